import os
import re

# Three processes run tests on two cores, each with one thread, as a fifth of the time two would wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import time

import gymnasium as gym
import numpy as np
import probes  # noqa: F401  registers them
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from torch.utils.tensorboard import SummaryWriter

import impala_vtrace
import ngu_r2d2
import ppo
import ppo_async
import ppo_atari
import ppo_continuous
import ppo_lstm
import ppo_multidiscrete
import ppo_shared

SCRIPTS = {"ppo": ppo, "ppo_shared": ppo_shared, "ppo_atari": ppo_atari, "ppo_continuous": ppo_continuous}
SCRIPTS |= {"ppo_lstm": ppo_lstm, "ppo_multidiscrete": ppo_multidiscrete}
# these have no details of the blog
OTHERS = {"impala_vtrace": impala_vtrace, "ppo_async": ppo_async, "ngu_r2d2": ngu_r2d2}


# Beginnings of the names of tests that take more than about two seconds.
SLOW = """
test_async.py::test_asynchronous test_async.py::test_in_turn test_async.py::test_mistakes
test_atari_envs.py::test_frame_by_frame test_atari_envs.py::test_frames_that
test_benchmark.py::test_a_killed test_benchmark.py::test_a_row_names_build
test_benchmark.py::test_a_run_of test_benchmark.py::test_a_run_whose
test_benchmark.py::test_a_run_without test_benchmark.py::test_a_stopped test_benchmark.py::test_a_worse
test_benchmark.py::test_a_wrong test_benchmark.py::test_disco test_benchmark.py::test_help
test_benchmark.py::test_mistakes_of_compare test_benchmark.py::test_no_tool test_benchmark.py::test_other
test_benchmark.py::test_rows test_benchmark.py::test_run test_benchmark.py::test_same_finds
test_benchmark.py::test_staleness test_benchmark.py::test_stop test_benchmark.py::test_the_loop
test_benchmark.py::test_what_an
test_command_line.py::test_a_sim test_command_line.py::test_a_terminal test_command_line.py::test_closed
test_contract.py::test_a_run_folder test_contract.py::test_a_second test_contract.py::test_after
test_contract.py::test_an_iteration test_contract.py::test_atari_evaluation test_contract.py::test_camera
test_contract.py::test_checkpoint test_contract.py::test_compile test_contract.py::test_copy
test_contract.py::test_evaluation test_contract.py::test_flags_change test_contract.py::test_heart
test_contract.py::test_killed test_contract.py::test_numbers test_contract.py::test_randomness
test_contract.py::test_same_seed test_contract.py::test_signal test_contract.py::test_space
test_contract.py::test_stopped test_contract.py::test_tracking test_contract.py::test_video
test_decoupled.py test_details.py::test_detail_14 test_details_continuous.py::test_detail_3
test_details_lstm.py::test_detail_3 test_details_multidiscrete.py::test_detail_3 test_devices.py
test_evaluation.py::test_each_game test_evaluation.py::test_evaluation_on
test_evaluation.py::test_training_on test_faults.py test_flags.py::test_flag[ test_gpu.py
test_impala.py::test_asynchronous test_impala.py::test_atari test_impala.py::test_mistakes
test_impala.py::test_three_games test_learning.py::test_task_is_learned
test_lockstep.py::test_lockstep[ppo_atari test_lockstep.py::test_lockstep[ppo_lstm-game test_mutants.py
test_ngu.py::test_a_full_replay test_ngu.py::test_every test_ngu.py::test_images test_ngu.py::test_table
test_on_ray.py test_processes.py::test_auxiliary test_processes.py::test_both test_processes.py::test_env
test_processes.py::test_first test_processes.py::test_impala test_processes.py::test_learners
test_processes.py::test_never test_processes.py::test_no_process test_processes.py::test_normal
test_processes.py::test_processes_draw test_processes.py::test_processes_log test_processes.py::test_stat
test_processes.py::test_threads test_processes.py::test_torchrun test_processes.py::test_two
test_readme.py::test_commands test_reference_decoupled.py test_reference_ngu.py test_report.py
test_research.py test_speed.py test_verdict.py test_watch.py
""".split()


LONGEST = """
test_readme.py test_speed.py test_devices.py test_learning.py test_benchmark.py test_processes.py
""".split()


def pytest_collection_modifyitems(items):
    """The longest tests come first, so that no process waits for one of them at the end."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    for item in items:
        if item.nodeid.removeprefix("tests/").startswith(tuple(SLOW)):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def scripts_stay_as_they_are():
    """A test that leaves a part of a script replaced fails, not those that run after it in its process."""
    scripts = [*SCRIPTS.values(), *OTHERS.values()]
    before = [dict(vars(script)) for script in scripts]
    yield
    for script, parts in zip(scripts, before, strict=True):
        replaced = [name for name, part in vars(script).items() if parts.get(name) is not part]
        replaced = [name for name in replaced if not name.startswith("__")]  # torch.compile's own
        vars(script).update(parts)
        assert not replaced, f"the test left {replaced} of {script.__name__} replaced"


@pytest.fixture(autouse=True)
def in_empty_folder(scripts_stay_as_they_are, tmp_path, monkeypatch):
    """Logs of runs that a test cuts off are closed: their threads would write into a folder that is gone.

    Event files of one second are read in the order of their numbers as text, so all have four digits.
    """
    writers, original = [], SummaryWriter.__init__
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(1000))

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        writers.append(self)

    monkeypatch.setattr(SummaryWriter, "__init__", init)
    monkeypatch.chdir(tmp_path)
    yield
    for writer in writers:
        writer.close()


@pytest.fixture(params=SCRIPTS)
def script(request):
    return SCRIPTS[request.param]


@pytest.fixture(params=["ppo", "ppo_shared"])
def vector_script(request):
    return SCRIPTS[request.param]


def small_args(script, **flags):
    """Arguments for a run of seconds."""
    small = dict(num_envs=2 if script is ppo_atari else 4, num_steps=16, total_timesteps=64, device="cpu")
    if script in (ppo_continuous, ppo_multidiscrete):
        small |= dict(num_minibatches=4, update_epochs=2)
    if script in (impala_vtrace, ppo_async):  # in turn, so that it repeats; a batch is a segment of each
        small |= dict(env_id="CartPole-v1", sync=True, batch_segments=flags.get("num_envs", 4))
    if script is impala_vtrace:
        small |= dict(log_every=1)
    if script is ngu_r2d2:
        small |= dict(
            env_id="CartPole-v1", burn_in=2, unroll=8, period=8, batch_sequences=2, learning_starts=1
        )
        small |= dict(replay_steps=800, log_every=1, save_replay=True)
    return script.Args(**small | flags)


class AlignedGames(gym.vector.VectorEnv):
    """Stands in for AtariEnvs: deterministic, and all episodes end with a rollout of 16 steps.

    Those of CutGames are cut after 4 steps, with a reward of 1 at every step; the last frames are marked.
    """

    length, is_cut, terminates = 16, False, False

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.single_observation_space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
        self.single_action_space = gym.spaces.Discrete(4)

    def observe(self):
        return np.full((self.num_envs, 4, 84, 84), self.t if self.is_cut else 10 * self.t, np.uint8)

    def reset(self, *, seed=None, options=None):
        probes.Aligned.seeds.append(seed)
        self.t = 0
        return self.observe(), {}

    def step(self, actions):
        self.actions = actions
        return self.recv()

    def recv(self):
        self.t = (self.t + 1) % self.length
        over = np.full(self.num_envs, self.t == 0)
        episode, infos = dict(r=np.ones(self.num_envs), l=np.ones(self.num_envs)), {}
        if self.t == 0:
            last = np.full((self.num_envs, 4, 84, 84), 100, np.uint8)
            infos = {"final_obs": last, "final_info": {"episode": episode, "_episode": over}}
        if self.is_cut:
            return self.observe(), np.ones(self.num_envs), over & self.terminates, over, infos
        return self.observe(), self.actions / 4, over, over & False, infos


class CutGames(AlignedGames):
    length, is_cut = 4, True


def aligned_args(script, monkeypatch, **flags):
    """Arguments of 8 iterations on environments that repeat, with episodes as long as a rollout."""
    if script is ppo_atari:
        monkeypatch.setattr(
            ppo_atari, "make_env", lambda args, num_envs, video_dir=None: AlignedGames(num_envs)
        )
        flags = dict(update_epochs=2) | flags
    else:
        ids = {ppo_continuous: "AlignedBox-v0", ppo_multidiscrete: "AlignedMulti-v0"}
        minibatches = {} if script in (impala_vtrace, ngu_r2d2) else dict(num_minibatches=2)
        flags = dict(env_id=ids.get(script, "Aligned-v0")) | minibatches | flags
    if script is ngu_r2d2:  # policies and the memory of a new episode are drawn and made anew when resumed
        flags = dict(num_policies=1, train_embedding=False) | flags
    return small_args(script, **dict(num_envs=2, total_timesteps=256) | flags)


def games(env_id, num_envs):
    return ppo_atari.make_env(ppo_atari.Args(env_id=env_id, device="cpu"), num_envs)


def scalars(run_dir, tag):
    """[(step, value), ...] of a tag in a run folder, as TensorBoard shows it."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    events.Reload()
    return [(e.step, e.value) for e in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []


def steps_of(run_dir):
    """Steps at which the numbers of an iteration were logged."""
    points = scalars(run_dir, "charts/learning_rate") or scalars(run_dir, "replay/sequences")
    return [step for step, _ in points]


class Dim:
    """As much of an environment as the agents ask for."""

    def __init__(self, obs_shape, action_space):
        self.single_observation_space = gym.spaces.Box(-1, 1, obs_shape, np.float32)
        self.single_action_space = action_space
        self.statistics = np.zeros(0)


def random_batch(agent, size, obs_shape=(4,), dtype=torch.float32, **more):
    """A minibatch whose log-probabilities and values are the agent's own.

    more: what the agent takes beside observations, such as masks; with a state, steps of one environment.
    """
    if "state" in more:
        obs_shape = (1, *obs_shape)
    obs = torch.from_numpy(np.random.default_rng(0).integers(0, 255, (size, *obs_shape))).to(dtype)
    obs = obs if dtype == torch.uint8 else obs / 255
    with torch.no_grad():
        dist, value, *_ = agent(obs, **{{"masks": "mask"}.get(k, k): x for k, x in more.items()})
        actions = dist.sample()
        batch = dict(obs=obs, actions=actions, logprobs=dist.log_prob(actions), values=value, **more)
    return batch | dict(advantages=torch.randn_like(value), returns=torch.randn_like(value))


def one_line(err):
    """An error that stands in one line, or in the box that tyro draws around a wrong value; else None."""
    if re.fullmatch(r"\w+\.py: error: [^\n]+\n", err):
        return err
    words = " ".join(re.sub("[─│╭╮╰╯]|-{9,}", " ", err).split())
    is_boxed = words.startswith("Value error Error parsing Args: ") and words.count("Error parsing") == 1
    return words if is_boxed and "Traceback" not in err else None


def wait_for(is_so):
    deadline = time.time() + 300
    while not is_so():
        assert time.time() < deadline
        time.sleep(0.02)
