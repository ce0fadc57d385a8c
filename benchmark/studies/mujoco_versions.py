"""Sums of what MuJoCo's tasks show after a reset and ten random actions: run it in two versions, and compare.

python benchmark/studies/mujoco_versions.py
"""

import gymnasium as gym
import mujoco
import numpy as np

TASKS = ("HalfCheetah", "Hopper", "Walker2d", "Ant")

if __name__ == "__main__":
    print(f"MuJoCo {mujoco.__version__}")
    for task in TASKS:
        env, rng = gym.make(f"{task}-v4"), np.random.default_rng(0)
        first, _ = env.reset(seed=1)
        for _ in range(10):
            obs, *_ = env.step(rng.uniform(-1, 1, env.action_space.shape).astype(np.float32))
        print(f"{task}-v4: {first.sum():.10f}, {obs.sum():.10f}")
