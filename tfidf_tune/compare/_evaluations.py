"""Evaluated checkpoints: their averages, what each measure is made of, and how objectives differ in
them.
"""

import math
from collections.abc import Iterator, Sequence
from operator import attrgetter
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
# The columns of averages over passages and blocks.
_AVERAGES = [
    "lms",
    "edit_distance",
    "common_subsequence",
    "prefix_match",
    "rouge_l",
    "verbatim",
    "control_lms",
    "control_edit_distance",
    "control_common_subsequence",
    "nll",
]


def average_scores(scores: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Average the scores of passages and blocks in groups, a row each in order of appearance; NaN
    if missing.

    Columns are the metrics of targets and blocks, "control_..." of controls, "max_lms",
    "max_prefix_match" and "num_predictions". Aggregates count only where a checkpoint has no rows
    of single units.
    """
    # Which rows count: those of single units, and aggregates where there are none.
    is_single = scores["unit"] != ""
    keys = [scores[name] for name in ("checkpoint", "metric", "kind")]
    has_units = is_single.groupby(keys, observed=True).transform("any")
    rows = scores[is_single | ~has_units]
    is_value = rows["count"] == 1  # a mean is not a maximum
    rows = rows.assign(sum=rows["value"] * rows["count"], largest=rows["value"].where(is_value))
    # The metrics of controls have names of their own.
    metrics = rows["metric"].astype(str)
    names = metrics.where(rows["kind"] != "control", "control_" + metrics)
    # Groups by what was asked for, and metric: means and maxima, with a column for each metric.
    is_of_text = ~rows["kind"].isin(("article", "question"))
    groups = rows[is_of_text].groupby([*by, names], sort=False, dropna=False, observed=True)
    sums = groups[["sum", "count"]].sum()
    averages = (sums["sum"] / sums["count"]).unstack()
    averages = averages.reindex(columns=_AVERAGES)
    largest = groups["largest"].max().unstack()
    largest = largest.reindex(columns=["lms", "max_lms", "prefix_match"])
    averages["max_lms"] = largest[["lms", "max_lms"]].max(axis=1)
    averages["max_prefix_match"] = largest["prefix_match"]
    averages["num_predictions"] = sums["count"].unstack().get("nll", 0.0)
    in_order = rows.drop_duplicates(list(by)).set_index(list(by)).index
    return averages.reindex(in_order)


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
    get_names = attrgetter(*names)
    rows = [get_names(checkpoint) for checkpoint in results.checkpoints]
    table = pd.DataFrame(rows, columns=names, dtype=object)
    table = table.astype({"learning_rate": float, "progress": int})
    averages = average_scores(results.scores, ["checkpoint"])
    return table.join(averages.rename(columns={"nll": "log_perplexity"}))


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
    trained = {each.run: each for each in results.checkpoints if not each.is_start}
    if not trained and baseline != START:
        raise ValueError(
            "nothing to compare: there is no run; for a single model use `tfidf-tune probe audit`"
        )
    if len(trained) == 1 and baseline != START:
        (run,) = trained.values()
        raise ValueError(
            f"nothing to compare: there is only {run.folder} ({run.setting}, {run.objective}); for "
            "a single model use `tfidf-tune probe audit`"
        )
    objectives, table = comparable_runs(results, baseline)
    totals = totals_by_unit(results.scores)
    for measure in (*COMPARED, CONTROL_LMS, PASSAGE_NLL, VERBATIM):
        keys = [(number, measure.metric, measure.kind) for number in table.index]
        table[measure.label] = [totals.get(key) for key in keys]
    # By setting in the order of the first runs, and within it by objective, the baseline first.
    setting_numbers = table.groupby("setting", sort=False).ngroup()
    objective_numbers = table["objective"].map(objectives.index)
    order = setting_numbers * len(objectives) + objective_numbers
    return objectives[0], table.loc[order.sort_values(kind="stable").index]


def totals_by_unit(scores: pd.DataFrame) -> dict[tuple[int, str, str], tuple[Floats, Floats]]:
    """Checkpoint, metric and kind -> sums and counts by unit; without aggregates, and those with a
    missing value.
    """
    rows = scores[scores["unit"] != ""]
    keys = ["checkpoint", "metric", "kind"]
    is_missing = rows["value"].isna()
    lacks_values = is_missing.groupby([rows[key] for key in keys], observed=True).transform("any")
    units = rows["unit"].astype(str)
    units = units.where(rows["kind"] != "block", units.str.zfill(20))  # blocks are numbered
    rows = rows.assign(sum=rows["value"] * rows["count"], unit=units)[~lacks_values]
    # The prefix lengths of a passage are summed: its sum and its count are one observation.
    by_unit = rows.groupby([*keys, "unit"], observed=True)[["sum", "count"]].sum()
    totals = {}
    for key, group in by_unit.groupby(level=keys, observed=True):
        totals[key] = (group["sum"].to_numpy(float), group["count"].to_numpy(float))
    return totals


def shared_progress(evaluations: pd.DataFrame, *measures: Measure) -> list[int]:
    """Return, ascending, the progress values at which every run with these measures has all of
    them.
    """
    labels = [measure.label for measure in measures]
    has_all = evaluations[labels].notna().all(axis=1)
    measured = evaluations[has_all & (evaluations["objective"] != START)]
    runs_by_progress: dict[int, set[object]] = {}
    for progress, run in zip(measured["progress"], measured["run"], strict=True):
        runs_by_progress.setdefault(progress, set()).add(run)
    all_runs = set(measured["run"])
    return sorted(progress for progress, runs in runs_by_progress.items() if runs == all_runs)


def at_last(evaluations: pd.DataFrame, *measures: Measure) -> pd.DataFrame:
    """Return the evaluations of a setting at the last progress where all runs have the measures,
    and of the start.
    """
    last = max(shared_progress(evaluations, *measures), default=None)
    is_last = evaluations["progress"] == last
    return evaluations[is_last | (evaluations["objective"] == START)]


def having_at_last(
    evaluations: pd.DataFrame, measure: Measure
) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yield setting, objective and those of its evaluations at the last shared progress that have a
    measure.
    """
    for setting, of_setting in evaluations.groupby("setting", sort=False):
        measured = at_last(of_setting, measure).dropna(subset=[measure.label])
        for objective, having in measured.groupby("objective", sort=False):
            yield str(setting), str(objective), having


def unit_totals(evaluations: pd.DataFrame, measure: Measure) -> tuple[Floats, Floats] | None:
    """Return sums (means over evaluations) and counts by unit; None if there is no evaluation, or
    one misses it.
    """
    totals = evaluations[measure.label]
    if totals.empty or totals.isna().any():
        return None
    sums = np.mean([sums for sums, _ in totals], axis=0)
    _, counts = totals.iloc[0]
    return sums, counts


def value_of(evaluations: pd.DataFrame, measure: Measure) -> float:
    """Return a measure over seeds, NaN if it is missing; perplexity is over
    all their predictions.
    """
    totals = unit_totals(evaluations, measure)
    if totals is None:
        return math.nan
    return float(measure.value(*totals))


def comparable_runs(results: Results, baseline: str | None) -> tuple[list[str], pd.DataFrame]:
    """Return the objectives, the baseline (None: "CE" or else the first run's) first, and
    :func:`run_table`.

    Runs must differ and be asked the same; a task that was not run is not a difference.
    """
    objectives = list(dict.fromkeys(each.objective for each in results.checkpoints))
    objectives.sort(key=lambda name: name == START)  # the start comes last
    if baseline is None:
        baseline = "CE" if "CE" in objectives else objectives[0]
    if baseline not in objectives:
        raise ValueError(f"no run has the baseline {baseline!r}: there are {', '.join(objectives)}")
    _require_comparable(results.checkpoints)
    _require_same_bos(results)
    return sorted(objectives, key=lambda name: name != baseline), run_table(results)


def _require_comparable(checkpoints: Sequence[Checkpoint]) -> None:
    """Refuse two trainings of one name, two evaluations of one checkpoint, and checkpoints of one
    model that were not asked the same.
    """
    trainings: dict[object, object] = {}
    evaluated = set()
    first_asked: dict[tuple[str, str], Checkpoint] = {}
    for checkpoint in checkpoints:
        training = (checkpoint.recipe, checkpoint.loss, checkpoint.training_seconds)
        is_other_run = trainings.setdefault(checkpoint.run, training) != training
        names = (checkpoint.run, checkpoint.progress)
        if is_other_run or names in evaluated:
            raise ValueError(
                f"two runs are both {checkpoint.title}: leave out one of the files or folders that "
                "have them"
            )
        evaluated.add(names)
        for what, digest in checkpoint.asked.items():
            first = first_asked.setdefault((checkpoint.model, what), checkpoint)
            if first.asked[what] != digest:
                raise ValueError(
                    f"{first.title}, {first.progress} % ({first.folder}) and {checkpoint.title}, "
                    f"{checkpoint.progress} % ({checkpoint.folder}) cannot be compared, their "
                    f"{what} differ: evaluate both in the same way"
                )


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
            with_bos = by_bos[1.0]
            without = by_bos[0.0]
            raise ValueError(
                f"{with_bos.title} ({with_bos.folder}) was evaluated with BOS before each prompt, "
                f"and {without.title} ({without.folder}) without: evaluate both with the same "
                "bos=true or bos=false"
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
    for setting, of_setting in evaluations.groupby("setting", sort=False):
        if not (of_setting["objective"] == baseline).any():
            continue
        last_by_measure = {}
        for measure in COMPARED:
            last = at_last(of_setting, LMS, measure)
            if last.empty:
                last = at_last(of_setting, measure)
            last_by_measure[measure] = last
        for objective in _compared(of_setting):
            for measure, last in last_by_measure.items():
                before = unit_totals(last[last["objective"] == baseline], measure)
                after = unit_totals(last[last["objective"] == objective], measure)
                if before is None or after is None:
                    continue
                row = _reduction(measure, before, after)
                row["setting"] = setting
                row["objective"] = objective
                row["measure"] = measure.label
                row["progress"] = last["progress"].max()
                rows.append(row)
    table = pd.DataFrame(rows, columns=_REDUCTIONS)
    # The p-values of a setting are corrected together, and have the last word on significance.
    table["p_value"] = table.groupby("setting")["p_value"].transform(holm)
    verdicts = []
    for row in table.itertuples():
        verdict = Interval(row.low, row.high, row.num_units).significant
        if verdict == "yes" and row.p_value >= ALPHA:
            verdict = "no"
        verdicts.append(verdict)
    table["significant"] = pd.Series(verdicts, dtype=object)
    return table


_REDUCTIONS = [
    "setting",
    "objective",
    "measure",
    "baseline",
    "other",
    "reduction",
    "low",
    "high",
    "num_units",
    "p_value",
    "progress",
]


def _compared(evaluations: pd.DataFrame) -> list[str]:
    """Return the objectives of a setting that are compared with the baseline, its first; the start
    is only shown.
    """
    others = evaluations["objective"].unique()[1:]
    return [str(objective) for objective in others if objective != START]


def _reduction(
    measure: Measure, baseline: tuple[Floats, Floats], other: tuple[Floats, Floats]
) -> dict[str, Any]:
    """Return both values, the reduction (NaN if it is not finite) and its interval."""
    sums_before, counts = baseline
    sums_after, _ = other

    def reduction(before: Floats, after: Floats, counts: Floats, axis: int = -1) -> Any:
        reference = measure.value(before, counts, axis)
        return (reference - measure.value(after, counts, axis)) / reference

    reference = float(measure.value(sums_before, counts))
    value = float(measure.value(sums_after, counts))
    relative = math.nan
    if reference:
        relative = (reference - value) / reference
    if math.isfinite(relative):
        interval = bootstrap_interval(reduction, sums_before, sums_after, counts)
    else:
        relative = math.nan
        interval = Interval(math.nan, math.nan, len(counts))
    return {
        "baseline": reference,
        "other": value,
        "reduction": relative,
        **interval._asdict(),
    }


def compare_at_equal_perplexity(evaluations: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Compare what an objective recites at the end with what the baseline recited when it had the
    same perplexity.

    For example, the baseline has perplexity 20 and an average LMS of 4 at 50 %, and 16 and 10 at
    100 %. An objective ends at perplexity 18, which is 0.47 of the way in logarithms,
    (ln 20 - ln 18) / (ln 20 - ln 16): there, the baseline's LMS is about 0.53 · 4 + 0.47 · 10 =
    6.8. The objective recites less if its LMS is below 4, more if it is above 10, and else between,
    as the straight line is no more than a guess.

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
    for setting, of_setting in evaluations.groupby("setting", sort=False):
        # The path of the baseline: perplexity and LMS of its checkpoints.
        of_baseline = of_setting[of_setting["objective"] == baseline]
        measured = shared_progress(of_baseline, LMS, PERPLEXITY)
        path = [of_baseline[of_baseline["progress"] == progress] for progress in measured]
        perplexities = np.array([value_of(point, PERPLEXITY) for point in path])
        lms_path = np.array([value_of(point, LMS) for point in path])
        if not path or not np.isfinite([perplexities, lms_path]).all():
            continue
        last = at_last(of_setting, LMS, PERPLEXITY)
        for objective in _compared(of_setting):
            end = last[last["objective"] == objective]
            perplexity = value_of(end, PERPLEXITY)
            lms = value_of(end, LMS)
            if not math.isfinite(perplexity) or math.isnan(lms):
                continue
            end_bound = _floor_bound(end)
            row = {
                "setting": setting,
                "objective": objective,
                "progress": end["progress"].iloc[0],
                "perplexity": perplexity,
                "lms": lms,
                "floor_bound": end_bound,
                "lowest": perplexities.min(),
                "highest": perplexities.max(),
            }
            rows.append(row)
            crossing = first_crossing(np.log(perplexities), math.log(perplexity))
            if crossing is None:
                continue
            # Where the baseline first had that perplexity, and what it recited there.
            first, second, weight = crossing
            before = lms_path[first]
            after = lms_path[second]
            bounds = [_floor_bound(path[first]), _floor_bound(path[second])]
            baseline_bound = float(np.max(bounds))  # NaN if there is none for one of them
            recited = "between"
            if lms < min(before, after):
                recited = "less"
            elif lms > max(before, after):
                recited = "more"
            if not math.isnan(end_bound) and not math.isnan(baseline_bound):
                recited = "not above controls"
            row |= {
                "before": path[first]["progress"].iloc[0],
                "after": path[second]["progress"].iloc[0],
                "lms_before": before,
                "lms_after": after,
                "interpolated": (1 - weight) * before + weight * after,
                "baseline_floor_bound": baseline_bound,
                "recited": recited,
            }
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
    targets = unit_totals(evaluations, LMS)
    controls = unit_totals(evaluations, CONTROL_LMS)
    if targets is None or controls is None:
        return None
    target_sums, target_counts = targets
    control_sums, control_counts = controls
    return floor_of(target_sums / target_counts, control_sums / control_counts)


def lms_floors(evaluations: pd.DataFrame) -> dict[tuple[str, str], Floor | None]:
    """Setting and objective, in the order of the tables -> its floor at the last checkpoint with an
    LMS of all runs.
    """
    floors = {}
    for setting, of_setting in evaluations.groupby("setting", sort=False):
        last = at_last(of_setting, LMS)
        for objective in of_setting["objective"].unique():
            floors[setting, objective] = lms_floor(last[last["objective"] == objective])
    return floors


def _floor_bound(evaluations: pd.DataFrame) -> float:
    floor = lms_floor(evaluations)
    if floor is None or not floor.reached:
        return math.nan
    return floor.excess.high


def first_crossing(path: Floats, goal: float) -> tuple[int, int, float] | None:
    """Return the points of a path ``[n]`` before and after it first has a value, linearly, and the
    second's weight.

    For example, the path ``[3.0, 2.0, 2.5, 1.0]`` has the value 2.2 on each of its three pieces.
    The first counts: points 0 and 1, and point 1 has the weight (2.2 - 3.0) / (2.0 - 3.0) = 0.8.
    """
    if path[0] == goal:
        return 0, 0, 0.0
    starts = path[:-1]
    ends = path[1:]
    is_reached = (np.minimum(starts, ends) <= goal) & (goal <= np.maximum(starts, ends))
    (pieces,) = np.nonzero(is_reached)
    if not len(pieces):
        return None
    first = int(pieces[0])
    weight = (goal - starts[first]) / (ends[first] - starts[first])
    return first, first + 1, float(weight)
