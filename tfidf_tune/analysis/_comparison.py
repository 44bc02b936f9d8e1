"""How much lower one objective is than the baseline, with intervals, and at which price."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfidf_tune.analysis._bootstrap import Interval, bootstrap_interval
from tfidf_tune.analysis._measures import CONTROL_LMS, LMS, MEASURES, PERPLEXITY, Floats, Measure
from tfidf_tune.analysis._model_runs import ModelRuns
from tfidf_tune.analysis._runs import Evaluation


@dataclass(frozen=True)
class Reduction:
    """``(baseline - other) / baseline`` of a measure.

    Args:
        measure (Measure): what is measured.
        baseline (float): value under the baseline.
        other (float): value under the other objective.
        num_units (int): passages, blocks, articles or questions, which the interval resamples.
        reduction (float | None): a fraction, negative for an increase; None where the baseline is 0 or a value is not
            finite.
        interval (Interval | None): of the reduction; None where it has none, see
            :func:`~tfidf_tune.analysis.bootstrap_interval`.
    """

    measure: Measure
    baseline: float
    other: float
    num_units: int
    reduction: float | None
    interval: Interval | None


@dataclass(frozen=True)
class Floor:
    """The average LMS of the targets and that of the controls.

    Args:
        targets (float): average LMS of the targets.
        controls (float): average LMS of the controls: what a model hits upon without having seen the text.
        excess (Interval | None): 95 % interval of ``targets - controls``, the passages of either drawn independently;
            None where either has a single passage.
    """

    targets: float
    controls: float
    excess: Interval | None


@dataclass(frozen=True)
class EqualPerplexity:
    """What the baseline recited when it had the perplexity that another objective ends with.

    Args:
        perplexity (float): the other objective's, at the last checkpoint.
        baseline_perplexities (tuple[float, ...]): of the baseline's checkpoints, in the order of training.
        between (tuple[int, int] | None): the baseline's checkpoints, in percent, between which it first had that
            perplexity; None where it never did.
        reduction (Reduction | None): of the average LMS against the baseline's there, interpolated in log perplexity.
            Its interval covers the choice of passages, not that of blocks. None where the baseline never had it.
    """

    perplexity: float
    baseline_perplexities: tuple[float, ...]
    between: tuple[int, int] | None
    reduction: Reduction | None


@dataclass(frozen=True)
class Comparison:
    """One objective of a model against the baseline.

    Args:
        model (str): the model.
        objective (str): the objective.
        reductions (dict[str, tuple[int, Reduction]]): name of a measure -> the last checkpoint in percent that all runs
            of the model share, and the reduction there. A measure that either objective misses is left out.
        equal_perplexity (EqualPerplexity | None): None where LMS and perplexity were not measured together.
    """

    model: str
    objective: str
    reductions: dict[str, tuple[int, Reduction]]
    equal_perplexity: EqualPerplexity | None


def compare_objectives(model: ModelRuns, baseline: str) -> list[Comparison]:
    """Compare each objective of a model with the baseline.

    Args:
        model (ModelRuns): its runs.
        baseline (str): the baseline.

    Returns:
        list[Comparison]: one an objective but the baseline; empty where the model has no run of the baseline.
    """
    comparisons = []
    for objective in model.objectives if baseline in model.objectives else ():
        if objective != baseline:
            at_last = {measure.name: (model.last(measure), measure) for measure in MEASURES}
            reductions = {
                name: (last, reduction)
                for name, (last, measure) in at_last.items()
                if last is not None
                and (reduction := compare_measure(measure, model.at(baseline, last), model.at(objective, last)))
            }
            equal = _at_equal_perplexity(model, baseline, objective)
            comparisons.append(Comparison(model.model, objective, reductions, equal))
    return comparisons


def compare_measure(measure: Measure, baseline: Sequence[Evaluation], other: Sequence[Evaluation]) -> Reduction | None:
    """The reduction of a measure, with its interval from resampling the units, paired between the two.

    Args:
        measure (Measure): what is measured.
        baseline (Sequence[Evaluation]): the baseline's, one a seed.
        other (Sequence[Evaluation]): the other objective's, one a seed, over the same units.

    Returns:
        Reduction | None: None where either misses the measure.
    """
    before, after = measure.mean_totals(baseline), measure.mean_totals(other)
    return None if before is None or after is None else _reduction(measure, before[0], after[0], before[1])


def own_interval(measure: Measure, evaluations: Sequence[Evaluation]) -> Interval | None:
    """The interval of a measure itself, from resampling its units.

    Args:
        measure (Measure): what is measured.
        evaluations (Sequence[Evaluation]): of one checkpoint, one a seed.

    Returns:
        Interval | None: None where the measure is missing, or has a single unit.
    """
    totals = measure.mean_totals(evaluations)
    return None if totals is None else bootstrap_interval(measure.value, *totals)


def lms_floor(evaluations: Sequence[Evaluation]) -> Floor | None:
    """How far the targets' average LMS is from the controls'.

    Args:
        evaluations (Sequence[Evaluation]): of one checkpoint, one a seed.

    Returns:
        Floor | None: None where there are no targets or no controls.
    """
    targets, controls = LMS.mean_totals(evaluations), CONTROL_LMS.mean_totals(evaluations)
    if targets is None or controls is None:
        return None
    target_means, control_means = targets[0] / targets[1], controls[0] / controls[1]
    excess = bootstrap_interval(_difference_of_means, target_means, control_means, paired=False)
    return Floor(float(target_means.mean()), float(control_means.mean()), excess)


def _difference_of_means(targets: Floats, controls: Floats, axis: int = -1) -> Any:
    return targets.mean(axis) - controls.mean(axis)


def _reduction(measure: Measure, before: Floats, after: Floats, counts: Floats) -> Reduction:
    def statistic(before: Floats, after: Floats, counts: Floats, axis: int = -1) -> Any:
        baseline = measure.value(before, counts, axis)
        return (baseline - measure.value(after, counts, axis)) / baseline

    baseline, other = float(measure.value(before, counts)), float(measure.value(after, counts))
    reduction = (baseline - other) / baseline if baseline else math.nan
    if not math.isfinite(reduction):
        return Reduction(measure, baseline, other, len(counts), None, None)
    interval = bootstrap_interval(statistic, before, after, counts)
    return Reduction(measure, baseline, other, len(counts), reduction, interval)


def _at_equal_perplexity(model: ModelRuns, baseline: str, objective: str) -> EqualPerplexity | None:
    last = model.last(LMS, PERPLEXITY)
    perplexity, recited = PERPLEXITY.of(model.at(objective, last)), LMS.mean_totals(model.at(objective, last))
    checkpoints = model.checkpoints(LMS, PERPLEXITY, objective=baseline)
    path = [
        (value, totals[0])
        for at in checkpoints
        if (value := PERPLEXITY.of(model.at(baseline, at))) and (totals := LMS.mean_totals(model.at(baseline, at)))
    ]
    perplexities = tuple(value for value, _ in path)
    if perplexity is None or recited is None or not path or not np.isfinite([perplexity, *perplexities]).all():
        return None
    crossing = _first_crossing(np.log(perplexities), math.log(perplexity))
    if crossing is None:
        return EqualPerplexity(perplexity, perplexities, None, None)
    before, after, weight = crossing
    interpolated = (1 - weight) * path[before][1] + weight * path[after][1]
    reduction = _reduction(LMS, interpolated, *recited)
    return EqualPerplexity(perplexity, perplexities, (checkpoints[before], checkpoints[after]), reduction)


def _first_crossing(path: Floats, goal: float) -> tuple[int, int, float] | None:
    """Where a path first reaches a goal: the points before and after, and the second one's weight."""
    if path[0] == goal:
        return 0, 0, 0.0
    for after in range(1, len(path)):
        start, end = path[after - 1], path[after]
        if min(start, end) <= goal <= max(start, end):
            return after - 1, after, float((goal - start) / (end - start))
    return None
