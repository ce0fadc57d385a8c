# /// script
# requires-python = ">=3.10"
# dependencies = ["ale-py>=0.12", "filelock>=3.15", "gymnasium>=1.1", "numpy", "tensorboard>=2.18",
#     "tensordict>=0.8.3", "torch>=2.6", "tqdm>=4.64", "tyro>=1.0.16"
# ]
# ///
# ruff: noqa: E402  (the second half of the file has its own imports)
"""PPO for Atari games: ppo.py and the 9 Atari details of openai/baselines, on ale-py's C++ emulators.

    python ppo_atari.py --env-id BreakoutNoFrameskip-v4     # every field of Args is a flag; see --help
    python ppo_atari.py --resume runs/NAME                  # go on with a run that was stopped
    python ppo_atari.py --evaluate runs/NAME                # play whole games with its agent
    torchrun --nproc-per-node 4 ppo_atari.py                # four processes that share the environments

Paper    Schulman et al. 2017, https://arxiv.org/abs/1707.06347
Details  numbered as in https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details
Shapes   of one process: T = num_steps, N = num_envs / processes, B = T * N, M = B / num_minibatches
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # before torch: its idle threads leave emulators the cores

import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from ale_py.vector_env import AtariVectorEnv
from torch import Tensor

RANK = int(os.environ.get("RANK", 0))  # number of this process among torchrun's
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # how many there are

# === Arguments ===============================================================================


@dataclass
class Args:
    env_id: str = "BreakoutNoFrameskip-v4"  # Gymnasium id of the task
    env_kwargs: str = "{}"  # arguments of the environment in JSON, such as '{"full_action_space": true}'
    total_timesteps: int = 10_000_000  # environment steps, summed over the parallel environments
    seed: int = 1  # of Python, NumPy, PyTorch and the environments

    # rollout
    num_envs: int = 8  # parallel environments, divided among torchrun's processes
    num_steps: int = 128  # steps per environment and rollout (T)
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # GAE: 0 is the one-step advantage, 1 is Monte Carlo
    bootstrap_truncated: bool = False  # at time limits, add gamma * value of the last observation to rewards

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
    target_kl: float | None = None  # skip the epochs that are left if the last minibatch's KL is above this

    # run
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"  # where the networks run
    amp: bool = False  # run Agent.network in bfloat16
    compile: bool = False  # torch.compile acting and the update
    track: bool = False  # log to Weights & Biases too (offline with WANDB_MODE=offline)
    wandb_project_name: str = "ppo"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases user or team
    save_every: int = 100  # iterations between checkpoints; there is one every ten minutes, too
    stall_seconds: int = 0  # exit if an iteration, or a step of --evaluate, takes longer; 0: no limit
    resume: str | None = None  # run folder to continue, with its own arguments where no flag is given
    evaluate: str | None = None  # run folder whose agent to evaluate instead of training
    eval_episodes: int = 10  # full episodes of --evaluate
    capture_video: bool = False  # record the episodes of --evaluate in the run folder

    @property
    def batch_size(self) -> int:  # environment steps of an iteration, over all processes
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return self.total_timesteps // self.batch_size

    def __post_init__(self):
        check(self)


# === Environment =============================================================================


class AtariEnvs(gym.vector.VectorEnv):
    """N games, each in a C++ emulator with its own thread, seen as through the wrappers of openai/baselines.

    Observations are (N, frames, 84, 84) uint8. An episode is a life; the next one begins in the step that
    ends it. info["final_info"] has score and frames of games that are over.
    """

    def __init__(self, spec: dict, num_envs: int, frames: int, video_dir: Path | None = None):
        kept = ("game", "repeat_action_probability", "full_action_space", "max_num_frames_per_episode")
        kwargs = {name: spec[name] for name in kept} | dict(num_envs=1, num_threads=1, stack_num=1)
        kwargs |= dict(reward_clipping=False, use_fire_reset=False, noop_max=31)  # 31 draws from 0 to 30
        kwargs |= dict(frameskip=4, maxpool=True)  # detail 15: 4 frames an action, maximum of the last two
        self.games = [AtariVectorEnv(**kwargs) for _ in range(num_envs)]  # detail 18: 84 x 84 grey pixels
        self.num_envs, self.single_action_space = num_envs, self.games[0].single_action_space
        self.single_observation_space = gym.spaces.Box(0, 255, (frames, 84, 84), np.uint8)
        self.without_noops = AtariVectorEnv(**kwargs | dict(noop_max=1))  # is reset once, and never played
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
        _, info = self.without_noops.reset()
        self.frames_before = info["episode_frame_number"][0]  # that some games play by themselves
        if self.camera:
            self.camera.reset(seed=seed)
            self.video = []
        frames = {n: self._first_frame(n, *game.reset(seed=seed + n)) for n, game in enumerate(self.games)}
        self._begin_episodes(frames)
        return self.stacks.copy(), {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        if not ((0 <= actions) & (actions < self.single_action_space.n)).all():
            raise ValueError(f"not all of {actions} are in {self.single_action_space}")  # ale-py would hang
        for n, action in enumerate(actions):  # the emulators work side by side
            self._send(n, action)
        info, rewards = {}, np.zeros(self.num_envs)
        terminated, truncated, self.ended = np.zeros((3, self.num_envs), bool)
        for n in range(self.num_envs):
            frame, reward, terminated[n], truncated[n] = self._receive(n)
            self.stacks[n, :-1] = self.stacks[n, 1:]
            self.stacks[n, -1] = frame
            rewards[n] = np.sign(reward)  # detail 19: reward clipping
        if truncated.any():
            info["final_obs"] = self.stacks.copy()
        self._begin_episodes(self._next_lives((terminated | truncated).nonzero()[0]))
        if self.ended.any():
            info["final_info"] = dict(episode=dict(r=self.returns, l=self.lengths), _episode=self.ended)
        return self.stacks.copy(), rewards, terminated, truncated, info

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
        # detail 14: 1 to 30 no-ops, where emulators draw 0 to 30
        while info["episode_frame_number"][0] == self.frames_before:
            frames, info = self.games[n].reset()
            if self.camera:
                self.camera.reset()
        self.lives[n], self.scores[n], self.over[n] = info["lives"][0], 0, False
        return frames[0, 0]

    def _begin_episodes(self, frames: dict[int, np.ndarray]):
        """Begins the episodes of some games, side by side, with the first frame of each."""
        for action in self.first_actions:  # detail 17: FIRE, which some games wait for, and action 2
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
    """Vectorized games, each reset within the step that ends its episode."""
    gym.register_envs(ale_py)
    try:
        spec = gym.spec(args.env_id)
    except (gym.error.Error, ImportError, TypeError) as error:
        fail_to_make(args.env_id, error)
    check_game(args, spec)
    # detail 1: vectorized architecture
    return AtariEnvs(spec.kwargs | json.loads(args.env_kwargs), num_envs, 4, video_dir)


# === Agent ===================================================================================


class Categorical:
    """torch.distributions.Categorical over the last axis of logits, with only what is used here: faster.

    Another distribution needs the same methods, with log_prob and entropy summed over action dimensions.
    """

    def __init__(self, logits: Tensor):
        self.logprobs = logits.log_softmax(-1)

    def sample(self) -> Tensor:
        """Actions (...) by the Gumbel-max trick: argmax(logprobs + noise), with noise = -log(exponential)."""
        return (self.logprobs - torch.empty_like(self.logprobs).exponential_().log_()).argmax(-1)

    def log_prob(self, action: Tensor) -> Tensor:
        return self.logprobs.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        return -(self.logprobs.exp() * self.logprobs).sum(-1)


def layer_init(layer: nn.Module, std: float = 2**0.5) -> nn.Module:
    nn.init.orthogonal_(layer.weight, std)  # detail 2: orthogonal weights, zero biases
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    amp = False  # run self.network in bfloat16

    def __init__(self, envs: gym.vector.VectorEnv):
        super().__init__()
        self.network = nn.Sequential(  # detail 21: the Nature CNN, shared
            layer_init(nn.Conv2d(4, 32, 8, stride=4)), nn.ReLU(inplace=True),
            layer_init(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU(inplace=True),
            layer_init(nn.Conv2d(64, 64, 3, stride=1)), nn.ReLU(inplace=True), nn.Flatten(),
            layer_init(nn.Linear(64 * 7 * 7, 512)), nn.ReLU(inplace=True),
        ).to(memory_format=torch.channels_last)  # fmt: skip
        self.actor = layer_init(nn.Linear(512, int(envs.single_action_space.n)), std=0.01)
        self.critic = layer_init(nn.Linear(512, 1), std=1.0)

    def forward(self, obs: Tensor) -> tuple[Categorical, Tensor]:
        """Policy and value (N,) of observations (N, 4, 84, 84) uint8."""
        x = obs.to(torch.float32, memory_format=torch.channels_last).div_(255)  # detail 22: scaling to [0, 1]
        with torch.autocast(obs.device.type, torch.bfloat16, self.amp):
            hidden = self.network(x)
        return Categorical(self.actor(hidden.float())), self.critic(hidden.float()).squeeze(-1)


# === Algorithm ===============================================================================


def compute_gae(rewards, values, dones, next_value, gamma: float, lam: float) -> np.ndarray:
    """Advantages (T, N) as in eq. 16 of Schulman et al. 2016, https://arxiv.org/abs/1506.02438.

    rewards, values, dones: (T, N); dones[t] is 1 if step t ended an episode. next_value: (N,), at step T.
    """
    next_values = np.concatenate((values[1:], next_value[None]))
    deltas = rewards + gamma * (1 - dones) * next_values - values
    advantages, advantage = np.zeros_like(deltas), 0
    for t in reversed(range(len(deltas))):  # detail 5: generalized advantage estimation
        advantages[t] = advantage = deltas[t] + gamma * lam * (1 - dones[t]) * advantage
    return advantages


def ppo_loss(agent: Agent, batch: dict[str, Tensor], clip: float | Tensor, args: Args) -> tuple[Tensor, dict]:
    """Loss of a minibatch of tensors (M, ...), and the diagnostics to log. clip: the clip range, annealed."""
    dist, value = agent(batch["obs"])
    logratio = dist.log_prob(batch["actions"]) - batch["logprobs"]
    ratio, advantages = logratio.exp(), batch["advantages"]
    if args.norm_adv:  # detail 7: advantage normalization, per minibatch
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
    metrics = dict(policy_loss=pg_loss.detach(), value_loss=v_loss.detach(), entropy=entropy.detach())
    with torch.no_grad():  # detail 12: debug variables; KL as in http://joschu.net/blog/kl-approx.html
        metrics["old_approx_kl"] = -logratio.mean()
        metrics["approx_kl"] = (ratio - 1 - logratio).mean()
        metrics["clipfrac"] = ((ratio - 1).abs() > clip).float().mean()
    return loss, metrics


# === Training ================================================================================


def train(args: Args) -> Path:
    """Trains an agent; returns the run folder."""
    start_process(args)  # seeds all that is random, takes a GPU, joins the other processes of torchrun
    keep_freed_memory()
    T, N, device = args.num_steps, args.num_envs // WORLD_SIZE, args.device
    envs = make_env(args, N)
    agent = Agent(envs).to(device)
    agent.amp = args.amp
    # For speed, all parameters become views of flat, and their gradients views of flat.grad. From here on,
    # agent.to() or agent.zero_grad() would break it. To do without, give agent.parameters() to the optimizer
    # and to clip_grad_norm_(), call the optimizer's zero_grad(), and average gradients over the processes.
    flat = flatten(agent.parameters())
    # Tensors, filled anew in each iteration, as --compile would recompile for each new number.
    lr, clip = (torch.tensor(float(x), device=device) for x in (args.learning_rate, args.clip_coef))
    optimizer = torch.optim.Adam([flat], lr=lr, eps=1e-5, fused=True, capturable=True)  # detail 3: epsilon
    run = Run(args, agent=agent, optimizer=optimizer)  # folder, logs, checkpoints; --resume loads both
    optimizer.param_groups[0]["lr"] = lr  # --resume loads a copy, which lr.fill_() would not reach

    @torch.no_grad()
    def act(obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dist, value = agent(obs)
        action = dist.sample()
        return action, dist.log_prob(action), value

    def update(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        flat.grad.zero_()  # in place, as the parameters' gradients are views of it
        loss, metrics = ppo_loss(agent, batch, clip, args)
        loss.backward()
        if WORLD_SIZE > 1:  # auxiliary detail 2: parallel gradients, averaged over the processes of torchrun
            flat.grad.div_(WORLD_SIZE)
            torch.distributed.all_reduce(flat.grad)  # sums in place
        norm = flat.grad.norm()  # detail 11: clipping of the global gradient norm
        flat.grad.mul_((args.max_grad_norm / (norm + 1e-6)).clamp(max=1))
        optimizer.step()
        return metrics | dict(grad_norm=norm)

    act, update = compiled(act, args), compiled(update, args)  # unchanged without --compile
    obs = torch.zeros((T, N, 84, 84, 4), dtype=torch.uint8, device=device)
    obs = obs.permute(0, 1, 4, 2, 3)  # (T, N, 4, 84, 84), channels last in memory
    actions = torch.zeros((T, N), dtype=torch.int64, device=device)
    logprobs, values = torch.zeros((2, T, N), device=device)
    rewards = np.zeros((T, N), np.float32)
    dones = np.zeros((T, N), np.float32)
    next_obs, _ = envs.reset(seed=run.seed)  # args.seed; another in each process, and after --resume
    # Counts from 0, or where --resume goes on. Before each iteration, Python, NumPy and PyTorch are seeded by
    # args.seed, RANK and iteration (environments are not); after it, a checkpoint is saved if due.
    for iteration in run.iterations():
        frac = 1 - iteration / args.num_iterations
        lr.fill_(args.learning_rate * (frac if args.anneal_lr else 1))  # detail 4: learning rate annealing
        clip.fill_(args.clip_coef * (frac if args.anneal_clip else 1))  # auxiliary detail 1: clip annealing

        # 1. rollout
        for t in range(T):
            obs[t] = torch.as_tensor(next_obs)
            actions[t], logprobs[t], values[t] = act(obs[t])
            next_obs, rewards[t], terminated, truncated, info = envs.step(actions[t].cpu().numpy())
            dones[t] = terminated | truncated
            run.count_steps(args.num_envs, info)  # of all processes; keeps the returns of ended episodes
            cut = truncated & ~terminated
            if args.bootstrap_truncated and cut.any():  # not in the paper
                with torch.no_grad():
                    _, value = agent(torch.as_tensor(info["final_obs"][cut], device=device))
                rewards[t, cut] += args.gamma * value.cpu().numpy()

        # 2. advantages
        batch = dict(obs=obs, actions=actions, logprobs=logprobs, values=values)
        with torch.no_grad():
            _, next_value = agent(torch.as_tensor(next_obs, device=device))
        advantages = compute_gae(
            rewards, values.cpu().numpy(), dones, next_value.cpu().numpy(), args.gamma, args.gae_lambda
        )
        batch["advantages"] = torch.as_tensor(advantages, device=device)
        batch["returns"] = batch["advantages"] + batch["values"]
        batch = {name: x.flatten(0, 1) for name, x in batch.items()}  # (T, N, ...) -> (B, ...)

        # 3. update
        clipfracs = []
        for _ in range(args.update_epochs):
            shuffled = torch.randperm(T * N, device=device)  # detail 6: shuffled minibatches
            for indices in shuffled.chunk(args.num_minibatches):
                metrics = update({name: x[indices] for name, x in batch.items()})
                clipfracs.append(metrics["clipfrac"])
            if args.target_kl is not None:  # auxiliary detail 3: early stopping, of all processes together
                if over_processes("SUM", metrics["approx_kl"]) / WORLD_SIZE > args.target_kl:
                    break

        # 4. log
        metrics["clipfrac"] = torch.stack(clipfracs).mean()  # the others are those of the last minibatch
        explained = 1 - batch["advantages"].var() / batch["returns"].var()  # advantages: returns - values
        scalars = {"losses/explained_variance": explained, "charts/learning_rate": lr}
        # Logs metrics as losses/...; where one is not finite, the run ends and names the arrays that are not.
        run.log(metrics, scalars, observations=obs, rewards=rewards, values=values)
    envs.close()
    return run.folder


# === Evaluation ==============================================================================


def load_agent(args: Args) -> tuple[gym.vector.VectorEnv, Agent]:
    """One environment and the agent of the run args.evaluate, for evaluate() and for notebooks."""
    envs = make_env(args, 1, Path(args.evaluate) / "videos" if args.capture_video else None)
    agent = Agent(envs).to(args.device)
    load_checkpoint(args.evaluate, dict(agent=agent))
    agent.amp = args.amp
    return envs, agent


@torch.no_grad()
def evaluate(args: Args) -> list[float]:
    """Returns of full episodes of the agent of the run args.evaluate, which samples as in training."""
    seed_all(args.seed)
    envs, agent = load_agent(args)
    returns = []
    obs, _ = envs.reset(seed=args.seed + args.total_timesteps + args.num_envs)  # a seed not used in training
    for _ in evaluation_steps(args, returns):  # while there are fewer than args.eval_episodes
        dist, _ = agent(torch.as_tensor(obs, device=args.device))
        obs, _, _, _, info = envs.step(dist.sample().cpu().numpy())
        returns.extend(episode["charts/episodic_return"] for episode in ended_episodes(info))
    envs.close()
    return returns


# === From here on nothing is the algorithm's: the run's folder, its processes, the command line ===

import argparse
import atexit
import ctypes
import faulthandler
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from typing import NoReturn, TextIO
from zipfile import ZipFile

import tyro
from filelock import FileLock, Timeout
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = Path(__file__).stem
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))  # rank on this machine; each has a GPU
FIXED = ("env_id", "env_kwargs", "seed", "num_envs", "num_steps")  # what --resume cannot change
HEARTBEATS: dict[str, float] = {}  # when each loop last went on


class Run:
    """The folder of a run: the state of its parts, its logs, and what was counted so far.

    parts: objects whose state_dict() a checkpoint holds. Some scripts use more: numbers, saved beside them;
    shown, tag of the returns in the progress bar; log_every, iterations between logs of all but episodes.
    """

    stop_signal = 0  # a signal that asks for the end of the process after its iteration

    def __init__(
        self, args: Args, numbers: dict | None = None, shown="charts/episodic_return", log_every=1, **parts
    ):
        name = f"{args.env_id[:99]}__{SCRIPT}__{args.seed}__{time.time_ns()}"  # 255 bytes at most
        name = name.replace("/", "-").replace(":", "-").replace(",", "+")  # W&B refuses these three
        self.args, self.parts, self.shown, self.log_every = args, parts, shown, log_every
        self.folder = Path(args.resume or f"runs/{name}").absolute()  # a step may change the working folder
        self.numbers = dict(iteration=0, last_returns=[]) | (numbers or {})
        if RANK == 0:
            self.lock = lock(self.folder)
        if args.resume:
            state = load_checkpoint(args.resume, parts, self.numbers)
            self.numbers = {name: state[name] for name in self.numbers}
            if over_processes("MAX", self.numbers["iteration"]) != self.numbers["iteration"]:
                fail(f"{args.resume}: the processes of torchrun read different checkpoints")
            self.tell_of_end(state["args"].total_timesteps)
        self.step = self.numbers["iteration"] * args.batch_size
        self.seed = args.seed + self.step + RANK * args.num_envs // WORLD_SIZE  # of the next episodes
        self.episodes, self.saved_at = [], time.monotonic()
        self.timed_from = None  # step and time at the end of the first iteration
        if RANK == 0:
            self.writer = start_logging(args, self.folder, self.step)
            self.bar = progress_bar(total=args.num_iterations * args.batch_size, initial=self.step)
        over_processes("MAX", 0)  # a barrier: all wait while Weights & Biases asks the first for a login
        heartbeat("iteration")

    def tell_of_end(self, before: int):
        """Says that a resumed run is at its end, or has another end than before (steps)."""
        after = self.args.total_timesteps
        if RANK == 0 and self.numbers["iteration"] >= self.args.num_iterations:
            done = f"the run is at its end, step {self.numbers['iteration'] * self.args.batch_size}"
            print(f"{done}; with a larger --total-timesteps it goes on", file=sys.stderr)
        elif RANK == 0 and before != after:
            print(f"the run, and what is annealed, now ends at step {after}, not {before}", file=sys.stderr)

    def iterations(self) -> Iterator[int]:
        """Counts the iterations that are left. Saves after some of them, the last one, and a signal's."""
        first, end = self.numbers["iteration"], self.args.num_iterations
        for done in range(first + 1, end + 1):
            heartbeat("iteration")
            # A seed of its own, so that no random state is saved. Hashes of integers are the same everywhere.
            seed_all(hash((self.args.seed, done - 1, RANK)))
            self.done, self.was_logged = done, False
            yield done - 1
            # With log_every above 1, a signal after log() may wait for the next iteration, which logs all.
            signum = int(over_processes("MAX", Run.stop_signal if self.was_logged else 0))
            is_due = time.monotonic() - self.saved_at > 600  # seconds
            if signum or is_due or done % self.args.save_every == 0 or done == end:
                self.numbers["iteration"], self.saved_at = done, time.monotonic()
                if RANK == 0:
                    self.writer.flush()
                    save_checkpoint(self.folder, self.args, self.parts, self.numbers)
            if signum:
                sys.exit(128 + signum)

    @property
    def is_logged(self) -> bool:
        """Whether this iteration logs more than its episodes."""
        is_last = self.done == self.args.num_iterations or Run.stop_signal > 0
        return is_last or self.done % self.log_every == 0

    def count_steps(self, n: int, info: dict):
        """Counts n environment steps, and notes the episodes that ended in them."""
        self.step += n
        self.episodes += [(self.step, episode) for episode in ended_episodes(info)]

    def log(self, losses: dict[str, Tensor], scalars: dict[str, Tensor | float], status="", **data):
        """Logs an iteration. A loss that is not finite ends the run, which names such data, too.

        Of several processes, the first logs its own episodes and losses. data: arrays, such as rewards.
        """
        losses = {f"losses/{name}": float(x) for name, x in losses.items()}
        self.check_finite(losses, data)
        returns = [episode[self.shown] for _, episode in self.episodes if self.shown in episode]
        self.numbers["last_returns"] = (self.numbers["last_returns"] + returns)[-100:]
        self.was_logged = self.is_logged
        if RANK == 0:
            last = [(self.step, losses | scalars | self.speed())] if self.was_logged else []
            for step, logged in self.episodes + last:
                for name, x in logged.items():
                    if np.isfinite(float(x)):
                        self.writer.add_scalar(name, float(x), step)
            mean = np.mean(self.numbers["last_returns"] or np.nan)
            self.bar.set_postfix_str(f"return {mean:.1f}{status}", refresh=False)
            self.bar.update(self.step - self.bar.n)
        self.timed_from = self.timed_from or (self.step, time.monotonic())
        self.episodes = []

    def speed(self) -> dict[str, float]:
        """Steps per second since the end of the first iteration, which may have compiled."""
        if self.timed_from is None:
            return {}
        first_step, start = self.timed_from
        return {"charts/SPS": (self.step - first_step) / (time.monotonic() - start)}

    def check_finite(self, scalars: dict[str, float], data: dict | None = None):
        """Ends the run in all processes where a number is not finite in one."""
        bad = {name: x for name, x in scalars.items() if not np.isfinite(x)}
        if over_processes("MAX", len(bad)):
            causes = [name for name, x in (data or {}).items() if not torch.as_tensor(x).isfinite().all()]
            message = f"step {self.step}: not finite: {bad or 'a number of another process'}"
            message += f", and {', '.join(causes)}" if causes else ""
            saved = self.numbers["iteration"]  # changes with each checkpoint
            good = f"{self.folder}/checkpoint.pt, of iteration {saved}" if saved else "none"
            sys.exit(f"{message}; last good checkpoint: {good}" if RANK == 0 else 1)


class Stderr:
    """A file for sys.stderr. Where its reader has gone, or a disk is full, nothing is written."""

    def __init__(self, file: TextIO):
        self.file = file

    def write(self, text: str):
        with suppress(OSError):
            self.file.write(text)

    def flush(self):
        with suppress(OSError):
            self.file.flush()

    def __getattr__(self, name: str):
        return getattr(self.file, name)


def progress_bar(total: int | None = None, **kwargs) -> tqdm:
    """Counts environment steps on a terminal, and prints a line every ten seconds elsewhere."""
    line = "{l_bar}{r_bar}" if total else "{n_fmt} steps [{elapsed}, {rate_fmt}{postfix}]"
    style = {} if sys.stderr.isatty() else dict(mininterval=10, bar_format=f"{line}\n")
    return tqdm(total=total, unit="step", unit_scale=True, **style, **kwargs)


def evaluation_steps(args: Args, returns: list[float]) -> Iterator[None]:
    """Goes on until there are enough returns, or a signal asks for the end; shows how far it is."""
    with progress_bar() as bar:
        while len(returns) < args.eval_episodes and not Run.stop_signal:
            heartbeat("evaluation")
            yield
            bar.set_postfix_str(f"{len(returns)} of {args.eval_episodes} episodes", refresh=False)
            bar.update()


def ended_episodes(info: dict) -> list[dict[str, float]]:
    """Return, length and the numbers of its last info, of each episode that ended in a step."""
    if "final_info" not in info:
        return []
    final, episodes = info["final_info"], []
    names = [name for name in final if f"_{name}" in final]  # _name is the mask of environments that have it
    names = [name for name in names if np.ndim(final[name]) == 1]
    for n in final["_episode"].nonzero()[0]:
        last = {name: final[name][n] for name in names if final[f"_{name}"][n]}
        last = {name: x for name, x in last.items() if isinstance(x, int | float | np.number | np.bool_)}
        scalars = {f"charts/{name}": float(x) for name, x in last.items()}
        scalars["charts/episodic_return"] = float(final["episode"]["r"][n])
        scalars["charts/episodic_length"] = float(final["episode"]["l"][n])
        episodes.append(scalars)
    return episodes


def start_process(args: Args):
    """Joins the other processes of torchrun, takes its GPU, and seeds all that is random before training."""
    if args.device == "cuda":
        torch.cuda.set_device(LOCAL_RANK)
    if WORLD_SIZE > 1:
        # If torch.compile imported it later, with a process group there, the process would abort at its exit.
        from torch import _dynamo  # noqa: F401

        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo")
        atexit.register(torch.distributed.destroy_process_group)
    seed_all(args.seed)
    torch.set_flush_denormal(True)  # denormal numbers are slow, and Adam's moments of dead units become such


def seed_all(seed: int):
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def over_processes(operation: str, x: float | Tensor) -> float:
    """SUM or MAX of a number over the processes of torchrun."""
    x = torch.tensor(float(x), dtype=torch.float64)  # float32 counts to 2**24
    if WORLD_SIZE > 1:
        torch.distributed.all_reduce(x, getattr(torch.distributed.ReduceOp, operation))
    return x.item()


def flatten(parameters: Iterable[nn.Parameter]) -> nn.Parameter:
    """Makes parameters views of one tensor, and their gradients views of its gradient.

    Adam, clipping and the sum over processes are then one operation each, not one for each parameter.
    """
    parameters = list(parameters)
    flat = nn.Parameter(torch.cat([x.data.flatten() for x in parameters]))
    flat.grad, sizes = torch.zeros_like(flat), [x.numel() for x in parameters]
    for x, part, grad in zip(parameters, flat.data.split(sizes), flat.grad.split(sizes), strict=True):
        part = part.as_strided(x.shape, x.stride()).copy_(x.data)  # keeps an order such as channels last
        x.data, x.grad = part, grad.as_strided(x.shape, x.stride())
    return flat


def keep_freed_memory():
    """Keeps glibc from returning freed memory to the kernel, page by page: a fifth of an update on a CPU."""
    if sys.platform == "linux":
        mallopt = ctypes.CDLL(None).mallopt
        if not mallopt(-3, 2**30):  # M_MMAP_THRESHOLD
            mallopt(-3, 2**25)  # the most that older versions take
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def check_game(args: Args, spec: gym.envs.registration.EnvSpec):
    """Fails for environments that are no Atari games, or skip a random number of frames."""
    if spec.entry_point != "ale_py.env:AtariEnv":
        fail(f"{spec.id} is no Atari game: try ppo.py")
    if spec.kwargs["frameskip"] not in (1, 4):
        fail(f"{spec.id} skips a random number of frames: take a NoFrameskip-v4 or an ALE/...-v5 id")
    takes = {
        "repeat_action_probability": ("from 0 to 1", lambda x: isinstance(x, int | float) and 0 <= x <= 1),
        "full_action_space": ("true or false", lambda x: isinstance(x, bool)),
        "max_num_frames_per_episode": ("an integer above 0", lambda x: isinstance(x, int) and x > 0),
    }
    for name, x in json.loads(args.env_kwargs).items():
        if name not in takes:
            fail(f"--env-kwargs: games take {', '.join(takes)}, not {name}")
        what, is_right = takes[name]
        if not is_right(x):
            fail(f"--env-kwargs: {name} must be {what}, not {x}")


def compiled(function: Callable, args: Args) -> Callable:
    """A function as it is, or with --compile by torch.compile and, on one GPU, in a CUDA graph."""
    if args.compile:
        function = torch.compile(function)
    if args.compile and args.device == "cuda" and WORLD_SIZE == 1:  # NCCL in a CUDA graph is untried
        from tensordict.nn import CudaGraphModule

        function = CudaGraphModule(function, warmup=4)  # launches all kernels at once
    return function


def lock(run_dir: Path) -> FileLock:
    """Makes a run folder, or refuses one in which another process trains. The lock ends with the process."""
    run_lock = FileLock(run_dir / "lock", is_singleton=True)  # a notebook may resume after an exception
    try:
        run_lock.acquire(blocking=False)
    except Timeout:
        fail(f"another process trains in {run_dir}")
    except OSError as error:
        fail(f"{run_dir} cannot be locked: {error}")
    return run_lock


def start_logging(args: Args, run_dir: Path, first_step: int) -> SummaryWriter:
    """TensorBoard's writer. With --track, Weights & Biases gets what TensorBoard gets."""
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
        except (wandb.Error, ValueError) as error:  # ValueError: a wrong WANDB_... in the environment
            fail(f"--track: {error}")
    writer = SummaryWriter(run_dir, purge_step=first_step + 1)  # hides what was logged but not saved
    atexit.register(writer.close)  # writes the last logs after an exception, too
    writer.add_text("args", "\n".join(f"    {name}: {x}" for name, x in asdict(args).items()))
    print(args.resume or os.path.relpath(run_dir))
    return writer


def save_checkpoint(run_dir: Path, args: Args, parts: dict, numbers: dict):
    """Saves atomically: a kill or a power cut leaves the old checkpoint or the new one."""
    state = {name: part.state_dict() for name, part in parts.items()} | numbers
    state |= dict(script=SCRIPT, args=asdict(args) | dict(resume=None))
    with open(run_dir / "checkpoint.tmp", "wb") as file:
        torch.save(state, file)  # torch.save names a full disk only when it writes to a file object
        os.fsync(file.fileno())  # on the disk before the old one is replaced
    (run_dir / "checkpoint.tmp").replace(run_dir / "checkpoint.pt")


def load_checkpoint(run_dir: str, parts: dict | None = None, numbers: Iterable[str] = ()) -> dict:
    """Reads what save_checkpoint() saved, with Args. Parts take on their state. Numbers must be there."""
    path = Path(run_dir) / "checkpoint.pt"
    try:
        if not path.exists():
            fail(f"there is no {path}")
        if damaged := ZipFile(path).testzip():  # torch.load compares no checksums
            raise ValueError(f"{damaged} is damaged")
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["script"] != SCRIPT:
            fail(f"{path} is a checkpoint of {state['script']}.py")
        for name, part in (parts or {}).items():
            part.load_state_dict(state[name])
        args = Args.__new__(Args)  # without check(), as flags may still change what it would refuse
        vars(args).update(state["args"])
        if unknown := vars(args).keys() - asdict(args).keys():
            raise ValueError(f"unknown flags: {', '.join(unknown)}")
        return state | dict(args=args) | {name: state[name] for name in numbers}
    except Exception as error:  # what a damaged file raises has many types
        fail(f"{path} cannot be loaded with these flags and this {SCRIPT}.py, or is damaged: {error!r:.150}")


def heartbeat(name: str):
    """Says that a loop goes on; see watch_heartbeats()."""
    HEARTBEATS[name] = time.monotonic()


def watch_heartbeats(seconds: int):
    """Ends the process, and shows where each thread is, when a loop does not go on for so many seconds."""
    if RANK == 0:
        print(f"--stall-seconds {seconds}: a longer iteration ends the run", file=sys.stderr)
    while True:
        # A second timer, in C, for code that keeps Python's lock, so that this loop stands still.
        faulthandler.dump_traceback_later(seconds + 1, exit=True, file=2)
        time.sleep(0.5)
        if any(time.monotonic() - then > seconds for then in HEARTBEATS.copy().values()):
            try:
                os.write(2, f"--stall-seconds {seconds}: nothing ended within that time\n".encode())
                faulthandler.dump_traceback(file=2)
            finally:
                os._exit(1)


def stop_after_iteration(signum: int, _):
    """Handles a signal: the first ends the run after its iteration, and a second Ctrl-C at once."""
    Run.stop_signal = signum
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # SIGTERM comes twice where torchrun passes it on, too
    with suppress(OSError):  # a terminal may have gone
        os.write(2, b"stopping after this iteration\n")


def check(args: Args):
    """Raises ValueError for arguments that cannot be, which tyro reports as it reports a wrong flag."""
    counts = "total_timesteps num_envs num_steps update_epochs num_minibatches save_every eval_episodes"
    rates = "learning_rate gamma gae_lambda clip_coef ent_coef vf_coef max_grad_norm target_kl"
    minimum = dict.fromkeys(counts.split(), 1) | dict.fromkeys(["seed", "stall_seconds", *rates.split()], 0)
    for name, x in asdict(args).items():
        if x is not None and name in minimum and not minimum[name] <= x < np.inf:
            raise ValueError(f"{name} cannot be {x}")
    minibatch_size, rest = divmod(args.batch_size // WORLD_SIZE, args.num_minibatches)
    rules = {
        "give --resume or --evaluate, not both": not (args.resume and args.evaluate),
        "--capture-video records the episodes of --evaluate": args.evaluate or not args.capture_video,
        "max_grad_norm must be above 0": args.max_grad_norm > 0,
        "env_id may have one colon, after a module": re.fullmatch(r"([^:]+:)?[^:]*", args.env_id),
        "env_kwargs must be a JSON object": is_json_object(args.env_kwargs),
        "stall_seconds must be below 2**22": args.stall_seconds < 2**22,  # 48 days: Windows' limit
        "seed + steps must be below 2**31": args.seed + args.total_timesteps + args.num_envs < 2**31,
        "gamma and gae_lambda must be at most 1": max(args.gamma, args.gae_lambda) <= 1,
        "total_timesteps must be at least num_envs * num_steps": args.num_iterations >= 1,
        f"the {WORLD_SIZE} processes of torchrun must divide num_envs": args.num_envs % WORLD_SIZE == 0,
        "num_minibatches must divide num_envs * num_steps / processes": rest == 0,
        "a minibatch must hold more than one step": minibatch_size != 1,
    }
    for rule, is_kept in rules.items():
        if not is_kept:
            raise ValueError(rule)


def is_json_object(text: str) -> bool:
    with suppress(ValueError):
        return isinstance(json.loads(text), dict)
    return False


def fail_to_make(env_id: str, error: Exception) -> NoReturn:
    """Reports an environment that there is not, or not with these arguments."""
    wrong_arguments = "unexpected keyword|multiple values|takes no arguments|missing .* required"
    if isinstance(error, TypeError) and not re.search(wrong_arguments, str(error)):
        raise error  # the environment's own mistake
    is_atari = env_id.startswith("ALE/") or "NoFrameskip" in env_id
    imports_ale = "ale_py" in globals()  # as scripts for Atari games do
    hint = " (for Atari games: ppo_atari.py)" if is_atari and not imports_ale else ""
    hint = f" (try {env_id}NoFrameskip-v4)" if f"{env_id}NoFrameskip-v4" in gym.registry else hint
    fail(f"--env-id {env_id}: {error}{hint}")


def fail(message: str) -> NoReturn:
    """Reports a mistake of the user, not a bug, in one line on stderr; exit code 2."""
    print(f"{SCRIPT}.py: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def parse_args(argv: Sequence[str] | None = None) -> Args:
    """The command line, or argv. A run that is resumed or evaluated brings its own arguments as defaults."""
    words = sys.argv[1:] if argv is None else argv
    argv = [word.removesuffix(f"{os.sep}checkpoint.pt") for word in words]  # a run may be named by that file
    # Before tyro reads the line, the run that it names must be found: its arguments are tyro's defaults.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume", "--evaluate", dest="run_dir", nargs="?")
    run_dir = parser.parse_known_args(argv)[0].run_dir
    saved = tyro.MISSING_NONPROP if run_dir is None else load_checkpoint(run_dir)["args"]
    args = tyro.cli(Args, args=argv, default=saved)
    for name in FIXED:
        if args.resume and getattr(args, name) != getattr(saved, name):
            fail(f"--resume cannot change {name} from {getattr(saved, name)} to {getattr(args, name)}")
    if args.device == "cuda" and LOCAL_RANK >= torch.cuda.device_count():
        fail(f"--device cuda: PyTorch finds {torch.cuda.device_count() or 'no'} GPU; each process needs one")
    wandb = find_spec("wandb")  # it finds the folder wandb, in which W&B keeps its runs, too
    if args.track and not args.evaluate and (wandb is None or wandb.origin is None):
        fail("--track: pip install wandb")
    if args.capture_video:
        try:
            (Path(args.evaluate) / "videos").mkdir(exist_ok=True)
        except OSError as error:
            fail(f"--capture-video: {error}")
    return args


def main():
    """Trains, or evaluates a run, as the command line says."""
    sys.stderr = Stderr(sys.stderr or open(os.devnull, "w"))  # a process may have been started without
    faulthandler.enable(2)  # a simulator that crashes shows where
    sys.path.append(os.getcwd())  # --env-id finds modules there, too
    args = parse_args()
    if args.stall_seconds:
        threading.Thread(target=watch_heartbeats, args=[args.stall_seconds], daemon=True).start()
    signals = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signals.append(signal.SIGHUP)  # a terminal or a connection has gone, and nohup was not asked for
    for signum in signals:
        signal.signal(signum, stop_after_iteration)
    try:
        if args.evaluate:
            heartbeat("evaluation")
            returns = evaluate(args)
            if returns:
                mean, std = np.mean(returns), np.std(returns)
                print(f"return {mean:.2f} +- {std:.2f} over {len(returns)} episodes")
            else:
                print("no episode has ended")
            if Run.stop_signal:
                sys.exit(128 + Run.stop_signal)
        else:
            train(args)
    finally:
        HEARTBEATS.clear()  # what is still to be written or sent may take its time


if __name__ == "__main__":
    main()
