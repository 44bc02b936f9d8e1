"""Targets: passages of the training text, those that occur most often first."""

from collections.abc import Iterator
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from tfidf_tune._tokenizer import TokenArray
from tfidf_tune.corpus import window_index as windows
from tfidf_tune.corpus.window_index import PLACE, Piece, Records, WindowIndex
from tfidf_tune.passages._search import (
    SAME_TOKENS,
    Corpus,
    Search,
    occurrences,
    read_corpus,
    read_documents,
    text_of,
)
from tfidf_tune.passages.probe_file import MOST_POSITIONS, PassageDraft
from tfidf_tune.passages.stretches import (
    Positions,
    Start,
    duplicated_stretches,
    name_repeated_windows,
)

_DOCUMENTS = (4096, 16384)  # of candidates: at first, and if they have too few passages
_COPIES = 64  # that are compared to find the passages of a candidate


class Target(NamedTuple):
    """A passage, where it starts, and how often it occurs."""

    draft: PassageDraft
    start: Start
    num_copies: int


class Chosen(NamedTuple):
    """The targets, and what was counted on the way to them."""

    targets: list[Target]
    stretch_repeats: tuple[int, ...]  # occurrences of each duplicated stretch of the candidates
    num_repetitive: int  # passages that repeat a few tokens, and are left out


def frequent_targets(search: Search) -> Chosen:
    """Choose the most frequent duplicates, then random passages."""
    spec = search.spec
    is_random = spec.passages == "random"
    groups = search.groups
    drawn = windows.draw_windows(
        search.index, search.num_candidates, search.rng, unique=not is_random
    )
    targets: list[Target] = []
    stretch_repeats: tuple[int, ...] = ()
    # Few documents at first; more if they have too few passages and there are more groups.
    for most in _DOCUMENTS:
        num_groups, places, weights = _candidates(search.index, groups, 0 if is_random else most)
        corpus = read_corpus(search, np.concatenate([places, drawn]), f"documents-{most}")
        if (
            not corpus.chooser.fits.any()
        ):  # the search needs memory in proportion to the length of a passage
            return Chosen([], stretch_repeats, 0)
        names = name_repeated_windows(corpus.token_ids, spec.block_size)
        if not is_random:
            targets, stretch_repeats = _duplicates(search, corpus, names, weights, f"copies-{most}")
        if is_random or num_groups == len(groups) or len(targets) == spec.num_targets:
            break
    missing = spec.num_targets - len(targets)
    possible = _random_places(search, corpus, names, drawn)
    num_rounds = 0
    while len(targets) < spec.num_targets:
        places_of_passages = list(islice(possible, missing))
        if not places_of_passages:
            break
        num_rounds += 1
        counted = _counted(search, corpus, places_of_passages, f"copies-of-random-{num_rounds}")
        targets += [target for target in counted if is_random or target.num_copies == 1]
    return Chosen(targets[: spec.num_targets], stretch_repeats, corpus.chooser.num_repetitive)


def _candidates(
    index: WindowIndex, groups: Records, most: int
) -> tuple[int, Records, dict[tuple[int, int], float]]:
    """Choose the largest groups whose windows are in so many documents.

    Returns their number, places of some windows of each, and for how many windows each document
    stands, at most.
    """
    counts, places = windows.find_windows(index, groups["key"][: 8 * most], _COPIES)
    num_groups = 0
    weights: dict[tuple[int, int], float] = {}
    for count, records in zip(counts.tolist(), places, strict=False):
        documents = {*records[windows.DOCUMENT].tolist()}
        if num_groups and len(weights) + len(documents - weights.keys()) > most:
            break
        # Of a group with more windows than were read, a document stands for several.
        for document in documents:
            weights[document] = max(weights.get(document, 1.0), count / len(records))
        num_groups += 1
    return num_groups, np.concatenate([np.zeros(0, PLACE), *places[:num_groups]]), weights


def _duplicates(
    search: Search,
    corpus: Corpus,
    names: Positions,
    weights: dict[tuple[int, int], float],
    step: str,
) -> tuple[list[Target], tuple[int, ...]]:
    """Choose the passages that occur most often; also return how often each duplicated stretch
    occurs.
    """
    spec = search.spec
    # The order is that of the expected counts; a few more than needed are counted in all text.
    stretches = duplicated_stretches(names, spec.block_size)
    expected = []
    for starts, _ in stretches:
        located = corpus.located(starts)
        expected.append(sum(weights.get(piece[:2], 1.0) for piece, _ in located))
    repeats = tuple(round(number) for number in expected if number >= spec.min_repeats)
    order = sorted(search.rng.permutation(len(stretches)), key=lambda number: -expected[number])
    possible = corpus.chooser.duplicates(stretches[number] for number in order)
    counted = _counted(search, corpus, list(islice(possible, 2 * spec.num_targets + 20)), step)
    targets = [target for target in counted if target.num_copies >= spec.min_repeats]
    targets.sort(key=lambda target: -target.num_copies)
    return targets[: spec.num_targets], repeats


def _random_places(
    search: Search, corpus: Corpus, names: Positions, drawn: Records
) -> Iterator[Positions]:
    """Choose passages where windows were drawn, then anywhere in their documents; with duplicates,
    unique ones.

    Yields where each occurs in the corpus, int64, ascending.
    """
    chooser = corpus.chooser
    allowed = chooser.fits & (
        (names[: len(chooser.fits)] == 0) | (search.spec.passages == "random")
    )
    possible = np.flatnonzero(allowed)
    if not len(possible):
        return

    def near() -> Iterator[int]:
        """Where a window was drawn, the last possible start before it; found only as long as
        passages are missing.
        """
        for place in drawn:
            number = int(np.searchsorted(possible, corpus.token_at(place), side="right")) - 1
            yield int(possible[max(0, number)])

    # Then every possible start in random order.
    anywhere = search.rng.permutation(possible).tolist()
    for start in chooser.random(allowed, chain(near(), anywhere)):
        same = np.flatnonzero(names == names[start]) if names[start] else np.array([start])
        # An occurrence may overlap a passage that was chosen elsewhere; of occurrences that
        # overlap, all are taken.
        is_free = all(map(chooser.is_free, same.tolist()))
        chooser.take(*same)
        if is_free:
            yield windows.without_overlaps(same, search.spec.block_size)


def _counted(search: Search, corpus: Corpus, chosen: list[Positions], step: str) -> list[Target]:
    """Count passages in all text, given by where they start in a corpus; leave out those without a
    window.
    """
    passages = [corpus.chooser.window(int(starts[0])) for starts in chosen]
    rarest = _rarest_windows(search, passages)
    occurrences_of: dict[int, list[tuple[Piece, int]]] = {}
    files: dict[int, str] = {}
    documents: dict[int, int] = {}
    elsewhere: dict[int, np.uint64] = {}
    whole = {piece[:2] for piece in corpus.pieces if piece.is_whole}
    for number, window in rarest.items():
        located = corpus.located(chosen[number])
        occurrences_of[number] = located
        files[number] = str(search.units[located[0][0].file])
        documents[number] = located[0][0].document
        # That is all if the corpus holds the whole documents of the rarest window. The index has no
        # window if the tokenizer changes text before it splits it.
        if window is not None:
            is_all_read = window.num_windows <= _COPIES and whole.issuperset(
                window.places[windows.DOCUMENT].tolist()
            )
            if not is_all_read:
                elsewhere[number] = window.key
    if elsewhere:
        # The second pass: the documents of all windows that each occurrence of a passage must have.
        _, places = windows.find_windows(search.index, np.array([*elsewhere.values()], np.uint64))
        for number in elsewhere:
            occurrences_of[number] = []
        for piece, ids in read_documents(search, np.concatenate(places), step):
            place = piece._replace(text="")
            for number in elsewhere:
                occurrences_of[number] += [
                    (place, start) for start in occurrences(passages[number], ids)
                ]
    targets = []
    for number, located in occurrences_of.items():
        start = min(map(corpus.chooser.start_of, chosen[number]))
        positions = _positions(search, located)
        fields = {"num_injections": len(located), "document": documents[number]}
        draft = PassageDraft(passages[number], positions, files[number], fields)
        targets.append(Target(draft, start, len(located)))
    return targets


class _RareWindow(NamedTuple):
    key: np.uint64
    num_windows: int
    places: Records  # of some of them


def _rarest_windows(search: Search, passages: list[TokenArray]) -> dict[int, _RareWindow | None]:
    """Return for each passage the window that every occurrence of it has and that is least often in
    the index.

    A passage without such a window is left out; one whose windows are not in the index has None.
    """
    batch = search.index.batch([text_of(search.tokenizer, ids) for ids in passages])
    words, keys = search.index.windows(batch, inner=True)
    of_passage = batch.of_text[words]
    counts, places = windows.find_windows(search.index, keys[:, 0], _COPIES)
    rarest: dict[int, _RareWindow | None] = {}
    for number in range(len(passages)):
        own = np.flatnonzero(of_passage == number)
        if not len(own):
            continue
        indexed = own[counts[own] > 0]
        if len(indexed):
            first = indexed[np.argmin(counts[indexed])]
            rarest[number] = _RareWindow(keys[first, 0], int(counts[first]), places[first])
        else:
            rarest[number] = None
    return rarest


def _positions(search: Search, located: list[tuple[Piece, int]]) -> list[list[int]]:
    """Return the document and the offset of each occurrence; none if they are not known or too
    many.
    """
    if len(located) > MOST_POSITIONS or not all(piece.is_whole for piece, _ in located):
        return []
    return [
        [search.built.first_documents[piece.file] + piece.document, start]
        for piece, start in located
    ]


def near_targets(search: Search) -> Chosen:
    """Choose a passage of each group of near copies, the largest groups first, then unique ones."""
    spec = search.spec
    # Candidates: the first window of each stretch, the largest groups first, then windows without
    # near copies.
    groups = windows.first_of_stretches(search.groups, search.index.num_bytes)
    counts = groups["count"].tolist()
    order = sorted(search.rng.permutation(len(groups)), key=lambda number: -counts[number])
    groups = groups[order[: search.num_candidates]]
    drawn = windows.draw_windows(search.index, search.num_candidates, search.rng, unique=True)
    places = np.concatenate([groups["place"], drawn])
    corpus = read_corpus(search, places, "documents")
    chooser = corpus.chooser
    targets: list[Target] = []
    taken: set[bytes] = set()
    for number, place in enumerate(places):
        if len(targets) == spec.num_targets:
            break
        start = corpus.token_at(place)
        piece, _ = corpus.located(np.array([start]))[0]
        is_group = number < len(groups)
        if start >= len(chooser.fits) or not chooser.fits[start]:
            continue
        if not is_group and not _is_unique(search, piece, place):
            continue
        # Near copies of a chosen passage are known by a run of tokens in common.
        ids = chooser.window(start)
        size = min(SAME_TOKENS, len(ids))
        grams = {ids[first : first + size].tobytes() for first in range(len(ids) - size + 1)}
        if chooser.is_varied(start) and not grams & taken:
            taken |= grams
            # The index has counted what the positions do not tell.
            num_copies = int(groups["count"][number]) if is_group else 1
            fields = {"num_injections": num_copies, "document": piece.document}
            draft = PassageDraft(ids, [], str(search.units[piece.file]), fields)
            targets.append(Target(draft, chooser.start_of(start), num_copies))
    return Chosen(targets, tuple(counts), chooser.num_repetitive)


def _is_unique(search: Search, piece: Piece, place: np.void) -> bool:
    """Return whether no window of another document is a near copy of a window."""
    batch = search.index.batch([piece.text.encode("utf-8", "surrogatepass")])
    keys = search.index.keys(
        batch, np.searchsorted(batch.words, [int(place["offset"]) - piece.start])
    )
    _, places = windows.find_windows(search.index, keys[0], _COPIES)
    return len(np.unique(np.concatenate(places)[windows.DOCUMENT])) == 1
