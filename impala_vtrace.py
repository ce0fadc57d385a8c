# /// script
# requires-python = ">=3.10"
# dependencies = ["ale-py>=0.12", "filelock>=3.15", "gymnasium[classic-control]>=1.1", "numpy",
#     "tensorboard>=2.18", "torch>=2.6", "tqdm>=4.64", "tyro>=1.0.16"
# ]
# ///
# ruff: noqa: E402  (the second half of the file has its own imports)
"""IMPALA: actors that run ahead of a learner, and V-trace for the lag between them. Atari, images, vectors.

    environments -> act() -> queue -> learn() -> publish() -> act()

    python impala_vtrace.py --env-id PongNoFrameskip-v4       # every field of Args is a flag; see --help
    python impala_vtrace.py --env-id PongNoFrameskip-v4,BreakoutNoFrameskip-v4      # one network, two tasks
    python impala_vtrace.py --env-id CartPole-v1 --sync       # actors and learner in turn: it repeats exactly
    python impala_vtrace.py --optimizer rmsprop --num-envs 32 --batch-segments 32      # as in the paper
    python impala_vtrace.py --resume runs/NAME                # go on with a run that was stopped
    python impala_vtrace.py --evaluate runs/NAME              # play full episodes with its agent
    torchrun --nproc-per-node 2 impala_vtrace.py              # two learners, each with actors of its own

Paper    Espeholt et al. 2018, https://arxiv.org/abs/1802.01561; its equations and sections are at the lines
Shapes   T = num_steps, N = environments of a group, B = segments of a batch / processes. A segment has T + 1
         observations; the last is the first of the next one. Step t has actions[t] = last_actions[t + 1], and
         rewards and ends alike: an observation comes with what led to it, as the LSTM wants to see it.
"""

import json
import math
import os
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain, cycle, pairwise
from pathlib import Path
from queue import SimpleQueue
from threading import Semaphore, Thread
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
    env_id: str = "BreakoutNoFrameskip-v4"  # Gymnasium id of the task, or of several: A,B
    env_kwargs: str = "{}"  # arguments of the environment in JSON, such as '{"max_episode_steps": 100}'
    total_timesteps: int = 10_000_000  # environment steps, summed over the parallel environments
    seed: int = 1  # of Python, NumPy, PyTorch and the environments

    # actors
    num_envs: int = 8  # parallel environments, divided among torchrun's processes
    num_actors: int = 1  # threads of a process for each task, with two groups of environments each
    num_steps: int = 20  # steps per environment and segment (T)
    sync: bool = False  # actors and learner in turn, in one thread

    # V-trace
    gamma: float = 0.99  # discount factor
    correction: Literal["vtrace", "one-step-is", "epsilon", "none"] = "vtrace"  # for off-policy data
    rho_bar: float = 1.0  # clip of the importance weights that say which policy is valued
    c_bar: float = 1.0  # clip of the importance weights that say how far back a surprise counts
    vtrace_lambda: float = 1.0  # 0 is the one-step target, 1 the longest
    rewards: Literal["clip", "raw"] = "clip"  # clip rewards to [-1, 1]
    bootstrap_truncated: bool = False  # at time limits, add gamma * value of the last observation to rewards

    # update
    batch_segments: int = 4  # segments in a batch, divided among torchrun's processes
    replay_fraction: float = 0.0  # share of a batch that comes from the replay
    replay_segments: int = 10_000  # segments in the replay of a process, 6 GB of Atari's
    optimizer: Literal["adam", "rmsprop"] = "adam"  # rmsprop: the paper's, as in TensorFlow
    learning_rate: float = 6e-4  # the optimizer's, before annealing
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    rmsprop_decay: float = 0.99  # decay of RMSProp's mean of squared gradients
    rmsprop_eps: float = 0.01  # added to that mean, inside the root
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
    save_every: int = 100  # iterations between checkpoints; there is one every ten minutes, too
    stall_seconds: int = 0  # exit if an iteration, actor's turn or evaluation step takes longer; 0: no limit
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
    def new_segments(self) -> int:
        return max(1, round(self.batch_segments * (1 - self.replay_fraction)))

    @property
    def batch_groups(self) -> int:
        """Groups whose segments are the new part of a batch, in each process."""
        return self.new_segments // (WORLD_SIZE * self.group_size)

    @property
    def room(self) -> int:
        """Pairs of groups whose segments may have been begun and not yet be taken by the learner.

        So few that no actor is more than a batch ahead, where its segments fill whole batches.
        """
        actors = 1 if self.sync else self.num_groups // (WORLD_SIZE * 2)
        return max(actors, math.ceil(self.batch_groups / 2))

    @property
    def batch_size(self) -> int:  # environment steps of an iteration, over all processes
        return self.new_segments * self.num_steps

    @property
    def num_iterations(self) -> int:
        return self.total_timesteps // self.batch_size

    def __post_init__(self):
        check(self)


# === Environment =============================================================================


def make_env(env_id: str, args: Args, num_envs: int, video_dir: Path | None = None) -> gym.vector.VectorEnv:
    """Vectorized environments, each reset within the step that ends its episode."""
    gym.register_envs(ale_py)
    same_step = dict(autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    spec = gym.registry.get(env_id)
    if spec and spec.entry_point == "ale_py.env:AtariEnv":
        check_game(args, spec, video_dir)
        kept = ("game", "repeat_action_probability", "full_action_space", "max_num_frames_per_episode")
        kwargs = {name: spec.kwargs[name] for name in kept} | json.loads(args.env_kwargs) | same_step
        kwargs |= dict(reward_clipping=False, noop_max=31)  # 31 draws from 0 to 30
        kwargs["full_action_space"] |= len(args.env_ids) > 1  # several tasks: 18 actions, appendix G.1
        envs = AtariVectorEnv(num_envs=num_envs, **kwargs)
        if video_dir:  # a twin in colour, played with the same seeds and actions
            camera = dict(img_height=210, img_width=160, grayscale=False, stack_num=1)
            envs.camera = AtariVectorEnv(num_envs=num_envs, **kwargs, **camera)
        return envs

    def make() -> gym.Env:
        kwargs = json.loads(args.env_kwargs) | (dict(render_mode="rgb_array") if video_dir else {})
        env = gym.make(env_id, **kwargs)
        if video_dir:
            if not env.render_mode:
                fail(f"--capture-video: {env_id} renders no images")
            task = env_id.replace("/", "-").replace(":", "-")
            env = gym.wrappers.RecordVideo(
                env, str(video_dir), episode_trigger=lambda n: n < args.eval_episodes, name_prefix=task
            )
        return as_array(gym.wrappers.RecordEpisodeStatistics(env))

    try:
        envs = gym.vector.SyncVectorEnv([make] * num_envs, **same_step)
    except (gym.error.Error, ImportError, TypeError) as error:
        fail_to_make(env_id, error)
    check_spaces(env_id, envs)
    return envs


def as_array(env: gym.Env) -> gym.Env:
    """Observations as images (channels, height, width) or vectors; of a dictionary, its image (MiniGrid)."""
    space = env.observation_space
    if isinstance(space, gym.spaces.Dict) and "image" in space.spaces:
        env = gym.wrappers.TransformObservation(env, lambda obs: obs["image"], space["image"])
        space = env.observation_space
    shape = space.shape if isinstance(space, gym.spaces.Box) else ()
    is_image = len(shape) == 3 and min(shape[:2]) >= 36
    has_pixels = len(shape) == 3 or len(shape) > 1 and space.dtype == np.uint8
    if has_pixels and not is_image and sorted(shape)[-2] >= 36:  # channels come first, or there are none
        fail(f"{shape} is no image of (height, width, channels): transpose or flatten it in make_env()")
    if is_image:
        low, high = (x.transpose(2, 0, 1) for x in (space.low, space.high))
        channels_first = gym.spaces.Box(low, high, dtype=space.dtype.type)
        # astype() copies: Gymnasium keeps a final observation, whose array an environment may reuse
        return gym.wrappers.TransformObservation(
            env, lambda obs: obs.transpose(2, 0, 1).astype(space.dtype), channels_first
        )
    return gym.wrappers.FlattenObservation(env) if isinstance(space, gym.spaces.Box) else env


class Group:
    """Environments of a task that work while their caller does something else: send(), then receive().

    row: what is to be seen of them now, arrays (N, ...): obs, last_actions, last_rewards (raw), starts (true
    where an episode begins). A life lost in an Atari game ends an episode, but not the game.
    """

    def __init__(self, env_id: str, envs: gym.vector.VectorEnv, video_dir: Path | None = None):
        self.env_id, self.envs = env_id, envs
        self.is_atari = isinstance(envs, AtariVectorEnv)
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
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Residual(nn.Module):
    """Residual block: x + conv(relu(conv(relu(x))))."""

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


class Agent(nn.Module):
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
    an episode, else gamma. Importance weights are clipped at rho_bar and c_bar. lam shortens the traces as in
    remark 2.
    """
    rhos, cs = ratio.clamp(max=rho_bar), ratio.clamp(max=c_bar)
    deltas = rhos * (rewards + discounts * torch.cat((values[1:], bootstrap_value[None])) - values)
    corrections, correction = torch.zeros_like(deltas), 0.0
    for t in reversed(range(len(deltas))):
        corrections[t] = correction = deltas[t] + discounts[t] * lam * cs[t] * correction
    vs = values + corrections
    pg_advantages = rhos * (rewards + discounts * torch.cat((vs[1:], bootstrap_value[None])) - values)
    return vs, pg_advantages


def impala_loss(agent: Agent, batch: dict[str, Tensor], args: Args) -> tuple[Tensor, dict]:
    """Loss of segments (T + 1, B, ...), summed over time and batch, and the diagnostics to log, per step."""
    dist, values, _ = agent(batch, batch["state"])
    rewards = batch["last_rewards"][1:]
    if args.rewards == "clip":
        rewards = rewards.clamp(-1, 1)
    rewards = rewards + batch["bootstraps"][1:]
    discounts = args.gamma * ~batch["starts"][1:]
    values, last_value = values[:-1], values[-1]
    actions = batch["last_actions"].roll(-1, 0)  # what was done in each row; in the last one nothing was
    logprobs, entropy = dist.log_prob(actions)[:-1], dist.entropy()[:-1].sum()

    logratio = logprobs.detach() - batch["logprobs"]
    ratio, targets = logratio.exp(), (rewards, discounts, values, last_value)
    if args.correction == "vtrace":
        vs, pg_advantages = vtrace(ratio, *targets, args.rho_bar, args.c_bar, args.vtrace_lambda)
    else:  # the ablations of section 5.2.2: the n-step return, as if on-policy
        vs, pg_advantages = vtrace(torch.ones_like(ratio), *targets, 1.0, 1.0, 1.0)
    if args.correction == "one-step-is":  # corrects the policy gradient alone
        pg_advantages = ratio.clamp(max=args.rho_bar) * pg_advantages
    if args.correction == "epsilon":  # keeps the gradient of log pi from exploding
        logprobs = (logprobs.exp() + 1e-6).log()

    pg_loss = -(logprobs * pg_advantages).sum()
    v_loss = 0.5 * ((vs - values) ** 2).sum()
    loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss
    with torch.no_grad():
        metrics = dict(policy_loss=pg_loss.detach(), value_loss=v_loss.detach(), entropy=entropy.detach())
        metrics = {name: x / ratio.numel() for name, x in metrics.items()}
        metrics |= dict(rho=ratio.mean(), rho_clipped=(ratio > args.rho_bar).float().mean())
        metrics |= dict(approx_kl=(ratio - 1 - logratio).mean())  # from the policies that acted
    return loss, metrics


class RMSProp(torch.optim.Optimizer):
    """RMSProp as in TensorFlow, for the paper's values: epsilon inside the root, squares begin with ones."""

    def __init__(self, flat: nn.Parameter, lr: Tensor, decay: float, eps: float):
        super().__init__([flat], dict(lr=lr))
        self.decay, self.eps = decay, eps
        self.state[flat]["square_avg"] = torch.ones_like(flat)

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        (flat,) = group["params"]
        square_avg = self.state[flat]["square_avg"]
        square_avg.lerp_(flat.grad**2, 1 - self.decay)
        flat.sub_(group["lr"] * flat.grad / (square_avg + self.eps).sqrt())


@torch.no_grad()
def average_with_neighbor(flat: Tensor):
    """Averages the parameters with those of the previous rank: they travel around the ring."""
    received = torch.empty_like(flat)
    exchange = [torch.distributed.P2POp(torch.distributed.isend, flat.detach(), (RANK + 1) % WORLD_SIZE)]
    exchange += [torch.distributed.P2POp(torch.distributed.irecv, received, (RANK - 1) % WORLD_SIZE)]
    for work in torch.distributed.batch_isend_irecv(exchange):
        work.wait()
    flat.lerp_(received, 0.5)


# === Actors ==================================================================================


@dataclass
class Segments:
    """T steps of the N environments of a group, by one version of the agent."""

    version: int
    data: dict[str, np.ndarray]  # by names that play() gives, with N in the second axis
    episodes: list[tuple[int, dict]]  # those that ended: step of the segment, and what to log
    seconds: float = 0.0  # its part of the time that its actor took for both groups


class Exchange:
    """All that actors and learner share: segments go one way, and copies of the agent the other way."""

    def __init__(self):
        self.queue = SimpleQueue()  # Segments, or what an actor raised
        self.room = Semaphore(0)  # an actor takes one for the segments of its two groups
        self.published = None  # the newest copy of the learner's agent, and its version
        self.taken = 0  # Segments that the learner took, and for which it has made no room yet
        self.is_closed = False  # the learner takes no more


def act(name: str, groups: list[Group], exchange: Exchange, args: Args):
    """Plays in a thread of its own, as often as there is room, until the exchange is closed."""
    try:
        torch.set_num_threads(1)
        if args.device == "cuda":  # a stream beside the learner's, on its GPU: a thread begins with device 0
            torch.cuda.set_device(LOCAL_RANK)
            torch.cuda.set_stream(torch.cuda.Stream())
        while exchange.room.acquire() and not exchange.is_closed:
            heartbeat(name)
            play(groups, exchange, args)
            HEARTBEATS.pop(name)  # to wait for room is no stall
    except BaseException as error:  # SystemExit, too: the learner would wait for ever
        HEARTBEATS.pop(name, None)
        exchange.queue.put(error)


@torch.no_grad()  # in this thread alone
def play(groups: list[Group], exchange: Exchange, args: Args):
    """Puts T steps of each group into the queue, by the newest agent.

    While the emulators of one group work, the other's actions are chosen.
    """
    agent, version = exchange.published
    start, T, made = time.monotonic(), args.num_steps, []
    for group in groups:
        data = {name: np.empty((T + 1, *x.shape), x.dtype) for name, x in group.row.items()}
        data["final_obs"] = np.full((T + 1, args.group_size), None)  # where a time limit ended an episode
        data["logprobs"] = np.empty((T, args.group_size), np.float32)
        data["state"] = group.state.cpu().numpy()
        made.append(Segments(version, data, []))
    for t in range(T + 1):
        for group, segments in zip(groups, made, strict=True):
            data = segments.data
            if t > 0:
                final_obs, episodes = group.receive()
                if exchange.is_closed:
                    return
                for episode in episodes:
                    if len(args.env_ids) > 1:
                        episode[f"tasks/{group.env_id}"] = episode["charts/episodic_return"]
                    segments.episodes.append((t, episode))
                if args.bootstrap_truncated:
                    for n, obs in final_obs.items():
                        data["final_obs"][t, n] = obs
            for name, x in group.row.items():
                data[name][t] = x
            if t < T:
                dist, _, group.state = agent(tensors(group.row, args), group.state)
                action = dist.sample()
                logprob = dist.log_prob(action).to("cpu", non_blocking=True)
                group.send(action[0].cpu().numpy())  # here alone the thread waits for a GPU
                data["logprobs"][t] = logprob[0].numpy()
    for segments in made:
        segments.seconds = (time.monotonic() - start) / len(groups)
        exchange.queue.put(segments)


def tensors(row: dict[str, np.ndarray], args: Args) -> dict[str, Tensor]:
    """Rows (1, N, ...) of what the agent reads of a group's row (N, ...)."""
    read = row if args.lstm else ("obs",)
    return {name: torch.from_numpy(row[name])[None].to(args.device, non_blocking=True) for name in read}


def publish(agent: Agent, version: int, exchange: Exchange, args: Args):
    """Offers a copy of the learner's agent to the actors, who take it as their segments begin (section 3)."""
    copy = deepcopy(agent)
    if args.lstm:
        copy.lstm.flatten_parameters()  # deepcopy() scatters the weights, and cuDNN wants one piece
    if args.device == "cuda":
        torch.cuda.current_stream().synchronize()  # the copy is complete before an actor can see it
    exchange.published = copy, version


def receive(exchange: Exchange, turns: cycle, args: Args) -> list[Segments]:
    """Takes the actors' segments of a batch, and makes room for as many. Raises what an actor raised."""
    while args.sync and exchange.queue.qsize() < args.batch_groups:
        play(next(turns), exchange, args)  # the learner's thread is each actor in turn
    batch = []
    for _ in range(args.batch_groups):
        segments = exchange.queue.get()
        if isinstance(segments, BaseException):
            raise segments
        batch.append(segments)
    exchange.taken += len(batch)
    while exchange.taken >= 2:  # an actor needs room for two groups
        exchange.taken -= 2
        exchange.room.release()
    return batch


def side_by_side(segments: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Segments (T or T + 1, N, ...) as one batch (T or T + 1, sum of N, ...)."""
    return {name: np.concatenate([some[name] for some in segments], axis=1) for name in segments[0]}


def shares_of_time(waits: list[tuple], seconds: float, args: Args) -> dict[str, float]:
    """Shares of the last seconds in which the learner and its actors waited, and of the room that was full.

    waits: for each batch, seconds that the learner waited and that actors acted, and groups that were ready.
    """
    waited, acted, ready = np.sum(waits, axis=0)
    num_actors = args.num_groups // (WORLD_SIZE * 2)
    return {
        "charts/learner_wait": waited / seconds,
        "charts/actor_wait": max(0.0, 1 - acted / (seconds * num_actors)),
        "charts/queue_fill": ready / (len(waits) * 2 * args.room),
    }


# === Replay ==================================================================================


class Replay:
    """The newest segments, first in, first out, drawn uniformly (section 5.2.2 and D.3)."""

    def __init__(self, capacity: int):
        self.segments, self.added = [None] * capacity, 0

    def add(self, segments: dict[str, np.ndarray]):
        """Adds segments (T + 1, B, ...), each in place of the oldest."""
        for n in range(segments["obs"].shape[1]):
            one = {name: x[:, n : n + 1] for name, x in segments.items()}
            self.segments[self.added % len(self.segments)] = one
            self.added += 1

    def sample(self, size: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        at = rng.integers(min(self.added, len(self.segments)), size=size)
        return side_by_side([self.segments[k] for k in at])


@torch.no_grad()
def beyond_time_limits(agent: Agent, batch: dict[str, Tensor], final_obs: np.ndarray, gamma: float) -> Tensor:
    """Bonus on the rewards (T + 1, B) of rows that a time limit ended: gamma times the agent's value.

    final_obs (T + 1, B) has the last observations of their episodes, and None elsewhere. Each takes the place
    of the next episode's first one in a copy of its segment, so that an LSTM reads what came before.
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


# === Training ================================================================================


def train(args: Args) -> Path:
    """Trains an agent with actors beside the learner; returns the run folder."""
    start_process(args)  # seeds all that is random, takes a GPU, joins the other processes of torchrun
    keep_freed_memory()
    warn_of_lag(args)
    tasks = args.env_ids * args.num_actors  # a fixed share of actors for each task, section 5.3
    actors = [[Group(task, make_env(task, args, args.group_size)) for _ in range(2)] for task in tasks]
    check_tasks(actors)
    exchange, threads = Exchange(), []
    try:
        if not args.sync:
            torch.get_num_threads()  # fixes the learner's number, or it would take on that of its actors
            for k, groups in enumerate(actors):
                name = f"actor {k}"
                thread = Thread(target=act, name=name, args=(name, groups, exchange, args))
                thread.start()  # and waits for room
                threads.append(thread)
        return learn(actors, exchange, args)
    finally:
        exchange.is_closed = True
        exchange.room.release(len(actors))
        HEARTBEATS.pop("iteration", None)  # from now on, only an actor that hangs is a stall
        for thread in threads:
            thread.join()  # it ends the environment step that it is in


def learn(actors: list[list[Group]], exchange: Exchange, args: Args) -> Path:
    """Learns from the actors' segments until the end or a signal; returns the run folder."""
    envs, device = actors[0][0].envs, args.device
    if len(envs.single_observation_space.shape) == 1:
        torch.set_num_threads(1)  # small networks: more threads only cost, larger ones may want them
    agent = Agent(envs, args).to(device)
    # For speed, all parameters become views of flat, and their gradients views of flat.grad. From here on,
    # agent.to() or agent.zero_grad() would break it.
    flat = flatten(agent.parameters())
    lr = torch.tensor(float(args.learning_rate), device=device)  # a tensor, or annealing would recompile
    if args.optimizer == "adam":
        optimizer = torch.optim.Adam([flat], lr=lr, eps=1e-5, fused=True, capturable=True)
    else:
        optimizer = RMSProp(flat, lr, args.rmsprop_decay, args.rmsprop_eps)
    run = Run(args, log_every=args.log_every, agent=agent, optimizer=optimizer)  # folder, logs, checkpoints
    optimizer.param_groups[0]["lr"] = lr  # --resume loads a copy, which lr.fill_() would not reach

    def update(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        flat.grad.zero_()  # in place, as the parameters' gradients are views of it
        loss, metrics = impala_loss(agent, batch, args)
        loss.backward()
        if args.sync_every > 1:  # a learner that is alone takes its segments for all
            flat.grad.mul_(WORLD_SIZE)
        elif WORLD_SIZE > 1:  # several learners, section 3: gradients are summed
            torch.distributed.all_reduce(flat.grad)
        norm = flat.grad.norm()
        flat.grad.mul_((args.max_grad_norm / (norm + 1e-6)).clamp(max=1))
        optimizer.step()
        return metrics | dict(grad_norm=norm)

    if args.compile:
        update = torch.compile(update)

    for k, group in enumerate(chain(*actors)):  # a resumed run begins new episodes
        group.reset(run.seed + k * args.group_size)
        group.state = agent.initial_state(args.group_size)
    publish(agent, run.numbers["iteration"], exchange, args)  # after a GPU has written the states, too
    exchange.room.release(args.room)
    turns, replay = cycle(actors), Replay(args.replay_segments)
    num_replayed = (args.batch_segments - args.new_segments) // WORLD_SIZE
    lags, waits, last_log, status = [], [], time.monotonic(), ""
    for iteration in run.iterations():  # those that are left, each with a seed of its own
        frac = 1 - iteration / args.num_iterations
        lr.fill_(args.learning_rate * (frac if args.anneal_lr else 1))

        # 1. segments, new and replayed
        start, ready = time.monotonic(), exchange.queue.qsize()
        received = receive(exchange, turns, args)
        waits.append((time.monotonic() - start, sum(segments.seconds for segments in received), ready))
        lags += [iteration - segments.version for segments in received]
        batch = side_by_side([segments.data for segments in received])
        if num_replayed:
            replay.add(batch)
            rng = np.random.default_rng((args.seed, iteration, RANK))
            batch = side_by_side([batch, replay.sample(num_replayed, rng)])
        final_obs = batch.pop("final_obs")
        batch = {name: torch.as_tensor(x, device=device) for name, x in batch.items()}
        batch["bootstraps"] = beyond_time_limits(agent, batch, final_obs, args.gamma)  # by the newest values

        # 2. update
        metrics = update(batch)
        if args.sync_every > 1 and WORLD_SIZE > 1 and (iteration + 1) % args.sync_every == 0:
            average_with_neighbor(flat)
        publish(agent, iteration + 1, exchange, args)

        # 3. log
        ended = [episode for segments in received for episode in segments.episodes]
        ended.sort(key=lambda episode: episode[0])
        run.episodes = [(run.step + t * args.new_segments, episode) for t, episode in ended]
        run.step += args.batch_size
        scalars = {"charts/learning_rate": lr}
        if run.is_logged:
            scalars |= {"charts/policy_lag": np.mean(lags), "charts/policy_lag_max": max(lags)}
            scalars |= shares_of_time(waits, time.monotonic() - last_log, args)
            status = f", lag {np.mean(lags):.1f}, learner waits {scalars['charts/learner_wait']:.0%}"
            status += f", actor waits {scalars['charts/actor_wait']:.0%}"
            lags, waits, last_log = [], [], time.monotonic()
        run.log(metrics, scalars, status, observations=batch["obs"], rewards=batch["last_rewards"])
    return run.folder


# === Evaluation ==============================================================================


def load_agent(args: Args, env_id: str) -> tuple[Group, Agent]:
    """One environment of a task and the agent of the run args.evaluate, for evaluate() and for notebooks."""
    video_dir = Path(args.evaluate) / "videos" if args.capture_video else None
    group = Group(env_id, make_env(env_id, args, 1, video_dir), video_dir)
    agent = Agent(group.envs, args).to(args.device)
    load_checkpoint(args.evaluate, dict(agent=agent))
    return group, agent


@torch.no_grad()
def evaluate(args: Args) -> list[float]:
    """Returns of full episodes of the agent of the run args.evaluate, which samples as in training."""
    seed_all(args.seed)
    all_returns = []
    for env_id in args.env_ids:
        (group, agent), returns = load_agent(args, env_id), []
        group.reset(seed=args.seed + args.total_timesteps + args.num_envs)  # a seed not used in training
        if group.row["obs"].ndim == 2:
            torch.set_num_threads(1)  # small networks: more threads only cost, larger ones may want them
        state = agent.initial_state(1)
        for _ in evaluation_steps(args, returns):  # while there are fewer than args.eval_episodes
            dist, _, state = agent(tensors(group.row, args), state)
            group.send(dist.sample()[0].cpu().numpy())
            _, episodes = group.receive()
            returns += [episode["charts/episodic_return"] for episode in episodes]
        group.envs.close()
        if len(args.env_ids) > 1 and returns:  # none, where a signal came before
            print(f"{env_id}: return {np.mean(returns):.2f} +- {np.std(returns):.2f}")
        all_returns += returns
    return all_returns


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
from collections.abc import Iterable, Iterator, Sequence
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
FIXED = (
    "env_id",
    "env_kwargs",
    "seed",
    "num_envs",
    "num_steps",
    "batch_segments",
    "replay_fraction",
    "optimizer",
)  # what --resume cannot change
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


def warn_of_lag(args: Args):
    """Says how far segments will be behind the learner, if other flags would make it two versions less."""
    least = 0 if args.sync else 1  # versions
    lag = least + math.ceil(2 * args.room / args.batch_groups) - 1  # of the last for which there is room
    if lag > least + 1 and RANK == 0:
        expected = f"expect segments about {lag} versions behind the learner instead of {least}"
        remedy = f"let a batch's new segments be a multiple of the {args.num_envs} environments"
        print(f"{SCRIPT}.py: warning: {expected}: {remedy}", file=sys.stderr)


def check_tasks(actors: list[list[Group]]):
    """Fails if the tasks have different observations or actions."""
    first = actors[0][0]
    for group, *_ in actors:
        spaces = [(x.envs.single_observation_space, x.envs.single_action_space) for x in (first, group)]
        if spaces[0] != spaces[1]:
            theirs = f"{first.env_id}, {spaces[0]}, and {group.env_id}, {spaces[1]}"
            fail(f"one network cannot play {theirs}")


def check_game(args: Args, spec: gym.envs.registration.EnvSpec, video_dir: Path | None):
    """Fails for an Atari game that skips frames at random, and for videos without the package they need."""
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
    if video_dir and not find_spec("moviepy"):
        fail("--capture-video: pip install moviepy")


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
    counts = "total_timesteps num_envs num_actors num_steps batch_segments replay_segments sync_every"
    counts += " log_every save_every eval_episodes"
    rates = "gamma rho_bar c_bar vtrace_lambda replay_fraction learning_rate rmsprop_decay rmsprop_eps"
    rates += " ent_coef vf_coef max_grad_norm"
    minimum = dict.fromkeys(counts.split(), 1) | dict.fromkeys(["seed", "stall_seconds", *rates.split()], 0)
    for name, x in asdict(args).items():
        if name in minimum and not minimum[name] <= x < np.inf:
            raise ValueError(f"{name} cannot be {x}")
    groups, unit = args.num_groups, WORLD_SIZE * max(1, args.group_size)
    replays = not args.replay_fraction or args.new_segments < args.batch_segments
    is_whole = args.new_segments % unit == 0 and args.batch_segments % WORLD_SIZE == 0
    rules = {
        "give --resume or --evaluate, not both": not (args.resume and args.evaluate),
        "--capture-video records the episodes of --evaluate": args.evaluate or not args.capture_video,
        "max_grad_norm must be above 0": args.max_grad_norm > 0,
        "env_id may have one colon, after a module": all(
            re.fullmatch(r"([^:]+:)?[^:]*", x) for x in args.env_ids
        ),
        "env_kwargs must be a JSON object": is_json_object(args.env_kwargs),
        "stall_seconds must be below 2**22": args.stall_seconds < 2**22,  # 48 days: Windows' limit
        "seed + steps must be below 2**31": args.seed + args.total_timesteps + args.num_envs < 2**31,
        "gamma and vtrace_lambda must be at most 1": max(args.gamma, args.vtrace_lambda) <= 1,
        "rmsprop_decay must be at most 1": args.rmsprop_decay <= 1,
        "--env-id needs at least one id": all(args.env_ids),
        "replay_fraction must be below 1: new segments keep the replay alive": args.replay_fraction < 1,
        "replay_fraction must be 0, or replay a segment of a batch": replays,
        f"num_envs must be a multiple of {groups}: two groups an actor and task": args.num_envs % groups == 0,
        f"a batch's {args.new_segments} new segments must be a multiple of {unit}, a group's": is_whole,
        "total_timesteps must be at least new segments of a batch * num_steps": args.num_iterations >= 1,
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


def check_spaces(env_id: str, envs: gym.vector.VectorEnv):
    """Fails for environments that the agent cannot play."""
    obs_space, action_space = envs.single_observation_space, envs.single_action_space
    if envs.envs[0].spec.entry_point == "ale_py.env:AtariEnv":  # without its frames, lives and no-ops
        fail(f"--env-id {env_id}: write it as BreakoutNoFrameskip-v4 and ALE/Breakout-v5 are written")
    if not isinstance(action_space, gym.spaces.Discrete) or action_space.start != 0:
        fail(f"{env_id} acts in {action_space}: try ppo_continuous.py, ppo_multidiscrete.py, Discrete from 0")
    if not isinstance(obs_space, gym.spaces.Box):
        hint = "gym.wrappers.FlattenObservation in make_env() makes vectors"
        fail(f"{env_id} observes {obs_space}: this script takes vectors and images; {hint}")


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
