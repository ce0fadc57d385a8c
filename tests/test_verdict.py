"""The verdict by simulation: how often its interval holds the true difference, and finds a worse script."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmark.verdict import MARGIN, Published, difference, iqm, word

ROOT = Path(__file__).parent.parent
TRIALS = 4000


def trials(seeds, shift=0.0, spread=0.1, runs=3, ours=1.0, draw=None, is_std=True):
    """Intervals (TRIALS, 3) of scripts that are `shift` of a deviation better than a published mean of 1.

    spread: their deviation. ours: our deviation, as a multiple of it. draw: numbers of mean 0 and variance 1.
    """
    rng, found = np.random.default_rng(0), []
    draw = draw or (lambda rng, n: rng.normal(size=n))
    for _ in range(TRIALS):
        theirs = 1 + spread * draw(rng, runs)
        error = theirs.std() if is_std else theirs.std(ddof=1) / runs**0.5
        published = Published("they", "Task-v0", theirs.mean(), error, runs, is_std)
        found.append(difference(1 + spread * (shift + ours * draw(rng, seeds)), published))
    return np.array(found)


def words(*args, **kwargs):
    """Share of each verdict."""
    said = Counter(word(low, high).split()[0] for _, low, high in trials(*args, **kwargs))
    return {name: n / TRIALS for name, n in said.items()}


@pytest.mark.parametrize(
    "seeds, runs, ours", [(5, 3, 1.0), (10, 3, 1.0), (10, 3, 5.0), (10, 3, 0.2), (5, 6, 1.0)]
)
def test_the_interval_holds_the_true_difference(seeds, runs, ours):
    _, low, high = trials(seeds, runs=runs, ours=ours).T
    assert 0.92 < ((low <= 0) & (high >= 0)).mean() < 0.97  # Welch's, of so few runs, is a little too narrow


def test_the_interval_of_skewed_returns():
    """As of a task with a highest return: it holds the difference a little less often."""
    _, low, high = trials(10, draw=lambda rng, n: 1 - rng.exponential(size=n)).T
    assert 0.91 < ((low <= 0) & (high >= 0)).mean() < 0.97


def test_a_band_of_unknown_kind_is_no_narrower_than_a_deviation():
    """Read as a standard error; if it is one, the interval has its coverage."""
    _, low, high = trials(10, runs=6, is_std=False).T
    assert 0.935 < ((low <= 0) & (high >= 0)).mean() < 0.97
    wide = difference(np.arange(10.0), Published("they", "", 5.0, 2.0, 6, is_std=False))
    narrow = difference(np.arange(10.0), Published("they", "", 5.0, 2.0, 6))
    assert wide[1] < narrow[1] < narrow[2] < wide[2]


def test_more_variance_of_ours_makes_agreement_harder():
    """It made it easier, when the whole interval of ours had to lie below theirs to be called short."""
    shares = [words(10, spread=0.02, ours=ours).get("equal", 0) for ours in (1, 2, 4)]
    assert shares == sorted(shares, reverse=True) and shares[0] > 0.5 > shares[-1] + 0.3


def test_a_worse_script_is_found_as_often_as_the_page_says():
    """One published deviation, of 10 % of the mean. One that is as good is seldom called lower."""
    page = (ROOT / "benchmark/RESULTS.md").read_text()
    said = re.findall(
        r"(\d+) % of the time with (\d+) seeds\s+against (\d+) runs", page.partition("two deviations")[0]
    )
    assert len(said) == 4
    for percent, seeds, runs in said:
        share = words(int(seeds), shift=-1, runs=int(runs))["lower"]
        assert abs(100 * share - int(percent)) < 2, (share, seeds, runs)
        assert words(int(seeds), runs=int(runs)).get("lower", 0) < 0.04
    (held,) = re.findall(r"holds the true difference (\d+) % of\s+the time with 10 seeds against 3", page)
    _, low, high = trials(10).T
    assert abs(100 * ((low <= 0) & (high >= 0)).mean() - int(held)) < 1
    (two,) = re.findall(r"two deviations worse is found (\d+) % of\s+the time with 10 seeds", page)
    assert abs(100 * words(10, shift=-2)["lower"] - int(two)) < 2
    (alike,) = re.findall(r"1 % of the mean, .* is\s+called equal (\d+) % of\s+the time", page, re.DOTALL)
    assert abs(100 * words(10, shift=-2, spread=0.01)["equal"] - int(alike)) < 2


def test_words():
    for interval, said in (
        ((-4.9, 3), "equal within 4.9 %"),
        ((1, 2.01), "equal within 2.1 %"),
        ((0, 0), "equal within 0.1 %"),
        ((1, MARGIN + 1), "higher"),
        ((-30, -1), "lower"),
        ((-30, 1), "inconclusive"),
        ((-MARGIN - 1, MARGIN + 1), "inconclusive"),
    ):
        assert word(*interval) == said


def test_an_interval_by_hand():
    """Welch's: variances of the means of 1 and 4, with 4 and 2 degrees of freedom."""
    ours = np.array([8.0, 9, 10, 11, 12]) * np.sqrt(2)  # variance 5: the mean's is 1
    theirs = Published("they", "", 20.0, 2 * np.sqrt(2), 3)  # the mean's variance is 8 / 2
    middle, low, high = difference(ours, theirs)
    freedom = (1 + 4) ** 2 / (1 / 4 + 16 / 2)
    assert middle == pytest.approx(100 * (10 * np.sqrt(2) - 20) / 20)
    assert freedom == pytest.approx(3.03, abs=0.01)
    assert (high - low) / 2 == pytest.approx(100 * 3.165 * 5**0.5 / 20, rel=0.002)  # t is 3.182 for 3


def test_no_spread_no_interval():
    assert (
        Published("they", "", 1.0, None, 1).error is None and Published("they", "", 1.0, 0.5, 1).error is None
    )
    same = difference(np.full(5, -200.0), Published("they", "", -200.0, 0.0, 3))
    assert same == (0, 0, 0)


def test_interquartile_mean():
    assert iqm(np.array([1.0, 2, 3, 4, 5, 6, 7, 100])) == 4.5
