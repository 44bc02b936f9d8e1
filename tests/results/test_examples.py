import dataclasses

import pytest
from helpers.fakes.runs import controls, decode, evaluation, results, run, sample, targets
from hypothesis import given
from hypothesis import strategies as st

from tfidf_tune.probe import longest_memorized_substring
from tfidf_tune.results.examples import recitation_examples, recited_pieces


def generated(ids, reference, decode=decode, text=None):
    return dataclasses.replace(
        sample(),
        generated_ids=ids,
        reference_ids=reference,
        generated_text=decode(ids) if text is None else text,
        reference_text=decode(reference),
        lms=longest_memorized_substring(ids, reference),
    )


@given(st.lists(st.integers(0, 5), max_size=12), st.lists(st.integers(0, 5), max_size=12))
@pytest.mark.parametrize("decoder", [decode, None, lambda ids: "a different tokenizer"])
def test_the_pieces_are_the_continuation_and_the_marked_one_is_in_the_reference(
    decoder, ids, reference
):
    one = generated(ids, reference)
    pieces = recited_pieces(one, decoder)
    assert "".join(text for text, _ in pieces) == one.generated_text
    assert all(text for text, _ in pieces)
    marked = [text for text, recited in pieces if recited]
    assert len(marked) == (one.lms > 0)
    for text in marked:
        assert len(text.split()) == one.lms
        assert f" {' '.join(text.split())} " in f" {one.reference_text} "


def checkpoints(ce, tfidf):
    made = results(run("CE", [evaluation(samples=ce)]), run("TF-IDF", [evaluation(samples=tfidf)]))
    return dict(zip(("CE", "TF-IDF"), made.checkpoints, strict=True))


def examples(*samples):
    return recitation_examples("Tiny", checkpoints(*samples))


def test_the_target_recited_most_and_a_median_one_are_shown():
    most, median = examples(
        [*targets(2, 8, 4), *controls(8, 8)], [*targets(1, 3, 0), *controls(1, 1)]
    )
    assert most.title == "Tiny: target-1 from its first 32 tokens (recited most under CE)"
    assert most.prompt == "prompt of target-1"
    assert most.truth == decode(range(100, 108))
    assert [(one.label, one.scores) for one in most.continuations] == [
        ("CE", "LMS 8, ROUGE-L 100.0"),
        ("TF-IDF", "LMS 3, ROUGE-L 37.5"),
    ]
    assert most.continuations[1].pieces == (("w100 w101 w102", True), (" w7 w7 w7 w7 w7", False))
    assert "target-2" in median.title
    assert "(a median one under CE)" in median.title


def test_the_shortest_prefix_is_shown_and_an_offset_named():
    samples = [*targets(8, 8, prefix_length=50), *targets(1, 2)]
    assert "target-1 from its first 32 tokens" in examples(samples, samples)[0].title
    samples = [sample("a", 3, offset=16)]
    (example,) = examples(samples, samples)  # one target is one example
    assert example.title == "Tiny: a from its tokens 17 to 48 (recited most under CE)"
    assert examples(controls(1), controls(1)) == []
