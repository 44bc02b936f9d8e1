from difflib import SequenceMatcher

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from tfidf_tune.analysis import (
    longest_memorized_substring,
    longest_memorized_substrings,
    longest_prefix_match,
    longest_prefix_matches,
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


@pytest.mark.parametrize(
    ("generated", "reference", "expected"),
    [
        ([1, 2, 3], [1, 2, 4], 2),
        ([9, 2, 3], [1, 2, 3], 0),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2], 2),
        ([1, 9, 3, 4], [1, 2, 3, 4], 1),  # what matches after the first difference does not count
        ([], [1], 0),
        ([1], [], 0),
        ([], [], 0),
    ],
)
def test_prefix_match_counts_up_to_the_first_difference(generated, reference, expected):
    assert longest_prefix_match(generated, reference) == expected


@pytest.mark.parametrize(
    ("generated", "reference", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], 3),
        ([9, 9, 5, 6, 7], [5, 6, 7, 8], 3),  # at different places in the two
        ([1, 2, 9, 3, 4, 5], [1, 2, 8, 3, 4, 5], 3),  # the longer of two runs, never their sum
        ([1, 3, 2], [1, 2, 3], 1),  # contiguous, no subsequence
        ([7, 7, 7], [7], 1),
        ([1, 2], [3, 4], 0),
        ([], [1], 0),
        ([1], [], 0),
        ([], [], 0),
    ],
)
def test_lms_is_the_longest_contiguous_run_found_in_both(generated, reference, expected):
    assert longest_memorized_substring(generated, reference) == expected


@given(few_ids, few_ids)
def test_lms_equals_double_loops(a, b):
    assert longest_memorized_substring(a, b) == lms_by_loops(a, b)


@given(few_ids, few_ids)
def test_lms_equals_difflib(a, b):
    assert longest_memorized_substring(a, b) == SequenceMatcher(None, a, b, autojunk=False).find_longest_match().size


@given(few_ids, few_ids)
def test_prefix_match_equals_a_plain_loop(a, b):
    assert longest_prefix_match(a, b) == prefix_by_loop(a, b)


@given(few_ids, few_ids)
def test_lms_is_symmetric(a, b):
    assert longest_memorized_substring(a, b) == longest_memorized_substring(b, a)


@given(few_ids, few_ids)
def test_lms_lies_between_the_prefix_match_and_the_shorter_length(a, b):
    assert longest_prefix_match(a, b) <= longest_memorized_substring(a, b) <= min(len(a), len(b))


@given(few_ids)
def test_equal_sequences_match_in_full(ids):
    assert longest_memorized_substring(ids, ids) == longest_prefix_match(ids, ids) == len(ids)


@pytest.mark.parametrize(
    ("batched", "single"),
    [
        (longest_memorized_substrings, longest_memorized_substring),
        (longest_prefix_matches, longest_prefix_match),
    ],
)
@given(pairs=st.lists(st.tuples(few_ids, few_ids), max_size=5))
def test_padded_rows_give_what_each_pair_gives(batched, single, pairs):
    generated = np.full((len(pairs), 12), -1)
    reference = np.full((len(pairs), 12), -2)
    for row, (a, b) in enumerate(pairs):
        generated[row, : len(a)] = a
        reference[row, : len(b)] = b
    assert batched(generated, reference).tolist() == [single(a, b) for a, b in pairs]


@given(texts, texts)
def test_rouge_l_is_that_of_rouge_score_with_stemmer_times_100(generated, reference):
    direct = RougeScorer(["rougeL"], use_stemmer=True).score(target=reference, prediction=generated)
    assert rouge_l(generated, reference) == 100 * direct["rougeL"].fmeasure


def test_rouge_l_of_equal_texts_is_100():
    assert rouge_l("The arsenal was owned.", "the arsenal was owned") == 100.0


def test_rouge_l_is_the_f_measure_by_hand():
    # common subsequence "a c": recall 2/4, precision 2/2, F = 2 * 1/2 * 1 / (1/2 + 1)
    assert rouge_l("a c", "a b c d") == pytest.approx(200 / 3)


def test_rouge_l_stems():
    assert rouge_l("transferring soldiers", "transferred soldier") == 100.0


@pytest.mark.parametrize(("generated", "reference"), [("", "a"), ("a", ""), ("", ""), ("слово", "слово")])
def test_rouge_l_is_0_without_ascii_words(generated, reference):
    assert rouge_l(generated, reference) == 0.0


@given(texts, texts)
def test_rouge_scores_are_those_of_rouge_score_with_stemmer_times_100(generated, reference):
    names = {"rouge1": "rouge1", "rouge2": "rouge2", "rouge_l": "rougeL"}
    direct = RougeScorer([*names.values()], use_stemmer=True).score(target=reference, prediction=generated)
    assert rouge_scores(generated, reference) == {name: 100 * direct[key].fmeasure for name, key in names.items()}
    assert rouge_scores(generated, reference)["rouge_l"] == rouge_l(generated, reference)


def test_rouge_scores_by_hand():
    # Words: 2 of 2 and of 4. Pairs: none of one ("a c") and of three.
    assert rouge_scores("a c", "a b c d") == pytest.approx({"rouge1": 200 / 3, "rouge2": 0.0, "rouge_l": 200 / 3})
