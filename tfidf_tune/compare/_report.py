"""Runs side by side as a report."""

import math
from collections.abc import Mapping
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
from tfidf_tune.report.document import Example, Footnotes, Report, joined
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
    detectable = set()
    for table in tables:
        if table.name == "membership":
            rows = table.frame.to_dict("records")
            detectable = {(row["Model"], row["Objective"]) for row in rows if is_detectable(row)}
    last = {one.run: (at, one.title) for at, one in enumerate(results.checkpoints)}
    others = [
        one.objective for one in results.checkpoints if one.objective not in (baseline, START)
    ]
    return Report(
        title=f"{joined(others)} against {baseline}" if others else baseline,
        verdict=_verdict(
            reductions, floors, detectable, unshown_objectives(results, evaluations), baseline
        )
        + _recited_clause(recited)
        + _unequal_steps_clause(results)
        + hardly_learned(results.scores, dict(last.values())),
        tables=tables,
        figures=comparison_figures(results, evaluations),
        examples=_examples(results, evaluations),
        mark=RECITED_MARK,
        provenance=_provenance(results, baseline),
        footnotes=notes.texts,
    )


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
    objectives: dict[str, list[str]] = {}
    for setting, objective in floors:
        if objective != START or baseline == START:
            objectives.setdefault(setting, []).append(objective)
    alone = {
        name: joined(own)
        for name, own in objectives.items()
        if baseline not in own or own == [baseline]
    }
    if len(alone) == len(objectives):
        have = "; ".join(f"{name}: {own}" for name, own in alone.items())
        return (
            f"Nothing is compared: no model has runs of {baseline} and of another objective "
            f"({have}). To name the objective of a model trained elsewhere, give OBJECTIVE=FOLDER."
        )
    clauses = []
    for setting, objective in floors:
        if setting in alone or objective in (baseline, START):
            continue
        own = reductions[
            (reductions["setting"] == setting) & (reductions["objective"] == objective)
        ]
        rows = {row.measure: row for row in own.itertuples()}
        recited = rows.get(LMS.label)
        direction, size = _change(recited)
        said = {
            -1: f"{objective} recites {size} less than {baseline} by the average LMS",
            0: f"{objective} is not shown to recite less or more than {baseline}",
            1: f"{objective} recites {size} more than {baseline} by the average LMS",
            None: f"too little was measured to judge what {objective} recites",
        }[direction]
        if {(setting, objective), (setting, baseline)} <= at_chance:
            said = f"{objective}, like {baseline}, {AT_CHANCE}"
        elif (setting, objective) in at_chance:
            said = (
                f"{objective} "
                f"{AT_CHANCE}{STILL_DETECTABLE if (setting, objective) in detectable else ''}"
            )
        if (setting, objective) in at_chance & unshown:
            said += ", but no positive control shows that it could be seen to recite"
        # The cost of what is recited is that of the same checkpoint.
        costs = [rows[utility.label] for utility in _UTILITIES if utility.label in rows]
        cost = next(
            (one for one in costs if recited is None or one.progress == recited.progress), None
        )
        direction, size = _change(cost)
        if cost is not None and direction is not None:
            differs = {-1: f"is {size} lower", 0: "is not shown to differ", 1: f"is {size} higher"}[
                direction
            ]
            said += f"; its {BY_LABEL[cost.measure].phrase} {differs}"
        clauses.append(f"{setting}: {said}" if len(objectives) > 1 else said)
    hidden = len(clauses) - MOST_CLAUSES
    if hidden:
        clauses[MOST_CLAUSES:] = [f"{hidden} more are in the table"] if hidden > 0 else []
    for setting in [name for name in objectives if name not in alone]:
        if (
            baseline == "CE"
            and (setting, baseline) in at_chance - unshown
            and not _is_dearer(reductions, setting)
        ):
            where = f"{setting}: " if len(objectives) > 1 else ""
            clauses.append(f"{where}{baseline} already {AT_CHANCE}: keep it")
    clauses += (
        [f"Not compared: {joined(f'{name} (only {own})' for name, own in alone.items())}"]
        if alone
        else []
    )
    return f"{'. '.join(clauses)}."


def _is_dearer(reductions: pd.DataFrame, setting: str) -> bool:
    """Return whether another objective is shown to have a lower perplexity, or another cost, than
    the baseline.
    """
    own = reductions[reductions["setting"] == setting]
    own = own[own["measure"].isin([utility.label for utility in _UTILITIES])]
    return bool(((own["significant"] == "yes") & (own["reduction"] > 0)).any())


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
    clauses = []
    for setting in dict.fromkeys(one.setting for one in results.checkpoints):
        runs = [
            one
            for one in results.checkpoints
            if one.setting == setting and one.num_sequences is not None
        ]
        numbers = dict.fromkeys((one.objective, one.num_sequences) for one in runs)
        if len({number for _, number in numbers}) > 1:
            listed = joined(f"{objective} {number}" for objective, number in numbers)
            clauses.append(
                f" The runs of {setting} had other numbers of sequences in a training step "
                f"({listed}), so that they took other numbers of steps, and a difference need not "
                "come from the objective."
            )
    return "".join(clauses)


def _change(row: Any) -> tuple[int | None, str]:
    """Return -1 if a measure is lower than the baseline's, 1 higher, 0 not shown to differ, else
    None; and its size.
    """
    if row is None or math.isnan(row.reduction) or row.significant not in ("yes", "no"):
        return None, ""
    size = f"{abs(100 * row.reduction):.1f} %"
    if row.significant == "no":
        return 0, size
    return (-1 if row.reduction > 0 else 1), size


def _examples(results: Results, evaluations: pd.DataFrame) -> list[Example]:
    examples = []
    for setting, own in evaluations.groupby("setting", sort=False):
        shown = {
            objective: results.checkpoints[one.index[0]]
            for _, objective, one in having_at_last(own, LMS)
        }
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
        entries[f"{first.setting}, {first.objective}, {seed}"] = (
            f"{first.folder} (evaluated at {progress})"
        )
    return entries | {
        "Intervals": f"percentile bootstrap, {NUM_RESAMPLES:,} resamples, seed {SEED}",
        "tfidf-tune": version("tfidf-tune"),
        "Date": date.today().isoformat(),
    }
