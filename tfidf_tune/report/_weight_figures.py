"""Figures of token weights, drawn without pyplot and its global state."""

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from tfidf_tune.analysis._token_weights import TERM_FREQUENCIES, TermFrequency
from tfidf_tune.report._shown_tokens import (
    DOWN_COLOR,
    MAX_LEVEL,
    STRONGEST_SHARE,
    UNDERLINED_LEVEL,
    UP_COLOR,
    ShownBlock,
    ShownToken,
    level_of,
    lines_of,
    readable,
    weight_of,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FONT = "DejaVu Sans Mono"  # part of matplotlib: the drawing is the same everywhere
_FONT_SIZE = 9
_COLUMN_INCHES = 0.602 * _FONT_SIZE / 72  # of each character of this font
_LINE_INCHES = 1.85 * _FONT_SIZE / 72
_LINE_COLUMNS = 100
_NO_GLYPH = "□"
_DPI = 150
_MOST_LINES = 300  # some 40 blocks of 256 tokens
# Okabe and Ito's palette, as in the other figures; gray is plain cross-entropy.
_FORM_COLORS = {"count": "#D55E00", "log": "#009E73", "binary": "#0072B2"}


def tokens_figure(blocks: Sequence[ShownBlock], form: TermFrequency) -> "Figure":
    """Draw the tokens of blocks on the colors of their weights, the paper's figure 1.

    Colors diverge around weight 1 on a log scale; weights of about 2 and more are underlined. Characters without a
    glyph are drawn as a box. Lines that do not fit a picture are left out, and a last line says so.
    """
    from matplotlib.figure import Figure

    lines = _all_lines(blocks)
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"{len(lines) - _MOST_LINES} more lines do not fit this picture"]
    margin, legend = 0.15, 0.75
    width, height = _LINE_COLUMNS * _COLUMN_INCHES + 2 * margin, len(lines) * _LINE_INCHES + 2 * margin + legend
    figure = Figure(figsize=(width, height), dpi=_DPI)
    axes = figure.add_axes(
        (margin / width, (margin + legend) / height, 1 - 2 * margin / width, len(lines) * _LINE_INCHES / height)
    )
    axes.set_axis_off()
    axes.set_xlim(0, _LINE_COLUMNS)
    axes.set_ylim(len(lines), 0)
    for number, line in enumerate(lines):
        if isinstance(line, str):
            axes.text(0, number + 0.5, line, va="center", size=_FONT_SIZE, color="0.35", parse_math=False)
        else:
            _draw_line(axes, number, line, form)
    _draw_legend(figure, figure.add_axes((0.3, 0.45 / height, 0.4, 0.14 / height)), form)
    return figure


def bands_figure(bands: "pd.DataFrame") -> "Figure":
    """Draw the share of the weight and of the tokens by frequency band, and the mean weights below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8, 5.4), layout="constrained")
    shares, means = figure.subplots(2, 1)
    positions = range(len(bands))
    bars = {"tokens (plain CE)": ("0.65", bands["% of tokens"])} | {
        f"weight, tf={form}": (_FORM_COLORS[form], bands[f"% of weight, {form}"]) for form in TERM_FREQUENCIES
    }
    for index, (label, (color, values)) in enumerate(bars.items()):
        centres = [position + 0.2 * (index - 1.5) for position in positions]
        shares.bar(centres, values, width=0.19, color=color, label=label)
    shares.set_ylabel("share (%)")
    # Above the panel, where no bar can reach it; the lines below have the same colors.
    shares.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False, fontsize="small")
    for form, marker in zip(TERM_FREQUENCIES, "osD", strict=True):
        means.plot(
            positions,
            bands[f"mean, {form}"],
            color=_FORM_COLORS[form],
            marker=marker,
            label=f"tf={form}",
        )
    means.axhline(1, color="0.5", linewidth=1, linestyle="--")
    means.set_ylabel("mean weight of a token")
    means.set_ylim(bottom=0)
    for axes in (shares, means):
        axes.set_xticks(list(positions), bands["frequency rank"], fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="0.9")
        axes.set_axisbelow(True)
    means.set_xlabel("frequency rank of the token in this text")
    return figure


def _all_lines(blocks: Sequence[ShownBlock]) -> list[str | list[tuple[str, ShownToken]]]:
    """Return the lines of all blocks, each after a heading, with an empty line between blocks."""
    lines: list[str | list[tuple[str, ShownToken]]] = []
    for block in blocks:
        lines += [""] * bool(lines) + [f"Block {block.index}, mini-batch {block.step}"]
        shown = [_drawable(readable(token.text)) for token in block.tokens]
        lines += lines_of(block.tokens, shown, _LINE_COLUMNS)
    return lines


def _draw_line(axes: "Axes", number: int, line: Sequence[tuple[str, ShownToken]], form: TermFrequency) -> None:
    from matplotlib.patches import Rectangle

    column = 0
    for text, token in line:
        if token.weights:
            weight = token.weights[form]
            box = Rectangle(
                (column, number + 0.06), len(text), 0.84, color=_color_map()(_on_scale(weight)), linewidth=0
            )
            axes.add_patch(box)
            if (level := level_of(weight)) >= UNDERLINED_LEVEL:
                axes.plot(
                    (column + 0.1, column + len(text) - 0.1),
                    (number + 0.9,) * 2,
                    color="black",
                    linewidth=0.5 * level - 0.4,
                )
        axes.text(
            column,
            number + 0.5,
            text,
            va="center_baseline",
            family=_FONT,
            size=_FONT_SIZE,
            color="black" if token.weights else "0.5",
            parse_math=False,
        )
        column += len(text)


def _draw_legend(figure: "Figure", axes: "Axes", form: TermFrequency) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    scale = ScalarMappable(LogNorm(weight_of(-MAX_LEVEL), weight_of(MAX_LEVEL)), _color_map())
    bar = figure.colorbar(scale, cax=axes, orientation="horizontal", extend="both")
    ticks = [weight_of(level) for level in range(-MAX_LEVEL, MAX_LEVEL + 1, 2)]
    bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    bar.minorticks_off()
    bar.set_label(f"weight (tf={form}; underlined: about {weight_of(UNDERLINED_LEVEL):g} and more)", size=_FONT_SIZE)
    axes.tick_params(labelsize=_FONT_SIZE - 1)


@cache
def _color_map() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    ends = [tuple((255 + STRONGEST_SHARE * (part - 255)) / 255 for part in end) for end in (DOWN_COLOR, UP_COLOR)]
    return LinearSegmentedColormap.from_list("weight", [ends[0], (1, 1, 1), ends[1]])


def _on_scale(weight: float) -> float:
    """Return the place of a weight on the color map: 0.5 for weight 1; outside of 0 to 1 the colors of its ends."""
    return 0.5 + math.log2(max(weight, 1e-9)) / MAX_LEVEL


def _drawable(text: str) -> str:
    font = _font()
    return "".join(character if font.get_char_index(ord(character)) else _NO_GLYPH for character in text)


@cache
def _font() -> Any:
    from matplotlib.font_manager import findfont, get_font

    return get_font(findfont(_FONT))
