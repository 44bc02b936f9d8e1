import itertools
import math

import numpy as np
import pytest
from helpers.fakes.results import grown_records, record, replace, results_of
from scipy import stats

from research.frontier import trace_frontiers, verdict
from research.seeds import SeedEstimate, over_seeds

DIRECTIONS = {"less": (-3.0, -1.0), "same": (-1.0, 1.0), "more": (1.0, 3.0)}
SAID = (
    "better",
    "recites less, perplexity unclear",
    "recites less, perplexity higher",
    "LMS unclear, perplexity lower",
    "no difference shown",
    "LMS unclear, perplexity higher",
    "recites more, perplexity lower",
    "recites more, perplexity unclear",
    "worse",
)


def trace(records, **options):
    return trace_frontiers(results_of(list(records)), **options)


def operating(found, objective):
    """The operating point of an objective."""
    points = found.points
    return points[points["operating"] & (points["objective"] == objective)].iloc[0]


def differences(found, at="operating points"):
    return list(found.differences[found.differences["at"] == at].itertuples())


def test_the_interval_of_a_mean_is_that_of_the_t_test():
    for number in (2, 3, 12):
        values = np.random.default_rng(number).normal(3, 2, number)
        test = stats.ttest_1samp(values, 0)
        expected = test.confidence_interval(0.95)
        found = over_seeds(values.tolist())
        assert found == pytest.approx(
            (values.mean(), expected.low, expected.high, number, test.pvalue), rel=1e-9
        )
    for values, mean in (([3.0], 3.0), ([3.0, math.inf], math.inf), ([], math.nan)):
        assert over_seeds(values) == pytest.approx(
            (mean, math.nan, math.nan, len(values), math.nan), nan_ok=True
        )
    assert over_seeds([0.0] * 3) == (0.0, 0.0, 0.0, 3, 1.0)  # equal values: free of rounding
    assert over_seeds([0.1] * 3).p_value == 0
    assert over_seeds([0.1] * 3).low == over_seeds([0.1] * 3).high == pytest.approx(0.1)


def test_the_verdicts():
    pairs = itertools.product(DIRECTIONS.values(), repeat=2)
    for lms, perplexity, said in (
        *((*ends, said) for ends, said in zip(pairs, SAID, strict=True)),
        # An end at 0 is no direction, but leaves a perplexity not higher.
        (DIRECTIONS["less"], (-1.0, 0.0), "better"),
        (DIRECTIONS["less"], (0.0, 1.0), "recites less, perplexity unclear"),
        (DIRECTIONS["more"], (0.0, 1.0), "worse"),
        (DIRECTIONS["more"], (-1.0, 0.0), "recites more, perplexity unclear"),
        ((-1.0, 0.0), DIRECTIONS["less"], "LMS unclear, perplexity lower"),
        ((0.0, 1.0), DIRECTIONS["more"], "LMS unclear, perplexity higher"),
        ((0.0, 0.0), (0.0, 0.0), "no difference shown"),
        ((math.nan, math.nan), DIRECTIONS["less"], "no verdict: a run diverged"),
        (DIRECTIONS["less"], (math.nan, math.nan), "no verdict: a run diverged"),
    ):
        assert (
            verdict(*(SeedEstimate(sum(ends) / 2, *ends, 5, 0.049) for ends in (lms, perplexity)))
            == said
        )
    less, more, above = (
        SeedEstimate(mean, mean - 1, mean + 1, 5, p) for mean, p in ((-2, 0), (2, 0), (2, 0.05))
    )
    assert verdict(less, above) == "recites less, perplexity unclear"  # not after correction
    assert verdict(above, more) == "LMS unclear, perplexity higher"


def test_each_objective_is_compared_at_the_learning_rate_of_its_own_lowest_perplexity():
    rates = {
        "CE": [(1e-4, 9, 30.0), (1e-3, 20, 20.0), (1e-2, 40, 25.0)],
        "B": [(1e-4, 5, 22.0), (1e-3, 9, 24.0)],
    }
    records = []
    for name, points in rates.items():
        for rate, lms, perplexity in reversed(points):
            for seed in (0, 1):
                made = record(name, lms + seed, perplexity, learning_rate=rate, seed=seed)
                records.append(made)
    found = trace(records)
    assert found.points["learning_rate"].tolist() == [1e-4, 1e-3, 1e-2, 1e-4, 1e-3]
    chosen = [operating(found, name) for name in ("CE", "B")]
    assert [(one["learning_rate"], one["range_end"]) for one in chosen] == [
        (1e-3, None),
        (1e-4, "lowest"),
    ]
    (one,) = differences(found)
    assert (one.learning_rate, one.reference_rate, one.lms) == (1e-4, 1e-3, -15.0)
    equal = [
        (one.learning_rate, one.reference_rate, one.lms)
        for one in differences(found, "equal rates")
    ]
    assert equal == [(1e-4, 1e-4, -4.0), (1e-3, 1e-3, -11.0)]


@pytest.mark.parametrize("log_perplexity", [math.inf, 2000.0])
def test_a_learning_rate_of_which_a_run_diverged_is_never_chosen(log_perplexity):
    found = trace(
        [
            *(record(lms=5.0, perplexity=20.0, seed=seed, learning_rate=1e-3) for seed in (0, 1)),
            record(lms=0.0, perplexity=15.0, seed=0, learning_rate=1e-2),
            record(lms=0.0, log_perplexity=log_perplexity, seed=1, learning_rate=1e-2),
            *(
                record("B", lms=9.0, perplexity=21.0, seed=seed, learning_rate=1e-2)
                for seed in (0, 1)
            ),
        ]
    )
    chosen = operating(found, "CE")
    assert chosen[["learning_rate", "range_end", "on_front"]].tolist() == [1e-3, "lowest", True]
    assert found.points["finite"].tolist() == [True, False, True]
    if math.isinf(log_perplexity):
        (one,) = differences(found, "equal rates")
        assert (one.verdict, math.isnan(one.perplexity)) == ("no verdict: a run diverged", True)


def test_lms_at_the_baselines_perplexity_is_linear_in_its_logarithm():
    found = trace(
        [
            record("CE", 20.0, 20.0),
            record("B", 2.0, 40.0, learning_rate=1e-4),
            record("B", 6.0, 10.0, learning_rate=1e-3),
            record("B", 9.0, 40.0, learning_rate=1e-2),
            record("never", 2.0, 21.0),
            record("leaps", 2.0, 19.0),
            record("leaps", 2.0, log_perplexity=math.inf, learning_rate=1e-2),
        ]
    )
    lms = [operating(found, name)["lms_at_baseline"] for name in ("CE", "B", "never", "leaps")]
    # B: halfway in the logarithm, on the side of the lower learning rates.
    assert lms == pytest.approx([20.0, 4.0, math.nan, math.nan], nan_ok=True)


def test_of_a_runs_checkpoints_the_last_one_counts():
    early = [replace(one, progress=50, lms=99.0, log_perplexity=9.0) for one in grown_records()]
    expected = trace(grown_records())
    for records in ([*early, *grown_records()], [*grown_records(), *early]):
        found = trace(records)
        assert found.points.equals(expected.points)
        assert found.differences.equals(expected.differences)
    with pytest.raises(ValueError, match="two runs are both Tiny, CE"):  # a training of its own
        trace([replace(early[0], training_seconds=1.0), *grown_records()])


def test_runs_that_lack_something_are_left_out_and_named():
    lacking = [
        record("B", seed=1, progress=50),
        record("B", seed=2, lms=None),
        record("B", seed=3, lms=None, log_perplexity=None, asked={}),
    ]
    found = trace([record(), record("B"), *lacking])
    assert found.left_out == (
        "Tiny, B, lr 0.001, seed 1: evaluated at 50 % of training at most, others at 100 %",
        "Tiny, B, lr 0.001, seed 2: LMS not measured",
        "Tiny, B, lr 0.001, seed 3: LMS and perplexity not measured",
    )
    assert operating(found, "B")["seeds"] == (0,)
