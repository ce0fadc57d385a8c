"""One small CSV of a run folder: a row an episode, with its step, seconds, return and length.

    python benchmark/episodes_csv.py runs/NAME benchmark/results/NAME.csv

Seconds count from the run's first log; what passed between a stop and a resumption counts as nothing. Of
several policies (ngu_r2d2.py) only the episodes of the first count, which is the one to evaluate.
"""

import csv
import io
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmark.files import fail, write_file  # noqa: E402


def replaceable(path: Path) -> Path:
    """The file that writing to path replaces: where a link leads, and never a device, a pipe or a folder."""
    target = path.resolve()
    if not target.parent.is_dir() or path.exists() and not target.is_file():
        raise ValueError(f"{path} must be a regular file or a new one, in a folder that exists")
    return target


def export(run_dir: Path | str, path: Path | str):
    """Write path, whole or not at all."""
    seconds, returns, lengths, before = 0.0, [], {}, 0.0
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    events.Reload()
    if "charts/episodic_return" not in events.Tags()["scalars"]:
        raise ValueError(f"{run_dir}: no episode has ended, so there is nothing to compare")
    # when each iteration was logged; charts/SPS alone leaves the first one out
    tags = [tag for tag in events.Tags()["scalars"] if tag == "charts/SPS" or tag.startswith("losses/")]
    ticks = sorted({e.step: e.wall_time for tag in tags for e in events.Scalars(tag)}.items())
    if not ticks:
        raise ValueError(f"{run_dir}: no iteration has been logged, so episodes have no time")
    # every start has written a file, named by its second: the time before it is no training
    starts = [float(path.name.split(".")[3]) for path in Path(run_dir).glob("events.out.tfevents.*")]
    clock = {}
    for k, (step, now) in enumerate(ticks):
        if k:
            seconds += now - max([before, *(x for x in starts if before < x < now)])
        clock[step], before = seconds, now
    lengths = events.Scalars("charts/episodic_length")
    returns = events.Scalars("charts/episodic_return")
    tags = events.Tags()["scalars"]
    if any(tag.startswith("policies/return_") for tag in tags):
        of_first = events.Scalars("policies/return_0") if "policies/return_0" in tags else []
        first = Counter((e.step, e.value) for e in of_first)
        kept = []
        for e, n in zip(returns, lengths, strict=True):
            if first[e.step, e.value] > 0:
                first[e.step, e.value] -= 1
                kept.append((e, n))
        if not kept:
            raise ValueError(f"{run_dir}: no episode of the first policy has ended")
        returns, lengths = zip(*kept, strict=True)
    steps, k = sorted(clock), 0
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", "seconds", "return", "length"])
    for e, n in zip(returns, lengths, strict=True):
        while k + 1 < len(steps) and steps[k] < e.step:
            k += 1
        writer.writerow([e.step, f"{clock[steps[k]]:.2f}", f"{e.value:.7g}", int(n.value)])
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(replaceable(path), text.getvalue())


@dataclass
class Args:
    run: Annotated[Path, tyro.conf.Positional]  # folder of a run
    csv: Annotated[Path, tyro.conf.Positional]  # to write


def main():
    args = tyro.cli(Args, description=__doc__)
    if not args.run.is_dir():
        fail(f"there is no folder {args.run}")
    try:
        export(args.run, args.csv)
    except (OSError, ValueError) as error:
        fail(error)


if __name__ == "__main__":
    main()
