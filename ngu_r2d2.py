# /// script
# requires-python = ">=3.10"
# dependencies = ["ale-py>=0.12", "filelock>=3.15", "gymnasium[classic-control]>=1.1", "minigrid>=3",
#     "numpy", "tensorboard>=2.18", "torch>=2.6", "tqdm>=4.64", "tyro>=1.0.16"
# ]
# ///
# ruff: noqa: E402  (what only the lower part needs is imported there)
"""Never Give Up on R2D2: recurrent Q-learning from replay, driven by novelty within an episode and for life.

    python ngu_r2d2.py --env-id MiniGrid-DoorKey-8x8-v0       # every field of Args is a flag; see --help
    python ngu_r2d2.py --num-policies 1 --beta 0              # R2D2 alone
    python ngu_r2d2.py --resume runs/NAME                     # go on with a run that was stopped
    python ngu_r2d2.py --evaluate runs/NAME                   # play full episodes with its agent and beta 0
    torchrun --nproc-per-node 4 ngu_r2d2.py                   # four processes that share the environments

Papers   NGU: Badia et al. 2020, https://arxiv.org/abs/2002.06038
         R2D2: Kapturowski et al. 2019, https://openreview.net/forum?id=r1lyTjAqYX
Choices  1 to 9 in the comments: where the papers contradict themselves or say nothing
Shapes   L = burn_in + unroll steps of a sequence, which has L + 1 rows; B sequences a batch; N environments.
         Row t has an observation and what led to it: step t has the action last_actions[t + 1], and its
         rewards, discount and end are of row t + 1 alike.
"""

import json
import os
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import ale_py
import gymnasium as gym
import minigrid
import numpy as np
import torch
import torch.nn as nn
from ale_py.vector_env import AtariVectorEnv
from torch import Tensor

RANK = int(os.environ.get("RANK", 0))  # number of this process among torchrun's
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # how many there are

# === Arguments ===============================================================================

Bonus = Literal["calibrated", "min-max", "batch-mean", "long-run-mean", "zero-mean", "unit-std"]


@dataclass
class Args:
    env_id: str = "MiniGrid-DoorKey-8x8-v0"  # Gymnasium id of the task
    env_kwargs: str = "{}"  # arguments of the environment in JSON, such as '{"max_episode_steps": 100}'
    total_timesteps: int = 1_000_000  # environment steps, summed over the parallel environments
    seed: int = 1  # of Python, NumPy, PyTorch and the environments

    # acting
    num_envs: int = 16  # parallel environments, divided among torchrun's processes
    num_steps: int = 4  # steps per environment and rollout (T)
    epsilon: float = 0.4  # share of random actions of the first environment; the last has its 8th power
    eval_epsilon: float = 0.01  # share of random actions in --evaluate, and of Retrace's target policy
    bootstrap_truncated: bool = True  # at time limits, add gamma * value of the last observation to rewards

    # sequences and their replay
    burn_in: int = 10  # steps that only warm up the LSTM's state
    unroll: int = 40  # steps to train on
    period: int = 40  # steps between the beginnings of an episode's sequences
    replay_steps: int = 100_000  # capacity of all processes; an episode takes one step more than it has
    learning_starts: int = 10_000  # environment steps in the replay before the first update
    priority_exponent: float = 0.9  # of priorities in a draw; 0 draws uniformly
    priority_eta: float = 0.9  # weight of a sequence's largest TD error, against the mean
    importance_exponent: float = 0.6  # of the weights that correct for priorities
    cross_mixture: float = 0.5  # share of a batch trained on for a policy drawn anew, not for its player
    save_replay: bool = False  # in the checkpoint; of torchrun's processes, that of the first alone

    # R2D2
    learning_rate: float = 5e-4  # Adam's
    adam_eps: float = 1e-7  # of both optimizers; the paper's 1e-4 drowns the gradients of small rewards
    batch_sequences: int = 16  # sequences of an update, divided among torchrun's processes
    updates_per_rollout: int = 2  # updates after num_envs * num_steps environment steps
    target: Literal["nstep", "retrace"] = "nstep"  # value targets
    n_step: int = 5  # steps of an n-step target
    retrace_lambda: float = 0.95  # of Retrace
    target_every: int = 50  # updates between copies to the target network
    h_eps: float = 1e-3  # of the value rescaling
    hidden_size: int = 128  # of the encoder, the LSTM and the heads
    squash_reward: bool = True  # the LSTM sees sign(r) log(1 + |r|) of the last reward: hundreds saturate it
    max_grad_norm: float = 40.0  # clip of the global gradient norm

    # Never Give Up
    num_policies: int = 2  # one is drawn for each episode; weights of the intrinsic reward go from 0 to beta
    beta: float = 0.05  # largest weight of the intrinsic reward, which is not in the paper's unit
    gamma_max: float = 0.99  # discount of the policy with weight 0; the paper's is 0.997
    gamma_min: float = 0.95  # discount of the policy with weight beta
    neighbors: int = 10  # nearest memories of an episode to compare with
    memory_size: int = 3000  # newest steps of an episode that are remembered
    kernel_eps: float = 1e-3  # of the kernel that compares them
    bonus: Bonus = "calibrated"  # scale of the episodic reward; others are as in DI-engine
    rnd: bool = True  # multiply the episodic reward by life-long novelty
    rnd_max: float = 5.0  # largest life-long novelty
    train_embedding: bool = True  # train the embedding by inverse dynamics; without, it stays random
    embedding_every: int = 500  # updates between copies to the embedding of episodes that begin
    auxiliary_steps: int = 20  # last steps of a sequence that train the embedding and the predictor
    auxiliary_lr: float = 5e-4  # learning rate of both
    last_reward_weight: float = 1.0  # of the last reward that is not zero in an episode's last sequence

    # run
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"  # where the networks run
    amp: bool = False  # run Agent.encoder in bfloat16
    compile: bool = False  # torch.compile the update
    track: bool = False  # log to Weights & Biases too (offline with WANDB_MODE=offline)
    wandb_project_name: str = "ngu"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases user or team
    log_every: int = 50  # iterations between logs of losses and rates; episodes are logged as they end
    save_every: int = 500  # iterations between checkpoints; there is one every ten minutes, too
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

    @property
    def length(self) -> int:
        return self.burn_in + self.unroll

    @property
    def usual_novelty(self) -> float:
        """Episodic reward where all neighbors are at the mean distance."""
        return episodic_reward(np.ones((1, self.neighbors)), 1.0, self.kernel_eps).item()

    def __post_init__(self):
        check(self)


# === Environment =============================================================================


class AtariGames(AtariVectorEnv):
    """Atari games in C++, with one frame and 18 actions. Their episodes are logged as Gymnasium's are."""

    def __init__(self, spec: dict, num_envs: int, video_dir: Path | None):
        kept = ("game", "repeat_action_probability", "max_num_frames_per_episode")
        kwargs = {name: spec[name] for name in kept} | dict(num_envs=num_envs, stack_num=1)
        kwargs |= dict(reward_clipping=False, full_action_space=True, noop_max=31)  # it draws 0 to 30 no-ops
        kwargs |= dict(autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
        super().__init__(**kwargs)
        self.video_dir, self.video = video_dir, []
        if video_dir:  # a twin in colour, played with the same seeds and actions
            self.camera = AtariVectorEnv(**kwargs, img_height=210, img_width=160, grayscale=False)

    def reset(self, *, seed: int) -> tuple[np.ndarray, dict]:
        if self.video_dir:
            self.camera.reset(seed=seed)
        self.returns, self.began = np.zeros(self.num_envs), np.zeros(self.num_envs, int)
        return super().reset(seed=seed)

    def step(self, actions: np.ndarray) -> tuple:
        obs, rewards, terminated, truncated, info = super().step(actions)
        over = terminated | truncated
        if self.video_dir:
            frames, *_ = self.camera.step(actions)
            self.video.append(frames[0, 0])
            if over[0]:
                self.save_video()
        self.returns += rewards
        began = info["frame_number"] - info["episode_frame_number"]  # a game lasts until the next one begins
        if over.any():  # CleanRL's length is in frames, and counts the no-ops at the start
            episode = dict(r=self.returns.copy(), l=began - self.began)
            info["final_info"] = dict(episode=episode, _episode=over)
        self.returns[over], self.began = 0, began
        return obs, rewards, terminated, truncated, info

    def save_video(self):
        from moviepy import ImageSequenceClip

        self.video_dir.mkdir(exist_ok=True)
        path = self.video_dir / f"{len(list(self.video_dir.iterdir()))}.mp4"
        ImageSequenceClip(self.video, fps=15).write_videofile(path, logger=None)  # every 4th of 60 a second
        self.video = []


def make_env(args: Args, num_envs: int, video_dir: Path | None = None) -> gym.vector.VectorEnv:
    """Vectorized environments, each reset within the step that ends its episode."""
    gym.register_envs(ale_py)
    gym.register_envs(minigrid)
    spec = gym.registry.get(args.env_id)
    if spec and spec.entry_point == "ale_py.env:AtariEnv":
        check_game(args, spec, video_dir)
        return AtariGames(spec.kwargs | json.loads(args.env_kwargs), num_envs, video_dir)

    def make() -> gym.Env:
        kwargs = json.loads(args.env_kwargs) | (dict(render_mode="rgb_array") if video_dir else {})
        env = gym.make(args.env_id, **kwargs)
        if video_dir:
            if not env.render_mode:
                fail(f"--capture-video: {args.env_id} renders no images")
            env = gym.wrappers.RecordVideo(env, str(video_dir), lambda n: n < args.eval_episodes)
        return as_array(gym.wrappers.RecordEpisodeStatistics(env))

    same_step = gym.vector.AutoresetMode.SAME_STEP
    try:
        envs = gym.vector.SyncVectorEnv([make] * num_envs, autoreset_mode=same_step)
    except (gym.error.Error, ImportError, TypeError) as error:
        fail_to_make(args.env_id, error)
    check_spaces(args.env_id, envs)  # refuses what Agent cannot play; change both together
    return envs


def as_array(env: gym.Env) -> gym.Env:
    """Observations as images (channels, height, width) or vectors; of a dictionary, its image (MiniGrid)."""
    if isinstance(env.observation_space, gym.spaces.Dict) and "image" in env.observation_space.spaces:
        image = env.observation_space["image"]
        env = gym.wrappers.TransformObservation(env, lambda obs: obs["image"], image)
    space = env.observation_space
    shape = space.shape if isinstance(space, gym.spaces.Box) else ()
    is_image = len(shape) == 3 and min(shape[:2]) >= 36
    has_pixels = len(shape) == 3 or len(shape) > 1 and space.dtype == np.uint8
    if has_pixels and not is_image and sorted(shape)[-2] >= 36:  # channels come first, or there are none
        fail(f"{shape} is no image of (height, width, channels): transpose or flatten it in make_env()")
    if len(shape) not in (1, 3):
        return env

    def channels_first(x: np.ndarray) -> np.ndarray:
        # a copy, as Gymnasium keeps final observations as they are, and an environment may reuse its array
        return np.moveaxis(x, -1, 0).copy()

    low, high = channels_first(space.low), channels_first(space.high)
    space = gym.spaces.Box(low, high, dtype=space.dtype.type)
    return gym.wrappers.TransformObservation(env, channels_first, space)


# === Agent ===================================================================================


def kind_of(shape: tuple[int, ...]) -> Literal["pixels", "grid", "vector"]:
    """Kind of an observation by its shape. It decides how the observation is scaled and encoded."""
    if len(shape) == 1:
        return "vector"
    return "pixels" if min(shape[1:]) >= 36 else "grid"


def scaled(obs: Tensor) -> Tensor:
    """Observations (n, ...): pixels from 0 to 1; things on a grid, numbers below 11, as one-hot channels."""
    kind = kind_of(obs.shape[1:])
    if kind == "pixels":
        x = obs.to(torch.float32, memory_format=torch.channels_last)
        return x.div_(255) if obs.dtype == torch.uint8 else x
    if kind == "vector" or obs.dtype != torch.uint8:
        return obs.float()
    one_hot = torch.eye(11, device=obs.device)
    return nn.functional.embedding(obs.movedim(1, -1).int().clamp(max=10), one_hot).flatten(-2).movedim(-1, 1)


def scaled_shape(envs: gym.vector.VectorEnv) -> tuple[int, ...]:
    """Shape of a scaled observation."""
    return scaled(torch.as_tensor(envs.single_observation_space.sample())[None]).shape[1:]


def encoder(shape: tuple[int, ...], num_features: int) -> nn.Sequential:
    """Network from scaled observations (n, ...) to features (n, num_features)."""
    kind, conv, relu = kind_of(shape), nn.Conv2d, nn.ReLU(inplace=True)
    if kind == "vector":
        layers = [nn.Linear(shape[0], 64), relu]
    elif kind == "grid":
        layers = [conv(shape[0], 16, 3), relu, conv(16, 32, 3), relu, nn.Flatten()]
    else:
        layers = [conv(shape[0], 32, 8, stride=4), relu, conv(32, 64, 4, stride=2), relu]
        layers += [conv(64, 64, 3), relu, nn.Flatten()]
    size = nn.Sequential(*layers)(torch.zeros(1, *shape)).numel()
    features = nn.Sequential(*layers, nn.Linear(size, num_features), relu)
    if kind == "pixels":  # with PyTorch's own weights, Pong's ball hardly moved the features
        for x in features.parameters():
            nn.init.orthogonal_(x, 2**0.5) if x.ndim > 1 else nn.init.zeros_(x)
    return features


class Agent(nn.Module):
    """A recurrent dueling Q-network of all policies."""

    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__()
        self.args, self.num_actions, size = args, int(envs.single_action_space.n), args.hidden_size
        # first, as cuDNN wants its weights at the beginning of what flatten() makes
        self.lstm = nn.LSTM(size + self.num_actions + 2 + args.num_policies, size)
        self.encoder = encoder(scaled_shape(envs), size)
        self.value = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 1))
        self.advantage = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, self.num_actions))

    def features(self, obs: Tensor) -> Tensor:
        """Features (n, hidden_size) of scaled observations (n, ...)."""
        with torch.autocast(obs.device.type, torch.bfloat16, self.args.amp):
            return self.encoder(obs).float()

    def forward(self, rows: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """Rescaled action values (T, N, num_actions) of rows (T, N, ...), and the state after them.

        rows: as Actor has them, with features() of their observations; episodes begin in the first alone.
        state: (2, N, hidden_size), hidden and cell state before it.
        """
        one_hot, r_ext = nn.functional.one_hot, rows["r_ext"]
        if self.args.squash_reward:
            r_ext = r_ext.sign() * r_ext.abs().log1p()
        rewards = torch.stack((r_ext, rows["r_int"]), -1)
        actions = one_hot(rows["last_actions"], self.num_actions)
        policies = one_hot(rows["policies"], self.args.num_policies)
        x = torch.cat((rows["features"], actions, rewards, policies), -1)
        state = state * ~rows["starts"][0, :, None]
        x, state = self.lstm(x, (state[:1].contiguous(), state[1:].contiguous()))
        advantage = self.advantage(x)
        return self.value(x) + advantage - advantage.mean(-1, keepdim=True), torch.cat(state)


# === Algorithm ===============================================================================


def policy_family(num_policies: int, beta: float, gamma_max: float, gamma_min: float) -> Tensor:
    """Weights of the intrinsic reward and discounts (2, num_policies); appendix A of NGU.

    Choice 9: the formulas divide by N - 2 and N - 1. A single policy has beta and gamma_max, two have 0 and
    beta. The first weight is exactly 0, so that it is the policy to evaluate.
    """
    i, last = torch.arange(num_policies, dtype=torch.float64), num_policies - 1
    betas = beta * torch.sigmoid(10 * (2 * i - (last - 1)) / max(last - 1, 1))
    betas[0] = 0
    betas[-1] = beta  # even if it is the only one
    gammas = 1 - np.geomspace(1 - gamma_max, 1 - gamma_min, num_policies)
    return torch.stack((betas, torch.from_numpy(gammas)))


def epsilons(num_envs: int, epsilon: float = 0.4) -> np.ndarray:
    """Share of random actions of each environment (N,), from epsilon down to epsilon^8: Ape-X's ladder."""
    return epsilon ** (1 + 7 * np.arange(num_envs) / max(num_envs - 1, 1))


def h(x: Tensor, eps: float = 1e-3) -> Tensor:
    """Value rescaling, section 2.3 of R2D2."""
    return x.sign() * ((x.abs() + 1).sqrt() - 1) + eps * x


def h_inv(x: Tensor, eps: float = 1e-3) -> Tensor:
    """Inverse of h(). Choice 5: eps as in NGU's table; the root is squared, as its appendix E forgot to do.

    The root is a quotient whose parts do not cancel: the paper's difference of two numbers near 1 does.
    """
    y = x.abs() + 1 + eps
    root = 2 * y / (1 + (1 + 4 * eps * y).sqrt())
    return x.sign() * (root - 1) * (root + 1)


def nstep_targets(rewards: Tensor, discounts: Tensor, ends: Tensor, values: Tensor, n: int) -> Tensor:
    """Returns (T, B) of n steps; of fewer where the episode or the sequence ends (choice 7).

    rewards, discounts (0 where an episode terminated), ends (true where it terminated or was cut): (T, B).
    values: (T + 1, B), of the rows.
    """
    targets = values
    for _ in range(n):
        targets = torch.cat((rewards + discounts * torch.where(ends, values[1:], targets[1:]), values[-1:]))
    return targets[:-1]


def retrace_targets(rewards, discounts, ends, values, taken_values, traces) -> Tensor:
    """Retrace's targets (T, B) for the actions taken, Munos et al. 2016, https://arxiv.org/abs/1606.02647.

    rewards, discounts, ends: (T, B) as for nstep_targets. values: (T + 1, B), expected under the target
    policy; taken_values: (T, B), of the actions taken; traces: (T, B), lambda min(1, pi / mu) of them.
    """
    targets, beyond = torch.empty_like(rewards), values[-1]
    for t in reversed(range(len(rewards))):
        targets[t] = rewards[t] + discounts[t] * torch.where(ends[t], values[t + 1], beyond)
        beyond = values[t] + traces[t] * (targets[t] - taken_values[t])
    return targets


def sequence_priority(td_errors: Tensor, eta: float, mask: Tensor) -> Tensor:
    """eta max + (1 - eta) mean of the absolute errors (T, B) of each sequence (B,), where mask is true."""
    errors = td_errors.abs() * mask
    return eta * errors.max(0)[0] + (1 - eta) * errors.sum(0) / mask.sum(0).clamp(min=1)


def episodic_reward(
    squared_distances: np.ndarray,
    mean_squared_distance: np.ndarray | float,
    kernel_eps: float = 1e-3,
    cluster_distance: float = 0.008,
    constant: float = 0.001,
    max_similarity: float = 8.0,
) -> np.ndarray:
    """Novelty (N,) by squared distances (N, k) to the nearest memories of the episode, algorithm 1 of NGU.

    mean_squared_distance: (N, 1), or one number for all.

    Choice 4: where memories are fewer than k, the others are infinitely far, and the sum counts as one of k.
    The constant is outside of the root, as in the algorithm.
    """
    found = np.isfinite(squared_distances).sum(-1).clip(1)
    distances = squared_distances / np.maximum(mean_squared_distance, 1e-12) - cluster_distance
    distances = np.maximum(distances, 0)
    kernel = kernel_eps / (distances + kernel_eps)
    similarity = np.sqrt(kernel.sum(-1) * squared_distances.shape[-1] / found) + constant
    return np.where(similarity > max_similarity, 0, 1 / similarity)


def rescaled(novelty: Tensor, mask: Tensor, how: Bonus) -> Tensor:
    """Episodic rewards (T, B) on a scale of their batch without its padding, like DI-engine."""
    seen = novelty[mask]
    if how == "min-max":
        return (novelty - seen.min()) / (seen.max() - seen.min() + 1e-8)
    if how == "batch-mean":
        return novelty / (seen.mean() + 1e-8)
    deviation = seen.std() if len(seen) > 1 else 1.0
    if how == "zero-mean":
        return (novelty - seen.mean()) / (deviation + 1e-8)
    if how == "unit-std":
        return novelty / (deviation + 1e-8)
    return novelty  # scaled when it was made


def q_values(agent: Agent, target: Agent, batch: dict[str, Tensor], args: Args) -> tuple[Tensor, Tensor]:
    """Rescaled action values (L + 1, B, A) of sequences by the online and by the target network."""
    names = ("last_actions", "r_ext", "r_int", "policies", "starts")
    rows, state, q = {name: batch[name] for name in names}, batch["state"], []
    is_row = torch.arange(args.length + 1, device=state.device)[:, None] <= batch["lengths"]
    obs = scaled(batch["obs"][is_row])  # padding is not encoded: saves a tenth of the time in short episodes
    zeros = torch.zeros(*is_row.shape, args.hidden_size, device=state.device)
    rows["features"] = zeros.index_put((is_row,), agent.features(obs))
    parts = (slice(0, args.burn_in), slice(args.burn_in, None)) if args.burn_in else (slice(None),)
    for part in parts:
        values, state = agent({name: x[part] for name, x in rows.items()}, state.detach())
        q.append(values)  # no gradient reaches back through the state into the burn-in
    with torch.no_grad():
        rows["features"] = zeros.index_put((is_row,), target.features(obs))
        target_q, _ = target(rows, batch["state"])
    return torch.cat(q), target_q


@torch.no_grad()
def q_targets(
    q: Tensor, target_q: Tensor, rewards: Tensor, gammas: Tensor, batch: dict[str, Tensor], args: Args
) -> Tensor:
    """Rescaled targets (L, B) for the actions taken, of action values (L + 1, B, A) and rewards (L, B)."""
    actions, ends = batch["last_actions"][1:, :, None], batch["ends"][1:]
    discounts, greedy = gammas * batch["discounts"][1:], q.argmax(-1, keepdim=True)
    values = h_inv(target_q, args.h_eps)
    if args.target == "nstep":  # double Q: chosen by the online network
        best = values.gather(-1, greedy).squeeze(-1)
        return h(nstep_targets(rewards, discounts, ends, best, args.n_step), args.h_eps)
    # Choice 8: the target policy is epsilon-greedy, of the online network.
    pi = torch.full_like(q, args.eval_epsilon / q.shape[-1])
    pi.scatter_add_(-1, greedy, torch.full_like(q[..., :1], 1 - args.eval_epsilon))
    ratio = pi[:-1].gather(-1, actions).squeeze(-1) / batch["mu"][1:].clamp(min=1e-6)
    traces = args.retrace_lambda * ratio.clamp(max=1)
    taken = values[:-1].gather(-1, actions).squeeze(-1)
    expected = (pi * values).sum(-1)
    return h(retrace_targets(rewards, discounts, ends, expected, taken, traces), args.h_eps)


def q_loss(agent: Agent, target: Agent, batch: dict[str, Tensor], family: Tensor, args: Args):
    """Loss of sequences (L + 1, B, ...) as Replay has them, priorities (B,), and the diagnostics to log."""
    mask, actions = batch["mask"], batch["last_actions"][1:, :, None]
    betas, gammas = family[:, batch["policies"][0]]
    q, target_q = q_values(agent, target, batch, args)
    alpha = batch["alpha"][1:].clamp(min=1)
    r_int = rescaled(batch["r_int"][1:] / alpha, mask, args.bonus) * alpha
    targets = q_targets(q, target_q, batch["rewards"][1:] + betas * r_int, gammas, batch, args)
    q_taken = q[:-1].gather(-1, actions).squeeze(-1)
    td_errors = (targets - q_taken) * mask  # choice 7: padding counts nowhere
    loss = (batch["weights"] * 0.5 * (td_errors**2).sum(0)).mean()
    with torch.no_grad():
        priorities = sequence_priority(td_errors, args.priority_eta, mask)
        info = dict(td_loss=0.5 * (td_errors**2).sum() / mask.sum(), q=q_taken[mask].mean())
        info |= dict(target=targets[mask].mean(), intrinsic_reward=r_int[mask].mean())
    return loss, priorities, info


# === Curiosity ===============================================================================


def mean_over_processes(x: Tensor) -> Tensor:
    """Mean of a tensor over the processes of torchrun."""
    mean = x / WORLD_SIZE
    torch.distributed.all_reduce(mean)
    return mean


class RunningMoments(nn.Module):
    """Mean and variance of what was seen, for the most part of its last `horizon` members."""

    def __init__(self, *shape: int, horizon: float = np.inf):
        super().__init__()
        self.horizon = horizon
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        self.register_buffer("count", torch.tensor(0.0))

    def update(self, x: Tensor):
        """Includes a batch (n, ...), except in evaluation."""
        if not self.training:
            return
        n, mean, total = len(x), x.mean(0), self.count + len(x)
        delta, var = mean - self.mean, ((x - mean) ** 2).mean(0)  # var() is slower
        m2 = self.var * self.count + var * n + delta**2 * self.count * n / total
        self.mean += delta * n / total
        self.var.copy_(m2 / total)
        self.count.copy_(total.clamp(max=self.horizon))


class FrozenEmbedding(nn.Sequential):
    """A copy of the embedding as it is now, and the mean distance between what it embeds.

    Choice 3: a running mean of all environments, updated before its use, kept across episodes; of the last
    hundred steps, as the agent changes. Each copy has its own, as each has its own scale.

    distances: running sum and number of squared distances.
    """

    def __init__(self, embedding: nn.Sequential, distances: Tensor):
        super().__init__(*deepcopy(embedding))
        self.requires_grad_(False)
        self.register_buffer("distances", distances)

    def note_distances(self, nearest: np.ndarray):
        """Includes the finite ones of a step's squared distances, except in evaluation."""
        found = nearest[np.isfinite(nearest)]
        if self.training:
            self.distances.mul_(0.99).add_(self.distances.new_tensor((found.sum(), found.size)))

    def mean_distance(self) -> float:
        total, count = self.distances
        return (total / count.clamp(min=1e-6)).item()


class EpisodicMemory:
    """The newest observations of the running episode in each environment, embedded.

    An episode keeps the embedding with which it began, as distances between two embeddings mean nothing.
    """

    def __init__(self, num_envs: int, args: Args):
        self.memory_size, self.neighbors = args.memory_size, args.neighbors
        self.entries = np.zeros((num_envs, args.memory_size, 32), np.float32)  # a ring for each environment
        self.counts = np.zeros(num_envs, np.int64)  # entries of the episode so far, overwritten ones included
        self.embeddings = [None] * num_envs  # of the episode in each environment

    def begin(self, x: Tensor, starts: np.ndarray, embedding: FrozenEmbedding):
        """Where an episode starts, forgets all but its first observation, of scaled ones (N, ...)."""
        self.counts[starts] = 0
        for n in starts.nonzero()[0]:
            self.embeddings[n] = embedding
        self.add(self.embed(x), starts)

    def users(self) -> list[tuple[FrozenEmbedding, list[int]]]:
        """Embeddings in use, each with the environments that use it."""
        return [(x, [n for n, used in enumerate(self.embeddings) if used is x]) for x in set(self.embeddings)]

    def embed(self, x: Tensor) -> np.ndarray:
        """Embeds scaled observations (N, ...) as (N, 32), each by the embedding of its episode."""
        embedded = np.zeros((len(x), 32), np.float32)
        for embedding, n in self.users():
            embedded[n] = embedding(x[n]).cpu().numpy()
        return embedded

    def add(self, embedded: np.ndarray, where: np.ndarray):
        n = where.nonzero()[0]
        self.entries[n, self.counts[n] % self.memory_size] = embedded[n]
        self.counts[n] += 1

    def nearest(self, embedded: np.ndarray) -> np.ndarray:
        """Squared distances (N, neighbors) to the nearest entries, infinite where there are fewer."""
        known = min(int(self.counts.max()), self.memory_size)
        distances = ((self.entries[:, :known] - embedded[:, None]) ** 2).sum(-1)
        distances[np.arange(known) >= self.counts[:, None]] = np.inf
        nearest, k = np.full((len(embedded), self.neighbors), np.inf), min(self.neighbors, known)
        nearest[:, :k] = np.partition(distances, k - 1, axis=1)[:, :k]
        return nearest


class Curiosity(nn.Module):
    """The intrinsic reward: novelty within the episode times novelty for life."""

    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__()
        self.args, num_actions, shape = args, int(envs.single_action_space.n), scaled_shape(envs)
        self.embedding = encoder(shape, 32)
        self.inverse = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, num_actions))
        self.rnd_target, self.rnd_predictor = (encoder(shape, 128)[:-1] for _ in range(2))
        nn.ModuleList((self.embedding, self.inverse)).requires_grad_(args.train_embedding)
        self.rnd_predictor.requires_grad_(args.rnd)
        self.rnd_target.requires_grad_(False)
        self.whitening = RunningMoments(1, *shape).to(memory_format=torch.channels_last)  # as what it whitens
        self.errors, self.novelties = RunningMoments(horizon=2e3 / WORLD_SIZE), RunningMoments()
        self.acting_embedding = FrozenEmbedding(self.embedding, torch.zeros(2))
        self.memory = EpisodicMemory(envs.num_envs, args)

    def refresh(self):
        """Embeds episodes that begin from now on by the embedding as it is now."""
        # It begins with the mean distance so far, which the first distances of its own outweigh.
        mean = self.acting_embedding.mean_distance()
        distances = 1e-6 * torch.tensor([mean, 1.0], device=self.args.device)
        self.acting_embedding = FrozenEmbedding(self.embedding, distances)

    def merge(self):
        """Merges statistics with those of torchrun's other processes, which have seen as many steps."""
        for moments in (self.whitening, self.errors, self.novelties):
            mean = mean_over_processes(moments.mean)
            moments.var.copy_(mean_over_processes(moments.var + (moments.mean - mean) ** 2))
            moments.mean.copy_(mean)
        distances = self.acting_embedding.distances
        distances.copy_(mean_over_processes(distances))

    def begin(self, obs: np.ndarray, starts: np.ndarray):
        """Begins the memory of an episode where one starts (N,), with its first observation (N, ...)."""
        x = scaled(torch.as_tensor(obs, device=self.args.device))
        self.memory.begin(x, starts, self.acting_embedding)

    def forward(self, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
        """Intrinsic rewards (N,) of arriving at observations (N, ...), alpha (N,) in them, and what to log.

        Choice 1: the reward is that of the state arrived at, and belongs to the action that led there.
        """
        x = scaled(torch.as_tensor(obs, device=self.args.device))
        novelty, mean_distance = self.novelty_in_episode(x)
        alpha = self.novelty_for_life(x) if self.args.rnd else np.ones(len(obs))
        reward = novelty * alpha
        info = dict(novelty=novelty, distance=mean_distance, memory=self.memory.counts)
        info |= dict(alpha=alpha, reward=reward)
        if self.args.rnd:
            info |= dict(alpha_at_least=alpha <= 1, alpha_at_most=alpha >= self.args.rnd_max)
        info = {name: values.mean() for name, values in info.items()}
        return reward.astype(np.float32), alpha.astype(np.float32), info

    def novelty_in_episode(self, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Novelty (N,) of scaled observations (N, ...), and the mean distances (N,) that are its unit.

        An observation is compared with those before it in its episode, and then remembered itself.
        """
        args, embedded = self.args, self.memory.embed(x)
        nearest, mean = self.memory.nearest(embedded), np.zeros(len(x))
        for embedding, n in self.memory.users():
            embedding.note_distances(nearest[n])
            mean[n] = embedding.mean_distance()
        novelty, usual = episodic_reward(nearest, mean[:, None], args.kernel_eps), args.usual_novelty
        if args.bonus == "long-run-mean":
            self.novelties.update(torch.from_numpy(novelty).float().to(x.device))
            usual = self.novelties.mean.item()
        novelty /= usual
        # Choice 2: an observation as far away as usual is worth 1, and none is worth more. Without that, the
        # first steps of an episode were worth far more than 1, whatever was done. The paper does not divide.
        if args.bonus == "calibrated":
            novelty = novelty.clip(max=1)
        self.memory.add(embedded, np.ones(len(x), bool))
        return novelty, mean

    def novelty_for_life(self, x: Tensor) -> np.ndarray:
        """Alpha (N,), section 2: 1 + (RND error - its mean) / its standard deviation, in [1, rnd_max]."""
        self.whitening.update(x)
        errors = self.prediction_errors(x)
        self.errors.update(errors)
        # Errors have no scale, as they shrink while the predictor learns: no constant is added to theirs.
        deviation = self.errors.var.sqrt().clamp(min=torch.finfo(torch.float32).tiny)
        alpha = 1 + ((errors - self.errors.mean) / deviation).cpu().numpy()
        return alpha.clip(1, self.args.rnd_max)

    def prediction_errors(self, x: Tensor) -> Tensor:
        """RND errors (n,) of scaled observations (n, ...), which it whitens."""
        mean, std = self.whitening.mean, (self.whitening.var + 1e-8).sqrt()
        x = (x - mean).div_(std).clamp_(-5, 5)
        return ((self.rnd_predictor(x) - self.rnd_target(x)) ** 2).mean(-1)

    def loss(self, obs: Tensor, actions: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of inverse dynamics and of the predictor on last_transitions(), and the diagnostics to log."""
        x = scaled(obs.flatten(0, 1))
        embedded = self.embedding(x).unflatten(0, obs.shape[:2])
        logits = self.inverse(torch.cat((embedded[:-1], embedded[1:]), -1)[mask])
        actions = actions[mask]
        inverse_loss = nn.functional.cross_entropy(logits, actions)
        errors = self.prediction_errors(x).unflatten(0, obs.shape[:2])
        rnd_loss = errors[1:][mask].mean()
        accuracy = (logits.argmax(-1) == actions).float().mean()
        info = dict(inverse_loss=inverse_loss.detach(), rnd_loss=rnd_loss.detach(), inverse_accuracy=accuracy)
        # L2 of the inverse model alone (table 6): it would take novelty from what was never seen
        penalty = sum((x**2).sum() for x in (*self.embedding.parameters(), *self.inverse.parameters()))
        return inverse_loss + rnd_loss + 0.5e-5 * penalty, info


def last_transitions(batch: dict[str, Tensor], steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Observations (steps + 1, B, ...) around the last steps of sequences, their actions, and a mask.

    Actions and mask: (steps, B). The mask is false for padding and the burn-in.
    """
    first = (batch["lengths"] - steps).clamp(min=0)
    t = first + torch.arange(min(steps, len(batch["mask"])) + 1, device=first.device)[:, None]
    n = torch.arange(t.shape[1], device=first.device)
    return batch["obs"][t, n], batch["last_actions"][t[1:], n], batch["mask"][t[:-1], n]


# === Replay ==================================================================================


class Replay:
    """The newest rows of each environment, and a table of the sequences in them, which are drawn by priority.

    A sequence begins every `period` steps of an episode. The end cuts the oldest unfinished one short, and
    leaves out others: a batch pads what is missing of L steps, with a mask that is false. The first one of an
    episode is trained on from its first row, as its state is known to be zero; others from row burn_in on,
    with the state stored before row 0.
    """

    def __init__(self, args: Args, envs: gym.vector.VectorEnv):
        self.args, N, space = args, envs.num_envs, envs.single_observation_space
        self.size = args.replay_steps // args.num_envs  # rows of an environment: the next replaces the oldest
        self.rows = dict(obs=np.zeros((N, self.size, *space.shape), space.dtype))
        for name in ("last_actions", "policies"):
            self.rows[name] = np.zeros((N, self.size), np.int64)
        for name in ("r_ext", "r_int", "mu", "alpha", "discounts"):
            self.rows[name] = np.zeros((N, self.size), np.float32)
        for name in ("starts", "ends"):
            self.rows[name] = np.zeros((N, self.size), bool)
        self.written = np.zeros(N, np.int64)  # rows of an environment so far, those that were replaced too
        self.begun = np.zeros(N, np.int64)  # first row of the oldest unfinished sequence
        self.states = np.zeros((N, self.size // args.period + 2, 2, args.hidden_size), np.float32)
        self.sequences = np.zeros((0, 3), np.int64)  # environment, first row and length (in steps) of each
        self.priorities = np.zeros(0)
        self.steps = 0  # so far, of all environments: rows but the first ones of episodes
        self.cut = (args.length, args.period)  # how episodes are cut into sequences

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (*self.rows.values(), self.states))

    def append(self, row: dict[str, np.ndarray], arrival: dict[str, np.ndarray], state: np.ndarray):
        """Writes the rows (N, ...) that were arrived at, and those before them that start an episode.

        state: (2, N, hidden_size), before the rows that were arrived at.
        """
        n = row["starts"].nonzero()[0]
        self.begun[n] = self.written[n]
        self.write(row, n)
        n = ((self.written - self.begun) % self.args.period == 0).nonzero()[0]  # where a sequence may begin
        self.states[n, self.place_of_state(self.written[n])] = state[:, n].swapaxes(0, 1)
        self.write(arrival, np.arange(len(self.written)))
        self.steps += len(self.written)

        # new sequences: those that are full, and what is left of episodes that have ended
        ends, lengths = arrival["ends"], self.written - 1 - self.begun
        n = (ends | (lengths == self.args.length)).nonzero()[0]
        added = np.stack((n, self.begun[n], lengths[n]), axis=1)
        largest = self.priorities.max(initial=0) or 1.0  # unseen: as the most surprising
        self.begun[n] += self.args.period
        sequences = np.concatenate((self.sequences, added))
        priorities = np.concatenate((self.priorities, np.full(len(n), largest)))

        # without those whose first row was replaced, or will be by the first row of the next episode
        n, first, _ = sequences.T
        kept = first >= (self.written + ends)[n] - self.size
        self.sequences, self.priorities = sequences[kept], priorities[kept]

    def write(self, row: dict[str, np.ndarray], n: np.ndarray):
        """Replaces the oldest rows of environments n."""
        at = self.written[n] % self.size
        for name, x in self.rows.items():
            x[n, at] = row[name][n] if name in row else 0  # nothing led to a first row
        self.written[n] += 1

    def place_of_state(self, row: np.ndarray) -> np.ndarray:
        """Place of a sequence in the ring of states, by its first row.

        Those that do not begin an episode are `period` or more apart; of others, no state is read.
        """
        return row // self.args.period % self.states.shape[1]

    def sample(self, size: int, rng: np.random.Generator) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Draws sequences: their places (B,) in the table, and their batch with importance weights (B,)."""
        p = self.priorities**self.args.priority_exponent
        p /= p.sum()
        places = rng.choice(len(p), size, p=p)
        weights = (len(p) * p[places]) ** -self.args.importance_exponent
        batch = self.padded(places)
        others = rng.random(size) < self.args.cross_mixture
        batch["policies"][:, others] = rng.integers(self.args.num_policies, size=others.sum())
        return places, batch | dict(weights=(weights / weights.max()).astype(np.float32))

    def padded(self, places: np.ndarray) -> dict[str, np.ndarray]:
        """Rows (L + 1, B, ...) of sequences, zeros behind them; steps to train on; and states (2, B, ...)."""
        n, first, lengths = self.sequences[places].T
        t = np.arange(self.args.length + 1)[:, None]
        batch = {name: x[n, (first + t) % self.size] for name, x in self.rows.items()}
        for x in batch.values():
            x[t > lengths] = 0
        mask = (t[:-1] < lengths) & (batch["starts"][0] | (t[:-1] >= self.args.burn_in))
        rewards = batch["r_ext"].copy()  # the network's input stays what it saw
        last = self.args.length - (rewards[::-1] != 0).argmax(0)  # row of the last reward that is not zero
        rewards[last, np.arange(len(n))] *= np.where(batch["ends"].any(0), self.args.last_reward_weight, 1)
        state = self.states[n, self.place_of_state(first)].swapaxes(0, 1)
        return batch | dict(rewards=rewards, mask=mask, lengths=lengths, state=state)

    def state_dict(self) -> dict:
        arrays = self.rows | dict(written=self.written, states=self.states)
        arrays |= dict(sequences=self.sequences, priorities=self.priorities)
        tensors = {name: torch.from_numpy(x) for name, x in arrays.items()}
        return tensors | dict(steps=self.steps, cut=self.cut)

    def load_state_dict(self, state: dict):
        if state.get("cut", self.cut) != self.cut:
            raise ValueError(f"the saved replay has other sequences: (length, period) = {state['cut']}")
        for name, x in (self.rows | dict(written=self.written, states=self.states)).items():
            x[:] = state[name].numpy()
        self.sequences, self.priorities = state["sequences"].numpy(), state["priorities"].numpy()
        self.steps = state["steps"]


# === Training ================================================================================


class Actor:
    """Plays environments by epsilon-greedy policies, and says what each arrival is worth.

    row: what is to be seen now, arrays (N, ...): obs, last_actions, r_ext (raw) and r_int, zeros where an
    episode begins; starts, true there; policies, the index of the one that plays, drawn for each episode.
    state: (2, N, hidden_size), the network's hidden and cell state before it.
    """

    def __init__(self, args: Args, envs: gym.vector.VectorEnv, agent: Agent, curiosity: Curiosity):
        self.args, self.envs, self.agent, self.curiosity = args, envs, agent, curiosity

    @torch.no_grad()
    def reset(self, seed: int):
        N, args = self.envs.num_envs, self.args
        obs, _ = self.envs.reset(seed=seed)
        self.row = dict(obs=obs, last_actions=np.zeros(N, np.int64), starts=np.ones(N, bool))
        self.row |= dict(r_ext=np.zeros(N, np.float32), r_int=np.zeros(N, np.float32))
        self.row["policies"] = np.random.default_rng(seed).integers(args.num_policies, size=N)
        self.state = torch.zeros(2, N, args.hidden_size, device=args.device)
        if args.beta > 0:
            self.curiosity.begin(obs, self.row["starts"])

    @torch.no_grad()
    def step(self, epsilon: np.ndarray, rng: np.random.Generator) -> tuple[dict, list, dict[str, float]]:
        """One step of each environment, epsilon (N,) of them by random actions.

        Returns the arrival row, with mu (the probability of its action), alpha, ends and discounts; what to
        log of episodes that ended, and of novelty. The arrival row has the last observation of an episode
        that ended, self.row the first of the next one.
        """
        args, N, A, policies = self.args, len(epsilon), self.agent.num_actions, self.row["policies"]
        inputs = {name: torch.as_tensor(x, device=args.device)[None] for name, x in self.row.items()}
        inputs["features"] = self.agent.features(scaled(inputs["obs"][0]))[None]
        q, self.state = self.agent(inputs, self.state)
        greedy = q[0].argmax(-1).cpu().numpy()
        actions = np.where(rng.random(N) < epsilon, rng.integers(A, size=N), greedy)
        mu = (epsilon / A + (1 - epsilon) * (actions == greedy)).astype(np.float32)

        obs, r_ext, terminated, truncated, info = self.envs.step(actions)
        ends, final_obs = terminated | truncated, obs.copy()
        if ends.any():
            final_obs[ends] = np.stack(info["final_obs"][ends])
        r_int, alpha, novelty = np.zeros(N, np.float32), np.ones(N, np.float32), {}
        if args.beta > 0:
            r_int, alpha, novelty = self.curiosity(final_obs)
        arrival = dict(obs=final_obs, last_actions=actions, r_ext=r_ext.astype(np.float32), r_int=r_int)
        arrival |= dict(starts=np.zeros(N, bool), policies=policies)

        self.row = arrival | dict(obs=obs, starts=ends)
        if ends.any():
            for name in ("last_actions", "r_ext", "r_int"):
                self.row[name] = np.where(ends, 0, arrival[name])
            self.row["policies"] = np.where(ends, rng.integers(args.num_policies, size=N), policies)
            if args.beta > 0:
                self.curiosity.begin(obs, ends)
        episodes = ended_episodes(info)
        for policy, episode in zip(policies[ends], episodes, strict=True):
            episode[f"policies/return_{policy}"] = episode["charts/episodic_return"]
        goes_on = ~terminated if args.bootstrap_truncated else ~ends  # choice 6: a time limit is no end
        arrival |= dict(mu=mu, alpha=alpha, ends=ends, discounts=goes_on.astype(np.float32))
        return arrival, episodes, novelty


def train(args: Args) -> Path:
    """Trains an agent; returns the run folder."""
    start_process(args)  # seeds all that is random, takes a GPU, joins the other processes of torchrun
    keep_freed_memory()
    T, N, device = args.num_steps, args.num_envs // WORLD_SIZE, args.device
    envs = make_env(args, N)
    if kind_of(envs.single_observation_space.shape) != "pixels":
        torch.set_num_threads(1)  # small networks: more threads only cost, larger ones may want them
    agent, curiosity = Agent(envs, args).to(device), Curiosity(envs, args).to(device)
    target_agent = deepcopy(agent)
    target_agent.lstm.flatten_parameters()  # deepcopy() scatters the weights, and cuDNN wants one piece
    adam = dict(eps=args.adam_eps, fused=True)
    optimizer = torch.optim.Adam([flatten(agent.parameters())], lr=args.learning_rate, **adam)
    trained = [x for x in curiosity.parameters() if x.requires_grad]
    trained = flatten(trained) if trained else torch.zeros(0)
    auxiliary = torch.optim.Adam([trained], lr=args.auxiliary_lr, **adam)
    family = policy_family(args.num_policies, args.beta, args.gamma_max, args.gamma_min).float().to(device)
    epsilon = epsilons(args.num_envs, args.epsilon)[RANK::WORLD_SIZE]  # greedy ones and others in each

    actor, replay = Actor(args, envs, agent, curiosity), Replay(args, envs)
    parts = dict(agent=agent, target_agent=target_agent, curiosity=curiosity)
    parts |= dict(optimizer=optimizer, auxiliary=auxiliary)
    if args.save_replay and RANK == 0:  # the others fill theirs anew
        parts["replay"] = replay
    run = Run(args, dict(updates=0), shown="policies/return_0", log_every=args.log_every, **parts)
    optimizer.param_groups[0] |= dict(lr=args.learning_rate, eps=args.adam_eps)  # not the checkpoint's
    auxiliary.param_groups[0] |= dict(lr=args.auxiliary_lr, eps=args.adam_eps)
    if RANK == 0:
        print(f"replay: {replay.size * N} steps, {replay.num_bytes / 1e6:.0f} MB", file=sys.stderr)

    def step_by(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
        """Steps down the gradient of a loss; returns the gradient's norm."""
        (flat,) = optimizer.param_groups[0]["params"]
        flat.grad.zero_()  # in place, as the parameters' gradients are views of it
        loss.backward()
        if WORLD_SIZE > 1:  # averaged over the processes of torchrun
            flat.grad.div_(WORLD_SIZE)
            torch.distributed.all_reduce(flat.grad)  # sums in place
        norm = flat.grad.norm()
        flat.grad.mul_((args.max_grad_norm / (norm + 1e-6)).clamp(max=1))
        optimizer.step()
        return norm

    def update(batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss, priorities, losses = q_loss(agent, target_agent, batch, family, args)
        losses["grad_norm"] = step_by(optimizer, loss)
        if args.beta > 0 and (args.train_embedding or args.rnd):
            loss, more = curiosity.loss(*last_transitions(batch, args.auxiliary_steps))
            step_by(auxiliary, loss)
            losses |= more
        return priorities, losses

    if args.compile:
        update = torch.compile(update)
    first_step, trained_steps, novelty_log = run.step, 0, []
    actor.reset(run.seed)
    for iteration in run.iterations():
        rng = np.random.default_rng((args.seed, iteration, RANK))
        losses, data, reward, seen = {}, {}, 0.0, 0.0

        # 1. act
        for _ in range(T):
            row = actor.row
            arrival, episodes, novelty = actor.step(epsilon, rng)
            run.count_steps(args.num_envs, {})
            run.episodes += [(run.step, episode) for episode in episodes]
            replay.append(row, arrival, actor.state.cpu().numpy())
            reward += float(arrival["r_ext"].sum())
            seen += float(row["obs"].sum(dtype=np.float64) + arrival["obs"].sum(dtype=np.float64))
            novelty_log.append(novelty)
        # before an update learns from it, or a checkpoint has it in its replay
        run.check_finite(novelty | dict(reward=reward, observations=seen), {})
        if WORLD_SIZE > 1 and args.beta > 0:
            curiosity.merge()

        # 2. update
        is_early = replay.steps * WORLD_SIZE < args.learning_starts or not len(replay.sequences)
        is_early = over_processes("MAX", is_early)  # in any process
        for _ in range(0 if is_early else args.updates_per_rollout):
            places, batch = replay.sample(args.batch_sequences // WORLD_SIZE, rng)
            trained_steps += int(batch["mask"].sum()) * WORLD_SIZE
            data = dict(observations=batch["obs"], rewards=batch["rewards"])
            priorities, losses = update({k: torch.as_tensor(x, device=device) for k, x in batch.items()})
            replay.priorities[places] = priorities.nan_to_num().cpu().numpy() + 1e-6  # NaN ends the run below
            run.numbers["updates"] += 1
            if run.numbers["updates"] % args.target_every == 0:
                target_agent.load_state_dict(agent.state_dict())
            if run.numbers["updates"] % args.embedding_every == 0 and args.train_embedding:
                curiosity.refresh()

        # 3. log
        scalars = {}
        if run.is_logged:
            scalars["charts/replay_ratio"] = trained_steps / (run.step - first_step)
            scalars["replay/sequences"] = len(replay.sequences)
            for name in ("mean", "std", "max") if len(replay.sequences) else ():
                scalars[f"replay/priority_{name}"] = getattr(replay.priorities, name)()
            scalars |= {f"curiosity/{name}": np.mean([x[name] for x in novelty_log]) for name in novelty}
            novelty_log = []
        run.log(losses, scalars, f" with beta {family[0, 0]:g}", **data)
    envs.close()
    return run.folder


# === Evaluation ==============================================================================


def load_agent(args: Args) -> Actor:
    """The agent of the run args.evaluate in one environment, with its smallest beta, also for notebooks."""
    envs = make_env(args, 1, Path(args.evaluate) / "videos" if args.capture_video else None)
    agent, curiosity = Agent(envs, args).to(args.device), Curiosity(envs, args).to(args.device)
    load_checkpoint(args.evaluate, dict(agent=agent, curiosity=curiosity))
    curiosity.eval()  # its statistics stay as they are
    return Actor(replace(args, num_policies=1), envs, agent, curiosity)


@torch.no_grad()
def evaluate(args: Args) -> list[float]:
    """Returns of full episodes of a run's agent, by its policy with the smallest beta and by eval_epsilon."""
    seed_all(args.seed)
    actor, returns = load_agent(args), []
    seed = args.seed + args.total_timesteps + args.num_envs  # no seed of training
    actor.reset(seed)
    rng = np.random.default_rng(seed)
    for _ in evaluation_steps(args, returns):  # while there are fewer than args.eval_episodes
        _, episodes, _ = actor.step(np.full(1, args.eval_epsilon), rng)
        returns += [episode["charts/episodic_return"] for episode in episodes]
    actor.envs.close()
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
    "num_policies",
    "hidden_size",
    "rnd",
    "train_embedding",
    "save_replay",
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


def check_game(args: Args, spec: gym.envs.registration.EnvSpec, video_dir: Path | None):
    """Fails for an Atari game that skips frames at random, and for videos without the package they need."""
    if spec.kwargs["frameskip"] not in (1, 4):
        fail(f"{spec.id} skips a random number of frames: take a NoFrameskip-v4 or an ALE/...-v5 id")
    takes = {
        "repeat_action_probability": ("from 0 to 1", lambda x: isinstance(x, int | float) and 0 <= x <= 1),
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
    counts = "total_timesteps num_envs num_steps unroll period replay_steps learning_starts batch_sequences"
    counts += " updates_per_rollout n_step target_every hidden_size num_policies neighbors memory_size"
    counts += " embedding_every auxiliary_steps log_every save_every eval_episodes"
    others = "seed stall_seconds burn_in epsilon eval_epsilon priority_exponent priority_eta"
    others += " importance_exponent cross_mixture learning_rate adam_eps retrace_lambda h_eps max_grad_norm"
    others += " beta gamma_max gamma_min kernel_eps rnd_max auxiliary_lr last_reward_weight"
    minimum = dict.fromkeys(counts.split(), 1) | dict.fromkeys(others.split(), 0)
    for name, x in asdict(args).items():
        if name in minimum and not minimum[name] <= x < np.inf:
            raise ValueError(f"{name} cannot be {x}")
    shares = ("epsilon", "eval_epsilon", "cross_mixture", "priority_eta", "retrace_lambda")
    processes = f"the {WORLD_SIZE} processes of torchrun must divide"
    is_enough = args.replay_steps // args.num_envs >= 2 * (args.length + 1)
    rules = {
        "give --resume or --evaluate, not both": not (args.resume and args.evaluate),
        "--capture-video records the episodes of --evaluate": args.evaluate or not args.capture_video,
        "max_grad_norm must be above 0": args.max_grad_norm > 0,
        "env_id may have one colon, after a module": re.fullmatch(r"([^:]+:)?[^:]*", args.env_id),
        "env_kwargs must be a JSON object": is_json_object(args.env_kwargs),
        "stall_seconds must be below 2**22": args.stall_seconds < 2**22,  # 48 days: Windows' limit
        "seed + steps must be below 2**31": args.seed + args.total_timesteps + args.num_envs < 2**31,
        "gamma_max and gamma_min must be below 1": max(args.gamma_max, args.gamma_min) < 1,
        f"{', '.join(shares)} must be at most 1": max(getattr(args, name) for name in shares) <= 1,
        "rnd_max must be at least 1": args.rnd_max >= 1,
        "total_timesteps must be at least num_envs * num_steps": args.num_iterations >= 1,
        f"{processes} num_envs": args.num_envs % WORLD_SIZE == 0,
        f"{processes} batch_sequences": args.batch_sequences % WORLD_SIZE == 0,
        "period must be at most unroll, or steps between sequences are lost": args.period <= args.unroll,
        "kernel_eps must be above 0": args.kernel_eps > 0,
        "kernel_eps is so large that nothing is novel": args.usual_novelty > 0,
        "learning_starts must be at most replay_steps": args.learning_starts <= args.replay_steps,
        "replay_steps must hold two sequences of each environment": is_enough,
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
    if not isinstance(obs_space, gym.spaces.Box) or len(obs_space.shape) not in (1, 3):
        hint = "gym.wrappers.FlattenObservation in make_env() makes vectors"
        fail(f"{env_id} observes {obs_space}: this script takes vectors and images; {hint}")
    is_grid = kind_of(obs_space.shape) == "grid"
    if is_grid and min(obs_space.shape[1:]) < 5:
        fail(f"{env_id} observes {obs_space}: the convolutions need 5 x 5 places")
    is_checked = is_grid and obs_space.dtype == np.uint8 and not envs.render_mode  # a reset would be filmed
    if is_checked and envs.reset()[0].max() > 10:
        fail(f"{env_id}: of images below 36 x 36, this script takes grids of numbers below 11")


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
