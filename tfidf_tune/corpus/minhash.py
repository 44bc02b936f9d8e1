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
_JOINERS = "\u200c\u200d"  # inside of words
_LONGER_FROM = (0x80, 0x800, 0x10000)  # characters that have 2, 3 and 4 bytes in UTF-8
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
    values = np.frombuffer(data, np.uint8) + np.uint64(1)
    words = stretch_hashes(hash_sums(values), starts, ends)
    if not len(words):
        return words
    ngrams = joined_words(words, min(size, len(words)))
    return np.unique(ngrams)


def word_spans(data: bytes) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return where each word of a text in UTF-8 starts and ends, in bytes.

    A word is a run of letters and digits with their marks, or a character of a script without
    spaces between words.
    """
    if not data:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    text = data.decode("utf-8", "surrogatepass")
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    kinds = _kinds()[codes]
    # A mark belongs to the character before it: it has the kind of the latest other character.
    numbers = np.arange(len(kinds))
    numbers[kinds == _MARK] = 0
    bases = np.maximum.accumulate(numbers)
    kinds_of_bases = kinds[bases]
    # Words of one character, and the first letters of others.
    kinds_before = np.append(np.uint8(_BETWEEN), kinds_of_bases[:-1])
    is_first_letter = (kinds == _LETTER) & (kinds_before != _LETTER)
    is_start = (kinds == _ALONE) | is_first_letter
    # A word ends before the next, or before what is no word.
    is_word = np.isin(kinds_of_bases, (_LETTER, _ALONE))
    is_end = is_word & np.append(is_start[1:] | ~is_word[1:], True)
    # The first byte after each character: UTF-8 has 1 to 4 bytes for a character.
    lengths = 1 + np.searchsorted(_LONGER_FROM, codes, side="right")
    ends = np.cumsum(lengths)
    starts = ends - lengths
    return starts[is_start], ends[is_end]


@lru_cache(1)
def _kinds() -> npt.NDArray[np.uint8]:
    """Return what each character is in a word, uint8 ``[0x110000]``."""
    kinds = np.zeros(sys.maxunicode + 1, np.uint8)
    for code in range(len(kinds)):
        character = chr(code)
        if character.isalnum():
            kinds[code] = _LETTER
        elif category(character)[0] == "M" or character in _JOINERS:
            kinds[code] = _MARK
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
    inverse = np.uint64(pow(int(BASE), -1, 2**64))
    powers = []
    for base in (BASE, inverse):
        factors = np.full(number, base)
        powers.append(np.append(np.uint64(1), factors).cumprod())
    return tuple(powers)


def mixed(values: Hashes) -> Hashes:
    """Spread the differences of hashes over all bits."""
    values = (values ^ (values >> np.uint64(30))) * _MIX
    return np.asarray(values ^ (values >> np.uint64(31)))


def joined_words(words: Hashes, size: int) -> Hashes:
    """Return a hash of each ``size`` consecutive words, uint64 ``[num_words - size + 1]``, from
    those of the words.
    """
    hashes = np.zeros(len(words) - size + 1, np.uint64)
    for start in range(size):
        hashes = hashes * BASE + words[start : start + len(hashes)]
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
        part = ngrams[start : start + _TOGETHER, None]
        values = part * factors + summands
        lowest = np.minimum(lowest, values.min(axis=0))
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
    hash functions in each. Sets with an equal key agree in a band. Of 2 bands of 2 functions, these
    sets agree in the first, and are candidates, although they have different values elsewhere::

        least of    1  2 | 3  4
        first set   5  3 | 8  2
        second set  5  3 | 9  2

    Two sets have the same least value of a function with the probability of their similarity s. So
    they agree in such a band with ``s^2``, and in one of the two with ``1 - (1 - s^2)^2``: 0.87 for
    a similarity of 0.8, and 0.08 for 0.2.
    """
    num_bands, num_rows = bands
    # Each hash function takes the least of all sets in one pass: of what is between two borders, by
    # turns a set and what is between two sets.
    borders = np.stack([starts, ends], axis=1).ravel()
    keys = np.zeros((len(starts), num_bands), np.uint64)
    functions = hash_functions().T[: num_bands * num_rows]
    for number, (factor, summand) in enumerate(functions):
        values = ngrams * factor + summand
        lowest = np.minimum.reduceat(values, borders)[::2]
        band = number // num_rows
        keys[:, band] = mixed(keys[:, band] * BASE + lowest + np.uint64(number + 1))
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
