"""Steps per second of a script beside plain_loop.py, in turn on the same machine: medians and their ratio.

    python benchmark/speed.py ppo.py CartPole-v1 --steps 100000
    python benchmark/speed.py ppo_atari.py BreakoutNoFrameskip-v4 --steps 10240
    python benchmark/speed.py ppo_atari.py BreakoutNoFrameskip-v4 --steps 10240 --flags "--amp"

Both are timed from the end of their first iteration; ours logs, too. Add --csv FILE to append the numbers.
On a GPU, where there is no plain loop to compare with:

    python ppo_atari.py --device cuda --total-timesteps 500000            # the progress line says steps/s
    python ppo_atari.py --device cuda --total-timesteps 500000 --compile
"""

import csv
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Args:
    script: tyro.conf.Positional[str]  # script to time
    env_id: tyro.conf.Positional[str]  # on which task
    steps: int = 20_000  # environment steps a run
    rounds: int = 3  # runs of each of the two
    flags: str = ""  # more flags for the script
    csv: str | None = None  # file to append the result to


def ours(args: Args) -> float:
    """Steps per second of one run of the script, from its own log."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, ROOT / args.script, "--env-id", args.env_id, "--device", "cpu"]
        command += ["--total-timesteps", str(args.steps), *shlex.split(args.flags)]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        (run_dir,) = Path(folder, "runs").iterdir()
        events = EventAccumulator(str(run_dir))
        events.Reload()
        points = events.Scalars("charts/SPS")
    return (points[-1].step - points[0].step) / (points[-1].wall_time - points[0].wall_time)


def plain(args: Args) -> float:
    command = [sys.executable, ROOT / "benchmark/plain_loop.py", args.env_id, str(args.steps)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0])


def main():
    args = tyro.cli(Args)
    rates = {"ours": [], "plain": []}
    for _ in range(args.rounds):
        rates["ours"].append(ours(args))
        rates["plain"].append(plain(args))
        print(
            f"{args.script} {rates['ours'][-1]:.0f} steps/s, plain loop {rates['plain'][-1]:.0f}", flush=True
        )
    fast, slow = (statistics.median(rates[name]) for name in ("ours", "plain"))
    row = dict(date=date.today(), script=args.script, env_id=args.env_id, flags=args.flags, steps=args.steps)
    row |= dict(rounds=args.rounds, steps_per_s=round(fast), plain_steps_per_s=round(slow))
    row |= dict(ratio=round(fast / slow, 2), cpus=os.cpu_count(), torch=torch.__version__)
    print(f"median {fast:.0f} against {slow:.0f}: {fast / slow:.2f} times")
    if args.csv:
        is_new = not Path(args.csv).exists()
        with open(args.csv, "a", newline="") as file:
            writer = csv.DictWriter(file, row)
            if is_new:
                writer.writeheader()
            writer.writerow(row)


if __name__ == "__main__":
    main()
