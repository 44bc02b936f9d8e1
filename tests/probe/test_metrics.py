import pytest
from hypothesis import example, given
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
texts = st.lists(
    st.sampled_from(["the", "arsenal", "was", "owned", "owning", "1860", "."]), max_size=10
).map(" ".join)


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


@given(few_ids, few_ids)
def test_matches_equal_plain_loops(a, b):
    assert longest_memorized_substring(a, b) == lms_by_loops(a, b)
    assert longest_prefix_match(a, b) == prefix_by_loop(a, b)


@given(few_ids, few_ids)
def test_near_verbatim_measures_equal_those_of_rouge_score_and_torchmetrics(a, b):
    assert longest_common_subsequence(a, b) == _lcs_table(a, b)[-1][-1]
    assert edit_distance(a, b) == _edit_distance(a, b) / max(len(a), len(b), 1)


@example("its", "it")  # words of three letters are not stemmed
@given(texts, texts)
def test_rouge_scores_are_those_of_rouge_score_with_stemmer_times_100(generated, reference):
    names = {"rouge1": "rouge1", "rouge2": "rouge2", "rouge_l": "rougeL"}
    direct = RougeScorer([*names.values()], use_stemmer=True).score(
        target=reference, prediction=generated
    )
    assert rouge_scores(generated, reference) == {
        name: 100 * direct[key].fmeasure for name, key in names.items()
    }
    assert rouge_scores(generated, reference)["rouge_l"] == rouge_l(generated, reference)


ascii_texts = st.text(st.characters(max_codepoint=127), max_size=40)


@given(ascii_texts, ascii_texts)
def test_rouge_scores_of_ascii_are_those_of_rouge_score_whatever_the_signs(generated, reference):
    test_rouge_scores_are_those_of_rouge_score_with_stemmer_times_100.hypothesis.inner_test(
        generated, reference
    )


@pytest.mark.parametrize(
    ("generated", "reference", "score"),
    [
        ("轮船中午离开了港口", "轮船中午离开了港口", 100.0),
        ("轮船\uff0c中午", "轮船晚上", 50.0),
        ("пароход вышел из гавани", "пароход вышел в море", 50.0),
        ("Пароход", "пароход", 100.0),
        ("café noir", "cafe noir", 50.0),
        ("हिन्दी में", "हिन्दी से", 50.0),
        ("สวัสดี", "สวัสดี!", 100.0),
        ("한국어 문장", "한국어 글", 50.0),
        ("カタ", "カナ", 50.0),
        ("می‌روم خانه", "می‌روم", 200 / 3),
        ("🚢", "🚢", 0.0),  # no words
    ],
)
def test_words_of_any_script_are_compared(generated, reference, score):
    assert rouge_l(generated, reference) == pytest.approx(score)
