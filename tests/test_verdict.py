"""The verdict by simulation: how often its interval holds the true difference, and finds a worse script."""

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import t

import benchmark.verdict
from benchmark import compare
from benchmark.suites import SUITES
from benchmark.verdict import MARGIN, Published, difference, iqm, verdict, word

ROOT = Path(__file__).parent.parent
TRIALS = 4000


def normal(rng, n):
    return rng.normal(size=n)


def skewed(rng, n):
    """As of a task with a highest return."""
    return 1 - rng.exponential(size=n)


def trials(seeds, shift=0.0, spread=0.1, runs=3, ours=1.0, draw=normal, is_std=True):
    """Intervals (TRIALS, 3) of scripts that are `shift` of a deviation better than a published mean of 1.

    spread: their deviation. ours: our deviation, as a multiple of it. draw: numbers of mean 0 and variance 1.
    """
    rng, found = np.random.default_rng(0), []
    for _ in range(TRIALS):
        theirs = 1 + spread * draw(rng, runs)
        error = theirs.std() if is_std else theirs.std(ddof=1) / runs**0.5
        published = Published("they", "Task-v0", theirs.mean(), error, runs, is_std)
        found.append(difference(1 + spread * (shift + ours * draw(rng, seeds)), published))
    return np.array(found)


def source(name, draws):
    return Published(name, "Task-v0", draws.mean(), draws.std(), len(draws))


def words(seeds, sources, shift=0.0, spread=0.1, ours=1.0, draw=normal, trials=TRIALS):
    """Share of each verdict on such scripts, beside several sources of 3 runs; in "all", of those trials in
    which all intervals hold the true difference.
    """
    rng, said = np.random.default_rng(0), Counter()
    for _ in range(trials):
        theirs = [source(f"{k}", 1 + spread * draw(rng, 3)) for k in range(sources)]
        mine = 1 + spread * (shift + ours * draw(rng, seeds))
        said[verdict(mine, theirs)[2].split()[0]] += 1
        intervals = [difference(mine, x, 1 - 0.05 / sources) for x in theirs]
        true = [100 * shift * spread / x.mean for x in theirs]
        said["all"] += all(low <= x <= high for x, (_, low, high) in zip(true, intervals, strict=True))
    return {name: n / trials for name, n in said.items()}


@pytest.mark.parametrize(
    "seeds, runs, ours", [(5, 3, 1.0), (10, 3, 1.0), (10, 3, 5.0), (10, 3, 0.2), (5, 6, 1.0)]
)
def test_the_interval_holds_the_true_difference(seeds, runs, ours):
    _, low, high = trials(seeds, runs=runs, ours=ours).T
    assert 0.92 < ((low <= 0) & (high >= 0)).mean() < 0.97  # Welch's, of so few runs, is a little too narrow


def test_safe_degrees_of_freedom_find_less(monkeypatch):
    """verdict.py says how often those of the side with fewer runs find what Welch's find."""
    found = words(10, 2, shift=-2)["lower"]
    quantiles = SimpleNamespace(ppf=lambda p, freedom: t.ppf(p, 2))  # of 10 seeds and 3 runs
    monkeypatch.setattr(benchmark.verdict, "t", quantiles)
    safe = words(10, 2, shift=-2)
    page = " ".join(benchmark.verdict.__doc__.split())
    less, more = re.search(
        r"10 seeds against 2 sources (\d+) % of the time instead of (\d+) %", page
    ).groups()
    assert 100 * safe["lower"] == pytest.approx(float(less), abs=2.5) and safe["all"] > 0.99
    assert 100 * found == pytest.approx(float(more), abs=2.5)


def test_the_interval_of_skewed_returns():
    """It holds the difference a little less often, and mostly lies below it where it does not."""
    _, low, high = trials(10, draw=skewed).T
    assert 0.91 < ((low <= 0) & (high >= 0)).mean() < 0.97
    assert 0.055 < (high < 0).mean() < 0.085 and (low > 0).mean() < 0.02


def test_a_band_of_unknown_kind_is_no_narrower_than_a_deviation():
    """Read as a standard error; if it is one, the interval has its coverage."""
    _, low, high = trials(10, runs=6, is_std=False).T
    assert 0.935 < ((low <= 0) & (high >= 0)).mean() < 0.97
    wide = difference(np.arange(10.0), Published("they", "", 5.0, 2.0, 6, is_std=False))
    narrow = difference(np.arange(10.0), Published("they", "", 5.0, 2.0, 6))
    assert wide[1] < narrow[1] < narrow[2] < wide[2]


def test_more_variance_of_ours_makes_agreement_harder():
    """It made it easier, when the whole interval of ours had to lie below theirs to be called short."""
    shares = [words(10, 1, spread=0.02, ours=ours).get("equal", 0) for ours in (1, 2, 4)]
    assert shares == sorted(shares, reverse=True) and shares[0] > 0.5 > shares[-1] + 0.3


def test_less_variance_of_ours_than_of_theirs_makes_agreement_harder_too():
    """As the degrees of freedom fall to those of three runs; so noise of ours does not beat agreement."""
    shares = [words(10, 2, spread=0.015, ours=ours).get("equal", 0) for ours in (0.01, 0.5, 1)]
    assert shares == sorted(shares) and shares[0] < 0.55 and shares[-1] < 0.75


@pytest.mark.parametrize("sources", [1, 2, 4, 6])
@pytest.mark.parametrize("seeds", [5, 10])
def test_more_sources_do_not_make_a_good_script_lower(seeds, sources):
    """When the highest of them alone judged, 13 % of good scripts were lower than it, of six sources."""
    shares = words(seeds, sources)
    assert 0.01 < shares["lower"] < 0.055 and 0.89 < shares["all"] < 0.97


def test_where_the_intervals_hold_least():
    """Of less spread than theirs, and, for a good script, of skewed returns."""
    assert 0.87 < words(10, 4, ours=0.3)["all"] < 0.9
    assert words(5, 4, ours=3)["all"] < 0.985
    for sources in (1, 2, 4):
        assert 0.055 < words(10, sources, draw=skewed)["lower"] < 0.085
    assert words(10, 2, draw=skewed, ours=0.3)["lower"] > 0.15


def test_what_more_seeds_can_decide():
    """RESULTS.md says which intervals infinitely many seeds of ours would leave."""
    found = []
    for suite in ("classic", "mujoco"):
        for row in SUITES[suite]:
            result = compare.load(suite, row, compare.Args())
            theirs = [compare.published(target, row.steps, True) for target in row.targets if result]
            theirs = [x for x in theirs if x.error]
            if theirs:
                decides, *_ = verdict(result.at(row.steps), theirs)
                many = result.at(row.steps).mean() + np.tile([-1e-3, 1e-3], 10**6)
                _, low, high = difference(many, decides, 1 - 0.05 / len(theirs))
                found.append(((high - low) / 2, row.script, row.task))
    page = " ".join((ROOT / "benchmark/RESULTS.md").read_text(encoding="utf-8").split())
    (least, task, script, most, other) = re.search(
        r"of ±([\d.]+) % \((\w+), `(\w+)`\) to ±(\d+) % \((\w+)\)", page
    ).groups()
    assert min(found)[1:] == (script, f"{task}-v1") and max(found)[2] == f"{other}-v4"
    assert min(found)[0] == pytest.approx(float(least), abs=0.05)
    assert max(found)[0] == pytest.approx(float(most), abs=0.5)


def test_a_worse_script_is_found_as_often_as_the_page_says():
    page = " ".join((ROOT / "benchmark/RESULTS.md").read_text(encoding="utf-8").split())
    found = re.findall(
        r"(\w+) deviations? worse is called (\w+) ((?:\d+ % .*?sources?(?:, | and |;|\.))+)", page
    )
    cases = [
        (dict(one=-1, two=-2)[shift], said, *map(int, numbers))
        for shift, said, text in found
        for numbers in re.findall(r"(\d+) % of the time with (\d+) seeds against (\d+) source", text)
    ]
    assert len(cases) == 7
    for shift, said, percent, seeds, sources in cases:
        spread = 0.01 if said == "equal" else 0.1
        share = words(seeds, sources, shift, spread, trials=5000)[said]
        assert abs(100 * share - percent) < 2, (share, shift, said, seeds, sources)  # 0.5 of it: rounding


def test_the_source_that_decides():
    """One that says lower, else the highest; higher is only what is higher than all."""
    ours = np.linspace(95, 105, 10)
    narrow = Published("narrow", "", 130.0, 1.0, 3)
    wide, low = Published("wide", "", 200.0, 150.0, 3), Published("low", "", 50.0, 1.0, 3)
    assert verdict(ours, [wide])[2] == "inconclusive"
    assert verdict(ours, [wide, narrow])[::2] == (narrow, "lower")
    assert verdict(ours, [wide, low])[::2] == (wide, "inconclusive")
    assert verdict(ours, [low])[::2] == (low, "higher")
    assert verdict(ours, [low, Published("wide", "", 40.0, 60.0, 3)])[::2] == (low, "inconclusive")
    one, two = (verdict(ours, [narrow, *more])[1] for more in ([], [wide]))
    assert one[0] == two[0] and two[1] < one[1] < one[2] < two[2]  # two intervals hold at once


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


def test_more_is_better_where_returns_are_negative_too():
    better, worse = (
        difference(np.linspace(x - 1, x + 1, 5), Published("they", "", -80.0, 1.0, 3)) for x in (-70, -90)
    )
    assert better[0] == pytest.approx(12.5) and better[1] > 0 > worse[2] and worse[0] == pytest.approx(-12.5)


def test_no_spread_no_interval():
    assert (
        Published("they", "", 1.0, None, 1).error is None and Published("they", "", 1.0, 0.5, 1).error is None
    )
    same = difference(np.full(5, -200.0), Published("they", "", -200.0, 0.0, 3))
    assert same == (0, 0, 0)


def test_interquartile_mean():
    assert iqm(np.array([1.0, 2, 3, 4, 5, 6, 7, 100])) == 4.5
