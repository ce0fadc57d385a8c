"""What scripts learn on tasks with a known answer, as numbers of one seed. Bounds are in test_learning.py.

    PYTHONPATH=.:tests:tests/helpers python tests/helpers/learning.py

trains twenty seeds of each and writes tests/helpers/learning.csv in half an hour.
"""

import csv
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from conftest import scalars, small_args

import ppo
import ppo_continuous
import ppo_lstm
import ppo_multidiscrete
import ppo_shared

CSV = Path(__file__).with_suffix(".csv")


def agent_after(script, env_id, steps, **flags):
    flags = dict(num_steps=32, learning_rate=2.5e-3) | flags
    args = small_args(script, env_id=env_id, total_timesteps=steps, **flags)
    run_dir = script.train(args)
    agent = script.Agent(script.make_env(args, 1)).requires_grad_(False)
    script.load_checkpoint(run_dir, dict(agent=agent))
    return agent, run_dir


def last_mean(run_dir, tag="charts/episodic_return"):
    return float(np.mean([x for _, x in scalars(run_dir, tag)[-100:]]))


def value_of_an_observation(script, seed):
    """The reward is the sign that was seen: the value's error."""
    agent, _ = agent_after(script, "RewardByObservation-v0", 8_000, seed=seed)
    values = agent(torch.tensor([[-1.0, 1.0], [1.0, 1.0]]))[1]
    return dict(error=(values - torch.tensor([-1.0, 1.0])).abs().max().item())


def action_of_an_observation(script, seed):
    """+1 for the action that the observation names, else -1: that action's probability."""
    agent, run_dir = agent_after(script, "RewardByAction-v0", 8_000, seed=seed)
    probabilities = agent(torch.tensor([[-1.0, 1.0], [1.0, 1.0]]))[0].logprobs.exp()
    return {"probability": probabilities.diag().min().item(), "return": last_mean(run_dir)}


def delayed_reward(script, seed):
    """The reward of the first of five actions comes at the end."""
    agent, _ = agent_after(script, "DelayedReward-v0", 16_000, seed=seed)
    dist, value = agent(torch.tensor([[0.0, 1.0]]))
    return dict(probability=dist.logprobs.exp()[0, 1].item(), error=abs(value.item() - 0.99**4))


def cartpole(script, seed):
    """Two fifths of the budget, in evaluation; the task calls 475 of 500 solved."""
    run_dir = script.train(script.Args(total_timesteps=200_000, learning_rate=1e-3, seed=seed))
    args = script.load_checkpoint(run_dir)["args"]
    args.evaluate, args.eval_episodes = str(run_dir), 20
    return {"return": float(np.mean(script.evaluate(args)))}


def best_continuous_action(script, seed):
    """The reward is 1 at half of what is observed: the mean's error."""
    env_id, flags = "RewardByContinuousAction-v0", dict(num_steps=64, update_epochs=10, learning_rate=3e-3)
    agent, run_dir = agent_after(script, env_id, 30_000, seed=seed, **flags)
    envs = script.make_env(script.Args(env_id=env_id), 1)
    envs.statistics[:] = agent.statistics
    seen = torch.from_numpy(envs.obs_norm(np.array([[-1.0, 1.0], [1.0, 1.0]])))
    error = (agent(seen)[0].mean[:, 0] - torch.tensor([-0.5, 0.5])).abs().max().item()
    return {"error": error, "return": last_mean(run_dir)}


def three_components(script, seed):
    """Each names the choice that is observed: chance is 3.6 of 10."""
    flags = dict(num_envs=8, num_steps=128, update_epochs=4, normalize=False)
    return {"return": last_mean(agent_after(script, "Match-v0", 61_440, seed=seed, **flags)[1])}


def hidden_velocities(script, seed):
    """CartPole without velocities: lengths of episodes, of 500."""
    task = dict(env_id="benchmark.tasks:MaskedCartPole-v0", num_envs=16, total_timesteps=150_000)
    run_dir = script.train(script.Args(**task, seed=seed, learning_rate=2e-3, device="cpu"))
    return dict(length=last_mean(run_dir, "charts/episodic_length"))


MEASURES = [
    *(
        (task, script)
        for task in (value_of_an_observation, action_of_an_observation)
        for script in (ppo, ppo_shared)
    ),
    *((delayed_reward, script) for script in (ppo, ppo_shared)),
    (cartpole, ppo),
    (best_continuous_action, ppo_continuous),
    (three_components, ppo_multidiscrete),
    (hidden_velocities, ppo_lstm),
    (hidden_velocities, ppo),
]


def record():
    rows, started = [("task", "script", "seed", "quantity", "value")], os.getcwd()
    for task, script in MEASURES:
        for seed in range(1, 21):
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)
                found = task(script, seed)
                os.chdir(started)
            rows += [(task.__name__, script.SCRIPT, seed, name, f"{x:.4g}") for name, x in found.items()]
            print(*rows[-1], file=sys.stderr)
    with open(CSV, "w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    record()
