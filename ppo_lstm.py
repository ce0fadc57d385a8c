# /// script
# requires-python = ">=3.10"
# dependencies = ["ale-py>=0.12", "filelock>=3.13", "gymnasium[classic-control]>=1.4", "numpy", "tensorboard",
#     "tensordict", "torch>=2.6", "tqdm", "tyro>=1"]
# ///
"""PPO with an LSTM: ppo_atari.py without frame stack, and the 5 LSTM details of openai/baselines.

    python ppo_lstm.py --env-id BreakoutNoFrameskip-v4     # every field of Args is a flag; see --help
    python ppo_lstm.py --env-id CartPole-v1                # vectors go through an MLP instead of convolutions
    python ppo_lstm.py --resume runs/NAME                  # go on with a run that was stopped
    python ppo_lstm.py --evaluate runs/NAME                # play full episodes with its agent
    torchrun --nproc-per-node 2 ppo_lstm.py                # two processes that share the environments

Paper    Schulman et al. 2017, https://arxiv.org/abs/1707.06347
Details  numbered as in https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details
Shapes   T = num_steps, N = num_envs / processes; a minibatch is (T, N / num_minibatches)
"""

import argparse
import atexit
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ContextDecorator
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
    env_id: str = "BreakoutNoFrameskip-v4"  # Gymnasium id of the task
    total_timesteps: int = 10_000_000  # environment steps, summed over the parallel environments
    seed: int = 1  # seeds PyTorch and the environments; nothing else is random

    # rollout
    num_envs: int = 8  # parallel environments, divided among torchrun's processes
    num_steps: int = 128  # steps per environment and rollout (T)
    stall_seconds: int = 0  # end a run if an iteration, or a step of --evaluate, takes longer; 0: never
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # GAE: 0 is the one-step advantage, 1 is Monte Carlo
    bootstrap_truncated: bool = False  # at a time limit, add gamma * value to the reward

    # update
    learning_rate: float = 2.5e-4  # Adam's, before annealing
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    update_epochs: int = 4  # passes over each rollout
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
    compile: bool = False  # torch.compile the update, and acting where it is on the device
    track: bool = False  # log to Weights & Biases too (offline with WANDB_MODE=offline)
    wandb_project_name: str = "ppo"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases user or team
    save_every: int = 100  # iterations between checkpoints
    resume: str | None = None  # run folder to continue, with its own arguments where no flag is given
    evaluate: str | None = None  # run folder whose agent to evaluate instead of training
    eval_episodes: int = 10  # full episodes of --evaluate
    capture_video: bool = False  # record the episodes of --evaluate in the run folder

    @property
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return self.total_timesteps // self.batch_size

    def __post_init__(self):
        # differs from ppo.py: minibatches of whole environments
        """Checks the values. tyro reports a ValueError as it reports a wrong flag."""
        for field in fields(self):
            name, x = field.name, getattr(self, field.name)
            least = 1 if field.type is int and name not in ("seed", "stall_seconds") else 0
            if type(x) in (int, float) and not least <= x < np.inf:
                raise ValueError(f"{name} cannot be {x}")
        minibatch_envs, rest = divmod(self.num_envs // WORLD_SIZE, self.num_minibatches)
        rules = {
            "give --resume or --evaluate, not both": not (self.resume and self.evaluate),
            "--capture-video records the episodes of --evaluate": self.evaluate or not self.capture_video,
            "max_grad_norm must be above 0": self.max_grad_norm > 0,
            "stall_seconds must be below 2**22": self.stall_seconds < 2**22,  # 48 days: Windows' limit
            "seed + steps must be below 2**31": self.seed + self.total_timesteps + self.num_envs < 2**31,
            "gamma and gae_lambda must be at most 1": max(self.gamma, self.gae_lambda) <= 1,
            "total_timesteps must be at least num_envs * num_steps": self.num_iterations >= 1,
            f"the {WORLD_SIZE} processes of torchrun must divide num_envs": self.num_envs % WORLD_SIZE == 0,
            "num_minibatches must divide num_envs / processes": rest == 0,
            "a minibatch must hold more than one step": minibatch_envs * self.num_steps != 1,
        }
        for rule, is_kept in rules.items():
            if not is_kept:
                raise ValueError(rule)


def fail(message: str) -> NoReturn:
    """Reports a mistake of the user, not a bug, in one line on stderr; exit code 2."""
    print(f"{SCRIPT}.py: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


# === Environment =============================================================================


class AtariEnvs(gym.vector.VectorEnv):
    """N games, each in a C++ emulator with its own thread, seen as through the wrappers of openai/baselines.

    Observations (N, frames, 84, 84) uint8 are one array that every step overwrites. An episode is a life; the
    next one begins in the step that ends it. info["final_info"] has score and frames of games that are over.
    """

    def __init__(self, spec: dict, num_envs: int, frames: int, video_dir: Path | None = None):
        kept = ("game", "repeat_action_probability", "full_action_space", "max_num_frames_per_episode")
        kwargs = {name: spec[name] for name in kept} | dict(num_envs=1, num_threads=1, stack_num=1)
        kwargs |= dict(reward_clipping=False, use_fire_reset=False, noop_max=31)  # 31 draws from 0 to 30
        kwargs |= dict(frameskip=4, maxpool=True)  # detail 15: 4 frames an action, maximum of the last two
        self.games = [AtariVectorEnv(**kwargs) for _ in range(num_envs)]  # detail 18: 84 x 84 grey pixels
        self.num_envs, self.single_action_space = num_envs, self.games[0].single_action_space
        self.single_observation_space = gym.spaces.Box(0, 255, (frames, 84, 84), np.uint8)
        buttons = self.games[0].ale.get_action_set()
        if buttons[0] != ale_py.Action.NOOP:
            fail(f"{spec['game']} has no no-op, with which openai/baselines begins an episode")
        self.first_actions = (1, 2) if ale_py.Action.FIRE in buttons else ()
        self.stacks = np.zeros((num_envs, frames, 84, 84), np.uint8)
        self.lives, self.scores, self.returns, self.lengths = np.zeros((4, num_envs))
        self.video_dir, self.video, self.camera = video_dir, [], None
        if video_dir:  # a twin of game 0 in colour, played with the same seeds and actions
            if not find_spec("moviepy"):
                fail("--capture-video: pip install moviepy")
            self.camera = AtariVectorEnv(**kwargs, img_height=210, img_width=160, grayscale=False)

    def reset(self, *, seed: int, options: dict | None = None) -> tuple[np.ndarray, dict]:
        self.over, self.ended = np.zeros((2, self.num_envs), bool)
        if self.camera:
            self.camera.reset(seed=seed)
        frames = {n: self._first_frame(n, *game.reset(seed=seed + n)) for n, game in enumerate(self.games)}
        self._begin_episodes(frames)
        return self.stacks, {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        self.send(actions)
        return self.recv()

    def send(self, actions: np.ndarray, games: slice = slice(None)):
        """Lets the emulators of some games work side by side, until recv() collects what step() returns."""
        if not ((0 <= actions) & (actions < self.single_action_space.n)).all():
            raise ValueError(f"not all of {actions} are in {self.single_action_space}")  # ale-py would hang
        for n, action in zip(range(self.num_envs)[games], actions, strict=True):
            self._send(n, action)

    def recv(self, games: slice = slice(None)) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        info, rewards = {}, np.zeros(self.num_envs)
        terminated, truncated, self.ended = np.zeros((3, self.num_envs), bool)
        for n in range(self.num_envs)[games]:
            frame, reward, terminated[n], truncated[n] = self._receive(n)
            self.stacks[n, :-1] = self.stacks[n, 1:]
            self.stacks[n, -1] = frame
            rewards[n] = np.sign(reward)  # detail 19: reward clipping
        if truncated.any():
            info["final_obs"] = self.stacks[games].copy()
        self._begin_episodes(self._next_lives((terminated | truncated).nonzero()[0]))
        if self.ended.any():
            info["final_info"] = dict(episode=dict(r=self.returns, l=self.lengths), _episode=self.ended)
        return self.stacks[games], rewards[games], terminated[games], truncated[games], info

    def _send(self, n: int, action: int):
        self.games[n].send(np.array([action]))
        if self.camera:
            frames, *_ = self.camera.step(np.array([action]))
            self.video.append(frames[0, 0])

    def _receive(self, n: int) -> tuple[np.ndarray, int, bool, bool]:
        """Frame, raw reward, terminated (a life or the game), truncated; notes whether the game is over."""
        frames, rewards, terminated, truncated, info = self.games[n].recv()  # arrays of one game
        lives = info["lives"][0]
        lost_life = 0 < lives < self.lives[n]
        self.lives[n] = lives
        self.scores[n] += rewards[0]
        self.over[n] = terminated[0] or truncated[0]
        if self.over[n]:
            self.ended[n], self.returns[n] = True, self.scores[n]
            self.lengths[n] = info["episode_frame_number"][0]
            if self.camera:
                self._save_video()
        return frames[0, 0], rewards[0], terminated[0] or lost_life, truncated[0]

    def _next_lives(self, games: Sequence[int]) -> dict[int, np.ndarray]:
        """First frames of the next lives, after one no-op, or of new games, which the emulators begin."""
        frames = {}
        for n in games:  # detail 16: a lost life ends the episode, but does not reset the emulator
            self._send(n, 0)
        for n in games:
            if self.over[n]:
                obs, *_, info = self.games[n].recv()
                frames[n] = self._first_frame(n, obs, info)
            else:
                frames[n], *_ = self._receive(n)
        over = [n for n in games if self.over[n]]
        return frames | self._next_lives(over) if over else frames

    def _first_frame(self, n: int, frames: np.ndarray, info: dict) -> np.ndarray:
        """First frame of a game that was just reset."""
        while info["episode_frame_number"][0] == 0:  # detail 14: 1 to 30 no-ops, where emulators draw 0 to 30
            frames, info = self.games[n].reset()
            if self.camera:
                self.camera.reset()
        self.lives[n], self.scores[n], self.over[n] = info["lives"][0], 0, False
        return frames[0, 0]

    def _begin_episodes(self, frames: dict[int, np.ndarray]):
        """Begins the episodes of some games, side by side, with the first frame of each."""
        for action in self.first_actions:  # detail 17: FIRE, which starts most games, and the action after it
            for n in frames:
                self._send(n, action)
            again = []
            for n in frames:
                frames[n], _, terminated, truncated = self._receive(n)
                if terminated or truncated:
                    again.append(n)
            frames |= self._next_lives(again)
        for n, frame in frames.items():
            self.stacks[n] = frame  # detail 20: a stack of frames, at first the same

    def _save_video(self):
        from moviepy import ImageSequenceClip

        self.video_dir.mkdir(exist_ok=True)
        path = self.video_dir / f"{len(list(self.video_dir.iterdir()))}.mp4"
        ImageSequenceClip(self.video, fps=15).write_videofile(path, logger=None)  # every 4th of 60 a second
        self.video = []


def make_env(args: Args, num_envs: int, video_dir: Path | None = None) -> gym.vector.VectorEnv:
    # differs from ppo.py: Atari games too
    """Vectorized environments, each reset within the step that ends its episode."""
    gym.register_envs(ale_py)
    spec = gym.registry.get(args.env_id)
    if spec and spec.entry_point == "ale_py.env:AtariEnv":
        if spec.kwargs["frameskip"] not in (1, 4):
            fail(f"{args.env_id} skips a random number of frames: take a NoFrameskip-v4 or an ALE/...-v5 id")
        return AtariEnvs(spec.kwargs, num_envs, frames=1, video_dir=video_dir)

    def make() -> gym.Env:
        env = gym.make(args.env_id, **(dict(render_mode="rgb_array") if video_dir else {}))
        if video_dir:
            env = gym.wrappers.RecordVideo(env, str(video_dir), lambda n: n < args.eval_episodes)
        return gym.wrappers.RecordEpisodeStatistics(env)

    same_step = gym.vector.AutoresetMode.SAME_STEP
    try:  # detail 1: vectorized architecture. Slow environments gain from AsyncVectorEnv.
        envs = gym.vector.SyncVectorEnv([make] * num_envs, copy=False, autoreset_mode=same_step)
    except (gym.error.Error, ImportError) as error:
        fail(f"--env-id {args.env_id}: {error}")
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    if not isinstance(action_space, gym.spaces.Discrete) or action_space.start != 0:
        fail(f"{args.env_id} acts in {action_space}: try ppo_continuous.py, or Discrete actions from 0")
    if not isinstance(obs_space, gym.spaces.Box) or len(obs_space.shape) != 1:
        fail(f"{args.env_id} observes {obs_space}: this script takes Atari games and vectors")
    return envs


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


class Agent(nn.Module):  # differs from ppo.py: an LSTM between the network and its heads
    amp = False  # run self.network in bfloat16

    def __init__(self, envs: gym.vector.VectorEnv):
        super().__init__()
        obs_shape, hidden_size = envs.single_observation_space.shape, 128
        # first, as cuDNN wants its weights at the beginning of what flatten() makes
        self.lstm = nn.LSTM(512 if len(obs_shape) == 3 else 64, hidden_size)
        for name, parameter in self.lstm.named_parameters():  # detail 32: orthogonal weights, zero biases
            nn.init.orthogonal_(parameter) if "weight" in name else nn.init.zeros_(parameter)
        if len(obs_shape) == 3:
            self.network = nn.Sequential(  # detail 21: the Nature CNN, here of a single frame
                layer_init(nn.Conv2d(1, 32, 8, stride=4)), nn.ReLU(inplace=True),
                layer_init(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU(inplace=True),
                layer_init(nn.Conv2d(64, 64, 3, stride=1)), nn.ReLU(inplace=True), nn.Flatten(),
                layer_init(nn.Linear(64 * 7 * 7, 512)), nn.ReLU(inplace=True),
            ).to(memory_format=torch.channels_last)  # fmt: skip
        else:
            self.network = nn.Sequential(
                layer_init(nn.Linear(obs_shape[0], 64)), nn.Tanh(),
                layer_init(nn.Linear(64, 64)), nn.Tanh(),
            )  # fmt: skip
        self.actor = layer_init(nn.Linear(hidden_size, int(envs.single_action_space.n)), std=0.01)
        self.critic = layer_init(nn.Linear(hidden_size, 1), std=1.0)

    def initial_state(self, num_envs: int) -> Tensor:
        """Hidden and cell state (2, 1, N, hidden_size)."""
        return self.actor.weight.new_zeros(2, 1, num_envs, self.lstm.hidden_size)  # detail 33: zeros

    def forward(self, obs: Tensor, state: Tensor, starts: Tensor) -> tuple[Categorical, Tensor, Tensor]:
        """Policy and value (T, N) of observations (T, N, ...), and the state after them.

        starts: (T, N), true where an episode begins. state: (2, 1, N, hidden_size), before the first step.
        """
        x = obs.flatten(0, 1)
        if obs.ndim == 5:  # detail 22: scaling to [0, 1]
            x = x.to(torch.float32, memory_format=torch.channels_last).div_(255)
        with torch.autocast(obs.device.type, torch.bfloat16, self.amp):
            x = self.network(x.float())
        x = x.float().unflatten(0, obs.shape[:2])
        outputs = []
        for steps in sequences(starts):
            state = state * ~starts[steps.start, :, None]  # detail 34: reset at the start of an episode
            output, (hidden, cell) = self.lstm(x[steps], (state[0], state[1]))
            state = torch.stack((hidden, cell))
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
    """Loss of a minibatch of tensors (T, M, ...) of M environments, and the diagnostics to log."""
    # differs from ppo.py: detail 36: states are rebuilt from the one saved before the rollout
    dist, value, _ = agent(batch["obs"], batch["state"], batch["starts"])
    logratio = dist.log_prob(batch["actions"]) - batch["logprobs"]
    ratio, advantages = logratio.exp(), batch["advantages"]
    if args.norm_adv:  # detail 7: advantage normalization, per minibatch (with the blog's unbiased std)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    clipped_ratio = ratio.clamp(1 - clip, 1 + clip)  # detail 8: clipped surrogate objective
    pg_loss = -torch.min(advantages * ratio, advantages * clipped_ratio).mean()

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
        info |= dict(clipfrac=((ratio - 1).abs() > clip).float().mean())
    return loss, info


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
@torch.no_grad()  # except in update()
def train(args: Args, stop: Sequence[int] = ()) -> Path:
    """Trains; returns the run folder. With a signal's number in stop, saves and exits after an iteration."""
    if args.device == "cuda":
        torch.cuda.set_device(LOCAL_RANK)
    if WORLD_SIZE > 1:
        # imported later, as by an optimizer, it would keep the group, whose threads may then abort the exit
        from torch import _dynamo  # noqa: F401

        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo")
        atexit.register(torch.distributed.destroy_process_group)
    torch.manual_seed(args.seed)
    torch.set_flush_denormal(True)  # denormal numbers are slow, and Adam's moments of dead units become such
    keep_freed_memory()
    T, N = args.num_steps, args.num_envs // WORLD_SIZE
    envs = make_env(args, N)
    agent = Agent(envs).to(args.device)
    is_game = len(envs.single_observation_space.shape) == 3
    if not is_game:
        torch.set_num_threads(1)  # the networks are small: a second thread only costs
    agent.amp = args.amp
    flat = flatten(list(agent.parameters()))
    lr = torch.tensor(args.learning_rate, device=args.device)  # a tensor, or annealing would recompile
    clip = torch.tensor(args.clip_coef, device=args.device)  # for the same reason
    # detail 3: Adam's epsilon. Capturable, as a CUDA graph may hold its step.
    optimizer = torch.optim.Adam([flat], lr=lr, eps=1e-5, fused=True, capturable=True)

    run_name = f"{args.env_id}__{SCRIPT}__{args.seed}__{time.time_ns()}".replace("/", "-").replace(":", "-")
    run_dir = Path(args.resume or f"runs/{run_name}")
    parts = dict(agent=agent, optimizer=optimizer)  # a checkpoint holds the state of each
    saved, last_returns = 0, []  # iterations in the last checkpoint, last 100 returns of this process
    if RANK == 0:
        run_lock = lock(run_dir)  # noqa: F841  train() holds it until it returns
    if args.resume:
        checkpoint = load_checkpoint(args.resume, parts, ("iteration", "last_returns"))
        saved, last_returns = checkpoint["iteration"], checkpoint["last_returns"]
        if over_processes("MAX", saved) != saved:
            fail(f"{args.resume}: the processes of torchrun read different checkpoints")
        optimizer.param_groups[0]["lr"] = lr  # not the checkpoint's
    first_iteration, first_step, start = saved, saved * args.batch_size, time.time()
    if RANK == 0:
        writer, bar = start_logging(args, run_dir, first_step)
    over_processes("MAX", 0)  # all wait while Weights & Biases asks the first for a login
    stall_timer.set(args.stall_seconds)

    def act(obs: Tensor, state: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # differs from ppo_atari.py: recurrent
        dist, value, state = agent(obs, state, starts)
        action = dist.sample()
        return action, dist.log_prob(action), value, state

    @torch.enable_grad()
    def update(batch: dict[str, Tensor], clip: Tensor) -> dict[str, Tensor]:
        loss, info = ppo_loss(agent, batch, clip, args)
        loss.backward()
        if WORLD_SIZE > 1:  # auxiliary detail 2: parallel gradients, averaged over the processes of torchrun
            torch.distributed.all_reduce(flat.grad.div_(WORLD_SIZE))
        norm = flat.grad.norm()  # detail 11: clipping of the global gradient norm
        flat.grad.mul_((args.max_grad_norm / (norm + 1e-6)).clamp(max=1))
        optimizer.step()
        flat.grad.zero_()
        return info

    if args.compile:
        act, update = torch.compile(act), torch.compile(update)
    if args.compile and args.device == "cuda" and WORLD_SIZE == 1:  # NCCL in a CUDA graph is untried
        from tensordict.nn import CudaGraphModule

        act = CudaGraphModule(act, warmup=4)  # not update(), which asks where episodes begin

    obs_dtype = torch.uint8 if is_game else torch.float32
    obs = torch.zeros((T, N, *envs.single_observation_space.shape), dtype=obs_dtype, device=args.device)
    starts = torch.zeros((T, N), dtype=torch.bool, device=args.device)
    actions = torch.zeros((T, N), dtype=torch.int64, device=args.device)
    logprobs, values = torch.zeros((2, T, N), device=args.device)
    rewards, dones = np.zeros((2, T, N), np.float32)
    next_obs, _ = envs.reset(seed=args.seed + first_step + RANK * N)  # resumed runs begin new episodes
    next_starts, state = np.ones(N, bool), agent.initial_state(N)
    for iteration in range(first_iteration, args.num_iterations):
        stall_timer.set(args.stall_seconds)
        # Each iteration has a seed of its own, so no random state is saved. Python salts no hash of integers.
        torch.manual_seed(hash((args.seed, iteration, RANK)))
        frac = 1 - iteration / args.num_iterations
        lr.fill_(args.learning_rate * (frac if args.anneal_lr else 1))  # detail 4: learning rate annealing
        clip.fill_(args.clip_coef * (frac if args.anneal_clip else 1))  # auxiliary detail 1: clip annealing
        step, episodes, clipfracs = iteration * args.batch_size, [], []

        # 1. rollout
        # differs from ppo.py: recurrent
        initial_state = state
        for t in range(T):
            obs[t], starts[t] = torch.from_numpy(next_obs), torch.from_numpy(next_starts)
            now = slice(t, t + 1)
            actions[now], logprobs[now], values[now], state = act(obs[now], state, starts[now])
            next_obs, rewards[t], terminated, truncated, info = envs.step(actions[t].cpu().numpy())
            next_starts = terminated | truncated
            dones[t] = next_starts
            step += args.num_envs
            episodes += [(step, scalars) for scalars in ended_episodes(info)]
            if args.bootstrap_truncated and (cut := truncated & ~terminated).any():  # beyond the blog
                final_obs = torch.as_tensor(np.stack(info["final_obs"][cut]), device=args.device)
                no_starts = torch.zeros((1, len(final_obs)), dtype=torch.bool, device=args.device)
                _, value, _ = agent(final_obs[None], state[:, :, torch.from_numpy(cut)], no_starts)
                rewards[t, cut] += args.gamma * value[0].cpu().numpy()

        # 2. advantages
        # differs from ppo_atari.py: recurrent, and environments stay apart
        batch = dict(obs=obs, starts=starts, actions=actions, logprobs=logprobs, values=values)
        after = torch.as_tensor(next_obs, device=args.device)[None]
        next_value = agent(after, state, torch.zeros_like(starts[:1]))[1][0].cpu().numpy()
        advantages = compute_gae(
            rewards, values.cpu().numpy(), dones, next_value, args.gamma, args.gae_lambda
        )
        batch["advantages"] = torch.as_tensor(advantages, device=args.device)
        batch["returns"] = batch["advantages"] + batch["values"]

        # 3. update
        # differs from ppo.py: detail 35: minibatches of whole environments, shuffled
        for _ in range(args.update_epochs):
            shuffled = torch.randperm(N, device=args.device)  # detail 6: shuffled minibatches
            for indices in shuffled.chunk(args.num_minibatches):
                minibatch = {name: x[:, indices] for name, x in batch.items()}
                losses = update(minibatch | dict(state=initial_state[:, :, indices]), clip)
                clipfracs.append(losses["clipfrac"])
            if args.target_kl is not None:  # auxiliary detail 3: early stopping
                if over_processes("SUM", losses["approx_kl"]) / WORLD_SIZE > args.target_kl:
                    break

        # 4. log and save
        scalars = {f"losses/{name}": x.item() for name, x in losses.items()}
        if over_processes("MAX", not np.isfinite(list(scalars.values())).all()):  # in any process
            good = f"{run_dir}/checkpoint.pt, of iteration {saved}" if saved else "none"
            message = f"iteration {iteration + 1}: not finite: {scalars}; last good checkpoint: {good}"
            sys.exit(message if RANK == 0 else 1)
        scalars["losses/clipfrac"] = torch.stack(clipfracs).mean().item()
        scalars["losses/explained_variance"] = 1 - (batch["advantages"].var() / batch["returns"].var()).item()
        scalars["charts/learning_rate"] = lr.item()
        scalars["charts/SPS"] = (step - first_step) / (time.time() - start)
        last_returns = (last_returns + [x["charts/episodic_return"] for _, x in episodes])[-100:]
        signum = int(over_processes("MAX", stop[0] if stop else 0))
        if RANK == 0:
            for end, episode in episodes:
                log(writer, end, episode)
            log(writer, step, scalars)
            bar.set_postfix_str(f"return {np.mean(last_returns or np.nan):.1f}", refresh=False)
            bar.update(step - bar.n)
            if signum or (iteration + 1) % args.save_every == 0 or iteration + 1 == args.num_iterations:
                saved = iteration + 1
                writer.flush()
                save_checkpoint(run_dir, args, parts, iteration=saved, last_returns=last_returns)
        if signum:
            sys.exit(128 + signum)
    envs.close()
    return run_dir


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


def keep_freed_memory():
    """Keeps glibc from returning freed memory to the kernel, page by page: a fifth of an update on a CPU."""
    if sys.platform == "linux":
        mallopt = ctypes.CDLL(None).mallopt
        if not mallopt(-3, 2**30):  # M_MMAP_THRESHOLD
            mallopt(-3, 2**25)  # the most that older versions take
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


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
    # differs from ppo.py: recurrent
    """Returns of full episodes of a run's agent, which samples its actions as in training."""
    torch.manual_seed(args.seed)
    envs = make_env(args, 1, Path(args.evaluate) / "videos" if args.capture_video else None)
    agent, returns = Agent(envs).to(args.device), []
    load_checkpoint(args.evaluate, dict(agent=agent))
    agent.amp = args.amp
    stall_timer.set(args.stall_seconds)
    obs, _ = envs.reset(seed=args.seed + args.total_timesteps + args.num_envs)  # no seed of training
    starts, state = np.ones(1, bool), agent.initial_state(1)
    if obs.ndim == 2:
        torch.set_num_threads(1)  # the networks are small: a second thread only costs
    while len(returns) < args.eval_episodes:
        stall_timer.set(args.stall_seconds)
        now = torch.as_tensor(obs, device=args.device)[None]
        dist, _, state = agent(now, state, torch.as_tensor(starts, device=args.device)[None])
        obs, _, terminated, truncated, info = envs.step(dist.sample()[0].cpu().numpy())
        starts = terminated | truncated
        returns += [episode["charts/episodic_return"] for episode in ended_episodes(info)]
    envs.close()
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
    """The command line. A run that is resumed or evaluated brings its own arguments as defaults."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume", "--evaluate", dest="run_dir")
    run_dir = parser.parse_known_args()[0].run_dir
    saved = tyro.MISSING_NONPROP if run_dir is None else load_checkpoint(run_dir)["args"]
    args = tyro.cli(Args, default=saved)
    for name in ("env_id", "seed", "num_envs", "num_steps"):
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
