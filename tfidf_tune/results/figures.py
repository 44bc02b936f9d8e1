"""The drawing that all reports share: the distribution of what is recited."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tfidf_tune.report import figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

FLOOR = "held out (chance)"


def lms_distribution(lms: Mapping[str, Mapping[str, Sequence[float]]]) -> "Drawing":
    """Draw the share of continuations that recite at least so many tokens, those of "control"
    dashed.
    """
    from matplotlib.ticker import NullLocator, StrMethodFormatter

    figure, (axes,) = figures.new_panels([""])
    styles = figures.styles_of([lms])
    longest = 1
    for of_label in lms.values():
        for values in of_label.values():
            longest = max([longest, *map(int, values)])
    lengths = np.arange(1, longest + 2)
    for label, of_label in lms.items():
        for kind, linestyle, shown in (
            ("target", "-", figures.drawn(label)),
            ("control", "--", FLOOR),
        ):
            values = sorted(of_label.get(kind, []))
            if values:
                share = 100.0 * ((len(values) - np.searchsorted(values, lengths)) / len(values))
                axes.step(
                    lengths,
                    share,
                    where="post",
                    color=styles[label][0],
                    linestyle=linestyle,
                    label=shown,
                )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("longest memorized substring of at least (tokens)")
    axes.set_ylabel("share of continuations (%)")
    axes.set_ylim(0, 102)
    figures.legend_above(figure, [axes], FLOOR)
    return figure
