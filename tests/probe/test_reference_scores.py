"""Membership scores with a reference model, against loops in plain Python."""

import math

import numpy as np
import pytest
import torch
from helpers.fakes.probe import random_ids, tiny_llama
from sklearn.metrics import roc_auc_score

from tfidf_tune.probe import membership_scores, reference_scores, token_likelihoods
from tfidf_tune.probe.membership_scores import error_zone, window_comparison

SIZES = (2, 3, 4, 6, 9, 13, 18, 25, 32, 40)
LENGTHS = (1, 2, 3, 5, 39, 40, 41, 130)


def squashed(value):
    return value / (1 + abs(value))


def wbc_by_loop(differences):
    sizes = [size for size in SIZES if size <= len(differences)]
    if len(differences) == 1:
        sizes = [1]
    shares = []
    means = []
    for size in sizes:
        num_positive = 0
        total = 0.0
        num_windows = len(differences) - size + 1
        for start in range(num_windows):
            window = sum(differences[start : start + size])
            if window > 0:
                num_positive += 1
            total += window / size
        shares.append(num_positive / num_windows)
        means.append(total / num_windows)
    share = sum(shares) / len(shares)
    if all(one == 1 for one in shares) or all(one == 0 for one in shares):
        share += squashed(sum(means) / len(means))
    return share


def error_zone_by_loop(differences, greedy):
    towards = 0.0
    away = 0.0
    num_errors = 0
    for difference, is_greedy in zip(differences, greedy, strict=True):
        if is_greedy:
            continue
        num_errors += 1
        if difference > 0:
            towards += difference
        else:
            away -= difference
    if num_errors < 2 or away == 0:
        return 2 + squashed(sum(differences) / len(differences))
    ratio = towards / away
    return ratio / (1 + ratio)


@pytest.mark.parametrize("shift", [-2.0, 0.0, 0.4, 2.0])
@pytest.mark.parametrize("length", LENGTHS)
def test_scores_equal_loops_over_windows_and_tokens(length, shift):
    rng = np.random.default_rng([length, int(10 * shift + 30)])
    for share_of_errors in (0.0, 0.1, 0.6, 1.0):
        differences = rng.normal(shift, 1, length)
        differences[rng.random(length) < 0.1] = 0.0
        greedy = rng.random(length) >= share_of_errors
        expected = wbc_by_loop(differences.tolist())
        assert window_comparison(differences) == pytest.approx(expected, rel=1e-12, abs=1e-12)
        expected = error_zone_by_loop(differences.tolist(), greedy.tolist())
        assert error_zone(differences, greedy) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_windows_by_hand():
    # Of two tokens: 1, -1, -4, -1. Of three: 0, -4, -2. Of four: -3, -2. A sum of 0 is not
    # positive, and no larger window fits.
    differences = np.array([1.0, 0.0, -1.0, -3.0, 2.0])
    assert window_comparison(differences) == pytest.approx((1 / 4 + 0 + 0) / 3)
    # The published sizes: of each, only the first window has a positive sum.
    differences = np.zeros(50)
    differences[0] = 1.0
    differences[-1] = -1.0
    expected = np.mean([1 / (50 - size + 1) for size in SIZES])
    assert window_comparison(differences) == pytest.approx(expected)


@pytest.mark.parametrize("length", LENGTHS)
def test_passages_at_the_ceiling_and_at_the_floor_are_ordered_and_pass_no_other(length):
    steps = np.full(length, 0.1)
    all_positive = [window_comparison(factor * steps) for factor in (1e-6, 1, 2, 1e4)]
    none_positive = [window_comparison(-factor * steps) for factor in (0, 1e-6, 1, 2, 1e4)]
    assert all_positive == sorted({*all_positive})
    assert none_positive == sorted({*none_positive}, reverse=True)
    assert all_positive[0] > 1
    assert all_positive[-1] < 2
    assert none_positive[0] == 0
    assert none_positive[-1] > -1
    if length > 2:  # some windows are positive, and others not
        differences = steps.copy()
        differences[0] = -1000.0
        differences[-1] = 1000.0
        assert 0 < window_comparison(differences) < 1
        differences = -differences
        assert 0 < window_comparison(differences) < 1


def test_the_order_at_the_ceiling_does_not_depend_on_the_length():
    scores = [window_comparison(np.full(length, 0.5)) for length in (1, 2, 30, 200)]
    assert scores == pytest.approx([1 + 0.5 / 1.5] * 4, rel=1e-12)


def test_the_error_zone_by_hand_and_in_the_order_of_the_ratio():
    greedy = np.array([False, True, False, False, True])
    differences = np.array([3.0, -100.0, -2.0, 1.0, 50.0])
    # P = 3 + 1, N = 2: the greedy tokens do not count.
    assert error_zone(differences, greedy) == pytest.approx(4 / 6)
    rng = np.random.default_rng(0)
    scores = []
    ratios = []
    for _ in range(40):
        differences = rng.normal(0.3, 1, 30)
        ratios.append(differences[differences > 0].sum() / -differences[differences < 0].sum())
        scores.append(error_zone(differences, np.zeros(30, bool)))
    assert np.argsort(scores).tolist() == np.argsort(ratios).tolist()


def test_passages_without_a_ratio_rank_above_all_others_by_their_mean_difference():
    def scored(differences, wrong):
        greedy = np.full(len(differences), True)
        greedy[wrong] = False
        return error_zone(np.array(differences), greedy)

    # The ratio of a passage that changed towards the text nearly everywhere.
    highest = scored([1e3, 1e3, 1e3, -1e-3], [0, 1, 2, 3])
    assert 0.999999 < highest < 1
    assert scored([-1.0, -2.0, 9.0], [0, 1]) == 0  # P = 0: only away from the text
    no_error = scored([0.5, 0.5, 2.0], [])
    one_error_towards = scored([0.5, 0.5, 2.0], [0])
    one_error_away = scored([-0.5, 1.5, 2.0], [0])
    none_away = scored([0.5, 0.5, 2.0], [0, 1])
    unchanged_at_errors = scored([0.0, 0.0, 3.0], [0, 1])
    # One order for all: each has a mean of 1.
    same = [no_error, one_error_towards, one_error_away, none_away, unchanged_at_errors]
    assert same == [2.5] * 5
    # Text that is as easy to the reference, or easier, comes last, but above all ratios.
    easy = scored([0.0, 0.0, 0.0], [])
    easier = scored([-1e3, -1e3, -1e3], [])
    assert highest < 1 < easier < easy == 2 < no_error < scored([0.5, 0.5, 2.1], []) < 3


def test_what_is_infinite_or_unknown_has_no_score():
    nll = np.array([1.0, math.inf, 2.0])
    reference_nll = np.array([2.0, math.inf, 2.0])
    scores = reference_scores(nll, reference_nll, np.array([False, False, True]))
    assert scores["reference_nll"] == math.inf
    assert math.isnan(scores["wbc"])
    assert math.isnan(scores["error_zone"])
    assert math.isnan(window_comparison(np.array([1.0, math.inf])))
    assert math.isnan(error_zone(np.array([1.0, -math.inf]), np.array([True, True])))
    assert list(reference_scores(nll[:1], reference_nll[:1], None)) == ["reference_nll", "wbc"]


def test_a_model_has_the_same_score_for_all_passages_against_itself():
    nll = np.array([1.0, 2.0, 0.5, 4.0])
    for greedy in ([True] * 4, [False] * 4, [True, False, True, False]):
        scores = reference_scores(nll, nll, np.array(greedy))
        assert (scores["wbc"], scores["error_zone"]) == (0, 2)


def test_what_a_tiny_model_was_trained_on_has_the_higher_scores():
    start = tiny_llama()
    trained = tiny_llama()
    members = [random_ids(48, seed) for seed in range(8)]
    others = [random_ids(48, seed) for seed in range(100, 116)]
    batch = torch.tensor(members)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3)
    trained.train()
    for _ in range(12):
        trained(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    texts = members + others
    rows = []
    for tokens, before in zip(
        token_likelihoods(trained, texts), token_likelihoods(start, texts), strict=True
    ):
        # Not all is recited, so that both scores are of their formulas.
        assert not tokens.greedy.all()
        rows.append(reference_scores(tokens.nll, before.nll, tokens.greedy))
    values = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    scores = membership_scores(values)
    assert list(scores) == ["WBC", "Error zone"]
    labels = [1] * len(members) + [0] * len(others)
    for attack, score in scores.items():
        assert roc_auc_score(labels, score) > 0.9, attack
    assert values["wbc"][len(members) :].max() < 1
    assert values["error_zone"].min() < 1
