"""Prompts of the positive control, and its exact test."""

import itertools

import numpy as np
import pytest

from tfidf_tune.probe.positive_control import (
    NUM_CONTROLS,
    control_prompts,
    sign_flip_p_value,
    unigram_nll,
)

BLANK = [900]


def passages(number, length=256, num_prompt=32):
    return [
        (f"control-{n:04d}", list(range(n * 1000, n * 1000 + length)), num_prompt)
        for n in range(number)
    ]


def test_each_of_ten_controls_is_asked_for_with_and_without_its_copy():
    prompts = control_prompts(passages(12), BLANK, None)
    assert len(prompts) == 2 * NUM_CONTROLS
    for n in range(NUM_CONTROLS):
        shown, plain = prompts[2 * n : 2 * n + 2]
        ids = list(range(n * 1000, n * 1000 + 256))
        assert (shown.prompt_ids, shown.reference_ids) == (
            [*ids[:80], *BLANK, *ids[:32]],
            ids[32:80],
        )
        assert (plain.prompt_ids, plain.reference_ids) == (ids[:32], ids[32:80])
        assert (shown.has_copy, plain.has_copy) == (True, False)


@pytest.mark.parametrize(
    ("length", "positions", "num_read"),
    [
        (256, 161, 48),  # 32 + 48 + 1 + 32 + 48
        (256, 160, 47),
        (256, 97, 16),
        (256, 96, None),
        (40, None, 8),  # what the passage has left
        (40, 81, 8),
        (40, 80, None),
    ],
)
def test_less_is_read_where_the_context_is_small(length, positions, num_read):
    prompts = control_prompts(passages(2, length), BLANK, positions)
    found = {len(prompt.reference_ids) for prompt in prompts if prompt.has_copy}
    assert found == ({num_read} if num_read else set())
    assert sum(not prompt.has_copy for prompt in prompts) == 2
    if num_read and positions:
        longest = max(len(prompt.prompt_ids) + len(prompt.reference_ids) for prompt in prompts)
        assert longest <= positions


def test_passages_with_the_longest_rest_are_chosen():
    short = [(f"short-{n}", list(range(40)), 32) for n in range(9)]
    chosen = {prompt.passage_id for prompt in control_prompts([*short, *passages(3)], BLANK, None)}
    assert {"control-0000", "control-0001", "control-0002"} < chosen
    assert len(chosen) == 10


def test_the_p_value_is_that_of_all_choices_of_signs():
    rng = np.random.default_rng(0)
    for differences in (
        rng.normal(0.3, 1, 8),
        rng.integers(-2, 4, 10).astype(float),
        np.zeros(10),
        np.ones(10),
    ):
        sums = [
            sum(s * d for s, d in zip(signs, differences, strict=True))
            for signs in itertools.product((1, -1), repeat=len(differences))
        ]
        expected = np.mean([value >= sum(differences) - 1e-9 for value in sums])
        assert sign_flip_p_value(differences) == expected
    assert sign_flip_p_value([1] * 10) == 1 / 1024
    assert sign_flip_p_value([0] * 10) == 1
    assert sign_flip_p_value([0.1] * 9 + [-0.05]) < 0.01 < sign_flip_p_value([1.0] * 5 + [-0.5] * 5)


def test_the_unigram_model_is_that_of_the_frequencies():
    assert unigram_nll(np.array([1, 2]), {1: 3, 2: 1}) == pytest.approx(
        (np.log(4 / 3) + np.log(4)) / 2
    )
