"""Completions whose recitation is measured: chosen from the examples of a data set, or injected into them."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tfidf_tune._checks import check_at_least
from tfidf_tune.data._conversations import last_answer
from tfidf_tune.data._injected_corpus import inject_aligned
from tfidf_tune.data._passages import Passage, make_passages
from tfidf_tune.data._sequences import SequenceDataset
from tfidf_tune.data._tokenizer import TextTokenizer

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


def choose_completions(
    examples: SequenceDataset, num_own: int, targets: Targets, tokenizer: TextTokenizer, source: str
) -> CompletionsDataset:
    """Choose targets and controls, see ``sft_dataset``; the first ``num_own`` examples are those of the source.

    Raises:
        ValueError: If there are too few examples for them.
    """
    answers = _answers(examples, tokenizer, targets.min_target_tokens)
    groups: dict[bytes, list[int]] = defaultdict(list)
    for index, (start, end) in answers.items():
        groups[examples.sequence(index)[0][start:end].tobytes()].append(index)
    rng = np.random.default_rng(targets.seed)
    own = [group for group in groups.values() if group[0] < num_own]
    once = _shuffled(rng, [group for group in own if len(group) == 1])
    if targets.kind == DUPLICATES:
        repeated = [group for group in own if len(group) > 1]
        chosen = sorted(_shuffled(rng, repeated), key=lambda group: -len(group))[: targets.num_targets]
        controls, num_injected = once[: targets.num_controls], 0
    elif targets.kind == RANDOM:
        chosen, controls = once[: targets.num_targets], once[targets.num_targets :][: targets.num_controls]
        num_injected = targets.num_repeats - 1
    else:
        own = _shuffled(rng, [group[:1] for group in groups.values() if group[0] >= num_own])
        chosen, controls = own[: targets.num_targets], own[targets.num_targets :][: targets.num_controls]
        num_injected = targets.num_repeats
    _check_enough(targets, len(chosen), len(controls), source)
    left_out = {index for group in controls for index in group}
    base = np.array([index for index in range(num_own) if index not in left_out], dtype=np.int32)
    if not len(base):
        raise ValueError(f"the {num_own} examples of {source!r} are all targets or controls: lower num_controls")
    injected = np.array([group[0] for group in chosen], dtype=np.int32)
    blocks, _ = inject_aligned(base[:, None], injected[:, None], num_repeats=num_injected, seed=targets.seed)
    order: Order = blocks[:, 0]
    return CompletionsDataset(examples, order, _passages(examples, order, chosen, controls, answers, tokenizer, source))


def describe_passages(passages: Sequence[Passage]) -> str:
    """Describe targets and controls in a few words."""
    repeats = [passage.num_injections for passage in passages if passage.kind == "target"]
    times = f"{min(repeats)} to {max(repeats)}" if min(repeats) < max(repeats) else str(max(repeats))
    return (
        f"{len(repeats)} completions are targets, which occur {times} times; {len(passages) - len(repeats)} are "
        "controls, which do not occur"
    )


def _answers(examples: SequenceDataset, tokenizer: TextTokenizer, min_tokens: int) -> dict[int, _Answer]:
    """Find the last answer of each example that has a prompt, and an answer of ``min_tokens`` tokens."""
    special = np.array([tokenizer.eos_id, *getattr(tokenizer, "special_tokens", {}).values()])
    answers = {}
    for index in range(len(examples)):
        tokens, is_label = examples.sequence(index)
        start, end = last_answer(is_label)
        # A turn can start and end with special tokens. Decoding ends at EOS, so that it could not be recited.
        runs = np.flatnonzero(np.diff(~np.isin(tokens[start:end], special), prepend=False, append=False))
        if start > 0 and len(runs) and runs[1] - runs[0] >= min_tokens:
            answers[index] = _Answer(start + int(runs[0]), start + int(runs[1]))
    return answers


def _shuffled(rng: np.random.Generator, groups: list[list[int]]) -> list[list[int]]:
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


def _passages(
    examples: SequenceDataset,
    order: Order,
    chosen: list[list[int]],
    controls: list[list[int]],
    answers: dict[int, _Answer],
    tokenizer: TextTokenizer,
    source: str,
) -> list[Passage]:
    group_of = {index: number for number, group in enumerate(chosen) for index in group}
    places: list[list[list[int]]] = [[] for _ in chosen]
    for place, index in enumerate(order.tolist()):
        if index in group_of:
            places[group_of[index]].append([place, answers[index].start])
    passages = []
    for kind, groups, positions in (("target", chosen, places), ("control", controls, [[] for _ in controls])):
        # Of an answer to several prompts, the most frequent prompt is asked for.
        shown = [
            Counter(examples.sequence(index)[0][: answers[index].end].tobytes() for index in group) for group in groups
        ]
        windows = [
            (np.frombuffer(counts.most_common(1)[0][0], dtype=np.int32), where, source)
            for counts, where in zip(shown, positions, strict=True)
        ]
        lengths = [answers[group[0]].end - answers[group[0]].start for group in groups]
        num_prompts = [len(ids) - length for (ids, _, _), length in zip(windows, lengths, strict=True)]
        passages += make_passages(tokenizer, kind, windows, num_prompts)
    return passages
