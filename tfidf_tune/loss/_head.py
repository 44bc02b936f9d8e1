"""What a model hands to the loss in place of logits."""

from typing import NamedTuple

from torch import Tensor

from tfidf_tune.weighting import check_label_type


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


def check_head(head: HeadInput, labels: Tensor) -> None:
    """Refuse hidden states, head and labels that do not fit each other.

    Args:
        head (HeadInput): should be ``[b, s, d]``, ``[v, d]`` and perhaps ``[v]``, of one floating dtype.
        labels (Tensor): should be ``[b, s]``, of signed integers.

    Raises:
        ValueError: If a shape or a dtype is another; the message names them all.
    """
    check_label_type(labels)
    hidden, weight, bias = head
    fits = (
        hidden.shape == (*labels.shape, weight.shape[-1])
        and weight.dim() == 2
        and (bias is None or bias.shape == weight.shape[:1])
    )
    tensors = [tensor for tensor in head if tensor is not None]
    if fits and hidden.is_floating_point() and all(tensor.dtype == hidden.dtype for tensor in tensors):
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
