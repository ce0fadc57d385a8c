"""The Random Disco Maze of section 4.1 of Never Give Up, https://arxiv.org/abs/2002.06038.

A new maze an episode, 21 x 21, whose walls change colour at every step and end the episode at a touch. There
is no reward; info["cells"] counts the different cells visited, of 199. An episode has 500 steps at most. From
the repository's folder it is  --env-id benchmark.studies.maze:RandomDiscoMaze-v0.
"""

import gymnasium as gym
import numpy as np


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


gym.register("RandomDiscoMaze-v0", entry_point=RandomDiscoMaze, max_episode_steps=500)
