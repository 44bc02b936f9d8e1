"""The labels that a weighting gets: shifted, checked, gathered from all ranks.

Shape suffixes: R ranks, P parts of a message (labels; document ids and tokens where given), B rows, S positions in a
row.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100
"""Label of ignored positions."""
NO_TOKEN = -1  # replaces ignored labels where ids are looked up or sorted
_LABEL_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8)
_INT32 = torch.iinfo(torch.int32)
_INT64_RANGE = 2**64


class Predictions(NamedTuple):
    """What the model predicts for the label tokens, without gradient.

    Attributes:
        log_probability (Tensor): float32 ``[b, s]``, natural logarithm of each label's probability; 0 where ignored.
        entropy (Tensor): float32 ``[b, s]``, of the distribution over the vocabulary, in nats; 0 where ignored.
    """

    log_probability: Tensor
    entropy: Tensor


class GatheredLabels(NamedTuple):
    """The mini-batches of all ranks as one, see :func:`gather_labels`.

    Attributes:
        labels (Tensor): integer ``[r * b, s]``, the rows of rank 0 first, each rank's padded to the largest shape.
        document_ids (Tensor | None): integer, same shape.
        own (tuple[slice, slice]): rows and positions of this rank.
        tokens (Tensor | None): integer, same shape, see :class:`TokenBatch`. Default: None.
    """

    labels: Tensor
    document_ids: Tensor | None
    own: tuple[slice, slice]
    tokens: Tensor | None = None

    def to(self, device: torch.device) -> "GatheredLabels":
        """Copy the labels to a device; from pinned memory the host does not wait for the copy."""
        document_ids = None if self.document_ids is None else self.document_ids.to(device, non_blocking=True)
        tokens = None if self.tokens is None else self.tokens.to(device, non_blocking=True)
        return GatheredLabels(self.labels.to(device, non_blocking=True), document_ids, self.own, tokens)


class TokenBatch(NamedTuple):
    """What a weighting computes the weights of a mini-batch from.

    Attributes:
        labels (Tensor): signed integer ``[b, s]``, already shifted, -100 where ignored.
        document_ids (Tensor | None): integer ``[b, s]``: the document of its row that each label belongs to.
            Default: None, a row is one document.
        vocab_size (int | None): size of the vocabulary, the last dimension of the logits. Default: None, unknown.
        predictions (Predictions | None): for these labels. Default: None, enough unless the weighting
            ``needs_predictions``.
        gathered (GatheredLabels | None): the labels of all ranks. Default: None, a weighting with ``sync`` gathers them
            itself.
        tokens (Tensor | None): signed integer ``[b, s]``: all tokens of each row, masked prompts included, see
            :func:`shift_tokens`; -100 in place of padding. Default: None, enough unless the weighting ``needs_tokens``.
        first_pass (bool): False from the second epoch on: the weighting has got every row once before. Default: True.
    """

    labels: Tensor
    document_ids: Tensor | None = None
    vocab_size: int | None = None
    predictions: Predictions | None = None
    gathered: GatheredLabels | None = None
    tokens: Tensor | None = None
    first_pass: bool = True


def shift_labels(labels: Tensor) -> Tensor:
    """Move labels ``[b, s]`` one position to the left, so that position i holds the token that follows token i.

    The last position gets -100.
    """
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORE_INDEX)], dim=1)


def shift_tokens(tokens: Tensor) -> Tensor:
    """Move tokens ``[b, s]`` one position to the left, as :func:`shift_labels` does; the first one becomes the last.

    The last position has no label, so that every token has a place. Document ids of the tokens are shifted in the same
    way, and hold for the labels too.
    """
    return tokens.roll(-1, dims=1)


def on_host(labels: Tensor) -> bool:
    """Return whether code may depend on values: on a CPU, outside of compiled graphs."""
    return labels.device.type == "cpu" and not torch.compiler.is_compiling()


def has_other_ranks() -> bool:
    """Return whether the world size is larger than 1."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def check_label_type(labels: Tensor, name: str = "labels") -> None:
    """Raise a ``ValueError`` unless labels are signed integers.

    Unsigned integers cannot hold -100, and torch treats indices of type uint8 and bool as masks.
    """
    if labels.dtype not in _LABEL_TYPES:
        raise ValueError(f"{name} are {labels.dtype}, expected signed integers: convert token ids with {name}.long()")


def check_types(labels: Tensor, document_ids: Tensor | None, tokens: Tensor | None = None) -> None:
    """Raise a ``ValueError`` unless labels are signed integers ``[b, s]``, document ids and tokens of that shape."""
    check_label_type(labels)
    if labels.dim() != 2:
        raise ValueError(
            f"labels has shape {tuple(labels.shape)}, expected [b, s]: term frequencies need separate sequences"
        )
    if document_ids is not None:
        if document_ids.is_floating_point():
            raise ValueError(f"document_ids are {document_ids.dtype}, expected integers")
        _check_shape("document_ids", document_ids, labels)
    if tokens is not None:
        check_label_type(tokens, "tokens")
        _check_shape("tokens", tokens, labels)


def _check_shape(name: str, tensor: Tensor, labels: Tensor) -> None:
    if tensor.shape != labels.shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected that of labels, {tuple(labels.shape)}")


def check_tokens(labels: Tensor, tokens: Tensor) -> None:
    """Raise a ``ValueError`` if a label that is not ignored is not the token at its position; on a GPU it gets NaN."""
    if on_host(labels) and (differ := (labels != IGNORE_INDEX) & (labels != tokens)).any():
        raise ValueError(
            f"{int(differ.sum())} labels are not the tokens at their positions: pass tokens=shift_tokens(input_ids) "
            "with the shifted labels"
        )


def check_ids(labels: Tensor, vocab_size: int | None, name: str = "labels") -> None:
    """Raise a ``ValueError`` if a label that is not ignored is outside the vocabulary; on a GPU that would wait for it.

    Args:
        labels (Tensor): int64, any shape.
        vocab_size (int | None): size of the vocabulary. None: every id from 0 is valid.
        name (str): of the labels in the message. Default: "labels".
    """
    if not on_host(labels):
        return
    ids = labels.numpy()  # a comparison takes half the time of torch's on small batches
    outside = ids.view(np.uint64) >= (vocab_size or _INT64_RANGE // 2)  # negative ids are the largest of all
    if np.count_nonzero(outside) != np.count_nonzero(ids == IGNORE_INDEX):
        unknown = ids[outside & (ids != IGNORE_INDEX)]
        smallest, largest = unknown.min(), unknown.max()
        raise ValueError(
            f"{name} contain the id {smallest if smallest < 0 else largest}, outside the vocabulary of "
            f"{vocab_size or 'ids from 0'}; ignored positions are marked by {IGNORE_INDEX}"
        )


def known_labels(labels: Tensor, vocab_size: int | None) -> Tensor:
    """Find the labels, int64 ``[b, s]``, that are in the vocabulary: bool ``[b, s]``, False where ignored."""
    return labels >= 0 if vocab_size is None else (labels >= 0) & (labels < vocab_size)


def gather_labels(
    labels: Tensor,
    document_ids: Tensor | None = None,
    tokens: Tensor | None = None,
    *,
    shape: tuple[int, int] | None = None,
    pin_memory: bool = False,
) -> GatheredLabels:
    """Gather the labels of all ranks of the default process group: 4 bytes a position, with the others 4 more each.

    Numbers outside the range of int32 are clamped to it.

    Args:
        labels (Tensor): integer ``[b, s]``, already shifted; with labels on a CPU nothing waits for a device.
        document_ids (Tensor | None): integer ``[b, s]``; on all ranks or on none. Default: None.
        tokens (Tensor | None): integer ``[b, s]``, see :class:`TokenBatch`; on all ranks or on none. Default: None.
        shape (tuple[int, int] | None): most rows and most positions of any rank, the same on every rank. Default: None,
            found by another collective, whose result the host waits for.
        pin_memory (bool): whether to gather into pinned memory. Default: False.

    Returns:
        GatheredLabels: on the device of ``labels``.

    Raises:
        ValueError: If labels, document ids or tokens have another type or shape, or the labels are larger than
            ``shape``.
    """
    check_types(labels, document_ids, tokens)
    num_rows, length = labels.shape
    if shape is None:
        largest = torch.tensor(labels.shape, device=labels.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        shape = (int(largest[0]), int(largest[1]))
    if num_rows > shape[0] or length > shape[1]:
        raise ValueError(f"labels have shape {(num_rows, length)}, larger than shape={shape}, the maximum of all ranks")
    padding = (0, shape[1] - length, 0, shape[0] - num_rows)
    parts = [F.pad(_as_int32(labels), padding, value=IGNORE_INDEX)]
    if document_ids is not None:
        parts.append(F.pad(_as_int32(document_ids), padding))
    if tokens is not None:
        parts.append(F.pad(_as_int32(tokens), padding, value=IGNORE_INDEX))
    message_PBS = torch.stack(parts)
    size = (dist.get_world_size(), *message_PBS.shape)
    gathered_RPBS = torch.empty(size, dtype=torch.int32, device=labels.device, pin_memory=pin_memory)
    dist.all_gather(list(gathered_RPBS.unbind()), message_PBS)
    all_labels, *others = (part.flatten(0, 1) for part in gathered_RPBS.unbind(1))
    all_documents, all_tokens = (None if part is None else others.pop(0) for part in (document_ids, tokens))
    first_row = dist.get_rank() * shape[0]
    own = (slice(first_row, first_row + num_rows), slice(length))
    return GatheredLabels(all_labels, all_documents, own, all_tokens)


def _as_int32(numbers: Tensor) -> Tensor:
    return numbers.long().clamp(_INT32.min, _INT32.max).int()


class SpecialTokens:
    """A set of token ids, looked up without waiting for a device."""

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        ids = sorted({token_id for token_id in token_ids if token_id >= 0})
        # A table, because torch.isin sorts many ids, which waits for a GPU.
        self._is_special = torch.zeros(ids[-1] + 2 if ids else 1, dtype=torch.bool)  # the last entry: all ids above
        self._is_special[ids] = True

    def among(self, labels: Tensor) -> Tensor:
        """Return where the labels, int64 of any shape, are special: bool of the same shape."""
        self._is_special = self._is_special.to(labels.device)
        return self._is_special.take(labels.clamp(0, len(self._is_special) - 1)) & (labels >= 0)
