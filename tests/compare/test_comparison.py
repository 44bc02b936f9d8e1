import dataclasses
import math

import numpy as np
import pytest
from helpers.fakes.runs import (
    answers,
    block,
    blocks,
    controls,
    evaluation,
    results,
    run,
    sample,
    summaries,
    targets,
)

from tfidf_tune.compare import compare_at_equal_perplexity, compare_objectives, evaluation_table
from tfidf_tune.results import intervals


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    monkeypatch.setattr(intervals, "NUM_RESAMPLES", 1000)


def probed(*lms, **fields):
    return [evaluation(samples=targets(*lms), **fields)]


def evaluations_of(*runs, **options):
    return evaluation_table(results(*runs), **options)


def compare(*runs, by=compare_objectives, **options):
    baseline, evaluations = evaluations_of(*runs, **options)
    return by(evaluations, baseline)


def reduction(baseline, other, measure="Avg LMS"):
    """The row of a measure, each side with evaluations of one seed each; None if there is none."""
    runs = [run("CE", [one], seed=seed) for seed, one in enumerate(baseline)]
    runs += [run("other", [one], seed=seed) for seed, one in enumerate(other)]
    frame = compare(*runs)
    return next(frame[frame["measure"] == measure].itertuples(), None)


def test_the_reduction_is_the_papers_over_targets_and_seeds():
    one = reduction(probed(2, 4, 6), probed(1, 2, 3))
    assert (one.baseline, one.other, one.reduction, one.num_units) == (4.0, 2.0, 0.5, 3)
    sides = ([evaluation(samples=[*targets(lms, lms), *controls(8, 8)])] for lms in (4, 2))
    assert reduction(*sides).reduction == 0.5
    for other in (0, 3):  # of a baseline of 0
        one = reduction(probed(0, 0), probed(other, other))
        assert (one.baseline, one.other, math.isnan(one.reduction), math.isnan(one.low)) == (
            0.0,
            other,
            True,
            True,
        )
    one = reduction(probed(4), probed(1))  # a single passage
    assert (one.reduction, math.isnan(one.low), one.num_units) == (0.75, True, 1)


def test_every_measure_reads_its_own_numbers():
    samples = [
        sample("a", 3, rouge_l=10.0, prefix_match=1),
        sample("b", 5, rouge_l=30.0, prefix_match=2),
    ]
    one = evaluation(
        samples=samples, blocks=blocks(20.0), summaries=summaries(40, 20), answers=answers(100, 50)
    )
    frame = compare(run("CE", [one]), run("TF-IDF", [one]))
    expected = {"Avg LMS": 4.0, "Avg Prefix": 1.5, "ROUGE-L": 20.0, "Perplexity": 20.0}
    expected |= {"Summary ROUGE-1": 30.0, "Summary ROUGE-2": 15.0, "Summary ROUGE-L": 24.0}
    expected |= {"Summary BERTScore-F1": 88.0, "Answer EM": 50.0, "Answer F1": 75.0}
    assert dict(zip(frame["measure"], frame["other"], strict=True)) == pytest.approx(expected)


def test_perplexity_is_over_predictions_and_its_reduction_not_that_of_the_logarithm():
    uneven = evaluation(blocks=(block(0, 1, -math.log(100.0)), block(1, 3, 0.0)))
    assert reduction([uneven], [uneven], "Perplexity").other == pytest.approx(100 ** (1 / 4))
    one = reduction([evaluation(blocks=blocks(20))], [evaluation(blocks=blocks(25))], "Perplexity")
    assert (one.reduction, one.low, one.high) == pytest.approx((-0.25, -0.25, -0.25))
    two_seeds = [evaluation(blocks=blocks(10)), evaluation(blocks=blocks(1000))]
    assert reduction(two_seeds, two_seeds, "Perplexity").other == pytest.approx(100.0)
    diverged, sane = (
        [evaluation(blocks=(block(0, 1, log), block(1, 1, log)))] for log in (-1e4, -3.0)
    )
    for pair in ((sane, diverged), (diverged, sane)):
        one = reduction(*pair, "Perplexity")
        assert math.isnan(one.reduction)
        assert math.inf in (one.baseline, one.other)


def test_passages_are_paired_in_any_order():
    """Every passage halved: no resample can say anything else, unless the pairs are lost."""
    lms = (2, 4, 8, 2, 6, 4, 2, 8, 6, 4, 2, 6)
    halved = [evaluation(samples=reversed(targets(*(value // 2 for value in lms))))]
    one = reduction(probed(*lms), halved)
    assert (one.low, one.high) == pytest.approx((0.5, 0.5))
    scores = [
        evaluation(blocks=tuple(block(i, 1, -scale * (1 + i % 3)) for i in range(12)))
        for scale in (2, 1)
    ]
    shuffled = dataclasses.replace(scores[1], blocks=scores[1].blocks[::-1])
    pairs = [reduction(scores[:1], [other], "Perplexity") for other in (scores[1], shuffled)]
    assert pairs[0] == pairs[1]


def test_prefix_lengths_and_seeds_of_a_passage_are_resampled_together():
    """More of the same is no new evidence: the interval stays as wide as it was."""
    before, after = np.random.default_rng(0).integers(0, 9, (2, 15)).tolist()

    def both(lengths, values):
        samples = []
        for length in lengths:
            samples += targets(*values, prefix_length=length)
        return [evaluation(samples=samples)]

    once = reduction(both([32], before), both([32], after))
    for again in (
        reduction(both([32, 50], before), both([32, 50], after)),
        reduction(both([32], before) * 3, both([32], after) * 3),
    ):
        assert (again.low, again.high) == pytest.approx((once.low, once.high), rel=1e-12)


def test_p_values_are_corrected_over_the_rows_of_a_model_alone():
    rng = np.random.default_rng(0)
    before = rng.integers(0, 9, 15).tolist()
    after = [
        max(0, lms + int(change))
        for lms, change in zip(before, rng.integers(-3, 2, 15), strict=True)
    ]
    pair = [run("CE", probed(*before)), run("TF-IDF", probed(*after))]
    others = [
        run(name, probed(*values), model="Other")
        for name, values in (("CE", after), ("TF-IDF", before))
    ]
    alone = compare(*pair)
    beside = compare(*pair, *others)
    np.testing.assert_array_equal(beside[beside["setting"] == "Tiny"]["p_value"], alone["p_value"])
    assert (alone["p_value"] < 1).any()


def test_the_baseline_is_ce_unless_another_is_named():
    runs = [run("TF-IDF", probed(1, 2)), run("CE", probed(2, 4)), run("IDF", probed(4, 8))]
    baseline, evaluations = evaluations_of(*runs)
    assert (baseline, evaluations["objective"].tolist()) == ("CE", ["CE", "TF-IDF", "IDF"])
    assert evaluations_of(*runs, baseline="IDF")[0] == "IDF"
    assert evaluations_of(*runs[::2])[0] == "TF-IDF"
    with pytest.raises(ValueError, match="'SFT': there are TF-IDF, CE, IDF"):
        evaluations_of(*runs, baseline="SFT")
    with pytest.raises(ValueError, match="/CE-0"):
        evaluations_of(runs[1])


def path(*points):
    return [evaluation(at, targets(lms, lms + 2), blocks=blocks(ppl)) for at, ppl, lms in points]


def at_equal_perplexity(baseline, other):
    runs = run("CE", baseline), run("TF-IDF", other)
    return next(compare(*runs, by=compare_at_equal_perplexity).itertuples(), None)


def test_equal_perplexity_interpolates_in_log_perplexity():
    """50 is a third of the way from 100 to 12.5 on a logarithmic scale: there the two passages have
    3 and 5 tokens.
    """
    found = at_equal_perplexity(
        path((25, 100, 2), (100, 12.5, 5)), path((25, 200, 0), (100, 50, 1))
    )
    assert (found.before, found.after, found.lms_before, found.lms_after) == (25, 100, 3.0, 6.0)
    values = (found.perplexity, found.lms, found.lowest, found.highest, found.interpolated)
    assert values == pytest.approx((50, 2.0, 12.5, 100, 4.0))


def test_where_the_baseline_had_that_perplexity():
    falling = [(25, 100, 2), (100, 25, 6)]
    for baseline, goal, where in (
        # The first time.
        (
            [(10, 100, 0), (25, 25, 2), (50, 100, 6), (75, 25, 6), (100, 90, 6)],
            50,
            (10, 25),
        ),
        (falling, 10, None),
        (falling, 200, None),
        (falling, 100, (25, 25)),  # exactly at its first checkpoint
        ([(25, 50, 2), (100, 50, 6)], 60, None),  # no division by zero
    ):
        found = at_equal_perplexity(path(*baseline), path((25, 300, 0), (100, goal, 1)))
        assert math.isnan(found.before) if where is None else (found.before, found.after) == where
        assert math.isnan(found.floor_bound + found.baseline_floor_bound)  # without controls
        if where == (25, 25):
            assert (found.lms_before, found.lms_after, found.interpolated) == (3.0, 3.0, 3.0)


DIFFERENT = (
    ({"samples": [sample("a", 1)]}, {"samples": [sample("b", 1)]}, "prompts"),
    ({"samples": targets(1)}, {"samples": targets(1, prefix_length=50)}, "prompts"),
    ({"samples": [sample("a", 1)]}, {"samples": [sample("a", 1, length=6)]}, "prompts"),
    ({"blocks": blocks(9, 4, 10)}, {"blocks": blocks(9, 4, 20)}, "perplexity blocks"),
    ({"summaries": summaries(1, 2)}, {"summaries": summaries(1)}, "articles"),
    ({"answers": answers(1)}, {"answers": answers(1, 2)}, "questions"),
)


def test_runs_that_were_asked_different_things_cannot_be_compared():
    for first, second, what in DIFFERENT:
        runs = [run("CE", [evaluation(**first)]), run("TF-IDF", [evaluation(**second)])]
        with pytest.raises(ValueError, match=rf"/CE-0\) and .*/TF-IDF-0\) .*their {what} differ"):
            evaluations_of(*runs)
        # Different models are not compared with each other.
        evaluations_of(
            runs[0], dataclasses.replace(runs[1], model="another", folder="runs/another")
        )
    first = evaluation(50, targets(1))
    later = evaluation(100, targets(1, 1))
    for runs in (  # beside other models, and in later checkpoints
        [run("CE", probed(1)), run("CE", probed(1, 1), model="B"), run("TF-IDF", [later])],
        [run("CE", [first, evaluation(100, targets(1))]), run("TF-IDF", [first, later])],
    ):
        with pytest.raises(ValueError, match="TF-IDF, seed 0, 100 %"):
            evaluations_of(*runs)
