"""Our results beside others': ratios with intervals, one summary, tables with all seeds, figures.

    python benchmark/compare.py                    # prints the tables of all suites
    python benchmark/compare.py classic --write    # and writes its figure, its tables in the pages, a page
    python benchmark/compare.py ngu --reach 0.5    # and says when each seed first was so good

A row has each seed's mean of its last 100 training episodes, at the last step that all seeds reached. It
stands beside three groups of runs: CleanRL's own script run here (published/cleanrl/), what CleanRL published
of the same version of the task, and all that was published, pooled. verdict.py says what the ratios and words
are; a row that was cut has "cut" for a word, one with seeds of several builds or of an unknown one says that.
A row that is below the first group that gives an interval: exit code 1.

With --flags, the project's own pages and figures stay as they are; index.html shows those runs. With a
--total-timesteps in --flags nothing was published. Where a row was not run, but results of other flags
are there, a line below the table names the flags.
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
from benchmark.files import csv_files, fail, read_csv, write_file  # noqa: E402
from benchmark.run import check_flags, read_table  # noqa: E402
from benchmark.suites import CLEANRL, PUBLISHED, RENAMED, SUITES, Row, Target  # noqa: E402
from benchmark.verdict import Ratio, Runs, iqm, joint, pool, ratio, runs_of, word  # noqa: E402

RESULTS = ROOT / "benchmark/results"
SUMMARY = ROOT / "benchmark/RESULTS.md", ROOT / "README.md"  # pages that have the summary
TABLES = ROOT / "benchmark/TABLES.md"  # has a table a suite
METHODS = ROOT / "benchmark/METHODS.md"  # has the table of controls
CONTROLS = {  # what is changed, by folder of controls/
    "mujoco_3_4": "MuJoCo 3.4.0",
    "reward_scaling_2018": "the reward scaling of 2018",
    "gymnasium_normalizers": "gymnasium's normalizers",
    "first_build": "the build of 21 November 2026",
    "first_build_again": "that build, run again on 27 November",
}
CHANGED = {"mujoco_11_bins": "actions in 11 bins", "mujoco_v5": "version 5 of the task"}  # by suite
RANDOM = RESULTS / "random_policy.csv"
LEGEND = """A ratio is ours by theirs, counted from random actions, with its 95 % interval. matches: it is
within 10 % of 1; below, above: it is on one side of 1; open: it takes more runs; cut: stopped before the end.
Bands of curves: quartiles of ours, what was published of others. A question mark: the source does not say
what its band is. build: the commit of the script. `benchmark/METHODS.md` says more."""
LEAST_SEEDS = 5  # for an interquartile mean
HERE = "CleanRL, run here"
GROUPS = HERE, "CleanRL, published", "all published"
CLEANRL_BY = "CleanRL", "the blog"  # the blog's runs are of CleanRL's authors and scripts
HEAD = ["script", "task", "steps", "seeds", "mean ± std", "IQM", "others"]
HEAD += [f"by {group}" for group in GROUPS] + ["build"]
HELP = tyro.conf.arg(help=f"of {', '.join(SUITES)}")
SuiteNames = Annotated[tuple[str, ...], tyro.conf.Positional, HELP]


@dataclass
class Args:
    suites: SuiteNames = tuple(SUITES)
    results: Path = RESULTS  # folder of run.py to read, and where figures and the page go
    flags: str = ""  # results of runs with these flags of run.py
    write: bool = False  # write index.html and figures; of the project's own results also the pages' tables
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


def published(target: Target, step: float, is_end: bool) -> Runs | None:
    """What a target says of a step of ours, if it says anything."""
    if not target.curve:
        return Runs(target.by, target.env_id, target.mean, target.spread, target.runs) if is_end else None
    points = curves()[target.curve, target.env_id]
    if step < points[0, 0]:
        return None
    mean, band, runs = (np.interp(step, points[:, 0], points[:, k]) for k in (1, 2, 3))
    if target.mean is not None and is_end:
        mean = target.mean
    spread, by, last = None if np.isnan(band) else float(band), target.by, points[-1, 0]
    if last < 0.98 * step:  # no later point, so nothing to stand beside
        spread, by = None, f"{by}, at {millions(last)}"
    return Runs(by, target.env_id, float(mean), spread, int(runs), target.is_std)


@cache
def run_here(script: str, task: str) -> "Result | None":
    """Runs of CleanRL's script, by seed."""
    files = csv_files(PUBLISHED / "cleanrl", f"{task}__{CLEANRL[script]}__")
    runs = {run["run"]: run["flags"] for run in read_csv(PUBLISHED / "cleanrl/runs.csv")}
    seeds = {
        int(seed): episodes(path, ("step", "return"))
        for seed, path in files.items()
        if "--total-timesteps" not in runs.get(f"{task}__{CLEANRL[script]}__{seed}", "")  # another schedule
    }
    return Result(Row(script, task, 0), dict(sorted(seeds.items()))) if seeds else None


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

    def between(self, begin: float, end: float) -> np.ndarray:
        """Mean of the episodes that ended in (begin, end], (seeds,); NaN without one."""
        values = []
        for episodes in self.seeds.values():
            first, last = np.searchsorted(episodes[:, 0], (begin, end), side="right")
            values.append(episodes[first:last, 1].mean() if last > first else np.nan)
        return np.array(values)

    def first(self, level: float) -> np.ndarray:
        """Step at which the mean of 20 episodes first was level or more, (seeds,); NaN where it never was."""
        steps = []
        for episodes in self.seeds.values():
            sums = np.cumsum(np.append(0, episodes[:, 1]))
            high = (sums[20:] - sums[:-20] >= 20 * level).nonzero()[0]
            steps.append(episodes[high[0] + 19, 0] if len(high) else np.nan)
        return np.array(steps)

    @property
    def is_cut(self) -> bool:
        """Ended before 98 % of the suite's steps: its last episode may have ended a little before them."""
        return self.reached < 0.98 * self.row.steps

    @property
    def state(self) -> str | None:
        """What a ratio has for a word, where it can have none."""
        states = {"cut": self.is_cut, "of several builds": "unknown" in self.files or len(self.files) > 1}
        return ", ".join(state for state, is_so in states.items() if is_so) or None


def episodes(path: Path, columns=("step", "seconds", "return", "length")) -> np.ndarray:
    """Step and return (n, 2) of a run's CSV."""
    rows = read_csv(path, columns)
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
    for seed, path in csv_files(folder, prefix).items():
        if not seed.isdigit():  # with more flags
            continue
        result.seeds[int(seed)] = episodes(path)
        unknown = dict(commit="unknown", fingerprint="unknown", changed="nothing")
        run = runs.get(f"{prefix}{seed}", unknown)
        changed = run["changed"].replace(",", " ").split()
        is_changed = any(file.split()[0] in changed for file in run["fingerprint"].split(", "))
        result.files.add(run["fingerprint"])
        result.commits.add(run["commit"] + " and changes" * is_changed)
    result.seeds = dict(sorted(result.seeds.items()))
    return result if result.seeds else None


def flags_between(row: Row, name: str) -> str | None:
    """Flags that give the results of a row this name, or None if none do."""
    new_names = {old: new for new, old in RENAMED.get(row.script, {}).items()}
    more = {}
    for text in name.split("__")[2:]:
        flag, _, value = text.partition("=")
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
    for stem in csv_files(args.results / suite, ""):
        name, _, seed = stem.rpartition("__")
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


def run_beside(row: Row, result: Result | None) -> tuple[Runs, float] | None:
    """CleanRL's own runs at the last step that both have reached, and that step."""
    here = run_here(row.script, row.task) if row.is_comparable else None
    if here is None:
        return None
    step = min(here.reached, result.reached if result else row.steps)
    by = HERE if step > 0.98 * here.reached and step > 0.98 * row.steps else f"{HERE}, at {millions(step)}"
    return runs_of(by, row.task, here.at(step)), step


def published_beside(row: Row, result: Result | None) -> list[Runs]:
    """What was published of the last step that all seeds reached, or of the end of the schedule."""
    is_end = result is None or not result.is_cut
    step = result.reached if result else row.steps
    return [x for target in row.targets if (x := published(target, step, is_end))]


def ratios(row: Row, result: Result) -> dict[str, Ratio | None]:
    """Ours by each group of runs that came as far; None where random actions are as good or not measured."""
    groups, random = {}, random_returns().get(row.task)
    if (beside := run_beside(row, result)) and beside[1] > 0.98 * result.reached:
        groups[HERE] = beside
    # at the end of a schedule, scores: a curve may be of the same runs
    has_scores = not result.is_cut and any(target.mean is not None for target in row.targets)
    targets = tuple(x for x in row.targets if x.mean is not None or not has_scores)
    theirs = published_beside(replace(row, targets=targets), result)
    theirs = [x for x in theirs if x.deviation is not None]
    names = CLEANRL_BY if row.is_comparable else CLEANRL_BY[:1]
    if same := [x for x in theirs if x.by in names and x.env_id == row.task]:
        groups["CleanRL, published"] = same[0], result.reached
    if theirs:
        groups["all published"] = pool(theirs), result.reached
    return {
        group: None if random is None else ratio(runs_of("", "", result.at(step)), x, random)
        for group, (x, step) in groups.items()
    }


def first_ratio(row: Row, result: Result) -> Ratio | None:
    """To the first group of runs that gives an interval, else to the first."""
    found = [x for x in ratios(row, result).values() if x]
    return next((x for x in found if np.isfinite(x.variance)), found[0] if found else None)


def joint_lines(results: list[tuple[Row, Result | None]]) -> list[str]:
    """For each script and each group, the joint ratio over its tasks, where there are several."""
    lines = []
    for script in dict.fromkeys(row.script for row, _ in results):
        rows = [(row, result) for row, result in results if row.script == script and row.is_comparable]
        found = [ratios(row, result) for row, result in rows if result and not result.state]
        for group in GROUPS:
            kept = [x[group] for x in found if x.get(group) and np.isfinite(x[group].variance)]
            if len(kept) > 1:
                together = f"`{script}.py` by {group}, {len(kept)} tasks together"
                lines.append(f"- {together}: **{said(joint(kept))}**")
    return lines


# === Tables ==================================================================================


def number(x: float) -> str:
    digits = 0 if abs(x) >= 1000 else 1 if abs(x) >= 10 else 2
    return f"{x:.{digits}f}".replace("-", "−")


def signed(x: float) -> str:
    return f"{x:+.1f}".replace("-", "−")


def millions(steps: float) -> str:
    return f"{steps / 1e6:.3g}M"


def said(x: Ratio, state: str | None = None) -> str:
    """A ratio with its interval and its word, or another state than a word."""
    middle, low, high = x.interval
    interval = "" if np.isnan(low) else f" [{low:.2f}, {high:.2f}]"
    return f"{middle:.2f}{interval} {word(low, high) if state is None else state}".strip()


def version_of(env_id: str, row: Row) -> str:
    """ ", -v2" where theirs is this version of the row's task, else nothing."""
    return "" if env_id == row.task else f", {env_id.removeprefix(row.task.rpartition('-')[0])}"


def cell_of(theirs: Runs, row: Row) -> str:
    """Mean, spread and what a reader must know of them."""
    about = f"{theirs.by}{version_of(theirs.env_id, row)}, {theirs.runs} run{'s' * (theirs.runs > 1)}"
    spread = ""
    if theirs.spread is not None:
        was_run_here = theirs.by.startswith(HERE)  # else it stays as it was published
        spread = f" ± {number(theirs.deviation if was_run_here else theirs.spread)}"
        spread += "" if theirs.is_std else "?"
    return f"{number(theirs.mean)}{spread} ({about})"


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
    theirs = published_beside(row, result)
    if beside := run_beside(row, result):
        theirs.insert(0, beside[0])
    others = "; ".join(cell_of(x, row) for x in theirs)
    if result is None:
        return [row.script, task, millions(row.steps), "", "not run", "", others, "", "", "", ""]
    ours = result.at(result.reached)
    names = list(result.seeds)
    is_row = names == list(range(names[0], names[-1] + 1)) and len(names) > 1
    seeds = f"{names[0]} to {names[-1]}" if is_row else ", ".join(map(str, names))
    each = f"{seeds}: {', '.join(map(number, ours))}"
    spread = f"{number(ours.mean())} ± {number(ours.std(ddof=1))}" if len(ours) > 1 else number(ours.mean())
    middle = number(iqm(ours)) if len(ours) >= LEAST_SEEDS else ""
    steps = f"{millions(result.reached)} of {millions(row.steps)}" if result.is_cut else millions(row.steps)
    found = ratios(row, result)
    cells = ["" if found.get(group) is None else said(found[group], result.state) for group in GROUPS]
    builds = ", ".join(sorted(result.commits)).replace(" | ", ", ")  # a resumed run may have several
    return [row.script, task, steps, each, spread, middle, others, *cells, builds]


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


def mean_and_runs(x: Runs, row: Row, is_published: bool = False) -> str:
    """A cell of the summary. A standard deviation that was published stays as it was published.

    A question mark: the source does not say what its band is. It is read as a standard error.
    """
    spread = x.spread if is_published and x.is_std else x.deviation
    deviation = "" if spread is None else f" ± {number(spread)}{'' if x.is_std else '?'}"
    return f"{number(x.mean)}{deviation} ({x.runs}{version_of(x.env_id, row)})"


def summary(results: dict[str, list[tuple[Row, Result | None]]]) -> str:
    """A row for each script and task that CleanRL has, too, and the joint ratios.

    Means, deviations and numbers of runs; where ours were cut, all at their step, but for runs of CleanRL's
    that ended before: these at their last. The last column has the ratio to the first group of runs that
    gives an interval.
    """
    head = "script|task|steps|ours (seeds)|CleanRL, run here|CleanRL, published|openai/baselines|ratio"
    lines = [head.split("|")]
    for row, result in (pair for pairs in results.values() for pair in pairs):
        if not row.is_comparable:
            continue
        steps = millions(result.reached if result and result.is_cut else row.steps)
        cells = [f"`{row.script}`", row.task.replace("NoFrameskip-v4", ""), steps]
        ours = runs_of("ours", row.task, result.at(result.reached)) if result else None
        cells.append(mean_and_runs(ours, row) if result else "not run")
        beside = run_beside(row, result)
        is_early = beside and result and beside[1] < 0.98 * result.reached
        at = f" at {millions(beside[1])}" if is_early else ""
        cells.append(mean_and_runs(beside[0], row) + at if beside else "not run")
        for names in (CLEANRL_BY, ("openai/baselines", "openai/baselines 2018")):
            found = [x for x in published_beside(row, result) if x.by in names]
            found = [x for x in found if x.env_id == row.task] or found
            cells.append(mean_and_runs(found[0], row, is_published=True) if found else "")
        first = first_ratio(row, result) if result else None
        cells.append(said(first, result.state) if first else "")
        lines.append(cells)
    together = [line for pairs in results.values() for line in joint_lines(pairs)]
    return "\n\n".join(filter(None, (markdown(lines), "\n".join(together))))


def controls(results: dict[str, list[tuple[Row, Result | None]]]) -> str:
    """Table of MuJoCo's tasks with one thing changed, beside the same without it.

    Another version of a task has other rewards, so there is no ratio.
    """
    plain = {row.task: result for row, result in results["mujoco"] if row.is_comparable and result}
    changed = [
        (change, row.task, load("mujoco", row, Args(results=RESULTS / "controls" / folder)))
        for folder, change in CONTROLS.items()
        for row, _ in results["mujoco"]
    ]
    changed += [
        (change, row.task.replace("-v5", "-v4"), result)
        for suite, change in CHANGED.items()
        for row, result in results[suite]
    ]
    lines = ["with|task|runs with it|runs without|ratio".split("|")]
    for change, task, result in changed:
        if result and task in plain:
            both = [runs_of("", task, x.at(x.reached)) for x in (result, plain[task])]
            by = ratio(*both, random_returns()[task]) if result.row.task == task else None
            cells = [mean_and_runs(x, plain[task].row) for x in both]
            lines.append([change, task.removesuffix("-v4"), *cells, said(by) if by else ""])
    return markdown(lines)


def section(
    suite: str, results: list[tuple[Row, Result | None]], folder: Path | str | None = "results"
) -> str:
    """Of TABLES.md: the table, joint ratios, what its rows have in common, and the figure, if in a folder."""
    parts = [markdown(table(results)), "\n".join(joint_lines(results))]
    parts += [flags_line([row for row, _ in results])]
    parts += [f"![{suite}]({folder}/{suite}/curves.png)"] if folder and is_drawn(results) else []
    return "\n\n".join(filter(None, parts))


# === Figures =================================================================================


POINTS = 50  # of a curve


def name_of(row: Row) -> str:
    return ", ".join(filter(None, (f"{row.script}.py", row.label)))


def label_of(target: Target, runs: int, row: Row) -> str:
    """Whose, of which version of the task, and how many runs."""
    version = (
        "" if target.env_id == row.task else f", {target.env_id.removeprefix(row.task.rpartition('-')[0])}"
    )
    return f"{target.by}{version}, {runs} run{'s' * (runs > 1)}"


def is_drawn(results: list[tuple[Row, Result | None]]) -> bool:
    """Whether there is something for a figure."""
    return any(result and row.is_drawn for row, result in results)


def draw_runs(ax, result: Result, until: float, **style):
    """The mean of runs with its quartiles over them; below four runs, a thin line each."""
    steps = np.linspace(0, until, POINTS + 1)[1:]
    returns = np.array([result.between(step - until / POINTS, step) for step in steps])
    is_there = np.isfinite(returns).all(1)
    steps, returns = steps[is_there], returns[is_there]
    line = figures.curve(ax, steps, returns.mean(1), **style)
    if returns.shape[1] >= 4:
        figures.band(ax, steps, *np.quantile(returns, (0.25, 0.75), axis=1), line)
    elif returns.shape[1] > 1:
        ax.plot(steps, returns, linewidth=0.5, color=line.get_color())


def draw_published(ax, target: Target, row: Row, until: float, color: str, shift: float):
    """A curve as far as ours go, or a score at the end; another version of the task is dotted, or hollow.

    Scores are shifted so that several stand side by side.
    """
    is_same = target.env_id == row.task
    if target.curve:
        points = curves()[target.curve, target.env_id]
        points = points[points[:, 0] <= max(1.05 * until, points[0, 0])]
        style = dict(color=color, linestyle="--" if is_same else ":")
        label = label_of(target, int(points[-1, 3]), row)
        line = figures.curve(ax, points[:, 0], points[:, 1], label=label, **style)
        if not np.isnan(points[:, 2]).any():
            figures.band(ax, points[:, 0], *(points[:, 1] + sign * points[:, 2] for sign in (-1, 1)), line)
    elif row.steps <= 1.05 * until:
        face = dict(markerfacecolor=color if is_same else "white", fmt="o" if is_same else "s")
        bar = dict(color=color, capsize=3, markersize=4, label=label_of(target, target.runs, row), **face)
        ax.errorbar(row.steps + shift, target.mean, target.spread, **bar)


def figure(results: list[tuple[Row, Result | None]]) -> Figure:
    """A panel a task: our rows that were run, CleanRL run here, and what was published."""
    shown, targets = {}, {}
    for row, result in results:
        if result and row.is_drawn:
            shown.setdefault(row.panel or row.task, []).append(result)
            targets.setdefault(row.panel or row.task, {}).update({target: row for target in row.targets})
    names = [name_of(result.row) for panel in shown.values() for result in panel]
    names += [target.by for panel in targets.values() for target in panel]
    color = figures.colors(names)
    drawing, axes = figures.panels(len(shown))
    for ax, (task, panel) in zip(axes, shown.items(), strict=True):
        until = max(result.reached for result in panel)
        for result in panel:
            name = name_of(result.row)
            draw_runs(ax, result, result.reached, color=color[name], label=name)
            here = run_here(result.row.script, result.row.task) if result.row.is_comparable else None
            if here:
                style = dict(color=figures.PUBLISHED["CleanRL"], linestyle="-.")
                runs = f"{len(here.seeds)} run{'s' * (len(here.seeds) > 1)}"
                name = f"CleanRL's {CLEANRL[result.row.script]}.py, run here, {runs}"
                draw_runs(ax, here, min(until, here.reached), label=name, **style)
        for k, (target, row) in enumerate(targets[task].items()):
            draw_published(ax, target, row, until, color[target.by], 0.015 * k * until)
        counts = sorted({len(result.seeds) for result in panel})
        seeds = " or ".join("one seed" if n == 1 else f"{n} seeds" for n in counts)
        figures.finish(ax, f"{task.replace('NoFrameskip-v4', '')}, {seeds}")
        figures.hide_the_beginning(ax)
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


def draws_suites(args: Args) -> bool:
    """Whether each suite gets a figure. Those of the project's own pages show no runs of other flags."""
    return args.write and not (args.flags and args.results.resolve() == RESULTS)


def write(args: Args, results: dict[str, list[tuple[Row, Result | None]]]):
    """Figures of the suites asked for, the page of all, and the tables of the other pages."""
    for suite in args.suites:
        if is_drawn(results[suite]) and draws_suites(args):
            figures.save(figure(results[suite]), args.results / suite / "curves")
    parts = [figures.html_text(LEGEND)]
    for suite, content in results.items():
        parts += [f"<h2>{suite}</h2>", figures.html_table(table(content))]
        parts += [figures.html_text(flags_line([row for row, _ in content]))]
        parts += [figures.html_image(figure(content))] if is_drawn(content) else []
    write_file(args.results / "index.html", figures.html_page("Benchmark", parts))
    if args.results.resolve() == RESULTS and not args.flags:
        for suite in args.suites:
            write_between(TABLES, suite, section(suite, results[suite]))
        for page in SUMMARY:
            write_between(page, "summary", summary(results))
        if {"mujoco", *CHANGED} & {*args.suites}:
            write_between(METHODS, "controls", controls(results))


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
            suite: [replace(row, steps=int(steps), targets=(), has_peers=False) for row in SUITES[suite]]
            for suite in SUITES
        }
    wanted = suites if args.write else args.suites  # the page and the summary are of all
    results = {suite: [(row, load(suite, row, args)) for row in suites[suite]] for suite in wanted}
    is_below = False
    for suite in args.suites:
        print(f"\n{suite}\n\n{section(suite, results[suite], args.results if draws_suites(args) else None)}")
        for line in hints(suite, results[suite], args):
            print(line)
        for row, result in results[suite] if args.reach is not None else ():
            if result:
                steps = ", ".join(f"{step:.0f}" for step in result.first(args.reach))
                print(f"{row.name()}: {args.reach:g} first at {steps}")
        for row, result in results[suite]:
            first = first_ratio(row, result) if result and not result.state else None
            is_below |= first is not None and word(*first.interval[1:]) == "below"
    if args.write:
        write(args, results)
    sys.exit(int(is_below))


if __name__ == "__main__":
    main()
