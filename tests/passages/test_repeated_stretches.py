import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tfidf_tune.passages.stretches import (
    duplicated_stretches,
    join_documents,
    name_repeated_windows,
)


def documents_of(*lists):
    return join_documents(np.array(ids, dtype=np.int32) for ids in lists)


def find(corpus, length):
    stretches = duplicated_stretches(name_repeated_windows(corpus, length), length)
    return [(starts.tolist(), num_windows) for starts, num_windows in stretches]


def slow_windows(lists, length):
    """Every window and all places where it stands, by comparing tuples; places count a separator a
    document.
    """
    places = {}
    first = 0
    for ids in lists:
        for offset in range(len(ids) - length + 1):
            places.setdefault(tuple(ids[offset : offset + length]), []).append(first + offset)
        first += len(ids) + 1
    return {window: starts for window, starts in places.items() if len(starts) > 1}


def slow_count(starts, length):
    """The most windows without overlap, by trying all sets where there are few, else
    from the left.
    """
    if len(starts) > 8:
        kept = starts[:1]
        for start in starts:
            kept = [*kept, start] if start >= kept[-1] + length else kept
        return len(kept)
    sets = itertools.chain.from_iterable(
        itertools.combinations(starts, size) for size in range(1, len(starts) + 1)
    )
    return max(
        len(chosen)
        for chosen in sets
        if all(b - a >= length for a, b in itertools.combinations(sorted(chosen), 2))
    )


def slow_stretches(lists, length):
    """Windows whose places are those of another one, moved by a token, belong to its stretch."""
    by_places = {tuple(starts) for starts in slow_windows(lists, length).values()}
    found = []
    for starts in by_places:
        if tuple(start - 1 for start in starts) in by_places:
            continue
        num_windows = 1
        while tuple(start + num_windows for start in starts) in by_places:
            num_windows += 1
        if slow_count(starts, length) >= 2:
            found.append((starts[0], slow_count(starts, length), num_windows))
    return sorted(found)


corpora = st.lists(st.lists(st.integers(0, 2), max_size=30), min_size=1, max_size=5)


@settings(max_examples=300)
@given(corpora, st.integers(2, 9))
def test_stretches_are_those_that_a_slow_search_finds(lists, length):
    found = find(documents_of(*lists), length)
    summary = [(starts[0], len(starts), num_windows) for starts, num_windows in found]
    assert summary == slow_stretches(lists, length)
    for starts, _ in found:
        assert (np.diff(starts) >= length).all()
