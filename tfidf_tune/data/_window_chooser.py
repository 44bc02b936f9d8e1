"""Choose windows of a corpus that start well, do not overlap and are not a few repeated tokens."""

from collections.abc import Iterable, Iterator
from enum import IntEnum
from itertools import takewhile

import numpy as np

from tfidf_tune.data._duplicates import (
    CUT,
    SEPARATOR,
    DuplicatedStretch,
    Mask,
    Positions,
    name_repeated_windows,
    none_within,
)
from tfidf_tune.data._tokenizer import TextTokenizer, TokenArray

SHARED_TOKENS = 50
"""A control has fewer consecutive tokens than this in common with the training text."""

# Every model continues a line of dashes or a table of zeros, even if it was not trained on it.
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


def is_varied(ids: TokenArray) -> bool:
    """Return whether at least one token in eight is distinct."""
    return len(np.unique(ids)) >= _LEAST_DIFFERENT * len(ids)


class WindowChooser:
    """Choose windows of ``length`` tokens of a corpus so that no two share a token, in any of their occurrences.

    A window is left out when fewer than an eighth of its tokens are distinct. ``fits`` says whether the window that
    starts at a token ends in the same document; ``num_repetitive`` counts the windows that were left out.
    """

    def __init__(self, tokenizer: TextTokenizer, corpus: TokenArray, length: int, rng: np.random.Generator) -> None:
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
        """Return the token ids of the window that starts at token ``start``, int32 of shape ``[length]``."""
        return self._corpus[start : start + self._length]

    def take(self, starts: Positions) -> None:
        """Exclude windows that overlap those at ``starts``, int64 of shape ``[num_occurrences]``."""
        for start in starts:
            self._taken[start : start + self._length] = True

    def duplicates(self, stretches: Iterable[DuplicatedStretch]) -> Iterator[Positions]:
        """Choose the occurrences of a window of each stretch, in order.

        It starts where a document, else a line, else a word starts, at the first such place. Take a window before
        requesting the next.
        """
        for starts, num_windows in stretches:
            taken = np.zeros(num_windows, dtype=np.bool_)
            for start in starts:
                taken |= self._are_taken(start, num_windows)
            if offsets := np.flatnonzero(~taken).tolist():
                # Occurrences differ only in what is before the stretch.
                best = {at: min(map(self.start_of, (starts[:1] if at else starts) + at)) for at in offsets}
                chosen = starts + min(offsets, key=best.__getitem__)
                if self._is_varied(chosen[0]):
                    yield chosen

    def random(self, allowed: Mask, drawn: Iterable[int] | None = None) -> Iterator[int]:
        """Choose the first tokens of random windows; each is moved to the start of a near word, forward if possible.

        ``allowed``, bool and no longer than ``fits``, says where a window may start; all of these tokens are drawn, or
        those given. Take a window before requesting the next.
        """
        for token in self._rng.permutation(np.flatnonzero(allowed)) if drawn is None else drawn:
            start = self._nearest_word(int(token), allowed)
            if self._are_taken(start, 1).any():
                continue
            if self._is_varied(start):
                yield start
            else:
                self.take(np.array([start]))  # counted once

    def unique(self, num_shared: int) -> Iterator[int]:
        """Draw and take random windows of which the corpus repeats no ``num_shared`` consecutive tokens."""
        are_repeated = name_repeated_windows(self._corpus, num_shared) > 0
        is_unique = none_within(are_repeated, self._length - num_shared + 1)
        for start in self.random(self.fits & is_unique[: len(self.fits)]):
            self.take(np.array([start]))
            yield start

    def start_of(self, start: int) -> Start:
        """Return whether the window at token ``start`` starts a document, a line, a word or none of these."""
        if start == 0 or self._corpus[start - 1] == SEPARATOR:
            return Start.DOCUMENT
        before, text = self._text(start - 1), self._text(start)
        if before.endswith(_LINE_ENDS) and not text.startswith(_LINE_ENDS):
            return Start.LINE
        if text.strip() and (text[0].isspace() or before[-1:].isspace()):
            return Start.WORD
        return Start.INSIDE_WORD

    def _nearest_word(self, drawn: int, allowed: Mask) -> int:
        ahead = range(drawn, min(drawn + self._length, len(allowed)))
        behind = range(drawn, max(drawn - self._length, -1), -1)
        for places in (ahead, behind):
            for start in takewhile(allowed.__getitem__, places):
                if self.start_of(start) < Start.INSIDE_WORD:
                    return start
        return drawn

    def _are_taken(self, start: int, num_windows: int) -> Mask:
        # All windows have one length, so a window that overlaps another contains its first or last token.
        last = start + self._length - 1
        return self._taken[start : start + num_windows] | self._taken[last : last + num_windows]

    def _is_varied(self, start: int) -> bool:
        varied = is_varied(self.window(start))
        self.num_repetitive += not varied
        return varied

    def _text(self, place: int) -> str:
        """Return what a token adds to a text; decoded by itself, a SentencePiece token would lose its space."""
        token_id = int(self._corpus[place])
        if token_id not in self._texts:
            anchor = self._decode(self._anchor)
            self._texts[token_id] = self._decode([*self._anchor, token_id])[len(anchor) :]
        return self._texts[token_id]
