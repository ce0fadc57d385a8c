"""The policies' distributions against SciPy's: what is drawn, how often, and what its log-probability is."""

import numpy as np
import pytest
import torch
from conftest import OTHERS, SCRIPTS
from scipy import stats

import ppo_continuous
import ppo_multidiscrete

ALL = SCRIPTS | OTHERS
# four actions, as a wrong sign of the noise does not show in two
PROBABILITIES = np.array([[0.6, 0.25, 0.1, 0.05], [0.01, 0.09, 0.2, 0.7]])
DRAWS = 20_000


def frequencies_fit(actions, probabilities):
    counts = np.bincount(actions, minlength=len(probabilities))
    return stats.chisquare(counts, probabilities * len(actions)).pvalue > 1e-6


@pytest.mark.parametrize("name", [name for name in ALL if hasattr(ALL[name], "Categorical")])
def test_categorical(name):
    torch.manual_seed(1)
    logits = torch.tensor(np.log(PROBABILITIES), dtype=torch.float32) + 3.0  # not normalized
    dist = ALL[name].Categorical(logits.expand(DRAWS, 2, 4))
    actions = dist.sample()
    for row, probabilities in enumerate(PROBABILITIES):
        assert frequencies_fit(actions[:, row].numpy(), probabilities)
    assert abs(np.corrcoef(actions[:, 0], actions[:, 1])[0, 1]) < 0.04  # rows are drawn apart
    expected = np.log(PROBABILITIES)[[0, 1], actions.numpy()]
    np.testing.assert_allclose(dist.log_prob(actions), expected, rtol=1e-5)
    np.testing.assert_allclose(dist.entropy()[0], stats.entropy(PROBABILITIES, axis=1), rtol=1e-5)


def test_normal():
    torch.manual_seed(1)
    mean, std = np.array([0.5, -2.0, 10.0]), np.array([0.1, 1.0, 3.0])
    means = torch.tensor(mean, dtype=torch.float32).expand(DRAWS, 3)
    dist = ppo_continuous.Normal(means, torch.tensor(np.log(std), dtype=torch.float32))
    actions = dist.sample()
    for dimension in range(3):
        drawn = stats.norm(mean[dimension], std[dimension])
        assert stats.kstest(actions[:, dimension], drawn.cdf).pvalue > 1e-6
    assert np.abs(np.corrcoef(actions.T) - np.eye(3)).max() < 0.04
    expected = stats.norm(mean, std).logpdf(actions.double().numpy()).sum(1)
    np.testing.assert_allclose(dist.log_prob(actions), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dist.entropy(), stats.norm(mean, std).entropy().sum(), rtol=1e-5)


def test_multi_categorical():
    """Components are drawn apart; log-probabilities and entropies are sums over them."""
    torch.manual_seed(1)
    logits = torch.tensor(np.log(PROBABILITIES), dtype=torch.float32).expand(DRAWS, 2, 4)
    dist = ppo_multidiscrete.MultiCategorical(logits)
    actions = dist.sample()
    for component, probabilities in enumerate(PROBABILITIES):
        assert frequencies_fit(actions[:, component].numpy(), probabilities)
    expected = np.log(PROBABILITIES)[[0, 1], actions.numpy()].sum(1)
    np.testing.assert_allclose(dist.log_prob(actions), expected, rtol=1e-5)
    np.testing.assert_allclose(dist.entropy()[0], stats.entropy(PROBABILITIES, axis=1).sum(), rtol=1e-5)
