"""Answers of examples whose memorization is measured, and answers that are held out, for
``sft_dataset``.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import numpy as np

from tfidf_tune._checks import check_at_least
from tfidf_tune._tokenizer import TextTokenizer, TokenArray
from tfidf_tune.passages.copies import draw_slots
from tfidf_tune.passages.probe_file import Passage, PassageDraft, make_passages, write_probe_file
from tfidf_tune.passages.stretches import LONG_RUN, Examples, LearnedRuns, Mask

Kept: TypeAlias = Callable[[TokenArray], Mask]  # which of a list of examples stay

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Targets:
    """What is measured; ``kind`` is "duplicates", "random" or a file, the others are arguments of
    ``sft_dataset``.
    """

    kind: str
    num_targets: int
    num_controls: int
    num_repeats: int
    min_target_tokens: int
    seed: int
    probe_file: str | None

    def __post_init__(self) -> None:
        check_at_least(1, num_targets=self.num_targets, num_repeats=self.num_repeats)
        check_at_least(0, num_controls=self.num_controls, seed=self.seed)
        check_at_least(2, min_target_tokens=self.min_target_tokens)

    @property
    def in_file(self) -> bool:
        """Whether the targets are rows of a file of their own."""
        return self.kind not in ("duplicates", "random")


def choose_completions(
    examples: Examples,
    num_own: int,
    targets: Targets,
    tokenizer: TextTokenizer,
    source: str,
    kept: Kept,
) -> tuple[TokenArray, list[Passage]]:
    """Choose targets and controls of ``sft_dataset``, whose source has the first ``num_own``
    examples.

    Returns the numbers of the examples in the order of training, int32, and the passages.
    """
    # All turns count: in a conversation that is exported turn by turn, an answer occurs again in
    # the next rows.
    runs = LearnedRuns(examples, tokenizer, targets.min_target_tokens)
    # An answer is represented by the first of the examples that end with it.
    candidates = [first for first in runs.ending if targets.in_file == (first >= num_own)]
    candidates = [
        candidates[at] for at in np.random.default_rng(targets.seed).permutation(len(candidates))
    ]
    # Targets first, because duplicates can be anywhere; controls are what is shared with no example
    # trained on.
    trained = set(range(num_own))
    avoided = set[int]()
    chosen: list[int] = []
    num_copies = 0
    if targets.kind == "duplicates":
        chosen = runs.most_frequent(candidates, targets.num_targets)
    else:
        num_copies = targets.num_repeats if targets.in_file else targets.num_repeats - 1
        for example in islice(
            runs.occurring_once(candidates, trained, avoided), targets.num_targets
        ):
            chosen.append(example)
            trained.add(example)
            avoided.update(runs.sharing(runs.last[example]))
    answers = [runs.locate(runs.occurrences(runs.last[first])).tolist() for first in chosen]
    for places in answers:
        avoided.update(index for index, _ in places)
    controls = [*islice(runs.occurring_once(candidates, trained, avoided), targets.num_controls)]
    base = sorted({*range(num_own)}.difference(controls))
    if (len(chosen), len(controls)) != (targets.num_targets, targets.num_controls) or not base:
        raise ValueError(
            f"{source!r} has {len(chosen)} of num_targets {targets.num_targets} answers of "
            f"{targets.min_target_tokens} tokens or more for targets={targets.kind}, and "
            f"{len(controls)} of num_controls {targets.num_controls} of which no other example "
            f"learns half of the tokens and at least {LONG_RUN} in a run; {len(base)} examples are "
            "left. Lower these numbers or min_target_tokens, or set targets=random"
        )
    # The order of training: base examples and copies of targets, without what deduplication
    # removes.
    numbers = np.append(base, np.repeat(chosen, num_copies)).astype(np.int32)
    order = numbers[np.argsort(draw_slots(len(base), len(chosen), num_copies, targets.seed))]
    order = order[kept(order)]
    places_of: dict[int, list[int]] = defaultdict(list)  # of an example in the data set
    for place, index in enumerate(order.tolist()):
        places_of[index].append(place)
    drafts: list[PassageDraft] = []
    for first, places in zip([*chosen, *controls], answers + [[]] * len(controls), strict=True):
        # The most frequent prompt of an answer, followed by the answer.
        length = runs.last[first].num_tokens
        starts = {index: runs.last[index].start for index in runs.ending[first]}
        shown = Counter(
            examples.sequence(index)[0][: start + length].tobytes()
            for index, start in starts.items()
        )
        ids = np.frombuffer(shown.most_common(1)[0][0], dtype=np.int32)
        positions = []
        for index, offset in places:
            positions += [[place, offset] for place in places_of[index]]
        positions.sort()
        drafts.append(PassageDraft(ids, positions, source, {"num_prompt": len(ids) - length}))
    passages = make_passages(tokenizer, drafts, len(chosen))
    times = [passage.num_injections for passage in passages[: len(chosen)]]
    logger.info(
        f"{source}: {len(chosen)} completions are targets, which occur {min(times)} to "
        f"{max(times)} times; {len(controls)} are controls; {len(order):,} examples are trained on"
    )
    if targets.probe_file is not None:
        write_probe_file(targets.probe_file, passages)
    return order, passages
