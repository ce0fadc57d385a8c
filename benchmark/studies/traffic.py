"""Bytes that a process of torchrun sums with the others in an environment step, for the scripts' own tasks.

    python benchmark/studies/traffic.py                    # all scripts, into results/speed/traffic.csv
    python benchmark/studies/traffic.py ppo_atari

Two processes run each script for three iterations or more, and all calls of all_reduce() count. In a ring of
n processes each sends 2 (n - 1) / n of these bytes, whatever n is. Steps before a script learns do not count.
"""

import csv
import os
import runpy
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmark.files import fail  # noqa: E402
from benchmark.run import build, machine  # noqa: E402

SCRIPTS = {  # environment steps of a run that learns
    "ppo": 1536,
    "ppo_shared": 1536,
    "ppo_continuous": 12_288,
    "ppo_multidiscrete": 12_288,
    "ppo_lstm": 3072,
    "ppo_atari": 3072,
    "ppo_async": 3072,
    "impala_vtrace": 2560,
    "ngu_r2d2": 12_800,
}
FLAGS = dict(ppo_continuous=["--num-envs", "2"], ppo_multidiscrete=["--num-envs", "2"])
FLAGS |= dict(ngu_r2d2=["--learning-starts", "3200"])
BEFORE = dict(ngu_r2d2=3200)  # steps before a script learns


def count(script: str, *flags: str):
    """Runs a script as one of two processes, and prints how many bytes it gave to all_reduce()."""
    sent, original = [], torch.distributed.all_reduce

    def all_reduce(x, *args, **kwargs):
        sent.append(x.numel() * x.element_size())
        return original(x, *args, **kwargs)

    torch.distributed.all_reduce = all_reduce
    sys.argv = [script, *flags]
    runpy.run_path(str(ROOT / f"{script}.py"), run_name="__main__")
    if os.environ["RANK"] == "0":
        print("bytes", sum(sent), "calls", len(sent))


def measure(script: str) -> tuple[float, float]:
    """Bytes and calls of all_reduce() in an environment step."""
    steps, flags = SCRIPTS[script], FLAGS.get(script, [])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, __file__, "--count", script, "--total-timesteps", str(steps), *flags]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr[-2000:])
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("bytes"))
    _, num_bytes, _, calls = line.split()
    steps -= BEFORE.get(script, 0)
    return int(num_bytes) / steps, int(calls) / steps


if __name__ == "__main__":
    if sys.argv[1:2] == ["--count"]:
        count(*sys.argv[2:])
        sys.exit()
    names = sys.argv[1:] or list(SCRIPTS)
    if unknown := set(names) - set(SCRIPTS):
        fail(f"no script {', '.join(unknown)}")
    rows = []
    for name in names:
        num_bytes, calls = measure(name)
        row = dict(
            date=date.today(), script=name, bytes_a_step=round(num_bytes), calls_a_step=round(calls, 4)
        )
        print(f"{name}.py: {row['bytes_a_step']} bytes a step, in {row['calls_a_step']} calls", flush=True)
        rows.append(row | build() | machine())
    if not sys.argv[1:]:
        with open(ROOT / "benchmark/results/speed/traffic.csv", "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
