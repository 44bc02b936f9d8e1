"""A frontier as tables: every point, the operating points, and the differences between objectives."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from tfidf_tune.analysis import (
    Frontier,
    FrontierCurve,
    FrontierPoint,
    RunRecord,
    SeedDifference,
    SeedEstimate,
    perplexity_of,
    trace_frontiers,
)
from tfidf_tune.report._document import Column, Table, Value, without_empty_columns
from tfidf_tune.report._memorization_tables import CONTROLS, SEEDS, WHO

_RATE = Column("Learning rate", "g")
_MEASURED = (
    Column("Avg LMS", ".2f", "lower"),
    Column("LMS from", ".2f"),
    Column("LMS to", ".2f"),
    Column("Perplexity", ".2f", "lower"),
    Column("Perplexity from", ".2f"),
    Column("Perplexity to", ".2f"),
)
_COMPARED = (
    Column("Pairs"),
    Column("LMS difference", "+.2f"),
    Column("LMS from", "+.2f"),
    Column("LMS to", "+.2f"),
    Column("LMS reduction %", ".1f"),
    Column("Perplexity %", "+.2f"),
    Column("Perplexity from %", "+.2f"),
    Column("Perplexity to %", "+.2f"),
    Column("Verdict"),
)
_INTERVALS = "From and to: 95 % t-interval over seeds; there is none from a single one."
_VERDICTS_EXPLAINED = (
    "Better: the LMS interval lies below 0, and the perplexity interval ends at or below it: it recites less at a "
    "perplexity that is not higher. Worse: the mirror image. Lower and higher: the interval lies below or above 0; not "
    "told apart: it includes 0, which does not show the two to be equal. Nothing is corrected for the number of "
    "comparisons: one in twenty is told apart by chance."
)


def frontier_tables(
    records: Sequence[RunRecord], *, baseline: str | None = None, references: Sequence[str] = ()
) -> list[Table]:
    """Make the tables of a frontier, which depend on nothing but the records.

    Args:
        records (Sequence[RunRecord]): as for :func:`~tfidf_tune.analysis.trace_frontiers`.
        baseline (str | None): objective to compare with. Default: None, "CE" where there is one, else the first's.
        references (Sequence[str]): more objectives to compare with. Default: none.

    Returns:
        list[Table]: ``operating_points``, ``differences``, ``equal_learning_rate``, ``points``; those without rows, and
            columns without values, are left out.

    Raises:
        ValueError: As :func:`~tfidf_tune.analysis.trace_frontiers`.
    """
    return tables_of(trace_frontiers(records, baseline=baseline, references=references))


def tables_of(frontiers: Sequence[Frontier]) -> list[Table]:
    """Make the tables of frontiers.

    Args:
        frontiers (Sequence[Frontier]): one a model, of one baseline.

    Returns:
        list[Table]: as :func:`frontier_tables`.
    """
    tables = (_operating_points(frontiers), _differences(frontiers), _equal_rates(frontiers), _points(frontiers))
    return [without_empty_columns(table) for table in tables if table.rows]


def _operating_points(frontiers: Sequence[Frontier]) -> Table:
    baseline = frontiers[0].baseline
    columns = (
        *(*WHO, _RATE, Column("End of range"), SEEDS, *_MEASURED),
        Column(f"LMS at {baseline}'s perplexity", ".2f"),
        Column("On the front"),
    )
    curves = [(frontier.model, curve) for frontier in frontiers for curve in frontier.curves]
    rows = tuple((model, curve.objective, *_operating_cells(curve)) for model, curve in curves)
    notes = (
        "Operating point: of the learning rates that were tried, the one of the lowest mean held-out perplexity, which "
        f"one would choose without a look at the passages, by the seeds that all its learning rates have. {_INTERVALS} "
        "The perplexity is the geometric mean over seeds. End of range: that learning rate is the lowest, the highest "
        "or the only one tried, so that a better one may lie beyond.",
        f"LMS at {baseline}'s perplexity: on the objective's own line through its learning rates, where it has the "
        f"perplexity of {baseline}'s operating point (linear in log perplexity; where it has it twice, at the lower "
        "learning rate); nothing where it never has it. On the front: no objective has at any learning rate as low an "
        "LMS and as low a perplexity, one of them lower, by the means.",
    )
    return Table("operating_points", "Operating points", columns, rows, notes)


def _operating_cells(curve: FrontierCurve) -> tuple[Value, ...]:
    point = curve.operating
    if point is None:
        return (*[None] * (3 + len(_MEASURED)), None, "diverged")
    seeds = point.lms.num_seeds
    on_front = "yes" if curve.on_front else "no"
    return (point.learning_rate, curve.range_end, seeds, *_measured(point), curve.lms_at_baseline, on_front)


def _differences(frontiers: Sequence[Frontier]) -> Table:
    columns = (*WHO, Column("Against"), _RATE, Column("Against's rate", "g"), *_COMPARED)
    rows = tuple(
        (frontier.model, one.objective, one.reference, one.learning_rate, one.reference_rate, *_compared(one))
        for frontier in frontiers
        for one in frontier.at_operating_points
    )
    notes = (
        "Objective minus reference, each at its own operating point, paired by seed; perplexity in percent of the "
        f"reference's. {_INTERVALS} LMS reduction: (reference - objective) / reference of the means over the pairs.",
        _VERDICTS_EXPLAINED,
    )
    return Table("differences", "Differences at the operating points", columns, rows, notes)


def _equal_rates(frontiers: Sequence[Frontier]) -> Table:
    columns = (*WHO, Column("Against"), _RATE, *_COMPARED)
    rows = tuple(
        (frontier.model, one.objective, one.reference, one.learning_rate, *_compared(one))
        for frontier in frontiers
        for one in frontier.at_equal_rates
    )
    notes = (
        "As the differences at the operating points, but both at the same learning rate, which need not be the best "
        "for either.",
    )
    return Table("equal_learning_rate", "Differences at equal learning rate", columns, rows, notes)


def _points(frontiers: Sequence[Frontier]) -> Table:
    columns = (
        *(*WHO, _RATE, *(Column(column.name, column.format) for column in _MEASURED)),
        *(Column("Max LMS"), Column("ROUGE-L", ".2f"), Column("Verbatim %", ".1f"), CONTROLS, SEEDS),
        Column("Operating point"),
    )
    rows = tuple(
        (frontier.model, curve.objective, point.learning_rate, *_point_cells(point), _mark(curve, point))
        for frontier in frontiers
        for curve in frontier.curves
        for point in curve.points
    )
    notes = [
        f"LMS, ROUGE-L and verbatim share: means over passages, prefix lengths and seeds; Max LMS: the largest. "
        f"{_INTERVALS}",
        *(f"Left out: {text}." for frontier in frontiers for text in frontier.left_out),
    ]
    return Table("points", "Every learning rate", columns, rows, tuple(notes))


def _point_cells(point: FrontierPoint) -> tuple[Value, ...]:
    longest = [record.max_lms for record in point.records if record.max_lms is not None]
    verbatim = _mean(record.verbatim_rate for record in point.records)
    return (
        *_measured(point),
        max(longest, default=None),
        _mean(record.rouge_l for record in point.records),
        None if verbatim is None else 100 * verbatim,
        _mean(record.control_lms for record in point.records),
        len(point.records),
    )


def _mark(curve: FrontierCurve, point: FrontierPoint) -> Value:
    if not point.finite:
        return "diverged"
    return "yes" if point is curve.operating else "no"


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _measured(point: FrontierPoint) -> tuple[Value, ...]:
    log = point.log_perplexity
    ends = (None if end is None else perplexity_of(end) for end in (log.low, log.high))
    return point.lms.mean, point.lms.low, point.lms.high, point.perplexity, *ends


def _compared(one: SeedDifference) -> tuple[Value, ...]:
    lms: tuple[Value, ...] = (None, None, None)
    if one.lms is not None:
        lms = (one.lms.mean, one.lms.low, one.lms.high)
    reduction = None if one.reduction is None else 100 * one.reduction
    return one.num_pairs, *lms, reduction, *in_percent(one.log_perplexity), one.verdict


def in_percent(log_ratio: SeedEstimate | None) -> tuple[float | None, float | None, float | None]:
    """Take a difference in log perplexity to a change of the perplexity.

    Args:
        log_ratio (SeedEstimate | None): objective minus reference.

    Returns:
        tuple[float | None, float | None, float | None]: mean and ends of the interval in percent of the reference's;
            None where there is none, or a run diverged.
    """
    if log_ratio is None or not math.isfinite(log_ratio.mean):
        return None, None, None
    low, high = (None if end is None else _percent(end) for end in (log_ratio.low, log_ratio.high))
    return _percent(log_ratio.mean), low, high


def _percent(log_ratio: float) -> float:
    with np.errstate(over="ignore"):  # a difference of two perplexities that may be as large as a float can hold
        return 100 * float(np.expm1(log_ratio))
