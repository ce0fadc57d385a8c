"""A table of faults and scripts: whatever goes wrong, a run ends soon and says why, or goes on unharmed.

Every cell is a command line in a process of its own, forked from one that has imported all. It must end
within 30 s and leave neither a process nor an actor behind. The actors of IMPALA and ppo_async.py are threads
here; in turn, they are in test_decoupled.py. Torn and foreign checkpoints are in test_contract.py, for all
scripts but one.
"""

import contextlib
import ctypes
import fcntl
import io
import itertools
import os
import pickle
import random
import re
import signal
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import probes
import pytest
import torch
from ale_py.vector_env import AtariVectorEnv
from conftest import OTHERS, SCRIPTS, one_line, scalars, small_args, steps_of
from forks import FORKS, IMPORTED, end, run, start, start_server
from torch.utils.tensorboard import SummaryWriter

import impala_vtrace
import ngu_r2d2
import ppo
import ppo_async
import ppo_atari
import ppo_continuous
import ppo_lstm
import ppo_multidiscrete

ALL = SCRIPTS | OTHERS
FAULTS = {}


@pytest.fixture(scope="module", autouse=True)
def fork_server():
    """Warm, as the first fork waits for its imports."""
    start_server()
    process = FORKS.Process()
    process.start()
    process.join()


def test_forks_have_imported_everything():
    code = f"import sys; sys.exit(sum(name not in sys.modules for name in {IMPORTED}))"
    process = FORKS.Process(target=exec, args=(code,))
    process.start()
    process.join()
    assert process.exitcode == 0


def fault(function):
    FAULTS[function.__name__.replace("_", "-")] = function
    return function


# === Runs ====================================================================================


def flags(script, env="Aligned", **changes):
    """Of a run of six iterations of 64 steps, 32 of Atari's, that saves each; actors in threads."""
    if script is ppo_atari:
        changes = dict(update_epochs=1, num_minibatches=2) | changes
    else:
        box = "Box" if env == "Aligned" else "-box"
        changes["env_id"] = f"{env}{box * (script in (ppo_continuous, ppo_multidiscrete))}-v0"
    if script in (impala_vtrace, ppo_async):
        changes = dict(sync=False) | changes
    steps = 6 * small_args(script).batch_size
    args = small_args(script, **dict(total_timesteps=steps, save_every=1) | changes)
    default, found = asdict(script.Args()), []
    for name, x in asdict(args).items():
        if x != default[name]:
            found += [f"--{'no-' * (x is False)}{name.replace('_', '-')}", *([x] * (type(x) is not bool))]
    return found


def is_finite(state):
    if isinstance(state, dict | list | tuple):
        return all(map(is_finite, state.values() if isinstance(state, dict) else state))
    return not isinstance(state, float | torch.Tensor) or torch.as_tensor(state).isfinite().all()


def assert_sound(script, run_dir, iterations=None):
    """A checkpoint of that iteration, or of any, which is finite."""
    state = script.load_checkpoint(run_dir)
    assert state["iteration"] == iterations or iterations is None and state["iteration"] > 0
    assert is_finite(state)
    return state["args"].batch_size


def assert_whole(script, run_dir, iterations):
    """A sound checkpoint, and each iteration logged once."""
    batch = assert_sound(script, run_dir, iterations)
    assert steps_of(run_dir) == list(range(batch, batch * iterations + 1, batch))


def assert_one_line(ended, words, code=2):
    assert ended.code == code and not ended.out, ended
    assert one_line(ended.err) and re.search(words, one_line(ended.err)), ended.err


# === The run is killed, stopped or has no room ===============================================


def later(seconds):
    """TensorBoard orders the event files of a run by their second."""
    now = time.time
    time.time = lambda: now() + seconds


@fault
def sigkill(script):
    """Kills while it starts or runs or saves, each resumed; and then to its end."""
    moments, begin = random.Random(script.SCRIPT), time.time()
    more = flags(script, total_timesteps=10**9, save_every=3)
    for number in range(10 if script is ppo else 4):
        process = start(script, *more, sabotage=partial(later, number))
        if number == 0:
            while not (found := list(Path("runs").glob("*/checkpoint.pt"))) and time.time() < begin + 30:
                time.sleep(0.01)
            more, begin = ["--resume", found[0].parent], time.time() - begin
        else:
            time.sleep(moments.uniform(0, 3 * begin))
        process.kill()
        assert end(process).code == -signal.SIGKILL
        state = script.load_checkpoint(found[0].parent)
    last = state["iteration"] + 3
    more += ["--total-timesteps", last * state["args"].batch_size]
    assert run(script, *more, sabotage=partial(later, 10)).code == 0
    (run_dir,) = Path("runs").iterdir()
    assert_whole(script, run_dir, last)
    ends = [step for step, _ in scalars(run_dir, "charts/episodic_return")]
    assert script is ppo_atari or ends == sorted([*range(64, 64 * last + 1, 64)] * 4)
    assert {path.name.split(".")[0] for path in run_dir.iterdir()} == {"checkpoint", "events", "lock"}
    assert not (run_dir / "checkpoint.tmp").exists()


def terminate():
    """SIGTERM at the first gradient, twice, as from a scheduler and from torchrun."""
    sent = []

    def terminated(function):
        def wrapped(*args, **kwargs):
            if not sent:
                sent.extend(os.kill(os.getpid(), signal.SIGTERM) for _ in range(2))
            return function(*args, **kwargs)

        return wrapped

    torch.autograd.grad, torch.Tensor.backward = map(terminated, (torch.autograd.grad, torch.Tensor.backward))


@fault
def sigterm_in_the_update(script):
    ended = run(script, *flags(script, save_every=100), sabotage=terminate)
    assert ended.code == 143 and "Traceback" not in ended.err, ended.err
    assert ended.err.count("stopping after this iteration") == 2
    (run_dir,) = Path("runs").iterdir()
    assert_whole(script, run_dir, 1)
    assert run(script, "--resume", run_dir, sabotage=partial(later, 1)).code == 0
    assert_whole(script, run_dir, 6)


def fill_disk(name):
    """For the files of this name, from the third save on."""
    flush, flushes = SummaryWriter.flush, []

    def full(self):
        flush(self)
        flushes.append(self)
        if len(flushes) == 3:
            path = Path(self.log_dir, name)
            Path("full").symlink_to("/dev/full")
            Path("full").replace(next(path.parent.glob(name), path))

    SummaryWriter.flush = full


def disk_full(name, iteration, script):
    ended = run(script, *flags(script), sabotage=partial(fill_disk, name))
    assert ended.code == 1 and "OSError: [Errno 28] No space left on device" in ended.err, ended.err
    (run_dir,) = Path("runs").iterdir()
    assert_sound(script, run_dir, iteration)


FAULTS["disk-full-for-the-checkpoint"] = partial(disk_full, "checkpoint.tmp", 2)
FAULTS["disk-full-for-the-log"] = partial(disk_full, "events*", 3)


@fault
def no_room_for_the_run(script):
    Path("runs").write_text("a file, not a folder", encoding="utf-8")
    assert_one_line(run(script, *flags(script)), "runs/")


@fault
def two_runs_in_a_second(script):
    both = [start(script, *flags(script), number=number) for number in range(2)]
    ended = [end(process, number) for number, process in enumerate(both)]
    assert [run.code for run in ended] == [0, 0], [(run.out, run.err[-600:]) for run in ended]
    assert len(os.listdir("runs")) == 2
    for run_dir in Path("runs").iterdir():
        assert_whole(script, run_dir, 6)


@fault
def another_process_trains_in_the_folder(script):
    """It is refused and writes nothing; once the first process is gone, killed or not, the run goes on."""
    first, deadline = start(script, *flags(script, total_timesteps=10**9)), time.time() + 300
    while not (found := list(Path("runs").glob("*/checkpoint.pt"))) and time.time() < deadline:
        time.sleep(0.01)
    run_dir = found[0].parent
    second = end(start(script, "--resume", run_dir, sabotage=partial(later, 1), number=1), 1)
    assert_one_line(second, f"another process trains in .*{run_dir}")
    assert len(list(run_dir.glob("events*"))) == 1 and first.is_alive()
    first.kill()
    assert end(first).code == -signal.SIGKILL
    state = script.load_checkpoint(run_dir)
    last = state["iteration"] + 3
    more = ["--total-timesteps", last * state["args"].batch_size]
    assert run(script, "--resume", run_dir, *more, sabotage=partial(later, 2)).code == 0
    assert_whole(script, run_dir, last)


def load_locked(run_dir):
    """Another process that wants to train there is refused while a checkpoint is read, but for its flags."""
    load, loads = torch.load, []

    def wrapped(*args, **kwargs):
        loads.append(args)
        if len(loads) == 1:  # the command line's flags stand over those of the run
            return load(*args, **kwargs)
        other = os.open(Path(run_dir, "lock"), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(other)
            return load(*args, **kwargs)
        os._exit(98)

    torch.load = wrapped


@fault
def folder_is_locked_before_its_checkpoint_is_read(script):
    """Else a run that ends meanwhile leaves a newer one, and the log of what lies between comes twice."""
    assert run(script, *flags(script)).code == 0
    (run_dir,) = Path("runs").iterdir()
    more = ["--total-timesteps", 8 * small_args(script).batch_size]
    sabotage = partial(load_locked, run_dir)
    ended = run(script, "--resume", run_dir, *more, sabotage=sabotage)
    assert ended.code == 0, ended
    assert_sound(script, run_dir, 8)


def without_linux():
    """Python as on Windows and macOS together: what either of them lacks is gone."""
    sys.platform = "win32"
    for module in ("fcntl", "resource", "pwd", "termios"):
        sys.modules[module] = None
    for name in ("SIGALRM", "SIGKILL", "SIGUSR1", "alarm", "setitimer", "pthread_kill", "pthread_sigmask"):
        delattr(signal, name)
    for name in (
        "fork",
        "sched_setaffinity",
        "sched_getaffinity",
        "memfd_create",
        "posix_fallocate",
        "getpgid",
    ):
        delattr(os, name)
    ctypes.CDLL = None


@fault
def another_operating_system(script):
    ended = run(script, *flags(script), sabotage=without_linux)
    assert ended.code == 0, ended.err
    (run_dir,) = Path("runs").iterdir()
    assert_whole(script, run_dir, 6)


def unreachable():
    os.environ |= dict(WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY=40 * "a")


@fault
def wandb_unreachable(script):
    pytest.importorskip("wandb")
    ended = run(script, "--track", *flags(script), sabotage=unreachable)
    assert ended.code == 2 and "Traceback" not in ended.err, ended.err
    assert len(re.findall(r"(?m)^ppo.py: error: --track: .+$", ended.err)) == 1
    assert [path.name for path in Path("runs").glob("*/*")] == ["lock"]  # the folder that it would have been


# === Checkpoints and arguments ===============================================================


def refused(script, checkpoint, words):
    path = Path("runs", "run", "checkpoint.pt")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(checkpoint)
    for flag in ("--resume", "--evaluate"):
        assert_one_line(run(script, flag, path.parent), words)
    assert os.listdir(path.parent) == [path.name]


class Malicious:
    def __reduce__(self):
        return open, ("it-ran", "w")


def saved(state, **how):
    file = io.BytesIO()
    torch.save(state, file, **how)
    return file.getvalue()


@fault
def malicious_checkpoint(script):
    state = dict(script=script.SCRIPT, args=asdict(script.Args()), iteration=Malicious())
    old = saved(state, _use_new_zipfile_serialization=False)
    for checkpoint in (saved(state), old, pickle.dumps(state, 2)):
        refused(script, checkpoint, "cannot be loaded")
        assert not Path("it-ran").exists()


@fault
def torn_checkpoint(script):
    whole = saved(dict(script=script.SCRIPT, args=asdict(script.Args())))
    for size in (0, len(whole) // 2, len(whole) - 1):
        refused(script, whole[:size], "cannot be loaded")


@fault
def foreign_checkpoint(script):
    refused(script, saved(dict(script="ppo", args=asdict(ppo.Args()))), "is a checkpoint of ppo.py")


MISFITS = {impala_vtrace: ["--lstm"], ngu_r2d2: ["--replay-steps", "1600"]}


@fault
def misfit_checkpoint(script):
    """A checkpoint without a part or with one of another layout; a flag that changes what was saved."""
    assert run(script, *flags(script, save_every=1)).code == 0
    (run_dir,) = Path("runs").iterdir()
    whole = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    before = sorted(run_dir.iterdir())
    for part in whole.keys() - {"script", "args", "iteration", "replay"}:
        layouts = [{name: x for name, x in whole.items() if name != part}]
        is_module = isinstance(whole[part], dict) and part != "last_returns"  # which IMPALA has by task
        layouts += [whole | {part: {"of": ["before"]}}] if is_module else []
        for state in layouts:
            torch.save(state, run_dir / "checkpoint.pt")
            assert_one_line(run(script, "--resume", run_dir, sabotage=partial(later, 1)), "cannot be loaded")
    torch.save(whole, run_dir / "checkpoint.pt")
    if script in MISFITS:
        assert_one_line(
            run(script, "--resume", run_dir, *MISFITS[script]), "cannot (be loaded|change replay_steps)"
        )
    assert sorted(run_dir.iterdir()) == before


@fault
def one_environment(script):
    alone = ["--num-envs", 1, *(["--num-minibatches", 1] if script is ppo_lstm else [])]
    ended = run(script, *flags(script, total_timesteps=96), *alone)
    if script in (impala_vtrace, ppo_async):
        return assert_one_line(ended, "num_envs must be a multiple of 2")
    assert ended.code == 0, ended.err
    assert_whole(script, *Path("runs").iterdir(), 6)


@fault
def minibatch_of_one_step(script):
    alone = "--num-minibatches 4 --num-envs 4"
    if script is impala_vtrace:
        alone = "--num-envs 2 --batch-segments 1"
    if script is ngu_r2d2:
        alone = "--num-envs 1 --batch-sequences 1 --burn-in 0 --unroll 1 --period 1"
    ended = run(script, *flags(script), "--num-steps", 1, "--total-timesteps", 24, *alone.split())
    if script not in (impala_vtrace, ngu_r2d2):
        return assert_one_line(ended, "a minibatch must hold more than one step")
    assert ended.code == 0, ended.err
    assert_whole(script, *Path("runs").iterdir(), 24)


# === Environments ============================================================================

UNHARMED = 0, r"(?s)\A(?!.*Warning)"
NOT_FINITE = r"(?m)^step \d+: not finite: %s\{.*\}(, and .+)?; last good checkpoint: \S+, of iteration [1-5]$"
STALLS = 1, r'(?s)--stall-seconds 2: nothing .*probes.py", line \d+ in '
LOCKED = 1, r'(?s)--stall-seconds 2: .*Timeout \(0:00:03\)!.*probes.py", line \d+ in '
ENDS = {  # exit code and words
    "raises": (1, "(?s)Traceback.*probes.py.*ZeroDivisionError: the environment's own mistake"),
    "hangs": STALLS,
    "hangs-in-reset": STALLS,
    "hangs-with-lock": LOCKED,
    "nan-observations": (1, NOT_FINITE % "(?=.*observations|.*novelty)"),
    "nan-rewards": (1, NOT_FINITE % "(?=.*reward)"),
    "huge-rewards": (1, NOT_FINITE % ""),
    "wrong-shape": (1, "(?s)Traceback.*ValueError: .*shape"),
    "ends-at-every-step": UNHARMED,
    "never-ends": UNHARMED,
}
ENDS_OTHERWISE = {("nan-observations", ppo_atari): (0, "")}  # there is no NaN among bytes
for script in (ppo_atari, ppo_continuous, ppo_multidiscrete, impala_vtrace):
    ENDS_OTHERWISE["huge-rewards", script] = UNHARMED  # which clip or normalize them


def faulty_games(fault):
    """Emulators that are sound for 40 actions, and then as probes.Faulty."""
    recv, actions, wrong = AtariVectorEnv.recv, itertools.count(), probes.FAULTS[fault]

    def faulty(self):
        obs, rewards, over, is_cut, info = recv(self)
        if next(actions) >= 40:
            obs, rewards, over = wrong(obs, rewards, over)
        return obs, rewards, over, is_cut, info

    AtariVectorEnv.recv = faulty
    if fault.endswith("reset"):
        AtariVectorEnv.reset = lambda self, **_: wrong()


def environment(fault, script, **more):
    sabotage = partial(faulty_games, fault) if script is ppo_atari else int
    more |= dict(stall_seconds=2) if "hangs" in fault else {}
    ended = run(script, *flags(script, fault, **more), sabotage=sabotage)
    code, words = ENDS_OTHERWISE.get((fault, script), ENDS[fault])
    assert ended.code == code and re.search(words, ended.err), (ended.code, ended.err)
    assert ("Traceback" in ended.err) == ("Traceback" in words), ended.err
    # A run that hangs with Python's lock may not have saved: the lock keeps the learner from it, too.
    may_have_saved = fault not in ("hangs-in-reset", "hangs-with-lock")
    for run_dir in Path("runs").iterdir() if may_have_saved else ():
        assert_whole(script, run_dir, 6) if code == 0 else assert_sound(script, run_dir)
        assert fault != "never-ends" or not scalars(run_dir, "charts/episodic_return")


@fault
def hangs_in_evaluation(script):
    ended = run(script, *flags(script, "Hang"))
    assert ended.code == 0, ended.err
    (run_dir,) = Path("runs").iterdir()
    ended = run(script, "--evaluate", run_dir, "--eval-episodes", 100, "--stall-seconds", 2)
    assert ended.code == STALLS[0] and re.search(STALLS[1], ended.err), ended.err


FAULTS |= {name: partial(environment, name) for name in ENDS}
FAULTS["nan-before-learning"] = partial(environment, "nan-observations", learning_starts=200)
FAULTS["nan-without-curiosity"] = partial(
    environment, "nan-observations", learning_starts=200, num_policies=1, beta=0
)
ONLY = dict.fromkeys(
    ["nan-before-learning", "nan-without-curiosity"], ["ngu_r2d2"]
)  # the others learn from the first rollout
ONLY |= {"hangs-in-evaluation": ["ppo"]}  # that all set the timer: test_contract.py
ONLY |= {"wandb-unreachable": ["ppo"]}  # its functions are the same in all, word for word: test_sync.py
ONLY |= {"torn-checkpoint": ["ppo_shared"], "foreign-checkpoint": ["ppo_shared"]}
CELLS = [(fault, name) for fault in FAULTS for name in ONLY.get(fault, ALL)]


def processes_here():
    """Other processes whose working folder is this one's."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):  # it may end meanwhile
            if os.readlink(path) == os.path.realpath(os.getcwd()) and path.parent.name != str(os.getpid()):
                found.append(path.parent.name)
    return found


@pytest.mark.parametrize("fault,name", CELLS, ids=map("-".join, CELLS))
def test_fault(fault, name):
    FAULTS[fault](ALL[name])
    deadline = time.time() + 300  # that of W&B ends after its run
    while processes_here():
        assert time.time() < deadline, processes_here()
