"""Tokens on the colors of their weights: readable text, lines, the terminal and the page."""

import math
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from rich.cells import cell_len
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from tfidf_tune.analysis._token_weights import WEIGHTS
from tfidf_tune.weighting import TermFrequency

ShownToken: TypeAlias = dict[str, Any]
"""A row of :func:`~tfidf_tune.analysis._token_weights.shown_tokens`."""

MAX_LEVEL = 4
LEVELS = tuple(range(-MAX_LEVEL, MAX_LEVEL + 1))
UP_COLOR = (213, 94, 0)
"""RGB of weights above 1; with DOWN_COLOR safe for all common forms of color blindness (Okabe and Ito)."""
DOWN_COLOR = (0, 114, 178)
STRONGEST_SHARE = 0.65
"""Share of its color at the highest level; the rest is background, so that text stays legible."""
UNDERLINED_LEVEL = 2
"""Levels from here on are underlined: color is not the only sign."""

_SIGNS = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}
_SHOWN_NUMBER = 2.0  # without colors, weights from here on are printed after their token


def level_of(token: ShownToken, form: TermFrequency) -> int | None:
    """Return the level of a token's weight, None for the first token of a block, which has no weight.

    A level is half an octave, from -4 to 4: 0 about weight 1, 2 about 2, -4 for 1/4 and below.
    """
    if not token["tf"]:
        return None
    return round(max(-MAX_LEVEL, min(MAX_LEVEL, 2 * math.log2(max(token[WEIGHTS[form]], 1e-9)))))


def weight_of(level: int) -> float:
    """Return the weight in the middle of a level."""
    return float(2 ** (level / 2))


def on_white(level: int) -> tuple[int, int, int]:
    """Return the color of a level on a white background, RGB."""
    share = STRONGEST_SHARE * abs(level) / MAX_LEVEL
    red, green, blue = (round(255 + share * (part - 255)) for part in (UP_COLOR if level > 0 else DOWN_COLOR))
    return red, green, blue


def readable(text: str, *, mark_spaces: bool = False) -> str:
    """Make every character of a token visible and harmless; the result is never empty.

    Line ends and tabs become symbols, other control and format characters their code points, and spaces ␣, except a
    leading one before something visible, which stays unless ``mark_spaces`` is set.
    """
    shown = "".join(map(_readable_character, text))
    if text[:1] == " " and text[1:2] not in ("", " ") and not mark_spaces:
        return " " + shown[1:]
    return "◌" + shown if unicodedata.category(text[:1] or " ")[0] == "M" else shown or "∅"


def lines_of(tokens: Sequence[ShownToken], shown: Sequence[str], width: int) -> Iterator[list[tuple[str, ShownToken]]]:
    """Set tokens in lines of ``width`` columns, breaking before a space if possible and after each line end."""
    line: list[tuple[str, ShownToken]] = []
    for text, token in zip(shown, tokens, strict=True):
        if line and cell_len("".join(part for part, _ in line) + text) > width:
            # The last word moves to the next line, unless it fills this one.
            starts = [i for i in range(1, len(line)) if line[i][0].startswith(" ")]
            end = starts[-1] if starts and not text.startswith(" ") else len(line)
            yield line[:end]
            line = line[end:]
        line.append((text, token))
        if "\n" in token["text"]:
            yield line
            line = []
    if line:
        yield line


def print_block(tokens: Sequence[ShownToken], form: TermFrequency, console: Console) -> None:
    """Print the tokens of a block on the colors of their weights; without colors, high weights as numbers."""
    is_colored = console.color_system is not None and not console.no_color
    shown = [readable(token["text"]) for token in tokens]
    if not is_colored:
        weights = [token[WEIGHTS[form]] if token["tf"] else 0.0 for token in tokens]
        shown = [
            f"{part}({weight:.2f})" if weight >= _SHOWN_NUMBER else part
            for part, weight in zip(shown, weights, strict=True)
        ]
    text = Text(f"{heading(tokens)}, tf={form}\n\n")
    for line in lines_of(tokens, shown, console.width):
        for part, token in line:
            text.append(part, _style(level_of(token, form)) if is_colored else None)
        text.append("\n")
    if is_colored:
        text.append("\nweight: ")
        for level in LEVELS:
            text.append(f" {weight_of(level):.2g} ", _style(level)).append(" ")
        text.append("and more\n")
    else:
        text.append(f"\n(in parentheses: weights of {_SHOWN_NUMBER:g} and more; the mean is 1)\n")
    console.print(text, soft_wrap=True)


def tokens_section(blocks: Sequence[Sequence[ShownToken]], form: TermFrequency) -> dict[str, Any]:
    """Return what :func:`html_page` needs for colored tokens whose numbers are shown on pointing, touch and focus."""
    return {
        "section": "tokens",
        "blocks": [
            (heading(tokens), [(token, _details(token), _classes(token)) for token in tokens]) for tokens in blocks
        ],
        "form": form,
        "forms": [*WEIGHTS],
        "readable": readable,
        "legend": [(f"{weight_of(level):.2g}", _class_of(level)) for level in LEVELS],
        "colors": {"up": UP_COLOR, "down": DOWN_COLOR},
        "percent_of_level": 100 * STRONGEST_SHARE / MAX_LEVEL,
        "lines": [0] * UNDERLINED_LEVEL + list(range(1, MAX_LEVEL)),
    }


def _classes(token: ShownToken) -> dict[str, str]:
    return {form: _class_of(level_of(token, form)) for form in WEIGHTS}


def _class_of(level: int | None) -> str:
    if level is None:
        return "unweighted"
    return f"up{level}" if level > 0 else f"down{-level}" if level < 0 else "even"


def _details(token: ShownToken) -> str:
    name = f"“{readable(token['text'], mark_spaces=True)}” (id {token['id']})"
    if not token["tf"]:
        return f"{name}: first of its block, never a label, no weight"
    weights = ", ".join(f"{token[column]:.2f} ({form})" for form, column in WEIGHTS.items())
    return (
        f"{name}: {token['tf']} in this block, in {token['df']} of {token['documents']} blocks, "
        f"idf {token['idf']:.2f}; weight {weights}"
    )


def heading(tokens: Sequence[ShownToken]) -> str:
    """Name a block, its mini-batch and the size of its window."""
    first = tokens[0]
    return f"Block {first['block']}, mini-batch {first['step']}, {first['documents']} blocks in the window"


def _style(level: int | None) -> Style | None:
    """Black on the level's color, or the terminal's own colors for a weight of about 1."""
    if not level:
        return None
    return Style(color="black", bgcolor=Color.from_rgb(*on_white(level)), underline=level >= UNDERLINED_LEVEL)


def _readable_character(character: str) -> str:
    if character not in _SIGNS and unicodedata.category(character)[0] in "CZ":
        return f"\\u{ord(character):04x}" if ord(character) < 0x10000 else f"\\U{ord(character):08x}"
    return _SIGNS.get(character, character)
