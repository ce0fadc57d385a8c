# /// script
# requires-python = ">=3.10"
# dependencies = ["ale-py>=0.12", "filelock>=3.13", "gymnasium[classic-control]>=1.4", "numpy", "tensorboard",
#     "torch>=2.6", "tqdm", "tyro>=1"]
# ///
"""IMPALA: actors that run ahead of a learner, and V-trace for the lag between them. Atari, images, vectors.

    python impala_vtrace.py --env-id PongNoFrameskip-v4       # every field of Args is a flag; see --help
    python impala_vtrace.py --env-id PongNoFrameskip-v4,BreakoutNoFrameskip-v4      # one network, two tasks
    python impala_vtrace.py --env-id CartPole-v1 --sync       # actors and learner in turn: it repeats exactly
    python impala_vtrace.py --resume runs/NAME                # go on with a run that was stopped
    python impala_vtrace.py --evaluate runs/NAME              # play full episodes with its agent
    torchrun --nproc-per-node 2 impala_vtrace.py              # two learners, each with actors of its own

Paper    Espeholt et al. 2018, https://arxiv.org/abs/1802.01561; its equations and sections are at the lines
Shapes   T = num_steps, N = environments of a group, B = unrolls of a batch / processes. An unroll has T + 1
         observations; the last is the first of the next one. Step t has actions[t] = last_actions[t + 1], and
         rewards and ends alike: an observation comes with what led to it, as the LSTM wants to see it.
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
from itertools import pairwise
from pathlib import Path
from pickle import UnpicklingError
from typing import Literal, NoReturn
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
    env_id: str = "BreakoutNoFrameskip-v4"  # Gymnasium id of the task, or of several: A,B
    total_timesteps: int = 10_000_000  # environment steps, summed over the parallel environments
    seed: int = 1  # seeds PyTorch and the environments; nothing else is random

    # actors
    num_envs: int = 32  # parallel environments, divided among torchrun's processes
    num_actors: int = 1  # threads of a process for each task, with two groups of environments each
    num_steps: int = 20  # steps per environment and rollout (T)
    sync: bool = False  # actors and learner in turn, in one thread
    stall_seconds: int = 0  # end a run if an iteration, or a step of --evaluate, takes longer; 0: never

    # V-trace
    gamma: float = 0.99  # discount factor
    correction: Literal["vtrace", "one-step-is", "epsilon", "none"] = "vtrace"  # of what is off-policy
    rho_bar: float = 1.0  # clip of the importance weights that say which policy is valued
    c_bar: float = 1.0  # clip of the importance weights that say how far back a surprise counts
    vtrace_lambda: float = 1.0  # 0 is the one-step target, 1 the longest
    rewards: Literal["clip", "soft-asymmetric", "raw"] = "clip"  # to [-1, 1], or as for DMLab-30
    bootstrap_truncated: bool = False  # at a time limit, add gamma * value to the reward

    # update
    batch_unrolls: int = 32  # unrolls in a batch, divided among torchrun's processes
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
    amp: bool = False  # run Agent.network in bfloat16
    compile: bool = False  # torch.compile the update
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
    def num_groups(self) -> int:
        return WORLD_SIZE * len(self.env_ids) * self.num_actors * 2

    @property
    def group_size(self) -> int:
        return self.num_envs // self.num_groups

    @property
    def new_unrolls(self) -> int:
        return max(1, round(self.batch_unrolls * (1 - self.replay_fraction)))

    @property
    def batch_size(self) -> int:
        return self.new_unrolls * self.num_steps

    @property
    def num_iterations(self) -> int:
        return self.total_timesteps // self.batch_size

    def __post_init__(self):
        # differs from ppo.py: groups of environments, unrolls and their replay
        """Checks the values. tyro reports a ValueError as it reports a wrong flag."""
        for field in fields(self):
            name, x = field.name, getattr(self, field.name)
            least = 1 if field.type is int and name not in ("seed", "stall_seconds") else 0
            if type(x) in (int, float) and not least <= x < np.inf:
                raise ValueError(f"{name} cannot be {x}")
        groups, rest = self.num_groups, self.num_envs % self.num_groups
        unit = WORLD_SIZE * max(1, self.group_size)
        is_whole = self.new_unrolls % unit == 0 and self.batch_unrolls % WORLD_SIZE == 0
        rules = {
            "give --resume or --evaluate, not both": not (self.resume and self.evaluate),
            "--capture-video records the episodes of --evaluate": self.evaluate or not self.capture_video,
            "max_grad_norm must be above 0": self.max_grad_norm > 0,
            "stall_seconds must be below 2**22": self.stall_seconds < 2**22,  # 48 days: Windows' limit
            "seed + steps must be below 2**31": self.seed + self.total_timesteps + self.num_envs < 2**31,
            "gamma and vtrace_lambda must be at most 1": max(self.gamma, self.vtrace_lambda) <= 1,
            "--env-id needs at least one id": all(self.env_ids),
            "replay_fraction must be below 1: new unrolls keep the replay alive": self.replay_fraction < 1,
            f"num_envs must be a multiple of {groups}: two groups an actor and task": rest == 0,
            f"a batch's {self.new_unrolls} new unrolls must be a multiple of {unit}, a group's": is_whole,
            "total_timesteps must be at least new unrolls of a batch * num_steps": self.num_iterations >= 1,
        }
        for rule, is_kept in rules.items():
            if not is_kept:
                raise ValueError(rule)


def fail(message: str) -> NoReturn:
    """Reports a mistake of the user, not a bug, in one line on stderr; exit code 2."""
    print(f"{SCRIPT}.py: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


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
            if not find_spec("moviepy"):
                fail("--capture-video: pip install moviepy")
            camera = dict(img_height=210, img_width=160, grayscale=False, stack_num=1)
            envs.camera = AtariVectorEnv(num_envs=num_envs, **kwargs, **camera)
        return envs

    def make() -> gym.Env:
        env = gym.make(env_id, **(dict(render_mode="rgb_array") if video_dir else {}))
        if video_dir:
            task = env_id.replace("/", "-").replace(":", "-")
            env = gym.wrappers.RecordVideo(
                env, str(video_dir), lambda n: n < args.eval_episodes, name_prefix=task
            )
        return as_array(gym.wrappers.RecordEpisodeStatistics(env))

    try:
        envs = gym.vector.SyncVectorEnv([make] * num_envs, copy=False, **same_step)
    except (gym.error.Error, ImportError) as error:
        fail(f"--env-id {env_id}: {error}")
    if envs.envs[0].spec.entry_point == "ale_py.env:AtariEnv":  # without its frames, lives and no-ops
        fail(f"--env-id {env_id}: write {envs.envs[0].spec.id}")
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    if not isinstance(action_space, gym.spaces.Discrete) or action_space.start != 0:
        fail(f"{env_id} acts in {action_space}: try ppo_continuous.py, or Discrete actions from 0")
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


class Group:
    """Environments of a task that work while their caller does something else: send(), then receive().

    row: what is to be seen of them now, arrays (N, ...): obs, last_actions, last_rewards (raw), starts (true
    where an episode begins). A life lost in an Atari game ends an episode, but not the game.
    """

    def __init__(self, env_id: str, args: Args, num_envs: int, video_dir: Path | None = None):
        self.env_id, self.envs = env_id, make_env(env_id, args, num_envs, video_dir)
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
        path = self.video_dir / f"{self.env_id.replace('/', '-')}-{len(list(self.video_dir.iterdir()))}.mp4"
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


class Agent(nn.Module):  # differs from ppo.py: shallow or deep convolutions, with or without an LSTM
    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__()
        obs_shape, self.amp = envs.single_observation_space.shape, args.amp
        self.num_actions = int(envs.single_action_space.n)
        num_features = 256 if len(obs_shape) == 3 else 64
        self.hidden_size = num_features if args.lstm else 0
        if args.lstm:  # first, as cuDNN wants its weights at the beginning of what flatten() makes
            self.lstm = nn.LSTM(num_features + self.num_actions + 1, self.hidden_size)
        if len(obs_shape) == 3:
            self.network = convolutions(args.network, obs_shape)
        else:
            self.network = nn.Sequential(
                layer_init(nn.Linear(obs_shape[0], 64)), nn.Tanh(),
                layer_init(nn.Linear(64, 64)), nn.Tanh(),
            )  # fmt: skip
        self.actor = layer_init(nn.Linear(num_features, self.num_actions), std=0.01)
        self.critic = layer_init(nn.Linear(num_features, 1), std=1.0)

    def initial_state(self, num_envs: int) -> Tensor:
        """Hidden and cell state (2, N, hidden_size); hidden_size is 0 without an LSTM."""
        return self.actor.weight.new_zeros(2, num_envs, self.hidden_size)

    def forward(self, rows: dict[str, Tensor], state: Tensor) -> tuple[Categorical, Tensor, Tensor]:
        """Policy and value (T, N) of rows (T, N, ...) as Group has them, and the state after them.

        state: (2, N, hidden_size), before the first of them.
        """
        obs = rows["obs"]
        x = obs.flatten(0, 1)  # time folded into the batch, section 3.1
        if obs.ndim == 5:
            x = x.to(torch.float32, memory_format=torch.channels_last)
            x = x.div_(255) if obs.dtype == torch.uint8 else x
        # without autocast's cache of weights, which the actors' streams would share
        with torch.autocast(obs.device.type, torch.bfloat16, self.amp, cache_enabled=False):
            x = self.network(x.float())
        x = x.float().unflatten(0, obs.shape[:2])
        if self.hidden_size:
            action = nn.functional.one_hot(rows["last_actions"], self.num_actions)
            x = torch.cat((x, action, rows["last_rewards"].clamp(-1, 1)[..., None]), -1)
            starts, outputs = rows["starts"], []
            for steps in sequences(starts):
                state = state * ~starts[steps.start, :, None]  # reset before the step whose done flag is set
                output, (hidden, cell) = self.lstm(x[steps], (state[:1].contiguous(), state[1:].contiguous()))
                state = torch.cat((hidden, cell))
                outputs.append(output)
            x = torch.cat(outputs)
        return Categorical(self.actor(x)), self.critic(x).squeeze(-1), state


def sequences(starts: Tensor) -> list[slice]:
    """Steps to run the LSTM over at once: (T, N) is cut where an episode begins, and after 16 steps.

    oneDNN keeps compiled code for each length that it meets, so there are few of them.
    """
    # A single step, as in acting, does not ask the device, which a CUDA graph could not.
    is_start = starts.any(1).tolist() if len(starts) > 1 else [True]
    begins = [0]
    for t in range(1, len(is_start)):
        if is_start[t] or t == begins[-1] + 16:
            begins.append(t)
    return [slice(begin, end) for begin, end in pairwise([*begins, len(is_start)])]


# === Algorithm ===============================================================================


@torch.no_grad()
def vtrace(ratio, rewards, discounts, values, bootstrap_value, rho_bar, c_bar, lam) -> tuple[Tensor, Tensor]:
    """V-trace targets vs (eq. 1, by remark 1) and advantages of the policy gradient (section 4.2), (T, N).

    All (T, N), but bootstrap_value (N,), the value after the last step. ratio is that of the probabilities of
    what was done, under the learner's policy and under the one that acted. discounts[t] is 0 if step t ended
    an episode, else gamma. Importance weights are clipped at rho_bar and c_bar (inf: not). lam shortens the
    traces as in remark 2.
    """
    rhos, cs = ratio.clamp(max=rho_bar), ratio.clamp(max=c_bar)
    deltas = rhos * (rewards + discounts * torch.cat((values[1:], bootstrap_value[None])) - values)
    corrections, correction = torch.zeros_like(deltas), 0.0
    for t in reversed(range(len(deltas))):
        corrections[t] = correction = deltas[t] + discounts[t] * lam * cs[t] * correction
    vs = values + corrections
    pg_advantages = rhos * (rewards + discounts * torch.cat((vs[1:], bootstrap_value[None])) - values)
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
    values, last_value = values[:-1], values[-1]
    actions = batch["last_actions"].roll(-1, 0)  # what was done in each row; in the last one nothing was
    logprobs, entropy = dist.log_prob(actions)[:-1], dist.entropy()[:-1].sum()

    logratio = logprobs.detach() - batch["logprobs"]
    ratio = logratio.exp()
    weights, bars = ratio, (args.rho_bar, args.c_bar, args.vtrace_lambda)
    if args.correction != "vtrace":  # the ablations of section 5.2.2: the n-step return, as if on-policy
        weights, bars = torch.ones_like(ratio), (1.0, 1.0, 1.0)
    vs, pg_advantages = vtrace(weights, rewards, discounts, values, last_value, *bars)
    if args.correction == "one-step-is":  # corrects the policy gradient alone
        pg_advantages = ratio.clamp(max=args.rho_bar) * pg_advantages
    if args.correction == "epsilon":  # keeps the gradient of log pi from exploding
        logprobs = (logprobs.exp() + 1e-6).log()

    pg_loss = -(logprobs * pg_advantages).sum()
    v_loss = 0.5 * ((vs - values) ** 2).sum()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
    with torch.no_grad():
        info = dict(policy_loss=pg_loss.detach(), value_loss=v_loss.detach(), entropy=entropy.detach())
        info = {name: x / ratio.numel() for name, x in info.items()}
        info |= dict(rho=ratio.mean(), rho_clipped=(ratio > args.rho_bar).float().mean())
        info |= dict(approx_kl=(ratio - 1 - logratio).mean())  # from the policies that acted
    return loss, info


class RMSProp(nn.Module):
    """TensorFlow's, for which the paper's values are: epsilon inside the root, squares begin with ones."""

    def __init__(self, flat: nn.Parameter, decay: float, eps: float):
        super().__init__()
        self.decay, self.eps = decay, eps
        self.register_buffer("square_avg", torch.ones_like(flat))

    @torch.no_grad()
    def step(self, flat: nn.Parameter, lr: Tensor):
        self.square_avg.lerp_(flat.grad**2, 1 - self.decay)
        flat.sub_(lr * flat.grad / (self.square_avg + self.eps).sqrt())


# === Actors ==================================================================================


@dataclass
class Unrolls:
    """T steps of the N environments of a group, by one version of the agent."""

    env_id: str
    version: int
    data: dict[str, np.ndarray]  # rows (T + 1, N, ...), logprobs (T, N), state (2, N, size)
    episodes: list[tuple[int, dict]]  # those that ended: step of the unroll, and what to log


def tensors(row: dict[str, np.ndarray], args: Args) -> dict[str, Tensor]:
    """What the agent reads of a row (N, ...) of a group, as rows (1, N, ...)."""
    read = row if args.lstm else ("obs",)
    return {name: torch.from_numpy(row[name])[None].to(args.device, non_blocking=True) for name in read}


class Actor:
    """Two groups of environments in turn: while the emulators of one work, the other's actions are chosen."""

    def __init__(self, env_id: str, args: Args):
        self.args, self.env_id = args, env_id
        self.groups = [Group(env_id, args, args.group_size) for _ in range(2)]
        self.began = math.inf  # time at which its present unroll began
        self.is_closed = False  # nobody takes its unrolls any more
        self.stream = torch.cuda.Stream() if args.device == "cuda" else None

    def reset(self, agent: Agent, seed: int):
        self.states = [agent.initial_state(self.args.group_size) for _ in self.groups]
        for k, group in enumerate(self.groups):
            group.reset(seed + k * self.args.group_size)

    @torch.no_grad()  # which counts for one thread alone
    def unroll(self, agent: Agent, version: int) -> list[Unrolls]:
        """T steps of each group by an agent of the learner's."""
        T, N, both = self.args.num_steps, self.args.group_size, []
        for group, state in zip(self.groups, self.states, strict=True):
            data = {name: np.empty((T + 1, *x.shape), x.dtype) for name, x in group.row.items()}
            data["final_obs"] = np.full((T + 1, N), None)  # where a time limit ended an episode
            data |= dict(logprobs=np.empty((T, N), np.float32), state=state.cpu().numpy())
            both.append(Unrolls(self.env_id, version, data, []))
        for t in range(T + 1):
            for k, group in enumerate(self.groups):
                data = both[k].data
                if t > 0:
                    cut, episodes = group.receive()
                    if self.is_closed:
                        return both
                    both[k].episodes += [(t, episode) for episode in episodes]
                    for n, obs in cut.items() if self.args.bootstrap_truncated else ():
                        data["final_obs"][t, n] = obs
                for name, x in group.row.items():
                    data[name][t] = x
                if t < T:
                    dist, _, self.states[k] = agent(tensors(group.row, self.args), self.states[k])
                    action = dist.sample()
                    logprob = dist.log_prob(action).to("cpu", non_blocking=True)
                    group.send(action[0].cpu().numpy())  # here alone the thread waits for a GPU
                    data["logprobs"][t] = logprob[0].numpy()
        return both


class Actors:
    """The actors of a process, in threads of their own or, with --sync, all in the learner's thread.

    They act by a published copy of the learner's agent. An actor's next unrolls begin when there is room for
    them, and the learner makes room when it takes unrolls.
    """

    def __init__(self, args: Args):
        tasks = args.env_ids * args.num_actors  # a fixed share of actors for each task, section 5.3
        self.args, self.members = args, [Actor(env_id, args) for env_id in tasks]
        self.idle, self.threads = deque(self.members), ThreadPoolExecutor(len(tasks), "actor")
        self.finished = queue.SimpleQueue()  # futures of run()
        self.unrolls = []  # their results, of each group alone, which no batch has taken yet
        self.batch_unrolls = args.new_unrolls // (WORLD_SIZE * args.group_size)  # of groups, in a batch
        at_once = 2 if args.sync else 2 * len(tasks)
        # So little that no actor is more than a batch ahead, where its unrolls fill whole batches.
        self.capacity = self.room = max(at_once, self.batch_unrolls + self.batch_unrolls % 2)
        least = 0 if args.sync else 1  # versions that unrolls are behind the learner
        lag = least + math.ceil(self.capacity / self.batch_unrolls) - 1  # of the last for which there is room
        if lag > least and RANK == 0:
            expected = f"expect unrolls about {lag} versions behind the learner instead of {least}"
            remedy = f"let a batch's new unrolls be a multiple of the {args.num_envs} environments"
            print(f"{SCRIPT}.py: warning: {expected}: {remedy}", file=sys.stderr)
        self.envs = self.members[0].groups[0].envs
        for actor in self.members:
            both = self.envs, actor.groups[0].envs
            ours, other = ((envs.single_observation_space, envs.single_action_space) for envs in both)
            if ours != other:
                fail(f"one network cannot play {tasks[0]}, {ours}, and {actor.env_id}, {other}")

    def start(self, agent: Agent, version: int, seed: int):
        """Begin new episodes, and act."""
        for k, actor in enumerate(self.members):
            actor.reset(agent, seed + 2 * k * self.args.group_size)
        self.publish(agent, version)  # last: it waits until a GPU has written the first states too
        self.sums, self.since = Counter(), time.monotonic()  # of what rates() tells
        self.fill_room()

    def publish(self, agent: Agent, version: int):
        """Offer a copy of the learner's agent to the actors, who take it as an unroll begins (section 3)."""
        copy = deepcopy(agent)
        if self.args.lstm:
            copy.lstm.flatten_parameters()  # deepcopy() scatters the weights, and cuDNN wants one piece
        if self.args.device == "cuda":
            torch.cuda.current_stream().synchronize()  # the copy is complete before an actor can see it
        self.published = copy, version

    def fill_room(self):
        """Let actors make as many unrolls as there is room for."""
        while self.room >= 2 and not self.args.sync:
            self.room -= 2
            self.threads.submit(self.run).add_done_callback(self.finished.put)

    def run(self) -> tuple[list[Unrolls], float]:
        """Unrolls of an idle actor, and their seconds; in a thread, or with --sync in the learner's."""
        actor = self.idle.popleft()
        try:
            if not self.args.sync:
                torch.set_num_threads(1)
                if self.args.device == "cuda":
                    # beside the learner's stream, and on its GPU, as a thread begins with device 0
                    torch.cuda.set_stream(actor.stream)
            actor.began = time.monotonic()
            unrolls = actor.unroll(*self.published)
            return unrolls, time.monotonic() - actor.began
        finally:
            actor.began = math.inf
            self.idle.append(actor)

    def receive(self) -> list[Unrolls]:
        """The new unrolls of a batch. Raises what an actor raised."""
        start, ready = time.monotonic(), len(self.unrolls) + 2 * self.finished.qsize()
        while len(self.unrolls) < self.batch_unrolls:
            unrolls, seconds = self.run() if self.args.sync else self.finished.get().result()
            self.unrolls += unrolls
            self.sums["acted"] += seconds
        batch, self.unrolls = self.unrolls[: self.batch_unrolls], self.unrolls[self.batch_unrolls :]
        self.sums.update(batches=1, ready=ready, waited=time.monotonic() - start)
        self.room += len(batch)
        self.fill_room()
        return batch

    def rates(self, reuse: float) -> dict[str, float]:
        """Rates since the last call, given how often each new step was trained on."""
        seconds, steps = time.monotonic() - self.since, self.sums["batches"] * self.args.batch_size
        rates = {
            "charts/learner_wait": self.sums["waited"] / seconds,
            # what an actor does counts when its unrolls are received
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


# === Replay ==================================================================================


class Replay:
    """The newest unrolls, first in, first out, drawn uniformly (section 5.2.2 and D.3)."""

    def __init__(self, capacity: int):
        self.unrolls, self.added = [None] * capacity, 0

    def add(self, unrolls: dict[str, np.ndarray]):
        """Unrolls (T + 1, B, ...), each in place of the oldest."""
        for n in range(unrolls["obs"].shape[1]):
            one = {name: x[:, n : n + 1] for name, x in unrolls.items()}
            self.unrolls[self.added % len(self.unrolls)] = one
            self.added += 1

    def sample(self, size: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        at = rng.integers(min(self.added, len(self.unrolls)), size=size)
        return side_by_side([self.unrolls[k] for k in at])


def beyond_time_limits(agent: Agent, batch: dict[str, Tensor], final_obs: np.ndarray, gamma: float) -> Tensor:
    """What is added to the rewards (T + 1, B) of rows that a time limit ended: gamma times the agent's value.

    final_obs (T + 1, B) has the last observations of their episodes, and None elsewhere. Each takes the place
    of the next episode's first one in a copy of its unroll, so that an LSTM reads what came before.
    """
    bootstraps = torch.zeros_like(batch["last_rewards"])
    found = [(t, n) for n, t in np.ndindex(final_obs.T.shape) if final_obs[t, n] is not None]
    if found:
        at, columns, k = [t for t, _ in found], [n for _, n in found], list(range(len(found)))
        rows = {name: batch[name][:, columns] for name in ("obs", "starts", "last_actions", "last_rewards")}
        rows["obs"][at, k] = torch.as_tensor(np.stack(final_obs[at, columns]), device=bootstraps.device)
        rows["starts"][at, k] = False
        _, values, _ = agent(rows, batch["state"][:, columns])
        bootstraps[at, columns] = gamma * values[at, k]
    return bootstraps


def side_by_side(unrolls: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Unrolls (T + 1, N, ...) as one batch (T + 1, sum of N, ...)."""
    return {name: np.concatenate([some[name] for some in unrolls], axis=1) for name in unrolls[0]}


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
    """The learner: updates on the actors' unrolls until the end or a signal; returns the run folder."""
    if len(actors.envs.single_observation_space.shape) == 1:
        torch.set_num_threads(1)  # the networks are small: a second thread only costs
    agent = Agent(actors.envs, args).to(args.device)
    flat = flatten(list(agent.parameters()))
    lr = torch.tensor(args.learning_rate, device=args.device)  # a tensor, or annealing would recompile
    optimizer = RMSProp(flat, args.rmsprop_decay, args.rmsprop_eps)

    # differs from ppo.py: of many tasks it names the first ones, as a file's name has 255 bytes at most
    run_name = f"{args.env_id[:99]}__{SCRIPT}__{args.seed}__{time.time_ns()}"
    run_name = run_name.replace("/", "-").replace(":", "-").replace(",", "+")  # W&B refuses these three
    run_dir = Path(args.resume or f"runs/{run_name}")
    parts = dict(agent=agent, optimizer=optimizer)  # a checkpoint holds the state of each
    saved, last_returns = 0, {env_id: [] for env_id in args.env_ids}
    if RANK == 0:
        run_lock = lock(run_dir)  # noqa: F841  train() holds it until it returns
    if args.resume:
        checkpoint = load_checkpoint(args.resume, parts, ("iteration", "last_returns"))
        saved, last_returns = checkpoint["iteration"], checkpoint["last_returns"]
        if over_processes("MAX", saved) != saved:
            fail(f"{args.resume}: the processes of torchrun read different checkpoints")
    first_iteration, first_step, start = saved, saved * args.batch_size, time.time()
    if RANK == 0:
        writer, bar = start_logging(args, run_dir, first_step)
    over_processes("MAX", 0)  # all wait while Weights & Biases asks the first for a login
    stall_timer.set(args.stall_seconds)

    @torch.enable_grad()
    def update(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        # differs from ppo.py: V-trace, and sums instead of means
        loss, info = impala_loss(agent, batch, args)
        loss.backward()
        if args.sync_every > 1:  # a learner that is alone takes its unrolls for all
            flat.grad.mul_(WORLD_SIZE)
        elif WORLD_SIZE > 1:  # several learners, section 3: gradients are summed
            torch.distributed.all_reduce(flat.grad)
        norm = flat.grad.norm()
        flat.grad.mul_((args.max_grad_norm / (norm + 1e-6)).clamp(max=1))
        optimizer.step(flat, lr)
        flat.grad.zero_()
        return info

    if args.compile:
        update = torch.compile(update)

    # a resumed run begins new episodes
    actors.start(agent, first_iteration, args.seed + first_step + RANK * args.num_envs // WORLD_SIZE)
    replay, num_replayed = Replay(args.replay_unrolls), (args.batch_unrolls - args.new_unrolls) // WORLD_SIZE
    for iteration in range(first_iteration, args.num_iterations):
        # No more time for an actor that hangs: the process ends and shows where, though other actors go on.
        if time.monotonic() - min(actor.began for actor in actors.members) < args.stall_seconds:
            stall_timer.set(args.stall_seconds)
        # Each iteration has a seed of its own, so no random state is saved. Python salts no hash of integers.
        torch.manual_seed(hash((args.seed, iteration, RANK)))
        frac = 1 - iteration / args.num_iterations
        # differs from ppo.py: no detail of IMPALA's
        lr.fill_(args.learning_rate * (frac if args.anneal_lr else 1))
        step, episodes = (iteration + 1) * args.batch_size, []
        if iteration == first_iteration or iteration % args.log_every == 0:
            lags = []  # since the last log

        # 1. unrolls, new and replayed
        received = actors.receive()
        for unrolls in received:
            lags.append(iteration - unrolls.version)
            for t, episode in unrolls.episodes:
                episodes.append((iteration * args.batch_size + t * args.new_unrolls, episode))
                returns = last_returns[unrolls.env_id] + [episode["charts/episodic_return"]]
                last_returns[unrolls.env_id] = returns[-100:]
        episodes.sort(key=lambda episode: episode[0])
        batch = side_by_side([unrolls.data for unrolls in received])
        if num_replayed:
            replay.add(batch)
            rng = np.random.default_rng((args.seed, iteration, RANK))
            batch = side_by_side([batch, replay.sample(num_replayed, rng)])
        final_obs = batch.pop("final_obs")
        batch = {name: torch.as_tensor(x, device=args.device) for name, x in batch.items()}
        batch["bootstraps"] = beyond_time_limits(agent, batch, final_obs, args.gamma)  # by the newest values

        # 2. update
        info = update(batch)
        if args.sync_every > 1 and WORLD_SIZE > 1 and (iteration + 1) % args.sync_every == 0:
            average_with_neighbor(flat)
        actors.publish(agent, iteration + 1)

        # 3. log and save
        scalars = {f"losses/{name}": x.item() for name, x in info.items()}
        if over_processes("MAX", not np.isfinite(list(scalars.values())).all()):  # in any process
            good = f"{run_dir}/checkpoint.pt, of iteration {saved}" if saved else "none"
            message = f"iteration {iteration + 1}: not finite: {scalars}; last good checkpoint: {good}"
            sys.exit(message if RANK == 0 else 1)
        signum = int(over_processes("MAX", stop[0] if stop else 0))
        ends = signum or iteration + 1 == args.num_iterations
        if RANK == 0:
            for end, episode in episodes:
                log(writer, end, episode)
            if ends or (iteration + 1) % args.log_every == 0:
                scalars["charts/learning_rate"] = lr.item()
                scalars["charts/SPS"] = (step - first_step) / (time.time() - start)
                scalars |= actors.rates(args.batch_unrolls / args.new_unrolls)
                scalars |= {"charts/policy_lag": np.mean(lags), "charts/policy_lag_max": max(lags)}
                means = {f"tasks/{env_id}": np.mean(x) for env_id, x in last_returns.items() if x}
                log(writer, step, scalars | (means if len(args.env_ids) > 1 else {}))
                status = f"return {np.mean(list(means.values()) or np.nan):.1f}, lag {np.mean(lags):.1f}, "
                status += f"learner waits {scalars['charts/learner_wait']:.0%}, "
                status += f"actor waits {scalars['charts/actor_wait']:.0%}"
                bar.set_postfix_str(status, refresh=False)
            bar.update(step - bar.n)
            if ends or (iteration + 1) % args.save_every == 0:
                saved = iteration + 1
                writer.flush()
                save_checkpoint(run_dir, args, parts, iteration=saved, last_returns=last_returns)
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


def average_with_neighbor(flat: Tensor):
    """Half of one's own parameters and half of the last rank's: they travel around the ring."""
    received = torch.empty_like(flat)
    exchange = [torch.distributed.P2POp(torch.distributed.isend, flat.detach(), (RANK + 1) % WORLD_SIZE)]
    exchange += [torch.distributed.P2POp(torch.distributed.irecv, received, (RANK - 1) % WORLD_SIZE)]
    for work in torch.distributed.batch_isend_irecv(exchange):
        work.wait()
    flat.lerp_(received, 0.5)


# === Evaluation ==============================================================================


@stall_timer
@torch.no_grad()
def evaluate(args: Args) -> list[float]:
    # differs from ppo.py: recurrent, with a camera for Atari, task by task
    """Returns of full episodes of a run's agent, which samples its actions as in training."""
    torch.manual_seed(args.seed)
    video_dir = Path(args.evaluate) / "videos" if args.capture_video else None
    all_returns = []
    for env_id in args.env_ids:
        group, returns = Group(env_id, args, 1, video_dir), []
        stall_timer.set(args.stall_seconds)
        group.reset(seed=args.seed + args.total_timesteps + args.num_envs)  # no seed of training
        agent = Agent(group.envs, args).to(args.device)
        load_checkpoint(args.evaluate, dict(agent=agent))
        if group.row["obs"].ndim == 2:
            torch.set_num_threads(1)  # the networks are small: a second thread only costs
        state = agent.initial_state(1)
        while len(returns) < args.eval_episodes:
            stall_timer.set(args.stall_seconds)
            dist, _, state = agent(tensors(group.row, args), state)
            group.send(dist.sample()[0].cpu().numpy())
            _, episodes = group.receive()
            returns += [episode["charts/episodic_return"] for episode in episodes]
        group.envs.close()
        if len(args.env_ids) > 1:
            print(f"{env_id}: return {np.mean(returns):.2f} +- {np.std(returns):.2f}")
        all_returns += returns
    return all_returns


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
    for name in ("env_id", "seed", "num_envs", "num_steps", "batch_unrolls", "replay_fraction"):
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
