"""Hidden states and head weight, which the loss takes instead of logits, and the chunk sizes for the logits."""

import math
from typing import NamedTuple

from torch import Tensor

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


def chunk_rows(num_tokens: int) -> int:
    """Return the number of tokens whose logits a head computes at a time: 1/16 of them, or 256."""
    return max(_MIN_ROWS, math.ceil(num_tokens / _NUM_CHUNKS))


def block_rows(vocab_size: int, *, is_cuda: bool) -> int:
    """Return the number of tokens whose logits are converted to float32 at a time: 4 MiB of them, on a GPU 8 MiB."""
    return max(1, (_CUDA_BLOCK_SIZE if is_cuda else _BLOCK_SIZE) // vocab_size)
