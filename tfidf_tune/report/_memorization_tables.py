"""What each model and objective recites: the paper's table 1, how it varies, and by prefix length."""

from collections.abc import Sequence

import numpy as np

from tfidf_tune.analysis import (
    LMS,
    Evaluation,
    Measure,
    ModelRuns,
    ProbeSample,
    last_evaluations,
    own_interval,
    summarize,
)
from tfidf_tune.report._document import Column, Table, Value
from tfidf_tune.report._explanations import TEXT_PROMPTS

WHO = (Column("Model"), Column("Objective"))
CONTROLS, SEEDS = Column("Control LMS", ".2f"), Column("Seeds")
_RECITED = (
    Column("Avg Prefix", ".2f", "lower"),
    Column("Max Prefix", "", "lower"),
    Column("Avg LMS", ".2f", "lower"),
    Column("Max LMS", "", "lower"),
    Column("ROUGE-L", ".2f", "lower"),
    Column("Verbatim %", ".1f", "lower"),
)
# Among rows of several checkpoints or prefix lengths, the best would be the first checkpoint, which says nothing.
RECITED_UNRANKED = tuple(Column(column.name, column.format) for column in _RECITED)


def memorization_table(models: Sequence[ModelRuns]) -> Table:
    """The paper's table 1, with the share of passages recited whole, and the controls.

    Args:
        models (Sequence[ModelRuns]): the runs.

    Returns:
        Table: a row for each model and objective that was probed.
    """
    rows = tuple(
        (*who, *recited(samples_of(evaluations)), len(_targets(evaluations)), len(evaluations))
        for *who, evaluations in last_evaluations(models, LMS)
    )
    lengths = _lengths([s for *_, evaluations in last_evaluations(models, LMS) for s in samples_of(evaluations)])
    notes = [
        f"Means and maxima over passages, prefix lengths ({', '.join(map(str, lengths))} tokens) and seeds. Prefix "
        "match and LMS, the longest memorized substring, are in tokens; Verbatim is the share of continuations that "
        "are the passage's whole rest; Control LMS is the average LMS of passages that were never injected: the floor.",
        *checkpoint_note(models, LMS),
        *_injections_note(models),
        *_text_prompts_notes(models),
        *_round_trip_notes(models),
    ]
    columns = (*WHO, *_RECITED, CONTROLS, Column("Passages"), SEEDS)
    return Table("memorization", "Memorization", columns, rows, tuple(notes))


def spread_table(models: Sequence[ModelRuns]) -> Table:
    """How the LMS varies over passages and over seeds.

    Args:
        models (Sequence[ModelRuns]): the runs.

    Returns:
        Table: a row for each model and objective that was probed.
    """
    rows: list[tuple[Value, ...]] = []
    several_seeds = any(len(evaluations) > 1 for *_, evaluations in last_evaluations(models, LMS))
    for *who, evaluations in last_evaluations(models, LMS):
        lms = [sample.lms for sample in samples_of(evaluations) if sample.kind == "target"]
        interval = own_interval(LMS, evaluations)
        by_seed = [value for evaluation in evaluations if (value := LMS.of([evaluation])) is not None]
        seeds = (min(by_seed), max(by_seed), len(by_seed))
        ends = (None, None) if interval is None else (interval.low, interval.high)
        quantiles = (float(np.quantile(lms, 0.5)), float(np.quantile(lms, 0.9)), max(lms))
        rows.append((*who, LMS.of(evaluations), *ends, *quantiles, *(seeds if several_seeds else ())))
    columns = [*WHO, Column("Avg LMS", ".2f"), Column("From", ".2f"), Column("To", ".2f")]
    columns += [Column("Median", ".1f"), Column("90th percentile", ".1f"), Column("Max")]
    columns += [Column("Lowest seed", ".2f"), Column("Highest seed", ".2f"), SEEDS] if several_seeds else []
    note = (
        "From and To: 95 % interval of the average, from resampling passages. Median and percentile are over passages, "
        "prefix lengths and seeds."
    )
    per_seed = ["Lowest and highest seed: the average LMS of one run alone."] if several_seeds else []
    return Table("lms_spread", "How the LMS varies", tuple(columns), tuple(rows), (note, *per_seed))


def prefix_table(models: Sequence[ModelRuns]) -> Table:
    """The memorization of each prefix length.

    Args:
        models (Sequence[ModelRuns]): the runs.

    Returns:
        Table: a row for each model, objective and prefix length.
    """
    rows: list[tuple[Value, ...]] = []
    for *who, evaluations in last_evaluations(models, LMS):
        samples = samples_of(evaluations)
        by_length = {length: [s for s in samples if s.prefix_length == length] for length in _lengths(samples)}
        rows += [(*who, length, *recited(of_length)) for length, of_length in by_length.items()]
    columns = (*WHO, Column("Prefix length"), *RECITED_UNRANKED, CONTROLS)
    return Table("by_prefix_length", "Memorization by prefix length", columns, tuple(rows))


def recited(samples: Sequence[ProbeSample]) -> tuple[Value, ...]:
    """The cells of ``RECITED_UNRANKED`` and ``CONTROLS``.

    Args:
        samples (Sequence[ProbeSample]): of targets and controls.

    Returns:
        tuple[Value, ...]: None for what has no samples.
    """
    by_kind = summarize(samples)
    targets, controls = by_kind.get("target"), by_kind.get("control")
    floor = None if controls is None else controls.avg_lms
    if targets is None:
        return (*[None] * len(_RECITED), floor)
    averages = (targets.avg_prefix, targets.max_prefix, targets.avg_lms, targets.max_lms, targets.rouge_l)
    return (*averages, 100 * targets.verbatim_rate, floor)


def samples_of(evaluations: Sequence[Evaluation]) -> list[ProbeSample]:
    """The samples of all seeds.

    Args:
        evaluations (Sequence[Evaluation]): one a seed.

    Returns:
        list[ProbeSample]: one after the other.
    """
    return [sample for evaluation in evaluations for sample in evaluation.samples]


def checkpoint_note(models: Sequence[ModelRuns], measure: Measure) -> list[str]:
    """Say where the last checkpoint is not the end of training.

    Args:
        models (Sequence[ModelRuns]): the runs.
        measure (Measure): what a table shows.

    Returns:
        list[str]: a note, or none.
    """
    at = {model.model: last for model in models if (last := model.last(measure)) not in (None, 100)}
    if not at:
        return []
    where = ", ".join(f"{model} at {progress} %" for model, progress in at.items())
    return [f"Not the end of training, but the last checkpoint that all runs of the model share: {where}."]


def _lengths(samples: Sequence[ProbeSample]) -> list[int]:
    return sorted({sample.prefix_length for sample in samples})


def _targets(evaluations: Sequence[Evaluation]) -> set[str]:
    return {sample.passage_id for sample in samples_of(evaluations) if sample.kind == "target"}


def _injections_note(models: Sequence[ModelRuns]) -> list[str]:
    times = sorted(
        {
            evaluation.num_injections[passage]
            for *_, evaluations in last_evaluations(models, LMS)
            for evaluation in evaluations
            for passage in _targets([evaluation])
            if passage in evaluation.num_injections
        }
    )
    return [f"Each target stood {' or '.join(map(str, times))} times in the training text."] if times else []


def _text_prompts_notes(models: Sequence[ModelRuns]) -> list[str]:
    return [
        f"{model}, {objective}: {TEXT_PROMPTS}"
        for model, objective, evaluations in last_evaluations(models, LMS)
        if any(evaluation.text_prompts for evaluation in evaluations)
    ]


def _round_trip_notes(models: Sequence[ModelRuns]) -> list[str]:
    return [
        f"{model}, {objective}: {sum(e.num_not_round_trip for e in evaluations)} of {len(samples_of(evaluations))} "
        "prompts did not survive as text, so the model saw other tokens than in training; `tfidf-tune eval` is exact."
        for model, objective, evaluations in last_evaluations(models, LMS)
        if any(evaluation.num_not_round_trip for evaluation in evaluations)
    ]
