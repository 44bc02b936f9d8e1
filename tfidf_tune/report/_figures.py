"""The drawings of a comparison, made without pyplot and its global state.

Narrow, with panels below each other, so that they can be read on a phone.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tfidf_tune._printing import visible
from tfidf_tune.analysis import ProbeSample

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart under every common colour blindness; its yellow is too faint for lines.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"
NUM_COLOURS = len(_COLOURS)
_WIDTH, _PANEL_HEIGHT = 4.8, 2.9
# Where the largest value is this many times the smallest, the axis is logarithmic.
_WIDE = 4.0
# Letters of the legend that fit into half the width.
_HALF_A_LINE = 28
# Letters of a title that fit the width: a longer one would squeeze the panel.
_TITLE_LETTERS = 64


def lms_progress(curves: Mapping[str, Mapping[str, Sequence[tuple[int, float, float | None]]]]) -> "Figure":
    """Average LMS of the targets against training progress (the paper's figure 2), a panel for each model.

    The dashed line of the same colour is the average LMS of the controls, the floor.

    Args:
        curves (Mapping[str, Mapping[str, Sequence[tuple[int, float, float | None]]]]): model -> objective ->
            (progress in percent, average LMS, that of the controls or None), by ascending progress.

    Returns:
        matplotlib.figure.Figure: the drawing.
    """
    figure, panels = new_panels(list(curves))
    styles = styles_of(curves.values())
    for axes, by_objective in zip(panels, curves.values(), strict=True):
        for index, (objective, points) in enumerate(by_objective.items()):
            colour, marker = styles[objective]
            progress = [point[0] for point in points]
            axes.plot(progress, [lms for _, lms, _ in points], color=colour, marker=marker, label=drawn(objective))
            floor = [(at, controls) for at, _, controls in points if controls is not None]
            dashes = (4 * index, (4, 4 * len(by_objective)))  # floors often coincide: each shows in the others' gaps
            if floor:
                axes.plot(*zip(*floor, strict=True), color=colour, linestyle=dashes, linewidth=1.4)
        axes.set_xticks(sorted({point[0] for points in by_objective.values() for point in points}))
        axes.set_ylabel("average LMS (tokens)")
        axes.set_ylim(bottom=0)
    panels[-1].set_xlabel("training progress (%)")
    points = [
        point for by_objective in curves.values() for of_objective in by_objective.values() for point in of_objective
    ]
    legend_above(figure, panels, with_floor=any(controls is not None for *_, controls in points))
    return figure


def frontier(paths: Mapping[str, Mapping[str, Sequence[tuple[int, float, float]]]]) -> "Figure":
    """Average LMS against perplexity, each objective's way through its checkpoints; a panel for each model.

    Lower and further left is better. Markers grow with training; the arrow ends at the last checkpoint.

    Args:
        paths (Mapping[str, Mapping[str, Sequence[tuple[int, float, float]]]]): model -> objective -> (progress in
            percent, perplexity, average LMS), by ascending progress.

    Returns:
        matplotlib.figure.Figure: the drawing.
    """
    figure, panels = new_panels(list(paths))
    styles = styles_of(paths.values())
    for axes, by_objective in zip(panels, paths.values(), strict=True):
        for objective, points in by_objective.items():
            colour, marker = styles[objective]
            progress, perplexity, lms = map(list, zip(*points, strict=True))
            axes.plot(perplexity, lms, color=colour, linewidth=1.2, alpha=0.6)
            axes.scatter(perplexity, lms, s=[12 + 0.5 * at for at in progress], color=colour, marker=marker, zorder=3)
            axes.plot([], [], color=colour, marker=marker, label=drawn(objective))
            for start, end in itertools.pairwise(zip(perplexity, lms, strict=True)):
                axes.annotate(
                    "", end, start, arrowprops={"arrowstyle": "->", "color": colour, "shrinkA": 4, "shrinkB": 5}
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


def lms_distribution(samples_by_label: Mapping[str, Sequence[ProbeSample]]) -> "Figure":
    """Share of continuations that recite at least so many tokens, targets and controls apart.

    Args:
        samples_by_label (Mapping[str, Sequence[ProbeSample]]): label (an objective, or a model) -> samples.

    Returns:
        matplotlib.figure.Figure: the drawing; solid lines are the targets, dashed ones the controls.
    """
    from matplotlib.ticker import NullLocator, StrMethodFormatter

    figure, (axes,) = new_panels([""])
    styles = styles_of([samples_by_label])
    longest = max((sample.lms for samples in samples_by_label.values() for sample in samples), default=1)
    lengths = np.arange(1, max(longest, 1) + 2)
    for label, samples in samples_by_label.items():
        for kind, linestyle in (("target", "-"), ("control", "--")):
            lms = np.sort([sample.lms for sample in samples if sample.kind == kind])
            if len(lms):
                share = 100.0 * ((len(lms) - np.searchsorted(lms, lengths)) / len(lms))
                label_of_line = drawn(label) if kind == "target" else None
                axes.step(
                    lengths, share, where="post", color=styles[label][0], linestyle=linestyle, label=label_of_line
                )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("longest memorized substring of at least (tokens)")
    axes.set_ylabel("share of continuations (%)")
    axes.set_ylim(0, 102)
    controls = any(sample.kind == "control" for samples in samples_by_label.values() for sample in samples)
    legend_above(figure, [axes], with_floor=controls)
    return figure


def new_panels(titles: Sequence[str], *, panel_height: float = _PANEL_HEIGHT) -> tuple["Figure", list["Axes"]]:
    """Make panels below each other.

    Args:
        titles (Sequence[str]): one a panel.
        panel_height (float): in inches. Default: 2.9.

    Returns:
        tuple[matplotlib.figure.Figure, list[matplotlib.axes.Axes]]: figure and panels.
    """
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
    """Prepare a name for a drawing: one line, its dollar signs no formula, shown whatever it begins with.

    Args:
        text (str): a name.
        longest (int | None): longer names lose their middle. Default: None, no limit.

    Returns:
        str: what matplotlib is given.
    """
    line = " ".join(visible(text).split())
    if longest is not None and len(line) > longest:
        line = f"{line[: longest // 2]}…{line[-(longest // 2 - 1) :]}"
    line = line.replace("$", r"\$")
    return line if line and line[0] != "_" else f" {line}"  # matplotlib leaves a label with a leading _ out of legends


def is_wide(values: Sequence[float]) -> bool:
    """Say whether values lie so far apart that their axis should be logarithmic.

    Args:
        values (Sequence[float]): at least one.

    Returns:
        bool: whether the largest is more than four times the smallest.
    """
    return max(values) > _WIDE * min(values)


def set_log_ticks(axis: "Axis") -> None:
    """Put ticks at 1, 2 and 5 times the powers of ten, and write them as plain numbers.

    Args:
        axis (matplotlib.axis.Axis): a logarithmic one.
    """
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def styles_of(panels: Iterable[Mapping[str, object]]) -> dict[str, tuple[str, str]]:
    """Choose one colour and marker for each label, the same in every panel.

    Args:
        panels (Iterable[Mapping[str, object]]): the labels of each panel, as keys.

    Returns:
        dict[str, tuple[str, str]]: label -> colour and marker. After seven labels the colours come again with other
            markers, after 49 both.
    """
    labels = dict.fromkeys(label for panel in panels for label in panel)
    return {
        label: (_COLOURS[index % NUM_COLOURS], _MARKERS[(index + index // NUM_COLOURS) % NUM_COLOURS])
        for index, label in enumerate(labels)
    }


def legend_above(figure: "Figure", panels: Sequence["Axes"], *, with_floor: bool) -> None:
    """Draw one legend for all panels, above them.

    Args:
        figure (matplotlib.figure.Figure): where to.
        panels (Sequence[matplotlib.axes.Axes]): whose lines have labels.
        with_floor (bool): whether to explain the dashed lines of the controls.
    """
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if with_floor:
        (handles["never injected (the floor)"],) = panels[0].plot([], [], color="0.4", linestyle="--", linewidth=1.4)
    columns = 2 if max(map(len, handles)) <= _HALF_A_LINE else 1
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper left", ncols=columns, frameon=False, fontsize="small"
    )
