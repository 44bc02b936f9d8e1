import math
import tracemalloc

import numpy as np
import pytest

from research.seeds import over_seeds_and_passages
from tfidf_tune.results import Interval, bootstrap_interval, holm, intervals
from tfidf_tune.results.intervals import ENOUGH_UNITS, MIN_UNITS


def ratio(after, before, axis=-1):
    return after.mean(axis) / before.mean(axis)


def mean(values, axis=-1):
    return values.mean(axis)


def difference(after, before, axis=-1):
    return after.mean(axis) - before.mean(axis)


def require_agrees(found, resamples):
    """Compare an interval and its p-value with 10,000 resamples that were made one at a time."""
    # Either side's share of 10,000 has a standard deviation of sqrt(0.025 * 0.975 / 10,000); both
    # are random.
    tolerance = 4 * math.sqrt(2 * 0.025 * 0.975 / 10_000)
    resamples = np.array(resamples)
    assert np.mean(resamples < found.low) == pytest.approx(0.025, abs=tolerance)
    assert np.mean(resamples > found.high) == pytest.approx(0.025, abs=tolerance)
    below = np.mean(resamples <= 0)  # varies more than the shares above: strict
    assert found.p_value / 2 == pytest.approx(min(below, 1 - below), abs=tolerance)


@pytest.mark.parametrize(("paired", "shift"), [(True, 0.25), (True, -0.25), (False, 4.0)])
def test_it_agrees_with_a_loop_over_resamples(paired, shift):
    rng = np.random.default_rng(1)
    before = rng.exponential(8.0, 30)
    after = before + shift + rng.exponential(1.0, 30) - 1
    rng = np.random.default_rng(2)
    resamples = []
    for _ in range(10_000):
        rows = rng.integers(30, size=30)
        other_rows = rows if paired else rng.integers(30, size=30)
        resamples.append(difference(after[rows], before[other_rows]))
    require_agrees(bootstrap_interval(difference, after, before, paired=paired), resamples)


def test_holms_correction_gives_published_values():
    # From R: p.adjust(p, "holm"), and statsmodels: multipletests(p, method="holm").
    for values, expected in (
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),
        ([0.4, 0.001, 0.4, 0.9], [1.0, 0.004, 1.0, 1.0]),
        ([0.02], [0.02]),
        ([math.nan, 0.02, 0.03], [math.nan, 0.04, 0.04]),  # a NaN does not count
        ([], []),
    ):
        assert holm(values) == pytest.approx(expected, nan_ok=True, abs=1e-15)


def two_way(rng, num_seeds, num_passages, of_seeds, of_passages, rest):
    """Differences of mean 0; those of passages are skewed, as recitation is."""
    passages = of_passages * (rng.exponential(size=num_passages) - 1)
    own = of_seeds * rng.normal(size=(num_seeds, 1)) + rest * rng.normal(
        size=(num_seeds, num_passages)
    )
    return passages + own


@pytest.mark.parametrize("num_controls", [0, 18])
def test_the_two_way_interval_agrees_with_a_loop(num_controls):
    rng = np.random.default_rng(1)
    values = two_way(rng, 4, 25, 0.5, 2.0, 1.0) + 0.7
    controls = two_way(rng, 4, num_controls, 0.5, 4.0, 1.0) if num_controls else np.zeros((4, 1))
    found = over_seeds_and_passages(values, controls if num_controls else None)
    draws = []
    of_seed = values.mean(1) - controls.mean(1)
    for _ in range(10_000):
        of_seeds = rng.standard_t(3) * np.std(of_seed, ddof=1) / 2
        chosen = [
            sample.mean(0)[rng.integers(sample.shape[1], size=sample.shape[1])]
            for sample in (values, controls)
        ]
        draws.append(of_seeds + np.mean(chosen[0]) - np.mean(chosen[1]))
    require_agrees(found, draws)
    assert (found.mean, found.num_seeds) == (pytest.approx(of_seed.mean()), 4)


def test_batches_bound_the_memory(monkeypatch):
    monkeypatch.setattr(intervals, "NUM_RESAMPLES", 300)  # three batches
    answers = np.random.default_rng(0).choice([0.0, 100.0], 10_570)
    tracemalloc.start()
    try:
        bootstrap_interval(ratio, answers, answers + 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6 * 8 * 2**20


def test_what_cannot_be_resampled_has_no_interval():
    for interval in (
        bootstrap_interval(mean, np.ones(0)),
        bootstrap_interval(mean, np.ones(1)),
        bootstrap_interval(ratio, np.ones(5), np.ones(1), paired=False),  # a single control
        # 1 / 0 in some resamples.
        bootstrap_interval(ratio, np.ones(4), np.array([0.0, 0.0, 0.0, 1.0])),
    ):
        assert (math.isnan(interval.low), math.isnan(interval.high), interval.significant) == (
            True,
            True,
            None,
        )


def test_significant_is_what_excludes_zero_and_an_end_of_zero_does_not():
    for low, high, significant in (
        (0.1, 0.2, "yes"),
        (-0.2, -0.1, "yes"),
        (-0.1, 0.1, "no"),
        (0.0, 0.1, "no"),
        (-0.1, 0.0, "no"),
    ):
        assert Interval(low, high, MIN_UNITS).significant == significant
        assert Interval(low, high, MIN_UNITS - 1).significant == "too few"
    assert (MIN_UNITS, ENOUGH_UNITS) == (10, 30)
    assert (
        bootstrap_interval(ratio, np.arange(1.0, 10), np.arange(1.0, 6), paired=False).num_units
        == 5
    )
