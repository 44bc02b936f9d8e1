"""Runs side by side as a report."""

import math
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from tfidf_tune.analysis.comparison import (
    Floor,
    compare_at_equal_perplexity,
    compare_objectives,
    compare_seeds,
    lms_floor,
)
from tfidf_tune.analysis.evaluations import (
    ANSWER_MEASURES,
    BY_NAME,
    CONTROL_LMS,
    LMS,
    PERPLEXITY,
    SUMMARY_MEASURES,
    Measure,
    at_last,
    evaluation_table,
    having_at_last,
    shared_progress,
    value_of,
)
from tfidf_tune.analysis.intervals import ENOUGH_UNITS, NUM_RESAMPLES, SEED, Interval
from tfidf_tune.report._comparison_tables import comparison_tables
from tfidf_tune.report._document import Example, Figure, Report
from tfidf_tune.report._examples import recitation_examples
from tfidf_tune.report._figures import lms_distribution, lms_progress, perplexity_paths
from tfidf_tune.report._wording import LMS_EXPLAINED, interval_text, joined, significance, why_no_interval
from tfidf_tune.results import Checkpoint, Results

if TYPE_CHECKING:
    import pandas as pd

_NEAR_FLOOR = 0.2  # an average LMS up to so far above the controls' is called near it


def comparison_report(results: Results, *, baseline: str | None = None) -> Report:
    """Compare runs: findings with intervals, the paper's tables, figures, examples.

    Args:
        results (Results): of at least two runs, of any models, objectives and seeds.
        baseline (str | None): objective to compare with. Default: None, "CE" if there is one, else the first run's.

    Raises:
        ValueError: If there is only one run, no run has the baseline, or runs of a model were not asked the same.
    """
    baseline, evaluations = evaluation_table(results, baseline=baseline)
    reductions = compare_objectives(evaluations, baseline)
    at_equal_perplexity = compare_at_equal_perplexity(evaluations, baseline)
    others = [one.objective for one in results.checkpoints if one.objective != baseline]
    return Report(
        title=f"{joined(others)} against {baseline}" if others else baseline,
        statements=_statements(evaluations, reductions, at_equal_perplexity, baseline),
        tables=comparison_tables(results, evaluations, reductions, at_equal_perplexity, baseline),
        figures=_figures(results, evaluations),
        examples=_examples(results, evaluations),
        provenance=_provenance(results, baseline),
        lead=_lead(results),
    )


def _lead(results: Results) -> str:
    models = f"Runs of {joined(one.model for one in results.checkpoints)}"
    kinds = set(results.scores["kind"])
    if "target" not in kinds:
        return f"{models}."
    floor = "; its floor is the average over passages that were never injected" if "control" in kinds else ""
    return f"{models}, asked to continue passages of their training text. {LMS_EXPLAINED}{floor}."


def _statements(
    evaluations: "pd.DataFrame", reductions: "pd.DataFrame", at_equal_perplexity: "pd.DataFrame", baseline: str
) -> list[str]:
    of_setting = dict(list(evaluations.groupby("setting", sort=False)))
    pairs: dict[tuple[str, str], dict[str, Any]] = {
        (setting, objective): {}
        for setting, own in of_setting.items()
        for objective in own["objective"].unique()
        if objective != baseline and baseline in set(own["objective"])
    }
    for one in reductions.itertuples():
        pairs[one.setting, one.objective][one.measure] = one
    statements: list[tuple[str, str | None]] = []  # the setting, and the sentence if there is one
    if not pairs:
        have = "; ".join(f"{name}: {joined(own['objective'])}" for name, own in of_setting.items())
        text = f"Nothing is compared: no model has runs of {baseline} and of another objective ({have})."
        statements.append(("", f"{text} To name the objective of a model trained elsewhere, give OBJECTIVE=FOLDER."))
    for (setting, objective), found in pairs.items():
        both = of_setting[setting][of_setting[setting]["objective"].isin([baseline, objective])]
        if measured := both.loc[both[LMS.name].notna(), "objective"].tolist():
            statements.append((setting, _lms_statement(objective, baseline, found, measured)))
    statements += [
        (one.setting, _equal_perplexity_statement(one, baseline)) for one in at_equal_perplexity.itertuples()
    ]
    for setting, own in of_setting.items():
        for objective, last in at_last(own, LMS, CONTROL_LMS).groupby("objective", sort=False):
            floor = lms_floor(last)
            statements.append((setting, floor and _floor_statement(objective, floor)))
    for (setting, objective), found in pairs.items():
        for task, measures in (("Summaries", SUMMARY_MEASURES), ("Answers", ANSWER_MEASURES)):
            if measured := [found[measure.name] for measure in measures if measure.name in found]:
                scores = ", ".join(map(_score, measured))
                statements.append((setting, f"{task} under {objective}{_when(measured[0])}: {scores}."))
    by_seed, of_seeds = compare_seeds(evaluations, baseline), []
    for setting, objective in pairs:
        runs = of_setting[setting].groupby("objective")["run"].nunique()
        num_seeds = min(runs[baseline], runs[objective])
        text = _seeds_statement(objective, by_seed.get((setting, objective), ()), num_seeds)
        of_seeds.append((setting if num_seeds > 1 else "", text))
    statements += dict.fromkeys(of_seeds)  # the warning of single runs once
    prefix = len(of_setting) > 1
    return [f"{model}: {text}" if prefix and model else text for model, text in statements if text]


def _lms_statement(objective: str, baseline: str, found: dict[str, Any], measured: Sequence[str]) -> str:
    """Say how an objective changes the average LMS, and what that costs in perplexity."""
    if LMS.name not in found:
        for name in (objective, baseline):
            if name not in measured:
                return f"{name} has no memorization results, so what it recites is not compared."
        return (
            f"{objective} and {baseline} share no checkpoint with memorization results, so what they recite is not "
            "compared: evaluate both at the same checkpoints."
        )
    recited, perplexity = found[LMS.name], found.get(PERPLEXITY.name)
    text = f"{objective} {_change(recited)} against {baseline}{_when(recited)}, {_verdict(recited)}."
    if perplexity is None:
        return f"{text} Perplexity was not measured for both, so what it costs is not known."
    return f"{text} It {_change(perplexity)}{_when(perplexity)}, {_verdict(perplexity)}."


def _equal_perplexity_statement(one: Any, baseline: str) -> str:
    """Say what the baseline recited when it had the perplexity that the objective ends with."""
    goal = f"{one.perplexity:.2f}"
    if math.isnan(one.before):
        return (
            f"There is no comparison at equal perplexity: {one.objective} ends with {goal}, and {baseline}'s "
            f"checkpoints range from {one.lowest:.2f} to {one.highest:.2f} and never reach it."
        )
    least, most = sorted((one.lms_before, one.lms_after))
    where, recited = f"at {one.before:.0f} %", f"{one.interpolated:.2f} tokens on average"
    if one.before != one.after:
        where = f"between {one.before:.0f} and {one.after:.0f} %"
        recited = f"between {least:.2f} and {most:.2f} tokens on average ({one.interpolated:.2f} interpolated)"
    # The verdict needs no interpolation.
    if one.at_floor and one.baseline_at_floor:
        verdict = "both at the floor, where they cannot be distinguished"
    elif least <= one.lms <= most:
        verdict = "no clear gain or loss"
    else:
        verdict = f"{'no gain, more' if one.lms > most else 'less'} than {baseline} did there"
    return (
        f"At equal perplexity ({baseline} first had {one.objective}'s final {goal} {where} of its training) {baseline} "
        f"recited {recited}; {one.objective} recites {one.lms:.2f}: {verdict}."
    )


def _floor_statement(objective: str, floor: Floor) -> str | None:
    """Say that an objective recites no more, or hardly more, than of text that it never saw."""
    values = f"average LMS {floor.targets:.2f}, that of passages never seen {floor.controls:.2f}"
    if floor.reached:
        return (
            f"{objective} is at the floor ({values}): the difference of {floor.difference:.2f} tokens "
            f"({interval_text(floor.excess, 'passage', decimals=2)}) is not significantly above 0, so there is little "
            "left to reduce."
        )
    if floor.targets <= (1 + _NEAR_FLOOR) * floor.controls:
        return f"{objective} is near the floor ({values}), so little is left to reduce."
    return None


def _seeds_statement(objective: str, by_seed: Sequence[float], num_seeds: int) -> str:
    """Say what the intervals leave out, with the reduction of each seed if there are several."""
    if num_seeds < 2:
        return (
            "A single training run cannot separate the effect of the objective from that of the seed: intervals cover "
            "only the choice of passages."
        )
    text = "Intervals cover the choice of passages, not that of seeds"
    if not by_seed:
        return f"{text}."
    reductions = ", ".join("undefined" if math.isnan(value) else f"{100 * value:.1f} %" for value in by_seed)
    return f"{text}; per seed the reduction of the average LMS under {objective} was {reductions}."


def _change(one: Any) -> str:
    """For example "lowers the average LMS by 57.8 % (8.30 to 3.50; 95 % interval 34.9 % to 71.1 %)"."""
    phrase, values = BY_NAME[one.measure].phrase, f"{one.baseline:.2f} to {one.other:.2f}"
    if math.isnan(one.reduction):
        return f"has an undefined relative change of the {phrase} ({values})"
    if one.reduction == 0:
        return f"does not change the {phrase} ({values}{_interval(one, 1, ';')})"
    verb, sign = ("lowers", 1) if one.reduction > 0 else ("raises", -1)
    return f"{verb} the {phrase} by {100 * abs(one.reduction):.1f} % ({values}{_interval(one, sign, ';')})"


def _verdict(one: Any) -> str:
    if math.isnan(one.reduction):
        return f"since {why_no_interval(one)}"
    if math.isnan(one.low):
        return f"which has no interval: {why_no_interval(one)}"
    return significance(Interval(one.low, one.high, one.num_units), BY_NAME[one.measure].unit)


def _score(one: Any) -> str:
    """For example "ROUGE-1 30.00 to 31.50 (+5.0 %, 95 % interval 1.0 % to 9.0 %, significant)"."""
    values = f"{BY_NAME[one.measure].phrase} {one.baseline:.2f} to {one.other:.2f}"
    if math.isnan(one.reduction):
        return f"{values} (relative change undefined, {why_no_interval(one)})"
    amount = f"{round(-100 * one.reduction, 1) + 0.0:+.1f} %"
    if math.isnan(one.low):
        return f"{values} ({amount}, no interval, {why_no_interval(one)})"
    interval, unit = Interval(one.low, one.high, one.num_units), BY_NAME[one.measure].unit
    few = f", but {one.num_units} {unit}s are few" if one.num_units < ENOUGH_UNITS else ""
    verdicts = {"no": "not significant", "yes": f"significant{few}", "too few": significance(interval, unit)}
    return f"{values} ({amount}{_interval(one, -1, ',')}, {verdicts[interval.significant or 'no']})"


def _interval(one: Any, sign: int, separator: str) -> str:
    if math.isnan(one.low):
        return ""
    low, high = sorted(100 * sign * end for end in (one.low, one.high))
    in_percent = Interval(low, high, one.num_units)
    return f"{separator} {interval_text(in_percent, BY_NAME[one.measure].unit, decimals=1, suffix=' %')}"


def _when(one: Any) -> str:
    return "" if one.progress == 100 else f" at {one.progress} % of training"


def _figures(results: Results, evaluations: "pd.DataFrame") -> list[Figure]:
    """Draw progress if an objective has several checkpoints, the paths if perplexity was measured, distributions."""
    figures = []
    curves = _measured(evaluations, (LMS,), CONTROL_LMS)
    if any(len(points) > 1 for by_objective in curves.values() for points in by_objective.values()):
        caption = (
            "Average LMS of the injected passages at each checkpoint. Dashed: passages that were never injected, the "
            "floor that fluency reaches by itself. Lower is better."
        )
        title = "Average LMS against training progress"
        figures.append(Figure("lms_progress", title, lms_progress(curves), caption))
    if paths := _measured(evaluations, (PERPLEXITY, LMS)):
        caption = (
            "The path of each objective through its checkpoints, along the arrows; the markers grow with training. "
            "Lower: recites less. Further left: predicts unseen text better. A reduction counts where it lies below "
            "the baseline's path at the same perplexity."
        )
        figures.append(Figure("frontier", "Memorization against perplexity", perplexity_paths(paths), caption))
    caption = (
        "The share of continuations whose longest memorized substring has at least so many tokens, over "
        "passages, prefix lengths and seeds. Dashed: passages that were never injected."
    )
    rows = results.scores[(results.scores["metric"] == "lms") & (results.scores["unit"] != "")]
    several = evaluations["setting"].nunique() > 1
    for number, (setting, own) in enumerate(evaluations.groupby("setting", sort=False), 1):
        lms = {}
        for _, objective, having in having_at_last(own, LMS):
            scores = rows[rows["checkpoint"].isin(having.index)]
            lms[objective] = {
                kind: scores.loc[scores["kind"] == kind, "value"].tolist() for kind in ("target", "control")
            }
        if lms:
            name, of_setting = (f"_{number}", f": {setting}") if several else ("", "")
            title = f"Distribution of the LMS{of_setting}"
            figures.append(Figure(f"lms_distribution{name}", title, lms_distribution(lms), caption))
    return figures


def _measured(
    evaluations: "pd.DataFrame", measures: Sequence[Measure], *optional: Measure
) -> dict[str, dict[str, list[Any]]]:
    """Setting -> objective -> (progress, each measure, NaN if an optional one is missing); empty ones are left out."""
    found: dict[str, dict[str, list[Any]]] = {}
    for (setting, objective), own in evaluations.groupby(["setting", "objective"], sort=False):
        for progress in shared_progress(own, *measures):
            at = own[own["progress"] == progress]
            values = (value_of(at, measure) for measure in (*measures, *optional))
            found.setdefault(setting, {}).setdefault(objective, []).append((progress, *values))
    return found


def _examples(results: Results, evaluations: "pd.DataFrame") -> list[Example]:
    examples = []
    for setting, own in evaluations.groupby("setting", sort=False):
        shown = {objective: results.checkpoints[one.index[0]] for _, objective, one in having_at_last(own, LMS)}
        if shown and all(one.samples for one in shown.values()):
            examples += recitation_examples(str(setting), shown)
    return examples


def _provenance(results: Results, baseline: str) -> dict[str, str]:
    runs: dict[object, list[Checkpoint]] = {}
    for one in results.checkpoints:
        runs.setdefault(one.run, []).append(one)
    entries = {"Baseline": baseline}
    for first, *later in runs.values():
        seed = "seed unknown" if first.seed is None else f"seed {first.seed}"
        progress = ", ".join(f"{one.progress} %" for one in (first, *later))
        entries[f"{first.setting}, {first.objective}, {seed}"] = f"{first.folder} (evaluated at {progress})"
    return entries | {
        "Intervals": f"percentile bootstrap, {NUM_RESAMPLES:,} resamples, seed {SEED}",
        "tfidf-tune": version("tfidf-tune"),
        "Date": date.today().isoformat(),
    }
