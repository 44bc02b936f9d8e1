"""Drawings of a comparison, made without pyplot and its global state, narrow enough for a phone."""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tfidf_tune._printing import visible
from tfidf_tune.analysis.evaluations import having_at_last, shared_progress, unit_totals, value_of
from tfidf_tune.analysis.intervals import MIN_UNITS, bootstrap_interval
from tfidf_tune.report._document import Figure
from tfidf_tune.results import Results
from tfidf_tune.results._table import CONTROL_LMS, LMS, PERPLEXITY, Measure

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

# Okabe and Ito's palette, safe for all common forms of color blindness; its yellow is too faint for lines.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
_LINES = ("-", (0, (4, 2)), (0, (1, 1.5)))  # for each seven objectives of a frontier
_WIDTH, _PANEL_HEIGHT, _FRONTIER_HEIGHT, _LEGEND_LINE = 4.8, 2.9, 4.4, 0.2  # in inches
_HALF_A_LINE, _TITLE_LETTERS = 28, 64  # letters that fit: of a legend into half the width, of a title into all of it
# Areas of the markers in square points: learning rates from the lowest to the highest, and operating points.
_SMALLEST, _LARGEST, _OPERATING = 6.0, 26.0, 44.0
_SIDES = ((5, 4), (-5, 4), (5, -4), (-5, -4))  # where a label may start, in points from its point
_NEAR = 4.0  # pixels around a point that labels keep off
_FEW = 4  # objectives that are named next to their points
_FLOOR = "never injected (the floor)"
_FLOOR_LINE: dict[str, Any] = {"color": "0.4", "linestyle": "--", "linewidth": 1.2, "zorder": 1}
_WIDE = 4.0  # if the largest value is more than this many times the smallest, the axis is logarithmic
_FURTHEST = 4.0  # points above this multiple of the highest perplexity of an operating point are not shown
_HIGHEST = 1e304  # of perplexities that can be drawn
_LINEAR_BELOW = 1.0  # below this LMS a wide axis is linear, so that it can hold 0


class Course(NamedTuple):
    """How an objective moved through its checkpoints, and the intervals of the last one; NaN where there is none."""

    points: list[tuple[float, float]]  # perplexity and average LMS of each checkpoint
    perplexity: tuple[float, float]
    lms: tuple[float, float]
    controls: float


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
    lms: dict[str, dict[str, Any]] = {setting: {} for setting in evaluations["setting"].unique()}
    for setting, objective, having in having_at_last(evaluations, LMS):
        values = rows[rows["checkpoint"].isin(having.index)].groupby("kind", observed=True)["value"]
        lms[setting][objective] = values.agg(list).to_dict()
    for number, (setting, own) in enumerate(lms.items(), 1):
        if own:
            name, of_setting = (f"_{number}", f": {setting}") if len(lms) > 1 else ("", "")
            title = f"Distribution of the LMS{of_setting}"
            figures.append(Figure(f"lms_distribution{name}", title, lms_distribution(own), caption))
    return figures


def _courses(evaluations: "pd.DataFrame") -> dict[str, dict[str, Course]]:
    """Setting -> objective -> its course through the checkpoints that have LMS and perplexity; none if it diverged."""
    courses: dict[str, dict[str, Course]] = {}
    for setting, by_objective in _measured(evaluations, (PERPLEXITY, LMS), CONTROL_LMS).items():
        for objective, measured in by_objective.items():
            points = [point for point in measured if math.isfinite(point[1])]
            if points:
                progress, *_, controls = points[-1]
                own = evaluations[(evaluations["setting"] == setting) & (evaluations["objective"] == objective)]
                last = own[own["progress"] == progress]
                courses.setdefault(setting, {})[objective] = Course(
                    [(x, y) for _, x, y, _ in points], _interval(last, PERPLEXITY), _interval(last, LMS), controls
                )
    return courses


def _interval(evaluations: "pd.DataFrame", measure: Measure) -> tuple[float, float]:
    """Return the ends of the interval over units, NaN if there are too few."""
    totals = unit_totals(evaluations, measure)
    interval = bootstrap_interval(measure.value, *totals) if totals else None
    return interval[:2] if interval and interval.num_units >= MIN_UNITS else (math.nan, math.nan)


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


def lms_progress(curves: Mapping[str, Mapping[str, Sequence[tuple[int, float, float]]]]) -> "Drawing":
    """Draw average LMS, and dashed that of the controls, against training progress: the paper's figure 2.

    The curves are by model and objective: progress in percent, LMS of the targets and of the controls or NaN.
    """
    figure, panels = new_panels(list(curves))
    styles = _styles(curves.values())
    for axes, by_objective in zip(panels, curves.values(), strict=True):
        for index, (objective, points) in enumerate(by_objective.items()):
            color, marker = styles[objective]
            progress, lms, _ = zip(*points, strict=True)
            axes.plot(progress, lms, color=color, marker=marker, label=_drawn(objective))
            floor = [(at, controls) for at, _, controls in points if not math.isnan(controls)]
            dashes = (4 * index, (4, 4 * len(by_objective)))  # floors often coincide: each shows in the others' gaps
            if floor:
                axes.plot(*zip(*floor, strict=True), color=color, linestyle=dashes, linewidth=1.4, label=_FLOOR)
        axes.set_xticks(sorted({point[0] for points in by_objective.values() for point in points}))
        axes.set_ylabel("average LMS (tokens)")
        axes.set_ylim(bottom=0)
    panels[-1].set_xlabel("training progress (%)")
    _legend_above(figure, panels)
    return figure


def trade_off(settings: Mapping[str, Mapping[str, Course]]) -> "Drawing":
    """Draw average LMS against perplexity: a point for each objective, thin lines to it, and a band for the controls.

    Up to four objectives with short names are named next to their points; others have the numbers of the legend.
    """
    styles = _styles(settings.values())
    numbers = {objective: str(number) for number, objective in enumerate(styles, start=1)}
    is_named = len(styles) <= _FEW and max(map(len, styles)) <= _HALF_A_LINE
    figure, panels = new_panels(list(settings), panel_height=_FRONTIER_HEIGHT if len(settings) == 1 else _PANEL_HEIGHT)
    labels = []
    for axes, courses in zip(panels, settings.values(), strict=True):
        for objective, one in courses.items():
            color, marker = styles[objective]
            x, y = one.points[-1]
            axes.plot(*zip(*one.points, strict=True), color=color, marker="o", markersize=2.5, linewidth=1, alpha=0.4)
            label = None if is_named else f"{numbers[objective]}  {_drawn(objective)}"
            axes.plot([x], [y], marker, color=color, markersize=_OPERATING**0.5, label=label, zorder=5)
            _cross(axes, (x, y), (one.perplexity, one.lms), color)
        floors = [one.controls for one in courses.values() if not math.isnan(one.controls)]
        shown = [end for one in courses.values() for end in (*one.points, *zip(one.perplexity, one.lms, strict=True))]
        perplexity, lms = ([value for value in own if not math.isnan(value)] for own in zip(*shown, strict=True))
        _set_axes(axes, perplexity, [*lms, *floors])
        before = [point for one in courses.values() for point in one.points[:-1]]
        named = {_drawn(name).strip() if is_named else numbers[name]: one.points[-1] for name, one in courses.items()}
        if floors:
            floor = float(np.mean(floors))
            axes.axhspan(min(floors), max(floors), color="0.4", alpha=0.2, linewidth=0, zorder=1)
            axes.axhline(floor, label=_FLOOR, **_FLOOR_LINE)
            if is_named:
                named[_FLOOR] = axes.get_xlim()[1], floor
            before += [(x, floor) for x in np.geomspace(*axes.get_xlim(), 100)]
        labels.append((axes, named, before))
    if not is_named:
        _legend_above(figure, panels)
    figure.draw_without_rendering()
    for axes, named, others in labels:
        _label(axes, named, others)
    return figure


def lms_distribution(lms: Mapping[str, Mapping[str, Sequence[float]]]) -> "Drawing":
    """Draw the share of continuations that recite at least so many tokens, those of "control" dashed."""
    from matplotlib.ticker import NullLocator, StrMethodFormatter

    figure, (axes,) = new_panels([""])
    styles = _styles([lms])
    longest = max((value for of_label in lms.values() for values in of_label.values() for value in values), default=1)
    lengths = np.arange(1, max(int(longest), 1) + 2)
    for label, of_label in lms.items():
        for kind, linestyle, shown in (("target", "-", _drawn(label)), ("control", "--", _FLOOR)):
            if values := sorted(of_label.get(kind, [])):
                share = 100.0 * ((len(values) - np.searchsorted(values, lengths)) / len(values))
                axes.step(lengths, share, where="post", color=styles[label][0], linestyle=linestyle, label=shown)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("longest memorized substring of at least (tokens)")
    axes.set_ylabel("share of continuations (%)")
    axes.set_ylim(0, 102)
    _legend_above(figure, [axes])
    return figure


def frontier_drawing(model: str, points: "pd.DataFrame") -> "Drawing":
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
    figure, (axes,) = new_panels([model], panel_height=_FRONTIER_HEIGHT + _LEGEND_LINE * num_lines)
    styles = _styles([dict.fromkeys(operating["objective"])])
    finite = points[points["finite"]]
    for number, chosen in enumerate(operating.itertuples(), start=1):
        color, marker = styles[chosen.objective]
        own = finite[finite["objective"] == chosen.objective]
        line = _LINES[(number - 1) // 7 % len(_LINES)]
        sizes = own["learning_rate"].fillna(0.0).map(areas)
        axes.plot(own["perplexity"], own["lms"], color=color, linestyle=line, linewidth=1, alpha=0.5)
        axes.scatter(
            own["perplexity"], own["lms"], s=sizes, color=color, marker=marker, alpha=0.6, linewidths=0, zorder=3
        )
        axes.plot([], [], color=color, marker=marker, linestyle=line, label=f"{number}  {_drawn(chosen.objective)}")
        x, y = chosen.perplexity, chosen.lms
        perplexity = chosen.perplexity_low, min(chosen.perplexity_high, _HIGHEST)
        _cross(axes, (x, y), (perplexity, (chosen.lms_low, chosen.lms_high)), color)
        axes.scatter([x], [y], s=_OPERATING, color=color, marker=marker, edgecolors="black", linewidths=0.8, zorder=5)
    shown = points[points["perplexity"] <= _FURTHEST * operating["perplexity"].max()]
    controls = shown.dropna(subset=["control_lms"])
    weights = controls["seeds"].map(len)  # the mean is over runs
    floors = [float(np.average(controls["control_lms"], weights=weights))] if len(controls) else []
    for floor in floors:
        axes.axhline(floor, label=_FLOOR, **_FLOOR_LINE)
    _set_axes(axes, shown["perplexity"].tolist(), [*shown["lms"], *floors])
    for rate, area in (areas if len(areas) > 1 else {}).items():
        axes.plot([], [], "o", color="0.5", markersize=area**0.5, label=f"lr {rate:g}" if rate else "lr of the config")
    _legend_above(figure, [axes])
    figure.draw_without_rendering()
    ends = zip(operating["perplexity"], operating["lms"], strict=True)
    _label(axes, {str(number): point for number, point in enumerate(ends, start=1)})
    return figure


def _label(axes: "Axes", labels: Mapping[str, tuple[float, float]], others: Iterable[tuple[float, float]] = ()) -> None:
    """Write each label next to its point, on the side where it covers the least of all points and other labels.

    The layout of the figure has to be done, and labels do not change it.
    """
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    style: dict[str, Any] = {"fontsize": "small", "weight": "bold", "zorder": 6, "textcoords": "offset points"}
    style |= {"path_effects": [withStroke(linewidth=2, foreground="white")]}
    places = [axes.transData.transform(point) for point in (*labels.values(), *others)]
    occupied = [Bbox([place - _NEAR, place + _NEAR]) for place in places]
    for label, point in labels.items():
        text = axes.annotate(label, point, _SIDES[0], in_layout=False, **style)
        boxes = {}
        for side in _SIDES:
            _put(text, side)
            boxes[side] = text.get_window_extent()
        covered = {side: sum(_shared(box, other) for other in occupied) for side, box in boxes.items()}
        _put(text, min(boxes, key=lambda side: covered[side] - _shared(boxes[side], axes.bbox)))
        occupied.append(text.get_window_extent())


def _put(text: "Annotation", side: tuple[int, int]) -> None:
    """Let a label start at an offset from its point, and lead away from it."""
    right, up = side
    text.set(position=side, ha="left" if right > 0 else "right", va="bottom" if up > 0 else "top")


def _shared(box: "Bbox", other: "Bbox") -> float:
    """Return the area that two boxes share."""
    both = box.intersection(box, other)
    return 0.0 if both is None else float(both.width * both.height)


def _cross(axes: "Axes", point: tuple[float, float], intervals: Sequence[tuple[float, float]], color: str) -> None:
    """Draw the intervals of a point's two coordinates as a cross; NaN where there is none."""
    reaches = [
        None if math.isnan(low) else [[mean - low], [high - mean]]
        for mean, (low, high) in zip(point, intervals, strict=True)
    ]
    axes.errorbar(point[0], point[1], xerr=reaches[0], yerr=reaches[1], color=color, linewidth=1.2, zorder=4)


def _set_axes(axes: "Axes", perplexity: Sequence[float], lms: Sequence[float]) -> None:
    """Set limits of means (intervals from few seeds may reach far beyond), and scales; wide ones are logarithmic."""
    from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullFormatter, NullLocator, StrMethodFormatter

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
    lowest, highest = min(lms), max(*lms, _LINEAR_BELOW)
    if highest > _WIDE * max(lowest, _LINEAR_BELOW):
        axes.set_yscale("symlog", linthresh=_LINEAR_BELOW, linscale=0.5)
        axes.yaxis.set_major_locator(FixedLocator([0, *(m * 10.0**e for e in range(5) for m in (1, 2, 5))]))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.set_ylim(0 if lowest < _LINEAR_BELOW else 0.8 * lowest, 1.3 * highest)
    else:
        axes.set_ylim(0, 1.08 * highest)
    axes.set_ylabel("average LMS (tokens)")


def new_panels(titles: Sequence[str], *, panel_height: float = _PANEL_HEIGHT) -> tuple["Drawing", list["Axes"]]:
    """Make a figure with panels below each other, of a height in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Drawing

    figure = Drawing(figsize=(_WIDTH, 0.6 + panel_height * len(titles)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(len(titles), 1, squeeze=False)[:, 0])
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(_drawn(title, longest=_TITLE_LETTERS).strip(), fontsize="medium", loc="left")
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def _drawn(text: str, *, longest: int | None = None) -> str:
    """Prepare a name for matplotlib: one line without formulas; names longer than ``longest`` lose their middle."""
    line = " ".join(visible(text).split())
    if longest is not None and len(line) > longest:
        line = f"{line[: longest // 2]}…{line[-(longest // 2 - 1) :]}"
    line = line.replace("$", r"\$")
    return line if line and line[0] != "_" else f" {line}"  # matplotlib leaves a label with a leading _ out of legends


def _styles(panels: Iterable[Mapping[str, object]]) -> dict[str, tuple[str, str]]:
    """Choose a color and a marker for each label (the keys of ``panels``): 49 combinations of seven colors."""
    labels = dict.fromkeys(label for panel in panels for label in panel)
    return {label: (_COLORS[index % 7], _MARKERS[(index + index // 7) % 7]) for index, label in enumerate(labels)}


def _legend_above(figure: "Drawing", panels: Sequence["Axes"]) -> None:
    """Draw one legend above all panels; the dashed lines of the controls, if there are any, are explained last."""
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles.pop(_FLOOR, None):
        (handles[_FLOOR],) = panels[0].plot([], [], color="0.4", linestyle="--", linewidth=1.4)
    columns = 2 if max(map(len, handles)) <= _HALF_A_LINE else 1
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper left", ncols=columns, frameon=False, fontsize="small"
    )


def draw(figure: "Drawing", to: Path | io.BytesIO, **options: Any) -> None:
    """Save a figure; with a fixed salt and without a date, the same figure makes the same file."""
    import matplotlib

    if options["format"] == "svg":
        options["metadata"] = {"Date": None}
    with matplotlib.rc_context({"svg.hashsalt": "tfidf-tune"}):
        figure.savefig(to, **options)
