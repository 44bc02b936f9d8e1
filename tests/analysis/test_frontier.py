import itertools
import math

import numpy as np
import pytest
from frontier_fakes import grown_records, record, replace, results_of, seeds
from scipy import stats

from tfidf_tune.analysis._frontier import trace_frontiers
from tfidf_tune.analysis._over_seeds import (
    BETTER,
    NO_DIFFERENCE,
    VERDICTS,
    WORSE,
    SeedEstimate,
    over_seeds,
    verdict,
)

LESS, SAME, MORE = (-3.0, -1.0), (-1.0, 1.0), (1.0, 3.0)


def estimate(low, high, num_seeds=5):
    return SeedEstimate((low + high) / 2, low, high, num_seeds)


def traced(records, **options):
    (frontier,) = trace_frontiers(results_of(records), **options)
    return frontier


def curve(frontier, objective):
    (found,) = (one for one in frontier.curves if one.objective == objective)
    return found


@pytest.mark.parametrize("number", [2, 3, 5, 12])
def test_the_interval_of_a_mean_is_that_of_the_t_test(number):
    values = np.random.default_rng(number).normal(3, 2, number)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    got = over_seeds(values.tolist())
    assert got.mean == pytest.approx(values.mean(), rel=1e-12)
    assert (got.low, got.high) == pytest.approx((expected.low, expected.high), rel=1e-12)
    assert got.num_seeds == number


def test_a_single_seed_and_one_that_is_not_finite_have_no_interval():
    assert over_seeds([3.0]) == SeedEstimate(3.0, None, None, 1)
    assert over_seeds([3.0, math.inf]) == SeedEstimate(math.inf, None, None, 2)


def test_equal_values_have_an_interval_without_width_free_of_rounding():
    assert over_seeds([0.0] * 3) == SeedEstimate(0.0, 0.0, 0.0, 3)
    assert over_seeds([0.1] * 3).low == over_seeds([0.1] * 3).high == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("lms", "perplexity", "said"),
    [
        (LESS, LESS, BETTER),
        (LESS, SAME, "recites less, perplexity not told apart"),
        (LESS, MORE, "recites less, perplexity higher"),
        (SAME, LESS, "LMS not told apart, perplexity lower"),
        (SAME, SAME, NO_DIFFERENCE),
        (SAME, MORE, "LMS not told apart, perplexity higher"),
        (MORE, LESS, "recites more, perplexity lower"),
        (MORE, SAME, "recites more, perplexity not told apart"),
        (MORE, MORE, WORSE),
    ],
    ids=[f"{lms}-{perplexity}" for lms, perplexity in itertools.product(("less", "same", "more"), repeat=2)],
)
def test_the_nine_verdicts(lms, perplexity, said):
    assert verdict(estimate(*lms), estimate(*perplexity)) == said
    assert said in VERDICTS
    # The same from records: three pairs whose differences have these intervals' signs.
    spread = {LESS: (-2.1, -2.0, -1.9), SAME: (-1.0, 0.0, 1.0), MORE: (1.9, 2.0, 2.1)}
    other = seeds("B", [5 + x for x in spread[lms]], [3 + x / 10 for x in spread[perplexity]])
    (one,) = traced([*seeds("CE", [5, 5, 5], [3, 3, 3]), *other]).at_operating_points
    assert one.verdict == said


@pytest.mark.parametrize(
    ("lms", "perplexity", "said"),
    [
        (LESS, (0.0, 0.0), BETTER),
        (LESS, (-1.0, 0.0), BETTER),
        (LESS, (0.0, 1.0), "recites less, perplexity not told apart"),
        (MORE, (0.0, 0.0), WORSE),
        (MORE, (0.0, 1.0), WORSE),
        (MORE, (-1.0, 0.0), "recites more, perplexity not told apart"),
        ((-1.0, 0.0), LESS, "LMS not told apart, perplexity lower"),
        ((0.0, 1.0), MORE, "LMS not told apart, perplexity higher"),
        ((0.0, 0.0), (0.0, 0.0), NO_DIFFERENCE),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_an_end_at_0_is_no_direction_but_leaves_a_perplexity_not_higher(lms, perplexity, said):
    assert verdict(estimate(*lms), estimate(*perplexity)) == said


def test_differences_are_the_paired_t_test_of_shared_seeds():
    rng = np.random.default_rng(0)
    lms, logs = rng.normal(20, 5, (2, 6)), rng.normal(3, 0.1, (2, 6))
    ce, other = (seeds(name, lms[i], logs[i]) for i, name in enumerate(("CE", "B")))
    kept = [0, 2, 3, 5]  # of those that B has, CE lacks seed 4; B lacks seed 1
    (one,) = traced(
        [*(r for r in ce if r.checkpoint.seed != 4), *(r for r in other if r.checkpoint.seed != 1)]
    ).at_operating_points
    assert one.num_pairs == 4
    for got, values in ((one.lms, lms), (one.log_perplexity, logs)):
        expected = stats.ttest_rel(values[1, kept], values[0, kept]).confidence_interval(0.95)
        assert (got.low, got.high) == pytest.approx((expected.low, expected.high), rel=1e-9)
        assert got.mean == pytest.approx((values[1, kept] - values[0, kept]).mean(), rel=1e-9)
    assert one.reduction == pytest.approx(1 - lms[1, kept].mean() / lms[0, kept].mean())


def test_a_point_is_the_mean_over_seeds_the_perplexity_geometric():
    frontier = traced([record(lms=4.0, perplexity=10.0, seed=0), record(lms=8.0, perplexity=40.0, seed=1)])
    (point,) = curve(frontier, "CE").points
    assert (point.lms.mean, point.perplexity) == (6.0, pytest.approx(20.0))
    expected = stats.ttest_1samp([math.log(10), math.log(40)], 0).confidence_interval(0.95)
    assert point.log_perplexity.high == pytest.approx(expected.high)


def test_each_objective_is_compared_at_the_learning_rate_of_its_own_lowest_perplexity():
    rates = {"CE": [(1e-4, 9, 30.0), (1e-3, 20, 20.0), (1e-2, 40, 25.0)], "B": [(1e-4, 5, 22.0), (1e-3, 9, 24.0)]}
    records = [
        record(name, lms + seed, perplexity, learning_rate=rate, seed=seed)
        for name, points in rates.items()
        for rate, lms, perplexity in reversed(points)
        for seed in (0, 1)
    ]
    frontier = traced(records)
    assert [point.learning_rate for point in curve(frontier, "CE").points] == [1e-4, 1e-3, 1e-2]
    assert [(one.operating.learning_rate, one.range_end) for one in frontier.curves] == [(1e-3, None), (1e-4, "lowest")]
    (one,) = frontier.at_operating_points
    assert (one.learning_rate, one.reference_rate, one.lms.mean) == (1e-4, 1e-3, -15.0)
    assert one.log_perplexity.mean == pytest.approx(math.log(22 / 20))
    equal = [(one.learning_rate, one.reference_rate, one.lms.mean) for one in frontier.at_equal_rates]
    assert equal == [(1e-4, 1e-4, -4.0), (1e-3, 1e-3, -11.0)]


@pytest.mark.parametrize(
    ("perplexities", "chosen", "end"),
    [
        ((20.0, 20.0, 20.0), 1, "lowest"),
        ((30.0, 20.0, 20.0), 2, None),
        ((30.0, 25.0, 20.0), 3, "highest"),
        ((20.0,), 1, "only"),
    ],
    ids=["tie", "upper-tie", "falling", "single"],
)
def test_ties_go_to_the_lower_learning_rate_and_ends_are_flagged(perplexities, chosen, end):
    records = [record(perplexity=value, learning_rate=rate) for rate, value in enumerate(perplexities, 1)]
    (one,) = traced(records).curves
    assert (one.operating.learning_rate, one.range_end) == (chosen, end)


def test_the_operating_point_is_chosen_by_the_seeds_that_all_learning_rates_have():
    lucky = [record(seed=1, learning_rate=1e-3, log_perplexity=3.0)]  # a seed that is easy for all
    first = [record(seed=seed, learning_rate=2e-3, log_perplexity=log) for seed, log in enumerate((3.6, 2.9, 3.5))]
    (found,) = traced([*lucky, *first]).curves
    assert (found.operating.learning_rate, found.chosen_by) == (2e-3, (1,))
    assert found.operating.lms.num_seeds == 3

    assert found.on_front  # by that seed too
    start = record("Start", 99.0, learning_rate=None, seed=None, log_perplexity=4.0)
    assert curve(traced([*lucky, *first, start]), "CE").on_front  # what has no seed does not count

    diverged = [record(seed=1, learning_rate=4e-3, log_perplexity=math.inf)]
    (found,) = traced([*lucky, *first[:1], *diverged]).curves
    assert (found.operating.learning_rate, found.chosen_by) == (1e-3, ())  # no seed in common: each by its own


def test_a_single_learning_rate_has_no_second_table_and_a_single_seed_no_verdict():
    frontier = traced([record(), record("B", 2.0)])
    (one,) = frontier.at_operating_points
    assert (one.num_pairs, one.lms.low, one.verdict) == (1, None, "no verdict: fewer than two pairs")
    assert frontier.at_equal_rates == ()


def test_objectives_without_a_common_seed_have_no_pair():
    (one,) = traced([record(seed=0), record("B", seed=1)]).at_operating_points
    assert (one.num_pairs, one.lms, one.reduction) == (0, None, None)
    assert one.verdict == "no verdict: fewer than two pairs"


def test_runs_of_unknown_seed_and_learning_rate_are_paired():
    (one,) = traced(
        [record(seed=None, learning_rate=None), record("B", seed=None, learning_rate=None)]
    ).at_operating_points
    assert (one.num_pairs, one.learning_rate) == (1, None)


def test_at_an_lms_of_0_there_is_no_reduction():
    ce, other = seeds("CE", [0, 0], [3, 3]), seeds("B", [0, 0], [3, 3])
    (one,) = traced([*ce, *other]).at_operating_points
    assert (one.reduction, one.verdict, one.lms.low, one.lms.high) == (None, NO_DIFFERENCE, 0.0, 0.0)


@pytest.mark.parametrize("log_perplexity", [math.inf, 2000.0])
def test_a_learning_rate_of_which_a_run_diverged_is_never_chosen(log_perplexity):
    records = [
        *(record(lms=5.0, perplexity=20.0, seed=seed, learning_rate=1e-3) for seed in (0, 1)),
        record(lms=0.0, perplexity=15.0, seed=0, learning_rate=1e-2),
        record(lms=0.0, log_perplexity=log_perplexity, seed=1, learning_rate=1e-2),
        *(record("B", lms=9.0, perplexity=21.0, seed=seed, learning_rate=1e-2) for seed in (0, 1)),
    ]
    frontier = traced(records)
    ce = curve(frontier, "CE")
    assert (ce.operating.learning_rate, ce.range_end, ce.on_front) == (1e-3, "lowest", True)
    assert [point.finite for point in ce.points] == [True, False]
    if math.isinf(log_perplexity):
        assert [one.verdict for one in frontier.at_equal_rates] == ["no verdict: a run diverged"]


def test_where_everything_diverged_there_is_no_operating_point():
    frontier = traced([record(log_perplexity=math.inf), record("B")])
    assert curve(frontier, "CE").operating is None
    assert (frontier.at_operating_points, curve(frontier, "B").lms_at_baseline) == ((), None)
    assert not curve(frontier, "CE").on_front


def test_the_front_is_of_all_points_by_the_means():
    records = [
        record("CE", 20.0, 20.0),
        record("twin", 20.0, 20.0),  # equal points leave each other on it
        record("dominated by CE", 20.0, 21.0),
        record("dominated off an operating point", 10.0, 25.0),
        record("other", 9.0, 24.0, learning_rate=1e-2),
        record("other", 30.0, 19.0),
    ]
    on_front = {one.objective for one in traced(records).curves if one.on_front}
    assert on_front == {"CE", "twin", "other"}


def test_lms_at_the_baselines_perplexity_is_linear_in_its_logarithm():
    records = [
        record("CE", 20.0, 20.0),
        record("B", 2.0, 40.0, learning_rate=1e-4),
        record("B", 6.0, 10.0, learning_rate=1e-3),
        record("B", 9.0, 40.0, learning_rate=1e-2),
        record("never", 2.0, 21.0),
        record("leaps", 2.0, 19.0),
        record("leaps", 2.0, log_perplexity=math.inf, learning_rate=1e-2),
    ]
    frontier = traced(records)
    assert curve(frontier, "B").lms_at_baseline == pytest.approx(4.0)  # halfway in the logarithm, on the lower side
    assert curve(frontier, "CE").lms_at_baseline == 20.0
    assert curve(frontier, "never").lms_at_baseline is None
    assert curve(frontier, "leaps").lms_at_baseline is None


def test_references_are_the_baseline_and_what_is_named():
    frontier = traced(grown_records(), references=["Goldfish"])
    assert frontier.references == ("CE", "Goldfish")
    pairs = [(one.reference, one.objective) for one in frontier.at_operating_points]
    assert pairs == [("CE", "TF-IDF"), ("CE", "Goldfish"), ("Goldfish", "CE"), ("Goldfish", "TF-IDF")]
    assert len(frontier.at_equal_rates) == 3 * len(pairs)
    assert traced(grown_records(), baseline="TF-IDF").curves[0].objective == "TF-IDF"


def test_models_are_apart_and_may_lack_the_baseline():
    first, second = trace_frontiers(results_of([*grown_records(), *grown_records(("B", "C"), model="Other")]))
    assert [one.model for one in (first, second)] == ["Tiny", "Other"]
    assert (second.references[0], second.at_operating_points) == ("CE", ())
    assert [one.lms_at_baseline for one in second.curves] == [None, None]


def numbers(frontiers):
    """All but the tables of runs."""
    return [
        (
            *(one.model, one.left_out, one.at_operating_points, one.at_equal_rates),
            [
                (c.objective, c.on_front, c.lms_at_baseline, [(p.lms, p.log_perplexity) for p in c.points])
                for c in one.curves
            ],
        )
        for one in frontiers
    ]


def test_of_a_runs_checkpoints_the_last_one_counts():
    early = [replace(one, progress=50, lms=99.0, log_perplexity=9.0) for one in grown_records()]
    expected = numbers(trace_frontiers(results_of(grown_records())))
    assert numbers(trace_frontiers(results_of([*early, *grown_records()]))) == expected
    assert numbers(trace_frontiers(results_of([*grown_records(), *early]))) == expected
    with pytest.raises(ValueError, match="two runs are both Tiny, CE"):  # a training of its own
        trace_frontiers(results_of([replace(early[0], training_seconds=1.0), *grown_records()]))
    only_early = [one for one in early if one.checkpoint.run == ("Tiny", "CE", 1e-3, 0)]
    rest = [one for one in grown_records() if one.checkpoint.title != only_early[0].checkpoint.title]
    assert traced([*only_early, *rest]).left_out == (
        "Tiny, CE, lr 0.001, seed 0: evaluated at 50 % of training at most, others at 100 %",
    )


def test_runs_that_lack_something_are_left_out_and_named():
    lacking = [
        record("B", seed=1, progress=50),
        record("B", seed=2, lms=None),
        record("B", seed=3, lms=None, log_perplexity=None, asked={}),
    ]
    frontier = traced([record(), record("B"), *lacking])
    assert frontier.left_out == (
        "Tiny, B, lr 0.001, seed 1: evaluated at 50 % of training at most, others at 100 %",
        "Tiny, B, lr 0.001, seed 2: LMS not measured",
        "Tiny, B, lr 0.001, seed 3: LMS and perplexity not measured",
    )
    assert len(curve(frontier, "B").points[0].runs) == 1


@pytest.mark.parametrize(
    ("records", "options", "message"),
    [
        ([], {}, "there is no run to draw a frontier of"),
        ([record()], {"baseline": "B"}, "no run has the baseline 'B': there are CE"),
        ([record()], {"references": ["B"]}, "no run has the reference 'B': there are CE"),
        ([record(), record(lms=5.0)], {}, "two runs are both Tiny, CE, lr 0.001, seed 0"),
        ([record(), record("B", asked={"prompts": "x"})], {}, "Tiny, CE, .* and Tiny, B, .* cannot be compared"),
    ],
    ids=["none", "baseline", "reference", "twice", "asked"],
)
def test_what_cannot_be_traced_is_refused(records, options, message):
    with pytest.raises(ValueError, match=message):
        trace_frontiers(results_of(records), **options)


def test_what_was_asked_may_differ_between_models():
    other = [replace(one, model="Other", asked={"prompts": "x"}) for one in grown_records()]
    assert len(trace_frontiers(results_of([*grown_records(), *other]))) == 2
