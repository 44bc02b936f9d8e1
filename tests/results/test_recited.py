"""The number of passages that are recited further than unseen text: its exact test, by simulation
and by counting.
"""

import math
from itertools import combinations

import numpy as np
import pandas as pd
import pytest

from tfidf_tune.probe import true_positive_rate
from tfidf_tune.results.intervals import holm
from tfidf_tune.results.positive_control import positive_control
from tfidf_tune.results.recited import (
    chance_of,
    false_alarm_of_auc,
    least_noticeable,
    recited_further,
)
from tfidf_tune.results.table import scores_table


def table(lms, repeats=40, length=128):
    return pd.DataFrame({"lms": lms, "repeats": repeats, "length": length})


def test_the_p_value_counts_the_orders_of_exchangeable_passages():
    n = 4
    m = 5
    c = 1
    for k in range(n + 1):
        # Which of the n + m places, the highest first, the targets have.
        orders = list(combinations(range(n + m), n))
        hits = 0
        for places in orders:
            controls = sorted(set(range(n + m)) - set(places))
            hits += sum(place < controls[c] for place in places) >= k
        assert chance_of(k, n, m, c) == pytest.approx(hits / len(orders)), k


def test_the_threshold_is_the_one_of_the_true_positive_rate_and_ties_count_against():
    rng = np.random.default_rng(0)
    for num_controls in (7, 99, 100, 250):
        controls = rng.integers(0, 12, num_controls)
        targets = rng.integers(0, 15, 60)
        found = recited_further(table(targets), pd.Series(controls))
        assert found.num_allowed == num_controls // 100
        share = true_positive_rate(targets.astype(float), controls.astype(float))
        assert found.all.num_above / 60 == pytest.approx(share)
    found = recited_further(table([3] * 20), pd.Series([3] * 20))
    assert (found.threshold, found.all.num_above, found.number) == (3, 0, 0)


def test_other_passages_do_not_hide_those_that_are_recited():
    rng = np.random.default_rng(1)
    controls = pd.Series(rng.integers(1, 6, 100))
    recited = [30] * 23
    others = rng.integers(1, 5, 77).tolist()
    found = recited_further(table(recited + others, [40] * 23 + [1] * 77), controls)
    assert found.number == 23
    assert {test.copies: test.num_above for test in found.tests} == {"all": 23, "1": 0, "40": 23}
    assert [test.is_rejected for test in found.tests] == [True, False, True]
    # Few of many, which only their own tier shows.
    found = recited_further(
        table([30] * 4 + rng.integers(1, 5, 396).tolist(), [40] * 4 + [1] * 396), controls
    )
    assert not found.all.is_rejected
    assert found.number == 4


def test_tiers_are_powers_of_two_and_unknown_numbers_are_one():
    repeats = [1, 2, 3, 4, 7, 8, np.nan, 0]
    found = recited_further(table(range(8), repeats), pd.Series([9] * 10))
    assert [test.copies for test in found.tests] == ["all", "unknown", "1", "2 to 3", "4 to 7", "8"]
    assert [test.num_targets for test in found.tests] == [8, 2, 1, 2, 2, 1]


def test_the_least_number_that_would_be_noticed_is_rejected_and_one_less_is_not():
    for num_targets, num_controls in ((23, 100), (24, 24), (100, 100), (12, 300)):
        number = least_noticeable(num_targets, num_controls)
        for above, rejected in ((number, True), (number - 1, False)):
            lms = [9] * above + [0] * (num_targets - above)
            controls = pd.Series(
                [*[10] * (num_controls // 100), *[5] * (num_controls - num_controls // 100)]
            )
            assert recited_further(table(lms), controls).all.is_rejected == rejected
    assert least_noticeable(1, 3) is None


def test_few_audits_of_unseen_text_say_that_it_is_recited():
    """At most 5 % by construction: of 400 draws at most 33 with a probability of 0.998."""
    rng = np.random.default_rng(2)
    alarms = 0
    for _ in range(400):
        lms = rng.geometric(0.4, 148)
        repeats = rng.choice([1, 2, 5, 40], 48)
        alarms += recited_further(table(lms[:48], repeats), pd.Series(lms[48:])).number > 0
    assert alarms <= 33


def test_p_values_are_corrected_for_all_tests():
    lms = [9, 9, 9, 0, 0, 0, 9, 0]
    repeats = [1, 1, 1, 1, 2, 2, 40, 40]
    controls = pd.Series([5] * 20)
    found = recited_further(table(lms, repeats), controls)
    raw = [chance_of(k, n, 20, 0) for k, n in ((4, 8), (3, 4), (0, 2), (1, 2))]
    assert [test.p_value for test in found.tests] == pytest.approx(holm(raw))
    assert found.all.expected == pytest.approx(8 / 21)


def test_targets_that_cannot_go_above_the_threshold_are_in_no_test_and_are_named_if_recited():
    controls = pd.Series([5] * 20)
    # Of 5 tokens, as many as the threshold, nothing can be above it; of 6 it can.
    found = recited_further(table([5, 2, 6, 2, 4], length=[5, 5, 6, 6, 4]), controls)
    assert (found.threshold, found.all.num_targets, found.all.num_above, found.num_hidden) == (
        5,
        2,
        1,
        2,
    )


def test_without_controls_or_targets_nothing_is_said():
    assert recited_further(table([1, 2]), pd.Series([], dtype=float)) is None
    assert recited_further(table([]), pd.Series([1])) is None


def test_the_false_alarm_rate_of_an_auc_is_that_of_draws():
    rng = np.random.default_rng(3)
    for limit, n, m in ((0.5, 20, 30), (0.55, 24, 24), (0.6, 100, 100)):
        draws = rng.random((4000, n + m))
        wins = (draws[:, :n, None] > draws[:, None, n:]).mean(axis=(1, 2))
        rate = (wins > limit).mean()
        assert false_alarm_of_auc(limit, n, m) == pytest.approx(
            rate, abs=4 * math.sqrt(0.25 / 4000)
        )


def test_a_model_that_predicts_worse_than_chance_shows_nothing():
    def state(nll, random_kind=None):
        rows = [(0, "vocab_size", "model", "", math.nan, 1000.0, 1.0)]
        if random_kind is not None:
            rows.append((0, "is_random", random_kind, "c0", math.nan, 1.0, 1.0))
        for number in range(10):
            unit = f"c{number}"
            values = {"nll_with_copy": nll - 1, "nll_without_copy": nll, "unigram_nll": 5.0}
            rows += [
                (0, name, "copy likelihoods", unit, math.nan, value, 1.0)
                for name, value in values.items()
            ]
            values = {"num_read_with_copy": 30, "num_read_without_copy": 1, "num_to_read": 48}
            rows += [
                (0, name, "copy text", unit, math.nan, float(value), 1.0)
                for name, value in values.items()
            ]
        made = positive_control(scores_table(rows), 0)
        return made.state, made.problem

    assert state(math.log(1000) - 0.1) == ("shown", "")
    found, problem = state(math.log(1000) + 0.1)
    assert found == "not shown"
    assert (
        "its NLL of unseen text is 7.01 nats a token, and 6.91 if all tokens were equally probable"
        in problem
    )
    # Tokens drawn at random are less probable than that under every model that knows text.
    assert state(math.log(1000) + 0.1, random_kind="control") == ("shown", "")
    assert state(math.log(1000) + 0.1, random_kind="target")[0] == "not shown"
