"""Runs of a tenth of a second that leave everything behind, for tests that compute apart from the scripts.

Traced environments note what they were asked and what they answered. record() trains on them and notes each
call of the loss, each step of an optimizer, each order of minibatches, and what was logged and saved. Only
environments and losses advance its clock.
"""

import functools
import threading
import time
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
import torch.nn as nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

STEP_SECONDS, LOSS_SECONDS = 0.25, 8.0  # of the clock in record()
NAMES_OF_LOSS = {"impala_vtrace": "impala_loss", "ngu_r2d2": "q_loss"}  # else ppo_loss


class Clock:
    """Stands for the module time of a script, but for folders' names."""

    def __init__(self):
        self.now, self.time_ns = 1e6, time.time_ns

    def time(self):
        return self.now

    monotonic = time


class Traced(gym.Env):
    """Episodes of 3 to 5 steps, different in each environment; every other one is cut by a time limit.

    Observations depend on the seed, rewards on step and action; they reach from -2.5 to 2.5.
    """

    made, clock = [], Clock()  # environments and clock of the present run
    observation_space = gym.spaces.Box(-10, 10, (3,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self):
        self.index, self.episodes, self.seeds, self.steps = len(Traced.made), -1, [], []
        Traced.made.append(self)

    def observe(self):
        return np.array([self.t, *self.np_random.normal(size=2)], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.t, self.episodes = 0, self.episodes + 1
        self.obs = self.observe()
        return self.obs, self.info()

    def info(self):
        return {}

    def step(self, action):
        Traced.clock.now += STEP_SECONDS
        before, action = self.obs, np.array(action, np.float64)
        self.t += 1
        reward = round(2.5 * np.cos(self.t + 2 * action.sum() + action.max()), 3)
        is_over = self.t == 3 + (self.index + self.episodes) % 3
        is_cut = is_over and (self.index + self.episodes) % 2 == 1
        self.obs = self.observe()
        self.steps.append((before, action, reward, self.obs, is_over and not is_cut, is_cut))
        info = dict(score=10.0 * self.episodes + self.index) if is_over else {}
        return self.obs, reward, is_over and not is_cut, is_cut, self.info() | info


class TracedTwin(Traced):
    pass


class TracedBox(Traced):
    action_space = gym.spaces.Box(np.array([-0.5, -3, 0], np.float32), np.array([0.5, 1, 2], np.float32))


class TracedBoxTwin(TracedBox):
    pass


class TracedMulti(Traced):
    """Two components; in every other step, the first choice of each is invalid."""

    action_space = gym.spaces.MultiDiscrete([2, 3])

    def info(self):
        is_valid = self.t % 2 == 0
        return dict(action_mask=np.array([is_valid, True, is_valid, True, True]))


class TracedMultiTwin(TracedMulti):
    pass


class TracedImage(Traced):
    observation_space = gym.spaces.Box(0, 255, (36, 36, 1), np.uint8)

    def observe(self):
        return self.np_random.integers(256, size=self.observation_space.shape, dtype=np.uint8)


class TracedGame(TracedImage):
    observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)


class TracedGameTwin(TracedGame):
    pass


for kind in (Traced, TracedTwin, TracedBox, TracedBoxTwin, TracedMulti, TracedMultiTwin, TracedImage):
    gym.register(f"{kind.__name__}-v0", entry_point=kind, disable_env_checker=True)
for kind in (TracedGame, TracedGameTwin):
    gym.register(f"{kind.__name__}-v0", entry_point=kind, disable_env_checker=True)


class Games(gym.vector.VectorEnv):
    """Stands for the emulators of ppo_atari.py."""

    def __init__(self, env_id: str, num_envs: int):
        self.num_envs = num_envs
        self.envs = [gym.wrappers.RecordEpisodeStatistics(gym.make(env_id)) for _ in range(num_envs)]
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space

    def reset(self, *, seed, options=None):
        return np.stack([env.reset(seed=seed + n)[0] for n, env in enumerate(self.envs)]), {}

    def step(self, actions):
        obs, rewards = np.zeros((self.num_envs, 4, 84, 84), np.uint8), np.zeros(self.num_envs)
        terminated, truncated = np.zeros((2, self.num_envs), bool)
        episode, final_obs = dict(r=np.zeros(self.num_envs), l=np.zeros(self.num_envs)), obs.copy()
        for n in range(self.num_envs):
            obs[n], reward, terminated[n], truncated[n], info = self.envs[n].step(actions[n])
            rewards[n] = np.sign(reward)
            if terminated[n] or truncated[n]:
                final_obs[n] = obs[n]
                for name in ("r", "l"):
                    episode[name][n] = info["episode"][name]
                obs[n] = self.envs[n].reset()[0]
        over = terminated | truncated
        final = dict(final_obs=final_obs, final_info=dict(episode=episode, _episode=over))
        return obs, rewards, terminated, truncated, final if over.any() else {}


BASE = dict(num_envs=2, num_steps=8, total_timesteps=32, device="cpu")
PPO = BASE | dict(env_id="Traced-v0", num_minibatches=2, update_epochs=2, learning_rate=0.01)
UNROLLS = BASE | dict(env_id="Traced-v0", sync=True, batch_segments=2, learning_rate=0.01)
SMALL = {
    "ppo": PPO,
    "ppo_shared": PPO,
    "ppo_atari": PPO | dict(env_id="TracedGame-v0", num_steps=4, total_timesteps=16, learning_rate=1e-3),
    "ppo_continuous": PPO | dict(env_id="TracedBox-v0"),
    "ppo_lstm": PPO,
    "ppo_multidiscrete": PPO | dict(env_id="TracedMulti-v0"),
    "impala_vtrace": UNROLLS | dict(log_every=1),
    "ppo_async": UNROLLS | dict(num_minibatches=2),
    "ngu_r2d2": BASE
    | dict(
        env_id="Traced-v0", num_steps=8, burn_in=1, unroll=3, period=2, batch_sequences=4, learning_starts=1
    )
    | dict(
        replay_steps=100, log_every=1, hidden_size=8, memory_size=10, total_timesteps=48, learning_rate=0.01
    )
    | dict(neighbors=2),
}


def policy(script, agent, batch):
    """Distributions and values (float64) of a batch, by the agent as it is."""
    name = script.SCRIPT
    with torch.no_grad():
        if name == "ppo_lstm":
            dist, value, _ = agent(batch["obs"], batch["state"], batch["starts"])
        elif name == "ppo_multidiscrete":
            dist, value = agent(batch["obs"], batch["masks"])
        elif name == "impala_vtrace":
            dist, value, _ = agent(batch, batch["state"])
        else:
            dist, value = agent(batch["obs"])
    if hasattr(dist, "log_std"):
        dist.log_std = dist.log_std.detach().clone()  # the next step of the optimizer changes it
    return dist, value.numpy().astype(np.float64)


def vector(tensors, like=None) -> np.ndarray:
    """Numbers of parameters, or of tensors like them, in the order in which memory has them.

    Of more than 100,000 it takes every 101st.
    """
    parts = []
    for x, parameter in zip(tensors, tensors if like is None else like, strict=True):
        is_last = parameter.ndim == 4 and not parameter.is_contiguous()  # channels last in memory
        parts.append((x.detach().permute(0, 2, 3, 1) if is_last else x.detach()).flatten())
    flat = torch.cat(parts)
    return flat[:: 101 if len(flat) > 100_000 else 1].numpy().astype(np.float64)


class Run(SimpleNamespace):
    """What record() noted, in the order of time.

    script, args, run_dir; environments; initial: parameters; losses: calls of the loss function; steps: of
    the optimizers; orders: of minibatches; logged: (tag, step, value); saved: checkpoints; bars: what the
    progress bar said; heartbeats: (loop, steps of the environments so far); compiled: functions; threads: in
    which environments were stepped.
    """

    def iterations(self) -> list[list[SimpleNamespace]]:
        """Calls of the loss, grouped by the number of environment steps before them."""
        counts = sorted({call.count for call in self.losses})
        return [[call for call in self.losses if call.count == count] for count in counts]


def steps_so_far() -> int:
    return sum(len(env.steps) for env in Traced.made)


def hook_loss(run: Run, patch: pytest.MonkeyPatch):
    """Notes each call of the script's loss: batch, other arguments, agent, results, gradient."""
    script, name = run.script, NAMES_OF_LOSS.get(run.script.SCRIPT, "ppo_loss")
    original = getattr(script, name)

    def loss(agent, *arguments):
        result = original(agent, *arguments)
        batch = next(x for x in arguments if isinstance(x, dict))
        call = SimpleNamespace(count=steps_so_far())
        call.batch = {key: x.detach().clone() for key, x in batch.items()}
        is_first = not run.losses or run.losses[-1].count < call.count
        call.agent = deepcopy(agent) if is_first else None
        call.loss, call.info = result[0].item(), {key: x.clone() for key, x in result[-1].items()}
        if script.SCRIPT == "ngu_r2d2":
            call.priorities = result[1].numpy().astype(np.float64)
            with torch.no_grad():
                q = script.q_values(agent, arguments[0], batch, run.args)
            call.q = [x.numpy().astype(np.float64) for x in q]  # of the online and of the target network
        else:
            call.dist, call.values = policy(script, agent, call.batch)
        parameters = list(agent.parameters())
        grads = torch.autograd.grad(result[0], parameters, retain_graph=True, materialize_grads=True)
        call.grad = vector(grads, like=parameters)
        call.norm = sum(x.double().square().sum().item() for x in grads) ** 0.5
        run.losses.append(call)
        Traced.clock.now += LOSS_SECONDS
        return result

    patch.setattr(script, name, functools.wraps(original)(loss))


def hook_optimizers(run: Run):
    """Notes each step: lr, gradient, parameters before and after."""

    def before(optimizer, *_):
        group = optimizer.param_groups[0]
        (flat,) = group["params"]
        step = SimpleNamespace(optimizer=optimizer, lr=float(group["lr"]), eps=group.get("eps"))
        step.grad, step.before, step.norm = vector([flat.grad]), vector([flat]), flat.grad.norm().item()
        run.steps.append(step)

    def after(optimizer, *_):
        run.steps[-1].after = vector(optimizer.param_groups[0]["params"])

    return [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]


def hook_agent(run: Run, patch: pytest.MonkeyPatch, adapt):
    """Notes the first agent's parameters, then lets `adapt` change it."""
    original = run.script.Agent.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        run.initial = vector(list(self.parameters())) if run.initial is None else run.initial
        with torch.no_grad():
            adapt(self)

    patch.setattr(run.script.Agent, "__init__", init)


@torch.no_grad()
def gaussian(x, std=1.0):
    return x.normal_(0, std / x[0].numel() ** 0.5)


def hook_libraries(run: Run, patch: pytest.MonkeyPatch, writes: bool):
    randperm, save, step, heartbeat = torch.randperm, torch.save, Traced.step, run.script.heartbeat

    def ordered(*args, **kwargs):
        run.orders.append(randperm(*args, **kwargs).numpy())
        return torch.from_numpy(run.orders[-1])

    def saved(state, *args, **kwargs):
        run.saved.append(deepcopy(state))
        return save(state if writes else {}, *args, **kwargs)

    def compiled(function, **_):
        run.compiled.append(function)
        return function

    def stepped(self, action):
        run.threads.add(threading.current_thread().name)
        return step(self, action)

    def beating(loop):
        run.heartbeats.append((loop, steps_so_far()))
        heartbeat(loop)

    patch.setattr(torch, "randperm", ordered)
    patch.setattr(torch, "save", saved)
    patch.setattr(torch, "compile", compiled)
    patch.setattr(Traced, "step", stepped)
    if not writes:
        patch.setattr(SummaryWriter, "add_scalar", lambda self, *x: run.logged.append(x))
        patch.setattr(torch.nn.init, "orthogonal_", gaussian)
    patch.setattr(tqdm, "set_postfix_str", lambda self, text, **_: run.bars.append(text))
    patch.setattr(run.script, "heartbeat", beating)


def hook_environments(script, patch: pytest.MonkeyPatch):
    """A clock of its own; stand-ins for ppo_atari.py's emulators and for its large network."""
    patch.setattr(Traced, "made", [])
    patch.setattr(Traced, "clock", Clock())
    patch.setattr(script, "time", Traced.clock)
    if script.SCRIPT == "ppo_atari":
        original = script.Agent.__init__

        def init(self, envs):
            original(self, envs)
            layers = nn.AvgPool2d(12), nn.Flatten(), nn.Linear(4 * 7 * 7, 512), nn.ReLU()
            self.network = nn.Sequential(*layers)

        patch.setattr(script.Agent, "__init__", init)
        patch.setattr(script, "make_env", lambda args, num_envs, video_dir=None: Games(args.env_id, num_envs))


def record(script, adapt=lambda agent: None, writes=False, **flags) -> Run:
    """A run of SMALL's flags and these. adapt: changes each agent at first.

    writes: logs and checkpoints are written as usual. Otherwise both are kept in memory alone, and weights
    begin as plain Gaussians, which costs less time.
    """
    args = script.Args(**SMALL[script.SCRIPT] | flags)
    names = "losses", "steps", "orders", "logged", "saved", "bars", "heartbeats", "compiled"
    run = Run(script=script, args=args, initial=None, threads=set(), **{name: [] for name in names})
    with pytest.MonkeyPatch.context() as patch:
        hook_environments(script, patch)
        hook_agent(run, patch, adapt)
        hook_loss(run, patch)
        hook_libraries(run, patch, writes)
        handles = hook_optimizers(run)
        run.environments = Traced.made
        try:
            run.run_dir = Path(script.train(args)).resolve()
        finally:
            for handle in handles:
                handle.remove()
    return run
