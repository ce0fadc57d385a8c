"""docs/your-research.md: its diffs apply to today's ppo.py, are short, and train; its table is true."""

import importlib.util
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import OTHERS, SCRIPTS, scalars, small_args

import ppo_continuous

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/your-research.md").read_text(encoding="utf-8")
PARTS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
ENVIRONMENT = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]


def trained(steps, part=None):
    """The folder of a run of ppo.py, with the diff of a part, on the page's own environment."""
    Path("ppo.py").write_text((ROOT / "ppo.py").read_text(encoding="utf-8"), encoding="utf-8")
    Path("corridor.py").write_text(ENVIRONMENT, encoding="utf-8")
    if part:
        diff = re.search(r"```diff\n(.*?)```", PARTS[part], re.DOTALL)[1]
        changed = [line for line in diff.splitlines() if re.match(r"[+-](?![+-])", line)]
        assert 0 < len(changed) <= 8
        subprocess.run(["git", "apply", "-"], input=diff, text=True, check=True)
    command = [sys.executable, "ppo.py", "--env-id", "corridor:Corridor-v0", "--total-timesteps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def test_an_environment_of_ones_own():
    """Learned: ten steps to the end of the corridor, where a random walk takes many times as many."""
    run_dir = trained(30_000)
    lengths = [x for _, x in scalars(run_dir, "charts/episodic_length")]
    assert sum(lengths[-50:]) / 50 < 15 < 40 < sum(lengths[:50]) / 50
    assert [x for _, x in scalars(run_dir, "charts/is_success")][-50:] == [1.0] * 50


@pytest.mark.parametrize("part", [part for part in PARTS if "```diff" in PARTS[part]])
def test_a_diff_applies_and_trains(part):
    run_dir = trained(4096, part)
    assert len(scalars(run_dir, "losses/policy_loss")) == 8
    tags = {"A success rate": "charts/success_rate", "An auxiliary loss": "losses/reconstruction_loss"}
    if tag := tags.get(part):
        assert len(scalars(run_dir, tag)) > 1
    if (
        part == "A bonus on the reward"
    ):  # the value is that of the bonus, too; the return that is logged is not
        assert max(x for _, x in scalars(run_dir, "charts/episodic_return")) <= 1


def test_the_bonus_is_of_the_place_where_a_step_led_to():
    """At the end of an episode, that is not where the next one begins."""
    lines = [
        line[1:].strip() for line in PARTS["A bonus on the reward"].splitlines() if line.startswith("+   ")
    ]
    reached = [np.array([0.3]), np.array([1.0])]
    names = dict(np=np, t=0, visits=Counter([(0.3,)] * 3), rewards=np.zeros((1, 2)))
    names |= dict(next_obs=np.array([[0.3], [0.0]]), dones=np.array([[0, 1]]), info=dict(final_obs=reached))
    exec("\n".join(line for line in lines if line != "visits = Counter()"), names)
    assert names["visits"] == {(0.3,): 4, (1.0,): 1}
    np.testing.assert_allclose(names["rewards"], [[0.05, 0.1]])


def test_there_are_five_changes_and_a_notebook():
    assert len(PARTS) == 6 and sum("```diff" in part for part in PARTS.values()) == 4


def test_a_notebook(capsys):
    """What the page shows runs as it is, with a run's name."""
    run_dir = ppo_continuous.train(small_args(ppo_continuous))
    code = re.search(r"```python\n(.*?)```", PARTS["A trained agent in a notebook"], re.DOTALL)[1]
    names = {}
    capsys.readouterr()
    exec(code.replace("runs/NAME", str(run_dir)), names)
    assert all(float(line) < -100 for line in capsys.readouterr().out.splitlines()[-4:])  # Pendulum's returns
    assert names["reward"].shape == names["value"].shape == (1,)
    saved = ppo_continuous.load_checkpoint(run_dir)["agent"]
    assert all(torch.equal(x, saved[name]) for name, x in names["agent"].state_dict().items())


OBSERVATIONS = {
    "vectors": gym.spaces.Box(0, 1, (3,), np.float32),
    "images": gym.spaces.Box(0, 255, (84, 84, 3), np.uint8),
    "grids": gym.spaces.Box(0, 255, (7, 7, 3), np.uint8),
    "boxes": gym.spaces.Box(0, 1, (4, 5), np.float32),
}
ACTIONS = {
    "discrete": gym.spaces.Discrete(3),
    "several": gym.spaces.MultiDiscrete([2, 3]),
    "vectors": gym.spaces.Box(-1, 1, (2,), np.float32),
}


class Spaces(gym.Env):
    """Has the spaces of these names, and observes zeros."""

    def __init__(self, seen, done):
        self.observation_space, self.action_space = OBSERVATIONS[seen], ACTIONS[done]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros_like(self.observation_space.low), {}

    def step(self, action):
        return np.zeros_like(self.observation_space.low), 0.0, False, False, {}


for seen in OBSERVATIONS:
    for done in ACTIONS:
        gym.register(f"{seen}-{done}-v0", Spaces, max_episode_steps=5, kwargs=dict(seen=seen, done=done))


@pytest.mark.parametrize("name", SCRIPTS | OTHERS)
def test_spaces_that_a_script_takes(name, capsys):
    """Those of the page's table, and all others are refused."""
    script = (SCRIPTS | OTHERS)[name]
    (line,) = (line for line in PAGE.splitlines() if line.startswith("|") and f"`{name}.py`" in line)
    _, observations, actions = line.strip("| ").split(" | ")
    said = {(x, y) for x in OBSERVATIONS for y in ACTIONS if x in observations and y in actions}
    said |= {("Atari games", "discrete")} if "Atari games" in observations else set()
    found = set()
    for seen, done in [*((x, y) for x in OBSERVATIONS for y in ACTIONS), ("Atari games", "discrete")]:
        env_id = "PongNoFrameskip-v4" if seen == "Atari games" else f"{seen}-{done}-v0"
        flags = dict(normalize=seen == "vectors") if name == "ppo_multidiscrete" else {}
        args = small_args(script, env_id=env_id, **flags)
        try:
            script.make_env(*[env_id] * (name == "impala_vtrace"), args, 1).close()
            found.add((seen, done))
        except SystemExit as end:
            assert end.code == 2 and capsys.readouterr().err.count("\n") == 1
    assert found == said and said


@pytest.mark.parametrize("name", ["ppo", "ppo_shared", "ppo_continuous", "ppo_lstm"])
def test_greedy_actions(name, monkeypatch):
    """As the page says: the same episodes then, whatever the numbers that PyTorch draws."""
    source = (ROOT / f"{name}.py").read_text(encoding="utf-8")
    greedy = "dist.mean" if name == "ppo_continuous" else "dist.logprobs.argmax(-1)"
    assert f"write `{greedy}`" in PAGE or f"`{name}.py` `{greedy}`" in PAGE
    before, begin, evaluation = source.partition("\ndef evaluate(")
    assert evaluation.partition("\n# ===")[0].count("dist.sample()") == 1
    evaluation = evaluation.replace("dist.sample()", greedy, 1)
    Path("greedy.py").write_text(f"{before}{begin}{evaluation}", encoding="utf-8")
    spec = importlib.util.spec_from_file_location("greedy", "greedy.py")
    greedy_script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "greedy", greedy_script)
    spec.loader.exec_module(greedy_script)
    env_id = "Pendulum-v1" if name == "ppo_continuous" else "CartPole-v1"
    run_dir = greedy_script.train(small_args(greedy_script, env_id=env_id))
    args = greedy_script.parse_args(["--evaluate", str(run_dir), "--eval-episodes", "3"])
    found = []
    for seed in (1, 2):
        monkeypatch.setattr(greedy_script, "seed_all", lambda _, seed=seed: torch.manual_seed(seed))
        found.append(greedy_script.evaluate(args))
    assert found[0] == found[1] and len(found[0]) == 3
