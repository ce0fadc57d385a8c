"""The blog's own MultiDiscrete tasks, gym_microrts 0.2.0, for today's gymnasium, with masks of valid actions.

    apt-get install default-jre-headless        # or any Java runtime
    pip install --no-deps gym_microrts==0.2.0 && pip install dacite JPype1 Pillow
    python ppo_multidiscrete.py --env-id benchmark.microrts:MicrortsMining-v1 --no-normalize \\
        --total-timesteps 2000000 --num-envs 8 --num-steps 128 --num-minibatches 4 --update-epochs 4 \\
        --learning-rate 2.5e-4 --clip-coef 0.1 --ent-coef 0.01         # and --no-mask-actions

gym_microrts imports the gym of its day when it is loaded: stand-ins made of gymnasium take its place.
"""

import os
import sys
from types import ModuleType

import gymnasium as gym
import numpy as np

# Java would take SIGINT and SIGTERM for itself and end, so that the script could not finish its iteration.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-Xrs")


def load() -> tuple[type, list[dict]]:
    """Import gym_microrts without gym; its environment, and what it wanted to register."""
    registered = []

    def module(name: str, **content):
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(content)
        return sys.modules[name]

    def register(id: str, entry_point: str, kwargs: dict | None = None, max_episode_steps: int | None = None):
        registered.append(dict(id=id, kwargs=kwargs or {}, max_episode_steps=max_episode_steps))

    for name in ("int", "bool", "float", "object"):  # aliases that NumPy has dropped
        if name not in vars(np):
            setattr(
                np,
                name,
                __builtins__[name] if isinstance(__builtins__, dict) else getattr(__builtins__, name),
            )
    seeding = module("gym.utils.seeding", np_random=gym.utils.seeding.np_random)
    utils = module("gym.utils", seeding=seeding, EzPickle=object)
    registration = module("gym.envs.registration", register=register)
    envs = module("gym.envs", registration=registration, registry=ModuleType("registry"))
    envs.registry.env_specs = {}
    module("gym.spaces", **vars(gym.spaces))
    module("gym.error", **vars(gym.error))
    module("gym", Env=object, spaces=gym.spaces, error=gym.error, utils=utils, envs=envs)
    from gym_microrts.envs import GlobalAgentCombinedRewardEnv

    for name in [name for name in sys.modules if name.split(".")[0] == "gym"]:
        del sys.modules[name]  # it is no gym: nobody else must find it
    return GlobalAgentCombinedRewardEnv, registered


OldEnv, specs = load()


class Microrts(gym.Env):
    """One of gym_microrts's environments; info["action_mask"] is (cells, 1 + S - cells), by acting unit."""

    def __init__(self, **kwargs):
        self.env = OldEnv(**kwargs)
        self.observation_space, self.action_space = self.env.observation_space, self.env.action_space

    def mask(self) -> np.ndarray:
        units = self.env.get_unit_location_mask()
        mask = np.zeros((len(units), 1 + self.action_space.nvec[1:].sum()), bool)
        for unit in units.nonzero()[0]:
            mask[unit, 0], mask[unit, 1:] = True, self.env.get_unit_action_mask(int(unit))
        return mask

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        obs = self.env.reset().astype(np.int32)
        return obs, dict(action_mask=self.mask())

    def step(self, action: np.ndarray):
        obs, reward, terminated, _ = self.env.step(action)
        return obs.astype(np.int32), float(reward), bool(terminated), False, dict(action_mask=self.mask())


for spec in specs:
    if spec["id"] in (
        "MicrortsMining-v1",
        "MicrortsAttackShapedReward-v1",
        "MicrortsRandomEnemyShapedReward3-v1",
    ):
        gym.register(entry_point=Microrts, **spec)
