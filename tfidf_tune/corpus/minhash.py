"""Words of a text, hashes of their n-grams, and MinHash, which finds sets of n-grams that have
enough in common.

Two texts are near copies if the sets of n-grams of their words have a Jaccard similarity,
:func:`similarity`, of a threshold or more. Near copies among many texts are found by MinHash
(Broder 1997) with locality-sensitive hashing (Indyk and Motwani 1998): a pair of similarity s
agrees in all r hash functions of a band with the probability ``s^r``, and in one of b bands with
``1 - (1 - s^r)^b``.
"""

import sys
from functools import lru_cache
from unicodedata import category

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

NUM_FUNCTIONS = 128
BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that its powers have inverses modulo 2^64
# Scripts without spaces, of which each character is a word: Thai, Lao, Myanmar, Khmer, Kana, Han.
# Hangul has spaces.
_UNSPACED = (
    (0xE00, 0xEFF),
    (0x1000, 0x109F),
    (0x1780, 0x17FF),
    (0x3005, 0x3007),
    (0x3040, 0x30FF),
    (0x31F0, 0x31FF),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0xFF66, 0xFF9F),
    (0x20000, 0x3FFFD),
)
_BETWEEN, _LETTER, _ALONE, _MARK = range(4)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_TOGETHER = 4096  # n-grams whose hashes are computed at once


def word_ngrams(text: str, size: int) -> Hashes:
    """Return a hash of each n-gram of the words of a text in lower case, uint64 ``[num_ngrams]``,
    sorted.

    A text with fewer words is one n-gram, a text without words, unless it is empty, one word, see
    :func:`word_spans`.
    """
    data = text.lower().encode("utf-8", "surrogatepass")
    starts, ends = word_spans(data)
    if not len(starts) and data:
        starts = np.array([0])
        ends = np.array([len(data)])
    words = stretch_hashes(hash_sums(np.frombuffer(data, np.uint8) + np.uint64(1)), starts, ends)
    return np.unique(joined_words(words, min(size, len(words)))) if len(words) else words


def word_spans(data: bytes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return where each word of a text in UTF-8 starts and ends, in bytes.

    A word is a run of letters and digits with their marks, or a character of a script without
    spaces between words.
    """
    codes = np.frombuffer(
        data.decode("utf-8", "surrogatepass").encode("utf-32-le", "surrogatepass"), np.uint32
    )
    kinds = _kinds()[codes]
    # A mark belongs to the character before it.
    of_base = (
        kinds[np.maximum.accumulate(np.where(kinds == _MARK, 0, np.arange(len(kinds))))]
        if len(kinds)
        else kinds
    )
    before = np.append(np.uint8(_BETWEEN), of_base[:-1]) if len(kinds) else kinds
    is_start = (kinds == _ALONE) | ((kinds == _LETTER) & (before != _LETTER))
    is_word = np.isin(of_base, (_LETTER, _ALONE))
    is_end = is_word & np.append(is_start[1:] | ~is_word[1:], True)
    # Of characters, in bytes.
    ends = np.cumsum(1 + (codes > 0x7F) + (codes > 0x7FF) + (codes > 0xFFFF))
    return np.append(0, ends)[:-1][is_start], ends[is_end]


@lru_cache(1)
def _kinds() -> npt.NDArray[np.uint8]:
    """Return what each character is in a word, uint8 ``[0x110000]``."""
    kinds = np.zeros(sys.maxunicode + 1, np.uint8)
    for code, character in enumerate(map(chr, range(len(kinds)))):
        # Joiners, inside of words.
        is_mark = category(character)[0] == "M" or character in "\u200c\u200d"
        if character.isalnum():
            kinds[code] = _LETTER
        elif is_mark:
            kinds[code] = _MARK
        else:
            kinds[code] = _BETWEEN
    for first, last in _UNSPACED:
        alone = kinds[first : last + 1]
        alone[alone == _LETTER] = _ALONE
    return kinds


def hash_sums(values: Hashes) -> Hashes:
    """Return prefix sums of ``x_i B^i`` of values x, with an odd base B modulo 2^64, uint64
    ``[num_values + 1]``.
    """
    forward, _ = _powers(1 << len(values).bit_length())
    return np.append(np.uint64(0), np.cumsum(values * forward[: len(values)]))


def stretch_hashes(
    sums: Hashes, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> Hashes:
    """Return the hash of each stretch from s to e, wherever it is: ``B^-s * sum_{s <= i < e} x_i
    B^i``, mixed.
    """
    _, inverse = _powers(1 << (len(sums) - 1).bit_length())
    return mixed((sums[ends] - sums[starts]) * inverse[starts])


@lru_cache(4)
def _powers(number: int) -> tuple[Hashes, ...]:
    """Return the powers of the base and of its inverse modulo 2^64, from 0 to ``number``."""
    bases = BASE, np.uint64(pow(int(BASE), -1, 2**64))
    return tuple(np.append(np.uint64(1), np.full(number, base)).cumprod() for base in bases)


def mixed(values: Hashes) -> Hashes:
    """Spread the differences of hashes over all bits."""
    values = (values ^ (values >> np.uint64(30))) * _MIX
    return np.asarray(values ^ (values >> np.uint64(31)))


def joined_words(words: Hashes, size: int) -> Hashes:
    """Return a hash of each ``size`` consecutive words, uint64 ``[num_words - size + 1]``, from
    those of the words.
    """
    hashes = np.zeros(len(words) - size + 1, np.uint64)
    for place in range(size):
        hashes = hashes * BASE + words[place : place + len(hashes)]
    return mixed(hashes)


def similarity(first: Hashes, second: Hashes) -> float:
    """Return the Jaccard similarity of two sets of :func:`word_ngrams`, of which one
    is not empty.
    """
    num_shared = len(np.intersect1d(first, second, assume_unique=True))
    return num_shared / (len(first) + len(second) - num_shared)


def signature(ngrams: Hashes) -> Hashes:
    """Return the least value of each hash function, uint64 ``[NUM_FUNCTIONS]``."""
    factors, summands = hash_functions()
    lowest = np.full(NUM_FUNCTIONS, np.iinfo(np.uint64).max)
    for start in range(0, len(ngrams), _TOGETHER):
        lowest = np.minimum(
            lowest, (ngrams[start : start + _TOGETHER, None] * factors + summands).min(axis=0)
        )
    return lowest


def band_keys(
    ngrams: Hashes,
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    bands: tuple[int, int],
) -> Hashes:
    """Return the keys of the bands of the signatures of many sets, uint64 ``[num_sets,
    num_bands]``.

    A set is the n-grams from its start to its end in ``ngrams``; ``bands`` are their number and the
    hash functions in each. Sets with an equal key agree in a band.
    """
    num_bands, num_rows = bands
    # Each hash function takes the least of all sets in one pass: of what is between two borders, by
    # turns a set and what is between two sets.
    borders = np.stack([starts, ends], axis=1).ravel()
    keys = np.zeros((len(starts), num_bands), np.uint64)
    for number, (factor, summand) in enumerate(hash_functions().T[: num_bands * num_rows]):
        lowest = np.minimum.reduceat(ngrams * factor + summand, borders)[::2]
        band = keys[:, number // num_rows] * BASE + lowest + np.uint64(number + 1)
        keys[:, number // num_rows] = mixed(band)
    return keys


@lru_cache(1)
def hash_functions() -> Hashes:
    """Return odd factors and summands modulo 2^64, uint64 ``[2, NUM_FUNCTIONS]``."""
    drawn = np.random.default_rng(1).integers(0, 2**64, (2, NUM_FUNCTIONS), dtype=np.uint64)
    drawn[0] |= np.uint64(1)
    return drawn


@lru_cache(16)
def bands(threshold: float, cost_of_missed: float = 0.5) -> tuple[int, int]:
    """Return the number of bands and of hash functions in each that fit a least similarity and the
    cost of misses.
    """
    from datasketch import MinHashLSH

    try:
        index = MinHashLSH(threshold, NUM_FUNCTIONS, weights=(1 - cost_of_missed, cost_of_missed))
    except ValueError as error:
        raise ValueError(
            f"threshold {threshold} is too high: lower it, or set method to exact"
        ) from error
    return index.b, index.r
