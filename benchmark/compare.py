"""Our results beside the published ones: a table a suite, with a verdict a row, and figures.

    python benchmark/compare.py                    # prints the tables of all suites
    python benchmark/compare.py classic --write    # and writes its figure, its table in RESULTS.md, a page
    python benchmark/compare.py ngu --reach 0.5    # and says when each seed first was so good

A row has each seed's mean of its last 100 training episodes, at the last step that all seeds reached. It is
judged beside all of its published means that have a spread, as verdict.py says. Without a word are rows of
fewer than five seeds, rows that were cut, rows whose seeds are of an unknown build or of several, rows of
which nothing with a spread is published, and those of tasks where random actions were not measured or
would not be called lower. With a --total-timesteps in --flags nothing is published. A row that is lower: exit
code 1. Where a row was not run, but results of other flags are there, a line below the table names the flags.
"""

import csv
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmark import figures  # noqa: E402
from benchmark.cli import fail, read_csv, write_file  # noqa: E402
from benchmark.run import check_flags, read_table  # noqa: E402
from benchmark.suites import PUBLISHED, RENAMED, SUITES, Row, Target  # noqa: E402
from benchmark.verdict import LEAST_SEEDS, Published, iqm, verdict  # noqa: E402

RESULTS = ROOT / "benchmark/results"
PAGE = ROOT / "benchmark/RESULTS.md"
RANDOM = RESULTS / "random_policy.csv"
HEAD = "script|task|steps|seeds|mean ± std|IQM|published|difference in % [95 %]|verdict|build".split("|")
HELP = tyro.conf.arg(help=f"of {', '.join(SUITES)}")
SuiteNames = Annotated[tuple[str, ...], tyro.conf.Positional, HELP]


@dataclass
class Args:
    suites: SuiteNames = tuple(SUITES)
    results: Path = RESULTS  # folder of run.py to read, and where figures and the page go
    flags: str = ""  # results of runs with these flags of run.py
    write: bool = False  # write figures and index.html; the tables of RESULTS.md, if they are of its results
    reach: float | None = None  # say at which steps the mean of 20 episodes first was so high


# === What was published ======================================================================


@cache
def curves() -> dict[tuple[str, str], np.ndarray]:
    """Curves (points, 4) of step, mean, band (NaN: none) and number of runs by (algo, env_id)."""
    found = {}
    with open(PUBLISHED / "curves.csv", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            point = [
                float(row["step"]),
                float(row["mean"]),
                float(row["band"] or "nan"),
                float(row["n_seeds"]),
            ]
            found.setdefault((row["algo"], row["env_id"]), []).append(point)
    return {key: np.array(sorted(points)) for key, points in found.items()}


@cache
def random_returns() -> dict[str, float]:
    """Mean return of random actions by task, of random_policy.py."""
    with open(RANDOM, encoding="utf-8") as file:
        return {row["task"]: float(row["mean"]) for row in csv.DictReader(file)}


def published(target: Target, step: float, is_end: bool) -> Published | None:
    """What a target says of a step of ours, if it says anything."""
    if not target.curve:
        spread = None if target.spread is None or target.at else target.spread
        return Published(target.by, target.env_id, target.mean, spread, target.runs) if is_end else None
    points = curves()[target.curve, target.env_id]
    if step < points[0, 0]:
        return None
    mean, band, runs = (np.interp(step, points[:, 0], points[:, k]) for k in (1, 2, 3))
    spread, by, last = None if np.isnan(band) else float(band), target.by, points[-1, 0]
    if last < 0.98 * step:  # no later point, so nothing to be judged by
        spread, by = None, f"{by}, at {millions(last)}"
    return Published(by, target.env_id, float(mean), spread, int(runs), target.is_std)


# === What we have ============================================================================


@dataclass
class Result:
    """What we have of a row: episodes (n, 2) of step and return by seed, and what made them."""

    row: Row
    seeds: dict[int, np.ndarray]
    files: set[str] = field(default_factory=set)  # fingerprints of the files that made them; one, or no word
    commits: set[str] = field(default_factory=set)  # that had these files

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


def episodes(path: Path) -> np.ndarray:
    """Step and return (n, 2) of a run's CSV."""
    rows = read_csv(path, ("step", "seconds", "return", "length"))
    try:
        found = np.array([(row["step"], row["return"]) for row in rows]).astype(float)
    except ValueError as error:
        fail(f"{path} is not the CSV of a run: {error}")
    if not rows or not np.isfinite(found).all():
        fail(f"{path} has no episodes, or returns that are not finite")
    return found


def load(suite: str, row: Row, args: Args) -> Result | None:
    folder, prefix = args.results / suite, f"{row.name(args.flags)}__"
    runs, result = read_table(folder / "runs.csv"), Result(row, {})
    for path in sorted(folder.glob("*.csv")):
        seed = path.stem.removeprefix(prefix)
        if path.stem.startswith(prefix) and seed.isdigit():
            result.seeds[int(seed)] = episodes(path)
            run = runs.get(path.stem, dict(commit="unknown", fingerprint="unknown", changed="nothing"))
            is_changed = any(file.split()[0] in run["changed"] for file in run["fingerprint"].split(", "))
            result.files.add(run["fingerprint"])
            result.commits.add(run["commit"] + " and changes" * is_changed)
    result.seeds = dict(sorted(result.seeds.items()))
    return result if result.seeds else None


def flags_between(row: Row, name: str) -> str | None:
    """Flags that give the results of a row this name, or None if none do."""
    new_names = {old: new for new, old in RENAMED.get(row.script, {}).items()}
    more = {}
    for word in name.split("__")[2:]:
        flag, _, value = word.partition("=")
        flag = new_names.get(flag, flag)
        if row.options().get(flag) != value:
            more[flag] = value
    flags = flags_text(more)
    return flags if row.name(flags) == name else None


def other_flags(suite: str, rows: list[Row], args: Args) -> dict[Row, Counter[str]]:
    """For each row, the flags that would show CSVs that no row shows, and the number of these CSVs.

    A CSV belongs to the row from whose flags it differs least.
    """
    shown, found = {row.name(args.flags) for row in rows}, {}
    for path in sorted((args.results / suite).glob("*__*.csv")):
        name, _, seed = path.stem.rpartition("__")
        if name in shown or not seed.isdigit():
            continue
        flags = {row: x for row in rows if (x := flags_between(row, name)) is not None}
        if flags:
            row = min(flags, key=lambda row: len(flags[row].split()))
            found.setdefault(row, Counter())[flags[row]] += 1
    return found


def hints(suite: str, results: list[tuple[Row, Result | None]], args: Args) -> list[str]:
    """A line for each row that was not run but has CSVs of other flags, and for each of these flags."""
    lines, others = [], other_flags(suite, [row for row, _ in results], args)
    for row, result in results:
        if result is not None:
            continue
        for flags, number in others.get(row, {}).items():
            how = f"--flags='{flags}'" if flags else "compare.py without --flags"
            csvs = f"{number} CSV{'s' * (number > 1)}"
            lines.append(f"{row.name()}: not run with these flags; {how} shows {csvs}")
    return lines


def judge(result: Result, theirs: list[Published]) -> tuple[str, str]:
    """The difference to the published mean that decides, with its interval, and the verdict."""
    ours = result.at(result.reached)
    with_spread = [x for x in theirs if x.error is not None]
    if not result.row.targets:
        return "", "nothing published"
    if result.is_cut:
        return "", f"cut at {result.reached / 1e6:.2g}M"
    if not with_spread:
        return "", "published without a spread"
    if len(ours) == 1:
        return "", "1 seed: no word"
    source, (middle, low, high), said = verdict(ours, with_spread)
    cell = f"{signed(middle)} [{signed(low)}, {signed(high)}] to {number(source.mean)}"
    if len(ours) < LEAST_SEEDS:
        return cell, f"{len(ours)} seeds: no word"
    if "unknown" in result.files or len(result.files) > 1:
        return cell, "not of one build: no word"
    random = random_returns().get(result.row.task)
    if random is None:
        return cell, "random actions not measured: no word"
    if verdict(ours - ours.mean() + random, with_spread)[2] != "lower":
        return cell, "random actions would pass: no word"
    return cell, said


# === Tables ==================================================================================


def number(x: float) -> str:
    digits = 0 if abs(x) >= 1000 else 1 if abs(x) >= 10 else 2
    return f"{x:.{digits}f}".replace("-", "−")


def signed(x: float) -> str:
    return f"{x:+.1f}".replace("-", "−")


def millions(steps: float) -> str:
    return f"{steps / 1e6:.3g}M"


def cell_of(theirs: Published, row: Row) -> str:
    """Mean, spread and what a reader must know of them."""
    about = [theirs.by]
    if theirs.env_id != row.task:
        about.append(theirs.env_id.removeprefix(row.task.rpartition("-")[0]))
    about.append(f"{theirs.runs} run{'s' * (theirs.runs > 1)}")
    spread = ""
    if theirs.spread is not None:
        spread = f" ± {number(theirs.spread)}{'' if theirs.is_std else '?'}"
    return f"{number(theirs.mean)}{spread} ({', '.join(about)})"


def shared_flags(rows: list[Row], script: str) -> dict[str, str]:
    """Flags that all rows of a script have."""
    options = [row.options() for row in rows if row.script == script]
    return {name: x for name, x in options[0].items() if all(o.get(name) == x for o in options)}


def flags_text(options: dict[str, str]) -> str:
    return " ".join(f"--{name} {x}".strip() for name, x in options.items())


def line_of(row: Row, result: Result | None, shared: dict[str, str]) -> list[str]:
    """Cells of a row."""
    own = flags_text({name: x for name, x in row.options().items() if name not in shared})
    task = ", ".join(filter(None, (row.task.replace("NoFrameskip-v4", ""), row.panel, row.label)))
    task += f" `{own}`" if own else ""
    end = result is None or not result.is_cut
    step = row.steps if result is None else result.reached
    theirs = [x for target in row.targets if (x := published(target, step, end))]
    cells = [cell_of(x, row) for x in theirs]
    for k, target in enumerate(target for target in row.targets if published(target, step, end)):
        if target.at:
            ours = f", ours {number(result.at(target.at).mean())}" if result else ""
            cells[k] += f" at {millions(target.at)}{ours}"
    if result is None:
        return [row.script, task, millions(row.steps), "", "", "", "; ".join(cells), "", "not run", ""]
    ours = result.at(result.reached)
    names = list(result.seeds)
    is_row = names == list(range(names[0], names[-1] + 1)) and len(names) > 1
    seeds = f"{names[0]} to {names[-1]}" if is_row else ", ".join(map(str, names))
    each = f"{seeds}: {', '.join(map(number, ours))}"
    spread = f"{number(ours.mean())} ± {number(ours.std(ddof=1))}" if len(ours) > 1 else number(ours.mean())
    middle = number(iqm(ours)) if len(ours) >= LEAST_SEEDS else ""
    steps = f"{millions(result.reached)} of {millions(row.steps)}" if result.is_cut else millions(row.steps)
    builds = ", ".join(sorted(result.commits))
    return [row.script, task, steps, each, spread, middle, "; ".join(cells), *judge(result, theirs), builds]


def table(results: list[tuple[Row, Result | None]]) -> list[list[str]]:
    """Rows of cells for Markdown and HTML, the head first."""
    rows = [row for row, _ in results]
    return [HEAD, *(line_of(row, result, shared_flags(rows, row.script)) for row, result in results)]


def markdown(lines: list[list[str]]) -> str:
    head, *body = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([head, "|---" * len(lines[0]) + "|", *body])


def flags_line(rows: list[Row]) -> str:
    """What all rows of a script have in common."""
    said = []
    for script in dict.fromkeys(row.script for row in rows):
        if shared := flags_text(shared_flags(rows, script)):
            said.append(f"`{script}.py` has `{shared}` in all rows.")
    return "\n".join(said)


def section(suite: str, results: list[tuple[Row, Result | None]], folder: Path | str = "results") -> str:
    """Of RESULTS.md: the table, what its rows have in common, and the figure in a folder of results."""
    parts = [markdown(table(results)), flags_line([row for row, _ in results])]
    parts += [f"![{suite}]({folder}/{suite}/curves.png)"] if any(result for _, result in results) else []
    return "\n\n".join(filter(None, parts))


# === Figures =================================================================================


def name_of(row: Row) -> str:
    return ", ".join(filter(None, (f"{row.script}.py", row.label)))


def draw_published(ax, target: Target, row: Row, until: float, color: str, shift: float):
    """A curve as far as ours go, or a score. Final ones are shifted so that several stand side by side."""
    if target.curve:
        points = curves()[target.curve, target.env_id]
        points = points[points[:, 0] <= max(1.05 * until, points[0, 0])]
        band = points[:, 2] if target.is_std and not np.isnan(points[:, 2]).any() else None
        figures.curve(ax, points[:, 0], points[:, 1], band, color=color, label=target.by)
    elif (target.at or row.steps) <= 1.05 * until:
        at, label = (target.at, target.by) if target.at else (row.steps + shift, f"{target.by}, final")
        bar = dict(fmt="o", color=color, capsize=3, markersize=4)
        ax.errorbar(at, target.mean, target.spread, label=label, **bar)


def figure(results: list[tuple[Row, Result | None]]) -> Figure:
    """A panel a task: our rows that were run, and what was published of them."""
    shown, targets = {}, {}
    for row, result in results:
        if result:
            shown.setdefault(row.panel or row.task, []).append(result)
            targets.setdefault(row.panel or row.task, {}).update({target: row for target in row.targets})
    names = [name_of(result.row) for panel in shown.values() for result in panel]
    names += [target.by for panel in targets.values() for target in panel]
    color = figures.colors(names)
    drawing, axes = figures.panels(len(shown))
    for ax, (task, panel) in zip(axes, shown.items(), strict=True):
        for result in panel:
            steps = np.linspace(0, result.reached, 101)[1:]
            ours = np.array([result.at(step) for step in steps])
            std = ours.std(1, ddof=1) if ours.shape[1] > 1 else None
            name = name_of(result.row)
            figures.curve(ax, steps, ours.mean(1), std, color=color[name], label=name)
        until = max(result.reached for result in panel)
        for k, (target, row) in enumerate(targets[task].items()):
            draw_published(ax, target, row, until, color[target.by], 0.015 * k * until)
        counts = sorted({len(result.seeds) for result in panel})
        seeds = " or ".join("one seed" if n == 1 else f"{n} seeds" for n in counts)
        figures.finish(ax, f"{task.replace('NoFrameskip-v4', '')}, {seeds}")
    figures.legend(drawing)
    return drawing


# === Main ====================================================================================


def write_between(page: Path, name: str, content: str):
    """Replaces what a page has between two comments."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"\n<!-- end of {name} -->")
    if not begin or not end:
        fail(f"{page} has no place for {name}")
    write_file(page, before + begin + content + end + after)


def write(args: Args, results: dict[str, list[tuple[Row, Result | None]]]):
    """Figures of the suites asked for, the page of all, and the tables of RESULTS.md."""
    for suite in args.suites:
        if any(result for _, result in results[suite]):
            figures.save(figure(results[suite]), args.results / suite / "curves")
    parts = []
    for suite, content in results.items():
        parts += [f"<h2>{suite}</h2>", figures.html_table(table(content))]
        parts += [f"<p>{flags_line([row for row, _ in content])}"]
        parts += [figures.html_image(figure(content))] if any(result for _, result in content) else []
    write_file(args.results / "index.html", figures.html_page("Benchmark", parts))
    if args.results.resolve() == RESULTS and not args.flags:
        for suite in args.suites:
            write_between(PAGE, suite, section(suite, results[suite]))


def main():
    args = tyro.cli(Args, description=__doc__)
    if unknown := [suite for suite in args.suites if suite not in SUITES]:
        fail(f"no suite {', '.join(unknown)}; there are {', '.join(SUITES)}")
    check_flags(args.flags)
    if not args.results.is_dir():
        fail(f"--results {args.results}: there is no such folder")
    steps = Row("", "", 0).options(args.flags).get("total-timesteps")
    suites = SUITES
    if steps:  # another schedule than the published runs had
        if not steps.isdigit():
            fail(f"--flags: total-timesteps cannot be {steps}")
        suites = {
            suite: [replace(row, steps=int(steps), targets=()) for row in SUITES[suite]] for suite in SUITES
        }
    results = {suite: [(row, load(suite, row, args)) for row in suites[suite]] for suite in suites}
    is_lower = False
    for suite in args.suites:
        print(f"\n{suite}\n\n{section(suite, results[suite], args.results)}")
        for line in hints(suite, results[suite], args):
            print(line)
        for row, result in results[suite] if args.reach is not None else ():
            if result:
                steps = ", ".join(f"{step:.0f}" for step in result.first(args.reach))
                print(f"{row.name()}: {args.reach:g} first at {steps}")
        is_lower |= any(line[-2] == "lower" for line in table(results[suite]))
    if args.write:
        write(args, results)
    sys.exit(int(is_lower))


if __name__ == "__main__":
    main()
