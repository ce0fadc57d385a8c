"""The benchmark's tools, on short runs: nothing is lost or run twice, and a worse run is called short."""

import csv
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import OTHERS, SCRIPTS, scalars

import benchmark.tasks  # noqa: F401  registers the maze
import ngu_r2d2
from benchmark import compare
from benchmark.suites import SUITES, Row, Target

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmark/results"


def command(*flags):
    tiny = ["--scripts", "ppo", "--env-ids", "CartPole-v1", "--work", "work", "--results", "results"]
    return [sys.executable, ROOT / "benchmark/run.py", "classic", *tiny, *map(str, flags)]


def rows(path="results/runs.csv"):
    with open(path) as file:
        return list(csv.DictReader(file))


def test_run_writes_a_csv_a_run_and_repeats_none():
    flags = ["--seeds", "1,2", "--total-timesteps", 4096]
    subprocess.run(command(*flags), check=True, capture_output=True, timeout=600)
    assert [row["run"] for row in sorted(rows(), key=lambda row: row["run"])] == [
        "CartPole-v1__ppo__1",
        "CartPole-v1__ppo__2",
    ]
    episodes = rows("results/CartPole-v1__ppo__1.csv")
    (run_dir,) = Path("work/CartPole-v1__ppo__1/runs").iterdir()
    logged = scalars(run_dir, "charts/episodic_return")
    assert [(int(e["step"]), float(e["return"])) for e in episodes] == logged and len(logged) > 20
    assert all(float(e["return"]) == float(e["length"]) for e in episodes)
    seconds = [float(e["seconds"]) for e in episodes]
    assert seconds == sorted(seconds)
    before = Path("results/CartPole-v1__ppo__1.csv").stat().st_mtime_ns
    subprocess.run(command(*flags), check=True, capture_output=True, timeout=600)
    assert len(rows()) == 2 and Path("results/CartPole-v1__ppo__1.csv").stat().st_mtime_ns == before


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_runner_goes_on_where_it_was(signum):
    """SIGTERM stops the runs, which are resumed; kill -9 leaves them to end alone: they are waited for."""
    flags = ["--seeds", "1", "--total-timesteps", 100_000]
    runner = subprocess.Popen(command(*flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    log, deadline = Path("work/CartPole-v1__ppo__1/log.txt"), time.time() + 300
    while not (log.exists() and "step/s" in log.read_text()) and time.time() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    runner.send_signal(signum)
    runner.communicate(timeout=600)
    assert runner.returncode == (130 if signum == signal.SIGTERM else -signum)
    (run_dir,) = Path("work/CartPole-v1__ppo__1/runs").iterdir()
    if signum == signal.SIGTERM:
        assert 0 < torch.load(run_dir / "checkpoint.pt")["iteration"] < 195
    assert not Path("results").exists()
    subprocess.run(command(*flags), check=True, capture_output=True, timeout=600)
    assert list(Path("work/CartPole-v1__ppo__1/runs").iterdir()) == [run_dir] and len(rows()) == 1
    assert torch.load(run_dir / "checkpoint.pt")["iteration"] == 195
    assert [step for step, _ in scalars(run_dir, "charts/SPS")] == list(range(512, 512 * 195 + 1, 512))


def test_stop_at_ends_a_run_early_on_its_full_schedule():
    flags = ["--seeds", "1", "--total-timesteps", 50_000_000, "--stop-at", 20_000]
    subprocess.run(command(*flags), check=True, capture_output=True, timeout=600)
    episodes = rows("results/CartPole-v1__ppo__1.csv")
    assert 20_000 <= int(episodes[-1]["step"]) + 500
    (run_dir,) = Path("work/CartPole-v1__ppo__1/runs").iterdir()
    assert scalars(run_dir, "charts/learning_rate")[-1][1] > 2.4e-4  # of 50 million steps
    for path in Path("results").iterdir():
        path.unlink()
    flags[-1] = 10_000  # as if it had been stopped by hand
    subprocess.run(command(*flags), check=True, capture_output=True, timeout=600)
    assert rows("results/CartPole-v1__ppo__1.csv") == episodes and len(rows()) == 1


def result(values, steps=500_000, row=None, published=(490.0, 6.0)):
    """Runs whose last 100 episodes have these means."""
    row = row or Row("ppo", "CartPole-v1", 500_000, (Target("theirs", *published),))
    ends = np.linspace(1000, steps, 200)
    return compare.Result(
        row, {seed: np.column_stack((ends, np.full(200, value))) for seed, value in enumerate(values)}
    )


def test_verdicts():
    target = Target("theirs", 490.0, 6.0)
    for values, expected in (
        ((488, 491, 495), "reproduced"),
        ((500, 499, 500), "better"),
        ((300, 420, 470), "short"),
        ((300, 490, 495), "reproduced"),  # one seed failed: its interval reaches theirs
        ((489,), "reproduced"),
        ((450,), "short"),
    ):
        assert compare.verdict(result(values), target) == expected, values
    assert (
        compare.verdict(result((489,), steps=300_000), target) == "not comparable"
    )  # cut short, and no curve


def test_when_a_seed_first_was_so_good():
    learns = np.column_stack((np.arange(100) * 10, np.arange(100) >= 50)).astype(float)
    never = learns * [1, 0]
    steps = compare.Result(None, {1: learns, 2: never, 3: learns[:19]}).first(0.5)
    assert steps[0] == 590 and np.isnan(steps[1:]).all()  # 10 ones among the 20 up to episode 59


def test_a_run_that_was_cut_is_compared_with_the_beginning_of_the_curve():
    row = next(row for row in SUITES["atari"] if "Pong" in row.env_id)
    curve = compare.published()[row.targets[0].curve]
    step, mean, band = curve[20]
    assert step < 0.3 * row.steps
    for value, expected in (
        (mean, "reproduced"),
        (mean - 2 * band - 1, "short"),
        (mean + 2 * band + 1, "better"),
    ):
        assert compare.verdict(result((value,), steps=step, row=row), row.targets[0]) == expected
    (line,) = compare.table([(row, result((mean,), steps=step, row=row))])[1:]
    assert "cut at 2" in line[-2]


def test_interquartile_mean_and_interval():
    values = np.array([1.0, 2, 3, 4, 5, 6, 7, 100])
    assert compare.iqm(values) == 4.5
    low, high = compare.interval(values, compare.iqm)
    assert 1 < low < 4.5 < high < 100
    assert compare.interval(np.array([3.0]), np.mean) == (3, 3)


def test_the_planted_regression_is_called_short():
    """CartPole at a tenth of the learning rate, whose results are committed beside the good ones."""
    script = [sys.executable, ROOT / "benchmark/compare.py", "classic", "--results"]
    for path in RESULTS.glob("*.csv"):
        Path(path.name).write_bytes(path.read_bytes())
    done = subprocess.run([*script, ".", "--flags=--learning-rate 2.5e-5"], capture_output=True, text=True)
    assert done.returncode == 1 and re.search(r"\| ppo \| CartPole-v1 .* short", done.stdout), done.stdout
    good = subprocess.run([*script, "."], capture_output=True, text=True)
    assert re.search(r"\| ppo \| CartPole-v1 .* (reproduced|better)", good.stdout), good.stdout
    page = Path("index.html").read_text()
    assert "data:image/png;base64" in page and "http" not in page


def test_the_table_of_the_readme_is_that_of_the_results():
    readme = (ROOT / "README.md").read_text()
    args = compare.Args()
    suites = [rows for name, rows in SUITES.items() if name not in compare.APART]
    sections = [compare.table([(row, compare.load(row, args)) for row in rows]) for rows in suites]
    run = [line for lines in sections for line in lines[1:] if line[-2] != "not run"]
    assert compare.markdown([sections[0][0], *run]) in readme


def test_unknown_suite():
    for tool in ("run", "compare"):
        done = subprocess.run(
            [sys.executable, ROOT / f"benchmark/{tool}.py", "clasic"], capture_output=True, text=True
        )
        assert done.returncode == 2 and re.fullmatch(
            rf"{tool}\.py: error: no suite clasic; there are .*\n", done.stderr
        )


def test_staleness_table_of_the_readme():
    """The README's numbers are those of the CSVs."""
    for path in RESULTS.glob("CartPole-v1__ppo_async__[dr]e*.csv"):
        shutil.copy(path, ".")
    tool = [sys.executable, ROOT / "benchmark/staleness.py", "--results", "."]
    rows = subprocess.run(tool, check=True, capture_output=True, text=True).stdout.splitlines()[2:]
    cells = [[cell.split(" ±")[0].strip() for cell in row.split("|")[1:-1]] for row in rows]
    readme = (ROOT / "README.md").read_text()
    delay, reuse = ([c for c in cells if c[0] == kind] for kind in ("staleness", "reuse"))
    assert "{}, {}, {}, {} and {}".format(*(c[3] for c in delay)) in readme
    assert "{}, {}, {}, {} and {}".format(*(c[4] for c in reuse)) in readme
    assert "{}, {}, {}, {}, {}".format(*(c[3] for c in reuse)) in readme
    assert Path("staleness_and_reuse.png").stat().st_size > 10_000


def test_ablation_of_the_readme():
    """V-trace ahead on the cliff, and the numbers are those of the CSVs."""
    ends = {}
    for row in SUITES["ablation"]:
        returns = compare.load(row, compare.Args()).at(row.steps)
        ends.setdefault(row.env_id.split(":")[-1], {})[row.variant] = returns
        assert len(returns) == 3
    readme = (ROOT / "README.md").read_text().replace("−", "-")
    cliff, cart = ends["CliffWalk-v0"], ends["CartPole-v1"]
    for returns in cliff.values():
        assert ", ".join(f"{x:.1f}" for x in returns) in readme
    assert "; ".join(", ".join(f"{x:.0f}" for x in returns) for returns in cart.values()) in readme
    vtrace = cliff.pop("vtrace")
    assert all(vtrace.min() > returns.max() + 10 for returns in cliff.values())


def test_scripts_of_the_readme():
    """Lines are those of the files, results those of the table below, speed and memory rows of speed.csv."""
    readme = (ROOT / "README.md").read_text()
    row = r"^\| `python (\w+)\.py` \| (\d+) \|.*\| (.*) \| (.*) \| (.*) \|$"
    rows = re.findall(row, readme, re.MULTILINE)
    assert {name for name, *_ in rows} == SCRIPTS.keys() | OTHERS.keys()
    with open(RESULTS / "speed.csv") as file:
        newest = {(row["script"], row["flags"]): row for row in csv.DictReader(file)}
    speeds = ("steps_per_s", "sb3_steps_per_s", "plain_steps_per_s")
    memories = ("peak_mb", "sb3_peak_mb", "plain_peak_mb")
    for name, lines, result, *figures in rows:
        assert int(lines) == len((ROOT / f"{name}.py").read_text().splitlines())
        results = "".join(re.findall(rf"^\| {name} \|.*$", readme, re.MULTILINE))
        assert all(number in results for number in re.findall(r"[−\d.]*\d\.\d+", result))
        row = newest.get((f"{name}.py", ""))
        found = (
            [" / ".join(row[x] for x in kind if row[x]) for kind in (speeds, memories)] if row else ["—"] * 2
        )
        assert figures == found, name


def test_speeds_of_the_readme_with_flags():
    """Steps per second and times the plain loop, of the newest row with these flags."""
    with open(RESULTS / "speed.csv") as file:
        newest = {(row["script"], row["flags"]): row for row in csv.DictReader(file)}
    prose = re.search(r"### Speed\n(.*?)\n#", (ROOT / "README.md").read_text() + "\n#", re.DOTALL)[1]
    ppo, continuous = newest["ppo.py", "--compile"], newest["ppo_continuous.py", "--compile"]
    assert f"`ppo.py` made {ppo['steps_per_s']} and `ppo_continuous.py` {continuous['steps_per_s']}" in prose
    assert f"{float(ppo['ratio']):.1f} and {float(continuous['ratio']):.1f} times the plain loop" in prose
    atari = newest["ppo_atari.py", "--amp"]
    assert f"`ppo_atari.py --amp` {atari['steps_per_s']}, {float(atari['ratio']):.1f} times" in prose


def test_the_disco_maze_is_the_papers():
    """One way between any two cells, new walls an episode, colours a step; walls or 500 steps end it."""
    env = gym.make("RandomDiscoMaze-v0")
    mazes, pictures, rng = [], [], np.random.default_rng(0)
    for seed in range(3):
        obs, info = env.reset(seed=seed)
        maze, over, lengths = env.unwrapped, False, 0
        assert obs.shape == (21, 21, 1) and obs[1, 1] == 6 and info["cells"] == 1
        mazes.append(maze.walls.copy())
        free = [tuple(cell) for cell in np.argwhere(~maze.walls)]
        assert len(free) == 199  # 100 rooms and the 99 passages of a tree over them
        reached, ahead = {(1, 1)}, [(1, 1)]
        while ahead:
            at = ahead.pop()
            new = {tuple(np.add(at, move).tolist()) for move in maze.moves} & set(free) - reached
            reached |= new
            ahead += new
        assert len(reached) == 199
        while not over:
            safe = [a for a in range(4) if not maze.walls[tuple(maze.at + maze.moves[a])]]
            obs, reward, terminated, truncated, info = env.step(rng.choice(safe))
            over, lengths = terminated or truncated, lengths + 1
            assert (obs[..., 0] > 0).sum() == 441 - 199 + 1 and reward == 0 and obs[maze.at] == 6
            pictures.append(obs)
        assert lengths == 500 and truncated and not terminated and info["cells"] == len(maze.visited) > 1
    assert not (mazes[0] == mazes[1]).all() and not (mazes[1] == mazes[2]).all()
    assert {*np.unique(np.stack(pictures))} == set(range(7))
    env.reset(seed=0)
    *_, terminated, truncated, info = env.step(0)  # up from (1, 1)
    assert terminated and not truncated and info["cells"] == 1


def test_disco_counts_the_cells_of_agents_and_walks():
    args = ngu_r2d2.Args(env_id="benchmark.tasks:RandomDiscoMaze-v0", num_envs=4, total_timesteps=400)
    args = replace(args, num_policies=1, rnd=False, burn_in=0, unroll=8, period=8, learning_starts=64)
    args = replace(args, train_embedding=False, batch_sequences=2, hidden_size=16, device="cpu")
    run_dir = ngu_r2d2.train(args)
    program = [sys.executable, ROOT / "benchmark/disco.py", "--csv", "disco.csv", "--episodes"]
    subprocess.run([*program, "20", run_dir], check=True, capture_output=True, timeout=600)
    subprocess.run([*program, "5"], check=True, capture_output=True, timeout=600)
    agent, careful, uniform = rows("disco.csv")
    assert agent["embedding"] == "untrained" and int(agent["steps"]) == 400 and int(agent["episodes"]) >= 20
    assert 1 <= float(agent["cells_mean"]) <= float(agent["length_mean"]) + 1
    assert float(careful["length_mean"]) == 500 and float(careful["cells_mean"]) > 10
    assert float(uniform["length_mean"]) < 5 and float(uniform["cells_mean"]) < 5
