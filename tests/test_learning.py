"""Learning, on tasks with a known answer; seconds each."""

import numpy as np
import torch
from conftest import scalars, small_args

import ppo
import ppo_continuous
import ppo_lstm
import ppo_multidiscrete


def agent_after(script, env_id, steps, **flags):
    flags = dict(num_steps=32, learning_rate=2.5e-3) | flags
    args = small_args(script, env_id=env_id, total_timesteps=steps, **flags)
    run_dir = script.train(args)
    agent = script.Agent(script.make_env(args, 1))
    agent.load_state_dict(script.load_checkpoint(run_dir)["agent"])
    return agent, run_dir


@torch.no_grad()
def test_value_learns_the_reward_of_an_observation(vector_script):
    agent, _ = agent_after(vector_script, "RewardByObservation-v0", 8_000)
    values = agent(torch.tensor([[-1.0, 1.0], [1.0, 1.0]]))[1]
    np.testing.assert_allclose(values, [-1, 1], atol=0.1)


@torch.no_grad()
def test_policy_learns_the_action_of_an_observation(vector_script):
    agent, run_dir = agent_after(vector_script, "RewardByAction-v0", 8_000)
    probabilities = agent(torch.tensor([[-1.0, 1.0], [1.0, 1.0]]))[0].logprobs.exp()
    assert probabilities[0, 0] > 0.9 and probabilities[1, 1] > 0.9
    assert np.mean([r for _, r in scalars(run_dir, "charts/episodic_return")[-100:]]) > 0.8


@torch.no_grad()
def test_policy_learns_from_a_delayed_reward(vector_script):
    agent, _ = agent_after(vector_script, "DelayedReward-v0", 16_000)
    assert agent(torch.tensor([[0.0, 1.0]]))[0].logprobs.exp()[0, 1] > 0.9
    value = agent(torch.tensor([[0.0, 1.0]]))[1]
    np.testing.assert_allclose(value, 0.99**4, atol=0.1)


def test_cartpole():
    """475 of 500, the task's own threshold, in evaluation: three seeds, two fifths of the budget."""
    returns = []
    for seed in (1, 2, 3):
        run_dir = ppo.train(ppo.Args(total_timesteps=200_000, learning_rate=1e-3, seed=seed))
        args = ppo.load_checkpoint(run_dir)["args"]
        args.evaluate, args.eval_episodes = str(run_dir), 20
        returns += ppo.evaluate(args)
    assert np.mean(returns) >= 475


@torch.no_grad()
def test_mean_learns_the_best_continuous_action():
    """The reward is 1 at half of what is observed."""
    flags = dict(num_steps=64, update_epochs=10, learning_rate=3e-3)
    agent, run_dir = agent_after(ppo_continuous, "RewardByContinuousAction-v0", 30_000, **flags)
    envs = ppo_continuous.make_env(ppo_continuous.Args(env_id="RewardByContinuousAction-v0"), 1)
    envs.statistics[:] = agent.statistics
    seen = torch.from_numpy(envs.obs_norm(np.array([[-1.0, 1.0], [1.0, 1.0]])))
    np.testing.assert_allclose(agent(seen)[0].mean[:, 0], [-0.5, 0.5], atol=0.1)
    assert np.mean([r for _, r in scalars(run_dir, "charts/episodic_return")[-100:]]) > 0.8


def test_every_component_learns_its_choice():
    """Three components, to be named as observed: chance is 3.6 of 10, the optimum 10."""
    flags = dict(num_envs=8, num_steps=128, update_epochs=4, normalize=False)
    _, run_dir = agent_after(ppo_multidiscrete, "Match-v0", 61_440, **flags)
    assert np.mean([r for _, r in scalars(run_dir, "charts/episodic_return")[-100:]]) > 9.5


def test_memory_is_needed_and_used():
    """CartPole with hidden velocities: at least 400 of 500 steps with the LSTM, below 100 without."""
    task = dict(env_id="benchmark.tasks:MaskedCartPole-v0", num_envs=16, total_timesteps=150_000)
    lengths = {}
    for script in (ppo_lstm, ppo):
        run_dir = script.train(script.Args(**task, learning_rate=2e-3, device="cpu"))
        lengths[script] = np.mean([n for _, n in scalars(run_dir, "charts/episodic_length")[-100:]])
    assert lengths[ppo_lstm] >= 400 and lengths[ppo] < 100
