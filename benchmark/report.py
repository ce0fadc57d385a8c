"""Any runs side by side: one HTML page from run folders, or a saved W&B report from a W&B project.

    python benchmark/report.py runs/*                               # report.html, which needs no network
    python benchmark/report.py runs/* --band ci --figures paper     # and SVG, PDF and CSV of every curve
    python benchmark/report.py benchmark/results/classic            # what run.py has finished: its CSVs
    python benchmark/report.py --wandb --project ppo --entity ME    # the same of runs logged with --track

Reads the folders of these scripts, of their copies and of CleanRL. Runs are grouped by environment, script
and the flags in which runs of a script differ, seeds aside. A curve is the mean over seeds of each seed's
last 100 values of --metric, as far as all seeds have come; its band is one standard deviation over seeds,
or a 95 % interval; thin lines are the seeds. Minutes leave out what passed between a stop and a resumption.
Of several runs with equal flags and seed the longest counts, of equally long ones the newest. Results of
run.py that other files or other versions of gymnasium, ale-py, mujoco, minigrid or gym-microrts made are a
group of their own.
"""

import csv
import gzip
import html
import io
import os
import re
import signal
import sys
import zlib
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import bootstrap, t, trim_mean
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmark import figures  # noqa: E402
from benchmark.compare import number  # noqa: E402
from benchmark.episodes_csv import replaceable  # noqa: E402
from benchmark.files import csv_path, fail, write_file  # noqa: E402
from benchmark.run import COLUMNS, read_table  # noqa: E402
from benchmark.suites import Row  # noqa: E402

matplotlib.rcParams["pdf.fonttype"] = 42  # TrueType: journals refuse matplotlib's Type 3 fonts

FORMATS = {  # where a script logs its arguments, and how
    "args/text_summary": ("ours", r"^ *(\w+): (.*)$"),
    "hyperparameters/text_summary": ("CleanRL", r"^\|(\w+)\|(.*)\|$"),
}
OF_EPISODES = ("charts/episodic", "tasks/", "policies/return")  # a value an episode
NO_GROUP = set(  # what tells no groups apart
    "env_id exp_name seed resume evaluate eval_episodes capture_video save_every save_model upload_model "
    "hf_entity track wandb_project_name wandb_entity param".split()
)

BANDS = {  # what a curve and its band are
    "std": "mean over seeds ± one standard deviation",
    "ci": "mean over seeds and its 95 % t interval",
    "iqm": "interquartile mean over seeds and its 95 % bootstrap interval (of fewer than four seeds as ci)",
}


@dataclass
class Args:
    # run folders, folders of run folders, or results of run.py
    folders: tyro.conf.Positional[tuple[Path, ...]] = ()
    out: Path = Path("report.html")  # the page
    metric: str = "charts/episodic_return"  # what to compare
    band: Literal["std", "ci", "iqm"] = (
        "std"  # mean and std, mean and 95 % interval, or IQM and 95 % interval
    )
    figures: Path | None = None  # a folder for SVG, PDF and CSV of all curves, too
    wandb: bool = False  # save a report of a W&B project instead
    project: str = "ppo"  # W&B project
    entity: str | None = None  # W&B user or team


# === Runs ====================================================================================


@dataclass
class Run:
    folder: Path
    env_id: str
    script: str
    seed: str
    flags: dict[str, str]
    scalars: dict[str, np.ndarray]  # (n, 3) by tag: step, minutes, value
    end: tuple[float, float]  # last step and minute
    started: float  # Unix time

    def curve(self, tag: str, axis: int, grid: np.ndarray, window: int | None) -> list[float]:
        """Mean of the last `window` values, or of those in a step of the grid; NaN outside of the run."""
        points = self.scalars[tag][np.argsort(self.scalars[tag][:, axis], kind="stable")]
        counts = np.searchsorted(points[:, axis], grid, side="right")
        counts[grid > self.end[axis]] = 0
        window = window or 1 + len(points) // len(grid)
        return [points[max(n - window, 0) : n, 2].mean() if n else np.nan for n in counts]


def event_folders(folder: Path) -> list[Path]:
    """Those with TensorBoard's events, in folder or below: CleanRL's runs of ALE/Pong-v5 are in runs/ALE."""
    found = {path.parent.resolve() for path in folder.rglob("events.out.tfevents.*")}
    return sorted(path for path in found if path.name != "eval" or path.parent not in found)


def read(folder: Path) -> Run:
    """The run in a folder, finished or not; ValueError says why there is none."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    flags = {"format": "none"}
    for tag, (name, pattern) in FORMATS.items():
        if tag in events.Tags()["tensors"]:  # a resumed run logged its arguments again
            text = events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
            flags = {"format": name} | dict(re.findall(pattern, text, re.MULTILINE))
    named = re.fullmatch(r"(?P<env_id>.+)__(?P<script>.+)__(?P<seed>\d+)__\d+", folder.name)
    named = named.groupdict() if named else {}
    env_id, seed = flags.get("env_id", named.get("env_id")), flags.get("seed", named.get("seed"))
    if not env_id:
        raise ValueError("no arguments logged, and no name such as ENV_ID__SCRIPT__SEED__TIME")
    points = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    if (folder / "eval").is_dir():  # of watch.py
        evals = EventAccumulator(str(folder / "eval"), size_guidance={"scalars": 0}).Reload()
        points = {tag: evals.Scalars(tag) for tag in evals.Tags()["scalars"]} | points
    scalars = {}
    for tag in points:
        found = [(e.step, e.wall_time, e.value) for e in points[tag] if np.isfinite(e.value)]
        if found:
            scalars[tag] = np.array(sorted(found, key=lambda e: e[0]))
    training = [x for tag, x in scalars.items() if not tag.startswith("eval/")]
    if not training:
        raise ValueError("nothing logged so far that can be read")
    # every start has written a file, named by its second: the time before it is no training
    starts = [float(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*")]
    ticks = np.unique(np.concatenate([starts, *(x[:, 1] for x in training)]))
    gaps = np.diff(ticks, prepend=ticks[0])
    minutes = np.cumsum(np.where(np.isin(ticks, starts), 0, gaps)) / 60
    for x in scalars.values():
        x[:, 1] = np.interp(x[:, 1], ticks, minutes)
    end = (max(x[:, 0].max() for x in training), minutes[-1])
    env_id = env_id.replace("/", "-").replace(":", "-")  # as in the folder's name
    script, seed = named.get("script", folder.name), seed or folder.name
    return Run(folder, env_id, script, seed, flags, scalars, end, min(starts))


def by_number(text: str) -> list[str | float]:
    """A key that sorts 2 before 10, and 1e-05 before 0.001."""
    parts = re.split(r"((?:(?<==)-)?\d+(?:\.\d+)?(?:e[-+]?\d+)?)", text)  # every second one is a number
    return [float(part) if k % 2 else part for k, part in enumerate(parts)]


def result_files(folder: Path, notes: list[str]) -> list[Path]:
    """The CSVs of run.py in folder or below, a run each: it removes the folder of a run that is done.

    Adds a line to notes on each runs.csv that is left out, as it has other columns.
    """
    files = []
    for table in sorted(folder.rglob("runs.csv")):
        with open(table, encoding="utf-8", errors="replace") as file:
            head = file.readline().strip()
        if head == ",".join(COLUMNS):
            files += [csv_path(table.parent, name) for name in read_table(table)]
        else:
            notes.append(f"{table}: left out, it has other columns than run.py's")
    return files


def read_result(path: Path) -> Run:
    """The run of a CSV of run.py, with what runs.csv says of it; ValueError says why there is none."""
    row = read_table(path.with_name("runs.csv"))[path.name.partition(".csv")[0]]
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        lines = file.readlines()
    if len(lines) < 2:
        raise ValueError("no episode")
    episodes = np.loadtxt(lines, delimiter=",", skiprows=1, usecols=range(4), ndmin=2)
    episodes = episodes[episodes[:, 0] <= int(row["steps"])]  # a run with --stop-at ends a little later
    if not len(episodes):
        raise ValueError("no episode")
    episodes[:, 1] /= 60  # seconds; the others are step, return and length
    scalars = {"charts/episodic_return": episodes[:, :3], "charts/episodic_length": episodes[:, [0, 1, 3]]}
    options = Row(row["script"], row["env_id"], 0).options(row["command"].split(maxsplit=2)[2])
    flags = {"format": "run.py"} | {name.replace("-", "_"): x or "True" for name, x in options.items()}
    flags |= dict(re.findall(r"(gymnasium|ale-py|mujoco|minigrid|gym-microrts) ([\w.]+)", row["versions"]))
    if row["fingerprint"]:  # "ppo.py 0123456789ab, ...": of each file
        flags["build"] = " ".join(x.split()[-1][:7] for x in row["fingerprint"].split(", "))
    env_id = row["env_id"].replace("/", "-").replace(":", "-")
    started = datetime.fromisoformat(row["started"].split(" | ")[0]).timestamp()
    end = (int(row["steps"]), episodes[-1, 1])
    return Run(path, env_id, row["script"], row["seed"], flags, scalars, end, started)


def differing(variants: list[dict[str, str]]) -> list[str]:
    """Flags in which variants of a script differ: what all have, and others as needed to tell them apart."""

    def told(names: list[str]) -> int:
        return len({tuple(variant.get(name) for name in names) for variant in variants})

    names = [k for k in dict.fromkeys(k for v in variants for k in v) if told([k]) > 1 and k not in NO_GROUP]
    chosen = [name for name in names if all(name in variant for variant in variants)]
    for name in names:
        chosen += [name] if told([*chosen, name]) > told(chosen) else []
    return chosen


def group(runs: list[Run], notes: list[str]) -> dict[str, dict[str, list[Run]]]:
    """Runs by environment and label, sorted by seed; adds a line to notes on each that is left out."""
    groups, flags = {}, {}
    for run in runs:
        flags.setdefault((run.env_id, run.script), []).append(run.flags)
    names = {script: differing(variants) for script, variants in flags.items()}
    for run in sorted(runs, key=lambda run: (-run.end[0], -run.started)):
        label = ", ".join(f"{k}={run.flags.get(k, '–')}" for k in names[run.env_id, run.script])
        label = f"{run.script}: {label}" if label else run.script
        same = groups.setdefault(run.env_id, {}).setdefault(label, {})
        if run.seed in same:
            left, kept = (f"{x.folder.parent.name}/{x.folder.name}" for x in (run, same[run.seed]))
            notes.append(f"{left}: left out for {kept}, longer or newer")
        same.setdefault(run.seed, run)
    for labels in groups.values():
        for label, same in labels.items():
            labels[label] = sorted(same.values(), key=lambda run: by_number(run.seed))
    return {
        env_id: {label: groups[env_id][label] for label in sorted(groups[env_id], key=by_number)}
        for env_id in sorted(groups, key=by_number)
    }


# === Curves ==================================================================================


@dataclass
class Curve:
    grid: np.ndarray  # (n,) steps or minutes
    seeds: np.ndarray  # (seeds, n) NaN where a seed has no value
    x: np.ndarray  # (m,) where all seeds have one
    middle: np.ndarray  # (m,)
    low: np.ndarray  # (m,) NaN if there is one seed
    high: np.ndarray  # (m,)


@dataclass
class Panel:
    metric: str
    axis: int  # 0: environment steps, 1: minutes
    curves: dict[str, Curve]  # by label


def summary(values: np.ndarray, band: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Middle, low and high of values (seeds, ...), as BANDS says; low and high are NaN for one seed."""
    seeds, middle = len(values), values.mean(0)
    if seeds == 1:
        return middle, np.full_like(middle, np.nan), np.full_like(middle, np.nan)
    if band == "iqm" and seeds > 3:
        resampling = dict(axis=0, n_resamples=2000, method="percentile", rng=0)
        interval = bootstrap([values], lambda x, axis: trim_mean(x, 0.25, axis), **resampling)
        return trim_mean(values, 0.25), *interval.confidence_interval
    reach = values.std(0, ddof=1)
    if band != "std":
        reach *= t.ppf(0.975, seeds - 1) / seeds**0.5
    return middle, middle - reach, middle + reach


def curve_of(runs: list[Run], metric: str, axis: int, window: int | None, band: str) -> Curve:
    grid = np.linspace(0, max(run.end[axis] for run in runs), 201)
    seeds = np.array([run.curve(metric, axis, grid, window) for run in runs])
    shared = np.isfinite(seeds).all(0)
    return Curve(grid, seeds, grid[shared], *summary(seeds[:, shared], band))


def panels_of(groups: dict[str, list[Run]], metric: str, band: str) -> list[Panel]:
    """The metric over steps and over minutes, then all else that was logged over steps."""
    tags = {tag for runs in groups.values() for run in runs for tag in run.scalars}
    panels = []
    for tag, axis in [(metric, 0), (metric, 1), *((tag, 0) for tag in sorted(tags - {metric}))]:
        window = 100 if tag == metric or tag.startswith(OF_EPISODES) else None
        curves = {}
        for label, runs in groups.items():
            if having := [run for run in runs if tag in run.scalars]:
                curves[label] = curve_of(having, tag, axis, window, band)
        panels.append(Panel(tag, axis, curves))
    return panels


def table_of(panels: list[Panel], band: str) -> str:
    """A CSV with a row a point of every curve; a curve is over steps or over minutes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    middle = "iqm" if band == "iqm" else "mean"
    writer.writerow(["metric", "label", "step", "minutes", middle, "low", "high", "runs"])
    for panel in panels:
        for label, curve in panel.curves.items():
            for x, *values in zip(curve.x, curve.middle, curve.low, curve.high, strict=True):
                at = ["", f"{x:.10g}"] if panel.axis else [f"{x:.10g}", ""]
                numbers = [f"{value:.7g}" if np.isfinite(value) else "" for value in values]
                writer.writerow([panel.metric, label, *at, *numbers, len(curve.seeds)])
    return text.getvalue()


def as_text(label: str) -> str:
    """What matplotlib shows as the label: it would read what is between two dollars as a formula."""
    return label.replace("$", r"\$")


def draw(ax: Axes, panel: Panel, styles: dict[str, dict[str, str]]):
    for label, curve in panel.curves.items():
        style, seeds = styles[label], len(curve.seeds)
        ax.plot(curve.grid, curve.seeds.T, alpha=0.3, linewidth=0.7, **style)
        dot = "." if len(curve.x) == 1 else None  # no line: one evaluation at the end
        name = f"{as_text(label)} ({seeds} seed{'s' * (seeds > 1)})"
        figures.curve(ax, curve.x, curve.middle, None, marker=dot, label=name, **style)
        if seeds > 1:
            ax.fill_between(curve.x, curve.low, curve.high, color=style["color"], alpha=0.15, linewidth=0)
    figures.finish(ax, as_text(panel.metric), ("environment steps", "time (minutes)")[panel.axis], ylabel="")
    if panel.axis:
        ax.xaxis.set_major_formatter("{x:g}")  # where steps have 10k, 0.01 minutes would be 10m


def picture(panels: list[Panel], across: int, height: float, labels: list[str]) -> Figure:
    """Panels with one legend below; a label has the same line in all figures."""
    styles = {
        label: dict(color=f"C{k % 10}", linestyle=("-", "--", ":", "-.")[k // 10 % 4])
        for k, label in enumerate(labels)
    }
    rows, columns = -(-len(panels) // across), max(1, 110 // max(map(len, labels)))
    figure = Figure(figsize=(11, height * rows + 0.2 * len(labels) / columns), layout="constrained")
    axes = figure.subplots(rows, across, squeeze=False).flat
    for ax, panel in zip(axes, panels, strict=False):
        draw(ax, panel, styles)
    for ax in axes[len(panels) :]:
        ax.axis("off")
    figures.legend(figure, columns)
    return figure


def pictures(panels: list[Panel], labels: list[str]) -> list[Figure]:
    """The metric over steps and minutes, and small panels of all else."""
    main = picture(panels[:2], 2, 4, labels)
    main.axes[1].sharey(main.axes[0])
    return [main, picture(panels[2:], 4, 2.1, labels)] if panels[2:] else [main]


# === HTML ====================================================================================


def summary_text(values: list[float], band: str) -> str:
    middle, low, high = summary(np.array(values), band)
    if len(values) == 1:
        return number(middle)
    spread = f"± {number(high - middle)}" if band == "std" else f"[{number(low)}, {number(high)}]"
    return f"{number(middle)} {spread}"


def results(groups: dict[str, list[Run]], metric: str, band: str) -> list[list[str]]:
    """Rows of cells, the head first."""
    lines = [["script", "seeds", "steps", f"final {metric}", "steps/s", "minutes"]]
    for label, runs in groups.items():
        final = [run.scalars[metric][-100:, 2].mean() for run in runs if metric in run.scalars]
        speed = [run.scalars["charts/SPS"][-1, 2] for run in runs if "charts/SPS" in run.scalars]
        ends = sorted({run.end[0] for run in runs})
        cells = [label, ", ".join(run.seed for run in runs)]
        cells.append(" to ".join(f"{end:,.0f}" for end in (ends[0], *ends[1:][-1:])))
        cells.append(summary_text(final, band) if final else "")
        cells.append(f"{np.mean(speed):,.0f}" if speed else "")
        lines.append([*cells, number(np.mean([run.end[1] for run in runs]))])
    filled = [any(column[1:]) for column in zip(*lines, strict=True)]  # CSVs have no steps/s
    return [[cell for cell, is_shown in zip(line, filled, strict=True) if is_shown] for line in lines]


def arguments(groups: dict[str, list[Run]]) -> list[list[str]]:
    """Rows of cells, the head first: the arguments in which the groups differ."""
    flags = [runs[0].flags for runs in groups.values()]
    names = [name for name in dict.fromkeys(name for f in flags for name in f) if name not in NO_GROUP]
    lines = [[name, *(f.get(name, "–") for f in flags)] for name in names]
    return [["argument", *groups], *(line for line in lines if len(set(line[1:])) > 1)]


def page(groups: dict, drawn: dict[str, list[Figure]], notes: list[str], args: Args) -> str:
    """One HTML page with everything in it."""
    said = f"Curves and finals: {BANDS[args.band]}, of each seed's last 100 {args.metric}. Thin lines: the "
    said += "seeds. Minutes and steps/s: mean over seeds, without pauses."
    parts = [f"<p>{html.escape(said)}", *(f"<br>{html.escape(note)}" for note in notes)]
    for env_id, labels in groups.items():
        main, *panels = map(figures.html_image, drawn[env_id])
        table = figures.html_table(results(labels, args.metric, args.band))
        parts += [f"<h2>{html.escape(env_id)}</h2>", table, main]
        parts += [figures.html_table(arguments(labels)), *panels]
    return figures.html_page("Runs", parts)


# === Weights & Biases =========================================================================


def build_report(runs: list, project: str, entity: str, metric: str):
    """The unsaved W&B report of W&B runs (their config and summary): a grid of panels an environment."""
    import wandb_workspaces.reports.v2 as wr

    blocks, runs = [], [run for run in runs if "env_id" in run.config]
    for env_id in sorted({run.config["env_id"] for run in runs}):
        same, flags = [run for run in runs if run.config["env_id"] == env_id], {}
        for run in same:
            flags.setdefault(run.config.get("exp_name"), []).append(
                {k: str(v) for k, v in run.config.items()}
            )
        names = dict.fromkeys(name for variants in flags.values() for name in differing(variants))
        runset = wr.Runset(
            project=project,
            entity=entity,
            name=env_id,
            filters=f"Config('env_id') == {env_id!r}",
            groupby=[f"config.{name}" for name in ("env_id", "exp_name", *names)],
        )
        band = dict(groupby_aggfunc="mean", groupby_rangefunc="stddev", max_runs_to_show=100)
        smooth = dict(smoothing_type="exponentialTimeWeighted", smoothing_factor=0.9, **band)
        panels = [
            wr.LinePlot(title=f"{metric} by {by}", x=x, y=[metric], layout=wr.Layout(w=12, h=8), **smooth)
            for by, x in (("environment step", "global_step"), ("time", "RelativeTime(Process)"))
        ]
        for tag in sorted({tag for run in same for tag in run.summary.keys() if "/" in tag}):
            if tag != metric:
                panels.append(wr.LinePlot(title=tag, x="global_step", y=[tag], **band))
        blocks += [wr.H2(env_id), wr.PanelGrid(runsets=[runset], panels=panels)]
    said = "Mean and standard deviation over the runs of a group: environment, script and differing flags."
    title = f"{project} side by side"
    return wr.Report(project, entity, title=title, description=said, blocks=blocks, width="fluid")


def save_report(args: Args):
    try:
        import wandb
        import wandb_workspaces  # noqa: F401
        from wandb.sdk.lib.service.service_connection import WandbApiFailedError  # is no wandb.Error
    except ImportError as error:
        fail(f"--wandb: {error}; pip install wandb wandb-workspaces")
    wandb.setup(wandb.Settings(silent=True))

    def give_up(error: object):
        print(f"report.py: error: --wandb: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        os._exit(2)  # W&B's own threads may hang, at the end of the process, too

    silence = "W&B's server does not answer in 30 seconds"
    signal.signal(signal.SIGALRM, lambda *_: give_up(silence))
    signal.alarm(30)
    try:
        if not wandb.login(prompt=False):
            fail("--wandb needs a W&B login (`wandb login` or WANDB_API_KEY), and WANDB_MODE not offline")
        api = wandb.Api()
        entity = args.entity or api.default_entity
        signal.alarm(0)
        runs = list(api.runs(f"{entity}/{args.project}", lazy=False))
        report = build_report(runs, args.project, entity, args.metric)
        if not report.blocks:
            fail(f"--wandb: no run with an env_id in its config in {entity}/{args.project}")
        print(report.save().url)
    except (wandb.Error, WandbApiFailedError, ValueError) as error:
        give_up(error)
    finally:
        signal.alarm(0)


def read_all(folders: tuple[Path, ...], metric: str) -> tuple[dict[str, dict[str, list[Run]]], list[str]]:
    """Groups of runs, and notes on what is not shown of the folders."""
    runs, notes = {}, []
    for folder in folders:
        csvs, run_dirs = result_files(folder, notes), event_folders(folder)
        if csvs:  # of run.py, whose unfinished runs have no results yet
            run_dirs = [x for x in run_dirs if "unfinished" not in x.relative_to(folder.resolve()).parts]
        notes += [] if csvs or run_dirs else [f"{folder}: no TensorBoard events"]
        for path in (*csvs, *run_dirs):
            try:
                runs[path] = read_result(path) if path in csvs else read(path)
            except (OSError, EOFError, ValueError, zlib.error) as error:  # one run is not to cost the page
                notes.append(f"{path.name}: left out, {error}")
    if not runs:
        fail("; ".join(notes) or "give run folders, such as runs/*")
    groups = group(list(runs.values()), notes)
    notes += [f"{path.name}: no {metric} so far" for path, run in runs.items() if metric not in run.scalars]
    return groups, notes


def figure_files(env_id: str, table: str, drawn: list[Figure]) -> dict[str, str | bytes]:
    """Names and contents of what --figures writes of an environment."""
    files = {f"{env_id}.csv": table}
    for figure, name in zip(drawn, (env_id, f"{env_id}_panels"), strict=False):
        for kind, date in (("svg", "Date"), ("pdf", "CreationDate")):
            content = io.BytesIO()
            figure.savefig(content, format=kind, metadata={date: None})  # the same curves make the same file
            files[f"{name}.{kind}"] = content.getvalue()
    return files


def main():
    args = tyro.cli(Args)
    if args.wandb:
        if args.folders or args.figures or (args.band, args.out) != (Args.band, Args.out):
            said = "--wandb compares the runs of a W&B project"
            fail(f"{said}; folders, --band, --figures and --out are for the page")
        return save_report(args)
    if (args.project, args.entity) != (Args.project, Args.entity):
        fail("--project and --entity are of a W&B project: give --wandb, too")
    try:
        replaceable(args.out)
    except (OSError, ValueError) as error:
        fail(f"--out: {error}")
    if args.figures and args.figures.exists() and not args.figures.is_dir():
        fail(f"--figures: {args.figures} must be a folder or a new one")
    groups, notes = read_all(args.folders, args.metric)
    for note in notes:
        print(f"report.py: {note}", file=sys.stderr)
    tags = {
        tag for labels in groups.values() for runs in labels.values() for run in runs for tag in run.scalars
    }
    if args.metric not in tags:
        fail(f"--metric {args.metric}: no run has it; there are {', '.join(sorted(tags))}")
    drawn, files = {}, {}
    for env_id, labels in groups.items():
        panels = panels_of(labels, args.metric, args.band)
        drawn[env_id] = pictures(panels, list(labels))
        if args.figures:
            content = figure_files(env_id, table_of(panels, args.band), drawn[env_id])
            files |= {args.figures / name: x for name, x in content.items()}
    files[args.out] = page(groups, drawn, notes, args)
    try:
        if args.figures:
            args.figures.mkdir(parents=True, exist_ok=True)
        targets = [replaceable(path) for path in files]  # before the first is written
        for path, content in zip(targets, files.values(), strict=True):
            write_file(path, content)
    except (OSError, ValueError) as error:
        fail(error)
    print(*files, sep="\n")


if __name__ == "__main__":
    main()
