"""The figures of a comparison."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfidf_tune.analysis.evaluations import (
    CONTROL_LMS,
    LMS,
    PERPLEXITY,
    Measure,
    having_at_last,
    shared_progress,
    unit_totals,
    value_of,
)
from tfidf_tune.analysis.intervals import MIN_UNITS, bootstrap_interval
from tfidf_tune.report._document import Figure
from tfidf_tune.report._figures import Course, lms_distribution, lms_progress, trade_off
from tfidf_tune.results import Results

if TYPE_CHECKING:
    import pandas as pd


def comparison_figures(results: Results, evaluations: "pd.DataFrame") -> list[Figure]:
    """Draw the trade-off if perplexity was measured, progress if there are several checkpoints, and distributions."""
    figures = []
    if courses := _courses(evaluations):
        caption = (
            "Each objective at the last checkpoint. Lower: it recites less. Further left: it predicts unseen text "
            "better. Crosses: 95 % intervals over passages and blocks, not over seeds. Grey: passages that were never "
            "injected, the floor that fluency reaches by itself. Thin lines: earlier checkpoints; a reduction counts "
            "where it lies below the baseline's line at the same perplexity."
        )
        figures.append(Figure("frontier", "Memorization against perplexity", trade_off(courses), caption))
    curves = _measured(evaluations, (LMS,), CONTROL_LMS)
    if any(len(points) > 1 for by_objective in curves.values() for points in by_objective.values()):
        caption = (
            "Average LMS of the injected passages at each checkpoint. Dashed: passages that were never injected, the "
            "floor that fluency reaches by itself. Lower is better."
        )
        title = "Average LMS against training progress"
        figures.append(Figure("lms_progress", title, lms_progress(curves), caption))
    caption = (
        "The share of continuations whose longest memorized substring has at least so many tokens, over "
        "passages, prefix lengths and seeds. Dashed: passages that were never injected."
    )
    rows = results.scores[(results.scores["metric"] == "lms") & (results.scores["unit"] != "")]
    several = evaluations["setting"].nunique() > 1
    for number, (setting, own) in enumerate(evaluations.groupby("setting", sort=False), 1):
        lms = {}
        for _, objective, having in having_at_last(own, LMS):
            scores = rows[rows["checkpoint"].isin(having.index)]
            lms[objective] = {
                kind: scores.loc[scores["kind"] == kind, "value"].tolist() for kind in ("target", "control")
            }
        if lms:
            name, of_setting = (f"_{number}", f": {setting}") if several else ("", "")
            title = f"Distribution of the LMS{of_setting}"
            figures.append(Figure(f"lms_distribution{name}", title, lms_distribution(lms), caption))
    return figures


def _courses(evaluations: "pd.DataFrame") -> dict[str, dict[str, Course]]:
    """Setting -> objective -> its course through the checkpoints that have LMS and perplexity; none if it diverged."""
    measured = _measured(evaluations, (PERPLEXITY, LMS), CONTROL_LMS)
    courses: dict[str, dict[str, Course]] = {}
    for (setting, objective), own in evaluations.groupby(["setting", "objective"], sort=False):
        points = [point for point in measured.get(setting, {}).get(objective, []) if math.isfinite(point[1])]
        if not points:
            continue
        last = own[own["progress"] == points[-1][0]]
        perplexity, lms = (_interval(last, measure) for measure in (PERPLEXITY, LMS))
        path = [(x, y) for _, x, y, _ in points]
        courses.setdefault(setting, {})[objective] = Course(path, perplexity, lms, controls=points[-1][3])
    return courses


def _interval(evaluations: "pd.DataFrame", measure: Measure) -> tuple[float, float]:
    """Return the ends of the interval over units, NaN if there are too few."""
    totals = unit_totals(evaluations, measure)
    interval = bootstrap_interval(measure.value, *totals) if totals else None
    return (interval.low, interval.high) if interval and interval.num_units >= MIN_UNITS else (math.nan, math.nan)


def _measured(
    evaluations: "pd.DataFrame", measures: Sequence[Measure], *optional: Measure
) -> dict[str, dict[str, list[Any]]]:
    """Setting -> objective -> (progress, each measure, NaN if an optional one is missing); empty ones are left out."""
    found: dict[str, dict[str, list[Any]]] = {}
    for (setting, objective), own in evaluations.groupby(["setting", "objective"], sort=False):
        for progress in shared_progress(own, *measures):
            at = own[own["progress"] == progress]
            values = (value_of(at, measure) for measure in (*measures, *optional))
            found.setdefault(setting, {}).setdefault(objective, []).append((progress, *values))
    return found
