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
_WIDE = (
    4.0  # if the largest value is more than this many times the smallest, the axis is logarithmic
)
_LINEAR_BELOW = 1.0  # below this LMS a wide axis is linear, so that it can hold 0


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
    figures = []
    courses: dict[str, dict[str, Course]] = {}
    curves: dict[str, dict[str, list[Any]]] = {}
    for (setting, objective), own in evaluations.groupby(["setting", "objective"], sort=False):
        points = _measured(own, LMS)
        if points:
            curves.setdefault(setting, {})[objective] = points
        points = [point for point in _measured(own, PERPLEXITY, LMS) if math.isfinite(point[1])]
        if points:
            progress, *_, controls = points[-1]
            last = own[own["progress"] == progress]
            path = [point[1:3] for point in points]
            course = Course(path, _interval(last, PERPLEXITY), _interval(last, LMS), controls)
            courses.setdefault(setting, {})[objective] = course
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
    longest = 0
    for by_objective in curves.values():
        longest = max(longest, *map(len, by_objective.values()))
    if longest > 1:
        figures.append(
            Figure(
                name="lms_progress",
                title="Average LMS against training progress",
                figure=lms_progress(curves),
                caption="Average LMS of the injected passages at each checkpoint. Dashed: held-out "
                "passages, what fluency reaches by chance. Lower is better.",
            )
        )
    rows = results.scores[(results.scores["metric"] == "lms") & (results.scores["unit"] != "")]
    several = evaluations["setting"].nunique() > 1
    for number, (setting, own) in enumerate(evaluations.groupby("setting", sort=False), 1):
        lms = {}
        for _, objective, having in having_at_last(own, LMS):
            values = rows[rows["checkpoint"].isin(having.index)].groupby("kind", observed=True)[
                "value"
            ]
            lms[objective] = values.agg(list).to_dict()
        if lms:
            name, of_setting = (f"_{number}", f": {setting}") if several else ("", "")
            figures.append(
                Figure(
                    name=f"lms_distribution{name}",
                    title=f"Distribution of the LMS{of_setting}",
                    figure=lms_distribution(lms),
                    caption="The share of continuations whose longest memorized substring has at "
                    "least so many tokens, over passages, prefix lengths and seeds. Dashed: "
                    "held-out passages.",
                )
            )
    return figures


def _interval(evaluations: pd.DataFrame, measure: Measure) -> tuple[float, float]:
    """Return the ends of the interval over units, NaN if there are too few."""
    totals = unit_totals(evaluations, measure)
    interval = bootstrap_interval(measure.value, *totals) if totals else None
    return interval[:2] if interval and interval.num_units >= MIN_UNITS else (math.nan, math.nan)


def _measured(evaluations: pd.DataFrame, *measures: Measure) -> list[Any]:
    """Progress, each measure, and the LMS of controls or NaN, of the checkpoints of an objective
    with all measures.
    """
    found = []
    for progress in shared_progress(evaluations, *measures):
        at = evaluations[evaluations["progress"] == progress]
        found.append((progress, *(value_of(at, measure) for measure in (*measures, CONTROL_LMS))))
    return found


def lms_progress(
    curves: Mapping[str, Mapping[str, Sequence[tuple[int, float, float]]]],
) -> "Drawing":
    """Draw (progress in percent, LMS, LMS of the controls or NaN), dashed for the controls: the
    paper's figure 2.
    """
    figure, panels = figures.new_panels(list(curves))
    styles = figures.styles_of(curves.values())
    for axes, by_objective in zip(panels, curves.values(), strict=True):
        for index, (objective, points) in enumerate(by_objective.items()):
            color, marker = styles[objective]
            progress, lms, _ = zip(*points, strict=True)
            axes.plot(progress, lms, color=color, marker=marker, label=figures.drawn(objective))
            floor = [(at, controls) for at, _, controls in points if not math.isnan(controls)]
            # Floors often coincide: each shows in the others' gaps.
            dashes = (
                4 * index,
                (4, 4 * len(by_objective)),
            )
            if floor:
                axes.plot(
                    *zip(*floor, strict=True),
                    color=color,
                    linestyle=dashes,
                    linewidth=1.4,
                    label=FLOOR,
                )
        measured_at = set()
        for points in by_objective.values():
            measured_at |= {progress for progress, *_ in points}
        axes.set_xticks(sorted(measured_at))
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
        for objective, one in courses.items():
            color, marker = styles[objective]
            x, y = one.points[-1]
            axes.plot(
                *zip(*one.points, strict=True),
                color=color,
                marker="o",
                markersize=2.5,
                linewidth=1,
                alpha=0.4,
            )
            label = None if is_named else f"{numbers[objective]}  {figures.drawn(objective)}"
            axes.plot(
                [x], [y], marker, color=color, markersize=OPERATING**0.5, label=label, zorder=5
            )
            figures.draw_cross(axes, (x, y), (one.perplexity, one.lms), color)
        floors = [course.controls for course in courses.values() if not math.isnan(course.controls)]
        perplexity: list[float] = []
        lms: list[float] = []
        before: list[tuple[float, float]] = []
        named: dict[str, tuple[float, float]] = {}
        for name, course in courses.items():
            perplexity += [*(x for x, _ in course.points), *course.perplexity]
            lms += [*(y for _, y in course.points), *course.lms]
            before += course.points[:-1]
            label = figures.drawn(name).strip() if is_named else numbers[name]
            named[label] = course.points[-1]
        # The ends of an interval are NaN where there are too few units.
        perplexity = [value for value in perplexity if not math.isnan(value)]
        lms = [value for value in lms if not math.isnan(value)]
        set_axes(axes, perplexity, [*lms, *floors])
        if floors:
            floor = float(np.mean(floors))
            axes.axhspan(min(floors), max(floors), color="0.4", alpha=0.2, linewidth=0, zorder=1)
            axes.axhline(floor, label=FLOOR, **FLOOR_LINE)
            if is_named:
                named[FLOOR] = axes.get_xlim()[1], floor
            before += [(x, floor) for x in np.geomspace(*axes.get_xlim(), 100)]
        labels.append((axes, named, before))
    if not is_named:
        figures.legend_above(figure, panels, FLOOR)
    figure.draw_without_rendering()
    for axes, named, others in labels:
        figures.label_points(axes, named, others)
    return figure


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

    room = max(1.02, (max(perplexity) / min(perplexity)) ** 0.07)
    axes.set_xlim(min(perplexity) / room, max(perplexity) * room)
    axes.set_xscale("log")  # after the limits: around a single point it would find none by itself
    if max(perplexity) > _WIDE * min(perplexity):
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
            ticks += [1 * 10.0**exponent, 2 * 10.0**exponent, 5 * 10.0**exponent]
        axes.yaxis.set_major_locator(FixedLocator(ticks))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.set_ylim(0 if lowest < _LINEAR_BELOW else 0.8 * lowest, 1.3 * highest)
    else:
        axes.set_ylim(0, 1.08 * highest)
    axes.set_ylabel("average LMS (tokens)")
