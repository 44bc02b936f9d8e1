"""Figures of token weights, drawn without pyplot and its global state."""

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from tfidf_tune.analysis._token_weights import WEIGHTS
from tfidf_tune.report._figures import new_panels
from tfidf_tune.report._shown_tokens import (
    DOWN_COLOR,
    MAX_LEVEL,
    STRONGEST_SHARE,
    UNDERLINED_LEVEL,
    UP_COLOR,
    ShownToken,
    heading,
    level_of,
    lines_of,
    readable,
    weight_of,
)
from tfidf_tune.weighting import TermFrequency

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FONT, _FONT_SIZE = "DejaVu Sans Mono", 9  # part of matplotlib: the drawing is the same everywhere
_COLUMN_INCHES, _LINE_INCHES = 0.602 * _FONT_SIZE / 72, 1.85 * _FONT_SIZE / 72
_LINE_COLUMNS, _MOST_LINES = 100, 300  # some 40 blocks of 256 tokens
_MARGIN, _LEGEND_INCHES, _DPI = 0.15, 0.75, 150
# Okabe and Ito's palette, as in the other figures; gray is plain cross-entropy.
_STYLES = {"count": ("#D55E00", "o"), "log": ("#009E73", "s"), "binary": ("#0072B2", "D")}


def tokens_figure(blocks: Sequence[Sequence[ShownToken]], form: TermFrequency) -> "Figure":
    """Draw the tokens of blocks on the colors of their weights, the paper's figure 1.

    Colors diverge around weight 1 on a log scale; weights of about 2 and more are underlined. Characters without a
    glyph are drawn as a box. Lines that do not fit a picture are left out, and a last line says so.
    """
    from matplotlib.figure import Figure

    lines: list[str | list[tuple[str, ShownToken]]] = []
    for tokens in blocks:
        lines += [""] * bool(lines) + [heading(tokens)]
        lines += lines_of(tokens, [_drawable(readable(token["text"])) for token in tokens], _LINE_COLUMNS)
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"{len(lines) - _MOST_LINES} more lines do not fit this picture"]
    text_height = len(lines) * _LINE_INCHES
    width, height = _LINE_COLUMNS * _COLUMN_INCHES + 2 * _MARGIN, text_height + 2 * _MARGIN + _LEGEND_INCHES
    figure = Figure(figsize=(width, height), dpi=_DPI)
    bottom = (_MARGIN + _LEGEND_INCHES) / height
    axes = figure.add_axes((_MARGIN / width, bottom, 1 - 2 * _MARGIN / width, text_height / height))
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
    figure, (shares, means) = new_panels(["", ""], panel_height=2.4)
    positions = range(len(bands))
    bars = {"tokens (plain CE)": ("0.65", "% of tokens")}
    bars |= {f"weight, tf={form}": (color, f"% of weight, {form}") for form, (color, _) in _STYLES.items()}
    for index, (label, (color, column)) in enumerate(bars.items()):
        centers = [position + 0.2 * (index - 1.5) for position in positions]
        shares.bar(centers, bands[column], width=0.19, color=color, label=label)
    shares.set_ylabel("share (%)")
    # Above the panel, where no bar can reach it; the lines below have the same colors.
    shares.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False, fontsize="small")
    for form, (color, marker) in _STYLES.items():
        means.plot(positions, bands[f"mean, {form}"], color=color, marker=marker, label=f"tf={form}")
    means.axhline(1, color="0.5", linewidth=1, linestyle="--")
    means.set_ylabel("mean weight of a token")
    means.set_ylim(bottom=0)
    means.set_xlabel("frequency rank of the token in this text")
    for axes in (shares, means):
        axes.set_xticks(list(positions), bands["frequency rank"], fontsize="small")
        axes.grid(visible=False, axis="x")
    return figure


def _draw_line(axes: "Axes", number: int, line: Sequence[tuple[str, ShownToken]], form: TermFrequency) -> None:
    from matplotlib.patches import Rectangle

    column = 0
    for text, token in line:
        level, end = level_of(token, form), column + len(text)
        if level is not None:
            # 0.5 for weight 1; below 0 and above 1 the map has the colors of its ends.
            color = _color_map()(0.5 + math.log2(max(token[WEIGHTS[form]], 1e-9)) / MAX_LEVEL)
            axes.add_patch(Rectangle((column, number + 0.06), len(text), 0.84, color=color, linewidth=0))
            if level >= UNDERLINED_LEVEL:
                line_width = 0.5 * level - 0.4
                axes.plot((column + 0.1, end - 0.1), (number + 0.9,) * 2, color="black", linewidth=line_width)
        font: dict[str, Any] = {"family": _FONT, "size": _FONT_SIZE, "color": "0.5" if level is None else "black"}
        axes.text(column, number + 0.5, text, va="center_baseline", parse_math=False, **font)
        column = end


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


def _drawable(text: str) -> str:
    return "".join(character if _font().get_char_index(ord(character)) else "□" for character in text)


@cache
def _font() -> Any:
    from matplotlib.font_manager import findfont, get_font

    return get_font(findfont(_FONT))
