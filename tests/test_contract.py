"""What every script promises: errors, stopping and resuming, logs, evaluation; through its command line."""

import faulthandler
import io
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import probes
import pytest
import torch
from ale_py.vector_env import AtariVectorEnv
from conftest import (
    OTHERS,
    SCRIPTS,
    AlignedGames,
    CutGames,
    aligned_args,
    games,
    one_line,
    scalars,
    small_args,
    steps_of,
    wait_for,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import impala_vtrace
import ngu_r2d2
import ppo
import ppo_async
import ppo_atari
import ppo_continuous
import ppo_lstm
import ppo_multidiscrete
import ppo_shared

ROOT = Path(__file__).parent.parent


# ppo_shared.py is ppo.py but for its network
@pytest.fixture(params=[name for name in SCRIPTS | OTHERS if name != "ppo_shared"])
def script(request):
    return (SCRIPTS | OTHERS)[request.param]


# a task that each script plays fast, and renders without a GPU
QUICK = {ppo: "CartPole-v1", ppo_atari: "BreakoutNoFrameskip-v4", ppo_lstm: "CartPole-v1"}
QUICK |= {ppo_continuous: "Pendulum-v1", ppo_multidiscrete: "Pendulum-v1", impala_vtrace: "CartPole-v1"}
QUICK |= {ppo_async: "CartPole-v1", ngu_r2d2: "CartPole-v1"}


@pytest.fixture
def vector_script():
    return ppo


def cli(script, *flags, monkeypatch):
    """Run a script's command line in this process; its exit code or message, 0 where it just ends."""
    monkeypatch.setattr(sys, "argv", [f"{script.SCRIPT}.py", *map(str, flags)])
    try:
        runpy.run_path(str(ROOT / f"{script.SCRIPT}.py"), run_name="__main__")
    except SystemExit as end:
        return end.code
    return 0


def assert_one_line_error(code, capsys, words):
    out, err = capsys.readouterr()
    assert code == 2 and not out
    assert one_line(err) and re.search(words, one_line(err)), err


MISTAKES = [
    ("--env-id CartPol-v1", "CartPole|no Atari"),
    ("--env-id ThereIsNoSuchThing-v0", "ThereIsNoSuchThing"),
    ("--env-id nosuchmodule:Thing-v0", "nosuchmodule"),
    ("--num-minibatches 3", "num_minibatches must divide"),
    ("--num-minibatches 0", "num_minibatches cannot be 0"),
    ("--eval-episodes 0", "eval_episodes cannot be 0"),
    ("--gae-lambda 1.5", "gamma and gae_lambda must be at most 1"),
    *(
        (f"--{x} -1", f"{x.replace('-', '_')} cannot be -1")
        for x in ("clip-coef", "ent-coef", "vf-coef", "target-kl")
    ),
    ("--num-envs 8 --num-steps 1 --num-minibatches 8", "more than one step"),
    ("--num-envs 0", "num_envs cannot be 0"),
    ("--num-steps 0", "num_steps cannot be 0"),
    ("--update-epochs -1", "update_epochs cannot be -1"),
    ("--save-every 0", "save_every cannot be 0"),
    ("--learning-rate nan", "learning_rate cannot be nan"),
    ("--learning-rate inf", "learning_rate cannot be inf"),
    ("--gamma 1.5", r"gamma and \w+_lambda must be at most 1"),
    ("--rmsprop-decay 1.5", "rmsprop_decay must be at most 1"),
    ("--seed -1", "seed cannot be -1"),
    ("--seed 3000000000", r"seed \+ steps must be below"),
    ("--seed 2147483647", r"seed \+ steps must be below"),
    ("--total-timesteps 50", "total_timesteps must be at least"),
    ("--gamma-max 1", "gamma_max and gamma_min must be below 1"),
    ("--gamma-min 1", "gamma_max and gamma_min must be below 1"),
    *(
        (f"--{x} 1.1", f"{x.replace('-', '_')}.* must be at most 1")
        for x in ("epsilon", "eval-epsilon", "cross-mixture", "priority-eta", "retrace-lambda")
    ),
    *(
        (f"--{x} 0", f"{x.replace('-', '_')} cannot be 0")
        for x in ("target-every", "embedding-every", "log-every", "sync-every")
    ),
    ("--max-grad-norm 0", "max_grad_norm must be above 0"),
    ("--stall-seconds -1", "stall_seconds cannot be -1"),
    ("--stall-seconds 99999999999", "stall_seconds must be below"),
    ("--kernel-eps 0", "kernel_eps must be above 0"),
    ("--neighbors 200 --kernel-eps 1", "kernel_eps is so large that nothing is novel"),
    ("--period 61", "period must be at most unroll"),
    ("--rnd-max 0.5", "rnd_max must be at least 1"),
    ("--replay-steps 600 --learning-starts 600", "replay_steps must hold two sequences"),
    ("--learning-starts 500000", "learning_starts must be at most replay_steps"),
    ("--resume nowhere", "there is no nowhere/checkpoint.pt"),
    ("--evaluate nowhere", "there is no nowhere/checkpoint.pt"),
    ("--capture-video", "--evaluate"),
]


@pytest.mark.parametrize("flags,words", MISTAKES, ids=[flags for flags, _ in MISTAKES])
def test_mistake_gets_one_line_and_exit_code_2(script, flags, words, monkeypatch, capsys):
    names = [flag[2:].replace("-", "_") for flag in flags.split() if re.match("--[a-z]", flag)]
    if not all(hasattr(script.Args(), name) for name in names):
        pytest.skip(f"{script.SCRIPT}.py has no such flag")
    assert_one_line_error(cli(script, *flags.split(), monkeypatch=monkeypatch), capsys, words)
    assert not os.listdir()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_without_a_gpu(script, monkeypatch, capsys):
    assert_one_line_error(cli(script, "--device", "cuda", monkeypatch=monkeypatch), capsys, "no GPU")
    assert not os.listdir()


@pytest.mark.parametrize(
    "flags", ["--env-di CartPole-v1", "--num-envs many", "--device tpu", "--anneal-lr maybe"]
)
def test_wrong_flag(script, flags, monkeypatch, capsys):
    assert cli(script, *flags.split(), monkeypatch=monkeypatch) == 2
    err = capsys.readouterr().err
    assert (flags.split()[0] in err or flags.split()[1] in err) and "Traceback" not in err
    assert not os.listdir()


VECTORS = (ppo, ppo_shared, ppo_continuous, ppo_multidiscrete)


@pytest.mark.parametrize(
    "script,env_id,words",
    [
        (ppo, "BoxActions-v0", "ppo_continuous.py"),
        (ppo, "ImageObservations-v0", "ppo_atari.py"),
        (ppo_shared, "FrozenLake-v1", "Discrete"),
        (ppo_atari, "CartPole-v1", "ppo.py"),
        (ppo_atari, "Breakout-v4", "random number of frames"),
        (ppo_atari, "ALE/Backgammon-v5", "no no-op"),
        (ppo_lstm, "ALE/VideoCheckers-v5", "no no-op"),
        (ppo_lstm, "Breakout-v4", "random number of frames"),
        (ppo_lstm, "Pendulum-v1", "ppo_continuous.py"),
        (ppo_lstm, "ImageObservations-v0", "such as PongNoFrameskip-v4, and vectors"),
        (ppo_continuous, "CartPole-v1", "ppo.py or ppo_multidiscrete.py"),
        (ppo_continuous, "ImageBox-v0", "FlattenObservation"),
        (ppo_continuous, "IntegerBox-v0", "acts in"),
        (ppo_multidiscrete, "CartPole-v1", "ppo.py or ppo_continuous.py"),
        (ppo_multidiscrete, "IntegerBox-v0", "acts in"),
        (ppo_multidiscrete, "StartedMulti-v0", "acts in"),
        (ppo_multidiscrete, "UnboundedBox-v0", "acts in"),
        *(
            (x, "Started-v0", "acts in")
            for x in (ppo, ppo_shared, ppo_lstm, ppo_async, impala_vtrace, ngu_r2d2)
        ),
        (ppo, "Match-v0", "ppo_multidiscrete.py"),
        (ppo_multidiscrete, "MatrixBox-v0", "try ppo.py or ppo_continuous.py"),
        (ppo_multidiscrete, "ImageMulti-v0", "add --no-normalize"),
        (ppo_multidiscrete, "FramesMulti-v0", "is no image of"),
        (impala_vtrace, "Breakout-v4", "random number of frames"),
        (impala_vtrace, "ALE/Breakout", "write it as BreakoutNoFrameskip-v4"),
        (impala_vtrace, "ale_py:ALE/Breakout-v5", "write it as BreakoutNoFrameskip-v4"),
        (ppo_async, "ALE/Breakout", "write it as BreakoutNoFrameskip-v4"),
        (ppo_async, "ale_py:ALE/Breakout-v5", "write it as BreakoutNoFrameskip-v4"),
        (ngu_r2d2, "ALE/Breakout", "write it as BreakoutNoFrameskip-v4"),
        (ngu_r2d2, "ale_py:ALE/Breakout-v5", "write it as BreakoutNoFrameskip-v4"),
        (impala_vtrace, "Pendulum-v1", "ppo_continuous.py"),
        (impala_vtrace, "FrozenLake-v1", "vectors and images"),
        (ngu_r2d2, "Breakout-v4", "random number of frames"),
        (ngu_r2d2, "Pendulum-v1", "ppo_continuous.py"),
        (ngu_r2d2, "FrozenLake-v1", "vectors and images"),
        (ngu_r2d2, "SmallImage-v0", "grids of numbers below 11"),
        (ngu_r2d2, "MiniGrid-NoSuchTask-v0", "MiniGrid-NoSuchTask"),
        *((x, "NoSuchGameNoFrameskip-v4", "for Atari games: ppo_atari.py") for x in VECTORS),
        *((x, "ALE/NoSuchGame-v5", "for Atari games: ppo_atari.py") for x in VECTORS),
        *((x, "NoSuchGame-v4", r"^(?!.*Atari).*NoSuchGame") for x in VECTORS),
    ],
)
def test_space_that_the_script_does_not_handle(script, env_id, words, monkeypatch, capsys):
    assert_one_line_error(cli(script, "--env-id", env_id, monkeypatch=monkeypatch), capsys, words)
    assert not os.listdir()


@pytest.mark.parametrize("name", ["ngu_r2d2", "ppo_multidiscrete"])
def test_boards_smaller_than_the_convolutions(name, capsys):
    """5 x 5 is the smallest that they take."""
    script = (SCRIPTS | OTHERS)[name]
    for width, height in ((5, 5), (4, 4), (4, 7), (7, 4)):
        flags = (
            dict(env_id="Board-v0") if script is ngu_r2d2 else dict(env_id="BoardMulti-v0", normalize=False)
        )
        args = small_args(script, env_kwargs=f'{{"width": {width}, "height": {height}}}', **flags)
        if width == height == 5:
            script.train(args)
            continue
        capsys.readouterr()
        with pytest.raises(SystemExit, match="2"):
            script.make_env(args, 1)
        assert "the convolutions need 5 x 5 places" in one_line(capsys.readouterr().err)


def test_checkpoints_that_are_none(script, monkeypatch, capsys):
    run_dir = script.train(small_args(script))
    capsys.readouterr()
    good = (run_dir / "checkpoint.pt").read_bytes()
    before = sorted(Path().rglob("*"))
    middle = len(good) // 2
    flipped = good[:middle] + bytes(255 - x for x in good[middle : middle + 64]) + good[middle + 64 :]
    for bad in (good[:middle], good[:-200], b"", b"no checkpoint", flipped):
        (run_dir / "checkpoint.pt").write_bytes(bad)
        for flag in ("--resume", "--evaluate"):
            code = cli(script, flag, run_dir, monkeypatch=monkeypatch)
            assert_one_line_error(code, capsys, "cannot be loaded")
    (run_dir / "checkpoint.pt").write_bytes(good)
    other = ppo_shared if script is ppo else ppo
    code = cli(other, "--resume", run_dir, monkeypatch=monkeypatch)
    assert_one_line_error(code, capsys, f"is a checkpoint of {script.SCRIPT}.py")
    changes = ["--seed 2", "--num-envs 8 --total-timesteps 640", "--num-steps 8"]
    for flags in (*changes, "--env-id Other-v0", """--env-kwargs {"a":1}"""):
        code = cli(script, "--resume", run_dir, *flags.split(), monkeypatch=monkeypatch)
        name = flags.split()[0][2:].replace("-", "_")
        assert_one_line_error(code, capsys, f"--resume cannot change {name}")
    code = cli(script, "--resume", run_dir, "--evaluate", run_dir, monkeypatch=monkeypatch)
    assert_one_line_error(code, capsys, "not both")
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(
    "script,flags",
    [
        (impala_vtrace, "--batch-segments 8"),
        (impala_vtrace, "--replay-fraction 0.5"),
        (impala_vtrace, "--optimizer rmsprop"),
        (ppo_async, "--batch-segments 8"),
        (ngu_r2d2, "--no-rnd"),
        (ngu_r2d2, "--no-train-embedding"),
        (ngu_r2d2, "--unroll 16"),
        (ngu_r2d2, "--period 4"),
        (ngu_r2d2, "--burn-in 4"),
        (ngu_r2d2, "--replay-steps 1600"),
    ],
)
def test_flags_that_a_checkpoint_cannot_follow(script, flags, monkeypatch, capsys):
    """A batch counts the steps; Adam's moments have the size of what is trained, the replay a sequence's."""
    run_dir = script.train(small_args(script))
    capsys.readouterr()
    code = cli(
        script, "--resume", run_dir, *flags.split(), "--total-timesteps", "640", monkeypatch=monkeypatch
    )
    words = "--resume cannot change"
    if script is ngu_r2d2 and "no" not in flags:
        words = "checkpoint.pt cannot be loaded with these flags .*(the saved replay has other|shape)"
    assert_one_line_error(code, capsys, words)


@pytest.mark.parametrize("script", [impala_vtrace, ppo_async, ngu_r2d2], ids=lambda script: script.SCRIPT)
def test_images_of_floats_are_not_scaled(script, monkeypatch):
    """Only bytes go up to 255."""
    seen, original = [], torch.nn.Conv2d.forward

    def forward(self, x):
        if x.shape[1] == 3 and x.any():  # what the first layer is given; its size is tried with zeros
            seen.append(x.unique().tolist())
        return original(self, x)

    monkeypatch.setattr(torch.nn.Conv2d, "forward", forward)
    flags = dict(rnd=False) if script is ngu_r2d2 else {}
    script.train(small_args(script, env_id="FloatImage-v0", **flags))
    assert len(seen) > 10 and all(x in ([1.0], [0.0, 1.0]) for x in seen)  # the replay pads with zeros


REUSING = [(x, "Reused") for x in (SCRIPTS | OTHERS).values() if x is not ppo_atari]  # which has emulators
REUSING += [(x, "ReusedImage") for x in (impala_vtrace, ppo_async, ngu_r2d2)]


@pytest.mark.parametrize("script,name", REUSING, ids=lambda x: getattr(x, "SCRIPT", x))
def test_final_observations_of_environments_that_reuse_their_array(script, name):
    """They are what the episode ended with, 100, not what the next one began with in the same array."""
    name += "Box" * (script in (ppo_continuous, ppo_multidiscrete))
    args = small_args(script, env_id=f"{name}-v0")
    envs = script.make_env(*([args.env_id] if script is impala_vtrace else []), args, 2)
    envs.reset(seed=1)
    end = 10 if script in (ppo_continuous, ppo_multidiscrete) else 100  # normalized and clipped, or not
    for _ in range(4):
        obs, _, _, is_cut, infos = envs.step(np.zeros((2, *envs.single_action_space.shape), int))
    assert is_cut.all() and (obs < 0.1 * end).all()
    assert all((final == end).all() and final.shape == obs[0].shape for final in infos["final_obs"])


def test_actions_that_are_numbered_by_bytes(script):
    if script in (ppo_continuous, ppo_atari):
        pytest.skip("has no discrete actions of others")
    multi = "Multi" * (script is ppo_multidiscrete)
    script.train(small_args(script, env_id=f"NarrowAction{multi}-v0"))


def test_what_a_saved_flag_would_be_refused_for_can_be_changed(script, monkeypatch, capsys):
    """As where more processes have to divide a number: what counts is the run that goes on."""
    run_dir, check = script.train(small_args(script)), script.check

    def strict_check(args):
        if args.total_timesteps == 64:
            raise ValueError("so few steps do not do here")
        check(args)

    monkeypatch.setattr(script, "check", strict_check)
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        script.parse_args(["--resume", str(run_dir)])
    assert end.value.code == 2 and "so few steps do not do here" in "".join(capsys.readouterr())
    args = script.parse_args(["--resume", str(run_dir), "--total-timesteps", "128"])
    assert (args.total_timesteps, args.num_steps) == (128, 16)


def test_a_checkpoint_with_a_flag_that_the_script_does_not_have(script, capsys):
    """As a renamed one: its value would be lost without a word."""
    run_dir = script.train(small_args(script))
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    state["args"]["segment_length"] = 20
    torch.save(state, run_dir / "checkpoint.pt")
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        script.parse_args(["--resume", str(run_dir)])
    assert_one_line_error(end.value.code, capsys, "unknown flags: segment_length")


def test_vectors_of_bytes_are_vectors():
    """Their values are those of the rollout, as they are those of what lies beyond it."""
    for script in (ppo, ppo_lstm, impala_vtrace, ppo_async, ngu_r2d2):
        script.train(small_args(script, env_id="Bytes-v0"))


@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
def test_an_empty_name_is_no_run_folder(script, flag, monkeypatch, capsys):
    """As of a variable of the shell that is not set."""
    code = cli(script, flag, "", monkeypatch=monkeypatch)
    assert_one_line_error(code, capsys, "there is no checkpoint.pt")
    assert not os.listdir()


def test_a_run_folder_that_cannot_be_locked(script, monkeypatch, capsys):
    run_dir = script.train(small_args(script))
    capsys.readouterr()

    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(script.FileLock, "acquire", denied)
    code = cli(script, "--resume", run_dir, monkeypatch=monkeypatch)
    assert_one_line_error(code, capsys, "Permission denied")


def test_no_room_for_the_run(monkeypatch, capsys):
    Path("runs").write_text("a file, not a folder", encoding="utf-8")
    assert_one_line_error(cli(ppo, monkeypatch=monkeypatch), capsys, "runs/CartPole-v1")
    assert os.listdir() == ["runs"]


def test_bins_must_be_two_or_more(monkeypatch, capsys):
    code = cli(ppo_multidiscrete, "--env-id", "Pendulum-v1", "--num-bins", "1", monkeypatch=monkeypatch)
    assert_one_line_error(code, capsys, "num_bins cannot be 1")


def test_agent_that_does_not_fit(monkeypatch, capsys):
    run_dir = ppo.train(small_args(ppo))
    capsys.readouterr()
    code = cli(ppo, "--evaluate", run_dir, "--env-id", "Acrobot-v1", monkeypatch=monkeypatch)
    assert_one_line_error(code, capsys, "cannot be loaded with these flags .*size mismatch")


def interrupt_at(script, monkeypatch, step, what):
    """Do something, once, when the iteration that ends at a step has been logged."""
    original = script.Run.log

    def log(self, *args, **data):
        original(self, *args, **data)
        if self.step == step:
            monkeypatch.setattr(script.Run, "log", original)
            what()

    monkeypatch.setattr(script.Run, "log", log)


def resumed(script, run_dir):
    args = script.load_checkpoint(run_dir)["args"]
    args.resume = str(run_dir)
    return args


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def seeds_of(monkeypatch, script, args, stop_at=None):
    """What PyTorch was seeded with in a run that a signal may end, and its environments."""
    seeds, seed = [], torch.manual_seed
    probes.Aligned.seeds.clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "manual_seed", lambda x: seeds.append(x) or seed(x))
        if stop_at:
            stop = partial(patch.setattr, script.Run, "stop_signal", signal.SIGTERM)
            interrupt_at(script, patch, stop_at, stop)
        try:
            script.train(args)
            assert not stop_at
        except SystemExit as end:
            assert stop_at and end.code == 143
    assert script.Run.stop_signal == 0
    return seeds, [x for x in probes.Aligned.seeds if x is not None]


@pytest.mark.parametrize(
    "name,flags",
    [*((name, {}) for name in SCRIPTS | OTHERS), ("impala_vtrace", dict(optimizer="rmsprop"))],
    ids=[*SCRIPTS | OTHERS, "impala_vtrace with RMSProp"],
)
def test_stopped_and_resumed_twice_equals_uninterrupted_bit_for_bit(name, flags, monkeypatch):
    """And noise is seeded anew in every iteration, but the environments never as they once were."""
    script = (SCRIPTS | OTHERS)[name]
    noise, tasks = seeds_of(monkeypatch, script, aligned_args(script, monkeypatch, **flags))
    (whole,) = Path("runs").iterdir()
    assert len(noise) == len(set(noise)) == 1 + 8 and noise[0] == 1
    assert tasks and min(tasks) == 1
    parts = None
    for step in (96, 160):
        args = resumed(script, parts) if parts else aligned_args(script, monkeypatch, **flags)
        first = torch.load(parts / "checkpoint.pt", weights_only=True)["iteration"] if parts else 0
        some_noise, some_tasks = seeds_of(monkeypatch, script, args, stop_at=step)
        assert (tasks == some_tasks) == (first == 0) and some_tasks
        assert first == 0 or not {*some_tasks} & {*tasks}
        (parts,) = set(Path("runs").iterdir()) - {whole}
        last = torch.load(parts / "checkpoint.pt", weights_only=True)["iteration"]
        assert some_noise == [1, *noise[1 + first : 1 + last]]
        assert last == step // 32
        tasks += some_tasks if first else []
    some_noise, some_tasks = seeds_of(monkeypatch, script, resumed(script, parts))
    assert some_noise == [1, *noise[1 + last :]] and some_tasks and not {*some_tasks} & {*tasks}
    a, b = (torch.load(run / "checkpoint.pt", weights_only=True) for run in (whole, parts))
    assert_same(a, b)
    tags = ("losses/policy_loss", "losses/value_loss", "charts/learning_rate", "charts/episodic_return")
    for tag in ("losses/td_loss", "losses/rnd_loss", tags[-1]) if script is ngu_r2d2 else tags:
        assert scalars(whole, tag) == scalars(parts, tag) and len(scalars(whole, tag)) >= 8, tag


def test_killed_run_resumes_into_one_continuous_curve(script, monkeypatch):
    """What was logged after the last checkpoint is replaced, not repeated."""

    class Killed(Exception):
        pass

    def kill():
        raise Killed

    interrupt_at(script, monkeypatch, 192, kill)
    with pytest.raises(Killed):
        script.train(aligned_args(script, monkeypatch, save_every=2))
    (run_dir,) = Path("runs").iterdir()
    assert torch.load(run_dir / "checkpoint.pt", weights_only=True)["iteration"] == 4
    script.train(resumed(script, run_dir))
    assert steps_of(run_dir) == list(range(32, 257, 32))
    assert [step for step, _ in scalars(run_dir, "charts/episodic_return")] == sorted(
        [*range(32, 257, 32)] * 2
    )
    assert list(Path("runs").iterdir()) == [run_dir]


@pytest.mark.parametrize("name", SCRIPTS | OTHERS)
def test_what_was_logged_before_an_exception_is_written(name, monkeypatch):
    """The log is closed at the exit of the process: a thread writes it, which may be behind."""
    script, at_exit, closed = (SCRIPTS | OTHERS)[name], [], []
    close = script.SummaryWriter.close
    monkeypatch.setattr(script.SummaryWriter, "close", lambda self: closed.append(self) or close(self))
    monkeypatch.setattr(script, "atexit", SimpleNamespace(register=at_exit.append))

    def fail():
        raise ZeroDivisionError

    interrupt_at(script, monkeypatch, 64, fail)
    with pytest.raises(ZeroDivisionError):
        script.train(aligned_args(script, monkeypatch))
    for function in at_exit:
        function()
    (run_dir,) = Path("runs").iterdir()
    assert len(closed) == 1 and steps_of(run_dir) == [32, 64]


def parameters_of(run_dir):
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    modules = [state[name] for name in ("agent", "curiosity") if name in state]
    statistics = ("_extra_state", ".mean", ".var", ".count", "distances")
    return torch.cat([x.flatten() for m in modules for k, x in m.items() if not k.endswith(statistics)])


@pytest.mark.parametrize("name", SCRIPTS | OTHERS)
def test_an_end_at_the_time_limit_is_an_end(name, monkeypatch):
    """A goal reached in the last step is no reason to bootstrap; where time alone ran out, the flag is."""
    script, is_boxed = (SCRIPTS | OTHERS)[name], name in ("ppo_continuous", "ppo_multidiscrete")
    monkeypatch.setattr(ppo_atari, "make_env", lambda args, num_envs, video_dir=None: CutGames(num_envs))
    flags = {} if name == "ppo_atari" else dict(env_id=f"Cut{'Box' * is_boxed}-v0")
    learned = {}
    for terminates in (True, False):
        monkeypatch.setattr(CutGames if name == "ppo_atari" else probes.Cut, "terminates", terminates)
        for bootstraps in (True, False):
            run_dir = script.train(small_args(script, bootstrap_truncated=bootstraps, **flags))
            learned[terminates, bootstraps] = parameters_of(run_dir)
    assert torch.equal(learned[True, True], learned[True, False])
    assert torch.equal(learned[True, True], learned[False, False])
    assert not torch.equal(learned[False, True], learned[False, False])


@pytest.mark.parametrize("name", SCRIPTS | OTHERS)
def test_after_an_exception_a_notebook_goes_on(name, monkeypatch):
    """No timer ends the process that has caught it, and a run may be resumed while the exception is kept."""
    script, timer = (SCRIPTS | OTHERS)[name], []
    args = small_args(script, save_every=1, stall_seconds=9)
    args.total_timesteps = 3 * args.batch_size
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: timer.append("set"))
    monkeypatch.setattr(script, "watch_heartbeats", timer.append)

    def interrupt():
        raise KeyboardInterrupt

    interrupt_at(script, monkeypatch, 2 * args.batch_size, interrupt)
    with pytest.raises(KeyboardInterrupt) as kept:
        script.train(args)
    (run_dir,) = Path("runs").iterdir()
    script.train(resumed(script, run_dir))
    assert steps_of(run_dir) == [n * args.batch_size for n in (1, 2, 3)]
    assert not timer and kept.traceback


WORK = [(gym.vector.SyncVectorEnv, "reset"), (gym.vector.SyncVectorEnv, "step"), (AtariVectorEnv, "reset")]
WORK += [(AtariVectorEnv, "recv")]


@pytest.mark.parametrize("name", SCRIPTS | OTHERS)
def test_heart_beats_while_environments_work(name, monkeypatch):
    """In each iteration and each step of an evaluation, and not while W&B asks for a login.

    The other processes of torchrun wait without it, too: they meet before its first beat.
    """
    script = (SCRIPTS | OTHERS)[name]
    beats, steps, set_up, meet, beat = [], [], [], script.over_processes, script.heartbeat
    monkeypatch.setattr(script, "heartbeat", lambda name: beats.append(name) or beat(name))
    for envs, method in WORK:
        original = getattr(envs, method)

        def spy(*args, original=original, **kwargs):
            steps.append(len(beats))
            assert script.HEARTBEATS
            return original(*args, **kwargs)

        monkeypatch.setattr(envs, method, spy)
    wandb = SimpleNamespace(init=lambda **_: set_up.append(("login", *beats)), Error=OSError)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(script, "over_processes", lambda *x: set_up.append(("meet", *beats)) or meet(*x))
    monkeypatch.setattr(script, "HEARTBEATS", {})
    args = small_args(script, env_id=QUICK.get(script, "CartPole-v1"), track=True)
    run_dir = script.train(args)
    assert set_up[:2] == [("login",), ("meet",)]
    assert len(set(steps)) >= 1 + args.num_iterations and beats.count("iteration") == 1 + args.num_iterations
    steps.clear()
    beats.clear()
    script.HEARTBEATS.clear()
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.setattr(sys, "argv", ["x.py", "--evaluate", str(run_dir), "--eval-episodes", "1"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(faulthandler, "enable", lambda *_: None)
    script.main()
    times = len(set(steps)) / len(steps)  # below 1 in games, where a lost life takes more steps at once
    assert times > 0.8 and set(beats) == {"evaluation"}


@pytest.mark.parametrize("ends", [0, KeyboardInterrupt, 143], ids=str)
@pytest.mark.parametrize("name", SCRIPTS | OTHERS)
def test_only_the_command_line_watches_the_heart(name, ends, monkeypatch, capsys):
    """If it is asked to, and not while what came out is written or sent, as to W&B."""
    script, watched, handled = (SCRIPTS | OTHERS)[name], [], []
    beating = {"iteration": time.monotonic()}

    def train(args):
        if ends:
            raise ends if isinstance(ends, type) else SystemExit(ends)

    def evaluate(args):
        return [1.0, 3.0]

    for function in (train, evaluate):
        monkeypatch.setattr(script, function.__name__, function)
    monkeypatch.setattr(script, "watch_heartbeats", watched.append)
    monkeypatch.setattr(signal, "signal", lambda signum, handler: handled.append((signum, handler)))
    monkeypatch.setattr(signal, "getsignal", lambda signum: signal.SIG_DFL)  # the tests may run under nohup
    monkeypatch.setattr(script, "HEARTBEATS", beating)
    three = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    all_three = [(signum, script.stop_after_iteration) for signum in three]
    for flags, seconds in (([], []), (["--stall-seconds", "9"], [9])):
        beating["iteration"] = 1.0
        monkeypatch.setattr(sys, "argv", [f"{script.SCRIPT}.py", *flags])
        with pytest.raises((KeyboardInterrupt, SystemExit)) if ends else nullcontext():
            script.main()
        assert not beating and watched == seconds and handled == all_three
        handled.clear()
    script.save_checkpoint(Path(), script.Args(), {}, {})
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--evaluate", "."])
    script.main()
    assert watched == [9, 9] and handled == all_three
    assert capsys.readouterr().out == "return 2.00 +- 1.00 over 2 episodes\n"


def test_second_signal_ends_at_once(monkeypatch, capfd):
    """Ctrl-C is Python's own again, while SIGTERM, which torchrun passes on, may come twice."""
    handlers = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(ppo.Run, "stop_signal", 0)
    for signum in (signal.SIGTERM, signal.SIGINT):
        ppo.stop_after_iteration(signum, None)
        assert ppo.Run.stop_signal == signum and handlers == {signal.SIGINT: signal.SIG_DFL}
    assert capfd.readouterr().err == 2 * "stopping after this iteration\n"


@pytest.mark.parametrize("rate", [0.0, 1e-3])
def test_flags_change_the_learning_rate_of_a_resumed_run(script, rate):
    """The optimizer's state that is loaded has the learning rate of before in it."""
    rates = [name for name in ("learning_rate", "auxiliary_lr") if hasattr(script.Args, name)]
    flags = dict(anneal_lr=False) if hasattr(script.Args, "anneal_lr") else dict(rnd=False)
    run_dir = script.train(small_args(script, **flags, **dict.fromkeys(rates, 1e-3)))
    before, args = parameters_of(run_dir), resumed(script, run_dir)
    args.total_timesteps *= 2
    script.train(replace(args, **dict.fromkeys(rates, rate)))
    assert torch.equal(before, parameters_of(run_dir)) == (rate == 0)


@pytest.mark.parametrize("name", SCRIPTS | OTHERS)
def test_compiled_functions_are_those_of_eager_mode(name, monkeypatch):
    """Bit for bit, where the compiler changes nothing."""
    script, calls = (SCRIPTS | OTHERS)[name], []

    def compiled(function, mode=None):
        def call(*args):
            calls.append(function)
            return function(*args)

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    args = [small_args(script, compile=compile) for compile in (False, True)]
    eager, compiled = (script.train(replace(x, total_timesteps=2 * x.total_timesteps)) for x in args)
    assert calls and torch.equal(parameters_of(eager), parameters_of(compiled))
    events = EventAccumulator(str(eager)).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("losses/")]
    assert len(tags) > 1
    for tag in tags:
        assert scalars(eager, tag) == scalars(compiled, tag), tag


def test_checkpoint_is_never_half_written(script, monkeypatch):
    run_dir = script.train(small_args(script))
    before = (run_dir / "checkpoint.pt").read_bytes()

    def die_half_way(state, file):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", die_half_way)
    with pytest.raises(KeyboardInterrupt):
        script.save_checkpoint(run_dir, script.Args(), {}, dict(iteration=0))
    assert (run_dir / "checkpoint.pt").read_bytes() == before


# both for ppo.py, and one of the two for each of the others, as the handler is the same for both
SIGNALS = [("ppo", signal.SIGINT)]
SIGNALS += [(name, (signal.SIGTERM, signal.SIGINT)[k % 2]) for k, name in enumerate(SCRIPTS | OTHERS)]


@pytest.mark.parametrize("name,signum", SIGNALS)
def test_signal_saves_and_exits(name, signum):
    script, code = (SCRIPTS | OTHERS)[name], 128 + signum
    command = [sys.executable, ROOT / f"{script.SCRIPT}.py"]
    flags = (
        ["--num-envs", "2", "--num-steps", "16"]
        if script is ppo_atari
        else ["--env-id", QUICK.get(script, "CartPole-v1")]
    )
    run = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run_dir = Path(run.stdout.readline().strip())
    wait_for(lambda: list(run_dir.glob("events*")))
    time.sleep(1)
    run.send_signal(signum)
    _, err = run.communicate(timeout=600)
    assert run.returncode == code and "Traceback" not in err, err
    assert err.count("stopping after this iteration") == 1
    state = script.load_checkpoint(run_dir)
    assert state["iteration"] > 0
    assert steps_of(run_dir)[-1] == state["iteration"] * state["args"].batch_size


@pytest.mark.parametrize("name", SCRIPTS | OTHERS)
def test_a_signal_after_an_iteration_was_logged_waits_for_the_next(name, monkeypatch):
    script, saved = (SCRIPTS | OTHERS)[name], []
    args = aligned_args(script, monkeypatch)
    log, save = script.Run.log, script.save_checkpoint

    def signalled(run, *arguments, **data):
        log(run, *arguments, **data)
        if run.done == 2:
            run.was_logged = False  # as where --log-every is above 1
            monkeypatch.setattr(script.Run, "stop_signal", signal.SIGTERM)

    monkeypatch.setattr(script.Run, "log", signalled)
    monkeypatch.setattr(script, "save_checkpoint", lambda *x: saved.append(x[-1]["iteration"]) or save(*x))
    with pytest.raises(SystemExit) as end:
        script.train(args)
    assert end.value.code == 143 and saved[-1] == 3


def test_same_seed_same_numbers(script):
    runs = [script.train(small_args(script, seed=seed, num_envs=4)) for seed in (1, 1, 2)]
    states = [torch.load(run / "checkpoint.pt", weights_only=True) for run in runs]
    assert_same(states[0], states[1])
    weights = [next(x for x in state["agent"].values() if torch.is_tensor(x)) for state in states]
    assert not torch.equal(weights[0], weights[2])
    tags = ("losses/td_loss", "losses/q") if script is ngu_r2d2 else ("losses/value_loss", "losses/entropy")
    for tag in (*tags, "charts/episodic_return"):
        assert scalars(runs[0], tag) == scalars(runs[1], tag)
    assert scalars(runs[0], tags[0]) != scalars(runs[2], tags[0])


def test_non_finite_loss_stops_the_run(vector_script):
    args = small_args(vector_script, env_id="NanReward-v0", total_timesteps=640, save_every=1)
    with pytest.raises(SystemExit) as end:
        vector_script.train(args)
    (run_dir,) = Path("runs").absolute().iterdir()
    words = r"step 192: not finite: \{'losses/.* nan.*\}, and rewards; last good checkpoint: "
    assert re.fullmatch(f"{words}{run_dir}/checkpoint.pt, of iteration 2", end.value.code), end.value.code
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    assert state["iteration"] == 2 and len(state["agent"]) == 12
    assert all(x.isfinite().all() for x in state["agent"].values())
    with pytest.raises(SystemExit, match="last good checkpoint: none"):
        vector_script.train(small_args(vector_script, env_id="NanReward-v0", total_timesteps=640))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_non_finite_loss_of_another_process_stops_the_run(script, rank, monkeypatch):
    """All processes end in one iteration. The first one saves, and so knows the last good checkpoint."""
    original = script.Run.check_finite

    def check_finite(*args):
        with monkeypatch.context() as patch:
            patch.setattr(script, "RANK", rank)
            patch.setattr(script, "over_processes", lambda operation, x: x + 1.0)
            original(*args)

    monkeypatch.setattr(script.Run, "check_finite", check_finite)
    with pytest.raises(SystemExit) as end:
        script.train(small_args(script))
    words = "not finite: a number of another process; last good checkpoint: none"
    assert end.value.code.endswith(words) if rank == 0 else end.value.code == 1


@pytest.mark.parametrize("name", SCRIPTS | OTHERS)
def test_processes_that_read_different_checkpoints(name, monkeypatch, capsys):
    """As one of two may that resume while a third, which was cut off from them, still saves."""
    script = (SCRIPTS | OTHERS)[name]
    run_dir = script.train(small_args(script))
    original, saved = script.over_processes, script.load_checkpoint(run_dir)["iteration"]
    capsys.readouterr()

    def over_processes(operation, x):
        return original(operation, x) + (operation == "MAX" and x == saved)

    monkeypatch.setattr(script, "over_processes", over_processes)
    with pytest.raises(SystemExit) as end:
        script.train(replace(script.load_checkpoint(run_dir)["args"], resume=str(run_dir)))
    assert_one_line_error(end.value.code, capsys, "processes of torchrun read different checkpoints")


@pytest.mark.parametrize("name", SCRIPTS | OTHERS)
def test_an_iteration_that_float32_does_not_know_is_resumed(name):
    """An odd number above 2**24: exact where processes compare and exchange it."""
    script, iteration = (SCRIPTS | OTHERS)[name], 2**24 + 1
    assert script.over_processes("MAX", iteration) == iteration
    run_dir = script.train(small_args(script))
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    torch.save(state | dict(iteration=iteration), run_dir / "checkpoint.pt")
    args = replace(script.load_checkpoint(run_dir)["args"], resume=str(run_dir))
    script.train(replace(args, total_timesteps=(iteration + 1) * args.batch_size))
    assert script.load_checkpoint(run_dir)["iteration"] == iteration + 1


def test_a_number_that_is_summed_over_processes_stays_as_it_was(script, monkeypatch):
    """losses/approx_kl is logged after --target-kl has compared its sum."""
    monkeypatch.setattr(script, "WORLD_SIZE", 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, op: x.mul_(2))
    kl = torch.tensor(0.25)
    assert script.over_processes("SUM", kl) == 0.5 and kl == 0.25


def test_a_float_may_be_given_as_an_integer(script):
    """From Python, where tyro makes no float of it: 0 is no count here, and no reason to refuse it."""
    assert script.Args(learning_rate=0).learning_rate == 0


@pytest.mark.parametrize("number", [1, 1.0])
def test_an_integer_is_annealed_as_a_float(script, number, monkeypatch):
    """A tensor of integers would cut 0.5 to 0."""
    seen, fill_ = [], torch.Tensor.fill_

    def spy(tensor, x):
        fill_(tensor, x)
        seen.append(tensor.item())
        return tensor

    flags = dict(learning_rate=number, total_timesteps=128)
    names = [name for name in ("clip_coef", "anneal_clip") if hasattr(script.Args, name)]
    flags |= dict.fromkeys(names, number)
    if not hasattr(script.Args, "anneal_lr"):
        pytest.skip("anneals nothing")
    args = small_args(script, **flags)
    monkeypatch.setattr(torch.Tensor, "fill_", spy)
    script.train(args)
    assert {1 - k / args.num_iterations for k in range(2)} <= {*seen} and args.num_iterations > 1


def test_crash_in_an_environment_is_shown_and_ends_the_run(vector_script):
    with pytest.raises(ZeroDivisionError, match="the environment's own mistake"):
        vector_script.train(small_args(vector_script, env_id="Crash-v0"))


def test_action_out_of_range_raises_instead_of_hanging():
    envs = games("PongNoFrameskip-v4", 2)
    envs.reset(seed=1)
    for bad in (6, -1):
        with pytest.raises(ValueError, match="not all of"):
            envs.step(np.array([0, bad]))


def test_episodes_are_logged_raw_where_they_end(vector_script):
    """Episodes of 5 steps with reward 1 in each of 4 environments: return 5, length 5, every 20 steps."""
    run_dir = vector_script.train(small_args(vector_script, env_id="Count-v0", total_timesteps=640))
    ends = [step for step in range(20, 641, 20) for _ in range(4)]
    assert scalars(run_dir, "charts/episodic_return") == [(step, 5.0) for step in ends]
    assert scalars(run_dir, "charts/episodic_length") == [(step, 5.0) for step in ends]


def test_logs_and_progress(vector_script, capsys):
    run_dir = vector_script.train(vector_script.Args(total_timesteps=2048))
    name = os.path.relpath(run_dir)
    assert re.fullmatch(rf"runs/CartPole-v1__{vector_script.SCRIPT}__1__\d+", name)
    assert len(scalars(run_dir, "charts/episodic_return")) > 20
    tags = "charts/learning_rate losses/policy_loss losses/approx_kl losses/grad_norm charts/SPS".split()
    for tag in tags:
        points, steps = scalars(run_dir, tag), [512, 1024, 1536, 2048]
        assert [step for step, _ in points] == steps[tag == "charts/SPS" :] and np.isfinite(points).all()
    out, err = capsys.readouterr()
    assert out == f"{name}\n"
    assert re.search(r"2\.05k/2\.05k .*step/s.* return \d+\.\d\]\n", err)


def test_evaluation_repeats_itself(script, monkeypatch, capsys):
    """What it plays is compared with the checkpoint's policy in test_evaluation.py."""
    run_dir = script.train(small_args(script, env_id=QUICK[script]))
    capsys.readouterr()
    printed = []
    for _ in range(2):
        assert cli(script, "--evaluate", run_dir, "--eval-episodes", 2, monkeypatch=monkeypatch) == 0
        out, err = capsys.readouterr()
        printed.append(out)
        assert re.search(r"\d steps \[\d\d:\d\d, .*step/s, 2 of 2 episodes\]\n", err)  # how far it was
    assert re.fullmatch(r"return \S+ \+- \S+ over 2 episodes\n", printed[0]) and printed[0] == printed[1]


def test_video(script, monkeypatch):
    run_dir = script.train(small_args(script, env_id=QUICK[script]))
    flags = ["--evaluate", run_dir, "--eval-episodes", 1 if script is ppo_atari else 2, "--capture-video"]
    assert cli(script, *flags, monkeypatch=monkeypatch) == 0
    videos = list((run_dir / "videos").glob("*.mp4"))
    assert len(videos) == flags[3] and all(video.stat().st_size > 1000 for video in videos)


def test_atari_evaluation_plays_whole_games(monkeypatch):
    """Of five lives each; and an id of ALE/ keeps its sticky actions and its own frame skip."""
    args = small_args(ppo_atari, env_id="ALE/Breakout-v5")
    run_dir = ppo_atari.train(args)
    assert (
        run_dir.name.startswith("ALE-Breakout-v5__ppo_atari__1__")
        and run_dir.parent == Path("runs").absolute()
    )
    made, original = [], ppo_atari.AtariVectorEnv

    def spy(**kwargs):
        made.append(kwargs)
        return original(**kwargs)

    monkeypatch.setattr(ppo_atari, "AtariVectorEnv", spy)
    lost, receive = [], ppo_atari.AtariEnvs._receive

    def count(self, i):
        result = receive(self, i)
        lost.append(bool(result[2]))
        return result

    monkeypatch.setattr(ppo_atari.AtariEnvs, "_receive", count)
    args.evaluate, args.eval_episodes = str(run_dir), 2
    returns = ppo_atari.evaluate(args)
    assert len(returns) == 2 and sum(lost) == 10
    assert made[0]["repeat_action_probability"] == 0.25 and made[0]["frameskip"] == 4
    assert not made[0]["full_action_space"]


def test_video_where_no_folder_can_be(script, monkeypatch, capsys):
    run_dir = script.train(small_args(script, env_id=QUICK[script]))
    (run_dir / "videos").touch()
    capsys.readouterr()
    code = cli(script, "--evaluate", run_dir, "--capture-video", monkeypatch=monkeypatch)
    assert_one_line_error(code, capsys, "--capture-video: .*File exists")


def test_run_that_may_not_be_read(script, monkeypatch, capsys):
    def stat(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", stat)  # as in a folder of someone else
    for flag in ("--resume", "--evaluate"):
        code = cli(script, flag, "runs/NAME", monkeypatch=monkeypatch)
        assert_one_line_error(code, capsys, "runs/NAME/checkpoint.pt cannot be loaded .*Permission denied")


PLAY_ATARI = [ppo_atari, ppo_lstm, impala_vtrace, ppo_async, ngu_r2d2]


@pytest.mark.parametrize("script", PLAY_ATARI, ids=lambda script: script.SCRIPT)
def test_video_of_a_game_without_moviepy(script, monkeypatch, capsys):
    run_dir = script.train(small_args(script, env_id="PongNoFrameskip-v4"))
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "moviepy", None)
    code = cli(script, "--evaluate", run_dir, "--capture-video", monkeypatch=monkeypatch)
    assert_one_line_error(code, capsys, "pip install moviepy")


@pytest.mark.parametrize("seed", [1, 9])  # with 9, the first game is reset again, as it drew no no-ops
def test_camera_films_the_same_game(seed):
    """The twin in colour stays in step, sticky actions and resets included."""
    args = small_args(ppo_atari, env_id="ALE/Breakout-v5")
    envs = ppo_atari.make_env(args, 1, Path("videos"))
    envs._save_video = lambda: None
    envs.reset(seed=seed)
    overs = 0
    for action in np.random.default_rng(0).integers(4, size=(500, 1)):
        overs += "final_info" in envs.step(action)[4]
    game, twin = (x.step(np.array([2])) for x in (envs.games[0], envs.camera))
    assert overs and envs.video[-1].shape == (210, 160, 3)
    for name in ("lives", "episode_frame_number", "frame_number"):
        assert game[4][name] == twin[4][name]


def test_tracking_offline_and_resumed_as_the_same_run():
    """Weights & Biases without a network: one run id over both parts."""
    pytest.importorskip("wandb")
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    command = [sys.executable, ROOT / "ppo.py", "--track", "--wandb-project-name", "tests"]
    subprocess.run([*command, "--total-timesteps", "1024"], env=environment, check=True, capture_output=True)
    (run_dir,) = Path("runs").iterdir()
    resume = ["--resume", run_dir, "--total-timesteps", "2048"]
    subprocess.run([*command, *resume], env=environment, check=True, capture_output=True)
    ids = [path.name.split("-", 4)[-1] for path in Path("wandb").glob("offline-run-*")]
    files = list(Path("wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and {f.stem for f in files} == {f"run-{run_dir.name}"}, ids
    assert steps_of(run_dir) == [512, 1024, 1536, 2048]


def test_what_is_tracked(script, monkeypatch):
    """All that TensorBoard gets, as one run by its folder's name, also when it is resumed; with all flags."""
    begun, env_id = [], QUICK[script]
    wandb = SimpleNamespace(init=lambda **flags: begun.append(flags), Error=OSError)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    args = small_args(script, env_id=env_id, track=True)
    run_dir = script.train(args)
    more = args.total_timesteps + args.batch_size
    script.train(replace(args, resume=str(run_dir), total_timesteps=more))
    assert len(begun) == 2
    for flags, steps in zip(begun, (args.total_timesteps, more), strict=True):
        assert flags["sync_tensorboard"] is True and flags["resume"] == "allow"
        assert flags["id"] == flags["name"] == run_dir.name
        assert flags["group"] == f"{env_id}__{script.SCRIPT}" and flags["tags"] == [script.SCRIPT, env_id]
        config = flags["config"]
        assert config["exp_name"] == script.SCRIPT  # by which CleanRL's reports group runs
        assert config.keys() - {"exp_name"} == asdict(args).keys()
        assert (config["env_id"], config["total_timesteps"]) == (env_id, steps)
        assert flags["settings"]["reinit"] == "finish_previous"  # each train() of a program is a run
    events = EventAccumulator(str(run_dir)).Reload()
    text = events.Tensors("args/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert all(f"    {name}: " in text for name in asdict(args)) and f"total_timesteps: {more}" in text
    monkeypatch.setitem(sys.modules, "wandb", None)  # it is not needed to play
    assert cli(script, "--evaluate", run_dir, "--eval-episodes", 1, monkeypatch=monkeypatch) == 0


def test_names_that_weights_and_biases_takes(script, monkeypatch):
    """A run's has no slash, colon or comma, and as a folder 255 bytes at most; a tag has 64 characters."""
    begun = []
    wandb = SimpleNamespace(init=lambda **flags: begun.append(flags), Error=OSError)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for env_id in ("a.module:ALE/Breakout-v5", "ALE/Pong-v5,ALE/Pong-v5", f"{300 * 'x'}-v0"):
        run = script.Run(small_args(script, env_id=env_id, track=True))
        run.writer.close()
        assert not {*"/:,"} & {*run.folder.name} and len(run.folder.name) <= 255
        assert begun[-1]["id"] == run.folder.name and all(len(tag) <= 64 for tag in begun[-1]["tags"])


def test_the_bar_of_a_resumed_run_begins_where_the_run_was(script, monkeypatch):
    """Or its rate would count old steps. In a log, a line every ten seconds is enough."""
    shown, tqdm = [], script.tqdm
    monkeypatch.setattr(sys, "stderr", io.StringIO())  # a log, no terminal
    monkeypatch.setattr(script, "tqdm", lambda *args, **flags: shown.append(flags) or tqdm(*args, **flags))
    args = small_args(script)
    run_dir = script.train(args)
    more = args.total_timesteps + 2 * args.batch_size
    script.train(replace(args, resume=str(run_dir), total_timesteps=more))
    steps = args.num_iterations * args.batch_size
    assert [(x["initial"], x["total"]) for x in shown] == [(0, steps), (steps, more)]
    assert all(x["mininterval"] == 10 and x["bar_format"].endswith("\n") for x in shown)


def test_a_signal_to_another_process_ends_this_one_too(script, monkeypatch):
    """After the same iteration: what torchrun's processes were told is compared at the end of each."""
    told, original = [], script.over_processes

    def over_processes(operation, x):
        if sys._getframe(1).f_code.co_name == "iterations" and operation == "MAX":
            told.append(x)
            return max(x, signal.SIGTERM if len(told) == 2 else 0)
        return original(operation, x)

    monkeypatch.setattr(script, "over_processes", over_processes)
    args = small_args(script)
    args.total_timesteps = 4 * args.batch_size
    with pytest.raises(SystemExit, match="143"):
        script.train(args)
    (run_dir,) = Path("runs").iterdir()
    assert told == [0, 0] and script.load_checkpoint(run_dir)["iteration"] == 2


def test_a_checkpoint_is_on_the_disk_before_it_replaces_the_old_one(script, monkeypatch):
    """Else a power cut may leave an empty file under its name."""
    sizes, saved, fsync, rename = [], [], os.fsync, Path.replace

    def synced(fd):
        sizes.append(os.fstat(fd).st_size)
        fsync(fd)

    def replaced(path, target):
        if path.name == "checkpoint.tmp":
            saved.append(sizes == [path.stat().st_size])
            sizes.clear()
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    args = small_args(script, save_every=1)
    args.total_timesteps = 3 * args.batch_size
    script.train(args)
    assert saved == [True] * args.num_iterations


def test_track_with_a_mode_that_wandb_does_not_know(script, monkeypatch, capsys):
    """Its settings are checked by pydantic, whose error is a ValueError of several lines."""

    def init(**_):
        raise ValueError("1 validation error for Settings\nmode\n  Input should be 'online' or 'offline'")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=OSError))
    with pytest.raises(SystemExit, match="2"):
        script.train(small_args(script, env_id=QUICK[script], track=True))
    assert_one_line_error(2, capsys, "--track: 1 validation error for Settings mode")


def test_track_without_wandb(script, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    code = cli(script, "--track", "--env-id", QUICK[script], monkeypatch=monkeypatch)
    assert_one_line_error(code, capsys, "pip install wandb")
    assert not os.listdir()


def test_copy_in_an_empty_folder_runs(script):
    Path("copied.py").write_text(with_fields_of_ones_own(script), encoding="utf-8")
    batch = "--batch-segments" if script in (impala_vtrace, ppo_async) else "--num-minibatches"
    batch = "--batch-sequences" if script is ngu_r2d2 else batch
    flags = ["--num-envs", "2", "--num-steps", "16", "--total-timesteps", "64", batch, "2", "--coef", "-2"]
    subprocess.run([sys.executable, "-I", "copied.py", *flags], check=True, capture_output=True)
    (run_dir,) = Path("runs").iterdir()
    assert "__copied__1__" in run_dir.name and (run_dir / "checkpoint.pt").exists()
    evaluated = [sys.executable, "-I", "copied.py", "--evaluate", run_dir, "--eval-episodes", "1"]
    assert "over 1 episodes" in subprocess.run(evaluated, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("amp", [False, True])
def test_atari_amp_changes_little(amp):
    """bfloat16 convolutions: the same policy to two digits, and float32 losses."""
    torch.manual_seed(1)
    agent = ppo_atari.Agent(ppo_atari.make_env(small_args(ppo_atari), 1))
    obs = torch.randint(0, 256, (8, 4, 84, 84), dtype=torch.uint8)
    dist, value = agent(obs)
    agent.amp = amp
    amp_dist, amp_value = agent(obs)
    assert amp_dist.logprobs.dtype == amp_value.dtype == torch.float32
    torch.testing.assert_close(amp_dist.logprobs, dist.logprobs, atol=1e-2, rtol=0)
    torch.testing.assert_close(amp_value, value, atol=5e-2, rtol=0)
    assert torch.equal(amp_value, value) != amp


def test_compile_runs_and_agrees(monkeypatch):
    """torch.compile learns the same parameters, with the same losses and learning rates."""
    import torch._inductor.config

    monkeypatch.setattr(torch._inductor.config, "fallback_random", True)  # act() draws the same numbers
    flags = dict(num_envs=2, num_steps=16, total_timesteps=96, num_minibatches=2, learning_rate=1e-2)
    eager, compiled = (ppo.train(ppo.Args(compile=compile, **flags)) for compile in (False, True))
    for tag in ("losses/policy_loss", "losses/value_loss", "losses/entropy"):
        losses = [np.array(scalars(run, tag)) for run in (eager, compiled)]
        assert losses[1][:, 0].tolist() == [32, 64, 96]
        np.testing.assert_allclose(*losses, rtol=1e-3, atol=1e-4)
    rates = [value for _, value in scalars(compiled, "charts/learning_rate")]
    np.testing.assert_allclose(rates, [1e-2, 2e-2 / 3, 1e-2 / 3], rtol=1e-5)
    assert scalars(compiled, "charts/learning_rate") == scalars(eager, "charts/learning_rate")
    # if annealing did not reach the compiled update, parameters would be apart by some of its steps
    torch.testing.assert_close(parameters_of(eager), parameters_of(compiled), rtol=0, atol=1e-3)


@pytest.mark.parametrize("script", [ppo_continuous, ppo_multidiscrete], ids=lambda script: script.SCRIPT)
@pytest.mark.parametrize("env_id", ["HalfCheetah-v4", "HalfCheetah-v5"])
def test_both_generations_of_mujoco_run(script, env_id):
    run_dir = script.train(small_args(script, env_id=env_id))
    losses = scalars(run_dir, "losses/value_loss")
    assert len(losses) == len(steps_of(run_dir)) == 1 and np.isfinite(losses).all()


def test_nan_is_never_logged():
    """A loss that is NaN ends the run; another number that is, is left out. Tensors are numbers."""
    run = ppo.Run(ppo.Args(total_timesteps=512))
    for _ in run.iterations():
        run.step += 512
        run.log({"a": torch.tensor(1.0)}, {"b": np.nan, "c": torch.tensor(2.0), "d": torch.tensor(np.inf)})
        with pytest.raises(SystemExit, match="step 512: not finite: {'losses/a': nan}; last good"):
            run.log({"a": torch.tensor(np.nan)}, {})
    run.writer.close()
    tags = EventAccumulator(str(run.folder)).Reload().Tags()["scalars"]
    assert tags == ["losses/a", "c"]
    assert scalars(run.folder, "losses/a") == [(512, 1.0)] and scalars(run.folder, "c") == [(512, 2.0)]


def test_speed_is_measured_from_the_second_iteration_on(monkeypatch):
    """The first one may compile, and starts the environments. A run that goes on counts its own steps."""
    clock, per_iteration = [100.0], [1000.0, 2.0, 4.0]

    class Time:
        time_ns, sleep, monotonic = time.time_ns, time.sleep, staticmethod(lambda: clock[0])

    monkeypatch.setattr(ppo, "time", Time)
    run_dir = None
    for total in (3, 6):
        args = ppo.Args() if run_dir is None else resumed(ppo, run_dir)
        run = ppo.Run(replace(args, total_timesteps=512 * total))
        for k in run.iterations():
            run.count_steps(512, {})
            clock[0] += per_iteration[k % 3]
            run.log({}, {})
        run.writer.close()
        run_dir = run.folder
    speeds = [(2 * 512, 256.0), (3 * 512, 1024 / 6), (5 * 512, 256.0), (6 * 512, 1024 / 6)]
    found = scalars(run_dir, "charts/SPS")
    np.testing.assert_allclose(found, speeds)


def test_numbers_that_an_environment_reports_are_logged(script):
    """Of the info at the end of an episode: a success, an array of numbers not, of those that have any."""
    if script is ppo_atari:
        pytest.skip("emulators report nothing of the kind")
    box = "Box" * (script in (ppo_continuous, ppo_multidiscrete))
    run_dir = script.train(small_args(script, env_id=f"Reports{box}-v0", total_timesteps=640))
    successes = scalars(run_dir, "charts/is_success")
    returns = scalars(run_dir, "charts/episodic_return")
    assert [step for step, _ in successes] == [step for step, _ in returns] and len(returns) > 20
    assert {x for _, x in successes} == {x for _, x in scalars(run_dir, "charts/is_near")} == {0.0, 1.0}
    assert {x for _, x in scalars(run_dir, "charts/distance")} == {2.5}
    assert {x for _, x in scalars(run_dir, "charts/level")} == {3}
    assert 0 < len(scalars(run_dir, "charts/sometimes")) < len(returns)
    tags = EventAccumulator(str(run_dir)).Reload().Tags()["scalars"]
    assert not {"charts/place", "charts/name", "charts/words", "charts/episode"} & {*tags}


OWN_FIELDS = "    warmup: int = 0\n    coef: float = -0.1\n    rate: float = float('nan')\n"


def with_fields_of_ones_own(script):
    """Source of a script with three more arguments, all of them values that a count or a rate cannot be."""
    source, field = (ROOT / f"{script.SCRIPT}.py").read_text(encoding="utf-8"), "    seed: int = 1"
    assert source.count(field) == 1
    return source.replace(field, OWN_FIELDS + field)


@pytest.mark.parametrize("name", SCRIPTS | OTHERS)
def test_only_fields_of_the_script_are_checked(name, monkeypatch, capsys):
    script = (SCRIPTS | OTHERS)[name]
    Path("copied.py").write_text(with_fields_of_ones_own(script), encoding="utf-8")
    copied = runpy.run_path("copied.py")
    args = copied["Args"]()
    assert (args.warmup, args.coef) == (0, -0.1) and np.isnan(args.rate)
    monkeypatch.setattr(sys, "argv", "copied.py --warmup -3 --coef -inf".split())
    args = copied["parse_args"]()
    assert (args.warmup, args.coef) == (-3, -np.inf)
    with pytest.raises(ValueError, match="num_envs cannot be 0"):
        copied["Args"](num_envs=0)


@pytest.mark.parametrize("name", SCRIPTS | OTHERS)
def test_a_second_loss_may_stand_anywhere_in_the_loop(name, monkeypatch):
    """Only what needs no gradients, as acting, is without them."""
    script, places = (SCRIPTS | OTHERS)[name], []
    methods = {method: getattr(script.Run, method) for method in ("iterations", "count_steps", "log")}

    def second_loss(run, place):
        parameters = [x for x in run.parts["agent"].parameters() if x.requires_grad]
        loss = sum(x.square().mean() for x in parameters)
        assert all(x.isfinite().all() for x in torch.autograd.grad(loss, parameters))
        places.append(place)

    def iterations(run):
        for iteration in methods["iterations"](run):
            second_loss(run, "iterations")
            yield iteration

    monkeypatch.setattr(script.Run, "iterations", iterations)
    for method in ("count_steps", "log"):

        def spy(run, *args, method=method, **data):
            methods[method](run, *args, **data)
            second_loss(run, method)

        monkeypatch.setattr(script.Run, method, spy)
    args = small_args(script, env_id=QUICK.get(script, "CartPole-v1"))
    script.train(replace(args, total_timesteps=2 * args.batch_size))
    assert places.count("iterations") == places.count("log") == 2
    assert "count_steps" in places or script in (impala_vtrace, ppo_async)  # whose actors take the steps


@pytest.mark.parametrize("name", SCRIPTS | OTHERS)
def test_randomness_of_python_and_numpy_repeats(name, monkeypatch):
    """Who uses random or np.random in the loop has the same numbers with the same seed, resumed or not."""
    script, drawn, original = (SCRIPTS | OTHERS)[name], [], (SCRIPTS | OTHERS)[name].Run.log

    def log(*args, **data):
        drawn.append((random.random(), np.random.random()))
        original(*args, **data)

    def drawn_by(args):
        drawn.clear()
        return script.train(args), drawn.copy()

    monkeypatch.setattr(script.Run, "log", log)
    args = small_args(script, env_id=QUICK.get(script, "CartPole-v1"))
    args.total_timesteps = 2 * args.batch_size
    (_, first), (run_dir, again), (_, other) = (drawn_by(replace(args, seed=seed)) for seed in (1, 1, 2))
    assert first == again and len({x for pair in first + other for x in pair}) == 4 * len(first) == 8
    _, rest = drawn_by(replace(resumed(script, run_dir), total_timesteps=4 * args.batch_size))
    _, whole = drawn_by(replace(args, total_timesteps=4 * args.batch_size))
    assert whole == again + rest and len(whole) == 4


OBSERVED = [(name, QUICK.get(script, "CartPole-v1")) for name, script in (SCRIPTS | OTHERS).items()]
OBSERVED += [(name, "BreakoutNoFrameskip-v4") for name in ("ppo_lstm", *OTHERS)]
OBSERVED += [("ngu_r2d2", "MiniGrid-DoorKey-5x5-v0"), ("impala_vtrace", "FloatImage-v0")]


@pytest.mark.parametrize("name,env_id", OBSERVED)
def test_an_observation_is_not_overwritten_by_the_next_step(name, env_id):
    """Whoever keeps it, as for the novelty of what comes after, keeps what was seen."""
    script = (SCRIPTS | OTHERS)[name]
    args = small_args(script, env_id=env_id)
    envs = script.make_env(*([env_id] if script is impala_vtrace else []), args, 2)
    kept = [(obs := envs.reset(seed=1)[0], np.array(obs))]
    for _ in range(60):
        actions = np.stack([envs.single_action_space.sample() for _ in range(2)])
        obs, _, _, _, info = envs.step(actions)
        kept.append((obs, np.array(obs)))
        kept += [(x, np.array(x)) for x in info.get("final_obs", ()) if x is not None]
    for seen, copy in kept:
        np.testing.assert_array_equal(seen, copy)
    assert len({copy.tobytes() for _, copy in kept}) > 1
    envs.close()


@pytest.mark.parametrize("name", ["ppo", "ppo_shared", "ppo_continuous"])
def test_a_changed_policy_acts_trains_and_is_evaluated(name, monkeypatch):
    """There is one, Agent.policy(), which forward() shares. Here it is as good as sure of one action."""
    script, taken = SCRIPTS[name], []
    place = "distribution" if script is ppo_shared else "policy"  # policy() and forward() call it
    original, step = getattr(script.Agent, place), gym.vector.SyncVectorEnv.step

    def changed(self, x):
        dist = original(self, x)
        if script is ppo_continuous:
            return type(dist)(0 * dist.mean + 0.75, 0 * dist.log_std - 7)
        return type(dist)(dist.logprobs + torch.tensor([0.0, 50.0]))

    def spy(self, actions):
        taken.extend(actions)
        return step(self, actions)

    monkeypatch.setattr(script.Agent, place, changed)
    monkeypatch.setattr(gym.vector.SyncVectorEnv, "step", spy)
    args = small_args(script, env_id=QUICK.get(script, "CartPole-v1"), update_epochs=1, num_minibatches=1)
    run_dir = script.train(args)
    script.evaluate(replace(args, evaluate=str(run_dir), eval_episodes=1))
    assert len(taken) > 64 and np.allclose(taken, 0.75 if script is ppo_continuous else 1, atol=0.02)
    assert all(x < 0.01 for _, x in scalars(run_dir, "losses/entropy"))  # of what is trained


@pytest.mark.parametrize("name", SCRIPTS | OTHERS)
def test_the_mean_return_is_that_of_the_last_hundred_episodes(name, monkeypatch):
    """A checkpoint keeps their returns; here every episode has one step."""
    monkeypatch.setattr(probes.Aligned, "length", 1)
    monkeypatch.setattr(AlignedGames, "length", 1)
    script = (SCRIPTS | OTHERS)[name]
    run_dir = script.train(aligned_args(script, monkeypatch))
    kept = script.load_checkpoint(run_dir)["last_returns"]
    logged = [x for _, x in scalars(run_dir, "charts/episodic_return")]
    assert len(logged) == 256 and kept == pytest.approx(logged[-100:])
