"""What measures speed, CPU time and memory: benchmark/speed/, same.py --cpu-time and studies/soak.py."""

import csv
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import pytest
import torch

from benchmark.speed import plain_ppo, sb3_ppo, scaling, speed
from benchmark.studies import soak

ROOT = Path(__file__).parent.parent
ENV = os.environ | dict(PYTHONPATH=str(ROOT))
OLD = "date,script,steps_per_s,plain_steps_per_s,ratio\n2026-01-02,ppo.py,5171,2648,1.95\n"


def rows(path):
    with open(path, encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", sorted(speed.TASKS.keys() - set(speed.ALONE)))
def test_stable_baselines3_has_the_same_network_and_settings(name):
    script = importlib.import_module(name)
    args = script.Args(device="cpu")
    assert speed.TASKS[name][0] == args.env_id and speed.TASKS[name][1] >= 5 * args.batch_size
    envs = script.make_env(args, 1)
    ours = sum(parameter.numel() for parameter in script.Agent(envs).parameters())
    envs.close()
    model = sb3_ppo.make_model(name, args)
    assert sum(parameter.numel() for parameter in model.policy.parameters()) == ours
    assert model.n_steps * model.n_envs == args.batch_size == model.batch_size * args.num_minibatches
    assert model.lr_schedule(0.5) == args.learning_rate / 2 and model.n_epochs == args.update_epochs
    model.env.close()


def test_the_yardsticks_leave_the_first_iteration_out(monkeypatch, capsys):
    """As the scripts' rates do, of which none counts the start: by clocks that tell made-up times."""
    seconds, step = [0.0], gym.vector.SyncVectorEnv.step

    def slow_at_first(envs, actions):
        seconds.append(seconds[-1] + (100 if len(seconds) <= 128 else 0.5))
        return step(envs, actions)

    monkeypatch.setattr(gym.vector.SyncVectorEnv, "step", slow_at_first)
    monkeypatch.setattr(plain_ppo, "time", SimpleNamespace(perf_counter=lambda: seconds[-1]))
    assert plain_ppo.run("CartPole-v1", 3 * 512) == 2 * 512 / (2 * 128 * 0.5)

    def learn(steps, clock):
        clock._on_training_start()
        for _ in range(steps // 512):
            clock._on_rollout_start()

    times = iter([0, 100, 110, 120])
    monkeypatch.setattr(sb3_ppo, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    model = SimpleNamespace(learn=learn, ep_info_buffer=[dict(r=7.0)])
    monkeypatch.setattr(sb3_ppo, "make_model", lambda *_: model)
    monkeypatch.setattr(sys, "argv", ["sb3_ppo.py", "ppo", "--total-timesteps", "1536"])
    sb3_ppo.main()
    said = ["return 7.00 of the last 1 episodes", "51.2 steps/s"]  # 2 * 512 in 20 seconds
    assert capsys.readouterr().out.splitlines() == said


def test_a_row_beside_older_ones():
    Path("speed.csv").write_text(OLD, encoding="utf-8")
    tool = ROOT / "benchmark/speed/speed.py"
    command = [sys.executable, tool, "ppo.py", "--rounds", "1", "--steps", "2048"]
    subprocess.run([*command, "--csv", "speed.csv"], check=True, timeout=600, capture_output=True)
    old, new = rows("speed.csv")
    assert list(old.values())[:5] == OLD.splitlines()[1].split(",") and set(list(old.values())[5:]) == {""}
    assert list(old) == list(new) and list(old)[:5] == OLD.splitlines()[0].split(",")
    for name, ratio in (("plain", "ratio"), ("sb3", "sb3_ratio")):
        expected = float(new["steps_per_s"]) / float(new[f"{name}_steps_per_s"])
        assert float(new[ratio]) == pytest.approx(expected, abs=0.01)
        assert 100 < float(new["peak_mb"]) < 2000 and 100 < float(new[f"{name}_peak_mb"]) < 2000
    assert new["device"] == "cpu" and new["steps"] == "2048"
    assert f"torch {torch.__version__}" in new["versions"]
    head = subprocess.check_output(["git", "rev-parse", "--short=10", "HEAD"], cwd=ROOT, text=True)
    assert new["commit"] == head.strip()


def test_rows_in_a_folder_that_is_not_there():
    for k in (1, 2):
        speed.append(Path("new/folder/speed.csv"), dict(rate=k))
    assert [row["rate"] for row in rows("new/folder/speed.csv")] == ["1", "2"]


def test_a_script_without_a_counterpart_is_timed_alone():
    tool = ROOT / "benchmark/speed/speed.py"
    flags = "impala_vtrace --env-id CartPole-v1 --steps 40960 --rounds 1 --csv speed.csv".split()
    subprocess.run([sys.executable, tool, *flags], check=True, timeout=600, capture_output=True)
    (row,) = rows("speed.csv")
    assert float(row["steps_per_s"]) > 0 and row["sb3_steps_per_s"] == row["ratio"] == ""


def test_memory_is_of_the_program_alone():
    """Not of speed.py, nor of the programs before it."""
    for name, size in (("large", 300), ("small", 0)):
        Path(f"{name}.py").write_text(f"b'x' * ({size} << 20)", encoding="utf-8")
    code = "from pathlib import Path; from benchmark.speed.speed import run; here = Path.cwd(); "
    code += "print(*(run(here / f'{name}.py', cwd='.')[1] for name in ('large', 'small')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=".", env=ENV, capture_output=True, text=True)
    large, small = map(float, done.stdout.split())
    assert 300 < large < 400 and small < 80


def test_mistakes():
    for flags, message in (
        (["pppo"], "no script pppo"),
        ([], "name scripts or give --all"),
    ):
        command = [sys.executable, ROOT / "benchmark/speed/speed.py", *flags]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith(f"speed.py: error: {message}")
        assert done.stderr.count("\n") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_freed_memory_is_kept():
    """Blocks of 48 MB that come and go: the kernel is asked for their pages once, not every time.

    Of blocks below 32 MB, glibc by itself keeps some, by how the heap happens to lie.
    """
    code = """
import resource, sys, torch, ppo_atari
if sys.argv[1:]:
    ppo_atari.keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def work():
    for _ in range(20):
        [torch.zeros(48 * 2**20, dtype=torch.uint8).add_(1) for _ in range(3)]
work()
before = faults()
work()
print(faults() - before)
"""
    environment = os.environ | dict(PYTHONPATH=str(Path(__file__).parent.parent))
    count = [
        int(subprocess.check_output([sys.executable, "-c", code, *keep], env=environment))
        for keep in ([], ["keep"])
    ]
    assert count[1] < count[0] / 20


def test_expectation_of_many_processes_by_hand():
    """4 processes, 8 MB: 6 messages of 2 MB at 1 GB/s and 1 ms each are 18 ms, ten times in an iteration."""
    assert scaling.allreduce_seconds(8e6, 4, 1e9, 1e-3) == pytest.approx(0.018)
    assert scaling.expected(1000, 500, 10, 8e6, (4, 1e9, 1e-3)) == pytest.approx(4 * 500 / (0.5 + 0.18))
    assert scaling.allreduce_seconds(8e6, 1, 1e9, 1e-3) == 0


def test_scaling_measures_and_draws(tmp_path):
    files = ["--csv", tmp_path / "scaling.csv", "--picture", tmp_path / "scaling.png"]
    flags = "--scripts ppo --envs 2 4 --processes 1 2 --iterations 3 --rounds 1".split()
    command = [sys.executable, ROOT / "benchmark/speed/scaling.py", *flags, *files]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    rows = list(csv.DictReader(files[1].open(encoding="utf-8")))
    assert [(row["what"], row["num_envs"], row["processes"]) for row in rows[:4]] == [
        ("environments", "2", "1"),
        ("environments", "4", "1"),
        ("processes", "4", "1"),
        ("processes", "8", "2"),
    ]
    assert all(float(row["steps_per_s"]) > 0 for row in rows) and len(rows) == 4 + len(scaling.LINKS)
    agent = (4 + 1) * 64 + (64 + 1) * 64 + (64 + 1) * 2 + (4 + 1) * 64 + (64 + 1) * 64 + (64 + 1) * 1
    assert int(rows[-1]["gradient_bytes"]) == 4 * agent
    assert files[3].stat().st_size > 10_000
    done = subprocess.run([*command, "--scripts", "ngu_r2d2"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("scaling.py: error: scaling.py times ppo")


def test_growth_by_hand():
    """Of 60 rows, from the sixth, which ends the first tenth, to the last."""
    rows = [[minute, "ppo", 100 + minute, 9] for minute in range(1, 61)]
    more, threads = soak.growth(rows)
    assert more == pytest.approx(160 / 106 - 1) and threads == 0
    assert soak.growth([*rows[:-1], [60, "ppo", 106, 10]]) == (0, 1)


@pytest.mark.parametrize("what", ["memory", "threads"])
def test_a_run_that_grows_is_seen(what, tmp_path, monkeypatch):
    """In the child of a process, too; and a flat one is flat."""
    more = (
        "kept.append(b'x' * 10**7)"
        if what == "memory"
        else "threading.Thread(target=time.sleep, args=[99]).start()"
    )
    child = (
        f"import threading, time; kept = []\nfor _ in range(8):\n    time.sleep(0.2); {more}\ntime.sleep(99)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = soak.psutil.Popen([sys.executable, "-c", parent])
    try:
        rows = []
        for part in range(soak.PARTS):
            soak.time.sleep(0.05)
            rows.append([part, "x", *soak.sample(process)])
        memory, threads = soak.growth(rows)
        assert (memory > 1) == (what == "memory") and (threads > 3) == (what == "threads")
    finally:
        for x in (*process.children(), process):
            x.kill()


def test_an_hour_in_seconds(tmp_path):
    flags = ["ppo", "ppo_shared", "--minutes", "0.1", "--csv", tmp_path / "soak.csv"]
    command = [sys.executable, ROOT / "benchmark/studies/soak.py", *flags]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=ENV | dict(TMPDIR=str(tmp_path))
    )
    lines = done.stdout.splitlines()[1:]
    assert [line.split(".py: ")[0] for line in lines] == ["ppo", "ppo_shared"], done.stdout + done.stderr
    assert all(int(line.split()[1]) > 0 and line.endswith("ended with 143") for line in lines)
    table = list(csv.DictReader((tmp_path / "soak.csv").open(encoding="utf-8")))
    memory = [float(row["resident_mb"]) for row in table]  # it grows while Python starts
    assert len(memory) == 2 * soak.PARTS and min(memory) > 0 and max(memory) > 100
    done = subprocess.run([*command[:2], "pppo"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("soak.py: error: no script pppo")


def test_cpu_time_of_two_builds(tmp_path):
    table = tmp_path / "cpu_time.csv"
    flags = f"--cpu-time 1 --csv={table} HEAD ppo --total-timesteps 1024".split()
    command = [sys.executable, ROOT / "benchmark/same.py", *flags]
    done = subprocess.run(command, check=True, timeout=600, capture_output=True, text=True)
    (row,) = rows(table)
    assert row["script"] == "ppo.py" and row["before"] == "HEAD" and row["rounds"] == "1"
    assert row["flags"] == "--total-timesteps 1024"
    said = "ppo.py: {now_s} s of CPU time, {before_s} in HEAD; {ratio}\n"
    assert done.stdout == said.format(**row)
    before, now = float(row["before_s"]), float(row["now_s"])
    assert min(before, now) > 0.5  # importing PyTorch alone takes longer
    assert float(row["ratio"]) == pytest.approx(now / before, abs=1e-3)


@pytest.mark.parametrize(
    "flags,message",
    [
        ("--cpu-time 1 nosuch ppo", "ppo.py of nosuch"),
        ("--cpu-time 1 HEAD ppp", "ppp.py of HEAD"),
        ("--cpu-time 1 recorded", "--cpu-time takes a commit"),
        ("--cpu-time 0 HEAD ppo", "--cpu-time must be"),
        ("--cpu-time 1", "give a commit"),
        ("--csv mine.csv HEAD ppo", "--csv needs --cpu-time"),
        ("--cpu-time 1 HEAD ppo --nosuch", "ppo.py ended with 2"),
        ("HEAD ppo --cpu-time 1", "ppo.py ended with 2"),  # which is a flag of the script there
    ],
)
def test_mistakes_of_cpu_time(flags, message):
    command = [sys.executable, ROOT / "benchmark/same.py", *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(f"same.py: error: {message}")
    assert done.stderr.count("\n") == 1
