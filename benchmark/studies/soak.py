"""Memory and threads of every script while it trains for an hour: does either grow?

    python benchmark/studies/soak.py --csv benchmark/results/speed/soak.csv
    python benchmark/studies/soak.py ppo impala_vtrace --minutes 10

All train at once, on one thread each and at the lowest priority, on the tasks of TASKS: their speed means
nothing here. The CSV has PARTS rows a script (one a minute), each with medians of SAMPLES samples: resident
memory and threads of the process and its children. Growth is that of the last row over the one that ends the
first tenth of the time. The runs and their checkpoints stay in a temporary folder.
Exits with 1 where it is above LIMIT, where threads are added, or where a script ends by itself.
"""

import csv
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmark.files import fail  # noqa: E402

LIMIT, PARTS, SAMPLES = 0.02, 60, 12
TASKS = {
    "ppo": "--env-id CartPole-v1",
    "ppo_shared": "--env-id CartPole-v1",
    "ppo_atari": "--env-id BreakoutNoFrameskip-v4",
    "ppo_continuous": "--env-id HalfCheetah-v4",
    "ppo_lstm": "--env-id BreakoutNoFrameskip-v4",
    "ppo_multidiscrete": "--env-id HalfCheetah-v4",
    "ppo_async": "--env-id BreakoutNoFrameskip-v4",
    "impala_vtrace": "--env-id BreakoutNoFrameskip-v4",
    "ngu_r2d2": "--env-id MiniGrid-DoorKey-8x8-v0 --replay-steps 12000",  # full within the first tenth
}
HEAD = ["minute", "script", "resident_mb", "threads"]


@dataclass
class Args:
    scripts: tyro.conf.Positional[tuple[str, ...]] = tuple(TASKS)  # scripts to run
    minutes: float = 60  # of training
    csv: Path | None = None  # file to write the samples to


def sample(process: psutil.Process) -> tuple[float, int]:
    """Resident MB and threads of a process and its children."""
    tree = [process, *process.children(recursive=True)]
    return sum(x.memory_info().rss for x in tree) / 1e6, sum(x.num_threads() for x in tree)


def growth(rows: list[list]) -> tuple[float, float]:
    """Of memory, as a share, and of threads, by the PARTS rows of one script."""
    _, _, memory, threads = rows[PARTS // 10 - 1]
    return rows[-1][2] / memory - 1, rows[-1][3] - threads


def steps_of(folder: Path) -> int:
    """Last step that the run in folder has logged."""
    (run_dir,) = (folder / "runs").iterdir()
    events = EventAccumulator(str(run_dir))
    events.Reload()
    return max(events.Scalars(tag)[-1].step for tag in events.Tags()["scalars"])


def main():
    args = tyro.cli(Args)
    if unknown := set(args.scripts) - TASKS.keys():
        fail(f"no script {', '.join(sorted(unknown))}; there are {', '.join(TASKS)}")
    if not 0 < args.minutes < float("inf"):
        fail(f"--minutes cannot be {args.minutes}")
    if args.csv:
        try:
            args.csv.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            fail(f"--csv: {error}")
    scripts = tuple(dict.fromkeys(args.scripts))  # one that is named twice runs once
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the scripts below
    folder = Path(tempfile.mkdtemp(prefix="soak_"))
    print(f"{folder} has the runs and what they print", flush=True)
    environment = os.environ | dict(OMP_NUM_THREADS="1")
    processes, rows = {}, []
    try:
        for script in scripts:
            (folder / script).mkdir()
            flags = shlex.split(f"{TASKS[script]} --device cpu --total-timesteps 1000000000")
            flags += ["--stall-seconds", "600"]  # all nine begin at once, on the same cores
            with open(folder / script / "log.txt", "w", encoding="utf-8") as log:
                command = [sys.executable, str(ROOT / f"{script}.py"), *flags]
                pipes = dict(cwd=folder / script, stdout=log, stderr=subprocess.STDOUT, env=environment)
                processes[script] = psutil.Popen(command, **pipes)
            processes[script].nice(19)
        for script, process in processes.items():  # one that starts slowly is not measured before it trains
            while not list((folder / script).glob("runs/*/events*")) and process.poll() is None:
                time.sleep(0.1)
        start = time.monotonic()
        for part in range(1, PARTS + 1):
            samples = {script: [] for script in processes}
            for k in range(SAMPLES):
                at = start + 60 * args.minutes * (part - 1 + (k + 1) / SAMPLES) / PARTS
                time.sleep(max(0, at - time.monotonic()))
                for script, process in processes.items():
                    if process.poll() is not None:
                        sys.exit(f"{script}.py ended with {process.returncode}: {folder / script}/log.txt")
                    samples[script].append(sample(process))
            for script, pairs in samples.items():
                medians = (round(median(x), 1) for x in zip(*pairs, strict=True))
                rows.append([round(args.minutes * part / PARTS, 2), script, *medians])
            if args.csv:
                with open(args.csv, "w", encoding="utf-8", newline="") as file:
                    csv.writer(file, lineterminator="\n").writerows([HEAD, *rows])
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        ended = {script: process.wait(timeout=600) for script, process in processes.items()}
    is_flat = True
    for script in processes:
        more, threads = growth([row for row in rows if row[1] == script])
        is_flat &= more < LIMIT and threads <= 0
        text = f"{script}.py: {steps_of(folder / script)} steps, memory {more:+.2%}, threads {threads:+g}"
        print(f"{text}, ended with {ended[script]}")
    sys.exit(0 if is_flat else 1)


if __name__ == "__main__":
    main()
