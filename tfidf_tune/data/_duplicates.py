"""Stretches of text that occur more than once in a corpus, found exactly on its token ids. Pure functions."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tfidf_tune.data._tokenizer import TokenArray

Positions = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

SEPARATOR = -1
"""Follows each document of a corpus; no window of tokens contains it."""


class DuplicatedStretch(NamedTuple):
    """A maximal stretch of tokens that occurs more than once.

    ``starts`` is int64 of shape ``[num_occurrences]``: where it starts in the corpus, ascending. ``num_windows`` is how
    many windows of the length searched for it holds, one starting at each of its first ``num_windows`` tokens.
    """

    starts: Positions
    num_windows: int


def join_documents(documents: Iterable[TokenArray]) -> TokenArray:
    """Concatenate documents of int32 token ids, each followed by :data:`SEPARATOR`."""
    separator = np.array([SEPARATOR], dtype=np.int32)
    return np.concatenate([separator[:0], *(part for ids in documents for part in (ids, separator))])


def name_repeated_windows(corpus: TokenArray, length: int) -> Positions:
    """Give a number to every window of ``length`` >= 2 tokens that occurs more than once.

    Exact, by naming (Karp, Miller and Rosenberg 1972): windows of ``2k`` tokens are equal if their halves have equal
    names, so the names of single tokens are paired ``log2(length)`` times. A window with a unique half drops out, which
    leaves few windows of text after the third round. O(n log n · log length) time in the worst case, O(n) memory.

    Returns int64 of the shape of ``corpus``: the name of the window that starts there, 1 or more and equal for equal
    windows; 0 if it occurs once or would cross the end of its document.
    """
    names = np.zeros(len(corpus) + length, dtype=np.int64)
    names[: len(corpus)] = corpus - SEPARATOR
    size = 1
    while size < length:
        step = min(size, length - size)  # the halves overlap in the last round if length is not a power of two
        names = _name_repeated_pairs(names[:-step], names[step:])
        size += step
    return names[: len(corpus)]


def _name_repeated_pairs(first: Positions, second: Positions) -> Positions:
    """Name the pairs ``(first[i], second[i])`` that occur more than once from 1 on; 0 if a half has no name."""
    places = np.flatnonzero((first > 0) & (second > 0))
    keys = first[places]
    keys *= second.max(initial=0)  # names count from 1
    keys += second[places]
    order = np.argsort(keys)
    keys = keys[order]
    places = places[order]
    del order
    is_first = np.diff(keys, prepend=-1) != 0
    del keys
    is_repeated = ~(is_first & np.append(is_first[1:], True))
    names = np.zeros(len(first), dtype=np.int64)
    names[places[is_repeated]] = np.cumsum(is_first[is_repeated])
    return names


def duplicated_stretches(names: Positions, length: int, min_repeats: int = 2) -> list[DuplicatedStretch]:
    """Join windows that always occur together to stretches, and count their occurrences.

    Two windows belong to one stretch if each occurrence of the first is followed, one token later, by one of the
    second, and the second has no others: so each stretch is as long as it can be without losing an occurrence.
    Occurrences are counted from the left without overlap: their first windows share no token. ``names`` and ``length``
    are those of :func:`name_repeated_windows`; the stretches are in the order of their first occurrence.
    """
    places = np.flatnonzero(names)
    if not len(places):
        return []
    places = places[np.argsort(names[places], kind="stable")]
    borders = np.flatnonzero(np.diff(names[places], prepend=0))
    counts = np.diff(borders, append=len(places))

    next_names = np.append(names, 0)[places + 1]
    lowest, highest = np.minimum.reduceat(next_names, borders), np.maximum.reduceat(next_names, borders)
    # Names count from 1 without gaps; the name 0 after a window ends its stretch like any difference.
    goes_on = (lowest == highest) & (lowest > 0) & (counts == counts[lowest - 1])

    by_place = np.argsort(places[borders])
    heads = np.flatnonzero(np.append(True, ~goes_on[by_place][:-1]))
    stretches = []
    for name, num_windows in zip(by_place[heads], np.diff(heads, append=len(by_place)), strict=True):
        starts = without_overlaps(places[borders[name] : borders[name] + counts[name]], length)
        if len(starts) >= min_repeats:
            stretches.append(DuplicatedStretch(starts, int(num_windows)))
    return stretches


def without_overlaps(starts: Positions, length: int) -> Positions:
    """Keep the largest number of windows without overlap, the leftmost ones, of ascending ``starts``, int64."""
    if (np.diff(starts) >= length).all():
        return starts
    kept = [0]
    while (following := int(np.searchsorted(starts, starts[kept[-1]] + length))) < len(starts):
        kept.append(following)
    return starts[kept]


def windows_with_shared_stretch(unseen: TokenArray, corpus: TokenArray, length: int, num_shared: int) -> Mask:
    """Find the windows of one text that have ``num_shared`` (2 to ``length``) consecutive tokens of another text.

    Returns bool ``[len(unseen) + 1 - length]``, empty if ``unseen`` is shorter.
    """
    names = name_repeated_windows(np.concatenate([corpus, unseen]), num_shared)
    in_corpus = np.zeros(names.max(initial=0) + 1, dtype=np.bool_)
    in_corpus[names[: len(corpus)]] = True
    in_corpus[0] = False
    return ~none_within(in_corpus[names[len(corpus) :]], length - num_shared + 1)[: max(0, len(unseen) + 1 - length)]


def none_within(marks: Mask, length: int) -> Mask:
    """Return for each window of ``marks``, ``[num_tokens]``, if none is True in it: ``[num_tokens + 1 - length]``."""
    marked_before = np.cumsum(np.append(False, marks))
    unmarked: Mask = marked_before[length:] == marked_before[:-length]
    return unmarked
