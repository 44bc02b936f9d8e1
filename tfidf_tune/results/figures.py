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
    for lms_by_kind in lms.values():
        for values in lms_by_kind.values():
            longest = max(longest, int(max(values, default=0)))
    lengths = np.arange(1, longest + 2)
    for label, lms_by_kind in lms.items():
        color, _ = styles[label]
        for kind, linestyle, shown in (
            ("target", "-", figures.drawn(label)),
            ("control", "--", FLOOR),
        ):
            ascending = sorted(lms_by_kind.get(kind, []))
            if not ascending:
                continue
            num_values = len(ascending)
            num_shorter = np.searchsorted(ascending, lengths)
            share = 100.0 * ((num_values - num_shorter) / num_values)
            axes.step(lengths, share, where="post", color=color, linestyle=linestyle, label=shown)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("longest memorized substring of at least (tokens)")
    axes.set_ylabel("share of continuations (%)")
    axes.set_ylim(0, 102)
    figures.legend_above(figure, [axes], FLOOR)
    return figure
