"""The drawing of a frontier: LMS against held-out perplexity, each objective through its learning rates."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tfidf_tune.report._figures import NUM_COLORS, drawn, is_wide, legend_above, new_panels, set_log_ticks, styles_of

if TYPE_CHECKING:
    import pandas as pd
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
_HIGHEST = 1e304  # of perplexities that can be drawn
# Below this LMS a wide axis is linear, so that it can hold 0.
_LINEAR_BELOW = 1.0


def frontier_drawing(model: str, points: "pd.DataFrame") -> "Figure":
    """Draw average LMS against perplexity (logarithmic), a line for each objective of a model.

    A line goes from the lowest learning rate to the highest, and markers grow with it. The operating point is large,
    with a black edge, the number of its objective in the legend, and the 95 % intervals of both means as a cross. The
    dashed line is the average LMS of the controls. Learning rates with a diverged run are left out; those with more
    than four times the highest perplexity of an operating point lie outside. If the averages lie far apart, the axis of
    the LMS is logarithmic above 1 token.

    Args:
        model (str): its name.
        points (pandas.DataFrame): its points, see :class:`Frontiers`, with at least one operating point.
    """
    operating = points[points["operating"]]
    rates = sorted(points["learning_rate"].fillna(0.0).unique())
    areas = dict(zip(rates, np.linspace(_SMALLEST, _LARGEST, len(rates)).tolist(), strict=True))
    num_lines = (len(operating) + len(areas) + 2) // 2
    figure, (axes,) = new_panels([model], panel_height=_PANEL_HEIGHT + _LEGEND_LINE * num_lines)
    styles = styles_of([dict.fromkeys(operating["objective"])])
    finite = points[points["finite"]]
    for number, chosen in enumerate(operating.itertuples(), start=1):
        color, marker = styles[chosen.objective]
        own = finite[finite["objective"] == chosen.objective]
        line = _LINES[(number - 1) // NUM_COLORS % len(_LINES)]
        sizes = own["learning_rate"].fillna(0.0).map(areas)
        axes.plot(own["perplexity"], own["lms"], color=color, linestyle=line, linewidth=1, alpha=0.5)
        axes.scatter(
            own["perplexity"], own["lms"], s=sizes, color=color, marker=marker, alpha=0.6, linewidths=0, zorder=3
        )
        axes.plot([], [], color=color, marker=marker, linestyle=line, label=f"{number}  {drawn(chosen.objective)}")
        x, y = chosen.perplexity, chosen.lms
        highest = min(chosen.perplexity_high, _HIGHEST)
        aside, upwards = _reach(chosen.perplexity_low, x, highest), _reach(chosen.lms_low, y, chosen.lms_high)
        axes.errorbar(x, y, xerr=aside, yerr=upwards, color=color, linewidth=1.2, zorder=4)
        axes.scatter([x], [y], s=_OPERATING, color=color, marker=marker, edgecolors="black", linewidths=0.8, zorder=5)
    shown = points[points["perplexity"] <= _FURTHEST * operating["perplexity"].max()]
    controls = shown.dropna(subset=["control_lms"])
    weights = controls["seeds"].map(len)  # the mean is over runs
    floor = float(np.average(controls["control_lms"], weights=weights)) if len(controls) else None
    if floor is not None:
        axes.axhline(floor, color="0.4", linestyle="--", linewidth=1.2, zorder=1)
    _set_axes(axes, shown["perplexity"].tolist(), shown["lms"].tolist(), floor)
    _number(axes, list(zip(operating["perplexity"], operating["lms"], strict=True)))
    for rate, area in (areas if len(areas) > 1 else {}).items():
        axes.plot([], [], "o", color="0.5", markersize=area**0.5, label=f"lr {rate:g}" if rate else "lr of the config")
    legend_above(figure, [axes], with_floor=floor is not None)
    return figure


def _number(axes: "Axes", points: Sequence[tuple[float, float]]) -> None:
    """Write the number of each operating point next to it, on the side furthest from others and their numbers."""
    from matplotlib.patheffects import withStroke

    to_points = 72 / axes.figure.dpi
    places = [to_points * axes.transData.transform(point) for point in points]
    taken = list(places)
    for number, place in enumerate(places, start=1):
        others = [other for index, other in enumerate(taken) if index != number - 1]
        side = max(_SIDES, key=lambda side: min((np.hypot(*(place + side - one)) for one in others), default=0.0))
        taken.append(place + side)
        axes.annotate(
            str(number),
            points[number - 1],
            side,
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize="small",
            weight="bold",
            zorder=6,
            path_effects=[withStroke(linewidth=2, foreground="white")],
        )


def _reach(low: float, mean: float, high: float) -> list[list[float]] | None:
    """Return how far an interval reaches below and above its mean, as matplotlib has it."""
    return None if math.isnan(low) else [[mean - low], [high - mean]]


def _set_axes(axes: "Axes", perplexity: Sequence[float], lms: Sequence[float], floor: float | None) -> None:
    """The limits are those of the means: intervals from few seeds may reach far beyond."""
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, StrMethodFormatter

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
    recited = [*lms, *([] if floor is None else [floor])]
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
