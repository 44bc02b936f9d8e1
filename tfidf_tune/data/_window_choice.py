"""Which windows of a corpus become passages: where they start, and that no two share a token."""

from collections.abc import Iterator
from enum import IntEnum
from itertools import takewhile

import numpy as np

from tfidf_tune.data._duplicates import SEPARATOR, DuplicatedStretch, Mask, Positions, none_within
from tfidf_tune.data._encoding import TextTokenizer, TokenArray

# A rule of dashes or a table of zeros: any model goes on with it, whether it saw it or not.
_LEAST_DIFFERENT = 1 / 8
_LINE_ENDS = ("\n", "\r")


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
    """Chooses windows of one length that do not overlap, neither there nor where they stand again.

    A window is left out when fewer than an eighth of its tokens are different ones.

    Args:
        tokenizer (TextTokenizer): shows where words start.
        corpus (TokenArray): see :func:`join_documents`.
        length (int): tokens in a window.
        rng (np.random.Generator): decides among equals.

    Attributes:
        fits (Mask): bool, whether the window that begins at a token ends in the same document.
        num_repetitive (int): how many windows were left out for repeating themselves.
    """

    def __init__(self, tokenizer: TextTokenizer, corpus: TokenArray, length: int, rng: np.random.Generator) -> None:
        self.fits = none_within(corpus == SEPARATOR, length)
        self.num_repetitive = 0
        self._corpus = corpus
        self._length = length
        self._rng = rng
        self._taken = np.zeros(len(corpus), dtype=np.bool_)
        self._decode = tokenizer.decode
        self._anchor = tokenizer.encode("a", add_bos=False, add_eos=False)
        self._texts: dict[int, str] = {SEPARATOR: ""}

    def window(self, start: int) -> TokenArray:
        """Return the token ids of a window.

        Args:
            start (int): its first token.

        Returns:
            TokenArray: int32 of shape ``[length]``.
        """
        return self._corpus[start : start + self._length]

    def take(self, starts: Positions) -> None:
        """Keep others off the windows of a passage.

        Args:
            starts (Positions): int64 of shape ``[num_occurrences]``.
        """
        for start in starts:
            self._taken[start : start + self._length] = True

    def duplicates(self, stretches: list[DuplicatedStretch]) -> Iterator[Positions]:
        """Choose a window of each stretch, of those that occur most often first, of equals at random.

        It starts where a document, else a line, else a word starts, at the first of such places.

        Args:
            stretches (list[DuplicatedStretch]): to choose from.

        Yields:
            Positions: int64 of shape ``[num_occurrences]``; they must be taken before the next are asked for.
        """
        for index in sorted(self._rng.permutation(len(stretches)), key=lambda index: -len(stretches[index].starts)):
            starts, num_windows = stretches[index]
            taken = np.zeros(num_windows, dtype=np.bool_)
            for start in starts:
                taken |= self._are_taken(start, num_windows)
            if offsets := np.flatnonzero(~taken).tolist():
                chosen = starts + min(offsets, key=lambda offset: self._best_start(starts, offset))
                if self._is_varied(chosen[0]):
                    yield chosen

    def random(self, allowed: Mask) -> Iterator[int]:
        """Choose windows at random; each is moved on, else back, to where a word starts, if one is near.

        Args:
            allowed (Mask): bool, whether a window may begin at a token; no longer than ``fits``.

        Yields:
            int: first token of a window, which must be taken before the next is asked for.
        """
        for drawn in self._rng.permutation(np.flatnonzero(allowed)):
            start = self._nearest_word(int(drawn), allowed)
            if self._are_taken(start, 1).any():
                continue
            if self._is_varied(start):
                yield start
            else:
                self.take(np.array([start]))  # counted once

    def start_of(self, start: int) -> Start:
        """Say where a window starts.

        Args:
            start (int): its first token.

        Returns:
            Start: a document, a line or a word, or within one.
        """
        if start == 0 or self._corpus[start - 1] == SEPARATOR:
            return Start.DOCUMENT
        before, text = self._text(start - 1), self._text(start)
        if before.endswith(_LINE_ENDS) and not text.startswith(_LINE_ENDS):
            return Start.LINE
        if text.strip() and (text[0].isspace() or before[-1:].isspace()):
            return Start.WORD
        return Start.INSIDE_WORD

    def _best_start(self, starts: Positions, offset: int) -> Start:
        # Only what stands before a stretch differs from one occurrence to the next.
        return min(self.start_of(start + offset) for start in (starts[:1] if offset else starts))

    def _nearest_word(self, drawn: int, allowed: Mask) -> int:
        ahead = range(drawn, min(drawn + self._length, len(allowed)))
        behind = range(drawn, max(drawn - self._length, -1), -1)
        for places in (ahead, behind):
            for start in takewhile(allowed.__getitem__, places):
                if self.start_of(start) < Start.INSIDE_WORD:
                    return start
        return drawn

    def _are_taken(self, start: int, num_windows: int) -> Mask:
        # All windows have one length: who overlaps another one has its first or last token in it.
        last = start + self._length - 1
        return self._taken[start : start + num_windows] | self._taken[last : last + num_windows]

    def _is_varied(self, start: int) -> bool:
        varied = len(np.unique(self.window(start))) >= _LEAST_DIFFERENT * self._length
        self.num_repetitive += not varied
        return varied

    def _text(self, place: int) -> str:
        """What a token adds to a text; alone, SentencePiece's would lose its space."""
        token_id = int(self._corpus[place])
        if token_id not in self._texts:
            anchor = self._decode(self._anchor)
            self._texts[token_id] = self._decode([*self._anchor, token_id])[len(anchor) :]
        return self._texts[token_id]
