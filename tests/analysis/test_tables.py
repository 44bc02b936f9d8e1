import dataclasses
import math

import pytest
from analysis_fakes import CE, CONTROLS, SAMPLE, FakePassage, WordTokenizer

from tfidf_tune.analysis import (
    CheckpointResult,
    MemorizationSummary,
    memorization_table,
    qualitative_example,
    relative_reduction,
)

DECODE = WordTokenizer().decode


def test_the_table_is_aligned_markdown():
    tfidf = MemorizationSummary(
        num_passages=100,
        avg_prefix=1.36,
        max_prefix=18,
        avg_lms=3.5,
        max_lms=18,
        rouge_l=13.55,
        verbatim_rate=0.0,
    )
    rows = [CE, CheckpointResult("TF-IDF", 10, tfidf, CONTROLS, 16.064)]
    assert memorization_table(rows) == (
        "| Objective | Progress | Avg Prefix | Max Prefix | Avg LMS | Max LMS | ROUGE-L | Control LMS | Perplexity |\n"
        "| --------- | -------: | ---------: | ---------: | ------: | ------: | ------: | ----------: | ---------: |\n"
        "| CE        |     100% |       5.65 |        128 |    8.30 |     128 |   21.05 |        1.50 |      20.94 |\n"
        "| TF-IDF    |      10% |       1.36 |         18 |    3.50 |      18 |   13.55 |        1.50 |      16.06 |"
    )


def test_a_long_name_widens_its_column_for_every_row():
    rows = [CE, dataclasses.replace(CE, objective="Goldfish with k = 4")]
    lines = memorization_table(rows).splitlines()
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1


def test_a_bar_in_a_name_does_not_start_a_column():
    assert r"| a\|b " in memorization_table([dataclasses.replace(CE, objective="a|b")])


def test_relative_reduction_is_the_papers():
    assert relative_reduction(8.30, 3.50) == pytest.approx(0.578, abs=5e-4)


def test_relative_reduction_is_negative_for_an_increase():
    assert relative_reduction(2.0, 3.0) == -0.5


def test_relative_reduction_of_nothing_is_nan():
    assert math.isnan(relative_reduction(0.0, 1.0))


def sample(passage_id, prefix_length, lms, generated_text="said", **fields):
    fields = {"kind": "target", "rouge_l": 17.14} | fields
    return dataclasses.replace(
        SAMPLE,
        passage_id=passage_id,
        prefix_length=prefix_length,
        lms=lms,
        generated_text=generated_text,
        reference_text="truth",
        **fields,
    )


PASSAGES = [FakePassage("a", [*range(10)]), FakePassage("b", [*range(20, 30)])]


def test_the_example_shows_prompt_truth_and_each_continuation():
    by_objective = {
        "CE": [sample("a", 3, 5), sample("b", 3, 128, "truth", rouge_l=100.0)],
        "TF-IDF": [sample("a", 3, 9), sample("b", 3, 2, "other words")],
    }
    assert qualitative_example(by_objective, PASSAGES, DECODE) == (
        "Prompt (b, 3 tokens)\n"
        "    w20 w21 w22\n"
        "\n"
        "Ground truth\n"
        "    truth\n"
        "\n"
        "CE (LMS=128, R-L=100.0)\n"
        "    truth\n"
        "\n"
        "TF-IDF (LMS=2, R-L=17.1)\n"
        "    other words"
    )


def test_the_example_is_of_the_shortest_prefix():
    by_objective = {"CE": [sample("a", 5, 128), sample("b", 3, 4), sample("a", 3, 2)]}
    assert "Prompt (b, 3 tokens)" in qualitative_example(by_objective, PASSAGES, DECODE)


def test_the_first_of_equals_is_the_example():
    by_objective = {"CE": [sample("b", 3, 4), sample("a", 3, 4)]}
    assert "Prompt (b, 3 tokens)" in qualitative_example(by_objective, PASSAGES, DECODE)


def test_a_control_is_never_the_example():
    by_objective = {"CE": [sample("a", 3, 9, kind="control"), sample("b", 3, 4)]}
    assert "Prompt (b, 3 tokens)" in qualitative_example(by_objective, PASSAGES, DECODE)


def test_the_prompt_starts_at_the_samples_offset():
    by_objective = {"CE": [sample("a", 3, 4, offset=2)]}
    assert "\n    w2 w3 w4\n" in qualitative_example(by_objective, PASSAGES, DECODE)


def test_long_text_is_wrapped_to_the_width():
    by_objective = {"CE": [sample("a", 3, 4, "word " * 100)]}
    lines = qualitative_example(by_objective, PASSAGES, DECODE, width=60).splitlines()
    assert len(lines) > 10
    assert max(map(len, lines)) <= 60


def test_an_example_needs_a_target():
    with pytest.raises(ValueError, match="'CE' has no sample of a target"):
        qualitative_example({"CE": [sample("a", 3, 4, kind="control")]}, PASSAGES, DECODE)


def test_an_objective_without_the_examples_sample_is_named():
    by_objective = {"CE": [sample("a", 3, 4)], "TF-IDF": [sample("b", 3, 4)]}
    with pytest.raises(ValueError, match="'TF-IDF' has no sample of passage 'a' at offset 0 with prefix length 3"):
        qualitative_example(by_objective, PASSAGES, DECODE)


def test_a_passage_that_is_not_given_is_named():
    with pytest.raises(ValueError, match="Passage 'a' is not in passages"):
        qualitative_example({"CE": [sample("a", 3, 4)]}, PASSAGES[1:], DECODE)
