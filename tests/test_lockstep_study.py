"""benchmark/studies/lockstep.py: its normalizers are ours, not gymnasium's; its switch reaches our scripts.

And the patch that gives ppo_continuous.py gymnasium's normalizers.

CleanRL's files are not here; docs/lockstep.md has what came out with them.
"""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

import ppo_continuous

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmark/studies"))
lockstep = importlib.import_module("lockstep")


class Walk(gym.Env):
    """Episodes of 3 and of 4 steps in turn; the former terminate, the latter are cut."""

    observation_space, action_space = gym.spaces.Box(-9, 9, (2,), np.float64), gym.spaces.Box(-1, 1, (1,))
    count = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.t = self.count + 1, 0
        return self.np_random.normal(size=2), {}

    def step(self, action):
        self.t += 1
        ends = self.t == 3 + self.count % 2
        obs, reward = self.np_random.normal(size=2), self.np_random.normal(3)
        return obs, reward, ends and self.count % 2 == 0, ends and self.count % 2 == 1, {}


def normalized(kind: str, script=ppo_continuous) -> list[np.ndarray]:
    """Observations and rewards of 40 steps."""
    if kind == "ours":
        envs = gym.vector.SyncVectorEnv([Walk], autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
        envs = script.NormalizedEnvs(envs, 0.9, frozen=False)
    else:
        wrappers = lockstep if kind == "baselines" else gym.wrappers

        def make():
            return wrappers.NormalizeReward(wrappers.NormalizeObservation(Walk()), gamma=0.9)

        envs = gym.vector.SyncVectorEnv([make], autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    found = [np.append(envs.reset(seed=1)[0][0], 0)]
    for _ in range(40):
        obs, rewards, *_ = envs.step(np.zeros((1, 1)))
        found.append(np.append(obs[0], rewards[0]).clip(-10, 10))  # CleanRL clips in further wrappers
    return found


def test_normalizers_of_the_study_are_ours_and_not_those_of_gymnasium():
    ours, baselines, gymnasium = (normalized(kind) for kind in ("ours", "baselines", "gymnasium"))
    np.testing.assert_allclose(baselines, ours, rtol=1e-9)
    first = [
        np.flatnonzero(~np.isclose(x, y, rtol=1e-4)).tolist() for x, y in zip(gymnasium, ours, strict=True)
    ]
    assert first[:4] == [[], [], [], []] and first[-1] == [0, 1, 2]  # the first episode has three steps


def test_the_patch_makes_our_normalizers_those_of_gymnasium(monkeypatch):
    shutil.copy(ROOT / "ppo_continuous.py", ".")
    subprocess.run(["git", "apply", ROOT / "benchmark/studies/gymnasium_normalizers.diff"], check=True)
    spec = importlib.util.spec_from_file_location("patched", "ppo_continuous.py")
    patched = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "patched", patched)
    spec.loader.exec_module(patched)
    np.testing.assert_allclose(normalized("gymnasium"), normalized("ours", patched), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["ppo", "ppo_shared", "ppo_continuous"])
def test_our_scripts_run_in_float64_and_leave_all_behind(name):
    env_id = "Pendulum-v1" if name == "ppo_continuous" else "CartPole-v1"
    with lockstep.float64():
        ours = lockstep.run_ours(name, dict(env_id=env_id, num_steps=64), 2)
    args, iterations = ours["args"], ours["iterations"]
    assert len(ours["stream"]) == 128 and len(ours["orders"]) == 2 * args.update_epochs
    assert ours["orders"][0].sort()[0].tolist() == list(range(args.batch_size))
    assert len(iterations) == 2 and torch.get_default_dtype() is torch.float32
    for x in (*ours["weights"].values(), *iterations[1]["parameters"].values()):
        assert x.dtype is torch.float64
    assert iterations[0]["advantages"].dtype == np.float64 and set(lockstep.TAGS) <= set(
        iterations[0]["logged"]
    )
    rewards = [step[2] for step in ours["stream"]]
    np.testing.assert_array_equal(np.concatenate([x["rewards"] for x in iterations]), rewards)
    replay = lockstep.Replay(ours)
    assert replay.reset(seed=1)[0].shape == replay.step(ours["stream"][0][0])[0].shape
    with pytest.raises(AssertionError):
        replay.step(ours["stream"][1][0] + 1)


def test_differences_are_of_the_worst_iteration_and_parameter():
    one = dict(
        rewards=[1.0, 4.0],
        advantages=[2.0],
        logged=dict.fromkeys(lockstep.TAGS, 1.0),
        parameters={"w": [1.0], "b": [2.0]},
    )
    two = one | dict(rewards=[1.5, 4.0], parameters={"w": [0.75], "b": [2.0]})
    worst = lockstep.compare([one, one, one], [one, two, one])
    assert worst == dict(rewards=0.125, advantages=0, logged=0, parameters=0.25)


def test_what_is_not_a_number_does_not_agree():
    numbers = dict(rewards=np.ones(2), advantages=np.ones(2), parameters=dict(w=np.ones(2)))
    numbers["logged"] = dict.fromkeys(lockstep.TAGS, 1.0)
    broken = numbers | dict(advantages=np.array([1, np.nan]), parameters=dict(w=np.full(2, np.nan)))
    broken["logged"] = numbers["logged"] | {lockstep.TAGS[-1]: np.nan}
    worst = lockstep.compare([numbers] * 3, [numbers, broken, numbers])
    assert (
        worst["rewards"] == 0 and np.isnan([worst[x] for x in ("advantages", "logged", "parameters")]).all()
    )


def test_a_folder_without_cleanrl_is_refused(tmp_path):
    command = [sys.executable, str(ROOT / "benchmark/studies/lockstep.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "CleanRL" in done.stderr
