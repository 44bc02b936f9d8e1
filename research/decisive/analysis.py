"""The registered analysis: recitation above chance at equal perplexity.

An arm has a curve: of each learning rate, how far each target is recited, and the perplexity of
held-out text. The perplexity falls with the learning rate, down to the arm's lowest; higher rates
are not on the curve. Two arms are compared, in each seed, at the lowest perplexity that both reach:

    rate      A: perplexity  recited     B: perplexity  recited
    0.001              20.0      1.0              19.0      0.5
    0.002              16.0      5.0              18.0      0.7

A reaches 16, B reaches 18: they are compared at 18. B recites 0.7 there, A half-way (in the
logarithm of the perplexity, about) between 1.0 and 5.0.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from research.seeds import SeedEstimate, over_seeds
from tfidf_tune.results.intervals import holm

Record = Mapping[str, Any]
Choice = Callable[[Mapping[str, Any]], bool]
LAST_CHECKPOINT = "checkpoint_100pct"
NEAR_CHANCE = 0.5
"""So many tokens recited above chance are near chance."""
LEAST_COPIES = 4
"""Targets with fewer copies are hardly recited by any arm, and are reported by themselves."""
OFTEN = 16
"""Passages with so many copies or more are often repeated."""


class Point(NamedTuple):
    """An arm at a learning rate: what is recited above chance, and the perplexity."""

    rate: float
    perplexity: float
    recited: float


def differs(target: Mapping[str, Any]) -> bool:
    """Whether a target is one of the primary contrast: its copies differ, and it has several."""
    return bool(target["change"] != "exact" and target["copies"] >= LEAST_COPIES)


def is_exact(target: Mapping[str, Any]) -> bool:
    """Whether a target has several copies that are exact."""
    return bool(target["change"] == "exact" and target["copies"] >= LEAST_COPIES)


def above_chance(record: Record, choice: Choice, measure: str = "lms") -> float:
    """Return the mean of the chosen targets minus the mean of the controls, of one run."""
    recited = fmean(target[measure] for target in record["targets"] if choice(target))
    return recited - fmean(control[measure] for control in record["controls"])


def curve(
    records: Sequence[Record], arm: str, seed: int, choice: Choice, measure: str = "lms"
) -> list[Point]:
    """Return the points of an arm in a seed by learning rate, up to its lowest perplexity.

    Raises:
        ValueError: If there are none: an arm is read when all of its runs are made.
    """
    points = []
    for record in records:
        if record["objective"] == arm and record["seed"] == seed:
            recited = above_chance(record, choice, measure)
            points.append(Point(record["learning_rate"], record["perplexity"], recited))
    if not points:
        raise ValueError(f"no record of {arm}, seed {seed}: the part is not finished")
    points.sort()
    lowest = min(range(len(points)), key=lambda place: points[place].perplexity)
    return points[: lowest + 1]


def recited_at(points: Sequence[Point], perplexity: float) -> float:
    """Read a curve at a perplexity, linearly in its logarithm between two learning rates; beyond an
    end of the curve the value is that of the end.
    """
    if perplexity >= points[0].perplexity:
        return points[0].recited
    for higher, lower in pairwise(points):
        if lower.perplexity <= perplexity <= higher.perplexity:
            whole = math.log(higher.perplexity / lower.perplexity)
            part = math.log(higher.perplexity / perplexity) / whole if whole else 1.0
            return higher.recited + part * (lower.recited - higher.recited)
    return points[-1].recited


def lowest_near_chance(points: Sequence[Point]) -> float | None:
    """Return the lowest perplexity of a curve at which at most half a token is recited above
    chance; None if more is recited at every learning rate.
    """
    near = [point.perplexity for point in points if point.recited <= NEAR_CHANCE]
    return min(near, default=None)


def contrast(
    records: Sequence[Record], ours: str, theirs: str, choice: Choice, measure: str = "lms"
) -> SeedEstimate:
    """Compare two arms at equal perplexity: ours minus theirs, over seeds.

    Passages are drawn anew for each seed, so that Student's t over the seeds' differences covers
    the choice of passages, too.
    """
    pairs = at_equal_perplexity(records, ours, theirs, choice, measure)
    return over_seeds([pair.ours - pair.theirs for pair in pairs])


class Pair(NamedTuple):
    """What two arms recite above chance at the lowest perplexity that both reach.

    ``is_beyond``: one of the arms has a lower perplexity at all of its learning rates, and is read
    at its highest perplexity.
    """

    ours: float
    theirs: float
    is_beyond: bool


def at_equal_perplexity(
    records: Sequence[Record], ours: str, theirs: str, choice: Choice, measure: str = "lms"
) -> list[Pair]:
    """Return the pair of each seed."""
    pairs = []
    for seed in sorted({record["seed"] for record in records}):
        of_ours = curve(records, ours, seed, choice, measure)
        of_theirs = curve(records, theirs, seed, choice, measure)
        reached = max(of_ours[-1].perplexity, of_theirs[-1].perplexity)
        is_beyond = reached > min(of_ours[0].perplexity, of_theirs[0].perplexity)
        values = (recited_at(of_ours, reached), recited_at(of_theirs, reached))
        pairs.append(Pair(*values, is_beyond))
    return pairs


def cost(records: Sequence[Record], ours: str, theirs: str) -> SeedEstimate:
    """Compare the lowest perplexities of two arms: the logarithm of their ratio, over seeds."""
    ratios = []
    for seed in sorted({record["seed"] for record in records}):
        lowest = []
        for arm in (ours, theirs):
            points = curve(records, arm, seed, differs)
            lowest.append(points[-1].perplexity)
        ratios.append(math.log(lowest[0] / lowest[1]))
    return over_seeds(ratios)


def difference(records: Sequence[Record], ours: str, theirs: str, measure: str) -> SeedEstimate:
    """Compare a measure of whole runs, such as the share of facts that are known, at the learning
    rate of the lowest perplexity of each arm: ours minus theirs, over seeds.
    """
    differences = []
    for seed in sorted({record["seed"] for record in records}):
        values = []
        for arm in (ours, theirs):
            own = [one for one in records if one["objective"] == arm and one["seed"] == seed]
            best = min(own, key=lambda record: record["perplexity"])
            values.append(best[measure])
        differences.append(values[0] - values[1])
    return over_seeds(differences)


_CHOICES: dict[str, Choice] = {"differ": differs, "exact": is_exact}


def registered(records: Sequence[Record], registration: Mapping[str, Any]) -> dict[str, Any]:
    """Compute what was registered, from the records of its model at the end of training.

    Returns:
        ``primary``: an estimate. ``secondary``: pairs of a comparison and its estimate, with
        p-values after Holm's correction. ``non_inferiority``: by the other arm, the estimated
        logarithm of the ratio of perplexities, and whether it lies below the margin.
    """
    named = registration["primary"]
    records = [
        record
        for record in records
        if record["model"] == named["model"] and record["checkpoint"] == LAST_CHECKPOINT
    ]
    primary = contrast(records, named["ours"], named["theirs"], differs)
    secondary = []
    for comparison in registration["secondary"]:
        arms = (comparison["ours"], comparison["theirs"])
        if comparison["what"] == "facts":
            estimate = difference(records, *arms, "facts_known")
        else:
            estimate = contrast(records, *arms, _CHOICES[comparison["what"]])
        secondary.append((comparison, estimate))
    corrected = holm([estimate.p_value for _, estimate in secondary])
    rule = registration["non_inferiority"]
    costs = {}
    for other in rule["theirs"]:
        estimate = cost(records, rule["ours"], other)
        costs[other] = (estimate, estimate.high < math.log1p(rule["margin"]))
    return {
        "primary": primary,
        "secondary": [
            (comparison, estimate._replace(p_value=float(p_value)))
            for (comparison, estimate), p_value in zip(secondary, corrected, strict=True)
        ],
        "non_inferiority": costs,
    }


def stopped_early(checkpoints: Sequence[Record], most_ngrams: float) -> Record:
    """Return the checkpoint at which the n-gram score stops a run: the last one before the mean
    score of the targets exceeds a limit, or else the first one.

    Args:
        checkpoints: Of one run, in the order of training.
        most_ngrams: The limit, from development text.
    """
    kept = checkpoints[0]
    for record in checkpoints:
        if fmean(target["ngrams"] for target in record["targets"]) > most_ngrams:
            break
        kept = record
    return kept
