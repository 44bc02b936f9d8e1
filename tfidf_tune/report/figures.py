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

    places = [axes.transData.transform(point) for point in (*labels.values(), *others)]
    occupied = [Bbox([place - _NEAR, place + _NEAR]) for place in places]
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
        boxes = {}
        for side in _SIDES:
            _put(text, side)
            boxes[side] = text.get_window_extent()
        covered = {
            side: sum(_shared(box, other) for other in occupied) for side, box in boxes.items()
        }
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


def draw_cross(
    axes: "Axes", point: tuple[float, float], intervals: Sequence[tuple[float, float]], color: str
) -> None:
    """Draw the intervals of a point's two coordinates as a cross; NaN where there is none."""
    reaches = []
    for mean, (low, high) in zip(point, intervals, strict=True):
        reaches.append(None if math.isnan(low) else [[mean - low], [high - mean]])
    axes.errorbar(
        point[0], point[1], xerr=reaches[0], yerr=reaches[1], color=color, linewidth=1.2, zorder=4
    )


def new_panels(
    titles: Sequence[str], *, panel_height: float = PANEL_HEIGHT
) -> tuple["Drawing", list["Axes"]]:
    """Make a figure with panels below each other, of a height in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Drawing

    figure = Drawing(figsize=(_WIDTH, 0.6 + panel_height * len(titles)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(len(titles), 1, squeeze=False)[:, 0])
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(drawn(title, longest=_TITLE_LETTERS).strip(), fontsize="medium", loc="left")
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
        line = f"{line[: longest // 2]}…{line[-(longest // 2 - 1) :]}"
    line = line.replace("$", r"\$")
    # Matplotlib leaves a label with a leading _ out of legends.
    return line if line and line[0] != "_" else f" {line}"


def styles_of(panels: Iterable[Mapping[str, object]]) -> dict[str, tuple[str, str]]:
    """Choose a color and a marker for each label (the keys of ``panels``): 49 combinations of seven
    colors.
    """
    styles: dict[str, tuple[str, str]] = {}
    for panel in panels:
        for label in panel:
            if label not in styles:
                index = len(styles)
                styles[label] = (_COLORS[index % 7], _MARKERS[(index + index // 7) % 7])
    return styles


def legend_above(figure: "Drawing", panels: Sequence["Axes"], dashed: str = "") -> None:
    """Draw one legend above all panels; the entry of the dashed lines, if there are any, is grey
    and the last.
    """
    handles: dict[str, Any] = {}
    for axes in panels:
        shown, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, shown, strict=True))
    if handles.pop(dashed, None):
        (handles[dashed],) = panels[0].plot([], [], color="0.4", linestyle="--", linewidth=1.4)
    columns = 2 if max(map(len, handles)) <= HALF_A_LINE else 1
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside upper left",
        ncols=columns,
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
