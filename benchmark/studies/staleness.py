"""What staleness and sample reuse do to learning: the runs of the suite staleness as a picture and a table.

    python benchmark/run.py staleness --seeds 1..5 --workers 2
    python benchmark/studies/staleness.py

Berner et al. 2019 (https://arxiv.org/abs/1912.06680, appendix M) found that both slow learning. They
varied reuse by the number of rollout workers beside the same optimizers: what counts as slow is a return by
samples trained on. By environment steps, reuse is more training. So there are two panels for reuse. The
panel beside that of staleness has the same with --decoupled. Every panel has the mean over seeds of each
seed's last 100 training episodes, and the band from the lowest to the highest seed.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmark import compare  # noqa: E402
from benchmark.suites import SUITES  # noqa: E402


@dataclass
class Args:
    results: Path = ROOT / "benchmark/results"  # CSVs to read, and where the picture goes


def main():
    args = tyro.cli(Args)
    figure = Figure(figsize=(16, 3.4), layout="constrained")
    axes = figure.subplots(1, 4, sharey=True)
    kinds = dict(delay="staleness", decoupled="staleness, decoupled", reuse="reuse")
    head = [
        "varied",
        "value",
        "seeds",
        "mean return over the run",
        "over its first 100k samples trained on",
        "end",
    ]
    lines = [head]
    for row in SUITES["staleness"]:
        result = compare.load("staleness", row, compare.Args(results=args.results))
        if result is None:
            continue
        kind, value = row.label.split("_")
        steps = np.linspace(0, result.reached, 401)[5:]
        ours = np.array([result.at(step) for step in steps])  # (points, seeds)
        trained = steps * (float(value) if kind == "reuse" else 1)
        panels = [(axes[list(kinds).index(kind)], steps)]
        if kind == "reuse":
            panels.append((axes[3], trained))
        for ax, x in panels:
            (line,) = ax.plot(x, ours.mean(1), label=value)
            ax.fill_between(x, ours.min(1), ours.max(1), color=line.get_color(), alpha=0.1, linewidth=0)
        means = [x.mean(0) for x in (ours, ours[trained <= 100_000], ours[-1:])]
        cells = [f"{x.mean():.0f} ± {x.std(ddof=1):.0f}" for x in means]
        lines.append([kinds[kind], value, str(ours.shape[1]), *cells])
    titles = ["staleness, versions", "staleness, versions, --decoupled", "sample reuse", "sample reuse"]
    labels = ["environment step", "environment step", "environment step", "samples trained on"]
    for ax, title, label in zip(axes, titles, labels, strict=True):
        ax.set(title=title, xlabel=label)
        ax.legend()
    axes[3].set_xlim(0, 200_000)
    figure.savefig(args.results / "staleness/staleness_and_reuse.png", dpi=80, metadata={"Software": None})
    print(compare.markdown(lines))


if __name__ == "__main__":
    main()
