import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer, _lcs_table
from torchmetrics.functional.text.helper import _edit_distance

from tfidf_tune.probe import (
    edit_distance,
    longest_common_subsequence,
    longest_memorized_substring,
    longest_prefix_match,
    rouge_l,
    rouge_scores,
)

few_ids = st.lists(st.integers(0, 3), max_size=12)  # few different ids: runs are common
texts = st.lists(st.sampled_from(["the", "arsenal", "was", "owned", "owning", "1860", "."]), max_size=10).map(" ".join)


def prefix_by_loop(a, b):
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


def lms_by_loops(a, b):
    longest = 0
    for i in range(len(a)):
        for j in range(len(b)):
            longest = max(longest, prefix_by_loop(a[i:], b[j:]))
    return longest


def test_matches_of_examples():
    for generated, reference, prefix, lms in (
        ([1, 2, 3], [1, 2, 4], 2, 2),
        ([1, 9, 3, 4], [1, 2, 3, 4], 1, 2),  # what matches after the first difference does not count for the prefix
        ([9, 9, 5, 6, 7], [5, 6, 7, 8], 0, 3),  # at different places in the two
        ([1, 2, 9, 3, 4, 5], [1, 2, 8, 3, 4, 5], 2, 3),  # the longer of two runs, never their sum
        ([1, 3, 2], [1, 2, 3], 1, 1),  # contiguous, no subsequence
        ([], [1], 0, 0),
        ([], [], 0, 0),
    ):
        assert longest_prefix_match(generated, reference) == prefix
        assert longest_memorized_substring(generated, reference) == lms


@given(few_ids, few_ids)
def test_matches_equal_plain_loops(a, b):
    assert longest_memorized_substring(a, b) == lms_by_loops(a, b)
    assert longest_prefix_match(a, b) == prefix_by_loop(a, b)


@given(few_ids, few_ids)
def test_near_verbatim_measures_equal_those_of_rouge_score_and_torchmetrics(a, b):
    assert longest_common_subsequence(a, b) == _lcs_table(a, b)[-1][-1]
    assert edit_distance(a, b) == _edit_distance(a, b) / max(len(a), len(b), 1)


@given(texts, texts)
def test_rouge_scores_are_those_of_rouge_score_with_stemmer_times_100(generated, reference):
    names = {"rouge1": "rouge1", "rouge2": "rouge2", "rouge_l": "rougeL"}
    direct = RougeScorer([*names.values()], use_stemmer=True).score(target=reference, prediction=generated)
    assert rouge_scores(generated, reference) == {name: 100 * direct[key].fmeasure for name, key in names.items()}
    assert rouge_scores(generated, reference)["rouge_l"] == rouge_l(generated, reference)


def test_rouge_scores_of_examples():
    # Words: 2 of 2 and of 4. Pairs: none of one ("a c") and of three. Common subsequence "a c": F = 2 * 1/2 / (3/2).
    assert rouge_scores("a c", "a b c d") == pytest.approx({"rouge1": 200 / 3, "rouge2": 0.0, "rouge_l": 200 / 3})
    assert rouge_l("The arsenal was owned.", "the arsenal was owned") == 100.0
    assert rouge_l("transferring soldiers", "transferred soldier") == 100.0
    for generated, reference in (("", "a"), ("a", ""), ("", ""), ("слово", "слово")):
        assert rouge_l(generated, reference) == 0.0
