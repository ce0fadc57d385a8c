"""Steps per second and peak memory of scripts beside stable-baselines3 and plain_ppo.py, in turn.

    python benchmark/speed/speed.py --all --rounds 3 --csv benchmark/results/speed/speed.csv
    python benchmark/speed/speed.py ppo ppo_atari --steps 20480
    python benchmark/speed/speed.py ppo_atari --flags=--amp
    python benchmark/speed/speed.py ppo_atari --device cuda --flags=--compile

Medians over the rounds, and ratios of the medians. All are timed from the end of their first iteration; only
ours log. Memory is the peak resident memory as the kernel counts it (os.wait4: of the largest process of a
tree, and these are one process each), so what is on a GPU is not in it. plain_ppo.py has no shared network,
LSTM or MultiDiscrete actions, and runs on the CPU only; stable-baselines3 has nothing like the last three
scripts, which are timed alone. --flags go to sb3_ppo.py, too.
"""

import csv
import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Literal

import tyro  # but not PyTorch: the kernel counts the memory of who starts a process as that process's, too
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmark.files import fail, python_path, read_csv  # noqa: E402
from benchmark.run import build, machine  # noqa: E402

TASKS = {  # the scripts' own tasks, and steps for a run of half a minute
    "ppo": ("CartPole-v1", 100_000),
    "ppo_shared": ("CartPole-v1", 100_000),
    "ppo_atari": ("BreakoutNoFrameskip-v4", 10_240),
    "ppo_continuous": ("HalfCheetah-v4", 20_480),
    "ppo_lstm": ("BreakoutNoFrameskip-v4", 10_240),
    "ppo_multidiscrete": ("HalfCheetah-v4", 20_480),
    "ppo_async": ("BreakoutNoFrameskip-v4", 20_480),
    "impala_vtrace": ("BreakoutNoFrameskip-v4", 81_920),
    "ngu_r2d2": ("MiniGrid-DoorKey-8x8-v0", 40_960),
}
PLAIN = ("ppo", "ppo_atari", "ppo_continuous")  # what plain_ppo.py has
ALONE = ("ppo_async", "impala_vtrace", "ngu_r2d2")
MORE = dict(ngu_r2d2=["--learning-starts", "1600"])  # so that it learns in most of so few steps


@dataclass
class Args:
    scripts: tyro.conf.Positional[tuple[str, ...]] = ()  # scripts to time
    all: bool = False  # all scripts
    env_id: str | None = None  # task, instead of each script's own
    steps: int | None = None  # environment steps a run
    rounds: int = 3  # runs of each
    device: Literal["cpu", "cuda"] = "cpu"  # of the scripts and stable-baselines3
    flags: str = ""  # more flags for the scripts
    csv: Path | None = None  # file to append the results to


def run(name: str, *flags: str, cwd: str, processes: int = 1) -> tuple[str, float]:
    """Output of a program, and its peak memory in MB."""
    launcher = f"-m torch.distributed.run --standalone --nproc-per-node {processes}".split()
    command = [sys.executable, *(launcher if processes > 1 else ()), str(ROOT / name), *flags]
    env = os.environ | dict(PYTHONPATH=python_path(ROOT))
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    process = subprocess.Popen(command, cwd=cwd, env=env, **pipes)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{shlex.join(command)} ended with {process.returncode}:\n{output[-2000:]}")
    return output, usage.ru_maxrss / (1024 if sys.platform == "linux" else 1024**2)


def measure(name: str, *flags: str, processes: int = 1) -> tuple[float, float]:
    """Steps per second, as a script logged them or a yardstick printed them, and peak memory in MB."""
    with tempfile.TemporaryDirectory() as folder:
        output, peak = run(name, *flags, cwd=folder, processes=processes)
        if name.startswith("benchmark/"):
            return float(output.split()[-2]), peak
        (run_dir,) = Path(folder, "runs").iterdir()
        events = EventAccumulator(str(run_dir))
        events.Reload()
        is_timed = "charts/SPS" in events.Tags()["scalars"]  # from the end of the first iteration on
        points = events.Scalars("charts/SPS") if is_timed else []
    if not points:
        fail("the steps of a run must be two iterations or more, of which the first is not timed")
    return points[-1].value, peak


def append(path: Path, row: dict):
    """To a CSV, whose older rows may have fewer columns."""
    rows = read_csv(path) if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)  # what was measured is not lost
    with open(path.with_suffix(".tmp"), "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, dict.fromkeys([*(rows or [{}])[0], *row]), "", lineterminator="\n")
        writer.writeheader()
        writer.writerows([*rows, row])
    path.with_suffix(".tmp").replace(path)


def compare(script: str, args: Args) -> dict:
    """A row of the CSV."""
    env_id, steps = args.env_id or TASKS[script][0], args.steps or TASKS[script][1]
    flags = ["--env-id", env_id, "--total-timesteps", str(steps), "--device", args.device]
    flags += [*MORE.get(script, ()), *shlex.split(args.flags)]
    programs = {"": (f"{script}.py", *flags)}
    if script not in ALONE:
        programs["sb3_"] = ("benchmark/speed/sb3_ppo.py", script, *flags)
    if script in PLAIN and args.device == "cpu":
        programs["plain_"] = ("benchmark/speed/plain_ppo.py", env_id, str(steps))
    runs = {name: [] for name in programs}
    for _ in range(args.rounds):
        for name, program in programs.items():
            runs[name].append(measure(*program))
        print(*(f"{name}{rates[-1][0]:.0f}" for name, rates in runs.items()), "steps/s", flush=True)
    rates = {name: median(rate for rate, _ in runs[name]) for name in runs}
    ratios = {name: round(rates[""] / rate, 2) for name, rate in rates.items()}
    rates = {name: round(rate) for name, rate in rates.items()}
    peaks = {name: round(median(peak for _, peak in runs[name])) for name in runs}
    print(f"{script}.py on {env_id}: {rates['']} steps/s, {peaks['']} MB")
    for name in [*programs][1:]:
        print(
            f"    {programs[name][0]}: {rates[name]}, {peaks[name]} MB; ours is {ratios[name]} times as fast"
        )
    row = dict(date=date.today(), script=f"{script}.py", env_id=env_id, flags=args.flags, steps=steps)
    row |= dict(rounds=args.rounds, steps_per_s=rates[""], plain_steps_per_s=rates.get("plain_"))
    row |= dict(ratio=ratios.get("plain_"), cpus=os.cpu_count(), torch=version("torch"))
    row |= dict(sb3_steps_per_s=rates.get("sb3_"), sb3_ratio=ratios.get("sb3_"))
    row |= {f"{name}peak_mb": peaks.get(name) for name in ("", "sb3_", "plain_")}
    return row | dict(device=args.device) | build() | machine()


def main():
    args = tyro.cli(Args)
    scripts = [*TASKS] if args.all else [Path(name).stem for name in args.scripts]
    if unknown := set(scripts) - set(TASKS):
        fail(f"no script {', '.join(sorted(unknown))}; there are {', '.join(TASKS)}")
    if args.rounds < 1 or args.steps is not None and args.steps < 1:
        fail("--rounds and --steps must be at least 1")
    if not scripts:
        fail(f"name scripts or give --all; there are {', '.join(TASKS)}")
    if set(scripts) - set(ALONE) and not importlib.util.find_spec("sb3_contrib"):
        fail("stable-baselines3 is missing: pip install sb3-contrib")
    for script in scripts:
        row = compare(script, args)
        if args.csv:
            append(args.csv, row)


if __name__ == "__main__":
    main()
