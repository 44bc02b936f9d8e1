"""What the baseline recited when it predicted unseen text no better than another objective does at its end."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tfidf_tune.analysis._floor import lms_floor
from tfidf_tune.analysis._measures import LMS, PERPLEXITY, Floats
from tfidf_tune.analysis._model_runs import ModelRuns
from tfidf_tune.analysis._runs import Evaluation


@dataclass(frozen=True)
class Bracket:
    """Two checkpoints of the baseline between which it first had some perplexity, one checkpoint if exactly there.

    Args:
        before (int): the first, in percent.
        after (int): the second, in percent.
        lms_before (float): the baseline's average LMS at the first.
        lms_after (float): that at the second.
        interpolated (float): that between them, linearly in log perplexity.
        at_floor (bool): whether the baseline is at the floor at both, see :class:`Floor`.
    """

    before: int
    after: int
    lms_before: float
    lms_after: float
    interpolated: float
    at_floor: bool


@dataclass(frozen=True)
class EqualPerplexity:
    """What the baseline recited when it had the perplexity that another objective ends with.

    Args:
        perplexity (float): the other objective's, at the last checkpoint.
        lms (float): the other objective's average LMS there.
        at_floor (bool): whether the other objective is at the floor there.
        baseline_perplexities (tuple[float, ...]): of the baseline's checkpoints, in the order of training.
        bracket (Bracket | None): the baseline around that perplexity; None where it never had it.
    """

    perplexity: float
    lms: float
    at_floor: bool
    baseline_perplexities: tuple[float, ...]
    bracket: Bracket | None


def at_equal_perplexity(model: ModelRuns, baseline: str, objective: str) -> EqualPerplexity | None:
    """Find where the baseline had the perplexity that another objective ends with.

    Args:
        model (ModelRuns): its runs.
        baseline (str): the baseline.
        objective (str): the other objective.

    Returns:
        EqualPerplexity | None: None where LMS and perplexity were not measured together, or a perplexity is not finite.
    """
    at_end = model.at(objective, model.last(LMS, PERPLEXITY))
    perplexity, recited = PERPLEXITY.of(at_end), LMS.of(at_end)
    path = [
        (at, value, lms)
        for at in model.checkpoints(LMS, PERPLEXITY, objective=baseline)
        if (value := PERPLEXITY.of(model.at(baseline, at))) and (lms := LMS.of(model.at(baseline, at))) is not None
    ]
    perplexities = tuple(value for _, value, _ in path)
    if perplexity is None or recited is None or not path or not np.isfinite([perplexity, *perplexities]).all():
        return None
    bracket, crossing = None, first_crossing(np.log(perplexities), math.log(perplexity))
    if crossing is not None:
        first, second, weight = crossing
        (before, _, lms_before), (after, _, lms_after) = path[first], path[second]
        interpolated = (1 - weight) * lms_before + weight * lms_after
        at_floor = all(_at_floor(model.at(baseline, at)) for at in (before, after))
        bracket = Bracket(before, after, lms_before, lms_after, interpolated, at_floor)
    return EqualPerplexity(perplexity, recited, _at_floor(at_end), perplexities, bracket)


def _at_floor(evaluations: Sequence[Evaluation]) -> bool:
    floor = lms_floor(evaluations)
    return floor is not None and floor.reached


def first_crossing(path: Floats, goal: float) -> tuple[int, int, float] | None:
    """Find where a path, linear between its points, first reaches a goal.

    Args:
        path (np.ndarray): float64 ``[n]``, n at least 1, all finite.
        goal (float): the value to reach.

    Returns:
        tuple[int, int, float] | None: the points before and after, and the second one's weight; None where it never
            does.
    """
    if path[0] == goal:
        return 0, 0, 0.0
    for after in range(1, len(path)):
        start, end = path[after - 1], path[after]
        if min(start, end) <= goal <= max(start, end):
            return after - 1, after, float((goal - start) / (end - start))
    return None
