"""What the ranks of the default process group tell each other: the only file here that communicates.

Shape suffixes: R ranks, P parts of a message (labels, and document ids where given), B rows, S positions in a row.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tfidf_tune.weighting._labels import check_document_ids, check_shape

_INT32 = torch.iinfo(torch.int32)


def has_other_ranks() -> bool:
    """Tell whether there is anybody to talk to."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def own_rank() -> int:
    """Number of this process, 0 where it is the only one."""
    return dist.get_rank() if has_other_ranks() else 0


class UnionBatch(NamedTuple):
    """The mini-batches of all ranks as one.

    Attributes:
        labels (Tensor): int32 ``[r * b, s]``, rows of rank 0 first, each rank's padded to the shape of the largest.
        document_ids (Tensor | None): int32, same shape.
        own (tuple[slice, slice]): rows and positions of this rank's labels.
    """

    labels: Tensor
    document_ids: Tensor | None
    own: tuple[slice, slice]


class LabelExchange(NamedTuple):
    """Labels of all ranks on their way; made by :func:`exchange_labels`."""

    gathered_RPBS: Tensor
    message_PBS: Tensor
    own: tuple[slice, slice]
    work: "dist.Work"

    def wait(self) -> UnionBatch:
        """Wait for the labels: the host does where they are on a CPU, on a GPU it is the current stream."""
        self.work.wait()
        labels, *document_ids = (part.flatten(0, 1) for part in self.gathered_RPBS.unbind(1))
        return UnionBatch(labels, document_ids[0] if document_ids else None, self.own)


def exchange_labels(
    labels: Tensor, document_ids: Tensor | None, *, shape: tuple[int, int] | None, ignore_index: int
) -> LabelExchange:
    """Start to gather the labels of all ranks: 4 bytes for each position of each rank, 8 with document ids.

    Numbers that int32 does not hold arrive as the largest or smallest that it does.

    Args:
        labels (Tensor): integer ``[b, s]``.
        document_ids (Tensor | None): integer ``[b, s]``; on all ranks or on none.
        shape (tuple[int, int] | None): most rows and most positions that a rank has, the same on every rank. None: it
            is found out by a collective of its own, which the host waits for.
        ignore_index (int): what rows and positions are filled up with.

    Returns:
        LabelExchange: to be waited for.

    Raises:
        ValueError: If labels or document ids have another type or shape, or the labels are larger than ``shape``.
    """
    check_shape(labels)
    if document_ids is not None:
        check_document_ids(document_ids, labels)
    num_rows, length = labels.shape
    most_rows, most_positions = _largest_shape(labels) if shape is None else shape
    if num_rows > most_rows or length > most_positions:
        raise ValueError(
            f"labels have shape {(num_rows, length)}, more than the shape {(most_rows, most_positions)} that all ranks "
            "fit in: hand over the largest of each dimension over all ranks, or None to have it found out"
        )
    padding = (0, most_positions - length, 0, most_rows - num_rows)
    parts = [F.pad(_as_int32(labels), padding, value=ignore_index)]
    if document_ids is not None:
        parts.append(F.pad(_as_int32(document_ids), padding))
    message_PBS = torch.stack(parts)
    gathered_RPBS = message_PBS.new_empty(dist.get_world_size(), *message_PBS.shape)
    work = dist.all_gather(list(gathered_RPBS.unbind()), message_PBS, async_op=True)
    first_row = dist.get_rank() * most_rows
    own = (slice(first_row, first_row + num_rows), slice(length))
    return LabelExchange(gathered_RPBS, message_PBS, own, work)


def unit_mean_over_ranks(raw_weights: Tensor, valid: Tensor) -> Tensor:
    """Scale weights to mean 1 over the valid tokens of all ranks, by one collective of two numbers.

    Args:
        raw_weights (Tensor): non-negative, float32, any shape; positive where ``valid``.
        valid (Tensor): bool, same shape.

    Returns:
        Tensor: float32, same shape; 0 where not ``valid``.
    """
    raw_weights = raw_weights * valid
    sums = torch.stack([valid.count_nonzero(), raw_weights.sum()])
    dist.all_reduce(sums)
    num_valid, total = sums
    return raw_weights.mul_(num_valid / total.clamp_min(torch.finfo(torch.float32).tiny))


def _largest_shape(labels: Tensor) -> tuple[int, int]:
    largest = torch.tensor(labels.shape, device=labels.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    rows, positions = largest.tolist()
    return rows, positions


def _as_int32(numbers: Tensor) -> Tensor:
    return numbers.long().clamp(_INT32.min, _INT32.max).int()
