"""Means over seeds with Student's t-intervals, and the verdict on two differences."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_CONFIDENCE_LEVEL = 0.95
BETTER, WORSE, NO_DIFFERENCE = "better", "worse", "no difference shown"
_TOO_FEW, _DIVERGED = "no verdict: fewer than two pairs", "no verdict: a run diverged"
# By the direction of LMS and of perplexity: -1 lower, 0 not told apart, 1 higher.
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


@dataclass(frozen=True)
class SeedEstimate:
    """A mean over seeds and its 95 % interval.

    Args:
        mean (float): not finite if a value is not.
        low (float | None): lower end of the interval; None from a single seed, or if a value is not finite.
        high (float | None): upper end, likewise.
        num_seeds (int): how many values.
    """

    mean: float
    low: float | None
    high: float | None
    num_seeds: int


def over_seeds(values: Sequence[float]) -> SeedEstimate:
    """Average over seeds, with Student's t-interval.

    With the mean x̄ and the standard deviation s of n values, of independent and roughly normal seeds::

        x̄ ± t(0.975; n - 1) · s / √n

    Applied to the differences of seeds that two objectives share, it is the interval of the paired t-test.

    Args:
        values (Sequence[float]): one a seed, at least one.
    """
    from scipy.stats import t

    number = len(values)
    if not all(map(math.isfinite, values)):
        return SeedEstimate(sum(values) / number, None, None, number)
    mean = float(np.mean(values))
    if number == 1:
        return SeedEstimate(mean, None, None, number)
    deviation = 0.0 if min(values) == max(values) else float(np.std(values, ddof=1))  # equal values: no rounding
    half = float(t.ppf((1 + _CONFIDENCE_LEVEL) / 2, number - 1)) * deviation / math.sqrt(number)
    return SeedEstimate(mean, mean - half, mean + half, number)


def verdict(lms: SeedEstimate | None, log_perplexity: SeedEstimate | None) -> str:
    """Say in words how an objective differs from a reference.

    Lower is an interval below 0, higher one above 0; 0 itself is in neither. "Better" is a lower LMS at a perplexity
    that is not higher: one whose interval ends at or below 0. "Worse" is the mirror image.

    Args:
        lms (SeedEstimate | None): objective minus reference; None if there is no pair of runs.
        log_perplexity (SeedEstimate | None): likewise.

    Returns:
        str: one of ``VERDICTS``.
    """
    if lms is None or log_perplexity is None or min(lms.num_seeds, log_perplexity.num_seeds) < 2:
        return _TOO_FEW
    if lms.low is None or lms.high is None or log_perplexity.low is None or log_perplexity.high is None:
        return _DIVERGED
    recited, perplexity = _direction(lms.low, lms.high), _direction(log_perplexity.low, log_perplexity.high)
    if recited < 0 and log_perplexity.high <= 0:
        return BETTER
    if recited > 0 and log_perplexity.low >= 0:
        return WORSE
    return _VERDICTS[recited, perplexity]


def _direction(low: float, high: float) -> int:
    return (low > 0) - (high < 0)
