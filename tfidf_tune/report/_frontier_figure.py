"""The drawing of a frontier: LMS against held-out perplexity, each objective through its learning rates."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tfidf_tune.analysis._frontier import Curve, Frontier, Point
from tfidf_tune.analysis._over_seeds import SeedEstimate
from tfidf_tune.report._figures import NUM_COLORS, drawn, is_wide, legend_above, new_panels, set_log_ticks, styles_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL_HEIGHT, _LEGEND_LINE = 4.4, 0.2
# Areas of the markers in square points: learning rates from the lowest to the highest, and operating points.
_SMALLEST, _LARGEST, _OPERATING = 6.0, 26.0, 44.0
# The seven colors come again with other lines, beside other markers.
_LINES = ("-", (0, (4, 2)), (0, (1, 1.5)))
# Where the number of an operating point may stand, in points from it; of equally good ones the first.
_SIDES = ((8, 7), (-8, 7), (8, -7), (-8, -7))
# What has more than so many times the highest perplexity of an operating point would squeeze all the others.
_FURTHEST = 4.0
# e to the power of it is still a float.
_HIGHEST_LOG = 700.0
# Below this LMS a wide axis is linear, so that it can hold 0.
_LINEAR_BELOW = 1.0


def frontier_drawing(frontier: Frontier) -> "Figure | None":
    """Draw average LMS against perplexity (logarithmic), a line for each objective of a model.

    A line goes from the lowest learning rate to the highest, and markers grow with it. The operating point is large,
    with a black edge, the number of its objective in the legend, and the 95 % intervals of both means as a cross. The
    dashed line is the average LMS of the controls. Learning rates with a diverged run are left out; those with more
    than four times the highest perplexity of an operating point lie outside. If the averages lie far apart, the axis of
    the LMS is logarithmic above 1 token.

    Returns:
        matplotlib.figure.Figure | None: None if there is nothing to draw.
    """
    operating = {curve.objective: curve.operating for curve in frontier.curves if curve.operating is not None}
    if not operating:
        return None
    areas = _areas(frontier)
    num_lines = (len(operating) + len(areas) + 2) // 2
    figure, (axes,) = new_panels([frontier.model], panel_height=_PANEL_HEIGHT + _LEGEND_LINE * num_lines)
    styles = styles_of([operating])
    for curve in frontier.curves:
        if curve.operating is not None:
            number = 1 + list(operating).index(curve.objective)
            _draw_curve(axes, curve, number, *styles[curve.objective], areas)
            _draw_operating_point(axes, curve.operating, *styles[curve.objective])
    limit = _FURTHEST * max(point.perplexity for point in operating.values())
    shown = [point for curve in frontier.curves for point in curve.points if point.perplexity <= limit]
    floor = _floor(shown)
    if floor is not None:
        axes.axhline(floor, color="0.4", linestyle="--", linewidth=1.2, zorder=1)
    _set_axes(axes, shown, floor)
    _number(axes, list(operating.values()))
    for rate, area in (areas if len(areas) > 1 else {}).items():
        axes.plot([], [], "o", color="0.5", markersize=area**0.5, label=f"lr {rate:g}" if rate else "lr of the config")
    legend_above(figure, [axes], with_floor=floor is not None)
    return figure


def _areas(frontier: Frontier) -> dict[float | None, float]:
    """Learning rate -> area of its markers."""
    rates = {point.learning_rate for curve in frontier.curves for point in curve.points}
    areas = np.linspace(_SMALLEST, _LARGEST, len(rates)).tolist()
    return dict(zip(sorted(rates, key=lambda rate: rate or 0.0), areas, strict=True))


def _draw_curve(
    axes: "Axes", curve: Curve, number: int, color: str, marker: str, areas: dict[float | None, float]
) -> None:
    points = [point for point in curve.points if point.finite]
    places = [point.perplexity for point in points], [point.lms.mean for point in points]
    line = _LINES[(number - 1) // NUM_COLORS % len(_LINES)]
    axes.plot(*places, color=color, linestyle=line, linewidth=1, alpha=0.5)
    sizes = [areas[point.learning_rate] for point in points]
    axes.scatter(*places, s=sizes, color=color, marker=marker, alpha=0.6, linewidths=0, zorder=3)
    axes.plot([], [], color=color, marker=marker, linestyle=line, label=f"{number}  {drawn(curve.objective)}")


def _draw_operating_point(axes: "Axes", point: Point, color: str, marker: str) -> None:
    x, y = point.perplexity, point.lms.mean
    aside, upwards = _reach(point.log_perplexity, exponential=True), _reach(point.lms)
    axes.errorbar(x, y, xerr=aside, yerr=upwards, color=color, linewidth=1.2, zorder=4)
    axes.scatter([x], [y], s=_OPERATING, color=color, marker=marker, edgecolors="black", linewidths=0.8, zorder=5)


def _number(axes: "Axes", points: Sequence[Point]) -> None:
    """Write the number of each operating point beside it, on the side furthest from others and their numbers."""
    from matplotlib.patheffects import withStroke

    to_points = 72 / axes.figure.dpi
    places = [to_points * axes.transData.transform((point.perplexity, point.lms.mean)) for point in points]
    taken = list(places)
    for number, place in enumerate(places, start=1):
        others = [other for index, other in enumerate(taken) if index != number - 1]
        side = max(_SIDES, key=lambda side: min((np.hypot(*(place + side - one)) for one in others), default=0.0))
        taken.append(place + side)
        axes.annotate(
            str(number),
            (points[number - 1].perplexity, points[number - 1].lms.mean),
            side,
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize="small",
            weight="bold",
            zorder=6,
            path_effects=[withStroke(linewidth=2, foreground="white")],
        )


def _reach(estimate: SeedEstimate, *, exponential: bool = False) -> list[list[float]] | None:
    """How far an interval reaches below and above its mean, as matplotlib has it."""
    if estimate.low is None or estimate.high is None:
        return None
    ends = np.array([estimate.low, estimate.mean, estimate.high])
    low, middle, high = (np.exp(np.minimum(ends, _HIGHEST_LOG)) if exponential else ends).tolist()
    return [[middle - low], [high - middle]]


def _floor(points: Sequence[Point]) -> float | None:
    controls = [value for point in points for value in point.runs["control_lms"].dropna()]
    return float(np.mean(controls)) if controls else None


def _set_axes(axes: "Axes", points: Sequence[Point], floor: float | None) -> None:
    """The limits are those of the means: intervals from few seeds may reach far beyond."""
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, StrMethodFormatter

    perplexity = [point.perplexity for point in points]
    room = max(1.02, (max(perplexity) / min(perplexity)) ** 0.07)
    axes.set_xlim(min(perplexity) / room, max(perplexity) * room)
    axes.set_xscale("log")  # after the limits: around a single point it would find none by itself
    if is_wide(perplexity):
        set_log_ticks(axes.xaxis)
    else:  # less than a power of ten, of which few round numbers are 1, 2 or 5 times one
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.set_xlabel("perplexity on held-out text")
    recited = [point.lms.mean for point in points] + ([] if floor is None else [floor])
    lowest, highest = min(recited), max(*recited, _LINEAR_BELOW)
    if is_wide([max(lowest, _LINEAR_BELOW), highest]):
        axes.set_yscale("symlog", linthresh=_LINEAR_BELOW, linscale=0.5)
        axes.yaxis.set_major_locator(FixedLocator([0, *(m * 10.0**e for e in range(5) for m in (1, 2, 5))]))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.set_ylim(0 if lowest < _LINEAR_BELOW else 0.8 * lowest, 1.3 * highest)
    else:
        axes.set_ylim(0, 1.08 * highest)
    axes.set_ylabel("average LMS (tokens)")
