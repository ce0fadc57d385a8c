"""How runs of the decoupled scripts end: whatever happens in an actor, soon, with its cause, and saved."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import probes
import pytest
import torch
from conftest import scalars, small_args, wait_for
from forks import run
from test_async import acting

import impala_vtrace
import ppo_async

ROOT = Path(__file__).parent.parent


@pytest.fixture(params=[impala_vtrace, ppo_async], ids=lambda script: script.SCRIPT)
def script(request):
    return request.param


def small(script, **flags):
    """An iteration of 64 steps, a segment of each of 4 environments."""
    return small_args(script, **dict(total_timesteps=64 * 10, sync=False) | flags)


def actors_alive():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("actor")]


def command(script, *flags):
    small = ["--num-steps", 20, "--num-envs", 4, "--batch-segments", 4, "--device", "cpu", "--env-id", *flags]
    return [sys.executable, ROOT / f"{script.SCRIPT}.py", *map(str, small)]


def ended(script, *flags, code, words, **kwargs):
    """Run to the end, with this exit code and words on stderr."""
    environment = os.environ | dict(PYTHONPATH=f"{ROOT}:{ROOT / 'tests/helpers'}", OMP_NUM_THREADS="1")
    done = subprocess.run(
        command(script, *flags), capture_output=True, text=True, timeout=600, env=environment, **kwargs
    )
    assert done.returncode == code and re.search(words, done.stderr), (done.returncode, done.stderr)
    return done


def test_environment_that_raises_ends_the_run_with_its_own_traceback(script):
    with pytest.raises(ZeroDivisionError, match="the environment's own mistake") as error:
        script.train(small(script, env_id="Crash-v0"))
    assert any("probes.py" in str(entry.path) for entry in error.traceback)
    assert not actors_alive()
    ended(script, "probes:Crash-v0", code=1, words="(?s)probes.py.*the environment's own mistake")


@pytest.mark.parametrize("flags", [["--no-sync"], ["--sync"], ["--num-actors", 2, "--batch-segments", 1]])
def test_environment_that_hangs_is_shown_and_ends_the_run(script, flags):
    """Though another actor goes on, with which batches of a single segment are complete."""
    flags = ("probes:Hang-v0", "--stall-seconds", 3, "--save-every", 1, *flags)
    done = run(script, *command(script, *flags)[2:])  # forked, as it ends at once, without Python's own end
    words = r'(?s)--stall-seconds 3: nothing .*probes.py", line \d+ in reward'
    assert done.code == 1 and re.search(words, done.err), done
    (run_dir,) = Path("runs").iterdir()
    assert torch.load(run_dir / "checkpoint.pt", weights_only=True)["iteration"] > 0


def test_an_actor_that_waits_for_room_is_no_stall(script, monkeypatch):
    """It is watched only while it plays: with several actors, a turn takes several iterations."""
    waiting, playing = [], []
    acquire, play = threading.Semaphore.acquire, script.play

    def noted(room, *args, **flags):
        if threading.current_thread().name.startswith("actor"):
            waiting.append(threading.current_thread().name in script.HEARTBEATS)
        return acquire(room, *args, **flags)

    def played(*args):
        playing.append(threading.current_thread().name in script.HEARTBEATS)
        return play(*args)

    monkeypatch.setattr(threading.Semaphore, "acquire", noted)
    monkeypatch.setattr(script, "play", played)
    script.train(small(script, num_actors=2))
    assert len(waiting) > 10 and not any(waiting)
    assert len(playing) > 5 and all(playing)


def test_the_end_waits_for_a_step_and_not_for_a_segment(script):
    """When the learner has saved its last checkpoint, the actors are at segments of 2 s that nobody takes."""
    run_dir = script.train(small(script, env_id="Slow-v0", num_envs=2, num_steps=10, total_timesteps=20 * 2))
    assert time.time() - (run_dir / "checkpoint.pt").stat().st_mtime < 1
    assert not actors_alive()


def test_actor_that_is_killed_ends_the_run(script, monkeypatch):
    """Whatever ends a thread, SystemExit too."""
    with pytest.raises(SystemExit, match="from within"):
        script.train(small(script, env_id="Exit-v0"))
    assert not actors_alive()


def test_actor_that_cannot_begin_ends_the_run(script, monkeypatch):
    """What its thread does before the first step may fail, too: the learner would wait for ever."""

    def fails(_):
        if threading.current_thread().name.startswith("actor"):
            raise RuntimeError("no device for this thread")

    monkeypatch.setattr(torch, "set_num_threads", fails)
    with pytest.raises(RuntimeError, match="no device for this thread"):
        script.train(small(script))
    assert not actors_alive()


def test_actor_whose_thread_cannot_be_started_ends_the_run(script, monkeypatch):
    """A limit on threads stops the second: the first, which waits for room, must not keep the process."""
    start = threading.Thread.start

    def limited_start(thread):
        if thread.name == "actor 1":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited_start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        script.train(small(script, num_actors=2))
    assert not actors_alive()


def test_full_disk_is_named_and_leaves_the_last_checkpoint(script, monkeypatch):
    original, saves = torch.save, []

    def save(state, path):
        saves.append(path)
        if len(saves) == 3:
            raise OSError(28, "No space left on device", str(path))
        original(state, path)

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(OSError, match="No space left"):
        script.train(small(script, save_every=2))
    (run_dir,) = Path("runs").iterdir()
    assert torch.load(run_dir / "checkpoint.pt", weights_only=True)["iteration"] == 4
    assert not actors_alive()


def test_sigterm_saves_and_goes_on_from_there(script):
    run = subprocess.Popen(
        command(script, "CartPole-v1"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    run_dir = Path(run.stdout.readline().strip())
    wait_for(lambda: list(run_dir.glob("events*")))
    time.sleep(1)
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=600)
    assert run.returncode == 143 and "Traceback" not in err, err
    iteration = torch.load(run_dir / "checkpoint.pt", weights_only=True)["iteration"]
    assert iteration > 0
    args = script.load_checkpoint(run_dir)["args"]
    args.resume, args.total_timesteps = str(run_dir), (iteration + 20) * args.batch_size
    script.train(args)
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)
    assert state["iteration"] == iteration + 20
    tag = "charts/policy_lag" if script is impala_vtrace else "staleness/mean"
    lags = [x for step, x in scalars(run_dir, tag) if step > iteration * args.batch_size]
    assert lags and max(lags) < 5  # the actors go on from the learner's version


def test_non_finite_loss_stops_the_run(script):
    words = r"step \d+: not finite: .*, and rewards.*; last good checkpoint: /.*/runs/.*iteration"
    with pytest.raises(SystemExit, match=words):
        script.train(small(script, env_id="NanReward-v0", total_timesteps=32 * 40, save_every=1))


def test_published_agent_is_a_copy(script):
    """What the learner does to its parameters afterwards does not reach the actors."""
    args = small(script, sync=True)
    _, agent, exchange = acting(script, args)
    script.publish(agent, 3, exchange, args)
    copy, version = exchange.published
    before = [parameter.clone() for parameter in copy.parameters()]
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(1)
    assert version == 3 and len(before) > 3
    assert all(torch.equal(a, b) for a, b in zip(before, copy.parameters(), strict=True))


def test_defaults_are_hardly_behind_the_learner(script, capsys):
    """On-policy in turn, else one version; IMPALA's batches take one of two groups, so one version more."""
    tag = "charts/policy_lag_max" if script is impala_vtrace else "staleness/max"
    later = int(script is impala_vtrace)
    for sync, most in ((True, later), (False, 1 + later)):
        args = script.Args(env_id="CartPole-v1", num_steps=8, sync=sync, device="cpu")
        args.total_timesteps = args.batch_size * 20
        run_dir = script.train(args)
        lags = [x for _, x in scalars(run_dir, tag)]
        assert lags and max(lags) <= most
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("num_actors", [1, 2, 3])
def test_no_actor_runs_ahead_of_the_others(script, num_actors, monkeypatch, capsys):
    """One that is done first, while the learner is slow, must not take the room of another's second group."""
    publish = script.publish

    def slow(*inputs):
        time.sleep(0.02)
        publish(*inputs)

    monkeypatch.setattr(script, "publish", slow)
    args = small(script, num_actors=num_actors, num_envs=4 * num_actors, batch_segments=4 * num_actors)
    args.total_timesteps = args.batch_size * 40
    run_dir = script.train(args)
    lags = scalars(run_dir, "charts/policy_lag_max" if script is impala_vtrace else "staleness/max")
    assert {lag for _, lag in lags} == {0, 1} and "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags,words",
    [
        (
            dict(num_envs=12, num_actors=3, batch_segments=2, sync=False),
            "about 6 versions behind the",
        ),
        (dict(num_envs=12, num_actors=3, batch_segments=4, sync=False), "about 3 versions behind the"),
        (dict(num_envs=4, batch_segments=2, sync=False), "about 2 versions behind the"),
        (dict(num_envs=4, batch_segments=6, sync=False), "about 2 versions behind the"),
        (dict(num_envs=4, batch_segments=2, sync=True), "about 1 versions behind the"),
    ],
)
def test_geometry_with_more_lag_is_told_once(script, flags, words, capsys):
    args = small(script, **flags)
    args.total_timesteps = args.batch_size * 5
    run_dir = script.train(args)
    err = capsys.readouterr().err
    if script is impala_vtrace and not re.search(
        "[36] versions", words
    ):  # one more than need be: as by default
        assert "warning" not in err
    else:
        assert err.count("warning") == 1 and words in err and f"the {args.num_envs} environments" in err
    if args.sync:  # the second block of a pair waits for a batch
        lags = scalars(run_dir, "charts/policy_lag_max" if script is impala_vtrace else "staleness/max")
        assert [x for _, x in lags] == [0, 1, 0, 1, 0]


def group_of(script, env_id):
    """Two environments that have begun."""
    (group, _), *_ = acting(script, small(script, env_id=env_id, num_envs=4), seed=3)
    return group


def test_length_of_a_game_is_in_frames_and_of_the_rest_in_steps(script):
    """CleanRL counts every frame of the emulator, those of no-ops too: as ppo_atari.py does."""
    group = group_of(script, "BreakoutNoFrameskip-v4")
    frames, lengths, expected, rng = np.zeros(2), [], [], np.random.default_rng(0)
    info, receive = {}, group.envs.recv
    group.envs.recv = lambda: (step := receive(), info.update(step[-1]))[0]
    for _ in range(800):
        group.send(rng.integers(4, size=2))
        frames[:] = info.get("episode_frame_number", 0)
        _, episodes = group.receive()
        ended = info["episode_frame_number"] < frames
        lengths += [episode["charts/episodic_length"] for episode in episodes]
        expected += frames[ended].tolist()  # and the 1 to 4 frames of the last action
    assert len(lengths) == len(expected) >= 4
    assert all(1 <= ours - before <= 4 for ours, before in zip(lengths, expected, strict=True))
    group = group_of(script, "Count-v0")
    episodes = []
    for _ in range(10):
        group.send(np.zeros(2, int))
        episodes += group.receive()[1]
    assert [episode["charts/episodic_length"] for episode in episodes] == [5] * 4


@pytest.mark.parametrize("shape", [(4,), (40, 40, 3)])
def test_observations_have_the_type_of_their_space(script, shape):
    """Whatever type an environment answers in: the last ones take the places of others in a batch."""

    class Wide(probes.Cut):
        observation_space = gym.spaces.Box(0, 255, shape, np.uint8)

        def reset(self, **kwargs):
            super().reset(**kwargs)
            return np.zeros(shape), {}

        def step(self, action):
            _, *rest = super().step(action)
            return np.full(shape, float(self.t)), *rest

    gym.register("Wide-v0", entry_point=Wide, disable_env_checker=True)
    args = small(script, env_id="Wide-v0", sync=True, bootstrap_truncated=True, num_steps=8)
    groups, _, exchange = acting(script, args)
    script.play(groups, exchange, args)
    found = [obs for obs in exchange.queue.get().data["final_obs"].flat if obs is not None]
    assert len(found) == 4 and all(obs.dtype == np.uint8 and (obs == 4).all() for obs in found)
