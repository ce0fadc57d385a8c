"""Small environments with a known answer. Importing this module registers them."""

import ctypes
import time

import gymnasium as gym
import numpy as np


class Probe(gym.Env):
    """Base of environments that are deterministic and need no seed."""

    observation_space = gym.spaces.Box(-10, 1000, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    length = 1

    def observe(self):
        return np.array([self.t, 1.0], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        reward = self.reward(int(action))
        return self.observe(), reward, self.t >= self.length, False, {}

    def reward(self, action):
        return 1.0


class RewardByObservation(Probe):
    """One step; the reward is the sign that was seen: only the value can learn."""

    def observe(self):
        return np.array([self.sign, 1.0], np.float32)

    def reset(self, *, seed=None, options=None):
        gym.Env.reset(self, seed=seed)
        self.t, self.sign = 0, float(self.np_random.integers(2) * 2 - 1)
        return self.observe(), {}

    def reward(self, action):
        return self.sign


class RewardByAction(RewardByObservation):
    """One step; +1 for the action that the observation names, else -1."""

    def reward(self, action):
        return 1.0 if action == (self.sign > 0) else -1.0


class DelayedReward(Probe):
    """Five steps; the reward at the end is 1 if the first action was 1."""

    length = 5

    def reward(self, action):
        if self.t == 1:
            self.first = action
        return float(self.first) if self.t == self.length else 0.0


class Count(Probe):
    """Observes its step; ends after 5 steps, which is no multiple of a rollout."""

    length = 5
    resets = 0

    def reset(self, **kwargs):
        Count.resets += 1
        return super().reset(**kwargs)


class Aligned(Probe):
    """Ends after 16 steps; deterministic, with rewards by action: for resuming bit by bit.

    seeds: what those of this kind were reset with, None among them.
    """

    length = 16
    seeds = []

    def reset(self, *, seed=None, options=None):
        Aligned.seeds.append(seed)
        return super().reset(seed=seed, options=options)

    def reward(self, action):
        return float(action) * self.t / 16


class AlignedBox(Aligned):
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def step(self, action):
        return super().step(10 * action[0])


class AlignedMulti(AlignedBox):
    action_space = gym.spaces.MultiDiscrete([2, 3])


class Cut(Probe):
    """The reward is 1 at every step and a time limit cuts after 4 steps; the last observation is marked."""

    terminates = False  # with the same step, as where a goal is reached just in time

    def step(self, action):
        self.t += 1
        obs = np.array([100.0 if self.t == 4 else self.t, 1.0], np.float32)
        return obs, 1.0, self.terminates and self.t == 4, self.t == 4, {}


class HugeReward(Aligned):
    def reward(self, action):
        return 1e6 * (1 + action)


class NanReward(Aligned):
    """Rewards turn into NaN in the third rollout of 16 steps."""

    def reset(self, **kwargs):
        self.episodes = getattr(self, "episodes", 0) + 1
        return super().reset(**kwargs)

    def reward(self, action):
        return float("nan") if self.episodes >= 3 else 1.0


class Crash(Aligned):
    def reward(self, action):
        if self.t == 10:
            raise ZeroDivisionError("the environment's own mistake")
        return 0.0


class BoxActions(Probe):
    """Remembers the actions that it was given."""

    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    length = 16
    taken = []

    def reward(self, action):
        return 1.0

    def step(self, action):
        BoxActions.taken.append(np.array(action))
        return super().step(action[0])


class RewardByContinuousAction(RewardByObservation):
    """One step; the reward falls with the distance of the action from half of what was seen."""

    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def step(self, action):
        self.action = float(action[0])
        return super().step(0)

    def reward(self, action):
        return 1 - abs(self.action - 0.5 * self.sign)


class IntegerBox(Probe):
    action_space = gym.spaces.Box(0, 5, (2,), np.int32)


class MatrixBox(Probe):
    action_space = gym.spaces.Box(-1, 1, (2, 3), np.float32)


class UnboundedBox(Probe):
    action_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)


class Started(Probe):
    action_space = gym.spaces.Discrete(3, start=1)


class StartedMulti(Probe):
    action_space = gym.spaces.MultiDiscrete([3, 3], start=[1, 1])


class ImageBox(Probe):
    observation_space = gym.spaces.Box(0, 255, (84, 84, 3), np.uint8)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)


class CutBox(Cut):
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)


class CountBox(Count):
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def step(self, action):
        return super().step(action[0])


class Match(gym.Env):
    """Names one choice of each of three components; the reward is the share that was matched."""

    action_space = gym.spaces.MultiDiscrete([2, 3, 4])
    observation_space = gym.spaces.Box(0, 1, (9,), np.float32)

    def observe(self):
        self.target = [self.np_random.integers(n) for n in self.action_space.nvec]
        return np.concatenate(
            [np.eye(n)[i] for n, i in zip(self.action_space.nvec, self.target, strict=True)]
        ).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action):
        self.t += 1
        reward = float(np.mean(np.array(action) == self.target))
        return self.observe(), reward, self.t >= 10, False, {}


class Masked(Probe):
    """Two components; what is valid depends on the step. Remembers (step, action)."""

    action_space = gym.spaces.MultiDiscrete([2, 3])
    length = 5
    taken = []

    @staticmethod
    def mask(t):
        return np.array([t % 2 == 0, True, True, t % 3 == 0, t % 2 == 1])

    @staticmethod
    def valid(t):
        return Masked.mask(t)[:2, None] & Masked.mask(t)[None, 2:]

    def reset(self, **kwargs):
        obs, _ = super().reset(**kwargs)
        return obs, {"action_mask": self.mask(0)}

    def step(self, action):
        Masked.taken.append((self.t, action.copy()))
        obs, reward, terminated, truncated, _ = super().step(0)
        return obs, reward, terminated, truncated, {"action_mask": self.mask(self.t)}


class MaskedLater(Masked):
    """Episodes of 1, 2, ... steps, whose first observations come without a mask."""

    episodes = 0

    def reset(self, **kwargs):
        MaskedLater.episodes += 1
        self.length = 1 + MaskedLater.episodes % 4
        return Probe.reset(self, **kwargs)


class Reports(Probe):
    """Three steps; says at the end of every episode, and now and then, what came of it."""

    length, episodes = 3, 0

    def step(self, action):
        obs, reward, over, is_cut, _ = super().step(0)
        info = dict(distance=2.5, place=np.zeros(2), name="somewhere", is_success=Reports.episodes % 2 == 0)
        info |= dict(level=np.uint8(3), is_near=np.bool_(Reports.episodes % 3 == 0), words=["a", "list"])
        if over:
            Reports.episodes += 1
            info |= dict(sometimes=1) if Reports.episodes % 3 == 0 else {}
        return obs, reward, over, is_cut, info


class ReportsBox(Reports):
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)


class ImageObservations(Probe):
    observation_space = gym.spaces.Box(0, 255, (84, 84, 3), np.uint8)


class ImageMulti(Probe):
    observation_space = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)
    action_space = gym.spaces.MultiDiscrete([2, 3])


class FramesMulti(Probe):
    """Grey frames, one after the other."""

    observation_space = gym.spaces.Box(0, 255, (12, 84, 84), np.uint8)
    action_space = gym.spaces.MultiDiscrete([2, 3])


class Board(Probe):
    """Empty places."""

    def __init__(self, width, height=None):
        self.observation_space = gym.spaces.Box(0, 255, (height or width, width, 3), np.uint8)

    def observe(self):
        return np.zeros_like(self.observation_space.low)

    def step(self, action):
        return super().step(0)


class BoardMulti(Board):
    action_space = gym.spaces.MultiDiscrete([2, 3])


class SmallImage(Probe):
    """Bytes that are no grid's: its pixels have numbers up to 255."""

    observation_space = gym.spaces.Box(0, 255, (20, 20, 3), np.uint8)

    def observe(self):
        return np.full((20, 20, 3), 255, np.uint8)


class FloatImage(Probe):
    """Pixels from 0 to 1, here all of them 1."""

    observation_space = gym.spaces.Box(0, 1, (40, 40, 3), np.float32)
    length = 16

    def observe(self):
        return np.ones((40, 40, 3), np.float32)


class Bytes(Probe):
    """A vector of bytes, as the RAM of a machine."""

    observation_space = gym.spaces.Box(0, 255, (6,), np.uint8)
    length = 5

    def observe(self):
        return np.full(6, 10 * self.t, np.uint8)


class Hang(Aligned):
    """Never returns from its 1000th step."""

    steps = 0

    def reward(self, action):
        Hang.steps += 1
        if Hang.steps == 1000:
            time.sleep(1000)
        return 0.0


class Slow(Aligned):
    """A step takes 0.1 s."""

    def reward(self, action):
        time.sleep(0.1)
        return 0.0


class Exit(Aligned):
    def reward(self, action):
        if self.t == 10:
            raise SystemExit("from within")
        return 0.0


def own_mistake(*_):
    raise ZeroDivisionError("the environment's own mistake")


# what a fault makes of an observation, a reward and whether the episode is over
FAULTS = {
    "raises": own_mistake,
    "hangs": lambda *_: time.sleep(1000),
    "hangs-in-reset": lambda: time.sleep(1000),
    "hangs-with-lock": lambda *_: ctypes.PyDLL(None).sleep(1000),  # as C code that keeps Python's lock
    "nan-observations": lambda obs, reward, over: (obs * np.float32("nan"), reward, over),
    "nan-rewards": lambda obs, reward, over: (obs, reward * np.float32("nan"), over),
    "huge-rewards": lambda obs, reward, over: (obs, reward + 1e30, over),
    "wrong-shape": lambda obs, reward, over: (obs[..., 1:], reward, over),
    "ends-at-every-step": lambda obs, reward, over: (obs, reward, over | True),
    "never-ends": lambda obs, reward, over: (obs, reward, over & False),
}


class Faulty(Aligned):
    """Sound for 20 steps, then with a fault; without one, it ends after 24."""

    length = 24

    def __init__(self, name, action_space):
        self.fault, self.in_reset = FAULTS[name], name.endswith("reset")
        self.action_space, self.steps = action_space, 0

    def reset(self, **kwargs):
        return self.fault() if self.in_reset else super().reset(**kwargs)

    def step(self, action):
        obs, reward, over, is_cut, info = super().step(0)
        self.steps += 1
        if self.steps > 20:
            obs, reward, over = self.fault(obs, reward, over)
        return obs, reward, over, is_cut, info


class Reused(Cut):
    """Cut with one array for all observations, as an environment that saves time may have."""

    observation_space = gym.spaces.Box(-10, 1000, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        gym.Env.reset(self, seed=seed)
        self.t, self.obs = 0, getattr(self, "obs", np.zeros_like(self.observation_space.low))
        self.obs[:] = 0
        return self.obs, {}

    def step(self, action):
        obs, *rest = super().step(action)
        self.obs[:] = obs[0]
        return self.obs, *rest


class ReusedBox(Reused):
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)


class ReusedImage(Reused):
    observation_space = gym.spaces.Box(0, 255, (40, 40, 3), np.uint8)


class NarrowAction(Probe):
    """Numbers its actions by bytes."""

    action_space = gym.spaces.Discrete(3, dtype=np.uint8)


class Spender(Probe):
    """Sets its action to 0 in place."""

    action_space = gym.spaces.MultiDiscrete([3, 4])

    def step(self, action):
        action[:] = 0
        return super().step(0)


class NarrowActionMulti(Probe):
    action_space = gym.spaces.MultiDiscrete([2, 3], dtype=np.uint8)

    def step(self, action):
        return super().step(action[0])


PROBES = (
    RewardByObservation,
    RewardByAction,
    DelayedReward,
    Count,
    Aligned,
    Cut,
    HugeReward,
    NanReward,
    Crash,
    Hang,
    Slow,
    Exit,
    Reports,
    ReportsBox,
)
OTHERS = (
    AlignedBox,
    ImageBox,
    IntegerBox,
    MatrixBox,
    UnboundedBox,
    Started,
    StartedMulti,
    AlignedMulti,
    BoxActions,
    ImageObservations,
    RewardByContinuousAction,
    CutBox,
    CountBox,
    Match,
    Masked,
    MaskedLater,
    ImageMulti,
    FramesMulti,
    Board,
    BoardMulti,
    SmallImage,
    FloatImage,
    Bytes,
    Reused,
    ReusedBox,
    ReusedImage,
    NarrowAction,
    NarrowActionMulti,
    Spender,
)
for probe in (*PROBES, *OTHERS):
    gym.register(f"{probe.__name__}-v0", entry_point=probe, disable_env_checker=True)
for fault in FAULTS:
    for suffix, probe in (("", Aligned), ("-box", AlignedBox)):
        kwargs = dict(name=fault, action_space=probe.action_space)
        gym.register(f"{fault}{suffix}-v0", entry_point=Faulty, kwargs=kwargs, disable_env_checker=True)
