"""The benchmark's tools at their edges: bad input, missing programs, broken tables, what is left running."""

import csv
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmark import compare, human, on_ray, report, run, watch
from benchmark.files import python_path, write_file
from benchmark.run import COLUMNS, Args, Mistake, Run, build
from benchmark.speed import speed
from benchmark.studies import soak
from benchmark.suites import SUITES, Row
from benchmark.verdict import Ratio

ROOT = Path(__file__).parent.parent
HEAD = "step,seconds,return,length\n"


def tool(name, *words, monkeypatch, capsys):
    """Exit code, and what a tool printed."""
    path = ROOT / f"benchmark/{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *map(str, words)])
    monkeypatch.syspath_prepend(path.parent)
    capsys.readouterr()
    try:
        runpy.run_path(str(path), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code or 0
    return code, *capsys.readouterr()


# === What a tool is given ====================================================================


@pytest.mark.parametrize(
    "name, words, said",
    [
        ("studies/lockstep", "cleanrl --scripts ppo.py", "no script ppo.py; there are ppo, ppo_shared"),
        ("studies/cleanrl", "cleanrl --scripts ppo --tasks A --stop-at 0", "--stop-at cannot be 0"),
        (
            "studies/cleanrl",
            "cleanrl --scripts ppo --tasks A --total-timesteps 0",
            "--total-timesteps cannot",
        ),
        ("studies/cleanrl", "cleanrl --scripts ppo --tasks A --workers 0", "--workers cannot be 0"),
        ("studies/exploration", "--episodes 0", "--episodes cannot be 0"),
        ("studies/ceiling", "--rounds 0", "--rounds cannot be 0"),
        ("studies/python_lock", "--steps 0", "--steps cannot be 0"),
        ("speed/plain_ppo", "", "give a task and steps, such as CartPole-v1 50000"),
        ("speed/plain_ppo", "CartPole-v1 many", "give a task and steps"),
        ("speed/plain_ppo", "CartPole-v1 600", "the steps must be 1024 or more"),
        ("speed/sb3_ppo", "ppo --total-timesteps 512", "two iterations or more"),
    ],
)
def test_mistakes(name, words, said, monkeypatch, capsys):
    Path("cleanrl").mkdir()
    Path("cleanrl/ppo.py").touch()
    code, out, err = tool(name, *words.split(), monkeypatch=monkeypatch, capsys=capsys)
    script = Path(name).name
    assert (code, out) == (2, "") and err.startswith(f"{script}.py: error: {said}") and err.count("\n") == 1
    assert sorted(os.listdir()) == ["cleanrl"]


def test_gpu_sh_knows_its_parts():
    """A part is no command of the shell: sync, for syncs, would flush all disks and pass."""
    done = subprocess.run(["bash", ROOT / "benchmark/gpu.sh", "sync"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gpu.sh: error: no part sync; there are eager compiled")
    parts = done.stderr.partition("there are ")[2].split()
    content = (ROOT / "benchmark/gpu.sh").read_text(encoding="utf-8")
    assert parts and all(f"\n{part}() {{" in content for part in parts)


@pytest.mark.parametrize("fails, said", [("trains_resumes", " eager"), ("", None)])
def test_gpu_sh_fails_where_a_part_does(fails, said, monkeypatch):
    """And goes on with the next one; programs that stand for Python and nvidia-smi are first in PATH."""
    for path, code in (("bin/nvidia-smi", ""), ("bin/python", f'[[ -z "{fails}" || "$*" != *"{fails}"* ]]')):
        Path("bin").mkdir(exist_ok=True)
        Path(path).write_text(f"#!/bin/bash\n{code}\n", encoding="utf-8")
        Path(path).chmod(0o755)
    Path("benchmark").mkdir()
    shutil.copy(ROOT / "benchmark/gpu.sh", "benchmark")
    monkeypatch.setenv("PATH", f"{Path.cwd() / 'bin'}{os.pathsep}{os.environ['PATH']}")
    done = subprocess.run(["bash", "benchmark/gpu.sh", "eager", "graphs"], capture_output=True, text=True)
    lines = ["== eager", "== graphs"] + ([f"failed or stopped:{said}"] if said else [])
    assert done.stdout.splitlines() == lines and done.returncode == (1 if said else 0)


def test_programs_that_are_started_find_the_users_packages(monkeypatch):
    """Where PYTHONPATH says, as modules of a cluster do; before it, where the tool needs."""
    monkeypatch.setenv("PYTHONPATH", "theirs")
    assert python_path(Path("ours")) == f"ours{os.pathsep}theirs"
    monkeypatch.delenv("PYTHONPATH")
    assert python_path(Path("ours")) == "ours"
    for path in [*ROOT.glob("benchmark/*.py"), *ROOT.glob("benchmark/*/*.py")]:
        for value in re.findall(r"PYTHONPATH=(\w+)", path.read_text(encoding="utf-8")):
            assert value in ("python_path", "where"), path


def test_without_git(monkeypatch):
    """A run has no commit to name, and is trained."""

    def missing(*_, **__):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    assert build() == dict(commit="unknown", changed="unknown")


def test_a_watcher_finds_environments_in_the_working_folder(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["watch.py", "nowhere"])
    monkeypatch.setattr(os, "nice", lambda _: 0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit, match="2"):
        watch.main()
    assert os.getcwd() in sys.path


# === Runs that fail ==========================================================================


@pytest.fixture
def started(monkeypatch):
    """main() of run.py with two runs of CartPole, by the function that stands for Run.work."""

    def start(work, *words):
        flags = ["--scripts", "ppo", "--env-ids", "CartPole-v1", "--seeds", "1,2", "--results", "results"]
        monkeypatch.setattr(sys, "argv", ["run.py", "classic", *flags, *words])
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        monkeypatch.setattr(Run, "work", work)
        with pytest.raises(SystemExit) as end:
            run.main()
        return end.value.code

    return start


def test_a_mistake_that_was_said_is_not_said_again(started, capsys):
    code = started(lambda self, stopping: sys.exit(2) if self.seed == 1 else stopping.wait(60))
    assert code == 2 and "error" not in capsys.readouterr().err


@pytest.mark.parametrize("error, code", [(Mistake("so"), 2), (RuntimeError("so"), 1)])
def test_a_crash_leaves_the_other_runs_alone(error, code, started, capsys):
    """A mistake stops them, as they would make it, too."""
    stopped = []

    def work(self, stopping):
        if self.seed == 1:
            raise error
        stopped.append(stopping.wait(3))

    assert started(work, "--workers", "2") == code
    assert stopped == [code == 2] and "run.py: error: so\n" in capsys.readouterr().err


def test_a_table_that_breaks_ends_the_runs(started, monkeypatch, capsys):
    """As by a merge beside a sweep: they save, and one line is said."""
    stopped = []

    def work(self, stopping):
        Path("results/classic/runs.csv").write_text("<<<<<<< HEAD\n", encoding="utf-8")
        Path(f"results/classic/CartPole-v1__ppo__{self.seed}.csv").write_text(HEAD, encoding="utf-8")
        stopped.append(stopping.wait(60))

    assert started(work, "--workers", "2") == 2 and stopped == [True, True]
    assert "runs.csv has other columns than" in capsys.readouterr().err


def test_a_script_that_was_changed_is_not_started():
    row = SUITES["classic"][0]
    ours = Run(Args("classic", results=Path("results")), row, 1)
    ours.identity["fingerprint"] = "ppo.py 0123456789ab"
    with pytest.raises(Mistake, match="ppo.py is not what it was when run.py began; start it again"):
        ours.train(SimpleNamespace(is_set=lambda: False))


@pytest.mark.parametrize("cause, code", [(Mistake("a wrong flag"), 2), (RuntimeError("a crash"), 1)])
def test_a_task_of_ray_that_fails(cause, code, monkeypatch, capsys):
    class RayError(Exception):
        pass

    def get(ref):
        error = RayError()
        error.cause = cause
        raise error

    task = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda trial: trial.name))
    ray = SimpleNamespace(
        remote=lambda **_: lambda function: task, wait=lambda refs, **_: (refs, []), get=get, cancel=print
    )
    ray.exceptions = SimpleNamespace(RayError=RayError)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    args = on_ray.Suite("classic", results=Path())
    trials = [on_ray.Trial(args, Row("ppo", "CartPole-v1", 4096), 1)]
    with pytest.raises(SystemExit) as end:
        list(on_ray.trained(ray, args, trials))
    assert end.value.code == code and capsys.readouterr().err == f"on_ray.py: error: {cause}\n"


class Started:
    """Stands for a process that goes on until it gets a signal."""

    def __init__(self, all_of_them):
        self.signals, self.returncode = [], None
        all_of_them.append(self)

    def nice(self, value):
        pass

    def poll(self):
        return self.returncode

    def send_signal(self, signum):
        self.signals.append(signum)
        self.returncode = 128 + signum

    def wait(self, timeout=None):
        return self.returncode


def test_soaking_leaves_no_script_behind(monkeypatch):
    """Neither where a later one cannot be started nor at SIGTERM; one that is named twice runs once."""
    processes, handlers = [], {}

    def popen(*_, **__):
        if len(processes) == 2:
            raise OSError("no more")
        return Started(processes)

    monkeypatch.setattr(soak.psutil, "Popen", popen)
    monkeypatch.setattr(soak.signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(sys, "argv", "soak.py ppo ppo ppo_shared ppo_lstm".split())
    with pytest.raises(OSError, match="no more"):
        soak.main()
    assert [process.signals for process in processes] == [[signal.SIGTERM]] * 2
    with pytest.raises(SystemExit, match="143"):
        handlers[signal.SIGTERM](signal.SIGTERM, None)


@pytest.mark.parametrize(
    "growth, code", [((0.0, 0), 0), ((0.9 * soak.LIMIT, 0), 0), ((1.1 * soak.LIMIT, 0), 1)]
)
def test_soaking_fails_where_memory_grows(growth, code, monkeypatch):
    processes = []

    def popen(*_, cwd, **__):
        (cwd / "runs/a").mkdir(parents=True)
        (cwd / "runs/a/events").touch()
        return Started(processes)

    monkeypatch.setattr(soak.psutil, "Popen", popen)
    monkeypatch.setattr(soak.signal, "signal", lambda *_: None)
    monkeypatch.setattr(soak, "sample", lambda process: (100.0, 3))
    monkeypatch.setattr(soak, "growth", lambda rows: growth)
    monkeypatch.setattr(soak, "steps_of", lambda folder: 1)
    monkeypatch.setattr(sys, "argv", "soak.py ppo --minutes 1e-4".split())
    with pytest.raises(SystemExit) as end:
        soak.main()
    assert end.value.code == code


# === Tables ==================================================================================


def rows_of(name, **changes):
    """A line of runs.csv."""
    row = dict.fromkeys(COLUMNS, "1") | dict(run=name, script="ppo", env_id="CartPole-v1", seed="1")
    row |= dict(steps="20000", schedule="500000", started="2026-01-01T00:00:00+00:00", changed="nothing")
    return row | dict(fingerprint="ppo.py 0123456789ab", command="python ppo.py --seed 1") | changes


def write_table(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def write_run(suite, name, *points):
    Path(suite).mkdir(parents=True, exist_ok=True)
    text = HEAD + "".join(f"{step},{step / 1000},{value},{value}\n" for step, value in points)
    Path(f"{suite}/{name}.csv").write_text(text, encoding="utf-8")


def test_a_row_has_the_seconds_and_the_builds_of_all_parts(monkeypatch):
    """Of a run that was stopped once, 30 and 12 seconds."""
    ours = Run(Args("classic", results=Path("results")), SUITES["classic"][0], 1)
    ours.results.mkdir(parents=True)
    monkeypatch.setattr(run, "export", lambda _, path: path.write_text(HEAD, encoding="utf-8"))
    monkeypatch.setattr(run, "remove", lambda _: None)
    part = dict(changed="nothing", machine="m", threads=1, versions="v")
    first, second = dict(commit="a", started="x", seconds=30), dict(commit="b", started="y", seconds=12)
    ours.finish([part | first, part | second])
    (row,) = run.read_table(ours.table).values()
    assert (row["seconds"], row["parts"]) == ("42", "2")
    assert (row["commit"], row["started"], row["machine"]) == ("a | b", "x | y", "m")


@pytest.mark.parametrize("steps, is_done", [("4096", False), ("20000", True), ("100000", True)])
def test_a_run_is_done_at_its_number_of_steps(steps, is_done):
    """Which is no text: 4096 would be more than 20000, and 100000 less."""
    ours = Run(Args("classic", stop_at=20_000, results=Path()), SUITES["classic"][0], 1)
    write_run("classic", ours.name, (1, 1.0))
    write_table(ours.table, rows_of(ours.name, steps=steps) | ours.identity)
    assert ours.is_done() == is_done


def test_rows_that_are_written_at_once_all_stay(monkeypatch):
    """Each writer reads the table first, and waits here before it writes."""
    read = run.read_table

    def slowly(path):
        table = read(path)
        time.sleep(0.02)
        return table

    monkeypatch.setattr(run, "read_table", slowly)
    names = [f"CartPole-v1__ppo__{seed}" for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda name: run.write_row(Path("classic/runs.csv"), name, rows_of(name)), names))
    assert list(read(Path("classic/runs.csv"))) == names


def test_a_file_that_is_cut_while_it_is_written_stays_as_it_was(monkeypatch):
    Path("runs.csv").write_text("old\n", encoding="utf-8")

    def write_half(path, content):
        with open(path, "wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", write_half)
    with pytest.raises(OSError, match="no space"):
        write_file(Path("runs.csv"), "new and longer\n")
    assert Path("runs.csv").read_text(encoding="utf-8") == "old\n"


def test_a_report_ends_where_a_run_was_to_stop():
    """The log comes every ten seconds, so a run with --stop-at ends later, by as much as it made in these."""
    name = "CartPole-v1__ppo__1"
    write_table(Path("classic/runs.csv"), rows_of(name))
    write_run("classic", name, (10_000, 20.0), (20_000, 40.0), (20_001, 400.0))
    found = report.read_result(Path(f"classic/{name}.csv"))
    assert found.scalars["charts/episodic_return"][:, 2].tolist() == [20.0, 40.0]
    assert found.end == (20_000, 20 / 60)
    write_run("classic", name, (20_001, 400.0))
    with pytest.raises(ValueError, match="no episode"):
        report.read_result(Path(f"classic/{name}.csv"))


def test_other_tables_of_the_same_name_cost_no_report():
    name = "CartPole-v1__ppo__1"
    write_table(Path("mine/classic/runs.csv"), rows_of(name))
    write_run("mine/classic", name, (10_000, 20.0))
    Path("mine/theirs").mkdir()
    Path("mine/theirs/runs.csv").write_text("run,flags\na,b\n", encoding="utf-8")
    notes = []
    assert report.result_files(Path("mine"), notes) == [Path(f"mine/classic/{name}.csv")]
    assert notes == ["mine/theirs/runs.csv: left out, it has other columns than run.py's"]


def test_a_broken_file_of_another_suite_costs_no_table(monkeypatch, capsys):
    write_run("mine/classic", "CartPole-v1__ppo__1", (500_000, 20.0))
    write_run("mine/mujoco", "Hopper-v4__ppo_continuous__1")
    words = ["--results", "mine"]
    code, out, err = tool("compare", "classic", *words, monkeypatch=monkeypatch, capsys=capsys)
    assert "| ppo | CartPole-v1 |" in out and not err
    code, _, err = tool("compare", "mujoco", *words, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2 and "Hopper-v4__ppo_continuous__1.csv has no episodes" in err


def test_a_run_of_cleanrl_on_another_schedule_is_not_beside_ours(monkeypatch):
    """A learning rate that is 0 at 0.1M is not theirs, nor is 0.1M the step that all have reached."""
    columns = "run,script,env_id,seed,seconds,started,machine,versions,fingerprint,flags".split(",")
    Path("cleanrl").mkdir()
    with open("cleanrl/runs.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, "", lineterminator="\n")
        writer.writeheader()
        for seed, flags in ((1, ""), (2, "--total-timesteps 100000"), (3, "--stop-at 400000")):
            writer.writerow(dict(run=f"Task-v0__ppo__{seed}", flags=flags))
            Path(f"cleanrl/Task-v0__ppo__{seed}.csv").write_text("step,return\n400000,1\n", encoding="utf-8")
    monkeypatch.setattr(compare, "PUBLISHED", Path())
    compare.run_here.cache_clear()
    assert list(compare.run_here("ppo", "Task-v0").seeds) == [1, 3]
    compare.run_here.cache_clear()


def result(task, value, files=("a",), steps=500_000):
    """Five seeds about a return, for a row that stands beside 490."""
    (row,) = [row for row in SUITES["classic"] if (row.script, row.task) == ("ppo", task)]
    ends = np.linspace(1000, steps, 200)
    seeds = {k: np.column_stack((ends, np.full(200, value * (1 + k / 500)))) for k in range(5)}
    return row, compare.Result(row, seeds, set(files), {"a"})


@pytest.mark.parametrize(
    "files, steps, state",
    [
        ("a", 500_000, None),
        ("ab", 500_000, "of several builds"),
        (("unknown",), 500_000, "of several builds"),
        ("a", 300_000, "cut"),
        ("ab", 300_000, "cut, of several builds"),
    ],
)
def test_a_row_without_a_word_has_none_anywhere(files, steps, state, monkeypatch, capsys):
    """Neither in the summary nor in the joint ratio, and it does not make compare.py end with 1."""
    cart = result("CartPole-v1", 200.0, files, steps)
    acrobot = result("Acrobot-v1", -120.0)
    assert cart[1].state == state
    line = compare.summary({"classic": [cart]}).splitlines()[2]
    assert line.rstrip(" |").endswith(state or "below")
    assert bool(compare.joint_lines([cart, acrobot])) == (state is None)
    monkeypatch.setattr(compare, "load", lambda suite, row, args: cart[1] if row is cart[0] else None)
    monkeypatch.setattr(sys, "argv", ["compare.py", "classic"])
    with pytest.raises(SystemExit) as end:
        compare.main()
    assert end.value.code == (1 if state is None else 0)


def test_reach_is_as_it_was_given(monkeypatch, capsys):
    row, ours = result("CartPole-v1", 490.0)
    for seed, episodes in ours.seeds.items():
        episodes[:, 1] = np.arange(200) >= 100 + seed  # the first twenty ones end at 119 + seed
    monkeypatch.setattr(compare, "load", lambda suite, x, args: ours if x is row else None)
    monkeypatch.setattr(sys, "argv", ["compare.py", "classic", "--reach", "1"])
    with pytest.raises(SystemExit):
        compare.main()
    ends = np.linspace(1000, 500_000, 200)
    said = ", ".join(f"{ends[119 + seed]:.0f}" for seed in range(5))
    assert f"{row.name()}: 1 first at {said}\n" in capsys.readouterr().out


def test_an_interval_beyond_all_numbers():
    """Of two runs close to random play: the ratio may be anything."""
    _, low, high = Ratio(-7.0, 9000.0, 1.0).interval
    assert low == 0 and high == np.inf


def test_two_runs_of_a_game_are_averaged(monkeypatch, capsys):
    returns = dict(a=14.6, b=-20.7)  # 100 % and 0 %: a human's and random play's of Pong
    monkeypatch.setattr(human, "last_returns", lambda run: {"PongNoFrameskip-v4": returns[run.name]})
    monkeypatch.setattr(sys, "argv", ["human.py", "a", "b"])
    human.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("50.0 % of 2 runs") and lines[1].startswith(
        "median 50.0 %, mean of what is capped 50.0"
    )


def test_the_median_is_over_games_and_not_over_runs(monkeypatch, capsys):
    """Three runs of Pong at 0 % and one of Breakout at 100 %."""
    returns = dict.fromkeys("abc", {"PongNoFrameskip-v4": -20.7}) | dict(d={"BreakoutNoFrameskip-v4": 30.5})
    monkeypatch.setattr(human, "last_returns", lambda run: returns[run.name])
    monkeypatch.setattr(sys, "argv", ["human.py", "a", "b", "c", "d"])
    human.main()
    assert capsys.readouterr().out.endswith("median 50.0 %, mean of what is capped 50.0 %\n")


def test_a_speed_is_the_median_of_its_rounds(monkeypatch, capsys):
    """So are its memory and those of the yardsticks."""
    found = iter(
        [
            (10.0, 1.0),
            (1.0, 1.0),
            (2.0, 1.0),
            (40.0, 3.0),
            (4.0, 3.0),
            (2.0, 3.0),
            (20.0, 2.0),
            (2.0, 2.0),
            (2.0, 2.0),
        ]
    )
    monkeypatch.setattr(speed, "measure", lambda *_: next(found))
    row = speed.compare("ppo", speed.Args(rounds=3))
    capsys.readouterr()
    assert (row["steps_per_s"], row["sb3_steps_per_s"], row["plain_steps_per_s"]) == (20, 2, 2)
    assert (row["ratio"], row["sb3_ratio"], row["peak_mb"]) == (10.0, 10.0, 2)


def test_an_episodes_metrics_are_means_of_a_hundred():
    """Lengths, tasks and policies as returns; losses are not."""
    for tag in ("charts/episodic_length", "tasks/Pong", "policies/return_0"):
        assert tag.startswith(report.OF_EPISODES)
    assert not any(tag.startswith(report.OF_EPISODES) for tag in ("losses/entropy", "charts/SPS"))
    for flag in ("track", "resume", "save_every", "seed", "wandb_project_name", "capture_video"):
        assert report.differing([{flag: "a", "gamma": "1"}, {flag: "b", "gamma": "1"}]) == []


def test_changes_of_results_are_no_changes_of_the_build(monkeypatch):
    """A run writes among them."""
    asked = []
    monkeypatch.setattr(run, "git", lambda *words: asked.append(words) or "")
    assert build() == dict(commit="", changed="nothing")
    assert ":(exclude)benchmark/results" in asked[0]
