"""95 % intervals over seeds, and over seeds and passages, with p-values."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import stdtr, stdtrit
from scipy.stats import t

from tfidf_tune.results.intervals import (
    BATCH_ELEMENTS,
    CONFIDENCE_LEVEL,
    NUM_RESAMPLES,
    SEED,
    share_beyond_0,
)

_ROUNDING = 1e-12  # so small a difference is 0


class SeedEstimate(NamedTuple):
    """A mean over seeds and its 95 % interval; NaN from fewer than two seeds, or if a value is not
    finite.
    """

    mean: float  # infinite or NaN if a value is; NaN without values
    low: float
    high: float
    num_seeds: int
    p_value: float = math.nan  # two-sided, of a mean of 0


def over_seeds(values: Sequence[float]) -> SeedEstimate:
    """Average over seeds, with Student's t-interval.

    With the mean x̄ and the standard deviation s of n values, of independent and roughly normal
    seeds::

        x̄ ± t(0.975; n - 1) · s / √n

    Applied to the differences of seeds that two objectives share, it is the interval of the paired
    t-test, and the p-value is that of the test.

    Args:
        values (Sequence[float]): one for each seed.
    """
    number = len(values)
    finite = all(map(math.isfinite, values))
    if number == 0:
        mean = math.nan
    elif finite:
        mean = float(np.mean(values))
    else:
        mean = sum(values) / number
    if number < 2 or not finite:
        return SeedEstimate(mean, math.nan, math.nan, number)
    # Equal values: no rounding.
    deviation = 0.0 if min(values) == max(values) else float(np.std(values, ddof=1))
    error = deviation / math.sqrt(number)
    half = float(t.ppf((1 + CONFIDENCE_LEVEL) / 2, number - 1)) * error
    p_value = 2 * float(t.sf(abs(mean) / error, number - 1)) if error else float(not mean)
    return SeedEstimate(mean, mean - half, mean + half, number, p_value)


def over_seeds_and_passages(
    values: npt.NDArray[np.float64], controls: npt.NDArray[np.float64] | None = None
) -> SeedEstimate:
    """Average over seeds that share their passages, with an interval for the choice of both.

    A two-way bootstrap, parametric over seeds. Of the mean x̄, the standard deviation s of the n
    seeds' means and the passages' deviations bⱼ (means over seeds minus x̄), the interval has the
    2.5 and 97.5 % quantiles of 10,000 draws::

        x̄ + T · s / √n + mean of resampled bⱼ        T of Student's t with n - 1 degrees of freedom

    If passages do not differ, it is :func:`over_seeds`; if seeds do not, the percentile bootstrap
    over passages, with the p-value of :func:`bootstrap_interval`. Seeds are not resampled because
    the mean of so few varies too little. What seeds and passages do to each other counts twice, so
    the interval is rather too wide (Owen 2007, "The pigeonhole bootstrap").

    Args:
        values (np.ndarray): float64 ``[seeds, passages]``, for example differences of two
            objectives.
        controls (np.ndarray | None): float64 ``[seeds, other passages]``: their mean is subtracted
            from each seed's, and they are resampled independently. If there is a single one, or a
            single value for each seed, only the others are resampled. Default: None.
    """
    samples = [values] if controls is None else [values, -controls]
    estimate = over_seeds(sum(sample.mean(axis=1) for sample in samples).tolist())
    if math.isnan(estimate.low) or max(sample.shape[1] for sample in samples) < 2:
        return estimate
    deviations = [sample.mean(axis=0) - sample.mean(axis=1).mean() for sample in samples]
    if np.allclose(np.concatenate(deviations), 0, rtol=0, atol=_ROUNDING):
        return estimate
    rng = np.random.default_rng(SEED)
    degrees = estimate.num_seeds - 1
    means = np.zeros(NUM_RESAMPLES)
    for passages in deviations:
        for rows in np.array_split(means, max(1, NUM_RESAMPLES * len(passages) // BATCH_ELEMENTS)):
            rows += passages[rng.integers(len(passages), size=(len(rows), len(passages)))].mean(
                axis=1
            )
    error = (estimate.high - estimate.mean) / float(stdtrit(degrees, (1 + CONFIDENCE_LEVEL) / 2))
    # Quantiles of T in random order are a sample of it without its noise.
    seeds = error * rng.permutation(
        stdtrit(degrees, (np.arange(NUM_RESAMPLES) + 0.5) / NUM_RESAMPLES)
    )
    draws = estimate.mean + seeds + means
    low, high = np.quantile(draws, [(1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2])
    if error > _ROUNDING:
        # Exact over T, so that the p-value has no lower limit.
        below = float(np.mean(stdtr(degrees, -(estimate.mean + means) / error)))
        p_value = 2 * min(below, 1 - below)
    else:
        p_value = share_beyond_0(draws.round(12))  # else a 0 can miss 0
    return SeedEstimate(estimate.mean, float(low), float(high), estimate.num_seeds, p_value)
