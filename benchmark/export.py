"""One small CSV of a run: the mean return of the last 100 episodes, and the losses, at up to 100 steps.

python benchmark/export.py runs/NAME benchmark/results/NAME.csv
"""

import csv
import sys
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TAGS = (
    "losses/entropy",
    "losses/approx_kl",
    "losses/clipfrac",
    "losses/explained_variance",
    "losses/value_loss",
    "charts/SPS",
)


def export(run_dir: str, path: str, rows: int = 100):
    events = EventAccumulator(run_dir, size_guidance={"scalars": 0})
    events.Reload()
    ends, returns = zip(*((e.step, e.value) for e in events.Scalars("charts/episodic_return")), strict=True)
    tags = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in TAGS}
    steps = np.unique(np.linspace(0, len(tags["charts/SPS"]) - 1, rows).astype(int))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "episodes", "mean_return_100", *(tag.split("/")[1] for tag in TAGS)])
        for k in steps:
            step = tags["charts/SPS"][k][0]
            done = np.searchsorted(ends, step, side="right")
            if done:
                points = (dict(points).get(step, float("nan")) for points in tags.values())
                mean = np.mean(returns[max(0, done - 100) : done])
                writer.writerow([step, done, f"{mean:.2f}", *(f"{value:.5g}" for value in points)])
    print(f"{path}: last 100 of {len(returns)} episodes, {ends[-1]} steps: {np.mean(returns[-100:]):.2f}")


if __name__ == "__main__":
    export(*sys.argv[1:])
