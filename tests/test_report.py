"""Reports on tiny runs: what is grouped, what the numbers are, and what cannot be read."""

import base64
import gzip
import html
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tyro
from conftest import scalars
from matplotlib.image import imread
from scipy import stats
from torch.utils.tensorboard import SummaryWriter

import ppo
from benchmark import report, run
from benchmark.episodes_csv import export
from benchmark.files import read_csv

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmark/report.py"
RETURN = "charts/episodic_return"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two learning rates, two seeds each, in folder/runs."""
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for learning_rate in (2.5e-4, 1e-3):
            for seed in (1, 2):
                ppo.train(ppo.Args(seed=seed, learning_rate=learning_rate, total_timesteps=4096))
    return folder / "runs"


def report_on(monkeypatch, *flags):
    """The page that report.py writes."""
    monkeypatch.setattr(sys, "argv", ["report.py", *map(str, flags)])
    report.main()
    return Path("report.html").read_text(encoding="utf-8")


def tables(page):
    """Rows of cells of each table."""
    rows = [re.findall("<tr>(.*?)</tr>", table) for table in re.findall("<table>(.*?)</table>", page)]
    return [[list(map(html.unescape, re.findall("<t[hd]>(.*?)</t[hd]>", row))) for row in x] for x in rows]


def write_run(folder, points, text=None, tag="hyperparameters"):
    """A run folder with (tag, step, value) as CleanRL writes it."""
    with SummaryWriter(folder) as writer:
        if text:
            writer.add_text(tag, text)
        for name, step, value in points:
            writer.add_scalar(name, value, step)
    return Path(folder)


def cleanrl(**args):
    return "|param|value|\n|-|-|\n" + "\n".join(f"|{key}|{value}|" for key, value in args.items())


def test_table_and_page(runs, monkeypatch):
    page = report_on(monkeypatch, *runs.iterdir())
    results, arguments = tables(page)
    assert [row[:3] for row in results[1:]] == [
        ["ppo: learning_rate=0.00025", "1, 2", "4,096"],
        ["ppo: learning_rate=0.001", "1, 2", "4,096"],
    ]
    assert arguments == [
        ["argument", "ppo: learning_rate=0.00025", "ppo: learning_rate=0.001"],
        ["learning_rate", "0.00025", "0.001"],
    ]
    folders = sorted(runs.iterdir(), key=lambda path: path.name.split("__")[-1])  # as they were trained
    for row, pair in zip(results[1:], (folders[:2], folders[2:]), strict=True):
        finals = [np.mean([value for _, value in scalars(path, RETURN)][-100:]) for path in pair]
        speeds = [scalars(path, "charts/SPS")[-1][1] for path in pair]
        spread = abs(finals[0] - finals[1]) / 2**0.5  # of two values
        assert list(map(float, row[3].split(" ± "))) == pytest.approx([np.mean(finals), spread], abs=0.06)
        assert row[4] == f"{np.mean(speeds):,.0f}" and 0 <= float(row[5]) < 0.6  # minutes
    assert (
        "<h2>CartPole-v1</h2>" in page and "http" not in page and "url(" not in page and "<script" not in page
    )
    pictures = re.findall('src="([^"]*)"', page)
    assert len(pictures) == 2 and all(x.startswith("data:image/png;base64,") for x in pictures)
    assert all(imread(io.BytesIO(base64.b64decode(x.split(",")[1]))).std() > 0.05 for x in pictures)
    assert not list(Path().glob("*.tmp"))


def test_panels_of_all_that_was_logged(runs):
    groups = report.group([report.read(path) for path in runs.iterdir()], [])["CartPole-v1"]
    main, panels = report.pictures(report.panels_of(groups, RETURN, "std"), list(groups))
    assert [ax.get_xlabel() for ax in main.axes] == ["environment steps", "time (minutes)"]
    for figure in (main, panels):  # either may stand alone in a paper
        names = [text.get_text() for text in figure.legends[0].get_texts()]
        assert names == [f"{label} (2 seeds)" for label in groups]
    logged = {tag for path in runs.iterdir() for tag in report.read(path).scalars} - {RETURN}
    assert {ax.get_title() for ax in panels.axes} - {""} == logged and "losses/value_loss" in logged
    assert all(len(ax.collections) == 2 for ax in main.axes)  # a band a group


def test_episodes_of_the_first_policy():
    """Of several policies, the CSV has those of the one that is evaluated, each as often as it ended."""
    points, expected = [("losses/td_loss", 100 * k, 0.5) for k in range(1, 7)], []
    for k, (policy, value) in enumerate([(1, 9.0), (0, 1.0), (0, 1.0), (1, 1.0), (0, 2.0), (1, 2.0)]):
        step = 200 if k in (1, 2, 3) else 100 * (k + 1)
        points += [("charts/episodic_return", step, value), ("charts/episodic_length", step, 10 + k)]
        points += [(f"policies/return_{policy}", step, value)]
        expected += [(step, value)] if policy == 0 else []
    export(write_run("some", points), "some.csv")
    found = [(int(row["step"]), float(row["return"])) for row in read_csv(Path("some.csv"))]
    assert found == expected == [(200, 1), (200, 1), (500, 2)]
    others = [(tag.replace("return_0", "return_2"), *x) for tag, *x in points]
    for name, rest, words in (
        ("none", others, "no episode of the first policy has ended"),
        ("new", [x for x in points if "losses" not in x[0]], "no iteration has been logged"),
    ):
        with pytest.raises(ValueError, match=words):
            export(write_run(name, rest), f"{name}.csv")


def test_curve_and_band():
    """Two seeds, one of them shorter: the mean ends with it."""
    points = np.column_stack((np.arange(1, 301), np.arange(1, 301) / 2, np.arange(300.0)))
    seeds = [
        report.Run(Path(), "Task", "ppo", str(k), {}, {RETURN: points[:n] + [0, 0, 10 * k]}, (n, n / 2), 0.0)
        for k, n in enumerate((300, 200))
    ]
    expected = [np.nan, 0, 24.5, 249.5, np.nan]  # means of 0; 0 to 49; 200 to 299
    assert seeds[0].curve(RETURN, 0, np.array([0.5, 1, 50, 300, 301]), 100) == pytest.approx(
        expected, nan_ok=True
    )
    minutes = np.array([0.2, 0.5, 25, 150, 151])  # half as many as steps
    assert seeds[0].curve(RETURN, 1, minutes, 100) == pytest.approx(expected, nan_ok=True)
    few = np.array([100.0, 200, 300])  # without a window: the last 1 + 300 // 3 values
    assert seeds[0].curve(RETURN, 0, few, None) == pytest.approx([49.5, 149, 249])
    panel = report.panels_of({"ppo": seeds}, RETURN, "std")[0]
    ax = report.Figure().subplots()
    report.draw(ax, panel, {"ppo": {"color": "C0"}})
    steps, mean = ax.lines[-1].get_data()
    at = {step: value for step, value in zip(steps, mean, strict=True)}
    assert at[150] == 99.5 + 5 and max(at) == 199.5
    band = ax.collections[0].get_paths()[0].vertices
    assert band[band[:, 0] == 150][:, 1] == pytest.approx([104.5 - 50**0.5, 104.5 + 50**0.5])


@pytest.mark.filterwarnings("error")
def test_intervals():
    """Of ten seeds at two points; of one and of three; of seeds that have no step in common."""
    values = np.random.default_rng(0).normal(100, 10, (10, 2))
    middle, low, high = report.summary(values, "ci")
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (middle, low, high) == (pytest.approx(values.mean(0)), *map(pytest.approx, expected))
    middle, low, high = report.summary(values, "iqm")
    assert middle == pytest.approx(np.sort(values, 0)[2:-2].mean(0))
    resampled = values[np.random.default_rng(1).integers(0, 10, (20_000, 10))]
    means = np.sort(resampled, 1)[:, 2:-2].mean(1)
    assert [low, high] == pytest.approx(np.percentile(means, [2.5, 97.5], axis=0), abs=0.5)
    assert report.summary(values[:3], "iqm") == (*map(pytest.approx, report.summary(values[:3], "ci")),)
    for band in report.BANDS:
        middle, low, high = report.summary(values[:1], band)
        assert (middle == values[0]).all() and np.isnan([low, high]).all()
        assert [x.shape for x in report.summary(values[:, :0], band)] == [(0,)] * 3


def test_minutes_are_minutes():
    """Two seconds are 0.03 minutes, not 30m of them."""
    points = np.column_stack((np.arange(10.0), np.linspace(0, 0.04, 10), np.arange(10.0)))
    run = report.Run(Path(), "Task", "ppo", "1", {}, {RETURN: points}, (9, 0.04), 0.0)
    (figure,) = report.pictures(report.panels_of({"ppo": [run]}, RETURN, "std"), ["ppo"])
    figure.canvas.draw()
    ticks = [label.get_text().replace("−", "-") for label in figure.axes[1].get_xticklabels()]
    assert figure.axes[1].get_xlabel() == "time (minutes)"
    assert list(map(float, ticks)) == pytest.approx(figure.axes[1].get_xticks())


def test_dollars_are_no_formula(monkeypatch, capfd):
    """In a flag, as $HOME, in a script's name, and in a tag."""
    for seed, flag in (1, "$2^{$"), (2, "$HOME"):
        points = [(RETURN, 500, 20.0), ("losses/$a^{$", 500, 1.0)]
        flags = cleanrl(env_id="Task-v0", seed=seed, note=flag)
        write_run(f"runs/Task-v0__$ppo$__{seed}__1", points, flags)
    assert "$ppo$: note=$2^{$" in report_on(monkeypatch, "runs", "--figures", "figures")
    assert not capfd.readouterr().err
    groups = report.group([report.read(path) for path in Path("runs").iterdir()], [])["Task-v0"]
    main, panels = report.pictures(report.panels_of(groups, RETURN, "std"), list(groups))
    texts = [*main.legends[0].get_texts(), panels.axes[0].title]
    assert not any(text._preprocess_math(text.get_text())[1] for text in texts)
    assert [text._preprocess_math(text.get_text())[0] for text in texts] == [
        "$ppo$: note=$2^{$ (1 seed)",
        "$ppo$: note=$HOME (1 seed)",
        "losses/$a^{$",
    ]


def test_numbers_in_labels_are_sorted_as_numbers():
    def labels(name, *values):
        flags = [{name: value} for value in values]
        runs = [report.Run(Path(), "Task", "ppo", "1", x, {}, (1, 1), 0.0) for x in flags]
        (groups,) = report.group(runs, []).values()
        return [label.removeprefix(f"ppo: {name}=") for label in groups]

    for sorted_values in (
        ["2", "10", "100"],
        ["1e-05", "0.00025", "0.001", "1", "1e+03"],
        ["-10", "-2", "-0.5", "3"],
        ["v2", "v10"],
    ):
        assert labels("x", *sorted(sorted_values)) == sorted_values, sorted_values
    runs = [report.Run(Path(), "Task", "ppo", seed, {}, {}, (1, 1), 0.0) for seed in ("10", "2", "1")]
    assert [run.seed for run in report.group(runs, [])["Task"]["ppo"]] == ["1", "2", "10"]
    runs = [report.Run(Path(), f"Task-v{k}", "ppo", "1", {}, {}, (1, 1), 0.0) for k in (10, 2)]
    assert list(report.group(runs, [])) == ["Task-v2", "Task-v10"]


@pytest.mark.parametrize("band", ["std", "iqm"])
def test_figures(runs, monkeypatch, capsys, band):
    """SVG and PDF of the pictures, and the numbers of every curve; the table has the same interval."""
    page = report_on(monkeypatch, *runs.iterdir(), "--band", band, "--figures", "paper/figures")
    folder = Path("paper/figures")
    names = ["CartPole-v1.csv", "CartPole-v1.svg", "CartPole-v1.pdf"]
    names += ["CartPole-v1_panels.svg", "CartPole-v1_panels.pdf"]
    assert capsys.readouterr().out.split() == [*(f"paper/figures/{name}" for name in names), "report.html"]
    assert {path.name for path in folder.iterdir()} == set(names)
    for name in names:
        if name.endswith("svg"):
            assert (folder / name).read_text().startswith("<?xml")
        if name.endswith("pdf"):
            content = (folder / name).read_bytes()
            assert content.startswith(b"%PDF") and b"/Type3" not in content and b"/CIDFontType2" in content
    rows = read_csv(folder / "CartPole-v1.csv")
    middle = "iqm" if band == "iqm" else "mean"
    assert list(rows[0]) == ["metric", "label", "step", "minutes", middle, "low", "high", "runs"]
    groups = report.group([report.read(path) for path in runs.iterdir()], [])["CartPole-v1"]
    panels = report.panels_of(groups, RETURN, band)
    for panel in panels:
        for label, curve in panel.curves.items():
            axis, other = ("step", "minutes") if panel.axis == 0 else ("minutes", "step")
            found = [r for r in rows if (r["metric"], r["label"]) == (panel.metric, label) and r[axis]]
            assert {(row["runs"], row[other]) for row in found} <= {("2", "")}  # none if no minute is shared
            numbers = [[float(row[k]) for row in found] for k in (axis, middle, "low", "high")]
            assert numbers == pytest.approx(
                np.array([curve.x, curve.middle, curve.low, curve.high]), rel=1e-6
            )
    assert len(rows) == sum(len(curve.x) for panel in panels for curve in panel.curves.values())
    for (label, group), row in zip(groups.items(), tables(page)[0][1:], strict=True):
        finals = np.array([run.scalars[RETURN][-100:, 2].mean() for run in group])
        mean, low, high = map(report.number, report.summary(finals, band))
        spread = f"± {report.number(finals.std(ddof=1))}" if band == "std" else f"[{low}, {high}]"
        assert row[0] == label and row[3] == f"{mean} {spread}"
    assert html.escape(report.BANDS[band]) in page


def commands(page):
    """Of docs/, in order, as lists of words."""
    blocks = re.findall(r"(?ms)^```bash\n(.*?)^```", (ROOT / "docs" / page).read_text(encoding="utf-8"))
    return [shlex.split(line) for line in "".join(blocks).replace("\\\n", " ").splitlines()]


def test_a_sweep_and_its_figures_as_documented(monkeypatch):
    """docs/figures.md: what run.py runs of it, and the report on its results; only runs are shorter."""
    (_, tool, *flags), (_, reporter, *asked), *_ = commands("figures.md")
    assert (tool, reporter) == ("benchmark/run.py", "benchmark/report.py")
    args = tyro.cli(run.Args, args=flags)
    names = {run.Run(args, row, seed).name for row, seed in run.planned(args)}
    rates, steps = ("2.5e-4", "1e-3"), f"total-timesteps={args.total_timesteps}"
    assert names == {
        f"CartPole-v1__ppo__learning-rate={rate}__{steps}__{seed}" for rate in rates for seed in (1, 2, 3)
    }
    given = [*flags, "--total-timesteps", "4096"]
    subprocess.run([sys.executable, ROOT / tool, *given], check=True, capture_output=True)
    page = report_on(monkeypatch, *asked)
    labels = [f"ppo: learning_rate={rate}" for rate in rates]
    assert [row[:3] for row in tables(page)[0][1:]] == [[label, "1, 2, 3", "4,096"] for label in labels]
    folder = Path(asked[asked.index("--figures") + 1])
    assert len(list(folder.iterdir())) == 5
    curves = {(row["metric"], row["label"], row["runs"]) for row in read_csv(folder / "CartPole-v1.csv")}
    metrics = (RETURN, "charts/episodic_length")
    assert curves == {(metric, label, "3") for metric in metrics for label in labels}


def test_results_of_run_py_are_what_its_csvs_have(monkeypatch, capsys):
    """Step, minutes and flags; a CSV that is cut gets a line."""
    folder = Path("results/suite")
    folder.mkdir(parents=True)
    rows = [",".join(run.COLUMNS)]
    for seed, content in (1, "100,60,5,7\n200,180,7,9\n"), (2, "100,60,5\n"), (3, ""), (4, None):
        name = f"Task-v0__ppo__sync__{seed}"
        command = f"python ppo.py --env-id my:Task-v0 --seed {seed} --sync --learning-rate 1e-3"
        started = '"2026-11-24T05:00:00+00:00 | 2026-11-24T06:00:00+00:00"'
        rows.append(f"{name},ppo,my:Task-v0,{seed},250,250,200,2,{started},,,,1,,{command},")
        if content is not None:
            folder.joinpath(f"{name}.csv").write_text(f"step,seconds,return,length\n{content}")
    zipped = gzip.compress(folder.joinpath("Task-v0__ppo__sync__1.csv").read_bytes())
    for seed, content in (5, zipped), (6, zipped[:-9]):
        rows.append(rows[1].replace("sync__1", f"sync__{seed}").replace(",1,250", f",{seed},250"))
        folder.joinpath(f"Task-v0__ppo__sync__{seed}.csv.gz").write_bytes(content)
    folder.joinpath("runs.csv").write_text("\n".join(rows) + "\n")
    first = report.read_result(folder / "Task-v0__ppo__sync__1.csv")
    assert first.scalars[RETURN].tolist() == [[100, 1, 5], [200, 3, 7]]
    assert first.scalars["charts/episodic_length"].tolist() == [[100, 1, 7], [200, 3, 9]]
    assert (first.env_id, first.script, first.seed, first.end) == ("my-Task-v0", "ppo", "1", (250, 3))
    assert first.flags == dict(
        format="run.py", env_id="my:Task-v0", seed="1", sync="True", learning_rate="1e-3"
    )
    page, said = report_on(monkeypatch, "results"), capsys.readouterr().err
    assert tables(page)[0][1] == ["ppo", "1, 5", "250", "6.00 ± 0.00", "3.00"]
    for note in (
        "2.csv: left out, .*columns",
        "3.csv: left out, no episode",
        "4.csv: .*No such file",
        "6.csv.gz: .*end",
    ):
        assert re.search(f"report.py: Task-v0__ppo__sync__{note}", said), said


def test_figures_of_seeds_that_have_no_step_in_common(monkeypatch):
    """And of a single seed, which has no interval."""
    for seed, step in ((1, 100), (2, 900)):
        points = [(RETURN, step, 20.0), ("charts/SPS", 200 if seed == 1 else 1000, 700.0)]
        write_run(f"runs/Task-v0__ppo__{seed}__1", points, cleanrl(env_id="Task-v0", seed=seed))
    write_run("runs/Task-v0__one__1__1", [(RETURN, 100, 30.0)], cleanrl(env_id="Task-v0", seed=1))
    report_on(monkeypatch, "runs", "--band", "iqm", "--figures", ".")
    rows = [row for row in read_csv(Path("Task-v0.csv")) if row["metric"] == RETURN]
    assert {(row["label"], row["iqm"], row["low"], row["high"], row["runs"]) for row in rows} == {
        ("one", "30", "", "", "1")
    }


def test_cleanrl_lands_beside_ours(runs):
    ours = {"env_id": "CartPole-v1", "seed": 3, "learning_rate": 0.00025, "exp_name": "ppo", "cuda": True}
    points = [
        (RETURN, 500, 20.0),
        (RETURN, 900, 30.0),
        ("charts/SPS", 1000, 700.0),
        ("losses/qf1_loss", 1000, 0.1),
    ]
    write_run("runs/CartPole-v1__ppo__3__1700000000", points, cleanrl(**ours))
    other = {"env_id": "CartPole-v1", "seed": 1, "exp_name": "dqn", "start_e": 1}
    write_run("runs/CartPole-v1__dqn__1__1700000000", points, cleanrl(**other))
    write_run("runs/ALE/Pong-v5__ppo_atari__1__1700000000", points, cleanrl(env_id="ALE/Pong-v5", seed=1))
    write_run("runs/Pong-v5__named__4__1700000000", points)
    folders = [path for folder in (runs, Path("runs")) for path in report.event_folders(folder)]
    groups = report.group([report.read(path) for path in folders], [])
    assert list(groups) == ["ALE-Pong-v5", "CartPole-v1", "Pong-v5"]
    pong, cartpole, named = [report.results(labels, RETURN, "std")[1:] for labels in groups.values()]
    assert [row[0] for row in cartpole] == [
        "dqn",
        "ppo: format=CleanRL, learning_rate=0.00025",
        "ppo: format=ours, learning_rate=0.00025",
        "ppo: format=ours, learning_rate=0.001",
    ]
    assert cartpole[1][1:5] == ["3", "1,000", "25.0", "700"] and pong[0][:3] == ["ppo_atari", "1", "1,000"]
    assert named[0][:2] == ["named", "4"]


def test_runs_that_cannot_be_shown_get_a_line(runs, monkeypatch, capsys):
    whole = sorted(runs.iterdir())[0]
    (events,) = whole.glob("events*")
    for name, content in {
        "CartPole-v1__ppo__7__1": events.read_bytes()[: events.stat().st_size // 2],  # in a record
        "CartPole-v1__ppo__8__1": b"",
        "CartPole-v1__ppo__9__1": b"no event at all",
    }.items():
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, events.name).write_bytes(content)
    Path("runs/empty").mkdir()
    write_run("runs/CartPole-v1__copy__1__1", [("charts/SPS", 1000, 700.0)])
    write_run("runs/other", [("charts/SPS", 1000, 700.0)])
    page, said = report_on(monkeypatch, *sorted(Path("runs").iterdir())), capsys.readouterr().err
    for note in (
        "CartPole-v1__ppo__8__1: left out, nothing logged so far that can be read",
        "CartPole-v1__ppo__9__1: left out, nothing logged so far that can be read",
        "runs/empty: no TensorBoard events",
        f"CartPole-v1__copy__1__1: no {RETURN} so far",
        "other: left out, no arguments logged, and no name such as ENV_ID__SCRIPT__SEED__TIME",
    ):
        assert note in page and f"report.py: {note}\n" in said
    (copy, unfinished), *_ = [table[1:] for table in tables(page)]
    assert copy == ["copy", "1", "1,000", "", "700", copy[5]]
    assert unfinished[:2] == ["ppo", "1"] and 0 < int(unfinished[2].replace(",", "")) < 4096


def test_pauses_evaluations_and_repetitions(monkeypatch, capsys):
    """Two minutes, a pause, one minute; the watcher's evaluations are below; a shorter run of the seed."""
    folder = Path("runs/Task-v0__ppo__1__1")
    for start, steps in ((10_000, (1, 2)), (90_000, (3,))):
        with SummaryWriter(folder) as writer:
            for k, step in enumerate(steps):
                writer.add_scalar(RETURN, 5.0, step, walltime=start + 60 * (k + 1))
        new = max(folder.glob("events*"), key=os.path.getctime)
        new.rename(new.with_name(f"events.out.tfevents.{start}.host.1.0"))
    write_run(folder / "eval", [("eval/episodic_return", 3, 7.0)])
    run = report.read(folder)
    assert run.scalars[RETURN][:, :2].tolist() == [[1, 1], [2, 2], [3, 3]] and run.end == (3, 3)
    write_run("runs/Task-v0__ppo__1__2", [(RETURN, 1, 100.0)])
    page = report_on(monkeypatch, "runs", "runs/Task-v0__ppo__1__1")
    assert tables(page)[0][1] == ["ppo", "1", "3", "5.00", "3.00"]
    note = "runs/Task-v0__ppo__1__2: left out for runs/Task-v0__ppo__1__1, longer or newer"
    assert capsys.readouterr().err == f"report.py: {note}\n" and note in page
    _, panels = report.pictures(report.panels_of({"ppo": [run]}, RETURN, "std"), ["ppo"])
    (panel,) = [ax for ax in panels.axes if ax.lines]
    assert panel.get_title() == "eval/episodic_return" and panel.lines[-1].get_marker() == "."


def test_seconds_of_a_csv_leave_out_pauses():
    """A long iteration is one; what lies between a stop and a start, be it short, counts as nothing."""
    folder = Path("runs/Task-v0__ppo__1__1")
    for start, ticks in ((10_000, (10, 20, 3_000)), (13_040, (13_050, 13_060))):
        with SummaryWriter(folder) as writer:
            for now in ticks if start > 10_000 else [start + x for x in ticks]:
                for tag in ("losses/value_loss", RETURN, "charts/episodic_length"):
                    writer.add_scalar(tag, 5.0, now, walltime=now)
        new = max(folder.glob("events*"), key=os.path.getctime)
        new.rename(new.with_name(f"events.out.tfevents.{start}.host.1.0"))
    export(folder, "run.csv")
    assert [row["seconds"] for row in read_csv(Path("run.csv"))] == [
        "0.00",
        "10.00",
        "2990.00",
        "3000.00",
        "3010.00",
    ]


def test_what_scripts_log_beyond_losses_and_charts_is_drawn():
    tags = ("staleness/mean", "tasks/Pong", "policies/return_0", "curiosity/novelty", "replay/size")
    write_run("runs/Task-v0__ppo__1__1", [(tag, k, 5.0) for tag in (RETURN, *tags) for k in (1, 2)])
    run = report.read(Path("runs/Task-v0__ppo__1__1"))
    panels = report.panels_of({"ppo": [run]}, RETURN, "std")
    _, drawn = report.pictures(panels, ["ppo"])
    assert {ax.get_title() for ax in drawn.axes if ax.lines} == {*tags}


def test_runs_beside_results_are_shown(runs, monkeypatch):
    """But not what run.py has not finished."""
    shutil.copytree(runs, "mine/runs")
    shutil.copytree(next(runs.iterdir()), "mine/suite/unfinished/NAME/runs/CartPole-v1__other__1__1")
    folder = Path("mine/suite")
    command = "python ppo.py --env-id Task-v0 --seed 1"
    started = "2026-11-24T05:00:00+00:00"
    row = f"Task-v0__ppo__1,ppo,Task-v0,1,250,250,200,1,{started},,,,1,,{command},"
    folder.joinpath("runs.csv").write_text(f"{','.join(run.COLUMNS)}\n{row}\n")
    folder.joinpath("Task-v0__ppo__1.csv").write_text("step,seconds,return,length\n100,60,5,7\n")
    groups, notes = report.read_all((Path("mine"),), RETURN)
    assert {*groups} == {"CartPole-v1", "Task-v0"} and not notes
    shown = {x.folder.name for labels in groups.values() for found in labels.values() for x in found}
    assert not any("other" in name for name in shown)


def test_results_of_other_builds_are_another_group():
    """By the fingerprint, or by the version of an environment's package; not by that of PyTorch."""
    made = {
        "first/1": ("ppo.py f1f1f1f1f1f1", "torch 2.6, gymnasium 1.4.0, mujoco 4.0.0"),
        "first/2": ("ppo.py f1f1f1f1f1f1", "torch 2.7, gymnasium 1.4.0, mujoco 4.0.0"),
        "other_build/1": ("ppo.py f2f2f2f2f2f2", "torch 2.6, gymnasium 1.4.0, mujoco 4.0.0"),
        "other_task/1": ("ppo.py f1f1f1f1f1f1, tasks.py f3f3f3f3f3f3", "gymnasium 1.4.0, mujoco 4.0.0"),
        "other_engine/1": ("ppo.py f1f1f1f1f1f1", "torch 2.6, gymnasium 1.4.0, mujoco 3.4.0"),
        "again/1": ("ppo.py f1f1f1f1f1f1", "torch 2.8, gymnasium 1.4.0, mujoco 4.0.0"),
    }
    for day, (path, (fingerprint, versions)) in enumerate(made.items(), 20):
        folder, seed = Path(path).parent, Path(path).name
        folder.mkdir(exist_ok=True)
        row = dict.fromkeys(run.COLUMNS, "") | dict(run=f"T-v0__ppo__{seed}", script="ppo", env_id="T-v0")
        row |= dict(seed=seed, steps=250, command="python ppo.py --env-id T-v0", fingerprint=fingerprint)
        row |= dict(started=f"2026-11-{day}T05:00:00+00:00", versions=versions)
        run.write_row(folder / "runs.csv", row["run"], row)
        folder.joinpath(f"T-v0__ppo__{seed}.csv").write_text("step,seconds,return,length\n100,60,5,7\n")
    groups, (note,) = report.read_all(tuple({Path(path).parent for path in made}), RETURN)
    found = {
        label: {f"{x.folder.parent.name}/{x.seed}" for x in runs} for label, runs in groups["T-v0"].items()
    }
    first, other = "build=f1f1f1f", "build=f2f2f2f"
    assert found == {
        f"ppo: mujoco=4.0.0, {first}": {"again/1", "first/2"},  # the newest of seed 1
        f"ppo: mujoco=4.0.0, {other}": {"other_build/1"},
        f"ppo: mujoco=4.0.0, {first} f3f3f3f": {"other_task/1"},
        f"ppo: mujoco=3.4.0, {first}": {"other_engine/1"},
    }
    assert note == "first/T-v0__ppo__1.csv: left out for again/T-v0__ppo__1.csv, longer or newer"


def test_differing_flags():
    assert report.differing([dict(a="1", b="2"), dict(a="1", b="2", seed="3")]) == []
    assert report.differing([dict(a="1", b="2"), dict(a="2", b="3"), dict(a="2", b="3")]) == ["a", "b"]
    assert report.differing([dict(a="1"), dict(a="2", b="3")]) == ["a"]  # which is enough
    assert report.differing([dict(a="1"), dict(a="1", b="3"), dict(a="1", b="4")]) == ["b"]


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "give run folders, such as runs/\\*"),
        (["nowhere"], "nowhere: no TensorBoard events"),
        ([".", "--out", "."], "--out: . must be a regular file or a new one, in a folder that exists"),
        (
            [".", "--out", "no/page"],
            "--out: no/page must be a regular file or a new one, in a folder that exists",
        ),
        *(
            (
                [*flags, "--wandb"],
                "--wandb compares .*; folders, --band, --figures and --out are for the page",
            )
            for flags in (["runs"], ["--band", "ci"], ["--figures", "."], ["--out", "page"])
        ),
        *(
            ([".", *flags], "--project and --entity are of a W&B project: give --wandb, too")
            for flags in (["--project", "mine"], ["--entity", "us"])
        ),
    ],
)
def test_mistakes(flags, message, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        report_on(monkeypatch, *flags)
    assert re.fullmatch(f"report.py: error: {message}\n", capsys.readouterr().err) and not list(
        Path().iterdir()
    )


def test_a_metric_that_no_run_has(runs, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        report_on(monkeypatch, runs, "--metric", "charts/episodic_retur")
    *_, error = capsys.readouterr().err.splitlines()
    assert error.startswith(
        "report.py: error: --metric charts/episodic_retur: no run has it; there are charts/"
    )
    assert RETURN in error and not Path("report.html").exists()


@pytest.fixture(params=["pipe", "link to a pipe", "link as /dev/stdout"])
def special(request):
    """What must not be replaced; /dev itself is no place for a test that may fail."""
    os.mkfifo("pipe")
    open_pipe = os.open("pipe", os.O_RDWR)
    path = Path("pipe" if request.param == "pipe" else "link")
    if path.name == "link":
        path.symlink_to(f"/proc/{os.getpid()}/fd/{open_pipe}" if "stdout" in request.param else "pipe")
    yield path
    os.close(open_pipe)


def test_no_device_is_replaced(special, runs, monkeypatch, capsys):
    """A link to one neither, nor by episodes_csv.py."""
    before = os.lstat(special)
    with pytest.raises(SystemExit, match="2"):
        report_on(monkeypatch, runs, "--out", special)
    with pytest.raises(SystemExit, match="2"):
        report_on(monkeypatch, runs, "--figures", special)
    said = f"{special} must be a regular file or a new one, in a folder that exists\n"
    folder = f"report.py: error: --figures: {special} must be a folder or a new one\n"
    assert capsys.readouterr().err == f"report.py: error: --out: {said}{folder}"
    command = [sys.executable, SCRIPT.with_name("episodes_csv.py"), next(runs.iterdir()), special]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, f"episodes_csv.py: error: {said}")
    assert os.lstat(special) == before and {path.name for path in Path().iterdir()} <= {"pipe", "link"}


def test_no_device_in_the_folder_of_figures_is_replaced(monkeypatch, capsys):
    """Nothing is written then, as a part would look like all."""
    write_run("runs/Task-v0__ppo__1__1", [(RETURN, 500, 20.0)])
    Path("figures").mkdir()
    os.mkfifo("figures/Task-v0.pdf")
    with pytest.raises(SystemExit, match="2"):
        report_on(monkeypatch, "runs", "--figures", "figures")
    said = "figures/Task-v0.pdf must be a regular file or a new one, in a folder that exists"
    assert capsys.readouterr().err == f"report.py: error: {said}\n"
    assert len(list(Path("figures").iterdir())) == 1 and not Path("report.html").exists()
    Path("file").touch()
    with pytest.raises(SystemExit, match="2"):
        report_on(monkeypatch, "runs", "--figures", "file")
    assert capsys.readouterr().err == "report.py: error: --figures: file must be a folder or a new one\n"


def test_a_link_to_a_regular_file_stays_and_the_file_is_replaced(runs, monkeypatch):
    """Someone has put it there so that the file is written elsewhere."""
    Path("elsewhere").mkdir()
    for name in ("report.html", "run.csv"):
        Path(name).symlink_to(f"elsewhere/{name}")  # the first time, there is no such file
    for _ in range(2):
        page = report_on(monkeypatch, runs)
        export(next(runs.iterdir()), "run.csv")
        assert (
            Path("report.html").is_symlink()
            and Path("elsewhere/report.html").read_text(encoding="utf-8") == page
        )
        assert Path("run.csv").is_symlink() and Path("elsewhere/run.csv").read_text().startswith("step,")


# === Weights & Biases =========================================================================

TRACKED = [
    (
        dict(env_id="CartPole-v1", exp_name="ppo", seed=1, learning_rate=1e-3, gamma=0.9),
        ["losses/value_loss"],
    ),
    (
        dict(env_id="CartPole-v1", exp_name="ppo", seed=2, learning_rate=1e-4, gamma=0.9),
        ["losses/value_loss"],
    ),
    (dict(env_id="CartPole-v1", exp_name="dqn", seed=1, learning_rate=1e-2), ["losses/td_loss", "_step"]),
    (dict(env_id="ALE/Pong-v5", exp_name="ppo_atari", seed=1, learning_rate=1e-4), [RETURN, "charts/SPS"]),
    (dict(no_env_id=1), []),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:wandb_workspaces.*")  # of pydantic
def test_wandb_report_groups_as_the_page():
    tracked = [SimpleNamespace(config=config, summary=dict.fromkeys(tags, 0)) for config, tags in TRACKED]
    built = report.build_report(tracked, "ppo", "me", RETURN)
    pong, cartpole = [block for block in built.blocks if hasattr(block, "panels")]
    for grid, env_id, grouping in (
        (pong, "ALE/Pong-v5", ["config.env_id", "config.exp_name"]),
        (cartpole, "CartPole-v1", ["config.env_id", "config.exp_name", "config.learning_rate"]),
    ):
        (runset,) = grid.runsets
        assert (runset.entity, runset.project, runset.groupby) == ("me", "ppo", grouping)
        assert runset.filters == f"Config('env_id') == '{env_id}'"
    panels = [(panel.x, *panel.y) for panel in cartpole.panels]
    assert panels == [
        ("global_step", RETURN),
        ("RelativeTime(Process)", RETURN),
        ("global_step", "losses/td_loss"),
        ("global_step", "losses/value_loss"),
    ]
    assert {(panel.groupby_aggfunc, panel.groupby_rangefunc) for panel in cartpole.panels} == {
        ("mean", "stddev")
    }
    assert len({(panel.layout.x, panel.layout.y) for panel in cartpole.panels}) == 4


def save(**environment):
    """report.py --wandb at a terminal that could be asked for a key, with no login but what is given."""
    terminal, stdin = os.openpty()
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    clean |= dict(HOME=os.getcwd(), NETRC="none", TERM="xterm") | environment
    command = [sys.executable, SCRIPT, "--wandb", "--project", "ppo"]
    done = subprocess.run(command, env=clean, stdin=stdin, stdout=stdin, stderr=stdin, timeout=600)
    return done.returncode, os.read(terminal, 10_000).decode().replace("\r\n", "\n")


def test_saving_without_a_login_is_one_line():
    login = "a W&B login (`wandb login` or WANDB_API_KEY), and WANDB_MODE not offline"
    assert save() == (2, f"report.py: error: --wandb needs {login}\n")


class FakeServer(BaseHTTPRequestHandler):
    """As much of W&B's server as saving a report asks for."""

    saved = []

    def do_POST(self):
        request = self.rfile.read(int(self.headers["Content-Length"]))
        reply = json.dumps(
            dict(data=self.answer(json.loads(request)) if self.path == "/graphql" else {})
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def answer(self, request):
        query, last = request["query"], dict(endCursor=None, hasNextPage=False)
        if "upsertView" in query:
            self.saved.append(view := request["variables"])
            project = dict(id="1", name=view["projectName"], entityName=view["entityName"])
            return dict(upsertView=dict(view=view | dict(id="ID", project=project), inserted=True))
        if "models(" in query:
            node = dict(
                id="1", name="ppo", entityName="me", createdAt="2026-01-01T00:00:00Z", isBenchmark=False
            )
            node |= dict(__typename="Project", user=None)
            return dict(models=dict(pageInfo=last | dict(__typename="PageInfo"), edges=[dict(node=node)]))
        if "runCount" in query:
            runs = [dict(name=str(k), config=c, tags=tags) for k, (c, tags) in enumerate(TRACKED)]
            for run in runs:
                run["config"] = json.dumps({key: dict(value=value) for key, value in run["config"].items()})
                run["summaryMetrics"] = json.dumps(dict.fromkeys(run.pop("tags"), 0))
                run |= dict(id=run["name"], state="finished", user=dict(name="me", username="me"))
            edges = [dict(node=run, cursor=run["name"]) for run in runs]
            runs = dict(edges=edges, pageInfo=last)
            return dict(project=dict(internalId="1", runCount=len(edges), readOnly=False, runs=runs))
        if "internalId" in query:
            return dict(project=dict(id="1", internalId="1"))
        return dict(viewer=dict(id="1", entity="me", username="me"))

    def log_message(self, *_):
        pass


def test_saving_with_a_login():
    """Against a server of our own: what is sent, and the link."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    code, output = save(WANDB_BASE_URL=address, WANDB_API_KEY="a" * 40)
    server.shutdown()
    assert (code, output) == (0, f"{address}/me/ppo/reports/ppo-side-by-side--ID\n")
    (view,) = FakeServer.saved
    grids = [block for block in json.loads(view["spec"])["blocks"] if block["type"] == "panel-grid"]
    (runset,) = grids[1]["metadata"]["runSets"]
    names = ["env_id.value", "exp_name.value", "learning_rate.value"]
    assert [key["name"] for key in runset["grouping"]] == names and runset["name"] == "CartPole-v1"
    assert [x["value"] for x in runset["filters"]["filters"]] == ["CartPole-v1"]
