"""Ratios by simulation: how often an interval holds the true ratio, and how often a worse script is found."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmark import compare
from benchmark.suites import SUITES
from benchmark.verdict import Ratio, Runs, iqm, joint, pool, ratio, runs_of, word

ROOT = Path(__file__).parent.parent
TRIALS = 1500


def normal(rng, n):
    return rng.normal(size=n)


def skewed(rng, n):
    """As of a task with a highest return."""
    return 1 - rng.exponential(size=n)


def trials(seeds, runs, spread, worse=0.0, tasks=1, draw=normal):
    """Share of each word, and of "held": intervals that hold the true ratio.

    spread: standard deviation of a run, as a share of the mean way. worse: by which share ours are worse.
    """
    rng, said = np.random.default_rng(0), Counter()
    for _ in range(TRIALS):
        found = []
        for _ in range(tasks):
            ours = (1 - worse) * (1 + spread * draw(rng, seeds))
            theirs = 1 + spread * draw(rng, runs)
            found.append(ratio(runs_of("we", "", ours), runs_of("they", "", theirs), random=0.0))
        _, low, high = (joint(found) if tasks > 1 else found[0]).interval
        said[word(low, high)] += 1 / TRIALS
        said["held"] += (low <= 1 - worse <= high) / TRIALS
    return said


@pytest.mark.parametrize("draw", [normal, skewed])
@pytest.mark.parametrize("seeds, runs, spread", [(10, 10, 0.15), (5, 10, 0.15), (5, 3, 0.15), (10, 3, 0.02)])
def test_an_interval_holds_the_true_ratio(seeds, runs, spread, draw):
    assert 0.91 < trials(seeds, runs, spread, draw=draw)["held"] < 0.985


@pytest.mark.parametrize("draw", [normal, skewed])
@pytest.mark.parametrize("worse", [0.0, 0.1])
def test_a_joint_interval_holds_the_true_ratio(worse, draw):
    for seeds, runs in ((10, 10), (5, 3)):
        assert 0.93 < trials(seeds, runs, 0.15, worse, 8, draw)["held"] < 0.985


def test_what_a_joint_ratio_finds():
    """METHODS.md has it as a table."""
    page = (ROOT / "benchmark/METHODS.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (\d+) and (\d+) \| (\d+) % \| (\d+) % \| (\d+) % \| (\d+) % \|$", page, re.MULTILINE
    )
    assert len(rows) >= 4
    for seeds, runs, spread, *shares in rows:
        for worse, share in zip((0, 0.05, 0.1), shares, strict=True):
            found = trials(int(seeds), int(runs), int(spread) / 100, worse, tasks=8)
            said = 100 * found["matches" if worse == 0 else "below"]
            assert said == pytest.approx(float(share), abs=3), (seeds, runs, spread, worse)


def test_a_ratio_by_hand():
    """Ways of 8 and 10, standard errors of 1 and 0.5."""
    ours = runs_of("we", "", np.array([9.0, 11.0]))  # deviation 2 ** 0.5, so a standard error of 1
    theirs = Runs("they", "", 12.0, 0.5 * 3**0.5, 4)  # deviation 1 with 3 in the denominator
    found = ratio(ours, theirs, random=2.0)
    a, b = 1 / 8**2, 0.25 / 10**2
    assert np.exp(found.log) == pytest.approx(0.8) and found.variance == pytest.approx(a + b)
    assert found.freedom == pytest.approx((a + b) ** 2 / (a**2 / 1 + b**2 / 3))
    middle, low, high = found.interval
    assert low * high == pytest.approx(middle**2) and low < 0.8 < high
    ten = Ratio(np.log(0.9), 0.01**2, 10.0).interval  # 2.228 is the quantile of 10 degrees of freedom
    assert ten == pytest.approx((0.9, 0.9 * np.exp(-0.02228), 0.9 * np.exp(0.02228)), rel=1e-4)


def test_a_joint_ratio_by_hand():
    found = joint([Ratio(0.2, 0.04, 5.0), Ratio(-0.1, 0.09, 8.0)])
    assert (found.log, found.variance) == pytest.approx((0.05, 0.13 / 4))
    assert found.freedom == pytest.approx(0.13**2 / (0.04**2 / 5 + 0.09**2 / 8))


def test_pooled_runs_are_as_if_they_had_been_drawn_together():
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=3), rng.normal(1, 2, size=6), rng.normal(size=10)]
    found = pool([runs_of("", "", part) for part in parts])
    together = runs_of("", "", np.concatenate(parts))
    assert (found.mean, found.spread, found.runs) == pytest.approx((together.mean, together.spread, 19))


def test_a_band_of_unknown_kind_is_read_as_a_standard_error():
    known, unknown = Runs("a", "", 1.0, 0.3, 6), Runs("a", "", 1.0, 0.3, 6, is_std=False)
    assert known.deviation == pytest.approx(0.3 * (6 / 5) ** 0.5)
    assert unknown.deviation == pytest.approx(0.3 * 6**0.5)


def test_no_ratio_where_random_actions_are_as_good():
    good, bad = runs_of("", "", np.array([5.0, 6.0])), runs_of("", "", np.array([1.0, 2.0]))
    assert ratio(good, bad, random=2.0) is None and ratio(bad, good, random=2.0) is None
    assert ratio(good, good, random=2.0) is not None


def test_one_run_has_a_ratio_without_an_interval():
    one, many = runs_of("", "", np.array([5.0])), runs_of("", "", np.array([10.0, 10.0]))
    middle, low, high = ratio(one, many, random=0.0).interval
    assert middle == 0.5 and np.isnan([low, high]).all() and word(low, high) == ""
    same = ratio(many, many, random=0.0)
    assert same.interval == (1, 1, 1)


@pytest.mark.parametrize(
    "low, high, said",
    [(0.91, 1.09, "matches"), (0.91, 0.99, "matches"), (0.89, 0.99, "below"), (1.01, 1.2, "above")]
    + [(0.89, 1.01, "open"), (0.99, 1.11, "open"), (0.5, 0.6, "below")],
)
def test_words(low, high, said):
    assert word(low, high) == said


def test_what_a_referee_found_with_the_same_runs():
    """Four tasks of an earlier build beside CleanRL of the same version: 1.01 [0.90, 1.13]."""
    theirs = [(1576, 276.4, 10, 1442.64, 46.03, -283.5), (1852, 559.9, 10, 2382.86, 271.74, 19.82)]
    theirs += [(3087, 490.5, 10, 2287.95, 571.78, 2.62), (885.5, 84.6, 5, 963.09, 22.2, 6.14)]
    found = []
    for mean, deviation, seeds, other, spread, random in theirs:
        ours = Runs("we", "", mean, deviation * ((seeds - 1) / seeds) ** 0.5, seeds)
        found.append(ratio(ours, Runs("they", "", other, spread, 3), random))
    middle, low, high = joint(found).interval
    assert middle == pytest.approx(1.01, abs=0.005) and low < 0.9 and 1.13 < high < 1.2


def test_the_joint_ratio_of_the_page_is_that_of_its_rows():
    rows = [(row, compare.load("mujoco", row, compare.Args())) for row in SUITES["mujoco"]]
    logs = []
    for row, result in rows:
        if row.is_comparable and result and not result.is_cut:
            (target,) = [x for x in row.targets if (x.by, x.env_id) == ("CleanRL", row.task)] or [None]
            random = compare.random_returns()[row.task]
            if target:
                logs.append(np.log((result.at(result.reached).mean() - random) / (target.mean - random)))
    lines = compare.joint_lines(rows)
    (line,) = [line for line in lines if "by CleanRL, published" in line]
    assert f"{len(logs)} tasks together: **{np.exp(np.mean(logs)):.2f} [" in line


def test_interquartile_mean():
    assert iqm(np.array([0.0, 1, 2, 3, 100])) == 2 and iqm(np.arange(10.0)) == np.arange(2, 8).mean()
