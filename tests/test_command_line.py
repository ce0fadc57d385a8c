"""What users met at the command line, and in notebooks, of every script."""

import faulthandler
import fcntl
import importlib.util
import io
import json
import os
import pty
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import termios
import time
import zlib
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import OTHERS, SCRIPTS, one_line, small_args, wait_for
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo_atari
import ppo_continuous
import ppo_multidiscrete

ALL = SCRIPTS | OTHERS
ATARI = ("ppo_atari", "ppo_lstm", "ppo_async", "impala_vtrace", "ngu_r2d2")
ROOT = Path(__file__).parent.parent


@pytest.fixture(params=ALL)
def script(request):
    return ALL[request.param]


def quick(script) -> str:
    if script in (ppo_continuous, ppo_multidiscrete):
        return "Pendulum-v1"
    return "BreakoutNoFrameskip-v4" if script is ppo_atari else "CartPole-v1"


def command(script, *flags, monkeypatch):
    """main() with a command line: its exit code or message, 0 where it just ends."""
    monkeypatch.setattr(sys, "argv", [f"{script.SCRIPT}.py", *map(str, flags)])
    for function in ("signal", "enable"):  # handlers are this process's own
        monkeypatch.setattr(signal if function == "signal" else faulthandler, function, lambda *_: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        script.main()
    except SystemExit as end:
        return end.code
    return 0


def mistake(script, *flags, monkeypatch, capsys) -> str:
    """The one line with which a command ends; nothing else comes of it."""
    assert command(script, *flags, monkeypatch=monkeypatch) == 2
    out, err = capsys.readouterr()
    assert not out and one_line(err), err
    return one_line(err)


# === Environments ============================================================================


class Room(gym.Env):
    """Its size is an argument; it has actions of all kinds."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    sizes = []

    def __init__(self, size=5, broken=False, actions="discrete", render_mode=None):
        self.sizes.append(size)
        if broken:
            len(3)
        box = gym.spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = box if actions == "box" else gym.spaces.Discrete(2)
        self.size = size

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full(3, self.t / self.size, np.float32), 1.0, self.t >= self.size, False, {}


for suffix, kwargs in (("", {}), ("Box", dict(actions="box"))):
    gym.register(f"Room{suffix}-v0", Room, kwargs=kwargs, disable_env_checker=True)


class Bare(gym.Env):
    """It takes no arguments."""


class Sized(Room):
    """Its size must be given."""

    def __init__(self, size, render_mode=None):
        super().__init__(size)


class Goal(Room):
    """Observes a dictionary."""

    observation_space = gym.spaces.Dict(
        at=Room.observation_space, goal=gym.spaces.Box(-1, 1, (2,), np.float32)
    )

    def reset(self, **kwargs):
        obs, info = super().reset(**kwargs)
        return dict(at=obs, goal=np.ones(2, np.float32)), info

    def step(self, action):
        obs, *rest = super().step(action)
        return dict(at=obs, goal=np.ones(2, np.float32)), *rest


gym.register("Bare-v0", Bare, disable_env_checker=True)
gym.register("Sized-v0", Sized, disable_env_checker=True)
gym.register("Goal-v0", Goal, disable_env_checker=True)


def room(script) -> str:
    return "RoomBox-v0" if script in (ppo_continuous, ppo_multidiscrete) else "Room-v0"


@pytest.mark.parametrize("name", [name for name in ALL if name != "ppo_atari"])
def test_arguments_of_an_environment(name, monkeypatch, capsys):
    """They reach it in training and evaluation, and are part of what a run is."""
    script = ALL[name]
    Room.sizes.clear()
    kwargs = json.dumps(dict(size=4))
    run_dir = script.train(small_args(script, env_id=room(script), env_kwargs=kwargs))
    assert len(Room.sizes) >= 4 and set(Room.sizes) == {4}
    args = script.parse_args(["--evaluate", str(run_dir), "--eval-episodes", "2"])
    assert np.isclose(script.evaluate(args), 4).all() and set(Room.sizes) == {4}
    capsys.readouterr()
    flags = dict(monkeypatch=monkeypatch, capsys=capsys)
    assert "--resume cannot change env_kwargs" in mistake(
        script, "--resume", run_dir, "--env-kwargs", "{}", **flags
    )


def test_arguments_that_an_environment_does_not_take(script, monkeypatch, capsys):
    flags = dict(monkeypatch=monkeypatch, capsys=capsys)
    for text in ("3", "{", "[1]", "size=4"):
        assert "env_kwargs must be a JSON object" in mistake(script, "--env-kwargs", text, **flags)
    if script is not ppo_atari:
        for text, error in (
            ('{"sise": 4}', "argument 'sise'"),
            ('{"id": 1}', "multiple values for argument 'id'"),
        ):
            words = mistake(script, "--env-id", room(script), "--env-kwargs", text, **flags)
            assert error in words
        words = mistake(script, "--env-id", "Bare-v0", "--env-kwargs", '{"size": 4}', **flags)
        assert "Bare() takes no arguments" in words
        words = mistake(script, "--env-id", "Sized-v0", **flags)
        assert "missing 1 required positional argument: 'size'" in words
        with pytest.raises(TypeError, match="object of type 'int' has no len"):  # a mistake of its own
            command(
                script,
                *("--env-id", room(script), "--env-kwargs", '{"broken": true}'),
                monkeypatch=monkeypatch,
            )


@pytest.mark.parametrize("name", ["ppo", "ppo_shared", "ppo_continuous", "ppo_lstm", "ppo_multidiscrete"])
def test_a_dictionary_that_is_flattened_where_the_script_says(name, monkeypatch):
    """As the message for other observations advises: the environment's own come to a wrapper there."""
    source, place = (ROOT / f"{name}.py").read_text(encoding="utf-8"), "        # Wrappers that change"
    assert source.count(place) == 1
    change = f"        env = gym.wrappers.FlattenObservation(env)\n{place}"
    Path("fork.py").write_text(source.replace(place, change), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("fork", "fork.py")
    fork = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fork", fork)
    spec.loader.exec_module(fork)
    kwargs = '{"actions": "box"}' if name in ("ppo_continuous", "ppo_multidiscrete") else "{}"
    args = small_args(fork, env_id="Goal-v0", env_kwargs=kwargs)
    assert fork.make_env(args, 1).single_observation_space.shape == (5,)
    assert (fork.train(args) / "checkpoint.pt").exists()


@pytest.mark.parametrize("name", [name for name in ALL if name != "ppo_atari"])
def test_a_video_of_what_renders_no_images(name, monkeypatch, capsys):
    script = ALL[name]
    run_dir = script.train(small_args(script, env_id=room(script)))
    capsys.readouterr()
    words = mistake(script, "--evaluate", run_dir, "--capture-video", monkeypatch=monkeypatch, capsys=capsys)
    assert f"--capture-video: {room(script)} renders no images" in words


@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
def test_a_run_without_a_name(script, flag, monkeypatch, capsys):
    """As where a variable of the shell is empty: it is reported as other wrong flags are."""
    for more in ((), ("--seed", "3")):
        assert command(script, flag, *more, monkeypatch=monkeypatch) == 2
        out, err = capsys.readouterr()
        assert not out and flag in err and "usage:" not in err and "Traceback" not in err
    assert not os.listdir()


@pytest.mark.parametrize("name", ATARI)
def test_arguments_of_a_game(name, monkeypatch, capsys):
    script, made = ALL[name], []
    original = script.AtariVectorEnv.__init__
    monkeypatch.setattr(
        script.AtariVectorEnv, "__init__", lambda self, *x, **kw: made.append(kw) or original(self, *x, **kw)
    )
    kwargs = json.dumps(dict(repeat_action_probability=0.5, max_num_frames_per_episode=400))
    args = script.Args(env_id="PongNoFrameskip-v4", env_kwargs=kwargs)
    first = [args.env_id] if name == "impala_vtrace" else []
    script.make_env(*first, args, 1).close()
    assert made
    for kw in made:
        assert kw["repeat_action_probability"] == 0.5 and kw["max_num_frames_per_episode"] == 400
    wrong = {
        '{"frameskip": 2}': "games take repeat_action_probability, .*, not frameskip",
        '{"size": 3}': "games take repeat_action_probability, .*, not size",
        '{"repeat_action_probability": "often"}': "repeat_action_probability must be from 0 to 1, not often",
        '{"repeat_action_probability": 3}': "repeat_action_probability must be from 0 to 1, not 3",
        '{"max_num_frames_per_episode": 0}': "max_num_frames_per_episode must be an integer above 0, not 0",
        '{"max_num_frames_per_episode": 9.5}': "max_num_frames_per_episode must be an integer above 0, not",
        '{"full_action_space": 0.5}': "full_action_space",
    }
    for text, said in wrong.items():
        words = mistake(
            script,
            *("--env-id", "PongNoFrameskip-v4", "--env-kwargs", text),
            monkeypatch=monkeypatch,
            capsys=capsys,
        )
        assert re.search(f"error: --env-kwargs: .*{said}", words)


@pytest.mark.parametrize("env_id", [":CartPole-v1", "a:b:CartPole-v1", "os:"])
def test_ids_that_are_none(script, env_id, monkeypatch, capsys):
    assert "env" in mistake(script, "--env-id", env_id, monkeypatch=monkeypatch, capsys=capsys)


@pytest.mark.parametrize("name", ["ppo", "ppo_shared", "ppo_lstm", "impala_vtrace", "ppo_async", "ngu_r2d2"])
def test_observations_that_are_no_vectors_name_the_way_out(name, monkeypatch, capsys):
    """Of numbers in all scripts with actions from 0; of MiniGrid's pictures where they are refused."""
    gym.register_envs(ALL["ngu_r2d2"].minigrid)
    env_ids = ["FrozenLake-v1"] + ["MiniGrid-Empty-5x5-v0"] * (name in ("ppo", "ppo_shared"))
    for env_id in env_ids:
        words = mistake(ALL[name], "--env-id", env_id, monkeypatch=monkeypatch, capsys=capsys)
        assert "gym.wrappers.FlattenObservation" in words
        assert "ngu_r2d2.py" in words or env_id == "FrozenLake-v1"


@pytest.mark.parametrize("name", ["ppo_atari", "ppo_lstm", "impala_vtrace", "ppo_async", "ngu_r2d2"])
@pytest.mark.parametrize("env_id", ["Breakout", "ALE/Breakout"])
def test_a_game_without_its_version_names_an_id(name, env_id, monkeypatch, capsys):
    """gymnasium adds a version to some ids; frames, lives and no-ops go by the name that was written."""
    words = mistake(ALL[name], "--env-id", env_id, monkeypatch=monkeypatch, capsys=capsys)
    hints = {"Breakout": "(try BreakoutNoFrameskip-v4)", "ALE/Breakout": "No registered env"}
    hint = hints[env_id] if name == "ppo_atari" else "such as PongNoFrameskip-v4"
    hint = hint if name in ("ppo_atari", "ppo_lstm") else "as BreakoutNoFrameskip-v4 and ALE/Breakout-v5 are"
    assert hint in words


@pytest.mark.parametrize("name", ["ppo", "ppo_shared", "ppo_continuous"])
@pytest.mark.parametrize("part", ["log_prob", "value"])
def test_shapes_that_the_loss_would_broadcast_are_refused(name, part, monkeypatch):
    """Of a fork: log-probabilities of each action component, or values (B, 1)."""
    script = ALL[name]
    dist_class = script.Normal if name == "ppo_continuous" else script.Categorical
    if part == "log_prob":
        log_prob = dist_class.log_prob
        monkeypatch.setattr(dist_class, "log_prob", lambda *x: log_prob(*x).unsqueeze(-1))
    else:
        forward = script.Agent.forward
        monkeypatch.setattr(
            script.Agent, "forward", lambda *x: (forward(*x)[0], forward(*x)[1].unsqueeze(-1))
        )
    with pytest.raises(AssertionError):
        script.train(small_args(script, env_id=quick(script)))


def test_modules_are_looked_for_in_the_working_folder(script, monkeypatch):
    monkeypatch.setattr(script, "parse_args", lambda: sys.exit(repr(sys.path)))
    assert eval(command(script, monkeypatch=monkeypatch))[-1] == os.getcwd()  # none hides an installed one


# === Checkpoints, and what ends a run ========================================================


def run_of(script, **flags):
    """A Run that trains nothing."""
    return script.Run(small_args(script, env_id=quick(script), **flags))


def test_a_checkpoint_by_the_clock(script, monkeypatch):
    """An iteration that ends ten minutes after the last checkpoint is saved, whatever --save-every says."""
    saved, flags = [], {} if script is not ppo_atari else dict(num_envs=4)
    monkeypatch.setattr(script, "save_checkpoint", lambda *x: saved.append(x[-1]["iteration"]))
    run = run_of(script, total_timesteps=5 * 64, **flags)
    for iteration in run.iterations():
        run.saved_at -= (0, 599, 2, 0, 0)[iteration]
    assert saved == [3, 5]


def test_a_run_at_its_end_says_so(script, monkeypatch, capsys):
    run_dir = script.train(small_args(script, env_id=quick(script)))
    capsys.readouterr()
    assert command(script, "--resume", run_dir, monkeypatch=monkeypatch) == 0
    assert "the run is at its end, step 64; with a larger --total-timesteps" in capsys.readouterr().err
    assert command(script, "--resume", run_dir, "--total-timesteps", 128, monkeypatch=monkeypatch) == 0
    err = capsys.readouterr().err
    assert "now ends at step 128, not 64" in err and "at its end" not in err
    run = run_of(script)
    capsys.readouterr()
    run.tell_of_end(before=640)
    assert "now ends at step 64, not 640" in capsys.readouterr().err
    monkeypatch.setattr(script, "RANK", 1)  # of several processes, the first one says it
    for before in (run.args.total_timesteps, 1):
        run.tell_of_end(before)
    assert not capsys.readouterr().err


def test_a_run_may_be_named_by_its_checkpoint(script):
    run_dir = script.train(small_args(script, env_id=quick(script)))
    for flag in ("--resume", "--evaluate"):
        for words in ([flag, f"{run_dir}/checkpoint.pt"], [f"{flag}={run_dir}/checkpoint.pt"]):
            assert getattr(script.parse_args(words), flag[2:]) == str(run_dir)


ERRORS = [EOFError("x"), zlib.error("x"), NotImplementedError("x"), AttributeError("x"), OverflowError("x")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_a_damaged_checkpoint_raises(script, error, monkeypatch, capsys):
    def load(*_, **kwargs):
        raise error

    script.save_checkpoint(Path(), script.Args(), {}, {})
    monkeypatch.setattr(torch, "load", load)
    words = mistake(script, "--resume", ".", monkeypatch=monkeypatch, capsys=capsys)
    assert "checkpoint.pt cannot be loaded" in words and type(error).__name__ in words


def test_damaged_checkpoints(monkeypatch, capsys):
    """Cut anywhere, or with any bit flipped, they cannot be loaded, or are what they were."""
    script, rng = ALL["ppo"], np.random.default_rng(0)
    script.save_checkpoint(Path(), script.Args(), dict(agent=torch.nn.Linear(3, 3)), dict(iteration=3))
    good = Path("checkpoint.pt").read_bytes()
    whole = script.load_checkpoint(".")
    bad = [good[:n] for n in rng.integers(len(good), size=40)]
    for n in rng.integers(len(good), size=200):
        bad.append(good[:n] + bytes([good[n] ^ 1 << rng.integers(8)]) + good[n + 1 :])
    for text in bad:
        Path("checkpoint.pt").write_bytes(text)
        try:
            state = script.load_checkpoint(".")
        except SystemExit as end:
            assert end.code == 2 and one_line(capsys.readouterr().err)
        else:
            assert state["args"] == whole["args"] and state["iteration"] == 3
            assert torch.equal(state["agent"]["weight"], whole["agent"]["weight"])


def test_a_checkpoint_of_a_gpu_is_read_without_one(script, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        script.save_checkpoint(Path(), script.Args(), dict(agent=torch.nn.Linear(3, 3)), dict(iteration=3))
    assert script.load_checkpoint(".")["agent"]["weight"].device.type == "cpu"


def test_an_environment_may_change_the_folder(script, tmp_path, monkeypatch):
    flags = {} if script is not ppo_atari else dict(num_envs=4)
    run = run_of(script, total_timesteps=128, **flags)
    (tmp_path / "elsewhere").mkdir()
    for _ in run.iterations():
        os.chdir(tmp_path / "elsewhere")
        run.log({}, {})
    (checkpoint,) = tmp_path.rglob("checkpoint.pt")
    assert checkpoint.parent == run.folder == next((tmp_path / "runs").iterdir())


@pytest.mark.parametrize("name", ALL)
def test_hangups_that_nohup_ignores_stay_ignored(name, monkeypatch):
    script, handled = ALL[name], []
    monkeypatch.setattr(script, "train", lambda args: None)
    for before, count in ((signal.SIG_DFL, 3), (signal.SIG_IGN, 2)):
        handled.clear()
        monkeypatch.setattr(signal, "getsignal", lambda signum, before=before: before)
        monkeypatch.setattr(sys, "argv", [f"{name}.py"])
        with monkeypatch.context() as patch:
            patch.setattr(signal, "signal", lambda *x: handled.append(x))
            patch.setattr(faulthandler, "enable", lambda *_: None)
            script.main()
        assert handled == [
            (x, script.stop_after_iteration) for x in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)[:count]
        ]


def test_a_terminal_that_goes_away():
    """The run saves, and ends as after other signals, although nobody takes what it prints any more."""
    terminal, mine = pty.openpty()

    def take_the_terminal():
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup

    run = subprocess.Popen(
        [sys.executable, ROOT / "ppo.py", "--total-timesteps", "5000000"],
        **dict(stdin=mine, stdout=mine, stderr=mine, start_new_session=True),
        preexec_fn=take_the_terminal,
    )
    os.close(mine)
    os.set_blocking(terminal, False)

    def begun():
        try:
            os.read(terminal, 65536)  # or the run would wait for a reader
        except BlockingIOError:
            pass
        return any(Path("runs").glob("*/events*"))

    wait_for(begun)
    for _ in range(20):
        begun()
        time.sleep(0.1)
    os.close(terminal)  # the kernel sends SIGHUP
    assert run.wait(timeout=120) == 128 + signal.SIGHUP
    (run_dir,) = Path("runs").iterdir()
    assert ALL["ppo"].load_checkpoint(run_dir)["iteration"] > 0


def test_a_process_without_standard_error(script, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(script, "train", lambda args: seen.append(sys.stderr.isatty()))
    assert command(script, monkeypatch=monkeypatch) == 0 and seen == [False]


class Gone(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, *_):
        raise BrokenPipeError(32, "Broken pipe")

    flush = write


def test_standard_error_that_nobody_reads(script, monkeypatch):
    """As with `2>&1 | head` or a full disk: training and evaluation go on without a progress bar."""
    monkeypatch.setattr(sys, "stderr", Gone())
    args = vars(small_args(script, env_id=quick(script)))
    monkeypatch.setattr(script, "parse_args", lambda: script.Args(**args))
    assert command(script, monkeypatch=monkeypatch) == 0
    (checkpoint,) = Path("runs").glob("*/checkpoint.pt")
    assert script.load_checkpoint(checkpoint.parent)["iteration"] == script.Args(**args).num_iterations
    args |= dict(evaluate=str(checkpoint.parent), eval_episodes=1)
    assert command(script, monkeypatch=monkeypatch) == 0


def test_closed_standard_error():
    command = f"{sys.executable} {ROOT / 'ppo.py'} --total-timesteps 2000 2>&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and (Path(done.stdout.strip()) / "checkpoint.pt").exists()


CRASHES = """
import ctypes
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

class Crashing(CartPoleEnv):
    def step(self, action):
        ctypes.string_at(0)

gym.register("Crashing-v0", Crashing)
"""


def test_a_simulator_that_crashes_shows_where():
    """Its module lies in the working folder, not beside the script."""
    Path("crashes.py").write_text(CRASHES, encoding="utf-8")
    flags = [sys.executable, ROOT / "ppo.py", "--env-id", "crashes:Crashing-v0"]
    done = subprocess.run(flags, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr and 'crashes.py", line 8 in step' in done.stderr


@pytest.mark.parametrize("name", ALL)
def test_crashes_are_shown(name, monkeypatch):
    script, enabled = ALL[name], []
    monkeypatch.setattr(script, "train", lambda args: None)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(faulthandler, "enable", enabled.append)
    script.main()
    assert enabled == [2]


# === Evaluation ==============================================================================


def test_an_evaluation_that_is_interrupted_keeps_its_episodes(script, monkeypatch, capsys):
    run_dir = script.train(small_args(script, env_id=quick(script)))
    beats, heartbeat = [], script.heartbeat

    def stop(name):
        heartbeat(name)
        beats.append(name)
        assert len(beats) <= 450, "it goes on"
        if len(beats) == 450:
            monkeypatch.setattr(script.Run, "stop_signal", signal.SIGINT)

    monkeypatch.setattr(script, "heartbeat", stop)
    flags = ["--evaluate", run_dir, "--eval-episodes", 10**6]
    capsys.readouterr()
    assert command(script, *flags, monkeypatch=monkeypatch) == 130
    out, err = capsys.readouterr()
    found = re.fullmatch(r"return \S+ \+- \S+ over (\d+) episodes\n", out)
    assert found or script is ppo_atari and out == "no episode has ended\n"
    number = int(found[1]) if found else 0
    assert f"{number} of 1000000 episodes" in err and len(beats) == 450


def test_an_evaluation_shows_how_far_it_is(script, monkeypatch, capsys):
    run_dir = script.train(small_args(script, env_id=quick(script)))
    capsys.readouterr()
    args = script.parse_args(["--evaluate", str(run_dir), "--eval-episodes", "2"])
    script.evaluate(args)
    assert "2 of 2 episodes" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ppo_continuous", "ppo_multidiscrete"])
def test_an_agent_in_a_notebook_keeps_its_statistics(name):
    script = ALL[name]
    run_dir = script.train(small_args(script, env_id="Pendulum-v1"))
    envs, agent = script.load_agent(script.parse_args(["--evaluate", str(run_dir)]))
    before = {name: x.clone() for name, x in agent.state_dict().items()}
    envs.reset(seed=1)
    for _ in range(300):
        envs.step(envs.action_space.sample())
    saved = script.load_checkpoint(run_dir)["agent"]
    assert before.keys() == saved.keys()
    for key, x in agent.state_dict().items():
        assert torch.equal(x, before[key]) and torch.equal(x, saved[key]), key


def test_an_agent_in_a_notebook_is_that_of_the_run(script):
    run_dir = script.train(small_args(script, env_id=quick(script)))
    args = script.parse_args(["--evaluate", str(run_dir)])
    loaded = script.load_agent(args, *([args.env_id] if script.SCRIPT == "impala_vtrace" else []))
    agent = loaded.agent if script.SCRIPT == "ngu_r2d2" else loaded[1]
    saved = script.load_checkpoint(run_dir)["agent"]
    assert all(torch.equal(x, saved[name]) for name, x in agent.state_dict().items())


# === Random numbers ==========================================================================


def test_all_that_is_random_is_seeded(script):
    def drawn(seed):
        script.seed_all(seed)
        return random.random(), np.random.rand(), torch.rand(()).item()

    assert drawn(1) == drawn(1)
    for a, b in ((1, 2), (1, 65), (1, 1 + 2**20)):
        assert not set(drawn(a)) & set(drawn(b))
    assert drawn(2**32 + 1)[1] == drawn(1)[1]  # NumPy's seeds have 32 bits


def test_copies_of_scripts_have_their_own_names():
    """What a copy prints and logs has the name of its file."""
    shutil.copy(ROOT / "ppo.py", "mine.py")
    assert runpy.run_path("mine.py")["SCRIPT"] == "mine"


# === Logs ====================================================================================


def test_every_tag_is_explained(script):
    """In docs/metrics.md, where N stands for numbers."""
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    flags = dict(total_timesteps=600) if script.SCRIPT == "ngu_r2d2" else {}
    flags |= dict(decoupled=True) if script.SCRIPT == "ppo_async" else {}
    run_dir = script.train(small_args(script, env_id=quick(script), **flags))
    events = EventAccumulator(str(run_dir)).Reload()
    tags = events.Tags()["scalars"]
    assert len(tags) > 5
    assert not [tag for tag in tags if f"`{re.sub('[0-9]+$', 'N', tag)}`" not in page]


def test_data_that_may_not_be_finite_are_named(script, monkeypatch):
    """Of each iteration, observations and rewards, and values where there are such, go to Run.log()."""
    given, log = [], script.Run.log
    flags = dict(total_timesteps=600) if script.SCRIPT == "ngu_r2d2" else {}
    monkeypatch.setattr(script.Run, "log", lambda run, *x, **data: given.append(data) or log(run, *x, **data))
    script.train(small_args(script, env_id=quick(script), **flags))
    expected = {"observations", "rewards", "values"}
    expected -= {"values"} if script.SCRIPT in ("ngu_r2d2", "impala_vtrace") else set()
    assert given[-1].keys() == expected
    assert all(torch.as_tensor(x).numel() > 1 for x in given[-1].values())
