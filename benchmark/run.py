"""Run what is missing of a suite, in parallel, and write one small CSV a run.

    python benchmark/run.py classic --workers 2
    python benchmark/run.py classic --scripts ppo --env-ids CartPole-v1 --seeds 1,5 --results mine
    python benchmark/run.py atari --env-ids PongNoFrameskip-v4 --stop-at 1000000
    python benchmark/run.py classic --scripts ppo --grid learning-rate=1e-4,1e-3 gamma=0.98,0.99 --seeds 1..3

Stop it when you like, even with kill -9: the same command goes on, each run from its last checkpoint, and
nothing is run twice. Without --seeds, each row of suites.py is run as often as it says. RESULTS/SUITE/ gets a
CSV a run, with a row an episode, and runs.csv, with a row a run: build, machine and command, as they were
when each part of the run began, and the seconds of all parts. Run folders are in RESULTS/SUITE/unfinished/
until their runs have reached the end of their schedule.

A run belongs to its command and to the fingerprints of its files, as `git hash-object` prints them. A row of
runs.csv that has the same name but was made by another command or by other files stays as it is, and run.py
says so; it ends with a message where an unfinished folder was. --anew throws either away and runs it again.

--stop-at ends runs early on their full schedule, so that they stay comparable with the beginning of a
published curve; a higher one continues them. --total-timesteps changes the schedule itself.

--grid runs every combination of the values of some flags, each with every seed. report.py shows them.
"""

import csv
import hashlib
import io
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import tyro
from filelock import FileLock, Timeout
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmark.episodes_csv import export  # noqa: E402
from benchmark.files import csv_path, fail, python_path, read_csv, write_file  # noqa: E402
from benchmark.suites import SUITES, Row  # noqa: E402

# nobody sees an unattended run hang; cores may be shared with others, where an iteration takes its time
PATIENCE = ("--stall-seconds", "600")
PACKAGES = ("torch", "numpy", "gymnasium", "ale-py", "mujoco", "minigrid", "gym-microrts")
COLUMNS = (
    "run,script,env_id,seed,steps,schedule,seconds,parts,started,commit,changed,machine,threads,versions"
)
COLUMNS = [*COLUMNS.split(","), "command", "fingerprint"]  # of runs.csv
SuiteName = Annotated[str, tyro.conf.Positional, tyro.conf.arg(help=f"one of {', '.join(SUITES)}")]


@dataclass
class Args:
    suite: SuiteName
    seeds: str | None = None  # such as 1..3 or 1,5, instead of the suite's own
    workers: int = 1  # runs at a time
    threads: int | None = None  # of each run, instead of the suite's
    scripts: tuple[str, ...] = ()  # only these
    env_ids: tuple[str, ...] = ()  # only these
    flags: str = ""  # more flags for the scripts; they change the names of the results
    grid: tuple[str, ...] = ()  # values of flags, such as learning-rate=1e-4,1e-3; all combinations are run
    total_timesteps: int | None = None  # instead of the suite's, annealing included
    stop_at: int | None = None  # environment step at which to stop a run, on the full schedule
    anew: bool = False  # throw away what other commands or other files made under the same name
    results: Path = ROOT / "benchmark/results"  # where the suite's folder is


class Mistake(Exception):
    """Of the user: the message is all that needs to be said."""


MISTAKES = (Mistake, SystemExit)  # the second, of fail(), has said what is wrong


# === Build and machine =======================================================================


def blob(file: Path) -> str:
    """The first digits of `git hash-object FILE`."""
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()[:12]


def fingerprint(row: Row) -> str:
    """Of each file that makes the row's results: the first digits of `git hash-object FILE`."""
    files = list(dict.fromkeys([f"{row.script}.py", row.file]))
    if ":" in row.env_id:
        module = row.env_id.split(":")[0].replace(".", "/") + ".py"
        files += [module] if (ROOT / module).is_file() else []  # else an installed package's
    return ", ".join(f"{file} {blob(ROOT / file)}" for file in files)


def git(*command: str) -> str:
    try:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
    except OSError:  # no git here
        return "unknown"
    return done.stdout.rstrip() if done.returncode == 0 else "unknown"


def build() -> dict[str, str]:
    """The commit, and what differs from it; results do not count."""
    changed = git("status", "--porcelain", "--", ".", ":(exclude)benchmark/results")
    files = [line[3:] for line in changed.splitlines()] if changed != "unknown" else ["unknown"]
    return dict(commit=git("rev-parse", "--short=10", "HEAD"), changed=" ".join(files) or "nothing")


def machine() -> dict[str, str]:
    """Names of the processors, and versions of what the runs compute with."""
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.*)", info.read_text(encoding="utf-8")) if info.exists() else []
    names = [f"{os.cpu_count()} x {models[0] if models else platform.processor() or platform.machine()}"]
    for gpu in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        names += re.findall(r"Model:\s*(.*)", gpu.read_text(encoding="utf-8"))
    versions = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            pass
    return dict(machine=", ".join(names), versions=", ".join(versions))


# === Runs ====================================================================================


class Run:
    """One run of a script: where it is, how far it is, and how to take it further."""

    def __init__(self, args: Args, row: Row, seed: int):
        self.row, self.seed, self.args = row, seed, args
        self.schedule = args.total_timesteps or row.steps
        stop_at = args.stop_at or (row.stop_at if self.schedule == row.steps else None)
        self.steps = min(stop_at or self.schedule, self.schedule)
        self.threads = args.threads or row.threads
        more = args.flags
        if self.schedule != row.steps:
            more += f" --total-timesteps {self.schedule}"
        self.name = f"{row.name(more)}__{seed}"
        self.results = args.results / args.suite
        self.csv, self.table = self.results / f"{self.name}.csv", self.results / "runs.csv"
        self.folder = self.results / "unfinished" / self.name
        options = row.options(args.flags) | {"total-timesteps": str(self.schedule)}
        flags = [word for name, x in options.items() for word in (f"--{name}", *x.split())]
        flags += [] if {"stall-seconds", "stall_seconds"} & options.keys() else PATIENCE
        self.flags = ["--env-id", row.env_id, "--seed", str(seed), *flags]
        command = " ".join(["python", row.file, *self.flags])
        self.identity = dict(command=command, fingerprint=fingerprint(row))

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def started(self) -> Path:
        """An empty file that is there while the script runs, and stays if its runner is killed."""
        return self.folder / "started"

    def run_dir(self) -> Path | None:
        """The run folder of the script, if it has a checkpoint."""
        found = sorted(self.folder.glob("runs/*/checkpoint.pt"), key=os.path.getmtime)
        return found[-1].parent if found else None

    def record(self) -> dict:
        """What is known of the run in its folder: its identity and the parts in which it was run."""
        path = self.folder / "run.json"
        try:
            return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        except ValueError as error:
            fail(f"{path} cannot be read ({error}): remove {self.folder}")

    def write_record(self, record: dict):
        write_file(self.folder / "run.json", json.dumps(record, indent=1))

    def is_mine(self, record: dict) -> bool:
        return all(record.get(name) == x for name, x in self.identity.items())

    def difference(self, record: dict) -> str:
        """In what a record of another run with this name differs."""
        name = next(name for name, x in self.identity.items() if record.get(name) != x)
        return f"has another {name}: {record.get(name, 'an unknown one')}, not {self.identity[name]}"

    def row_of_another(self) -> str | None:
        """What runs.csv has under this run's name, if that was made by another command or by other files."""
        row = read_table(self.table).get(self.name)
        return f"{self.csv} {self.difference(row)}" if row and not self.is_mine(row) else None

    def folder_of_another(self) -> str | None:
        """Its folder, if that was made by another command or by other files, or has no record."""
        record, is_begun = self.record(), any(self.folder.glob("runs/*"))
        is_of_another = (record or is_begun) and not self.is_mine(record)
        return f"{self.folder} {self.difference(record)}" if is_of_another else None

    def is_done(self) -> bool:
        if not csv_path(self.results, self.name).exists():
            return False
        row = read_table(self.table).get(self.name)
        return bool(row) and self.is_mine(row) and int(row["steps"]) >= self.steps

    def is_beyond(self) -> bool:
        """Has passed the step at which it is to stop. The log rounds, so just that step is not enough."""
        return self.steps < self.schedule and self.progress() > self.steps

    def progress(self) -> int:
        """Environment steps, from the last line of the log."""
        numbers = re.findall(r"([\d.]+)([kMG]?)/[\d.]+[kMG]? ", self.log_end())
        units = dict(k=1e3, M=1e6, G=1e9)
        return int(float(numbers[-1][0]) * units.get(numbers[-1][1], 1)) if numbers else 0

    def log_end(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-2000:] if self.log.exists() else ""

    def work(self, stopping: threading.Event):
        """Train until the run is done, or until it is to stop."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{self.folder}.lock")
        try:
            while not stopping.is_set() and not is_taken(lock):
                stopping.wait(1)
            while not stopping.is_set() and self.is_orphan():
                stopping.wait(1)
            if not stopping.is_set() and not self.is_done():
                self.train(stopping)
        finally:
            lock.release()
        if self.is_done() and self.steps == self.schedule:
            with suppress(PermissionError):  # on Windows, while another runner looks at it
                Path(lock.lock_file).unlink(missing_ok=True)

    def is_orphan(self) -> bool:
        """Whether the run goes on without its runner, which was killed: it is waited for, not started twice.

        A script locks its run folder before it logs. One that has not logged yet is given a minute.
        """
        if self.started.exists():
            start = self.started.stat().st_mtime
            has_logged = any(path.stat().st_mtime >= start for path in self.folder.glob("runs/*/events*"))
            if not has_logged and time.time() < start + 60:
                return True
        return any(not is_free(path) for path in self.folder.glob("runs/*/lock"))

    def train(self, stopping: threading.Event):
        if (obstacle := self.row_of_another() or self.folder_of_another()) and not self.args.anew:
            raise Mistake(obstacle)
        if self.identity["fingerprint"] != fingerprint(self.row):
            raise Mistake(f"{self.row.script}.py is not what it was when run.py began; start it again")
        if self.folder_of_another():
            remove(self.folder)
        record = self.record() or self.identity | dict(parts=[])
        end_last_part(record["parts"], self.log)
        if self.run_dir() and self.is_beyond():
            return self.finish(record["parts"])
        part = dict(started=datetime.now(timezone.utc).isoformat(timespec="seconds"))
        part |= build() | machine() | dict(threads=self.threads, seconds=None)
        record["parts"].append(part)
        self.folder.mkdir(exist_ok=True)
        self.write_record(record)
        start = time.time()
        returncode = self.execute(stopping)
        part["seconds"] = round(time.time() - start)
        self.write_record(record)
        if returncode == 0 or returncode == 128 + signal.SIGTERM and self.is_beyond():
            self.finish(record["parts"])
        elif not stopping.is_set():
            error = Mistake if returncode == 2 else RuntimeError
            raise error(f"{self.name} ended with {returncode}; see {self.log}\n{self.log_end()}")

    def execute(self, stopping: threading.Event) -> int:
        """Exit code of the script, which is started or resumed, and stopped in time."""
        resume = ["--resume", str(self.run_dir().relative_to(self.folder))] if self.run_dir() else []
        environment = os.environ | dict(OMP_NUM_THREADS=str(self.threads), PYTHONPATH=python_path(ROOT))
        self.started.touch()
        with open(self.log, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, str(ROOT / self.row.file), *self.flags, *resume],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the runner, which tells the runs
            )
        while process.poll() is None:
            if stopping.is_set() or self.is_beyond():
                process.send_signal(signal.SIGTERM)
                process.wait()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)
        self.started.unlink(missing_ok=True)
        return process.returncode

    def finish(self, parts: list[dict]):
        """Write the results; the folder leaves, if there is nothing to continue."""
        row = dict(run=self.name, script=self.row.script, env_id=self.row.env_id, seed=self.seed)
        row |= dict(steps=self.steps, schedule=self.schedule, seconds=sum(x["seconds"] for x in parts))
        row |= dict(parts=len(parts))
        for name in ("started", "commit", "changed", "machine", "threads", "versions"):
            different = dict.fromkeys(str(part[name]) for part in parts)
            row[name] = " | ".join(different)
        new = self.csv.with_suffix(".new")
        export(self.run_dir(), new)
        write_row(self.table, self.name, None)  # a kill leaves no row beside the episodes of another run
        new.replace(self.csv)
        self.csv.with_suffix(".csv.gz").unlink(missing_ok=True)
        write_row(self.table, self.name, row | self.identity)
        if self.steps == self.schedule:
            remove(self.folder)


def remove(folder: Path):
    """At once, for a reader: what a kill leaves of it has another name."""
    removed = folder.with_name(f"{folder.name}.removed")
    shutil.rmtree(removed, ignore_errors=True)
    folder.rename(removed)
    shutil.rmtree(removed)


def end_last_part(parts: list[dict], log: Path):
    """Gives a part whose runner was killed its seconds: until the last line of the log."""
    if parts and parts[-1]["seconds"] is None:
        start = datetime.fromisoformat(parts[-1]["started"]).timestamp()
        end = log.stat().st_mtime if log.exists() else start
        parts[-1]["seconds"] = max(0, round(end - start))


def is_taken(lock: FileLock) -> bool:
    """Takes the lock, if nobody else has it."""
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return False
    return True


def is_free(path: Path) -> bool:
    """Whether nobody has the lock of this path."""
    lock = FileLock(path)
    if not is_taken(lock):
        return False
    lock.release()
    return True


# === runs.csv ================================================================================


def read_table(path: Path) -> dict[str, dict]:
    """Rows of runs.csv by the run's name."""
    return {row["run"]: row for row in read_csv(path, COLUMNS)} if path.exists() else {}


def write_row(path: Path, name: str, row: dict | None):
    """Adds a run's row to runs.csv, replaces it, or removes it if it is None. Rows are in order of names."""
    (path.parent / "unfinished").mkdir(parents=True, exist_ok=True)
    with FileLock(path.parent / "unfinished" / f"{path.name}.lock"):
        rows = read_table(path) | {name: row}
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[name] for name in sorted(rows) if rows[name])
        write_file(path, text.getvalue())


# === Main ====================================================================================


def seed_list(text: str) -> list[int]:
    """Seeds of 1..3 or 1,5."""
    if found := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        seeds = list(range(int(found[1]), int(found[2]) + 1))
    else:
        seeds = [int(x) for x in text.split(",")] if re.fullmatch(r"\d+(,\d+)*", text) else []
    if not seeds:
        fail(f"--seeds {text}: write 1..3 or 1,5")
    return seeds


def check_flags(flags: str, *taken: str, option: str = "--flags"):
    """taken: names of flags that the tool has itself, besides those of all tools; option: of the tool."""
    if flags.strip() and not flags.strip().startswith("--"):
        fail(f"--flags {flags!r}: write them as for a script, such as --flags='--learning-rate 1e-3'")
    names = {word[2:].partition("=")[0].replace("_", "-") for word in flags.split() if word.startswith("--")}
    if wrong := sorted(names & {"env-id", "seed", "resume", "evaluate", *taken}):
        fail(f"{option}: --{wrong[0]} is not to be given among them")


def combinations(grid: tuple[str, ...], flags_beside: str) -> list[str]:
    """Flags for the scripts: each value of each flag of the grid with each value of the others."""
    found = [""]
    for text in grid:
        if not re.fullmatch(r"\w[\w-]*=[^,\s]+(,[^,\s]+)*", text):
            fail(f"--grid {text}: write it as learning-rate=1e-4,1e-3")
        name, _, values = text.partition("=")
        found = [f"{flags} --{name} {value}" for flags in found for value in values.split(",")]
    names = [text.partition("=")[0].replace("_", "-") for text in grid]
    names += re.findall(r"--([\w-]+)", flags_beside.replace("_", "-"))
    if twice := [name for name in names if names.count(name) > 1]:
        fail(f"--{twice[0]} is given twice, in --grid or in --flags")
    return found


def planned(args: Args) -> list[tuple[Row, int]]:
    """Rows and seeds that the flags ask for, the first seed of each row first."""
    if args.suite not in SUITES:
        fail(f"no suite {args.suite}; there are {', '.join(SUITES)}")
    for flag, asked, known in (
        ("--scripts", args.scripts, [row.script for row in SUITES[args.suite]]),
        ("--env-ids", args.env_ids, [row.env_id for row in SUITES[args.suite]]),
    ):
        if unknown := [x for x in asked if x not in known]:
            known = ", ".join(dict.fromkeys(known))
            fail(f"{flag}: {args.suite} has no {', '.join(unknown)}; it has {known}")
    for name in ("workers", "threads", "total_timesteps", "stop_at"):
        if (x := getattr(args, name)) is not None and x < 1:
            fail(f"{name} cannot be {x}")
    grid = combinations(args.grid, args.flags)
    check_flags(args.flags, "total-timesteps")  # which is run.py's own
    check_flags(grid[0], "total-timesteps", option="--grid")  # all have the same names
    rows = [row for row in SUITES[args.suite] if not args.scripts or row.script in args.scripts]
    rows = [row for row in rows if not args.env_ids or row.env_id in args.env_ids]
    rows = [replace(row, flags=row.flags + flags) for row in rows for flags in grid]
    seeds = seed_list(args.seeds) if args.seeds else range(1, 1 + max(row.seeds for row in rows))
    plan = [(row, seed) for seed in seeds for row in rows if args.seeds or seed <= row.seeds]
    if not plan:
        fail("these rows are only run if they are given --seeds")
    return plan


def possible(runs: list[Run]) -> list[Run]:
    """Those that may be run: without --anew, not those that are recorded of other builds."""
    if too_long := [run.name for run in runs if len(run.name) > 240]:
        fail(f"{too_long[0]} is too long for the name of a file: give fewer flags")
    if len(names := {run.name for run in runs}) < len(runs):
        fail(f"{len(names)} of {len(runs)} runs differ: a seed, or a flag of --grid, is given twice")
    of_others = {run.name: text for run in runs if not run.args.anew and (text := run.row_of_another())}
    if of_others:
        share = f"{len(of_others)} of {len(runs)} runs are such and stay; --anew makes them again"
        text = f"{next(iter(of_others.values()))}; {share}"
        if len(of_others) == len(runs):
            fail(text)
        print(f"run.py: {text}", file=sys.stderr)
    runs = [run for run in runs if run.name not in of_others]
    folders = [text for run in runs if not run.args.anew and (text := run.folder_of_another())]
    if folders:
        fail(f"{folders[0]} ({len(folders)} of {len(runs)} runs); --anew makes them again")
    return runs


def main():
    args = tyro.cli(Args, description=__doc__)
    args.results = args.results.resolve()
    runs = possible([Run(args, row, seed) for row, seed in planned(args)])
    try:
        (args.results / args.suite).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--results: {error}")
    stopping = threading.Event()

    def progress() -> int:
        return sum(run.steps if run.is_done() else run.progress() for run in runs)

    style = {} if sys.stderr.isatty() else dict(mininterval=60, bar_format="{l_bar}{r_bar}\n")
    signals = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signals.append(signal.SIGHUP)  # a terminal or a connection has gone, and nohup was not asked for
    for signum in signals:
        signal.signal(signum, lambda *_: stopping.set())
    with (
        ThreadPoolExecutor(args.workers) as pool,
        tqdm(total=sum(run.steps for run in runs), unit="step", unit_scale=True, **style) as bar,
    ):
        bar.initial = bar.n = progress()  # the estimate is of what is left
        futures = [pool.submit(run.work, stopping) for run in runs]
        going_on = futures
        try:
            while going_on:
                going_on = wait(going_on, timeout=1, return_when=FIRST_COMPLETED).not_done
                failed = [future.exception() for future in futures if future.done() and future.exception()]
                if any(isinstance(error, MISTAKES) for error in failed):
                    stopping.set()  # the other runs would make it, too
                done = sum(run.is_done() for run in runs)
                bar.set_postfix_str(f"{done} of {len(runs)} runs", refresh=False)
                bar.update(progress() - bar.n)
        finally:
            stopping.set()  # a table that cannot be read any more ends this loop, and the runs
    errors = [future.exception() for future in futures if future.exception()]
    for error in errors:
        if not isinstance(error, SystemExit):  # which has said so
            print(f"run.py: error: {error}", file=sys.stderr)
    done = sum(run.is_done() for run in runs)
    print(f"{done} of {len(runs)} runs are done; results in {args.results / args.suite}")
    if errors:
        sys.exit(2 if any(isinstance(error, MISTAKES) for error in errors) else 1)
    sys.exit(0 if done == len(runs) else 130)


if __name__ == "__main__":
    main()
