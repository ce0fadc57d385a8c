"""Whether a script trains as it did in another build: the same episodes and losses, bit for bit.

    python benchmark/same.py 3d9e99a ppo --total-timesteps 20000
    python benchmark/same.py f90e744 impala_vtrace --env-id CartPole-v1 --sync --total-timesteps 20000

The build is a commit, such as runs.csv names. Both versions run with the same flags in temporary folders, and
all that they log is compared, except rates and times. Exit code 0 if they agree, 1 if not.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmark.cli import fail  # noqa: E402

OF_TIME = ("SPS", "wait", "queue_fill", "seconds")  # parts of the names of what depends on the machine's speed


def source_of(build: str, script: str) -> str:
    """A script as it was in a commit."""
    shown = subprocess.run(["git", "show", f"{build}:{script}.py"], cwd=ROOT, capture_output=True, text=True)
    if shown.returncode:
        fail(f"{script}.py of {build}: {shown.stderr}")
    return shown.stdout


def logged(source: str, script: str, flags: list[str]) -> dict[str, list[tuple[int, str]]]:
    """Steps and values of all that a run of a script logs, by name. NaN is equal to itself here."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{script}.py")
        path.write_text(source)
        command = [sys.executable, path, "--device", "cpu", *flags]
        environment = os.environ | dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            fail(f"{script}.py ended with {done.returncode}: {done.stderr[-300:]}")
        (run_dir,) = Path(folder, "runs").iterdir()
        events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0}).Reload()
        tags = [tag for tag in events.Tags()["scalars"] if not any(part in tag for part in OF_TIME)]
        return {tag: [(e.step, repr(e.value)) for e in events.Scalars(tag)] for tag in tags}


def main():
    if len(sys.argv) < 3 or sys.argv[1].startswith("-"):
        fail("give a commit and a script, then the script's flags, such as: 3d9e99a ppo --total-timesteps 20000")
    build, script, flags = sys.argv[1], sys.argv[2].removesuffix(".py"), sys.argv[3:]
    before = logged(source_of(build, script), script, flags)
    now = logged((ROOT / f"{script}.py").read_text(), script, flags)
    different = sorted(tag for tag in before.keys() | now.keys() if before.get(tag) != now.get(tag))
    values = sum(map(len, now.values()))
    if different:
        print(f"{script}.py trains otherwise than in {build}: {', '.join(different)}")
        sys.exit(1)
    print(f"{script}.py trains as in {build}: {values} values of {len(now)} logs are the same, bit for bit")


if __name__ == "__main__":
    main()
