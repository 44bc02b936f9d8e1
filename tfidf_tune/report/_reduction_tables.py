"""Objectives against the baseline, as tables."""

from collections.abc import Sequence

from tfidf_tune.analysis import NUM_RESAMPLES, Comparison, Reduction
from tfidf_tune.report._document import Column, Table, Value
from tfidf_tune.report._intervals import SIGNIFICANCE_NOTE
from tfidf_tune.report._statements import why_no_interval

_WHO = (Column("Model"), Column("Objective"))


def reductions_table(comparisons: Sequence[Comparison], baseline: str) -> Table:
    """The relative reduction of every measure.

    Args:
        comparisons (Sequence[Comparison]): objectives against the baseline.
        baseline (str): the baseline.

    Returns:
        Table: a row for each model, objective and measure.
    """
    rows, notes = [], []
    for one in comparisons:
        for name, (progress, reduction) in one.reductions.items():
            values = (reduction.baseline, reduction.other)
            rows.append((one.model, one.objective, name, *values, *_cells(reduction), progress))
            if reduction.interval is None:
                notes.append(f"{one.model}, {one.objective}, {name}: no interval, {why_no_interval(reduction)}.")
    columns = (
        *_WHO,
        Column("Measure"),
        Column(baseline, ".2f"),
        Column("Value", ".2f"),
        Column("Reduction %", ".1f"),
        Column("From %", ".1f"),
        Column("To %", ".1f"),
        Column("Significant"),
        Column("Progress %"),
    )
    explanation = (
        f"Reduction: ({baseline} - value) / {baseline}; negative where the objective is higher, which is better for "
        "summaries and answers. From and To: 95 % percentile-bootstrap interval",
        f"of {NUM_RESAMPLES:,} resamples, paired between the objectives: by passage (its prefix lengths and seeds stay "
        "together), by block for perplexity, by article and by question. It covers the choice of these, not that of "
        f"seeds. {SIGNIFICANCE_NOTE}",
    )
    title = f"Relative reductions against {baseline}"
    return Table("reductions", title, columns, tuple(rows), (" ".join(explanation), *notes))


def equal_perplexity_table(comparisons: Sequence[Comparison], baseline: str) -> Table:
    """What the baseline recited when it had each objective's final perplexity.

    Args:
        comparisons (Sequence[Comparison]): objectives against the baseline.
        baseline (str): the baseline.

    Returns:
        Table: a row for each model and objective with LMS and perplexity.
    """
    rows, notes = [], []
    for one in comparisons:
        equal = one.equal_perplexity
        if equal is None:
            continue
        bracket = equal.bracket
        if bracket is None:
            lowest, highest = min(equal.baseline_perplexities), max(equal.baseline_perplexities)
            notes.append(
                f"{one.model}, {one.objective}: out of range, {baseline}'s checkpoints lie between {lowest:.2f} and "
                f"{highest:.2f}."
            )
            of_baseline: tuple[Value, ...] = (None, None, None, None)
        else:
            recited = (bracket.lms_before, bracket.lms_after, bracket.interpolated)
            of_baseline = (_span(bracket.before, bracket.after), *recited)
        rows.append((one.model, one.objective, equal.perplexity, *of_baseline, equal.lms))
    columns = (
        *_WHO,
        Column("Perplexity", ".2f"),
        Column(f"{baseline} at %"),
        Column(f"{baseline} LMS before", ".2f"),
        Column(f"{baseline} LMS after", ".2f"),
        Column("Interpolated", ".2f"),
        Column("Avg LMS", ".2f"),
    )
    explanation = (
        f"{baseline} first had the objective's final perplexity between these checkpoints. LMS before and after: its "
        "average LMS at them; Interpolated: linearly in log perplexity, a guess at what lies between. Avg LMS: the "
        "objective's."
    )
    title = f"At equal perplexity, against {baseline}"
    return Table("equal_perplexity", title, columns, tuple(rows), (explanation, *notes))


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def _cells(reduction: Reduction) -> tuple[Value, ...]:
    percent = None if reduction.reduction is None else 100 * reduction.reduction
    if reduction.interval is None:
        return percent, None, None, None
    return percent, 100 * reduction.interval.low, 100 * reduction.interval.high, reduction.interval.significant
