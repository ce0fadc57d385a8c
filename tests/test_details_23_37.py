"""Details 23 to 37, and auxiliary 4, one test each, by number; see test_details.py for the others."""

import math

import gymnasium as gym
import numpy as np
import probes
import pytest
import torch
from conftest import small_args
from scipy import stats
from test_details import log_ratios, watch

import ppo_continuous
import ppo_lstm
import ppo_multidiscrete


class Dim:
    """As much of an environment as the agents ask for."""

    def __init__(self, obs_shape, action_space):
        self.single_observation_space = gym.spaces.Box(-1, 1, obs_shape, np.float32)
        self.single_action_space = action_space
        self.statistics = np.zeros(0)


def continuous_agent(obs_dim=3, act_dim=2):
    torch.manual_seed(1)
    return ppo_continuous.Agent(Dim((obs_dim,), gym.spaces.Box(-1, 1, (act_dim,), np.float32)))


def test_detail_23_normal_distribution():
    torch.manual_seed(0)
    mean, log_std, action = torch.randn(5, 3), torch.tensor([-1.0, 0.0, 0.5]), torch.randn(5, 3)
    dist = ppo_continuous.Normal(mean, log_std)
    expected = stats.norm(mean, log_std.exp()).logpdf(action).sum(-1)
    np.testing.assert_allclose(dist.log_prob(action), expected, rtol=1e-5)
    samples = ppo_continuous.Normal(mean.expand(20_000, 5, 3), log_std).sample()
    np.testing.assert_allclose(samples.mean(0), mean, atol=0.05)
    np.testing.assert_allclose(samples.std(0), log_std.exp().expand(5, 3), rtol=0.03)


def test_detail_24_log_std_does_not_depend_on_the_state(monkeypatch):
    agent = continuous_agent()
    assert (agent(torch.randn(7, 3))[0].log_std == 0).all()
    made = watch(monkeypatch, ppo_continuous, "Agent")
    ppo_continuous.train(small_args(ppo_continuous, learning_rate=1e-2, ent_coef=0.01))
    ((_, agent),) = made
    assert (agent.log_std != 0).any()  # it learns
    dist, _ = agent(torch.randn(7, 17))
    assert dist.log_std is agent.log_std and dist.log_std.shape == (6,)


def test_detail_25_independent_components():
    mean, log_std, action = torch.tensor([[0.3, -0.2]]), torch.tensor([0.1, -0.4]), torch.tensor([[1.0, 0.5]])
    both = ppo_continuous.Normal(mean, log_std).log_prob(action)
    each = [ppo_continuous.Normal(mean[:, [i]], log_std[[i]]).log_prob(action[:, [i]]) for i in (0, 1)]
    assert both.shape == (1,)
    torch.testing.assert_close(both, sum(each))
    entropy = continuous_agent(act_dim=6)(torch.randn(4, 3))[0].entropy()
    torch.testing.assert_close(entropy, torch.tensor(6 * 1.4189385))


def test_detail_26_separate_networks():
    agent = continuous_agent(17, 6)
    assert sum(p.numel() for p in agent.parameters()) == (17 * 64 + 64 + 64 * 64 + 64) * 2 + 65 * 7 + 6
    assert sum(isinstance(layer, torch.nn.Tanh) for layer in agent.modules()) == 4
    obs = torch.randn(4, 17)
    mean = agent(obs)[0].mean
    with torch.no_grad():
        for parameter in agent.critic.parameters():
            parameter.add_(1)
    assert torch.equal(mean, agent(obs)[0].mean)


def test_detail_27_the_environment_takes_clipped_actions_and_the_update_those_drawn(monkeypatch):
    losses = watch(monkeypatch, ppo_continuous, "ppo_loss")
    ratios = log_ratios(monkeypatch, ppo_continuous)
    probes.BoxActions.taken = []
    ppo_continuous.train(
        small_args(ppo_continuous, env_id="BoxActions-v0", num_minibatches=1, update_epochs=1)
    )
    drawn = torch.cat([call[0][1]["actions"] for call in losses])
    taken = np.stack(probes.BoxActions.taken)
    assert drawn.abs().max() > 1 and np.abs(taken).max() == 1
    assert sorted(drawn.clamp(-1, 1).flatten().tolist()) == sorted(taken.flatten().tolist())
    assert ratios[0] < 1e-5


class Scripted(gym.vector.VectorEnv):
    """Plays back observations (T + 1, N, ...), rewards and ends (T, N)."""

    def __init__(self, obs, rewards, terminated=None, truncated=None):
        self.obs, self.rewards = np.asarray(obs, np.float64), np.asarray(rewards, np.float64)
        self.num_envs = self.rewards.shape[1]
        none = np.zeros(self.rewards.shape, bool)
        self.terminated, self.truncated = (
            none if x is None else np.array(x) for x in (terminated, truncated)
        )
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, self.obs.shape[2:])
        self.single_action_space = gym.spaces.Box(-1, 1, (1,))

    def reset(self, **kwargs):
        self.t = 0
        return self.obs[0], {}

    def step(self, actions):
        self.t += 1
        t = self.t - 1
        info = dict(final_obs=self.obs[self.t]) if (self.terminated[t] | self.truncated[t]).any() else {}
        return self.obs[self.t], self.rewards[t], self.terminated[t], self.truncated[t], info


def played(envs, gamma=0.99, frozen=False):
    envs = ppo_continuous.NormalizedEnvs(envs, gamma, frozen)
    obs, rewards = [envs.reset()[0]], []
    for _ in range(len(envs.env.rewards)):
        next_obs, reward, *_ = envs.step(np.zeros((envs.num_envs, 1)))
        obs.append(next_obs)
        rewards.append(reward)
    return envs, np.array(obs), np.array(rewards)


def test_detail_28_observations_normalized_by_statistics_of_all_environments():
    rng = np.random.default_rng(0)
    raw = (
        rng.normal(size=(501, 3, 2)) * (3, 0.1) + rng.normal(size=(1, 3, 2)) * 5
    )  # environments differ in mean
    envs, obs, _ = played(Scripted(raw, np.zeros((500, 3))))
    flat = raw.reshape(-1, 2)  # the observation of reset() counts, too
    np.testing.assert_allclose(envs.obs_norm.mean, flat.mean(0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(envs.obs_norm.var, flat.var(0), rtol=1e-3)
    assert (abs(envs.obs_norm.count - 1503) < 0.01).all()
    expected = (raw[-1] - envs.obs_norm.mean) / np.sqrt(envs.obs_norm.var + 1e-8)
    np.testing.assert_allclose(obs[-1], expected)
    first = raw[0]  # normalized with itself counted in: mean of the three, weighted against a prior of 1e-4
    np.testing.assert_allclose(obs[0], (first - first.mean(0)) / first.std(0), atol=1e-3)


def test_detail_29_observations_clipped_to_10():
    raw = np.zeros((1001, 1, 2))
    raw[:, 0, 0] = np.random.default_rng(0).normal(size=1001)
    raw[-1] = 1e6, 0
    _, obs, _ = played(Scripted(raw, np.zeros((1000, 1))))
    assert obs[-1, 0, 0] == 10 and np.abs(obs[:-1]).max() < 10


def test_detail_30_rewards_scaled_by_the_deviation_of_discounted_returns():
    """gamma 0.5, an episode of three steps: returns 1, 1.5, 1.75, then 1 again, as worked by hand."""
    ends = np.array([[0], [0], [1], [0], [0]], bool)
    for kind in ("terminated", "truncated"):
        envs, _, rewards = played(Scripted(np.zeros((6, 1, 1)), np.ones((5, 1)), **{kind: ends}), gamma=0.5)
        returns, mean, var, count = [1, 1.5, 1.75, 1, 1.5], 0.0, 1.0, 1e-4
        for k, value in enumerate(returns):  # openai/baselines's update, one number at a time
            delta, total = value - mean, count + 1
            mean, var = mean + delta / total, (var * count + delta**2 * count / total) / total
            count = total
            expected = min(10, 1 / math.sqrt(var + 1e-8))
            np.testing.assert_allclose(rewards[k, 0], expected, rtol=1e-6)
        np.testing.assert_allclose(envs.norm.mean[-1], mean)
        np.testing.assert_allclose(envs.returns, 1.5)


def test_environments_that_offer_no_mask_call_everything_valid(monkeypatch):
    """Beside others that offer one: gymnasium fills theirs with zeros."""
    probes.MaskedLater.episodes = 0
    losses = watch(monkeypatch, ppo_multidiscrete, "ppo_loss")
    flags = dict(env_id="MaskedLater-v0", normalize=False, num_envs=4, num_minibatches=1, update_epochs=1)
    ppo_multidiscrete.train(small_args(ppo_multidiscrete, num_steps=64, total_timesteps=256, **flags))
    masks, first = (losses[0][0][1][name] for name in ("masks", "obs"))
    starts = first[:, 0] == 0
    assert 20 < starts.sum() < 200 and masks[starts].all() and not masks[~starts].all(1).any()


def test_detail_31_rewards_clipped_to_10():
    rewards = np.zeros((1000, 1))
    rewards[-2:, 0] = 1e6, -1e6
    _, _, scaled = played(Scripted(np.zeros((1001, 1, 1)), rewards))
    assert scaled[-2, 0] == 10 and scaled[-1, 0] == -10 and (scaled[:-2] == 0).all()


def test_statistics_are_saved_and_frozen_in_evaluation(monkeypatch):
    """Users of other projects got 4 instead of 2,000, because their statistics were not in the checkpoint."""
    made = watch(monkeypatch, ppo_continuous, "make_env")
    run_dir = ppo_continuous.train(small_args(ppo_continuous, num_steps=64, total_timesteps=512))
    args = ppo_continuous.load_checkpoint(run_dir)["args"]
    args.evaluate, args.eval_episodes = str(run_dir), 1
    ppo_continuous.evaluate(args)
    (_, training), (_, evaluation) = made
    mean, var, count = training.statistics  # of 17 components of the observations and of the returns
    assert mean.shape == (18,) and (count > 500).all() and (mean != 0).all() and (var != 1).all()
    np.testing.assert_array_equal(training.statistics, evaluation.statistics)


@pytest.mark.parametrize("script", [ppo_continuous, ppo_multidiscrete], ids=lambda script: script.SCRIPT)
def test_statistics_are_merged_before_they_are_saved(script, monkeypatch):
    """A checkpoint has those of all processes: here the others' means are 1 higher, on average 0.5."""
    own = []

    def merge(self):
        own.append(self.norm.mean.copy())
        self.norm.mean += 0.5

    monkeypatch.setattr(script.NormalizedEnvs, "merge_statistics", merge)
    run_dir = script.train(small_args(script))
    state = torch.load(run_dir / "checkpoint.pt", weights_only=True)["agent"]["_extra_state"]
    np.testing.assert_array_equal(state[0], own[-1] + 0.5)


def test_observations_at_a_time_limit_are_normalized(monkeypatch):
    """The bootstrap of a truncated episode values the last observation as the agent sees observations."""
    gaes = watch(monkeypatch, ppo_continuous, "compute_gae")
    seen, original = [], ppo_continuous.Agent.forward
    monkeypatch.setattr(
        ppo_continuous.Agent, "forward", lambda self, obs: seen.append(obs) or original(self, obs)
    )
    flags = dict(env_id="CutBox-v0", bootstrap_truncated=True, num_envs=1, update_epochs=1)
    ppo_continuous.train(small_args(ppo_continuous, num_minibatches=1, **flags))
    assert gaes and max(x.abs().max() for x in seen) <= 10  # the raw one is 100


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
    assert losses[0][0][1]["state"].shape == (2, 1, 4, 128)


def test_detail_34_the_state_is_reset_where_an_episode_starts():
    """From a start on, outputs are those of the rest alone; other environments are not touched."""
    agent, obs = lstm_agent(), torch.randn(9, 3, 2)
    starts, state = torch.zeros(9, 3, dtype=torch.bool), torch.randn(2, 1, 3, 128)
    plain, _, _ = agent(obs, state, starts)
    starts[4, 1] = starts[0, 2] = True
    dist, value, after = agent(obs, state, starts)
    torch.testing.assert_close(dist.logprobs[:, 0], plain.logprobs[:, 0])
    torch.testing.assert_close(dist.logprobs[:4, 1], plain.logprobs[:4, 1])
    for env, first in ((1, 4), (2, 0)):
        rest = agent(obs[first:, [env]], agent.initial_state(1), starts[first:, [env]])
        torch.testing.assert_close(dist.logprobs[first:, env], rest[0].logprobs[:, 0])
        torch.testing.assert_close(value[first:, env], rest[1][:, 0])
        torch.testing.assert_close(after[:, :, env], rest[2][:, :, 0])
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


def multi_agent(nvec=(2, 3), obs_shape=(4,)):
    torch.manual_seed(1)
    return ppo_multidiscrete.Agent(Dim(obs_shape, gym.spaces.MultiDiscrete(nvec)))


def grid(nvec):
    return torch.stack(torch.meshgrid(*map(torch.arange, nvec), indexing="ij"), -1).flatten(0, -2)


def test_detail_37_independent_components():
    agent, everything = multi_agent(), torch.ones(6, 5, dtype=torch.bool)
    with torch.no_grad():
        agent.actor[-1].weight.mul_(100)
    obs, actions = torch.randn(1, 4).expand(6, 4), grid((2, 3))
    dist, _ = agent(obs, everything)
    probabilities = dist.log_prob(actions).exp()
    assert dist.sample().shape == (6, 2)
    torch.testing.assert_close(probabilities.sum(), torch.tensor(1.0))
    logits = agent.actor(obs[0])
    first, second = logits[:2].softmax(-1), logits[2:].softmax(-1)
    torch.testing.assert_close(probabilities, (first[:, None] * second).flatten())
    entropy = sum(torch.distributions.Categorical(probs=p).entropy() for p in (first, second))
    torch.testing.assert_close(dist.entropy(), entropy.expand(6))


def test_auxiliary_detail_4_invalid_actions_are_masked():
    agent, obs = multi_agent((3, 2, 4)), torch.randn(1, 4)
    mask = torch.tensor([[1, 0, 1, 1, 1, 0, 0, 1, 0]]).bool()
    dist, _ = agent(obs, mask)
    actions = grid((3, 2, 4))
    probabilities = agent(obs.expand(24, 4), mask.expand(24, 9))[0].log_prob(actions).exp()
    valid = (actions[:, 0] != 1) & (actions[:, 2] == 2)
    assert (probabilities[~valid] < 1e-30).all()
    torch.testing.assert_close(probabilities[valid].sum(), torch.tensor(1.0))
    left = [
        agent.actor(obs)[0, slots].log_softmax(-1) for slots in ([0, 2], [3, 4])
    ]  # the third has no choice
    torch.testing.assert_close(dist.entropy()[0], sum(-(x.exp() * x).sum() for x in left))
    (gradient,) = torch.autograd.grad(dist.log_prob(torch.tensor([[2, 0, 2]])).sum(), agent.actor[-1].bias)
    assert (gradient[~mask[0]] == 0).all() and (gradient[mask[0]][:4] != 0).all()


def test_auxiliary_detail_4_a_component_without_a_valid_choice_stays_in_range():
    """As Microrts's type of unit to build, where nothing can be built: any choice, but one that exists."""
    agent = multi_agent((6, 2, 4))
    mask = torch.ones(500, 12, dtype=torch.bool)
    mask[:, 6:8] = False
    action, _, logprob, _ = agent.act(torch.randn(500, 4), mask)
    assert set(action[:, 1].tolist()) == {0, 1} and (action < torch.tensor([6, 2, 4])).all()
    dist, _ = agent(torch.randn(500, 4), mask)
    assert logprob.isfinite().all() and dist.entropy().isfinite().all()


def test_auxiliary_detail_4_the_first_component_says_what_is_valid_of_the_others():
    agent = multi_agent((3, 2))
    mask = torch.zeros(
        500, 3, 3, dtype=torch.bool
    )  # first choice: 0 or 2; the second is 1 after 0, 0 after 2
    mask[:, 0, [0, 2]] = mask[:, 2, [0, 1]] = True
    obs = torch.randn(500, 4)
    action, stored, logprob, value = agent.act(obs, mask)
    assert {tuple(a) for a in action.tolist()} == {(0, 1), (2, 0)}
    assert stored.shape == (500, 5)
    dist, _ = agent(obs, stored)
    torch.testing.assert_close(dist.log_prob(action), logprob)
    first = agent.actor(obs)[:, [0, 2]].log_softmax(-1)  # the second has no choice: its probability is 1
    torch.testing.assert_close(logprob, torch.where(action[:, 0] == 0, first[:, 0], first[:, 1]))


@pytest.mark.parametrize("masked", [True, False])
def test_auxiliary_detail_4_masks_of_the_environment_are_stored_and_used_again(monkeypatch, masked):
    ratios = log_ratios(monkeypatch, ppo_multidiscrete)
    losses = watch(monkeypatch, ppo_multidiscrete, "ppo_loss")
    probes.Masked.taken = []
    flags = dict(env_id="Masked-v0", normalize=False, num_minibatches=1, update_epochs=1)
    ppo_multidiscrete.train(small_args(ppo_multidiscrete, mask_actions=masked, total_timesteps=128, **flags))
    valid = all(probes.Masked.valid(t)[a] for t, action in probes.Masked.taken for a in [tuple(action)])
    assert valid == masked and len(probes.Masked.taken) == 128
    assert losses[0][0][1]["masks"].all() != masked
    assert ratios[0] < 1e-5


def test_bins_cover_the_whole_range():
    """11 bins a dimension, from the lowest action to the highest."""
    probes.BoxActions.taken = []
    args = small_args(ppo_multidiscrete, env_id="BoxActions-v0")
    envs = ppo_multidiscrete.make_env(args, 2)
    assert envs.single_action_space == gym.spaces.MultiDiscrete([11])
    envs.reset(seed=1)
    for a in range(11):
        envs.step(np.array([[a], [10 - a]]))
    np.testing.assert_allclose(np.ravel(probes.BoxActions.taken[::2]), np.linspace(-1, 1, 11), atol=1e-6)
