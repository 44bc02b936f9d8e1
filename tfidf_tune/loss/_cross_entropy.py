"""Cross-entropy and predictions of each token, from logits or from hidden states and head weight, as pure functions."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tfidf_tune.weighting import IGNORE_INDEX, Predictions

# A chunk's logits are at most 1/16 of all, or 256 rows: fewer would make matrix products slow.
_NUM_CHUNKS = 16
_MIN_ROWS = 256
# Logits that are converted to float32 at a time: 4 MiB stay in a CPU's cache; with less than 8 MiB, kernels of a GPU
# would take less time than their launch.
_BLOCK_SIZE = 2**20
_CUDA_BLOCK_SIZE = 2**21


class HeadInput(NamedTuple):
    """What logits are computed from, ``hidden @ weight.T + bias``, for a loss that never holds all of them.

    Attributes:
        hidden (Tensor): ``[b, s, d]``, after the final norm.
        weight (Tensor): ``[v, d]``, of the output projection or the tied embeddings; dtype of ``hidden``.
        bias (Tensor | None): ``[v]``. Default: None.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None


def check_head(head: HeadInput, labels: Tensor) -> None:
    """Raise a ``ValueError`` unless shapes and dtypes of hidden states, head and labels match; it names them all."""
    hidden, weight, bias = head
    fits = (
        hidden.shape == (*labels.shape, weight.shape[-1])
        and weight.dim() == 2
        and (bias is None or bias.shape == weight.shape[:1])
    )
    if fits and hidden.is_floating_point() and len({tensor.dtype for tensor in head if tensor is not None}) == 1:
        return
    found = ", ".join(
        f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in (*zip(HeadInput._fields, head, strict=True), ("labels", labels))
        if tensor is not None
    )
    raise ValueError(
        f"the head's input does not fit: {found}; expected are hidden [b, s, d], weight [v, d], bias [v] or none, all "
        "of one floating dtype (under autocast: hidden.to(weight.dtype)), and labels [b, s]"
    )


def chunk_rows(num_tokens: int) -> int:
    """Return the number of tokens whose logits a head computes at a time: 1/16 of them, or 256."""
    return max(_MIN_ROWS, math.ceil(num_tokens / _NUM_CHUNKS))


def block_rows(vocab_size: int, *, is_cuda: bool) -> int:
    """Return the number of tokens whose logits are converted to float32 at a time: 4 MiB of them, on a GPU 8 MiB."""
    return max(1, (_CUDA_BLOCK_SIZE if is_cuda else _BLOCK_SIZE) // vocab_size)


def token_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Cross-entropy of each token, :math:`-\log P(x_i)`, computed in float32.

    Args:
        logits (Tensor): ``[b, s, v]``, any floating dtype.
        labels (Tensor): integer ``[b, s]``, already shifted, -100 where ignored.

    Returns:
        Tensor: float32 ``[b, s]``, 0 at ignored positions.
    """
    losses = F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten().long(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return losses.view_as(labels)


def require_linear_cross_entropy() -> None:
    """Raise a ``ValueError`` if the installed torch has no ``linear_cross_entropy``."""
    if not hasattr(F, "linear_cross_entropy"):
        raise ValueError(
            "head is 'torch', which needs torch.nn.functional.linear_cross_entropy of torch 2.13 or later; this is "
            f"torch {torch.__version__}: set head to 'fused'"
        )


def linear_token_cross_entropy(head: HeadInput, labels: Tensor) -> Tensor:
    r"""Cross-entropy of each token from hidden states and head weight, by PyTorch's chunked ``linear_cross_entropy``.

    Args:
        head (HeadInput): hidden states ``[b, s, d]``, head weight ``[v, d]``, perhaps a bias; of one dtype.
        labels (Tensor): integer ``[b, s]``, already shifted, -100 where ignored.

    Returns:
        Tensor: float32 ``[b, s]``, 0 at ignored positions; from hidden states in bfloat16 PyTorch rounds it to that.

    Raises:
        ValueError: If shapes or dtypes do not match, or torch is older than 2.13.
    """
    require_linear_cross_entropy()
    check_head(head, labels)
    losses: Tensor = F.linear_cross_entropy(
        head.hidden.flatten(0, 1),
        head.weight,
        labels.flatten().long(),
        linear_bias=head.bias,
        reduction="none",
        ignore_index=IGNORE_INDEX,
        options=torch.nn.LinearCrossEntropyOptions(),
    )
    return losses.view_as(labels).float()


def weighted_mean(losses: Tensor, weights: Tensor, valid: Tensor) -> Tensor:
    r"""The objective, :math:`\frac{1}{M}\sum_{i} w_i \ell_i` over the M valid tokens.

    Source: "Rebalancing Token Importance in Language Models with TF-IDF Weighted Cross-Entropy Loss", equation 1.

    Args:
        losses (Tensor): float32 ``[b, s]``, 0 at ignored positions.
        weights (Tensor): float32 ``[b, s]``, 0 at ignored positions.
        valid (Tensor): bool ``[b, s]``.

    Returns:
        Tensor: float32 scalar; without a valid token a 0 that can be backpropagated.
    """
    return (losses * weights).sum() / valid.sum().clamp_min(1)


@torch.no_grad()
def token_predictions(logits: list[Tensor] | HeadInput, labels: Tensor) -> Predictions:
    r"""Compute the log-probability of each label and the entropy of the predicted distribution.

    .. math::
        \ln P(x_i | x_{<i}), \qquad H_i = -\sum_v P(v | x_{<i}) \ln P(v | x_{<i})

    From a :class:`HeadInput` no more than 1/16 of the logits, or those of 256 tokens, exist at a time; they are
    converted to float32 a few tokens at a time.

    Args:
        logits (list[Tensor] | HeadInput): chunks of ``[b, s, v]`` along s, or what they are computed from.
        labels (Tensor): integer ``[b, s]``, already shifted, -100 where ignored.

    Returns:
        Predictions: float32 ``[b, s]`` each, 0 at ignored positions.

    Raises:
        ValueError: If shapes or dtypes of a :class:`HeadInput` do not match.
    """
    if isinstance(logits, HeadInput):
        check_head(logits, labels)
        hidden = logits.hidden.flatten(0, 1)
        pieces = (F.linear(rows, logits.weight, logits.bias) for rows in torch.split(hidden, chunk_rows(len(hidden))))
        log_probability, entropy = (part.view(labels.shape) for part in _predict(pieces, labels.flatten()))
    else:
        chunks = torch.split(labels, [chunk.shape[1] for chunk in logits], dim=1)
        predicted = [
            [part.view(chunk.shape) for part in _predict([of_chunk.flatten(0, 1)], chunk.flatten())]
            for of_chunk, chunk in zip(logits, chunks, strict=True)
        ]
        log_probability, entropy = (torch.cat(parts, dim=1) for parts in zip(*predicted, strict=True))
    ignored = labels == IGNORE_INDEX
    return Predictions(log_probability.masked_fill(ignored, 0), entropy.masked_fill(ignored, 0))


def _predict(logits: Iterable[Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, float32 ``[n]`` each, from logits ``[c, v]`` of all n labels in turn."""
    log_probabilities, entropies, start = [], [], 0
    for chunk in logits:
        for block in torch.split(chunk, block_rows(chunk.shape[1], is_cuda=chunk.is_cuda)):
            log_softmax = torch.log_softmax(block.float(), dim=1)
            # Labels outside the vocabulary are replaced; the weighting refuses those that are not ignored.
            tokens = labels[start : start + len(block)].long().clamp(0, block.shape[1] - 1)
            log_probabilities.append(log_softmax.gather(1, tokens.unsqueeze(1)).squeeze(1))
            entropies.append(torch.special.entr(log_softmax.exp_()).sum(dim=1))
            start += len(block)
    return torch.cat(log_probabilities), torch.cat(entropies)
