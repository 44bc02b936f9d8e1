"""How much lower one objective is than the baseline, with intervals, and at which price."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfidf_tune.analysis._bootstrap import Interval, bootstrap_interval
from tfidf_tune.analysis._measures import CONTROL_LMS, LMS, MEASURES, PERPLEXITY, Floats, Measure
from tfidf_tune.analysis._settings import Setting


@dataclass(frozen=True)
class Reduction:
    """``(baseline - other) / baseline`` of a measure at a checkpoint.

    Args:
        measure (Measure): what is measured.
        progress (int): of the checkpoint, in percent.
        baseline (float): value under the baseline.
        other (float): value under the other objective.
        num_units (int): passages, blocks, articles or questions, which the interval resamples.
        reduction (float | None): a fraction; None if the baseline is 0 or a value is not finite.
        interval (Interval | None): of the reduction; None if there is none, see :func:`bootstrap_interval`.
    """

    measure: Measure
    progress: int
    baseline: float
    other: float
    num_units: int
    reduction: float | None
    interval: Interval | None


@dataclass(frozen=True)
class Bracket:
    """Two checkpoints of the baseline between which it first had some perplexity; twice the same if exactly there."""

    before: int  # progress in percent
    after: int
    lms_before: float  # the baseline's average LMS
    lms_after: float
    interpolated: float  # between them, linearly in log perplexity
    at_floor: bool  # whether the baseline is at the floor at both, see Floor


@dataclass(frozen=True)
class EqualPerplexity:
    """What the baseline recited when it had the perplexity that another objective ends with."""

    perplexity: float  # the other objective's, at the last checkpoint
    lms: float  # its average LMS there
    at_floor: bool  # whether it is at the floor there
    baseline_perplexities: tuple[float, ...]  # of the baseline's checkpoints, in the order of training
    bracket: Bracket | None  # the baseline around that perplexity; None if it never had it


@dataclass(frozen=True)
class Comparison:
    """One objective of a setting against the baseline.

    Args:
        setting (Setting): model and learning rate.
        objective (str): the objective.
        reductions (dict[str, Reduction]): name of a measure -> its reduction at the last checkpoint that all runs
            share; measures that either objective misses are left out.
        equal_perplexity (EqualPerplexity | None): None if LMS and perplexity were not measured together.
        lms_by_seed (tuple[float | None, ...]): the reduction of the average LMS of each run, by ascending seed,
            against the baseline's run of the same seed.
    """

    setting: Setting
    objective: str
    reductions: dict[str, Reduction]
    equal_perplexity: EqualPerplexity | None
    lms_by_seed: tuple[float | None, ...]


@dataclass(frozen=True)
class Floor:
    """The average LMS of the targets, and of the controls: what is recited of text that was never seen."""

    targets: float
    controls: float
    excess: Interval | None  # of targets - controls, drawn independently; None if either has a single passage

    @property
    def difference(self) -> float:
        """``targets - controls``."""
        return self.targets - self.controls

    @property
    def exceeded(self) -> bool:
        """Whether the interval lies above 0 and is from enough passages for a verdict."""
        return self.excess is not None and self.excess.significant == "yes" and self.excess.low > 0

    @property
    def reached(self) -> bool:
        """Whether the interval does not lie above 0 and is from enough passages for a verdict."""
        return self.excess is not None and self.excess.significant != "too few" and self.excess.low <= 0


def compare_objectives(setting: Setting, baseline: str) -> list[Comparison]:
    """Compare each objective of a setting with the baseline; empty if it has no run of the baseline."""
    if baseline not in setting.objectives:
        return []
    comparisons = []
    for objective in setting.objectives:
        if objective != baseline:
            found = [_reduction(setting, measure, baseline, objective) for measure in MEASURES]
            reductions = {one.measure.name: one for one in found if one is not None}
            equal = _equal_perplexity(setting, baseline, objective)
            by_seed = _lms_by_seed(setting, baseline, objective)
            comparisons.append(Comparison(setting, objective, reductions, equal, by_seed))
    return comparisons


def own_interval(setting: Setting, measure: Measure, checkpoints: Sequence[int]) -> Interval | None:
    """Return the interval of a measure itself, from resampling its units; None as :func:`bootstrap_interval`."""
    totals = setting.totals(measure, checkpoints)
    return None if totals is None else bootstrap_interval(measure.value, *totals)


def lms_floor(setting: Setting, checkpoints: Sequence[int]) -> Floor | None:
    """Compare the targets' average LMS with the controls'; None if there are no targets or no controls."""
    targets, controls = (setting.totals(measure, checkpoints) for measure in (LMS, CONTROL_LMS))
    if targets is None or controls is None:
        return None
    return floor_of(targets[0] / targets[1], controls[0] / controls[1])


def floor_of(targets: Floats, controls: Floats) -> Floor:
    """Compare the average LMS of passages: targets ``[n]`` and controls ``[m]``."""
    excess = bootstrap_interval(_difference_of_means, targets, controls, paired=False)
    return Floor(float(targets.mean()), float(controls.mean()), excess)


def first_crossing(path: Floats, goal: float) -> tuple[int, int, float] | None:
    """Find where a path, linear between its points, first reaches a goal.

    Args:
        path (np.ndarray): float64 ``[n]``, n at least 1, all finite.
        goal (float): the value to reach.

    Returns:
        tuple[int, int, float] | None: the points before and after, and the second one's weight; None if it never does.
    """
    if path[0] == goal:
        return 0, 0, 0.0
    for after in range(1, len(path)):
        start, end = path[after - 1], path[after]
        if min(start, end) <= goal <= max(start, end):
            return after - 1, after, float((goal - start) / (end - start))
    return None


def _difference_of_means(targets: Floats, controls: Floats, axis: int = -1) -> Any:
    return targets.mean(axis) - controls.mean(axis)


def _reduction(setting: Setting, measure: Measure, baseline: str, objective: str) -> Reduction | None:
    progress = setting.last(measure)
    before, after = (setting.totals(measure, setting.at(name, progress)) for name in (baseline, objective))
    if progress is None or before is None or after is None:
        return None
    counts = before[1]

    def statistic(before: Floats, after: Floats, counts: Floats, axis: int = -1) -> Any:
        reference = measure.value(before, counts, axis)
        return (reference - measure.value(after, counts, axis)) / reference

    values = float(measure.value(before[0], counts)), float(measure.value(after[0], counts))
    reduction = _relative(*values)
    interval = None if reduction is None else bootstrap_interval(statistic, before[0], after[0], counts)
    return Reduction(measure, progress, *values, len(counts), reduction, interval)


def _relative(baseline: float, other: float) -> float | None:
    reduction = (baseline - other) / baseline if baseline else math.nan
    return reduction if math.isfinite(reduction) else None


def _lms_by_seed(setting: Setting, baseline: str, objective: str) -> tuple[float | None, ...]:
    """A run of an unknown seed is paired with the baseline's of an unknown seed."""
    last = setting.last(LMS)
    of_baseline, of_other = (
        {
            setting.results.checkpoints[at].seed: lms
            for at in setting.at(name, last)
            if (lms := setting.value(LMS, [at])) is not None
        }
        for name in (baseline, objective)
    )
    shared = sorted(of_baseline.keys() & of_other.keys(), key=lambda seed: seed or 0)
    return tuple(_relative(of_baseline[seed], of_other[seed]) for seed in shared)


def _equal_perplexity(setting: Setting, baseline: str, objective: str) -> EqualPerplexity | None:
    def measured(checkpoints: list[int]) -> tuple[float, float] | None:
        perplexity, lms = setting.value(PERPLEXITY, checkpoints), setting.value(LMS, checkpoints)
        return None if perplexity is None or lms is None or not math.isfinite(perplexity) else (perplexity, lms)

    def at_floor(checkpoints: list[int]) -> bool:
        floor = lms_floor(setting, checkpoints)
        return floor is not None and floor.reached

    end = setting.at(objective, setting.last(LMS, PERPLEXITY))
    progress = setting.progress(LMS, PERPLEXITY, objective=baseline)
    ours, path = measured(end), [measured(setting.at(baseline, at)) for at in progress]
    known = [point for point in path if point is not None]
    if ours is None or not path or len(known) < len(path):
        return None
    perplexities = tuple(perplexity for perplexity, _ in known)
    bracket, crossing = None, first_crossing(np.log(perplexities), math.log(ours[0]))
    if crossing is not None:
        first, second, weight = crossing
        before, after = known[first][1], known[second][1]
        interpolated = (1 - weight) * before + weight * after
        both_at_floor = all(at_floor(setting.at(baseline, progress[at])) for at in (first, second))
        bracket = Bracket(progress[first], progress[second], before, after, interpolated, both_at_floor)
    return EqualPerplexity(*ours, at_floor(end), perplexities, bracket)
