# /// script
# requires-python = ">=3.10"
# dependencies = ["ale-py>=0.12", "filelock>=3.13", "gymnasium[classic-control]>=1.4", "numpy", "tensorboard",
#     "torch>=2.6", "tqdm", "tyro>=1"]
# ///
"""Off-policy PPO: rollout workers beside an optimizer, the staleness of every sample known and bounded.

    python ppo_async.py --env-id BreakoutNoFrameskip-v4      # every field of Args is a flag; see --help
    python ppo_async.py --env-id CartPole-v1 --sync          # workers and optimizer in turn, which repeats
    python ppo_async.py --resume runs/NAME                   # go on with a run that was stopped
    python ppo_async.py --evaluate runs/NAME                 # play full episodes with its agent
    torchrun --nproc-per-node 2 ppo_async.py                 # two processes that share the environments

Paper    Berner et al. 2019, https://arxiv.org/abs/1912.06680, section 4.4 and appendix M: a sample made by
         version N of the policy and trained on by version M is M - N stale. Here a version is an iteration's
         update: sample_reuse passes of num_minibatches gradient steps. An iteration whose segments were all
         too stale makes no version.
Details  numbered as in https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details
Shapes   T = num_steps, N = environments of a group, B = segments of an iteration / processes
"""

import argparse
import atexit
import ctypes
import faulthandler
import math
import os
import queue
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ContextDecorator
from copy import deepcopy
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from typing import Annotated, Literal, NoReturn
from zipfile import BadZipFile, ZipFile

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # before torch: its idle threads leave emulators the cores

import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from ale_py.vector_env import AtariVectorEnv
from filelock import FileLock
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = Path(__file__).stem
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))  # rank on this machine; each has a GPU

# === Arguments ===============================================================================


@dataclass
class Args:
    env_id: str = "BreakoutNoFrameskip-v4"  # Gymnasium id of the task
    total_timesteps: int = 10_000_000  # environment steps, summed over the parallel environments
    seed: int = 1  # seeds PyTorch and the environments; nothing else is random

    # rollout workers
    num_envs: int = 16  # parallel environments, divided among torchrun's processes
    num_actors: int = 1  # threads of a process, with two groups of environments each
    num_steps: Annotated[int, tyro.conf.arg(aliases=["--segment-length"])] = 128  # steps of a segment (T)
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # GAE: 0 is the one-step advantage, 1 is Monte Carlo
    gae_on_learner: bool = False  # advantages by the optimizer's values instead of the workers'
    bootstrap_truncated: bool = False  # at a time limit, add gamma * value to the reward
    sync: bool = False  # actors and learner in turn, in one thread
    stall_seconds: int = 0  # end a run if an iteration, or a step of --evaluate, takes longer; 0: never

    # staleness
    sample_reuse: float = 1.0  # passes over each sample; below 1, a random share is left out
    max_staleness: int | None = None  # drop segments that are more versions behind
    artificial_delay: int = 0  # hold segments back for so many iterations
    decoupled: bool = False  # center the policy's clip on the optimizer's policy before the update

    # update
    batch_unrolls: int = 16  # unrolls in a batch, divided among torchrun's processes
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
    amp: bool = False  # run Agent.network in bfloat16
    compile: bool = False  # torch.compile the update
    track: bool = False  # log to Weights & Biases too (offline with WANDB_MODE=offline)
    wandb_project_name: str = "ppo"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases user or team
    save_every: int = 100  # iterations between checkpoints
    resume: str | None = None  # run folder to continue, with its own arguments where no flag is given
    evaluate: str | None = None  # run folder whose agent to evaluate instead of training
    eval_episodes: int = 10  # full episodes of --evaluate
    capture_video: bool = False  # record the episodes of --evaluate in the run folder

    @property
    def num_groups(self) -> int:
        # differs from impala_vtrace.py: one task
        return WORLD_SIZE * self.num_actors * 2

    @property
    def group_size(self) -> int:
        return self.num_envs // self.num_groups

    @property
    def batch_size(self) -> int:
        return self.batch_unrolls * self.num_steps

    @property
    def num_iterations(self) -> int:
        return self.total_timesteps // self.batch_size

    def __post_init__(self):
        # differs from ppo.py: groups of environments, and their segments
        """Checks the values. tyro reports a ValueError as it reports a wrong flag."""
        for field in fields(self):
            name, x = field.name, getattr(self, field.name)
            may_be_0 = ("seed", "stall_seconds", "max_staleness", "artificial_delay")
            least = 0 if field.type in (float, float | None) or name in may_be_0 else 1
            if type(x) in (int, float) and not least <= x < np.inf:
                raise ValueError(f"{name} cannot be {x}")
        groups = self.num_groups
        unit = WORLD_SIZE * max(1, self.group_size)
        rest = self.batch_size // WORLD_SIZE % self.num_minibatches
        share = self.sample_reuse % 1 or 1  # of the samples, in the last pass
        rules = {
            "give --resume or --evaluate, not both": not (self.resume and self.evaluate),
            "--capture-video records the episodes of --evaluate": self.evaluate or not self.capture_video,
            "max_grad_norm must be above 0": self.max_grad_norm > 0,
            "stall_seconds must be below 2**22": self.stall_seconds < 2**22,  # 48 days: Windows' limit
            "seed + steps must be below 2**31": self.seed + self.total_timesteps + self.num_envs < 2**31,
            "gamma and gae_lambda must be at most 1": max(self.gamma, self.gae_lambda) <= 1,
            "a minibatch must hold more than one step": self.num_steps * share >= 2 * self.num_minibatches,
            f"num_envs must be a multiple of {groups}: two groups a worker": self.num_envs % groups == 0,
            f"batch_unrolls must be a multiple of {unit}, a group's size": self.batch_unrolls % unit == 0,
            "num_minibatches must divide batch_unrolls * num_steps / processes": rest == 0,
            "total_timesteps must be at least batch_unrolls * num_steps": self.num_iterations >= 1,
            "sample_reuse cannot be 0": self.sample_reuse > 0,
        }
        for rule, is_kept in rules.items():
            if not is_kept:
                raise ValueError(rule)


def fail(message: str) -> NoReturn:
    """Reports a mistake of the user, not a bug, in one line on stderr; exit code 2."""
    print(f"{SCRIPT}.py: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


# === Environment =============================================================================


def make_env(args: Args, num_envs: int, video_dir: Path | None = None) -> gym.vector.VectorEnv:
    # differs from ppo.py: Atari games in C++, everything else as vectors or images, channels first
    """Vectorized environments, each reset within the step that ends its episode."""
    gym.register_envs(ale_py)
    same_step = dict(autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    spec = gym.registry.get(args.env_id)
    if spec and spec.entry_point == "ale_py.env:AtariEnv":
        if spec.kwargs["frameskip"] not in (1, 4):
            fail(f"{args.env_id} skips a random number of frames: take a NoFrameskip-v4 or an ALE/...-v5 id")
        kept = ("game", "repeat_action_probability", "full_action_space", "max_num_frames_per_episode")
        kwargs = {name: spec.kwargs[name] for name in kept} | same_step
        kwargs |= dict(reward_clipping=False, noop_max=31)  # 31 draws from 0 to 30
        envs = AtariVectorEnv(num_envs=num_envs, **kwargs)
        if video_dir:  # a twin in colour, played with the same seeds and actions
            if not find_spec("moviepy"):
                fail("--capture-video: pip install moviepy")
            camera = dict(img_height=210, img_width=160, grayscale=False, stack_num=1)
            envs.camera = AtariVectorEnv(num_envs=num_envs, **kwargs, **camera)
        return envs

    def make() -> gym.Env:
        env = gym.make(args.env_id, **(dict(render_mode="rgb_array") if video_dir else {}))
        if video_dir:
            env = gym.wrappers.RecordVideo(env, str(video_dir), lambda n: n < args.eval_episodes)
        return as_array(gym.wrappers.RecordEpisodeStatistics(env))

    try:
        envs = gym.vector.SyncVectorEnv([make] * num_envs, copy=False, **same_step)
    except (gym.error.Error, ImportError) as error:
        fail(f"--env-id {args.env_id}: {error}")
    if envs.envs[0].spec.entry_point == "ale_py.env:AtariEnv":  # without its frames, lives and no-ops
        fail(f"--env-id {args.env_id}: write {envs.envs[0].spec.id}")
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    if not isinstance(action_space, gym.spaces.Discrete) or action_space.start != 0:
        fail(f"{args.env_id} acts in {action_space}: try ppo_continuous.py, or Discrete actions from 0")
    if not isinstance(obs_space, gym.spaces.Box):
        fail(f"{args.env_id} observes {obs_space}: this script takes vectors and images")
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
        # astype() copies: Gymnasium keeps a final observation, whose array an environment may reuse
        return gym.wrappers.TransformObservation(
            env, lambda obs: obs.transpose(2, 0, 1).astype(space.dtype), channels_first
        )
    return gym.wrappers.FlattenObservation(env) if isinstance(space, gym.spaces.Box) else env


def ended_episodes(info: dict) -> list[dict[str, float]]:
    """What to log of each episode that ended in a step: return, length and the numbers of its last info."""
    if "final_info" not in info:
        return []
    final, episodes = info["final_info"], []
    names = [name for name in final if f"_{name}" in final]  # _name marks the environments that have it
    names = [name for name in names if np.ndim(final[name]) == 1 and final[name].dtype.kind in "biuf"]
    for n in final["_episode"].nonzero()[0]:
        scalars = {f"charts/{name}": float(final[name][n]) for name in names if final[f"_{name}"][n]}
        scalars["charts/episodic_return"] = float(final["episode"]["r"][n])
        scalars["charts/episodic_length"] = float(final["episode"]["l"][n])
        episodes.append(scalars)
    return episodes


class Group:  # differs from impala_vtrace.py: one task
    """Environments that work while their caller does something else: send(), then receive().

    row: what is to be seen of them now, arrays (N, ...): obs, last_actions, last_rewards (raw), starts (true
    where an episode begins). A life lost in an Atari game ends an episode, but not the game.
    """

    def __init__(self, args: Args, num_envs: int, video_dir: Path | None = None):
        self.envs = make_env(args, num_envs, video_dir)
        self.is_atari = isinstance(self.envs, AtariVectorEnv)
        self.video_dir, self.video = video_dir if self.is_atari else None, []

    def reset(self, seed: int):
        obs, info = self.envs.reset(seed=seed)
        if self.video_dir:
            self.envs.camera.reset(seed=seed)
        num_envs = self.envs.num_envs
        self.returns, self.lives = np.zeros(num_envs), info.get("lives")
        self.began = np.zeros(num_envs, int)  # the emulator's frame at which the game began
        self.row = dict(obs=obs, last_actions=np.zeros(num_envs, np.int64))
        self.row |= dict(last_rewards=np.zeros(num_envs, np.float32), starts=np.ones(num_envs, bool))

    def send(self, actions: np.ndarray):
        self.actions = actions
        if self.is_atari:
            self.envs.send(actions)
        if self.video_dir:
            frames, *_ = self.envs.camera.step(actions)
            self.video.append(frames[0, 0])

    def receive(self) -> tuple[dict[int, np.ndarray], list[dict[str, float]]]:
        """Last observations, by environment, of what a time limit cut, and what to log of ended episodes."""
        step = self.envs.recv() if self.is_atari else self.envs.step(self.actions)
        obs, rewards, terminated, truncated, info = step
        starts = terminated | truncated
        if self.is_atari:
            info["final_info"] = self.ended_games(starts, rewards, info)
            starts = starts | (0 < info["lives"]) & (info["lives"] < self.lives)
            self.lives = info["lives"]
        self.row = dict(obs=obs, last_actions=self.actions, starts=starts)
        self.row["last_rewards"] = rewards.astype(np.float32)
        cut = (truncated & ~terminated).nonzero()[0]
        return {n: info["final_obs"][n] for n in cut}, ended_episodes(info)

    def ended_games(self, over: np.ndarray, rewards: np.ndarray, info: dict) -> dict:
        """Games as gymnasium reports episodes, but with CleanRL's length: all frames, no-ops at first too."""
        returns = self.returns + rewards
        began = info["frame_number"] - info["episode_frame_number"]  # a game lasts until the next one begins
        final_info = dict(episode=dict(r=returns, l=began - self.began), _episode=over)
        self.returns, self.began = np.where(over, 0, returns), began
        if self.video_dir and over[0]:
            self.save_video()
        return final_info

    def save_video(self):
        from moviepy import ImageSequenceClip

        self.video_dir.mkdir(exist_ok=True)
        path = self.video_dir / f"{len(list(self.video_dir.iterdir()))}.mp4"
        ImageSequenceClip(self.video, fps=15).write_videofile(path, logger=None)  # every 4th of 60 a second
        self.video = []


# === Agent ===================================================================================


class Categorical:
    """Distribution over the last axis of logits, without the checks that make torch.distributions slow."""

    def __init__(self, logits: Tensor):
        self.logprobs = logits.log_softmax(-1)

    def sample(self) -> Tensor:
        """Actions (...) by the Gumbel-max trick: minus the log of an exponential variable is Gumbel noise."""
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
        self.amp = args.amp
        if len(obs_shape) == 3:
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
        x = obs
        if obs.ndim == 4:  # detail 22: scaling to [0, 1]
            x = x.to(torch.float32, memory_format=torch.channels_last)
            x = x.div_(255) if obs.dtype == torch.uint8 else x
        # without autocast's cache of weights, which the actors' streams would share
        with torch.autocast(obs.device.type, torch.bfloat16, self.amp, cache_enabled=False):
            hidden = self.network(x.float())
        return Categorical(self.actor(hidden.float())), self.critic(hidden.float()).squeeze(-1)


# === Algorithm ===============================================================================


def compute_gae(rewards, values, dones, next_value, gamma: float, lam: float) -> np.ndarray:
    """Advantages (T, N) as in eq. 16 of Schulman et al. 2016, https://arxiv.org/abs/1506.02438.

    rewards, values, dones: (T, N); dones[t] is 1 if step t ended an episode. next_value: (N,), of next_obs.
    """
    deltas = rewards + gamma * (1 - dones) * np.concatenate((values[1:], next_value[None])) - values
    advantages, advantage = np.zeros_like(deltas), 0
    for t in reversed(range(len(deltas))):  # detail 5: generalized advantage estimation
        advantages[t] = advantage = deltas[t] + gamma * lam * (1 - dones[t]) * advantage
    return advantages


def ppo_loss(agent: Agent, batch: dict[str, Tensor], clip: float | Tensor, args: Args) -> tuple[Tensor, dict]:
    # differs from ppo.py: the clip may be centered elsewhere
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
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    clipped_ratio = ratio.clamp(1 - clip, 1 + clip)  # detail 8: clipped surrogate objective
    surrogate = torch.min(advantages * ratio, advantages * clipped_ratio)
    pg_loss = -(weight_logratio.exp() * surrogate).mean()

    v_loss = (value - batch["returns"]) ** 2
    if args.clip_vloss:  # detail 9: value loss clipping
        clipped_value = value.clamp(batch["values"] - clip, batch["values"] + clip)
        v_loss = torch.max(v_loss, (clipped_value - batch["returns"]) ** 2)
    v_loss = 0.5 * v_loss.mean()

    entropy = dist.entropy().mean()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss  # detail 10: overall loss
    info = dict(policy_loss=pg_loss.detach(), value_loss=v_loss.detach(), entropy=entropy.detach())
    with torch.no_grad():  # detail 12: debug variables; KL as in http://joschu.net/blog/kl-approx.html
        info |= dict(old_approx_kl=-logratio.mean(), approx_kl=(ratio - 1 - logratio).mean())
        info |= dict(clipped=(ratio - 1).abs() > clip)  # of each sample
        if args.decoupled:  # from the policies that acted to the recent one; the others are from that one on
            info |= dict(behavior_kl=(weight_logratio.exp() - 1 - weight_logratio).mean())
    return loss, info


# === Actors ==================================================================================


@dataclass
class Segments:
    """T steps of the N environments of a group, by one version of the policy."""

    data: dict[str, np.ndarray]  # (T, N, ...), but obs and values (T + 1, N, ...)
    episodes: list[tuple[int, dict]]  # those that ended: step of the segment, and what to log


class Actor:  # differs from impala_vtrace.py: values too, no memory
    """Two groups of environments in turn: while the emulators of one work, the other's actions are chosen."""

    def __init__(self, args: Args):
        self.args, self.groups = args, [Group(args, args.group_size) for _ in range(2)]
        self.began = math.inf  # time at which its present segments began
        self.is_closed = False  # nobody takes its segments any more
        self.stream = torch.cuda.Stream() if args.device == "cuda" else None

    def reset(self, seed: int):
        for k, group in enumerate(self.groups):
            group.reset(seed + k * self.args.group_size)

    @torch.no_grad()  # which counts for one thread alone
    def unroll(self, agent: Agent, version: int) -> list[Segments]:
        """T steps of each group by an agent of the optimizer's."""
        T, N, both = self.args.num_steps, self.args.group_size, []
        for group in self.groups:
            obs = np.empty((T + 1, *group.row["obs"].shape), group.row["obs"].dtype)
            data = dict(obs=obs, values=np.empty((T + 1, N), np.float32), actions=np.empty((T, N), np.int64))
            data |= {name: np.empty((T, N), np.float32) for name in ("rewards", "dones", "logprobs")}
            data["final_obs"] = np.full((T, N), None)  # where a time limit ended an episode
            data["versions"] = np.full((T, N), version)
            both.append(Segments(data, []))
        for t in range(T + 1):
            for group, segments in zip(self.groups, both, strict=True):
                data = segments.data
                if t > 0:
                    cut, episodes = group.receive()
                    if self.is_closed:
                        return both
                    segments.episodes += [(t, episode) for episode in episodes]
                    data["rewards"][t - 1] = group.row["last_rewards"]
                    data["dones"][t - 1] = group.row["starts"]
                    for n, final_obs in cut.items() if self.args.bootstrap_truncated else ():
                        data["final_obs"][t - 1, n] = final_obs
                data["obs"][t] = group.row["obs"]
                obs = torch.from_numpy(group.row["obs"]).to(self.args.device, non_blocking=True)
                dist, value = agent(obs)
                if t < T:  # the last value is that of what lies beyond the segment
                    action = dist.sample()
                    logprob = dist.log_prob(action).to("cpu", non_blocking=True)
                    data["actions"][t] = action.cpu().numpy()  # waits for a GPU, and so for logprob too
                    group.send(data["actions"][t])
                    data["logprobs"][t] = logprob.numpy()
                data["values"][t] = value.cpu().numpy()
        return both


class Actors:  # differs from impala_vtrace.py: one task, no LSTM
    """The actors of a process, in threads of their own or, with --sync, all in the optimizer's thread.

    They act by a published copy of the optimizer's agent. An actor's next segments begin when there is room
    for them, and the optimizer makes room when it takes segments.
    """

    def __init__(self, args: Args):
        self.args, self.members = args, [Actor(args) for _ in range(args.num_actors)]
        self.idle, self.threads = deque(self.members), ThreadPoolExecutor(args.num_actors, "actor")
        self.finished = queue.SimpleQueue()  # futures of run()
        self.segments = []  # their results, of each group alone, which no batch has taken yet
        self.batch_segments = args.batch_unrolls // (WORLD_SIZE * args.group_size)  # of groups, in a batch
        at_once = 2 if args.sync else 2 * args.num_actors
        # So little that no actor is more than a batch ahead, where its segments fill whole batches.
        self.capacity = self.room = max(at_once, self.batch_segments + self.batch_segments % 2)
        least = 0 if args.sync else 1  # versions that segments are behind the optimizer
        lag = (
            least + math.ceil(self.capacity / self.batch_segments) - 1
        )  # of the last for which there is room
        if lag > least and RANK == 0:
            expected = f"expect segments about {lag} versions behind the optimizer instead of {least}"
            remedy = f"let batch_unrolls be a multiple of the {args.num_envs} environments"
            print(f"{SCRIPT}.py: warning: {expected}: {remedy}", file=sys.stderr)
        self.envs = self.members[0].groups[0].envs

    def start(self, agent: Agent, version: int, seed: int):
        """Begin new episodes, and act."""
        for k, actor in enumerate(self.members):
            actor.reset(seed + 2 * k * self.args.group_size)
        self.publish(agent, version)
        self.sums, self.since = Counter(), time.monotonic()  # of what rates() tells
        self.fill_room()

    def publish(self, agent: Agent, version: int):
        """Offer a copy of the optimizer's agent to the actors, who take it as a segment begins."""
        copy = deepcopy(agent)
        if self.args.device == "cuda":
            torch.cuda.current_stream().synchronize()  # the copy is complete before an actor can see it
        self.published = copy, version

    def fill_room(self):
        """Let actors make as many segments as there is room for."""
        while self.room >= 2 and not self.args.sync:
            self.room -= 2
            self.threads.submit(self.run).add_done_callback(self.finished.put)

    def run(self) -> tuple[list[Segments], float]:
        """Segments of an idle actor, and their seconds; in a thread, or with --sync in the optimizer's."""
        actor = self.idle.popleft()
        try:
            if not self.args.sync:
                torch.set_num_threads(1)
                if self.args.device == "cuda":
                    # beside the optimizer's stream, and on its GPU, as a thread begins with device 0
                    torch.cuda.set_stream(actor.stream)
            actor.began = time.monotonic()
            segments = actor.unroll(*self.published)
            return segments, time.monotonic() - actor.began
        finally:
            actor.began = math.inf
            self.idle.append(actor)

    def receive(self) -> list[Segments]:
        """The segments of a batch. Raises what an actor raised."""
        start, ready = time.monotonic(), len(self.segments) + 2 * self.finished.qsize()
        while len(self.segments) < self.batch_segments:
            segments, seconds = self.run() if self.args.sync else self.finished.get().result()
            self.segments += segments
            self.sums["acted"] += seconds
        batch, self.segments = self.segments[: self.batch_segments], self.segments[self.batch_segments :]
        self.sums.update(batches=1, ready=ready, waited=time.monotonic() - start)
        self.room += len(batch)
        self.fill_room()
        return batch

    def rates(self, reuse: float) -> dict[str, float]:
        """Rates since the last call, given how often each new step was trained on."""
        seconds, steps = time.monotonic() - self.since, self.sums["batches"] * self.args.batch_size
        rates = {
            "charts/learner_wait": self.sums["waited"] / seconds,
            # what an actor does counts when its segments are received
            "charts/actor_wait": max(0.0, 1 - self.sums["acted"] / (seconds * len(self.members))),
            "charts/queue_fill": self.sums["ready"] / (self.sums["batches"] * self.capacity),
            "charts/collected_SPS": steps / seconds,
            "charts/trained_SPS": steps / seconds * reuse,
            "charts/sample_reuse": reuse,
        }
        self.sums, self.since = Counter(), time.monotonic()
        return rates

    def close(self):
        """Wait until each actor has ended the environment step that it is in."""
        for actor in self.members:
            actor.is_closed = True
        self.threads.shutdown(cancel_futures=True)


def beyond_time_limits(agent: Agent, final_obs: np.ndarray, args: Args) -> np.ndarray:
    # differs from impala_vtrace.py: no memory
    """What is added to the rewards (T, B) of steps that a time limit ended: gamma times the agent's value.

    final_obs (T, B) has the last observations of their episodes, and None elsewhere.
    """
    added = np.zeros(final_obs.shape, np.float32)
    for (t, n), obs in np.ndenumerate(final_obs):
        if obs is not None:
            _, value = agent(torch.as_tensor(obs[None], device=args.device))
            added[t, n] = args.gamma * value.item()
    return added


def staleness_report(staleness: Tensor, clipped: Tensor) -> dict[str, float]:
    """Of samples (n,) that were trained on: their staleness, and the clipped share of each."""
    report = {"staleness/mean": staleness.float().mean().item(), "staleness/max": staleness.max().item()}
    for versions in staleness.unique().tolist():
        report[f"staleness/clipfrac_{versions}"] = clipped[staleness == versions].float().mean().item()
    return report


def collect(actors: Actors) -> tuple[dict[str, np.ndarray], list]:
    """Segments of an iteration, side by side (T, B, ...), and the episodes that ended in them."""
    received = actors.receive()
    names, parts = received[0].data.keys(), [segments.data for segments in received]
    data = {name: np.concatenate([part[name] for part in parts], axis=1) for name in names}
    return data, [episode for segments in received for episode in segments.episodes]


# === Training ================================================================================


class StallTimer(ContextDecorator):
    """Ends the process, and shows where each thread is, unless set() is called again within --stall-seconds.

    It decorates train() and evaluate(), and stops when they end: a notebook goes on after an exception.
    """

    watcher = None

    def __enter__(self):
        self.stop = threading.Event()

    def __exit__(self, *_):
        self.stop.set()
        if self.watcher:
            self.watcher.join()
            self.watcher = None

    def set(self, seconds: int):
        self.deadline = time.monotonic() + seconds
        if seconds and not self.watcher:
            self.watcher = threading.Thread(target=self.watch, args=[seconds], daemon=True)
            self.watcher.start()

    def watch(self, seconds: int):
        message, stopped = f"--stall-seconds {seconds}: nothing ended within that time\n", False
        while not stopped:
            # may crash beside threads that run, so it is only for C code that keeps Python's lock
            faulthandler.dump_traceback_later(seconds, exit=True, file=2)
            stopped = self.stop.wait(0.5)
            if not stopped and time.monotonic() > self.deadline:
                try:
                    os.write(2, message.encode())
                    faulthandler.dump_traceback(file=2)
                finally:
                    os._exit(1)
        faulthandler.cancel_dump_traceback_later()


stall_timer = StallTimer()


@stall_timer
def train(args: Args, stop: Sequence[int] = ()) -> Path:
    # differs from ppo.py: learn() has the loop; here the actors begin and end
    """Trains; returns the run folder. With a signal's number in stop, saves and exits after an iteration."""
    if args.device == "cuda":
        torch.cuda.set_device(LOCAL_RANK)
    if WORLD_SIZE > 1:
        # imported later, as by an optimizer, it would keep the group, whose threads may then abort the exit
        from torch import _dynamo  # noqa: F401

        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo")
        atexit.register(torch.distributed.destroy_process_group)
    torch.manual_seed(args.seed)
    torch.set_flush_denormal(True)  # means that fade to almost 0 would slow the update down
    keep_freed_memory()
    actors = Actors(args)
    try:
        return learn(args, actors, stop)
    finally:
        actors.close()  # the timer still runs, as an actor may hang


@torch.no_grad()  # except in update()
def learn(args: Args, actors: Actors, stop: Sequence[int]) -> Path:
    """The optimizer: updates on the workers' segments until the end or a signal; returns the run folder."""
    if len(actors.envs.single_observation_space.shape) == 1:
        torch.set_num_threads(1)  # the networks are small: a second thread only costs
    agent = Agent(actors.envs, args).to(args.device)
    flat = flatten(list(agent.parameters()))
    lr = torch.tensor(args.learning_rate, device=args.device)  # a tensor, or annealing would recompile
    clip = torch.tensor(args.clip_coef, device=args.device)  # for the same reason
    # detail 3: Adam's epsilon. Capturable, as a CUDA graph may hold its step.
    optimizer = torch.optim.Adam([flat], lr=lr, eps=1e-5, fused=True, capturable=True)

    run_name = f"{args.env_id}__{SCRIPT}__{args.seed}__{time.time_ns()}".replace("/", "-").replace(":", "-")
    run_dir = Path(args.resume or f"runs/{run_name}")
    parts = dict(agent=agent, optimizer=optimizer)  # a checkpoint holds the state of each
    saved, last_returns = 0, []  # iterations in the last checkpoint, last 100 returns of this process
    version = 0  # updates that took place
    if RANK == 0:
        run_lock = lock(run_dir)  # noqa: F841  train() holds it until it returns
    if args.resume:
        checkpoint = load_checkpoint(args.resume, parts, ("iteration", "last_returns", "version"))
        saved, last_returns = checkpoint["iteration"], checkpoint["last_returns"]
        if over_processes("MAX", saved) != saved:
            fail(f"{args.resume}: the processes of torchrun read different checkpoints")
        version = checkpoint["version"]
        optimizer.param_groups[0]["lr"] = lr  # not the checkpoint's
    first_iteration, first_step, start = saved, saved * args.batch_size, time.time()
    if RANK == 0:
        writer, bar = start_logging(args, run_dir, first_step)
    over_processes("MAX", 0)  # all wait while Weights & Biases asks the first for a login
    stall_timer.set(args.stall_seconds)

    @torch.enable_grad()
    def update(batch: dict[str, Tensor], clip: Tensor) -> dict[str, Tensor]:
        # differs from ppo.py: processes may have kept different numbers of segments
        loss, info = ppo_loss(agent, batch, clip, args)
        loss.backward()
        if WORLD_SIZE > 1:  # auxiliary detail 2: parallel gradients, averaged over samples
            size = len(batch["obs"])
            torch.distributed.all_reduce(flat.grad.mul_(size / over_processes("SUM", size)))
        norm = flat.grad.norm()  # detail 11: clipping of the global gradient norm
        flat.grad.mul_((args.max_grad_norm / (norm + 1e-6)).clamp(max=1))
        optimizer.step()
        flat.grad.zero_()
        return info

    if args.compile:
        update = torch.compile(update)

    if args.artificial_delay:  # what is held back is collected before the first iteration seeds each process
        torch.manual_seed(hash((args.seed, first_iteration, RANK, args.artificial_delay)))
    # a resumed run begins new episodes
    actors.start(agent, version, args.seed + first_step + RANK * args.num_envs // WORLD_SIZE)
    held = deque()
    for _ in range(args.artificial_delay):
        stall_timer.set(args.stall_seconds)
        held.append(collect(actors))
    for iteration in range(first_iteration, args.num_iterations):
        # No more time for an actor that hangs: the process ends and shows where, though other actors go on.
        if time.monotonic() - min(actor.began for actor in actors.members) < args.stall_seconds:
            stall_timer.set(args.stall_seconds)
        # Each iteration has a seed of its own, so no random state is saved. Python salts no hash of integers.
        torch.manual_seed(hash((args.seed, iteration, RANK)))
        frac = 1 - version / args.num_iterations  # only an update is progress
        lr.fill_(args.learning_rate * (frac if args.anneal_lr else 1))  # detail 4: learning rate annealing
        clip.fill_(args.clip_coef * (frac if args.anneal_clip else 1))  # auxiliary detail 1: clip annealing
        step, losses = (iteration + 1) * args.batch_size, {}
        ages, clipped = [], []  # staleness of each sample that is trained on, and whether it was clipped

        # 1. segments
        held.append(collect(actors))
        data, ended = held.popleft()
        begin = iteration * args.batch_size
        episodes = [(begin + t * args.batch_unrolls, episode) for t, episode in ended]
        episodes.sort(key=lambda episode: episode[0])
        staleness = version - data["versions"]
        kept = staleness[0] <= (np.inf if args.max_staleness is None else args.max_staleness)
        if over_processes("MAX", not kept.any()):  # if a process has nothing to train on, none trains
            kept[:] = False
        data = {name: x[:, kept] for name, x in data.items()}

        # 2. advantages
        values, obs = data["values"], torch.as_tensor(data["obs"], device=args.device)
        if args.gae_on_learner:
            values = agent(obs.flatten(0, 1))[1].view(values.shape).cpu().numpy()
        rewards = data["rewards"]
        if isinstance(actors.envs, AtariVectorEnv):
            rewards = np.sign(rewards)  # detail 19: reward clipping
        rewards = rewards + beyond_time_limits(agent, data["final_obs"], args)  # by the newest values
        advantages = compute_gae(rewards, values[:-1], data["dones"], values[-1], args.gamma, args.gae_lambda)
        batch = dict(obs=obs[:-1], actions=data["actions"], logprobs=data["logprobs"], values=values[:-1])
        batch |= dict(advantages=advantages, returns=advantages + values[:-1])
        batch["staleness"] = version - data["versions"]
        # (T, B, ...) -> (T * B, ...)
        batch = {name: torch.as_tensor(x, device=args.device).flatten(0, 1) for name, x in batch.items()}
        if args.decoupled:
            batch["recent_logprobs"] = agent(batch["obs"])[0].log_prob(batch["actions"])

        # 3. update
        num_samples, passes = len(batch["obs"]), math.ceil(args.sample_reuse) if kept.any() else 0
        for k in range(passes):
            share = min(1.0, args.sample_reuse - k)  # the last pass may be over a random part
            shuffled = torch.randperm(num_samples, device=args.device)  # detail 6: shuffled minibatches
            for indices in shuffled[: round(share * num_samples)].tensor_split(args.num_minibatches):
                minibatch = {name: x[indices] for name, x in batch.items()}
                losses = update(minibatch, clip)
                ages.append(minibatch["staleness"])
                clipped.append(losses.pop("clipped"))
            if args.target_kl is not None:  # auxiliary detail 3: early stopping
                if over_processes("SUM", losses["approx_kl"]) / WORLD_SIZE > args.target_kl:
                    break
        if losses:  # a version is an update that took place
            version += 1
            actors.publish(agent, version)

        # 4. log and save
        scalars = {f"losses/{name}": x.item() for name, x in losses.items()}
        if over_processes("MAX", not np.isfinite(list(scalars.values())).all()):  # in any process
            good = f"{run_dir}/checkpoint.pt, of iteration {saved}" if saved else "none"
            message = f"iteration {iteration + 1}: not finite: {scalars}; last good checkpoint: {good}"
            sys.exit(message if RANK == 0 else 1)
        if losses:
            scalars |= staleness_report(torch.cat(ages), torch.cat(clipped))
            scalars["losses/clipfrac"] = torch.cat(clipped).float().mean().item()
            explained = 1 - (batch["advantages"].var() / batch["returns"].var()).item()
            scalars["losses/explained_variance"] = explained
        scalars["charts/learning_rate"] = lr.item()
        scalars["charts/SPS"] = (step - first_step) / (time.time() - start)
        scalars |= actors.rates(over_processes("SUM", sum(map(len, ages))) / args.batch_size)
        scalars["staleness/dropped"] = over_processes("SUM", (~kept).mean()) / WORLD_SIZE
        scalars["charts/dropped_SPS"] = scalars["staleness/dropped"] * scalars["charts/collected_SPS"]
        last_returns = (last_returns + [x["charts/episodic_return"] for _, x in episodes])[-100:]
        signum = int(over_processes("MAX", stop[0] if stop else 0))
        if RANK == 0:
            for end, episode in episodes:
                log(writer, end, episode)
            log(writer, step, scalars)
            if losses:
                writer.add_histogram("staleness/versions", torch.cat(ages), step)
            status = f"return {np.mean(last_returns or np.nan):.1f}, staleness {staleness.mean():.1f}, "
            status += f"learner waits {scalars['charts/learner_wait']:.0%}, "
            status += f"actor waits {scalars['charts/actor_wait']:.0%}"
            bar.set_postfix_str(status, refresh=False)
            bar.update(step - bar.n)
            if signum or (iteration + 1) % args.save_every == 0 or iteration + 1 == args.num_iterations:
                saved = iteration + 1
                writer.flush()
                numbers = dict(iteration=saved, last_returns=last_returns, version=version)
                save_checkpoint(run_dir, args, parts, **numbers)
        if signum:
            sys.exit(128 + signum)
    return run_dir


def keep_freed_memory():
    """Keeps glibc from returning freed memory to the kernel, page by page: a fifth of an update on a CPU."""
    if sys.platform == "linux":
        mallopt = ctypes.CDLL(None).mallopt
        if not mallopt(-3, 2**30):  # M_MMAP_THRESHOLD
            mallopt(-3, 2**25)  # the most that older versions take
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def flatten(parameters: list[nn.Parameter]) -> nn.Parameter:
    """Makes parameters views of one tensor, and their gradients views of its gradient.

    Adam, clipping and the sum over processes are then one operation each, not one for each parameter.
    """
    flat = nn.Parameter(torch.cat([x.data.flatten() for x in parameters]))
    flat.grad, sizes = torch.zeros_like(flat), [x.numel() for x in parameters]
    for x, part, grad in zip(parameters, flat.data.split(sizes), flat.grad.split(sizes), strict=True):
        part = part.as_strided(x.shape, x.stride()).copy_(x.data)  # channels may be last in memory
        x.data, x.grad = part, grad.as_strided(x.shape, x.stride())
    return flat


def over_processes(operation: str, x: float | Tensor) -> float:
    """SUM or MAX of a number over the processes of torchrun."""
    x = torch.tensor(float(x), dtype=torch.float64)  # float32 counts to 2**24
    if WORLD_SIZE > 1:
        torch.distributed.all_reduce(x, getattr(torch.distributed.ReduceOp, operation))
    return x.item()


# === Evaluation ==============================================================================


@stall_timer
@torch.no_grad()
def evaluate(args: Args) -> list[float]:
    # differs from ppo.py: a group of one environment
    """Returns of full episodes of a run's agent, which samples its actions as in training."""
    torch.manual_seed(args.seed)
    video_dir = Path(args.evaluate) / "videos" if args.capture_video else None
    group, returns = Group(args, 1, video_dir), []
    stall_timer.set(args.stall_seconds)
    group.reset(seed=args.seed + args.total_timesteps + args.num_envs)  # no seed of training
    agent = Agent(group.envs, args).to(args.device)
    load_checkpoint(args.evaluate, dict(agent=agent))
    if group.row["obs"].ndim == 2:
        torch.set_num_threads(1)  # the networks are small: a second thread only costs
    while len(returns) < args.eval_episodes:
        stall_timer.set(args.stall_seconds)
        dist, _ = agent(torch.as_tensor(group.row["obs"], device=args.device))
        group.send(dist.sample().cpu().numpy())
        _, episodes = group.receive()
        returns += [episode["charts/episodic_return"] for episode in episodes]
    group.envs.close()
    return returns


# === Logs and checkpoints ====================================================================


def lock(run_dir: Path) -> FileLock:
    """Refuses a run folder in which another process trains. The lock ends with train() or its process."""
    run_lock = FileLock(run_dir / "lock", is_singleton=True)  # a notebook may resume after an exception
    try:
        run_lock.acquire(blocking=False)
    except OSError as error:
        fail(f"{run_dir} cannot be locked, another process may train there: {error}")
    return run_lock


def start_logging(args: Args, run_dir: Path, first_step: int) -> tuple[SummaryWriter, tqdm]:
    """TensorBoard's writer and a progress bar. With --track, Weights & Biases gets what TensorBoard gets."""
    if args.track:
        import wandb

        config = asdict(args) | dict(exp_name=SCRIPT)  # CleanRL's reports group runs by exp_name
        try:
            wandb.init(
                project=args.wandb_project_name, entity=args.wandb_entity, config=config,
                id=run_dir.name, name=run_dir.name, resume="allow", sync_tensorboard=True,
                group=f"{args.env_id}__{SCRIPT}", tags=[SCRIPT, args.env_id[:64]],
                settings=dict(init_timeout=10, reinit="finish_previous"),  # seconds; a run for each train()
            )  # fmt: skip
        except wandb.Error as error:
            fail(f"--track: {error}")
    writer = SummaryWriter(run_dir, purge_step=first_step + 1)  # hides what was logged but not saved
    atexit.register(writer.close)  # writes the last logs after an exception, too
    writer.add_text("args", "\n".join(f"    {name}: {x}" for name, x in asdict(args).items()))
    style = {} if sys.stderr.isatty() else dict(mininterval=10, bar_format="{l_bar}{r_bar}\n")
    total = args.num_iterations * args.batch_size
    print(run_dir)
    return writer, tqdm(total=total, initial=first_step, unit="step", unit_scale=True, **style)


def log(writer: SummaryWriter, step: int, scalars: dict[str, float]):
    for name, x in scalars.items():
        if np.isfinite(x):
            writer.add_scalar(name, x, step)


def save_checkpoint(run_dir: Path, args: Args, parts: dict, **numbers):
    """Saves atomically: a kill leaves the old checkpoint or the new one."""
    state = {name: part.state_dict() for name, part in parts.items()} | numbers
    state |= dict(script=SCRIPT, args=asdict(args) | dict(resume=None))
    with open(run_dir / "checkpoint.tmp", "wb") as file:
        torch.save(state, file)  # torch.save names a full disk only when it writes to a file object
    (run_dir / "checkpoint.tmp").replace(run_dir / "checkpoint.pt")


def load_checkpoint(run_dir: str, parts: dict | None = None, numbers: Sequence[str] = ()) -> dict:
    """What save_checkpoint() saved, with Args. Parts take on their saved state. Numbers must be there."""
    path = Path(run_dir) / "checkpoint.pt"
    try:
        if damaged := ZipFile(path).testzip():  # torch.load compares no checksums
            raise ValueError(f"{damaged} is damaged")
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["script"] != SCRIPT:
            fail(f"{path} is a checkpoint of {state['script']}.py")
        for name, part in (parts or {}).items():
            part.load_state_dict(state[name])
        return state | dict(args=Args(**state["args"])) | {name: state[name] for name in numbers}
    except (OSError, BadZipFile, RuntimeError, LookupError, TypeError, ValueError, UnpicklingError) as error:
        fail(f"{path} cannot be loaded with these flags and this {SCRIPT}.py: {error!r:.150}")


# === Main ====================================================================================


def parse_args() -> Args:
    # differs from ppo.py: what a batch has is a flag of its own
    """The command line. A run that is resumed or evaluated brings its own arguments as defaults."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume", "--evaluate", dest="run_dir")
    run_dir = parser.parse_known_args()[0].run_dir
    saved = tyro.MISSING_NONPROP if run_dir is None else load_checkpoint(run_dir)["args"]
    args = tyro.cli(Args, default=saved)
    for name in ("env_id", "seed", "num_envs", "num_steps", "batch_unrolls"):
        if args.resume and getattr(args, name) != getattr(saved, name):
            fail(f"--resume cannot change {name} from {getattr(saved, name)} to {getattr(args, name)}")
    if args.device == "cuda" and LOCAL_RANK >= torch.cuda.device_count():
        fail(f"--device cuda: PyTorch finds {torch.cuda.device_count() or 'no'} GPU; each process needs one")
    wandb = find_spec("wandb")  # it finds the folder wandb, in which W&B keeps its runs, too
    if args.track and not args.evaluate and (wandb is None or wandb.origin is None):
        fail("--track: pip install wandb")
    return args


if __name__ == "__main__":
    args, stop = parse_args(), []
    if args.stall_seconds and RANK == 0:
        print(f"--stall-seconds {args.stall_seconds}: a longer iteration ends the run", file=sys.stderr)

    def finish(signum: int, _):
        """The first signal ends the run after its iteration, and a second Ctrl-C at once."""
        print("stopping after this iteration", file=sys.stderr)
        stop.append(signum)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # SIGTERM comes twice where torchrun passes it on, too

    if args.evaluate:
        returns = evaluate(args)
        print(f"return {np.mean(returns):.2f} +- {np.std(returns):.2f} over {len(returns)} episodes")
    else:
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, finish)
        train(args, stop)
