"""Runs by Ray (pip install ray): the suites of run.py on a cluster, and population-based training.

    python benchmark/on_ray.py classic --seeds 1..3 --results mine    # what run.py does, as Ray tasks
    python benchmark/on_ray.py classic --results mine --ray-address auto    # on this machine's cluster
    python benchmark/on_ray.py pbt --script ppo --env-id CartPole-v1 --population 4 --rounds 20

Stop it when you like: the same command goes on. On a cluster, every node has this repository and its packages
at the same path. A suite's CSVs come back to the machine that asked for them, while run folders stay on the
nodes: for a stopped run to go on from its checkpoint, --results must be a folder that all nodes share, and
population-based training needs one.

Population-based training is that of IMPALA's appendix, https://arxiv.org/abs/1802.01561. In each round every
member trains for --round-steps; then evolve() says from whose checkpoint, and with which values, it goes on.
A round resumes with a total that grows by that much, not with the whole total and a signal at some point: so
all members compare at the same step, and the same seed gives the same population of PPO, however often it was
stopped (a stopped round begins anew). Annealing is off, for it would end at each such total: the schedule is
what evolution finds. RESULTS/pbt/TASK__SCRIPT__pbt__SEED.csv has a row a round and member, with fitness and
step at its end; beside it, a JSON file has the settings, the build and the machine with which it began.
"""

import csv
import importlib
import io
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from filelock import FileLock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmark import run  # noqa: E402
from benchmark.files import fail, python_path, read_csv, write_file  # noqa: E402
from benchmark.suites import Row  # noqa: E402


@dataclass
class Suite(run.Args):
    gpus: float = 0  # of each run, such as 0.25
    ray_address: str = "local"  # of a cluster, such as auto; local is this machine alone


@dataclass
class Population:
    script: str = "ppo"  # which script
    env_id: str | None = None  # task, instead of the script's own
    population: int = 4  # members
    rounds: int = 20  # times that all members train; they are compared in between
    round_steps: int = 25_000  # environment steps of a member in a round
    spread: float = 4.0  # the first values are the script's times 1/spread to spread, log-uniform
    seed: int = 1  # of the evolution; the members' own are 100 * seed and up
    flags: str = ""  # more flags for the script
    workers: int = 2  # members that train at a time, on this machine
    threads: int = 1  # of each member
    gpus: float = 0  # of each member, such as 0.25
    ray_address: str = "local"  # of a cluster, such as auto; local is this machine alone
    results: Path = ROOT / "benchmark/results"  # where the folder pbt is, with the CSV and the run folders

    @property
    def name(self) -> str:
        return f"{Row(self.script, self.env_id, 0).name()}__pbt__{self.seed}"

    @property
    def folder(self) -> Path:
        return self.results / "pbt/unfinished" / self.name


# === Ray =====================================================================================


def connect(args: Suite | Population, threads: int):
    """Ray, ready for tasks of up to so many threads."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        fail("Ray is missing: pip install ray")
    where = f"{python_path(ROOT)}{os.pathsep}{os.getcwd()}"  # of benchmark/ and of the user's environments
    options = dict(runtime_env=dict(env_vars=dict(PYTHONPATH=where)))
    options |= dict(logging_level="error", log_to_driver=False)
    if args.ray_address == "local":
        options |= dict(num_cpus=args.workers * threads, include_dashboard=False)

    def give_up():
        print(f"on_ray.py: error: --ray-address {args.ray_address}: no answer in 25 s", file=sys.stderr)
        os._exit(2)

    patience = threading.Timer(25, give_up)  # Ray's own is two minutes
    if args.ray_address != "local":
        patience.start()
    try:
        ray.init(args.ray_address, **options)
    except (ConnectionError, ValueError) as error:
        fail(f"--ray-address {args.ray_address}: {error}")
    finally:
        patience.cancel()
    if args.ray_address == "local" and (found := ray.cluster_resources().get("GPU", 0)) < args.gpus:
        fail(f"--gpus {args.gpus:g}: Ray finds {found:g} on this machine")
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(node.get("CPU", 0) >= threads and node.get("GPU", 0) >= args.gpus for node in nodes):
        gpus = f" and {args.gpus:g} of a GPU" if args.gpus else ""
        text = f"no node has {threads} CPUs{gpus}; the runs wait until one has"
        print(f"on_ray.py: {text}", file=sys.stderr, flush=True)
    return ray


def take_further(trial: run.Run):
    """On a node: train. Ray cancels by a KeyboardInterrupt in the main thread: the run saves and ends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a script started Ray
    stopping = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(trial.work, stopping)
        try:
            while not wait([future], timeout=0.2).done:
                pass
        finally:
            stopping.set()
    future.result()
    return trial.result()


def trained(ray, args: Suite | Population, trials: list[run.Run]) -> Iterator:
    """(trial, its result) as they end; Ctrl-C, SIGTERM or a failure stops the others and waits for them."""
    stop, signals = [], [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signals.append(signal.SIGHUP)  # a terminal or a connection has gone, and nohup was not asked for
    for signum in signals:
        signal.signal(signum, lambda signum, _: stop.append(signum))
    threads = max(trial.threads for trial in trials)  # of each, or more than --workers would run at a time
    task = ray.remote(num_cpus=threads, num_gpus=args.gpus)(take_further)
    running = {task.options(name=trial.name).remote(trial): trial for trial in trials}
    try:
        while running and not stop:
            for ref in ray.wait(list(running), timeout=0.5)[0]:
                yield running[ref], ray.get(ref)
                del running[ref]
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", error)
        print(f"on_ray.py: error: {cause}", file=sys.stderr)
        sys.exit(2 if isinstance(cause, run.Mistake) else 1)
    finally:
        for ref in running:
            ray.cancel(ref)
        if running:
            ray.wait(list(running), num_returns=len(running))
    if stop:
        sys.exit(130)


# === Suites ==================================================================================


class Trial(run.Run):
    """A run of a suite whose results go to whoever asked for them."""

    def result(self) -> tuple[dict, str]:
        return run.read_table(self.table)[self.name], self.csv.read_text(encoding="utf-8")


def run_suite(args: Suite):
    trials = run.possible([Trial(args, row, seed) for row, seed in run.planned(args)])
    missing = [trial for trial in trials if not trial.is_done()]
    print(f"{len(trials) - len(missing)} of {len(trials)} runs are done")
    if not missing:
        return
    ray = connect(args, max(trial.threads for trial in missing))
    for trial, (row, episodes) in trained(ray, args, missing):
        run.write_row(trial.table, trial.name, None)
        write_file(trial.csv, episodes)
        run.write_row(trial.table, trial.name, row)
        print(trial.name, flush=True)


# === Population-based training ===============================================================

EVOLVED = ("learning_rate", "ent_coef", "rmsprop_eps")  # the three of IMPALA's paper


@dataclass(frozen=True)
class Member:
    fitness: float  # mean return of the last 100 training episodes; NaN before the first
    values: dict[str, float]  # of the hyper-parameters


def evolved(defaults) -> dict[str, float]:
    """The flags to evolve, of those that a script has and reads with these arguments, and their values."""
    names = [name for name in EVOLVED if hasattr(defaults, name)]
    if getattr(defaults, "optimizer", None) == "adam":
        names.remove("rmsprop_eps")
    return {name: getattr(defaults, name) for name in names}


def evolve(members: list[Member], rng: np.random.Generator) -> list[tuple[int, dict[str, float]]]:
    """For each member, whose checkpoint it goes on from and with which values.

    It looks at one other member, at random, and takes over that one's if it is more than 5 % better: 5 % of
    the absolute value, for returns are no percentages as the paper's scores are. Copied or not, each value is
    then multiplied by 1.2 or 1 / 1.2 with probability 0.33.
    """
    following = []
    for k, member in enumerate(members):
        other = int((k + rng.integers(1, len(members))) % len(members))
        is_better = members[other].fitness - member.fitness > 0.05 * abs(member.fitness)
        parent = other if is_better else k
        factors = [rng.choice((1.2, 1 / 1.2)) if rng.random() < 0.33 else 1.0 for _ in member.values]
        values = zip(members[parent].values.items(), factors, strict=True)
        following.append((parent, {name: float(x * factor) for (name, x), factor in values}))
    return following


class Round(run.Run):
    """A member's training between two comparisons. It ends with a snapshot; the last two are kept."""

    def __init__(self, args: Population, number: int, member: int, parent: int, values: dict[str, float]):
        given = [f"--{name.replace('_', '-')} {value}" for name, value in values.items()]
        steps, flags = (number + 1) * args.round_steps, " ".join([args.flags, *given])
        row = Row(args.script, args.env_id, steps, flags=flags)
        super().__init__(run.Args("pbt", threads=args.threads), row, 100 * args.seed + member)
        self.number, self.member, self.name = number, member, f"member_{member}"
        self.folder = args.folder / self.name
        self.parent = self.folder.with_name(f"member_{parent}") / f"round_{number - 1}.pt" if number else None

    def snapshot(self, number: int) -> Path:
        return self.folder / f"round_{number}.pt"

    def is_done(self) -> bool:
        return self.snapshot(self.number).exists()

    def train(self, stopping: threading.Event):
        if self.identity["fingerprint"] != run.fingerprint(self.row):
            text = f"{self.row.script}.py has changed since the round began, or is another one on this node"
            raise RuntimeError(text)
        self.folder.mkdir(exist_ok=True)
        if self.parent:
            state = torch.load(self.parent, weights_only=True)
            state["args"]["seed"] = self.seed  # its own, or it would draw what its parent draws
            torch.save(state, self.run_dir() / "checkpoint.pt")
        returncode = self.execute(stopping)
        if returncode == 0:
            shutil.copy(self.run_dir() / "checkpoint.pt", self.folder / "round.tmp")
            (self.folder / "round.tmp").replace(self.snapshot(self.number))
            self.snapshot(self.number - 2).unlink(missing_ok=True)
        elif not stopping.is_set():
            raise RuntimeError(f"{self.folder} ended with {returncode}:\n{self.log_end()}")

    def result(self) -> tuple[float, int]:
        """Fitness, the mean of the last hundred returns, and iterations so far."""
        state = torch.load(self.snapshot(self.number), weights_only=True)
        return float(np.mean(state["last_returns"] or np.nan)), state["iteration"]


def save(path: Path, rows: list[dict]):
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_file(path, text.getvalue())


def check_identity(args: Population, table: Path):
    """What the population was made of stands beside its table; another population cannot go on with it."""
    path, names = table.with_suffix(".json"), ("population", "round_steps", "spread", "flags")
    identity = {name: getattr(args, name) for name in names}
    identity |= dict(fingerprint=run.fingerprint(Row(args.script, args.env_id, 0)))
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if table.exists():
        for name, x in identity.items():
            if before is None or before[name] != x:
                was = before[name] if before else "unknown"
                fail(f"{table} has {name} {was}, not {x}: put that back, or remove the table")
    else:
        table.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(identity | run.build() | run.machine(), indent=1))


def run_population(args: Population):
    run.check_flags(args.flags, "total-timesteps")  # which are the rounds'
    if not (ROOT / f"{args.script}.py").exists():
        fail(f"no script {args.script}")
    defaults = tyro.cli(importlib.import_module(args.script).Args, args=args.flags.split())
    args.env_id, N = args.env_id or defaults.env_id, args.population
    args.flags += " --no-anneal-lr" * hasattr(defaults, "anneal_lr")
    least_of = dict(population=2, rounds=1, round_steps=defaults.batch_size, workers=1, threads=1)
    for name, least in least_of.items():
        if getattr(args, name) < least:
            fail(f"{name} must be at least {least}")
    table = args.results / "pbt" / f"{args.name}.csv"
    rows = read_csv(table) if table.exists() else []
    # where Ray is missing, nothing is written
    ray = connect(args, args.threads) if len(rows) < args.rounds * N else None
    try:
        args.folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--results: {error}")
    lock = FileLock(f"{args.folder}.lock")  # until this function returns
    if not run.is_taken(lock):
        fail(f"another on_ray.py goes on in {args.folder}")
    rows = read_csv(table) if table.exists() else []  # again: another one may just have ended
    check_identity(args, table)
    if not rows:
        shutil.rmtree(args.folder, ignore_errors=True)  # of a first round that did not end
    rng = np.random.default_rng(args.seed)
    first = evolved(defaults)
    values = args.spread ** rng.uniform(-1, 1, (N, len(first))) * list(first.values())
    following = [(k, dict(zip(first, row.tolist(), strict=True))) for k, row in enumerate(values)]
    for number in range(args.rounds):
        if len(rows) == number * N:
            if number:
                check_identity(args, table)  # the script may have been changed since the last round
            rounds = [Round(args, number, k, *following[k]) for k in range(N)]
            results = {done.member: result for done, result in trained(ray, args, rounds)}
            for k, (parent, values) in enumerate(following):
                fitness, iterations = results[k]
                row = dict(round=number, member=k, parent=parent, fitness=fitness) | values
                rows.append(row | dict(step=iterations * defaults.batch_size))
            save(table, rows)
        last = rows[number * N :][:N]
        members = [Member(float(row["fitness"]), {name: float(row[name]) for name in first}) for row in last]
        best = max(range(N), key=lambda k: np.nan_to_num(members[k].fitness, nan=-np.inf))
        values = ", ".join(f"{name} {x:.3g}" for name, x in members[best].values.items())
        step, fitness = last[0]["step"], members[best].fitness
        print(f"step {step}: best is member {best}, {fitness:.1f}, {values}", flush=True)
        following = evolve(members, rng)
    run_dir = Round(args, args.rounds, best, best, {}).run_dir()
    print(f"python {args.script}.py --evaluate {run_dir}\n{table}" if run_dir else table)


def main():
    is_pbt = sys.argv[1:2] == ["pbt"]
    args = tyro.cli(Population, args=sys.argv[2:]) if is_pbt else tyro.cli(Suite)
    args.results = args.results.resolve()  # a task runs in another folder
    run_population(args) if is_pbt else run_suite(args)


if __name__ == "__main__":
    main()
