"""How long the actors and the learner of a decoupled script hold Python's lock, in an environment step.

    python benchmark/speed/python_lock.py                                  # needs: pip install py-spy
    python benchmark/speed/python_lock.py --script ppo_async --seconds 60

One thread of a process holds the lock at a time, so the sum of their microseconds bounds the process's rate,
whatever its number of cores: beyond it, more processes (torchrun) help and more actors do not. Emulators and
PyTorch's kernels run without the lock. py-spy looks a hundred times a second at who holds it.
"""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmark.cli import fail  # noqa: E402

RATE = 100  # looks a second


@dataclass
class Args:
    script: str = "impala_vtrace"  # or ppo_async
    env_id: str = "BreakoutNoFrameskip-v4"  # task
    seconds: int = 60  # of the run


def main(args: Args):
    with tempfile.TemporaryDirectory() as folder:
        spy = ["py-spy", "record", "--gil", "--rate", str(RATE), "--duration", str(args.seconds)]
        spy += ["--format", "raw", "--output", f"{folder}/stacks", "--"]
        script = [
            sys.executable,
            str(ROOT / f"{args.script}.py"),
            "--env-id",
            args.env_id,
            "--save-every",
            "10",
        ]
        try:
            subprocess.run([*spy, *script], cwd=folder, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            fail(f"{error}; pip install py-spy, and let it look at processes (ptrace)")
        (run_dir,) = Path(folder, "runs").iterdir()
        events = EventAccumulator(str(run_dir))
        events.Reload()
        steps = events.Scalars("charts/SPS")[-1].step
        stacks = Path(folder, "stacks").read_text().splitlines()
    total = 0
    for who, function in (("actors", "Actors.run ("), ("learner", "learn (")):
        looks = sum(int(line.rpartition(" ")[2]) for line in stacks if function in line)
        total += looks / RATE / steps
        print(f"{who}: {1e6 * looks / RATE / steps:.0f} us of Python's lock in an environment step")
    print(f"one process makes at most {1 / total:,.0f} steps/s ({steps} steps, {args.env_id})")


if __name__ == "__main__":
    main(tyro.cli(Args))
