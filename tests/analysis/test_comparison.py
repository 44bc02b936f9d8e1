import dataclasses
import math

import numpy as np
import pytest
from run_fakes import BlockScore, answers, blocks, controls, evaluation, results, run, sample, summaries, targets

from tfidf_tune.analysis import _comparison
from tfidf_tune.analysis._comparison import compare_objectives
from tfidf_tune.analysis._measures import (
    ANSWER_MEASURES,
    CONTROL_LMS,
    LMS,
    MEASURES,
    PERPLEXITY,
    PREFIX_MATCH,
    ROUGE_L,
    SUMMARY_MEASURES,
)
from tfidf_tune.analysis._settings import Setting, group_results


def probed(*lms, **fields):
    return [evaluation(samples=targets(*lms), **fields)]


def setting(**evaluations):
    """The evaluations of each objective, one a seed, as a setting."""
    runs = [run(name, [one], seed=seed) for name, own in evaluations.items() for seed, one in enumerate(own)]
    made = results(*runs)
    names = [one.objective for one in made.checkpoints]
    return Setting("Tiny", {name: [at for at, own in enumerate(names) if own == name] for name in evaluations}, made)


def compare_measure(measure, baseline, other):
    made = setting(CE=baseline, other=other)
    (one,) = compare_objectives(made, "CE")
    return one.reductions.get(measure.name)


def value(measure, evaluations):
    made = setting(CE=evaluations)
    return made.value(measure, made.objectives["CE"])


def own_interval(measure, evaluations):
    made = setting(CE=evaluations)
    return _comparison.own_interval(made, measure, made.objectives["CE"])


def lms_floor(evaluations):
    made = setting(CE=evaluations)
    return _comparison.lms_floor(made, made.objectives["CE"])


def group_runs(runs, **options):
    return group_results(results(*runs), **options)


def compared(*runs, **options):
    """The comparisons of the only model."""
    baseline, (model,) = group_runs(runs, **options)
    return compare_objectives(model, baseline)


def test_the_reduction_is_the_papers():
    reduction = compare_measure(LMS, probed(2, 4, 6), probed(1, 2, 3))
    assert (reduction.baseline, reduction.other, reduction.reduction) == (4.0, 2.0, 0.5)
    assert reduction.num_units == 3


def test_an_increase_is_a_negative_reduction():
    assert compare_measure(LMS, probed(2, 2), probed(3, 3)).reduction == -0.5


def test_controls_do_not_count_as_targets():
    with_controls = [evaluation(samples=[*targets(4, 4), *controls(8, 8)])]
    assert compare_measure(LMS, with_controls, probed(2, 2)).reduction == 0.5
    assert value(CONTROL_LMS, with_controls) == 8.0


def test_every_measure_reads_its_own_numbers():
    samples = [
        dataclasses.replace(sample("a", 3, length=8), rouge_l=10.0, prefix_match=1),
        dataclasses.replace(sample("b", 5, length=8), rouge_l=30.0, prefix_match=2),
    ]
    one = evaluation(samples=samples, blocks=blocks(20.0), summaries=summaries(40, 20), answers=answers(100, 50))
    values = {measure.name: value(measure, [one]) for measure in MEASURES}
    assert values == pytest.approx(
        {
            "Avg LMS": 4.0,
            "Avg Prefix": 1.5,
            "ROUGE-L": 20.0,
            "Perplexity": 20.0,
            "Summary ROUGE-1": 30.0,
            "Summary ROUGE-2": 15.0,
            "Summary ROUGE-L": 24.0,
            "Summary BERTScore-F1": 88.0,
            "Answer EM": 50.0,
            "Answer F1": 75.0,
        }
    )


def test_what_was_not_measured_is_missing_and_not_zero():
    assert [value(measure, [evaluation()]) for measure in (*MEASURES, CONTROL_LMS)] == [None] * 11
    assert compare_measure(LMS, probed(1, 2), [evaluation()]) is None
    assert own_interval(LMS, [evaluation()]) is None
    assert value(LMS, []) is None


def test_one_missing_bertscore_makes_it_missing():
    first, second = summaries(30, 30)
    second = dataclasses.replace(second, bertscore_f1=None, bertscore_missing="no model")
    assert value(SUMMARY_MEASURES[3], [evaluation(summaries=(first, second))]) is None
    assert value(SUMMARY_MEASURES[0], [evaluation(summaries=(first, second))]) == 30.0


def test_perplexity_is_over_predictions_and_not_over_blocks():
    uneven = evaluation(blocks=(BlockScore(0, 1, -math.log(100.0)), BlockScore(1, 3, 0.0)))
    assert value(PERPLEXITY, [uneven]) == pytest.approx(100 ** (1 / 4))


def test_the_reduction_of_perplexity_is_of_perplexity_and_not_of_its_logarithm():
    reduction = compare_measure(PERPLEXITY, [evaluation(blocks=blocks(20))], [evaluation(blocks=blocks(25))])
    assert reduction.reduction == pytest.approx(-0.25)
    assert (reduction.interval.low, reduction.interval.high) == pytest.approx((-0.25, -0.25))


def test_seeds_are_averaged():
    baseline = [*probed(2, 4), *probed(4, 6)]
    reduction = compare_measure(LMS, baseline, probed(2, 2))
    assert (reduction.baseline, reduction.other, reduction.reduction) == (4.0, 2.0, 0.5)
    two_seeds = [evaluation(blocks=blocks(10)), evaluation(blocks=blocks(1000))]
    assert value(PERPLEXITY, two_seeds) == pytest.approx(100.0)


def test_samples_in_another_order_are_paired_all_the_same():
    forward = [evaluation(samples=targets(*range(1, 9)))]
    backward = [evaluation(samples=reversed(targets(*range(1, 9))))]
    reduction = compare_measure(LMS, forward, backward)
    assert (reduction.reduction, reduction.interval.low, reduction.interval.high) == (0.0, 0.0, 0.0)


def test_objectives_are_paired():
    """Every passage halved: no resample can say anything else, unless the pairs are lost."""
    reduction = compare_measure(LMS, probed(2, 4, 8, 2, 6), probed(1, 2, 4, 1, 3))
    assert (reduction.interval.low, reduction.interval.high) == pytest.approx((0.5, 0.5))


def test_a_passages_prefix_lengths_are_resampled_together():
    """A second prefix length that says the same is no new evidence: the interval stays as wide as it was."""
    lms = [int(value) for value in np.random.default_rng(0).integers(0, 9, (2, 15)).ravel()]
    before, after = lms[:15], lms[15:]

    def both(lengths, values):
        return [evaluation(samples=[s for length in lengths for s in targets(*values, prefix_length=length)])]

    one = compare_measure(LMS, both([32], before), both([32], after)).interval
    two = compare_measure(LMS, both([32, 50], before), both([32, 50], after)).interval
    assert (two.low, two.high) == pytest.approx((one.low, one.high), rel=1e-12)
    own_one, own_two = own_interval(LMS, both([32], before)), own_interval(LMS, both([32, 50], before))
    assert (own_two.low, own_two.high) == pytest.approx((own_one.low, own_one.high), rel=1e-12)


def test_a_passages_seeds_are_resampled_together():
    one = compare_measure(LMS, probed(1, 5, 3, 8), probed(2, 2, 1, 4)).interval
    three = compare_measure(LMS, probed(1, 5, 3, 8) * 3, probed(2, 2, 1, 4) * 3).interval
    assert (three.low, three.high) == pytest.approx((one.low, one.high), rel=1e-12)


@pytest.mark.parametrize("other", [0, 3])
def test_a_baseline_of_zero_leaves_the_reduction_undefined(other):
    reduction = compare_measure(LMS, probed(0, 0), probed(other, other))
    assert (reduction.baseline, reduction.other) == (0.0, other)
    assert reduction.reduction is None
    assert reduction.interval is None


def test_a_single_passage_has_a_reduction_without_interval():
    reduction = compare_measure(LMS, probed(4), probed(1))
    assert (reduction.reduction, reduction.interval) == (0.75, None)


def test_a_model_that_diverged_has_no_reduction_of_perplexity():
    diverged = [evaluation(blocks=(BlockScore(0, 1, -1e4), BlockScore(1, 1, -1e4)))]
    sane = [evaluation(blocks=(BlockScore(0, 1, -3.0), BlockScore(1, 1, -3.0)))]
    assert compare_measure(PERPLEXITY, sane, diverged).reduction is None
    assert compare_measure(PERPLEXITY, diverged, sane).reduction is None
    assert math.isinf(value(PERPLEXITY, diverged))


def test_the_baseline_is_ce_unless_another_is_named():
    runs = [run("TF-IDF", probed(1, 2)), run("CE", probed(2, 4)), run("IDF", probed(4, 8))]
    assert group_runs(runs)[0] == "CE"
    assert list(group_runs(runs)[1][0].objectives) == ["CE", "TF-IDF", "IDF"]
    assert group_runs(runs, baseline="IDF")[0] == "IDF"
    assert group_runs(runs[::2])[0] == "TF-IDF"


def test_each_model_has_its_own_runs_and_comparisons():
    runs = [
        run("CE", probed(2, 4), model="A"),
        run("CE", probed(8, 8), model="B"),
        run("TF-IDF", probed(1, 2), model="A"),
        run("TF-IDF", probed(2, 2), model="B"),
        run("TF-IDF", probed(1, 1), model="without baseline"),
    ]
    baseline, models = group_runs(runs)
    found = [one for model in models for one in compare_objectives(model, baseline)]
    assert [(one.setting.name, one.objective, one.reductions[LMS.name].reduction) for one in found] == [
        ("A", "TF-IDF", 0.5),
        ("B", "TF-IDF", 0.75),
    ]


def test_only_what_both_measured_is_compared():
    (one,) = compared(
        run("CE", [evaluation(samples=targets(4, 4), answers=answers(100, 100))]), run("TF-IDF", probed(2, 2))
    )
    assert list(one.reductions) == [LMS.name, PREFIX_MATCH.name, ROUGE_L.name]
    assert one.equal_perplexity is None


def test_runs_are_compared_at_the_last_checkpoint_that_all_have():
    def at(*points):
        return [evaluation(progress, targets(lms, lms)) for progress, lms in points]

    runs = [
        run("CE", at((50, 4), (100, 8)), seed=0),
        run("CE", at((25, 1), (50, 4)), seed=1),
        run("TF-IDF", at((25, 1), (50, 1), (100, 1))),
    ]
    (one,) = compared(*runs)
    reduction = one.reductions[LMS.name]
    assert (reduction.progress, reduction.baseline, reduction.reduction) == (50, 4.0, 0.75)
    (model,) = group_runs(runs)[1]
    assert {objective: len(found) for objective, found in model.at_last(LMS).items()} == {"CE": 2, "TF-IDF": 1}


def test_a_task_that_a_run_never_had_does_not_hold_the_others_back():
    runs = [
        run("CE", [evaluation(100, targets(2, 2), answers=answers(100, 0))]),
        run("TF-IDF", [evaluation(100, targets(1, 1), answers=answers(0, 0))]),
        run("IDF", [evaluation(100, targets(1, 1))]),
    ]
    tfidf, idf = compared(*runs)
    assert tfidf.reductions[ANSWER_MEASURES[1].name].reduction == 1.0
    assert ANSWER_MEASURES[1].name not in idf.reductions


def test_runs_without_a_common_checkpoint_have_no_reduction():
    (one,) = compared(run("CE", [evaluation(50, targets(2, 2))]), run("TF-IDF", [evaluation(100, targets(1, 1))]))
    assert one.reductions == {}


def path(*points):
    return [evaluation(at, targets(lms, lms + 2), blocks=blocks(ppl)) for at, ppl, lms in points]


def equal(baseline, other):
    (one,) = compared(run("CE", path(*baseline)), run("TF-IDF", path(*other)))
    return one.equal_perplexity


def test_equal_perplexity_interpolates_in_log_perplexity():
    """50 is a third of the way from 100 to 12.5 on a logarithmic scale: there the two passages have 3 and 5 tokens."""
    found = equal([(25, 100, 2), (100, 12.5, 5)], [(25, 200, 0), (100, 50, 1)])
    assert (found.bracket.before, found.bracket.after) == (25, 100)
    assert (found.perplexity, found.lms) == (pytest.approx(50), 2.0)
    assert found.baseline_perplexities == pytest.approx((100, 12.5))
    assert (found.bracket.lms_before, found.bracket.lms_after) == (3.0, 6.0)
    assert found.bracket.interpolated == pytest.approx(4.0)


def test_equal_perplexity_takes_the_first_time_that_the_baseline_had_it():
    found = equal([(10, 100, 0), (25, 25, 2), (50, 100, 6), (100, 25, 6)], [(10, 100, 0), (100, 50, 1)])
    assert (found.bracket.before, found.bracket.after) == (10, 25)


@pytest.mark.parametrize("goal", [10, 200])
def test_a_perplexity_that_the_baseline_never_had_is_out_of_range(goal):
    found = equal([(25, 100, 2), (100, 25, 6)], [(25, 300, 0), (100, goal, 1)])
    assert found.bracket is None


def test_a_perplexity_that_the_baseline_had_at_its_first_checkpoint():
    found = equal([(25, 100, 2), (100, 25, 6)], [(25, 300, 0), (100, 100, 1)])
    bracket = found.bracket
    assert (bracket.before, bracket.after) == (25, 25)
    assert (bracket.lms_before, bracket.lms_after, bracket.interpolated) == (3.0, 3.0, 3.0)


def test_baseline_checkpoints_of_one_perplexity_are_no_division_by_zero():
    assert equal([(25, 50, 2), (100, 50, 6)], [(25, 90, 0), (100, 60, 1)]).bracket is None


@pytest.mark.parametrize(("before", "after", "other"), [(1, 1, 1), (1, 9, 1), (9, 1, 1), (1, 1, 9)])
def test_equal_perplexity_knows_who_is_at_the_floor(before, after, other):
    """Controls have 1 and 2 in turn; so have targets at the floor."""

    def around(*points):
        return [
            evaluation(at, [*targets(*[lms, lms + 1] * 6), *controls(*[1, 2] * 6)], blocks=blocks(perplexity))
            for at, perplexity, lms in points
        ]

    (one,) = compared(
        run("CE", around((25, 100, before), (100, 25, after))),
        run("TF-IDF", around((25, 300, 1), (100, 50, other))),
    )
    assert one.equal_perplexity.bracket.at_floor is (before == after == 1)
    assert one.equal_perplexity.at_floor is (other == 1)


def test_without_controls_nobody_is_known_to_be_at_the_floor():
    found = equal([(25, 100, 0), (100, 25, 0)], [(25, 200, 0), (100, 50, 0)])
    assert (found.at_floor, found.bracket.at_floor) == (False, False)


def test_each_seed_is_compared_with_the_baselines_run_of_the_same_seed():
    runs = [
        *(run("CE", probed(lms, lms), seed=seed) for seed, lms in ((0, 4), (1, 8), (2, 8))),
        *(run("TF-IDF", probed(lms, lms), seed=seed) for seed, lms in ((1, 2), (0, 3), (5, 1))),
    ]
    (one,) = compared(*runs)
    assert one.lms_by_seed == (0.25, 0.75)


def test_a_seeds_reduction_is_undefined_where_its_baseline_is_zero():
    runs = [run(name, probed(lms, lms), seed=seed) for name, lms in (("CE", 0), ("TF-IDF", 2)) for seed in (0, 1)]
    assert compared(*runs)[0].lms_by_seed == (None, None)


def test_without_a_common_checkpoint_or_lms_no_seed_has_a_reduction():
    apart = [run("CE", [evaluation(50, targets(2, 2))]), run("TF-IDF", [evaluation(100, targets(1, 1))])]
    assert compared(*apart)[0].lms_by_seed == ()
    assert compared(*(run(name, [evaluation(answers=answers(1, 2))]) for name in ("CE", "TF-IDF")))[0].lms_by_seed == ()


def test_nothing_is_at_the_perplexity_of_a_model_that_diverged():
    assert equal([(25, 100, 2), (100, math.inf, 5)], [(25, 200, 0), (100, math.inf, 1)]) is None
    assert equal([(25, 100, 2), (100, math.inf, 5)], [(25, 200, 0), (100, 150, 1)]) is None


def test_the_floor_is_an_average_over_prefix_lengths_too():
    lengths = (32, 50)
    samples = [s for length in lengths for s in targets(6, 8, prefix_length=length) + controls(2, prefix_length=length)]
    found = lms_floor([evaluation(samples=samples)])
    assert (found.targets, found.controls, found.excess) == (7.0, 2.0, None)


def test_the_floor_is_the_controls_average():
    found = lms_floor([evaluation(samples=[*targets(6, 8, 7, 7), *controls(1, 2, 2, 3, 2)])])
    assert (found.targets, found.controls) == (7.0, 2.0)
    assert 3 < found.excess.low < 5.0 < found.excess.high < 7
    assert (found.difference, found.excess.num_units) == (5.0, 4)


@pytest.mark.parametrize(
    ("lms", "number", "exceeded", "reached"),
    [(4, 10, True, False), (4, 9, False, False), (1, 10, False, True), (1, 9, False, False), (0, 10, False, True)],
)
def test_from_few_passages_the_floor_is_neither_reached_nor_exceeded(lms, number, exceeded, reached):
    samples = [*targets(*[lms, lms + 1] * 6), *controls(*[1, 2, 1, 2, 1, 2, 1, 2, 1, 2][:number])]
    found = lms_floor([evaluation(samples=samples)])
    assert (found.exceeded, found.reached) == (exceeded, reached)


def test_targets_and_controls_are_drawn_independently():
    """Were they paired, this difference would be the same in every resample."""
    found = lms_floor([evaluation(samples=[*targets(1, 3, 5, 7), *controls(1, 3, 5, 7)])])
    assert found.excess.low < -1 < 1 < found.excess.high


def test_there_is_no_floor_without_controls():
    assert lms_floor([evaluation(samples=targets(1, 2))]) is None
    assert lms_floor([]) is None


def test_one_run_alone_is_nothing_to_compare():
    with pytest.raises(ValueError, match=r"runs/CE-0 \(Tiny, CE\).*probe audit"):
        group_runs([run("CE", probed(1))])


def test_an_unknown_baseline_is_told_with_those_there_are():
    with pytest.raises(ValueError, match="no run has the baseline 'SFT': there are CE, TF-IDF"):
        group_runs([run("CE", probed(1)), run("TF-IDF", probed(1))], baseline="SFT")


DIFFERENT = {
    "other targets": (
        {"samples": [sample("a", 1)]},
        {"samples": [sample("b", 1)]},
        "their prompts differ: only the first has target a, offset 0, 32 tokens",
    ),
    "more targets": (
        {"samples": [sample("a", 1)]},
        {"samples": [sample("a", 1), sample("b", 1)]},
        "only the second has target b",
    ),
    "prefix lengths": (
        {"samples": [sample("a", 1)]},
        {"samples": [sample("a", 1, prefix_length=50)]},
        "only the first has target a, offset 0, 32 tokens",
    ),
    "offsets": (
        {"samples": [sample("a", 1)]},
        {"samples": [sample("a", 1, offset=10)]},
        "only the first has target a, offset 0",
    ),
    "references": (
        {"samples": [sample("a", 1)]},
        {"samples": [sample("a", 1, length=6)]},
        r"target a, offset 0, 32 tokens expects \[100, 101, 102, 103, 104\]... \(8 ids\) in the first and .*\(6 ids\)",
    ),
    "a control for a target": (
        {"samples": [sample("a", 1)]},
        {"samples": [sample("a", 1, kind="control")]},
        "only the first has target a",
    ),
    "blocks": ({"blocks": blocks(9, 4)}, {"blocks": blocks(9, 5)}, "perplexity blocks differ: only the second has 4"),
    "block sizes": (
        {"blocks": blocks(9, 4, 10)},
        {"blocks": blocks(9, 4, 20)},
        "0 expects 10 predictions in the first and 20 predictions in the second",
    ),
    "articles": ({"summaries": summaries(1, 2)}, {"summaries": summaries(1)}, "articles differ: only the first has a1"),
    "questions": ({"answers": answers(1)}, {"answers": answers(1, 2)}, "questions differ: only the second has q1"),
}


@pytest.mark.parametrize(("first", "second", "message"), DIFFERENT.values(), ids=DIFFERENT)
def test_runs_that_were_asked_different_things_cannot_be_compared(first, second, message):
    runs = [run("CE", [evaluation(**first)]), run("TF-IDF", [evaluation(**second)])]
    with pytest.raises(ValueError, match=message) as error:
        group_runs(runs)
    assert str(error.value).startswith(
        "runs/CE-0 (Tiny, CE, 100 %) and runs/TF-IDF-0 (Tiny, TF-IDF, 100 %) cannot be compared"
    )
    # Models of their own are not compared with each other.
    group_runs([runs[0], dataclasses.replace(runs[1], model="another")])


def test_a_difference_is_found_between_runs_of_another_model():
    runs = [
        run("CE", probed(1), model="A"),
        run("CE", probed(1, 1), model="B"),
        run("TF-IDF", probed(1, 1), model="A"),
    ]
    with pytest.raises(ValueError, match="cannot be compared"):
        group_runs(runs)


def test_a_difference_in_a_later_checkpoint_is_found():
    runs = [
        run("CE", [evaluation(50, targets(1)), evaluation(100, targets(1))]),
        run("TF-IDF", [evaluation(50, targets(1)), evaluation(100, targets(1, 1))]),
    ]
    with pytest.raises(ValueError, match=r"TF-IDF, 100 %\) cannot be compared"):
        group_runs(runs)
