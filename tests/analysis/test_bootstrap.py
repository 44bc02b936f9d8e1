import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t as student

from tfidf_tune.analysis import _bootstrap
from tfidf_tune.analysis._bootstrap import ENOUGH_UNITS, MIN_UNITS, Interval, bootstrap_interval


def ratio(after, before, axis=-1):
    return after.mean(axis) / before.mean(axis)


def mean(values, axis=-1):
    return values.mean(axis)


def slow_resamples(statistic, data, *, paired, seed):
    """The definition: one resample at a time."""
    rng = np.random.default_rng(seed)
    for _ in range(10_000):
        if paired:
            rows = rng.integers(len(data[0]), size=len(data[0]))
            yield statistic(*(values[rows] for values in data))
        else:
            yield statistic(*(values[rng.integers(len(values), size=len(values))] for values in data))


@pytest.mark.parametrize("paired", [True, False])
def test_it_agrees_with_a_loop_over_resamples(paired):
    rng = np.random.default_rng(1)
    before = rng.exponential(8.0, 30)
    data = (before * rng.uniform(0.2, 1.0, 30), before)
    interval = bootstrap_interval(ratio, *data, paired=paired)
    resamples = np.array(list(slow_resamples(ratio, data, paired=paired, seed=2)))
    # Either side's share of 10,000 has a standard deviation of sqrt(0.025 * 0.975 / 10,000); both are random.
    tolerance = 4 * math.sqrt(2 * 0.025 * 0.975 / 10_000)
    assert np.mean(resamples < interval.low) == pytest.approx(0.025, abs=tolerance)
    assert np.mean(resamples > interval.high) == pytest.approx(0.025, abs=tolerance)


def test_the_interval_covers_the_truth_at_the_nominal_rate(monkeypatch):
    monkeypatch.setattr(_bootstrap, "NUM_RESAMPLES", 1000)
    rng = np.random.default_rng(0)
    num_experiments = 1000
    covered = 0
    for _ in range(num_experiments):
        passage = rng.gamma(4.0, 2.0, 100)  # what the two objectives share
        before, after = passage + rng.gamma(2.0, 1.0, 100), 0.5 * passage + rng.gamma(2.0, 1.0, 100)
        interval = bootstrap_interval(ratio, after, before)
        covered += interval.low <= 6.0 / 10.0 <= interval.high
    tolerance = 3 * math.sqrt(0.95 * 0.05 / num_experiments)
    assert covered / num_experiments == pytest.approx(0.95, abs=tolerance)


@pytest.mark.parametrize(("num_units", "nominal"), [(MIN_UNITS, False), (12, False), (100, True)])
def test_where_nothing_changed_few_observations_are_called_significant_too_often(monkeypatch, num_units, nominal):
    """Percentiles of resampled means of normal noise lie at 1.96 standard errors, of variance / n and not / (n - 1)."""
    monkeypatch.setattr(_bootstrap, "NUM_RESAMPLES", 1000)
    rng = np.random.default_rng(0)
    num_experiments = 1500
    noise = rng.normal(size=(num_experiments, num_units))
    rate = np.mean([bootstrap_interval(mean, change).significant == "yes" for change in noise])
    expected = 2 * student.sf(1.96 * math.sqrt((num_units - 1) / num_units), num_units - 1)
    assert rate == pytest.approx(expected, abs=3 * math.sqrt(expected * (1 - expected) / num_experiments))
    band = 3 * math.sqrt(0.05 * 0.95 / num_experiments)
    assert rate < 0.05 + band if nominal else rate > 0.05 + band


def test_pairs_stay_together():
    before = np.random.default_rng(0).exponential(8.0, 20)
    paired = bootstrap_interval(ratio, before / 2, before)
    assert (paired.low, paired.high) == pytest.approx((0.5, 0.5), abs=1e-12)
    unpaired = bootstrap_interval(ratio, before / 2, before, paired=False)
    assert unpaired.high - unpaired.low > 0.1


def test_the_same_data_give_the_same_interval():
    values = np.random.default_rng(0).normal(size=50)
    assert bootstrap_interval(mean, values) == bootstrap_interval(mean, values)


def test_batches_do_not_change_the_interval(monkeypatch):
    values = np.random.default_rng(0).normal(size=50)
    whole = bootstrap_interval(mean, values)
    monkeypatch.setattr(_bootstrap, "_BATCH_ELEMENTS", 7 * 50)
    in_batches = bootstrap_interval(mean, values)
    assert (in_batches.low, in_batches.high) == pytest.approx((whole.low, whole.high), rel=1e-12)


def test_ten_thousand_questions_need_little_memory(monkeypatch):
    monkeypatch.setattr(_bootstrap, "NUM_RESAMPLES", 300)  # three batches
    answers = np.random.default_rng(0).choice([0.0, 100.0], 10_570)
    bootstrap_interval(mean, answers[:50])  # imports
    tracemalloc.start()
    try:
        bootstrap_interval(ratio, answers, answers + 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6 * 8 * 2**20


@pytest.mark.parametrize("num_values", [0, 1])
def test_less_than_two_observations_have_no_interval(num_values):
    assert bootstrap_interval(mean, np.ones(num_values)) is None


def test_a_single_control_gives_no_interval():
    assert (
        bootstrap_interval(lambda x, y, axis=-1: x.mean(axis) - y.mean(axis), np.ones(5), np.ones(1), paired=False)
        is None
    )


def test_a_ratio_to_zero_in_some_resamples_has_no_interval():
    assert bootstrap_interval(ratio, np.ones(4), np.array([0.0, 0.0, 0.0, 1.0])) is None


@pytest.mark.parametrize(
    ("low", "high", "significant"),
    [(0.1, 0.2, "yes"), (-0.2, -0.1, "yes"), (-0.1, 0.1, "no"), (0.0, 0.1, "no"), (-0.1, 0.0, "no")],
)
def test_significant_is_what_excludes_zero_and_an_end_of_zero_does_not(low, high, significant):
    assert Interval(low, high, ENOUGH_UNITS).significant == significant
    assert Interval(low, high, MIN_UNITS).significant == significant
    assert Interval(low, high, MIN_UNITS - 1).significant == "too few"


def test_an_interval_knows_its_observations_of_two_samples_the_fewer():
    assert bootstrap_interval(mean, np.arange(7.0)).num_units == 7
    assert bootstrap_interval(ratio, np.arange(1.0, 10), np.arange(1.0, 6), paired=False).num_units == 5


def test_a_point_is_an_interval_without_width_up_to_rounding():
    assert bootstrap_interval(mean, np.full(7, 0.1)).is_point
    assert Interval(0.0, 1e-17, 7).is_point
    assert not Interval(0.5, 0.5001, 7).is_point
    assert not Interval(0.0, 1e-6, 7).is_point


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12), st.floats(-100, 100))
@settings(max_examples=15, deadline=None)
def test_the_interval_of_a_mean_lies_within_the_data_and_moves_with_them(values, shift):
    data = np.array(values)
    interval = bootstrap_interval(mean, data)
    assert data.min() - 1e-9 <= interval.low <= interval.high <= data.max() + 1e-9
    moved = bootstrap_interval(mean, data + shift)
    assert (moved.low, moved.high) == pytest.approx((interval.low + shift, interval.high + shift), abs=1e-9)
