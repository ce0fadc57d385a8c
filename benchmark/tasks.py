"""Small tasks with a purpose, for  --env-id benchmark.tasks:NAME  from the repository's folder.

MaskedCartPole-v0   CartPole-v1 without its velocities: one observation says too little, two say enough, and a
                    network without memory stays below 100 of 500 steps. The reward is 1/20 a step.
CliffWalk-v0        CliffWalking-v1 with a one-hot place, a tenth of its rewards and at most 200 steps. The
                    goal is 13 steps along the cliff, -1.3; a fall costs 10, standing still 20.
UnclippedReacher-v4 Reacher-v4, whose reward is charged for the action as it was drawn: scripts clip actions
                    to the bounds of their space, which here has none, and MuJoCo clips them for its motors.
"""

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv


class MaskedCartPole(CartPoleEnv):
    """Observes position and angle only, scaled to about 1."""

    scale = np.array([2.4, 0.2], np.float32)

    def __init__(self, render_mode: str | None = None):
        super().__init__(render_mode=render_mode)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        return obs[[0, 2]] / self.scale, info

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs[[0, 2]] / self.scale, 0.05 * reward, *rest


class CliffWalk(gym.Wrapper):
    """Observes its place as a one-hot vector; rewards are a tenth of CliffWalking-v1's."""

    def __init__(self, render_mode: str | None = None):
        super().__init__(gym.make("CliffWalking-v1", render_mode=render_mode))
        self.observation_space = gym.spaces.Box(0, 1, (48,), np.float32)

    def reset(self, **kwargs):
        place, info = self.env.reset(**kwargs)
        return np.eye(48, dtype=np.float32)[place], info

    def step(self, action):
        place, reward, *rest = self.env.step(action)
        return np.eye(48, dtype=np.float32)[place], reward / 10, *rest


class Unclipped(gym.Wrapper):
    """An action space without bounds, so that the reward is that of the action as it was drawn."""

    def __init__(self, env_id: str, render_mode: str | None = None):
        super().__init__(gym.make(env_id, render_mode=render_mode))
        self.action_space = gym.spaces.Box(-np.inf, np.inf, self.env.action_space.shape, np.float32)


gym.register("CliffWalk-v0", entry_point=CliffWalk, max_episode_steps=200)
gym.register("MaskedCartPole-v0", entry_point=MaskedCartPole, max_episode_steps=500)
gym.register("UnclippedReacher-v4", entry_point=Unclipped, kwargs=dict(env_id="Reacher-v4"))
