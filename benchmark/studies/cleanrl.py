"""CleanRL's own scripts, run here: what our results stand beside.

    git clone https://github.com/vwxyzjn/cleanrl && git -C cleanrl checkout fe8d8a0
    python benchmark/studies/cleanrl.py cleanrl/cleanrl --scripts ppo --tasks CartPole-v1 --seeds 1..10
    python benchmark/studies/cleanrl.py cleanrl/cleanrl --scripts ppo_one_network --tasks CartPole-v1

Their files are run as they are, with their defaults, on a CPU, by one thread a run; cleanrl_today.py gives
them today's gymnasium. ppo_one_network is their ppo.py changed by one_network.diff: an actor and a critic on
one network, as in ppo_shared.py.

benchmark/published/cleanrl/ gets a CSV a run with a row an episode, and runs.csv with a row a run: versions,
machine, seconds and the file's fingerprint, as `git hash-object` prints it. A run that is there is not run
again. One that is stopped begins anew, as CleanRL's scripts cannot resume.
"""

import csv
import gzip
import io
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
from benchmark.files import fail, read_csv, write_file  # noqa: E402
from benchmark.run import blob, machine, seed_list  # noqa: E402

STUDIES = ROOT / "benchmark/studies"
COLUMNS = "run,script,env_id,seed,seconds,started,machine,versions,fingerprint".split(",")  # of runs.csv
EPISODE = re.compile(r"global_step=(\d+), episodic_return=\[?([-+.\de]+)")  # as their scripts print it


@dataclass
class Args:
    folder: Annotated[Path, tyro.conf.Positional]  # of CleanRL's scripts
    scripts: tuple[str, ...]  # such as ppo, ppo_continuous_action or ppo_one_network
    tasks: tuple[str, ...]
    seeds: str = "1..10"
    workers: int = 1  # runs at a time
    total_timesteps: int | None = None  # instead of the scripts' own
    results: Path = ROOT / "benchmark/published/cleanrl"


def source(args: Args, script: str, folder: Path) -> Path:
    """The script's file: CleanRL's own, or a copy in a folder, changed by the diff."""
    if script != "ppo_one_network":
        return (args.folder / f"{script}.py").resolve()
    changed = folder / "ppo_one_network.py"
    patch = ["patch", "--quiet", f"--output={changed}", str(args.folder / "ppo.py")]
    subprocess.run([*patch, str(STUDIES / "one_network.diff")], check=True)
    return changed


def train(args: Args, script: str, task: str, seed: int):
    name = f"{task}__{script}__{seed}"
    path = args.results / f"{name}.csv.gz"
    if path.exists():
        return
    row = dict(run=name, script=script, env_id=task, seed=seed)
    row["started"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory() as folder:  # they write runs/ where they are started
        file, start = source(args, script, Path(folder)), time.time()
        command = [sys.executable, str(STUDIES / "cleanrl_today.py"), str(file), "--no-cuda"]
        command += ["--env-id", task, "--seed", str(seed)]
        command += ["--total-timesteps", str(args.total_timesteps)] if args.total_timesteps else []
        environment = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(args.folder.resolve()))
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name} ended with {done.returncode}: {done.stderr[-2000:]}")
        row |= machine() | dict(seconds=round(time.time() - start), fingerprint=f"{script}.py {blob(file)}")
    episodes = EPISODE.findall(done.stdout)
    text = "step,return\n" + "".join(f"{step},{float(x):.7g}\n" for step, x in episodes)
    with FileLock(args.results / "runs.csv.lock"):
        table = args.results / "runs.csv"
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
    args.results.mkdir(parents=True, exist_ok=True)
    runs = [(x, task, seed) for seed in seed_list(args.seeds) for x in args.scripts for task in args.tasks]
    with ThreadPoolExecutor(args.workers) as pool, tqdm(total=len(runs), unit="run") as bar:
        for _ in pool.map(lambda run: train(args, *run), runs):
            bar.update()


if __name__ == "__main__":
    main()
