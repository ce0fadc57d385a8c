# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "ale-py>=0.12", "filelock>=3.13", "gymnasium>=1.4", "numpy", "tensorboard",
#     "torch>=2.6", "tqdm", "tyro>=1",
# ]
# ///
"""PPO for Atari games: ppo.py and the 9 Atari details of openai/baselines, on ale-py's C++ emulators.

    python ppo_atari.py --env-id BreakoutNoFrameskip-v4     # every field of Args is a flag; see --help
    python ppo_atari.py --resume runs/NAME                  # go on with a run that was stopped
    python ppo_atari.py --evaluate runs/NAME                # play whole games with its agent
    torchrun --nproc-per-node 4 ppo_atari.py                # environments and gradients shared out over 4

Paper    Schulman et al. 2017, https://arxiv.org/abs/1707.06347
Details  numbered as in https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details
Shapes   T = num_steps, N = num_envs / processes, B = T * N, M = B / num_minibatches
"""

import atexit
import ctypes
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NoReturn

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

    # rollout
    num_envs: int = 8  # parallel environments, shared out over torchrun's processes
    num_steps: int = 128  # steps per environment and rollout (T)
    stall_seconds: int = 20  # an environment that takes longer for a step ends the run
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # GAE: 0 is the one-step advantage, 1 is Monte Carlo
    bootstrap_truncated: bool = False  # value what lies beyond a time limit instead of taking it for the end

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
    def batch_size(self) -> int:
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return self.total_timesteps // self.batch_size


def fail(message: object) -> NoReturn:
    """A mistake of the user, not a bug: one line on stderr and exit code 2."""
    print(f"{SCRIPT}.py: error: {' '.join(str(message).split())}", file=sys.stderr)
    sys.exit(2)


def parse_args() -> Args:
    args = tyro.cli(Args)
    if run_dir := args.resume or args.evaluate:
        saved = load_checkpoint(run_dir)["args"]
        args = tyro.cli(Args, default=saved)
        for name in ("env_id", "seed", "num_envs", "num_steps") if args.resume else ():
            if getattr(args, name) != getattr(saved, name):
                fail(f"--resume cannot change {name} from {getattr(saved, name)} to {getattr(args, name)}")
    for name, x in asdict(args).items():
        if type(x) is int and x < (name != "seed") or type(x) is float and not 0 <= x < np.inf:
            fail(f"{name} cannot be {x}")
    minibatch_size, rest = divmod(args.batch_size // WORLD_SIZE, args.num_minibatches)
    for mistake, message in (
        (args.resume and args.evaluate, "give --resume or --evaluate, not both"),
        (args.capture_video and not args.evaluate, "--capture-video records the episodes of --evaluate"),
        (args.seed >= 2**31, "seed must be below 2**31"),
        (max(args.gamma, args.gae_lambda) > 1, "gamma and gae_lambda must be at most 1"),
        (args.num_iterations < 1, "total_timesteps must be at least num_envs * num_steps"),
        (args.num_envs % WORLD_SIZE, f"the {WORLD_SIZE} processes of torchrun must divide num_envs"),
        (rest, "num_minibatches must divide num_envs * num_steps"),
        (minibatch_size == 1, "a minibatch must hold more than one step"),
        (args.device == "cuda" and not torch.cuda.is_available(), "--device cuda: PyTorch finds no GPU"),
    ):
        if mistake:
            fail(message)
    return args


# === Environment =============================================================================


class AtariEnvs(gym.vector.VectorEnv):
    """N games, each in a C++ emulator with its own thread, seen as through the wrappers of openai/baselines.

    Observations (N, frames, 84, 84) uint8 are one array that every step overwrites. An episode is a life;
    the next begins in the step that ends it. infos["final_info"] has raw score and frames of the games over.
    """

    def __init__(self, spec: dict, num_envs: int, frames: int, video_dir: Path | None = None):
        kept = ("game", "repeat_action_probability", "full_action_space", "max_num_frames_per_episode")
        kwargs = {name: spec[name] for name in kept} | dict(num_envs=1, num_threads=1, stack_num=1)
        kwargs |= dict(reward_clipping=False, use_fire_reset=False, noop_max=31)  # 31 draws from 0 to 30
        kwargs |= dict(frameskip=4, maxpool=True)  # detail 15: 4 frames an action, maximum of the last two
        self.games = [AtariVectorEnv(**kwargs) for _ in range(num_envs)]  # detail 18: 84 x 84 grey pixels
        self.num_envs, self.single_action_space = num_envs, self.games[0].single_action_space
        self.single_observation_space = gym.spaces.Box(0, 255, (frames, 84, 84), np.uint8)
        self.first_actions = (1, 2) if ale_py.Action.FIRE in self.games[0].ale.get_action_set() else ()
        self.stacks = np.zeros((num_envs, frames, 84, 84), np.uint8)
        self.lives, self.scores, self.returns, self.lengths = np.zeros((4, num_envs))
        self.video_dir, self.video, self.camera = video_dir, [], None
        if video_dir:  # a twin of game 0 in colour, played with the same seeds and actions
            self.camera = AtariVectorEnv(**kwargs, img_height=210, img_width=160, grayscale=False)

    def reset(self, *, seed: int, options: dict | None = None) -> tuple[np.ndarray, dict]:
        self.seeds, self.over = [seed + i for i in range(self.num_envs)], np.ones(self.num_envs, bool)
        self.ended = np.zeros(self.num_envs, bool)
        for i in range(self.num_envs):
            self._begin_episode(i)
        return self.stacks, {}

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict]:
        if not ((0 <= actions) & (actions < self.single_action_space.n)).all():
            raise ValueError(f"not all of {actions} are in {self.single_action_space}")  # ale-py would hang
        for i, action in enumerate(actions):  # the emulators work side by side
            self._send(i, action)
        infos, (rewards, terminated, truncated, self.ended) = {}, np.zeros((4, self.num_envs))
        for i in range(self.num_envs):
            frame, reward, terminated[i], truncated[i] = self._receive(i)
            self.stacks[i] = *self.stacks[i, 1:], frame
            rewards[i] = np.sign(reward)  # detail 19: reward clipping
            if truncated[i]:
                infos.setdefault("final_obs", np.zeros_like(self.stacks))[i] = self.stacks[i]
            if terminated[i] or truncated[i]:
                self._begin_episode(i)
        if self.ended.any():
            infos["final_info"] = dict(episode=dict(r=self.returns, l=self.lengths), _episode=self.ended > 0)
        return self.stacks, rewards, terminated > 0, truncated > 0, infos

    def _send(self, i: int, action: int):
        self.games[i].send(np.array([action]))
        if self.camera:
            self.video.append(self.camera.step(np.array([action]))[0][0, 0])

    def _receive(self, i: int) -> tuple[np.ndarray, int, bool, bool]:
        """Frame, raw reward, terminated (a life or the game), truncated; notes whether the game is over."""
        ((frame,),), (reward,), (terminated,), (truncated,), info = self.games[i].recv()
        (lives,), lives_before, self.over[i] = info["lives"], self.lives[i], terminated or truncated
        self.lives[i] = lives
        self.scores[i] += reward
        if self.over[i]:
            self.ended[i], self.returns[i] = True, self.scores[i]
            (self.lengths[i],) = info["episode_frame_number"]
            if self.camera:
                self._save_video()
        return frame, reward, terminated or 0 < lives < lives_before, truncated

    def _begin_episode(self, i: int):
        frame = self._next_life(i)
        for action in self.first_actions:  # detail 17: FIRE, which starts most games, and the action after it
            self._send(i, action)
            frame, _, *ended = self._receive(i)
            if any(ended):
                frame = self._next_life(i)
        self.stacks[i] = frame  # detail 20: a stack of frames, at first the same

    def _next_life(self, i: int) -> np.ndarray:
        """First frame of the next life, after one no-op, or of a new game, after 1 to 30."""
        if not self.over[i]:  # detail 16: a lost life ends the episode, but does not reset the emulator
            self._send(i, 0)
            frame, *_ = self._receive(i)
        noops = 0
        while self.over[i] and noops == 0:  # detail 14: 1 to 30 no-ops
            ((frame,),), info = self.games[i].reset(seed=self.seeds[i])
            if self.camera:
                self.camera.reset(seed=self.seeds[i])
            noops, self.seeds[i] = info["episode_frame_number"][0], None
            self.lives[i], self.scores[i] = info["lives"][0], 0
        self.over[i] = False
        return frame

    def _save_video(self):
        from moviepy import ImageSequenceClip

        self.video_dir.mkdir(exist_ok=True)
        path = self.video_dir / f"{len(list(self.video_dir.iterdir()))}.mp4"
        ImageSequenceClip(self.video, fps=15).write_videofile(path, logger=None)  # every 4th of 60 a second
        self.video = []


def make_env(args: Args, num_envs: int, video_dir: Path | None = None) -> gym.vector.VectorEnv:
    # differs from ppo.py: Atari games only
    """Vectorized games, each reset within the step that ends its episode."""
    gym.register_envs(ale_py)
    try:
        spec = gym.spec(args.env_id)
        if video_dir:
            import moviepy  # noqa: F401  better missed now than after a game
    except (gym.error.Error, ImportError) as error:
        fail(f"--env-id {args.env_id}: {error}")
    if spec.entry_point != "ale_py.env:AtariEnv":
        fail(f"{args.env_id} is no Atari game: try ppo.py")
    if spec.kwargs["frameskip"] not in (1, 4):
        fail(f"{args.env_id} skips a random number of frames: take a NoFrameskip-v4 or an ALE/...-v5 id")
    return AtariEnvs(spec.kwargs, num_envs, 4, video_dir)  # detail 1: vectorized architecture


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


class Agent(nn.Module):  # differs from ppo.py: convolutions, shared by policy and value
    amp = False  # run them in bfloat16

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
    """Loss of a minibatch of tensors (M, ...), and what is logged of the last minibatch, as in the blog."""
    dist, value = agent(batch["obs"])
    logratio = dist.log_prob(batch["actions"]) - batch["logprobs"]
    ratio, advantages = logratio.exp(), batch["advantages"]
    if args.norm_adv:  # detail 7: advantage normalization, per minibatch (with the blog's unbiased std)
        std, mean = torch.std_mean(advantages)
        advantages = (advantages - mean) / (std + 1e-8)
    pg_loss = -torch.min(advantages * ratio, advantages * ratio.clamp(1 - clip, 1 + clip)).mean()  # detail 8

    error = value - batch["returns"]
    if args.clip_vloss:  # detail 9: value loss clipping: the larger of both errors counts
        clipped_error = value.clamp(batch["values"] - clip, batch["values"] + clip) - batch["returns"]
        error = torch.where(clipped_error.abs() > error.abs(), clipped_error, error)
    v_loss = 0.5 * (error * error).mean()  # a product, as autograd takes longer for a power
    entropy = dist.entropy().mean()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss  # detail 10: overall loss
    info = dict(policy_loss=pg_loss, value_loss=v_loss, entropy=entropy, logratio=logratio)
    return loss, {name: x.detach() for name, x in info.items()}


def diagnostics(logratios: list[Tensor], clip: float) -> dict[str, Tensor]:
    """KL of the last minibatch, http://joschu.net/blog/kl-approx.html, share of all clipped: detail 12."""
    last, ratios = logratios[-1], torch.stack(logratios).exp()
    kl = dict(old_approx_kl=-last.mean(), approx_kl=(last.exp() - 1 - last).mean())
    return kl | dict(clipfrac=((ratios - 1).abs() > clip).float().mean())


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


def over_processes(operation: str, x: float | Tensor) -> float:
    """SUM or MAX of a number over the processes of torchrun."""
    x = torch.as_tensor(x, dtype=torch.float32)
    if WORLD_SIZE > 1:
        torch.distributed.all_reduce(x, getattr(torch.distributed.ReduceOp, operation))
    return x.item()


@torch.no_grad()  # but for the update
def train(args: Args, stop: Sequence[int] = ()) -> Path:
    """Train and return the run folder; a signal number in stop ends it after the iteration, saved."""
    torch.manual_seed(args.seed)
    if WORLD_SIZE > 1:
        torch.distributed.init_process_group()
        atexit.register(torch.distributed.destroy_process_group)
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    torch.set_flush_denormal(True)  # the moments of dead units fade into numbers that slow Adam down fivefold
    keep_freed_memory()
    T, N = args.num_steps, args.num_envs // WORLD_SIZE
    envs = make_env(args, N)
    agent = Agent(envs).to(args.device)
    agent.amp = args.amp
    parameters = list(agent.parameters())
    lr = torch.tensor(args.learning_rate)  # a tensor, so that annealing does not recompile the update
    optimizer = torch.optim.Adam(parameters, lr=lr, eps=1e-5, fused=True)  # detail 3: Adam's epsilon
    run_name = f"{args.env_id}__{SCRIPT}__{args.seed}__{time.time_ns()}".replace("/", "-").replace(":", "-")
    run_dir = Path(args.resume or f"runs/{run_name}")
    first_iteration, last_returns = 0, deque(maxlen=100)
    if args.resume:
        checkpoint = load_checkpoint(args.resume)
        try:
            agent.load_state_dict(checkpoint["agent"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            last_returns.extend(checkpoint["last_returns"])
            first_iteration = checkpoint["iteration"]
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            fail(f"{args.resume} does not fit the flags or this version of {SCRIPT}.py: {error}")
    saved, first_step, start = first_iteration, first_iteration * args.batch_size, time.time()
    if RANK == 0:
        logger = Logger(args, run_dir, first_step)
        print(run_dir)

    def act(obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dist, value = agent(obs)
        return (action := dist.sample()), dist.log_prob(action), value

    def update(batch: dict[str, Tensor], clip: float) -> dict[str, Tensor]:
        # differs from ppo.py: large networks gain nothing by one flat tensor
        with torch.enable_grad():
            loss, info = ppo_loss(agent, batch, clip, args)
        optimizer.zero_grad()
        loss.backward()
        for parameter in parameters if WORLD_SIZE > 1 else ():  # auxiliary detail 2: parallel gradients
            torch.distributed.all_reduce(parameter.grad.div_(WORLD_SIZE))
        nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)  # detail 11: gradient clipping
        optimizer.step()
        return info

    if args.compile:
        act, update = (torch.compile(function, mode="reduce-overhead") for function in (act, update))

    obs = torch.zeros((T, N, 84, 84, 4), dtype=torch.uint8, device=args.device)
    obs = obs.permute(0, 1, 4, 2, 3)  # (T, N, 4, 84, 84), channels last in memory
    actions = torch.zeros((T, N), dtype=torch.int64, device=args.device)
    logprobs, values = torch.zeros((2, T, N), device=args.device)
    rewards, dones = np.zeros((2, T, N), np.float32)
    stall_limit = StallLimit(args.env_id, args.stall_seconds)
    with stall_limit:
        next_obs, _ = envs.reset(seed=args.seed + first_step + RANK * N)  # resumed runs begin new episodes
    for iteration in range(first_iteration, args.num_iterations):
        # seeded anew in every iteration, so that there is no random state to save and resume
        torch.manual_seed(int(np.random.SeedSequence((args.seed, iteration, RANK)).generate_state(1)[0]))
        frac = 1 - iteration / args.num_iterations  # detail 4: learning rate annealing
        optimizer.param_groups[0]["lr"].fill_(args.learning_rate * (frac if args.anneal_lr else 1))
        clip = args.clip_coef * (frac if args.anneal_clip else 1)  # auxiliary detail 1: clip range annealing
        step, episodes, logratios = iteration * args.batch_size, [], []

        # 1. rollout
        # differs from ppo.py: the network is too large for acting in NumPy
        for t in range(T):
            obs[t] = torch.from_numpy(next_obs)
            actions[t], logprobs[t], values[t] = act(obs[t])
            with stall_limit:
                next_obs, rewards[t], terminated, truncated, info = envs.step(actions[t].cpu().numpy())
            dones[t] = terminated | truncated
            step += args.num_envs
            if "final_info" in info:
                stats, ended = info["final_info"]["episode"], info["final_info"]["_episode"]
                returns, lengths = stats["r"][ended].tolist(), stats["l"][ended].tolist()
                episodes += [(step, *episode) for episode in zip(returns, lengths, strict=True)]
            if args.bootstrap_truncated and (cut := truncated & ~terminated).any():  # beyond the blog
                final_obs = torch.as_tensor(np.stack(info["final_obs"][cut]), device=args.device)
                rewards[t, cut] += args.gamma * agent(final_obs)[1].cpu().numpy()
        data = dict(obs=obs, actions=actions, logprobs=logprobs, values=values, rewards=rewards, dones=dones)
        data = {name: torch.as_tensor(x, device=args.device) for name, x in data.items()}

        # 2. advantages and value targets
        next_value = agent(torch.as_tensor(next_obs, device=args.device))[1]
        r, v, d = data.pop("rewards"), data["values"], data.pop("dones")
        data["advantages"] = compute_gae(r, v, d, next_value, args.gamma, args.gae_lambda)
        data["returns"] = data["advantages"] + v
        data = {name: x.flatten(0, 1) for name, x in data.items()}  # (T, N, ...) -> (B, ...)

        # 3. update
        for _ in range(args.update_epochs):
            shuffled = torch.randperm(T * N, device=args.device)  # detail 6: shuffled minibatches
            parts = (x.index_select(0, shuffled).chunk(args.num_minibatches) for x in data.values())
            for minibatch in zip(*parts, strict=True):
                losses = update(dict(zip(data, minibatch, strict=True)), clip)
                logratios.append(losses.pop("logratio").clone())  # CUDA graphs write over what they return
            kl = diagnostics(logratios, clip)["approx_kl"]
            if args.target_kl is not None and over_processes("SUM", kl) / WORLD_SIZE > args.target_kl:
                break  # auxiliary detail 3: early stopping

        # 4. log and save
        scalars = {f"losses/{k}": x.item() for k, x in (losses | diagnostics(logratios, clip)).items()}
        if not np.isfinite(list(scalars.values())).all():
            good = f"{run_dir}/checkpoint.pt, of iteration {saved}" if saved else "none"
            sys.exit(f"iteration {iteration + 1}: {scalars} are not finite; last good checkpoint: {good}")
        scalars["losses/explained_variance"] = (1 - data["advantages"].var() / data["returns"].var()).item()
        scalars["charts/learning_rate"] = optimizer.param_groups[0]["lr"].item()
        scalars["charts/SPS"] = (step - first_step) / (time.time() - start)
        last_returns.extend(episodic_return for _, episodic_return, _ in episodes)
        if RANK == 0:
            logger.log(step, scalars, episodes, f"return {np.mean(last_returns or 0):.1f}")
        signum = int(over_processes("MAX", stop[0] if stop else 0))
        due = (iteration + 1) % args.save_every == 0 or iteration + 1 == args.num_iterations
        if RANK == 0 and (due or signum):
            saved = iteration + 1
            logger.writer.flush()
            checkpoint = dict(agent=agent.state_dict(), optimizer=optimizer.state_dict(), iteration=saved)
            checkpoint |= dict(last_returns=list(last_returns), args=asdict(args) | dict(resume=None))
            save_checkpoint(run_dir, **checkpoint)
        if signum:
            sys.exit(128 + signum)
    if RANK == 0:
        logger.close()
    return run_dir


# === Evaluation ==============================================================================


@torch.no_grad()
def evaluate(args: Args) -> list[float]:
    """Returns of full episodes of a run's agent, which samples its actions as in training."""
    torch.manual_seed(args.seed)
    envs = make_env(args, 1, Path(args.evaluate) / "videos" if args.capture_video else None)
    agent, returns = Agent(envs).to(args.device), []
    try:
        agent.load_state_dict(load_checkpoint(args.evaluate)["agent"])
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        fail(f"the agent of {args.evaluate} does not fit {args.env_id}: {error}")
    obs, _ = envs.reset(seed=args.seed + args.total_timesteps + args.num_envs)  # no seed of training
    while len(returns) < args.eval_episodes:
        action = agent(torch.as_tensor(obs, device=args.device))[0].sample()
        obs, _, _, _, info = envs.step(action.cpu().numpy())
        if "final_info" in info:
            returns += info["final_info"]["episode"]["r"].tolist()
    envs.close()
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
