"""Short runs of every script, for a pretend GPU (devices.py) and a real one (test_gpu.py)."""

import ale_py
import gymnasium as gym
import numpy as np
import torch
from conftest import OTHERS, SCRIPTS
from probes import Masked


class FirstChooses(Masked):
    """Its masks (2, 1 + 3) say of each first component if it is valid, and which second ones are then."""

    @staticmethod
    def mask(t):
        return np.array([[True, True, t % 2 == 0, True], [t % 3 == 0, True, True, False]])


gym.register("FirstChooses-v0", entry_point=FirstChooses, disable_env_checker=True)
gym.register_envs(ale_py)
breakout = gym.spec("BreakoutNoFrameskip-v4")  # an agent that presses no FIRE would play it for half an hour
short = breakout.kwargs | dict(max_num_frames_per_episode=200)
gym.register("ShortBreakout-v0", entry_point=breakout.entry_point, kwargs=short)

FEW = dict(num_envs=4, num_steps=16, num_minibatches=4, update_epochs=2)
CUT = dict(env_id="Cut-v0", bootstrap_truncated=True)
ATARI = dict(env_id="ShortBreakout-v0", num_envs=2, num_steps=4)
GROUPS = dict(num_envs=4, batch_segments=4)
NGU = dict(num_envs=4, num_steps=8, burn_in=2, unroll=8, period=8, batch_sequences=2, learning_starts=1)
NGU |= dict(replay_steps=800, log_every=1, save_replay=True, target_every=2, embedding_every=3)
# flags by run; a run's name begins with its script's
RUNS = {
    "ppo": FEW | dict(env_id="CartPole-v1", target_kl=0.1),
    "ppo-cut": FEW | CUT,
    "ppo_shared": FEW | CUT,
    "ppo_atari": ATARI | dict(target_kl=1.0, update_epochs=2),
    "ppo_atari-amp": ATARI | dict(amp=True, bootstrap_truncated=True, update_epochs=2),
    "ppo_continuous": FEW | CUT | dict(env_id="CutBox-v0"),
    "ppo_lstm": FEW | CUT,
    "ppo_lstm-atari": ATARI | dict(amp=True, update_epochs=2, num_minibatches=2),
    "ppo_multidiscrete": FEW | CUT | dict(env_id="CutBox-v0"),
    "ppo_multidiscrete-masks": FEW | dict(env_id="Masked-v0"),
    "ppo_multidiscrete-choice": FEW | dict(env_id="FirstChooses-v0"),
    "ppo_async": GROUPS | CUT | dict(num_steps=16, sample_reuse=2),
    "ppo_async-atari": ATARI | GROUPS | dict(num_steps=8, sample_reuse=2, amp=True),
    "impala_vtrace": GROUPS | CUT | dict(log_every=1),
    "impala_vtrace-atari": ATARI | GROUPS | dict(network="deep", amp=True, log_every=1),
    "impala_vtrace-lstm": GROUPS | CUT | dict(lstm=True, replay_fraction=0.5, log_every=1),
    "ngu_r2d2": NGU | dict(env_id="CartPole-v1"),
    "ngu_r2d2-retrace": NGU | dict(env_id="MiniGrid-Empty-5x5-v0", target="retrace"),
    "ngu_r2d2-atari": NGU | dict(env_id="ShortBreakout-v0", amp=True, bonus="long-run-mean"),
}
ACTORS = ("impala_vtrace", "ppo_async")  # with threads


def script_of(run):
    return (SCRIPTS | OTHERS)[run.split("-")[0]]


def make_args(run, iterations=3, **flags):
    args = script_of(run).Args(**RUNS[run] | dict(device="cuda") | flags)
    args.total_timesteps = iterations * args.batch_size
    return args


def in_turn(run):
    """The flag without which the script's threads make every run another one."""
    return dict(sync=True) if run.startswith(ACTORS) else {}


def parameters_of(run_dir):
    return torch.load(run_dir / "checkpoint.pt", map_location="cpu", weights_only=True)["agent"]
