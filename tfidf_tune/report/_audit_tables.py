"""The tables of an audit."""

import dataclasses
import textwrap

from tfidf_tune.analysis import ENOUGH_UNITS, LMS, Evaluation, lms_floor, summarize
from tfidf_tune.report._audit_numbers import best_samples, of_kind, repeat_groups, verbatim_passages
from tfidf_tune.report._document import Column, Table, Value
from tfidf_tune.report._explanations import TEXT_PROMPTS

_NUM_MOST_RECITED = 20
_PROMPT_WIDTH = 70
_KINDS = {"target": "targets (training text)", "control": "controls (never seen)"}


def targets_and_controls(evaluation: Evaluation) -> Table:
    """Table the paper's scores of targets and controls.

    Args:
        evaluation (Evaluation): with at least one target.

    Returns:
        Table: a row for the targets and, where there are any, one for the controls.
    """
    columns = (
        Column("Passages"),
        Column("Number"),
        Column("Avg Prefix", ".2f"),
        Column("Max Prefix"),
        Column("Avg LMS", ".2f"),
        Column("Max LMS"),
        Column("ROUGE-L", ".2f"),
        Column("Verbatim (% of prompts)", ".1f"),
    )
    summaries = summarize(evaluation.samples)
    rows = tuple(
        (
            label,
            summaries[kind].num_passages,
            summaries[kind].avg_prefix,
            summaries[kind].max_prefix,
            summaries[kind].avg_lms,
            summaries[kind].max_lms,
            summaries[kind].rouge_l,
            100 * summaries[kind].verbatim_rate,
        )
        for kind, label in _KINDS.items()
        if kind in summaries
    )
    notes = [
        "Prefix: tokens that agree from the first on. LMS: longest memorized substring, the longest run of tokens that "
        "continuation and passage share. Each passage is asked for from every prefix length."
    ]
    if evaluation.text_prompts:
        notes.append(f"The {TEXT_PROMPTS}")
    return Table("targets_and_controls", "Targets against controls", columns, rows, tuple(notes))


def by_prefix_length(evaluation: Evaluation) -> Table:
    """Table the average LMS by the length of the prompt.

    Args:
        evaluation (Evaluation): with at least one target.

    Returns:
        Table: a row a prefix length that targets were asked for from, ascending.
    """
    columns = (
        Column("Prompt (tokens)"),
        Column("LMS of targets", ".2f"),
        Column("LMS of controls", ".2f"),
        Column("Difference", ".2f"),
        Column("95 % from", ".2f"),
        Column("95 % to", ".2f"),
        Column("Targets verbatim (%)", ".1f"),
    )
    targets, controls = of_kind(evaluation, "target"), of_kind(evaluation, "control")
    rows: list[tuple[Value, ...]] = []
    for length in sorted({sample.prefix_length for sample in targets}):
        of_length = tuple(sample for sample in evaluation.samples if sample.prefix_length == length)
        at_length = dataclasses.replace(evaluation, samples=of_length)
        these, floor = of_kind(at_length, "target"), lms_floor([at_length])
        against = (None, None) if floor is None else (floor.controls, floor.difference)
        interval = None if floor is None else floor.excess
        ends = (None, None) if interval is None else (interval.low, interval.high)
        verbatim = 100 * len(verbatim_passages(these)) / len({sample.passage_id for sample in these})
        rows.append((length, LMS.of([at_length]), *against, *ends, verbatim))
    notes = ["95 %: percentile bootstrap over passages of the difference, targets minus controls."]
    fewest = min(len({sample.passage_id for sample in samples}) for samples in (targets, controls))
    if 0 < fewest < ENOUGH_UNITS:
        notes.append(f"From as few as {fewest} passages such an interval tends to be too narrow.")
    return Table("by_prefix_length", "By length of the prompt", columns, tuple(rows), tuple(notes))


def by_repeats(evaluation: Evaluation) -> Table | None:
    """Table the scores of the targets by how often they stood in the training text.

    Args:
        evaluation (Evaluation): of one checkpoint.

    Returns:
        Table | None: a row a group of repeats, ascending; None where the repeats are not known.
    """
    columns = (
        Column("Times in the training text"),
        Column("Targets"),
        Column("Avg LMS", ".2f"),
        Column("Max LMS"),
        Column("Targets verbatim (%)", ".1f"),
    )
    rows: list[tuple[Value, ...]] = []
    for group in repeat_groups(evaluation):
        passages = {sample.passage_id for sample in group.samples}
        lms = [sample.lms for sample in group.samples]
        verbatim = 100 * len(verbatim_passages(group.samples)) / len(passages)
        rows.append((group.repeats, len(passages), sum(lms) / len(lms), max(lms), verbatim))
    if not rows:
        return None
    notes = ("Verbatim: recited whole from at least one of the prompts.",)
    return Table("by_repeats", "By repeats in the training text", columns, tuple(rows), notes)


def most_recited(evaluation: Evaluation) -> Table:
    """Table the targets that are recited most, each at the prompt from which it is.

    Args:
        evaluation (Evaluation): with at least one target.

    Returns:
        Table: at most 20 rows, by descending LMS.
    """
    columns = (
        Column("Passage"),
        Column("Times in the training text"),
        Column("Prompt (tokens)"),
        Column("LMS"),
        Column("Of"),
        Column("ROUGE-L", ".1f"),
        Column("Verbatim"),
        Column("Starts with"),
    )
    best = best_samples(of_kind(evaluation, "target"))
    rows: tuple[tuple[Value, ...], ...] = tuple(
        (
            sample.passage_id,
            evaluation.num_injections.get(sample.passage_id),
            sample.prefix_length,
            sample.lms,
            len(sample.reference_ids),
            sample.rouge_l,
            "yes" if sample.verbatim else "no",
            textwrap.shorten(
                evaluation.prompts.get((sample.passage_id, sample.offset, sample.prefix_length), ""),
                _PROMPT_WIDTH,
                placeholder=" …",
            ),
        )
        for sample in best[:_NUM_MOST_RECITED]
    )
    notes = ["Of: tokens of the passage that the continuation was compared with."]
    if len(best) > len(rows):
        notes.append(f"The first {len(rows)} of {len(best)} targets.")
    return Table("most_recited", "The passages that it recites most", columns, rows, tuple(notes))
