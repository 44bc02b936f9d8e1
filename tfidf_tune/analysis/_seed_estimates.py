"""Means over seeds, with intervals that say how far they would move with other seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE_LEVEL = 0.95


@dataclass(frozen=True)
class SeedEstimate:
    """A mean over seeds and its 95 % interval.

    Args:
        mean (float): not finite where a value is not.
        low (float | None): lower end of the interval; None from a single seed, or where a value is not finite.
        high (float | None): its upper end, likewise.
        num_seeds (int): how many values.
    """

    mean: float
    low: float | None
    high: float | None
    num_seeds: int


def over_seeds(values: Sequence[float]) -> SeedEstimate:
    """Average over seeds, with Student's t-interval.

    With the mean x̄ and the standard deviation s of n values, of independent and about normal seeds::

        x̄ ± t(0.975; n - 1) · s / √n

    Values that are all equal have an interval without width. Applied to the differences of seeds that two objectives
    share, it is the interval of the paired t-test.

    Args:
        values (Sequence[float]): one a seed, at least one.

    Returns:
        SeedEstimate: mean and interval.
    """
    from scipy.stats import t

    number = len(values)
    if not all(map(math.isfinite, values)):
        return SeedEstimate(sum(values) / number, None, None, number)
    mean = float(np.mean(values))
    if number == 1:
        return SeedEstimate(mean, None, None, number)
    deviation = 0.0 if min(values) == max(values) else float(np.std(values, ddof=1))  # equal ones, free of rounding
    half = float(t.ppf((1 + CONFIDENCE_LEVEL) / 2, number - 1)) * deviation / math.sqrt(number)
    return SeedEstimate(mean, mean - half, mean + half, number)
