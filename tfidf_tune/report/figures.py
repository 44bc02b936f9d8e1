"""What all drawings share: panels, colors and markers, labels, a legend; made without pyplot and
its global state.
"""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfidf_tune._printing import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

# Okabe and Ito's palette, safe for all common forms of color blindness; its yellow is too faint for
# lines.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
# in inches, narrow enough for a phone
_WIDTH = 4.8
PANEL_HEIGHT = 2.9
LONE_HEIGHT = 4.4
# Letters that fit: of a legend into half the width, of a title into all of it.
HALF_A_LINE = 28
_TITLE_LETTERS = 64
_SIDES = ((5, 4), (-5, 4), (5, -4), (-5, -4))  # where a label may start, in points from its point
_NEAR = 4.0  # pixels around a point that labels keep off


def label_points(
    axes: "Axes",
    labels: Mapping[str, tuple[float, float]],
    others: Iterable[tuple[float, float]] = (),
) -> None:
    """Write labels next to their points, where they cover the least of all points and labels; the
    layout is done.
    """
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    occupied = []
    for point in (*labels.values(), *others):
        pixel = axes.transData.transform(point)
        occupied.append(Bbox([pixel - _NEAR, pixel + _NEAR]))
    for label, point in labels.items():
        text = axes.annotate(
            label,
            point,
            _SIDES[0],
            textcoords="offset points",
            in_layout=False,
            fontsize="small",
            weight="bold",
            zorder=6,
            path_effects=[withStroke(linewidth=2, foreground="white")],
        )
        # Try every side of the point: a label that leaves the panel, or covers something, costs.
        costs = {}
        for side in _SIDES:
            _put(text, side)
            box = text.get_window_extent()
            covered = sum(_shared(box, other) for other in occupied)
            costs[side] = covered - _shared(box, axes.bbox)
        _put(text, min(costs, key=costs.__getitem__))
        occupied.append(text.get_window_extent())


def _put(text: "Annotation", side: tuple[int, int]) -> None:
    """Let a label start at an offset from its point, and lead away from it."""
    right, up = side
    horizontal = "left" if right > 0 else "right"
    vertical = "bottom" if up > 0 else "top"
    text.set(position=side, ha=horizontal, va=vertical)


def _shared(box: "Bbox", other: "Bbox") -> float:
    """Return the area that two boxes share."""
    both = box.intersection(box, other)
    if both is None:
        return 0.0
    return float(both.width * both.height)


def draw_cross(
    axes: "Axes", point: tuple[float, float], intervals: Sequence[tuple[float, float]], color: str
) -> None:
    """Draw the intervals of a point's two coordinates as a cross; NaN where there is none."""
    x, y = point
    x_interval, y_interval = intervals
    axes.errorbar(
        x,
        y,
        xerr=_reaches(x, x_interval),
        yerr=_reaches(y, y_interval),
        color=color,
        linewidth=1.2,
        zorder=4,
    )


def _reaches(mean: float, interval: tuple[float, float]) -> list[list[float]] | None:
    """Return how far an interval reaches below and above a mean; None if there is no interval."""
    low, high = interval
    if math.isnan(low):
        return None
    return [[mean - low], [high - mean]]


def new_panels(
    titles: Sequence[str], *, panel_height: float = PANEL_HEIGHT
) -> tuple["Drawing", list["Axes"]]:
    """Make a figure with panels below each other, of a height in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Drawing

    height = 0.6 + panel_height * len(titles)
    figure = Drawing(figsize=(_WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(titles), 1, squeeze=False)
    panels = list(grid[:, 0])
    for axes, title in zip(panels, titles, strict=True):
        shown = drawn(title, longest=_TITLE_LETTERS).strip()
        axes.set_title(shown, fontsize="medium", loc="left")
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def drawn(text: str, *, longest: int | None = None) -> str:
    """Prepare a name for matplotlib: one line without formulas; names longer than ``longest`` lose
    their middle.
    """
    line = " ".join(visible(text).split())
    if longest is not None and len(line) > longest:
        half = longest // 2
        line = f"{line[:half]}…{line[-(half - 1) :]}"
    line = line.replace("$", r"\$")
    # Matplotlib leaves a label with a leading _ out of legends.
    if not line or line.startswith("_"):
        return f" {line}"
    return line


def styles_of(panels: Iterable[Mapping[str, object]]) -> dict[str, tuple[str, str]]:
    """Choose a color and a marker for each label (the keys of ``panels``): 49 combinations of seven
    colors.

    Labels 0 to 6 have color i and marker i; labels 7 to 13 have the colors again, each with the
    next marker: label 7 has color 0 and marker 1.
    """
    labels: dict[str, None] = {}
    for panel in panels:
        labels |= dict.fromkeys(panel)
    styles = {}
    for index, label in enumerate(labels):
        color = _COLORS[index % 7]
        num_rounds = index // 7
        styles[label] = (color, _MARKERS[(index + num_rounds) % 7])
    return styles


def legend_above(figure: "Drawing", panels: Sequence["Axes"], dashed: str = "") -> None:
    """Draw one legend above all panels; the entry of the dashed lines, if there are any, is grey
    and the last.
    """
    handles: dict[str, Any] = {}
    for axes in panels:
        handles_of_panel, labels = axes.get_legend_handles_labels()
        handles.update(zip(labels, handles_of_panel, strict=True))
    if handles.pop(dashed, None):
        (grey,) = panels[0].plot([], [], color="0.4", linestyle="--", linewidth=1.4)
        handles[dashed] = grey
    longest = max(map(len, handles))
    num_columns = 2 if longest <= HALF_A_LINE else 1
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside upper left",
        ncols=num_columns,
        frameon=False,
        fontsize="small",
    )


def draw(figure: "Drawing", to: Path | io.BytesIO, **options: Any) -> None:
    """Save a figure; with a fixed salt and without a date, the same figure makes the same file."""
    import matplotlib

    if options["format"] == "svg":
        options["metadata"] = {"Date": None}
    with matplotlib.rc_context({"svg.hashsalt": "tfidf-tune"}):
        figure.savefig(to, **options)
