"""Evaluated checkpoints: their averages, what each measure is made of, and how objectives differ in
them.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from tfidf_tune.results.floor import Floor, floor_of
from tfidf_tune.results.intervals import ALPHA, Interval, bootstrap_interval, holm
from tfidf_tune.results.table import (
    COMPARED,
    CONTROL_LMS,
    LMS,
    PASSAGE_NLL,
    PERPLEXITY,
    START,
    VERBATIM,
    Checkpoint,
    Measure,
    Results,
)

Floats: TypeAlias = npt.NDArray[np.float64]
_CONTINUATION = ("lms", "edit_distance", "common_subsequence")
_OF_CONTROLS = [f"control_{name}" for name in _CONTINUATION]


def average_scores(scores: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Average the scores of passages and blocks in groups, a row each in order of appearance; NaN
    if missing.

    Columns are the metrics of targets and blocks, "control_..." of controls, "max_lms",
    "max_prefix_match" and "num_predictions". Aggregates count only where a checkpoint has no rows
    of single units.
    """
    single = scores["unit"] != ""
    keys = [scores[name] for name in ("checkpoint", "metric", "kind")]
    has_units = single.groupby(keys, observed=True).transform("any")
    rows = scores[single | ~has_units].assign(
        sum=lambda table: table["value"] * table["count"],
        largest=lambda table: table["value"].where(table["count"] == 1),  # a mean is not a maximum
    )
    names = (
        rows["metric"]
        .astype(str)
        .where(rows["kind"] != "control", "control_" + rows["metric"].astype(str))
    )
    of_text = rows[~rows["kind"].isin(("article", "question"))]
    groups = of_text.groupby([*by, names], sort=False, dropna=False, observed=True)
    sums = groups[["sum", "count"]].sum()
    averages = (sums["sum"] / sums["count"]).unstack()
    averages = averages.reindex(
        columns=[*_CONTINUATION, "prefix_match", "rouge_l", "verbatim", *_OF_CONTROLS, "nll"]
    )
    largest = groups["largest"].max().unstack().reindex(columns=["lms", "max_lms", "prefix_match"])
    averages["max_lms"] = largest[["lms", "max_lms"]].max(axis=1)
    averages["max_prefix_match"] = largest["prefix_match"]
    averages["num_predictions"] = sums["count"].unstack().get("nll", 0.0)
    return averages.reindex(rows.drop_duplicates(list(by)).set_index(list(by)).index)


def run_table(results: Results) -> pd.DataFrame:
    """Return a row for each checkpoint.

    Returns:
        pandas.DataFrame: indexed as ``results.checkpoints``, with the columns "model", "objective",
            "learning_rate" (NaN if unset), "seed" (None if unknown), "progress", "folder",
            "setting", "run" and "title", see :class:`~tfidf_tune.results.Checkpoint`; those of
            :func:`average_scores`; and "log_perplexity", which is its "nll".
    """
    names = [
        "model",
        "objective",
        "learning_rate",
        "seed",
        "progress",
        "folder",
        "setting",
        "run",
        "title",
    ]
    rows = [[getattr(one, name) for name in names] for one in results.checkpoints]
    table = pd.DataFrame(rows, columns=names, dtype=object).astype(
        {"learning_rate": float, "progress": int}
    )
    return table.join(
        average_scores(results.scores, ["checkpoint"]).rename(columns={"nll": "log_perplexity"})
    )


def evaluation_table(results: Results, *, baseline: str | None = None) -> tuple[str, pd.DataFrame]:
    """Return the baseline, and a row for each checkpoint, by setting and objective in the order of
    the first runs.

    Args:
        results (Results): of any models, objectives and seeds.
        baseline (str | None): objective to compare with. Default: None, "CE" if there is one, else
            the first run's.

    Returns:
        tuple[str, pandas.DataFrame]: the baseline, which comes first in each setting; and a frame
            indexed as ``results.checkpoints`` with the columns of :func:`run_table`, and one for
            each measure by name: a tuple of float64 ``[n]`` sums and ``[n]`` counts by ascending
            unit (the prefix lengths of a passage stay together), or None if a value is missing.

    Raises:
        ValueError: If there is only one run, no run has the baseline, or runs of a model were not
            asked the same.
    """
    runs = results.checkpoints
    trained = {one.run: one for one in runs if one.objective != START}
    if len(trained) < 2 and baseline != START:
        found = "no run"
        for one in trained.values():
            found = f"only {one.folder} ({one.setting}, {one.objective})"
        raise ValueError(
            f"nothing to compare: there is {found}; for a single model use `tfidf-tune probe audit`"
        )
    objectives, table = comparable_runs(results, baseline)
    totals = totals_by_unit(results.scores)
    columns = {
        measure.label: [totals.get((at, measure.metric, measure.kind)) for at in table.index]
        for measure in (*COMPARED, CONTROL_LMS, PASSAGE_NLL, VERBATIM)
    }
    order = table.groupby("setting", sort=False).ngroup() * len(objectives) + table[
        "objective"
    ].map(objectives.index)
    return objectives[0], table.assign(**columns).loc[order.sort_values(kind="stable").index]


def totals_by_unit(scores: pd.DataFrame) -> dict[tuple[int, str, str], tuple[Floats, Floats]]:
    """Checkpoint, metric and kind -> sums and counts by unit; without aggregates, and those with a
    missing value.
    """
    rows = scores[scores["unit"] != ""]
    keys = ["checkpoint", "metric", "kind"]
    missing = (
        rows["value"].isna().groupby([rows[key] for key in keys], observed=True).transform("any")
    )
    units = rows["unit"].astype(str)
    units = units.where(rows["kind"] != "block", units.str.zfill(20))  # blocks are numbered
    rows = rows.assign(sum=rows["value"] * rows["count"], unit=units)[~missing]
    by_unit = rows.groupby([*keys, "unit"], observed=True)[["sum", "count"]]
    by_key = by_unit.sum().groupby(level=keys, observed=True)
    return {key: (own["sum"].to_numpy(float), own["count"].to_numpy(float)) for key, own in by_key}


def shared_progress(evaluations: pd.DataFrame, *measures: Measure) -> list[int]:
    """Return, ascending, the progress values at which every run with these measures has all of
    them.
    """
    is_measured = evaluations[[measure.label for measure in measures]].notna().all(axis=1)
    is_measured &= evaluations["objective"] != START
    runs_at: dict[int, set[object]] = {}
    for progress, run in zip(
        evaluations["progress"][is_measured], evaluations["run"][is_measured], strict=True
    ):
        runs_at.setdefault(progress, set()).add(run)
    measured = set[object]().union(*runs_at.values())
    return sorted(progress for progress, runs in runs_at.items() if runs == measured)


def at_last(evaluations: pd.DataFrame, *measures: Measure) -> pd.DataFrame:
    """Return the evaluations of a setting at the last progress where all runs have the measures,
    and of the start.
    """
    last = max(shared_progress(evaluations, *measures), default=None)
    return evaluations[(evaluations["progress"] == last) | (evaluations["objective"] == START)]


def having_at_last(
    evaluations: pd.DataFrame, measure: Measure
) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yield setting, objective and those of its evaluations at the last shared progress that have a
    measure.
    """
    for setting, own in evaluations.groupby("setting", sort=False):
        for objective, having in (
            at_last(own, measure).dropna(subset=[measure.label]).groupby("objective", sort=False)
        ):
            yield str(setting), str(objective), having


def unit_totals(evaluations: pd.DataFrame, measure: Measure) -> tuple[Floats, Floats] | None:
    """Return sums (means over evaluations) and counts by unit; None if there is no evaluation, or
    one misses it.
    """
    totals = evaluations[measure.label]
    if totals.empty or totals.isna().any():
        return None
    return np.mean([sums for sums, _ in totals], axis=0), totals.iloc[0][1]


def value_of(evaluations: pd.DataFrame, measure: Measure) -> float:
    """Return a measure over seeds, NaN if it is missing; perplexity is over
    all their predictions.
    """
    totals = unit_totals(evaluations, measure)
    return math.nan if totals is None else float(measure.value(*totals))


def comparable_runs(results: Results, baseline: str | None) -> tuple[list[str], pd.DataFrame]:
    """Return the objectives, the baseline (None: "CE" or else the first run's) first, and
    :func:`run_table`.

    Runs must differ and be asked the same; a task that was not run is not a difference.
    """
    objectives = list(dict.fromkeys(one.objective for one in results.checkpoints))
    objectives.sort(key=lambda name: name == START)  # the start comes last
    if baseline is None:
        baseline = "CE" if "CE" in objectives else objectives[0]
    if baseline not in objectives:
        raise ValueError(f"no run has the baseline {baseline!r}: there are {', '.join(objectives)}")
    known: dict[object, object] = {}
    first_asked: dict[tuple[str, str], Checkpoint] = {}
    for one in results.checkpoints:
        training = one.recipe, one.loss, one.training_seconds
        if (
            known.setdefault(one.run, training) != training
            or known.setdefault((one.run, one.progress), one) is not one
        ):
            raise ValueError(
                f"two runs are both {one.title}: leave out one of the files or folders that have "
                "them"
            )
        for what, digest in one.asked.items():
            first = first_asked.setdefault((one.model, what), one)
            if first.asked[what] != digest:
                both = " and ".join(
                    f"{of.title}, {of.progress} % ({of.folder})" for of in (first, one)
                )
                raise ValueError(
                    f"{both} cannot be compared, their {what} differ: evaluate both in the same way"
                )
    _require_same_bos(results)
    return sorted(objectives, key=lambda name: name != baseline), run_table(results)


def _require_same_bos(results: Results) -> None:
    """Refuse evaluations of one model of which some gave it BOS before each prompt, and some did
    not.
    """
    rows = results.scores[results.scores["metric"] == "has_bos"]
    first: dict[str, tuple[float, Checkpoint]] = {}
    for number, value in zip(rows["checkpoint"], rows["value"], strict=True):
        checkpoint = results.checkpoints[number]
        value_before, before = first.setdefault(checkpoint.model, (value, checkpoint))
        if value != value_before:
            by_bos = {value: checkpoint, value_before: before}
            raise ValueError(
                f"{by_bos[1.0].title} ({by_bos[1.0].folder}) was evaluated with BOS before each "
                f"prompt, and {by_bos[0.0].title} ({by_bos[0.0].folder}) without: evaluate both "
                "with the same bos=true or bos=false"
            )


def compare_objectives(evaluations: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Compare each objective of a setting with the baseline.

    Args:
        evaluations (pandas.DataFrame): of :func:`evaluation_table`.
        baseline (str): the baseline; settings without it are left out.

    Returns:
        pandas.DataFrame: a row for each "setting", "objective" and "measure" that both have at the
            last checkpoint that all runs share, if possible one where the LMS is known too
            ("progress", in percent), with the columns "baseline" and "other" (values), "reduction"
            (``(baseline - other) / baseline``; NaN if the baseline is 0 or a value is not finite),
            "low" and "high" (its interval; NaN if there is none), "num_units" (passages, blocks,
            articles or questions), "p_value" (by Holm's method over all rows of the setting), and
            "significant" ("yes", "no", "too few" or None, see :class:`Interval`; "yes" only if the
            p-value is below 0.05 too).
    """
    rows = []
    for setting, own in evaluations.groupby("setting", sort=False):
        if not (own["objective"] == baseline).any():
            continue
        last_with = {}
        for measure in COMPARED:
            last = at_last(own, LMS, measure)
            last_with[measure] = at_last(own, measure) if last.empty else last
        for objective in _compared(own):
            for measure, last in last_with.items():
                before, after = (
                    unit_totals(last[last["objective"] == of], measure)
                    for of in (baseline, objective)
                )
                if before is not None and after is not None:
                    reduction = _reduction(measure, before, after)
                    rows.append(
                        (setting, objective, measure.label, *reduction, last["progress"].max())
                    )
    names = [
        "setting",
        "objective",
        "measure",
        "baseline",
        "other",
        "reduction",
        *Interval._fields,
        "progress",
    ]
    table = pd.DataFrame(rows, columns=names)
    table["p_value"] = table.groupby("setting")["p_value"].transform(holm)
    intervals = table[["low", "high", "num_units"]].itertuples(index=False, name=None)
    said = pd.Series([Interval(*interval).significant for interval in intervals], dtype=object)
    return table.assign(significant=said.mask((said == "yes") & (table["p_value"] >= ALPHA), "no"))


def _compared(evaluations: pd.DataFrame) -> list[str]:
    """Return the objectives of a setting that are compared with the baseline, its first; the start
    is only shown.
    """
    return [
        str(objective) for objective in evaluations["objective"].unique()[1:] if objective != START
    ]


def _reduction(
    measure: Measure, baseline: tuple[Floats, Floats], other: tuple[Floats, Floats]
) -> tuple[float, ...]:
    """Return both values, the reduction (NaN if it is not finite) and its interval."""
    before, counts = baseline
    after, _ = other

    def reduction(before: Floats, after: Floats, counts: Floats, axis: int = -1) -> Any:
        reference = measure.value(before, counts, axis)
        return (reference - measure.value(after, counts, axis)) / reference

    reference = float(measure.value(before, counts))
    value = float(measure.value(after, counts))
    relative = (reference - value) / reference if reference else math.nan
    if not math.isfinite(relative):
        return (reference, value, math.nan, *Interval(math.nan, math.nan, len(counts)))
    return (reference, value, relative, *bootstrap_interval(reduction, before, after, counts))


def compare_at_equal_perplexity(evaluations: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Compare what an objective recites at the end with what the baseline recited when it had the
    same perplexity.

    Args:
        evaluations (pandas.DataFrame): of :func:`evaluation_table`.
        baseline (str): the baseline; settings without it are left out.

    Returns:
        pandas.DataFrame: a row for each "setting" and "objective" of which both measures are known
            wherever they were measured together, with the columns

            - "progress" of the last checkpoint that all runs share; "perplexity" and "lms": at it;
              "floor_bound": how far above the floor that LMS is at most, in tokens, if it cannot be
              told from it, else NaN,
            - "lowest" and "highest": of the baseline's perplexities,
            - "before" and "after": progress of the baseline's checkpoints between which it first
              had that perplexity (equal if exactly at one), "lms_before" and "lms_after": its
              average LMS there, "interpolated": between them, linearly in log perplexity; NaN if it
              never had it,
            - "baseline_floor_bound": the same of the baseline at both, the higher; NaN if one can
              be told,
            - "recited": "less" than at both of the baseline's checkpoints, "more", or "between"
              them; "not above floor" if neither objective can be told from it; None if the baseline
              never had the perplexity.
    """
    rows = []
    for setting, own in evaluations.groupby("setting", sort=False):
        of_baseline = own[own["objective"] == baseline]
        last = at_last(own, LMS, PERPLEXITY)
        path = [
            of_baseline[of_baseline["progress"] == at]
            for at in shared_progress(of_baseline, LMS, PERPLEXITY)
        ]
        points = np.array([[value_of(one, PERPLEXITY), value_of(one, LMS)] for one in path])
        for objective in _compared(own) if path and np.isfinite(points).all() else ():
            end = last[last["objective"] == objective]
            perplexity = value_of(end, PERPLEXITY)
            lms = value_of(end, LMS)
            if not math.isfinite(perplexity) or math.isnan(lms):
                continue
            own_bound = _floor_bound(end)
            progress = end["progress"].iloc[0]
            row = [
                setting,
                objective,
                progress,
                perplexity,
                lms,
                own_bound,
                points[:, 0].min(),
                points[:, 0].max(),
            ]
            crossing = first_crossing(np.log(points[:, 0]), math.log(perplexity))
            if crossing is not None:
                first, second, weight = crossing
                before, after = points[[first, second], 1]
                bound = float(np.max([_floor_bound(path[at]) for at in (first, second)]))
                if not math.isnan(own_bound + bound):
                    recited = "not above controls"
                elif lms < min(before, after):
                    recited = "less"
                elif lms > max(before, after):
                    recited = "more"
                else:
                    recited = "between"
                row += [
                    path[first]["progress"].iloc[0],
                    path[second]["progress"].iloc[0],
                    before,
                    after,
                ]
                row += [(1 - weight) * before + weight * after, bound, recited]
            rows.append(dict(zip(_AT_EQUAL_PERPLEXITY, row, strict=False)))
    return pd.DataFrame(rows, columns=_AT_EQUAL_PERPLEXITY)


_AT_EQUAL_PERPLEXITY = [
    "setting",
    "objective",
    "progress",
    "perplexity",
    "lms",
    "floor_bound",
    "lowest",
    "highest",
    "before",
    "after",
    "lms_before",
    "lms_after",
    "interpolated",
    "baseline_floor_bound",
    "recited",
]


def lms_floor(evaluations: pd.DataFrame) -> Floor | None:
    """Compare the targets' average LMS with the controls'; None if there are no targets or no
    controls.
    """
    targets, controls = (unit_totals(evaluations, measure) for measure in (LMS, CONTROL_LMS))
    if targets is None or controls is None:
        return None
    return floor_of(targets[0] / targets[1], controls[0] / controls[1])


def lms_floors(evaluations: pd.DataFrame) -> dict[tuple[str, str], Floor | None]:
    """Setting and objective, in the order of the tables -> its floor at the last checkpoint with an
    LMS of all runs.
    """
    floors = {}
    for setting, own in evaluations.groupby("setting", sort=False):
        last = at_last(own, LMS)
        for objective in own["objective"].unique():
            floors[setting, objective] = lms_floor(last[last["objective"] == objective])
    return floors


def _floor_bound(evaluations: pd.DataFrame) -> float:
    floor = lms_floor(evaluations)
    return floor.excess.high if floor is not None and floor.reached else math.nan


def first_crossing(path: Floats, goal: float) -> tuple[int, int, float] | None:
    """Return the points of a path ``[n]`` before and after it first has a value, linearly, and the
    second's weight.
    """
    if path[0] == goal:
        return 0, 0, 0.0
    starts = path[:-1]
    ends = path[1:]
    (reached,) = np.nonzero((np.minimum(starts, ends) <= goal) & (goal <= np.maximum(starts, ends)))
    if not len(reached):
        return None
    first = int(reached[0])
    return first, first + 1, float((goal - starts[first]) / (ends[first] - starts[first]))
