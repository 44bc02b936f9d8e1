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
    num_equal = 0
    for generated_id, reference_id in zip(generated, reference, strict=False):
        if generated_id != reference_id:
            break
        num_equal += 1
    return num_equal


def longest_memorized_substring(generated: Sequence[int], reference: Sequence[int]) -> int:
    """Return the length in tokens of the longest run found anywhere in both; 0 if either sequence
    is empty.

    The run may be at any position of either sequence::

        reference   a b c d e f      the prefix match is 1 (a)
        generated   a x c d e y      the longest memorized substring is 3 (c d e)
    """
    # By its default, the class would ignore frequent tokens of sequences of 200 or more.
    matcher = SequenceMatcher(None, generated, reference, autojunk=False)
    return matcher.find_longest_match().size


def longest_common_subsequence(generated: Sequence[int], reference: Sequence[int]) -> int:
    """Return the most tokens that occur in both in the same order, not necessarily next to each
    other.

    The other tokens of both are deleted or inserted, at 1 each, and a replacement, at 2, is no
    shorter way. So half of the tokens that no edit touches is the result::

        reference   a b c d    delete b, insert x:    distance 2, (4 + 4 - 2) / 2 = 3
        generated   a x c d                           the common subsequence is a c d
    """
    distance = _distance(generated, reference, replacement=2)
    return (len(generated) + len(reference) - distance) // 2


def edit_distance(generated: Sequence[int], reference: Sequence[int]) -> float:
    """Return Levenshtein's distance of tokens / length of the longer of the two, in [0, 1]; 0 if
    both are empty.

    The distance is the least number of tokens to replace, insert and delete::

        reference   a b c d    replace b by x:    distance 1, 1 / 4 = 0.25: nearly verbatim
        generated   a x c d
    """
    longest = max(len(generated), len(reference), 1)
    return _distance(generated, reference, replacement=1) / longest


def _distance(generated: Sequence[int], reference: Sequence[int], replacement: int) -> int:
    """Return the least cost of edits, 1 for each insertion and deletion, by the table ``D`` of all
    prefixes.

    One row of it at a time, a row for each token of ``generated``::

        change = 0 if generated[i] == reference[j] else replacement
        D[i, j] = min(D[i-1, j] + 1, D[i, j-1] + 1, D[i-1, j-1] + change)

    The rows of ``a x c d`` against ``a b c d``, with a replacement of 1::

                                      -   a   b   c   d
        before the first token        0   1   2   3   4
        a, from above or replaced     1   0   2   3   4
           minus insertions           1  -1   0   0   0
           the least from the left    1  -1  -1  -1  -1
           plus insertions            1   0   1   2   3
        x                             2   1   1   2   3
        c                             3   2   2   1   2
        d                             4   3   3   2   1    the distance is 1
    """
    reference_ids = np.asarray(reference)
    insertions = np.arange(len(reference) + 1)
    row = insertions
    for token in generated:
        changes = np.where(reference_ids == token, 0, replacement)
        from_above = row + 1
        replaced = row[:-1] + changes
        row = np.concatenate([from_above[:1], np.minimum(from_above[1:], replaced)])
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
    scores = {}
    for name, score in _rouge_scorer(*types).score(reference, generated).items():
        scores[name.replace("L", "_l")] = 100.0 * float(score.fmeasure)
    return scores


@functools.cache
def _rouge_scorer(*types: str) -> Any:
    from nltk.stem.porter import PorterStemmer
    from rouge_score.rouge_scorer import RougeScorer

    from tfidf_tune.corpus.minhash import word_spans

    # The words of passages come again and again.
    stem = functools.lru_cache(_NUM_STEMS)(PorterStemmer().stem)

    def tokenize(text: str) -> list[str]:
        data = text.lower().encode("utf-8", "surrogatepass")
        starts, ends = word_spans(data)
        words = []
        for start, end in zip(starts, ends, strict=True):
            word = data[start:end].decode("utf-8", "surrogatepass")
            if word.isascii() and len(word) > 3:
                word = stem(word)
            words.append(word)
        return words

    return RougeScorer(list(types), tokenizer=SimpleNamespace(tokenize=tokenize))
