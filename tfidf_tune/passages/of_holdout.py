"""Targets and controls of a text that a coin divided before training: both chosen by one function.

What decides whether a passage can be chosen does not depend on the side of its document. So targets
and controls differ by the coin alone, and what a model knows more of the targets is training.
"""

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tfidf_tune._printing import counted
from tfidf_tune._tokenizer import TextTokenizer, TokenArray, encode_texts
from tfidf_tune.corpus.holdout import Holdout, Side, read_holdout
from tfidf_tune.passages._search import cut_at_eos
from tfidf_tune.passages.probe_file import FEWEST_PASSAGES, PassageDraft
from tfidf_tune.passages.probe_spec import ProbeSpec
from tfidf_tune.passages.stretches import (
    Mask,
    Positions,
    Start,
    WindowChooser,
    join_documents,
    name_repeated_windows,
    none_within,
    shared_run,
)

_CANDIDATES = 4  # groups of a tier that are looked at, for each passage that is wanted
_BATCH_TOKENS = 1 << 21
_SIDES: tuple[Side, Side] = ("train", "held_out")


class Candidate(NamedTuple):
    """A passage that may be chosen.

    Attributes:
        token_ids (TokenArray): int32 ``[block_size]``.
        place (str): where its document is.
        group (str): the group of near copies that its document is of.
        copies (int): documents of the group.
        start (Start): where the passage starts.
    """

    token_ids: TokenArray
    place: str
    group: str
    copies: int
    start: Start


@dataclass(frozen=True)
class ChosenByCoin:
    """Passages of both sides, with as many of each tier of copies.

    Attributes:
        targets (list[PassageDraft]): of documents that were trained on.
        controls (list[PassageDraft]): of documents that were held out.
        starts (Counter[Start]): of the targets by where they start.
        num_documents (int): rows of both sides.
        num_tokens (int): their tokens.
        num_refused (int): candidates that have a stretch of another group's text.
        num_repetitive (int): candidates that repeat a few tokens.
        by_tier (dict[int, tuple[int, int]]): least number of copies in a tier -> candidates that
            were possible on each side.
    """

    targets: list[PassageDraft]
    controls: list[PassageDraft]
    starts: "Counter[Start]"
    num_documents: int
    num_tokens: int
    num_refused: int
    num_repetitive: int
    by_tier: dict[int, tuple[int, int]]


def choose_by_coin(tokenizer: TextTokenizer, spec: ProbeSpec) -> ChosenByCoin:
    """Choose passages of both sides of a holdout.

    1. Of each side, and each tier of copies (1, 2 to 3, 4 to 7, ...), the groups with the least
       hashes of seed and name are candidates, with a window of one document each.
    2. A candidate is refused if another group's text, on either side, has a run of its tokens, see
       ``shared_run``. Only so is the rule the same for both: text that recurs in the training text
       would be found there far more often than in the small part that is held out.
    3. As many candidates of a tier are taken of one side as of the other, from the tier with the
       most copies on, in the order of their hashes::

           copies        candidates trained on    held out    taken of each
           4 to 7                             6           1               1
           2 to 3                            40           3               3
           1                                400          90     96 in all: 90

    Memory does not grow with the text, all of which is read twice and tokenized once.

    Raises:
        ValueError: If fewer than 10 passages of each side can be taken, or the holdout is of
            conversations.
    """
    holdout = read_holdout(str(spec.holdout))
    if holdout.column is None:
        raise ValueError(
            f"{holdout.manifest} divides conversations or prompts, of which passages cannot be "
            "chosen: name a holdout of text, or a probe file by `tfidf-tune probe audit`"
        )
    wanted = min(spec.num_targets, spec.num_controls)
    candidates: dict[Side, list[Candidate]] = {}
    num_repetitive = 0
    for side in _SIDES:
        candidates[side], repetitive = _candidates(tokenizer, spec, holdout, side, wanted)
        num_repetitive += repetitive
    both = [*candidates["train"], *candidates["held_out"]]
    is_shared, num_documents, num_tokens = _shared_with_others(tokenizer, spec, holdout, both)
    possible: dict[Side, list[Candidate]] = {"train": [], "held_out": []}
    for number, candidate in enumerate(both):
        if not is_shared[number]:
            side = "train" if number < len(candidates["train"]) else "held_out"
            possible[side].append(candidate)

    # As many of each tier on both sides.
    taken: dict[Side, list[Candidate]] = {"train": [], "held_out": []}
    by_tier: dict[int, tuple[int, int]] = {}
    for tier in sorted({_tier(candidate.copies) for candidate in both}, reverse=True):
        of_tier: dict[Side, list[Candidate]] = {}
        for side in _SIDES:
            of_tier[side] = [each for each in possible[side] if _tier(each.copies) == tier]
        numbers = (len(of_tier["train"]), len(of_tier["held_out"]))
        by_tier[1 << (tier - 1)] = numbers
        number = min(*numbers, wanted - len(taken["train"]))
        for side in _SIDES:
            taken[side] += of_tier[side][:number]
    num_taken = len(taken["train"])
    if num_taken < min(FEWEST_PASSAGES, wanted):
        raise ValueError(
            f"{holdout.manifest}: {counted(num_taken, 'passage')} of {spec.block_size} tokens can "
            f"be taken of each side ({len(possible['train']):,} of what was trained on, "
            f"{len(possible['held_out']):,} of what was held out, by tiers of copies; "
            f"{int(is_shared.sum()):,} have text of other documents), and {FEWEST_PASSAGES} are "
            "needed: lower --block-size, or hold out a larger share of more text"
        )
    targets = []
    for candidate in taken["train"]:
        # The place is that of a row, which is one document.
        fields = {"num_injections": candidate.copies, "document": 0}
        targets.append(PassageDraft(candidate.token_ids, [], candidate.place, fields))
    controls = [
        PassageDraft(each.token_ids, [], each.place, {"document": 0}) for each in taken["held_out"]
    ]
    return ChosenByCoin(
        targets=targets,
        controls=controls,
        starts=Counter(candidate.start for candidate in taken["train"]),
        num_documents=num_documents,
        num_tokens=num_tokens,
        num_refused=int(is_shared.sum()),
        num_repetitive=num_repetitive,
        by_tier=by_tier,
    )


def _tier(copies: int) -> int:
    return copies.bit_length()


class _Drawn(NamedTuple):
    """A document of a group, by ``order``, minus the group's hash: the largest leaves a heap
    first.
    """

    order: int
    group: str
    copies: int
    place: str
    text: str


def _candidates(
    tokenizer: TextTokenizer, spec: ProbeSpec, holdout: Holdout, side: Side, wanted: int
) -> tuple[list[Candidate], int]:
    """Return a window of a document of the first groups of each tier, in the order of their hashes,
    and how many were left out because they repeat a few tokens.
    """
    drawn: dict[int, list[_Drawn]] = {}  # by tier, heaps
    seen: set[str] = set()
    for row, group in holdout.rows(side):
        text = row.columns.get(holdout.column or "")
        if not group.is_tossed or group.name is None or not isinstance(text, str):
            continue
        heap = drawn.setdefault(_tier(group.documents), [])
        order = -_order(spec.seed, group.name)
        is_full = len(heap) == _CANDIDATES * wanted
        if group.name in seen or (is_full and order < heap[0].order):
            continue
        seen.add(group.name)
        document = _Drawn(order, group.name, group.documents, row.place, text)
        if is_full:
            seen.discard(heapq.heappushpop(heap, document).group)
        else:
            heapq.heappush(heap, document)
    candidates = []
    num_repetitive = 0
    for heap in drawn.values():
        documents = sorted(heap, reverse=True)
        texts = (document.text for document in documents)
        for document, ids in zip(documents, encode_texts(tokenizer, texts), strict=True):
            corpus = join_documents([ids])
            cut_at_eos(spec, tokenizer, corpus)
            rng = np.random.default_rng(-document.order)
            chooser = WindowChooser(tokenizer, corpus, spec.block_size, rng)
            start = next(chooser.random(chooser.fits), None)
            num_repetitive += chooser.num_repetitive
            if start is not None:
                candidate = Candidate(
                    token_ids=chooser.window(start).copy(),
                    place=document.place,
                    group=document.group,
                    copies=document.copies,
                    start=chooser.start_of(start),
                )
                candidates.append(candidate)
    return candidates, num_repetitive


def _order(seed: int, group: str) -> int:
    """Return a number that orders groups, the same on each side and in each process."""
    key = str(seed).encode()
    digest = hashlib.blake2b(group.encode(), digest_size=8, key=key, person=b"tfidf audit").digest()
    return int.from_bytes(digest, "big")


def _shared_with_others(
    tokenizer: TextTokenizer, spec: ProbeSpec, holdout: Holdout, candidates: Sequence[Candidate]
) -> tuple[Mask, int, int]:
    """Return which candidates have a stretch in common with text of another group, and the
    documents and tokens of both sides.
    """
    length = spec.block_size
    num_shared = shared_run(length)
    numbers = {candidate.group: number for number, candidate in enumerate(candidates)}
    windows = join_documents(candidate.token_ids for candidate in candidates)
    is_shared = np.zeros(len(candidates), dtype=np.bool_)
    num_documents = 0
    num_tokens = 0
    for groups, documents in _batches(tokenizer, holdout):
        num_documents += len(documents)
        num_tokens += sum(map(len, documents))
        # The group of each token, by the number of its candidate; -1: a group without one.
        owners = [
            np.full(len(ids) + 1, numbers.get(group, -1))
            for group, ids in zip(groups, documents, strict=True)
        ]
        corpus = join_documents(documents)
        names = name_repeated_windows(np.concatenate([corpus, windows]), num_shared)
        is_others = _of_others(names, np.concatenate(owners), len(candidates), length)
        are_none = none_within(is_others, length - num_shared + 1)
        is_shared |= ~are_none[:: length + 1][: len(candidates)]
    return is_shared, num_documents, num_tokens


def _of_others(names: Positions, owners: Positions, num_candidates: int, length: int) -> Mask:
    """Return at which tokens of the candidates a stretch begins that another group's text has.

    ``names`` are those of the text, then of the candidates, each followed by a separator;
    ``owners`` are the groups of the text's tokens::

        text            a b c d | a b c | x a b c |      stretches of 3 tokens
        owner           0 0 0 0 0 1 1 1 1 2 2 2 2 2
        candidate 0     a b c d                          a b c is of 1 and 2, too; b c d of 0 alone
    """
    in_text = names[: len(owners)]
    in_candidates = names[len(owners) :]
    pairs = np.unique(np.stack([in_text, owners], axis=1)[in_text > 0], axis=0)
    num_groups = np.bincount(pairs[:, 0], minlength=names.max(initial=0) + 1)
    only_group = np.full(len(num_groups), -1)
    only_group[pairs[:, 0]] = pairs[:, 1]
    own = np.repeat(np.arange(num_candidates), length + 1)
    groups_with = num_groups[in_candidates]
    is_of_another = (groups_with == 1) & (only_group[in_candidates] != own)
    return np.asarray((in_candidates > 0) & ((groups_with > 1) | is_of_another))


def _batches(
    tokenizer: TextTokenizer, holdout: Holdout
) -> Iterator[tuple[list[str], list[TokenArray]]]:
    """Tokenize the text of both sides, as much at a time as fits into memory, with the group of
    each document.
    """
    groups: list[str] = []
    texts: list[str] = []
    num_characters = 0
    for side in _SIDES:
        for row, group in holdout.rows(side):
            text = row.columns.get(holdout.column or "")
            if not isinstance(text, str) or not text:
                continue
            groups.append(group.name or "")
            texts.append(text)
            num_characters += len(text)
            if num_characters > _BATCH_TOKENS:
                yield groups, [*encode_texts(tokenizer, texts)]
                groups = []
                texts = []
                num_characters = 0
    if texts:
        yield groups, [*encode_texts(tokenizer, texts)]
