"""How much of a reference a continuation recites: prefix match, longest memorized substring, edit
distance, ROUGE-L.

Pure functions on token ids and strings. Prefix match and LMS follow Huang et al. 2024,
"Demystifying Verbatim Memorization in Large Language Models" (https://arxiv.org/abs/2407.17817).
"""

import functools
from collections.abc import Sequence
from difflib import SequenceMatcher
from types import SimpleNamespace
from typing import Any

import numpy as np

_NUM_STEMS = 1 << 16  # words


def longest_prefix_match(generated: Sequence[int], reference: Sequence[int]) -> int:
    """Return the number of equal token ids up to the first difference; 0 if either sequence is
    empty.
    """
    different = (
        i
        for i, (ours, theirs) in enumerate(zip(generated, reference, strict=False))
        if ours != theirs
    )
    return next(different, min(len(generated), len(reference)))


def longest_memorized_substring(generated: Sequence[int], reference: Sequence[int]) -> int:
    """Return the length in tokens of the longest run found anywhere in both; 0 if either sequence
    is empty.
    """
    return SequenceMatcher(None, generated, reference, autojunk=False).find_longest_match().size


def longest_common_subsequence(generated: Sequence[int], reference: Sequence[int]) -> int:
    """Return the most tokens that occur in both in the same order, not necessarily next to each
    other.
    """
    # What is left of both is deleted and inserted: a replacement for 2 is no shorter way.
    return (len(generated) + len(reference) - _distance(generated, reference, replacement=2)) // 2


def edit_distance(generated: Sequence[int], reference: Sequence[int]) -> float:
    """Return Levenshtein's distance of tokens / length of the longer of the two, in [0, 1]; 0 if
    both are empty.

    The distance is the least number of tokens to replace, insert and delete.
    """
    return _distance(generated, reference, replacement=1) / max(len(generated), len(reference), 1)


def _distance(generated: Sequence[int], reference: Sequence[int], replacement: int) -> int:
    """Return the least cost of edits, 1 for each insertion and deletion, by the table ``D`` of all
    prefixes.

    One row of it at a time::

        differs = generated[i] != reference[j]
        D[i, j] = min(D[i-1, j] + 1, D[i, j-1] + 1, D[i-1, j-1] + replacement * differs)
    """
    reference_ids = np.asarray(reference)
    insertions = np.arange(len(reference) + 1)
    row = insertions
    for token in generated:
        replaced = row[:-1] + replacement * (reference_ids != token)
        row = np.concatenate([row[:1] + 1, np.minimum(row[1:] + 1, replaced)])
        # From the left: each further insertion costs 1, so that a running minimum of the rest is
        # enough.
        row = np.minimum.accumulate(row - insertions) + insertions
    return int(row[-1])


def rouge_l(generated: str, reference: str) -> float:
    """Return the ROUGE-L F-measure × 100, in [0, 100], of the ``rouge_score`` package with its
    Porter stemmer.

    Words are those of :func:`~tfidf_tune.corpus.minhash.word_spans` in lower case, in ASCII those
    of the package; a text without any scores 0.
    """
    return _rouge(generated, reference, "rougeL")["rouge_l"]


def rouge_scores(generated: str, reference: str) -> dict[str, float]:
    """Return ``rouge1``, ``rouge2`` and ``rouge_l`` of a summary, computed like :func:`rouge_l`."""
    return _rouge(generated, reference, "rouge1", "rouge2", "rougeL")


def _rouge(generated: str, reference: str, *types: str) -> dict[str, float]:
    scores = _rouge_scorer(*types).score(reference, generated)
    return {
        name.replace("L", "_l"): 100.0 * float(score.fmeasure) for name, score in scores.items()
    }


@functools.cache
def _rouge_scorer(*types: str) -> Any:
    from nltk.stem.porter import PorterStemmer
    from rouge_score.rouge_scorer import RougeScorer

    from tfidf_tune.corpus.minhash import word_spans

    # The words of passages come again and again.
    stem = functools.lru_cache(_NUM_STEMS)(PorterStemmer().stem)

    def tokenize(text: str) -> list[str]:
        data = text.lower().encode("utf-8", "surrogatepass")
        words = (
            data[start:end].decode("utf-8", "surrogatepass")
            for start, end in zip(*word_spans(data), strict=True)
        )
        return [stem(word) if word.isascii() and len(word) > 3 else word for word in words]

    return RougeScorer(list(types), tokenizer=SimpleNamespace(tokenize=tokenize))
