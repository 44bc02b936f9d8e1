"""Cross-entropy of each token, and its weighted mean, as pure functions."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tfidf_tune.loss._head import HeadInput, check_head
from tfidf_tune.weighting import check_label_type


def token_cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    r"""Cross-entropy of each token, :math:`-\log P(x_i)`, computed in float32.

    Args:
        logits (Tensor): ``[b, s, v]``, any floating dtype.
        labels (Tensor): integer ``[b, s]``, already shifted.
        ignore_index (int): label of the positions that do not count. Default: -100.

    Returns:
        Tensor: float32 ``[b, s]``, 0 at ignored positions.

    Raises:
        ValueError: If ``labels`` is not of signed integers.
    """
    check_label_type(labels)
    losses = F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten().long(), ignore_index=ignore_index, reduction="none"
    )
    return losses.view_as(labels)


def linear_token_cross_entropy(head: HeadInput, labels: Tensor, ignore_index: int = -100) -> Tensor:
    r"""Cross-entropy of each token from hidden states and head weight, by PyTorch's chunked ``linear_cross_entropy``.

    Args:
        head (HeadInput): hidden states ``[b, s, d]``, head weight ``[v, d]``, perhaps a bias; of one dtype.
        labels (Tensor): integer ``[b, s]``, already shifted.
        ignore_index (int): label of the positions that do not count. Default: -100.

    Returns:
        Tensor: float32 ``[b, s]``, 0 at ignored positions; from hidden states in bfloat16 PyTorch rounds it to that.

    Raises:
        ValueError: If shapes or dtypes do not fit.
    """
    check_head(head, labels)
    losses: Tensor = F.linear_cross_entropy(
        head.hidden.flatten(0, 1),
        head.weight,
        labels.flatten().long(),
        linear_bias=head.bias,
        reduction="none",
        ignore_index=ignore_index,
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
