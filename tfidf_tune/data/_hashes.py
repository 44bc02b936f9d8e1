"""Hashes of all words of a text at once. Pure functions."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that its powers have inverses modulo 2^64
IS_WORD = np.array([byte >= 128 or chr(byte).isalnum() for byte in range(256)])
_MIX = np.uint64(0xBF58476D1CE4E5B9)


def word_ngrams(text: str, size: int) -> Hashes:
    """Return a hash of each n-gram of the words of a text in lower case, uint64 ``[num_ngrams]``.

    A word is a run of letters and digits, and of all characters that are not ASCII. A text with fewer words is one
    n-gram; without words it has none. All hashes come from a few operations on the bytes of the text: with the bytes
    ``x_i`` and an odd base B modulo 2^64, that of the word from s to e is ``B^-s * sum_{s <= i < e} (x_i + 1) B^i``.
    """
    data = np.frombuffer(text.lower().encode("utf-8", "surrogatepass"), np.uint8)
    borders = np.flatnonzero(np.diff(IS_WORD[data], prepend=False, append=False))
    starts, ends = borders[::2], borders[1::2]
    if not len(starts):
        return np.zeros(0, np.uint64)
    forward, inverse = powers(1 << len(data).bit_length())
    sums = np.zeros(len(data) + 1, np.uint64)
    np.cumsum((data + np.uint64(1)) * forward[: len(data)], out=sums[1:])
    words = mixed((sums[ends] - sums[starts]) * inverse[starts])
    size = min(size, len(words))
    hashes = np.zeros(len(words) - size + 1, np.uint64)
    for place in range(size):
        hashes = hashes * BASE + words[place : place + len(hashes)]
    return np.unique(mixed(hashes))


@lru_cache(4)
def powers(number: int) -> tuple[Hashes, Hashes]:
    """Return the powers of the base and of its inverse modulo 2^64, from 0 to ``number``."""
    bases = BASE, np.uint64(pow(int(BASE), -1, 2**64))
    rows = [np.concatenate([np.ones(1, np.uint64), np.full(number, base, np.uint64)]).cumprod() for base in bases]
    return rows[0], rows[1]


def mixed(values: Hashes) -> Hashes:
    """Spread the differences of hashes over all bits."""
    values = (values ^ (values >> np.uint64(30))) * _MIX
    return np.asarray(values ^ (values >> np.uint64(31)))
