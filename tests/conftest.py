import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as many processes as cores run tests, each with one thread

import numpy as np
import probes  # noqa: F401  registers them
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
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

# the details of ppo.py, 1 to 13, are tested on the first three; the others have that code word for word
SCRIPTS = {"ppo": ppo, "ppo_shared": ppo_shared, "ppo_atari": ppo_atari}
OTHERS = {"ppo_continuous": ppo_continuous, "ppo_lstm": ppo_lstm, "ppo_multidiscrete": ppo_multidiscrete}
OTHERS |= {"impala_vtrace": impala_vtrace, "ppo_async": ppo_async, "ngu_r2d2": ngu_r2d2}


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    """Logs of runs that a test cuts off are closed: their threads would write into a folder that is gone."""
    writers, original = [], SummaryWriter.__init__

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
    if script in (impala_vtrace, ppo_async):  # in turn, so that it repeats; a batch is an unroll of each
        small |= dict(env_id="CartPole-v1", sync=True, batch_unrolls=flags.get("num_envs", 4))
    if script is impala_vtrace:
        small |= dict(log_every=1)
    if script is ngu_r2d2:
        small |= dict(
            env_id="CartPole-v1", burn_in=2, unroll=8, period=8, batch_sequences=2, learning_starts=1
        )
        small |= dict(replay_steps=800, log_every=1, save_replay=True)
    return script.Args(**small | flags)


def games(env_id, num_envs):
    return ppo_atari.make_env(ppo_atari.Args(env_id=env_id, device="cpu"), num_envs)


def scalars(run_dir, tag):
    """[(step, value), ...] of a tag in a run folder, as TensorBoard shows it."""
    events = EventAccumulator(str(run_dir), size_guidance={"scalars": 0})
    events.Reload()
    return [(e.step, e.value) for e in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []


def random_batch(agent, size, obs_shape=(4,), dtype=torch.float32):
    """A minibatch whose log-probabilities and values are the agent's own."""
    obs = torch.from_numpy(np.random.default_rng(0).integers(0, 255, (size, *obs_shape))).to(dtype)
    obs = obs if dtype == torch.uint8 else obs / 255
    with torch.no_grad():
        dist, value = agent(obs)
        actions = dist.sample()
        batch = dict(obs=obs, actions=actions, logprobs=dist.log_prob(actions), values=value)
    return batch | dict(advantages=torch.randn(size), returns=torch.randn(size))
