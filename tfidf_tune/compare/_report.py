"""Runs side by side as a report."""

from datetime import date
from importlib.metadata import version
from typing import TYPE_CHECKING

from tfidf_tune.compare._evaluations import compare_objectives, evaluation_table, having_at_last, lms_floors
from tfidf_tune.compare._examples import recitation_examples
from tfidf_tune.compare._figures import comparison_figures
from tfidf_tune.compare._intervals import NUM_RESAMPLES, SEED
from tfidf_tune.compare._table import LMS, Checkpoint, Results
from tfidf_tune.compare._tables import comparison_tables, is_detectable
from tfidf_tune.compare._verdict import RECITED_MARK, verdict
from tfidf_tune.report._document import Example, Footnotes, Report, joined

if TYPE_CHECKING:
    import pandas as pd


def comparison_report(results: Results, *, baseline: str | None = None) -> Report:
    """Compare runs: a verdict, a table with a row for each objective, figures; more tables and examples as details.

    Args:
        results (Results): of at least two runs, of any models, objectives and seeds.
        baseline (str | None): objective to compare with. Default: None, "CE" if there is one, else the first run's.

    Raises:
        ValueError: If there is only one run, no run has the baseline, or runs of a model were not asked the same.
    """
    baseline, evaluations = evaluation_table(results, baseline=baseline)
    reductions, floors = compare_objectives(evaluations, baseline), lms_floors(evaluations)
    notes = Footnotes()
    tables = comparison_tables(results, evaluations, reductions, floors, baseline, notes)
    at_chance = {names for names, floor in floors.items() if floor is not None and floor.reached}
    likelihoods = [row for one in tables if one.name == "membership" for row in one.frame.to_dict("records")]
    detectable = {(row["Model"], row["Objective"]) for row in likelihoods if is_detectable(row)}
    others = [one.objective for one in results.checkpoints if one.objective != baseline]
    return Report(
        title=f"{joined(others)} against {baseline}" if others else baseline,
        verdict=verdict(reductions, list(floors), at_chance, detectable, baseline),
        tables=tables,
        figures=comparison_figures(results, evaluations),
        examples=_examples(results, evaluations),
        mark=RECITED_MARK,
        provenance=_provenance(results, baseline),
        footnotes=notes.texts,
    )


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
