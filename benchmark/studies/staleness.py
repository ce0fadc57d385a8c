"""What staleness and sample reuse do to learning: the runs of the suite staleness as a picture and a table.

    python benchmark/run.py staleness --workers 2
    python benchmark/studies/staleness.py --write
    python benchmark/studies/staleness.py --artificial-delay 4 --env-id CartPole-v1 --sync

With --artificial-delay it is ppo_async.py, with its flags, but each segment is held back for so many
iterations.

Berner et al. 2019 (https://arxiv.org/abs/1912.06680, appendix M) found that both slow learning. They
varied reuse by the number of rollout workers beside the same optimizers: what counts as slow is a return by
samples trained on. By environment steps, reuse is more training. So there are two panels for reuse. The
panel beside that of staleness has the same with --decoupled. Every panel has the mean over seeds of each
seed's last 100 training episodes, and a band of one standard deviation over seeds.
"""

import argparse
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from matplotlib import colormaps

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import ppo_async  # noqa: E402
from benchmark import compare, figures  # noqa: E402
from benchmark.files import fail  # noqa: E402
from benchmark.suites import SUITES  # noqa: E402


@dataclass
class Args:
    results: Path = compare.RESULTS  # folder of run.py to read, and where the figure goes
    write: bool = False  # write the figure; the table of docs/async.md, if it is of its results


PAGE = ROOT / "docs/async.md"
KINDS = {
    "staleness": "staleness, versions",
    "decoupled": "staleness, versions, --decoupled",
    "reuse": "sample reuse, passes",
}
HEAD = "varied|value|seeds|mean return over the run|over its first 100k samples trained on|end".split("|")


def held_back(receive: Callable, delay: int) -> Callable:
    """Makes receive() of ppo_async.py return each batch so many calls later than it came."""
    held = deque()

    def late(exchange, turns, args):
        if not held:  # the first batches are collected before the first iteration draws random numbers
            state = torch.get_rng_state()
            torch.manual_seed(hash((args.seed, exchange.published[1], ppo_async.RANK, delay)))
            for _ in range(delay):
                ppo_async.heartbeat("iteration")
                held.append(receive(exchange, turns, args))
            torch.set_rng_state(state)
            ppo_async.heartbeat("iteration")
        held.append(receive(exchange, turns, args))
        return held.popleft()

    return late


def main():
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--artificial-delay", type=int)
    known, rest = parser.parse_known_args()
    if known.artificial_delay is not None:
        if known.artificial_delay < 0:
            fail(f"--artificial-delay cannot be {known.artificial_delay}")
        sys.argv[1:] = rest
        ppo_async.receive = held_back(ppo_async.receive, known.artificial_delay)
        ppo_async.main()
    else:
        draw()


def draw():
    """Prints the table and, if asked, writes it and the figure."""
    args = tyro.cli(Args)
    if not (args.results / "staleness").is_dir():
        fail(f"--results {args.results}: there are no results of the suite staleness")
    figure, axes = figures.panels(4, columns=4, height=3.4)
    values = sorted({float(row.label) for row in SUITES["staleness"]})
    shades = dict(zip(values, colormaps["viridis"](np.linspace(0, 0.9, len(values))), strict=True))
    for value, shade in shades.items():
        axes[0].plot([], color=shade, label=f"{value:g}")  # for the legend, in order
    lines, counts = [HEAD], set()
    for row in SUITES["staleness"]:
        result = compare.load("staleness", row, compare.Args(results=args.results))
        if result is None:
            continue
        steps = np.linspace(0, result.reached, 401)[5:]
        ours = np.array([result.at(step) for step in steps])  # (points, seeds)
        std = ours.std(1, ddof=1) if ours.shape[1] > 1 else None
        trained = steps * (float(row.label) if row.panel == "reuse" else 1)
        panels = [(axes[list(KINDS).index(row.panel)], steps)]
        panels += [(axes[3], trained)] if row.panel == "reuse" else []
        for ax, x in panels:
            mean, band = ours.mean(1)[::4], std[::4] if std is not None else None
            figures.curve(ax, x[::4], mean, band, color=shades[float(row.label)], label=row.label)
        means = [x.mean(0) for x in (ours, ours[trained <= 100_000], ours[-1:])]
        cells = [f"{x.mean():.0f}" + (f" ± {x.std(ddof=1):.0f}" if len(x) > 1 else "") for x in means]
        lines.append([row.panel, row.label, str(ours.shape[1]), *cells])
        counts.add(ours.shape[1])
    seeds = " or ".join(f"{n} seed{'s' * (n > 1)}" for n in sorted(counts))
    for ax, title in zip(axes, KINDS.values(), strict=False):
        figures.finish(ax, f"{title} ({seeds})")
    figures.finish(axes[3], f"sample reuse, passes ({seeds})", xlabel="samples trained on")
    axes[3].set_xlim(0, 200_000)
    figures.legend(figure, columns=10)
    print(compare.markdown(lines))
    if args.write:
        figures.save(figure, args.results / "staleness/staleness_and_reuse")
        if args.results.resolve() == compare.RESULTS:
            compare.write_between(PAGE, "staleness", compare.markdown(lines))


if __name__ == "__main__":
    main()
