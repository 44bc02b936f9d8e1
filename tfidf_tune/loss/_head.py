"""What a model hands to the loss in place of logits."""

from typing import NamedTuple

from torch import Tensor


class HeadInput(NamedTuple):
    """What logits are made of, ``hidden @ weight.T + bias``, for a loss that never holds all of them.

    Attributes:
        hidden (Tensor): ``[b, s, d]``, after the final norm.
        weight (Tensor): ``[v, d]``, of the output projection or the embeddings it is tied to; dtype of ``hidden``.
        bias (Tensor | None): ``[v]``. Default: None.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
