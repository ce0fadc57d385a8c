"""Details 23 to 31, of continuous actions, one test each, by number; see test_details.py for the first 22."""

import math

import gymnasium as gym
import numpy as np
import probes
import pytest
import torch
from conftest import Dim, small_args
from scipy import stats
from test_details import log_ratios, watch

import ppo_continuous
import ppo_multidiscrete


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
