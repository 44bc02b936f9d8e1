"""95 % intervals over passages, p-values and their correction."""

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tfidf_tune.probe.membership_scores import Floats, true_positive_rate, win_shares

NUM_RESAMPLES = 10_000
CONFIDENCE_LEVEL = 0.95
ALPHA = 0.05  # of p-values
SEED = 0
# If nothing changed, percentile intervals exclude 0 in about 25 % of cases from 3 observations, 12
# % from 8, 7 to 11 % from 10 to 29, and 6 % from 30, instead of 5 %. Below MIN_UNITS there is no
# verdict, below ENOUGH_UNITS a caveat.
MIN_UNITS = 10
ENOUGH_UNITS = 30
# Numbers in memory at once for each array: 8 MB.
BATCH_ELEMENTS = 2**20


class Interval(NamedTuple):
    """A 95 % interval.

    Attributes:
        low (float): lower end; NaN if there is no interval, see :func:`bootstrap_interval`.
        high (float): upper end; NaN as ``low``.
        num_units (int): how many observations were resampled; of two samples, the size of the
            smaller.
        p_value (float): two-sided, of the value 0; NaN if there is no interval. Default: NaN.
    """

    low: float
    high: float
    num_units: int
    p_value: float = math.nan

    @property
    def significant(self) -> Literal["yes", "no", "too few"] | None:
        """Whether 0 lies outside (an end of exactly 0 is inside); "too few" below ``MIN_UNITS``
        observations.
        """
        if math.isnan(self.low):
            return None
        if self.num_units < MIN_UNITS:
            return "too few"
        return "yes" if self.low > 0 or self.high < 0 else "no"


def bootstrap_interval(
    statistic: Callable[..., Any], *data: npt.NDArray[np.float64], paired: bool = True
) -> Interval:
    """Return the 95 % percentile interval of a statistic over 10,000 resamples with replacement,
    from a fixed seed.

    Batches bound the memory to about 8 MB for each array and its indices. The p-value is twice the
    smaller share of resamples at or beyond 0 on one side, with the value itself counted as one of
    them (Davison and Hinkley 1997, 4.2), so it is at least 0.0002.

    Args:
        statistic (Callable): called as ``statistic(*resampled, axis=-1)`` with arrays of resamples,
            one a row.
        *data (np.ndarray): float64 ``[n]`` each, one observation an element.
        paired (bool): whether element i of every array is one observation, resampled together.
            Default: True.

    Returns:
        Interval: its ends are NaN if there are fewer than two observations, or if the statistic of
            a resample is not finite (a ratio to 0), so that its distribution has no percentiles.
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
            batch=max(1, BATCH_ELEMENTS // max(map(len, data))),
            rng=np.random.default_rng(SEED),
        )
    known = np.isfinite(result.bootstrap_distribution).all()
    low, high = result.confidence_interval if known else (math.nan, math.nan)
    p_value = share_beyond_0(result.bootstrap_distribution) if known else math.nan
    return Interval(float(low), float(high), fewest, p_value)


def binomial_upper_bound(num_found: int, number: int) -> float:
    """Return the one-sided 95 % upper bound of a share (Clopper and Pearson 1934); with none of 300
    it is 0.0099.
    """
    from scipy.stats import beta

    return (
        1.0
        if num_found == number
        else float(beta.ppf(CONFIDENCE_LEVEL, num_found + 1, number - num_found))
    )


def share_beyond_0(resamples: npt.NDArray[np.float64]) -> float:
    """Return the two-sided p-value of 0 of :func:`bootstrap_interval`."""
    fewest_beyond = min(np.count_nonzero(resamples <= 0), np.count_nonzero(resamples >= 0))
    return min(1.0, 2 * (1 + int(fewest_beyond)) / (1 + len(resamples)))


def holm(p_values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Adjust p-values for their number (Holm 1979): at most 5 % of tables then have a false
    difference below 0.05.

    Of m values in ascending order, the i-th becomes the largest of (m - j + 1) · pⱼ over j ≤ i, at
    most 1.

    Args:
        p_values (ArrayLike): ``[m]``; those that are NaN stay NaN and do not count.

    Returns:
        np.ndarray: float64 ``[m]``.
    """
    values = np.array(p_values, dtype=np.float64)
    order = np.argsort(values, kind="stable")[: np.count_nonzero(~np.isnan(values))]  # NaN is last
    values[order] = np.minimum(
        1.0, np.maximum.accumulate(values[order] * np.arange(len(order), 0, -1))
    )
    return values


class Membership(NamedTuple):
    """How well a score separates members of the training text from others.

    Attributes:
        auc (float): probability that a member has a higher score than another passage, ties counted
            half: 0.5 is chance. NaN if a score is not finite.
        auc_interval (Interval): of the AUC, over passages.
        tpr (float): share of the members above a threshold that at most 1 % of the others exceed.
        tpr_interval (Interval): of the TPR, over passages.
    """

    auc: float
    auc_interval: Interval
    tpr: float
    tpr_interval: Interval


def membership(members: Floats, others: Floats) -> Membership:
    """Measure how well a score separates members from others, on average over models.

    The intervals are percentile bootstraps over passages; members and others are resampled
    separately, and a passage with its scores under all models.

    Args:
        members (np.ndarray): float64 ``[m, n]``, scores of n passages of the training text under m
            models.
        others (np.ndarray): float64 ``[m, k]``, scores of k passages that are not in it.
    """
    fewest = min(members.shape[1], others.shape[1])
    if fewest == 0 or not (np.isfinite(members).all() and np.isfinite(others).all()):
        unknown = Interval(math.nan, math.nan, fewest)
        return Membership(math.nan, unknown, math.nan, unknown)
    wins = win_shares(members, others)

    def auc_of(member_indices: Any, other_indices: Any, axis: int = -1) -> Any:
        member_counts, other_counts = map(_counts, (member_indices, other_indices), wins.shape)
        return ((member_counts @ wins) * other_counts).sum(axis) / wins.size

    def tpr_of(member_indices: Any, other_indices: Any, axis: int = -1) -> Any:
        drawn = (
            members[:, member_indices.astype(np.int64)],
            others[:, other_indices.astype(np.int64)],
        )
        return true_positive_rate(*drawn).mean(axis=0)

    member_indices, other_indices = (
        np.arange(scores.shape[1], dtype=np.float64) for scores in (members, others)
    )
    return Membership(
        float(wins.mean()),
        bootstrap_interval(auc_of, member_indices, other_indices, paired=False),
        float(true_positive_rate(members, others).mean()),
        bootstrap_interval(tpr_of, member_indices, other_indices, paired=False),
    )


def _counts(indices: Floats, size: int) -> Floats:
    """Count how often each row has each index below ``size``."""
    rows = indices.reshape(-1, indices.shape[-1]).astype(np.int64)
    rows += size * np.arange(len(rows))[:, None]  # so that the rows are counted at once
    return (
        np.bincount(rows.ravel(), minlength=size * len(rows))
        .reshape(*indices.shape[:-1], size)
        .astype(np.float64)
    )
