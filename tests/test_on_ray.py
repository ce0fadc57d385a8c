"""Ray: a suite's results are those of run.py, and a population goes on from its parents' checkpoints."""

import csv
import importlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tyro
from conftest import scalars
from filelock import FileLock

from benchmark import on_ray
from benchmark.suites import Row

ROOT = Path(__file__).parent.parent


def command(tool, *flags):
    results = ["--results", f"{tool}_results"]
    return [sys.executable, ROOT / f"benchmark/{tool}.py", *map(str, flags), *results]


def rows(path):
    with open(path, encoding="utf-8") as file:
        return list(csv.DictReader(file))


def members(*fitness):
    return [on_ray.Member(x, dict(learning_rate=1e-3 * 2**k, ent_coef=0.01)) for k, x in enumerate(fitness)]


@pytest.mark.parametrize("flags", ["--seed 7", "--total-timesteps 9", "--resume runs/NAME"])
def test_flags_that_the_population_sets(flags, capsys):
    args = on_ray.Population(script="ppo", flags=flags)
    with pytest.raises(SystemExit, match="2"):
        on_ray.run_population(args)
    assert f"--flags: {flags.split()[0]} is not to be given among them" in capsys.readouterr().err


def test_evolve_copies_only_what_is_more_than_5_percent_better():
    for fitness, copies in (
        ((100.0, 106.0), {0}),
        ((100.0, 104.0), set()),
        ((-100.0, -96.0), set()),
        ((-100.0, -94.0), {0}),
        ((0.0, 0.1), {0}),
        ((np.nan, 5.0), set()),  # no episode has ended yet
        ((7.0, 7.0), set()),
    ):
        parents = [parent for parent, _ in on_ray.evolve(members(*fitness), np.random.default_rng(0))]
        assert {k for k, parent in enumerate(parents) if parent != k} == copies, fitness


def test_evolve_multiplies_a_third_of_the_values_by_its_factor():
    population, factors, others = members(*np.linspace(1, 100, 20)), [], []
    for seed in range(100):
        for k, (parent, values) in enumerate(on_ray.evolve(population, np.random.default_rng(seed))):
            assert parent == k or population[parent].fitness > 1.05 * population[k].fitness
            factors += [x / population[parent].values[name] for name, x in values.items()]
            others += [parent] * (k == 0)
    assert {round(x, 6) for x in factors} == {1.0, 1.2, round(1 / 1.2, 6)}
    for factor, share in ((1.2, 0.165), (1 / 1.2, 0.165), (1.0, 0.67)):
        assert np.isclose(factors, factor).mean() == pytest.approx(share, abs=0.02)
    assert set(others) == set(range(1, 20))  # a random other one, never itself


@pytest.mark.parametrize(
    "script, flags, names",
    [
        ("ppo", "", "learning_rate ent_coef"),
        ("impala_vtrace", "", "learning_rate ent_coef"),
        ("impala_vtrace", "--optimizer rmsprop", "learning_rate ent_coef rmsprop_eps"),
        ("ngu_r2d2", "", "learning_rate"),
    ],
)
def test_only_flags_that_are_read_evolve(script, flags, names):
    """Adam reads no rmsprop_eps; a member that differs in it alone would be the same run."""
    defaults = tyro.cli(importlib.import_module(script).Args, args=flags.split())
    assert on_ray.evolved(defaults) == {name: getattr(defaults, name) for name in names.split()}


def test_evolve_repeats():
    first, again, other = (
        on_ray.evolve(members(1, 5, 9, 2), np.random.default_rng(seed)) for seed in (3, 3, 4)
    )
    assert first == again != other


def test_a_population_goes_on_from_its_parents_checkpoints():
    """At a learning rate of 0 a member keeps the parameters that it began with: its parent's, to the bit."""
    pytest.importorskip("ray")
    flags = [
        "--population",
        2,
        "--rounds",
        2,
        "--round-steps",
        2048,
        "--seed",
        2,
        "--flags=--learning-rate 0",
    ]
    subprocess.run(command("on_ray", "pbt", *flags), check=True, capture_output=True, timeout=600)
    table, folder = (
        rows("on_ray_results/pbt/CartPole-v1__ppo__pbt__2.csv"),
        Path("on_ray_results/pbt/unfinished/CartPole-v1__ppo__pbt__2"),
    )
    assert [row["step"] for row in table] == ["2048", "2048", "4096", "4096"]
    assert [row["parent"] for row in table] == ["0", "1", "1", "1"]  # member 1 is a sixth better by chance
    assert float(table[0]["fitness"]) < 0.95 * float(table[1]["fitness"])
    states = {
        (k, number): torch.load(folder / f"member_{k}/round_{number}.pt") for k in (0, 1) for number in (0, 1)
    }
    assert not torch.equal(states[0, 0]["agent"]["actor.0.weight"], states[1, 0]["agent"]["actor.0.weight"])
    for k in (0, 1):
        state, parent = states[k, 1], states[1, 0]
        assert state["iteration"] == 8 and state["args"]["seed"] == 200 + k
        assert all(torch.equal(x, parent["agent"][name]) for name, x in state["agent"].items())
        assert float(table[2 + k]["fitness"]) == np.mean(state["last_returns"])
        factor = float(table[2 + k]["ent_coef"]) / float(table[1]["ent_coef"])
        assert min(abs(factor - x) for x in (1, 1.2, 1 / 1.2)) < 1e-9
        assert state["args"]["ent_coef"] == float(table[2 + k]["ent_coef"]) and not state["args"]["anneal_lr"]
        (run_dir,) = (folder / f"member_{k}/runs").iterdir()
        assert [step for step, _ in scalars(run_dir, "charts/learning_rate")] == list(range(512, 4097, 512))
    assert states[0, 1]["last_returns"][-20:] != states[1, 1]["last_returns"][-20:]  # other random numbers


@pytest.mark.parametrize("code", [0, 1])
def test_a_round_begins_at_its_parents_checkpoint_with_its_own_seed(code, monkeypatch):
    """Member 0 goes on from member 1. The last two snapshots are kept, and one that failed leaves none."""
    args, seen = on_ray.Population(env_id="CartPole-v1", seed=2, results=Path.cwd()), []
    for k in (0, 1):
        run_dir = args.folder / f"member_{k}/runs/NAME"
        run_dir.mkdir(parents=True)
        for number, path in enumerate((*(run_dir.parents[1] / f"round_{n}.pt" for n in (0, 1)), run_dir)):
            path = path if path.suffix else path / "checkpoint.pt"
            torch.save(dict(weight=10 * k + number, args=dict(seed=200 + k)), path)

    def execute(self, stopping):
        seen.append(torch.load(self.run_dir() / "checkpoint.pt"))
        return code

    monkeypatch.setattr(on_ray.Round, "execute", execute)
    ours = on_ray.Round(args, 2, 0, 1, dict(learning_rate=1e-3))
    if code:
        with pytest.raises(RuntimeError, match="member_0 ended with 1"):
            ours.train(threading.Event())
    else:
        ours.train(threading.Event())
    assert seen == [dict(weight=11, args=dict(seed=200))] and ours.is_done() == (not code)
    left = [ours.snapshot(number).exists() for number in (0, 1, 2)]
    assert left == ([True, True, False] if code else [False, True, True])
    assert code or torch.load(ours.snapshot(2)) == seen[0]


@pytest.fixture
def pretended(monkeypatch):
    """Stands in for Ray, and for training: a member's fitness comes of its learning rate and its number.

    pretended(name) is a population of three that has its results in the folder name; with stops_in it is
    stopped in that round.
    """
    monkeypatch.setattr(on_ray, "connect", lambda *_: None)
    for name in ("build", "machine"):
        monkeypatch.setattr(on_ray.run, name, dict)

    def population(name, stops_in=None, **flags):
        def trained(ray, args, rounds):
            for k in reversed(range(len(rounds))):  # in whatever order they end
                learning_rate = float(re.search(r"--learning-rate (\S+)", rounds[k].row.flags)[1])
                if rounds[k].number == stops_in and k == 1:
                    sys.exit(130)
                run_dir = rounds[k].folder / "runs/NAME"
                run_dir.mkdir(parents=True, exist_ok=True)
                (run_dir / "checkpoint.pt").touch()
                yield rounds[k], (100 * abs(np.log(learning_rate)) + k, 4 * (1 + rounds[k].number))

        monkeypatch.setattr(on_ray, "trained", trained)
        flags = dict(population=3, rounds=4, round_steps=2048) | flags
        on_ray.run_population(on_ray.Population(results=Path(name).absolute(), **flags))
        return rows(f"{name}/pbt/CartPole-v1__ppo__pbt__{flags.get('seed', 1)}.csv")

    return population


def test_the_best_member_is_named(pretended, capsys):
    """After each round, and whose checkpoint to evaluate at the end."""
    table = pretended("results")
    said, best = capsys.readouterr().out.splitlines(), []
    for number in range(4):
        fitness = [float(row["fitness"]) for row in table[3 * number : 3 * number + 3]]
        best.append(int(np.argmax(fitness)))
        text = f"step {2048 * (number + 1)}: best is member {best[-1]}, {max(fitness):.1f}, learning_rate "
        assert said[number].startswith(text)
    folder = Path("results/pbt/unfinished/CartPole-v1__ppo__pbt__1").absolute()
    assert said[4] == f"python ppo.py --evaluate {folder}/member_{best[-1]}/runs/NAME"
    assert len({row["fitness"] for row in table}) > 6


def test_first_values_are_spread_on_both_sides(pretended):
    """Log-uniformly, from the script's own by 1/spread to them by spread; a seed repeats them."""
    values = []
    for seed in range(1, 41):
        table = pretended("results", rounds=1, seed=seed)
        values += [[float(row["learning_rate"]) / 2.5e-4, float(row["ent_coef"]) / 0.01] for row in table]
    logs = np.log(values) / np.log(4)
    assert -1 <= logs.min() < -0.9 and 0.9 < logs.max() <= 1 and abs(logs.mean(0)).max() < 0.15
    assert abs(np.corrcoef(logs.T)[0, 1]) < 0.3 and len(np.unique(logs)) == logs.size
    assert pretended("again", rounds=1, seed=40) == table


def test_a_stopped_population_goes_on_as_if_it_had_not_been(pretended):
    whole = pretended("whole")
    assert any(row["parent"] != row["member"] for row in whole)
    for stops_in in (0, 1, 3):
        with pytest.raises(SystemExit, match="130"):
            pretended("parts", stops_in)
        table = Path("parts/pbt/CartPole-v1__ppo__pbt__1.csv")
        assert (rows(table) if table.exists() else []) == whole[: 3 * stops_in]
    assert pretended("parts") == whole == pretended("parts")


@pytest.mark.parametrize("flags", [dict(spread=2.0), dict(round_steps=4096), dict(flags="--gamma 0.9"), {}])
def test_another_population_does_not_go_on_in_its_table(pretended, flags, monkeypatch, capsys):
    """With other flags, or with another script: not even where it was changed between two rounds."""
    table, fingerprint = pretended("results", rounds=2), on_ray.run.fingerprint
    if not flags:
        monkeypatch.setattr(on_ray.run, "fingerprint", lambda row: f"{fingerprint(row)} changed")
    with pytest.raises(SystemExit, match="2"):
        pretended("results", **flags)
    name = next(iter(flags), "fingerprint")
    assert re.search(
        rf"error: .*__1\.csv has {name} .*: put that back, or remove the table\n$", capsys.readouterr().err
    )
    assert rows("results/pbt/CartPole-v1__ppo__pbt__1.csv") == table
    if not flags:
        evolve = on_ray.evolve
        monkeypatch.setattr(on_ray.run, "fingerprint", fingerprint)

        def evolve_and_edit(*args):
            monkeypatch.setattr(on_ray.run, "fingerprint", lambda row: f"{fingerprint(row)} changed")
            return evolve(*args)

        monkeypatch.setattr(on_ray, "evolve", evolve_and_edit)
        with pytest.raises(SystemExit, match="2"):
            pretended("edited")
        assert len(rows("edited/pbt/CartPole-v1__ppo__pbt__1.csv")) == 3


def test_a_signal_stops_the_tasks(monkeypatch):
    """Exit code 130, and none is left. All ask for as many CPUs, so no more than --workers run at a time."""
    cancelled, asked = [], []
    handlers = {x: signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def remote(**flags):
        asked.append(flags)
        task = SimpleNamespace(remote=lambda trial: trial.name)
        return lambda function: SimpleNamespace(options=lambda **_: task)

    def wait(refs, timeout=None, num_returns=1):
        if timeout:
            signal.raise_signal(signal.SIGTERM)
        return [], refs

    ray = SimpleNamespace(remote=remote, wait=wait, cancel=cancelled.append)
    ray.exceptions = SimpleNamespace(RayError=ZeroDivisionError)
    args = on_ray.Suite("classic", results=Path(), gpus=0.5)
    trials = [on_ray.Trial(args, Row("ppo", "CartPole-v1", 4096, threads=x), x) for x in (1, 3, 2)]
    try:
        with pytest.raises(SystemExit) as end:
            list(on_ray.trained(ray, args, trials))
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    assert end.value.code == 130 and cancelled == [trial.name for trial in trials]
    assert asked == [dict(num_cpus=3, num_gpus=0.5)]


def pretended_ray(nodes):
    """What connect() needs of Ray; begun has what init() was given."""
    begun, resources = [], {name: sum(node.get(name, 0) for node in nodes) for name in ("CPU", "GPU")}
    init = lambda *args, **flags: begun.append((*args, flags))  # noqa: E731
    nodes = [dict(Alive=True, Resources=x) for x in nodes] + [
        dict(Alive=False, Resources=dict(CPU=99, GPU=9))
    ]
    return SimpleNamespace(init=init, nodes=lambda: nodes, cluster_resources=lambda: resources, begun=begun)


@pytest.mark.parametrize(
    "threads, gpus, said",
    [
        (4, 0.5, ""),
        (8, 0, ""),
        (16, 0, "no node has 16 CPUs; the runs wait until one has"),
        (8, 1, "no node has 8 CPUs and 1 of a GPU; the runs wait until one has"),
    ],
)
def test_runs_that_no_node_has_room_for(threads, gpus, said, monkeypatch, capsys):
    """They wait, as a cluster may grow, but not without a word."""
    ray = pretended_ray([dict(CPU=8), dict(CPU=4, GPU=1)])
    monkeypatch.setitem(sys.modules, "ray", ray)
    args = on_ray.Suite("classic", gpus=gpus, ray_address="auto")
    assert on_ray.connect(args, threads) is ray and "num_cpus" not in ray.begun[0][-1]
    assert capsys.readouterr().err == (f"on_ray.py: {said}\n" if said else "")


def test_this_machine_runs_as_many_at_a_time_as_there_are_workers(monkeypatch):
    ray = pretended_ray([dict(CPU=6)])
    monkeypatch.setitem(sys.modules, "ray", ray)
    on_ray.connect(on_ray.Suite("impala", workers=3), 2)
    assert ray.begun[0][-1]["num_cpus"] == 6


def test_a_round_is_trained_by_the_script_of_its_population(monkeypatch):
    """On no node by another one, and not after it was changed."""
    args = on_ray.Population(env_id="CartPole-v1", results=Path("results").absolute())
    member = on_ray.Round(args, 0, 0, 0, dict(learning_rate=1e-3))
    monkeypatch.setattr(on_ray.run, "fingerprint", lambda row: "another")
    with pytest.raises(RuntimeError, match="ppo.py has changed since the round began, or is another one"):
        member.train(threading.Event())
    assert not member.folder.exists()


def test_results_that_are_no_folder(monkeypatch, capsys):
    monkeypatch.setattr(on_ray, "connect", lambda *_: None)
    Path("file").touch()
    with pytest.raises(SystemExit, match="2"):
        on_ray.run_population(on_ray.Population(results=Path("file").absolute()))
    assert re.fullmatch(r".*error: --results: .*\n", capsys.readouterr().err)


def test_a_suite_has_the_results_of_run_py():
    pytest.importorskip("ray")
    flags = [
        "classic",
        "--scripts",
        "ppo",
        "--env-ids",
        "CartPole-v1",
        "--seeds",
        1,
        "--total-timesteps",
        4096,
    ]
    for tool in ("run", "on_ray"):
        subprocess.run(command(tool, *flags), check=True, capture_output=True, timeout=600)
    for name in ("CartPole-v1__ppo__total-timesteps=4096__1.csv", "runs.csv"):
        ours, theirs = (
            [row | dict(seconds="", started="") for row in rows(f"{x}_results/classic/{name}")]
            for x in ("on_ray", "run")
        )
        assert ours == theirs and ours


def test_a_kill_leaves_no_row_beside_the_episodes_of_another_run(monkeypatch):
    """Where a node sends a longer run: neither the old row with new episodes nor the other way."""
    flags = dict(scripts=("ppo",), env_ids=("CartPole-v1",), results=Path.cwd())
    args, table, seen = on_ray.Suite("classic", "1", stop_at=8192, **flags), Path("classic/runs.csv"), []
    trial = on_ray.Trial(args, *on_ray.run.planned(args)[0])
    row = dict.fromkeys(on_ray.run.COLUMNS, "1") | dict(run=trial.name, steps="4096") | trial.identity
    on_ray.run.write_row(table, trial.name, row)
    trial.csv.write_text("old", encoding="utf-8")
    replace_file = Path.replace

    def replace_and_look(self, target):
        replace_file(self, target)
        seen.append((trial.csv.read_text(encoding="utf-8"), [x["steps"] for x in rows(table)]))

    monkeypatch.setattr(Path, "replace", replace_and_look)
    monkeypatch.setattr(on_ray, "connect", lambda *_: None)
    results = [(trial, (row | dict(steps="8192"), "new"))]
    monkeypatch.setattr(on_ray, "trained", lambda *_: results)
    on_ray.run_suite(args)
    assert seen == [("old", []), ("new", []), ("new", ["8192"])]


def test_a_cancelled_task_saves_its_run_and_leaves_no_process():
    """Ray cancels by a KeyboardInterrupt, even where its workers were started with SIGINT ignored."""
    code = "from benchmark.on_ray import *; args = Suite('classic', results=Path.cwd()); "
    code += "take_further(Trial(args, run.SUITES['classic'][0], 1))"
    env = os.environ | dict(PYTHONPATH=str(ROOT))
    ignored = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)  # noqa: E731
    task = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, env=env, preexec_fn=ignored)
    log, deadline = Path("classic/unfinished/CartPole-v1__ppo__1/log.txt"), time.time() + 300
    while not (log.exists() and "step/s" in log.read_text(encoding="utf-8")) and time.time() < deadline:
        time.sleep(0.1)
    task.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in task.communicate(timeout=600)[1]
    (run_dir,) = log.parent.glob("runs/*")
    assert 0 < torch.load(run_dir / "checkpoint.pt")["iteration"] < 976
    for path in (f"{log.parent}.lock", run_dir / "lock"):
        FileLock(path).acquire(blocking=False)  # raises if it is still held


@pytest.mark.parametrize(
    "flags, message",
    [
        (["clasic"], "no suite clasic; "),
        (["pbt", "--script", "pppo"], "no script pppo"),
        (["pbt", "--population", "1"], "population must be at least 2"),
        (["pbt", "--workers", "0"], "workers must be at least 1"),
        (["pbt", "--threads", "0"], "threads must be at least 1"),
        (["pbt", "--rounds", "0"], "rounds must be at least 1"),
        (["pbt", "--round-steps", "100"], "round_steps must be at least 512"),
        (["pbt", "--population", "2"], "Ray is missing: pip install ray"),
    ],
)
def test_mistakes(flags, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["on_ray.py", *flags, "--results", "results"])
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    with pytest.raises(SystemExit, match="2"):
        on_ray.main()
    error = capsys.readouterr().err
    assert error.startswith(f"on_ray.py: error: {message}") and error.count("\n") == 1
    assert not os.path.exists("results")


def test_a_population_that_goes_on_elsewhere(monkeypatch, capsys):
    """A second one of its name is refused, also before the first round has ended."""
    monkeypatch.setattr(on_ray, "connect", lambda *_: None)
    args = on_ray.Population(results=Path("results").absolute(), flags="--gamma 0.9")
    args.env_id = "CartPole-v1"
    member = args.folder / "member_0"
    member.mkdir(parents=True)
    with FileLock(f"{args.folder}.lock"), pytest.raises(SystemExit, match="2"):
        on_ray.run_population(args)
    assert capsys.readouterr().err.endswith(f"another on_ray.py goes on in {args.folder}\n")
    assert member.exists() and not list(args.results.rglob("*.json"))


def test_more_gpus_than_there_are():
    pytest.importorskip("ray")
    flags = command("on_ray", "classic", "--seeds", 1, "--gpus", 99)
    done = subprocess.run(flags, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and "error: --gpus 99: Ray finds " in done.stderr


@pytest.mark.parametrize("address", ["127.0.0.1:9", "nonsense"])
def test_a_cluster_that_does_not_answer(address):
    """Is said within half a minute; Ray by itself waits for two."""
    pytest.importorskip("ray")
    flags = command("on_ray", "classic", "--seeds", 1, "--ray-address", address)
    done = subprocess.run(flags, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and f"on_ray.py: error: --ray-address {address}: " in done.stderr
    assert not Path("on_ray_results").exists()
