"""Drawings of a comparison, made without pyplot and its global state, narrow enough for a phone."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tfidf_tune._printing import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe and Ito's palette, safe for all common forms of color blindness; its yellow is too faint for lines.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
NUM_COLORS = len(_COLORS)
_WIDTH, _PANEL_HEIGHT = 4.8, 2.9
# If the largest value is more than this many times the smallest, the axis is logarithmic.
_WIDE = 4.0
# Letters of the legend that fit into half the width.
_HALF_A_LINE = 28
# Letters of a title that fit the width: a longer one would squeeze the panel.
_TITLE_LETTERS = 64


def lms_progress(curves: Mapping[str, Mapping[str, Sequence[tuple[int, float, float]]]]) -> "Figure":
    """Draw average LMS against training progress (the paper's figure 2), a panel for each model.

    Args:
        curves (Mapping[str, Mapping[str, Sequence[tuple[int, float, float]]]]): model -> objective -> (progress in
            percent, average LMS, that of the controls or NaN), by ascending progress.

    Returns:
        matplotlib.figure.Figure: dashed lines are the controls, the floor.
    """
    figure, panels = new_panels(list(curves))
    styles = styles_of(curves.values())
    for axes, by_objective in zip(panels, curves.values(), strict=True):
        for index, (objective, points) in enumerate(by_objective.items()):
            color, marker = styles[objective]
            progress = [point[0] for point in points]
            axes.plot(progress, [lms for _, lms, _ in points], color=color, marker=marker, label=drawn(objective))
            floor = [(at, controls) for at, _, controls in points if not math.isnan(controls)]
            dashes = (4 * index, (4, 4 * len(by_objective)))  # floors often coincide: each shows in the others' gaps
            if floor:
                axes.plot(*zip(*floor, strict=True), color=color, linestyle=dashes, linewidth=1.4)
        axes.set_xticks(sorted({point[0] for points in by_objective.values() for point in points}))
        axes.set_ylabel("average LMS (tokens)")
        axes.set_ylim(bottom=0)
    panels[-1].set_xlabel("training progress (%)")
    points = [
        point for by_objective in curves.values() for of_objective in by_objective.values() for point in of_objective
    ]
    legend_above(figure, panels, with_floor=not all(math.isnan(controls) for *_, controls in points))
    return figure


def perplexity_paths(paths: Mapping[str, Mapping[str, Sequence[tuple[int, float, float]]]]) -> "Figure":
    """Draw average LMS against perplexity through the checkpoints of each objective, a panel for each model.

    Args:
        paths (Mapping[str, Mapping[str, Sequence[tuple[int, float, float]]]]): model -> objective -> (progress in
            percent, perplexity, average LMS), by ascending progress.

    Returns:
        matplotlib.figure.Figure: markers grow with training; arrows end at the later checkpoint.
    """
    figure, panels = new_panels(list(paths))
    styles = styles_of(paths.values())
    for axes, by_objective in zip(panels, paths.values(), strict=True):
        for objective, points in by_objective.items():
            color, marker = styles[objective]
            progress, perplexity, lms = map(list, zip(*points, strict=True))
            axes.plot(perplexity, lms, color=color, linewidth=1.2, alpha=0.6)
            axes.scatter(perplexity, lms, s=[12 + 0.5 * at for at in progress], color=color, marker=marker, zorder=3)
            axes.plot([], [], color=color, marker=marker, label=drawn(objective))
            for start, end in itertools.pairwise(zip(perplexity, lms, strict=True)):
                axes.annotate(
                    "", end, start, arrowprops={"arrowstyle": "->", "color": color, "shrinkA": 4, "shrinkB": 5}
                )
        values = [point[1] for points in by_objective.values() for point in points]
        if is_wide(values):
            axes.set_xscale("log")
            set_log_ticks(axes.xaxis)
        axes.margins(x=0.08, y=0.1)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("average LMS (tokens)")
    panels[-1].set_xlabel("perplexity on unseen text")
    legend_above(figure, panels, with_floor=False)
    return figure


def lms_distribution(lms: Mapping[str, Mapping[str, Sequence[float]]]) -> "Figure":
    """Draw the share of continuations that recite at least so many tokens.

    Args:
        lms (Mapping[str, Mapping[str, Sequence[float]]]): label (an objective, or a model) -> "target" and "control"
            -> LMS of each continuation.

    Returns:
        matplotlib.figure.Figure: solid lines are the targets, dashed ones the controls.
    """
    from matplotlib.ticker import NullLocator, StrMethodFormatter

    figure, (axes,) = new_panels([""])
    styles = styles_of([lms])
    longest = max((value for of_label in lms.values() for values in of_label.values() for value in values), default=1)
    lengths = np.arange(1, max(int(longest), 1) + 2)
    for label, of_label in lms.items():
        for kind, linestyle in (("target", "-"), ("control", "--")):
            values = np.sort(of_label[kind])
            if len(values):
                share = 100.0 * ((len(values) - np.searchsorted(values, lengths)) / len(values))
                shown = drawn(label) if kind == "target" else None
                axes.step(lengths, share, where="post", color=styles[label][0], linestyle=linestyle, label=shown)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("longest memorized substring of at least (tokens)")
    axes.set_ylabel("share of continuations (%)")
    axes.set_ylim(0, 102)
    legend_above(figure, [axes], with_floor=any(of_label["control"] for of_label in lms.values()))
    return figure


def new_panels(titles: Sequence[str], *, panel_height: float = _PANEL_HEIGHT) -> tuple["Figure", list["Axes"]]:
    """Make a figure with panels below each other, of a height in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, 0.6 + panel_height * len(titles)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(len(titles), 1, squeeze=False)[:, 0])
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(drawn(title, longest=_TITLE_LETTERS).strip(), fontsize="medium", loc="left")
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, panels


def drawn(text: str, *, longest: int | None = None) -> str:
    """Prepare a name for matplotlib: one line without formulas; names longer than ``longest`` lose their middle."""
    line = " ".join(visible(text).split())
    if longest is not None and len(line) > longest:
        line = f"{line[: longest // 2]}…{line[-(longest // 2 - 1) :]}"
    line = line.replace("$", r"\$")
    return line if line and line[0] != "_" else f" {line}"  # matplotlib leaves a label with a leading _ out of legends


def is_wide(values: Sequence[float]) -> bool:
    """Return whether the largest value is more than four times the smallest."""
    return max(values) > _WIDE * min(values)


def set_log_ticks(axis: "Axis") -> None:
    """Put ticks of a logarithmic axis at 1, 2 and 5 times the powers of ten, written as plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def styles_of(panels: Iterable[Mapping[str, object]]) -> dict[str, tuple[str, str]]:
    """Choose a color and a marker for each label (the keys of ``panels``): 49 combinations of seven colors."""
    labels = dict.fromkeys(label for panel in panels for label in panel)
    return {
        label: (_COLORS[index % NUM_COLORS], _MARKERS[(index + index // NUM_COLORS) % NUM_COLORS])
        for index, label in enumerate(labels)
    }


def legend_above(figure: "Figure", panels: Sequence["Axes"], *, with_floor: bool) -> None:
    """Draw one legend above all panels; ``with_floor`` explains the dashed lines of the controls."""
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if with_floor:
        (handles["never injected (the floor)"],) = panels[0].plot([], [], color="0.4", linestyle="--", linewidth=1.4)
    columns = 2 if max(map(len, handles)) <= _HALF_A_LINE else 1
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper left", ncols=columns, frameon=False, fontsize="small"
    )
