# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "ale-py>=0.12", "filelock>=3.13", "gymnasium[classic-control]>=1.4", "numpy", "tensorboard",
#     "torch>=2.6", "tqdm", "tyro>=1",
# ]
# ///
"""Off-policy PPO: rollout workers beside an optimizer, the staleness of every sample known and bounded.

    python ppo_async.py --env-id BreakoutNoFrameskip-v4      # every field of Args is a flag; see --help
    python ppo_async.py --env-id CartPole-v1 --sync          # workers and optimizer in turn, to the bit
    python ppo_async.py --resume runs/NAME                   # go on with a run that was stopped
    python ppo_async.py --evaluate runs/NAME                 # play full episodes with its agent
    torchrun --nproc-per-node 2 ppo_async.py                 # environments and gradients shared out over 2

Paper    Berner et al. 2019, https://arxiv.org/abs/1912.06680, section 4.4 and appendix M: a sample made by
         version N of the policy and trained on by version M is M - N stale. Here a version is an iteration's
         update: sample_reuse passes of num_minibatches gradient steps. An iteration whose segments were all
         too stale makes no version.
Details  numbered as in https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details
Shapes   T = num_steps, N = environments of a group, B = segments of an iteration / processes. A segment has
         T + 1 observations, as in impala_vtrace.py: actions[t] = last_actions[t + 1], ends and rewards alike.
"""

import atexit
import ctypes
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal, NoReturn

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # for PyTorch: idle threads leave emulators the cores

import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from ale_py.vector_env import AtariVectorEnv
from filelock import FileLock, Timeout
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = Path(__file__).stem
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun

# === Arguments ===============================================================================


@dataclass
class Args:
    env_id: str = "BreakoutNoFrameskip-v4"  # Gymnasium id of the task
    total_timesteps: int = 10_000_000  # environment steps, summed over the parallel environments
    seed: int = 1  # seeds PyTorch and the environments; nothing else is random

    # rollout workers
    num_envs: int = 16  # parallel environments, shared out over torchrun's processes
    num_actors: int = 1  # threads of a process for each task, with two groups of environments each
    num_steps: Annotated[int, tyro.conf.arg(aliases=["--segment-length"])] = 128  # steps of a segment (T)
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # GAE: 0 is the one-step advantage, 1 is Monte Carlo
    gae_on_learner: bool = False  # advantages by the optimizer's values instead of the workers'
    bootstrap_truncated: bool = False  # value what lies beyond a time limit instead of taking it for the end
    sync: bool = False  # actors and learner in turn, in one thread
    stall_seconds: int = 20  # an environment that takes longer for a step ends the run

    # staleness
    sample_reuse: float = 1.0  # passes over each sample; below 1, a random share is left out
    max_staleness: int | None = None  # drop segments that are more versions behind
    artificial_delay: int = 0  # hold segments back for so many iterations
    decoupled: bool = False  # center the policy's clip on the optimizer's policy before the update

    # update
    batch_unrolls: int = 16  # unrolls in a batch, shared out over torchrun's processes
    learning_rate: float = 2.5e-4  # Adam's, before annealing
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    num_minibatches: int = 4  # minibatches per pass
    norm_adv: bool = True  # normalize advantages within each minibatch
    clip_coef: float = 0.1  # clip range of the policy ratio, and of the value if clip_vloss
    anneal_clip: bool = False  # decay the clip range linearly to 0
    clip_vloss: bool = True  # clip the value loss too
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # clip of the global gradient norm
    target_kl: float | None = None  # skip the update's remaining epochs above this KL divergence

    # run
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"  # where the networks run
    amp: bool = False  # run the convolutions in bfloat16
    compile: bool = False  # torch.compile what the device runs
    track: bool = False  # log to Weights & Biases too (offline with WANDB_MODE=offline)
    wandb_project_name: str = "ppo"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases user or team
    save_every: int = 100  # iterations between checkpoints
    resume: str | None = None  # run folder to continue, with its own arguments where no flag is given
    evaluate: str | None = None  # run folder whose agent to evaluate instead of training
    eval_episodes: int = 10  # full episodes of --evaluate
    capture_video: bool = False  # record the episodes of --evaluate in the run folder

    @property
    def env_ids(self) -> list[str]:
        return self.env_id.split(",")

    @property
    def group_size(self) -> int:
        return self.num_envs // (WORLD_SIZE * len(self.env_ids) * self.num_actors * 2)

    @property
    def new_unrolls(self) -> int:
        return self.batch_unrolls

    @property
    def batch_size(self) -> int:
        return self.new_unrolls * self.num_steps

    @property
    def num_iterations(self) -> int:
        return self.total_timesteps // self.batch_size


def fail(message: object) -> NoReturn:
    """A mistake of the user, not a bug: one line on stderr and exit code 2."""
    print(f"{SCRIPT}.py: error: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(2)


def parse_args() -> Args:  # differs from ppo.py: groups of environments, and their segments
    args = tyro.cli(Args)
    if run_dir := args.resume or args.evaluate:
        saved = load_checkpoint(run_dir)["args"]
        args = tyro.cli(Args, default=saved)
        for name in ("env_id", "seed", "num_envs", "num_steps") if args.resume else ():
            if getattr(args, name) != getattr(saved, name):
                fail(f"--resume cannot change {name} from {getattr(saved, name)} to {getattr(args, name)}")
    may_be_zero = ("seed", "max_staleness", "artificial_delay")
    for name, x in asdict(args).items():
        if type(x) is int and x < (name not in may_be_zero) or type(x) is float and not 0 <= x < np.inf:
            fail(f"{name} cannot be {x}")
    groups = WORLD_SIZE * args.num_actors * 2
    per_batch = WORLD_SIZE * max(1, args.group_size)
    share = args.sample_reuse % 1 or 1  # of the samples, in the last pass
    rest = args.batch_size // WORLD_SIZE % args.num_minibatches
    for mistake, message in (
        (args.resume and args.evaluate, "give --resume or --evaluate, not both"),
        (args.capture_video and not args.evaluate, "--capture-video records the episodes of --evaluate"),
        (args.seed >= 2**31, "seed must be below 2**31"),
        (max(args.gamma, args.gae_lambda) > 1, "gamma and gae_lambda must be at most 1"),
        (args.num_steps * share < 2 * args.num_minibatches, "a minibatch must hold more than one step"),
        (args.num_envs % groups, f"num_envs must be a multiple of {groups}: two groups a worker"),
        (
            args.batch_unrolls % per_batch,
            f"batch_unrolls must be a multiple of {per_batch}, a group's environments",
        ),
        (rest, "num_minibatches must divide batch_unrolls * num_steps"),
        (args.num_iterations < 1, "total_timesteps must be at least batch_unrolls * num_steps"),
        (args.sample_reuse == 0, "sample_reuse cannot be 0"),
        (args.device == "cuda" and not torch.cuda.is_available(), "--device cuda: PyTorch finds no GPU"),
    ):
        if mistake:
            fail(message)
    return args


# === Environment =============================================================================


def make_env(env_id: str, args: Args, num_envs: int, video_dir: Path | None = None) -> gym.vector.VectorEnv:
    # differs from ppo.py: Atari games in C++, everything else as vectors or images, channels first
    """Vectorized environments, each reset within the step that ends its episode."""
    gym.register_envs(ale_py)
    same_step = dict(autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    spec = gym.registry.get(env_id)
    if spec and spec.entry_point == "ale_py.env:AtariEnv":
        if spec.kwargs["frameskip"] not in (1, 4):
            fail(f"{env_id} skips a random number of frames: take a NoFrameskip-v4 or an ALE/...-v5 id")
        kept = ("game", "repeat_action_probability", "full_action_space", "max_num_frames_per_episode")
        kwargs = {name: spec.kwargs[name] for name in kept} | same_step
        kwargs |= dict(reward_clipping=False, noop_max=31)  # 31 draws from 0 to 30
        kwargs["full_action_space"] |= len(args.env_ids) > 1  # several tasks: 18 actions, appendix G.1
        envs = AtariVectorEnv(num_envs=num_envs, **kwargs)
        if video_dir:  # a twin in colour, played with the same seeds and actions
            camera = dict(img_height=210, img_width=160, grayscale=False, stack_num=1)
            envs.camera = AtariVectorEnv(num_envs=num_envs, **kwargs, **camera)
        return envs
    options = dict(wrappers=[as_array], vector_kwargs=same_step)
    if video_dir:
        record = dict(video_folder=str(video_dir), episode_trigger=lambda n: n < args.eval_episodes)
        options["wrappers"] = [lambda env: gym.wrappers.RecordVideo(env, **record), as_array]
        options["render_mode"] = "rgb_array"
    try:
        envs = gym.make_vec(env_id, num_envs, "sync", **options)
    except (gym.error.Error, ImportError) as error:
        fail(f"--env-id {env_id}: {error}")
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    if not isinstance(action_space, gym.spaces.Discrete) or action_space.start != 0:
        fail(f"{env_id} acts in {action_space}: try ppo_continuous.py or ppo_multidiscrete.py")
    if not isinstance(obs_space, gym.spaces.Box):
        fail(f"{env_id} observes {obs_space}: this script takes vectors and images")
    return envs


def as_array(env: gym.Env) -> gym.Env:
    """Observations as images (channels, height, width) or vectors; of a dictionary, its image (MiniGrid)."""
    space = env.observation_space
    if isinstance(space, gym.spaces.Dict) and "image" in space.spaces:
        env = gym.wrappers.TransformObservation(env, lambda obs: obs["image"], space["image"])
        space = env.observation_space
    if isinstance(space, gym.spaces.Box) and len(space.shape) == 3 and min(space.shape[:2]) >= 36:
        low, high = (x.transpose(2, 0, 1) for x in (space.low, space.high))
        channels_first = gym.spaces.Box(low, high, dtype=space.dtype.type)
        return gym.wrappers.TransformObservation(env, lambda obs: obs.transpose(2, 0, 1), channels_first)
    return gym.wrappers.FlattenObservation(env) if isinstance(space, gym.spaces.Box) else env


class Group:
    """Environments of a task that work while their caller does something else: send(), then receive().

    row: what is to be seen of them now, arrays (N, ...): obs, last_actions, last_rewards (raw), starts (true
    where an episode begins). A life lost in an Atari game ends an episode, but not the game.
    """

    def __init__(self, env_id: str, args: Args, num_envs: int, seed: int, video_dir: Path | None = None):
        self.env_id, self.envs = env_id, make_env(env_id, args, num_envs, video_dir)
        self.is_atari = isinstance(self.envs, AtariVectorEnv)
        self.video_dir, self.video = video_dir if self.is_atari else None, []
        obs, info = self.envs.reset(seed=seed)
        if self.video_dir:
            self.envs.camera.reset(seed=seed)
        self.lives = info["lives"] if self.is_atari else np.zeros(num_envs)
        self.began = np.zeros(num_envs, int)  # the emulator's frame at which the game began
        self.returns, self.lengths = np.zeros((2, num_envs))
        zeros = np.zeros(num_envs, np.float32)
        self.row = dict(obs=obs, last_actions=zeros.astype(np.int64), last_rewards=zeros)
        self.row["starts"] = np.ones(num_envs, bool)

    def send(self, actions: np.ndarray):
        self.actions = actions
        if self.is_atari:
            self.envs.send(actions)
        if self.video_dir:
            self.video.append(self.envs.camera.step(actions)[0][0, 0])

    def receive(self) -> tuple[np.ndarray | None, list[tuple[float, int]]]:
        """Final observations (N, ...), None if none; returns and lengths of whole episodes that ended."""
        step = self.envs.recv() if self.is_atari else self.envs.step(self.actions)
        obs, rewards, terminated, truncated, info = step
        over = starts = terminated | truncated
        self.cut = truncated & ~terminated
        self.returns += rewards
        self.lengths += 1
        if self.is_atari:  # CleanRL's length: frames with no-ops. A game lasts until the next one begins.
            began = info["frame_number"] - info["episode_frame_number"]
            self.lengths, self.began = began - self.began, began
        episodes = [(self.returns[i].item(), int(self.lengths[i])) for i in over.nonzero()[0]]
        self.returns[over] = self.lengths[over] = 0
        if self.video_dir and over[0]:
            self.save_video()
        if self.is_atari:
            starts = over | (0 < info["lives"]) & (info["lives"] < self.lives)
            self.lives = info["lives"]
        self.row = dict(obs=obs, last_actions=self.actions, last_rewards=rewards.astype(np.float32))
        self.row["starts"] = starts
        return info.get("final_obs"), episodes

    def save_video(self):
        from moviepy import ImageSequenceClip

        self.video_dir.mkdir(exist_ok=True)
        path = self.video_dir / f"{self.env_id.replace('/', '-')}-{len(list(self.video_dir.iterdir()))}.mp4"
        ImageSequenceClip(self.video, fps=15).write_videofile(path, logger=None)  # every 4th of 60 a second
        self.video = []


# === Agent ===================================================================================


class Categorical:
    """Distribution over the last axis of logits, without the checks that make torch.distributions slow."""

    def __init__(self, logits: Tensor):
        self.logprobs = logits.log_softmax(-1)

    def sample(self) -> Tensor:  # (...), by the Gumbel-max trick: -log of an exponential is a Gumbel variable
        return (self.logprobs - torch.empty_like(self.logprobs).exponential_().log_()).argmax(-1)

    def log_prob(self, action: Tensor) -> Tensor:
        return self.logprobs.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        return -(self.logprobs.exp() * self.logprobs).sum(-1)


def layer_init(layer: nn.Module, std: float = 2**0.5) -> nn.Module:
    nn.init.orthogonal_(layer.weight, std)  # detail 2: orthogonal weights, zero biases
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):  # differs from ppo.py: convolutions for images, as in ppo_atari.py
    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__()
        obs_shape, num_actions = envs.single_observation_space.shape, int(envs.single_action_space.n)
        self.amp, self.is_image = args.amp, len(obs_shape) == 3
        if self.is_image:
            layers = (  # detail 21: the Nature CNN, shared
                layer_init(nn.Conv2d(obs_shape[0], 32, 8, stride=4)), nn.ReLU(inplace=True),
                layer_init(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU(inplace=True),
                layer_init(nn.Conv2d(64, 64, 3, stride=1)), nn.ReLU(inplace=True), nn.Flatten(),
            )  # fmt: skip
            num_features = nn.Sequential(*layers)(torch.zeros(1, *obs_shape)).numel()
            layers += (layer_init(nn.Linear(num_features, 512)), nn.ReLU(inplace=True))
            self.network = nn.Sequential(*layers).to(memory_format=torch.channels_last)
            self.actor = layer_init(nn.Linear(512, num_actions), std=0.01)
            self.critic = layer_init(nn.Linear(512, 1), std=1.0)
        else:
            self.network = nn.Identity()
            self.actor = nn.Sequential(  # detail 13: separate networks
                layer_init(nn.Linear(obs_shape[0], 64)), nn.Tanh(),
                layer_init(nn.Linear(64, 64)), nn.Tanh(),
                layer_init(nn.Linear(64, num_actions), std=0.01),
            )  # fmt: skip
            self.critic = nn.Sequential(
                layer_init(nn.Linear(obs_shape[0], 64)), nn.Tanh(),
                layer_init(nn.Linear(64, 64)), nn.Tanh(),
                layer_init(nn.Linear(64, 1), std=1.0),
            )  # fmt: skip

    def forward(self, obs: Tensor) -> tuple[Categorical, Tensor]:
        """Policy and value (N,) of observations (N, ...)."""
        x = obs.float()
        if self.is_image:  # detail 22: scaling to [0, 1]
            x = obs.to(torch.float32, memory_format=torch.channels_last, copy=True).div_(255)
        with torch.autocast(obs.device.type, torch.bfloat16, self.amp):
            hidden = self.network(x)
        return Categorical(self.actor(hidden.float())), self.critic(hidden.float()).squeeze(-1)


# === Algorithm ===============================================================================


def compute_gae(rewards, values, dones, next_value, gamma: float, lam: float) -> Tensor:
    """Advantages (T, N) as in eq. 16 of Schulman et al. 2016, https://arxiv.org/abs/1506.02438.

    rewards, values, dones: (T, N); dones[t] is 1 if step t ended an episode. next_value: (N,), of next_obs.
    """
    deltas = rewards + gamma * (1 - dones) * torch.cat((values[1:], next_value[None])) - values
    advantages, decay = deltas.unbind(), (gamma * lam * (1 - dones)).unbind()  # views of one step each
    for t in reversed(range(len(deltas) - 1)):  # detail 5: generalized advantage estimation
        advantages[t].addcmul_(decay[t], advantages[t + 1])
    return deltas


def ppo_loss(agent: Agent, batch: dict[str, Tensor], clip: float, args: Args) -> tuple[Tensor, dict]:
    # differs from ppo.py: the clip may be centered elsewhere; diagnostics of every sample
    """Loss of a minibatch of tensors (M, ...), and the diagnostics to log.

    args.decoupled is the objective of Hilton et al. 2021, https://arxiv.org/abs/2110.00641: the clip keeps
    the policy near a recent one, and an importance weight leads from the policy that acted to the recent one.
    """
    dist, value = agent(batch["obs"])
    recent_logprobs = batch["recent_logprobs"] if args.decoupled else batch["logprobs"]
    weight_logratio = recent_logprobs - batch["logprobs"]
    logratio = dist.log_prob(batch["actions"]) - recent_logprobs
    ratio, advantages = logratio.exp(), batch["advantages"]
    if args.norm_adv:  # detail 7: advantage normalization, per minibatch (with the blog's unbiased std)
        std, mean = torch.std_mean(advantages)
        advantages = (advantages - mean) / (std + 1e-8)
    clipped_ratio = ratio.clamp(1 - clip, 1 + clip)  # detail 8: clipped surrogate objective
    surrogate = torch.min(advantages * ratio, advantages * clipped_ratio)
    pg_loss = -(weight_logratio.exp() * surrogate).mean()

    error = value - batch["returns"]
    if args.clip_vloss:  # detail 9: value loss clipping: the larger of both errors counts
        clipped_error = value.clamp(batch["values"] - clip, batch["values"] + clip) - batch["returns"]
        error = torch.where(clipped_error.abs() > error.abs(), clipped_error, error)
    v_loss = 0.5 * (error * error).mean()  # a product, as autograd takes longer for a power
    entropy = dist.entropy().mean()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss  # detail 10: overall loss
    with torch.no_grad():  # detail 12: debug variables; KL as in http://joschu.net/blog/kl-approx.html
        info = dict(policy_loss=pg_loss.detach(), value_loss=v_loss.detach(), entropy=entropy.detach())
        info |= dict(old_approx_kl=-logratio.mean(), approx_kl=(ratio - 1 - logratio).mean())
        clipped = (ratio - 1).abs() > clip
        info |= dict(clipfrac=clipped.float().mean(), clipped=clipped)
        if args.decoupled:  # the other diagnostics are of the policy and the recent one
            kl = (weight_logratio.exp() - 1 - weight_logratio).mean()
            info |= dict(behavior_kl=kl)  # from the policies that acted to the recent one
    return loss, info


# === Actors ==================================================================================


class Unrolls:  # differs from impala_vtrace.py: values too, no memory
    """What an actor sends: segments of N environments, each field (T + 1, N, ...), by one policy."""

    def __init__(self, args: Args, agent: Agent, row: dict[str, np.ndarray]):
        self.data = {name: np.zeros((args.num_steps + 1, *x.shape), x.dtype) for name, x in row.items()}
        for name in ("logprobs", "values"):
            self.data[name] = np.zeros((args.num_steps + 1, args.group_size), np.float32)
        self.data["cuts"] = np.empty((1, args.group_size), object)

    def begin(self, env_id: str, version: int):
        self.env_id, self.version, self.episodes = env_id, version, []  # (step of the unroll, return, length)
        self.data["cuts"].fill(())  # of each environment: ((row, final observation), ...) of time limits


class StallLimit:
    """Ends the process, and says where it hangs, if a block within it takes longer than so many seconds."""

    def __init__(self, env_id: str, seconds: int):
        self.since = float("inf")
        threading.Thread(target=self.watch, args=(env_id, seconds), daemon=True).start()

    def watch(self, env_id: str, seconds: int):
        while time.monotonic() < self.since + seconds:
            time.sleep(1)
        print(f"{SCRIPT}.py: error: {env_id}: a step takes longer than {seconds} s:", file=sys.stderr)
        traceback.print_stack(sys._current_frames()[self.thread])
        os._exit(1)

    def __enter__(self):
        self.thread, self.since = threading.get_ident(), time.monotonic()

    def __exit__(self, *_):
        self.since = float("inf")


class Actor:  # differs from impala_vtrace.py: values too, no memory
    """Two groups of environments in turn: while the emulators of one work, the other's actions are chosen."""

    def __init__(self, env_id: str, args: Args, seed: int):
        size = args.group_size
        self.stall_limit = StallLimit(env_id, args.stall_seconds)
        with self.stall_limit:
            self.groups = [Group(env_id, args, size, seed + k * size) for k in range(2)]
        self.args, self.env_id, self.waited, self.steps = args, env_id, 0.0, 0

    def unroll(self, agent: Agent, version: int, both: list[Unrolls]):
        """T steps of each group by an agent of the learner's, into an Unrolls each."""
        for unrolls in both:
            unrolls.begin(self.env_id, version)
        for t in range(self.args.num_steps + 1):
            for unrolls, group in zip(both, self.groups, strict=True):
                if t:
                    self.receive(group, t, unrolls)
                for name, x in group.row.items():
                    unrolls.data[name][t] = x
                dist, value = agent(torch.as_tensor(group.row["obs"], device=self.args.device))
                unrolls.data["values"][t] = value.cpu().numpy()
                if t < self.args.num_steps:  # the last value is what lies beyond the segment
                    action = dist.sample()
                    unrolls.data["logprobs"][t] = dist.log_prob(action).cpu().numpy()
                    group.send(action.cpu().numpy())
        self.steps += 2 * self.args.num_steps * self.args.group_size

    def receive(self, group: Group, t: int, unrolls: Unrolls):
        """The next row of a group, and what it says of ended episodes."""
        with self.stall_limit:
            final_obs, episodes = group.receive()
        unrolls.episodes += [(t, *episode) for episode in episodes]
        for n in group.cut.nonzero()[0] if self.args.bootstrap_truncated else ():
            unrolls.data["cuts"][0, n] += ((t, np.array(final_obs[n], group.row["obs"].dtype)),)


class Actors:
    """The actors of a process, each in a thread of its own, or, with --sync, all in the learner's."""

    def __init__(self, args: Args, first_step: int):
        self.args, self.threads = args, []
        # a resumed run begins new episodes
        seed = args.seed + first_step + RANK * args.num_envs // WORLD_SIZE
        tasks = args.env_ids * args.num_actors  # a fixed share of actors for each task, section 5.3
        self.members = [Actor(env_id, args, seed + 2 * k * args.group_size) for k, env_id in enumerate(tasks)]
        first, *others = (group for actor in self.members for group in actor.groups)
        self.envs, self.row = first.envs, first.row
        for group in others:
            for space in ("single_observation_space", "single_action_space"):
                ours, other = getattr(first.envs, space), getattr(group.envs, space)
                if ours != other:
                    fail(f"one network cannot play {first.env_id}, {ours}, and {group.env_id}, {other}")

    def start(self, agent: Agent, version: int):
        """Begin to act with an agent."""
        self.publish(agent, version)
        self.turn, self.waited, self.batches, self.fill, self.then = 0, 0.0, 0, 0, None
        self.filled, self.free = queue.SimpleQueue(), queue.SimpleQueue()
        self.batch_blocks = self.args.new_unrolls // (WORLD_SIZE * self.args.group_size)
        # so few that no actor can fill a second pair while the learner is at the batch before the first:
        # one that is ahead waits, with data that are one version old
        at_once = 2 * len(self.members)  # the actors fill so many blocks at a time
        self.num_blocks = max(at_once, self.batch_blocks + len(self.members))
        # a round of all actors lasts for so many batches; in turn, an odd block is left for the next batch
        lag = self.batch_blocks % 2 if self.args.sync else at_once / self.batch_blocks
        least = 0 if self.args.sync else 1
        if lag > least and RANK == 0:
            expected = f"expect unrolls up to {lag:.2g} versions behind the learner instead of {least}"
            remedy = f"let a batch's new unrolls be a multiple of the {self.args.num_envs} environments"
            print(f"{SCRIPT}.py: warning: {expected}: {remedy}", file=sys.stderr)
        for _ in range(self.num_blocks):
            self.free.put(Unrolls(self.args, agent, self.row))
        for actor in self.members if not self.args.sync else ():
            name = f"actor of {actor.env_id}"
            self.threads.append(threading.Thread(target=self.run, args=(actor,), name=name, daemon=True))
            self.threads[-1].start()
        self.rates()

    def publish(self, agent: Agent, version: int):
        """Offer a copy of the learner's agent to the actors, who take it as an unroll begins (section 3)."""
        self.published = deepcopy(agent), version

    def run(self, actor: Actor):
        """An actor's thread."""
        torch.set_num_threads(1)
        if self.args.device == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream())  # beside the learner's work, not behind it
        try:
            while self.act(actor):
                pass
        except BaseException as error:  # whatever ends an actor ends the run, with the actor's own traceback
            self.filled.put(error)

    @torch.no_grad()  # of which each thread has its own
    def act(self, actor: Actor) -> bool:
        """Let an actor fill two unrolls; false if there is no more to do."""
        start = time.monotonic()
        both = [self.free.get(), self.free.get()]
        actor.waited += time.monotonic() - start
        if None in both:
            return False
        actor.unroll(*self.published, both)
        for unrolls in both:
            self.filled.put(unrolls)
        return True

    def receive(self) -> list[Unrolls]:
        """The new unrolls of a batch. Raises what an actor raised."""
        batch = []
        self.fill += self.filled.qsize()
        while len(batch) < self.batch_blocks:
            if self.args.sync and self.filled.empty():
                self.act(self.members[self.turn % len(self.members)])
                self.turn += 1
            start = time.monotonic()
            batch.append(self.filled.get())
            self.waited += time.monotonic() - start
            if isinstance(batch[-1], BaseException):
                raise batch[-1]
        self.batches += 1
        return batch

    def give_back(self, batch: list[Unrolls]):
        for unrolls in batch:
            self.free.put(unrolls)

    def rates(self, trained: int = 0) -> dict[str, float]:
        """Since the last call: shares of time spent waiting, steps per second, sample reuse.

        trained: steps that the learner trained on, each time that it did.
        """
        then, steps = self.then, sum(actor.steps for actor in self.members) * WORLD_SIZE
        waited = sum(actor.waited for actor in self.members) / len(self.members)
        self.then = np.array([time.monotonic(), self.waited, waited, steps, self.batches, self.fill])
        if then is None:
            return {}
        seconds, learner, actors, collected, batches, fill = self.then - then
        return dict(
            learner_wait=learner / seconds,
            actor_wait=min(1.0, actors / seconds),  # a wait counts when it ends
            queue_fill=fill / (batches * self.num_blocks),
            collected_SPS=collected / seconds,
            trained_SPS=trained / seconds,
            sample_reuse=trained / (batches * self.args.batch_size),
        )

    def close(self):
        for _ in range(2 * len(self.threads)):
            self.free.put(None)
        for thread in self.threads:
            thread.join()


def beyond_time_limits(agent: Agent, data: dict[str, Tensor], cuts: np.ndarray, gamma: float) -> Tensor:
    # differs from impala_vtrace.py: no memory
    """What is added to the rewards (T + 1, B) of rows that a time limit ended: gamma times the agent's value.

    cuts: (1, B), of Unrolls.
    """
    bootstraps = torch.zeros_like(data["last_rewards"])
    found = [(t, n, obs) for n, some in enumerate(cuts[0]) for t, obs in some]
    if found:
        at, columns = [t for t, _, _ in found], [n for _, n, _ in found]
        final_obs = np.stack([obs for _, _, obs in found])
        _, values = agent(torch.as_tensor(final_obs, device=bootstraps.device))
        bootstraps[at, columns] = gamma * values
    return bootstraps


def side_by_side(unrolls: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Unrolls (T + 1, N, ...) as one batch (T + 1, sum of N, ...)."""
    return {name: np.concatenate([some[name] for some in unrolls], axis=1) for name in unrolls[0]}


def staleness_report(staleness: Tensor, clipped: Tensor) -> dict[str, float]:
    """Of samples (n,) that were trained on: their staleness, and the clipped share of each."""
    if not len(staleness):
        return {}
    report = {"staleness/mean": staleness.float().mean().item(), "staleness/max": staleness.max().item()}
    for versions in staleness.unique().tolist():
        report[f"staleness/clipfrac_{versions}"] = clipped[staleness == versions].float().mean().item()
    return report


def collect(actors: Actors) -> tuple[dict[str, np.ndarray], np.ndarray, list]:
    """Segments of an iteration (T + 1, B, ...), the version that made each (B,), and ended episodes."""
    received = actors.receive()
    data = side_by_side([unrolls.data for unrolls in received])
    versions = np.repeat([unrolls.version for unrolls in received], actors.args.group_size)
    episodes = [episode for unrolls in received for episode in unrolls.episodes]
    actors.give_back(received)
    return data, versions, episodes


# === Logging and checkpoints =================================================================


class Logger:
    """TensorBoard, Weights & Biases with --track, and a progress bar: plain lines if no terminal."""

    def __init__(self, args: Args, run_dir: Path, first_step: int):
        if args.resume:  # before anything is written to its folder; a new run has none yet
            self.lock = lock(run_dir)
        if args.track:
            try:
                import wandb
            except ImportError as error:
                fail(f"--track: {error}; pip install wandb")
            account = dict(project=args.wandb_project_name, entity=args.wandb_entity, sync_tensorboard=True)
            same_run = dict(id=run_dir.name, name=run_dir.name, resume="allow")  # when this one is resumed
            config = asdict(args) | dict(exp_name=SCRIPT)  # CleanRL's key: its reports group by it
            labels = dict(config=config, group=f"{args.env_id}__{SCRIPT}", tags=[SCRIPT, args.env_id[:64]])
            try:
                wandb.init(**account, **same_run, **labels, settings=dict(init_timeout=5))
            except wandb.Error as error:
                fail(f"--track: {error}")
        try:  # hiding what was logged but not saved
            self.writer = SummaryWriter(run_dir, purge_step=first_step + 1)
            self.lock = lock(run_dir)
        except OSError as error:
            fail(f"{run_dir}: {error}")
        self.writer.add_text("args", "\n".join(f"    {k}: {v}" for k, v in asdict(args).items()))
        style = {} if sys.stderr.isatty() else dict(mininterval=10, bar_format="{l_bar}{r_bar}\n")
        total = args.num_iterations * args.batch_size
        self.bar = tqdm(total=total, initial=first_step, unit="step", unit_scale=True, **style)
        atexit.register(self.close)  # a crash loses no logs

    def log(self, step: int, scalars: dict[str, float], episodes: list[tuple[int, float, int]], status: str):
        """Log scalars at step, and each episode, (end, return, length), at the step that ended it."""
        names = "charts/episodic_return", "charts/episodic_length"
        ended = [(end, dict(zip(names, episode, strict=True))) for end, *episode in episodes]
        for at, values in [*ended, (step, scalars)] if scalars else ended:
            finite = [Summary.Value(tag=k, simple_value=x) for k, x in values.items() if np.isfinite(x)]
            self.writer.file_writer.add_summary(Summary(value=finite), at)  # an event each, without NaN
        self.bar.set_postfix_str(status, refresh=False)
        self.bar.update(step - self.bar.n)

    def close(self):
        self.bar.close()
        self.writer.close()
        self.lock.release(force=True)


def lock(run_dir: Path) -> FileLock:
    """Refuses a run folder in which another process trains. The lock ends with the process that holds it."""
    held = FileLock(run_dir / "lock", is_singleton=True)
    try:
        held.acquire(timeout=0)
    except Timeout:
        fail(f"another process trains in {run_dir}")
    return held


def save_checkpoint(run_dir: Path, **state):
    """Atomically, so that a kill leaves the old one or the new one."""
    with open(run_dir / "checkpoint.tmp", "wb") as file:  # of which a full disk is named, unlike of a path
        torch.save(dict(script=SCRIPT, **state), file)
    (run_dir / "checkpoint.tmp").replace(run_dir / "checkpoint.pt")


def load_checkpoint(run_dir: str) -> dict:
    """What train() saved in run_dir, with its Args."""
    path = Path(run_dir) / "checkpoint.pt"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["script"] == SCRIPT:
            return state | dict(args=Args(**state["args"]))
    except (OSError, EOFError, RuntimeError, LookupError, TypeError, pickle.UnpicklingError) as error:
        fail(f"{path} is no readable checkpoint: {str(error)[:150]}")
    fail(f"{path} is a checkpoint of {state['script']}.py")


# === Training ================================================================================


def keep_freed_memory():
    """glibc returns what large networks free to the kernel, page by page: a fifth of an update on a CPU."""
    if sys.platform == "linux":
        for parameter, value in ((-1, 2**31 - 1), (-3, 2**30)):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            ctypes.CDLL(None).mallopt(parameter, value)


def over_processes(operation: str, x: float | Tensor) -> float:
    """SUM or MAX of a number over the processes of torchrun."""
    x = torch.as_tensor(x, dtype=torch.float32)
    if WORLD_SIZE > 1:
        torch.distributed.all_reduce(x, getattr(torch.distributed.ReduceOp, operation))
    return x.item()


def train(args: Args, stop: Sequence[int] = ()) -> Path:
    # differs from ppo.py: learn() has the loop; here the actors begin and end
    """Train and return the run folder; a signal number in stop ends it after the iteration, saved."""
    torch.manual_seed(args.seed)
    if WORLD_SIZE > 1:
        torch.distributed.init_process_group()
        atexit.register(torch.distributed.destroy_process_group)
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    torch.set_flush_denormal(True)  # the moments of dead units fade into numbers that slow the update down
    keep_freed_memory()
    checkpoint = load_checkpoint(args.resume) if args.resume else dict(iteration=0)
    actors = Actors(args, checkpoint["iteration"] * args.batch_size)
    try:
        return learn(args, actors, checkpoint, stop)
    finally:
        actors.close()


@torch.no_grad()  # but for the update
def learn(args: Args, actors: Actors, checkpoint: dict, stop: Sequence[int]) -> Path:
    """The optimizer: update on the workers' segments until the end or a signal; returns the run folder."""
    is_atari = actors.members[0].groups[0].is_atari
    if actors.row["obs"].ndim == 2:
        torch.set_num_threads(1)  # the networks are small: a second thread only costs
    agent = Agent(actors.envs, args).to(args.device)
    parameters = list(agent.parameters())
    lr = torch.tensor(args.learning_rate)  # a tensor, so that annealing does not recompile the update
    optimizer = torch.optim.Adam(parameters, lr=lr, eps=1e-5, fused=True)  # detail 3: Adam's epsilon
    run_name = f"{args.env_id}__{SCRIPT}__{args.seed}__{time.time_ns()}"
    run_dir, first_iteration, version = Path("runs", run_name.replace("/", "-").replace(":", "-")), 0, 0
    last_returns = deque(maxlen=100)
    if args.resume:
        run_dir, first_iteration = Path(args.resume), checkpoint["iteration"]
        try:
            version = checkpoint["version"]
            agent.load_state_dict(checkpoint["agent"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            last_returns.extend(checkpoint["last_returns"])
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            fail(f"{args.resume} does not fit the flags or this version of {SCRIPT}.py: {error}")
    saved, first_step, start = first_iteration, first_iteration * args.batch_size, time.time()
    if RANK == 0:
        logger = Logger(args, run_dir, first_step)
        print(run_dir)

    def update(batch: dict[str, Tensor], clip: float, weight: float) -> dict[str, Tensor]:
        # differs from ppo.py: a process weighs its gradient by its share of the samples
        with torch.enable_grad():
            loss, info = ppo_loss(agent, batch, clip, args)
        optimizer.zero_grad()
        loss.backward()
        for parameter in parameters if WORLD_SIZE > 1 else ():  # auxiliary detail 2: parallel gradients
            torch.distributed.all_reduce(parameter.grad.mul_(weight))
        nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)  # detail 11: gradient clipping
        optimizer.step()
        return info

    if args.compile:
        update = torch.compile(update)

    actors.start(agent, version)
    held = deque(collect(actors) for _ in range(args.artificial_delay))
    for iteration in range(first_iteration, args.num_iterations):
        # seeded anew in every iteration, so that there is no random state to save and resume
        torch.manual_seed(int(np.random.SeedSequence((args.seed, iteration, RANK)).generate_state(1)[0]))
        frac = 1 - version / args.num_iterations  # detail 4: learning rate annealing, by versions
        optimizer.param_groups[0]["lr"].fill_(args.learning_rate * (frac if args.anneal_lr else 1))
        clip = args.clip_coef * (frac if args.anneal_clip else 1)  # auxiliary detail 1: clip range annealing
        step, infos = (iteration + 1) * args.batch_size, []

        # 1. segments
        held.append(collect(actors))
        data, versions, ended = held.popleft()
        episodes = [(iteration * args.batch_size + t * args.batch_unrolls, *episode) for t, *episode in ended]
        episodes.sort()
        staleness = torch.as_tensor(version - versions, device=args.device)
        kept = staleness <= (np.inf if args.max_staleness is None else args.max_staleness)
        cuts = data.pop("cuts")[:, kept.cpu().numpy()]
        data = {name: torch.as_tensor(x, device=args.device)[:, kept] for name, x in data.items()}

        # 2. advantages and value targets
        if args.gae_on_learner:
            data["values"] = agent(data["obs"].flatten(0, 1))[1].view_as(data["values"])
        r, v, d = data["last_rewards"][1:], data["values"][:-1], data["starts"][1:].float()
        bootstraps = beyond_time_limits(agent, data, cuts, args.gamma)  # by the newest values
        r = (r.sign() if is_atari else r) + bootstraps[1:]  # detail 19: reward clipping
        batch = dict(obs=data["obs"][:-1], actions=data["last_actions"][1:], logprobs=data["logprobs"][:-1])
        batch |= dict(values=v, staleness=staleness[kept].expand(args.num_steps, -1))
        batch["advantages"] = compute_gae(r, v, d, data["values"][-1], args.gamma, args.gae_lambda)
        batch["returns"] = batch["advantages"] + v
        batch = {name: x.flatten(0, 1) for name, x in batch.items()}  # (T, B, ...) -> (T * B, ...)
        if args.decoupled:
            recent, _ = agent(batch["obs"])
            batch["recent_logprobs"] = recent.log_prob(batch["actions"])

        # 3. update
        num_samples, passes = len(batch["obs"]), [1.0] * int(args.sample_reuse) + [args.sample_reuse % 1]
        if over_processes("MAX", num_samples == 0):  # all are too stale in a process: no process learns
            passes, kept = [], torch.zeros_like(kept)
        for share in filter(None, passes):
            shuffled = torch.randperm(num_samples, device=args.device)  # detail 6: shuffled minibatches
            for indices in shuffled[: round(share * num_samples)].tensor_split(args.num_minibatches):
                minibatch = {name: x.index_select(0, indices) for name, x in batch.items()}
                # processes whose kept segments differ in number weigh their gradients by samples
                weight = len(indices) / over_processes("SUM", len(indices))
                infos.append(update(minibatch, clip, weight) | dict(staleness=minibatch["staleness"]))
            if args.target_kl is not None:  # auxiliary detail 3: early stopping
                if over_processes("SUM", infos[-1]["approx_kl"]) / WORLD_SIZE > args.target_kl:
                    break
        if infos:
            version += 1
            actors.publish(agent, version)

        # 4. log and save
        per_sample = [
            torch.cat([info.pop(name) for info in infos] or [kept[:0]]) for name in ("staleness", "clipped")
        ]
        scalars = {f"losses/{k}": x.item() for k, x in infos[-1].items()} if infos else {}
        if infos:
            scalars["losses/clipfrac"] = torch.stack([info["clipfrac"] for info in infos]).mean().item()
        if not np.isfinite(list(scalars.values())).all():
            good = f"{run_dir}/checkpoint.pt, of iteration {saved}" if saved else "none"
            sys.exit(f"iteration {iteration + 1}: {scalars} are not finite; last good checkpoint: {good}")
        if infos:
            scalars["losses/explained_variance"] = (
                1 - (batch["advantages"].var() / batch["returns"].var()).item()
            )
        scalars["charts/learning_rate"] = optimizer.param_groups[0]["lr"].item()
        scalars["charts/SPS"] = (step - first_step) / (time.time() - start)
        scalars |= staleness_report(*per_sample)
        trained = over_processes("SUM", len(per_sample[0]))
        scalars["staleness/dropped"] = over_processes("SUM", (~kept).float().mean()) / WORLD_SIZE
        scalars |= {f"charts/{k}": x for k, x in actors.rates(trained).items()}
        scalars["charts/dropped_SPS"] = scalars["staleness/dropped"] * scalars["charts/collected_SPS"]
        last_returns.extend(episodic_return for _, episodic_return, _ in episodes)
        if RANK == 0:
            if infos:
                logger.writer.add_histogram("staleness/versions", per_sample[0], step)
            waits = (f"{who} waits {scalars[f'charts/{who}_wait']:.0%}" for who in ("learner", "actor"))
            status = [f"return {np.mean(last_returns or 0):.1f}", f"staleness {staleness.float().mean():.1f}"]
            logger.log(step, scalars, episodes, ", ".join([*status, *waits]))
        signum = int(over_processes("MAX", stop[0] if stop else 0))
        due = (iteration + 1) % args.save_every == 0 or iteration + 1 == args.num_iterations
        if RANK == 0 and (due or signum):
            saved = iteration + 1
            logger.writer.flush()
            checkpoint = dict(agent=agent.state_dict(), optimizer=optimizer.state_dict(), iteration=saved)
            checkpoint |= dict(version=version, last_returns=list(last_returns))
            checkpoint |= dict(args=asdict(args) | dict(resume=None))
            save_checkpoint(run_dir, **checkpoint)
        if signum:
            sys.exit(128 + signum)
    if RANK == 0:
        logger.close()
    return run_dir


# === Evaluation ==============================================================================


@torch.no_grad()
def evaluate(args: Args) -> list[float]:
    # differs from ppo.py: a group of one environment
    """Returns of full episodes of a run's agent, which samples its actions as in training."""
    torch.manual_seed(args.seed)
    video_dir = Path(args.evaluate) / "videos" if args.capture_video else None
    seed = args.seed + args.total_timesteps + args.num_envs  # no seed of training
    group = Group(args.env_id, args, 1, seed, video_dir)
    agent, returns = Agent(group.envs, args).to(args.device), []
    try:
        agent.load_state_dict(load_checkpoint(args.evaluate)["agent"])
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        fail(f"the agent of {args.evaluate} does not fit {args.env_id}: {error}")
    if group.row["obs"].ndim == 2:
        torch.set_num_threads(1)  # the networks are small: a second thread only costs
    while len(returns) < args.eval_episodes:
        dist, _ = agent(torch.as_tensor(group.row["obs"], device=args.device))
        group.send(dist.sample().cpu().numpy())
        returns += [episodic_return for episodic_return, _ in group.receive()[1]]
    group.envs.close()
    return returns


if __name__ == "__main__":
    args = parse_args()
    if args.evaluate:
        returns = evaluate(args)
        print(f"return {np.mean(returns):.2f} +- {np.std(returns):.2f} over {len(returns)} episodes")
    else:
        stop = []

        def finish(signum: int, _):
            """The first signal ends the run after its iteration, a second one at once."""
            print("stopping after this iteration", file=sys.stderr)
            stop.append(signum)
            signal.signal(signum, signal.SIG_DFL)

        signal.signal(signal.SIGINT, finish)
        signal.signal(signal.SIGTERM, finish)
        train(args, stop)
