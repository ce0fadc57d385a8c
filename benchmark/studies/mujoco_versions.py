"""What MuJoCo's -v4 tasks show after a reset and the same actions: run it in several versions, and compare.

    pip install mujoco==2.3.7 && python benchmark/studies/mujoco_versions.py

Prints lines of CSV: version, task, step, the observation's sum and its largest component. What follows an
episode's end is left out. results/controls/mujoco_versions.csv has 2.3.7, 3.4.0, 3.5.0 and 4.0.0.
"""

import gymnasium as gym
import mujoco
import numpy as np

TASKS = "HalfCheetah Hopper Walker2d InvertedPendulum InvertedDoublePendulum Reacher Swimmer Humanoid Ant"

if __name__ == "__main__":
    print("mujoco,task,step,sum,largest")
    for task in TASKS.split():
        env, rng = gym.make(f"{task}-v4"), np.random.default_rng(0)
        obs, _ = env.reset(seed=1)
        for step in range(21):
            print(f"{mujoco.__version__},{task}-v4,{step},{obs.sum():.12f},{abs(obs).max():.12f}")
            obs, _, terminated, _, _ = env.step(rng.uniform(-1, 1, env.action_space.shape).astype(np.float32))
            if terminated:
                break
