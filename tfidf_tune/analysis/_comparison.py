"""How much lower one objective is than the baseline, with intervals, and at which price."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tfidf_tune.analysis._bootstrap import Interval, bootstrap_interval
from tfidf_tune.analysis._equal_perplexity import EqualPerplexity, at_equal_perplexity
from tfidf_tune.analysis._measures import LMS, MEASURES, Floats, Measure
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
class Comparison:
    """One objective of a model against the baseline.

    Args:
        model (str): the model.
        objective (str): the objective.
        reductions (dict[str, tuple[int, Reduction]]): name of a measure -> the last checkpoint in percent that all runs
            of the model share, and the reduction there. A measure that either objective misses is left out.
        equal_perplexity (EqualPerplexity | None): None where LMS and perplexity were not measured together.
        lms_by_seed (tuple[float | None, ...]): the reduction of the average LMS of each run, by ascending seed, against
            the baseline's run of the same seed; seeds that either misses are left out.
    """

    model: str
    objective: str
    reductions: dict[str, tuple[int, Reduction]]
    equal_perplexity: EqualPerplexity | None
    lms_by_seed: tuple[float | None, ...]


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
            equal = at_equal_perplexity(model, baseline, objective)
            by_seed = _lms_by_seed(model, baseline, objective)
            comparisons.append(Comparison(model.model, objective, reductions, equal, by_seed))
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


def _reduction(measure: Measure, before: Floats, after: Floats, counts: Floats) -> Reduction:
    def statistic(before: Floats, after: Floats, counts: Floats, axis: int = -1) -> Any:
        baseline = measure.value(before, counts, axis)
        return (baseline - measure.value(after, counts, axis)) / baseline

    baseline, other = float(measure.value(before, counts)), float(measure.value(after, counts))
    reduction = _relative(baseline, other)
    if reduction is None:
        return Reduction(measure, baseline, other, len(counts), None, None)
    interval = bootstrap_interval(statistic, before, after, counts)
    return Reduction(measure, baseline, other, len(counts), reduction, interval)


def _relative(baseline: float, other: float) -> float | None:
    reduction = (baseline - other) / baseline if baseline else math.nan
    return reduction if math.isfinite(reduction) else None


def _lms_by_seed(model: ModelRuns, baseline: str, objective: str) -> tuple[float | None, ...]:
    """A run of an unknown seed is paired with the baseline's of an unknown seed."""
    last = model.last(LMS)
    of_baseline, of_other = (
        {
            run.seed: lms
            for run in model.objectives[name]
            for evaluation in run.evaluations
            if evaluation.progress == last and (lms := LMS.of([evaluation])) is not None
        }
        for name in (baseline, objective)
    )
    shared = sorted(of_baseline.keys() & of_other.keys(), key=lambda seed: seed or 0)
    return tuple(_relative(of_baseline[seed], of_other[seed]) for seed in shared)
