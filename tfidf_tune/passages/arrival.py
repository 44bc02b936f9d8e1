"""Whether canaries arrive: batches as a trainer makes them are searched for the tokens of the probe
file, and the labels are counted there.
"""

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tfidf_tune._checks import require_number
from tfidf_tune._tokenizer import TokenArray
from tfidf_tune.passages.probe_file import Passage, read_probe_file
from tfidf_tune.passages.stretches import Mask, label_runs

if TYPE_CHECKING:
    from transformers import Trainer

_IGNORED = -100  # label of a token without loss
_HIDDEN = -1  # stands for padding, which no canary contains
# Tokens that are looked up at once; a shorter stretch of a canary is not noticed.
_GRAM = 8
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, and of no pattern
# Settings of trainers that decide what arrives; an error quotes them.
_SETTINGS = (
    "max_length",
    "packing",
    "packing_strategy",
    "completion_only_loss",
    "assistant_only_loss",
    "dataloader_drop_last",
)


@dataclass(frozen=True)
class CanaryCheck:
    """What a check of canaries has seen; printed, it is two sentences."""

    num_targets: int
    """Canaries that were inserted."""
    num_controls: int
    """Canaries that were not inserted, none of which is in the batches."""
    num_batches: int
    """Batches that were read, on all processes."""
    num_inserted: int
    """Insertions of all targets, as the probe file says."""
    num_seen: int
    """Insertions that arrive whole; more than ``num_inserted`` if rows are read several times."""
    tokens_with_loss: dict[str, int]
    """For each target the tokens with loss, in the insertion that has the fewest."""
    num_trainable: int | None
    """Parameters (tensors) that training changes; None if no model was checked."""
    num_with_gradient: int | None
    """Of these, the ones that get a gradient from a target."""

    def __str__(self) -> str:
        fewest = min(self.tokens_with_loss.values())
        text = (
            f"{self.num_targets} canaries arrive: {self.num_seen} of {self.num_inserted} "
            f"insertions in {self.num_batches} batches, each with loss on at least {fewest} "
            f"tokens. None of {self.num_controls} controls is in the batches."
        )
        if self.num_trainable is None:
            return f"{text} Gradients were not checked."
        return (
            f"{text} {self.num_with_gradient} of {self.num_trainable} trainable parameters get a "
            "gradient from a canary."
        )


class _Piece(NamedTuple):
    """The longest stretch of an incomplete canary; pieces compare by their length."""

    num_tokens: int
    num_equal: int  # tokens at their places, before and after others too
    is_cut: bool  # whether its row ends, or begins, within the canary
    first_difference: tuple[int, int, int]  # place in the canary, token of the file, of the row


@dataclass
class _Sightings:
    """What was seen of one canary."""

    num_whole: int = 0
    fewest_with_loss: int | None = None
    longest: _Piece | None = None
    num_heads: int = 0  # pieces from the first token on, after which their row ends
    num_tails: int = 0  # pieces up to the last token, which begin their row

    def add_whole(self, with_loss: int) -> None:
        """Count a whole canary."""
        self.num_whole += 1
        if self.fewest_with_loss is None or with_loss < self.fewest_with_loss:
            self.fewest_with_loss = with_loss

    def add_piece(self, piece: _Piece) -> None:
        """Keep a piece if it is the longest."""
        if self.longest is None or piece.num_tokens > self.longest.num_tokens:
            self.longest = piece

    def merge(self, other: "_Sightings") -> None:
        """Add what another process has seen of the canary."""
        if other.fewest_with_loss is not None:
            self.add_whole(other.fewest_with_loss)
            self.num_whole += other.num_whole - 1
        if other.longest is not None:
            self.add_piece(other.longest)
        self.num_heads += other.num_heads
        self.num_tails += other.num_tails


@dataclass
class Seen:
    """What was seen of all canaries in some batches, in the order of the passages."""

    canaries: list[_Sightings]
    num_batches: int = 0
    longest_row: int = 0
    """Tokens of the longest row, or document of a packed row."""

    def merge(self, other: "Seen") -> None:
        """Add what another process has seen."""
        for mine, theirs in zip(self.canaries, other.canaries, strict=True):
            mine.merge(theirs)
        self.num_batches += other.num_batches
        self.longest_row = max(self.longest_row, other.longest_row)


@dataclass
class Circumstances:
    """What an error says beside the canary: settings of the trainer, and what was not read."""

    settings: str = ""
    """In brackets, or empty."""
    is_wrapped: bool = False
    """Whether packing divides texts."""
    notes: list[str] = field(default_factory=list)
    """Sentences about insertions that are missing."""


class CanarySearch:
    """Searches batches for canaries.

    Windows of 8 tokens of all canaries are looked up in each row. Where one is found, the whole
    canary is laid over the row and compared, token by token::

        canary              5 6 7 8 9
        row           1 2 3 5 6 7 8       all that the row has is equal, but it ends: cut
        row           1 2 4 6 7 8 9 1     the first token differs: other token ids

    Args:
        passages (Sequence[Passage]): targets and controls.
        special_ids (Iterable[int]): special tokens of the tokenizer, which end a text in a row.
        loss_share (float): least share of a target's tokens that have loss. Default: 1.0
    """

    def __init__(
        self, passages: Sequence[Passage], special_ids: Iterable[int], loss_share: float = 1.0
    ) -> None:
        require_number(
            "loss_share",
            loss_share,
            0,
            1,
            "it is the least share of a target's tokens that have loss",
            positive=True,
        )
        self._passages = passages
        self._loss_share = loss_share
        self._canaries = [np.array(passage.token_ids, dtype=np.int32) for passage in passages]
        self._special = {*special_ids, _HIDDEN}
        self._length = min(_GRAM, *(len(ids) for ids in self._canaries))
        self._places: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, ids in enumerate(self._canaries):
            for offset, code in enumerate(_codes(ids, self._length).tolist()):
                self._places[code].append((number, offset))
        self._known = np.array(sorted(self._places), dtype=np.uint64)
        self.seen = Seen([_Sightings() for _ in passages])

    def add(self, batch: Any, *, may_be_shifted: bool) -> None:
        """Search a batch.

        Args:
            batch (Any): a mapping with ``input_ids`` and ``labels`` or ``shift_labels``, ``[b,
                s]``; ``attention_mask`` and ``position_ids`` if there are any.
            may_be_shifted (bool): whether the label at a position may be the token after it.
        """
        self.seen.num_batches += 1
        ids, has_loss = _tokens_and_loss(batch, may_be_shifted=may_be_shifted)
        for row, borders in enumerate(_borders(batch, ids.shape)):
            for start, end in pairwise(borders):
                self._add_document(ids[row, start:end], has_loss[row, start:end])

    def _add_document(self, ids: TokenArray, has_loss: Mask) -> None:
        """Search a row, or a document of a packed row."""
        self.seen.longest_row = max(self.seen.longest_row, len(ids))
        if len(ids) < self._length:
            return
        whole = []
        incomplete = []
        for number, start in self._candidates(ids):
            canary = self._canaries[number]
            if start >= 0 and np.array_equal(ids[start : start + len(canary)], canary):
                whole.append((number, start))
            else:
                incomplete.append((number, start))
        is_covered = np.zeros(len(ids), dtype=bool)
        for number, start in whole:
            end = start + len(self._canaries[number])
            is_covered[start:end] = True
            self.seen.canaries[number].add_whole(int(has_loss[start:end].sum()))
        # What whole canaries share with others, or with themselves, is no piece.
        for number, start in incomplete:
            self._add_incomplete(number, start, ids, is_covered)

    def _candidates(self, ids: TokenArray) -> list[tuple[int, int]]:
        """Return ``(canary, place of its first token)`` for all canaries of which a window is in a
        row; the place is negative if the row begins within the canary.
        """
        codes = _codes(ids, self._length)
        nearest = np.searchsorted(self._known, codes).clip(max=len(self._known) - 1)
        found = set()
        for place in np.flatnonzero(self._known[nearest] == codes).tolist():
            for number, offset in self._places[int(codes[place])]:
                found.add((number, place - offset))
        return sorted(found)

    def _add_incomplete(self, number: int, start: int, ids: TokenArray, is_covered: Mask) -> None:
        """Keep the longest stretch of a canary that is laid over a row from ``start`` on."""
        canary = self._canaries[number]
        first = max(start, 0)
        last = min(start + len(canary), len(ids))
        offset = first - start
        is_equal = ids[first:last] == canary[offset : last - start]
        runs = label_runs(is_equal & ~is_covered[first:last])
        if not len(runs):
            return
        begin, end = runs[(runs[:, 1] - runs[:, 0]).argmax()].tolist()
        # Where the stretch is, in the row and in the canary.
        row_begin = first + begin
        row_end = first + end
        starts_row = row_begin == 0 or int(ids[row_begin - 1]) in self._special
        ends_row = row_end == len(ids) or int(ids[row_end]) in self._special
        lacks_head = offset + begin > 0
        lacks_tail = offset + end < len(canary)
        sightings = self.seen.canaries[number]
        if ends_row and lacks_tail and not lacks_head:
            sightings.num_heads += 1
        if starts_row and lacks_head and not lacks_tail:
            sightings.num_tails += 1
        difference = (0, 0, 0)
        if not is_equal.all():
            place = int(np.argmin(is_equal))
            difference = (offset + place, int(canary[offset + place]), int(ids[first + place]))
        is_cut = (ends_row and lacks_tail) or (starts_row and lacks_head)
        sightings.add_piece(_Piece(end - begin, int(is_equal.sum()), is_cut, difference))

    def result(
        self, circumstances: Circumstances, model: Any, context: AbstractContextManager[Any]
    ) -> CanaryCheck:
        """Check what was seen, and the gradient if there is a model; sum up."""
        seen = self.seen
        check_seen(self._passages, seen, circumstances, self._loss_share)
        num_trainable = None
        num_with_gradient = None
        if model is not None and not is_sharded(model):
            target = next(passage for passage in self._passages if passage.kind == "target")
            num_trainable, num_with_gradient = check_gradient(model, target, context)
        tokens_with_loss = {}
        for passage, sightings in zip(self._passages, seen.canaries, strict=True):
            if passage.kind == "target":
                tokens_with_loss[passage.id] = sightings.fewest_with_loss or 0
        return CanaryCheck(
            num_targets=len(tokens_with_loss),
            num_controls=len(self._passages) - len(tokens_with_loss),
            num_batches=seen.num_batches,
            num_inserted=sum(passage.num_injections for passage in self._passages),
            num_seen=sum(sightings.num_whole for sightings in seen.canaries),
            tokens_with_loss=tokens_with_loss,
            num_trainable=num_trainable,
            num_with_gradient=num_with_gradient,
        )


def _codes(ids: TokenArray, length: int) -> Any:
    """Return a number for each window of ``length`` tokens; different windows hardly share one."""
    codes = np.zeros(len(ids) - length + 1, dtype=np.uint64)
    for offset in range(length):
        codes = codes * _FACTOR + ids[offset : offset + len(codes)].astype(np.uint64)
    return codes


def _array(value: Any) -> Any:
    """Return a tensor of any device, or lists, as an array of two dimensions or more."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    return np.atleast_2d(np.asarray(value))


def _tokens_and_loss(batch: Any, *, may_be_shifted: bool) -> tuple[TokenArray, Mask]:
    """Return the tokens of a batch, padding as -1, and which of them are learned."""
    names = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
    if "input_ids" not in names or not {"labels", "shift_labels"} & {*names}:
        raise ValueError(
            f"canaries are searched in batches with input_ids and labels, but a batch has {names}: "
            "use a data collator that makes them"
        )
    ids = _array(batch["input_ids"]).astype(np.int32)
    labels = batch.get("labels")
    is_shifted = batch.get("shift_labels") is not None
    if is_shifted:
        labels = batch["shift_labels"]
    labels = _array(labels)
    if labels.shape != ids.shape:
        raise ValueError(
            f"input_ids have the shape {ids.shape}, but labels {labels.shape}: canaries are "
            "searched in batches with a label for each token"
        )
    is_label = labels != _IGNORED
    if not is_shifted and not (labels == ids)[is_label].all():
        # The token after the last label may be padding, or not in the row.
        is_pair = is_label[:, :-1] & is_label[:, 1:]
        is_shifted = bool(is_pair.any() and (labels[:, :-1] == ids[:, 1:])[is_pair].all())
        if not is_shifted:
            raise ValueError(
                "labels are not the input_ids, nor the tokens that follow them: make them equal, "
                "or -100 (a collator needs mlm=False)"
            )
        if not may_be_shifted:
            raise ValueError(
                "labels are shifted already, and models of transformers shift them again: pass "
                "input_ids as labels. If your trainer's loss expects shifted labels, call "
                "check_batches(trainer.get_train_dataloader(), model=trainer.model)"
            )
    # A token is learned where it is the label of the token before it; the first one never is.
    has_loss = np.zeros(ids.shape, dtype=bool)
    has_loss[:, 1:] = is_label[:, 1:]
    if is_shifted:
        has_loss[:, 1:] = is_label[:, :-1]
    mask = batch.get("attention_mask")
    if mask is not None and _array(mask).shape == ids.shape:
        ids[_array(mask) == 0] = _HIDDEN
    return ids, has_loss


def _borders(batch: Any, shape: tuple[int, int]) -> Iterator[list[int]]:
    """Yield for each row where its documents begin, and its end: documents of packed rows begin
    where ``position_ids`` start again.
    """
    positions = batch.get("position_ids")
    if positions is not None:
        positions = _array(positions)
    for row in range(shape[0]):
        begins = []
        if positions is not None and positions.shape == shape:
            begins = (np.flatnonzero(np.diff(positions[row]) < 1) + 1).tolist()
        yield [0, *begins, shape[1]]


@contextmanager
def unchanged_random_state(loader: Any = None) -> Iterator[None]:
    """Put back the random states of Python, NumPy and torch after the block, and the state of a
    data loader that is used again: generators, and the number of its epoch.
    """
    import torch

    python = random.getstate()
    numpy = np.random.get_state()
    cpu = torch.get_rng_state()
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state_all() if has_cuda else []
    generators = _generators(loader)
    states = [generator.get_state() for generator in generators]
    epoch = getattr(loader, "iteration", None)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if has_cuda:
            torch.cuda.set_rng_state_all(cuda)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        if epoch is not None:
            loader.iteration = epoch


def _generators(loader: Any) -> list[Any]:
    """Return the random generators of a data loader and its samplers."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = [
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    ]
    generators = []
    for owner in owners:
        generator = getattr(owner, "generator", None)
        if hasattr(generator, "get_state"):
            generators.append(generator)
    return generators


def search_batches(
    search: CanarySearch, batches: Iterable[Any], num_batches: int | None, *, may_be_shifted: bool
) -> None:
    """Search all batches, or the first ``num_batches``, without an effect on later reading."""
    with unchanged_random_state(batches):
        try:
            for batch in islice(batches, num_batches):
                search.add(batch, may_be_shifted=may_be_shifted)
        finally:
            # The data loaders of accelerate register themselves until they are read to the end.
            if hasattr(batches, "gradient_state"):
                batches.end()  # type: ignore[attr-defined]


def length_of(batches: Iterable[Any]) -> int | None:
    """Return the number of batches, None if it is not known."""
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        return None


def batches_of_first_epoch(trainer: Any, loader: Any) -> tuple[int, int | None]:
    """Return how many batches of the first epoch a ``Trainer`` reads, and how many there are."""
    from datasets import IterableDataset
    from torch.utils.data import IterableDataset as TorchStream

    args = trainer.args
    stream = trainer.train_dataset
    if isinstance(stream, TorchStream) and not isinstance(stream, IterableDataset):
        raise ValueError(
            f"the training data are a stream ({type(stream).__name__}), which a check might use "
            "up: call check_batches(batches, max_batches=...) with a second copy of it"
        )
    length = length_of(loader)
    steps = args.max_steps
    if length is not None and steps <= 0:
        steps_per_epoch = -(-length // args.gradient_accumulation_steps)
        steps = int(np.ceil(args.num_train_epochs * steps_per_epoch))
    if steps <= 0:
        raise ValueError(
            "the training data have no length: set max_steps, which the trainer needs too"
        )
    num_batches = steps * args.gradient_accumulation_steps
    if length is not None:
        num_batches = min(num_batches, length)
    return num_batches, length


def circumstances_of(trainer: Any, num_read: int, length: int | None) -> Circumstances:
    """Return what an error has to say of a trainer."""
    args = trainer.args
    values = []
    for name in _SETTINGS:
        value = getattr(args, name, None)
        if value is not None:
            values.append(f"{name}={value!r}")
    result = Circumstances(settings=f" ({', '.join(values)})")
    if getattr(args, "packing", False):
        # "bfd_split" divides only texts that are longer than a row.
        result.is_wrapped = getattr(args, "packing_strategy", "") == "wrapped"
    if length is not None and num_read < length:
        needed = -(-length // args.gradient_accumulation_steps)
        result.notes.append(
            f"Training ends after {num_read} of the {length} batches of an epoch: set max_steps to "
            f"{needed} or more, or num_train_epochs to 1 or more."
        )
    if getattr(args, "dataloader_drop_last", False):
        result.notes.append("dataloader_drop_last=True leaves rows out: set it to False.")
    return result


def check_seen(
    passages: Sequence[Passage], seen: Seen, circumstances: Circumstances, loss_share: float
) -> None:
    """Raise a ``ValueError`` that describes the first canary that does not arrive as it should."""
    missing = []
    without_loss = []
    present = []
    for passage, sightings in zip(passages, seen.canaries, strict=True):
        # The first token of a row has no loss: nothing predicts it.
        needed = loss_share * (len(passage.token_ids) - 1)
        if passage.kind == "control":
            if sightings.num_whole:
                present.append((passage, sightings))
        elif sightings.num_whole < passage.num_injections:
            missing.append((passage, sightings))
        elif sightings.fewest_with_loss is not None and sightings.fewest_with_loss < needed:
            without_loss.append((passage, sightings))
    if missing:
        passage, sightings = missing[0]
        raise ValueError(
            f"{passage.id} arrives whole {sightings.num_whole} of {passage.num_injections} times"
            f"{_others(missing)}. {_why_missing(passage, sightings, seen, circumstances)}"
        )
    if without_loss:
        passage, sightings = without_loss[0]
        raise ValueError(
            f"{passage.id} arrives, but only {sightings.fewest_with_loss} of its "
            f"{len(passage.token_ids)} tokens have loss{_others(without_loss)}: the labels of the "
            f"others are -100. Put canaries where the model learns, inject(dataset, "
            f"column='completion'), or set completion_only_loss or assistant_only_loss to False"
            f"{circumstances.settings}. A loss that leaves tokens out on purpose needs loss_share "
            f"below {loss_share:g}."
        )
    if present:
        passage, sightings = present[0]
        raise ValueError(
            f"{passage.id} is in the training data {sightings.num_whole} times"
            f"{_others(present)}, but controls must not be: make InjectedCanaries with another "
            "seed, and do not train on the probe file"
        )


def _others(affected: Sequence[Any]) -> str:
    """Return how many other canaries have the same problem."""
    if len(affected) == 1:
        return ""
    if len(affected) == 2:
        return " (another canary has the same problem)"
    return f" ({len(affected) - 1} other canaries have the same problem)"


def _why_missing(
    passage: Passage, sightings: _Sightings, seen: Seen, circumstances: Circumstances
) -> str:
    """Return why insertions of a target are missing, and what to set."""
    size = len(passage.token_ids)
    piece = sightings.longest
    settings = circumstances.settings
    if piece is not None and piece.is_cut:
        stretch = f"no other row has more than {piece.num_tokens} of its {size} tokens"
        # A part of fewer than 8 tokens is not noticed.
        if circumstances.is_wrapped or (sightings.num_heads and sightings.num_tails):
            return (
                f"It is split over rows: {stretch}. Set packing=False, or packing_strategy='bfd' "
                f"with a max_length well above {size}{settings}."
            )
        return (
            f"It is cut: {stretch}, and rows have up to {seen.longest_row}. Set max_length well "
            f"above {size}, where you tokenize or in the trainer (sequence_len of Axolotl), or "
            f"make InjectedCanaries with a smaller block_size{settings}."
        )
    if piece is not None and 2 * piece.num_equal >= size:
        place, expected, found = piece.first_difference
        return (
            f"It arrives with other token ids: {piece.num_equal} of {size} are those of the probe "
            f"file, and token {place} is {found} instead of {expected}. Make InjectedCanaries "
            "with the tokenizer of the trainer; if a chat template or another text stands right "
            "beside the canary, put a line break or a special token between them."
        )
    if circumstances.notes:
        return " ".join(circumstances.notes)
    longest = 0 if piece is None else piece.num_tokens
    return (
        f"Other rows have at most {longest} of its {size} tokens in a row. Rows are left out after "
        "inject(), by removal of duplicates, a filter, a split or the data collator; or the "
        f"trainer reads another column or has another tokenizer{settings}."
    )


def is_sharded(model: Any) -> bool:
    """Return whether no process has the whole model."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def check_gradient(model: Any, passage: Passage, context: Any) -> tuple[int, int]:
    """Raise a ``ValueError`` unless the loss of a target has a gradient; return the number of
    trainable parameters, and of those with a gradient.

    The model is in evaluation mode meanwhile, and the gradients are not kept: nothing is left of
    them for training, and no hook of an optimizer runs.
    """
    import torch
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(model, DistributedDataParallel):  # which would wait for a backward pass
        model = model.module
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ValueError(
            "no parameter of the model is trainable, so no canary can be learned: load an adapter "
            "with is_trainable=True, or set requires_grad"
        )
    ids = torch.tensor([passage.token_ids], device=trainable[0].device)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.enable_grad(), context:
            output = model(ids)
        # Prompt tuning puts virtual tokens in front.
        logits = getattr(output, "logits", output)
        predicting = logits[0, -ids.shape[1] : -1].float()
        loss = F.cross_entropy(predicting, ids[0, 1:].to(predicting.device))
        gradients: Sequence[Any] = []
        if loss.requires_grad:
            gradients = torch.autograd.grad(loss, trainable, allow_unused=True)
    finally:
        for module in training:
            module.training = True
    num_with_gradient = 0
    for gradient in gradients:
        if gradient is not None and bool(gradient.any()):
            num_with_gradient += 1
    if not num_with_gradient:
        raise ValueError(
            f"the loss of {passage.id} has no gradient for any of the {len(trainable)} trainable "
            "parameters, so it cannot be learned: an adapter may be switched off, merged, or "
            "another one active"
        )
    return len(trainable), num_with_gradient


def check_trainer(
    trainer: Any, passages: Sequence[Passage], special_ids: Iterable[int], *, loss_share: float
) -> CanaryCheck:
    """Check the batches of the first epoch of a ``Trainer``, and its model, see
    :meth:`InjectedCanaries.check`.
    """
    search = CanarySearch(passages, special_ids, loss_share)
    with unchanged_random_state():
        loader = trainer.get_train_dataloader()
        num_batches, length = batches_of_first_epoch(trainer, loader)
        search_batches(search, loader, num_batches, may_be_shifted=False)
        if trainer.args.world_size > 1:
            from accelerate.utils import gather_object

            search.seen, *others = gather_object([search.seen])
            for other in others:
                search.seen.merge(other)
        circumstances = circumstances_of(trainer, num_batches, length)
        model: Any = trainer.model
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            model = None  # train() distributes its weights, which are not complete before
        return search.result(circumstances, model, trainer.accelerator.autocast())


def check_canaries(
    trainer: "Trainer", probe_file: str | Path, *, loss_share: float = 1.0
) -> CanaryCheck:
    """Check before training that a trainer learns the targets of a probe file, and that no control
    is in its data: :meth:`InjectedCanaries.check` where only the file of the canaries is at hand.

    Args:
        trainer (Trainer): a ``Trainer`` of transformers, or one derived from it, before
            ``train()``.
        probe_file (str | Path): what :meth:`InjectedCanaries.write_probe_file` wrote.
        loss_share (float): least share of a target's tokens that have loss. Default: 1.0

    Returns:
        CanaryCheck: what was seen; can be printed.

    Raises:
        ValueError: As :meth:`InjectedCanaries.check`, and if the file has no targets.
    """
    passages = read_probe_file(probe_file)
    if not any(passage.kind == "target" for passage in passages):
        raise ValueError(f"{probe_file} has no targets: name the file of canaries in the data")
    # Only messages need them.
    special_ids = getattr(trainer.processing_class, "all_special_ids", ())
    return check_trainer(trainer, passages, special_ids, loss_share=loss_share)
