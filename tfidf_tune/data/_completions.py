"""Completions whose recitation is measured: chosen from the examples of a data set, or injected into them."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tfidf_tune._checks import check_at_least
from tfidf_tune.data._conversations import label_runs
from tfidf_tune.data._duplicates import join_documents
from tfidf_tune.data._injected_corpus import inject_aligned
from tfidf_tune.data._passages import Passage, make_passages
from tfidf_tune.data._sequences import SequenceDataset
from tfidf_tune.data._tokenizer import TextTokenizer, TokenArray

DUPLICATES, RANDOM = "duplicates", "random"
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
    """Where the answer of an example starts and ends, in tokens, without special tokens."""

    start: int
    end: int


class _LearnedRuns:
    """All runs of tokens that are learned, of all turns of all examples.

    Args:
        examples (SequenceDataset): the examples.
        tokenizer (TextTokenizer): its special tokens are around answers.

    Attributes:
        last (dict[int, _Answer]): the last answer of each example that has a prompt.
        counts (Counter[bytes]): runs of each answer, by its ids.
    """

    def __init__(self, examples: SequenceDataset, tokenizer: TextTokenizer) -> None:
        special = np.array([tokenizer.eos_id, *getattr(tokenizer, "special_tokens", {}).values()])
        self.last: dict[int, _Answer] = {}
        self.counts: Counter[bytes] = Counter()
        runs: list[TokenArray] = []
        places: list[tuple[int, int]] = []
        for index in range(len(examples)):
            tokens, is_label = examples.sequence(index)
            for start, end in label_runs(is_label).tolist():
                runs.append(tokens[start:end])
                places.append((index, start))
                # A turn can start and end with special tokens. Decoding ends at EOS, so that it could not be recited.
                self.last.pop(index, None)
                parts = label_runs(~np.isin(tokens[start:end], special))
                if len(parts):
                    answer = _Answer(*(start + parts[0]).tolist())
                    self.counts[tokens[answer.start : answer.end].tobytes()] += 1
                    if start > 0:
                        self.last[index] = answer
        self._tokens = join_documents(runs).tobytes()
        self._starts = np.cumsum([0, *(len(run) + 1 for run in runs)])[:-1]  # a separator follows each
        self._places = places

    def find(self, answer: bytes) -> list[tuple[int, int]]:
        """Return the example and the offset of each occurrence without overlap, also within longer runs."""
        found = []
        at = self._tokens.find(answer)
        while at >= 0:
            token, remainder = divmod(at, np.dtype(np.int32).itemsize)
            if not remainder:
                run = int(np.searchsorted(self._starts, token, side="right")) - 1
                index, offset = self._places[run]
                found.append((index, offset + token - int(self._starts[run])))
            at = self._tokens.find(answer, at + (1 if remainder else len(answer)))
        return found


class _Group(NamedTuple):
    """An answer, and the examples that end with it."""

    answer: bytes
    examples: list[int]


def choose_completions(
    examples: SequenceDataset, num_own: int, targets: Targets, tokenizer: TextTokenizer, source: str
) -> CompletionsDataset:
    """Choose targets and controls, see ``sft_dataset``; the first ``num_own`` examples are those of the source.

    Occurrences are counted in the tokens that are learned, of all turns: conversations are often exported turn by turn,
    so that the last answer of a row is an earlier one of the next rows.

    Raises:
        ValueError: If there are too few examples for them.
    """
    runs = _LearnedRuns(examples, tokenizer)
    rng = np.random.default_rng(targets.seed)
    groups = _groups(examples, runs, targets.min_target_tokens)
    own = [group for group in groups if group.examples[0] < num_own]
    once = _shuffled(rng, [group for group in own if runs.counts[group.answer] == 1])
    trained, avoided = set(range(num_own)), set[int]()
    if targets.kind == DUPLICATES:
        repeated = _shuffled(rng, [group for group in own if runs.counts[group.answer] > 1])
        chosen = sorted(repeated, key=lambda group: -runs.counts[group.answer])[: targets.num_targets]
        avoided = {index for group in chosen for index, _ in runs.find(group.answer)}
        num_injected = 0
    else:
        if targets.in_file:
            once = _shuffled(rng, [group for group in groups if group.examples[0] >= num_own])
        chosen = _take(once, targets.num_targets, runs, trained, avoided)
        num_injected = targets.num_repeats if targets.in_file else targets.num_repeats - 1
    controls = _take(once, targets.num_controls, runs, trained, avoided, are_trained=False)
    _check_enough(targets, len(chosen), len(controls), source)
    left_out = {group.examples[0] for group in controls}
    base = np.array([index for index in range(num_own) if index not in left_out], dtype=np.int32)
    if not len(base):
        raise ValueError(f"the {num_own} examples of {source!r} are all targets or controls: lower num_controls")
    injected = np.array([group.examples[0] for group in chosen], dtype=np.int32)
    blocks, _ = inject_aligned(base[:, None], injected[:, None], num_repeats=num_injected, seed=targets.seed)
    order: Order = blocks[:, 0]
    targets_at = [_positions(order, runs.find(group.answer)) for group in chosen]
    passages = [
        *_passages("target", examples, runs, chosen, targets_at, tokenizer, source),
        *_passages("control", examples, runs, controls, [[] for _ in controls], tokenizer, source),
    ]
    return CompletionsDataset(examples, order, passages)


def _take(
    groups: list[_Group],
    number: int,
    runs: _LearnedRuns,
    trained: set[int],
    avoided: set[int],
    are_trained: bool = True,
) -> list[_Group]:
    """Take ``number`` answers that occur once in their first example, and in no other one that is trained on.

    These examples are not ``avoided``, which hold a target already. For targets, both sets are updated.
    """
    taken: list[_Group] = []
    for group in groups:
        if len(taken) == number:
            break
        example = group.examples[0]
        if example in avoided:
            continue
        found = Counter(index for index, _ in runs.find(group.answer))
        if found.pop(example) == 1 and not found.keys() & trained:
            taken.append(group)
            if are_trained:
                trained.add(example)
                avoided.update(found, [example])
    return taken


def describe_passages(passages: Sequence[Passage]) -> str:
    """Describe targets and controls in a few words."""
    repeats = [passage.num_injections for passage in passages if passage.kind == "target"]
    times = f"{min(repeats)} to {max(repeats)}" if min(repeats) < max(repeats) else str(max(repeats))
    return (
        f"{len(repeats)} completions are targets, which occur {times} times; {len(passages) - len(repeats)} are "
        "controls, which do not occur"
    )


def _groups(examples: SequenceDataset, runs: _LearnedRuns, min_tokens: int) -> list[_Group]:
    """Group the examples by their last answer, if it has ``min_tokens`` tokens."""
    groups: dict[bytes, list[int]] = defaultdict(list)
    for index, (start, end) in runs.last.items():
        if end - start >= min_tokens:
            groups[examples.sequence(index)[0][start:end].tobytes()].append(index)
    return [_Group(*item) for item in groups.items()]


def _shuffled(rng: np.random.Generator, groups: list[_Group]) -> list[_Group]:
    return [groups[index] for index in rng.permutation(len(groups))]


def _check_enough(targets: Targets, num_targets: int, num_controls: int, source: str) -> None:
    if (num_targets, num_controls) == (targets.num_targets, targets.num_controls):
        return
    what = {DUPLICATES: "answers that occur several times", RANDOM: "answers that occur once"}
    found = what.get(targets.kind, f"answers in {targets.kind!r} that are not in the source,")
    others = " Random ones: targets=random." if targets.kind == DUPLICATES else ""
    raise ValueError(
        f"{source!r}: num_targets is {targets.num_targets} and num_controls {targets.num_controls}, but there are only "
        f"{num_targets} {found} of {targets.min_target_tokens} tokens or more as targets, and {num_controls} examples "
        f"for controls: lower these numbers or min_target_tokens.{others}"
    )


def _positions(order: Order, found: list[tuple[int, int]]) -> list[list[int]]:
    """Return ``[place in the data set, offset]`` of what was found in examples."""
    offsets: dict[int, list[int]] = defaultdict(list)
    for index, offset in found:
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
    answers = [runs.last[group.examples[0]] for group in groups]
    num_prompts = [len(ids) - (end - start) for (ids, _, _), (start, end) in zip(windows, answers, strict=True)]
    return make_passages(tokenizer, kind, windows, num_prompts)
