"""How much of a reference a continuation recites: prefix match, longest memorized substring, ROUGE-L.

Pure functions on token ids and strings. Prefix match and LMS follow Huang et al. 2024, "Demystifying Verbatim
Memorization in Large Language Models" (https://arxiv.org/abs/2407.17817).
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

Ids = npt.NDArray[np.integer]


def longest_prefix_match(generated: Sequence[int], reference: Sequence[int]) -> int:
    """Return the number of equal token ids up to the first difference; 0 if either sequence is empty."""
    return int(longest_prefix_matches(_one_row(generated), _one_row(reference))[0])


def longest_memorized_substring(generated: Sequence[int], reference: Sequence[int]) -> int:
    """Return the length in tokens of the longest run found anywhere in both; 0 if either sequence is empty."""
    return int(longest_memorized_substrings(_one_row(generated), _one_row(reference))[0])


def longest_prefix_matches(generated: Ids, reference: Ids) -> npt.NDArray[np.int64]:
    """:func:`longest_prefix_match` of each row.

    Args:
        generated (np.ndarray): integer ``[n, g]`` token ids, rows padded at the end with -1.
        reference (np.ndarray): integer ``[n, r]`` token ids, rows padded at the end with -2: padding never matches.

    Returns:
        np.ndarray: ``[n]`` int64, in tokens.
    """
    shared = min(generated.shape[1], reference.shape[1])
    equal = generated[:, :shared] == reference[:, :shared]
    matches: npt.NDArray[np.int64] = np.logical_and.accumulate(equal, axis=1).sum(axis=1, dtype=np.int64)
    return matches


def longest_memorized_substrings(generated: Ids, reference: Ids) -> npt.NDArray[np.int64]:
    """:func:`longest_memorized_substring` of each row.

    With ``run[i, j]`` the longest common run that ends at ``generated[i]`` and at ``reference[j]``::

        run[i, j] = run[i-1, j-1] + 1   if generated[i] == reference[j]   else 0
        LMS       = max over i, j of run[i, j]

    One row of ``run`` is kept at a time, for the whole batch: O(g·n·r) time, O(n·r) memory.

    Args:
        generated (np.ndarray): integer ``[n, g]`` token ids, rows padded at the end with -1.
        reference (np.ndarray): integer ``[n, r]`` token ids, rows padded at the end with -2: padding never matches.

    Returns:
        np.ndarray: ``[n]`` int64, in tokens.
    """
    num_rows, reference_length = reference.shape
    run = np.zeros((num_rows, reference_length + 1), dtype=np.int64)  # column 0 is before the reference
    longest = np.zeros(num_rows, dtype=np.int64)
    for ids in generated.T:
        run[:, 1:] = np.where(ids[:, None] == reference, run[:, :-1] + 1, 0)
        longest = np.maximum(longest, run.max(axis=1))
    return longest


def rouge_l(generated: str, reference: str) -> float:
    """Return the ROUGE-L F-measure × 100, in [0, 100], of the ``rouge_score`` package with its Porter stemmer.

    Its words are runs of ASCII letters and digits in lower case: a text without any scores 0.
    """
    return 100.0 * float(_rouge_scorer("rougeL").score(reference, generated)["rougeL"].fmeasure)


def rouge_scores(generated: str, reference: str) -> dict[str, float]:
    """Return ``rouge1``, ``rouge2`` and ``rouge_l`` of a summary, computed like :func:`rouge_l`."""
    scores = _rouge_scorer("rouge1", "rouge2", "rougeL").score(reference, generated)
    return {
        name: 100.0 * float(scores[key].fmeasure)
        for name, key in {"rouge1": "rouge1", "rouge2": "rouge2", "rouge_l": "rougeL"}.items()
    }


def _one_row(ids: Sequence[int]) -> Ids:
    return np.asarray(ids, dtype=np.int64)[None]


@functools.cache
def _rouge_scorer(*types: str) -> "RougeScorer":
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(types), use_stemmer=True)
