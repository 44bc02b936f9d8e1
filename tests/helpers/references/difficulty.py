"""Weights by difficulty once more from float64 logits, and how far float32 or bfloat16 may be from
them.

The bounds are intervals: the least and the largest that a raw weight may come out as, given how far
a logit may be off, and from these the least and the largest of a weight.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from helpers.fakes.label_batches import EPS
from helpers.references.peers import reference_difficulty
from helpers.references.tfidf import IGNORED

# A weight of mean 1 from raw ones: the mean 14, a division and a product, as for TF-IDF; and the
# power 2.
MEAN_RTOL = 18 * EPS
BF16_ROUNDING = 2.0**-8


class Difficulty(NamedTuple):
    """What is true of a batch, and what is tolerated; all float64 ``[b, s]``."""

    weights: torch.Tensor
    tolerance: torch.Tensor
    losses: torch.Tensor
    shift: torch.Tensor


def truth_of_difficulty(kind, gamma, logits, labels, logit_error=0.0):
    """``logit_error`` is how far a logit may be off, for each position or at all.

    A logarithm of a probability is then off by twice that, and by what float32 adds: a difference
    below 32 and a logarithm round 16 EPS each, the sum in it rounds once for each of v terms.
    """
    log_probabilities = logits.detach().double().log_softmax(dim=-1)
    vocab_size = logits.shape[-1]
    valid = labels != IGNORED
    weights = torch.tensor(
        reference_difficulty(kind, gamma, log_probabilities.tolist(), labels.tolist()),
        dtype=torch.float64,
    )
    own = log_probabilities.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    shift = (
        2 * torch.as_tensor(logit_error, dtype=torch.float64).expand(labels.shape)
        + (32 + vocab_size) * EPS
    )
    if kind == "focal":
        error = own.exp() * shift.expm1() + 2 * EPS
        least = (-own.expm1() - error).clamp(min=0)
        largest = (-own.expm1() + error).clamp(max=1)
    else:
        # Each p goes up or down by a factor of e**shift at most, each -ln p by shift; the v terms
        # and their sum round.
        entropy = torch.special.entr(log_probabilities.exp()).sum(dim=-1)
        rounding = (vocab_size + 4) * EPS
        least = 1 + (entropy - shift).clamp(min=0) * (-shift).exp() * (1 - rounding)
        largest = 1 + (entropy + shift) * shift.exp() * (1 + rounding)
    least, largest = (bound**gamma * valid for bound in (least, largest))
    num_valid = valid.sum()
    bounds = (
        largest * num_valid / least.sum() - weights,
        weights - least * num_valid / largest.sum(),
    )
    tolerance = torch.maximum(*bounds) + 2 * MEAN_RTOL * weights
    return Difficulty(weights, tolerance, torch.where(valid, -own, 0.0), shift)


def logit_error_of(head):
    """How far the logits of hidden states and head may be off: their sum of products, and in 16 bit
    their rounding.
    """
    hidden = head.hidden.detach().double()
    weight = head.weight.detach().double()
    bias = None if head.bias is None else head.bias.detach().double()
    magnitudes = F.linear(hidden.abs(), weight.abs(), None if bias is None else bias.abs()).amax(
        dim=-1
    )
    error = (hidden.shape[-1] + 1) * EPS * magnitudes
    if head.hidden.dtype == torch.bfloat16:
        error += BF16_ROUNDING * (F.linear(hidden, weight, bias).abs().amax(dim=-1) + error)
    return error


def assert_within(value, truth, tolerance):
    """Element by element."""
    assert torch.isfinite(value).all()
    excess = (value.double() - truth).abs() - tolerance
    assert float(excess.max()) <= 0, f"beyond the tolerance by {float(excess.max())}"
