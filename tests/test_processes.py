"""Auxiliary detail 2, parallel gradients, and several learners with actors: torchrun with two processes."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import SCRIPTS, scalars, wait_for

import ngu_r2d2

ROOT = Path(__file__).parent.parent
ENVIRONMENT = os.environ | dict(
    OMP_NUM_THREADS="1", PYTHONHASHSEED="0", PYTHONPATH=os.pathsep.join((str(ROOT), str(ROOT / "tests/helpers")))
)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(*command, **more):
    """Once more if another torchrun has taken the port that this one had found free."""
    for _ in range(3):
        done = subprocess.run(command, env=ENVIRONMENT, timeout=600, capture_output=True, text=True, **more)
        if done.returncode == 0 or "EADDRINUSE" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """A folder of what one process did with each script, and one of what two did."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    run(sys.executable, ROOT / "tests/helpers/one_of_many.py", one, *SCRIPTS, cwd=one)
    run(*TORCHRUN, ROOT / "tests/helpers/one_of_many.py", two, *SCRIPTS, cwd=two)
    return one, two


@pytest.mark.parametrize("name", SCRIPTS)
def test_auxiliary_detail_2_two_processes_do_what_one_does(name, ranks):
    """Five updates of the whole batch: the same parameters to 1e-6, bitwise equal on both ranks."""
    one, two = ranks
    paths = one / f"{name}-0.pt", two / f"{name}-0.pt", two / f"{name}-1.pt"
    alone, first, second = map(torch.load, paths)
    assert len(first["sums"]) == 5 and first["sums"] == second["sums"] and len(set(first["sums"])) == 5
    for a, b in zip(alone["parameters"], first["parameters"], strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    torch.testing.assert_close(alone["gradients"], first["gradients"], atol=1e-4, rtol=1e-3)
    assert alone["gradients"].abs().max() > 1e-2
    assert first["seeds"] == [1] and second["seeds"] == [3]  # two environments each
    assert ("statistics" in alone) == (name in ("ppo_continuous", "ppo_multidiscrete"))
    if "statistics" in alone:
        torch.testing.assert_close(alone["statistics"], first["statistics"], rtol=1e-5, atol=0)
        assert torch.equal(first["statistics"], second["statistics"])


def test_processes_log_save_stop_and_resume_as_one(tmp_path):
    """Rank 0 logs and saves; one signal ends all; a run of two processes goes on in one."""
    command = [*TORCHRUN, ROOT / "ppo.py", "--total-timesteps", "200000000"]
    process = subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    run_dir = Path(process.stdout.readline().strip())
    wait_for(lambda: list(run_dir.glob("events*")))
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=600)
    assert not out and list(Path("runs").iterdir()) == [run_dir], err
    steps = [step for step, _ in scalars(run_dir, "charts/SPS")]
    iteration = torch.load(run_dir / "checkpoint.pt")["iteration"]
    assert steps == list(range(512, 512 * iteration + 1, 512)) and iteration > 0
    total = str(512 * (iteration + 3))
    run(sys.executable, ROOT / "ppo.py", "--resume", run_dir, "--total-timesteps", total)
    assert torch.load(run_dir / "checkpoint.pt")["iteration"] == iteration + 3
    assert list(Path("runs").iterdir()) == [run_dir]


@pytest.fixture
def nodes():
    """Two "machines": network namespaces joined by a cable, as prefixes of commands. Needs root."""
    ip = shutil.which("ip")
    if not ip or subprocess.run([ip, "netns", "add", "ppo1"], capture_output=True).returncode:
        pytest.skip("no right to make network namespaces")
    in_namespaces = [[ip, "netns", "exec", name] for name in ("ppo1", "ppo2")]
    try:
        for line in (
            "netns add ppo2",
            "link add ppo1 netns ppo1 type veth peer name ppo2 netns ppo2",
            *(f"-n ppo{n} addr add 10.77.0.{n}/24 dev ppo{n}" for n in (1, 2)),
            *(f"-n ppo{n} link set {name} up" for n in (1, 2) for name in ("lo", f"ppo{n}")),
        ):
            subprocess.run([ip, *line.split()], check=True)
        yield in_namespaces
    finally:
        for name in ("ppo1", "ppo2"):
            subprocess.run([ip, "netns", "del", name])


def test_two_nodes_bring_back_a_rank_that_was_killed(nodes):
    """Two processes on each of two nodes, one killed: all begin anew from the checkpoint, up to the end.

    The variable: in the store that torchrun shares, workers of a new round find addresses of dead ones.
    """
    run(sys.executable, ROOT / "ppo.py", "--total-timesteps", "5120", "--save-every", "10")
    (run_dir,) = Path("runs").iterdir()
    total, agents = 512 * 300, []
    train = [ROOT / "ppo.py", "--resume", run_dir, "--total-timesteps", str(total), "--save-every", "10"]
    for n, node in enumerate(nodes, 1):
        torchrun = "--nnodes 2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d --rdzv-id ppo".split()
        endpoint = ["--rdzv-endpoint", "10.77.0.1:29477", "--local-addr", f"10.77.0.{n}"]
        endpoint += ["--rdzv-conf", f"is_host={n == 1}"]  # which it cannot tell by the machine's name here
        command = [*node, sys.executable, "-m", "torch.distributed.run", *torchrun, *endpoint, *train]
        environment = ENVIRONMENT | dict(GLOO_SOCKET_IFNAME=f"ppo{n}", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        agents.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        first = saved_iteration(run_dir, above=10)
        children = subprocess.check_output(["pgrep", "-P", str(agents[1].pid)], text=True).split()
        victim = int(children[-1])
        os.kill(victim, signal.SIGKILL)
        for agent in agents:
            _, err = agent.communicate(timeout=600)
            assert agent.returncode == 0, err[-3000:]
    finally:
        for agent in agents:
            agent.kill()
    assert 10 < first < 300 and saved_iteration(run_dir) == 300
    steps = [step for step, _ in scalars(run_dir, "charts/SPS")]
    assert steps == list(range(512, total + 1, 512))
    assert list(Path("runs").iterdir()) == [run_dir]


def saved_iteration(run_dir: Path, above: int = 0) -> int:
    deadline = time.time() + 300
    while (
        iteration := torch.load(run_dir / "checkpoint.pt")["iteration"]
    ) <= above and time.time() < deadline:
        time.sleep(0.2)
    return iteration


def words(text):
    """Of what tyro draws a box around."""
    return " ".join(text.replace("│", " ").split())


def test_processes_must_divide_the_environments():
    command = [*TORCHRUN, ROOT / "ppo.py", "--num-envs", "3"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert "the 2 processes of torchrun must divide num_envs" in words(done.stderr) and not os.listdir()


def decoupled(name, folder, *flags, processes=1):
    """Parameters after every update (1 + updates, all), by rank."""
    folder.mkdir()
    start = TORCHRUN if processes == 2 else [sys.executable]
    run(*start, ROOT / "tests/helpers/decoupled_ranks.py", name, folder, *flags)
    return [torch.load(folder / f"{rank}.pt") for rank in range(processes)]


@pytest.mark.parametrize("name", ["impala_vtrace", "ppo_async"])
def test_two_learners_do_what_one_does(name, tmp_path):
    """Gradients are put together before the clip: one double batch to 1e-6, bitwise equal on both ranks."""
    (alone,) = decoupled(name, tmp_path / "one")
    first, second = decoupled(name, tmp_path / "two", processes=2)
    assert len(first) == 6 and torch.equal(first, second) and len(first.unique(dim=0)) == 6
    torch.testing.assert_close(alone, first, atol=1e-6, rtol=0)


def test_two_optimizers_drop_the_same_batches(tmp_path):
    """--max-staleness: where all of a batch is too old, no rank updates, and none waits for the other."""
    flags = ("--artificial-delay", "1", "--max-staleness", "0")
    first, second = decoupled("ppo_async", tmp_path / "two", *flags, processes=2)
    assert torch.equal(first, second)
    # the first version and three more: every other iteration has what the version before it made
    assert len(first) == 4 and len(first.unique(dim=0)) == 4


def test_two_optimizers_that_keep_unequal_numbers_do_what_one_does(tmp_path):
    """One keeps 4 segments and the other one 1: the union, with gradients weighted by samples."""
    (alone,) = decoupled("ppo_async", tmp_path / "one", "unequal")
    first, second = decoupled("ppo_async", tmp_path / "two", "unequal", processes=2)
    assert len(first) == 6 and torch.equal(first, second) and len(first.unique(dim=0)) == 6
    torch.testing.assert_close(alone, first, atol=1e-6, rtol=0)


def test_two_optimizers_that_keep_unequal_numbers_make_as_many_updates(tmp_path):
    """32 and 128 samples, of which a share of 0.8 goes into 8 minibatches: chunks would be 7 and 8."""
    flags = "unequal --num-steps 32 --total-timesteps 1280 --num-minibatches 8 --sample-reuse 0.8 --norm-adv"
    flags = flags.split()
    first, second = decoupled("ppo_async", tmp_path / "two", *flags, processes=2)
    assert len(first) == 6 and torch.equal(first, second) and len(first.unique(dim=0)) == 6


def test_impala_learners_that_average_now_and_then(tmp_path):
    """--sync-every 2: apart after updates 1 and 3, together after 2 and 4. Their mean moves as one does."""
    flags = ("--max-grad-norm", "1e9", "--sync-every")
    (alone,) = decoupled("impala_vtrace", tmp_path / "one", *flags, "1")
    first, second = decoupled("impala_vtrace", tmp_path / "two", *flags, "2", processes=2)
    assert ((first[1] + second[1]) / 2 - alone[1]).norm() < 0.05 * (alone[1] - alone[0]).norm()
    differ = [(a - b).abs().max().item() > 1e-6 for a, b in zip(first, second, strict=True)]
    assert differ == [False, True, False, True, False, True]


def test_never_give_up_in_two_processes(tmp_path):
    """Other episodes, but the same parameters and statistics to the bit; batch and replay are shared out."""
    run(*TORCHRUN, ROOT / "tests/helpers/ngu_ranks.py", tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert not torch.equal(first["played"], second["played"])
    assert first["parameters"].keys() == second["parameters"].keys() and len(first["parameters"]) > 40
    for name, x in first["parameters"].items():
        assert torch.equal(x, second["parameters"][name]), name
    assert set(first["drawn"]) == set(second["drawn"]) == {2} and len(first["drawn"]) > 20
    assert first["capacity"] == second["capacity"] == 200  # of each of two environments
    ladder = torch.stack((first["epsilon"], second["epsilon"]), 1).flatten()  # in turn, as the first one logs
    torch.testing.assert_close(ladder, torch.from_numpy(ngu_r2d2.epsilons(4)))


def test_processes_must_divide_the_sequences_of_a_batch():
    command = [*TORCHRUN, ROOT / "ngu_r2d2.py", "--batch-sequences", "3"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    message = "the 2 processes of torchrun must divide batch_sequences"
    assert message in words(done.stderr) and not os.listdir()
