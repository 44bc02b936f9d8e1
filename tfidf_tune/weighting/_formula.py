"""The mathematics of TF-IDF as pure functions: terms, term frequency, inverse document frequency, normalization.

Shapes do not depend on values, so that nothing waits for a GPU, and the whole can be compiled or captured in a graph.

Shape suffixes: B rows, S positions in a row, N positions of all rows.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

TermFrequency = Literal["count", "log", "binary"]
# Weights with a smaller sum count as none: a number of tokens divided by it is still a float32.
_SMALLEST_SUM = 2.0**-100


class Terms(NamedTuple):
    """The distinct keys of each row.

    Attributes:
        keys (Tensor): integer ``[b * s]``, each key once for each row that holds it, and -1 in what remains.
        counts (Tensor): int64 ``[b * s]``, the positions of the row that hold the key; 0 in what remains.
        positions (Tensor): int64 ``[b, s]``, the term at each position: an index of the other two.
    """

    keys: Tensor
    counts: Tensor
    positions: Tensor


def distinct_terms(keys_BS: Tensor) -> Terms:
    """Find the distinct integer keys of each row and count them, by one sort of ``[b, s]``."""
    sorted_BS, order_BS = keys_BS.sort(dim=-1)
    # Equal keys are neighbours now. A term begins at each row, and where a key differs from the one before it.
    begins_BS = torch.ones_like(sorted_BS, dtype=torch.bool)
    begins_BS[:, 1:] = sorted_BS[:, 1:] != sorted_BS[:, :-1]
    term_N = begins_BS.flatten().cumsum(0) - 1
    sorted_N = sorted_BS.flatten()
    return Terms(
        keys=torch.full_like(sorted_N, -1).scatter_(0, term_N, sorted_N),
        counts=torch.zeros_like(term_N).scatter_add_(0, term_N, torch.ones_like(term_N)),
        positions=torch.empty_like(order_BS).scatter_(-1, order_BS, term_N.view_as(order_BS)),
    )


def term_frequency(counts: Tensor, form: TermFrequency) -> Tensor:
    r"""Turn counts within a document into term frequencies.

    Args:
        counts (Tensor): c, occurrences of each token in its document, integer, at least 1, any shape.
        form (TermFrequency): ``count`` for the paper's :math:`\mathrm{tf} = c`, ``log`` for :math:`1 + \ln c`,
            ``binary`` for 1, so that only IDF counts.

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
    raise ValueError(f"tf is '{form}': possible are {', '.join(get_args(TermFrequency))}")


def inverse_document_frequency(document_frequency: Tensor, num_documents: Tensor) -> Tensor:
    r"""Smoothed inverse document frequency, :math:`\mathrm{idf} = \ln\frac{1 + N}{1 + \mathrm{df}} + 1`.

    Source: "Rebalancing Token Importance in Language Models with TF-IDF Weighted Cross-Entropy Loss", section 3.1. It
    is 1 as long as nothing has been counted (N = 0, df = 0).

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
    # Never true at the last valid position, where c w' = M - (M - 1) max_weight <= 1: a scale always exists.
    num_capped = (scales * descending > max_weight).sum().unsqueeze(0)
    scale = scales[num_capped]
    return (raw_weights * scale).clamp_max(max_weight)
