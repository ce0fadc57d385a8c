"""How the mean of our seeds stands to the published ones: intervals, and one of four words.

An interval is Welch's, for the difference of two means, in percent of the published one, which is taken as
exact there. It needs no equal variances and no equal numbers of runs. Where several sources published a mean,
their intervals are so wide that all of them hold their true differences with 95 % (Bonferroni). Else the
luckiest of many sources would judge. That is the nominal level: of so few runs, and against up to four
sources, simulation gives 88 to 98 % where returns are normal. Degrees of freedom of the side with fewer runs
would be safe, but find a script that is two deviations worse with 10 seeds against 2 sources 19 % of the time
instead of 69 %. The words:

    equal within x %    the whole interval to the highest mean is within MARGIN; x is its end farther from 0
    lower               than at least one source: its whole interval is below 0, and not within MARGIN
    higher              than every source: all intervals are above 0, and none is within MARGIN
    inconclusive        none of these; where published runs are few, no number of our seeds may decide

Once ours vary less than theirs, still less of it widens the interval, as the degrees of freedom fall to those
of the published runs: "equal" may then become "inconclusive", but not the other way.
"""

from dataclasses import dataclass

import numpy as np
from scipy.stats import t, trim_mean

MARGIN = 5  # percent
LEAST_SEEDS = 5


@dataclass(frozen=True)
class Published:
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
    def error(self) -> float | None:
        """Standard error of the mean, read as the larger of two where the source leaves a choice.

        Sources do not say whether their deviation is divided by the number of runs or by one less: it is read
        as divided by the number. A band of which nothing is said is read as a standard error.
        """
        if self.spread is None or self.runs < 2:
            return None
        return self.spread / (self.runs - 1) ** 0.5 if self.is_std else self.spread


def difference(ours: np.ndarray, theirs: Published, confidence: float = 0.95) -> tuple[float, float, float]:
    """Ours (seeds,) less theirs in percent of theirs, and the ends of its interval."""
    variances = np.array([ours.var(ddof=1) / len(ours), theirs.error**2])
    scale = 100 / abs(theirs.mean)
    middle = ours.mean() - theirs.mean
    if not variances.any():
        return middle * scale, middle * scale, middle * scale
    freedom = variances.sum() ** 2 / (variances**2 / [len(ours) - 1, theirs.runs - 1]).sum()
    reach = t.ppf((1 + confidence) / 2, freedom) * variances.sum() ** 0.5
    return middle * scale, (middle - reach) * scale, (middle + reach) * scale


def word(low: float, high: float) -> str:
    """What an interval of the difference in percent says."""
    if max(-low, high) <= MARGIN:
        return f"equal within {np.ceil(max(-low, high, 0.1) * 10) / 10:g} %"
    return "higher" if low > 0 else "lower" if high < 0 else "inconclusive"


def verdict(ours: np.ndarray, sources: list[Published]) -> tuple[Published, tuple[float, float, float], str]:
    """The source that decides, the difference to it with its interval, and the word; all have a spread."""
    confidence = 1 - 0.05 / len(sources)
    intervals = {source: difference(ours, source, confidence) for source in sources}
    words = {source: word(*interval[1:]) for source, interval in intervals.items()}
    source = max(sources, key=lambda source: source.mean)
    if below := [source for source in sources if words[source] == "lower"]:
        source = min(below, key=lambda source: intervals[source][2])  # the clearest
    said = words[source]
    if said == "higher" and set(words.values()) != {"higher"}:
        said = "inconclusive"
    return source, intervals[source], said


def iqm(values: np.ndarray) -> float:
    """Interquartile mean: without a quarter of the values at each end, rounded down (of 5 one, of 10 two)."""
    return float(trim_mean(values, 0.25))
