"""Results as figures, drawn without pyplot and its global state."""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from tfidf_tune._files import atomic_file
from tfidf_tune.analysis._tables import CheckpointResult

# Okabe and Ito's palette, told apart under every common colour blindness; its yellow is too faint for lines.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "osD^vPX"


def plot_lms_progress(results: Sequence[CheckpointResult], path: str | os.PathLike[str]) -> None:
    """Average LMS of the targets against training progress, one line an objective (the paper's figure 2).

    The dashed line of the same colour is the average LMS of the controls, the floor. Colours repeat after
    seven objectives.

    Args:
        results (Sequence[CheckpointResult]): checkpoints in any order; objectives are drawn in the order of their
            first occurrence.
        path (str | os.PathLike[str]): file to write, whole or not at all; its suffix (``.png``, ``.svg``, ``.pdf``)
            sets the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    objectives = dict.fromkeys(result.objective for result in results)
    styles = itertools.cycle(zip(_COLOURS, _MARKERS, strict=True))
    for index, (objective, (colour, marker)) in enumerate(zip(objectives, styles, strict=False)):
        dashes = (4 * index, (4, 4 * len(objectives)))  # floors often coincide: each shows in the others' gaps
        points = sorted((r for r in results if r.objective == objective), key=lambda result: result.progress)
        progress = [point.progress for point in points]
        axes.plot(progress, [p.targets.avg_lms for p in points], color=colour, marker=marker, label=objective)
        axes.plot(progress, [p.controls.avg_lms for p in points], color=colour, linestyle=dashes, linewidth=1.4)
    axes.plot([], [], color="0.4", linestyle="--", linewidth=1.4, label="never injected (floor)")
    axes.set_xticks(sorted({result.progress for result in results}))
    axes.set_xlabel("training progress (%)")
    axes.set_ylabel("average LMS (tokens)")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(facecolor="white", edgecolor="none", framealpha=0.9)
    with atomic_file(Path(path)) as temporary:
        figure.savefig(temporary, format=Path(path).suffix.lstrip("."), dpi=200)
