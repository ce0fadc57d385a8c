"""Run what is missing of a suite, in parallel, and write one small CSV a run.

    python benchmark/run.py classic --seeds 1..3 --workers 2
    python benchmark/run.py atari --seeds 1 --env-ids PongNoFrameskip-v4 --stop-at 1000000 --threads 2

Stop it when you like, even with kill -9: the same command goes on, each run from its checkpoint, and nothing
is run twice. --stop-at ends the runs early on their full schedule, so that they stay comparable with the
beginning of a published curve; --total-timesteps changes the schedule itself. Folders and checkpoints are in
benchmark/unfinished/, results in benchmark/results/: RUN.csv (a row an episode) and runs.csv (a row a run).
"""

import csv
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import tyro
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmark.export import export  # noqa: E402
from benchmark.suites import SUITES, Row  # noqa: E402


@dataclass
class Args:
    suite: tyro.conf.Positional[str]  # which suite
    seeds: str = "1..3"  # such as 1..3 or 1,5
    workers: int = 2  # runs at a time
    threads: int = 1  # of each run
    scripts: tuple[str, ...] = ()  # only these
    env_ids: tuple[str, ...] = ()  # only these
    flags: str = ""  # more flags for the scripts; they change the names of the results
    total_timesteps: int | None = None  # instead of the suite's, annealing included
    stop_at: int | None = None  # environment step at which to stop a run, on the full schedule
    work: Path = ROOT / "benchmark/unfinished"  # for run folders
    results: Path = ROOT / "benchmark/results"  # for CSVs

    def seed_list(self) -> list[int]:
        if ".." in self.seeds:
            first, last = map(int, self.seeds.split(".."))
            return list(range(first, last + 1))
        return [int(seed) for seed in self.seeds.split(",")]


class Run:
    """One run of a script: where it is, how far it is, and how to take it further."""

    def __init__(self, args: Args, row: Row, seed: int):
        self.row, self.seed, self.args = row, seed, args
        steps = args.total_timesteps or row.steps
        self.steps = min(args.stop_at or steps, steps)
        self.name = "__".join((row.name, *args.flags.replace("--", "").split(), str(seed)))
        self.folder, self.csv = args.work / self.name, args.results / f"{self.name}.csv"
        self.command = [
            sys.executable,
            str(ROOT / f"{row.script}.py"),
            "--env-id",
            row.env_id,
            "--seed",
            str(seed),
        ]
        self.command += ["--total-timesteps", str(steps), *row.flags, *args.flags.split()]
        self.log = self.folder / "log.txt"

    def run_dir(self) -> Path | None:
        """The run folder with the newest checkpoint, if any."""
        found = sorted(self.folder.glob("runs/*/checkpoint.pt"), key=os.path.getmtime)
        return found[-1].parent if found else None

    def progress(self) -> int:
        """Environment steps, from the last line of the log."""
        if self.csv.exists():
            return self.steps
        text = self.log.read_text(errors="replace")[-2000:] if self.log.exists() else ""
        numbers = re.findall(r"([\d.]+)([kM]?)/[\d.]+[kM]? ", text)
        return int(float(numbers[-1][0]) * dict(k=1e3, M=1e6).get(numbers[-1][1], 1)) if numbers else 0

    def work(self, stopping: threading.Event):
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "lock", "w") as lock:
            # the run holds the lock, too: one that outlived its runner is waited for, not started twice
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self.csv.exists() and not stopping.is_set():
                self.train(lock, stopping)

    def train(self, lock, stopping: threading.Event):
        if self.args.stop_at and self.run_dir() and self.progress() >= self.steps:
            return self.finish(0)  # it was stopped by hand, beyond
        resume = ["--resume", str(self.run_dir().relative_to(self.folder))] if self.run_dir() else []
        environment = os.environ | dict(OMP_NUM_THREADS=str(self.args.threads), PYTHONPATH=str(ROOT))
        start = time.time()
        with open(self.log, "a") as log:
            process = subprocess.Popen(
                [*self.command, *resume],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=[lock.fileno()],
                start_new_session=True,  # Ctrl-C is for the runner, which tells the runs
            )
        while process.poll() is None:
            if stopping.is_set() or self.args.stop_at and self.progress() >= self.steps:
                process.send_signal(signal.SIGTERM)
                process.wait()
            stopping.wait(1) if not stopping.is_set() else time.sleep(0.1)
        cut = process.returncode == 128 + signal.SIGTERM and self.progress() >= self.steps
        if process.returncode == 0 or cut:
            self.finish(time.time() - start)
        elif not stopping.is_set():
            tail = self.log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{self.name} ended with {process.returncode}; see {self.log}\n{tail}")

    def finish(self, seconds: float):
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
        )
        row = dict(
            run=self.name, script=self.row.script, env_id=self.row.env_id, seed=self.seed, steps=self.steps
        )
        row |= dict(date=date.today(), commit=commit.stdout.strip() or "?", seconds=round(seconds))
        row |= dict(command=" ".join(["python", f"{self.row.script}.py", *self.command[2:]]))
        table = self.args.results / "runs.csv"
        self.args.results.mkdir(parents=True, exist_ok=True)
        with open(self.args.results / "runs.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            is_new = not table.exists()
            with open(table, "a", newline="") as file:
                writer = csv.DictWriter(file, row, lineterminator="\n")
                if is_new:
                    writer.writeheader()
                writer.writerow(row)
        export(self.run_dir(), self.csv)


def main():
    args = tyro.cli(Args)
    if args.suite not in SUITES:
        print(f"run.py: error: no suite {args.suite}; there are {', '.join(SUITES)}", file=sys.stderr)
        sys.exit(2)
    rows = [row for row in SUITES[args.suite] if not args.scripts or row.script in args.scripts]
    rows = [row for row in rows if not args.env_ids or row.env_id in args.env_ids]
    runs = [Run(args, row, seed) for seed in args.seed_list() for row in rows]
    stopping, done = threading.Event(), 0
    style = {} if sys.stderr.isatty() else dict(mininterval=10, bar_format="{l_bar}{r_bar}\n")
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: stopping.set())
    with (
        ThreadPoolExecutor(args.workers) as pool,
        tqdm(total=sum(run.steps for run in runs), unit="step", unit_scale=True, **style) as bar,
    ):
        futures = [pool.submit(run.work, stopping) for run in runs]
        bar.initial = bar.n = sum(run.progress() for run in runs)  # the estimate is of what is left
        while not all(future.done() for future in futures):
            failed = [future for future in futures if future.done() and future.exception()]
            if failed:
                stopping.set()
            bar.update(sum(run.progress() for run in runs) - bar.n)
            done = sum(run.csv.exists() for run in runs)
            bar.set_postfix_str(f"{done} of {len(runs)} runs", refresh=False)
            time.sleep(0.5)
    errors = [str(future.exception()) for future in futures if future.exception()]
    if errors:
        sys.exit("\n".join(errors))
    done = sum(run.csv.exists() for run in runs)
    print(f"{done} of {len(runs)} runs are done; results in {args.results}")
    sys.exit(0 if done == len(runs) else 130)


if __name__ == "__main__":
    main()
