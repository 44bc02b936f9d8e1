"""Runs side by side as a report."""

from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from tfidf_tune.compare._evaluations import (
    at_last,
    compare_at_equal_perplexity,
    compare_objectives,
    evaluation_table,
    having_at_last,
    lms_floor,
)
from tfidf_tune.compare._examples import recitation_examples
from tfidf_tune.compare._figures import comparison_figures
from tfidf_tune.compare._intervals import NUM_RESAMPLES, SEED
from tfidf_tune.compare._table import ANSWER_MEASURES, LMS, PERPLEXITY, SUMMARY_MEASURES, Checkpoint, Results
from tfidf_tune.compare._tables import comparison_tables, is_detectable
from tfidf_tune.compare._verdict import RECITED_MARK, Pair, verdict
from tfidf_tune.report._document import Example, Footnotes, Report, Table, joined

if TYPE_CHECKING:
    import pandas as pd

# In the order of preference: what a reduction costs.
_UTILITIES = [PERPLEXITY, SUMMARY_MEASURES[2], ANSWER_MEASURES[1]]


def comparison_report(results: Results, *, baseline: str | None = None) -> Report:
    """Compare runs: a verdict, a table with a row for each objective, figures; more tables and examples as details.

    Args:
        results (Results): of at least two runs, of any models, objectives and seeds.
        baseline (str | None): objective to compare with. Default: None, "CE" if there is one, else the first run's.

    Raises:
        ValueError: If there is only one run, no run has the baseline, or runs of a model were not asked the same.
    """
    baseline, evaluations = evaluation_table(results, baseline=baseline)
    reductions = compare_objectives(evaluations, baseline)
    at_equal_perplexity = compare_at_equal_perplexity(evaluations, baseline)
    have = {str(name): own["objective"].tolist() for name, own in evaluations.groupby("setting", sort=False)}
    notes = Footnotes()
    tables = comparison_tables(results, evaluations, reductions, at_equal_perplexity, baseline, notes)
    others = [one.objective for one in results.checkpoints if one.objective != baseline]
    return Report(
        title=f"{joined(others)} against {baseline}" if others else baseline,
        verdict=verdict(_pairs(evaluations, reductions, tables, baseline), have, baseline),
        tables=tables,
        figures=comparison_figures(results, evaluations),
        examples=_examples(results, evaluations),
        mark=RECITED_MARK,
        provenance=_provenance(results, baseline),
        footnotes=notes.texts,
    )


def _pairs(
    evaluations: "pd.DataFrame", reductions: "pd.DataFrame", tables: Sequence[Table], baseline: str
) -> list[Pair]:
    """Put each objective beside the baseline of its setting, in the order of the tables."""
    measured: dict[tuple[str, str], dict[str, Any]] = {}
    for row in reductions.itertuples():
        measured.setdefault((row.setting, row.objective), {})[row.measure] = row
    detected = {
        (row["Model"], row["Objective"])
        for table in tables
        if table.name == "membership"
        for row in table.frame.to_dict("records")
        if is_detectable(row)
    }
    pairs = []
    for setting, own in evaluations.groupby("setting", sort=False):
        objectives, last = list(dict.fromkeys(own["objective"])), at_last(own, LMS)
        floors = {name: lms_floor(last[last["objective"] == name]) for name in objectives}
        at_chance = {name: floor is not None and floor.reached for name, floor in floors.items()}
        for objective in objectives if baseline in objectives else ():
            if objective != baseline:
                rows = measured.get((str(setting), objective), {})
                recited = rows.get(LMS.label)
                costs = [rows[utility.label] for utility in _UTILITIES if utility.label in rows]
                if recited is not None:  # at the same checkpoint
                    costs = [cost for cost in costs if cost.progress == recited.progress]
                chances = at_chance[objective], at_chance[baseline]
                is_detected = (setting, objective) in detected
                pairs.append(Pair(str(setting), objective, recited, next(iter(costs), None), *chances, is_detected))
    return pairs


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
