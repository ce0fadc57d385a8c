"""What staleness and sample reuse do to learning: the runs of the suite staleness as a picture and a table.

    python benchmark/run.py staleness --seeds 1..3 --workers 2
    python benchmark/staleness.py

Berner et al. 2019 (https://arxiv.org/abs/1912.06680, appendix M) found that both slow learning in Dota 2.
The picture has the mean over seeds of each seed's last 100 training episodes by environment step, and the
band from the lowest to the highest seed; the table the mean of that curve over the whole run, and its end.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmark import compare  # noqa: E402
from benchmark.suites import SUITES  # noqa: E402


@dataclass
class Args:
    results: Path = ROOT / "benchmark/results"  # CSVs to read, and where the picture goes


def main():
    args = tyro.cli(Args)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    lines = [["varied", "value", "seeds", "return over the whole run", "last 100 episodes"]]
    kinds = dict(delay="staleness, versions", reuse="sample reuse")
    for ax, (kind, title) in zip(figure.subplots(1, 2, sharey=True), kinds.items(), strict=True):
        rows = [row for row in SUITES["staleness"] if row.variant.startswith(kind)]
        for k, row in enumerate(rows):
            result = compare.load(row, compare.Args(results=args.results))
            if result is None:
                continue
            steps = np.linspace(0, result.reached, 101)[5:]
            ours = np.array([result.at(step) for step in steps])  # (points, seeds)
            value, color = row.variant.split("_")[1], f"C{k}"
            ax.plot(steps, ours.mean(1), color=color, label=value)
            ax.fill_between(steps, ours.min(1), ours.max(1), color=color, alpha=0.1, linewidth=0)
            cells = [f"{x.mean():.0f} ± {x.std(ddof=1):.0f}" for x in (ours.mean(0), ours[-1])]
            lines.append([title, value, str(ours.shape[1]), *cells])
        ax.set(title=title, xlabel="environment step")
        ax.legend()
    figure.savefig(args.results / "staleness_and_reuse.png", dpi=90, metadata={"Software": None})
    print(compare.markdown(lines))


if __name__ == "__main__":
    main()
