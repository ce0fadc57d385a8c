"""Detail 37 and auxiliary detail 4, of actions of several components and of masks, a test each statement."""

import gymnasium as gym
import numpy as np
import probes
import pytest
import torch
from conftest import Dim, scalars, small_args
from test_details import log_ratios, watch

import ppo_multidiscrete


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


def test_an_environment_may_change_its_action():
    """What it does to the array is not what the agent learns from: all ratios are 1 in the first epoch."""
    args = small_args(
        ppo_multidiscrete, env_id="Spender-v0", update_epochs=1, num_minibatches=1, normalize=False
    )
    kept, original = [], ppo_multidiscrete.ppo_loss

    def spy(agent, batch, *inputs):
        kept.append(batch["actions"].clone())
        return original(agent, batch, *inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo_multidiscrete, "ppo_loss", spy)
        run_dir = ppo_multidiscrete.train(args)
    assert kept and all(x.float().std(0).min() > 0.1 for x in kept)
    assert all(abs(x) < 1e-6 for _, x in scalars(run_dir, "losses/approx_kl"))


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


def test_environments_that_offer_no_mask_call_everything_valid(monkeypatch):
    """Beside others that offer one: gymnasium fills theirs with zeros."""
    probes.MaskedLater.episodes = 0
    losses = watch(monkeypatch, ppo_multidiscrete, "ppo_loss")
    flags = dict(env_id="MaskedLater-v0", normalize=False, num_envs=4, num_minibatches=1, update_epochs=1)
    ppo_multidiscrete.train(small_args(ppo_multidiscrete, num_steps=64, total_timesteps=256, **flags))
    masks, first = (losses[0][0][1][name] for name in ("masks", "obs"))
    starts = first[:, 0] == 0
    assert 20 < starts.sum() < 200 and masks[starts].all() and not masks[~starts].all(1).any()


def test_masks_may_be_lists():
    """gymnasium puts them into an array of objects, with None where none is offered."""
    args = small_args(ppo_multidiscrete, env_id="Masked-v0", normalize=False)
    envs = ppo_multidiscrete.make_env(args, 2)
    offered, mask = np.array([None, None]), probes.Masked.mask(1).tolist()
    offered[1] = mask
    info = dict(action_mask=offered, _action_mask=np.array([False, True]))
    assert ppo_multidiscrete.offered_masks(args, envs, info).tolist() == [[True] * 5, mask]
    offered[0], info["_action_mask"][0] = mask[::-1], True
    assert ppo_multidiscrete.offered_masks(args, envs, info).tolist() == [mask[::-1], mask]


def test_two_bins_are_the_bounds():
    envs = ppo_multidiscrete.make_env(small_args(ppo_multidiscrete, env_id="Pendulum-v1", num_bins=2), 2)
    taken, step = [], envs.unwrapped.step
    envs.unwrapped.step = lambda actions: taken.append(actions.tolist()) or step(actions)
    envs.reset(seed=1)
    envs.step(np.array([[0], [1]]))
    assert envs.single_action_space.nvec.tolist() == [2] and taken == [[[-2.0], [2.0]]]
