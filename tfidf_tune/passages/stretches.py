"""Stretches that occur more than once in a corpus, exactly by its token ids; and windows of it that
start well.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from enum import IntEnum
from heapq import heapify, heappop, heappush
from itertools import takewhile
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tfidf_tune._tokenizer import TextTokenizer, TokenArray
from tfidf_tune.corpus.window_index import without_overlaps

Positions = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

SEPARATOR = -1
"""Follows each document of a corpus; no window of tokens contains it."""

CUT = -2
"""Stands for tokens of a document that are not known; no window contains it."""

LONG_RUN = 16  # tokens; answers made from a template share shorter runs without being copies
_MOST_COMPARED = 2**15  # tokens at a time, few because the first that are equal often end a search


def label_runs(is_label: Mask) -> Positions:
    """Return where the runs of label tokens start and end, shape ``[num_runs, 2]``."""
    return np.flatnonzero(np.diff(is_label, prepend=False, append=False)).reshape(-1, 2)


def join_documents(documents: Iterable[TokenArray]) -> TokenArray:
    """Concatenate documents of int32 token ids, each followed by :data:`SEPARATOR`."""
    return np.concatenate(
        [np.empty(0, np.int32), *(np.append(ids, np.int32(SEPARATOR)) for ids in documents)]
    )


def name_repeated_windows(corpus: TokenArray, length: int) -> Positions:
    """Give a number to every window of ``length`` >= 2 tokens that occurs more than once.

    Exact, by naming (Karp, Miller and Rosenberg 1972): windows of ``2k`` tokens are equal if their
    halves have equal names, so the names of single tokens are paired ``log2(length)`` times.
    Returns int64 of the shape of ``corpus``: 1 or more and equal for equal windows that start
    there; 0 for a window that occurs once or crosses a document's end.

    For example, windows of 3 tokens of two documents, 5 6 7 8 9 and 5 6 7 8 4::

        corpus             5 6 7 8 9 | 5 6 7 8 4 |
        names of 2 tokens  1 2 3 0 0 0 1 2 3 0 0 0    5 6, 6 7 and 7 8 occur again
        names of 3 tokens  1 2 0 0 0 0 1 2 0 0 0 0    5 6 7 is the pair (1, 2), 6 7 8 is (2, 3)
    """
    names = np.zeros(len(corpus) + length, dtype=np.int64)
    names[: len(corpus)] = corpus - SEPARATOR
    size = 1
    while size < length:
        # The halves overlap in the last round if length is not a power of two.
        step = min(size, length - size)
        first = names[:-step]
        second = names[step:]
        # One integer for each pair of names, which count from 1; sorted, equal pairs follow each
        # other. A window with a unique half drops out, which leaves few windows of text after the
        # third round.
        places = np.flatnonzero((first > 0) & (second > 0))
        keys = first[places]
        keys *= second.max(initial=0)
        keys += second[places]
        order = np.argsort(keys)
        keys = keys[order]
        places = places[order]
        is_first = np.diff(keys, prepend=-1) != 0
        del keys, order  # the corpus may take a good part of the memory
        is_repeated = ~(is_first & np.append(is_first[1:], True))
        names = np.zeros(len(first), dtype=np.int64)
        names[places[is_repeated]] = np.cumsum(is_first[is_repeated])
        size += step
    return names[: len(corpus)]


def duplicated_stretches(names: Positions, length: int) -> list[tuple[Positions, int]]:
    """Join windows that always follow each other to stretches: their places and the number of their
    windows.

    Each stretch is as long as it can be without losing an occurrence. Occurrences are counted from
    the left without overlap; the stretches are in the order of the first. ``names`` are those of
    :func:`name_repeated_windows`.

    In the example there, window 1 is always followed by window 2, and both occur twice: one stretch
    of 2 windows, so of 4 tokens, at the places 0 and 6. If 6 7 8 stood alone somewhere else, window
    2 would occur three times, and each window would be a stretch of its own.
    """
    places = np.flatnonzero(names)
    if not len(places):
        return []
    # The places of each name follow each other, in ascending order.
    places = places[np.argsort(names[places], kind="stable")]
    borders = np.flatnonzero(np.diff(names[places], prepend=0))
    counts = np.diff(borders, append=len(places))
    # A window goes on if all its occurrences are followed by the same window, which has no others.
    # Names count from 1 without gaps; the name 0 after a window ends its stretch like any
    # difference.
    next_names = np.append(names, 0)[places + 1]
    lowest = np.minimum.reduceat(next_names, borders)
    highest = np.maximum.reduceat(next_names, borders)
    goes_on = (lowest == highest) & (lowest > 0) & (counts == counts[lowest - 1])
    # In the order of the text, a stretch begins after each window that does not go on.
    by_place = np.argsort(places[borders])
    heads = np.flatnonzero(np.append(True, ~goes_on[by_place][:-1]))
    stretches = []
    for name, num_windows in zip(
        by_place[heads], np.diff(heads, append=len(by_place)).tolist(), strict=True
    ):
        starts = without_overlaps(places[borders[name] : borders[name] + counts[name]], length)
        if len(starts) > 1:
            stretches.append((starts, num_windows))
    return stretches


def windows_with_shared_stretch(
    unseen: TokenArray, corpus: TokenArray, length: int, num_shared: int
) -> Mask:
    """Return which windows of a text have ``num_shared``, 2 to ``length``, consecutive tokens of
    another text.
    """
    names = name_repeated_windows(np.concatenate([corpus, unseen]), num_shared)
    in_corpus = np.zeros(names.max(initial=0) + 1, dtype=np.bool_)
    in_corpus[names[: len(corpus)]] = True
    in_corpus[0] = False
    return ~none_within(in_corpus[names[len(corpus) :]], length - num_shared + 1)[
        : max(0, len(unseen) + 1 - length)
    ]


def none_within(marks: Mask, length: int) -> Mask:
    """Return for each window of ``marks``, ``[num_tokens]``, if none is True in it: ``[num_tokens +
    1 - length]``.
    """
    marked_before = np.cumsum(np.append(False, marks))
    return np.asarray(marked_before[length:] == marked_before[:-length])


def least_occurrence(num_tokens: int) -> int:
    """Return the tokens of a run that is an occurrence of an answer: 90 %, because its ends vary
    with the text.
    """
    return -(-num_tokens * 9 // 10)


def shared_run_of_answer(num_tokens: int) -> int:
    """Return how many consecutive tokens make a part of an answer a copy: half, but 16, and at most
    an occurrence.
    """
    return min(least_occurrence(num_tokens), max(LONG_RUN, -(-num_tokens // 2)))


class Examples(Protocol):
    """Tokenized examples, such as a :class:`~tfidf_tune.data.SequenceDataset`."""

    def __len__(self) -> int: ...

    def sequence(self, index: int) -> tuple[TokenArray, Mask]:
        """Return the ids of an example, int32 ``[num_tokens]``, and whether each is learned."""
        ...


class Answer(NamedTuple):
    """Where the answer of an example is, in tokens, without special tokens."""

    start: int  # in the example
    num_tokens: int
    place: int  # where it starts in the tokens of LearnedRuns

    @property
    def least_occurrence(self) -> int:
        """Tokens of a run that is an occurrence, see :func:`least_occurrence`."""
        return least_occurrence(self.num_tokens)

    @property
    def least_shared(self) -> int:
        """Tokens of the answer that no row may learn in a run if the answer is a control."""
        return shared_run_of_answer(self.num_tokens)


class LearnedRuns:
    """All runs of tokens that are learned, of all turns of all examples, and where answers share
    tokens with them.

    ``last`` is the last answer of each example after a prompt, if it has ``min_tokens``; ``ending``
    are the examples that end with the same answer, by the first of them.
    """

    def __init__(self, examples: Examples, tokenizer: TextTokenizer, min_tokens: int) -> None:
        special = np.array([tokenizer.eos_id, *getattr(tokenizer, "special_tokens", {}).values()])
        self.last: dict[int, Answer] = {}
        self.ending: dict[int, list[int]] = defaultdict(list)
        # So that a separator is also before the first one.
        runs: list[TokenArray] = [np.empty(0, dtype=np.int32)]
        sources = [(0, 0)]
        starts = [0, 1]
        for index in range(len(examples)):
            tokens, is_label = examples.sequence(index)
            for start, end in label_runs(is_label).tolist():
                # A turn can start and end with special tokens. Decoding ends at EOS, so that it
                # could not be recited.
                self.last.pop(index, None)
                parts = label_runs(~np.isin(tokens[start:end], special)).tolist()
                if start > 0 and parts and parts[0][1] - parts[0][0] >= min_tokens:
                    first, last = parts[0]
                    self.last[index] = Answer(start + first, last - first, starts[-1] + first)
                runs.append(tokens[start:end])
                sources.append((index, start))
                starts.append(starts[-1] + end - start + 1)
        self.tokens = join_documents(runs)
        # Examples with the same answer are represented by the first.
        first_with: dict[bytes, int] = {}
        for index, answer in self.last.items():
            ids = self.tokens[answer.place : answer.place + answer.num_tokens]
            self.ending[first_with.setdefault(ids.tobytes(), index)].append(index)
        self._starts = np.array(starts[:-1])
        self._sources = np.array(sources)
        # Every run that is searched for has a window of this length, which leads to the others with
        # the same one.
        self._length = max(2, min(LONG_RUN, min_tokens * 4 // 5))
        self._names = name_repeated_windows(self.tokens, self._length)
        named = np.flatnonzero(self._names)
        self._by_name = named[np.argsort(self._names[named], kind="stable")]
        self._ends = np.cumsum(np.bincount(self._names[named], minlength=1))

    def occurrences(self, answer: Answer) -> Positions:
        """Return the places of runs of 90 % of the answer without overlap, int64, ascending."""
        starts = np.unique(np.concatenate(list(self._shared(answer, answer.least_occurrence))))
        return without_overlaps(starts, answer.least_occurrence)

    def most_occurrences(self, answer: Answer) -> int:
        """Return an upper bound of the number of occurrences: all of them contain the inner 80 % of
        the answer.
        """
        inner = answer.place + answer.num_tokens - answer.least_occurrence
        names = self._names[inner : answer.place + answer.least_occurrence - self._length + 1]
        return int(np.where(names > 0, self._ends[names] - self._ends[names - 1], 1).min())

    def sharing(self, answer: Answer) -> Iterator[int]:
        """Yield the examples that learn a run of ``least_shared`` tokens of the answer, some more
        than once.
        """
        for places in self._shared(answer, answer.least_shared):
            yield from np.unique(self.locate(places)[:, 0]).tolist()

    def most_frequent(self, candidates: Iterable[int], number: int) -> list[int]:
        """Choose the last answers of candidates that occur most often, at least twice, and share no
        token.
        """
        chosen: list[int] = []
        is_taken = np.zeros(len(self.tokens), dtype=np.bool_)
        # The answer with the highest bound is counted, comes back, and is chosen if it is still the
        # first.
        bounds = (
            (-self.most_occurrences(self.last[first]), at, first)
            for at, first in enumerate(candidates)
        )
        queue = [(*bound, False) for bound in bounds if bound[0] < -1]
        heapify(queue)
        while queue and len(chosen) < number:
            _, at, first, is_counted = heappop(queue)
            answer = self.last[first]
            if is_taken[answer.place : answer.place + answer.num_tokens].any():
                continue
            places = self.occurrences(answer)
            if is_counted:
                chosen.append(first)
                is_taken[places[:, None] + np.arange(answer.least_occurrence)] = True
            elif len(places) > 1:
                heappush(queue, (-len(places), at, first, True))
        return chosen

    def occurring_once(
        self, candidates: Iterable[int], trained: set[int], avoided: set[int]
    ) -> Iterator[int]:
        """Choose answers that occur once in their example, and share no long run with another that
        is trained on.
        """
        for example in candidates:
            answer = self.last[example]
            # The examples to avoid share a long run with a target; both sets grow while targets are
            # chosen.
            if example in avoided or any(
                other in trained and other != example for other in self.sharing(answer)
            ):
                continue
            if self.locate(self.occurrences(answer))[:, 0].tolist().count(example) == 1:
                yield example

    def locate(self, places: Positions) -> Positions:
        """Return the example and the offset in it of each place, int64 ``[num_places, 2]``."""
        runs = np.searchsorted(self._starts, places, side="right") - 1
        located: Positions = self._sources[runs]
        located[:, 1] += places - self._starts[runs]
        return located

    def _shared(self, answer: Answer, length: int) -> Iterator[Positions]:
        """Yield in parts the places of all windows of ``length`` tokens that are also windows of
        the answer.

        Only windows of ``_length`` tokens have names. Of an answer of 24 tokens, a run of 12 with
        names of 8 contains 5 named windows in sequence, so one of every 5: those at the offsets 4,
        9 and 14 are looked up, and each place with the same name is compared token by token.
        """
        num_tokens = answer.num_tokens
        ids = self.tokens[answer.place : answer.place + num_tokens]
        # Differs from everything, so that no run goes on in the next comparison.
        ids = np.append(ids, SEPARATOR - 1)
        # A run contains so many windows less one, in sequence, so that it contains one of every so
        # many.
        step = length - self._length + 1
        size = -(-_MOST_COMPARED // len(ids))
        for offset in range(
            min(num_tokens - length, step - 1), num_tokens - self._length + 1, step
        ):
            # Candidates: places with the same window at this offset of the answer.
            name = self._names[answer.place + offset]
            same = (
                self._by_name[self._ends[name - 1] : self._ends[name]]
                if name
                else np.array([answer.place + offset])
            )
            starts = same - offset
            for first in range(0, len(starts), size):
                # All of them are compared with the answer at once; a run may start anywhere around
                # the window.
                part = starts[first : first + size]
                around = self.tokens.take(part[:, None] + np.arange(len(ids)), mode="clip")
                equal_from = np.flatnonzero(none_within((around != ids).ravel(), length))
                number, shift = np.divmod(equal_from, len(ids))
                yield part[number] + shift


SHARED_TOKENS = 50
"""A control has fewer consecutive tokens than this in common with the training text."""


def shared_run(length: int) -> int:
    """Return how many consecutive tokens make a passage of ``length`` tokens a copy: 50, or half of
    it, but 16.
    """
    return min(SHARED_TOKENS, max(LONG_RUN, length // 2), length)


# Every model continues a line of dashes or a table of zeros, even if it was not trained on it.
_LEAST_DIFFERENT = 1 / 8
_LINE_ENDS = ("\n", "\r")


def is_varied(ids: TokenArray) -> bool:
    """Return whether at least an eighth of the tokens are distinct."""
    return len(np.unique(ids)) >= _LEAST_DIFFERENT * len(ids)


class Start(IntEnum):
    """Where a passage starts, the best prompt first."""

    DOCUMENT = 0
    LINE = 1
    WORD = 2
    INSIDE_WORD = 3

    @property
    def phrase(self) -> str:
        """In words: "document", "inside word"."""
        return self.name.lower().replace("_", " ")


class WindowChooser:
    """Choose windows of ``length`` tokens of a corpus so that no two share a token, in any of their
    occurrences.

    ``fits`` says whether the window that starts at a token ends in the same document;
    ``num_repetitive`` counts the windows that were left out, because fewer than an eighth of their
    tokens are distinct.
    """

    def __init__(
        self, tokenizer: TextTokenizer, corpus: TokenArray, length: int, rng: np.random.Generator
    ) -> None:
        self.fits = none_within(corpus < 0, length)
        self.num_repetitive = 0
        self._corpus = corpus
        self._length = length
        self._rng = rng
        self._taken = np.zeros(len(corpus), dtype=np.bool_)
        self._decode = tokenizer.decode
        self._anchor = tokenizer.encode("a", add_bos=False, add_eos=False)
        self._texts: dict[int, str] = {SEPARATOR: "", CUT: ""}

    def window(self, start: int) -> TokenArray:
        """Return the token ids of the window that starts at token ``start``, int32 of shape
        ``[length]``.
        """
        return self._corpus[start : start + self._length]

    def take(self, *starts: int) -> None:
        """Exclude windows that overlap those at ``starts``."""
        for start in starts:
            self._taken[start : start + self._length] = True

    def is_free(self, start: int) -> bool:
        """Return whether the window at ``start`` overlaps none that was taken."""
        return not self._are_taken(start, 1).any()

    def duplicates(self, stretches: Iterable[tuple[Positions, int]]) -> Iterator[Positions]:
        """Choose and take the occurrences of a window of each stretch: where the best start is, the
        first of equal.

        A stretch of 4 tokens at the places 0 and 6 has 2 windows of 3 tokens. If a document starts
        at 0, the window at offset 0 is the best prompt, and the places 0 and 6 are taken. If token
        0 or 6 is taken already, the window at offset 1 is left, at 1 and 7.
        """
        for starts, num_windows in stretches:
            # Offsets at which no occurrence overlaps a chosen window; occurrences differ only in
            # what is before.
            free = np.flatnonzero(
                ~np.any([self._are_taken(start, num_windows) for start in starts], axis=0)
            ).tolist()
            if free:
                best = min(
                    free,
                    key=lambda at: min(map(self.start_of, (starts[:1] if at else starts) + at)),
                )
                if self.is_varied(starts[0] + best):
                    self.take(*starts + best)
                    yield starts + best

    def random(self, allowed: Mask, drawn: Iterable[int] | None = None) -> Iterator[int]:
        """Choose the first tokens of random windows; take a window before requesting the next.

        All tokens that are ``allowed`` are drawn, or those given; each is moved to an allowed start
        of a near word.
        """
        for token in self._rng.permutation(np.flatnonzero(allowed)) if drawn is None else drawn:
            start = self._nearest_word(int(token), allowed)
            if self._are_taken(start, 1).any():
                continue
            if self.is_varied(start):
                yield start
            else:
                self.take(start)  # counted once

    def unique(self, num_shared: int) -> Iterator[int]:
        """Draw and take random windows of which the corpus repeats no ``num_shared`` consecutive
        tokens.
        """
        # A window is unique if none of its stretches of this length occurs again.
        are_repeated = name_repeated_windows(self._corpus, num_shared) > 0
        is_unique = none_within(are_repeated, self._length - num_shared + 1)
        yield from self.taken(self.random(self.fits & is_unique[: len(self.fits)]))

    def taken(self, starts: Iterable[int]) -> Iterator[int]:
        """Take each window before it is yielded."""
        for start in starts:
            self.take(start)
            yield start

    def start_of(self, start: int) -> Start:
        """Return whether the window at token ``start`` starts a document, a line, a word or none of
        these.
        """
        if start == 0 or self._corpus[start - 1] == SEPARATOR:
            return Start.DOCUMENT
        before = self._text(start - 1)
        text = self._text(start)
        if before.endswith(_LINE_ENDS) and not text.startswith(_LINE_ENDS):
            return Start.LINE
        if text.strip() and (text[0].isspace() or before[-1:].isspace()):
            return Start.WORD
        return Start.INSIDE_WORD

    def is_varied(self, start: int) -> bool:
        """Return whether at least an eighth of the tokens of a window are distinct; count it if
        not.
        """
        varied = is_varied(self.window(start))
        self.num_repetitive += not varied
        return varied

    def _nearest_word(self, drawn: int, allowed: Mask) -> int:
        # Through allowed places only, so that the window stays in its document.
        ahead = range(drawn, min(drawn + self._length, len(allowed)))
        behind = range(drawn, max(drawn - self._length, -1), -1)
        for places in (ahead, behind):
            for start in takewhile(allowed.__getitem__, places):
                if self.start_of(start) < Start.INSIDE_WORD:
                    return start
        return drawn

    def _are_taken(self, start: int, num_windows: int) -> Mask:
        # All windows have one length, so a window that overlaps another contains its first or last
        # token.
        last = start + self._length - 1
        return self._taken[start : start + num_windows] | self._taken[last : last + num_windows]

    def _text(self, place: int) -> str:
        """Return what a token adds to a text; decoded by itself, a SentencePiece token would lose
        its space.
        """
        token_id = int(self._corpus[place])
        if token_id not in self._texts:
            self._texts[token_id] = self._decode([*self._anchor, token_id])[
                len(self._decode(self._anchor)) :
            ]
        return self._texts[token_id]
