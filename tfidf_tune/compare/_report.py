"""Runs side by side as a report."""

import math
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from typing import Any, TypeAlias

import pandas as pd

from tfidf_tune.compare._evaluations import (
    compare_objectives,
    evaluation_table,
    having_at_last,
    lms_floors,
)
from tfidf_tune.compare._figures import comparison_figures
from tfidf_tune.compare._tables import comparison_tables, recited_by_objective, unshown_objectives
from tfidf_tune.report.document import Example, Footnotes, Report, Table, joined
from tfidf_tune.results.examples import recitation_examples
from tfidf_tune.results.floor import Floor
from tfidf_tune.results.intervals import NUM_RESAMPLES, SEED
from tfidf_tune.results.membership_table import is_detectable
from tfidf_tune.results.table import (
    ANSWER_MEASURES,
    BY_LABEL,
    LMS,
    PERPLEXITY,
    START,
    SUMMARY_MEASURES,
    Checkpoint,
    Results,
)
from tfidf_tune.results.wording import (
    AT_CHANCE,
    MOST_CLAUSES,
    RECITED_MARK,
    STILL_DETECTABLE,
    hardly_learned,
)

# In the order of preference: what a reduction costs.
_UTILITIES = (PERPLEXITY, SUMMARY_MEASURES[2], ANSWER_MEASURES[1])
_Names: TypeAlias = tuple[str, str]  # setting and objective


def comparison_report(results: Results, *, baseline: str | None = None) -> Report:
    """Compare runs: a verdict, a table with a row for each objective, figures; more tables and
    examples as details.

    Args:
        results (Results): of at least two runs, of any models, objectives and seeds.
        baseline (str | None): objective to compare with. Default: None, "CE" if there is one, else
            the first run's.

    Raises:
        ValueError: If there is only one run, no run has the baseline, or runs of a model were not
            asked the same.
    """
    baseline, evaluations = evaluation_table(results, baseline=baseline)
    reductions = compare_objectives(evaluations, baseline)
    floors = lms_floors(evaluations)
    notes = Footnotes()
    recited = recited_by_objective(results.scores, evaluations)
    tables = comparison_tables(results, evaluations, reductions, floors, recited, baseline, notes)
    unshown = unshown_objectives(results, evaluations)
    verdict = _verdict(reductions, floors, _detectable(tables), unshown, baseline)
    verdict += _recited_clause(recited)
    verdict += _unequal_steps_clause(results)
    verdict += hardly_learned(results.scores, _last_checkpoints(results))
    return Report(
        title=_title(results, baseline),
        verdict=verdict,
        tables=tables,
        figures=comparison_figures(results, evaluations),
        examples=_examples(results, evaluations),
        mark=RECITED_MARK,
        provenance=_provenance(results, baseline),
        footnotes=notes.texts,
    )


def _title(results: Results, baseline: str) -> str:
    objectives = [checkpoint.objective for checkpoint in results.checkpoints]
    others = [objective for objective in objectives if objective not in (baseline, START)]
    if not others:
        return baseline
    return f"{joined(others)} against {baseline}"


def _detectable(tables: Sequence[Table]) -> set[_Names]:
    """Return the objectives whose loss tells training text from other text."""
    detectable = set()
    for table in tables:
        if table.name != "membership":
            continue
        for row in table.frame.to_dict("records"):
            if is_detectable(row):
                detectable.add((row["Model"], row["Objective"]))
    return detectable


def _last_checkpoints(results: Results) -> dict[int, str]:
    """Return the number of the last checkpoint of each run, and the run's title."""
    last = {}
    for number, checkpoint in enumerate(results.checkpoints):
        last[checkpoint.run] = (number, checkpoint.title)
    return dict(last.values())


def _verdict(
    reductions: pd.DataFrame,
    floors: Mapping[_Names, Floor | None],
    detectable: set[_Names],
    unshown: set[_Names],
    baseline: str,
) -> str:
    """Say what each objective recites and at which cost, and which settings have nothing to
    compare.
    """
    at_chance = {names for names, floor in floors.items() if floor is not None and floor.reached}
    # Which settings have the baseline and another objective, and which have nothing to compare.
    objectives: dict[str, list[str]] = {}
    for setting, objective in floors:
        if objective != START or baseline == START:
            objectives.setdefault(setting, []).append(objective)
    compared = []
    alone = {}
    for setting, names in objectives.items():
        if baseline in names and names != [baseline]:
            compared.append(setting)
        else:
            alone[setting] = joined(names)
    if not compared:
        have = "; ".join(f"{setting}: {names}" for setting, names in alone.items())
        return (
            f"Nothing is compared: no model has runs of {baseline} and of another objective "
            f"({have}). To name the objective of a model trained elsewhere, give OBJECTIVE=FOLDER."
        )
    # A clause for each objective that is compared: what it recites, and at which cost.
    has_several = len(objectives) > 1
    clauses = []
    for setting, objective in floors:
        if setting in alone or objective in (baseline, START):
            continue
        rows = _rows_by_measure(reductions, setting, objective)
        is_at_chance = (setting, objective) in at_chance
        if is_at_chance:
            like = f", like {baseline}," if (setting, baseline) in at_chance else ""
            clause = f"{objective}{like} {AT_CHANCE}"
            if (setting, objective) in detectable:
                clause += STILL_DETECTABLE
        else:
            clause = _recites(rows.get(LMS.label), objective, baseline)
        if is_at_chance and (setting, objective) in unshown:
            clause += " (no positive control shows that it could be seen to recite)"
        clause += _cost(rows)
        clauses.append(f"{setting}: {clause}" if has_several else clause)
    num_hidden = len(clauses) - MOST_CLAUSES
    if num_hidden > 0:
        clauses = [*clauses[:MOST_CLAUSES], f"{num_hidden} more are in the table"]
    # Where the baseline recites nothing either, there is nothing to gain.
    for setting in compared:
        is_shown_at_chance = (setting, baseline) in at_chance - unshown
        if baseline == "CE" and is_shown_at_chance and not _is_dearer(reductions, setting):
            but = STILL_DETECTABLE if (setting, baseline) in detectable else ""
            clause = f"{baseline} already {AT_CHANCE}{but}: keep it"
            clauses.append(f"{setting}: {clause}" if has_several else clause)
    if alone:
        names_alone = joined(f"{setting} (only {names})" for setting, names in alone.items())
        clauses.append(f"Not compared: {names_alone}")
    return f"{'. '.join(clauses)}."


def _rows_by_measure(reductions: pd.DataFrame, setting: str, objective: str) -> dict[str, Any]:
    """Return the reductions of an objective by the label of the measure."""
    is_setting = reductions["setting"] == setting
    rows = reductions[is_setting & (reductions["objective"] == objective)]
    return {row.measure: row for row in rows.itertuples()}


def _recites(row: Any, objective: str, baseline: str) -> str:
    """Say whether an objective recites less or more than the baseline, by a row of reductions."""
    direction, size = _change(row)
    if direction is None:
        return f"too little was measured to judge what {objective} recites"
    if direction < 0:
        return f"{objective} recites {size} less than {baseline} by the average LMS"
    if direction > 0:
        return f"{objective} recites {size} more than {baseline} by the average LMS"
    return f"{objective} is not shown to recite less or more than {baseline}"


def _cost(rows: Mapping[str, Any]) -> str:
    """Say what an objective costs, at the checkpoint of which it is said what it recites; "" if
    nothing is known.
    """
    recited = rows.get(LMS.label)
    for utility in _UTILITIES:
        row = rows.get(utility.label)
        if row is None or (recited is not None and row.progress != recited.progress):
            continue
        direction, size = _change(row)
        if direction is None:
            return ""
        phrase = BY_LABEL[row.measure].phrase
        if direction < 0:
            return f"; its {phrase} is {size} lower"
        if direction > 0:
            return f"; its {phrase} is {size} higher"
        return f"; its {phrase} is not shown to differ"
    return ""


def _is_dearer(reductions: pd.DataFrame, setting: str) -> bool:
    """Return whether another objective is shown to have a lower perplexity, or another cost, than
    the baseline.
    """
    labels = [utility.label for utility in _UTILITIES]
    is_cost = (reductions["setting"] == setting) & reductions["measure"].isin(labels)
    costs = reductions[is_cost]
    is_lower = (costs["significant"] == "yes") & (costs["reduction"] > 0)
    return bool(is_lower.any())


def _recited_clause(recited: Mapping[_Names, str]) -> str:
    """Say of how many passages each objective recites more than of unseen text: a percentage of
    tokens hides that.
    """
    settings = {setting for setting, _ in recited}
    clauses = []
    for (setting, objective), number in recited.items():
        where = f"{setting}, " if len(settings) > 1 else ""
        clauses.append(f"{where}{objective} {number}")
    if not clauses or len(clauses) > 2 * MOST_CLAUSES:
        return ""
    return f" Passages recited further than unseen text: {', '.join(clauses)}."


def _unequal_steps_clause(results: Results) -> str:
    """Say which runs of a model were trained with other numbers of sequences in a step, if any."""
    nums_by_setting: dict[str, dict[tuple[str, int], None]] = {}
    for checkpoint in results.checkpoints:
        numbers = nums_by_setting.setdefault(checkpoint.setting, {})
        if checkpoint.num_sequences is not None:
            numbers[checkpoint.objective, checkpoint.num_sequences] = None
    clauses = ""
    for setting, numbers in nums_by_setting.items():
        if len({number for _, number in numbers}) < 2:
            continue
        listed = joined(f"{objective} {number}" for objective, number in numbers)
        clauses += (
            f" The runs of {setting} had other numbers of sequences in a training step ({listed}), "
            "so that they took other numbers of steps, and a difference need not come from the "
            "objective."
        )
    return clauses


def _change(row: Any) -> tuple[int | None, str]:
    """Return -1 if a measure is lower than the baseline's, 1 higher, 0 not shown to differ, else
    None; and its size.
    """
    if row is None or math.isnan(row.reduction) or row.significant not in ("yes", "no"):
        return None, ""
    size = f"{abs(100 * row.reduction):.1f} %"
    if row.significant == "no":
        return 0, size
    if row.reduction > 0:
        return -1, size
    return 1, size


def _examples(results: Results, evaluations: pd.DataFrame) -> list[Example]:
    examples = []
    for setting, group in evaluations.groupby("setting", sort=False):
        shown = {}
        for _, objective, having in having_at_last(group, LMS):
            shown[objective] = results.checkpoints[having.index[0]]
        if shown and all(checkpoint.samples for checkpoint in shown.values()):
            examples += recitation_examples(str(setting), shown)
    return examples


def _provenance(results: Results, baseline: str) -> dict[str, str]:
    runs: dict[object, list[Checkpoint]] = {}
    for checkpoint in results.checkpoints:
        runs.setdefault(checkpoint.run, []).append(checkpoint)
    entries = {"Baseline": baseline}
    for checkpoints in runs.values():
        first = checkpoints[0]
        seed = "seed unknown" if first.seed is None else f"seed {first.seed}"
        progress = ", ".join(f"{checkpoint.progress} %" for checkpoint in checkpoints)
        name = f"{first.setting}, {first.objective}, {seed}"
        entries[name] = f"{first.folder} (evaluated at {progress})"
    entries["Intervals"] = f"percentile bootstrap, {NUM_RESAMPLES:,} resamples, seed {SEED}"
    entries["tfidf-tune"] = version("tfidf-tune")
    entries["Date"] = date.today().isoformat()
    return entries
