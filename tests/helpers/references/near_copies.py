"""Groups of near copies, by comparing all pairs of texts."""

import itertools

import numpy as np
from scipy.sparse.csgraph import connected_components


def near_copy_groups(texts, threshold, size):
    """Return the numbers of the texts of each group, also of those that are connected by others."""
    words_of = []
    for text in texts:
        if any(map(str.isalnum, text)):
            words_of.append(text.split())
        else:  # a text without letters and digits is one n-gram
            words_of.append([text] * size)
    sets = [
        {tuple(words[i : i + size]) for i in range(len(words) - size + 1)} for words in words_of
    ]
    similar = np.eye(len(texts))
    for i, j in itertools.combinations(range(len(texts)), 2):
        similar[i, j] = len(sets[i] & sets[j]) / max(len(sets[i] | sets[j]), 1) >= threshold
    number, of_text = connected_components(similar, directed=False)
    return [np.flatnonzero(of_text == cluster).tolist() for cluster in range(number)]
