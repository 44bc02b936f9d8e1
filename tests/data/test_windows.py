"""Windows of text and their hashes, against plain Python on strings."""

import random
import re

import numpy as np
import pytest

from tfidf_tune.data._deduplication import joined_words, signature
from tfidf_tune.data._window_index import band_keys, chosen_words, hashes, make_batch

WORDS = ["ein", "Wort", "über", "das", "Ende", "a", "of", "1815", "日本", "naïve"]


def text_of(seed, length):
    rng = random.Random(seed)
    return "".join(rng.choice(WORDS) + rng.choice([" ", " ", " ", ", ", ".\n", "-"]) for _ in range(length))


def windows_of(batch, chosen, num_bytes):
    data = batch.data.tobytes()
    return [data[start : start + num_bytes] for start in batch.words[chosen].tolist()]


@pytest.fixture(scope="module")
def texts():
    return [text_of(seed, length).encode() for seed, length in enumerate([300, 1, 40, 500, 0, 90, 3])]


def test_words_start_where_python_finds_them(texts):
    batch = make_batch(texts)
    expected = []
    for number, text in enumerate(texts):
        string = text.decode()
        # A character of three bytes is a word of its own, the start of one too.
        starts = {m.start() for m in re.finditer(r"[a-z0-9\u0080-\U0010ffff]+", string, re.IGNORECASE)}
        starts |= {at for at, character in enumerate(string) if len(character.encode()) > 2}
        offsets = [len(string[:at].encode()) for at in sorted(starts)]
        expected += [(number, offset, len(text) - offset) for offset in offsets]
    assert [*zip(batch.of_text.tolist(), batch.offsets.tolist(), batch.num_left.tolist(), strict=True)] == expected


@pytest.mark.parametrize("spacing", [1, 2, 5, 16, 33])
def test_each_run_of_words_has_a_window_and_only_the_least_ones_do(texts, spacing):
    num_bytes = 64
    batch = make_batch(texts)
    chosen = set(chosen_words(batch, num_bytes, spacing).tolist())
    fitting = [index for index, left in enumerate(batch.num_left.tolist()) if left >= num_bytes]
    data = batch.data.tobytes()
    rank = {}
    for index in fitting:
        start = int(batch.words[index])
        value = int(hashes(batch, np.array([index]), 16)[0]) >> 1 | 1
        rank[index] = (data[start - 1 : start] not in (b"\n", b"\r") and start > 0, value)
    expected = set()
    for text in range(len(texts)):
        own = [index for index in fitting if batch.of_text[index] == text]
        expected |= {min(own[at : at + spacing], key=rank.get) for at in range(len(own) - spacing + 1)} | set(own[:1])
    assert chosen == expected


def test_windows_are_found_again_in_other_places_and_equal_keys_are_equal_bytes(texts):
    num_bytes, spacing = 100, 8
    shared = text_of(99, 200)
    batches = [make_batch([before.encode() + b" " + shared.encode() + after, *texts]) for before, after in (
        (text_of(1, 30), b""), (text_of(2, 77), text_of(3, 40).encode()), ("", b" end"),
    )]  # fmt: skip
    found = []
    for batch in batches:
        chosen = chosen_words(batch, num_bytes, spacing)
        windows, keys = windows_of(batch, chosen, num_bytes), hashes(batch, chosen, num_bytes).tolist()
        assert len(set(keys)) == len(set(windows))
        found.append(dict(zip(windows, keys, strict=True)))
    inside = [{window for window in one if window in shared.encode()} for one in found]
    common = set.intersection(*inside)
    assert all(one[window] == found[0][window] for one in found for window in common)
    # No stretch of a window and `spacing` words is without one.
    starts = sorted(shared.encode().index(window) for window in common)
    words = make_batch([shared.encode()]).words.tolist()
    fitting = [start for start in words if start + num_bytes <= len(shared.encode())]
    gaps = np.diff([fitting.index(start) for start in starts])
    assert gaps.max() <= spacing
    assert fitting.index(starts[0]) < spacing


def test_band_keys_agree_as_often_as_sets_of_ngrams_are_similar():
    num_bytes, size = 400, 3
    rng = random.Random(0)
    base = [f"w{rng.randrange(10_000)}" for _ in range(200)]

    def padded(words):  # all windows hold the same number of words
        return " ".join(word.ljust(6, "x") for word in words)

    for share in (0.0, 0.05, 0.2, 1.0):
        other = [f"v{number}" if rng.random() < share else word for number, word in enumerate(base)]
        texts = [padded(base).encode(), padded(other).upper().replace(" ", "\n").encode()]
        batch = make_batch(texts, ignore_case=True)
        chosen = np.flatnonzero(batch.offsets == 0)
        for num_bands, num_rows in ((128, 1), (42, 3)):
            keys = band_keys(batch, chosen, num_bytes, size, (num_bands, num_rows))
            window = [padded(words)[:num_bytes].split() for words in (base, other)]
            grams = [{tuple(words[at : at + size]) for at in range(len(words) - size + 1)} for words in window]
            similarity = len(grams[0] & grams[1]) / len(grams[0] | grams[1])
            expected = similarity**num_rows
            error = 4 * (expected * (1 - expected) / num_bands) ** 0.5 + 1 / num_bands
            assert abs((keys[0] == keys[1]).mean() - expected) <= error
            signatures = []
            for first in chosen.tolist():  # all words have six bytes and a gap
                words = np.arange(first, first + len(window[0]))
                signatures.append(signature(joined_words(hashes(batch, words, 6), size)))
            agree = (signatures[0] == signatures[1])[: num_bands * num_rows].reshape(num_bands, num_rows).all(axis=1)
            assert (keys[0] == keys[1]).tolist() == agree.tolist()
