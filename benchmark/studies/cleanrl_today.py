"""Runs a script that was written for gymnasium 0.29, as CleanRL's, on today's gymnasium.

    python benchmark/studies/cleanrl_today.py cleanrl/ppo_continuous_action.py --env-id Hopper-v4 --no-cuda

The file is run as it is. Gymnasium gets the names and the behaviour that its loop expects; nothing that
computes is changed.
"""

import runpy
import sys
from pathlib import Path

import ale_py
import gymnasium as gym
import numpy as np

gym.register_envs(ale_py)
TransformObservation = gym.wrappers.TransformObservation


class SyncVectorEnv(gym.vector.SyncVectorEnv):
    """Resets an environment within the step that ends its episode; final_info has an item an environment."""

    def __init__(self, env_fns):
        super().__init__(env_fns, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)

    def step(self, actions):
        obs, rewards, terminated, truncated, info = super().step(actions)
        if "final_info" in info:
            found = info["final_info"]
            ended = found["_episode"] if "_episode" in found else np.zeros(self.num_envs, bool)
            info["final_info"] = [None] * self.num_envs
            for k in ended.nonzero()[0]:
                episode = {key: found["episode"][key][[k]] for key in ("r", "l")}
                info["final_info"][k] = dict(episode=episode)
        return obs, rewards, terminated, truncated, info


gym.vector.SyncVectorEnv = SyncVectorEnv
gym.wrappers.TransformObservation = lambda env, func: TransformObservation(env, func, env.observation_space)
gym.wrappers.GrayScaleObservation = gym.wrappers.GrayscaleObservation
gym.wrappers.FrameStack = gym.wrappers.FrameStackObservation

if __name__ == "__main__":
    script = Path(sys.argv[1]).resolve()
    sys.path.insert(0, str(script.parent.parent))  # cleanrl_utils lies beside the folder of the scripts
    sys.path.insert(0, str(script.parent))
    sys.argv = sys.argv[1:]
    runpy.run_path(str(script), run_name="__main__")
