"""Recitation against perplexity over learning rates: objectives as curves, and their differences
over seeds.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from research.seeds import SeedEstimate, over_seeds, over_seeds_and_passages
from tfidf_tune.compare._evaluations import Floats, comparable_runs, first_crossing, totals_by_unit
from tfidf_tune.results import Results
from tfidf_tune.results.intervals import ALPHA, holm
from tfidf_tune.results.table import CONTROL_LMS, LMS, Measure

_MEASURED = ["lms", "log_perplexity"]
_MEANS = [
    "rouge_l",
    "verbatim",
    "control_lms",
    "edit_distance",
    "common_subsequence",
    "control_edit_distance",
    "control_common_subsequence",
]

BETTER = "better"
WORSE = "worse"
NO_DIFFERENCE = "no difference shown"
_TOO_FEW = "no verdict: fewer than two pairs"
_DIVERGED = "no verdict: a run diverged"
# By the direction of LMS and of perplexity: -1 lower, 0 the interval includes 0, 1 higher.
_RECITES = {-1: "recites less", 0: "LMS unclear", 1: "recites more"}
_COSTS = {-1: "perplexity lower", 0: "perplexity unclear", 1: "perplexity higher"}
_VERDICTS = {
    (lms, cost): f"{_RECITES[lms]}, {_COSTS[cost]}" for lms, cost in product(_RECITES, _COSTS)
}
_VERDICTS |= {(-1, -1): BETTER, (0, 0): NO_DIFFERENCE, (1, 1): WORSE}
VERDICTS = (*_VERDICTS.values(), _TOO_FEW, _DIVERGED)
"""All verdicts, the best first."""


class Frontiers(NamedTuple):
    """The objectives of each model through their learning rates, and how they differ.

    Attributes:
        references (tuple[str, ...]): objectives that others are compared with; the baseline first.
        points (pandas.DataFrame): a row for each model, objective (the baseline first) and
            ascending learning rate ("learning_rate", NaN if the runs name none), with

            - "seeds" (tuple): of its runs,
            - "lms" and "log_perplexity": means over seeds, with the ends "..._low" and "..._high"
              of their intervals (NaN if there is none); "perplexity" and its ends: e to the power
              of these,
            - "max_lms", "rouge_l", "verbatim", "edit_distance", "common_subsequence" and, of the
              controls, "control_lms", "control_edit_distance", "control_common_subsequence";
              "excess": LMS minus the controls', with the ends of its interval, that of
              :func:`over_seeds_and_passages`, or over seeds where single passages were not kept,
            - "finite": whether no run diverged,
            - "operating": whether it is the operating point of its objective: of the finite ones
              the learning rate of the lowest mean log perplexity, of equal ones the lower, over the
              seeds that all of them have ("common", a tuple; if it is empty, each counts by its own
              seeds).

            At operating points only:

            - "range_end": "lowest" or "highest" if it is an end of the rates tried; "only" if there
              was one; or None,
            - "on_front": whether no finite point of the model has as low an LMS and as low a
              perplexity, one of them lower, by the means over the seeds that all points of the
              model have, if there are any,
            - "lms_at_baseline": LMS of the objective at the perplexity of the baseline's operating
              point, interpolated linearly in log perplexity between learning rates, by the same
              seeds; at the lowest learning rate if it has it more than once; NaN if it never has
              it.
        differences (pandas.DataFrame): objective minus reference over the seeds that both have, a
            row for each "model", "reference", "objective" and "at": "operating points" (each at its
            own) or "equal rates" (unless there is a single one); with "learning_rate" and
            "reference_rate", "num_pairs", "lms" and "log_perplexity" as above, "perplexity" (in
            percent of the reference's, and its ends), "reduction" ((reference - objective) /
            reference of the mean LMS, NaN if the reference's is 0), "lms_p" and "perplexity_p":
            p-values, by Holm's method over both measures of all rows of the model with the same
            "at", and "verdict". The interval of the LMS is that of :func:`over_seeds_and_passages`,
            or over seeds where single passages were not kept.
        left_out (tuple[str, ...]): runs that no curve can have, with the reason.
    """

    references: tuple[str, ...]
    points: pd.DataFrame
    differences: pd.DataFrame
    left_out: tuple[str, ...]


@np.errstate(over="ignore")  # a perplexity that is too large for a float is infinite
def trace_frontiers(
    results: Results, *, baseline: str | None = None, references: Sequence[str] = ()
) -> Frontiers:
    """Trace each model's objectives through their learning rates and compare them.

    Args:
        results (Results): of any models, objectives, learning rates and seeds; of each run, the
            last checkpoint counts.
        baseline (str | None): objective to compare with. Default: None, "CE" if there is one, else
            the first run's.
        references (Sequence[str]): more objectives to compare with. Default: none.

    Raises:
        ValueError: If there is no run, none has both LMS and perplexity, none has the baseline or a
            reference, two runs have the same names, or runs of a model were not asked the same.
    """
    if not results.checkpoints:
        raise ValueError(
            "there is no run to draw a frontier of: give folders of evaluated runs, or a results "
            "file"
        )
    objectives, runs = comparable_runs(results, baseline)
    unknown = [name for name in references if name not in objectives]
    if unknown:
        raise ValueError(
            f"no run has the reference {unknown[0]!r}: there are {', '.join(objectives)}"
        )
    runs = runs.assign(
        of_model=runs.groupby("model", sort=False).ngroup(),
        of_objective=runs["objective"].map(objectives.index),
    ).sort_values("of_model", kind="stable")
    runs = runs[runs["progress"] == runs.groupby("run", sort=False)["progress"].transform("max")]
    reasons = [_why_left_out(run, runs) for run in runs.itertuples()]
    left_out = [
        f"{title}: {reason}" for title, reason in zip(runs["title"], reasons, strict=True) if reason
    ]
    keys = ["of_model", "of_objective", "learning_rate"]
    used = runs[[reason is None for reason in reasons]].sort_values(
        keys, na_position="first", kind="stable"
    )
    if used.empty:
        raise ValueError(f"no run has both LMS and perplexity: {'; '.join(left_out)}")
    used = used.assign(
        point=used.groupby(keys, dropna=False, sort=False).ngroup(),
        passages=used.index.map(_passage_lms(results, LMS)),
        controls=used.index.map(_passage_lms(results, CONTROL_LMS)),
    )
    points = pd.DataFrame([_point(own) for _, own in used.groupby("point")])
    for _, own in points.groupby("model", sort=False):
        _mark_operating_points(points, own, used[used["point"].isin(own.index)], objectives[0])
    names = tuple(dict.fromkeys((objectives[0], *references)))
    found = list(_differences(points, used, names))
    for family in {(one["model"], one["at"]) for one in found}:
        _judge([one for one in found if (one["model"], one["at"]) == family])
    return Frontiers(
        names, points, pd.DataFrame(found, columns=_DIFFERENCE_COLUMNS), tuple(left_out)
    )


def _passage_lms(results: Results, measure: Measure) -> dict[int, Floats]:
    """Checkpoint -> LMS of targets or controls by ascending passage, of mean the average, if
    passages were kept.
    """
    rows = results.scores[
        (results.scores["metric"] == measure.metric) & (results.scores["kind"] == measure.kind)
    ]
    return {
        checkpoint: sums / counts.mean()
        for (checkpoint, *_), (sums, counts) in totals_by_unit(rows).items()
    }


def _why_left_out(run: Any, runs: pd.DataFrame) -> str | None:
    last = runs.loc[runs["model"] == run.model, "progress"].max()
    if run.progress < last:
        return f"evaluated at {run.progress} % of training at most, others at {last} %"
    measured = {"LMS": run.lms, "perplexity": run.log_perplexity}
    missing = [name for name, value in measured.items() if math.isnan(value)]
    return f"{' and '.join(missing)} not measured" if missing else None


def _point(runs: pd.DataFrame) -> dict[str, Any]:
    lms = over_seeds(runs["lms"].tolist())
    log_perplexity = over_seeds(runs["log_perplexity"].tolist())
    excess = over_seeds((runs["lms"] - runs["control_lms"]).tolist())
    passages = runs["passages"].tolist()
    controls = runs["controls"].tolist()
    if all(isinstance(numbers, np.ndarray) for numbers in (*passages, *controls)):
        excess = over_seeds_and_passages(np.array(passages), np.array(controls))
    return {
        **runs.iloc[0][["model", "objective", "learning_rate"]],
        "seeds": tuple(runs["seed"]),
        **_estimates(lms, log_perplexity, np.exp),
        "max_lms": runs["max_lms"].max(),
        **runs[_MEANS].mean(),
        **dict(zip(("excess", "excess_low", "excess_high"), excess[:3], strict=True)),
        "finite": math.isfinite(np.exp(log_perplexity.mean)),
        "operating": False,
        "common": (),
        "range_end": None,
        "on_front": False,
        "lms_at_baseline": math.nan,
    }


def _estimates(
    lms: SeedEstimate, log_perplexity: SeedEstimate, scale: Callable[[float], float]
) -> dict[str, float]:
    """Name means and the ends of their intervals; "perplexity" is the scaled log perplexity."""
    scaled = log_perplexity._replace(
        mean=scale(log_perplexity.mean),
        low=scale(log_perplexity.low),
        high=scale(log_perplexity.high),
    )
    estimates = {"lms": lms, "log_perplexity": log_perplexity, "perplexity": scaled}
    named: dict[str, float] = {}
    for name, estimate in estimates.items():
        named[name] = estimate.mean
        named[f"{name}_low"] = estimate.low
        named[f"{name}_high"] = estimate.high
    return named


def _mark_operating_points(
    points: pd.DataFrame, of_model: pd.DataFrame, runs: pd.DataFrame, baseline: str
) -> None:
    """Fill in the columns of ``points`` that say which points of a model are operating points, and
    what they are.
    """
    finite = runs[runs["point"].map(points["finite"])]
    means = _means(finite, _common_seeds(finite))
    chosen = {}
    for objective, own in finite.groupby("objective", sort=False):
        common = _common_seeds(own)
        chosen[objective] = at = _means(own, common)["log_perplexity"].idxmin()
        rates = of_model.index[of_model["objective"] == objective]
        end = "only" if len(rates) == 1 else {rates[0]: "lowest", rates[-1]: "highest"}.get(at)
        dominated = (means <= means.loc[at]).all(axis=1) & (means != means.loc[at]).any(axis=1)
        points.at[at, "common"] = common
        points.loc[at, ["operating", "range_end", "on_front"]] = [True, end, not dominated.any()]
    for objective, at in chosen.items() if baseline in chosen else ():
        path = means[points.loc[means.index, "objective"] == objective]
        goal = means.at[chosen[baseline], "log_perplexity"]
        crossing = first_crossing(path["log_perplexity"].to_numpy(), goal)
        if crossing is not None:
            before, after, weight = crossing
            ends = path["lms"].iloc[before], path["lms"].iloc[after]
            points.loc[at, "lms_at_baseline"] = (1 - weight) * ends[0] + weight * ends[1]


def _common_seeds(runs: pd.DataFrame) -> tuple[int, ...]:
    """The seeds that all points have; points with a run of an unknown seed are left out."""
    seeds = [own.tolist() for _, own in runs.groupby("point")["seed"]]
    known = [of_point for of_point in seeds if None not in of_point]
    if not known:
        return ()
    return tuple(seed for seed in known[0] if all(seed in others for others in known))


def _means(runs: pd.DataFrame, seeds: Sequence[int]) -> pd.DataFrame:
    """Mean LMS and log perplexity of each point over these seeds, or over its own if it has none of
    them.
    """
    counted, own = (
        part.groupby("point")[_MEASURED].mean() for part in (runs[runs["seed"].isin(seeds)], runs)
    )
    return counted.combine_first(own)


def _differences(
    points: pd.DataFrame, runs: pd.DataFrame, references: Sequence[str]
) -> Iterator[dict[str, Any]]:
    measured = {
        point: {one.seed: one for one in own.itertuples()} for point, own in runs.groupby("point")
    }
    for _, own in points.groupby("model", sort=False):
        several_rates = own["learning_rate"].nunique(dropna=False) > 1
        for reference, one, other in product(references, own.itertuples(), own.itertuples()):
            if one.objective == reference or other.objective != reference:
                continue
            same_rate = str(one.learning_rate) == str(other.learning_rate)  # both may be NaN
            compared = {
                "operating points": one.operating and other.operating,
                "equal rates": several_rates and same_rate,
            }
            for at in (name for name, applies in compared.items() if applies):
                names = {
                    "model": one.model,
                    "reference": reference,
                    "objective": one.objective,
                    "at": at,
                }
                names |= {"learning_rate": one.learning_rate, "reference_rate": other.learning_rate}
                yield names | _difference(measured[one.Index], measured[other.Index])


def _difference(ours: dict[Any, Any], theirs: dict[Any, Any]) -> dict[str, Any]:
    """Compare LMS and log perplexity by seed; a run of an unknown seed is paired with one of an
    unknown seed.
    """
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    log_perplexity = over_seeds([own.log_perplexity - other.log_perplexity for own, other in pairs])
    lms = over_seeds([own.lms - other.lms for own, other in pairs])
    has_passages = [
        isinstance(own.passages, np.ndarray) and isinstance(other.passages, np.ndarray)
        for own, other in pairs
    ]
    if pairs and all(has_passages):
        lms = over_seeds_and_passages(
            np.array([own.passages - other.passages for own, other in pairs])
        )
    reduction = math.nan
    reference = sum(other.lms for _, other in pairs)
    if reference:
        reduction = 1 - sum(own.lms for own, _ in pairs) / reference
    finite = math.isfinite(log_perplexity.mean)
    return {
        "num_pairs": len(pairs),
        **_estimates(
            lms, log_perplexity, lambda log_ratio: 100 * np.expm1(log_ratio) if finite else math.nan
        ),
        "reduction": reduction,
        "estimates": (lms, log_perplexity),
    }


def verdict(lms: SeedEstimate, log_perplexity: SeedEstimate) -> str:
    """Return the one of ``VERDICTS`` on differences, objective minus reference, with corrected
    p-values.

    "Better" is a lower LMS at a perplexity that is lower, or whose interval ends at 0. "Worse" is
    the mirror image.
    """
    if min(lms.num_seeds, log_perplexity.num_seeds) < 2:
        return _TOO_FEW
    if math.isnan(lms.low) or math.isnan(log_perplexity.low):
        return _DIVERGED
    recited = _direction(lms)
    cost = _direction(log_perplexity)
    if recited < 0 and (cost < 0 or log_perplexity.high == 0):
        return BETTER
    if recited > 0 and (cost > 0 or log_perplexity.low == 0):
        return WORSE
    return _VERDICTS[recited, cost]


def _direction(difference: SeedEstimate) -> int:
    """Return -1 or 1 for lower or higher, if the interval and the p-value say so; else 0."""
    if not (difference.p_value < ALPHA):  # or NaN
        return 0
    if difference.low > 0:
        return 1
    if difference.high < 0:
        return -1
    return 0


def _judge(differences: Sequence[dict[str, Any]]) -> None:
    """Correct the p-values of a family of comparisons, and add their verdicts."""
    p_values: list[float] = []
    for one in differences:
        p_values += [estimate.p_value for estimate in one["estimates"]]
    adjusted = holm(p_values).reshape(-1, 2)
    for one, (lms_p, perplexity_p) in zip(differences, adjusted.tolist(), strict=True):
        lms, log_perplexity = one.pop("estimates")
        said = verdict(lms._replace(p_value=lms_p), log_perplexity._replace(p_value=perplexity_p))
        one |= {"lms_p": lms_p, "perplexity_p": perplexity_p, "verdict": said}


_ESTIMATED = list(_estimates(over_seeds([]), over_seeds([]), float))
_DIFFERENCE_COLUMNS = [
    "model",
    "reference",
    "objective",
    "at",
    "learning_rate",
    "reference_rate",
    "num_pairs",
    *_ESTIMATED,
    "reduction",
    "lms_p",
    "perplexity_p",
    "verdict",
]
