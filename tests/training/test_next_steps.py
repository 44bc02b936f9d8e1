"""The evaluation that a run prints at its end fits its passages."""

import pytest
from helpers.fakes.probe import a_passage

from tfidf_tune.training._next_steps import _task


@pytest.mark.parametrize(
    ("lengths", "task", "prefix_lengths"),
    [
        ((128, 101), "tfidf_memorization", []),
        ((128, 100), "tfidf_memorization_prefixes", [32, 50]),
        ((64,), "tfidf_memorization_prefixes", [32]),
        ((63,), "tfidf_memorization_prefixes", [31]),
    ],
)
def test_every_prompt_leaves_the_shortest_passage_tokens_to_recite(lengths, task, prefix_lengths):
    passages = [a_passage("target-0000", [7] * length) for length in lengths]

    assert _task(passages) == (task, prefix_lengths)
