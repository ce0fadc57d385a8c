"""Our results beside the published ones: a verdict a row, a table, curves, one HTML page.

    python benchmark/compare.py                    # all suites
    python benchmark/compare.py classic --write    # and rewrite this suite's table in RESULTS.md
    python benchmark/compare.py ngu --reach 0.5    # and say when each seed first was so good

A row is judged by its first target, at the last step that all our seeds reached, by the mean of each seed's
last 100 training episodes: *short* if the whole 95 % bootstrap interval of our mean over seeds lies below the
published mean less its spread (std over seeds, or the band that the source drew), *better* if it lies above
mean plus spread, else *reproduced*. One seed has no interval: its mean stands for it. The last column is the
share of published steps at which our mean was no lower than theirs less the band. A short row: exit code 1.
"""

import base64
import csv
import html
import io
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import tyro
from scipy.stats import bootstrap, trim_mean

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmark.suites import SUITES, Row, Target  # noqa: E402

PAGE = ROOT / "benchmark/RESULTS.md"


@dataclass
class Args:
    suites: tyro.conf.Positional[tuple[str, ...]] = tuple(SUITES)  # which suites
    results: Path = ROOT / "benchmark/results"  # CSVs to read, and where pictures and pages go
    flags: str = ""  # results of runs with these flags of run.py
    write: bool = False  # rewrite the tables of these suites in RESULTS.md
    reach: float | None = None  # say at which steps the mean of 20 episodes first was so high


@cache
def published() -> dict[tuple[str, str], np.ndarray]:
    """Curves (points, 3) of step, mean and band by (algo, env_id)."""
    curves = {}
    with open(ROOT / "benchmark/published/curves.csv") as file:
        for row in csv.DictReader(file):
            point = [float(row["step"]), float(row["mean"]), float(row["band"] or 0)]
            curves.setdefault((row["algo"], row["env_id"]), []).append(point)
    return {key: np.array(sorted(points)) for key, points in curves.items()}


@dataclass
class Result:
    """What we have of a row: episodes (n, 2) of step and return, by seed."""

    row: Row
    seeds: dict[int, np.ndarray]

    @property
    def reached(self) -> float:
        """Step that all seeds reached."""
        return min(episodes[-1, 0] for episodes in self.seeds.values())

    def at(self, step: float) -> np.ndarray:
        """Mean of the last 100 episodes up to a step, (seeds,); NaN before the first episode."""
        values = []
        for episodes in self.seeds.values():
            returns = episodes[: np.searchsorted(episodes[:, 0], step, side="right"), 1]
            values.append(returns[-100:].mean() if len(returns) else np.nan)
        return np.array(values)

    def first(self, level: float) -> np.ndarray:
        """Step at which the mean of 20 episodes first was level or more, (seeds,); NaN where it never was."""
        steps = []
        for episodes in self.seeds.values():
            means = np.convolve(episodes[:, 1], np.full(20, 1 / 20), "valid")
            high = (means >= level).nonzero()[0]
            steps.append(episodes[high[0] + 19, 0] if len(high) else np.nan)
        return np.array(steps)

    @property
    def is_cut(self) -> bool:
        """Ended before 98 % of the suite's steps: its last episode may have ended a little before them."""
        return self.reached < 0.98 * self.row.steps


def interval(values: np.ndarray, statistic) -> tuple[float, float]:
    """95 % bootstrap interval over seeds; the value itself where all are the same."""
    if len(values) < 2 or np.ptp(values) == 0:
        return float(statistic(values)), float(statistic(values))
    found = bootstrap((values,), statistic, method="percentile", rng=np.random.default_rng(0))
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def iqm(values: np.ndarray, axis: int = -1) -> np.ndarray:
    """Interquartile mean along an axis."""
    return trim_mean(values, 0.25, axis=axis)


def goal(target: Target, result: Result) -> tuple[float, float] | None:
    """Published mean and spread at the step that we reached, if the target says anything of it."""
    points = published()[target.curve] if target.curve else None
    if target.mean is not None and not result.is_cut:
        return target.mean, target.std
    if points is None or result.reached < points[0, 0]:
        return None
    return tuple(float(np.interp(result.reached, points[:, 0], points[:, k])) for k in (1, 2))


def verdict(result: Result, target: Target) -> str:
    theirs = goal(target, result)
    if theirs is None:
        return "not comparable"
    low, high = interval(result.at(result.reached), np.mean)
    if high < theirs[0] - theirs[1]:
        return "short"
    return "better" if low > theirs[0] + theirs[1] else "reproduced"


def along(result: Result, target: Target) -> str:
    """Share of the published steps we passed at which our mean was at least theirs less their band."""
    if not target.curve:
        return ""
    points = published()[target.curve]
    points = points[points[:, 0] <= result.reached]
    ours = np.array([result.at(step).mean() for step in points[:, 0]])
    seen = np.isfinite(ours)
    return f"{(ours >= points[:, 1] - points[:, 2])[seen].mean():.0%}" if seen.any() else ""


def load(suite: str, row: Row, args: Args) -> Result | None:
    prefix, seeds = f"{row.name(args.flags)}__", {}
    for path in (args.results / suite).glob("*.csv"):
        seed = path.stem.removeprefix(prefix)
        if seed.isdigit():
            seeds[int(seed)] = np.loadtxt(path, delimiter=",", skiprows=1, usecols=(0, 2))
    return Result(row, dict(sorted(seeds.items()))) if seeds else None


def number(x: float) -> str:
    digits = 0 if abs(x) >= 1000 else 1 if abs(x) >= 10 else 2
    return f"{x:.{digits}f}".replace("-", "−")


def table(results: list[tuple[Row, Result | None]]) -> list[list[str]]:
    """Rows of cells for Markdown and HTML, the head first."""
    head = [
        "script",
        "task",
        "steps",
        "seeds",
        "ours (mean ± std)",
        "IQM [95 %]",
        "published",
        "verdict",
        "curve",
    ]
    lines = [head]
    for row, result in results:
        task = row.env_id.split(":")[-1].replace("NoFrameskip-v4", "")
        task += f", {row.label}" if row.label else ""
        if result is None:
            wanted = " / ".join(
                f"{number(t.mean)} ± {number(t.std)} ({t.by})" for t in row.targets if t.mean is not None
            )
            lines.append(
                [
                    row.script,
                    task,
                    f"{row.steps / 1e6:g}M",
                    "",
                    "",
                    "",
                    wanted or "a curve" * bool(row.targets),
                    "not run",
                    "",
                ]
            )
            continue
        ours = result.at(result.reached)
        theirs = []
        for target in row.targets:
            if value := goal(target, result):
                theirs.append(f"{number(value[0])} ± {number(value[1])} ({target.by})")
        said = next(
            (v for t in row.targets if (v := verdict(result, t)) != "not comparable"), "not comparable"
        )
        said = said if row.targets else "nothing published"
        along_curve = next((a for t in row.targets if (a := along(result, t))), "")
        steps = f"{row.steps / 1e6:g}M"
        if result.is_cut:
            said += f", cut at {result.reached / 1e6:.2g}M"
            steps = f"{result.reached / 1e6:.2g}M of {steps}"
        low, high = interval(ours, iqm)
        spread = (
            f"{number(ours.mean())} ± {number(ours.std(ddof=len(ours) > 1))}"
            if len(ours) > 1
            else number(ours.mean())
        )
        middle = f"{number(iqm(ours))} [{number(low)}, {number(high)}]" if len(ours) > 1 else ""
        seeds = ", ".join(map(str, result.seeds))
        lines.append([row.script, task, steps, seeds, spread, middle, " / ".join(theirs), said, along_curve])
    return lines


def markdown(lines: list[list[str]]) -> str:
    head, *body = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([head, "|---" * len(lines[0]) + "|", *body])


def picture(suite: str, results: list[tuple[Row, Result | None]]) -> bytes:
    """PNG: a panel a row that was run, with our seeds, their mean, and the published curves and scores."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [(row, result) for row, result in results if result]
    columns = min(3, len(shown))
    lines = -(-len(shown) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4 * columns, 2.8 * lines), squeeze=False)
    for ax, (row, result) in zip(axes.flat, shown, strict=False):
        steps = np.linspace(0, result.reached, 101)[1:]
        ours = np.array([result.at(step) for step in steps])
        ax.plot(steps, ours, color="tab:blue", alpha=0.3, linewidth=0.8)
        ax.plot(steps, ours.mean(1), color="tab:blue", label=f"{row.script}.py")
        for target, color in zip(
            row.targets, ("tab:orange", "tab:green", "tab:red", "tab:purple"), strict=False
        ):
            if target.curve:
                x, mean, band = published()[target.curve].T
                near = x <= max(1.25 * result.reached, x[0])
                ax.plot(x[near], mean[near], color=color, linewidth=1, label=target.by)
                ax.fill_between(
                    x[near], (mean - band)[near], (mean + band)[near], color=color, alpha=0.15, linewidth=0
                )
            elif not result.is_cut:
                ax.errorbar(
                    row.steps,
                    target.mean,
                    target.std,
                    fmt="o",
                    color=color,
                    capsize=3,
                    markersize=4,
                    label=target.by,
                )
        ax.set_title(", ".join(filter(None, (row.env_id.split(":")[-1], row.label))), fontsize=9)
        ax.tick_params(labelsize=7)
        ax.legend(fontsize=6)
    for ax in axes.flat[len(shown) :]:
        ax.axis("off")
    figure.suptitle(f"{suite}: return of the last 100 training episodes by environment step", fontsize=10)
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=90, metadata={"Software": None})
    plt.close(figure)
    return buffer.getvalue()


def page(sections: list[tuple[str, list[list[str]], bytes | None]]) -> str:
    """One HTML page with everything in it."""
    parts = []
    for suite, lines, png in sections:
        head, *body = lines
        cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>" for line in body
        )
        image = f'<img src="data:image/png;base64,{base64.b64encode(png).decode()}">' if png else ""
        parts.append(f"<h2>{suite}</h2><table><tr>{cells}</tr>{rows}</table>{image}")
    style = "body{font:14px sans-serif;margin:2em} table{border-collapse:collapse} "
    style += "td,th{border:1px solid #ccc;padding:3px 8px}"
    return (
        f"<!doctype html><meta charset=utf-8><title>Benchmark</title><style>{style}</style>{''.join(parts)}\n"
    )


def main():
    args = tyro.cli(Args)
    if unknown := set(args.suites) - set(SUITES):
        print(
            f"compare.py: error: no suite {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}",
            file=sys.stderr,
        )
        sys.exit(2)
    sections, is_short = [], False
    for suite in args.suites:
        results = [(row, load(suite, row, args)) for row in SUITES[suite]]
        lines, png = table(results), None
        if any(result for _, result in results):
            png = picture(suite, results)
            (args.results / suite / "curves.png").write_bytes(png)
        print(f"\n{suite}\n\n{markdown(lines)}")
        for row, result in results if args.reach is not None else ():
            if result:
                steps = ", ".join(f"{step:.0f}" for step in result.first(args.reach))
                print(f"{row.name()}: {args.reach:g} first at {steps}")
        is_short |= any(line[-2].startswith("short") for line in lines)
        sections.append((suite, lines, png))
    (args.results / "index.html").write_text(page(sections))
    if args.write:
        text = PAGE.read_text()
        for suite, lines, _ in sections:
            begin, end = f"<!-- {suite} -->", f"<!-- end of {suite} -->"
            before, _, rest = text.partition(begin)
            text = f"{before}{begin}\n{markdown(lines)}\n{end}{rest.partition(end)[2]}"
        PAGE.write_text(text)
    sys.exit(int(is_short))


if __name__ == "__main__":
    main()
