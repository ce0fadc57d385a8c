# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "ale-py>=0.12", "filelock>=3.13", "gymnasium[classic-control]>=1.4", "numpy", "tensorboard",
#     "torch>=2.6", "tqdm", "tyro>=1",
# ]
# ///
"""IMPALA: actors that run ahead of a learner, and V-trace for the lag between them. Atari, images, vectors.

    python impala_vtrace.py --env-id PongNoFrameskip-v4       # every field of Args is a flag; see --help
    python impala_vtrace.py --env-id PongNoFrameskip-v4 BreakoutNoFrameskip-v4      # one network, two tasks
    python impala_vtrace.py --env-id CartPole-v1 --sync       # actors and learner in turn, to the bit
    python impala_vtrace.py --resume runs/NAME                # go on with a run that was stopped
    python impala_vtrace.py --evaluate runs/NAME              # play full episodes with its agent
    torchrun --nproc-per-node 2 impala_vtrace.py              # two learners, each with actors of its own

Paper    Espeholt et al. 2018, https://arxiv.org/abs/1802.01561; its equations and sections are at the lines
Shapes   T = num_steps, N = environments of a group, B = unrolls of a batch / processes. An unroll has T + 1
         observations; the last is the first of the next one. Step t has actions[t] = last_actions[t + 1], and
         rewards and ends alike: an observation comes with what led to it, as the LSTM wants to see it.
"""

import atexit
import ctypes
import os
import pickle
import queue
import re
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import pairwise
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

# several words of the command line, "A B", as one string, "A,B"
Words = tyro.constructors.PrimitiveConstructorSpec(
    nargs="*",
    metavar="ID [ID ...]",
    instance_from_str=",".join,
    is_instance=lambda x: isinstance(x, str),
    str_from_instance=lambda x: x.split(","),
)


@dataclass
class Args:
    env_id: Annotated[str, Words] = "BreakoutNoFrameskip-v4"  # Gymnasium ids of the tasks, of one or several
    total_timesteps: int = 10_000_000  # environment steps, summed over the parallel environments
    seed: int = 1  # seeds PyTorch and the environments; nothing else is random

    # actors
    num_envs: int = 32  # parallel environments, shared out over torchrun's processes
    num_actors: int = 1  # threads of a process for each task, with two groups of environments each
    num_steps: int = 20  # steps per environment and rollout (T)
    sync: bool = False  # actors and learner in turn, in one thread
    stall_seconds: int = 20  # an environment that takes longer for a step ends the run

    # V-trace
    gamma: float = 0.99  # discount factor
    correction: Literal["vtrace", "one-step-is", "epsilon", "none"] = "vtrace"  # of what is off-policy
    rho_bar: float = 1.0  # clip of the importance weights that say which policy is valued
    c_bar: float = 1.0  # clip of the importance weights that say how far back a surprise counts
    vtrace_lambda: float = 1.0  # 0 is the one-step target, 1 the longest
    rewards: Literal["clip", "soft-asymmetric", "raw"] = "clip"  # to [-1, 1], or as for DMLab-30
    bootstrap_truncated: bool = False  # value what lies beyond a time limit instead of taking it for the end

    # update
    batch_unrolls: int = 32  # unrolls in a batch, shared out over torchrun's processes
    replay_fraction: float = 0.0  # share of a batch that comes from the replay
    replay_unrolls: int = 10_000  # unrolls in the replay of a process, 6 GB of Atari's
    learning_rate: float = 6e-4  # RMSProp's, before annealing
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    rmsprop_decay: float = 0.99  # of the mean of squared gradients
    rmsprop_eps: float = 0.01  # added to it, inside the root
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 40.0  # clip of the global gradient norm
    sync_every: int = 1  # updates between exchanges of torchrun's processes; above 1, parameters are averaged

    # network
    network: Literal["shallow", "deep"] = "shallow"  # for images: 2 convolutions, or 15 with residuals
    lstm: bool = False  # between the network and its heads, fed with the last action and reward

    # run
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"  # where the networks run
    amp: bool = False  # run the convolutions in bfloat16
    compile: bool = False  # torch.compile what the device runs
    track: bool = False  # log to Weights & Biases too (offline with WANDB_MODE=offline)
    wandb_project_name: str = "impala"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases user or team
    log_every: int = 10  # iterations between logs of losses and rates; episodes are logged as they end
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
        return max(1, round(self.batch_unrolls * (1 - self.replay_fraction)))

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


def parse_args() -> Args:  # differs from ppo.py: groups of environments, unrolls and their replay
    args = tyro.cli(Args)
    if run_dir := args.resume or args.evaluate:
        saved = load_checkpoint(run_dir)["args"]
        args = tyro.cli(Args, default=saved)
        for name in ("env_id", "seed", "num_envs", "num_steps") if args.resume else ():
            if getattr(args, name) != getattr(saved, name):
                fail(f"--resume cannot change {name} from {getattr(saved, name)} to {getattr(args, name)}")
    may_be_zero = ("seed", "replay_fraction")
    for name, x in asdict(args).items():
        if type(x) is int and x < (name not in may_be_zero) or type(x) is float and not 0 <= x < np.inf:
            fail(f"{name} cannot be {x}")
    groups = WORLD_SIZE * len(args.env_ids) * args.num_actors * 2
    per_batch = WORLD_SIZE * max(1, args.group_size)
    for mistake, message in (
        (args.resume and args.evaluate, "give --resume or --evaluate, not both"),
        (args.capture_video and not args.evaluate, "--capture-video records the episodes of --evaluate"),
        (args.seed >= 2**31, "seed must be below 2**31"),
        (max(args.gamma, args.vtrace_lambda) > 1, "gamma and vtrace_lambda must be at most 1"),
        (not all(args.env_ids), "--env-id needs at least one id"),
        (args.replay_fraction >= 1, "replay_fraction must be below 1: new unrolls keep the replay alive"),
        (args.num_envs % groups, f"num_envs must be a multiple of {groups}: two groups an actor and task"),
        (
            args.new_unrolls % per_batch or args.batch_unrolls % WORLD_SIZE,
            f"the {args.new_unrolls} new unrolls of a batch must be a multiple of {per_batch}, a group's "
            "environments: change batch_unrolls, num_envs or num_actors",
        ),
        (args.num_iterations < 1, "total_timesteps must be at least new unrolls of a batch * num_steps"),
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
    # differs from ppo.py: no detail of IMPALA's
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Residual(nn.Module):
    """Of the deep network: x and what two convolutions add to it."""

    def __init__(self, channels: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(inplace=True), nn.Conv2d(channels, channels, 3, padding=1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def convolutions(network: str, obs_shape: tuple[int, int, int]) -> nn.Sequential:
    """Figure 3 of the paper, up to the 256 features: the shallow or the deep network."""
    channels, layers = obs_shape[0], []
    if network == "shallow":
        layers += [layer_init(nn.Conv2d(channels, 16, 8, stride=4)), nn.ReLU(inplace=True)]
        layers += [layer_init(nn.Conv2d(16, 32, 4, stride=2)), nn.ReLU(inplace=True)]
    else:  # with PyTorch's initialization: orthogonal residuals would double the variance six times
        for wider in (16, 32, 32):
            layers += [nn.Conv2d(channels, wider, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)]
            layers += [Residual(wider), Residual(wider)]
            channels = wider
        layers += [nn.ReLU(inplace=True)]
    num_features = nn.Sequential(*layers)(torch.zeros(1, *obs_shape)).numel()
    layers += [nn.Flatten(), layer_init(nn.Linear(num_features, 256)), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class Agent(nn.Module):  # differs from ppo.py: shallow and deep convolutions, an LSTM on demand
    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__()
        obs_shape, self.amp = envs.single_observation_space.shape, args.amp
        self.num_actions = int(envs.single_action_space.n)
        if len(obs_shape) == 3:
            self.network, num_features = convolutions(args.network, obs_shape), 256
        else:
            num_features = 64
            self.network = nn.Sequential(
                layer_init(nn.Linear(obs_shape[0], 64)), nn.Tanh(),
                layer_init(nn.Linear(64, 64)), nn.Tanh(),
            )  # fmt: skip
        self.hidden_size = num_features if args.lstm else 0
        if args.lstm:
            self.lstm = nn.LSTM(num_features + self.num_actions + 1, self.hidden_size)
        self.actor = layer_init(nn.Linear(num_features, self.num_actions), std=0.01)
        self.critic = layer_init(nn.Linear(num_features, 1), std=1.0)

    def initial_state(self, num_envs: int) -> Tensor:
        """Hidden and cell state (2, N, hidden_size); hidden_size is 0 without an LSTM."""
        return self.actor.weight.new_zeros(2, num_envs, self.hidden_size)

    def forward(self, rows: dict[str, Tensor], state: Tensor) -> tuple[Categorical, Tensor, Tensor]:
        """Policy and value (T, N) of rows (T, N, ...) as Group has them, and the state after them.

        state: (2, N, hidden_size), before the first of them.
        """
        obs, starts = rows["obs"], rows["starts"]
        x = obs.flatten(0, 1)  # time folded into the batch, section 3.1
        if obs.ndim == 5:
            x = x.to(torch.float32, memory_format=torch.channels_last).div_(255)
        with torch.autocast(obs.device.type, torch.bfloat16, self.amp):
            x = self.network(x.float())
        x = x.float().unflatten(0, obs.shape[:2])
        if self.hidden_size:
            action = nn.functional.one_hot(rows["last_actions"], self.num_actions)
            x = torch.cat((x, action, rows["last_rewards"].clamp(-1, 1)[..., None]), -1)
            begins, outputs = {0, *starts.any(1).nonzero().flatten().tolist()}, []
            for begin, end in pairwise((*sorted(begins), len(x))):  # one call up to the next start
                state = state * ~starts[begin, :, None]  # reset before the step whose done flag is set
                output, state = self.lstm(x[begin:end], (state[:1], state[1:]))
                outputs.append(output)
                state = torch.cat(state)
            x = torch.cat(outputs)
        return Categorical(self.actor(x)), self.critic(x).squeeze(-1), state


# === Algorithm ===============================================================================


@torch.no_grad()
def vtrace(
    behavior_logprobs: Tensor,
    target_logprobs: Tensor,
    rewards: Tensor,
    discounts: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    rho_bar: float | None = 1.0,
    c_bar: float | None = 1.0,
    pg_rho_bar: float | None = 1.0,
    lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """V-trace targets vs (eq. 1, by remark 1) and advantages of the policy gradient (section 4.2), (T, N).

    All (T, N), but bootstrap_value (N,), the value after the last step. discounts[t] is 0 if step t ended an
    episode, else gamma. Importance weights are clipped at rho_bar, c_bar and pg_rho_bar; None does not clip.
    lam shortens the traces as in remark 2.
    """
    ratio = (target_logprobs - behavior_logprobs).exp()
    bars = (rho_bar, c_bar, pg_rho_bar)
    rhos, cs, pg_rhos = (ratio if bar is None else ratio.clamp(max=bar) for bar in bars)
    deltas = rhos * (rewards + discounts * torch.cat((values[1:], bootstrap_value[None])) - values)
    decay, corrections, correction = discounts * lam * cs, torch.empty_like(deltas), 0.0
    for t in reversed(range(len(deltas))):
        corrections[t] = correction = deltas[t] + decay[t] * correction
    vs = values + corrections
    pg_advantages = pg_rhos * (rewards + discounts * torch.cat((vs[1:], bootstrap_value[None])) - values)
    return vs, pg_advantages


def transform(rewards: Tensor, how: str) -> Tensor:
    """Rewards as the learner sees them; soft-asymmetric is that of DMLab-30, in the authors' code."""
    if how == "clip":
        return rewards.clamp(-1, 1)
    if how == "soft-asymmetric":
        squeezed = 5 * (rewards / 5).tanh()
        return torch.where(rewards < 0, 0.3 * squeezed, squeezed)
    return rewards


def impala_loss(agent: Agent, batch: dict[str, Tensor], args: Args) -> tuple[Tensor, dict]:
    """Loss of unrolls (T + 1, B, ...), summed over time and batch, and the diagnostics to log, per step."""
    dist, values, _ = agent(batch, batch["state"])
    rewards = transform(batch["last_rewards"][1:], args.rewards) + batch["bootstraps"][1:]
    discounts = args.gamma * ~batch["starts"][1:]
    values, bootstrap_value = values[:-1], values[-1].detach()
    dist.logprobs = dist.logprobs[:-1]
    logprobs = dist.log_prob(batch["last_actions"][1:])

    target_logprobs, behavior_logprobs = logprobs.detach(), batch["logprobs"]
    logratio = target_logprobs - behavior_logprobs
    ratio = logratio.exp()
    if args.correction != "vtrace":  # ablations of section 5.2.2: the n-step return, as if on-policy
        behavior_logprobs = target_logprobs
    targets = rewards, discounts, values.detach(), bootstrap_value
    bars = (args.rho_bar, args.c_bar, args.rho_bar, args.vtrace_lambda)
    vs, pg_advantages = vtrace(behavior_logprobs, target_logprobs, *targets, *bars)
    if args.correction == "one-step-is":  # corrects the policy gradient alone
        pg_advantages = ratio.clamp(max=args.rho_bar) * pg_advantages
    if args.correction == "epsilon":  # keeps the gradient of log pi from exploding
        logprobs = (logprobs.exp() + 1e-6).log()

    pg_loss = -(logprobs * pg_advantages).sum()
    v_loss = 0.5 * ((vs - values) ** 2).sum()
    entropy = dist.entropy().sum()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
    with torch.no_grad():
        info = dict(policy_loss=pg_loss.detach(), value_loss=v_loss.detach(), entropy=entropy.detach())
        info = {name: x / ratio.numel() for name, x in info.items()}
        info |= dict(rho=ratio.mean(), rho_clipped=(ratio > args.rho_bar).float().mean())
        info |= dict(approx_kl=(ratio - 1 - logratio).mean())  # from the policies that acted
    return loss, info


# === Actors ==================================================================================


class Unrolls:
    """What an actor sends: data of N environments' unrolls, each field (T + 1, N, ...), by one policy."""

    def __init__(self, args: Args, agent: Agent, row: dict[str, np.ndarray]):
        self.data = {name: np.zeros((args.num_steps + 1, *x.shape), x.dtype) for name, x in row.items()}
        self.data["logprobs"] = np.zeros((args.num_steps, args.group_size), np.float32)
        self.data["state"] = agent.initial_state(args.group_size).cpu().numpy()
        self.data["cuts"] = np.empty((1, args.group_size), object)

    def begin(self, env_id: str, version: int, state: Tensor):
        self.env_id, self.version, self.episodes = env_id, version, []  # (step of the unroll, return, length)
        self.data["state"][:] = state.cpu().numpy()
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


class Actor:
    """Two groups of environments in turn: while the emulators of one work, the other's actions are chosen."""

    def __init__(self, env_id: str, args: Args, seed: int):
        size = args.group_size
        self.stall_limit = StallLimit(env_id, args.stall_seconds)
        with self.stall_limit:
            self.groups = [Group(env_id, args, size, seed + k * size) for k in range(2)]
        self.args, self.env_id, self.states = args, env_id, [None, None]
        self.waited, self.steps = 0.0, 0

    def unroll(self, agent: Agent, version: int, both: list[Unrolls]):
        """T steps of each group by an agent of the learner's, into an Unrolls each."""
        for k, unrolls in enumerate(both):
            if self.states[k] is None:
                self.states[k] = agent.initial_state(self.args.group_size)
            unrolls.begin(self.env_id, version, self.states[k])
        for t in range(self.args.num_steps + 1):
            for k, (unrolls, group) in enumerate(zip(both, self.groups, strict=True)):
                if t:
                    self.receive(group, t, unrolls)
                for name, x in group.row.items():
                    unrolls.data[name][t] = x
                if t < self.args.num_steps:
                    dist, _, self.states[k] = agent(self.inputs(group.row), self.states[k])
                    action = dist.sample()
                    unrolls.data["logprobs"][t] = dist.log_prob(action)[0].cpu().numpy()
                    group.send(action[0].cpu().numpy())
        self.steps += 2 * self.args.num_steps * self.args.group_size

    def inputs(self, row: dict[str, np.ndarray]) -> dict[str, Tensor]:
        return {name: torch.as_tensor(x, device=self.args.device)[None] for name, x in row.items()}

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


# === Replay ==================================================================================


class Replay:
    """The newest unrolls, first in, first out, drawn uniformly (section 5.2.2 and D.3)."""

    def __init__(self, like: dict[str, np.ndarray], capacity: int):
        shapes = {name: (len(x), capacity, *x.shape[2:]) for name, x in like.items()}
        self.fields = {name: np.zeros(shape, like[name].dtype) for name, shape in shapes.items()}
        self.capacity, self.added = capacity, 0

    def add(self, unrolls: dict[str, np.ndarray]):
        """Unrolls (T + 1, B, ...), in place of the oldest."""
        at = np.arange(self.added, self.added + unrolls["obs"].shape[1]) % self.capacity
        for name, x in unrolls.items():
            self.fields[name][:, at] = x
        self.added += len(at)

    def sample(self, size: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        at = rng.integers(min(self.added, self.capacity), size=size)
        return {name: x[:, at] for name, x in self.fields.items()}


def beyond_time_limits(agent: Agent, batch: dict[str, Tensor], cuts: np.ndarray, gamma: float) -> Tensor:
    """What is added to the rewards (T + 1, B) of rows that a time limit ended: gamma times the agent's value.

    The final observation takes the place of the next episode's first in a copy of its unroll, so that an LSTM
    reads what came before. cuts: (1, B), of Unrolls.
    """
    bootstraps = torch.zeros_like(batch["last_rewards"])
    found = [(t, n, obs) for n, some in enumerate(cuts[0]) for t, obs in some]
    if found:
        at, columns = [t for t, _, _ in found], [n for _, n, _ in found]
        rows = {name: batch[name][:, columns] for name in ("obs", "starts", "last_actions", "last_rewards")}
        final_obs, k = np.stack([obs for _, _, obs in found]), list(range(len(found)))
        rows["obs"][at, k] = torch.as_tensor(final_obs, device=bootstraps.device)
        rows["starts"][at, k] = False
        _, values, _ = agent(rows, batch["state"][:, columns])
        bootstraps[at, columns] = gamma * values[at, k]
    return bootstraps


def side_by_side(unrolls: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Unrolls (T + 1, N, ...) as one batch (T + 1, sum of N, ...)."""
    return {name: np.concatenate([some[name] for some in unrolls], axis=1) for name in unrolls[0]}


# === Logging and checkpoints =================================================================

# random and human scores of Atari games, from table C.1 of the paper and from Mnih et al. 2015
SCORES = """
Alien 227.8 7127.7, Amidar 5.8 1719.5, Assault 222.4 742, Asterix 210 8503.3, Asteroids 719.1 47388.7,
Atlantis 12850 29028.1, BankHeist 14.2 753.1, BattleZone 2360 37187.5, BeamRider 363.9 16926.5,
Berzerk 123.7 2630.4, Bowling 23.1 160.7, Boxing 0.1 12.1, Breakout 1.7 30.5, Centipede 2090.9 12017,
ChopperCommand 811 7387.8, CrazyClimber 10780.5 35829.4, Defender 2874.5 18688.9, DemonAttack 152.1 1971,
DoubleDunk -18.6 -16.4, Enduro 0 860.5, FishingDerby -91.7 -38.7, Freeway 0 29.6, Frostbite 65.2 4334.7,
Gopher 257.6 2412.5, Gravitar 173 3351.4, Hero 1027 30826.4, IceHockey -11.2 0.9, Jamesbond 29 302.8,
Kangaroo 52 3035, Krull 1598 2665.5, KungFuMaster 258.5 22736.3, MontezumaRevenge 0 4753.3,
MsPacman 307.3 6951.6, NameThisGame 2292.3 8049, Phoenix 761.4 7242.6, Pitfall -229.4 6463.7,
Pong -20.7 14.6, PrivateEye 24.9 69571.3, Qbert 163.9 13455, Riverraid 1338.5 17118, RoadRunner 11.5 7845,
Robotank 2.2 11.9, Seaquest 68.4 42054.7, Solaris 1236.3 12326.7, SpaceInvaders 148 1668.7,
StarGunner 664 10250, Surround -10 6.5, Tennis -23.8 -8.3, TimePilot 3568 5229.2, Tutankham 11.4 167.6,
UpNDown 533.4 11693.2, Venture 0 1187.5, VideoPinball 16256.9 17667.9, WizardOfWor 563.5 4756.5,
YarsRevenge 3092.9 54576.9, Zaxxon 32.5 9173.3
"""


def human_normalized(returns: dict[str, float]) -> dict[str, float]:
    """Median and capped mean over games of (return - random) / (human - random), percent; of Atari alone."""
    scores = dict(re.findall(r"(\w+) (\S+ [^\s,]+)", SCORES))
    games = {re.sub(r"^ALE/|NoFrameskip|-v\d+$", "", env_id): x for env_id, x in returns.items()}
    if not games.keys() <= scores.keys():
        return {}
    bounds = {game: [float(x) for x in scores[game].split()] for game in games}
    percent = [100 * (x - bounds[game][0]) / (bounds[game][1] - bounds[game][0]) for game, x in games.items()]
    return dict(human_median=np.median(percent), human_capped_mean=np.minimum(percent, 100).mean())


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


def average_with_neighbor(flat: Tensor):
    """Half of one's own parameters and half of the last rank's: they travel around the ring."""
    received = torch.empty_like(flat)
    exchange = [torch.distributed.P2POp(torch.distributed.isend, flat.detach(), (RANK + 1) % WORLD_SIZE)]
    exchange += [torch.distributed.P2POp(torch.distributed.irecv, received, (RANK - 1) % WORLD_SIZE)]
    for work in torch.distributed.batch_isend_irecv(exchange):
        work.wait()
    flat.lerp_(received, 0.5)


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
    """The learner: update on the actors' unrolls until the end or a signal; returns the run folder."""
    if actors.row["obs"].ndim == 2:
        torch.set_num_threads(1)  # the networks are small: a second thread only costs
    agent = Agent(actors.envs, args).to(args.device)
    parameters = list(agent.parameters())
    flat = nn.Parameter(nn.utils.parameters_to_vector(parameters))  # one tensor to step, send and average;
    nn.utils.vector_to_parameters(flat, parameters)  # the parameters become views of it
    square_avg = torch.ones_like(flat)  # RMSProp's mean of squares begins with ones, as TensorFlow's
    lr = torch.tensor(args.learning_rate)  # a tensor, so that annealing does not recompile the update
    run_name = f"{args.env_id}__{SCRIPT}__{args.seed}__{time.time_ns()}".replace("/", "-").replace(":", "-")
    run_dir = Path(args.resume or f"runs/{run_name}")
    first_iteration, last_returns = checkpoint["iteration"], {x: deque(maxlen=100) for x in args.env_ids}
    if args.resume:
        try:
            agent.load_state_dict(checkpoint["agent"])
            square_avg.copy_(checkpoint["optimizer"])
            for env_id, returns in checkpoint["last_returns"].items():
                last_returns[env_id].extend(returns)
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            fail(f"{args.resume} does not fit the flags or this version of {SCRIPT}.py: {error}")
    saved, first_step, start = first_iteration, first_iteration * args.batch_size, time.time()
    if RANK == 0:
        logger = Logger(args, run_dir, first_step)
        print(run_dir)

    def update(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.enable_grad():
            loss, info = impala_loss(agent, batch, args)
        grad = torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, parameters)])
        if WORLD_SIZE > 1 and args.sync_every == 1:  # several learners, section 3: gradients are summed
            torch.distributed.all_reduce(grad)
        grad *= (args.max_grad_norm / (grad.norm() + 1e-6)).clamp(max=1)
        square_avg.lerp_(grad**2, 1 - args.rmsprop_decay)  # RMSProp with epsilon inside the root, as
        flat.sub_(lr * grad / (square_avg + args.rmsprop_eps).sqrt())  # TensorFlow's: the paper's values
        return info

    if args.compile:
        update = torch.compile(update)

    actors.start(agent, first_iteration)
    replay, replayed = None, (args.batch_unrolls - args.new_unrolls) // WORLD_SIZE
    lags, status = [], []
    for iteration in range(first_iteration, args.num_iterations):
        # seeded anew in every iteration, so that there is no random state to save and resume
        seed = int(np.random.SeedSequence((args.seed, iteration, RANK)).generate_state(1)[0])
        torch.manual_seed(seed)
        if args.anneal_lr:
            lr.fill_(args.learning_rate * (1 - iteration / args.num_iterations))
        step, episodes = (iteration + 1) * args.batch_size, []

        # 1. unrolls, new and replayed
        received = actors.receive()
        for unrolls in received:
            lags.append(iteration - unrolls.version)
            for t, episodic_return, length in unrolls.episodes:
                episodes.append((iteration * args.batch_size + t * args.new_unrolls, episodic_return, length))
                last_returns[unrolls.env_id].append(episodic_return)
        episodes.sort()
        batch = side_by_side([unrolls.data for unrolls in received])
        actors.give_back(received)
        if replayed:
            replay = replay or Replay(batch, args.replay_unrolls)
            replay.add(batch)
            batch = side_by_side([batch, replay.sample(replayed, np.random.default_rng(seed))])
        cuts = batch.pop("cuts")
        batch = {name: torch.as_tensor(x, device=args.device) for name, x in batch.items()}
        batch["bootstraps"] = beyond_time_limits(agent, batch, cuts, args.gamma)  # by the newest values

        # 2. update
        info = update(batch)
        if args.sync_every > 1 and WORLD_SIZE > 1 and (iteration + 1) % args.sync_every == 0:
            average_with_neighbor(flat)
        actors.publish(agent, iteration + 1)

        # 3. log and save
        scalars = {f"losses/{k}": x.item() for k, x in info.items()}
        if not np.isfinite(list(scalars.values())).all():
            good = f"{run_dir}/checkpoint.pt, of iteration {saved}" if saved else "none"
            sys.exit(f"iteration {iteration + 1}: {scalars} are not finite; last good checkpoint: {good}")
        signum = int(over_processes("MAX", stop[0] if stop else 0))
        ends = signum or iteration + 1 == args.num_iterations
        if (iteration + 1) % args.log_every == 0 or ends:
            scalars["charts/learning_rate"] = lr.item()
            scalars["charts/SPS"] = (step - first_step) / (time.time() - start)
            scalars |= {"charts/policy_lag": np.mean(lags), "charts/policy_lag_max": max(lags)}
            trained = len(lags) // actors.batch_blocks * args.batch_unrolls * args.num_steps
            scalars |= {f"charts/{k}": x for k, x in actors.rates(trained).items()}
            means = {env_id: np.mean(returns) for env_id, returns in last_returns.items() if returns}
            if len(args.env_ids) > 1:
                scalars |= {f"tasks/{env_id}": mean for env_id, mean in means.items()}
            if len(means) == len(args.env_ids):
                scalars |= {f"charts/{k}": x for k, x in human_normalized(means).items()}
            waits = (f"{who} waits {scalars[f'charts/{who}_wait']:.0%}" for who in ("learner", "actor"))
            status = [f"return {np.mean(list(means.values()) or 0):.1f}", f"lag {np.mean(lags):.1f}", *waits]
            lags = []
        else:
            scalars = {}
        if RANK == 0:
            logger.log(step, scalars, episodes, ", ".join(status))
        if RANK == 0 and (ends or (iteration + 1) % args.save_every == 0):
            saved = iteration + 1
            logger.writer.flush()
            checkpoint = dict(agent=agent.state_dict(), optimizer=square_avg, iteration=saved)
            checkpoint |= dict(last_returns={k: list(x) for k, x in last_returns.items()})
            save_checkpoint(run_dir, **checkpoint, args=asdict(args) | dict(resume=None))
        if signum:
            sys.exit(128 + signum)
    if RANK == 0:
        logger.close()
    return run_dir


# === Evaluation ==============================================================================


@torch.no_grad()
def evaluate(args: Args) -> list[float]:
    # differs from ppo.py: recurrent, with a camera for Atari, task by task
    """Returns of full episodes of a run's agent, which samples its actions as in training."""
    torch.manual_seed(args.seed)
    video_dir = Path(args.evaluate) / "videos" if args.capture_video else None
    state_dict, all_returns = load_checkpoint(args.evaluate)["agent"], []
    for env_id in args.env_ids:
        seed = args.seed + args.total_timesteps + args.num_envs  # no seed of training
        group = Group(env_id, args, 1, seed, video_dir)
        agent, returns = Agent(group.envs, args).to(args.device), []
        try:
            agent.load_state_dict(state_dict)
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            fail(f"the agent of {args.evaluate} does not fit {env_id}: {error}")
        if group.row["obs"].ndim == 2:
            torch.set_num_threads(1)  # the networks are small: a second thread only costs
        state = agent.initial_state(1)
        while len(returns) < args.eval_episodes:
            inputs = {name: torch.as_tensor(x, device=args.device)[None] for name, x in group.row.items()}
            dist, _, state = agent(inputs, state)
            group.send(dist.sample()[0].cpu().numpy())
            returns += [episodic_return for episodic_return, _ in group.receive()[1]]
        group.envs.close()
        if len(args.env_ids) > 1:
            print(f"{env_id}: return {np.mean(returns):.2f} +- {np.std(returns):.2f}")
        all_returns += returns
    return all_returns


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
