"""Recitation against perplexity over learning rates: objectives as curves, and their differences over seeds."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tfidf_tune.analysis._equal_perplexity import first_crossing
from tfidf_tune.analysis._model_runs import choose_baseline
from tfidf_tune.analysis._records import RunRecord
from tfidf_tune.analysis._seed_estimates import SeedEstimate, over_seeds
from tfidf_tune.analysis._verdicts import verdict


@dataclass(frozen=True)
class FrontierPoint:
    """An objective at one learning rate.

    Args:
        learning_rate (float | None): None where the runs name none.
        records (tuple[RunRecord, ...]): one a seed, each with LMS and perplexity.
        lms (SeedEstimate): average LMS.
        log_perplexity (SeedEstimate): mean negative log-likelihood of a held-out token; e to the power of its mean is
            the geometric mean of the perplexities.
    """

    learning_rate: float | None
    records: tuple[RunRecord, ...]
    lms: SeedEstimate
    log_perplexity: SeedEstimate

    @property
    def finite(self) -> bool:
        """Whether no run diverged, so far that the perplexity is more than a float can hold."""
        return math.isfinite(self.perplexity)

    @property
    def perplexity(self) -> float:
        """The geometric mean over seeds; infinite where a run diverged."""
        return perplexity_of(self.log_perplexity.mean)


@dataclass(frozen=True)
class FrontierCurve:
    """An objective through its learning rates.

    Args:
        objective (str): its name.
        points (tuple[FrontierPoint, ...]): by ascending learning rate.
        operating (FrontierPoint | None): the learning rate of the lowest held-out perplexity, of equal ones the lower:
            what one would choose without a look at the passages. None where runs of every learning rate diverged.
        chosen_by (tuple[int | None, ...]): the seeds by which it was chosen: those that all learning rates without a
            diverged run have. Empty where there is none such: then each counts by the seeds it has.
        range_end (str | None): "lowest" or "highest" where that learning rate is an end of those tried, so that a
            better one may lie beyond; "only" where there was one; None where it lies inside, or there is none.
        on_front (bool): whether no point of the model has as low an LMS and as low a perplexity as the operating
            point, one of them lower: by the means over the seeds that all points of the model have, if there are such.
        lms_at_baseline (float | None): LMS at the perplexity of the baseline's operating point, interpolated linearly
            in log perplexity between learning rates, over the same seeds; where the curve has it more than once, at
            the lowest. None where it never has it.
    """

    objective: str
    points: tuple[FrontierPoint, ...]
    operating: FrontierPoint | None
    chosen_by: tuple[int | None, ...]
    range_end: str | None
    on_front: bool
    lms_at_baseline: float | None


@dataclass(frozen=True)
class SeedDifference:
    """An objective minus a reference, paired by seed.

    Args:
        objective (str): its name.
        reference (str): what it is compared with.
        learning_rate (float | None): the objective's.
        reference_rate (float | None): the reference's.
        num_pairs (int): seeds that both have; others are left out.
        lms (SeedEstimate | None): difference in average LMS; None where there is no pair.
        log_perplexity (SeedEstimate | None): difference in log perplexity, likewise.
        reduction (float | None): of the mean LMS, ``(reference - objective) / reference`` over the pairs, a fraction;
            None where the reference's is 0, or there is no pair.
        verdict (str): one of ``VERDICTS``.
    """

    objective: str
    reference: str
    learning_rate: float | None
    reference_rate: float | None
    num_pairs: int
    lms: SeedEstimate | None
    log_perplexity: SeedEstimate | None
    reduction: float | None
    verdict: str


@dataclass(frozen=True)
class Frontier:
    """All objectives of one model.

    Args:
        model (str): its name.
        baseline (str): the baseline, which the model may lack.
        references (tuple[str, ...]): what objectives are compared with, the baseline first.
        curves (tuple[FrontierCurve, ...]): the baseline's first.
        at_operating_points (tuple[SeedDifference, ...]): by reference, then objective: each at its own operating point.
        at_equal_rates (tuple[SeedDifference, ...]): by reference, objective and learning rate: both at the same. Where
            there is a single learning rate, it would say the same again and is empty.
        left_out (tuple[str, ...]): runs that no curve can have, with the reason.
    """

    model: str
    baseline: str
    references: tuple[str, ...]
    curves: tuple[FrontierCurve, ...]
    at_operating_points: tuple[SeedDifference, ...]
    at_equal_rates: tuple[SeedDifference, ...]
    left_out: tuple[str, ...]


def perplexity_of(log_perplexity: float) -> float:
    """Take a mean negative log-likelihood to a perplexity.

    Args:
        log_perplexity (float): natural logarithm.

    Returns:
        float: e to the power of it; infinite where that is too large for a float.
    """
    with np.errstate(over="ignore"):
        return float(np.exp(log_perplexity))


def trace_frontiers(
    records: Sequence[RunRecord], *, baseline: str | None = None, references: Sequence[str] = ()
) -> list[Frontier]:
    """Trace each model's objectives through their learning rates and compare them.

    Args:
        records (Sequence[RunRecord]): of any models, objectives, learning rates and seeds; of a run's checkpoints the
            last one counts.
        baseline (str | None): objective to compare with. Default: None, "CE" where there is one, else the first
            record's.
        references (Sequence[str]): more objectives to compare with. Default: none.

    Returns:
        list[Frontier]: the models in the order of their first record.

    Raises:
        ValueError: If there is no record, none has the baseline or a reference, two records have the same names, or
            records of a model were not asked the same.
    """
    if not records:
        raise ValueError("there is no run to draw a frontier of: give folders of evaluated runs, or a file of records")
    objectives = list(dict.fromkeys(record.objective for record in records))
    baseline = choose_baseline(objectives, baseline)
    if unknown := [name for name in references if name not in objectives]:
        raise ValueError(f"no run has the reference {unknown[0]!r}: there are {', '.join(objectives)}")
    _require_distinct(records)
    records = _last_checkpoints(records)
    names = tuple(dict.fromkeys((baseline, *references)))
    objectives.sort(key=lambda name: name != baseline)
    return [
        _frontier(model, [record for record in records if record.model == model], objectives, names)
        for model in dict.fromkeys(record.model for record in records)
    ]


def _require_distinct(records: Iterable[RunRecord]) -> None:
    """A run may have several checkpoints, but not the same one twice, nor checkpoints of different trainings."""
    seen: dict[tuple[object, ...], dict[int, RunRecord]] = {}
    for record in records:
        others = seen.setdefault(record.run, {})
        if record.progress in others or any(_training_of(record) != _training_of(one) for one in others.values()):
            raise ValueError(f"two runs are both {record.title}: leave out one of the files or folders that have them")
        others[record.progress] = record


def _training_of(record: RunRecord) -> tuple[object, ...]:
    return record.recipe, record.loss, record.training_seconds, record.asked


def _last_checkpoints(records: Sequence[RunRecord]) -> list[RunRecord]:
    last = {record.run: record for record in sorted(records, key=lambda record: record.progress)}
    return [record for record in records if last[record.run] is record]


def _frontier(
    model: str, records: Sequence[RunRecord], objectives: Sequence[str], references: tuple[str, ...]
) -> Frontier:
    last = max(record.progress for record in records)
    reasons = {record.title: _why_left_out(record, last) for record in records}
    used = [record for record in records if reasons[record.title] is None]
    _require_same_questions(used)
    points = {name: found for name in objectives if (found := _points([r for r in used if r.objective == name]))}
    common = {name: _common_seeds(found) for name, found in points.items()}
    operating = {name: _operating_point(found, common[name]) for name, found in points.items()}
    at_baseline = operating.get(references[0])
    everywhere = [point for found in points.values() for point in found if point.finite]
    shared = _common_seeds(everywhere)
    curves = tuple(
        FrontierCurve(
            objective=name,
            points=found,
            operating=chosen,
            chosen_by=common[name],
            range_end=_range_end(found, chosen),
            on_front=chosen is not None and not any(_dominates(point, chosen, shared) for point in everywhere),
            lms_at_baseline=None if at_baseline is None else _lms_at(found, at_baseline, shared),
        )
        for name, found in points.items()
        for chosen in (operating[name],)
    )
    pairs = [(name, other) for other in references if other in points for name in points if name != other]
    equal_rates = [
        _difference(name, point, other, reference)
        for name, other in pairs
        for point in points[name]
        for reference in points[other]
        if point.learning_rate == reference.learning_rate
    ]
    several_rates = len({point.learning_rate for found in points.values() for point in found}) > 1
    return Frontier(
        model=model,
        baseline=references[0],
        references=references,
        curves=curves,
        at_operating_points=tuple(
            _difference(name, point, other, reference)
            for name, other in pairs
            if (point := operating[name]) is not None and (reference := operating[other]) is not None
        ),
        at_equal_rates=tuple(equal_rates) if several_rates else (),
        left_out=tuple(f"{title}: {reason}" for title, reason in reasons.items() if reason is not None),
    )


def _why_left_out(record: RunRecord, last: int) -> str | None:
    if record.progress < last:
        return f"evaluated at {record.progress} % of training at most, others at {last} %"
    missing = [what for what, value in (("LMS", record.lms), ("perplexity", record.log_perplexity)) if value is None]
    return f"{' and '.join(missing)} not measured" if missing else None


def _require_same_questions(records: Sequence[RunRecord]) -> None:
    for record in records[1:]:
        if record.asked != records[0].asked:
            raise ValueError(
                f"{records[0].title} and {record.title} cannot be compared: their prompts, references or perplexity "
                "blocks differ. Evaluate both with one probe file, data set and settings, or name the models apart"
            )


def _points(records: Sequence[RunRecord]) -> tuple[FrontierPoint, ...]:
    rates = {record.learning_rate for record in records}
    in_order = sorted(rates, key=lambda rate: -math.inf if rate is None else rate)
    return tuple(_point(rate, [record for record in records if record.learning_rate == rate]) for rate in in_order)


def _point(rate: float | None, records: Sequence[RunRecord]) -> FrontierPoint:
    lms, log_perplexities = (list(values) for values in zip(*map(_measured, records), strict=True))
    return FrontierPoint(rate, tuple(records), over_seeds(lms), over_seeds(log_perplexities))


def _measured(record: RunRecord) -> tuple[float, float]:
    assert record.lms is not None
    assert record.log_perplexity is not None  # others have been left out
    return record.lms, record.log_perplexity


def _common_seeds(points: Sequence[FrontierPoint]) -> tuple[int | None, ...]:
    """The seeds that all have; points with a diverged run, or of one without a known seed, are left out."""
    of_points = [[record.seed for record in point.records] for point in points if point.finite]
    seeds = [of_point for of_point in of_points if None not in of_point]
    return tuple(seed for seed in seeds[0] if all(seed in others for others in seeds)) if seeds else ()


def _operating_point(points: Sequence[FrontierPoint], seeds: Sequence[int | None]) -> FrontierPoint | None:
    """The first of the lowest, which is that of the lower learning rate."""
    finite = [point for point in points if point.finite]
    return min(finite, key=lambda point: _means(point, seeds)[1], default=None)


def _means(point: FrontierPoint, seeds: Sequence[int | None]) -> tuple[float, float]:
    """LMS and log perplexity by these seeds, by all that there are if none is given."""
    counted = [record for record in point.records if record.seed in seeds] or point.records
    lms, log_perplexity = np.mean([_measured(record) for record in counted], axis=0)
    return float(lms), float(log_perplexity)


def _range_end(points: Sequence[FrontierPoint], chosen: FrontierPoint | None) -> str | None:
    if chosen is None:
        return None
    if len(points) == 1:
        return "only"
    return "lowest" if chosen is points[0] else "highest" if chosen is points[-1] else None


def _dominates(point: FrontierPoint, other: FrontierPoint, seeds: Sequence[int | None]) -> bool:
    ours, theirs = (_means(one, seeds) for one in (point, other))
    return ours != theirs and ours[0] <= theirs[0] and ours[1] <= theirs[1]


def _lms_at(points: Sequence[FrontierPoint], other: FrontierPoint, seeds: Sequence[int | None]) -> float | None:
    """Where the curve has the other point's perplexity."""
    path = [_means(point, seeds) for point in points if point.finite]
    crossing = first_crossing(np.array([log for _, log in path]), _means(other, seeds)[1]) if path else None
    if crossing is None:
        return None
    before, after, weight = crossing
    return (1 - weight) * path[before][0] + weight * path[after][0]


def _difference(objective: str, point: FrontierPoint, reference: str, other: FrontierPoint) -> SeedDifference:
    """A run of an unknown seed is paired with the reference's of an unknown seed."""
    of_reference = {record.seed: record for record in other.records}
    pairs = [
        (_measured(record), _measured(of_reference[record.seed]))
        for record in point.records
        if record.seed in of_reference
    ]
    lms = over_seeds([ours[0] - theirs[0] for ours, theirs in pairs]) if pairs else None
    log_perplexity = over_seeds([ours[1] - theirs[1] for ours, theirs in pairs]) if pairs else None
    recited = sum(theirs[0] for _, theirs in pairs)
    return SeedDifference(
        objective=objective,
        reference=reference,
        learning_rate=point.learning_rate,
        reference_rate=other.learning_rate,
        num_pairs=len(pairs),
        lms=lms,
        log_perplexity=log_perplexity,
        reduction=1 - sum(ours[0] for ours, _ in pairs) / recited if recited else None,
        verdict=verdict(lms, log_perplexity),
    )
