"""Learning, on tasks with a known answer; seconds each."""

import numpy as np
import torch
from conftest import scalars, small_args

import ppo


def agent_after(script, env_id, steps, **flags):
    args = small_args(
        script, env_id=env_id, num_steps=32, total_timesteps=steps, learning_rate=2.5e-3, **flags
    )
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
