"""95 % intervals: percentile bootstrap over passages, Student's t over seeds, and the verdict on two differences."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

NUM_RESAMPLES = 10_000
CONFIDENCE_LEVEL = 0.95
SEED = 0
# If nothing changed, percentile intervals exclude 0 in about 25 % of cases from 3 observations, 12 % from 8, 7 to 11 %
# from 10 to 29, and 6 % from 30, instead of 5 %. Below MIN_UNITS there is no verdict, below ENOUGH_UNITS a caveat.
MIN_UNITS = 10
ENOUGH_UNITS = 30
# Numbers in memory at once for each array: 8 MB.
_BATCH_ELEMENTS = 2**20

BETTER, WORSE, NO_DIFFERENCE = "better", "worse", "no difference shown"
_TOO_FEW, _DIVERGED = "no verdict: fewer than two pairs", "no verdict: a run diverged"
# By the direction of LMS and of perplexity: -1 lower, 0 the interval includes 0, 1 higher.
_VERDICTS = {
    (-1, -1): BETTER,
    (-1, 0): "recites less, perplexity unclear",
    (-1, 1): "recites less, perplexity higher",
    (0, -1): "LMS unclear, perplexity lower",
    (0, 0): NO_DIFFERENCE,
    (0, 1): "LMS unclear, perplexity higher",
    (1, -1): "recites more, perplexity lower",
    (1, 0): "recites more, perplexity unclear",
    (1, 1): WORSE,
}
VERDICTS = (*_VERDICTS.values(), _TOO_FEW, _DIVERGED)
"""All verdicts, the best first."""


class Interval(NamedTuple):
    """A 95 % interval.

    Attributes:
        low (float): lower end; NaN if there is no interval, see :func:`bootstrap_interval`.
        high (float): upper end; NaN as ``low``.
        num_units (int): how many observations were resampled; of two samples, the size of the smaller.
    """

    low: float
    high: float
    num_units: int

    @property
    def significant(self) -> Literal["yes", "no", "too few"] | None:
        """Whether 0 lies outside (an end of exactly 0 is inside); "too few" below ``MIN_UNITS`` observations."""
        if math.isnan(self.low):
            return None
        if self.num_units < MIN_UNITS:
            return "too few"
        return "yes" if self.low > 0 or self.high < 0 else "no"


def bootstrap_interval(statistic: Callable[..., Any], *data: npt.NDArray[np.float64], paired: bool = True) -> Interval:
    """Return the 95 % percentile interval of a statistic over 10,000 resamples with replacement, from a fixed seed.

    Batches bound the memory to about 8 MB for each array and its indices.

    Args:
        statistic (Callable): called as ``statistic(*resampled, axis=-1)`` with arrays of resamples, one a row.
        *data (np.ndarray): float64 ``[n]`` each, one observation an element.
        paired (bool): whether element i of every array is one observation, resampled together. Default: True.

    Returns:
        Interval: its ends are NaN if there are fewer than two observations, or if the statistic of a resample is not
            finite (a ratio to 0), so that its distribution has no percentiles.
    """
    from scipy.stats import DegenerateDataWarning, bootstrap

    fewest = min(map(len, data))
    if fewest < 2:
        return Interval(math.nan, math.nan, fewest)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateDataWarning)  # reported by returning NaN
        result = bootstrap(
            data,
            statistic,
            paired=paired,
            vectorized=True,
            method="percentile",
            n_resamples=NUM_RESAMPLES,
            confidence_level=CONFIDENCE_LEVEL,
            batch=max(1, _BATCH_ELEMENTS // max(map(len, data))),
            rng=np.random.default_rng(SEED),
        )
    known = np.isfinite(result.bootstrap_distribution).all()
    low, high = result.confidence_interval if known else (math.nan, math.nan)
    return Interval(float(low), float(high), fewest)


class SeedEstimate(NamedTuple):
    """A mean over seeds and its 95 % interval.

    Args:
        mean (float): infinite or NaN if a value is; NaN without values.
        low (float): lower end of the interval; NaN from fewer than two seeds, or if a value is not finite.
        high (float): upper end; NaN as ``low``.
        num_seeds (int): number of values.
    """

    mean: float
    low: float
    high: float
    num_seeds: int


def over_seeds(values: Sequence[float]) -> SeedEstimate:
    """Average over seeds, with Student's t-interval.

    With the mean x̄ and the standard deviation s of n values, of independent and roughly normal seeds::

        x̄ ± t(0.975; n - 1) · s / √n

    Applied to the differences of seeds that two objectives share, it is the interval of the paired t-test.

    Args:
        values (Sequence[float]): one for each seed.
    """
    number = len(values)
    finite = all(map(math.isfinite, values))
    mean = float(np.mean(values)) if finite and number else sum(values) / number if number else math.nan
    if number < 2 or not finite:
        return SeedEstimate(mean, math.nan, math.nan, number)
    from scipy.stats import t

    deviation = 0.0 if min(values) == max(values) else float(np.std(values, ddof=1))  # equal values: no rounding
    half = float(t.ppf((1 + CONFIDENCE_LEVEL) / 2, number - 1)) * deviation / math.sqrt(number)
    return SeedEstimate(mean, mean - half, mean + half, number)


def verdict(lms: SeedEstimate, log_perplexity: SeedEstimate) -> str:
    """Describe how an objective differs from a reference.

    Lower is an interval below 0, higher one above 0; an interval with 0 at an end is neither. "Better" is a lower LMS
    at a perplexity that is not higher: its interval ends at or below 0. "Worse" is the mirror image.

    Args:
        lms (SeedEstimate): of the differences, objective minus reference.
        log_perplexity (SeedEstimate): of the differences, objective minus reference.

    Returns:
        str: one of ``VERDICTS``.
    """
    if min(lms.num_seeds, log_perplexity.num_seeds) < 2:
        return _TOO_FEW
    if math.isnan(lms.low) or math.isnan(log_perplexity.low):
        return _DIVERGED
    recited, perplexity = ((one.low > 0) - (one.high < 0) for one in (lms, log_perplexity))
    if recited < 0 and log_perplexity.high <= 0:
        return BETTER
    if recited > 0 and log_perplexity.low >= 0:
        return WORSE
    return _VERDICTS[recited, perplexity]
