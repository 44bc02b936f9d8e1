"""What a near copy is: two texts are near copies if the sets of n-grams of their words have enough in common.

The measure is the Jaccard similarity, :func:`similarity`. Near copies among many texts are found by MinHash (Broder
1997) with locality-sensitive hashing (Indyk and Motwani 1998): a pair of similarity s agrees in all r hash functions of
a band with the probability ``s^r``, and in one of b bands with ``1 - (1 - s^r)^b``. Pure functions.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

NUM_FUNCTIONS = 128
BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that its powers have inverses modulo 2^64
IS_WORD = np.array([byte >= 128 or chr(byte).isalnum() for byte in range(256)])
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_TOGETHER = 4096  # n-grams whose hashes are computed at once


def word_ngrams(text: str, size: int) -> Hashes:
    """Return a hash of each n-gram of the words of a text in lower case, uint64 ``[num_ngrams]``, sorted.

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
    return np.unique(joined_words(words, min(size, len(words))))


def joined_words(words: Hashes, size: int) -> Hashes:
    """Return a hash of each ``size`` consecutive words, uint64 ``[num_words - size + 1]``, from those of the words."""
    hashes = np.zeros(len(words) - size + 1, np.uint64)
    for place in range(size):
        hashes = hashes * BASE + words[place : place + len(hashes)]
    return mixed(hashes)


def similarity(first: Hashes, second: Hashes) -> float:
    """Return the Jaccard similarity of two sets of :func:`word_ngrams`, from 0 to 1; 0 if both are empty."""
    num_shared = len(np.intersect1d(first, second, assume_unique=True))
    return num_shared / max(1, len(first) + len(second) - num_shared)


def signature(ngrams: Hashes) -> Hashes:
    """Return the least value of each hash function, uint64 ``[NUM_FUNCTIONS]``."""
    factors, summands = hash_functions()
    lowest = np.full(NUM_FUNCTIONS, np.iinfo(np.uint64).max)
    for start in range(0, len(ngrams), _TOGETHER):
        values = ngrams[start : start + _TOGETHER, None] * factors + summands
        lowest = np.minimum(lowest, values.min(axis=0))
    return lowest


@lru_cache(1)
def hash_functions() -> Hashes:
    """Return odd factors and summands modulo 2^64, uint64 ``[2, NUM_FUNCTIONS]``."""
    drawn = np.random.default_rng(1).integers(0, 2**64, (2, NUM_FUNCTIONS), dtype=np.uint64)
    drawn[0] |= np.uint64(1)
    return drawn


@lru_cache(16)
def bands(threshold: float, cost_of_missed: float = 0.5) -> tuple[int, int]:
    """Return the number of bands and of hash functions in each that fit a threshold best.

    Args:
        threshold (float): the least similarity of near copies.
        cost_of_missed (float): of a near copy that has no band in common; 1 minus it is the cost of a pair below the
            threshold that has one. Default: 0.5

    Raises:
        ValueError: If the threshold is so high that there would be a single band.
    """
    from datasketch import MinHashLSH

    try:
        index = MinHashLSH(threshold, NUM_FUNCTIONS, weights=(1 - cost_of_missed, cost_of_missed))
    except ValueError as error:
        raise ValueError(
            f"threshold {threshold} is too high for {NUM_FUNCTIONS} hash functions: lower it, or set method to exact"
        ) from error
    return index.b, index.r


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
