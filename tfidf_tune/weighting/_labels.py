"""The mini-batch that a weighting gets: its labels and what goes with them, checked, shifted, gathered from all ranks.

Shape suffixes: R ranks, P parts of a message (labels; document ids and tokens where given), B rows, S positions in a
row.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100
"""Label of ignored positions."""
NO_TOKEN = -1  # replaces ignored labels where ids are looked up or sorted
_SIGNED = (torch.int64, torch.int32, torch.int16, torch.int8)
_INT32 = torch.iinfo(torch.int32)
# The fields of a TokenBatch that are integers ``[b, s]``, all checked and gathered alike; with what they are padded by.
_PADDED_BY = {"labels": IGNORE_INDEX, "document_ids": 0, "all_tokens": IGNORE_INDEX}


class Predictions(NamedTuple):
    """What the model predicts for the label tokens, without gradient.

    Attributes:
        log_probability (Tensor): float32 ``[b, s]``, natural logarithm of each label's probability; 0 where ignored.
        entropy (Tensor): float32 ``[b, s]``, of the distribution over the vocabulary, in nats; 0 where ignored.
    """

    log_probability: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class TokenBatch:
    """The labels of a mini-batch, and what else a loss and its weighting know of it.

    Types and shapes are checked here and nowhere else. Integers of other widths become int64.

    Attributes:
        labels (Tensor): signed integer ``[b, s]``, already shifted, -100 where ignored.
        document_ids (Tensor | None): integer ``[b, s]``: the document of its row that each label belongs to.
            Default: None, a row is one document.
        all_tokens (Tensor | None): signed integer ``[b, s]``: all tokens of each row, masked prompts included, see
            :func:`shift_tokens`; -100 in place of padding. Default: None, enough unless the weighting ``needs_tokens``.
        vocab_size (int | None): size of the vocabulary, the last dimension of the logits; the loss sets it. Default:
            None, unknown.
        predictions (Predictions | None): for these labels; the loss sets them. Default: None, enough unless the
            weighting ``needs_predictions``.
        largest_shape (tuple[int, int] | None): most rows and most positions that any rank has in this mini-batch, for a
            weighting with ``sync``. Default: None, found by a collective, for which the host waits.
        first_pass (bool): False from the second epoch on: the weighting has got every row once before. Default: True.

    Raises:
        ValueError: If labels, document ids or tokens have another type or shape.
    """

    labels: Tensor
    document_ids: Tensor | None = None
    all_tokens: Tensor | None = None
    vocab_size: int | None = None
    predictions: Predictions | None = None
    largest_shape: tuple[int, int] | None = None
    first_pass: bool = True

    def __post_init__(self) -> None:
        if self.labels.dim() != 2:
            raise ValueError(
                f"labels has shape {tuple(self.labels.shape)}, expected [b, s]: weights need separate sequences. "
                "torchtune's stock recipes flatten labels for every loss but one named CEWithChunkedOutputLoss: with "
                "them, set loss._component_=tfidf_tune.loss.stock.CEWithChunkedOutputLoss"
            )
        if self.document_ids is not None and self.document_ids.is_floating_point():
            raise ValueError(f"document_ids are {self.document_ids.dtype}, expected integers")
        for name, tensor in _integers_of(self).items():
            if name != "document_ids" and tensor.dtype not in _SIGNED:  # others cannot hold -100, or are masks
                raise ValueError(
                    f"{name} are {tensor.dtype}, expected signed integers: convert token ids with {name}.long()"
                )
            if tensor.shape != self.labels.shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}, expected that of labels, {tuple(self.labels.shape)}"
                )
            object.__setattr__(self, name, tensor.long())


def _integers_of(batch: TokenBatch) -> dict[str, Tensor]:
    return {name: tensor for name in _PADDED_BY if (tensor := getattr(batch, name)) is not None}


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


def values_are_known(tensor: Tensor) -> bool:
    """Return whether values can be read without waiting: on a CPU, outside of compiled graphs."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def gather_batch(batch: TokenBatch) -> tuple[TokenBatch, tuple[slice, slice]]:
    """Gather the mini-batches of all ranks on the device of the labels, 4 bytes a position for each part given.

    Document ids and tokens have to be given on all ranks or on none. Numbers outside the range of int32 are clamped to
    it. Predictions are not gathered.

    Returns:
        tuple[TokenBatch, tuple[slice, slice]]: the rows of rank 0 first, each rank's padded to the largest shape; and
        rows and positions of this rank.
    """
    # The largest shape of all ranks, unless the caller knows it: reading it makes the host wait.
    num_rows, length = batch.labels.shape
    largest = batch.largest_shape
    if largest is None:
        shape = torch.tensor([num_rows, length], device=batch.labels.device)
        dist.all_reduce(shape, dist.ReduceOp.MAX)
        largest = (int(shape[0]), int(shape[1]))
    if num_rows > largest[0] or length > largest[1]:
        raise ValueError(f"labels have shape {(num_rows, length)}, larger than largest_shape, {largest}")
    padding = (0, largest[1] - length, 0, largest[0] - num_rows)
    given = _integers_of(batch)
    # One message with all parts, padded by ignored labels; the document of a position without a label does not matter.
    in_range = {name: part.clamp(_INT32.min, _INT32.max).int() for name, part in given.items()}
    message_PBS = torch.stack([F.pad(part, padding, value=_PADDED_BY[name]) for name, part in in_range.items()])
    # One collective for all parts; every rank then has the same union, its own rows included.
    gathered_RPBS = message_PBS.new_empty(dist.get_world_size(), *message_PBS.shape)
    dist.all_gather(list(gathered_RPBS.unbind()), message_PBS)
    parts: dict[str, Any] = dict(zip(given, (part.flatten(0, 1) for part in gathered_RPBS.unbind(1)), strict=True))
    first_row = dist.get_rank() * largest[0]
    own = (slice(first_row, first_row + num_rows), slice(length))
    return replace(batch, predictions=None, **parts), own
