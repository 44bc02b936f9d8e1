"""Whether likelihoods reveal the training text: scores of a passage, membership inference,
extraction by sampling.

Pure functions on arrays. The higher a membership score, the more likely the passage was in the
training text.
"""

import math
import zlib
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

_LOWEST_SHARE = 0.2  # of the tokens, which Min-K% and Min-K%++ average over; at least one
_WINDOW_SIZES = (2, 3, 4, 6, 9, 13, 18, 25, 32, 40)  # in tokens, of WBC
_LEAST_ERRORS = 2  # wrongly predicted tokens, of which the error zone has a ratio
Floats: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]


def passage_scores(nll: Floats, standardized: Floats | None, text: str) -> dict[str, float]:
    """Return the scores of a passage.

    ==================  ============================================================================
    ``nll``             mean of ``-ln P(x_t | x_<t)``
    ``min_k``           Min-K%: mean of ``ln P(x_t | x_<t)`` over the 20 % least likely tokens (Shi
                        et al. 2023, https://arxiv.org/abs/2310.16789)
    ``min_k_plus_plus`` Min-K%++: mean of the 20 % lowest standardized log-probabilities (Zhang et
                        al. 2024, https://arxiv.org/abs/2404.02936)
    ``zlib``            sum of the NLL / bytes of the text compressed by zlib (Carlini et al. 2021,
                        https://arxiv.org/abs/2012.07805, have the mean over the tokens in place of
                        the sum)
    ==================  ============================================================================

    ``nll`` and ``standardized``, see :func:`token_likelihoods`, are float64 ``[n]`` of the
    predicted tokens; without ``standardized`` Min-K%++ is left out.
    """
    num_lowest = max(1, int(len(nll) * _LOWEST_SHARE))
    scores = {"nll": float(nll.mean())}
    least_likely = np.sort(-nll)[:num_lowest]
    scores["min_k"] = float(least_likely.mean())
    if standardized is not None:
        lowest = np.sort(standardized)[:num_lowest]
        scores["min_k_plus_plus"] = float(lowest.mean())
    scores["zlib"] = zlib_score(float(nll.sum()), text)
    return scores


def zlib_score(nll_sum: float, text: str) -> float:
    """Return the NLL of a text per byte of its zlib compression; see :func:`passage_scores`."""
    compressed = zlib.compress(text.encode("utf-8"))
    return nll_sum / len(compressed)


def reference_scores(nll: Floats, reference_nll: Floats, greedy: Flags | None) -> dict[str, float]:
    """Return the scores of a passage that compare the model with a reference model.

    =================  =============================================================================
    ``reference_nll``  mean of ``-ln P(x_t | x_<t)`` under the reference
    ``wbc``            :func:`window_comparison`
    ``error_zone``     :func:`error_zone`; left out without ``greedy``
    =================  =============================================================================

    ``nll`` and ``reference_nll`` are float64 ``[n]`` of the same tokens under the model and under
    the reference, which did not see the training text. ``greedy`` is bool ``[n]``, whether no other
    token is more probable to the model. Where a log-probability is infinite, both comparisons are
    NaN.
    """
    scores = {"reference_nll": float(reference_nll.mean())}
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        differences = reference_nll - nll
    scores["wbc"] = window_comparison(differences)
    if greedy is not None:
        scores["error_zone"] = error_zone(differences, greedy)
    return scores


def window_comparison(differences: Floats) -> float:
    """Return in how many windows of a passage the model finds the text likelier than the reference.

    WBC, window-based comparison (Chen et al. 2026, https://arxiv.org/abs/2601.02751), of the
    differences ``d_t = ln P(x_t | x_<t) - ln P_reference(x_t | x_<t)``::

        share(w) = windows of w tokens in a row with a positive sum of d / (n - w + 1)
        WBC = mean of share(w) over w in 2, 3, 4, 6, 9, 13, 18, 25, 32, 40

    The sizes are those of the authors' settings; the formula in their text gives others:
    2, 3, 4, 5, 8, 11, 15, 21, 29, 40. A size above n is left out, where their code takes a window
    over the whole passage instead. A passage of one token is one window.

    Many passages can have only positive windows, or none. Their order is that of the mean of
    ``d`` in a window, m, averaged over windows and then sizes::

        all windows positive:   1 + m / (1 + |m|), between 1 and 2
        no window positive:     0 + m / (1 + |m|), between -1 and 0

    So no passage changes places with one of another WBC, which is between 0 and 1.

    Args:
        differences (Floats): float64 ``[n]``, at least one; NaN is returned if one is not finite.
    """
    if not np.isfinite(differences).all():
        return math.nan
    sizes = [size for size in _WINDOW_SIZES if size <= len(differences)]
    if not sizes:
        sizes = [len(differences)]
    shares = []
    means = []
    for size in sizes:
        # Not by a cumulative sum, whose rounding could make a sum of 0 positive.
        sums = sliding_window_view(differences, size).sum(axis=-1)
        shares.append((sums > 0).mean())
        means.append(sums.mean() / size)
    share = float(np.mean(shares))
    if share in (0.0, 1.0):
        return share + _bounded(float(np.mean(means)))
    return share


def error_zone(differences: Floats, greedy: Flags) -> float:
    """Return how much of the change at wrongly predicted tokens is towards the passage.

    Error zone (Ilić et al. 2026, https://arxiv.org/abs/2601.12104), of the differences ``d_t`` of
    :func:`window_comparison` at the tokens to which the model prefers another::

        P = sum of d_t over d_t > 0        N = sum of -d_t over d_t < 0
        error zone = P / N                 here P / (P + N), between 0 and 1

    P / (P + N) orders passages as P / N does, and is finite.

    There is no ratio with fewer than two such tokens (one would give 0 or infinity) or with N = 0.
    The appendix of the paper takes these passages for members, the authors' code gives them the
    lowest score, 0. Here they rank above all others: a model that predicts each token of a passage
    shows the strongest sign of memorization, and P / N grows without bound as N goes to 0. Among
    them, the mean m of ``d`` over all tokens decides, so that text that is easy for the reference,
    too, comes last: ``2 + m / (1 + |m|)``, between 1 and 3.

    Args:
        differences (Floats): float64 ``[n]``, at least one; NaN is returned if one is not finite.
        greedy (Flags): bool ``[n]``, whether no other token is more probable to the model.
    """
    if not np.isfinite(differences).all():
        return math.nan
    at_errors = differences[~greedy]
    towards = float(at_errors[at_errors > 0].sum())
    away = float(-at_errors[at_errors < 0].sum())
    if len(at_errors) < _LEAST_ERRORS or away == 0:
        return 2 + _bounded(float(differences.mean()))
    return towards / (towards + away)


def _bounded(value: float) -> float:
    """Map numbers to the interval from -1 to 1, in their order."""
    return value / (1 + abs(value))


def roc_auc(members: Floats, others: Floats) -> float:
    """Return the AUC of finite scores ``[n]`` of members and ``[k]`` of others; see
    :class:`Membership`.
    """
    return float(win_shares(members[None], others[None]).mean())


def win_shares(members: Floats, others: Floats) -> Floats:
    """Return ``[n, k]`` how often, over models, a member has the higher score: the statistic U of
    Mann and Whitney.
    """
    # Ties count half, so that equal scores give 0.5.
    members_mn1 = members[:, :, None]
    others_m1k = others[:, None, :]
    above = (members_mn1 > others_m1k).mean(axis=0)
    equal = (members_mn1 == others_m1k).mean(axis=0)
    return np.asarray(above + equal / 2)


def true_positive_rate(members: Floats, others: Floats, false_positive_rate: float = 0.01) -> Any:
    """Return the share of members with a score above a threshold that at most a given share of the
    others exceeds.

    With fewer than 100 others and a rate of 1 %, the threshold is the highest score of the others.
    Scores are float64, ``[..., n]`` of members and ``[..., k]`` of others; the rate is at least 0
    and less than 1.
    """
    threshold = threshold_of(others, false_positive_rate)
    return (members > threshold).mean(axis=-1)


def threshold_of(others: Floats, false_positive_rate: float = 0.01) -> Any:
    """Return the threshold of :func:`true_positive_rate`, ``[..., 1]`` for others ``[..., k]``."""
    # The threshold is a score of the others: as many as are allowed lie above it. Of 100 others and
    # a rate of 0.29 that are 29, although the product falls short of it by rounding.
    num_others = others.shape[-1]
    num_above = math.floor(false_positive_rate * num_others + 1e-9)
    rank = num_others - 1 - num_above
    return np.partition(others, rank, axis=-1)[..., rank, None]


def exposure(nll: Floats, control_nll: Floats) -> Floats:
    """Return the exposure of passages in bits (Carlini et al. 2019, "The Secret Sharer",
    https://arxiv.org/abs/1802.08232).

    ``R`` is a passage with the k controls, by which it is ranked::

        exposure = log2 |R| - log2 rank        rank = 1 + number of controls whose NLL is not higher

    It lies in ``[0, log2(k + 1)]``. The paper's extrapolation by a fitted distribution is left out:
    it holds for alternatives drawn at random like the canary, not for passages of other text.
    ``nll`` is float64 ``[n]`` of passages of the training text, ``control_nll`` ``[k]`` of others.
    """
    # side="right": a tie with a control counts against the passage.
    ranks = 1 + np.searchsorted(np.sort(control_nll), nll, side="right")
    return np.asarray(np.log2(len(control_nll) + 1) - np.log2(ranks))


def extraction_probability(nll_sum: Any, num_samples: float) -> Any:
    """Return the probability that at least one of n samples is exactly the true continuation.

    (n, p)-discoverable extraction (Hayes et al. 2024, https://arxiv.org/abs/2410.19482), sampling
    at temperature 1 from the complete distribution::

        q = exp(-NLL)        p = 1 - (1 - q)^n

    ``nll_sum`` is the NLL of a continuation given its prompt, summed over its tokens;
    ``num_samples`` is n.
    """
    # log1p and expm1, because q can be far below the precision of 1 - q.
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        q = np.exp(-np.asarray(nll_sum, dtype=np.float64))
        log_of_miss = np.log1p(-q)
        # 0 times infinity is NaN.
        finite_log = np.maximum(log_of_miss, np.finfo(np.float64).min)
        return -np.expm1(num_samples * finite_log)


def membership_scores(values: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return membership scores, the higher the more likely a member, by attack.

    "Loss" is the NLL, "Loss against start" the NLL minus that under a reference model, which did
    not see the training text. Attacks without values are left out. ``values`` are scores of
    :func:`passage_scores` and :func:`reference_scores`.
    """
    # A low NLL speaks for a member, and a high log-probability.
    scores = {}
    if "nll" in values:
        scores["Loss"] = -values["nll"]
    if "zlib" in values:
        scores["zlib"] = -values["zlib"]
    if "min_k" in values:
        scores["Min-K%"] = values["min_k"]
    if "min_k_plus_plus" in values:
        scores["Min-K%++"] = values["min_k_plus_plus"]
    if "nll" in values and "reference_nll" in values:
        scores["Loss against start"] = values["reference_nll"] - values["nll"]
    if "wbc" in values:
        scores["WBC"] = values["wbc"]
    if "error_zone" in values:
        scores["Error zone"] = values["error_zone"]
    return scores
