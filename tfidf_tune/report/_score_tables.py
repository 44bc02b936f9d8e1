"""What each model and objective scores beside memorization: the paper's tables 2 to 4, and every checkpoint."""

from collections.abc import Sequence

from tfidf_tune.analysis import (
    ANSWER_MEASURES,
    DOWNSTREAM_MEASURES,
    PERPLEXITY,
    SUMMARY_MEASURES,
    Measure,
    ModelRuns,
    last_evaluations,
)
from tfidf_tune.report._document import Column, Table, Value, without_empty_columns
from tfidf_tune.report._memorization_tables import (
    CONTROLS,
    RECITED_UNRANKED,
    SEEDS,
    WHO,
    checkpoint_note,
    recited,
    samples_of,
)


def perplexity_table(models: Sequence[ModelRuns]) -> Table:
    """The paper's table 2.

    Args:
        models (Sequence[ModelRuns]): the runs.

    Returns:
        Table: a row for each model and objective.
    """
    note = "Token-level perplexity on unseen text, over all predictions of all seeds."
    columns = (Column("Perplexity", ".2f", "lower"),)
    lost = [
        f"{model}, {objective}: {sum(e.num_blocks_not_round_trip for e in evaluations)} of "
        f"{sum(len(e.blocks) for e in evaluations)} blocks did not survive as text, so other tokens were predicted."
        for model, objective, evaluations in last_evaluations(models, PERPLEXITY)
        if any(e.num_blocks_not_round_trip for e in evaluations)
    ]
    return _scores("perplexity", "Perplexity", models, (PERPLEXITY,), columns, "Blocks", [note, *lost])


def summarization_table(models: Sequence[ModelRuns]) -> Table:
    """The paper's table 3.

    Args:
        models (Sequence[ModelRuns]): the runs.

    Returns:
        Table: a row for each model and objective; the notes say why a BERTScore is missing.
    """
    columns = tuple(Column(name, ".2f", "higher") for name in ("ROUGE-1", "ROUGE-2", "ROUGE-L", "BERTScore-F1"))
    missing = []
    for model, objective, evaluations in last_evaluations(models, SUMMARY_MEASURES[0]):
        summaries = [summary for evaluation in evaluations for summary in evaluation.summaries]
        reasons = [(s.bertscore_missing or "no reason given").rstrip(".") for s in summaries if s.bertscore_f1 is None]
        if reasons:
            missing.append(
                f"{model}, {objective}: BERTScore-F1 is missing for {len(reasons)} of {len(summaries)} summaries: "
                f"{'; '.join(dict.fromkeys(reasons))}."
            )
    notes = ["CNN/DailyMail; means of F-measures in percent.", *missing]
    return _scores("summarization", "Summarization", models, SUMMARY_MEASURES, columns, "Articles", notes)


def qa_table(models: Sequence[ModelRuns]) -> Table:
    """The paper's table 4.

    Args:
        models (Sequence[ModelRuns]): the runs.

    Returns:
        Table: a row for each model and objective.
    """
    columns = tuple(Column(name, ".2f", "higher") for name in ("Exact Match %", "F1 %"))
    notes = ["SQuAD v1.1, the best over each question's gold answers."]
    return _scores("qa", "Question answering", models, ANSWER_MEASURES, columns, "Questions", notes)


def progress_table(models: Sequence[ModelRuns]) -> Table:
    """Every checkpoint's numbers.

    Args:
        models (Sequence[ModelRuns]): the runs.

    Returns:
        Table: a row for each model, objective and checkpoint, without the columns that nobody has.
    """
    rows: list[tuple[Value, ...]] = []
    for model in models:
        for objective, runs in model.objectives.items():
            for progress in sorted({evaluation.progress for run in runs for evaluation in run.evaluations}):
                evaluations = model.at(objective, progress)
                scores = (measure.of(evaluations) for measure in (PERPLEXITY, *DOWNSTREAM_MEASURES))
                rows.append(
                    (model.model, objective, progress, *recited(samples_of(evaluations)), *scores, len(evaluations))
                )
    names = [Column(measure.name, ".2f") for measure in (PERPLEXITY, *DOWNSTREAM_MEASURES)]
    columns = (*WHO, Column("Progress %"), *RECITED_UNRANKED, CONTROLS, *names, SEEDS)
    return without_empty_columns(Table("progress", "Every checkpoint", columns, tuple(rows)))


def _scores(
    name: str,
    title: str,
    models: Sequence[ModelRuns],
    measures: Sequence[Measure],
    columns: tuple[Column, ...],
    units: str,
    notes: Sequence[str],
) -> Table:
    rows = []
    for *who, evaluations in last_evaluations(models, measures[0]):
        totals = measures[0].totals(evaluations[0])
        num_units = 0 if totals is None else len(totals[0])
        rows.append((*who, *(measure.of(evaluations) for measure in measures), num_units, len(evaluations)))
    columns = (*WHO, *columns, Column(units), SEEDS)
    return Table(name, title, columns, tuple(rows), (*notes, *checkpoint_note(models, measures[0])))
