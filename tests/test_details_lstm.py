"""Details 32 to 36, of the LSTM, one test each, by number; see test_details.py for the first 22."""

import gymnasium as gym
import numpy as np
import torch
from conftest import Dim, small_args
from test_details import log_ratios, watch

import ppo_lstm


def lstm_agent(obs_shape=(2,)):
    torch.manual_seed(1)
    return ppo_lstm.Agent(Dim(obs_shape, gym.spaces.Discrete(3)))


def test_detail_32_lstm_weights_orthogonal_and_biases_zero():
    lstm = lstm_agent((1, 84, 84)).lstm
    assert (lstm.input_size, lstm.hidden_size, lstm.num_layers) == (512, 128, 1)
    eye = torch.eye(128)
    torch.testing.assert_close(lstm.weight_hh_l0.T @ lstm.weight_hh_l0, eye, atol=1e-5, rtol=0)
    torch.testing.assert_close(lstm.weight_ih_l0.T @ lstm.weight_ih_l0, torch.eye(512), atol=1e-5, rtol=0)
    assert (lstm.bias_ih_l0 == 0).all() and (lstm.bias_hh_l0 == 0).all()


def lstm_args(**flags):
    return small_args(ppo_lstm, env_id="CartPole-v1", **flags)


def test_detail_33_the_first_state_is_zero(monkeypatch):
    losses = watch(monkeypatch, ppo_lstm, "ppo_loss")
    ppo_lstm.train(lstm_args(num_minibatches=1, update_epochs=1))
    assert (losses[0][0][1]["state"] == 0).all() and losses[0][0][1]["starts"][0].all()
    assert losses[0][0][1]["state"].shape == (2, 4, 128)


def test_detail_34_the_state_is_reset_where_an_episode_starts():
    """From a start on, outputs are those of the rest alone; other environments are not touched."""
    agent, obs = lstm_agent(), torch.randn(9, 3, 2)
    starts, state = torch.zeros(9, 3, dtype=torch.bool), torch.randn(2, 3, 128)
    plain, _, _ = agent(obs, state, starts)
    starts[4, 1] = starts[0, 2] = True
    dist, value, after = agent(obs, state, starts)
    torch.testing.assert_close(dist.logprobs[:, 0], plain.logprobs[:, 0])
    torch.testing.assert_close(dist.logprobs[:4, 1], plain.logprobs[:4, 1])
    for env, first in ((1, 4), (2, 0)):
        rest = agent(obs[first:, [env]], agent.initial_state(1), starts[first:, [env]])
        torch.testing.assert_close(dist.logprobs[first:, env], rest[0].logprobs[:, 0])
        torch.testing.assert_close(value[first:, env], rest[1][:, 0])
        torch.testing.assert_close(after[:, env], rest[2][:, 0])
        assert not torch.allclose(dist.logprobs[first:, env], plain.logprobs[first:, env])
    state_now, steps = state, []  # as one step after the other
    for t in range(9):
        step, _, state_now = agent(obs[t : t + 1], state_now, starts[t : t + 1])
        steps.append(step.logprobs)
    torch.testing.assert_close(torch.cat(steps), dist.logprobs)
    torch.testing.assert_close(state_now, after)


def test_detail_34_as_few_calls_as_starts_allow(monkeypatch):
    agent, calls = lstm_agent(), []
    agent.lstm.register_forward_hook(lambda *call: calls.append(len(call[1][0])))
    starts = torch.zeros(16, 4, dtype=torch.bool)
    starts[0] = starts[5, 1] = starts[5, 2] = starts[11, 0] = True
    agent(torch.randn(16, 4, 2), agent.initial_state(4), starts)
    assert calls == [5, 6, 5]


def test_detail_35_minibatches_are_whole_environments_in_order(monkeypatch):
    losses = watch(monkeypatch, ppo_lstm, "ppo_loss")
    gaes = watch(monkeypatch, ppo_lstm, "compute_gae")
    ppo_lstm.train(lstm_args(num_minibatches=2, update_epochs=3, total_timesteps=64))
    whole = gaes[0][0][1]  # values (T, N)
    epochs = [[], [], []]
    for k, ((_, batch, *_), _) in enumerate(losses):
        assert batch["values"].shape == (16, 2)
        for column in batch["values"].T:
            (env,) = [i for i in range(4) if np.array_equal(whole[:, i], column)]
            epochs[k // 2].append(env)
    assert [sorted(envs) for envs in epochs] == [[0, 1, 2, 3]] * 3
    assert len({tuple(envs) for envs in epochs}) > 1


def test_detail_36_states_are_rebuilt_from_the_one_before_the_rollout(monkeypatch):
    """One step per rollout: each of them begins with stored log-probabilities recomputed exactly."""
    ratios, losses = log_ratios(monkeypatch, ppo_lstm), watch(monkeypatch, ppo_lstm, "ppo_loss")
    ppo_lstm.train(lstm_args(num_minibatches=1, update_epochs=1, total_timesteps=4 * 64))
    assert len(losses) == 4 and max(ratios) < 1e-5
    assert (losses[1][0][1]["state"] != 0).any()


def test_minibatches_of_whole_environments_must_divide(monkeypatch, capsys):
    from test_contract import assert_one_line_error, cli

    code = cli(ppo_lstm, "--num-envs", "6", monkeypatch=monkeypatch)
    assert_one_line_error(code, capsys, "num_minibatches must divide num_envs")
