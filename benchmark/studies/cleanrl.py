"""CleanRL's own scripts, run here: what our results stand beside.

    git clone https://github.com/vwxyzjn/cleanrl && git -C cleanrl checkout fe8d8a0
    python benchmark/studies/cleanrl.py cleanrl/cleanrl --scripts ppo --tasks CartPole-v1 --seeds 1..10
    python benchmark/studies/cleanrl.py cleanrl/cleanrl --scripts ppo_one_network --tasks CartPole-v1
    python benchmark/studies/cleanrl.py cleanrl/cleanrl --scripts ppo_atari --tasks BreakoutNoFrameskip-v4 \\
        --seeds 1..2 --stop-at 500000

Their files are run as they are, with their defaults, on a CPU, by one thread a run; cleanrl_today.py gives
them today's gymnasium. ppo_one_network is their ppo.py changed by one_network.diff: an actor and a critic on
one network, as in ppo_shared.py.

benchmark/published/cleanrl/ gets a CSV a run with a row an episode, and runs.csv with a row a run:
versions, machine, seconds, the file's fingerprint, as `git hash-object` prints it, and the flags that
shorten a run. A run that is there is not run again, and with other such flags it is refused. One that is
stopped begins anew, as CleanRL's scripts cannot resume. --stop-at ends runs early, on their full schedule.
Their Atari scripts want opencv-python-headless.
"""

import csv
import gzip
import io
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import tyro
from filelock import FileLock
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmark.files import fail, python_path, read_csv, write_file  # noqa: E402
from benchmark.run import blob, machine, seed_list  # noqa: E402

STUDIES = ROOT / "benchmark/studies"
# of runs.csv
COLUMNS = "run,script,env_id,seed,seconds,started,machine,versions,fingerprint,flags".split(",")
EPISODE = re.compile(r"global_step=(\d+), episodic_return=\[?([-+.\de]+)")  # as their scripts print it


@dataclass
class Args:
    folder: Annotated[Path, tyro.conf.Positional]  # of CleanRL's scripts
    scripts: tuple[str, ...]  # such as ppo, ppo_continuous_action or ppo_one_network
    tasks: tuple[str, ...]
    seeds: str = "1..10"
    workers: int = 1  # runs at a time
    total_timesteps: int | None = None  # instead of the scripts' own
    stop_at: int | None = None  # environment step after which to stop a run
    results: Path = ROOT / "benchmark/published/cleanrl"


def source(args: Args, script: str, folder: Path) -> Path:
    """The script's file: CleanRL's own, or a copy in a folder, changed by the diff."""
    if script != "ppo_one_network":
        return (args.folder / f"{script}.py").resolve()
    changed = folder / "ppo_one_network.py"
    patch = ["patch", "--quiet", f"--output={changed}", str(args.folder / "ppo.py")]
    subprocess.run([*patch, str(STUDIES / "one_network.diff")], check=True)
    return changed


def play(command: list[str], stop_at: float, **options) -> list[tuple[int, float]]:
    """Step and return of each episode that a script prints, until it ends or prints one beyond stop_at."""
    found = []
    with tempfile.TemporaryFile() as log:
        piped = dict(stdout=subprocess.PIPE, stderr=log, text=True)
        with subprocess.Popen(command, **piped, **options) as process:
            for line in process.stdout:
                episodes = [(int(step), float(x)) for step, x in EPISODE.findall(line)]
                found += [(step, x) for step, x in episodes if step <= stop_at]
                if any(step > stop_at for step, _ in episodes):
                    process.kill()
                    return found
        if process.returncode:
            log.seek(0)
            last_words = log.read().decode()[-2000:]
            raise RuntimeError(f"{command} ended with {process.returncode}: {last_words}")
    return found


def train(args: Args, script: str, task: str, seed: int):
    name = f"{task}__{script}__{seed}"
    path, table = args.results / f"{name}.csv.gz", args.results / "runs.csv"
    lengths = {"--total-timesteps": args.total_timesteps, "--stop-at": args.stop_at}
    flags = " ".join(f"{flag} {x}" for flag, x in lengths.items() if x)
    if path.exists():
        before = {run["run"]: run["flags"] for run in read_csv(table, COLUMNS)}.get(name, "unknown flags")
        if before != flags:
            fail(f"{path} was made with {before or 'no flags'}, not {flags or 'none'}: remove it first")
        return
    row = dict(run=name, script=script, env_id=task, seed=seed, flags=flags)
    row["started"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory() as folder:  # they write runs/ where they are started
        file, start = source(args, script, Path(folder)), time.time()
        command = [sys.executable, "-u", str(STUDIES / "cleanrl_today.py"), str(file), "--no-cuda"]
        command += ["--env-id", task, "--seed", str(seed)]
        command += ["--total-timesteps", str(args.total_timesteps)] if args.total_timesteps else []
        environment = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=python_path(args.folder.resolve()))
        episodes = play(command, args.stop_at or math.inf, cwd=folder, env=environment)
        row |= machine() | dict(seconds=round(time.time() - start), fingerprint=f"{script}.py {blob(file)}")
    if not episodes:
        fail(f"{name}: no episode has ended, so there is nothing to compare")
    text = "step,return\n" + "".join(f"{step},{x:.7g}\n" for step, x in episodes)
    with FileLock(args.results / "runs.csv.lock"):
        rows = {run["run"]: run for run in read_csv(table, COLUMNS)} if table.exists() else {}
        rows[name] = row
        content = io.StringIO()
        writer = csv.DictWriter(content, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[name] for name in sorted(rows))
        write_file(table, content.getvalue())
        write_file(path, gzip.compress(text.encode(), mtime=0))


def main():
    args = tyro.cli(Args, description=__doc__)
    if not (args.folder / "ppo.py").is_file():
        fail(f"{args.folder} is not the folder of CleanRL's scripts: it has no ppo.py")
    for script in args.scripts:
        if script != "ppo_one_network" and not (args.folder / f"{script}.py").is_file():
            fail(f"{args.folder} has no {script}.py")
    if args.workers < 1:
        fail(f"--workers cannot be {args.workers}")
    for flag, steps in (("--total-timesteps", args.total_timesteps), ("--stop-at", args.stop_at)):
        if steps is not None and steps < 1:
            fail(f"{flag} cannot be {steps}")
    args.results.mkdir(parents=True, exist_ok=True)
    runs = [(x, task, seed) for seed in seed_list(args.seeds) for x in args.scripts for task in args.tasks]
    with ThreadPoolExecutor(args.workers) as pool, tqdm(total=len(runs), unit="run") as bar:
        for _ in pool.map(lambda run: train(args, *run), runs):
            bar.update()


if __name__ == "__main__":
    main()
