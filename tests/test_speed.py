"""What measures speed, CPU time and memory: benchmark/speed/, same.py --cpu-time and four of studies/."""

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
from torch.utils.tensorboard import SummaryWriter

import impala_vtrace
import ppo_atari
from benchmark import same
from benchmark.speed import plain_ppo, sb3_ppo, scaling, speed
from benchmark.studies import ceiling, python_lock, soak, traffic

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


def test_a_rate_is_the_last_that_was_logged(monkeypatch):
    """Which is that of all iterations but the first; a yardstick prints its own."""

    def run(name, cwd, **_):
        with SummaryWriter(f"{cwd}/runs/NAME") as writer:
            for step, rate in ((512, 100.0), (1024, 300.0), (1536, 200.0)):
                writer.add_scalar("charts/SPS", rate, step)
        return "return 7.00 of the last 9 episodes\n51.2 steps/s\n", 3.0

    monkeypatch.setattr(speed, "run", run)
    assert speed.measure("ppo.py") == (200, 3) and speed.measure("benchmark/speed/sb3_ppo.py") == (51.2, 3)


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


def test_rates_of_the_picture_and_their_proportion(monkeypatch):
    """The dotted lines begin at the first rate and are as steep as the number: twice the rate at twice."""
    drawn = []
    monkeypatch.setattr(scaling.figures, "save", lambda figure, path: drawn.append(figure))
    points = [(2, 1, "environments", 100), (6, 1, "environments", 150)]
    points += [(8, 2, "processes", 80), (16, 4, "processes", 120), (64, 16, "expected: fast", 900)]
    scaling.draw([["", "ppo", "", "cpu", 2, *point, *[""] * 7] for point in points], Path("scaling.png"))
    upper, lower = drawn[0].axes
    assert (upper.get_xlabel(), lower.get_xlabel()) == ("environments", "processes")
    lines = [[[*map(float, x)] for x in line.get_data()] for ax in (upper, lower) for line in ax.lines]
    assert lines[:2] == [[[2, 6], [100, 150]], [[2, 6], [100, 300]]]
    assert lines[2:] == [[[2, 4], [80, 120]], [[2, 4], [80, 160]], [[16], [900]]]


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


def test_a_sample_is_of_a_process_and_its_children():
    def process(megabytes, threads, *children):
        memory = SimpleNamespace(rss=megabytes * 10**6)
        parts = dict(memory_info=lambda: memory, num_threads=lambda: threads)
        return SimpleNamespace(children=lambda recursive: list(children), **parts)

    assert soak.sample(process(300, 5, process(20, 2), process(4, 1))) == (324, 8)


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


def test_bytes_of_two_sums(monkeypatch, capsys):
    """Five floats and three integers of 64 bits are 44 bytes, as the first process says; all are summed."""
    code = "import torch; five, three = torch.zeros(5), torch.zeros(3, dtype=torch.int64)\n"
    code += "for x in (five, three):\n    torch.distributed.all_reduce(x, 'MAX')\n"
    Path("planted.py").write_text(code, encoding="utf-8")
    summed = []
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda x, operation: summed.append((len(x), operation))
    )
    monkeypatch.setattr(traffic, "ROOT", Path.cwd())
    monkeypatch.setattr(sys, "argv", [])
    for rank, said in (("1", ""), ("0", "bytes 44 calls 2\n")):
        monkeypatch.setenv("RANK", rank)
        traffic.count("planted", "--seed", "2")
        assert capsys.readouterr().out == said and sys.argv == ["planted", "--seed", "2"]
    assert summed == [(5, "MAX"), (3, "MAX")] * 2


def test_bytes_of_a_step_that_learns(monkeypatch):
    """ngu_r2d2.py learns in 9,600 of its 12,800 steps."""
    commands = []

    def run(command, **_):
        commands.append(" ".join(map(str, command[1:])))
        return SimpleNamespace(returncode=0, stdout="step 1\nbytes 96000 calls 960\n")

    monkeypatch.setattr(traffic, "subprocess", SimpleNamespace(run=run))
    assert traffic.measure("ngu_r2d2") == (10, 0.1)
    assert "--nproc-per-node 2 " in commands[0]
    assert commands[0].endswith("--count ngu_r2d2 --total-timesteps 12800 --learning-starts 3200")


def test_bytes_that_two_processes_sum():
    """ppo.py's gradients are 9,155 floats, 16 times in an iteration of 512 steps; all else is small."""
    num_bytes, calls = traffic.measure("ppo")
    hidden = 2 * (5 * 64 + 65 * 64)
    assert 0 < 512 * num_bytes - 16 * 4 * (hidden + 65 * 2 + 65) < 200
    assert 16 <= 512 * calls < 20


STACKS = """\
<module> (ppo_async.py:9);train (ppo_async.py:8);learn (ppo_async.py:7) 15
<module> (ppo_async.py:9);train (ppo_async.py:8);learn (ppo_async.py:7);step (adam.py:1) 5
_bootstrap (threading.py:9);run (threading.py:8);act (ppo_async.py:6) 10
_bootstrap (threading.py:9);run (threading.py:8);act (ppo_async.py:5);step (envs.py:1) 30
_bootstrap (threading.py:9);run (threading.py:8);write (event_file_writer.py:1) 99
"""


def test_python_lock_by_hand(monkeypatch, capsys):
    """A hundred looks a second: 40 at actors and 20 at the learner are 0.4 and 0.2 s in a thousand steps."""
    commands = []

    def run(command, **_):
        commands.append(command)
        Path(command[command.index("--output") + 1]).write_text(STACKS, encoding="utf-8")

    monkeypatch.setattr(python_lock, "subprocess", SimpleNamespace(run=run))
    args = python_lock.Args("ppo_async", steps=1000, flags="--num-envs 8", csv=Path("lock.csv"))
    python_lock.main(args)
    (row,) = rows("lock.csv")
    assert (row["script"], row["steps"], row["flags"]) == ("ppo_async.py", "1000", "--num-envs 8")
    assert (row["actors_us"], row["learner_us"], row["at_most_steps_per_s"]) == ("400", "200", "1667")
    assert "at most 1,667 steps/s" in capsys.readouterr().out
    (command,) = commands
    assert "--gil" in command and command[command.index("--rate") + 1] == "100"
    assert command[-4:] == ["--total-timesteps", "1000", "--num-envs", "8"]
    monkeypatch.setattr(sys.modules[__name__], "STACKS", "main (ppo_async.py:9) 3\n")
    with pytest.raises(SystemExit, match="2"):
        python_lock.main(args)
    assert "neither was seen with the lock: give more --steps" in capsys.readouterr().err
    assert len(rows("lock.csv")) == 1


@pytest.fixture
def parts_alone(monkeypatch):
    """Stands for the emulators and networks of ceiling.py, of which a clock tells made-up times."""
    calls, weight = [], torch.ones(1, requires_grad=True)

    class Agent:
        num_actions = 4

        def __init__(self, *_):
            self.amp = False

        def initial_state(self, size):
            return torch.zeros(1, size)

        def __call__(self, x, *state):
            obs = x["obs"] if state else x
            size = tuple(obs.shape[: 2 if state else 1])
            calls.append((*size, torch.is_grad_enabled()))
            out = weight * torch.ones(size)
            return SimpleNamespace(logprobs=out), out, *state

    game = SimpleNamespace(send=lambda actions: calls.append(len(actions)), recv=lambda: calls.append("recv"))
    envs = SimpleNamespace(games=[game] * 8, reset=lambda **_: None, **vars(game))
    envs.single_action_space = gym.spaces.Discrete(4)
    group = SimpleNamespace(envs=envs, reset=lambda **_: None)
    for script in (ppo_atari, impala_vtrace):
        monkeypatch.setattr(script, "make_env", lambda *_: envs)
        monkeypatch.setattr(script, "Agent", Agent)
    monkeypatch.setattr(impala_vtrace, "Group", lambda *_: group)

    def with_iterations_of(*seconds):
        """The clock is read where an iteration begins and where it ends."""
        times = iter([x for k, second in enumerate(seconds) for x in (100 * k, 100 * k + second)])
        monkeypatch.setattr(ceiling, "time", SimpleNamespace(perf_counter=lambda: next(times)))
        return calls

    return with_iterations_of


def test_parts_of_ppo_atari_by_hand(parts_alone):
    """An iteration has 1,024 steps, and its median is 2 s."""
    calls = parts_alone(9, 2, 1, 2, 50)
    assert ceiling.parts(ceiling.Args()) == 512
    assert calls.count(1) == calls.count("recv") == 5 * 128 * 8  # a game's action at a time
    assert calls.count((8, False)) == 5 * 128 and calls.count((256, True)) == 5 * 16
    assert len(calls) == 5 * (2 * 1024 + 128 + 16)


def test_parts_of_impala_by_hand(parts_alone):
    """An iteration has 640 steps, and its median is 4 s."""
    calls = parts_alone(9, 4, 1, 4, 50, 4, 4, 4, 1, 8)
    assert ceiling.parts_of_impala(ceiling.Args("impala_vtrace")) == 160
    assert calls.count(16) == calls.count("recv") == 10 * 20 * 2  # 20 steps of two groups of 16
    assert calls.count((1, 16, False)) == 10 * 40 and calls.count((21, 32, True)) == 10
    assert len(calls) == 10 * (2 * 40 + 40 + 1)


def test_a_share_of_the_ceiling_is_that_of_medians(monkeypatch, capsys):
    whole, parts = iter([(10.0, 1), (30.0, 1), (20.0, 1)]), iter(["40\n", "50\n", "60\n"])
    monkeypatch.setattr(ceiling, "measure", lambda *_: next(whole))
    run = lambda *_, **__: SimpleNamespace(stdout=next(parts))  # noqa: E731
    monkeypatch.setattr(ceiling, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(sys, "argv", ["ceiling.py", "--rounds", "3"])
    ceiling.main()
    assert capsys.readouterr().out.splitlines()[-1] == "median 20 of 50: 40% of the ceiling"


def test_cpu_seconds_are_those_of_one_run(monkeypatch):
    """4 s of the user and 1.5 s of the system, beside what children took before."""
    resource = pytest.importorskip("resource")
    usages = iter([SimpleNamespace(ru_utime=5, ru_stime=2), SimpleNamespace(ru_utime=9, ru_stime=3.5)])
    monkeypatch.setattr(resource, "getrusage", lambda who: next(usages))
    monkeypatch.setattr(same, "train", lambda *_: None)
    assert same.cpu_seconds("", "ppo", []) == 5.5


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
