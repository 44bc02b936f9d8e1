"""How much of a reference a continuation recites: prefix match, longest memorized substring, edit distance, ROUGE-L.

Pure functions on token ids and strings. Prefix match and LMS follow Huang et al. 2024, "Demystifying Verbatim
Memorization in Large Language Models" (https://arxiv.org/abs/2407.17817).
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer


def longest_prefix_match(generated: Sequence[int], reference: Sequence[int]) -> int:
    """Return the number of equal token ids up to the first difference; 0 if either sequence is empty."""
    different = (i for i, (ours, theirs) in enumerate(zip(generated, reference, strict=False)) if ours != theirs)
    return next(different, min(len(generated), len(reference)))


def longest_memorized_substring(generated: Sequence[int], reference: Sequence[int]) -> int:
    """Return the length in tokens of the longest run found anywhere in both; 0 if either sequence is empty.

    With ``run[i, j]`` the longest common run that ends at ``generated[i]`` and at ``reference[j]``::

        run[i, j] = run[i-1, j-1] + 1   if generated[i] == reference[j]   else 0
        LMS       = max over i, j of run[i, j]

    One row of ``run`` is kept at a time.
    """
    reference_ids = np.asarray(reference)
    run = np.zeros(len(reference) + 1, dtype=np.int64)  # run[0] is before the reference
    longest = 0
    for token in generated:
        # The right side is complete before the row is overwritten.
        run[1:] = np.where(reference_ids == token, run[:-1] + 1, 0)
        longest = max(longest, int(run.max()))
    return longest


def longest_common_subsequence(generated: Sequence[int], reference: Sequence[int]) -> int:
    """Return the most tokens that occur in both in the same order, not necessarily next to each other.

    One row at a time of the table ``L`` of all prefixes of the two::

        L[i, j] = max(L[i-1, j], L[i, j-1], L[i-1, j-1] + [generated[i] == reference[j]])
    """
    reference_ids = np.asarray(reference)
    row = np.zeros(len(reference) + 1, dtype=np.int64)
    for token in generated:
        # From above and from the diagonal; then from the left, which is a running maximum.
        row[1:] = np.maximum(row[1:], row[:-1] + (reference_ids == token))
        row = np.maximum.accumulate(row)
    return int(row[-1])


def edit_distance(generated: Sequence[int], reference: Sequence[int]) -> float:
    """Return Levenshtein's distance of tokens / length of the longer of the two, in [0, 1]; 0 if both are empty.

    The distance is the least number of tokens to replace, insert and delete. One row at a time of the table ``D`` of
    all prefixes of the two::

        D[i, j] = min(D[i-1, j] + 1, D[i, j-1] + 1, D[i-1, j-1] + [generated[i] != reference[j]])
    """
    reference_ids = np.asarray(reference)
    insertions = np.arange(len(reference) + 1)
    row = insertions
    for token in generated:
        replaced = row[:-1] + (reference_ids != token)
        row = np.concatenate([row[:1] + 1, np.minimum(row[1:] + 1, replaced)])
        # From the left: each further insertion costs 1, so that a running minimum of the rest is enough.
        row = np.minimum.accumulate(row - insertions) + insertions
    return int(row[-1]) / max(len(generated), len(reference), 1)


def rouge_l(generated: str, reference: str) -> float:
    """Return the ROUGE-L F-measure × 100, in [0, 100], of the ``rouge_score`` package with its Porter stemmer.

    Its words are runs of ASCII letters and digits in lower case: a text without any scores 0.
    """
    return 100.0 * float(_rouge_scorer("rougeL").score(reference, generated)["rougeL"].fmeasure)


def rouge_scores(generated: str, reference: str) -> dict[str, float]:
    """Return ``rouge1``, ``rouge2`` and ``rouge_l`` of a summary, computed like :func:`rouge_l`."""
    scores = _rouge_scorer("rouge1", "rouge2", "rougeL").score(reference, generated)
    return {name.replace("L", "_l"): 100.0 * float(score.fmeasure) for name, score in scores.items()}


@functools.cache
def _rouge_scorer(*types: str) -> "RougeScorer":
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(types), use_stemmer=True)
