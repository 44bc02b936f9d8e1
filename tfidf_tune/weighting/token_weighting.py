"""The mini-batch that a weighting gets, the base class of all weightings, and equal weights.

The labels of a mini-batch and what goes with them are checked, shifted, and gathered from all
ranks.

Shape suffixes: R ranks, P parts of a message (labels; document ids and tokens where given), B rows,
S positions in a row.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE_INDEX = -100
"""Label of ignored positions."""
NO_TOKEN = -1  # replaces ignored labels where ids are looked up or sorted
_SIGNED = (torch.int64, torch.int32, torch.int16, torch.int8)
_INT32 = torch.iinfo(torch.int32)
# The fields of a TokenBatch that are integers ``[b, s]``, all checked and gathered alike; with what
# they are padded by.
_PADDED_BY = {"labels": IGNORE_INDEX, "document_ids": 0, "all_tokens": IGNORE_INDEX}


class Predictions(NamedTuple):
    """What the model predicts for the label tokens, without gradient.

    Attributes:
        log_probability (Tensor): float32 ``[b, s]``, natural logarithm of each label's probability;
            0 where ignored.
        entropy (Tensor): float32 ``[b, s]``, of the distribution over the vocabulary, in nats; 0
            where ignored.
    """

    log_probability: Tensor
    entropy: Tensor


@dataclass(frozen=True)
class TokenBatch:
    """The labels of a mini-batch, and what else a loss and its weighting know of it.

    Types and shapes are checked here and nowhere else. Integers of other widths become int64.

    Attributes:
        labels (Tensor): signed integer ``[b, s]``, already shifted, -100 where ignored.
        document_ids (Tensor | None): integer ``[b, s]``: the document of its row that each label
            belongs to. Default: None, a row is one document.
        all_tokens (Tensor | None): signed integer ``[b, s]``: all tokens of each row, masked
            prompts included, see :func:`shift_tokens`; -100 in place of padding. Default: None,
            enough unless the weighting ``needs_tokens``.
        vocab_size (int | None): size of the vocabulary, the last dimension of the logits; the loss
            sets it. Default: None, unknown.
        predictions (Predictions | None): for these labels; the loss sets them. Default: None,
            enough unless the weighting ``needs_predictions``.
        largest_shape (tuple[int, int] | None): most rows and most positions that any rank has in
            this mini-batch, for a weighting with ``sync``. Default: None, found by a collective,
            for which the host waits.
        first_pass (bool): False from the second epoch on: the weighting has got every row once
            before. Default: True.

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
            # torchtune's stock recipes flatten labels for every loss but one of this name.
            raise ValueError(
                f"labels has shape {tuple(self.labels.shape)}, expected [b, s]: in torchtune's "
                "stock recipes set loss._component_=tfidf_tune.loss.stock.CEWithChunkedOutputLoss"
            )
        for name, tensor in _integers_of(self).items():
            # Unsigned ones cannot hold -100, or are masks; the number of a document is never -100.
            if name == "document_ids":
                is_refused = tensor.is_floating_point()
            else:
                is_refused = tensor.dtype not in _SIGNED
            if is_refused:
                raise ValueError(
                    f"{name} are {tensor.dtype}, expected signed integers: convert ids with "
                    f"{name}.long()"
                )
            if tensor.shape != self.labels.shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}, expected that of labels, "
                    f"{tuple(self.labels.shape)}"
                )
            object.__setattr__(self, name, tensor.long())


def _integers_of(batch: TokenBatch) -> dict[str, Tensor]:
    fields = {name: getattr(batch, name) for name in _PADDED_BY}
    return {name: tensor for name, tensor in fields.items() if tensor is not None}


def shift_labels(labels: Tensor) -> Tensor:
    """Move labels ``[b, s]`` one position to the left, so that position i holds the token that
    follows token i.

    The last position gets -100.
    """
    last = torch.full_like(labels[:, :1], IGNORE_INDEX)
    return torch.cat([labels[:, 1:], last], dim=1)


def shift_tokens(tokens: Tensor) -> Tensor:
    """Move tokens ``[b, s]`` one position to the left, as :func:`shift_labels` does; the first one
    becomes the last.

    The last position has no label, so that every token has a place. Document ids of the tokens are
    shifted in the same way, and hold for the labels too.
    """
    return tokens.roll(-1, dims=1)


def differs_from_previous(values: Tensor) -> Tensor:
    """Return where values along the last dimension differ from the one before, which the first ones
    do.
    """
    differs = values[..., 1:] != values[..., :-1]
    return F.pad(differs, (1, 0), value=True)


def values_are_known(tensor: Tensor) -> bool:
    """Return whether values can be read without waiting: on a CPU, outside of compiled graphs."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def _num_ranks() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1


def gather_batch(batch: TokenBatch) -> tuple[TokenBatch, tuple[slice, slice]]:
    """Return the mini-batch of all ranks, each rank's padded to the largest shape, and the place of
    the own rows in it.

    Document ids and tokens are given on all ranks or on none. Numbers outside the range of int32
    are clamped to it. Predictions are not gathered.
    """
    # The largest shape of all ranks, unless the caller knows it: reading it makes the host wait.
    num_rows, length = batch.labels.shape
    largest = batch.largest_shape
    if largest is None:
        shape = torch.tensor([num_rows, length], device=batch.labels.device)
        dist.all_reduce(shape, dist.ReduceOp.MAX)
        largest = (int(shape[0]), int(shape[1]))
    if num_rows > largest[0] or length > largest[1]:
        raise ValueError(
            f"labels have shape {(num_rows, length)}, larger than largest_shape, {largest}"
        )
    padding = (0, largest[1] - length, 0, largest[0] - num_rows)
    # One message with all parts, padded by ignored labels; the document of a position without a
    # label does not matter.
    given = _integers_of(batch)
    padded = [F.pad(part, padding, value=_PADDED_BY[name]) for name, part in given.items()]
    message_PBS = torch.stack(padded).clamp(_INT32.min, _INT32.max).int()
    # One collective for all parts; every rank then has the same union, its own rows included.
    gathered_RPBS = message_PBS.new_empty(dist.get_world_size(), *message_PBS.shape)
    dist.all_gather(list(gathered_RPBS.unbind()), message_PBS)
    parts: dict[str, Any] = {
        name: part.flatten(0, 1) for name, part in zip(given, gathered_RPBS.unbind(1), strict=True)
    }
    first_row = dist.get_rank() * largest[0]
    own_rows = (slice(first_row, first_row + num_rows), slice(length))
    return replace(batch, predictions=None, **parts), own_rows


# Weights with a smaller sum count as none: a number of tokens divided by it is still a float32.
_SMALLEST_SUM = 2.0**-100


def unit_mean(raw_weights: Tensor, valid: Tensor, max_weight: float | None = None) -> Tensor:
    r"""Scale weights to mean 1 over the valid tokens: :math:`w_i = w'_i / (\frac{1}{M}\sum_j
    w'_j)`.

    With ``max_weight`` the scale :math:`c` is the one for which the mean of :math:`w_i =
    \min(c\,w'_i, \mathrm{max\_weight})` is 1, so that a cap changes neither the mean nor the
    learning rate that suits it. With k tokens at the cap :math:`c = (M - k\,\mathrm{max\_weight}) /
    \sum_{i>k} w'_i` over weights in descending order, and k is the number of positions at which
    that c would still exceed the cap.

    Args:
        raw_weights (Tensor): non-negative, float32, any shape; with ``max_weight`` positive where
            ``valid``.
        valid (Tensor): bool, same shape.
        max_weight (float | None): largest weight, at least 1. Default: None, no cap.

    Returns:
        Tensor: float32, same shape; 0 where not ``valid``; all 0 when no valid token has a weight.
    """
    raw_weights = raw_weights * valid
    num_valid = valid.count_nonzero()
    if max_weight is None or raw_weights.numel() == 0:
        return raw_weights.mul_(num_valid / raw_weights.sum().clamp_min_(_SMALLEST_SUM))

    # Candidates for the scale: with 0, 1, 2, ... of the largest weights at the cap, the rest shares
    # what is left of M.
    descending = raw_weights.flatten().sort(descending=True).values
    tail_sums = descending.flip(0).cumsum(0).flip(0).clamp_min(_SMALLEST_SUM)
    num_capped_before = torch.arange(len(descending), device=descending.device)
    scales = (num_valid - num_capped_before * max_weight) / tail_sums
    # Never true at the last valid position, where c w' = M - (M - 1) max_weight <= 1: a scale
    # always exists.
    num_capped = (scales * descending > max_weight).sum().unsqueeze(0)
    scale = scales[num_capped]
    return (raw_weights * scale).clamp_max(max_weight)


class OneThread:
    """A lock that never waits: entering it while another thread holds it is an error. Copies are
    not locked.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def locked(self, is_needed: bool) -> AbstractContextManager[None]:
        """Return this lock if it is needed; never in compiled graphs, which have no locks."""
        return self if is_needed and not torch.compiler.is_compiling() else nullcontext()

    def __enter__(self) -> None:
        if not self._lock.acquire(False):
            raise RuntimeError(
                "two threads update one window of token counts at the same time: give each thread "
                "its own loss, for example copy.deepcopy(loss)"
            )

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type["OneThread"], tuple[()]]:
        return type(self), ()


class RankLocalModule(nn.Module):
    """A module whose buffers belong to its process, also inside of a module that
    ``DistributedDataParallel`` wraps.

    Before each forward pass ``DistributedDataParallel`` overwrites all ``named_buffers()`` of the
    module that it wraps with those of rank 0: a rank would lose what it has seen. Buffers of this
    class are therefore plain attributes, which a module that contains it does not list. Otherwise
    they are as all buffers: while PyTorch moves, saves or loads them, they are where it keeps
    buffers, so that they have the same dtypes and the same keys in ``state_dict``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._names_of_buffers: list[str] = []

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Add a buffer, or replace the one of this name."""
        with self._buffers_in_place():
            super().register_buffer(name, tensor, persistent)
        if name not in self._names_of_buffers:
            self._names_of_buffers.append(name)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of this module, for FSDP2 and distributed checkpoints, which ask each
        module by itself.
        """

        def buffers_of(module: nn.Module) -> Iterable[tuple[str, Tensor | None]]:
            if isinstance(module, RankLocalModule):
                return [(name, getattr(module, name)) for name in module._names_of_buffers]
            return module._buffers.items()

        yield from self._named_members(buffers_of, prefix, recurse, remove_duplicate)

    @contextmanager
    def _buffers_in_place(self) -> Iterator[None]:
        for name in self._names_of_buffers:
            # It is in place already where PyTorch replaced it: when it loads with assign=True.
            if name in self.__dict__:
                self._buffers[name] = self.__dict__.pop(name)
        try:
            yield
        finally:
            self.__dict__.update(self._buffers)
            self._buffers.clear()

    def _apply(self, *args: Any, **options: Any) -> Any:
        with self._buffers_in_place():
            return super()._apply(*args, **options)  # type: ignore[no-untyped-call]

    def _save_to_state_dict(self, *args: Any) -> None:
        with self._buffers_in_place():
            super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:
        with self._buffers_in_place():
            super()._load_from_state_dict(*args)


class TokenWeighting(RankLocalModule, ABC):
    """Base class of all weightings: gives each label token a weight in a cross-entropy loss.

    A subclass implements :meth:`weigh`. In ``.train()`` mode it may learn from the batch (a window
    of statistics, for example); in ``.eval()`` mode it leaves its state unchanged. State belongs
    into registered buffers, which the recipes save and restore, and of which each process keeps its
    own.

    Attributes:
        needs_predictions (bool): whether :meth:`weigh` needs ``batch.predictions``. The logits then
            have to be computed before the weights are known.
        needs_tokens (bool): whether :meth:`weigh` needs ``batch.all_tokens``, the tokens without a
            label too; it is None otherwise.
        sync (bool): whether, in training with several processes, :meth:`weigh` gets one mini-batch
            with the rows of all ranks, the same on every rank, without predictions. The base class
            gathers it, and keeps the weights of the rank's own rows.
    """

    needs_predictions: bool = False
    needs_tokens: bool = False
    sync: bool = False

    @torch.no_grad()
    def forward(self, batch: TokenBatch | Tensor, **fields: Any) -> Tensor:
        """Compute the weights of a mini-batch.

        Args:
            batch (TokenBatch | Tensor): the mini-batch, or only its labels, signed integer ``[b,
                s]``, already shifted, -100 where ignored.
            **fields (Any): with a labels tensor the other fields of :class:`TokenBatch`, such as
                ``vocab_size``.

        Returns:
            Tensor: float32 ``[b, s]`` on the device of the labels, without gradient: 0 at ignored
            positions, mean 1 over the valid tokens unless the class says otherwise.

        Raises:
            ValueError: If labels have another type or shape, tokens that are needed are missing,
                or, on a CPU, an id is outside the vocabulary or a label is not the token at its
                position. With ``sync`` every rank raises it for values.
        """
        # One form of the arguments, with all tokens exactly where they are needed.
        if isinstance(batch, TokenBatch):
            batch = replace(batch, **fields)
        else:
            batch = TokenBatch(batch, **fields)
        if not self.needs_tokens and batch.all_tokens is not None:
            batch = replace(batch, all_tokens=None)
        elif self.needs_tokens and batch.all_tokens is None:
            raise ValueError(
                f"{type(self).__name__} counts all tokens, but the batch has only labels: pass "
                "all_tokens=shift_tokens(input_ids) too, -100 in place of padding"
            )
        # In training with several processes the weighting gets the rows of all ranks.
        union = batch
        own_rows = (slice(None), slice(None))
        shares_batches = self.sync and self.training
        if shares_batches and _num_ranks() > 1:
            union, own_rows = gather_batch(batch)
        if values_are_known(batch.labels):
            if batch.labels.numel():
                self.check(batch)
            # Numbers of the union are clamped to int32.
            if union is not batch and union.labels.numel():
                self.check(union)
        if union.labels.numel() == 0:  # nothing to learn, and no maximum to take
            return torch.zeros(batch.labels.shape, device=batch.labels.device)
        # torchtune's stock recipes do not move their loss.
        if any(buffer.device != batch.labels.device for buffer in self.buffers()):
            self.to(batch.labels.device)
        weights = self.weigh(union)
        if getattr(weights, "shape", None) != union.labels.shape:
            result = list(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
            raise ValueError(
                f"{type(self).__name__}.weigh has to return [b, s] = {list(union.labels.shape)}, "
                f"got {result}"
            )
        return weights[own_rows]

    def check(self, batch: TokenBatch) -> None:
        """Raise a ``ValueError`` if an id is outside the vocabulary, or a label is not the token at
        its position.

        Called where reading values waits for no device.
        """
        size = batch.vocab_size or "ids from 0"
        outside = f"the vocabulary of {size}; ignored positions are marked by {IGNORE_INDEX}"
        for name, ids in (("labels", batch.labels), ("all_tokens", batch.all_tokens)):
            if ids is not None:
                # Ignored positions look like the id 0, which every vocabulary has.
                known_ids = torch.where(ids == IGNORE_INDEX, 0, ids)
                require_ids(name, known_ids, batch.vocab_size, outside)
        if batch.all_tokens is not None:
            differ = (batch.labels != IGNORE_INDEX) & (batch.labels != batch.all_tokens)
            if differ.any():
                raise ValueError(
                    f"{int(differ.sum())} labels are not the tokens at their positions: pass "
                    "all_tokens=shift_tokens(input_ids) with the shifted labels"
                )

    @abstractmethod
    def weigh(self, batch: TokenBatch) -> Tensor:
        """Compute the weights, float32 ``[b, s]``, of a mini-batch with at least one position,
        which has been checked.

        Labels, document ids and tokens are int64.
        """

    def set_special_tokens(self, token_ids: Iterable[int]) -> None:
        """Set the special tokens (BOS, EOS, ...), which are never hidden. They replace those set
        before.
        """


def require_ids(name: str, ids: Tensor, limit: int | None, outside: str) -> None:
    """Raise a ``ValueError`` unless ids are from 0 to below ``limit``; it says what they are
    ``outside`` of.
    """
    smallest, largest = (int(bound) for bound in ids.aminmax())
    if smallest < 0 or (limit is not None and largest >= limit):
        wrong = smallest if smallest < 0 else largest
        raise ValueError(f"{name} contain the id {wrong}, outside {outside}")


def require_no_tokens(weighting: TokenWeighting, host: str) -> None:
    """Raise a ``ValueError`` if a weighting needs all tokens, for a host that passes only labels to
    its loss.
    """
    if weighting.needs_tokens:
        raise ValueError(
            f"the weighting counts all tokens, but {host} passes only the labels to a loss: set "
            "counted to 'labels'"
        )


class UniformWeighting(TokenWeighting):
    """Weight 1 for every valid token: plain cross-entropy."""

    def weigh(self, batch: TokenBatch) -> Tensor:
        """Return 1 at valid positions and 0 at ignored ones, float32 ``[b, s]``."""
        return (batch.labels != IGNORE_INDEX).float()
