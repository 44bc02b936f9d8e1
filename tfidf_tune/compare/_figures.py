"""Drawings of a comparison: the trade-off, training progress, and the distribution of what is
recited.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from tfidf_tune.compare._evaluations import having_at_last, shared_progress, unit_totals, value_of
from tfidf_tune.report import Figure, figures
from tfidf_tune.results.figures import FLOOR, lms_distribution
from tfidf_tune.results.intervals import MIN_UNITS, bootstrap_interval
from tfidf_tune.results.table import CONTROL_LMS, LMS, PERPLEXITY, Measure, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

FLOOR_LINE: dict[str, Any] = {"color": "0.4", "linestyle": "--", "linewidth": 1.2, "zorder": 1}
OPERATING = 44.0  # area of the marker of a last checkpoint, in square points
_FEW = 4  # objectives that are named next to their points
# If the largest value is more than this many times the smallest, the axis is logarithmic.
_WIDE = 4.0
_LINEAR_BELOW = 1.0  # below this LMS a wide axis is linear, so that it can hold 0


class _Point(NamedTuple):
    """Measures at a training progress, in percent; NaN for controls that were not measured."""

    progress: int
    values: list[float]
    controls: float


class Course(NamedTuple):
    """How an objective moved through its checkpoints (none diverged), and the intervals of the
    last; NaN for none.
    """

    points: list[tuple[float, float]]  # perplexity and average LMS of each checkpoint
    perplexity: tuple[float, float]
    lms: tuple[float, float]
    controls: float


def comparison_figures(results: Results, evaluations: pd.DataFrame) -> list[Figure]:
    """Draw the trade-off if perplexity was measured, progress if there are several checkpoints, and
    distributions.
    """
    # What the drawings show, by setting and objective.
    courses: dict[str, dict[str, Course]] = {}
    curves: dict[str, dict[str, list[tuple[int, float, float]]]] = {}
    is_trained = False  # whether anything has more than one checkpoint
    for (setting, objective), group in evaluations.groupby(["setting", "objective"], sort=False):
        curve = []
        for point in _measured(group, LMS):
            (lms,) = point.values
            curve.append((point.progress, lms, point.controls))
        if curve:
            curves.setdefault(setting, {})[objective] = curve
        if len(curve) > 1:
            is_trained = True
        course = _course_of(group)
        if course is not None:
            courses.setdefault(setting, {})[objective] = course
    figures = []
    if courses:
        figures.append(
            Figure(
                name="frontier",
                title="Memorization against perplexity",
                figure=trade_off(courses),
                caption="Each objective at the last checkpoint. Lower: it recites less. Further "
                "left: it predicts unseen text better. Crosses: 95 % intervals over passages and "
                "blocks, not over seeds. Grey: held-out passages, what fluency reaches by chance. "
                "Thin lines: earlier checkpoints; a reduction counts where it lies below the "
                "baseline's line at the same perplexity.",
            )
        )
    if is_trained:
        figures.append(
            Figure(
                name="lms_progress",
                title="Average LMS against training progress",
                figure=lms_progress(curves),
                caption="Average LMS of the targets at each checkpoint. Dashed: held-out "
                "passages, what fluency reaches by chance. Lower is better.",
            )
        )
    return figures + _distributions(results, evaluations)


def _distributions(results: Results, evaluations: pd.DataFrame) -> list[Figure]:
    """Draw the distribution of the LMS of each setting."""
    figures = []
    is_single_lms = (results.scores["metric"] == "lms") & (results.scores["unit"] != "")
    rows = results.scores[is_single_lms]
    has_several = evaluations["setting"].nunique() > 1
    for number, (setting, group) in enumerate(evaluations.groupby("setting", sort=False), 1):
        lms = {}
        for _, objective, having in having_at_last(group, LMS):
            rows_of_objective = rows[rows["checkpoint"].isin(having.index)]
            by_kind = rows_of_objective.groupby("kind", observed=True)["value"]
            lms[objective] = by_kind.agg(list).to_dict()
        if not lms:
            continue
        name = "lms_distribution"
        title = "Distribution of the LMS"
        if has_several:
            name += f"_{number}"
            title += f": {setting}"
        figures.append(
            Figure(
                name=name,
                title=title,
                figure=lms_distribution(lms),
                caption="The share of continuations whose longest memorized substring has at least "
                "so many tokens, over passages, prefix lengths and seeds. Dashed: held-out "
                "passages.",
            )
        )
    return figures


def _course_of(evaluations: pd.DataFrame) -> Course | None:
    """Return how an objective moved through its checkpoints; None if none has both measures."""
    path = []
    last = None
    for point in _measured(evaluations, PERPLEXITY, LMS):
        perplexity, lms = point.values
        if math.isfinite(perplexity):
            path.append((perplexity, lms))
            last = point
    if last is None:
        return None
    at_last = evaluations[evaluations["progress"] == last.progress]
    return Course(path, _interval(at_last, PERPLEXITY), _interval(at_last, LMS), last.controls)


def _interval(evaluations: pd.DataFrame, measure: Measure) -> tuple[float, float]:
    """Return the ends of the interval over units, NaN if there are too few."""
    totals = unit_totals(evaluations, measure)
    if totals is None:
        return math.nan, math.nan
    interval = bootstrap_interval(measure.value, *totals)
    if interval.num_units < MIN_UNITS:
        return math.nan, math.nan
    return interval.low, interval.high


def _measured(evaluations: pd.DataFrame, *measures: Measure) -> list[_Point]:
    """Return the checkpoints of an objective that have all measures."""
    points = []
    for progress in shared_progress(evaluations, *measures):
        at_progress = evaluations[evaluations["progress"] == progress]
        values = [value_of(at_progress, measure) for measure in measures]
        points.append(_Point(progress, values, value_of(at_progress, CONTROL_LMS)))
    return points


def lms_progress(
    curves: Mapping[str, Mapping[str, Sequence[tuple[int, float, float]]]],
) -> "Drawing":
    """Draw (progress in percent, LMS, LMS of the controls or NaN), dashed for the controls: the
    paper's figure 2.
    """
    figure, panels = figures.new_panels(list(curves))
    styles = figures.styles_of(curves.values())
    for axes, by_objective in zip(panels, curves.values(), strict=True):
        ticks: set[int] = set()
        for index, (objective, points) in enumerate(by_objective.items()):
            color, marker = styles[objective]
            progress, lms, _ = zip(*points, strict=True)
            axes.plot(progress, lms, color=color, marker=marker, label=figures.drawn(objective))
            ticks.update(progress)
            floor = [(at, controls) for at, _, controls in points if not math.isnan(controls)]
            if not floor:
                continue
            floor_progress, floor_lms = zip(*floor, strict=True)
            # Floors often coincide: each shows in the others' gaps. Of three objectives, each
            # draws 4 points of every 16, shifted by 4.
            dashes = (4 * index, (4, 4 * len(by_objective)))
            axes.plot(
                floor_progress,
                floor_lms,
                color=color,
                linestyle=dashes,
                linewidth=1.4,
                label=FLOOR,
            )
        axes.set_xticks(sorted(ticks))
        axes.set_ylabel("average LMS (tokens)")
        axes.set_ylim(bottom=0)
    panels[-1].set_xlabel("training progress (%)")
    figures.legend_above(figure, panels, FLOOR)
    return figure


def trade_off(settings: Mapping[str, Mapping[str, Course]]) -> "Drawing":
    """Draw average LMS against perplexity: a point for each objective, thin lines to it, and a band
    for the controls.

    Up to four objectives with short names are named next to their points; others have the numbers
    of the legend.
    """
    styles = figures.styles_of(settings.values())
    numbers = {objective: str(number) for number, objective in enumerate(styles, start=1)}
    is_named = len(styles) <= _FEW and max(map(len, styles)) <= figures.HALF_A_LINE
    height = figures.LONE_HEIGHT if len(settings) == 1 else figures.PANEL_HEIGHT
    figure, panels = figures.new_panels(list(settings), panel_height=height)
    labels = []
    for axes, courses in zip(panels, settings.values(), strict=True):
        named: dict[str, tuple[float, float]] = {}  # labels of points
        others: list[tuple[float, float]] = []  # points that labels keep off
        floors: list[float] = []
        perplexities: list[float] = []
        averages: list[float] = []
        for objective, course in courses.items():
            color, marker = styles[objective]
            path_x, path_y = zip(*course.points, strict=True)
            axes.plot(
                path_x, path_y, color=color, marker="o", markersize=2.5, linewidth=1, alpha=0.4
            )
            # The last checkpoint: named beside its point, or numbered with an entry in the legend.
            x, y = course.points[-1]
            name = figures.drawn(objective)
            label = None
            if is_named:
                named[name.strip()] = (x, y)
            else:
                named[numbers[objective]] = (x, y)
                label = f"{numbers[objective]}  {name}"
            axes.plot(
                [x], [y], marker, color=color, markersize=OPERATING**0.5, label=label, zorder=5
            )
            figures.draw_cross(axes, (x, y), (course.perplexity, course.lms), color)
            others += course.points[:-1]
            perplexities += [*path_x, *course.perplexity]
            averages += [*path_y, *course.lms]
            floors.append(course.controls)
        floors = _without_nan(floors)
        set_axes(axes, _without_nan(perplexities), [*_without_nan(averages), *floors])
        if floors:
            floor = float(np.mean(floors))
            axes.axhspan(min(floors), max(floors), color="0.4", alpha=0.2, linewidth=0, zorder=1)
            axes.axhline(floor, label=FLOOR, **FLOOR_LINE)
            left, right = axes.get_xlim()
            if is_named:
                named[FLOOR] = (right, floor)
            others += [(x, floor) for x in np.geomspace(left, right, 100)]
        labels.append((axes, named, others))
    if not is_named:
        figures.legend_above(figure, panels, FLOOR)
    figure.draw_without_rendering()
    for axes, named, others in labels:
        figures.label_points(axes, named, others)
    return figure


def _without_nan(values: Sequence[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def set_axes(axes: "Axes", perplexity: Sequence[float], lms: Sequence[float]) -> None:
    """Set limits of means (intervals from few seeds may reach far beyond), and scales; wide ones
    are logarithmic.
    """
    from matplotlib.ticker import (
        FixedLocator,
        LogLocator,
        MaxNLocator,
        NullFormatter,
        NullLocator,
        StrMethodFormatter,
    )

    least = min(perplexity)
    most = max(perplexity)
    room = max(1.02, (most / least) ** 0.07)
    axes.set_xlim(least / room, most * room)
    axes.set_xscale("log")  # after the limits: around a single point it would find none by itself
    if most > _WIDE * least:
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:  # less than a power of ten, of which few round numbers are 1, 2 or 5 times one
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlabel("perplexity on held-out text")
    lowest = min(lms)
    highest = max(*lms, _LINEAR_BELOW)
    if highest > _WIDE * max(lowest, _LINEAR_BELOW):
        axes.set_yscale("symlog", linthresh=_LINEAR_BELOW, linscale=0.5)
        ticks = [0.0]
        for exponent in range(5):
            ticks += [10.0**exponent, 2 * 10.0**exponent, 5 * 10.0**exponent]
        axes.yaxis.set_major_locator(FixedLocator(ticks))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        bottom = 0 if lowest < _LINEAR_BELOW else 0.8 * lowest
        axes.set_ylim(bottom, 1.3 * highest)
    else:
        axes.set_ylim(0, 1.08 * highest)
    axes.set_ylabel("average LMS (tokens)")
