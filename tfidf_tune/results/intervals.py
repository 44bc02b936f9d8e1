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
        if self.low > 0 or self.high < 0:
            return "yes"
        return "no"


def bootstrap_interval(
    statistic: Callable[..., Any], *data: npt.NDArray[np.float64], paired: bool = True
) -> Interval:
    """Return the 95 % percentile interval of a statistic over 10,000 resamples with replacement,
    from a fixed seed.

    An observation is a passage with all of its prompts, which stay together (a cluster bootstrap):
    it brings the sum of its values over the prefix lengths, and their number. For example, three
    passages are each asked with prompts of 16 and 32 tokens::

        LMS of its two prompts    sum    count
        passage 0:  4,  6          10      2
        passage 1:  0,  2           2      2
        passage 2: 10, 14          24      2      average (10 + 2 + 24) / 6 = 6

    A resample draws three passages with replacement, say 2, 0 and 2. Its sums are ``[24, 10, 24]``
    and its counts ``[2, 2, 2]``, an average of 58 / 6 = 9.67: both prompts of passage 2 count
    twice. A draw of six of the six values would take two prompts of a passage for independent, and
    the interval would be too narrow. The interval leaves out the lowest 2.5 % of the 10,000
    averages, and the highest 2.5 %.

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

    sizes = [len(observations) for observations in data]
    fewest = min(sizes)
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
            batch=max(1, BATCH_ELEMENTS // max(sizes)),
            rng=np.random.default_rng(SEED),
        )
    resampled = result.bootstrap_distribution
    if not np.isfinite(resampled).all():
        return Interval(math.nan, math.nan, fewest)
    low, high = result.confidence_interval
    return Interval(float(low), float(high), fewest, share_beyond_0(resampled))


def binomial_upper_bound(num_found: int, number: int) -> float:
    """Return the one-sided 95 % upper bound of a share (Clopper and Pearson 1934); with none of 300
    it is 0.0099.
    """
    from scipy.stats import beta

    if num_found == number:
        return 1.0
    return float(beta.ppf(CONFIDENCE_LEVEL, num_found + 1, number - num_found))


def binomial_interval(num_found: int, number: int) -> tuple[float, float]:
    """Return the two-sided 95 % interval of a share (Clopper and Pearson 1934):
    of none of 10 it is 0 to 0.308, of 5 of 10 0.187 to 0.813.
    """
    from scipy.stats import beta

    outside = (1 - CONFIDENCE_LEVEL) / 2
    low = 0.0
    high = 1.0
    if num_found > 0:
        low = float(beta.ppf(outside, num_found, number - num_found + 1))
    if num_found < number:
        high = float(beta.ppf(1 - outside, num_found + 1, number - num_found))
    return low, high


def share_beyond_0(resamples: npt.NDArray[np.float64]) -> float:
    """Return the two-sided p-value of 0 of :func:`bootstrap_interval`."""
    num_below = int(np.count_nonzero(resamples <= 0))
    num_above = int(np.count_nonzero(resamples >= 0))
    one_sided = (1 + min(num_below, num_above)) / (1 + len(resamples))
    return min(1.0, 2 * one_sided)


def holm(p_values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Adjust p-values for their number (Holm 1979): at most 5 % of tables then have a false
    difference below 0.05.

    Of m values in ascending order, the i-th becomes the largest of (m - j + 1) · pⱼ over j ≤ i, at
    most 1. For example 0.01, 0.02 and 0.03 become 3 · 0.01 = 0.03, 2 · 0.02 = 0.04, and 0.04 again,
    because 1 · 0.03 is less.

    Args:
        p_values (ArrayLike): ``[m]``; those that are NaN stay NaN and do not count.

    Returns:
        np.ndarray: float64 ``[m]``.
    """
    values = np.array(p_values, dtype=np.float64)
    num_known = np.count_nonzero(~np.isnan(values))
    order = np.argsort(values, kind="stable")[:num_known]  # NaN is last
    factors = np.arange(num_known, 0, -1)
    adjusted = np.maximum.accumulate(values[order] * factors)
    values[order] = np.minimum(1.0, adjusted)
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
    num_members = members.shape[1]
    num_others = others.shape[1]
    fewest = min(num_members, num_others)
    is_finite = np.isfinite(members).all() and np.isfinite(others).all()
    if fewest == 0 or not is_finite:
        unknown = Interval(math.nan, math.nan, fewest)
        return Membership(math.nan, unknown, math.nan, unknown)
    wins = win_shares(members, others)

    # Indices of passages are resampled, so that a passage keeps its scores under all models.
    def auc_of(member_indices: Any, other_indices: Any, axis: int = -1) -> Any:
        member_counts = _counts(member_indices, num_members)
        other_counts = _counts(other_indices, num_others)
        won = (member_counts @ wins) * other_counts
        return won.sum(axis) / wins.size

    def tpr_of(member_indices: Any, other_indices: Any, axis: int = -1) -> Any:
        drawn_members = members[:, member_indices.astype(np.int64)]
        drawn_others = others[:, other_indices.astype(np.int64)]
        return true_positive_rate(drawn_members, drawn_others).mean(axis=0)

    all_members = np.arange(num_members, dtype=np.float64)
    all_others = np.arange(num_others, dtype=np.float64)
    return Membership(
        auc=float(wins.mean()),
        auc_interval=bootstrap_interval(auc_of, all_members, all_others, paired=False),
        tpr=float(true_positive_rate(members, others).mean()),
        tpr_interval=bootstrap_interval(tpr_of, all_members, all_others, paired=False),
    )


def auc_difference(
    before: tuple[Floats, Floats], after: tuple[Floats, Floats]
) -> tuple[tuple[float, float], Interval]:
    """Compare how well two scores of the same passages separate members from others.

    Args:
        before (tuple[np.ndarray, np.ndarray]): float64 ``[n]`` of members and ``[k]`` of others.
        after (tuple[np.ndarray, np.ndarray]): another score of the same passages.

    Returns:
        tuple[tuple[float, float], Interval]: both AUCs, and the interval of the second minus the
            first: passages are resampled with both of their scores, members and others separately.
    """
    wins_before, wins_after = (
        win_shares(members[None], others[None]) for members, others in (before, after)
    )
    change = wins_after - wins_before
    num_members, num_others = change.shape

    def mean_change(member_indices: Any, other_indices: Any, axis: int = -1) -> Any:
        member_counts = _counts(member_indices, num_members)
        other_counts = _counts(other_indices, num_others)
        changed = (member_counts @ change) * other_counts
        return changed.sum(axis) / change.size

    interval = bootstrap_interval(
        mean_change,
        np.arange(num_members, dtype=np.float64),
        np.arange(num_others, dtype=np.float64),
        paired=False,
    )
    return (float(wins_before.mean()), float(wins_after.mean())), interval


def clustered_auc(
    members: Floats,
    others: Floats,
    member_clusters: npt.NDArray[np.int64],
    other_clusters: npt.NDArray[np.int64],
) -> tuple[float, Interval]:
    """Measure how well a score separates members from others, where passages of one document are
    no independent observations.

    The interval is a percentile bootstrap over documents: those of members and of others are drawn
    separately, a document with all of its passages. If each passage is a document of its own, it is
    that of :func:`membership`.

    Args:
        members (np.ndarray): float64 ``[n]``, finite scores of members.
        others (np.ndarray): float64 ``[k]``, finite scores of others.
        member_clusters (np.ndarray): int64 ``[n]``, the document of each member.
        other_clusters (np.ndarray): int64 ``[k]``, the document of each other passage.

    Returns:
        tuple[float, Interval]: the AUC and its interval over documents.
    """
    wins = win_shares(members[None], others[None])
    # Wins of each pair of documents, and the number of passages of each document.
    rows = np.unique(member_clusters, return_inverse=True)[1]
    columns = np.unique(other_clusters, return_inverse=True)[1]
    num_members = np.bincount(rows).astype(np.float64)
    num_others = np.bincount(columns).astype(np.float64)
    wins_of_pairs = np.zeros((len(num_members), len(num_others)))
    np.add.at(wins_of_pairs, (rows[:, None], columns[None, :]), wins)

    def auc_of(member_indices: Any, other_indices: Any, axis: int = -1) -> Any:
        member_counts = _counts(member_indices, len(num_members))
        other_counts = _counts(other_indices, len(num_others))
        won = ((member_counts @ wins_of_pairs) * other_counts).sum(axis)
        return won / ((member_counts @ num_members) * (other_counts @ num_others))

    interval = bootstrap_interval(
        auc_of,
        np.arange(len(num_members), dtype=np.float64),
        np.arange(len(num_others), dtype=np.float64),
        paired=False,
    )
    return float(wins.mean()), interval


def _counts(indices: Floats, size: int) -> Floats:
    """Count how often each row has each index below ``size``.

    Rows ``[0, 0, 2]`` and ``[1, 2, 2]`` with size 3 are counted at once, the second with 3 added:
    0, 0, 2, 4, 5, 5 have the counts ``[2, 0, 1, 0, 1, 2]``, of which each row has three.
    """
    rows = indices.reshape(-1, indices.shape[-1]).astype(np.int64)
    rows += size * np.arange(len(rows))[:, None]
    counts = np.bincount(rows.ravel(), minlength=size * len(rows))
    shape = (*indices.shape[:-1], size)
    return counts.reshape(shape).astype(np.float64)
