"""Whether scripts became slower since a commit: CPU seconds of whole runs, of both builds in turn.

    python benchmark/speed/cpu_time.py 11ea077 ppo --flags="--total-timesteps 150000"
    python benchmark/speed/cpu_time.py 11ea077 ppo_atari --flags="--total-timesteps 8192" --csv mine.csv

They count all threads and the start, and depend less on what else runs on the machine than steps per second
do. Medians and their ratio are printed, and --csv gets a row.
"""

import os
import resource
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median

import tyro

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmark.files import fail  # noqa: E402
from benchmark.run import build, machine  # noqa: E402
from benchmark.same import source_of  # noqa: E402
from benchmark.speed.speed import append  # noqa: E402


@dataclass
class Args:
    before: tyro.conf.Positional[str]  # commit to compare with
    script: tyro.conf.Positional[str]  # such as ppo
    flags: str = ""  # of both builds
    rounds: int = 5  # runs of each build
    csv: Path | None = None  # file to append the result to


def cpu_seconds(source: str, script: str, flags: list[str]) -> float:
    """Seconds that all threads of a run take together."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{script}.py")
        path.write_text(source, encoding="utf-8")
        environment = os.environ | dict(PYTHONPATH=str(ROOT))
        start = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, path, *flags], cwd=folder, env=environment, capture_output=True, text=True
        )
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        fail(f"{script}.py ended with {done.returncode}: {done.stderr[-300:]}")
    return end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime


def main(args: Args):
    if args.rounds < 1:
        fail("--rounds must be at least 1")
    script = args.script.removesuffix(".py")
    sources = dict(
        before=source_of(args.before, script), now=(ROOT / f"{script}.py").read_text(encoding="utf-8")
    )
    seconds = dict(before=[], now=[])
    for k in range(args.rounds):
        for name in ("before", "now") if k % 2 == 0 else ("now", "before"):
            seconds[name].append(cpu_seconds(sources[name], script, shlex.split(args.flags)))
    medians = {f"{name}_s": round(median(x), 2) for name, x in seconds.items()}
    ratio = round(medians["now_s"] / medians["before_s"], 3)
    print(f"{script}.py: {medians['now_s']} s of CPU time, {medians['before_s']} in {args.before}; {ratio}")
    row = dict(date=date.today(), script=f"{script}.py", flags=args.flags, rounds=args.rounds)
    row |= dict(before=args.before) | medians | dict(ratio=ratio)
    if args.csv:
        append(args.csv, row | build() | machine())


if __name__ == "__main__":
    main(tyro.cli(Args))
