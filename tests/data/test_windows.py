"""Windows of text and their hashes, against plain Python on strings."""

import random

import numpy as np

from tfidf_tune.data._deduplication import joined_words, signature
from tfidf_tune.data._window_index import band_keys, hashes, make_batch


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
