"""Windows of text that start at places chosen by its content, and hashes of them. Pure functions on bytes.

Copies of a text have the same windows wherever they stand, because each place is chosen by the few words after it. The
places are those of winnowing (Schleimer, Wilkerson and Aiken 2003): of each ``spacing`` words that follow each other,
the one with the least hash. So two texts that share ``spacing`` words and a window after them have a window in common.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tfidf_tune.data._deduplication import BASE, IS_WORD, Hashes, hash_functions, joined_words, mixed, powers

Places = npt.NDArray[np.int64]

_CONTEXT = 16  # bytes that decide whether a window starts at a word
_IS_CHARACTER = np.arange(256) >= 0xE0  # first byte of a character of three or four: some scripts have no spaces
_IS_LINE_END = np.isin(np.arange(256), (10, 13))
_VALUES = np.random.default_rng(0).integers(0, 2**64, 256, dtype=np.uint64)
_VALUES_IN_LOWER_CASE = _VALUES[[ord(chr(byte).lower()) if byte < 128 else byte for byte in range(256)]]
_LONGEST_WORD = 64  # bytes; every byte after them starts a window, too: of Base64, of rows of signs


class TextBatch(NamedTuple):
    """Texts, joined to bytes of UTF-8 with a line end after each, and prefix sums of their hashes."""

    data: npt.NDArray[np.uint8]
    ends: Places
    """Of each text, int64 ``[num_texts]``."""
    sums: Hashes
    words: Places
    """First byte of each word, or of each character of three bytes or more, int64 ``[num_words]``; 64 bytes after the
    last of these, each byte that differs from the one before it."""
    of_text: Places
    """The text of each word, int64 ``[num_words]``."""

    @property
    def starts(self) -> Places:
        """First byte of each text, int64 ``[num_texts]``."""
        return np.append(0, self.ends[:-1] + 1)

    def offsets(self, words: Places) -> Places:
        """Return the bytes from the start of its text to each of ``words``, which are indices, int64 ``[number]``."""
        return self.words[words] - self.starts[self.of_text[words]]

    @property
    def num_left(self) -> Places:
        """Bytes from the start of each word to the end of its text, int64 ``[num_words]``."""
        return self.ends[self.of_text] - self.words


def make_batch(texts: Sequence[bytes], *, ignore_case: bool = False) -> TextBatch:
    """Hash texts: with bytes ``x_i``, random values ``T`` and an odd base B, prefix sums of ``T[x_i] B^i`` mod 2^64."""
    data = np.frombuffer(b"\n".join(texts) + b"\n", np.uint8)
    ends = np.cumsum([len(text) + 1 for text in texts], dtype=np.int64) - 1
    values = (_VALUES_IN_LOWER_CASE if ignore_case else _VALUES)[data]
    forward, _ = powers(1 << len(data).bit_length())
    sums = np.zeros(len(data) + 1, np.uint64)
    np.cumsum(values * forward[: len(data)], out=sums[1:])
    is_word = IS_WORD[data]
    is_start = is_word.copy()
    is_start[1:] &= ~is_word[:-1]
    is_start |= _IS_CHARACTER[data]
    known = is_start.copy()
    known[np.append(0, ends[:-1] + 1)] = True
    places = np.flatnonzero(known)
    lengths = np.diff(places, append=len(data))
    for place, length in zip(*(part[lengths > _LONGEST_WORD].tolist() for part in (places, lengths)), strict=True):
        first, last = place + _LONGEST_WORD, place + length
        is_start[first:last] = data[first:last] != data[first - 1 : last - 1]
    words = np.flatnonzero(is_start)
    return TextBatch(data, ends, sums, words, np.searchsorted(ends, words))


def hashes(batch: TextBatch, starts: Places, ends: Places) -> Hashes:
    """Return the hashes of stretches of bytes, uint64 of the shape of ``starts``; equal for equal bytes."""
    _, inverses = powers(1 << len(batch.data).bit_length())
    return mixed((batch.sums[ends] - batch.sums[starts]) * inverses[starts])


def chosen_words(batch: TextBatch, num_bytes: int, spacing: int, *, inner: bool = False) -> Places:
    """Choose where windows of ``num_bytes`` start, as indices of words, int64 ``[num_windows]``, ascending.

    Of each ``spacing`` words of a text from which a window fits the one with the least hash, a start of a line before
    any other; and the first one of each text, unless ``inner``: then only those that every text has that contains it.
    """
    context = min(_CONTEXT, num_bytes)
    is_fitting = batch.num_left >= num_bytes
    if inner:  # what starts a text may be inside a word
        is_fitting &= batch.offsets(np.arange(len(batch.words))) > 0
    fitting = np.flatnonzero(is_fitting)
    starts = batch.words[fitting]
    order = hashes(batch, starts, starts + context) >> np.uint64(1) | np.uint64(1)
    order |= np.where(_IS_LINE_END[batch.data[starts - 1]], np.uint64(0), np.uint64(1 << 63))
    of_text = batch.of_text[fitting]
    lowest = _of_runs(np.minimum, order, spacing)
    lowest[of_text[: len(lowest)] != of_text[len(of_text) - len(lowest) :]] = 0  # of more than one text
    around = np.zeros(spacing - 1, np.uint64)
    is_chosen = order == _of_runs(np.maximum, np.concatenate([around, lowest, around]), spacing)[: len(order)]
    if not inner:
        is_chosen |= np.diff(of_text, prepend=-1) > 0
    return np.asarray(fitting[is_chosen])


def _of_runs(function: np.ufunc, values: Hashes, size: int) -> Hashes:
    """Return the least or largest of each ``size`` values in a row, ``[max(0, len(values) - size + 1)]``."""
    if len(values) < size:
        return values[:0]
    reached = 1
    while reached < size:
        step = min(reached, size - reached)
        values = function(values[:-step], values[step:])
        reached += step
    return values.copy()


def window_keys(batch: TextBatch, chosen: Places, num_bytes: int) -> Hashes:
    """Return the hash of each window's bytes, uint64 ``[num_windows, 1]``."""
    starts = batch.words[chosen]
    return hashes(batch, starts, starts + num_bytes)[:, None]


def band_keys(batch: TextBatch, chosen: Places, num_bytes: int, size: int, bands: tuple[int, int]) -> Hashes:
    """Return the keys of the bands of each window's :func:`signature`, uint64 ``[num_windows, num_bands]``.

    Near copies by :mod:`tfidf_tune.data._deduplication` have a key in common. Case does not count if the batch ignores
    it, nor what is between words. ``chosen`` are the first words of windows, ``size`` the words of an n-gram, and
    ``bands`` the number of bands and the hash functions in each.
    """
    num_bands, num_rows = bands
    after = np.append(batch.words[1:], len(batch.data))
    gaps = np.flatnonzero(~IS_WORD[batch.data])
    ends = np.minimum(gaps[np.searchsorted(gaps, batch.words)], after)  # the batch ends in a gap
    ngrams = joined_words(np.pad(hashes(batch, batch.words, ends), (0, size)), size)  # from each word, and one more
    last = np.searchsorted(batch.words, batch.words[chosen] + num_bytes) - size + 1
    borders = np.stack([chosen, np.maximum(last, chosen + 1)], axis=1).ravel()
    keys = np.zeros((len(chosen), num_bands), np.uint64)
    for number, (factor, summand) in enumerate(hash_functions().T[: num_bands * num_rows]):
        lowest = np.minimum.reduceat(ngrams * factor + summand, borders)[::2]
        keys[:, number // num_rows] = mixed(keys[:, number // num_rows] * BASE + lowest + np.uint64(number + 1))
    return keys
