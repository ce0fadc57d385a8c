"""The evaluator beside a training: plays its newest checkpoint, keeps the best, draws the learning curve.

    python benchmark/watch.py runs/NAME            # until the training has finished; Ctrl-C ends only this
    python benchmark/watch.py runs/NAME --once     # only the newest checkpoint
    python benchmark/watch.py runs/NAME --capture-video    # films an episode of each new best
    tensorboard --logdir runs                      # shows the evaluations as a run of their own, NAME/eval

It takes the lowest priority and one thread of the CPU, reads the training's files and writes its own beside
them: best.pt (the checkpoint of the highest mean return), eval.csv (a row an evaluation), learning_curve.png
and eval/. To evaluate best.pt or to resume from it, copy it to another folder as checkpoint.pt. The videos of
--capture-video are in videos/best-STEP; each shows the first episode of that step's evaluation.

It never queues: of the checkpoints written during an evaluation, the last one is next. Stop it when you like,
even with kill -9, and start it again: nothing is evaluated twice. Where the training leaves no core free,
start it in the same terminal: Linux shares cores among terminals before it looks at priorities.
"""

import csv
import importlib
import io
import lzma
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import zlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch
import tyro
from filelock import FileLock, Timeout
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmark import figures  # noqa: E402
from benchmark.files import fail, read_csv  # noqa: E402

# what ZipFile and torch.load raise for files that were cut or changed, besides common errors
DAMAGED = (BadZipFile, EOFError, OverflowError, lzma.LZMAError, pickle.UnpicklingError, zlib.error)
COLUMNS = dict(step=int, mean=float, std=float, episodes=int, seconds=float)  # of eval.csv


@dataclass
class Args:
    run: tyro.conf.Positional[Path]  # run folder
    episodes: int = 10  # full episodes of an evaluation
    poll: float = 5.0  # seconds between looks for a new checkpoint
    once: bool = False  # evaluate the newest checkpoint and end
    capture_video: bool = False  # film an episode of each new best in the run folder's videos/best-STEP
    stall_seconds: int = 0  # end if a step of an evaluation takes longer; 0: never
    script: Path | None = None  # the run's script, where it is neither in this folder nor in the repository


def read_evaluations(path: Path) -> list[dict[str, float]]:
    """Rows of eval.csv."""
    rows = []
    for number, row in enumerate(read_csv(path, COLUMNS), 2):  # the first line has the names
        try:
            rows.append({name: COLUMNS[name](x) for name, x in row.items()})
        except ValueError as error:
            fail(f"{path}, line {number}: {error}")
    return rows


def read_checkpoint(path: Path) -> tuple[bytes, dict]:
    """A checkpoint as it lies on the disk, and what it holds."""
    try:
        checkpoint = path.read_bytes()
        if damaged := ZipFile(io.BytesIO(checkpoint)).testzip():  # torch.load compares no checksums
            raise ValueError(f"{damaged} is damaged")
        state = torch.load(io.BytesIO(checkpoint), map_location="cpu", weights_only=True)
        if missing := {"script", "args", "iteration"} - set(state):
            raise ValueError(f"{', '.join(sorted(missing))} is missing")
    except (OSError, LookupError, RuntimeError, TypeError, ValueError, *DAMAGED) as error:
        fail(f"{path} is no readable checkpoint: {error!r:.150}")
    return checkpoint, state


class Watcher:
    """The evaluations of a run, and how to add the next."""

    timer = None  # of --stall-seconds

    def __init__(self, args: Args):
        self.args, self.folder, self.rows = args, args.run / "eval", []
        try:
            self.folder.mkdir(exist_ok=True)
            self.lock = FileLock(self.folder / "lock")
            self.lock.acquire(blocking=False)
        except Timeout:
            fail(f"{args.run} has a watcher")
        except OSError as error:
            fail(f"{args.run}: {error}")
        if (args.run / "eval.csv").exists():
            self.rows = read_evaluations(args.run / "eval.csv")
        self.training = EventAccumulator(str(args.run), size_guidance={"scalars": 0})
        if self.rows:
            self.publish()  # what a kill left undone

    @cached_property  # a watcher that fails at once leaves no file
    def writer(self) -> SummaryWriter:
        # not in the training's folder: TensorBoard reads its files one after the other and never goes back
        return SummaryWriter(self.folder, purge_step=self.rows[-1]["step"] + 1 if self.rows else 0)

    @property
    def best(self) -> dict[str, float]:
        return max(self.rows, key=lambda row: row["mean"])

    def write(self, name: str, content: bytes):
        """Atomically, so that a kill leaves the old file or the new one."""
        (self.folder / "new.tmp").write_bytes(content)
        (self.folder / "new.tmp").replace(self.args.run / name)

    def script(self, name: str) -> ModuleType:
        places = [self.args.script] if self.args.script else [Path(f"{name}.py"), ROOT / f"{name}.py"]
        found = [path.resolve() for path in places if path.stem == name and path.is_file()]
        if not found:
            fail(f"{self.args.run} is a run of {name}.py: say where that is with --script")
        if sys.path[0] != str(found[0].parent):
            sys.path.insert(0, str(found[0].parent))  # as if it were run: modules of its own lie beside it
        return importlib.import_module(name)

    def watch_heartbeats(self, script: ModuleType):
        """Starts the timer of --stall-seconds, by this flag and not by that of the training."""
        if self.args.stall_seconds and not self.timer:
            watch = dict(target=script.watch_heartbeats, args=[self.args.stall_seconds], daemon=True)
            self.timer = threading.Thread(**watch)
            self.timer.start()

    def evaluate(self) -> bool:
        """Evaluate the checkpoint, unless that was done. True if it is the training's last."""
        path = self.args.run / "checkpoint.pt"
        checkpoint, state = read_checkpoint(path)  # the training may replace the file from now on
        name = state["script"]
        script = self.script(name)
        try:
            args = script.Args(**state["args"])
        except (TypeError, ValueError) as error:
            fail(f"{path} is of another {name}.py: {error}")
        step = state["step"] if "step" in state else state["iteration"] * args.batch_size
        if step not in [row["step"] for row in self.rows]:
            copy, start = self.folder / str(step), time.time()
            copy.mkdir(exist_ok=True)
            self.write(f"eval/{step}/checkpoint.pt", checkpoint)
            args = replace(args, evaluate=str(copy), eval_episodes=self.args.episodes, device="cpu")
            self.watch_heartbeats(script)
            script.heartbeat("evaluation")  # to make the environment counts, too
            returns = script.evaluate(args)
            mean, std = float(np.mean(returns)), float(np.std(returns))
            row = dict(
                step=step, mean=mean, std=std, episodes=len(returns), seconds=round(time.time() - start, 1)
            )
            if self.args.capture_video and (not self.rows or mean > self.best["mean"]):
                script.evaluate(replace(args, eval_episodes=1, capture_video=True))
                self.keep_videos(copy / "videos", f"best-{step}")
            if self.timer:
                script.HEARTBEATS.clear()  # the next checkpoint may be long in coming
            self.record(row)
        return state["iteration"] >= args.num_iterations

    def keep_videos(self, folder: Path, name: str):
        """Moves videos into the run's. They are there before their evaluation counts: a kill loses none."""
        kept = self.args.run / "videos" / name
        kept.parent.mkdir(exist_ok=True)
        if not kept.exists():  # else a kill came before the evaluation counted
            folder.replace(kept)

    def record(self, row: dict[str, float]):
        self.writer.add_scalar("eval/episodic_return", row["mean"], row["step"])
        self.writer.add_scalar("eval/episodic_return_std", row["std"], row["step"])
        self.writer.flush()
        self.rows.append(row)
        table = io.StringIO()
        writer = csv.DictWriter(table, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        self.write("eval.csv", table.getvalue().encode())  # from here on the evaluation counts
        self.publish()
        print(
            "step {step}: return {mean:.2f} +- {std:.2f} over {episodes} episodes".format(**row), flush=True
        )

    def publish(self):
        """best.pt and the picture, of what is in eval.csv."""
        copy = self.folder / str(self.best["step"]) / "checkpoint.pt"
        if copy.exists():  # else it is best.pt already
            copy.replace(self.args.run / "best.pt")
        for folder in filter(Path.is_dir, self.folder.iterdir()):
            shutil.rmtree(folder)
        self.write("learning_curve.png", self.picture())

    def picture(self) -> bytes:
        figure, (ax,) = figures.panels(1, height=4.5)
        figure.set_figwidth(8)
        tag = "charts/episodic_return"
        self.training.Reload()  # only what is new
        if tag in self.training.Tags()["scalars"]:
            steps, returns = np.array([(e.step, e.value) for e in self.training.Scalars(tag)]).T
            last = np.minimum(np.arange(len(returns)) + 1, 100)
            smooth = np.convolve(returns, np.ones(100))[: len(returns)] / last
            ax.plot(steps, smooth, linewidth=1, label="training, last 100 episodes")
        steps, means, stds = ([row[k] for row in self.rows] for k in ("step", "mean", "std"))
        bars = dict(marker=".", capsize=2, linewidth=1, elinewidth=0.6)
        ax.errorbar(steps, means, stds, **bars, label="evaluation, mean ± std")
        label = f"best.pt, {self.best['mean']:.4g}"
        ax.plot(self.best["step"], self.best["mean"], "*", color="black", markersize=12, label=label)
        figures.finish(ax, self.args.run.name)
        figures.legend(figure)
        return figures.png(figure)


def main():
    args = tyro.cli(Args)
    for signum in (signal.SIGINT, signal.SIGTERM):  # no different from a kill: that is safe at any time
        signal.signal(signum, lambda signum, _: os._exit(128 + signum))
    if hasattr(os, "nice"):  # Windows has none
        os.nice(19)
    torch.set_num_threads(1)
    sys.path.append(os.getcwd())  # as in the scripts: where environments of the user's own may lie
    if args.episodes < 1 or not args.poll > 0:
        fail("episodes and poll must be above 0")
    if not 0 <= args.stall_seconds < 2**22:
        fail("stall_seconds must be from 0 to 2**22 - 1")
    if not args.run.is_dir():
        fail(f"there is no folder {args.run}")
    if not any((args.run / name).exists() for name in ("checkpoint.pt", "lock")):  # of a training
        fail(f"{args.run} is no run folder, such as runs/NAME")
    path, seen, finished = args.run / "checkpoint.pt", None, False
    watcher = Watcher(args)
    if not args.once and not path.exists():
        print(f"waiting for {path}", flush=True)
    while not finished:
        written = path.stat().st_mtime_ns if path.exists() else None
        if written != seen:
            finished, seen = watcher.evaluate() or args.once, written
        elif args.once:
            fail(f"there is no {path} yet")
        else:
            time.sleep(args.poll)
    best = watcher.best
    print(f"best return {best['mean']:.2f} at step {best['step']}: {args.run}/best.pt")


if __name__ == "__main__":
    main()
