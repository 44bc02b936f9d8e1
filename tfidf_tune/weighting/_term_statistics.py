"""From counts to weights: term frequency, inverse document frequency, normalisation, as pure functions."""

from typing import Literal, get_args

import torch
from torch import Tensor

TermFrequency = Literal["count", "log", "binary"]
TERM_FREQUENCIES: tuple[TermFrequency, ...] = get_args(TermFrequency)
# Weights with a smaller sum count as none: a number of tokens divided by it still is a float32.
_SMALLEST_SUM = 2.0**-100


def term_frequency(counts: Tensor, form: TermFrequency) -> Tensor:
    r"""Turn counts within a document into term frequencies.

    ``count`` is the paper's :math:`\mathrm{tf} = c`; ``log`` is the sublinear :math:`1 + \ln c`;
    ``binary`` is 1, which leaves IDF alone.

    Args:
        counts (Tensor): occurrences of each token in its document, integer, at least 1, any shape.
        form (TermFrequency): one of ``count``, ``log``, ``binary``.

    Returns:
        Tensor: float32, same shape.

    Raises:
        ValueError: If ``form`` is not one of the three.
    """
    if form == "count":
        return counts.float()
    if form == "log":
        return 1 + counts.float().log()
    if form == "binary":
        return torch.ones_like(counts, dtype=torch.float32)
    raise ValueError(f"tf is '{form}': possible are {', '.join(TERM_FREQUENCIES)}")


def inverse_document_frequency(document_frequency: Tensor, num_documents: Tensor) -> Tensor:
    r"""Smoothed inverse document frequency, :math:`\mathrm{idf} = \ln\frac{1 + N}{1 + \mathrm{df}} + 1`.

    Source: "Rebalancing Token Importance in Language Models with TF-IDF Weighted Cross-Entropy Loss", section
    3.1. With nothing counted yet (N = 0, df = 0) it is 1.

    Args:
        document_frequency (Tensor): df, the number of documents that contain the token, integer, any shape.
        num_documents (Tensor): N, the number of documents counted, integer scalar.

    Returns:
        Tensor: float32, the shape of ``document_frequency``.
    """
    return ((1 + num_documents) / document_frequency.float().add_(1)).log_().add_(1)


def unit_mean(raw_weights: Tensor, valid: Tensor, max_weight: float | None = None) -> Tensor:
    r"""Scale weights to mean 1 over the valid tokens: :math:`w_i = w'_i / (\frac{1}{M}\sum_j w'_j)`.

    With ``max_weight`` the scale :math:`c` is the one for which the mean of
    :math:`w_i = \min(c\,w'_i, \mathrm{max\_weight})` is 1, so that a cap changes neither the mean nor the learning
    rate that suits it. With k tokens at the cap :math:`c = (M - k\,\mathrm{max\_weight}) / \sum_{i>k} w'_i` over
    weights in descending order, and k is the number of positions at which that c would still exceed the cap.

    Args:
        raw_weights (Tensor): non-negative, float32, any shape; with ``max_weight`` positive where ``valid``.
        valid (Tensor): bool, same shape.
        max_weight (float | None): largest weight, at least 1. Default: None, no cap.

    Returns:
        Tensor: float32, same shape; 0 where not ``valid``; all 0 when no valid token has a weight.
    """
    raw_weights = raw_weights * valid
    num_valid = valid.count_nonzero()
    if max_weight is None or raw_weights.numel() == 0:
        return raw_weights.mul_(num_valid / raw_weights.sum().clamp_min_(_SMALLEST_SUM))

    descending = raw_weights.flatten().sort(descending=True).values
    tail_sums = descending.flip(0).cumsum(0).flip(0).clamp_min(_SMALLEST_SUM)
    num_capped_before = torch.arange(len(descending), device=descending.device)
    scales = (num_valid - num_capped_before * max_weight) / tail_sums
    # Never so at the last valid position, where c w' = M - (M - 1) max_weight <= 1: there is a scale to take.
    num_capped = (scales * descending > max_weight).sum().unsqueeze(0)
    scale = scales[num_capped]
    return (raw_weights * scale).clamp_max(max_weight)
