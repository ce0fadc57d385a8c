"""How far our runs came beside other runs: a ratio with its interval, and one of four words.

A run's way is its return less that of random actions. A ratio is the mean way of our runs by the mean way
of theirs: 1 is as good, 0 is random. Its interval is Welch's at 95 %, of the logarithms: the variance of a
mean's logarithm is that of the mean by the square of the way (the delta method). Random returns are exact.

    matches    the whole interval is within MARGIN of 1
    below      else, and the whole interval is below 1
    above      else, and the whole interval is above 1
    open       else: more runs, of ours or of theirs, would have to tell

A joint ratio over tasks is the geometric mean of their ratios, so each task counts the same. Its variance is
that of a mean, its degrees of freedom are Satterthwaite's. Several sources are pooled as if all of their runs
had been drawn alike: the deviation has what differs within and between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, nan
from typing import NamedTuple

import numpy as np
from scipy.stats import t, trim_mean

MARGIN = 0.1


@dataclass(frozen=True)
class Runs:
    """A mean over runs, with its spread."""

    by: str
    env_id: str
    mean: float
    spread: float | None  # None: of a single run, or of an unknown number
    runs: int
    is_std: bool = (
        True  # spread is a standard deviation over the runs; else the source does not say what it is
    )

    @property
    def deviation(self) -> float | None:
        """Standard deviation of runs, read as the larger of two where the source leaves a choice.

        Sources do not say whether theirs has the number of runs in its denominator or one less: it is read as
        having the number. A band of which nothing is said is read as a standard error.
        """
        if self.spread is None or self.runs < 2:
            return None
        return self.spread * ((self.runs / (self.runs - 1)) ** 0.5 if self.is_std else self.runs**0.5)


class Ratio(NamedTuple):
    """Logarithm of a ratio, with what its interval needs; NaN where a side has one run."""

    log: float
    variance: float
    freedom: float

    @property
    def interval(self) -> tuple[float, float, float]:
        """The ratio and the ends of its interval."""
        reach = t.ppf(0.975, self.freedom) * self.variance**0.5 if self.variance else self.variance
        with np.errstate(over="ignore"):  # two runs near random play may say nothing: up to infinity
            return exp(self.log), float(np.exp(self.log - reach)), float(np.exp(self.log + reach))


def runs_of(by: str, env_id: str, returns: np.ndarray) -> Runs:
    """Of runs whose returns (runs,) are known."""
    spread = returns.std() if len(returns) > 1 else None
    return Runs(by, env_id, returns.mean(), spread, len(returns))


def pool(sources: Sequence[Runs]) -> Runs:
    """All runs of some sources, which have a deviation, as one."""
    runs = np.array([x.runs for x in sources])
    means, deviations = (np.array([getattr(x, name) for x in sources]) for name in ("mean", "deviation"))
    mean = (runs * means).sum() / runs.sum()
    squares = ((runs - 1) * deviations**2 + runs * (means - mean) ** 2).sum()
    return Runs("all", sources[0].env_id, mean, (squares / runs.sum()) ** 0.5, int(runs.sum()))


def ratio(ours: Runs, theirs: Runs, random: float) -> Ratio | None:
    """Ours by theirs; None where one of them is not better than random actions."""
    ways = np.array([ours.mean, theirs.mean]) - random
    if not (ways > 0).all():
        return None
    middle = log(ways[0] / ways[1])
    if ours.deviation is None or theirs.deviation is None:
        return Ratio(middle, nan, nan)
    runs = np.array([ours.runs, theirs.runs])
    variances = np.array([ours.deviation, theirs.deviation]) ** 2 / runs / ways**2
    if not variances.any():
        return Ratio(middle, 0.0, nan)
    return Ratio(middle, variances.sum(), variances.sum() ** 2 / (variances**2 / (runs - 1)).sum())


def joint(ratios: Sequence[Ratio]) -> Ratio:
    """Geometric mean of the ratios of several tasks, which are not NaN."""
    variances = np.array([x.variance for x in ratios])
    squares = sum(x.variance**2 / x.freedom for x in ratios if x.variance)
    freedom = variances.sum() ** 2 / squares if squares else nan
    return Ratio(float(np.mean([x.log for x in ratios])), variances.sum() / len(ratios) ** 2, freedom)


def word(low: float, high: float) -> str:
    """What an interval of a ratio says; nothing if it is NaN."""
    if np.isnan(low):
        return ""
    if 1 - MARGIN <= low and high <= 1 + MARGIN:
        return "matches"
    return "below" if high < 1 else "above" if low > 1 else "open"


def iqm(values: np.ndarray) -> float:
    """Interquartile mean: without a quarter of the values at each end, rounded down (of 5 one, of 10 two)."""
    return float(trim_mean(values, 0.25))
