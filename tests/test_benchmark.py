"""The benchmark's tools, on short runs: nothing is lost or run twice, and a worse run is called short."""

import csv
import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
import tyro
from conftest import OTHERS, SCRIPTS, scalars, wait_for
from filelock import FileLock
from scipy import stats

import benchmark.studies.maze  # noqa: F401  registers it
import ngu_r2d2
import ppo
import ppo_async
from benchmark import compare, figures, same
from benchmark.files import csv_files, csv_path, read_csv
from benchmark.run import COLUMNS, Args, Run, end_last_part, fingerprint, planned, read_table
from benchmark.studies import exploration, random_policy
from benchmark.suites import RENAMED, SUITES, Row, Target

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmark/results"


def command(*flags):
    tiny = ["--scripts", "ppo", "--env-ids", "CartPole-v1", "--results", "results"]
    return [sys.executable, ROOT / "benchmark/run.py", "classic", *tiny, *map(str, flags)]


def run_it(*flags, code=0):
    done = subprocess.run(command(*flags), capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stderr
    return done


def in_this_process(command):
    """What subprocess.run(command, capture_output=True, text=True) returns of a tool, without its imports."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(word) for word in command[1:]])
        try:
            runpy.run_path(str(command[1]), run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code or 0
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


def rows(path="results/classic/runs.csv"):
    with open(path, encoding="utf-8") as file:
        return list(csv.DictReader(file))


def csv_of(*flags, seed=1):
    return Path("results/classic", "__".join(["CartPole-v1__ppo", *flags, f"{seed}.csv"]))


SHORT = "total-timesteps=4096"


def test_run_writes_a_csv_a_run_and_repeats_none():
    flags = ["--seeds", "1,2", "--total-timesteps", 4096]
    run_it(*flags, "--workers", 2)
    assert [row["run"] for row in rows()] == [f"CartPole-v1__ppo__{SHORT}__{seed}" for seed in (1, 2)]
    subprocess.run([sys.executable, ROOT / "ppo.py", "--total-timesteps", "4096"], check=True)
    (run_dir,) = Path("runs").iterdir()
    logged = scalars(run_dir, "charts/episodic_return")
    episodes = rows(csv_of(SHORT))
    assert [(int(e["step"]), float(e["return"])) for e in episodes] == logged and len(logged) > 20
    assert all(float(e["return"]) == float(e["length"]) for e in episodes)
    seconds = [float(e["seconds"]) for e in episodes]
    assert seconds == sorted(seconds)
    before = csv_of(SHORT).stat().st_mtime_ns
    run_it(*flags)
    assert len(rows()) == 2 and csv_of(SHORT).stat().st_mtime_ns == before
    assert not list(Path("results/classic/unfinished").glob("CartPole*"))  # finished runs have left


def test_a_row_names_build_machine_and_command():
    run_it("--seeds", 1, "--total-timesteps", 4096, "--flags=--learning-rate 0", "--threads", 2)
    (row,) = rows()
    git = lambda *words: subprocess.check_output(["git", *words], cwd=ROOT, text=True).rstrip()  # noqa: E731
    assert row["run"] == f"CartPole-v1__ppo__learning-rate=0__{SHORT}__1"
    assert row["commit"] == git("rev-parse", "--short=10", "HEAD")
    status = git("status", "--porcelain", "--", ".", ":(exclude)benchmark/results").splitlines()
    assert row["changed"] == (" ".join(line[3:] for line in status) or "nothing")
    assert row["fingerprint"] == f"ppo.py {git('hash-object', 'ppo.py')[:12]}"
    assert row["threads"] == "2" and row["parts"] == "1" and 0 < int(row["seconds"]) < 600
    assert (
        f"torch {torch.__version__}, numpy {np.__version__}, gymnasium {gym.__version__}" in row["versions"]
    )
    assert row["machine"].startswith(f"{os.cpu_count()} x ") and len(row["machine"]) > 10
    assert abs(datetime.fromisoformat(row["started"]).timestamp() - time.time()) < 600
    assert row["command"].startswith("python ppo.py --env-id CartPole-v1 --seed 1 --learning-rate 0 --total")
    shutil.copy(ROOT / "ppo.py", ".")  # the command makes the CSV again
    subprocess.run([sys.executable, *row["command"].split()[1:]], check=True)
    (run_dir,) = Path("runs").iterdir()
    episodes = rows(csv_of("learning-rate=0", SHORT))
    assert [(int(e["step"]), float(e["return"])) for e in episodes] == scalars(
        run_dir, "charts/episodic_return"
    )


def test_other_flags_are_another_run():
    """A learning rate of 0, and a longer schedule, in the same results folder: neither is the first run."""
    run_it("--seeds", 1, "--total-timesteps", 4096)
    run_it("--seeds", 1, "--total-timesteps", 4096, "--flags=--learning-rate 0")
    run_it("--seeds", 1, "--total-timesteps", 8192)
    first, flat = rows(csv_of(SHORT)), rows(csv_of("learning-rate=0", SHORT))
    longer = rows(csv_of("total-timesteps=8192"))
    assert [e["return"] for e in first] != [e["return"] for e in flat]
    assert int(longer[-1]["step"]) > 4096 and [row["parts"] for row in rows()] == ["1"] * 3


def test_a_grid_is_all_combinations_of_its_values_with_every_seed():
    args = Args("classic", "1,2", scripts=("ppo",), env_ids=("CartPole-v1",), flags="--num-envs 8")
    args.grid = ("learning-rate=1e-4,1e-3", "gamma=0.9,0.99,1")
    runs = [Run(args, row, seed) for row, seed in planned(args)]
    assert [run.name for run in runs] == [
        f"CartPole-v1__ppo__learning-rate={learning_rate}__gamma={gamma}__num-envs=8__{seed}"
        for seed in (1, 2)
        for learning_rate in ("1e-4", "1e-3")
        for gamma in ("0.9", "0.99", "1")
    ]
    assert " --learning-rate 1e-4 --gamma 0.99 --num-envs 8 --total" in runs[1].identity["command"]


def test_a_run_without_an_episode():
    """Nothing can be compared: one line, and the run stays to be continued."""
    flags = ["--scripts", "ppo", "--env-ids", "Acrobot-v1", "--seeds", "1", "--results", "results"]
    tool = [sys.executable, ROOT / "benchmark/run.py", "classic", *flags, "--total-timesteps", "512"]
    done = subprocess.run(tool, capture_output=True, text=True)
    assert done.returncode == 1 and re.search(r"run.py: error: .*: no episode has ended.*\n$", done.stderr)
    assert list(Path("results/classic/unfinished/Acrobot-v1__ppo__total-timesteps=512__1/runs").iterdir())


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_run_of_another_build_is_not_taken_over(is_finished):
    """Neither as a result nor to go on from: one line, until --anew makes it again."""
    flags = ["--seeds", 1, "--total-timesteps", 4096]
    if is_finished:
        run_it(*flags)
        path = Path("results/classic/runs.csv")
    else:
        path = Path(f"results/classic/unfinished/CartPole-v1__ppo__{SHORT}__1/run.json")
        path.parent.mkdir(parents=True)
        run = Run(Args("classic", total_timesteps=4096), SUITES["classic"][0], 1)
        path.write_text(json.dumps(run.identity | dict(parts=[])), encoding="utf-8")
    path.write_text(re.sub(r"ppo.py \w{12}", "ppo.py 0123456789ab", path.read_text(encoding="utf-8")))
    error = run_it(*flags, code=2).stderr
    assert re.fullmatch(
        r"run.py: error: \S+ has another fingerprint: ppo.py 0123456789ab, not .*; --anew .*\n", error
    ), error
    run_it(*flags, "--anew")
    (row,) = rows()
    assert "0123456789ab" not in row["fingerprint"]
    before = csv_of(SHORT).stat().st_mtime_ns
    run_it(*flags, "--anew")
    assert csv_of(SHORT).stat().st_mtime_ns == before  # it is of this build now


def test_rows_of_another_build_stay_and_what_is_missing_is_run():
    flags = ["--total-timesteps", 4096]
    run_it(*flags, "--seeds", 1)
    table = Path("results/classic/runs.csv")
    table.write_text(
        re.sub(r"ppo.py \w{12}", "ppo.py 0123456789ab", table.read_text(encoding="utf-8")), encoding="utf-8"
    )
    done = run_it(*flags, "--seeds", "1,2")
    assert re.search(
        r"run.py: \S+1.csv has another fingerprint: .*; 1 of 2 runs are such and stay; ", done.stderr
    )
    assert ["0123456789ab" in row["fingerprint"] for row in rows()] == [True, False]


def test_what_an_interrupted_removal_left_is_not_gone_on_from():
    """A checkpoint without a record of what made it."""
    flags = ["--seeds", 1, "--total-timesteps", 4096]
    run_it(*flags)
    subprocess.run(
        [sys.executable, ROOT / "ppo.py", "--total-timesteps", "4096", "--gamma", "0.5"], check=True
    )
    folder = Path(f"results/classic/unfinished/CartPole-v1__ppo__{SHORT}__1")
    folder.mkdir(parents=True)
    Path("runs").rename(folder / "runs")
    before = csv_of(SHORT).read_text(encoding="utf-8")
    csv_of(SHORT).unlink()
    error = run_it(*flags, code=2).stderr
    assert f"{folder.name} has another command: an unknown one, not python ppo.py" in error
    run_it(*flags, "--anew")
    returns = [
        [line.split(",")[2] for line in text.split()]
        for text in (before, csv_of(SHORT).read_text(encoding="utf-8"))
    ]
    assert returns[0] == returns[1] and not folder.exists()


def test_a_killed_runner_leaves_no_row_beside_the_episodes_of_another_run(monkeypatch):
    """Neither the old row with new episodes nor the new row with old ones."""
    run_it("--seeds", 1, "--total-timesteps", 4096)
    run = Run(Args("classic", total_timesteps=4096, results=Path("results")), SUITES["classic"][0], 1)
    old, seen = csv_of(SHORT).read_text(encoding="utf-8"), []
    monkeypatch.setattr("benchmark.run.export", lambda _, path: path.write_text("new", encoding="utf-8"))
    monkeypatch.setattr("benchmark.run.remove", lambda _: None)
    replace_file = Path.replace

    def replace_and_look(self, target):
        replace_file(self, target)
        seen.append((csv_of(SHORT).read_text(encoding="utf-8") == old, len(rows())))

    monkeypatch.setattr(Path, "replace", replace_and_look)
    part = dict(started="", commit="", changed="", machine="", threads=1, versions="", seconds=1)
    run.finish([part])
    assert seen == [(True, 0), (False, 0), (False, 1)]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_stopped_runner_goes_on_where_it_was(signum):
    """SIGTERM, or a terminal that goes, stops the runs, which are resumed.

    kill -9 leaves them to end alone: they are waited for.
    """
    flags = ["--seeds", "1", "--total-timesteps", 100_000]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    answer = (
        signal.SIG_IGN if signum == signal.SIGTERM else signal.SIG_DFL
    )  # to a hangup, as nohup has it or not
    hangup = lambda: signal.signal(signal.SIGHUP, answer)  # noqa: E731
    runner = subprocess.Popen(command(*flags), **pipes, preexec_fn=hangup)
    folder = Path("results/classic/unfinished/CartPole-v1__ppo__total-timesteps=100000__1")
    wait_for(
        lambda: (
            list(folder.glob("runs/*/events*"))
            and "step/s" in (folder / "log.txt").read_text(encoding="utf-8")
        )
    )
    if answer == signal.SIG_IGN:
        runner.send_signal(signal.SIGHUP)
    time.sleep(1.5)  # the runner looks every second
    assert "stopping" not in (folder / "log.txt").read_text(encoding="utf-8")
    runner.send_signal(signum)
    runner.communicate(timeout=600)
    assert runner.returncode == (130 if signum != signal.SIGKILL else -signum)
    (run_dir,) = (folder / "runs").iterdir()
    if signum != signal.SIGKILL:
        assert 0 < torch.load(run_dir / "checkpoint.pt")["iteration"] < 195
    assert not Path("results/classic/runs.csv").exists()
    again = subprocess.Popen(command(*flags), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    kept = Path("kept")  # the folder leaves with the end of the run: its events are held by links
    kept.mkdir()
    while again.poll() is None:
        for path in run_dir.glob("events*"):
            if not (kept / path.name).exists():
                (kept / path.name).hardlink_to(path)
        assert len(list((folder / "runs").glob("*"))) <= 1
        time.sleep(0.05)
    assert again.returncode == 0 and not folder.exists()
    assert [step for step, _ in scalars(kept, "losses/value_loss")] == list(range(512, 512 * 195 + 1, 512))
    (row,) = rows()
    assert row["parts"] == "2" and 1 <= int(row["seconds"]) < 300
    episodes = rows(csv_of("total-timesteps=100000"))
    assert [int(e["step"]) for e in episodes] == [step for step, _ in scalars(kept, "charts/episodic_return")]


def test_a_run_without_its_runner_is_waited_for():
    """While it holds the lock of its run folder, and for a minute while it may still be starting."""
    run = Run(Args("classic", results=Path("results")), SUITES["classic"][0], 1)
    folder = run.folder / "runs/NAME"
    folder.mkdir(parents=True)
    assert not run.is_orphan()
    with FileLock(folder / "lock"):
        assert run.is_orphan()
    assert not run.is_orphan()
    run.started.touch()
    (folder / "events.1").touch()
    os.utime(folder / "events.1", (1, 1))  # of an earlier part
    assert run.is_orphan()
    (folder / "events.2").touch()  # it has logged, so it had the lock, and lost it as it ended
    assert not run.is_orphan()
    (folder / "events.2").unlink()
    long_ago = time.time() - 61
    os.utime(run.started, (long_ago, long_ago))
    assert not run.is_orphan()


def test_a_run_whose_runner_was_killed_at_once_is_not_started_twice():
    """Before the script has a run folder."""
    flags = ["--seeds", "1", "--total-timesteps", 4096]
    runner = subprocess.Popen(command(*flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    folder = Path(f"results/classic/unfinished/CartPole-v1__ppo__{SHORT}__1")
    wait_for((folder / "log.txt").exists)
    runner.kill()
    runner.communicate(timeout=600)
    assert not (folder / "runs").exists()
    again = subprocess.Popen(command(*flags), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while again.poll() is None:
        assert len(list(folder.glob("runs/*"))) <= 1
        time.sleep(0.05)
    assert again.returncode == 0 and not folder.exists() and [row["parts"] for row in rows()] == ["2"]


WITHOUT_FCNTL = """
import sys
from pathlib import Path
import filelock, matplotlib.figure, psutil, tensorboard, torch.utils.tensorboard, tqdm, tyro
import ppo, ppo_async, impala_vtrace, ngu_r2d2
sys.modules["fcntl"] = None
tools = "compare episodes_csv figures files human on_ray report run same suites tasks verdict watch"
for name in tools.split():
    __import__(f"benchmark.{name}")
"""


def test_no_tool_needs_fcntl():
    """Windows has none; filelock has what takes its place."""
    env = os.environ | dict(PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, "-c", WITHOUT_FCNTL], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_seconds_are_the_sum_of_the_parts():
    log = Path("log.txt")
    log.write_text("", encoding="utf-8")
    os.utime(log, (1_000_000_060, 1_000_000_060))
    start = datetime.fromtimestamp(1_000_000_000, timezone.utc).isoformat()
    parts = [dict(started=start, seconds=30), dict(started=start, seconds=None)]
    end_last_part(parts, log)  # its runner was killed: it lasted until the last line of the log
    assert [part["seconds"] for part in parts] == [30, 60]


def test_stop_at_ends_a_run_early_on_its_full_schedule_and_a_higher_one_continues_it():
    flags = ["--seeds", "1", "--total-timesteps", 50_000_000, "--stop-at"]
    run_it(*flags, 20_000)
    path = csv_of("total-timesteps=50000000")
    episodes = rows(path)
    assert 20_000 <= int(episodes[-1]["step"]) + 500
    (run_dir,) = Path("results/classic/unfinished", path.stem, "runs").iterdir()
    assert scalars(run_dir, "charts/learning_rate")[-1][1] > 2.4e-4  # of 50 million steps
    assert [(row["steps"], row["schedule"], row["parts"]) for row in rows()] == [("20000", "50000000", "1")]
    longer = int(episodes[-1]["step"]) + 10_000
    run_it(*flags, longer)
    assert rows(path)[: len(episodes)] == episodes and int(rows(path)[-1]["step"]) + 500 >= longer
    assert [(row["steps"], row["parts"]) for row in rows()] == [(str(longer), "2")]
    before = path.read_bytes()
    for used in (path, path.with_name("runs.csv")):
        used.unlink()
    run_it(*flags, 10_000)  # as if it had been stopped by hand
    assert path.read_bytes() == before and [row["steps"] for row in rows()] == ["10000"]


def test_where_a_run_stops():
    """A row's own step is one of its own schedule; the log of a long schedule counts in G."""

    def steps(**flags):
        row = next(row for row in SUITES["atari"] if row.env_id == "PongNoFrameskip-v4")
        return Run(Args("atari", results=Path.cwd(), **flags), row, 1)

    for flags, expected in (
        ({}, 3_000_000),
        (dict(total_timesteps=5_000_000), 5_000_000),
        (dict(total_timesteps=10_000_000), 3_000_000),
        (dict(total_timesteps=5_000_000, stop_at=1_000_000), 1_000_000),
        (dict(stop_at=4_000_000), 4_000_000),
    ):
        assert steps(**flags).steps == expected
    long = steps(total_timesteps=10**9, stop_at=10**6)
    long.folder.mkdir(parents=True)
    for done, progress in (("999k", 999_000), ("1.01M", 1_010_000), ("1.00G", 10**9)):
        long.log.write_text(f"  1%|| {done}/1.00G [00:05<1:00:00, 200kstep/s]\n")
        assert long.progress() == progress and long.is_beyond() == (progress > 10**6)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--seeds", "1-3"], "--seeds 1-3: write 1..3 or 1,5"),
        (["--seeds", "3..1"], "--seeds 3..1: write 1..3 or 1,5"),
        (
            ["--env-ids", "CartPole-v2"],
            "--env-ids: classic has no CartPole-v2; it has CartPole-v1, Acrobot-v1, ",
        ),
        (["--scripts", "ppo.py"], "--scripts: classic has no ppo.py; it has ppo, ppo_shared"),
        (["--workers", "0"], "workers cannot be 0"),
        (["--stop-at", "0"], "stop_at cannot be 0"),
        (["--flags", "learning-rate 0"], "--flags 'learning-rate 0': write them as for a script"),
        (["--flags=--seed 7"], "--flags: --seed is not to be given among them"),
        (["--flags=--env_id=Acrobot-v1"], "--flags: --env-id is not to be given among them"),
        (["--flags=--total-timesteps 9999"], "--flags: --total-timesteps is not to be given among them"),
        (["--grid", "learning-rate"], "--grid learning-rate: write it as learning-rate=1e-4,1e-3"),
        (["--grid", "gamma=0.9", "learning-rate=1e-4,"], "--grid learning-rate=1e-4,: write it as"),
        (["--grid", "seed=1,2"], "--grid: --seed is not to be given among them"),
        (["--seeds", "1", "--grid", "gamma=0.9,0.9"], "1 of 2 runs differ: a seed, or a flag of --grid"),
        (["--seeds", "1", "--grid", "gamma=0.9,0.8", "--flags=--gamma 1"], "--gamma is given twice"),
        (["--flags=" + " ".join(f"--flag-{k} {k}" for k in range(30))], "CartPole-v1__ppo__flag-0=0"),
    ],
)
def test_mistakes_of_run(flags, message):
    done = in_this_process(command(*flags))
    assert done.returncode == 2 and done.stderr.startswith(f"run.py: error: {message}")
    assert done.stderr.count("\n") == 1 and not Path("results").exists()


def test_results_where_there_can_be_no_folder():
    Path("file").touch()
    done = in_this_process(command("--seeds", "1", "--results", "file"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("run.py: error: --results: ") and os.listdir() == ["file"]


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU here")
def test_gpu_sh_without_a_gpu():
    done = subprocess.run(["bash", ROOT / "benchmark/gpu.sh"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gpu.sh: error: there is no nvidia-smi, so no GPU\n"


def test_a_wrong_flag_of_a_script_ends_the_runner():
    done = run_it("--seeds", "1..9", "--flags=--learning-rate nonsense", code=2)
    assert "CartPole-v1__ppo__learning-rate=nonsense__1 ended with 2" in done.stderr
    assert not list(Path("results/classic/unfinished").glob("*__9"))


@pytest.mark.parametrize("tool", ["run", "compare"])
def test_help_lists_the_suites(tool):
    done = in_this_process([sys.executable, ROOT / f"benchmark/{tool}.py", "--help"])
    words = done.stdout.replace(",", " ").split()
    assert done.returncode == 0 and SUITES.keys() <= set(words)


def test_rows_have_flags_of_their_scripts_and_names_of_their_own():
    for suite, content in SUITES.items():
        names = [row.name() for row in content]
        assert len(set(names)) == len(names), suite
        for row in content:
            options = row.options()
            options.pop("artificial-delay", None)  # is of the study, which wraps the script
            flags = [x for name, value in options.items() for x in (f"--{name}", *value.split())]
            tyro.cli((SCRIPTS | OTHERS)[row.script].Args, args=["--env-id", row.env_id, *flags])
            first = RENAMED.get(row.script, {})
            assert all(f"__{first.get(name, name)}" in row.name() for name in row.options())
            assert len(f"{row.name()}__total-timesteps=10000000__10") <= 240


def result(values, steps=500_000, row=None, published=(490.0, 6.0)):
    """Runs whose last 100 episodes have these means."""
    target = Target("CleanRL", "CartPole-v1", *published, runs=3 if published[1] is not None else 1)
    row = row or Row("ppo", "CartPole-v1", 500_000, (target,))
    ends = np.linspace(1000, steps, 200)
    episodes = {seed: np.column_stack((ends, np.full(200, value))) for seed, value in enumerate(values)}
    return compare.Result(row, episodes, {"ppo.py 0123456789ab"}, {"a"})


def cells(ours):
    """The ratios of its line in the table, by group."""
    line = compare.line_of(ours.row, ours, {})
    return dict(zip(compare.GROUPS, line[-4:-1], strict=True))


TEN = 490 + np.linspace(-8, 8, 10)


@pytest.mark.parametrize(
    "values, said",
    [(TEN, "matches"), (1.2 * TEN, "above"), (0.8 * TEN, "below"), (TEN * np.linspace(0.7, 1.3, 10), "open")],
)
def test_words_of_a_row(values, said):
    """Beside one mean that CleanRL published of the same version of the task, which so is in two groups."""
    found = cells(result(values))
    assert found["CleanRL, published"] == found["all published"]
    middle, low, high, word = re.fullmatch(
        r"([\d.]+) \[([\d.]+), ([\d.]+)\] (\w+)", found["all published"]
    ).groups()
    random = compare.random_returns()["CartPole-v1"]
    assert float(middle) == pytest.approx((values.mean() - random) / (490 - random), abs=0.006)
    assert word == said and float(low) < float(middle) < float(high)


@pytest.fixture
def without_runs_here(monkeypatch):
    """As if CleanRL had not been run here."""
    monkeypatch.setattr(compare, "run_here", lambda script, task: None)


def test_rows_without_a_word(without_runs_here):
    cut = cells(result(TEN, steps=300_000))
    assert set(cut.values()) == {""}  # a score says nothing of another step
    assert set(cells(result(TEN, published=(490.0, None))).values()) == {""}
    assert set(cells(result(TEN, row=Row("ppo", "CartPole-v1", 500_000))).values()) == {""}
    row = Row("ppo", "MountainCar-v0", 500_000, (Target("they", "MountainCar-v0", -200.0, 0.0, 3),))
    assert set(cells(result([-200.0] * 5, row=row)).values()) == {""}  # random actions are as good
    row = Row("ppo", "Unknown-v0", 500_000, (Target("they", "Unknown-v0", 490.0, 6.0, 3),))
    assert set(cells(result(TEN, row=row)).values()) == {""}  # random actions were not measured
    assert re.fullmatch(r"1\.0\d", cells(result(TEN[-1:]))["all published"])  # one seed has no interval
    two = result(TEN)
    two.files.add("ppo.py ba9876543210")
    assert cells(two)["all published"].endswith("] of several builds")
    two.files = {"unknown"}
    assert cells(two)["all published"].endswith("] of several builds")
    assert "not run" in compare.line_of(row, None, {})


def test_a_curve_that_ends_early_says_where_and_has_no_ratio(monkeypatch):
    points = np.array([(0.0, 0.0, 1.0, 3.0), (600_000.0, 18.0, 1.0, 3.0)])
    monkeypatch.setattr(compare, "curves", lambda: {("curve", "Task-v0"): points})
    target = Target("they", "Task-v0", curve="curve")
    inside, beyond = compare.published(target, 300_000, True), compare.published(target, 1_000_000, True)
    assert (inside.mean, inside.spread, inside.by) == (9, 1, "they")
    assert (beyond.mean, beyond.deviation, beyond.by) == (18, None, "they, at 0.6M")


def test_a_score_beside_its_curve_has_the_spread_of_the_end():
    (row,) = [row for row in SUITES["mujoco"] if row.task == "Hopper-v4"]
    (target,) = [target for target in row.targets if target.curve]
    end = compare.curves()["ppo2", "Hopper-v2"][-1]
    found = compare.published(target, 1_000_000, True)
    assert found.mean == 2316.16 and found.spread == pytest.approx(end[2]) and not found.is_std
    assert compare.published(target, 500_000, False).mean < 2316


def test_groups_of_runs(without_runs_here):
    """CleanRL of this version alone, all of them pooled, and one that has no spread in neither."""
    targets = [Target("CleanRL", "CartPole-v1", 300.0, 6.0, 3), Target("they", "CartPole-v0", 490.0, 6.0, 9)]
    targets.append(Target("single", "CartPole-v1", 1000.0, runs=1))
    row = Row("ppo", "CartPole-v1", 500_000, tuple(targets))
    random, found = compare.random_returns()["CartPole-v1"], cells(result(TEN, row=row))
    assert found["CleanRL, published"].startswith(f"{(490 - random) / (300 - random):.2f} [")
    pooled = (3 * 300 + 9 * 490) / 12
    assert found["all published"].startswith(f"{(490 - random) / (pooled - random):.2f} [")
    cell = compare.line_of(row, result(TEN, row=row), {})[6]
    others = "300.0 ± 6.00 (CleanRL, 3 runs); 490.0 ± 6.00 (they, -v0, 9 runs); 1000 (single, 1 run)"
    assert cell == others


def test_curves_are_not_pooled_with_the_scores_of_the_same_runs():
    """At the end of a schedule; a row that was cut has only curves."""
    (row,) = [row for row in SUITES["atari"] if "Pong" in row.env_id]
    random, scores = compare.random_returns()[row.task], (20.36, 20.512, 20.45)
    found = cells(result([20.0] * 5, 10_000_000, row))["all published"]
    assert found.startswith(f"{(20 - random) / (np.mean(scores) - random):.2f} [")
    assert cells(result([20.0] * 5, 2_000_000, row))["all published"].endswith("] cut")


def test_what_lies_beside_a_csv_does_not_hide_it():
    """As a copy of an editor, or what a kill left of writing it; of both kinds, the plain one is newer."""
    for name in (
        "1.csv",
        "1.csv~",
        "2.csv.gz",
        "2.csv.gz.orig",
        "3.csv",
        "3.csv.gz",
        "3.csv.tmp",
        "4.csv.tmp",
    ):
        Path(f"A__{name}").touch()
    Path("runs.csv").touch()
    found = {name: path.name for name, path in csv_files(Path(), "A__").items()}
    assert found == {"1": "A__1.csv", "2": "A__2.csv.gz", "3": "A__3.csv"}


def test_a_score_is_reached_by_twenty_episodes_at_least():
    """Fewer have no such mean. By hand: episodes 11 to 30 are the first twenty whose mean is 0.5."""
    few, many = np.full((19, 2), 7.0), np.column_stack((np.arange(1, 41), np.arange(1, 41) > 20))
    row = Row("ppo", "CartPole-v1", 40)
    ours = compare.Result(row, {1: few, 2: many.astype(float)}, set(), set())
    assert np.isnan(ours.first(-100.0)[0]) and ours.first(0.5)[1] == 30
    assert np.isnan(compare.Result(row, {1: few[:4] - 507}, set(), set()).first(-100.0)[0])


def test_a_row_has_its_seeds_and_a_run_its_threads(monkeypatch, capsys):
    """Without --seeds, seeds 1 to the row's own; PyTorch gets the threads that runs.csv names."""
    for suite, rows in SUITES.items():
        expected = {(row, seed) for row in rows for seed in range(1, 1 + row.seeds)}
        if expected:
            assert set(planned(Args(suite))) == expected, suite
        else:
            with pytest.raises(SystemExit, match="2"):
                planned(Args(suite))
            assert "these rows are only run if they are given --seeds" in capsys.readouterr().err
    started, row_and_seed = [], planned(Args("classic"))[0]
    runs = [Run(Args("classic", results=Path("results"), threads=x), *row_and_seed) for x in (1, 3)]
    runs[0].folder.mkdir(parents=True)
    ended = SimpleNamespace(poll=lambda: 0, returncode=0)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **kwargs: started.append(kwargs["env"]) or ended)
    for run in runs:
        run.execute(threading.Event())
    assert [x["OMP_NUM_THREADS"] for x in started] == ["1", "3"] == [str(run.threads) for run in runs]


def test_flags_of_a_run():
    """The limit of an iteration is the user's; an environment may come from an installed package."""
    (row, seed), *_ = planned(Args("classic"))
    usual, slow, none = (
        Run(Args("classic", flags=flags), row, seed).flags
        for flags in ("", "--stall-seconds 3600", "--stall_seconds=0")
    )
    assert usual[-2:] == ["--stall-seconds", "600"]
    for flags, seconds in ((slow, "3600"), (none, "0")):
        assert "600" not in flags
        assert tyro.cli(ppo.Args, args=flags).stall_seconds == int(seconds)
    files = fingerprint(Row("ppo", "minigrid:MiniGrid-Empty-5x5-v0", 0))
    assert re.fullmatch(r"ppo.py \w{12}", files)
    files = fingerprint(Row("ngu_r2d2", "benchmark.studies.maze:RandomDiscoMaze-v0", 0))
    assert re.fullmatch(r"ngu_r2d2.py \w{12}, benchmark/studies/maze.py \w{12}", files)


@pytest.mark.parametrize(
    "flags",
    [
        "--grid gamma=0.9 gamma=0.8",
        "--grid gae-lambda=0.9 gae_lambda=1",
        "--grid gamma=0.9 --flags=--gamma=1",
    ],
)
def test_a_flag_of_a_grid_is_given_once(flags):
    done = run_it(*flags.split(), code=2)
    assert re.search("error: --(gamma|gae-lambda) is given twice, in --grid or in --flags", done.stderr)


def test_a_record_that_cannot_be_read(capsys):
    row, _ = planned(Args("classic"))[0]
    run = Run(Args("classic", results=Path("results")), row, 1)
    run.folder.mkdir(parents=True)
    (run.folder / "run.json").touch()
    with pytest.raises(SystemExit, match="2"):
        run.folder_of_another()
    error = capsys.readouterr().err
    assert "run.json cannot be read (Expecting value" in error and f"remove {run.folder}" in error


def test_cleanrls_scripts_are_played_to_the_end_or_to_a_step():
    """cleanrl.py keeps what they print until --stop-at, and ends those that would go on."""
    Path("cleanrl").mkdir()
    script = """
        import sys, time
        assert sys.argv[1:4] == ["--no-cuda", "--env-id", "Task-v0"]
        for k, x in ((4, "1.0"), (9, "-2.25"), (9, "2e-05"), (12, "3.")):
            print(f"global_step={k}, episodic_return=[{x}]")
        if sys.argv[-1] == "2":
            time.sleep(1000)
        assert sys.argv[-1] != "3"
    """
    Path("cleanrl/ppo.py").write_text(textwrap.dedent(script), encoding="utf-8")
    tool = [sys.executable, ROOT / "benchmark/studies/cleanrl.py", "cleanrl", "--scripts", "ppo"]
    tool += ["--tasks", "Task-v0", "--results", "theirs", "--seeds"]
    in_this_process([*tool, "1"])
    in_this_process([*tool, "2", "--stop-at", "9"])
    with pytest.raises(RuntimeError, match="(?s)ended with 1: .*AssertionError"):
        in_this_process([*tool, "3"])
    whole, cut = (read_csv(Path(f"theirs/Task-v0__ppo__{seed}.csv.gz")) for seed in (1, 2))
    assert [float(x["return"]) for x in whole] == [1, -2.25, 2e-05, 3]
    assert [x["step"] for x in whole] == ["4", "9", "9", "12"]
    assert cut == whole[:3]
    assert [x["run"] for x in rows("theirs/runs.csv")] == ["Task-v0__ppo__1", "Task-v0__ppo__2"]
    assert [x["flags"] for x in rows("theirs/runs.csv")] == ["", "--stop-at 9"]
    assert in_this_process([*tool, "2", "--stop-at", "9"]).returncode == 0  # is there, and stays
    refused = [
        ([*tool, "2"], "2.csv.gz was made with --stop-at 9, not none: remove it first"),
        ([*tool, "1", "--stop-at", "9"], "1.csv.gz was made with no flags, not --stop-at 9: remove it first"),
        ([*tool, "4", "--stop-at", "1"], "Task-v0__ppo__4: no episode has ended, so there is"),
        ([*tool, "1", "--scripts", "ppo_foo"], "cleanrl has no ppo_foo.py"),
    ]
    for command, words in refused:
        done = in_this_process(command)
        assert done.returncode == 2 and words in done.stderr
    assert len(list(Path("theirs").glob("*.csv.gz"))) == 2


OF_CLEANRL = """
import sys
import cleanrl_utils
import gymnasium as gym
import numpy as np
import sibling

class Count(gym.Env):
    observation_space, action_space = gym.spaces.Box(0, 9, (1,)), gym.spaces.Discrete(2)

    def __init__(self, length):
        self.length = length

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        over = self.t == self.length
        return np.full(1, self.t, np.float32), float(self.length), over, False, {}

def make(length):
    def thunk():
        env = gym.wrappers.RecordEpisodeStatistics(Count(length))
        return gym.wrappers.TransformObservation(env, lambda obs: obs + 1)
    return thunk

assert gym.wrappers.FrameStack and gym.wrappers.GrayScaleObservation
print(sys.argv[1:])
envs = gym.vector.SyncVectorEnv([make(2), make(3)])
print(envs.reset(seed=1)[0].ravel().tolist())
for step in range(1, 7):
    obs, _, terminated, _, infos = envs.step(np.zeros(2, int))
    print(step, obs.ravel().tolist(), terminated.tolist())
    if "final_info" in infos:
        for k, info in enumerate(infos["final_info"]):
            if info and "episode" in info:
                print(f"of {k}: episodic_return={info['episode']['r']}, length={info['episode']['l']}")
"""


def test_the_loop_of_cleanrls_scripts_on_todays_gymnasium():
    """Episodes of 2 and 3 steps with rewards of 2 and 3: each is told once, and the next begins at once."""
    Path("theirs/cleanrl").mkdir(parents=True)
    Path("theirs/cleanrl/ppo.py").write_text(OF_CLEANRL, encoding="utf-8")
    Path("theirs/cleanrl/sibling.py").touch()
    Path("theirs/cleanrl_utils.py").touch()
    tool = [sys.executable, ROOT / "benchmark/studies/cleanrl_today.py", "theirs/cleanrl/ppo.py"]
    done = subprocess.run([*tool, "--seed", "1"], capture_output=True, text=True)
    two = "of 0: episodic_return=[4.], length=[2]"
    three = "of 1: episodic_return=[9.], length=[3]"
    assert done.stdout.splitlines() == [
        "['--seed', '1']",
        "[1.0, 1.0]",
        "1 [2.0, 2.0] [False, False]",
        "2 [1.0, 3.0] [True, False]",  # counted from 1; an end is followed by the next episode's first
        two,
        "3 [2.0, 1.0] [False, True]",
        three,
        "4 [1.0, 2.0] [True, False]",
        two,
        "5 [2.0, 3.0] [False, False]",
        "6 [1.0, 1.0] [True, True]",
        two,
        three,
    ], done.stderr


class Planted(gym.Env):
    """Returns 1 and 3 in turn to no action: an episode that terminates and one that is cut."""

    observation_space, action_space = gym.spaces.Discrete(1), gym.spaces.Box(0, 1, (1,))
    episodes, seeds, actions = 0, [], []

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        self.episodes, self.t = self.episodes + 1, 0
        return 0, {}

    def step(self, action):
        self.actions.append(float(action[0]))
        self.t += 1
        is_short = self.episodes % 2 == 1
        return 0, 1 + self.actions[-1], is_short and self.t == 1, not is_short and self.t == 3, {}


def test_returns_of_random_actions_and_of_none(monkeypatch):
    monkeypatch.setattr(random_policy, "EPISODES", 4)
    monkeypatch.setitem(gym.registry, "Planted-v0", gym.envs.registration.EnvSpec("Planted-v0", Planted))
    monkeypatch.setattr(Planted, "seeds", [])
    idle = random_policy.returns("Planted-v0", idle=True)
    assert idle.tolist() == [1, 3, 1, 3] and Planted.seeds == [1, None, None, None]
    assert random_policy.line("Planted", idle) == ["Planted", "2.00", "1.00", "4 episodes"]
    monkeypatch.setattr(Planted, "actions", [])
    drawn, actions = random_policy.returns("Planted-v0"), Planted.actions
    a, b, c, d = (sum(part) for part in (actions[:1], actions[1:4], actions[4:5], actions[5:]))
    assert drawn.tolist() == pytest.approx([1 + a, 3 + b, 1 + c, 3 + d]) and len({*actions}) == 8
    assert random_policy.returns("Planted-v0").tolist() == drawn.tolist()  # the same seed


def test_random_returns_that_are_recorded():
    """Those of CartPole, by running it again, and those of games, from the paper's table."""
    recorded = {row["task"]: row for row in read_csv(compare.RANDOM)}
    again = random_policy.line("CartPole-v1", random_policy.returns("CartPole-v1"))
    assert [*recorded["CartPole-v1"].values()] == again
    assert recorded["PongNoFrameskip-v4"]["mean"] == "-20.7"
    tasks = {row.task for suite in SUITES.values() for row in suite if "microrts" not in row.env_id}
    assert recorded.keys() == tasks | {"Reacher-v4 without actions"}


def test_a_table_of_random_returns(monkeypatch, capsys):
    """A row a task: of random actions, of the paper's table for games, and of no action on Reacher."""
    suite = [Row("ppo", "CartPole-v1", 1), Row("ppo_shared", "CartPole-v1", 1)]
    suite += [Row("ngu_r2d2", "MiniGrid-Empty-5x5-v0", 1), Row("ppo_atari", "PongNoFrameskip-v4", 1)]
    asked = []
    returns = lambda env_id, idle=False: asked.append((env_id, idle)) or np.array([1.0, 2.0])  # noqa: E731
    monkeypatch.setattr(random_policy, "SUITES", dict(some=suite))
    monkeypatch.setattr(random_policy, "returns", returns)
    monkeypatch.setattr(random_policy, "ROOT", Path.cwd())
    Path("benchmark/results").mkdir(parents=True)
    random_policy.main()
    cartpole, minigrid, pong, idle = rows("benchmark/results/random_policy.csv")
    assert asked == [("CartPole-v1", False), ("minigrid:MiniGrid-Empty-5x5-v0", False), ("Reacher-v4", True)]
    said = dict(mean="1.50", std="0.50", of="100 episodes")
    assert cartpole == dict(task="CartPole-v1") | said and minigrid["task"] == "MiniGrid-Empty-5x5-v0"
    assert pong["mean"] == "-20.7" and idle == dict(task="Reacher-v4 without actions") | said


def test_cleanrl_run_here_stands_beside_ours(monkeypatch):
    """At the last step that both have reached; not beside other flags."""
    theirs = compare.Result(None, {s: np.array([(100_000, 50.0 + s), (500_000, 400.0 + s)]) for s in (0, 1)})
    monkeypatch.setattr(compare, "run_here", lambda script, task: theirs)
    row = Row("ppo", "CartPole-v1", 500_000)
    random, ours = compare.random_returns()["CartPole-v1"], result(TEN, row=row)
    mean = (50.5 + 400.5) / 2  # of the last 100 episodes
    assert cells(ours)[compare.HERE].startswith(f"{(490 - random) / (mean - random):.2f} [")
    assert compare.line_of(row, ours, {})[6].startswith("225.5 ± 0.71 (CleanRL, run here, 2 runs)")
    cut = result(TEN, steps=200_000, row=row)
    assert cells(cut)[compare.HERE].startswith(f"{(490 - random) / (50.5 - random):.2f} [")
    assert "(CleanRL, run here, at 0.2M, 2 runs)" in compare.line_of(row, cut, {})[6]
    for early in theirs.seeds.values():
        early[-1][0] = 300_000
    assert cells(cut)[compare.HERE] and cells(ours)[compare.HERE] == ""  # they did not come so far
    assert "(CleanRL, run here, at 0.3M, 2 runs)" in compare.line_of(row, ours, {})[6]
    shown = [compare.summary({"classic": [(row, x)]}).splitlines()[2].split("|")[5] for x in (ours, cut)]
    assert shown == [" 225.5 ± 0.71 (2) at 0.3M ", " 50.5 ± 0.71 (2) "]
    other = replace(row, flags="--num-envs 8")
    assert cells(result(TEN, row=other))[compare.HERE] == ""


def test_cut_atari_rows_stand_beside_the_curve_of_the_blog():
    """The summary's ratio is to the cell beside it; rows of other scripts have no group of CleanRL's."""
    ours = found("atari", "PongNoFrameskip-v4")
    (blog,) = (x for x in compare.published_beside(ours.row, ours) if x.by == "the blog")
    way = ours.at(ours.reached).mean() + 20.7, blog.mean + 20.7  # random actions have -20.7
    assert np.isclose(compare.first_ratio(ours.row, ours).interval[0], way[0] / way[1])
    masked = found("microrts", "MicrortsMining-v1", "masked")
    assert "CleanRL, published" not in compare.ratios(masked.row, masked)


def load_all():
    """Rows and results of all suites, as compare.py reads them."""
    return {
        suite: [(row, compare.load(suite, row, compare.Args())) for row in rows]
        for suite, rows in SUITES.items()
    }


def test_the_summary_has_each_script_and_task_that_cleanrl_has():
    head, _, *lines = compare.summary(load_all()).partition("\n\n")[0].splitlines()
    shown = [tuple(cell.strip(" `") for cell in line.split("|")[1:3]) for line in lines]
    known = [
        row for rows in SUITES.values() for row in rows if row.script in compare.CLEANRL and not row.flags
    ]
    known = [
        (row.script, row.task.replace("NoFrameskip-v4", ""))
        for row in known
        if "Unclipped" not in row.task and not row.task.endswith("-v5")
    ]
    assert shown == known and head.startswith("| script | task | steps | ours (seeds) | CleanRL, run here |")


def test_every_source_has_its_environment_and_the_kind_of_its_band():
    (row,) = [row for row in SUITES["mujoco"] if row.task == "HalfCheetah-v4"]
    found = compare.line_of(row, None, {})[6].split("; ")
    found = [cell for cell in found if "run here" not in cell]
    assert found[0] == "1443 ± 46.0 (CleanRL, 3 runs)"
    assert found[2] == "2262 ± 1197 (CleanRL, -v2, 3 runs)"
    assert found[3] == "1669 ± 224.9? (openai/baselines 2018, -v2, 6 runs)"


def test_when_a_seed_first_was_so_good():
    learns = np.column_stack((np.arange(100) * 10, np.arange(100) >= 50)).astype(float)
    never = learns * [1, 0]
    steps = compare.Result(None, {1: learns, 2: never, 3: learns[:19]}).first(0.5)
    assert steps[0] == 590 and np.isnan(steps[1:]).all()  # 10 ones among the 20 up to episode 59


def test_a_row_is_at_the_step_that_all_seeds_reached():
    """There the second seed's one episode counts, and the first's last one does not."""
    two = {1: np.array([[10.0, 1], [20, 2], [30, 9]]), 2: np.array([[20.0, 5]])}
    ours = compare.Result(Row("ppo", "CartPole-v1", 20), two)
    assert ours.reached == 20 and ours.at(20).tolist() == [1.5, 5] and not ours.is_cut


def test_a_run_that_was_cut_stands_beside_the_beginning_of_the_curve():
    (row,) = [row for row in SUITES["atari"] if "Pong" in row.env_id]
    step, mean, band, _ = compare.curves()["ppo_atari.py(blog)", row.env_id][20]
    assert step < 0.3 * row.steps
    line = compare.line_of(row, result((mean,), steps=step, row=row), {})
    assert f"; {compare.number(mean)} ± {compare.number(band)} (the blog, 3 runs); " in line[6]
    assert not re.search(r"\(CleanRL, \d", line[6]) and line[-2].endswith(" cut")
    assert line[2].endswith(" of 10M")


def test_each_seed_is_shown():
    line = compare.line_of(Row("ppo", "CartPole-v1", 500_000), result((1.0, 2.0, 30.0, 4.0, 5.0)), {})
    assert line[3:6] == ["0 to 4: 1.00, 2.00, 30.0, 4.00, 5.00", "8.40 ± 12.2", "3.67"]


def test_a_row_names_its_build():
    head, *lines = compare.table(
        [(row, compare.load("staleness", row, compare.Args())) for row in SUITES["staleness"]]
    )
    assert {line[-1] for line in lines} <= {row["commit"] for row in rows(RESULTS / "staleness/runs.csv")}
    row = SUITES["classic"][0]
    table = [dict.fromkeys(COLUMNS, "") | dict(fingerprint="ppo.py ab") for _ in range(4)]
    for seed, (line, commit) in enumerate(zip(table, ("b", "a", "a", "c"), strict=True), 1):
        write(f"CartPole-v1__ppo__{seed}")
        line |= dict(run=f"CartPole-v1__ppo__{seed}", commit=commit, changed="nothing")
    table[3]["changed"] = "README.md ppo.py"
    found = load(row, table)
    assert compare.line_of(row, found, {})[-1] == "a, b, c and changes" and found.files == {"ppo.py ab"}
    table[0]["fingerprint"] = "ppo.py cd"
    assert load(row, table).files == {"ppo.py ab", "ppo.py cd"}
    assert load(row, table[:2]).files == {"ppo.py ab", "ppo.py cd", "unknown"}  # two CSVs have no row
    write("5")  # of no row
    write("Acrobot-v1__ppo__5")
    assert list(load(row, table).seeds) == [1, 2, 3, 4]


def write(name, text="step,seconds,return,length\n500000,1,2,3\n"):
    """A run's CSV."""
    Path("classic").mkdir(exist_ok=True)
    Path(f"classic/{name}.csv").write_text(text, encoding="utf-8")


def load(row, table, **flags):
    with open("classic/runs.csv", "w", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(table)
    return compare.load("classic", row, compare.Args(results=Path("."), **flags))


HEAD = "step,seconds,return,length\n"
BROKEN = ["", HEAD, "a\nb\n", "a\n1,2\n", f"{HEAD}1,2,nan,3\n", f"{HEAD}1,2,x,3\n", f"{HEAD}1,2,3\n"]


@pytest.mark.parametrize("text", [*BROKEN, f"{HEAD}1,2,3,4", f"{HEAD}1,2,3,4\n\0\0\0"])
def test_a_broken_csv(text, capfd):
    write("CartPole-v1__ppo__1", text)
    with pytest.raises(SystemExit) as end:
        load(SUITES["classic"][0], [])
    error = capfd.readouterr().err
    assert end.value.code == 2 and "CartPole-v1__ppo__1.csv" in error and error.count("\n") == 1


def test_a_table_of_other_columns(capfd):
    write("runs", "run,commit\nCartPole-v1__ppo__1,abc\n")
    tool = [sys.executable, ROOT / "benchmark/run.py", "classic", "--seeds", "1", "--results", "."]
    for command in (tool, [sys.executable, ROOT / "benchmark/compare.py", "classic", "--results", "."]):
        done = in_this_process(command)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert "runs.csv has other columns than run, script" in done.stderr


ROW = ",".join(["CartPole-v1__ppo__1", *["1"] * (len(COLUMNS) - 1)])


@pytest.mark.parametrize(
    "end, words",
    [
        (ROW[:30], f"line 3 has 7 of {len(COLUMNS)} columns"),
        (ROW, "line 3 has no line end: it was cut, maybe within a number"),
    ],
    ids=["columns", "end"],
)
def test_half_a_row_of_a_table(end, words):
    """Of a full disk or a kill: one line, which names the file and its line; nothing is run or lost."""
    table = f"{','.join(COLUMNS)}\n{ROW}\n{end}"
    write("runs", table)
    write("CartPole-v1__ppo__1")
    tool = [sys.executable, ROOT / "benchmark/run.py", "classic", "--seeds", "1", "--results", "."]
    for command in (tool, [sys.executable, ROOT / "benchmark/compare.py", "classic", "--results", "."]):
        done = in_this_process(command)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert f"classic/runs.csv, {words}" in done.stderr
    assert Path("classic/runs.csv").read_text(encoding="utf-8") == table
    with pytest.raises(SystemExit):
        same.recorded(Path("."))


def hints(*flags):
    """The lines of compare.py below its table."""
    tool = [sys.executable, ROOT / "benchmark/compare.py", *flags, "--results", "."]
    done = in_this_process(tool)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if "not run with these flags" in line]


def test_results_of_other_flags_are_named():
    for seed in (1, 2):
        write(f"CartPole-v1__ppo__total-timesteps=4096__{seed}")
    write("CartPole-v1__ppo__learning-rate=0.1__anneal-lr__1")
    write("Acrobot-v1__ppo__1")
    write("Acrobot-v1__ppo__gamma=0.5__1")  # beside a row that was run
    write("Pendulum-v1__ppo__1")  # of no row
    begin = "CartPole-v1__ppo: not run with these flags; "
    assert hints("classic") == [
        f"{begin}--flags='--learning-rate 0.1 --anneal-lr' shows 1 CSV",
        f"{begin}--flags='--total-timesteps 4096' shows 2 CSVs",
    ]
    assert hints("classic", "--flags=--total-timesteps 4096") == [
        "Acrobot-v1__ppo: not run with these flags; compare.py without --flags shows 1 CSV",
        "Acrobot-v1__ppo: not run with these flags; --flags='--gamma 0.5' shows 1 CSV",
    ]


def test_flags_of_a_name_show_its_results():
    """The flags of a row stay, and a renamed flag has its new name; what no flags give has none."""
    small = "--num-envs 8 --num-steps 10 --batch-segments 8"
    row = Row("impala_vtrace", "PongNoFrameskip-v4", 10_000_000, flags=small)
    more = "--learning-rate 0.1 --batch-segments 4 --sync"
    found = compare.flags_between(row, row.name(more))
    assert row.options(found) == row.options(more) and row.name(found) == row.name(more)
    assert "--batch-segments 4" in found and "--num-envs" not in found
    assert compare.flags_between(row, row.name()) == ""
    assert compare.flags_between(row, "PongNoFrameskip-v4__impala_vtrace__gamma=0.5") is None


def test_results_of_other_flags_belong_to_the_row_that_they_differ_least_from():
    Path("impala").mkdir()
    for row in SUITES["impala"]:
        Path(f"impala/{row.name('--gamma 0.5')}__1.csv").touch()
    found = compare.other_flags("impala", SUITES["impala"], compare.Args(results=Path(".")))
    assert found == {row: {"--gamma 0.5": 1} for row in SUITES["impala"]}


def test_another_schedule_has_its_own_steps_and_nothing_published():
    for seed in range(1, 6):
        write(f"CartPole-v1__ppo__total-timesteps=1000000__{seed}")
    tool = [sys.executable, ROOT / "benchmark/compare.py", "classic", "--results", "."]
    flags = ["--flags=--total-timesteps 1000000"]
    done = subprocess.run([*tool, *flags], capture_output=True, text=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("| ppo | CartPole-v1")]
    assert "| 0.5M of 1M | 1 to 5:" in line and "CleanRL, " not in line and done.returncode == 0


def test_a_page_without_the_place_of_a_table_stays_as_it_is(capfd):
    page = Path("page.md")
    page.write_text("# page\n<!-- mujoco -->\nold\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        compare.write_between(page, "mujoco", "new")
    assert (
        page.read_text(encoding="utf-8") == "# page\n<!-- mujoco -->\nold\n"
        and "no place for" in capfd.readouterr().err
    )


def test_a_worse_run_is_called_below():
    """The exit code says it; nothing that git tracks is written."""
    Path("mine/classic").mkdir(parents=True)
    lines = []
    for seed in range(1, 6):
        text = "step,seconds,return,length\n" + "".join(
            f"{k * 5000},1,{250 + seed},3\n" for k in range(1, 101)
        )
        Path(f"mine/classic/CartPole-v1__ppo__{seed}.csv").write_text(text, encoding="utf-8")
        lines.append(
            dict(run=f"CartPole-v1__ppo__{seed}", commit="a", changed="nothing", fingerprint="ppo.py ab")
        )
    with open("mine/classic/runs.csv", "w", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(lines)
    tool = [sys.executable, ROOT / "benchmark/compare.py", "classic", "--results", "mine"]
    before = {path: path.stat().st_mtime_ns for path in RESULTS.rglob("*")}
    before[compare.TABLES] = compare.TABLES.stat().st_mtime_ns
    done = in_this_process(tool)
    assert done.returncode == 1 and re.search(r"\| ppo \| CartPole-v1 .* below ", done.stdout), done.stdout
    assert len(list(Path("mine").rglob("*"))) == 7 and "curves.png" not in done.stdout
    done = in_this_process([*tool, "--write"])
    assert done.returncode == 1 and "![classic](mine/classic/curves.png)" in done.stdout
    page = Path("mine/index.html").read_text(encoding="utf-8")
    assert "data:image/png;base64" in page and "http" not in page and ">not run<" in page
    assert Path("mine/classic/curves.png").exists() and Path("mine/classic/curves.svg").exists()
    assert all(path.stat().st_mtime_ns == time_ns for path, time_ns in before.items())


@pytest.mark.parametrize(
    "flags, message",
    [
        (["clasic"], "no suite clasic; there are classic, mujoco, "),
        (["--results", "nowhere"], "--results nowhere: there is no such folder"),
        (["--flags", "total-timesteps 1"], "--flags 'total-timesteps 1': write them as for a script"),
    ],
)
def test_mistakes_of_compare(flags, message):
    done = in_this_process([sys.executable, ROOT / "benchmark/compare.py", *flags])
    assert done.returncode == 2 and done.stderr.startswith(f"compare.py: error: {message}")
    assert done.stderr.count("\n") == 1


def test_same_finds_what_trains_otherwise():
    source, flags = (ROOT / "ppo.py").read_text(encoding="utf-8"), ["--total-timesteps", "1024"]
    other = source.replace("gamma: float = 0.99", "gamma: float = 0.98")
    logs = [same.logged(text, "ppo", flags) for text in (source, source, other)]
    assert logs[0] == logs[1] != logs[2] and logs[0].keys() == logs[2].keys()
    assert len(logs[0]["losses/policy_loss"]) == 2 and "charts/SPS" not in logs[0]


@pytest.mark.parametrize("difference", [0, 1])
def test_same_compares_the_tree_with_the_commit(difference, monkeypatch, capsys):
    """Exit code 1 where one of the runs differs; the ratio is this tree's CPU time by the commit's."""
    monkeypatch.setattr(same, "source_of", lambda build, script: f"{script} of {build}")
    tree_of = {
        f"{name} of 1234": (ROOT / f"{name}.py").read_text(encoding="utf-8") for name in ("ppo", "ppo_lstm")
    }

    def logged(source, script, flags):
        assert source in tree_of or source == tree_of[f"{script} of 1234"]
        return {"losses/x": [(1, "0.5" if source in tree_of else repr(0.5 + difference * (script == "ppo")))]}

    monkeypatch.setattr(same, "logged", logged)
    monkeypatch.setattr(same, "recorded", lambda _: [("1234", "ppo", []), ("1234", "ppo_lstm", [])])
    monkeypatch.setattr(sys, "argv", ["same.py", "recorded"])
    with pytest.raises(SystemExit) as end:
        same.main()
    said = capsys.readouterr().out.splitlines()
    assert end.value.code == difference
    assert said[0].endswith("differs in losses/x" if difference else "the same") and "the same" in said[1]
    monkeypatch.setattr(same, "cpu_seconds", lambda source, *_: 4.0 if source in tree_of else 3.0)
    same.measure("1234", "ppo", [], same.Args(cpu_time=3))
    assert capsys.readouterr().out == "ppo.py: 3.0 s of CPU time, 4.0 in 1234; 0.75\n"


def test_same_gives_a_study_the_script_of_the_commit():
    """The study of staleness imports ppo_async: of the folder, not of this tree."""
    with pytest.raises(SystemExit), pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr(same, "fail", lambda message: (said.append(message), sys.exit(2)))
        same.train(".", "raise SystemExit('the given source')", "ppo_async", ["--artificial-delay", "2"])
    assert "the given source" in said[0]


def test_same_leaves_out_what_no_commit_has(capsys):
    """The script of impala_screen's first runs was changed in the tree."""
    found = {(build, script) for build, script, _ in same.recorded(RESULTS)}
    assert "left out, as its commit had another impala_vtrace.py: " in capsys.readouterr().out
    changed = [x for x in rows(RESULTS / "impala_screen/runs.csv") if "impala_vtrace.py" in x["changed"]]
    assert changed and not {(x["commit"], x["script"]) for x in changed} & found


def test_same_takes_a_run_of_each_recorded_build():
    found = same.recorded(ROOT / "benchmark/results")
    assert {script for _, script, _ in found} == SCRIPTS.keys() | OTHERS.keys()
    for _, script, flags in found:
        assert flags[:2] and ("--sync" in flags) == (script in ("impala_vtrace", "ppo_async"))


@pytest.mark.parametrize(
    "flags,message",
    [([], "give a commit"), (["nosuch", "ppo"], "ppo.py of nosuch"), (["HEAD", "ppp"], "ppp.py of HEAD")],
)
def test_mistakes_of_same(flags, message):
    command = [sys.executable, ROOT / "benchmark/same.py", *flags]
    done = in_this_process(command)
    assert done.returncode == 2 and done.stderr.startswith(f"same.py: error: {message}")
    assert done.stderr.count("\n") == 1


def test_a_figure_has_a_panel_a_task_and_a_color_a_source():
    """A script and its variants share a panel; one seed is said; PNG and SVG repeat to the byte."""
    tasks = {"MiniGrid-DoorKey-8x8-v0": 5, "MiniGrid-MultiRoom-N4-S5-v1": 1}
    results = [
        (row, result(TEN[: tasks[row.task]], steps=300_000, row=row) if row.task in tasks else None)
        for row in SUITES["ngu"]
    ]
    figure = compare.figure(results)
    titles = [ax.get_title() for ax in figure.axes]
    assert titles == ["MiniGrid-DoorKey-8x8-v0, 5 seeds", "MiniGrid-MultiRoom-N4-S5-v1, one seed"]
    for ax in figure.axes:
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("environment steps", "episodic return")
        lines = {line.get_label(): line.get_color() for line in ax.lines}
        assert lines == {"ngu_r2d2.py, Never Give Up": "tab:blue", "ngu_r2d2.py, R2D2": "black"}
    assert [len(ax.collections) for ax in figure.axes] == [2, 0]  # bands
    for name in ("one", "two"):
        figures.save(compare.figure(results), Path(name))
    for suffix in ("png", "svg"):
        assert Path(f"one.{suffix}").read_bytes() == Path(f"two.{suffix}").read_bytes()


def test_another_version_of_a_task_is_dotted_or_hollow():
    (row,) = [row for row in SUITES["mujoco"] if row.task == "HalfCheetah-v4"]
    (ax,) = compare.figure([(row, result((1500.0,), row.steps, row))]).axes
    marks = {
        x.get_label(): (x.lines[0].get_marker(), x.lines[0].get_markerfacecolor()) for x in ax.containers
    }
    assert marks["CleanRL, 3 runs"] == ("o", "tab:orange") and marks["CleanRL, -v2, 3 runs"] == ("s", "white")
    lines = {line.get_label(): line.get_linestyle() for line in ax.lines}
    assert lines["openai/baselines 2018, -v2, 6 runs"] == ":" and lines["ppo_continuous.py"] == "-"


def test_bands_are_quartiles_and_few_seeds_are_thin_lines(without_runs_here):
    row = Row("ppo", "CartPole-v1", 500_000)
    (ax,) = compare.figure([(row, result(np.arange(8.0), row=row))]).axes
    (band,) = ax.collections
    assert band.get_datalim(ax.transData).bounds[1::2] == pytest.approx((1.75, 3.5))  # from, and how high
    (ax,) = compare.figure([(row, result((1.0, 2.0), row=row))]).axes
    assert [line.get_linewidth() for line in ax.lines] == [1.4, 0.5, 0.5] and not ax.collections


def test_a_drawn_curve_is_the_mean_of_the_seeds_at_each_step(without_runs_here, monkeypatch):
    """By hand: episodes of two seeds that learn, and the published curve with its band."""
    target = Target("CleanRL", "CartPole-v1", curve="ppo.py")
    row = Row("ppo", "CartPole-v1", 400, (target,))
    ends = np.arange(1.0, 401)
    seeds = {1: np.column_stack((ends, ends)), 2: np.column_stack((ends, 3 * ends))}
    published = np.array([[100.0, 7.0, 2.0, 3.0], [400.0, 9.0, 1.0, 3.0]])  # step, mean, deviation, runs
    monkeypatch.setattr(compare, "curves", lambda: {("ppo.py", "CartPole-v1"): published})
    (ax,) = compare.figure([(row, compare.Result(row, seeds, set(), set()))]).axes
    ours, *thin, theirs = ax.lines
    steps, returns = ours.get_data()
    assert steps.tolist() == np.arange(8.0, 401, 8).tolist()  # each is the mean of eight episodes
    np.testing.assert_allclose(returns, 2 * (steps - 3.5))
    for line, factor in zip(thin, (1, 3), strict=True):
        np.testing.assert_allclose(line.get_ydata(), factor * (steps - 3.5))
    assert [x.tolist() for x in theirs.get_data()] == [[100, 400], [7, 9]]
    (band,) = ax.collections
    assert {(x, y) for x, y in band.get_paths()[0].vertices} == {(100, 5), (100, 9), (400, 8), (400, 10)}


@pytest.mark.parametrize("flags", ["", "--gamma 0.9"])
@pytest.mark.parametrize("is_of_pages", [True, False])
def test_pages_show_what_the_defaults_do(flags, is_of_pages, without_runs_here, monkeypatch):
    """Other flags' results leave the project's own tables and figures as they are; one's own are drawn."""
    saved, changed = [], []
    monkeypatch.setattr(figures, "save", lambda figure, path: saved.append(path))
    monkeypatch.setattr(compare, "write_between", lambda page, name, content: changed.append(name))
    monkeypatch.setattr(compare, "RESULTS", Path("." if is_of_pages else "elsewhere").resolve())
    row = Row("ppo", "CartPole-v1", 500_000)
    results = {suite: [] for suite in SUITES} | {"classic": [(row, result(TEN, row=row))]}
    compare.write(compare.Args(suites=("classic",), results=Path(), flags=flags, write=True), results)
    assert saved == ([] if is_of_pages and flags else [Path("classic/curves")])
    assert ("classic" in changed) == ("summary" in changed) == (is_of_pages and not flags)
    assert Path("index.html").exists()


def test_an_axis_begins_at_what_is_reached_after_a_tenth_of_the_steps():
    (ax,) = figures.panels(1)[1]
    x = np.linspace(0, 1, 101)
    ax.plot(x, np.where(x < 0.05, -1000, -10 + x))
    figures.hide_the_beginning(ax)
    assert -12 < ax.get_ylim()[0] < -9.9


def test_published_sources_keep_their_colors():
    for suite in ("atari", "mujoco"):
        row = SUITES[suite][0]
        ax = compare.figure([(row, result((1.0,), steps=row.steps, row=row))]).axes[0]
        color = {line.get_label(): line.get_color() for line in ax.lines}
        for label, found in color.items():
            source = label.partition(", ")[0]
            assert found == figures.PUBLISHED.get(source, found)
        assert any(label.startswith("openai/baselines 2018, ") for label in color)


def test_the_legend_is_within_the_figure():
    for suite in ("memory", "atari", "ngu"):
        figure = compare.figure([(row, result((1.0,), row.steps, row)) for row in SUITES[suite]])
        figure.canvas.draw()
        box, width = figure.legends[0].get_window_extent(), figure.get_figwidth() * figure.dpi
        assert 0 <= box.x0 < box.x1 <= width, suite


def test_ticks_do_not_overlap():
    row = SUITES["atari"][0]
    figure = compare.figure([(row, result((1.0,), steps=row.steps, row=row))] * 3)
    figure.canvas.draw()
    for ax in figure.axes:
        boxes = [label.get_window_extent() for label in ax.get_xticklabels() if label.get_text()]
        boxes = sorted((box.x0, box.x1) for box in boxes)
        assert len(boxes) > 3 and all(a[1] < b[0] for a, b in zip(boxes, boxes[1:], strict=False))


def test_tables_of_the_pages_are_those_of_the_csvs():
    page = compare.TABLES.read_text(encoding="utf-8")
    shown = re.findall(r"<!-- (\w+) -->\n(.*?)\n<!-- end of \1 -->", page, re.DOTALL)
    assert [suite for suite, _ in shown] == [*SUITES]
    loaded = load_all()
    for suite, table in shown:
        assert table == compare.section(suite, loaded[suite]), suite
    summary = f"<!-- summary -->\n{compare.summary(loaded)}\n<!-- end of summary -->"
    for path in compare.SUMMARY:
        assert summary in path.read_text(encoding="utf-8")


def test_joint_ratios_in_sentences():
    """Those of the README, and in METHODS.md those of the tasks that are the same on both engines."""
    readme, methods = (
        " ".join(path.read_text(encoding="utf-8").split()) for path in (ROOT / "README.md", compare.METHODS)
    )
    loaded = load_all()["mujoco"]
    lines = "\n".join(compare.joint_lines(loaded))
    results = " ".join((ROOT / "benchmark/RESULTS.md").read_text(encoding="utf-8").split())
    (pooled,) = re.findall(r"by all published, 8 tasks together: \*\*([\d.]+) ", lines)
    assert f"and the eight tasks together ({pooled})." in readme
    assert f"ours are {100 * (1 - float(pooled)):.0f} % lower on the eight tasks together" in results
    others = [x for x in loaded if x[0].task not in ("Hopper-v4", "Humanoid-v4")]
    by_here, by_cleanrl, by_all = re.findall(r"\*\*(.*?)\*\*", "\n".join(compare.joint_lines(others)))
    said = f"by CleanRL, run here, is {by_here}, by CleanRL, published, {by_cleanrl}, and by all published "
    assert f"{said}{by_all}." in methods


def test_sentences_on_cleanrls_runs_on_mujoco():
    """That there are ten, what each task is, and which words changed with the runs."""
    pages = ROOT / "README.md", ROOT / "benchmark/RESULTS.md", compare.METHODS
    readme, results, methods = (" ".join(path.read_text(encoding="utf-8").split()) for path in pages)
    rows = [(row, result) for row, result in load_all()["mujoco"] if row.is_comparable]
    theirs = {row.task: compare.run_here("ppo_continuous", row.task) for row, _ in rows}
    assert len(rows) == 8 and len({(*x.seeds,) for x in theirs.values()}) == 1
    words = "zero one two three four five six seven eight nine ten".split()
    assert all(len(x.seeds) == 10 for x in theirs.values())
    together = next(x for x in compare.joint_lines(rows) if "by CleanRL, run here, 8 tasks together" in x)
    assert together.endswith(" matches**")
    said = "no task is *below*; of the eight on MuJoCo, both pendulums and Reacher *match*, each of the "
    assert f"{said}others is *open*, and together they match." in results
    said = "**As good as CleanRL**, by ten runs of each here: `ppo` on CartPole and Acrobot, `ppo_shared` on "
    said += (
        "CartPole, `ppo_continuous` on both pendulums, Reacher and all eight MuJoCo tasks together. *Open*: "
    )
    assert f"{said}the other five, and `ppo_shared` on Acrobot." in readme
    last = {row.task: compare.said(compare.first_ratio(row, result)).split()[-1] for row, result in rows}
    for script, task in (("ppo", "CartPole-v1"), ("ppo", "Acrobot-v1"), ("ppo_shared", "CartPole-v1")):
        ours = found("classic", task, script=script)
        assert len(ours.seeds) == len(compare.run_here(script, task).seeds) == 10
        assert compare.said(compare.first_ratio(ours.row, ours)).endswith(" matches")
    ours = found("classic", "Acrobot-v1", script="ppo_shared")
    assert len(ours.seeds) == len(compare.run_here("ppo_shared", "Acrobot-v1").seeds) == 10
    assert compare.said(compare.first_ratio(ours.row, ours)).endswith(" open")
    match = ["InvertedPendulum-v4", "InvertedDoublePendulum-v4", "Reacher-v4"]
    assert [last.pop(task) for task in match] == ["matches"] * 3 and [*last.values()] == ["open"] * 5
    pendulum = theirs["InvertedPendulum-v4"]
    mean = compare.number(pendulum.at(pendulum.reached).mean())
    assert f"(963.1, where CleanRL's own has {mean} here)" in results
    low = words[(theirs["Swimmer-v4"].at(1e6) < 65).sum()]
    assert f"half of our seeds end below 65, as {low} of CleanRL's ten here" in results
    ours = found("mujoco", "Swimmer-v4")
    assert (ours.at(1e6) < 65).tolist().count(True) == 5
    (of_2018,) = compare.published_beside(ours.row, ours)
    # no run of n can be further from their mean (Samuelson's inequality)
    furthest = of_2018.deviation * (of_2018.runs - 1) / of_2018.runs**0.5
    assert of_2018.mean - furthest > 65
    first = {n: {} for n in range(2, 11)}  # ratios by the first n runs
    for row, result in rows:
        ours, random = compare.runs_of("", "", result.at(result.reached)), compare.random_returns()[row.task]
        for n, by_task in first.items():
            by = compare.Result(row, dict([*theirs[row.task].seeds.items()][:n]))
            by = compare.runs_of("", "", by.at(min(by.reached, result.reached)))
            by_task[row.task] = compare.ratio(ours, by, random)
    for by_task in first.values():
        by_task["together"] = compare.joint([*by_task.values()])
    changed = {  # words, and the number of runs from which on they are said
        task: {n: x for n, x in words.items() if x != words.get(n - 1)}
        for task in first[2]
        if (words := {n: compare.said(by_task[task]).split()[-1] for n, by_task in first.items()})
    }
    assert changed.pop("together") == {2: "open", 4: "matches"}
    assert changed.pop("InvertedPendulum-v4") == {2: "open", 6: "matches"}
    assert changed.pop("InvertedDoublePendulum-v4") == {2: "open", 9: "matches"}
    assert changed.pop("Reacher-v4") == {2: "above", 3: "open", 9: "matches"}
    assert changed.pop("Swimmer-v4") == {2: "above", 3: "open"}
    assert all(words == {2: "open"} for words in changed.values()), changed
    reacher, swimmer = (
        compare.said(first[2][f"{task}-v4"]).removesuffix(" above") for task in ("Reacher", "Swimmer")
    )
    said = f"With two, our Reacher was *above*, {reacher}, and Swimmer, {swimmer}; the third run made "
    said += "both *open*. InvertedPendulum matches since the sixth, InvertedDoublePendulum and Reacher since "
    said += "the ninth; they were *open* before. All eight together were *open* with two and with three, and "
    said += "match since the fourth. No other word changed."
    assert said in methods
    below = {group: [] for group in compare.GROUPS}
    for row, result in rows:
        for group, by in compare.ratios(row, result).items():
            below[group] += [row.task[:-3]] if compare.said(by).endswith(" below") else []
    assert below["CleanRL, published"] == ["InvertedPendulum"] and not below["CleanRL, run here"]
    assert below["all published"] == ["Hopper", "Swimmer"]
    said = "**Below what was published**: InvertedPendulum by CleanRL, Swimmer by openai/baselines 2018, "
    assert f"{said}and, by all sources pooled, Hopper" in readme


def test_words_that_the_second_five_seeds_changed():
    """METHODS.md names the tasks, with the ratios of the first five; no other word or joint word changed."""
    page, changed, ratios = " ".join(compare.METHODS.read_text(encoding="utf-8").split()), {}, {}
    for row, result in load_all()["mujoco"]:
        if row.is_comparable:
            five = compare.Result(row, {seed: result.seeds[seed] for seed in range(1, 6)})
            for k, runs in enumerate((five, result)):
                for group, by in compare.ratios(row, runs).items():
                    if group != compare.HERE:
                        ratios.setdefault(group, ([], []))[k].append((row.task, by))
    for group, both in ratios.items():
        texts = [[(task, compare.said(by)) for task, by in runs] for runs in both]
        for (task, before), (_, after) in zip(*texts, strict=True):
            if before.split()[-1] != after.split()[-1]:
                changed[task, group] = before, after.split()[-1]
        joint = [compare.said(compare.joint([by for _, by in runs])).split()[-1] for runs in both]
        assert joint[0] == joint[1], (group, joint)
    humanoid, pooled = (changed.pop(("Humanoid-v4", group)) for group in compare.GROUPS[1:])
    hopper, swimmer = (changed.pop((f"{x}-v4", "all published")) for x in ("Hopper", "Swimmer"))
    assert not changed and humanoid == pooled and {hopper[1], swimmer[1]} == {"below"}
    said = "Humanoid went from *below*, {}, to *open*; by all that was published, Hopper went from *open*,"
    said += " {}, to *below*, and Swimmer from *open*, {}, to *below*. No other word changed."
    words = humanoid[0].removesuffix(" below"), *(x[0].removesuffix(" open") for x in (hopper, swimmer))
    assert said.format(*words) in page


def test_the_reward_scaling_of_2018_beside_its_own_runs():
    task = "InvertedDoublePendulum-v4"
    row = found("mujoco", task).row
    ours = compare.load("mujoco", row, compare.Args(results=RESULTS / "controls/reward_scaling_2018"))
    (theirs,) = (x for x in compare.published_beside(row, ours) if "2018" in x.by)
    ours = compare.runs_of("", "", ours.at(ours.reached))
    by = compare.said(compare.ratio(ours, theirs, compare.random_returns()[task]))
    said = f"had {theirs.mean:.0f} there; with that scaling it has {ours.mean:.0f} here, a ratio of {by}"
    page = " ".join(compare.METHODS.read_text(encoding="utf-8").split())
    assert f"InvertedDoublePendulum {said}" in page
    page = " ".join((ROOT / "benchmark/RESULTS.md").read_text(encoding="utf-8").split())
    said = f"with the reward scaling of 2018 has {ours.mean:.0f}, where openai/baselines 2018 had "
    assert f"InvertedDoublePendulum {said}{theirs.mean:.0f}" in page


def test_every_published_number_has_a_source():
    for name in ("score", "curve"):
        sources = {row["source"]: row["where"] for row in read_csv(compare.PUBLISHED / f"{name}_sources.csv")}
        named = {row["source"] for row in read_csv(compare.PUBLISHED / f"{name}s.csv")}
        assert named <= set(sources) and all(sources.values()), name


def found(suite, task, label="", script=None):
    """The result of a row."""
    kept = [row for row in SUITES[suite] if (row.task, row.label) == (task, label)]
    (row,) = [row for row in kept if script in (None, row.script)]
    return compare.load(suite, row, compare.Args())


def test_machines_of_cleanrls_runs():
    """METHODS.md: of the same kind as ours, but for some rows."""
    of_script = {theirs: ours for ours, theirs in compare.CLEANRL.items()}
    suites = ("classic", "mujoco", "atari", "atari_cut", "atari_lstm")
    ours = [x for suite in suites for x in read_csv(RESULTS / suite / "runs.csv")]
    later = [x for x in ours if x["script"] in ("ppo_atari", "ppo_lstm") and x["seed"] != "1"]
    ours = {((x["script"], x["env_id"]), x["machine"]) for x in ours if x not in later}
    rows = read_csv(ROOT / "benchmark/published/cleanrl/runs.csv")
    assert [x["seed"] for x in later] == ["3", "2"]
    assert {x["machine"] for x in later} <= {x["machine"] for x in rows if x["script"] == "ppo_atari"}
    theirs = {((of_script[x["script"]], x["env_id"]), x["machine"]) for x in rows}
    other = [("ppo", "MountainCar-v0"), ("ppo_shared", "MountainCar-v0"), ("ppo_shared", "Acrobot-v1")]
    other += [("ppo_atari", "BreakoutNoFrameskip-v4"), ("ppo_lstm", "BreakoutNoFrameskip-v4")]
    assert {row for row, _ in theirs - ours} == {*other} and not {row for row, _ in theirs & ours} & {*other}
    page = " ".join((ROOT / "benchmark/METHODS.md").read_text(encoding="utf-8").split())
    said = "but for Atari (its first seeds), MountainCar and, with one network, Acrobot, on the same kind of"
    assert said in page


def test_one_network_beside_two():
    """Ours and CleanRL's, in the words of RESULTS.md; and that no run reaches MountainCar's flag."""

    def both(script, task):
        ours, theirs = found("classic", task, script=script), compare.run_here(script, task)
        assert len(ours.seeds) == 10 and len(theirs.seeds) == (3 if task == "MountainCar-v0" else 10)
        return ours, theirs

    page = " ".join((ROOT / "benchmark/RESULTS.md").read_text(encoding="utf-8").split())
    for task in ("Acrobot", "CartPole"):
        means = []
        for script in ("ppo_shared", "ppo"):
            ours, _ = both(script, f"{task}-v1")
            beside, _ = compare.run_beside(ours.row, ours)
            means += map(compare.number, (ours.at(ours.reached).mean(), beside.mean))
        assert "{} and {} on {}, where two have {} and {}".format(*means[:2], task, *means[2:]) in page
    for script in ("ppo", "ppo_shared"):
        for runs in both(script, "MountainCar-v0"):
            assert all((episodes[:, 1] == -200).all() for episodes in runs.seeds.values())


def test_numbers_that_stand_in_no_table():
    """Of the texts around the tables, from the CSVs."""
    page = " ".join((ROOT / "benchmark/METHODS.md").read_text(encoding="utf-8").split())
    clipped, unclipped = found("mujoco", "Reacher-v4"), found("mujoco", "UnclippedReacher-v4")
    first = [found("mujoco", "HalfCheetah-v4").at(3000), clipped.at(3000), unclipped.at(3000)]
    cheetah, reacher, charged = (f"−{-x.mean():.0f}" for x in first)
    assert f"our first 3,000 steps have {cheetah} and {reacher}." in page
    assert f"ends at {compare.number(unclipped.at(1e6).mean())} (theirs " in page
    assert f"but begins at {charged}, lower than theirs" in page
    (theirs,) = (x for x in compare.published_beside(clipped.row, clipped) if "2018" in x.by)
    idle = compare.random_returns()["Reacher-v4 without actions"]
    by_idle = compare.ratio(compare.runs_of("", "", clipped.at(1e6)), theirs, idle)
    assert f"which has {compare.signed(idle)}, its ratio is {compare.said(by_idle)}." in page
    begin = [compare.curves()["ppo2", f"{task}-v2"][0, 1] for task in ("HalfCheetah", "Reacher")]
    assert "they begin at −{:.0f} on HalfCheetah and at −{:.0f} on Reacher".format(*np.abs(begin)) in page
    page = " ".join(compare.TABLES.read_text(encoding="utf-8").split())

    masked = found("microrts", "MicrortsMining-v1", "masked")
    steps = np.arange(100_000, masked.reached, 100)
    means = np.array([masked.at(step) for step in steps])
    assert f"both seeds have {means.min():.1f} to {means.max():.1f} from 100k steps on" in page

    for task, begin in (("Breakout", 100_000), ("Pong", 1_000_000)):
        ours = found("atari_lstm", f"{task}NoFrameskip-v4")
        steps = np.arange(begin, 2_000_001, 10_000)
        for name in ("ppo_atari_lstm.py(blog)", "openai_baselines_ppo2_cnn_lstm"):
            theirs = compare.curves()[name, f"{task}NoFrameskip-v4"]
            means = np.interp(steps, theirs[:, 0], theirs[:, 1])
            assert all(ours.at(step)[0] > mean for step, mean in zip(steps, means, strict=True)), task

    none, vtrace = (found("vtrace_ablation", "CartPole-v1", kind) for kind in ("none", "vtrace"))
    impala = " ".join((ROOT / "docs/impala.md").read_text(encoding="utf-8").split())
    p_value = stats.ttest_ind(none.at(none.reached), vtrace.at(vtrace.reached), equal_var=False).pvalue
    assert f"(between `none` and V-trace, Welch's p is {p_value:.2f})" in impala


def test_screen_of_impalas_defaults():
    """docs/impala.md has a row for each run on Pong, in any order: settings, and means of 100 episodes."""
    page, folder = (ROOT / "docs/impala.md").read_text(encoding="utf-8"), RESULTS / "impala_screen"
    shown = page.partition("<!-- screen -->")[2].partition("<!-- end of screen -->")[0]
    settings, scores = [], []
    for line in shown.strip().splitlines()[2:]:
        optimizer, num_steps, batch_segments, _, *returns, last = [x.strip() for x in line.split("|")[1:-1]]
        settings.append((*optimizer.split(), num_steps, batch_segments))
        scores.append((*settings[-1], *returns, last))
    expected = []
    for name, run in read_table(folder / "runs.csv").items():
        steps, returns = np.array(
            [(float(x["step"]), float(x["return"])) for x in read_csv(csv_path(folder, name))]
        ).T
        options = Row("", "", 0).options("--" + run["command"].partition(" --")[2])
        found = {
            k: f"{returns[steps <= k * 1e6][-100:].mean():.1f}".replace("-", "−") for k in (0.75, 1.5, 3, 99)
        }
        if "Breakout" in name:
            assert f"it had {found[99]} after {steps[-1] / 1e6:.2f}M steps" in " ".join(page.split())
            continue
        until = [found[k] if steps[-1] > 0.99e6 * k else "" for k in (0.75, 1.5, 3)]
        optimizer = "Adam" if "optimizer" in options else "RMSProp"
        sizes = options["num-steps"], options.get("batch-segments", options.get("batch-unrolls"))
        rate = options.get("learning-rate", "6e-4")
        expected.append((optimizer, rate, *sizes, *until, f"{found[99]} at {steps[-1] / 1e6:.2f}M"))
    assert len(expected) == 12 and sorted(scores) == sorted(expected)


def test_what_impalas_defaults_reach():
    """The table of docs/impala.md has each run on Atari, as the mean of the last 100 games until a step."""
    lines, ends, millions = [], {}, (1, 2, 3, 5, 10)
    for row in sorted(SUITES["impala"], key=lambda row: row.task):
        result = compare.load("impala", row, compare.Args())
        if result and "NoFrameskip" in row.task:
            game, until = row.task.partition("No")[0], [min(k * 1e6, result.reached) for k in millions]
            means = np.array([result.at(step) for step in until]).T
            for seed, values in zip(result.seeds, means, strict=True):
                cells = [
                    f"{x:.1f}" if result.reached > 0.99 * k * 1e6 else ""
                    for x, k in zip(values, millions, strict=True)
                ]
                lines.append(f"| {game} | {seed} | {' | '.join(cells)} |")
            ends[game] = means[:, -1]
    page = (ROOT / "docs/impala.md").read_text(encoding="utf-8")
    shown = page.partition("<!-- reached -->")[2].partition("<!-- end of reached -->")[0].strip().splitlines()
    assert shown[0] == f"| game | seed | {' | '.join(f'at {k}M' for k in millions)} |"
    assert shown[2:] == [line.replace("-", "−") for line in lines]
    pages = " ".join(
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "benchmark/RESULTS.md")
    )
    pages = " ".join(pages.split())
    assert len(ends["Pong"]) == len(ends["Breakout"]) == 2
    breakout, pong = (f"{ends[game].mean():.1f}" for game in ("Breakout", "Pong"))
    assert f"2 seeds: Pong {pong}, Breakout {breakout}." in pages
    rllib = {row.task.partition("No")[0]: row.targets for row in SUITES["impala"]}

    def theirs(game, step):
        means = [compare.published(target, step, is_end=False).mean for target in rllib[game]]
        return " to ".join(f"{x:.{int(game == 'Pong')}f}" for x in sorted({min(means), max(means)}))

    theirs_at_the_end = (
        f"where RLlib's runs with 32 workers have {theirs('Breakout', 10e6)}, and are ahead at 3M and 5M."
    )
    assert f"{pong} on Pong and {breakout} on Breakout, {theirs_at_the_end}" in pages
    page = " ".join(page.split()).replace("−", "-")
    three, five, end = (theirs("Breakout", k * 1e6) for k in (3, 5, 10))
    assert f"rise sooner on Breakout, to {three} at 3M and {five} at 5M, and end at {end}. " in page
    ours = found("impala", "BreakoutNoFrameskip-v4")
    assert all(ours.at(k * 1e6).max() < float(x.split()[0]) for k, x in ((3, three), (5, five)))
    three, five, end = (theirs("Pong", k * 1e6) for k in (3, 5, 6))
    assert f"has {three} at 3M and {five} at 5M, and ends there, at {end} after 6M" in page
    ppo2 = [
        compare.published(Target("", f"{game}NoFrameskip-v4", curve="ppo2", is_std=False), 5e6, is_end=False)
        for game in ("BeamRider", "Qbert", "SpaceInvaders")
    ]
    ours = [found("impala", x.env_id).at(5e6) for x in ppo2]
    assert [len(x) for x in ours] == [1] * 3 and {x.runs for x in ppo2} == {6}
    said = [
        f"{x.mean():.0f} on {y.env_id.partition('No')[0]} ({y.mean:.0f})"
        for x, y in zip(ours, ppo2, strict=True)
    ]
    said = ", ".join(said)
    assert f"they have {said} at 5M, just before the runs were stopped" in page
    table = read_table(RESULTS / "impala/runs.csv")
    runs = [table[f"{x.env_id}__impala_vtrace__1"] for x in ppo2]
    assert {(x["steps"], x["schedule"]) for x in runs} == {("5000000", "10000000")}


def test_sentences_on_impalas_runs():
    """In docs/impala.md and docs/atari.md: evaluations, sizes, memory, rates, and which setting was ahead."""
    impala, atari = (
        " ".join((ROOT / f"docs/{name}.md").read_text(encoding="utf-8").split()).replace("−", "-")
        for name in ("impala", "atari")
    )
    evaluated, rows = (
        [x for x in read_csv(RESULTS / name) if x["script"] == "impala_vtrace"]
        for name in ("evaluated.csv", "speed/long_runs.csv")
    )
    games = {game: [x for x in evaluated if x["env_id"].startswith(game)] for game in ("Breakout", "Pong")}
    said = {
        game: " and ".join(f"{float(x['mean']):.1f} ± {float(x['std']):.{digits}f}" for x in games[game])
        for game, digits in (("Breakout", 1), ("Pong", 2))
    }
    said = f"gives {said['Breakout']} on Breakout, {said['Pong']} on Pong"
    assert [x["seed"] for game in games.values() for x in game] == ["1", "2"] * 2
    assert f"Over {evaluated[0]['games']} games, `--evaluate` of the last checkpoints {said} (" in impala
    assert {x["games"] for x in evaluated} == {evaluated[0]["games"]}
    sizes = sorted(float(x["events_mb"]) for x in evaluated)
    assert f"events have {sizes[0]} to {sizes[-1]} MB, and" in atari
    (size,) = {x["checkpoint_mb"] for x in evaluated}
    assert f"optimizer, {size} MB (" in atari
    rates = {
        game: [int(x["steps_per_s"]) for x in rows if x["seed"] == "2" and x["env_id"].startswith(game)]
        for game in games
    }
    for game, k in rates.items():
        assert f"{k[0]:,} steps/s in the first ten minutes, {k[-1]:,} in the last on {game}" in atari
        assert f"never below {min(k):,}" in atari
    memory = [float(x[key]) for x in rows for key in ("resident_mb_min", "resident_mb_max")]
    assert f"kept {min(memory):.0f} to {max(memory):.0f} MB of memory" in atari
    waits = [sorted(float(x[key]) for x in rows) for key in ("learner_wait", "actor_wait")]
    said = [f"{x[0]:.2f} to {x[-1]:.2f}" for x in waits]
    assert f"`charts/learner_wait` {said[0]} and `charts/actor_wait` {said[1]} (" in impala

    def at(path, step):
        return np.mean([float(x["return"]) for x in read_csv(path) if int(x["step"]) <= step * 1e6][-100:])

    (rmsprop,) = (RESULTS / "impala_screen").glob("Pong*num-steps=10__*learning-rate=1.5e-3__1.csv.gz")
    (adam,) = (RESULTS / "impala_screen").glob("Pong*num-steps=20__batch-unrolls=4__optimizer=adam__1.csv.gz")
    ahead = [at(rmsprop, k) > at(adam, k) for k in (1, 1.5, 2, 2.4, 2.8, 2.9, 3)]
    assert ahead == [True] * 5 + [False] * 2 and "Until 2.8M, RMSProp at 1.5e-3 with T = 10 was" in impala
    again = [
        f"{at(csv_path(RESULTS / 'impala', f'PongNoFrameskip-v4__impala_vtrace__{k}'), 3):.1f}"
        for k in (1, 2)
    ]
    assert f"have {' and '.join(again)} at 3M, less than RMSProp's {at(rmsprop, 3):.1f}, so" in impala


ONE_PASS = "__num-envs=16__batch-unrolls=16__sample-reuse=1"  # in names of results


def settings(name, run):
    """Flags of a run of ppo_async.py by its name, which has what was typed and what was a default once."""
    today = {flag.replace("_", "-"): str(x) for flag, x in asdict(ppo_async.Args()).items()}
    once = {"num-envs": "16", "batch-segments": "16", "sample-reuse": "1"}
    once = once if run["started"] < "2026-11-29" else {flag: today[flag] for flag in once}
    flags = (word.partition("=")[::2] for word in name.split("__")[2:-1])
    now = {then: flag for flag, then in RENAMED["ppo_async"].items()}
    named = {now.get(flag, flag): x for flag, x in flags}
    words = Row("", "", 0).options("--" + run["command"].partition(" --")[2])
    typed = {now.get(flag, flag): x for flag, x in words.items()}
    assert named.items() <= (once | typed).items()
    found = today | named
    assert all(float(found[flag]) == float(typed.get(flag, x)) for flag, x in once.items())
    assert found["batch-segments"] == found["num-envs"]
    return found


def test_names_of_results_have_what_was_a_default_once():
    for suite in ("off_policy_ppo", "staleness", "async_screen"):
        for name, run in read_table(RESULTS / suite / "runs.csv").items():
            settings(name, run)


def test_python_lock_of_off_policy_ppo():
    """The sentence of docs/async.md has the newest rows of python_lock.csv."""
    page = " ".join((ROOT / "docs/async.md").read_text(encoding="utf-8").split())
    table = [row for row in rows(RESULTS / "speed/python_lock.csv") if row["script"] == "ppo_async.py"]
    most = {row["flags"]: f"{round(int(row['at_most_steps_per_s']), -2):,}" for row in table}
    before = [f"{round(int(row['at_most_steps_per_s']), -2):,}" for row in table if not row["flags"]][0]
    larger = [f"{n} {most[f'--num-envs {n} --batch-unrolls {n}']}" for n in (32, 64, 128)]
    said = (
        f"at most {most['']} steps/s (commit `{table[-1]['commit']}`, on an AMD EPYC), and with one pass 16"
    )
    assert f"{said} environments {before}, {larger[0]}, {larger[1]}, and {larger[2]}, each with" in page


def test_off_policy_ppo_on_breakout():
    """Tables and sentences of docs/async.md: the whole run beside two other scripts, and the short ones."""
    page = (ROOT / "docs/async.md").read_text(encoding="utf-8")
    runs = {
        "`ppo_async`": "off_policy_ppo/BreakoutNoFrameskip-v4__ppo_async__1",
        "`ppo_async`, one pass": f"off_policy_ppo/BreakoutNoFrameskip-v4__ppo_async{ONE_PASS}__1",
        "`ppo_atari`": "atari_cut/BreakoutNoFrameskip-v4__ppo_atari__1",
        "`impala_vtrace`": "impala/BreakoutNoFrameskip-v4__impala_vtrace__2",
    }
    paths = {who: csv_path(RESULTS, name) for who, name in runs.items()}
    defaults, one_pass, atari, _ = paths.values()

    def until(path, key, last):
        """The mean of the last 100 games, or nothing where the run ended before."""
        episodes = read_csv(path)
        returns = [float(x["return"]) for x in episodes if float(x[key]) <= last]
        return f"{np.mean(returns[-100:]):.1f}" if float(episodes[-1][key]) >= 0.999 * last else ""

    lines = ["| script | at 1M | at 2M | at 3M | at 4M | in 0.5 h | in 1 h | in 1.5 h | in 2 h | in 2.25 h |"]
    for who, path in paths.items():
        cells = [until(path, "step", k * 1e6) for k in (1, 2, 3, 4)]
        cells += [until(path, "seconds", k * 3600) for k in (0.5, 1, 1.5, 2, 2.25)]
        lines.append(f"| {who} | {' | '.join(cells)} |")
    shown = page.partition("<!-- breakout -->")[2].partition("<!-- end of")[0].strip().splitlines()
    assert [shown[0], *shown[2:]] == lines
    ours, theirs = ([float(x.strip() or "nan") for x in line.split("|")[2:-1]] for line in lines[2:4])
    is_ahead = [a < b for a, b in zip(ours, theirs, strict=True)]  # of hours, 1.5 is not spoken of
    assert is_ahead[:6] + is_ahead[7:] == [True] * 4 + [False] * 2 + [True] * 2
    seconds = {
        k: max(float(x["seconds"]) for x in read_csv(atari) if int(x["step"]) <= k * 1e6) for k in (1, 2)
    }
    assert seconds[1] > 2 * (seconds[2] - seconds[1])
    leads = {
        k / 100: float(until(defaults, "step", k * 1e4)) - float(until(atari, "step", k * 1e4))
        for k in range(5, 314)
    }
    assert all(x < 0 for k, x in leads.items() if k <= 0.5)
    behind = [k for k, x in leads.items() if k >= 0.95 and x <= 0]
    assert 2.1 < min(behind) < max(behind) < 2.7 and len(behind) < 0.2 * len(leads)
    assert leads[3.0] > 0.9 * max(leads.values())
    near = f"({until(defaults, 'step', 3.1e6)} and {until(atari, 'step', 3.1e6)} at 3.1M)"
    assert near in " ".join(page.split())
    whole = read_csv(defaults)
    steps, clock = ([float(x[key]) for x in whole] for key in ("step", "seconds"))
    rates = np.diff(np.interp(np.arange(0, clock[-1], 600), clock, steps)) / 600
    said = f"each ten minutes of the run had {min(rates):.0f} to {max(rates):.0f} steps/s"
    assert said in " ".join(page.split()) and min(rates) > 200
    slower = f"slower EPYC, with {int(steps[-1] / clock[-1])} steps/s"
    assert slower in " ".join((ROOT / "docs/atari.md").read_text(encoding="utf-8").split())

    lines = ["| environments | T | passes | how | at 85k | at 130k | at 420k |"]
    played = {
        name: (csv_path(RESULTS / suite, name), run)
        for suite in ("off_policy_ppo", "async_screen")
        for name, run in read_table(RESULTS / suite / "runs.csv").items()
        if "Breakout" in name
    }
    names = [f"BreakoutNoFrameskip-v4__ppo_async{x}__1" for x in ("", ONE_PASS)]
    assert list(played)[:2] == names
    for name, (path, run) in played.items():
        options = settings(name, run)
        cells = [options[x].removesuffix(".0") for x in ("num-envs", "num-steps", "sample-reuse")]
        cells.append("in turn" if "__sync__" in name else "threads")
        cells += [until(path, "step", k * 1000) for k in (85, 130, 420)]
        lines.append(f"| {' | '.join(cells)} |")
    cells = [until(atari, "step", k * 1000) for k in (85, 130, 420)]
    lines.append(f"| 8 | 128 | 4 | `ppo_atari.py` | {' | '.join(cells)} |")
    shown = page.partition("<!-- async screen -->")[2].partition("<!-- end of")[0].strip().splitlines()
    assert [shown[0], *shown[2:]] == lines

    page = " ".join(page.split())
    by_420k = [line.split("|")[-2].strip() for line in (lines[1], lines[-1], lines[2])]
    assert "at {} by 420k steps, beside its {} and {} with one pass.".format(*by_420k) in page
    assert [run["threads"] for _, run in played.values()] == ["2"] * 2 + ["1"] * (len(played) - 2)
    (_, whole), (_, run) = (played[name] for name in names)
    said = f"The defaults were played to {steps[-1] / 1e6:.2f}M steps on Breakout, with one seed, in"
    assert f"{said} {int(whole['seconds']) / 3600:.1f} hours on two cores of an AMD EPYC." in page
    assert (whole["parts"], whole["machine"]) == ("1", "2 x AMD EPYC")
    end = until(one_pass, "step", 1e7)
    assert f"it has {end} after 10M steps, in {int(run['seconds']) / 3600:.1f} hours on two cores" in page
    played_with = "--num-envs 16 --batch-segments 16 --sample-reuse 1"
    rows = [x for x in read_csv(RESULTS / "speed/long_runs.csv") if x["flags"] == played_with]
    resumed = f"{int(rows[0]['from_step']) / 1e6:.2f}M"
    assert run["parts"] == "2" and f"it was stopped once, at {resumed}" in page
    rounds = {}
    for row in read_csv(RESULTS / "speed/async_beside_atari.csv"):
        rounds.setdefault((row["script"], "--sync" in row["flags"]), []).append(int(row["steps_per_s"]))
    threads, in_turn, rate = (
        np.median(rounds[x]).astype(int)
        for x in (("ppo_async.py", False), ("ppo_async.py", True), ("ppo_atari.py", False))
    )
    said = f"made {threads} steps/s in threads and {in_turn} in turn, `ppo_atari.py` {rate} (medians of three"
    assert said in page and {len(x) for x in rounds.values()} == {3}

    (evaluated,) = (x for x in read_csv(RESULTS / "evaluated.csv") if x["flags"] == played_with)
    score = f"{float(evaluated['mean']):.1f} ± {float(evaluated['std']):.1f}"
    assert f"`--evaluate` of its last checkpoint gives {score} over {evaluated['games']} games" in page
    assert (evaluated["seed"], evaluated["step"]) == ("1", run["steps"])
    memory = [float(x[key]) for x in rows for key in ("resident_mb_min", "resident_mb_max")]
    rates = sorted(int(x["steps_per_s"]) for x in rows)
    said = f"{min(memory):.0f} to {max(memory):.0f} MB of memory and {rates[0]:,} to {rates[-1]:,} steps/s"
    assert f"Each ten minutes of that run had {said}" in page
    assert f"events have {evaluated['events_mb']} MB and the checkpoint {evaluated['checkpoint_mb']}." in page


def means_of_100(returns):
    """By sums of whole numbers: sums of hundredths are rounded by each CPU in its own way, such as 19.05."""
    sums = np.cumsum(np.append(0, returns))
    return (sums[100:] - sums[:-100]) / 100


def test_off_policy_ppo_on_pong():
    """Table and sentences of docs/async.md: the defaults, one pass, the screen, and ppo_atari.py."""
    page = (ROOT / "docs/async.md").read_text(encoding="utf-8")
    millions = (0.5, 0.75, 1, 1.5, 2)
    runs = {
        name: (csv_path(RESULTS / suite, name), run)
        for suite in ("off_policy_ppo", "async_screen", "atari")
        for name, run in read_table(RESULTS / suite / "runs.csv").items()
        if name.startswith("PongNoFrameskip")
    }
    lines, reached, ends, late, curve = [], {}, {}, {}, {}
    for name, (path, run) in runs.items():
        assert (run["seed"], run["schedule"]) == ("1", "10000000")
        step, returns, seconds = np.array(
            [[float(x[key]) for key in ("step", "return", "seconds")] for x in read_csv(path)]
        ).T
        if run["script"] == "ppo_atari":
            cells = ["8, `ppo_atari.py`", "4", "4", "2.5e-4"]
        else:
            options = settings(name, run)
            names = ("num-envs", "num-minibatches", "sample-reuse", "learning-rate")
            cells = [options[x].removesuffix(".0").replace("0.00025", "2.5e-4") for x in names]
        cells += [
            f"{np.mean(returns[step <= k * 1e6][-100:]):.1f}".replace("-", "−")
            if step[-1] > 0.99e6 * k
            else ""
            for k in millions
        ]
        lines.append(f"| {' | '.join(cells)} |")
        means = means_of_100(returns)
        first = [np.argmax(means >= score) + 99 for score in (0, 15) if (means >= score).any()]
        reached[name] = [x for k in first for x in (f"{step[k] / 1e6:.2f}M", f"{seconds[k] / 3600:.1f}")]
        ends[name] = f"{step[-1] / 1e6:.2f}M"
        late[name] = means[step[99:] > 1.5e6]
        curve[name] = (step[99:], means)
    shown = page.partition("<!-- async pong -->")[2].partition("<!-- end of")[0].strip().splitlines()
    head = ("environments", "minibatches", "passes", "learning rate", *(f"at {k}M" for k in millions))
    assert [shown[0], *shown[2:]] == [f"| {' | '.join(head)} |", *lines]
    passes, one_pass, rate, minibatches, atari = runs
    assert [passes, one_pass] == [f"PongNoFrameskip-v4__ppo_async{x}__1" for x in ("", ONE_PASS)]
    page = " ".join(page.split())
    ours, theirs = (lines[k].split(" | ")[7] for k in (1, -1))
    said = (
        f"of 16 environments, Pong was at {ours} after 1.5M steps, where `ppo_atari.py` is at {theirs}, and"
    )
    assert said in page
    said = "the return stayed near −20 until {} and {} steps, where they were stopped"
    assert said.format(ends[minibatches], ends[rate]) in page and f"stopped at {ends[one_pass]}." in page
    said = (
        "their mean of 100 games is above 0 after {} and {} hours, above 15 after {} and {}, with both cores"
    )
    assert said.format(*reached[passes]) in page
    low, high = (f"{x:.1f}" for x in (late[passes].min(), late[passes].max()))
    said = (
        f"From 1.5M on that of the defaults stayed between {low} and {high} until {ends[passes]}, where the"
    )
    resumed = {"9": "eight"}[runs[passes][1]["parts"]]
    assert f"{said} run was stopped (it had been resumed {resumed} times)." in page

    def at(name, million):
        step, means = curve[name]
        return f"{means[step <= million * 1e6][-1]:.1f}"

    said = (
        f"It has {at(passes, 3)} at 3M, where that of `ppo_atari.py`, which ends just after it, at "
        f"{at(atari, 4)}, has {at(atari, 3)};"
    )
    row = next(x for x in SUITES["off_policy_ppo"] if x.task.startswith("Pong"))
    blog = compare.published(row.targets[0], 7.6e6, False)
    said += f" {at(passes, 5)} at 5M and {at(passes, 7.6)} at 7.6M, where three runs of PPO in"
    said += " [the blog of the 37 details](details.md) have"
    assert f"{said} {blog.mean:.1f}." in page and ends[atari] == "3.00M"
    assert (blog.by, blog.runs) == ("the blog", 3)
    rows = [x for x in read_csv(RESULTS / "speed/long_runs.csv") if x["script"] == "ppo_async"]
    rows = [x for x in rows if (x["env_id"], x["flags"]) == ("PongNoFrameskip-v4", "")]
    memory = [float(x[key]) for x in rows for key in ("resident_mb_min", "resident_mb_max")]
    rates = sorted(int(x["steps_per_s"]) for x in rows)
    said = f"from {int(rows[0]['from_step']) / 1e6:.2f}M on, which nothing interrupted, had {min(memory):.0f}"
    said += f" to {max(memory):.0f} MB of memory and {rates[0]} to {rates[-1]} steps/s."
    assert said in page and len(rows) == 6 * 2.5
    pairs = zip(rows, rows[1:], strict=False)
    assert all(int(y["from_step"]) - int(x["to_step"]) <= 1024 for x, y in pairs)
    said = "`ppo_atari.py` is after {} and {} hours, and after {} and {}, with one core of an Intel Xeon."
    assert said.format(*reached[atari]) in page
    for seed in (1, 2):  # IMPALA, too, is ahead by steps
        episodes = read_csv(csv_path(RESULTS / "impala", f"PongNoFrameskip-v4__impala_vtrace__{seed}"))
        last = [float(x["return"]) for x in episodes if int(x["step"]) <= 1.5e6][-100:]
        assert np.mean(last) > float(ours.replace("−", "-")) + 1


def test_off_policy_ppo_in_the_results():
    """RESULTS.md says where the runs of ppo_async.py on Atari games were stopped, and at what return."""
    said = []
    for row in SUITES["off_policy_ppo"][2:]:  # without CartPole's
        result = compare.load("off_policy_ppo", row, compare.Args())
        said.append((f"{result.reached / 1e6:.3g}M", f"{np.mean(result.at(result.reached)):.1f}"))
    breakout, pong, one_pass, one_pass_pong = said
    page = " ".join((ROOT / "benchmark/RESULTS.md").read_text(encoding="utf-8").split())
    assert (
        f"stopped at {pong[0]} of Pong, at {pong[1]}, and at {breakout[0]} of Breakout, at {breakout[1]}."
        in page
    )
    assert (
        f"ends at {one_pass[1]} on Breakout, and had learned nothing on Pong when it was stopped at" in page
    )
    assert f"at {one_pass_pong[0]} ([more]" in page
    assert result.at(result.reached).mean() < compare.random_returns()[row.task] + 0.5


def until(path, millions):
    """Means of the last 100 games until each of these steps that the run has reached."""
    step, returns = np.array([[float(x[key]) for key in ("step", "return")] for x in read_csv(path)]).T
    return [returns[step <= k * 1e6][-100:].mean() for k in millions if 0.99e6 * k < step[-1]]


def test_half_a_million_steps_of_breakout():
    """Table and sentences of docs/atari.md: our scripts and CleanRL's, run here, and the published curves."""
    page = (ROOT / "docs/atari.md").read_text(encoding="utf-8")
    lines, ends, over_1000, behind, game = [], {}, {}, [], "BreakoutNoFrameskip-v4"
    for script, suite in (("ppo_atari", "atari"), ("ppo_lstm", "atari_lstm")):
        own, theirs = f"{game}__{script}", f"{game}__{compare.CLEANRL[script]}"
        cut = "atari_cut" if script == "ppo_atari" else suite
        played = {
            "ours, seed 1": csv_path(RESULTS / cut, f"{own}__1"),
            "ours, seed 2": csv_path(RESULTS / cut, f"{own}__2"),
            "ours, seed 3": csv_path(RESULTS / suite, f"{own}__3"),
            "ours, seed 2, one thread": RESULTS / f"atari_start/{own}__2.csv.gz",
            "CleanRL's, here, seed 1": csv_path(compare.PUBLISHED / "cleanrl", f"{theirs}__1"),
            "CleanRL's, here, seed 2": csv_path(compare.PUBLISHED / "cleanrl", f"{theirs}__2"),
        }
        means = {}
        for who, path in played.items():
            if path.exists():
                step, returns = np.array([(float(x["step"]), float(x["return"])) for x in read_csv(path)]).T
                assert step[-1] > 499_000
                means[who] = [returns[step <= k * 1e5][-100:].mean() for k in (1, 2, 3, 4, 5)]
                over_1000[script, who] = returns[step <= 5e5][-1000:].mean()
        (row,) = (row for row in SUITES[suite] if row.task == game)
        for target in (x for x in row.targets if x.curve):
            published = (compare.published(target, k * 1e5, is_end=False) for k in (1, 2, 3, 4, 5))
            means[target.by] = [x.mean for x in published]
        for who, values in means.items():
            lines.append(f"| `{script}` | {who} | {' | '.join(f'{x:.1f}' for x in values)} |")
            ends.setdefault(script, []).append(values[-1])
            if "seed" in who:  # from 0.2M on, each is above every curve, but for one at the end
                curves = [x for name, x in means.items() if "seed" not in name]
                assert all(values[k] > curve[k] for curve in curves for k in (1, 2, 3))
                behind += [(script, who)] * any(values[4] <= curve[4] for curve in curves)
    assert behind == [("ppo_atari", "ours, seed 2")]
    results = (ROOT / "benchmark/RESULTS.md").read_text(encoding="utf-8")
    for text in (page, results):
        words = "above the published (ones|curves) from 0.2M to 0.4M steps, and all but one at 0.5M"
        assert re.search(words, " ".join(text.split()))
    shown = page.partition("<!-- early -->")[2].partition("<!-- end of early -->")[0].strip().splitlines()
    assert shown[0] == "| script | whose | at 0.1M | at 0.2M | at 0.3M | at 0.4M | at 0.5M |"
    assert shown[2:] == lines
    page = " ".join(page.split())
    atari, lstm = ([f"{x:.1f}" for x in ends[script]] for script in ends)
    said = "the four runs of `ppo_atari.py` have {}, {}, {} and {}, and those of CleanRL's {} and {}, where"
    said = f"{said.format(*atari[:6])} the published curves have {min(atari[6:])} to {max(atari[6:])}; the"
    assert said in page
    said = "; the one of `ppo_lstm.py` {}, and CleanRL's {} and {}, where they have {} to {}."
    assert said.format(*lstm) in page
    longer = [f"{x:.1f}" for (script, _), x in over_1000.items() if script == "ppo_atari"]
    said = (
        "Over the last 1,000 games until 0.5M, ours have {}, {}, {} and {}, CleanRL's {} and {}, about what"
    )
    assert (
        f"{said.format(*longer)} the two curves that end at {atari[6]} have." in page and atari[6] == atari[7]
    )
    runs = {run["run"]: run for run in rows(compare.PUBLISHED / "cleanrl/runs.csv")}
    hours = [f"{int(runs[f'{game}__ppo_atari__{k}']['seconds']) / 3600:.1f}" for k in (2, 1)]
    assert f"`ppo_atari.py` took {' and '.join(hours)} hours for half a million steps on Breakout," in page


def test_two_seeds_of_pong():
    """Table and sentences of docs/atari.md: both of our seeds, and the published curves."""
    text, game = (ROOT / "docs/atari.md").read_text(encoding="utf-8"), "PongNoFrameskip-v4"
    means, spreads, millions = {}, [], (0.4, 0.6, 0.8, 1.0, 1.1)
    for seed, suite in ((1, "atari"), (2, "atari_start")):
        means[f"ours, seed {seed}"] = until(csv_path(RESULTS / suite, f"{game}__ppo_atari__{seed}"), millions)
    (row,) = (row for row in SUITES["atari"] if row.task == game)
    for target in (x for x in row.targets if x.curve):
        found = [compare.published(target, k * 1e6, is_end=False) for k in millions]
        means[f"{target.by}, {found[0].runs} runs"] = [x.mean for x in found]
        spreads += [f"{found[3].deviation:.1f}"] if found[3].runs == 3 else []
    lines = [f"| {who} | {' | '.join(f'{x:.1f}' for x in values)} |" for who, values in means.items()]
    shown = text.partition("<!-- pong -->")[2].partition("<!-- end of pong -->")[0].strip().splitlines()
    assert shown[0] == f"| whose | {' | '.join(f'at {k}M' for k in millions)} |"
    assert shown[2:] == [line.replace("-", "−") for line in lines]
    first, second, *published = (f"{values[3]:.1f}".replace("-", "−") for values in means.values())
    said = f"At 1M, our two seeds have {first} and {second}, and the published means of three and six runs "
    said += f"{published[0]}, {published[1]} and {published[2]}."
    page = " ".join(text.split())
    assert said in page and f"deviations of the first two are {' and '.join(spreads)}." in page


def test_pong_on_a_slow_cpu():
    """docs/atari.md: the rate of seed 2 of ppo_atari.py, and the hours that follow from it."""
    name = "PongNoFrameskip-v4__ppo_atari__2"
    page = " ".join((ROOT / "docs/atari.md").read_text(encoding="utf-8").split())
    run = read_table(RESULTS / "atari_start/runs.csv")[name]
    assert (run["machine"], run["threads"], run["schedule"]) == ("2 x AMD EPYC", "2", "10000000")
    episodes = read_csv(csv_path(RESULTS / "atari_start", name))
    step, seconds = np.array([[float(x[key]) for key in ("step", "seconds")] for x in episodes]).T
    later = step > 0.85e6  # when nothing else ran
    rate = (step[later][-1] - step[later][0]) / (seconds[later][-1] - seconds[later][0])
    assert f"made {rate:.0f} steps/s with both cores" in page
    assert f"so 10M steps would take {1e7 / rate / 3600:.0f} hours." in page


def test_a_long_run_of_ppo_atari():
    """docs/atari.md: memory, rate, sizes and an evaluation of seed 2 on Breakout."""
    page = " ".join((ROOT / "docs/atari.md").read_text(encoding="utf-8").split())
    tables = (read_csv(RESULTS / name) for name in ("speed/long_runs.csv", "evaluated.csv"))
    rows, (evaluated,) = (
        [x for x in table if (x["script"], x["flags"], x["seed"]) == ("ppo_atari", "", "2")]
        for table in tables
    )
    for row in (*rows, evaluated):
        assert (row["env_id"], row["seed"]) == ("BreakoutNoFrameskip-v4", "2")
    memory = [float(x[key]) for x in rows for key in ("resident_mb_min", "resident_mb_max")]
    rates = sorted(int(x["steps_per_s"]) for x in rows)
    assert len(rows) >= 6 and all(int(x["from_step"]) < int(x["to_step"]) for x in rows)
    said = f"From {int(rows[0]['from_step']) / 1e6:.1f}M steps on, `ppo_atari.py` kept {min(memory):.0f} to"
    said += f" {max(memory):.0f} MB on Breakout, and each ten minutes had {rates[0]} to {rates[-1]} steps/s."
    said += (
        f" After {int(evaluated['step']) / 1e6:.2f}M steps, its checkpoint has {evaluated['checkpoint_mb']}"
    )
    said += f" MB and TensorBoard's events {evaluated['events_mb']}; over {evaluated['games']} games,"
    said += f" `--evaluate` gives {float(evaluated['mean']):.1f} ± {float(evaluated['std']):.1f}."
    assert said in page


def test_breakout_to_the_end():
    """Table and sentences of docs/atari.md: seed 3, the run with --amp, both cut ones, what was published."""
    text, game = (ROOT / "docs/atari.md").read_text(encoding="utf-8"), "BreakoutNoFrameskip-v4"
    page, millions = " ".join(text.split()), (1, 2, 3, 3.5, 4, 6, 8, 10)
    name, amp = f"{game}__ppo_atari__3", f"{game}__ppo_atari__amp__1"
    runs = read_table(RESULTS / "atari/runs.csv")[name], read_table(RESULTS / "atari_amp/runs.csv")[amp]
    for run in runs:
        assert (run["steps"], run["schedule"], run["threads"]) == ("10000000", "10000000", "2")
    played = {"ours, seed 3": csv_path(RESULTS / "atari", name)}
    played |= {f"ours, seed {k}": csv_path(RESULTS / "atari_cut", f"{name[:-1]}{k}") for k in (1, 2)}
    played["with `--amp`"] = csv_path(RESULTS / "atari_amp", amp)
    means = {who: until(path, millions) for who, path in played.items()}
    (row,), spreads = SUITES["atari_amp"], []
    for target in (x for x in row.targets if x.curve):
        beside = [compare.published(target, k * 1e6, is_end=False) for k in millions]
        means[f"{target.by}, {beside[0].runs} runs"] = [x.mean for x in beside]
        spreads += [f"{beside[3].deviation:.1f}"] if beside[3].runs == 3 else []
    lines = [
        f"| {who} | {' | '.join([f'{x:.1f}' for x in values] + [''] * (len(millions) - len(values)))} |"
        for who, values in means.items()
    ]
    shown = text.partition("<!-- breakout -->")[2].partition("<!-- end of breakout -->")[0].strip()
    assert shown.splitlines()[0] == f"| whose | {' | '.join(f'at {k}M' for k in millions)} |"
    assert shown.splitlines()[2:] == lines
    cleanrl, *baselines = (x for x in row.targets if x.mean is not None and not x.curve)
    assert (cleanrl.by, *(x.by for x in baselines)) == ("CleanRL", "openai/baselines", "openai/baselines")
    both = " and ".join(compare.number(x.mean) for x in baselines)
    peers = f"where CleanRL published {compare.number(cleanrl.mean)} and openai/baselines has {both}"
    plain, bfloat = found("atari", game), found("atari_amp", game, "bfloat16")
    assert [*plain.seeds] == [3] and not plain.is_cut
    ends = [compare.number(x.at(x.reached).mean()) for x in (plain, bfloat)]
    hours = [f"{int(run['seconds']) / 3600:.1f}" for run in runs]
    rows = [x for x in read_csv(RESULTS / "evaluated.csv") if x["script"] == "ppo_atari"]
    evaluated, of_amp = (x for x in rows if int(x["step"]) > 0.999e7)
    assert (evaluated["seed"], evaluated["flags"], of_amp["flags"]) == ("3", "", "--amp")
    at_3_5 = [f"{x[3]:.1f}" for x in means.values()]
    for said in (
        f"Seed 3 was played to the end, in {hours[0]} hours, and seed 1 with `--amp`, in {hours[1]},",
        f"They have {ends[0]} and {ends[1]}, {peers}, each the mean of three runs.",
        f"means are (ratio {compare.first_ratio(plain.row, plain).interval[0]:.2f} to CleanRL's);",
        f"`--evaluate` gives {float(evaluated['mean']):.1f} ± {float(evaluated['std']):.1f} after seed 3 and"
        f" {float(of_amp['mean']):.1f} ± {float(of_amp['std']):.1f} after the run with `--amp`",
        f"a checkpoint has {evaluated['checkpoint_mb']} MB, TensorBoard's events {evaluated['events_mb']}"
        f" and {of_amp['events_mb']}.",
        f"At 3.5M, our three seeds have {at_3_5[0]}, {at_3_5[1]} and {at_3_5[2]}, and the published means of "
        f"three and six runs {at_3_5[4]}, {at_3_5[5]} and {at_3_5[6]}; the deviations of the first two are "
        f"{' and '.join(spreads)}.",
    ):
        assert said in page, said
    assert evaluated["checkpoint_mb"] == of_amp["checkpoint_mb"]
    results = " ".join((ROOT / "benchmark/RESULTS.md").read_text(encoding="utf-8").split())
    said = f"one seed of `ppo_atari` with the defaults has {ends[0]} and one with `--amp` {ends[1]}, {peers}"
    assert said in results
    assert f"Breakout {ends[1]}. [IMPALA]" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_amp_on_a_cpu_with_bfloat16():
    """docs/atari.md: the rates of the short runs with and without --amp, of both scripts."""
    page = " ".join((ROOT / "docs/atari.md").read_text(encoding="utf-8").split())
    rates = {(x["script"], x["flags"]): int(x["steps_per_s"]) for x in read_csv(RESULTS / "speed/amp.csv")}
    for script in ("ppo_atari", "ppo_lstm"):
        plain, amp = rates[script, ""], rates[script, "--amp"]
        assert f"`{script}.py` {amp / plain:.2f} times as many ({amp} and {plain})" in page


def test_hours_to_a_score():
    """The table of docs/atari.md has what the CSVs say, for every run and every score that it has reached."""
    page, lines = (ROOT / "docs/atari.md").read_text(encoding="utf-8"), []
    suites = dict(atari_amp="ppo_atari", atari_cut="ppo_atari", atari="ppo_atari")
    suites |= dict(off_policy_ppo="ppo_async", atari_lstm="ppo_lstm", impala="impala_vtrace")
    for suite, script in suites.items():
        table = read_table(RESULTS / suite / "runs.csv")
        for game, scores in (("Breakout", (50, 200, 300)), ("Pong", (0, 15, 18))):
            for name in sorted(x for x in table if x.startswith(f"{game}NoFrameskip-v4__{script}__")):
                episodes = read_csv(csv_path(RESULTS / suite, name))
                step, seconds, returns = (
                    np.array([float(x[key]) for x in episodes]) for key in ("step", "seconds", "return")
                )
                means = means_of_100(returns)
                for score in scores:
                    if (means >= score).any():
                        how = ", one pass" * (ONE_PASS in name) + ", `--amp`" * (suite == "atari_amp")
                        k = np.argmax(means >= score) + 99
                        cells = (table[name]["seed"], score, f"{step[k] / 1e6:.2f}M")
                        cells += (f"{seconds[k] / 3600:.1f}", table[name]["threads"])
                        lines.append(f"| `{script}`{how} | {game} | {' | '.join(map(str, cells))} |")
    hours = {
        game: int(table[f"{game}NoFrameskip-v4__impala_vtrace__2"]["seconds"]) / 3600
        for game in ("Pong", "Breakout")
    }
    assert (
        f"10M steps took {hours['Pong']:.1f} hours on Pong and {hours['Breakout']:.1f} on Breakout." in page
    )
    shown = page.partition("<!-- hours -->")[2].partition("<!-- end of hours -->")[0].strip().splitlines()
    assert shown[0] == "| script | game | seed | score | steps | hours | PyTorch's threads |"
    assert shown[2:] == lines


def test_a_run_that_was_run_again_is_the_same():
    """METHODS.md: by a later build, in each episode."""
    name = "BreakoutNoFrameskip-v4__ppo_atari__1"
    first, again = (read_csv(csv_path(RESULTS / suite, name)) for suite in ("atari_cut", "atari_again"))
    for x, y in zip(first, again, strict=False):
        assert [x[key] for key in ("step", "return", "length")] == [
            y[key] for key in ("step", "return", "length")
        ]
    rows = [read_table(RESULTS / suite / "runs.csv")[name] for suite in ("atari_cut", "atari_again")]
    assert rows[0]["fingerprint"] != rows[1]["fingerprint"] and rows[0]["commit"] != rows[1]["commit"]
    assert rows[0]["machine"] == rows[1]["machine"] and "Intel(R) Xeon" in rows[0]["machine"]
    begun = [datetime.fromisoformat(row["started"].split(" | ")[0]).date() for row in rows]
    assert (begun[1] - begun[0]).days == 5
    page = " ".join((ROOT / "benchmark/METHODS.md").read_text(encoding="utf-8").split())
    assert f"in {int(rows[1]['steps']) / 1e6:.2f}M steps, all {len(again):,} episodes have the step" in page
    then = float(first[len(again) - 1]["seconds"]) / 3600
    hours = f"{float(again[-1]['seconds']) / 3600:.1f} hours where the first run had taken {then:.1f}, with"
    assert hours in page


def test_one_seed_with_two_numbers_of_threads():
    """METHODS.md and RESULTS.md: both runs of BeamRider, of which the longer one is the row."""
    name, ran = "BeamRiderNoFrameskip-v4__ppo_atari__1", []
    for suite in ("atari", "atari_again"):
        row = read_table(RESULTS / suite / "runs.csv")[name]
        episodes = read_csv(csv_path(RESULTS / suite, name))
        before = [float(x["return"]) for x in episodes if int(x["step"]) <= 2_000_000]
        played = [(x["step"], x["return"], x["length"]) for x in episodes]
        ran.append((row, played, compare.number(np.mean(before[-100:]))))
    (row, played, mean), (other, others, mean_of_other) = ran
    assert (row["threads"], other["threads"]) == ("2", "1") and row["machine"] == other["machine"]
    assert int(row["steps"]) == 2_400_000 > int(other["steps"]) == 2_000_000
    assert [x == y for x, y in zip(played, others, strict=False)].index(False) == 7
    beam = found("atari", "BeamRiderNoFrameskip-v4")
    end = compare.number(beam.at(beam.reached).mean())
    beside = {x.by: compare.number(x.mean) for x in compare.published_beside(beam.row, beam)}
    both = f"{beside['the blog']} and {beside['openai/baselines']}"
    methods, results = (
        " ".join((ROOT / f"benchmark/{page}.md").read_text(encoding="utf-8").split())
        for page in ("METHODS", "RESULTS")
    )
    said = f"with two threads, which has {mean} at 2M, where the one with one thread had {mean_of_other} and"
    assert (
        said in methods and f"the row's {end} at 2.41M is about as far below the {both} beside it" in methods
    )
    assert (
        f"On BeamRider the published curves are ahead ({both}, ours {end}), by about as much as two"
        in results
    )
    apart, of_2018 = abs(float(mean) - float(mean_of_other)), beside["openai/baselines 2018"]
    assert all(0.85 < (float(x) - float(end)) / apart < 1.15 for x in both.split(" and "))
    assert f"and the one of 2018 ({of_2018}) by twice as much." in results
    assert 1.85 < (float(of_2018) - float(end)) / apart < 2.15


def test_hours_that_are_missing():
    """The table of docs/atari.md has each game that is short of its schedule, and its hours by runs.csv."""
    page, lines = (ROOT / "docs/atari.md").read_text(encoding="utf-8"), []
    planned = {
        ("atari", "ppo_atari"): dict(Breakout=3, Pong=2, BeamRider=2),
        ("atari_lstm", "ppo_lstm"): dict(Breakout=1, Pong=1),
        ("off_policy_ppo", "ppo_async"): dict(Breakout=1, Pong=1),
        ("impala", "impala_vtrace"): dict(Breakout=2, Pong=2),
    }
    for (suite, script), games in planned.items():
        kept = [suite] + ["atari_cut"] * (suite == "atari")
        table = [x for name in kept for x in read_csv(RESULTS / name / "runs.csv")]
        # of the defaults, which have no flags
        table = [x for x in table if x["run"] == f"{x['env_id']}__{script}__{x['seed']}"]
        threads = min(x["threads"] for x in table)
        cpu = "AMD EPYC" if script in ("ppo_async", "impala_vtrace") else "Intel"
        assert all(cpu in x["machine"] for x in table if x["threads"] == threads)
        rates = [int(x["seconds"]) / int(x["steps"]) for x in table if x["threads"] == threads]
        hours = 10e6 * np.mean(rates) / 3600 / (2 if threads == "1" else 1)  # of both cores, for one run
        for game, seeds in games.items():
            reached = [int(x["steps"]) for x in table if x["env_id"] == f"{game}NoFrameskip-v4"]
            if left := seeds - reached.count(10_000_000):
                cut = ", ".join(f"{steps / 1e6:.2g}M" for steps in reached if steps < 10e6) or "*not run*"
                lines.append(f"| `{script}` | {game} | {cut} | {left} | {left * hours:.1f} |")
    shown = page.partition("<!-- missing -->")[2].partition("<!-- end of missing -->")[0].strip().splitlines()
    assert shown[0] == "| script | game | reached | runs to 10M that are missing | hours of both cores |"
    assert shown[2:] == lines
    rows = read_csv(RESULTS / "speed/ngu_montezuma.csv")
    rates = [float(x["steps_per_s"]) for x in rows]
    seconds = " and ".join(
        f"{(int(x['to_step']) - int(x['from_step'])) / rate:.0f}" for x, rate in zip(rows, rates, strict=True)
    )
    hours = " and ".join(f"{2e6 / rate / 3600:.1f}" for rate in rates)
    page = " ".join(page.split())
    said = f"it makes {rates[0]} steps/s once it learns and R2D2 {rates[1]}, by the last {seconds} seconds of"
    assert said in page and f"2M steps would take {hours} hours." in page


def test_writing_one_table_leaves_the_others(monkeypatch):
    monkeypatch.setattr(compare, "TABLES", Path("TABLES.md"))
    monkeypatch.setattr(compare, "SUMMARY", ())
    monkeypatch.setattr(compare, "RESULTS", Path("results").resolve())
    page = "a\n<!-- classic -->\nold\n<!-- end of classic -->\nb\n<!-- ngu -->\nkept\n<!-- end of ngu -->\n"
    compare.TABLES.write_text(page, encoding="utf-8")
    Path("results").mkdir()
    for flags in ([], ["--write"]):
        assert compare.TABLES.read_text(encoding="utf-8") == page
        monkeypatch.setattr(sys, "argv", ["compare.py", "classic", "--results", "results", *flags])
        with pytest.raises(SystemExit):
            compare.main()
    text = compare.TABLES.read_text(encoding="utf-8")
    assert "| ppo | CartPole-v1 |" in text and "old" not in text
    assert text.startswith("a\n<!-- classic -->\n| script |") and text.endswith(page[page.index("\nb") :])


def test_staleness_table_of_the_page():
    """The table of docs/async.md is the one that staleness.py prints; without --write, it writes nothing."""
    shutil.copytree(RESULTS / "staleness", "staleness")
    figure = Path("staleness/staleness_and_reuse.png")
    before = figure.read_bytes()
    figure.unlink()
    tool = [sys.executable, ROOT / "benchmark/studies/staleness.py", "--results", "."]
    table = in_this_process(tool).stdout.strip()
    page = (ROOT / "docs/async.md").read_text(encoding="utf-8")
    assert len(table.splitlines()) == 2 + 15 and f"<!-- staleness -->\n{table}\n<!-- end of" in page
    assert not figure.exists()
    in_this_process([*tool, "--write"])
    assert figure.read_bytes() == before and page == (ROOT / "docs/async.md").read_text(encoding="utf-8")


def test_never_give_up_of_the_page():
    """The table of docs/ngu.md has the numbers of the CSVs."""
    page, said = (ROOT / "docs/ngu.md").read_text(encoding="utf-8"), 0
    for row in SUITES["ngu"]:
        if ours := compare.load("ngu", row, compare.Args()):
            mean, std = ours.at(ours.reached).mean(), ours.at(ours.reached).std(ddof=1)
            first = [f"{step / 1000:.0f}k" if np.isfinite(step) else "never" for step in ours.first(0.5)]
            task = row.task.removeprefix("MiniGrid-").rpartition("-")[0]
            cells = (task, row.label, f"{compare.number(mean)} ± {compare.number(std)}", ", ".join(first))
            assert f"| {' | '.join(cells)} |" in page
            said += 1
    assert said == page.count(" ± ") > 0


def newest_speeds():
    """The newest row of speed.csv by script and flags."""
    with open(RESULTS / "speed/speed.csv", encoding="utf-8") as file:
        return {(row["script"], row["flags"]): row for row in csv.DictReader(file)}


UNITS = {"s": 1, "min": 60, "h": 3600}


def test_scripts_of_the_readme():
    """A default run's duration is that of its steps at the measured speed."""
    readme, newest = (ROOT / "README.md").read_text(encoding="utf-8"), newest_speeds()
    rows = re.findall(r"^\| `(\w+)\.py` \|.*, ([\d.]+) (s|min|h) \|", readme, re.MULTILINE)
    assert {name for name, *_ in rows} == SCRIPTS.keys() | OTHERS.keys()
    for name, number, unit in rows:
        if row := newest.get((f"{name}.py", "")):
            seconds = (SCRIPTS | OTHERS)[name].Args().total_timesteps / float(row["steps_per_s"])
            assert float(number) == pytest.approx(seconds / UNITS[unit], rel=0.05), name


def test_speeds_of_the_readme():
    newest, readme = newest_speeds(), (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| \S+ \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", readme, re.MULTILINE)
    assert len(rows) == 3
    for name, speed, *ratios in rows:
        row = newest[f"{name}.py", ""]
        assert speed == row["steps_per_s"]
        assert ratios == [f"{float(row[x]):.1f}" for x in ("sb3_ratio", "ratio")], name


def test_speeds_of_the_page():
    """Every row is the newest one of speed.csv, and none of them is left out."""
    newest, page = newest_speeds(), (ROOT / "benchmark/SPEED.md").read_text(encoding="utf-8")
    kinds = (
        ("steps_per_s", "sb3_steps_per_s", "plain_steps_per_s"),
        ("peak_mb", "sb3_peak_mb", "plain_peak_mb"),
    )
    rows = re.findall(r"^\| (\w+) \| (\S+) \| (\S*) ?\| (.*) \| (\S*) ?\| (.*) \|$", page, re.MULTILINE)
    assert {(f"{name}.py", flags) for name, _, flags, *_ in rows} == newest.keys()
    for name, task, flags, speeds, ratio, memory in rows:
        row = newest[f"{name}.py", flags]
        figures = [" / ".join(row[x] for x in kind if row[x]) for kind in kinds]
        assert [task, ratio] == [row["env_id"], row["ratio"]] and [speeds, memory] == figures, name


def test_traffic_of_the_page():
    """docs/distributed.md has what traffic.csv has, for every script."""
    page = (ROOT / "docs/distributed.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| `(\w+)\.py`.* \| ([\d,]+) \| (\d+) \|$", page, re.MULTILINE)
    measured = {row["script"]: row for row in rows(RESULTS / "speed/traffic.csv")}
    assert {name for name, *_ in found} == measured.keys() == SCRIPTS.keys() | OTHERS.keys()
    for name, num_bytes, steps in found:
        assert num_bytes.replace(",", "") == measured[name]["bytes_a_step"]
        assert int(steps) == round(1 / float(measured[name]["calls_a_step"])), name


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


def test_disco_counts_the_cells_of_agents_and_walks(monkeypatch):
    args = ngu_r2d2.Args(env_id="benchmark.studies.maze:RandomDiscoMaze-v0", num_envs=4, total_timesteps=400)
    args = replace(args, num_policies=1, rnd=False, burn_in=0, unroll=8, period=8, learning_starts=64)
    args = replace(args, train_embedding=False, batch_sequences=2, hidden_size=16, device="cpu")
    monkeypatch.setattr(ngu_r2d2, "encoder", exploration.map_encoder)
    run_dir = ngu_r2d2.train(args)
    program = [sys.executable, ROOT / "benchmark/studies/exploration.py", "--csv", "maze.csv", "--episodes"]
    subprocess.run([*program, "20", run_dir], check=True, capture_output=True, timeout=600)
    subprocess.run([*program, "5"], check=True, capture_output=True, timeout=600)
    agent, careful, uniform = rows("maze.csv")
    assert agent["embedding"] == "untrained" and int(agent["steps"]) == 400
    assert int(agent["episodes"]) == 32  # for 20 of them, two in each of 16 environments
    assert 1 <= float(agent["cells_mean"]) <= float(agent["length_mean"]) + 1
    assert float(careful["length_mean"]) == 500 and float(careful["cells_mean"]) > 10
    assert float(uniform["length_mean"]) < 5 and float(uniform["cells_mean"]) < 5


def test_engines_of_the_page():
    """On MuJoCo 4.0 the tasks that METHODS.md names are those of 2.3.7 to rounding, the others are not."""
    sums = {}
    for row in read_csv(RESULTS / "controls/mujoco_versions.csv"):
        step = sums.setdefault(row["task"], {}).setdefault(row["step"], {})
        step[row["mujoco"]] = np.array([float(row["sum"]), float(row["largest"])])
    apart = {
        (task, version): max(abs(step[version] - step["2.3.7"]).max() for step in steps.values())
        for task, steps in sums.items()
        for version in ("3.4.0", "3.5.0", "4.0.0")
    }
    others = {task for (task, version), x in apart.items() if version == "4.0.0" and x > 1e-8}
    assert others == {"Hopper-v4", "Humanoid-v4", "Ant-v4"} and len(sums) == 9
    assert apart["Hopper-v4", "3.4.0"] < 1e-12 < 1e-2 < apart["Hopper-v4", "3.5.0"]


def test_bins_beside_gaussians():
    """docs/continuous.md has the ratio of each task that was run in 11 bins to the same with Gaussians."""
    page = " ".join((ROOT / "docs/continuous.md").read_text(encoding="utf-8").split())
    rows = [line.split(" | ") for line in compare.controls(load_all()).splitlines() if "in 11 bins" in line]
    said = [f"{task} {ratio.rstrip(' |')}" for _, task, _, _, ratio in rows]
    assert rows and f"the returns of five seeds by those of ten with Gaussians: {', '.join(said)}." in page


def test_tasks_that_version_5_left_as_they_were():
    """METHODS.md names those whose runs are equal, episode for episode, and no other is."""
    runs, same = read_table(RESULTS / "mujoco_v5/runs.csv"), {}
    for name, run in runs.items():
        old, new = (
            [(row["step"], float(row["return"])) for row in read_csv(csv_path(folder, x))]
            for folder, x in ((RESULTS / "mujoco", name.replace("-v5", "-v4")), (RESULTS / "mujoco_v5", name))
        )
        same.setdefault(run["env_id"].removesuffix("-v5"), []).append(old == new)
    equal, equal_in_part = ({task for task, seeds in same.items() if f(seeds)} for f in (all, any))
    assert len(runs) == 40 and equal == equal_in_part == {"HalfCheetah", "Swimmer"}
    plain = {row.task: result for row, result in load_all()["mujoco"] if not row.flags}
    for row, result in load_all()["mujoco_v5"]:
        ours = plain[row.task.replace("-v5", "-v4")]
        mean = result.at(result.reached).mean()
        assert abs(mean - ours.at(ours.reached).mean()) < ours.at(ours.reached).std(ddof=1), row.task
    pages = (compare.METHODS, ROOT / "benchmark/RESULTS.md")
    methods, results = (" ".join(page.read_text(encoding="utf-8").split()) for page in pages)
    assert "HalfCheetah and Swimmer are the same tasks in both: five seeds are equal, episode for" in methods
    said = "On version 5 of each of the eight tasks, whose rewards are partly others, five seeds have a mean"
    assert f"{said} within one deviation of version 4's runs" in results


def test_controls_of_the_page():
    """METHODS.md has mean, deviation and number of the runs of each control, at the last step of all."""
    page, runs = compare.METHODS.read_text(encoding="utf-8"), {}
    folders = {RESULTS / "controls" / name / "mujoco": change for name, change in compare.CONTROLS.items()}
    folders |= {RESULTS / suite: change for suite, change in compare.CHANGED.items()}
    for folder, change in folders.items():
        for name, run in read_table(folder / "runs.csv").items():
            line = f"| {change} | {run['env_id'].rpartition('-')[0]} | "
            episodes = [(int(row["step"]), float(row["return"])) for row in read_csv(csv_path(folder, name))]
            runs.setdefault(line, []).append(episodes)
    assert len({line.split("|")[1] for line in runs}) == 7
    normalizers = [line for line in page.splitlines() if line.startswith("| gymnasium's normalizers | ")]
    assert "All three are open, so there is no flag" in page
    assert len(normalizers) == 3 and all(line.endswith("] open |") for line in normalizers)
    for line, seeds in runs.items():
        last = min(episodes[-1][0] for episodes in seeds)
        scores = [np.mean([x for step, x in episodes if step <= last][-100:]) for episodes in seeds]
        mean, std = compare.number(np.mean(scores)), compare.number(np.std(scores, ddof=1))
        assert f"{line}{mean} ± {std} ({len(scores)}) | " in page
    for folder in (*folders, RESULTS / "mujoco"):
        assert all(f"`{run['commit'][:7]}`" in page for run in read_table(folder / "runs.csv").values()), (
            folder
        )
    plain, ratios = load_all()["mujoco"], []
    for row, result in plain:
        if first := compare.load("mujoco", row, compare.Args(results=RESULTS / "controls/first_build")):
            both = (compare.runs_of("", "", x.at(x.reached)) for x in (first, result))
            ratios.append(compare.ratio(*both, compare.random_returns()[row.task]))
    better = sum(x.log > 0 for x in ratios)
    said = f"{'zero one two three four five six seven'.split()[better]} of seven tasks, by a joint ratio of "
    assert len(ratios) == 7 and said + compare.said(compare.joint(ratios)) in " ".join(page.split())
    swimmer, result = next(x for x in plain if x[0].task == "Swimmer-v4")
    folders = ("first_build", "first_build_again")
    before, again = (
        compare.load("mujoco", swimmer, compare.Args(results=RESULTS / f"controls/{x}")) for x in folders
    )
    assert (
        (before.at(1e6) > 100).all()
        and (again.at(1e6)[:3] > 100).sum() == 1
        and [*again.seeds][:3] == [1, 2, 3]
    )
    by_before, by_again = (
        compare.ratio(
            *(compare.runs_of("", "", x.at(x.reached)) for x in (runs, result)),
            compare.random_returns()["Swimmer-v4"],
        )
        for runs in (before, again)
    )
    ratios[ratios.index(by_before)] = by_again
    assert f"the joint ratio is {compare.said(compare.joint(ratios))}." in " ".join(page.split())
    table = compare.controls(load_all())
    assert f"<!-- controls -->\n{table}\n<!-- end of controls -->" in page
