"""Recitation against perplexity over learning rates: objectives as curves, and their differences over seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tfidf_tune.analysis._comparison import first_crossing
from tfidf_tune.analysis._over_seeds import SeedEstimate, over_seeds, verdict
from tfidf_tune.analysis._settings import average_scores, choose_baseline, require_comparable
from tfidf_tune.results import Results

if TYPE_CHECKING:
    import pandas as pd

_MEASURED = ("lms", "log_perplexity")


@dataclass(frozen=True)
class Point:
    """An objective at one learning rate.

    Args:
        objective (str): its name.
        learning_rate (float | None): None if the runs name none.
        runs (pandas.DataFrame): a row a run, see :func:`run_table`, each with LMS and perplexity.
        lms (SeedEstimate): average LMS.
        log_perplexity (SeedEstimate): mean negative log-likelihood of a held-out token.
    """

    objective: str
    learning_rate: float | None
    runs: "pd.DataFrame"
    lms: SeedEstimate
    log_perplexity: SeedEstimate

    @property
    def perplexity(self) -> float:
        """The geometric mean over seeds; infinite if a run diverged."""
        return perplexity_of(self.log_perplexity.mean)

    @property
    def finite(self) -> bool:
        """Whether no run diverged, so far that the perplexity is more than a float can hold."""
        return math.isfinite(self.perplexity)

    def means(self, seeds: Sequence[int | None]) -> tuple[float, float]:
        """Return LMS and log perplexity by these seeds; by all if none of them is there."""
        counted = self.runs[self.runs["seed"].isin(seeds)]
        lms, log_perplexity = (counted if len(counted) else self.runs)[list(_MEASURED)].mean()
        return float(lms), float(log_perplexity)


@dataclass(frozen=True)
class Curve:
    """An objective through its learning rates.

    Args:
        objective (str): its name.
        points (tuple[Point, ...]): by ascending learning rate.
        operating (Point | None): the learning rate of the lowest held-out perplexity, of equal ones the lower. None if
            runs of every learning rate diverged.
        chosen_by (tuple[int, ...]): the seeds by which it was chosen: those that all learning rates without a diverged
            run have. Empty if there is none: then each counts by its own seeds.
        range_end (str | None): "lowest" or "highest" if that learning rate is an end of those tried; "only" if there
            was one; otherwise None.
        on_front (bool): whether no point of the model has as low an LMS and as low a perplexity as the operating
            point, one of them lower: by the means over the seeds that all points of the model have, if there are any.
        lms_at_baseline (float | None): LMS at the perplexity of the baseline's operating point, interpolated linearly
            in log perplexity between learning rates, by the same seeds; if the curve has it more than once, at the
            lowest learning rate. None if it never has it.
    """

    objective: str
    points: tuple[Point, ...]
    operating: Point | None
    chosen_by: tuple[int, ...]
    range_end: str | None
    on_front: bool
    lms_at_baseline: float | None


@dataclass(frozen=True)
class SeedDifference:
    """An objective minus a reference, paired by seed; seeds that only one of them has are left out."""

    objective: str
    reference: str
    learning_rate: float | None  # the objective's
    reference_rate: float | None
    num_pairs: int
    lms: SeedEstimate | None  # difference in average LMS; None if there is no pair
    log_perplexity: SeedEstimate | None  # likewise
    reduction: float | None  # (reference - objective) / reference of the mean LMS; None if the reference's is 0
    verdict: str  # one of VERDICTS


@dataclass(frozen=True)
class Frontier:
    """All objectives of one model."""

    model: str
    references: tuple[str, ...]  # what objectives are compared with; the baseline first, which the model may lack
    curves: tuple[Curve, ...]  # the baseline's first
    at_operating_points: tuple[SeedDifference, ...]  # by reference, then objective: each at its own operating point
    at_equal_rates: tuple[SeedDifference, ...]  # both at the same rate; empty if there is a single one
    left_out: tuple[str, ...]  # runs that no curve can have, with the reason


def perplexity_of(log_perplexity: float) -> float:
    """Return e to the power of a mean negative log-likelihood; infinite if that is too large for a float."""
    with np.errstate(over="ignore"):
        return float(np.exp(log_perplexity))


def run_table(results: Results) -> "pd.DataFrame":
    """Return a row for each checkpoint.

    Returns:
        pandas.DataFrame: indexed as ``results.checkpoints``, with the columns "model", "objective", "learning_rate"
            and "seed" (None if unknown), "progress", "title", those of :func:`average_scores`, and "log_perplexity",
            which is its "nll".
    """
    import pandas as pd

    names = ["model", "objective", "learning_rate", "seed", "progress", "title"]
    rows = [[getattr(one, name) for name in names] for one in results.checkpoints]
    table = pd.DataFrame(rows, columns=names, dtype=object)
    averages = average_scores(results.scores, ["checkpoint"])
    return table.join(averages.rename(columns={"nll": "log_perplexity"}))


def trace_frontiers(results: Results, *, baseline: str | None = None, references: Sequence[str] = ()) -> list[Frontier]:
    """Trace each model's objectives through their learning rates and compare them.

    Args:
        results (Results): of any models, objectives, learning rates and seeds; of each run, the last checkpoint counts.
        baseline (str | None): objective to compare with. Default: None, "CE" if there is one, else the first run's.
        references (Sequence[str]): more objectives to compare with. Default: none.

    Returns:
        list[Frontier]: the models in the order of their first run.

    Raises:
        ValueError: If there is no run, none has the baseline or a reference, two runs have the same names, or runs of a
            model were not asked the same.
    """
    if not results.checkpoints:
        raise ValueError("there is no run to draw a frontier of: give folders of evaluated runs, or a results file")
    baseline, objectives = choose_baseline(results.checkpoints, baseline)
    if unknown := [name for name in references if name not in objectives]:
        raise ValueError(f"no run has the reference {unknown[0]!r}: there are {', '.join(objectives)}")
    require_comparable(results)
    runs = run_table(results)
    runs["run"] = [one.run for one in results.checkpoints]
    last = runs.groupby("run", sort=False)["progress"].transform("max")
    runs = runs[runs["progress"] == last]
    names = tuple(dict.fromkeys((baseline, *references)))
    return [_frontier(model, runs[runs["model"] == model], objectives, names) for model in dict.fromkeys(runs["model"])]


def _frontier(model: str, runs: "pd.DataFrame", objectives: Sequence[str], references: tuple[str, ...]) -> Frontier:
    last = runs["progress"].max()
    reasons = {row.title: _why_left_out(row, last) for row in runs.itertuples()}
    used = runs[[reasons[title] is None for title in runs["title"]]]
    points = {name: found for name in objectives if (found := _points(name, used[used["objective"] == name]))}
    common = {name: _common_seeds(found) for name, found in points.items()}
    operating = {name: _operating_point(found, common[name]) for name, found in points.items()}
    at_baseline = operating.get(references[0])
    everywhere = [point for found in points.values() for point in found if point.finite]
    shared = _common_seeds(everywhere)
    curves = tuple(
        Curve(
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
    several_rates = len({point.learning_rate for found in points.values() for point in found}) > 1
    return Frontier(
        model=model,
        references=references,
        curves=curves,
        at_operating_points=tuple(
            _seed_difference(point, reference)
            for name, other in pairs
            if (point := operating[name]) is not None and (reference := operating[other]) is not None
        ),
        at_equal_rates=tuple(
            _seed_difference(point, reference)
            for name, other in pairs
            for point in points[name]
            for reference in points[other]
            if several_rates and point.learning_rate == reference.learning_rate
        ),
        left_out=tuple(f"{title}: {reason}" for title, reason in reasons.items() if reason is not None),
    )


def _why_left_out(run: Any, last: int) -> str | None:
    if run.progress < last:
        return f"evaluated at {run.progress} % of training at most, others at {last} %"
    measured = {"LMS": run.lms, "perplexity": run.log_perplexity}
    missing = [name for name, value in measured.items() if math.isnan(value)]
    return f"{' and '.join(missing)} not measured" if missing else None


def _points(objective: str, runs: "pd.DataFrame") -> tuple[Point, ...]:
    rates = sorted(set(runs["learning_rate"]), key=lambda rate: -math.inf if rate is None else rate)
    own = [runs[[one == rate for one in runs["learning_rate"]]] for rate in rates]
    return tuple(
        Point(objective, rate, of_rate, *(over_seeds(of_rate[name].tolist()) for name in _MEASURED))
        for rate, of_rate in zip(rates, own, strict=True)
    )


def _common_seeds(points: Sequence[Point]) -> tuple[int, ...]:
    """The seeds that all have; points with a diverged run or of an unknown seed are left out."""
    seeds = [point.runs["seed"].tolist() for point in points if point.finite]
    known = [of_point for of_point in seeds if None not in of_point]
    return tuple(seed for seed in known[0] if all(seed in others for others in known)) if known else ()


def _operating_point(points: Sequence[Point], seeds: Sequence[int]) -> Point | None:
    """The first of the lowest, which is that of the lower learning rate."""
    return min((point for point in points if point.finite), key=lambda point: point.means(seeds)[1], default=None)


def _range_end(points: Sequence[Point], chosen: Point | None) -> str | None:
    if chosen is None:
        return None
    if len(points) == 1:
        return "only"
    return "lowest" if chosen is points[0] else "highest" if chosen is points[-1] else None


def _dominates(point: Point, other: Point, seeds: Sequence[int]) -> bool:
    ours, theirs = point.means(seeds), other.means(seeds)
    return ours != theirs and ours[0] <= theirs[0] and ours[1] <= theirs[1]


def _lms_at(points: Sequence[Point], other: Point, seeds: Sequence[int]) -> float | None:
    """Average LMS where the curve has the other point's perplexity."""
    path = [point.means(seeds) for point in points if point.finite]
    crossing = first_crossing(np.array([log for _, log in path]), other.means(seeds)[1]) if path else None
    if crossing is None:
        return None
    before, after, weight = crossing
    return (1 - weight) * path[before][0] + weight * path[after][0]


def _seed_difference(point: Point, reference: Point) -> SeedDifference:
    """A run of an unknown seed is paired with the reference's of an unknown seed."""
    ours, theirs = ({row.seed: row for row in one.runs.itertuples()} for one in (point, reference))
    seeds = [seed for seed in ours if seed in theirs]
    differences = [
        over_seeds([getattr(ours[seed], name) - getattr(theirs[seed], name) for seed in seeds])
        for name in (_MEASURED if seeds else ())
    ]
    lms, log_perplexity = differences or (None, None)
    recited = sum(theirs[seed].lms for seed in seeds)
    return SeedDifference(
        objective=point.objective,
        reference=reference.objective,
        learning_rate=point.learning_rate,
        reference_rate=reference.learning_rate,
        num_pairs=len(seeds),
        lms=lms,
        log_perplexity=log_perplexity,
        reduction=1 - sum(ours[seed].lms for seed in seeds) / recited if recited else None,
        verdict=verdict(lms, log_perplexity),
    )
