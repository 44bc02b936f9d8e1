"""Runs over learning rates as a report: the frontier of recitation against perplexity."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tfidf_tune.analysis import Frontier, Run, RunRecord, provenance_of, records_of, trace_frontiers, write_records
from tfidf_tune.report._document import Figure, Report
from tfidf_tune.report._explanations import LMS_EXPLAINED
from tfidf_tune.report._frontier_figure import frontier_drawing
from tfidf_tune.report._frontier_statements import frontier_statements
from tfidf_tune.report._frontier_tables import tables_of
from tfidf_tune.report._statements import joined
from tfidf_tune.report._write import require_report_folder, write_report

RECORDS_FILE = "runs.jsonl"
"""The records beside a frontier's report, from which all of it can be made again."""


def frontier_report(
    records: Sequence[RunRecord],
    *,
    baseline: str | None = None,
    references: Sequence[str] = (),
    provenance: Mapping[str, str] | None = None,
) -> Report:
    """Show what each objective recites at which perplexity, through its learning rates and with intervals over seeds.

    Args:
        records (Sequence[RunRecord]): of any models, objectives, learning rates and seeds.
        baseline (str | None): objective to compare with. Default: None, "CE" where there is one, else the first's.
        references (Sequence[str]): more objectives to compare with. Default: none.
        provenance (Mapping[str, str] | None): when and with what the runs were made. Default: None, nothing is said.

    Returns:
        Report: a figure for each model, tables, and what follows from them.

    Raises:
        ValueError: If there is no record, none has the baseline or a reference, two records have the same names, or
            records of a model were not asked the same.
    """
    frontiers = trace_frontiers(records, baseline=baseline, references=references)
    return Report(
        title="Recitation against perplexity",
        statements=frontier_statements(frontiers),
        tables=tuple(tables_of(frontiers)),
        figures=_figures(frontiers),
        examples=(),
        provenance=(
            ("Compared with", joined(frontiers[0].references)),
            ("Runs", str(len({record.run for record in records}))),
            ("Intervals", "95 %, Student's t over seeds, differences paired by seed"),
            *(provenance or {}).items(),
        ),
        lead=_lead(records),
    )


def write_frontier(
    runs: Sequence[Run], folder: Path, *, baseline: str | None = None, references: Sequence[str] = ()
) -> Report:
    """Write the records of runs to ``runs.jsonl`` and, beside it, their report.

    Args:
        runs (Sequence[Run]): of any models, objectives, learning rates and seeds.
        folder (Path): where to; it is made.
        baseline (str | None): as for :func:`frontier_report`. Default: None.
        references (Sequence[str]): likewise. Default: none.

    Returns:
        Report: what was written.

    Raises:
        ValueError: As :func:`frontier_report`; if the folder holds files but no report; or if a run's ``config.yaml``
            or ``trained.json`` cannot be read.
    """
    require_report_folder(folder)
    records, provenance = records_of(runs), provenance_of(runs)
    report = frontier_report(records, baseline=baseline, references=references, provenance=provenance)
    write_report(report, folder, {RECORDS_FILE: lambda path: write_records(records, path, provenance)})
    return report


def _lead(records: Sequence[RunRecord]) -> str:
    models = joined(list(dict.fromkeys(record.model for record in records)))
    objectives = len({record.objective for record in records})
    rates = sorted({record.learning_rate for record in records if record.learning_rate is not None})
    through = f" at learning rates {joined([f'{rate:g}' for rate in rates])}" if rates else ""
    seeds = len({record.seed for record in records if record.seed is not None}) or 1
    return (
        f"Runs of {models} under {objectives} objective{'s' * (objectives > 1)}{through}, {seeds} "
        f"seed{'s' * (seeds > 1)}, at their last checkpoint. {LMS_EXPLAINED}."
    )


def _figures(frontiers: Sequence[Frontier]) -> tuple[Figure, ...]:
    caption = (
        "A line for each objective from its lowest learning rate to its highest, the markers growing with it. Large, "
        "numbered and with a cross: the operating point, the learning rate of the lowest held-out perplexity, with "
        "95 % intervals over seeds. Further down: recites less. Further left: predicts unseen text better. Dashed: "
        "passages that were never injected, the floor. Learning rates with more than four times the highest perplexity "
        "of an operating point lie outside."
    )
    drawings = [(frontier, frontier_drawing(frontier)) for frontier in frontiers]
    several = len(frontiers) > 1
    return tuple(
        Figure(
            f"frontier_{number}" if several else "frontier",
            "LMS against held-out perplexity" + (f": {frontier.model}" if several else ""),
            drawing,
            caption,
        )
        for number, (frontier, drawing) in enumerate(drawings, start=1)
        if drawing is not None
    )
