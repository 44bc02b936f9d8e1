"""Runs over learning rates as a report: the frontier of recitation against perplexity."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfidf_tune.analysis._frontier import Curve, Frontier, Point, SeedDifference, perplexity_of, trace_frontiers
from tfidf_tune.analysis._over_seeds import VERDICTS, SeedEstimate
from tfidf_tune.report._comparison_tables import CONTROLS, SEEDS, WHO
from tfidf_tune.report._document import Column, Figure, Report, Table
from tfidf_tune.report._frontier_figure import frontier_drawing
from tfidf_tune.report._wording import LMS_EXPLAINED, joined
from tfidf_tune.results import Results

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
_CAPTION = (
    "A line for each objective from its lowest learning rate to its highest, the markers growing with it. Large, "
    "numbered and with a cross: the operating point, the learning rate of the lowest held-out perplexity, with 95 % "
    "intervals over seeds. Further down: recites less. Further left: predicts unseen text better. Dashed: passages "
    "that were never injected, the floor. Learning rates with more than four times the highest perplexity of an "
    "operating point lie outside."
)
_FEW = 4  # up to so many objectives, all have their numbers in a sentence


def frontier_report(results: Results, *, baseline: str | None = None, references: Sequence[str] = ()) -> Report:
    """Show what each objective recites at which perplexity, through its learning rates, with intervals over seeds.

    Args:
        results (Results): of any models, objectives, learning rates and seeds.
        baseline (str | None): objective to compare with. Default: None, "CE" if there is one, else the first run's.
        references (Sequence[str]): more objectives to compare with. Default: none.

    Raises:
        ValueError: If there is no run, none has the baseline or a reference, two runs have the same names, or runs of a
            model were not asked the same.
    """
    frontiers = trace_frontiers(results, baseline=baseline, references=references)
    several = len(frontiers) > 1
    drawings = [(frontier, frontier_drawing(frontier)) for frontier in frontiers]
    tables = (_operating_points(frontiers), _differences(frontiers), _equal_rates(frontiers), _points(frontiers))
    return Report(
        title="Recitation against perplexity",
        statements=tuple(
            f"{frontier.model}: {text}" if several else text
            for frontier in frontiers
            for text in (*_verdicts(frontier), *_front(frontier), *_doubts(frontier))
        ),
        tables=tuple(table.without_empty_columns() for table in tables if table.rows),
        figures=tuple(
            Figure(
                f"frontier_{number}" if several else "frontier",
                "LMS against held-out perplexity" + (f": {frontier.model}" if several else ""),
                drawing,
                _CAPTION,
            )
            for number, (frontier, drawing) in enumerate(drawings, start=1)
            if drawing is not None
        ),
        examples=(),
        provenance=(
            ("Compared with", joined(frontiers[0].references)),
            ("Runs", str(len({one.run for one in results.checkpoints}))),
            ("Intervals", "95 %, Student's t over seeds, differences paired by seed"),
            *results.provenance.items(),
        ),
        lead=_lead(results),
    )


def _lead(results: Results) -> str:
    runs = results.checkpoints
    models = joined(list(dict.fromkeys(one.model for one in runs)))
    objectives = len({one.objective for one in runs})
    rates = sorted({one.learning_rate for one in runs if one.learning_rate is not None})
    through = f" at learning rates {joined([f'{rate:g}' for rate in rates])}" if rates else ""
    seeds = len({one.seed for one in runs if one.seed is not None}) or 1
    return (
        f"Runs of {models} under {objectives} objective{'s' * (objectives > 1)}{through}, {seeds} "
        f"seed{'s' * (seeds > 1)}, at their last checkpoint. {LMS_EXPLAINED}."
    )


def _verdicts(frontier: Frontier) -> list[str]:
    statements = []
    for reference in frontier.references:
        against = [one for one in frontier.at_operating_points if one.reference == reference]
        pairs = {one.num_pairs for one in against}
        shown = "" if len(pairs) > 1 else f" ({_pairs(*pairs)})" if pairs else ""
        found = []
        for said in VERDICTS:
            # Of many objectives, the sentence has the numbers of the best only.
            brief = len(against) > _FEW and said not in VERDICTS[:2]
            same = [one for one in against if one.verdict == said]
            names = [one.objective if brief else _change(one, with_pairs=len(pairs) > 1) for one in same]
            found += [f"{said}: {joined(names)}"] if names else []
        if found:
            statements.append(f"Against {reference}, each at its operating point{shown}: {'; '.join(found)}.")
    return statements


def _change(one: SeedDifference, *, with_pairs: bool) -> str:
    """For example "Goldfish (LMS -86.0 %, perplexity +1.2 %)"."""
    changes = [] if one.reduction is None else [f"LMS {_signed(-100 * one.reduction)}"]
    perplexity, *_ = _in_percent(one.log_perplexity)
    changes += [] if perplexity is None else [f"perplexity {_signed(perplexity)}"]
    changes += [_pairs(one.num_pairs)] if with_pairs else []
    return f"{one.objective} ({', '.join(changes)})" if changes else one.objective


def _signed(value: float) -> str:
    return f"{round(value, 1) + 0.0:+.1f} %"  # no "-0.0"


def _pairs(number: int) -> str:
    return f"{number} pair{'s' * (number != 1)} of seeds"


def _front(frontier: Frontier) -> list[str]:
    on_front = [
        (curve.operating.log_perplexity.mean, curve.objective)
        for curve in frontier.curves
        if curve.operating is not None and curve.on_front
    ]
    if len(frontier.curves) < 2 or not on_front:
        return []
    names = joined([objective for _, objective in sorted(on_front)])
    points = ", by ascending perplexity, are the operating points" if len(on_front) > 1 else " is the operating point"
    return [
        f"On the Pareto front of all points{points} of {names}: no other point has less of one without more of the "
        "other."
    ]


def _doubts(frontier: Frontier) -> list[str]:
    """Say where an operating point is an end of the range, seeds differ, or all runs diverged."""
    statements = [
        f"The operating point of {joined(objectives)} is at the {end} learning rate that was tried: a better one may "
        "lie beyond."
        for end in ("lowest", "highest")
        if (objectives := [curve.objective for curve in frontier.curves if curve.range_end == end])
    ]
    unequal = [
        curve
        for curve in frontier.curves
        if len({frozenset(point.runs["seed"]) for point in curve.points if point.finite}) > 1
    ]
    for has_common, how in ((True, "those that all have"), (False, "each one's own, since none is common to all")):
        if objectives := [curve.objective for curve in unequal if bool(curve.chosen_by) == has_common]:
            statements.append(
                f"Not every learning rate of {joined(objectives)} has the same seeds: the operating point is chosen by "
                f"{how}."
            )
    if objectives := [curve.objective for curve in frontier.curves if curve.operating is None]:
        statements.append(
            f"At every learning rate a run of {joined(objectives)} diverged, so that there is no operating point."
        )
    return statements


def _operating_points(frontiers: Sequence[Frontier]) -> Table:
    baseline = frontiers[0].references[0]
    columns = (
        *(*WHO, _RATE, Column("End of range"), SEEDS, *_MEASURED),
        Column(f"LMS at {baseline}'s perplexity", ".2f"),
        Column("On the front"),
    )
    rows = tuple(
        (frontier.model, curve.objective, *_operating_cells(curve))
        for frontier in frontiers
        for curve in frontier.curves
    )
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


def _operating_cells(curve: Curve) -> tuple[Any, ...]:
    point = curve.operating
    if point is None:
        return (*[None] * (3 + len(_MEASURED)), None, "diverged")
    on_front = "yes" if curve.on_front else "no"
    return (
        *(point.learning_rate, curve.range_end, len(point.runs), *_measured(point)),
        *(curve.lms_at_baseline, on_front),
    )


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
    rows = []
    for frontier in frontiers:
        for curve in frontier.curves:
            for point in curve.points:
                longest = point.runs["max_lms"].dropna()
                means = point.runs[["rouge_l", "verbatim", "control_lms"]].mean() * [1, 100, 1]
                mark = "diverged" if not point.finite else "yes" if point is curve.operating else "no"
                rows.append(
                    (
                        *(frontier.model, curve.objective, point.learning_rate, *_measured(point)),
                        int(longest.max()) if len(longest) else None,
                        *(None if math.isnan(value) else float(value) for value in means),
                        *(len(point.runs), mark),
                    )
                )
    notes = [
        f"LMS, ROUGE-L and verbatim share: means over passages, prefix lengths and seeds; Max LMS: the largest. "
        f"{_INTERVALS}",
        *(f"Left out: {text}." for frontier in frontiers for text in frontier.left_out),
    ]
    return Table("points", "Every learning rate", columns, tuple(rows), tuple(notes))


def _measured(point: Point) -> tuple[Any, ...]:
    log = point.log_perplexity
    ends = (None if end is None else perplexity_of(end) for end in (log.low, log.high))
    return point.lms.mean, point.lms.low, point.lms.high, point.perplexity, *ends


def _compared(one: SeedDifference) -> tuple[Any, ...]:
    lms = (None, None, None) if one.lms is None else (one.lms.mean, one.lms.low, one.lms.high)
    reduction = None if one.reduction is None else 100 * one.reduction
    return one.num_pairs, *lms, reduction, *_in_percent(one.log_perplexity), one.verdict


def _in_percent(log_ratio: SeedEstimate | None) -> tuple[float | None, ...]:
    """Turn mean and interval of a difference in log perplexity into percent; None if there is none or it diverged."""
    if log_ratio is None or not math.isfinite(log_ratio.mean):
        return None, None, None
    return tuple(_percent(end) for end in (log_ratio.mean, log_ratio.low, log_ratio.high))


def _percent(log_ratio: float | None) -> float | None:
    with np.errstate(over="ignore"):  # of two perplexities that may be as large as a float can hold
        return None if log_ratio is None else 100 * float(np.expm1(log_ratio))
