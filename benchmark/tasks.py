"""Small tasks with a purpose, for  --env-id benchmark.tasks:NAME  from the repository's folder.

MaskedCartPole-v0   CartPole-v1 without its velocities: one observation says too little, two say enough, and a
                    network without memory stays below 100 of 500 steps. The reward is 1/20 a step.
CliffWalk-v0        CliffWalking-v1 with a one-hot place, a tenth of its rewards and at most 200 steps. The
                    goal is 13 steps along the cliff, -1.3; a fall costs 10, standing still 20.
RandomDiscoMaze-v0  Section 4.1 of Never Give Up: a new maze an episode, 21 x 21, whose walls change colour at
                    every step and end the episode at a touch. There is no reward; info["cells"] counts the
                    different cells visited, of 199. 500 steps at most. A walk that avoids walls sees 29.
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


class RandomDiscoMaze(gym.Env):
    """Observes a picture of one pixel a cell: corridors are 0, walls of colours 1 to 5, the agent is 6."""

    size = 21
    moves = np.array([[-1, 0], [1, 0], [0, -1], [0, 1]])
    observation_space = gym.spaces.Box(0, 6, (size, size, 1), np.uint8)
    action_space = gym.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        inside, cells = range(1, self.size), {(1, 1)}
        stack = [(1, 1)]
        while stack:  # depth first: one way between any two cells
            y, x = stack[-1]
            ahead = [(y + 2 * dy, x + 2 * dx) for dy, dx in self.moves.tolist()]
            new = [(y, x) for y, x in ahead if y in inside and x in inside and (y, x) not in cells]
            if not new:
                stack.pop()
                continue
            there = new[self.np_random.integers(len(new))]
            cells |= {there, ((y + there[0]) // 2, (x + there[1]) // 2)}
            stack.append(there)
        self.walls = np.ones((self.size, self.size), bool)
        self.walls[tuple(zip(*cells, strict=True))] = False
        self.at, self.visited, self.steps = (1, 1), {(1, 1)}, 0
        return self.observe(), {"cells": 1}

    def observe(self):
        picture = self.np_random.integers(1, 6, size=self.walls.shape, dtype=np.uint8) * self.walls
        picture[self.at] = 6
        return picture[..., None]

    def step(self, action):
        self.at, self.steps = tuple(self.at + self.moves[action]), self.steps + 1
        hit = bool(self.walls[self.at])
        if not hit:
            self.visited.add(self.at)
        return self.observe(), 0.0, hit, False, {"cells": len(self.visited)}


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


gym.register("CliffWalk-v0", entry_point=CliffWalk, max_episode_steps=200)
gym.register("RandomDiscoMaze-v0", entry_point=RandomDiscoMaze, max_episode_steps=500)
gym.register("MaskedCartPole-v0", entry_point=MaskedCartPole, max_episode_steps=500)
