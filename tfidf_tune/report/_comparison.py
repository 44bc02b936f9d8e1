"""Runs side by side as a report."""

from collections.abc import Callable, Sequence
from datetime import date
from importlib.metadata import version

from tfidf_tune.analysis import (
    CONTROL_LMS,
    LMS,
    NUM_RESAMPLES,
    SEED,
    Comparison,
    ModelRuns,
    Run,
    compare_objectives,
    group_runs,
    lms_floor,
)
from tfidf_tune.report._comparison_figures import comparison_figures
from tfidf_tune.report._document import Example, Report, Table
from tfidf_tune.report._examples import Decode, checkpoint_decoder, recitation_examples
from tfidf_tune.report._explanations import LMS_EXPLAINED
from tfidf_tune.report._memorization_tables import memorization_table, prefix_table, spread_table
from tfidf_tune.report._reduction_tables import equal_perplexity_table, reductions_table
from tfidf_tune.report._score_tables import perplexity_table, progress_table, qa_table, summarization_table
from tfidf_tune.report._statements import (
    downstream_statements,
    equal_perplexity_statement,
    floor_statement,
    joined,
    reduction_statement,
    seeds_statement,
)


def comparison_report(
    runs: Sequence[Run],
    *,
    baseline: str | None = None,
    decoder: Callable[[str], Decode | None] = checkpoint_decoder,
) -> Report:
    """Put runs side by side: findings with intervals, the paper's tables, figures, examples.

    Args:
        runs (Sequence[Run]): at least two, of any models, objectives and seeds.
        baseline (str | None): objective to compare with. Default: None, "CE" where there is one, else the first run's.
        decoder (Callable[[str], Callable[[list[int]], str] | None]): checkpoint -> how to decode its token ids, for the
            examples. Default: the tokenizer in the checkpoint's folder, if any.

    Returns:
        Report: tables and figures without content are left out.

    Raises:
        ValueError: If there is only one run, no run has the baseline, or runs of a model were not asked the same.
    """
    baseline, models = group_runs(runs, baseline=baseline)
    comparisons = [one for model in models for one in compare_objectives(model, baseline)]
    others = list(dict.fromkeys(run.objective for run in runs if run.objective != baseline))
    return Report(
        title=f"{joined(others)} against {baseline}" if others else baseline,
        statements=_statements(models, comparisons, baseline),
        tables=_tables(models, comparisons, baseline),
        figures=comparison_figures(models),
        examples=_examples(models, decoder),
        provenance=_provenance(runs, baseline),
        lead=_lead(runs),
    )


def _lead(runs: Sequence[Run]) -> str:
    models = f"Runs of {joined(list(dict.fromkeys(run.model for run in runs)))}"
    kinds = {sample.kind for run in runs for evaluation in run.evaluations for sample in evaluation.samples}
    if "target" not in kinds:
        return f"{models}."
    floor = "; its floor is the average over passages that were never injected" if "control" in kinds else ""
    return f"{models}, asked to continue passages of their training text. {LMS_EXPLAINED}{floor}."


def _statements(models: Sequence[ModelRuns], comparisons: Sequence[Comparison], baseline: str) -> tuple[str, ...]:
    statements: list[tuple[str, str | None]] = []
    if not comparisons:
        have = "; ".join(f"{model.model}: {joined(list(model.objectives))}" for model in models)
        statements.append(
            (
                "",
                f"Nothing is compared: no model has runs of {baseline} and of another objective ({have}). To name the "
                "objective of a model trained elsewhere, give OBJECTIVE=FOLDER.",
            )
        )
    statements += [(one.model, _lms_statement(one, models, baseline)) for one in comparisons]
    statements += [(one.model, equal_perplexity_statement(one, baseline)) for one in comparisons]
    for model in models:
        for objective in model.objectives:
            floor = lms_floor(model.at(objective, model.last(LMS, CONTROL_LMS)))
            statements.append((model.model, None if floor is None else floor_statement(objective, floor)))
    statements += [(one.model, text) for one in comparisons for text in downstream_statements(one)]
    statements += _seeds_statements(models, comparisons, baseline)
    prefix = len(models) > 1
    return tuple(f"{model}: {text}" if prefix and model else text for model, text in statements if text is not None)


def _seeds_statements(
    models: Sequence[ModelRuns], comparisons: Sequence[Comparison], baseline: str
) -> list[tuple[str, str]]:
    """One for each objective of several seeds, one for all the others."""
    statements = []
    for one in comparisons:
        objectives = _objectives_of(models, one)
        num_seeds = min(len(objectives[name]) for name in (baseline, one.objective))
        statements.append((one.model if num_seeds > 1 else "", seeds_statement(one, num_seeds)))
    return list(dict.fromkeys(statements))


def _objectives_of(models: Sequence[ModelRuns], one: Comparison) -> dict[str, tuple[Run, ...]]:
    return next(model.objectives for model in models if model.model == one.model)


def _lms_statement(one: Comparison, models: Sequence[ModelRuns], baseline: str) -> str | None:
    if LMS.name in one.reductions:
        return reduction_statement(one, baseline)
    objectives = _objectives_of(models, one)
    runs = (*objectives[baseline], *objectives[one.objective])
    if all(LMS.totals(evaluation) is None for run in runs for evaluation in run.evaluations):
        return None
    return (
        f"{one.objective} and {baseline} share no checkpoint with memorization results, so what they recite is not "
        "compared: evaluate both at the same checkpoints."
    )


def _tables(models: Sequence[ModelRuns], comparisons: Sequence[Comparison], baseline: str) -> tuple[Table, ...]:
    tables = [
        memorization_table(models),
        perplexity_table(models),
        summarization_table(models),
        qa_table(models),
        reductions_table(comparisons, baseline),
        equal_perplexity_table(comparisons, baseline),
        spread_table(models),
    ]
    # With one prefix length, or one checkpoint, these would repeat what stands above.
    tables += [table for table in (prefix_table(models), progress_table(models)) if _has_several_a_run(table)]
    return tuple(table for table in tables if table.rows)


def _has_several_a_run(table: Table) -> bool:
    return len({(model, objective) for model, objective, *_ in table.rows}) < len(table.rows)


def _examples(models: Sequence[ModelRuns], decoder: Callable[[str], Decode | None]) -> tuple[Example, ...]:
    examples = []
    for model in models:
        at_last = {objective: model.at(objective, model.last(LMS)) for objective in model.objectives}
        probed = {name: evaluations[0] for name, evaluations in at_last.items() if LMS.of(evaluations) is not None}
        examples += recitation_examples(model.model, probed, decoder) if probed else []
    return tuple(examples)


def _provenance(runs: Sequence[Run], baseline: str) -> tuple[tuple[str, str], ...]:
    entries = [("Baseline", baseline)]
    for run in runs:
        seed = "seed unknown" if run.seed is None else f"seed {run.seed}"
        checkpoints = ", ".join(f"{evaluation.progress} %" for evaluation in run.evaluations)
        entries.append((f"{run.setting}, {run.objective}, {seed}", f"{run.folder} (evaluated at {checkpoints})"))
    intervals = f"percentile bootstrap, {NUM_RESAMPLES:,} resamples, seed {SEED}"
    made = (("Intervals", intervals), ("tfidf-tune", version("tfidf-tune")), ("Date", date.today().isoformat()))
    return (*entries, *made)
