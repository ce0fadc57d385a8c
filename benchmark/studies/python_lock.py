"""How long the actors and the learner of a decoupled script hold Python's lock, in an environment step.

    python benchmark/studies/python_lock.py                                  # needs: pip install py-spy
    python benchmark/studies/python_lock.py --script ppo_async --flags="--num-envs 64 --batch-segments 64"

One thread of a process holds the lock at a time, so the sum of their microseconds bounds the process's rate,
whatever its number of cores: beyond it, more processes (torchrun) help and more actors do not. Emulators and
PyTorch's kernels run without the lock. py-spy looks a hundred times a second at who holds it.
"""

import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Literal

import tyro

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmark.files import fail  # noqa: E402
from benchmark.run import build, machine  # noqa: E402
from benchmark.speed.speed import append  # noqa: E402

RATE = 100  # looks a second


@dataclass
class Args:
    script: Literal["impala_vtrace", "ppo_async"] = "impala_vtrace"
    env_id: str = "BreakoutNoFrameskip-v4"  # task
    flags: str = ""  # more flags for the script
    steps: int = 40_960  # of the run: whole batches
    csv: Path | None = None  # file to append the result to


def main(args: Args):
    if args.steps < 1:
        fail(f"--steps cannot be {args.steps}")
    with tempfile.TemporaryDirectory() as folder:
        command = ["py-spy", "record", "--gil", "--rate", str(RATE), "--format", "raw"]
        command += ["--output", f"{folder}/stacks", "--", sys.executable, str(ROOT / f"{args.script}.py")]
        command += ["--env-id", args.env_id, "--total-timesteps", str(args.steps), *shlex.split(args.flags)]
        try:
            subprocess.run(command, cwd=folder, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            fail(f"{error}; pip install py-spy, and let it look at processes (ptrace)")
        stacks = Path(folder, "stacks").read_text(encoding="utf-8").splitlines()
    held = {}  # microseconds in an environment step
    for who, function in (("actors", ";act ("), ("learner", "learn (")):
        looks = sum(int(line.rpartition(" ")[2]) for line in stacks if function in line)
        held[f"{who}_us"] = round(1e6 * looks / RATE / args.steps)
        print(f"{who}: {held[f'{who}_us']} us of Python's lock in an environment step")
    if not any(held.values()):
        fail("neither was seen with the lock: give more --steps")
    at_most = round(1e6 / sum(held.values()))
    print(f"one process makes at most {at_most:,} steps/s ({args.env_id} {args.flags})")
    row = dict(date=date.today(), script=f"{args.script}.py", env_id=args.env_id, flags=args.flags)
    row |= dict(steps=args.steps) | held | dict(at_most_steps_per_s=at_most)
    if args.csv:
        append(args.csv, row | build() | machine())


if __name__ == "__main__":
    main(tyro.cli(Args))
