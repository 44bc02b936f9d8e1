"""Completions whose recitation is measured: chosen from the examples of a data set, or injected into them."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from tfidf_tune._checks import check_at_least
from tfidf_tune.data._conversations import label_runs
from tfidf_tune.data._duplicates import (
    SEPARATOR,
    Mask,
    Positions,
    join_documents,
    name_repeated_windows,
    none_within,
    without_overlaps,
)
from tfidf_tune.data._injected_corpus import inject_aligned
from tfidf_tune.data._passages import Passage, make_passages
from tfidf_tune.data._sequences import SequenceDataset
from tfidf_tune.data._tokenizer import TextTokenizer, TokenArray

DUPLICATES, RANDOM = "duplicates", "random"
_LONG_RUN = 16  # tokens; answers made from a template share shorter runs without being copies
_SHARED = f"90 % of the tokens, or half of them and at least {_LONG_RUN},"
_MOST_COMPARED = 2**15  # tokens at a time, few because the first that are equal often end a search
Order = np.ndarray[tuple[int], np.dtype[np.int32]]


@dataclass(frozen=True)
class Targets:
    """What is measured; ``kind`` is "duplicates", "random" or a file, the others are arguments of ``sft_dataset``."""

    kind: str
    num_targets: int
    num_controls: int
    num_repeats: int
    min_target_tokens: int
    seed: int

    @property
    def in_file(self) -> bool:
        """Whether the targets are rows of a file."""
        return self.kind not in (DUPLICATES, RANDOM)

    def __post_init__(self) -> None:
        """Check the ranges; raises a ValueError."""
        check_at_least(1, num_targets=self.num_targets, num_repeats=self.num_repeats)
        check_at_least(0, num_controls=self.num_controls, seed=self.seed)
        check_at_least(2, min_target_tokens=self.min_target_tokens)


class CompletionsDataset(SequenceDataset):
    """Examples, some of which are targets; the controls are not among them.

    Args:
        examples (SequenceDataset): of the source, perhaps followed by those of a file of targets.
        order (Order): int32 numbers of the examples that are trained on, in this order.
        passages (Sequence[Passage]): the targets, then the controls; an attribute.
    """

    def __init__(self, examples: SequenceDataset, order: Order, passages: Sequence[Passage]) -> None:
        super().__init__(*examples.parts(order))
        self.passages = passages


class _Answer(NamedTuple):
    """Where the answer of an example is, in tokens, without special tokens.

    ``start`` and ``end`` are those in the example, ``place`` is where it starts in the tokens of ``_LearnedRuns``.
    """

    start: int
    end: int
    place: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def least_occurrence(self) -> int:
        """Tokens that a run of an occurrence has at least: 90 % of the answer.

        The first and last tokens of an answer vary with the text around it, such as "It" and " It"; long rows are cut.
        """
        return -(-self.num_tokens * 9 // 10)

    @property
    def least_shared(self) -> int:
        """Tokens of the answer that no row may learn in a run if the answer is a control: half, but at least 16."""
        return min(self.least_occurrence, max(_LONG_RUN, -(-self.num_tokens // 2)))


class _LearnedRuns:
    """All runs of tokens that are learned, of all turns of all examples, and where answers share tokens with them.

    Args:
        examples (SequenceDataset): the examples.
        tokenizer (TextTokenizer): its special tokens are around answers.
        min_tokens (int): the least length of an answer, at least 2.

    Attributes:
        last (dict[int, _Answer]): the last answer of each example that has a prompt and such an answer.
    """

    def __init__(self, examples: SequenceDataset, tokenizer: TextTokenizer, min_tokens: int) -> None:
        special = np.array([tokenizer.eos_id, *getattr(tokenizer, "special_tokens", {}).values()])
        self.last: dict[int, _Answer] = {}
        runs: list[TokenArray] = [np.empty(0, dtype=np.int32)]  # so that a separator is also before the first one
        sources = [(0, 0)]
        place = 1
        for index in range(len(examples)):
            tokens, is_label = examples.sequence(index)
            for start, end in label_runs(is_label).tolist():
                # A turn can start and end with special tokens. Decoding ends at EOS, so that it could not be recited.
                self.last.pop(index, None)
                parts = label_runs(~np.isin(tokens[start:end], special)).tolist()
                if start > 0 and parts and parts[0][1] - parts[0][0] >= min_tokens:
                    first, last = parts[0]
                    self.last[index] = _Answer(start + first, start + last, place + first)
                runs.append(tokens[start:end])
                sources.append((index, start))
                place += end - start + 1
        self.tokens = join_documents(runs)
        self._starts = np.cumsum([0, *(len(run) + 1 for run in runs)])[:-1]
        self._sources = np.array(sources)
        # Every run that is searched for has a window of this length, which leads to the others with the same one.
        self._length = max(2, min(_LONG_RUN, min_tokens * 4 // 5))
        self._names = name_repeated_windows(self.tokens, self._length)
        named = np.flatnonzero(self._names)
        self._by_name = named[np.argsort(self._names[named], kind="stable")]
        self._ends = np.cumsum(np.bincount(self._names[named], minlength=1))

    def occurrences(self, answer: _Answer) -> Positions:
        """Return the places of runs of 90 % of the answer without overlap, int64, ascending."""
        found = np.unique(np.concatenate(list(self._shared(answer, answer.least_occurrence))))
        return without_overlaps(found, answer.least_occurrence)

    def most_occurrences(self, answer: _Answer) -> int:
        """Return an upper bound of the number of occurrences: all of them contain the inner 80 % of the answer."""
        inner = answer.place + answer.num_tokens - answer.least_occurrence
        names = self._names[inner : answer.place + answer.least_occurrence - self._length + 1]
        return int(np.where(names > 0, self._ends[names] - self._ends[names - 1], 1).min())

    def sharing(self, answer: _Answer) -> Iterator[int]:
        """Yield the examples that learn a run of ``least_shared`` tokens of the answer, some more than once."""
        for places in self._shared(answer, answer.least_shared):
            yield from np.unique(self.locate(places)[:, 0]).tolist()

    def locate(self, places: Positions) -> Positions:
        """Return the example and the offset in it of each place, int64 ``[num_places, 2]``."""
        runs = np.searchsorted(self._starts, places, side="right") - 1
        located: Positions = self._sources[runs]
        located[:, 1] += places - self._starts[runs]
        return located

    def _shared(self, answer: _Answer, length: int) -> Iterator[Positions]:
        """Yield in parts the places of all windows of ``length`` tokens that are also windows of the answer."""
        num_tokens = answer.num_tokens
        ids = self.tokens[answer.place : answer.place + num_tokens]
        ids = np.append(ids, SEPARATOR - 1)  # differs from everything, so that no run goes on in the next comparison
        # A run contains so many windows less one, in sequence, so that it contains one of every so many.
        step = length - self._length + 1
        size = -(-_MOST_COMPARED // len(ids))
        for offset in range(min(num_tokens - length, step - 1), num_tokens - self._length + 1, step):
            starts = self._same_window(answer.place + offset) - offset
            for first in range(0, len(starts), size):
                part = starts[first : first + size]
                around = self.tokens.take(part[:, None] + np.arange(len(ids)), mode="clip")
                equal_from = np.flatnonzero(none_within((around != ids).ravel(), length))
                number, shift = np.divmod(equal_from, len(ids))
                yield part[number] + shift

    def _same_window(self, place: int) -> Positions:
        name = self._names[place]
        return self._by_name[self._ends[name - 1] : self._ends[name]] if name else np.array([place])


class _Group(NamedTuple):
    """An answer, and the examples that end with it; it is the one of the first of them."""

    answer: _Answer
    examples: list[int]


def choose_completions(
    examples: SequenceDataset,
    num_own: int,
    targets: Targets,
    tokenizer: TextTokenizer,
    source: str,
    kept: Callable[[Order], Mask],
) -> CompletionsDataset:
    """Choose targets and controls, see ``sft_dataset``; the first ``num_own`` examples are those of the source.

    ``kept`` returns which of the examples with these numbers, in this order, stay.

    Occurrences are counted in the tokens that are learned, of all turns: conversations are often exported turn by turn,
    so that the last answer of a row is an earlier one of the next rows. See ``_Answer`` for what an occurrence is.

    Raises:
        ValueError: If there are too few examples for them.
    """
    runs = _LearnedRuns(examples, tokenizer, targets.min_target_tokens)
    rng = np.random.default_rng(targets.seed)
    groups = [group for group in _groups(examples, runs) if targets.in_file == (group.examples[0] >= num_own)]
    groups = [groups[index] for index in rng.permutation(len(groups))]
    trained, avoided = set(range(num_own)), set[int]()
    if targets.kind == DUPLICATES:
        chosen = _most_frequent(groups, targets.num_targets, runs)
        num_injected = 0
    else:
        chosen = _take(groups, targets.num_targets, runs, trained, avoided)
        num_injected = targets.num_repeats if targets.in_file else targets.num_repeats - 1
    found = [runs.locate(runs.occurrences(group.answer)) for group in chosen]
    avoided.update(index for places in found for index in places[:, 0].tolist())
    controls = _take(groups, targets.num_controls, runs, trained, avoided, are_trained=False)
    _check_enough(targets, len(chosen), len(controls), source)
    left_out = {group.examples[0] for group in controls}
    base = np.array([index for index in range(num_own) if index not in left_out], dtype=np.int32)
    if not len(base):
        raise ValueError(f"the {num_own} examples of {source!r} are all targets or controls: lower num_controls")
    injected = np.array([[[group.examples[0]]] * num_injected for group in chosen], dtype=np.int32)
    blocks, _ = inject_aligned(base[:, None], injected.reshape(len(chosen), num_injected, 1), seed=targets.seed)
    order: Order = blocks[:, 0]
    order = order[kept(order)]
    targets_at = [_positions(order, places) for places in found]
    passages = [
        *_passages("target", examples, runs, chosen, targets_at, tokenizer, source),
        *_passages("control", examples, runs, controls, [[] for _ in controls], tokenizer, source),
    ]
    return CompletionsDataset(examples, order, passages)


def _most_frequent(groups: list[_Group], number: int, runs: _LearnedRuns) -> list[_Group]:
    """Take the ``number`` answers that occur most often, at least twice, and share no token with each other."""
    taken: list[_Group] = []
    is_taken = np.zeros(len(runs.tokens), dtype=np.bool_)
    # An answer is counted only when none has a higher bound.
    queue = [(-most, at, False) for at, group in enumerate(groups) if (most := runs.most_occurrences(group.answer)) > 1]
    heapify(queue)
    while queue and len(taken) < number:
        _, at, is_counted = heappop(queue)
        answer = groups[at].answer
        if is_taken[answer.place : answer.place + answer.num_tokens].any():
            continue
        places = runs.occurrences(answer)
        if is_counted:
            taken.append(groups[at])
            is_taken[places[:, None] + np.arange(answer.least_occurrence)] = True
        elif len(places) > 1:
            heappush(queue, (-len(places), at, True))
    return taken


def _take(
    groups: list[_Group],
    number: int,
    runs: _LearnedRuns,
    trained: set[int],
    avoided: set[int],
    are_trained: bool = True,
) -> list[_Group]:
    """Take ``number`` answers that occur once in their first example, and share no long run with one trained on.

    These examples are not ``avoided``, which share one with a target already. For targets, both sets are updated.
    """
    taken: list[_Group] = []
    for group in groups:
        if len(taken) == number:
            break
        example = group.examples[0]
        if example in avoided or any(index in trained and index != example for index in runs.sharing(group.answer)):
            continue
        if runs.locate(runs.occurrences(group.answer))[:, 0].tolist().count(example) == 1:
            taken.append(group)
            if are_trained:
                trained.add(example)
                avoided.update(runs.sharing(group.answer))
    return taken


def describe_passages(passages: Sequence[Passage]) -> str:
    """Describe targets and controls in a few words."""
    repeats = [passage.num_injections for passage in passages if passage.kind == "target"]
    times = f"{min(repeats)} to {max(repeats)}" if min(repeats) < max(repeats) else str(max(repeats))
    return (
        f"{len(repeats)} completions are targets, which occur {times} times, whole or at least 90 % of them in a run; "
        f"{len(passages) - len(repeats)} are controls, of which no example learns {_SHARED} in a run"
    )


def _groups(examples: SequenceDataset, runs: _LearnedRuns) -> list[_Group]:
    """Group the examples by their last answer."""
    groups: dict[bytes, list[int]] = defaultdict(list)
    for index, answer in runs.last.items():
        groups[examples.sequence(index)[0][answer.start : answer.end].tobytes()].append(index)
    return [_Group(runs.last[indices[0]], indices) for indices in groups.values()]


def _check_enough(targets: Targets, num_targets: int, num_controls: int, source: str) -> None:
    if (num_targets, num_controls) == (targets.num_targets, targets.num_controls):
        return
    what = {DUPLICATES: "answers that occur several times", RANDOM: "answers that occur once"}
    found = what.get(targets.kind, f"answers in {targets.kind!r} that are not in the source,")
    others = " Random ones: targets=random." if targets.kind == DUPLICATES else ""
    raise ValueError(
        f"{source!r}: num_targets is {targets.num_targets} and num_controls {targets.num_controls}, but there are only "
        f"{num_targets} {found} of {targets.min_target_tokens} tokens or more as targets, and {num_controls} examples "
        f"for controls: lower these numbers or min_target_tokens.{others} Of controls and random "
        f"targets, no other example that is trained on learns {_SHARED} in a run"
    )


def _positions(order: Order, found: Positions) -> list[list[int]]:
    """Return ``[place in the data set, offset]`` of what was found in examples."""
    offsets: dict[int, list[int]] = defaultdict(list)
    for index, offset in found.tolist():
        offsets[index].append(offset)
    return [[place, offset] for place, index in enumerate(order.tolist()) for offset in offsets.get(index, [])]


def _passages(
    kind: str,
    examples: SequenceDataset,
    runs: _LearnedRuns,
    groups: list[_Group],
    positions: list[list[list[int]]],
    tokenizer: TextTokenizer,
    source: str,
) -> list[Passage]:
    # Of an answer to several prompts, the most frequent prompt is asked for.
    shown = [
        Counter(examples.sequence(index)[0][: runs.last[index].end].tobytes() for index in group.examples)
        for group in groups
    ]
    windows = [
        (np.frombuffer(counts.most_common(1)[0][0], dtype=np.int32), where, source)
        for counts, where in zip(shown, positions, strict=True)
    ]
    num_prompts = [len(ids) - group.answer.num_tokens for (ids, _, _), group in zip(windows, groups, strict=True)]
    return make_passages(tokenizer, kind, windows, num_prompts)
