"""Means over seeds with Student's t-intervals, and the verdict on two differences."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_CONFIDENCE_LEVEL = 0.95
BETTER, WORSE, NO_DIFFERENCE = "better", "worse", "no difference shown"
_TOO_FEW, _DIVERGED = "no verdict: fewer than two pairs", "no verdict: a run diverged"
# By the direction of LMS and of perplexity: -1 lower, 0 the interval includes 0, 1 higher.
_VERDICTS = {
    (-1, -1): BETTER,
    (-1, 0): "recites less, perplexity not told apart",
    (-1, 1): "recites less, perplexity higher",
    (0, -1): "LMS not told apart, perplexity lower",
    (0, 0): NO_DIFFERENCE,
    (0, 1): "LMS not told apart, perplexity higher",
    (1, -1): "recites more, perplexity lower",
    (1, 0): "recites more, perplexity not told apart",
    (1, 1): WORSE,
}
VERDICTS = (*_VERDICTS.values(), _TOO_FEW, _DIVERGED)
"""All verdicts, the best first."""


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
    half = float(t.ppf((1 + _CONFIDENCE_LEVEL) / 2, number - 1)) * deviation / math.sqrt(number)
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
