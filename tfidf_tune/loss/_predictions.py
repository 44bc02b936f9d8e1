"""What a model predicts for the label tokens, beforehand and without a gradient."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tfidf_tune.loss._chunking import block_rows, chunk_rows
from tfidf_tune.loss._head import HeadInput, check_head
from tfidf_tune.weighting import Predictions, check_label_type


@torch.no_grad()
def token_predictions(logits: list[Tensor] | HeadInput, labels: Tensor, ignore_index: int = -100) -> Predictions:
    r"""Compute the log-probability of each label and the entropy of the distribution it is drawn from.

    .. math::
        \ln P(x_i | x_{<i}), \qquad H_i = -\sum_v P(v | x_{<i}) \ln P(v | x_{<i})

    From a :class:`HeadInput` no more than 1/16 of the logits is made at a time, or those of 256 tokens; their float32
    form is made of a few tokens at a time, see :func:`~tfidf_tune.loss._chunking.block_rows`.

    Args:
        logits (list[Tensor] | HeadInput): chunks of ``[b, s, v]`` along s, or what they would be made of.
        labels (Tensor): integer ``[b, s]``, already shifted.
        ignore_index (int): label of the positions that do not count. Default: -100.

    Returns:
        Predictions: float32 ``[b, s]`` each, 0 at ignored positions.

    Raises:
        ValueError: If ``labels`` is not of signed integers, or shapes or dtypes of a :class:`HeadInput` do not fit.
    """
    check_label_type(labels)
    if isinstance(logits, HeadInput):
        check_head(logits, labels)
        tokens = _tokens(labels, logits.weight.shape[0])
        log_probability, entropy = (
            part.view(labels.shape) for part in _predict(_head_logits(logits), tokens.flatten())
        )
    else:
        chunks = torch.split(_tokens(labels, logits[0].shape[-1]), [chunk.shape[1] for chunk in logits], dim=1)
        predicted = [
            [part.view(chunk.shape) for part in _predict([of_chunk.flatten(0, 1)], chunk.flatten())]
            for of_chunk, chunk in zip(logits, chunks, strict=True)
        ]
        log_probability, entropy = (torch.cat(parts, dim=1) for parts in zip(*predicted, strict=True))
    ignored = labels == ignore_index
    return Predictions(log_probability.masked_fill(ignored, 0), entropy.masked_fill(ignored, 0))


def _tokens(labels: Tensor, vocab_size: int) -> Tensor:
    """Labels that can be looked up; another one stands in for those that cannot, which the weighting refuses."""
    return labels.long().clamp(0, vocab_size - 1)


def _head_logits(head: HeadInput) -> Iterator[Tensor]:
    hidden = head.hidden.flatten(0, 1)
    for rows in torch.split(hidden, chunk_rows(len(hidden))):
        yield torch.nn.functional.linear(rows, head.weight, head.bias)


def _predict(logits: Iterator[Tensor] | list[Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, float32 ``[n]`` each, from logits ``[c, v]`` of all n labels in turn."""
    log_probabilities, entropies, start = [], [], 0
    for chunk in logits:
        for block in torch.split(chunk, block_rows(chunk.shape[1], is_cuda=chunk.is_cuda)):
            log_softmax = torch.log_softmax(block.float(), dim=1)
            own = labels[start : start + len(block)].unsqueeze(1)
            log_probabilities.append(log_softmax.gather(1, own).squeeze(1))
            entropies.append(torch.special.entr(log_softmax.exp_()).sum(dim=1))
            start += len(block)
    return torch.cat(log_probabilities), torch.cat(entropies)
