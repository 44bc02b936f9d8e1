"""Token weights in a terminal."""

import os
from collections.abc import Mapping
from typing import Literal

from tfidf_tune.analysis import TermFrequency
from tfidf_tune.report._shown_tokens import (
    LEVELS,
    UNDERLINED_LEVEL,
    ShownBlock,
    level_of,
    lines_of,
    on_white,
    readable,
    weight_of,
)

Colours = Literal["none", "256", "24-bit"]

_SHOWN_NUMBER = 2.0  # without colours, weights from here on stand behind their token
_PLAIN = "\x1b[0m"


def terminal_colours(is_terminal: bool, environment: Mapping[str, str] = os.environ) -> Colours:
    """Find out which colours may be written.

    Args:
        is_terminal (bool): whether the output goes to a terminal.
        environment (Mapping[str, str]): ``NO_COLOR`` (https://no-color.org), ``TERM`` and ``COLORTERM`` count.

    Returns:
        Colours: "none" where the output is no terminal, or colours are unwanted or unknown to it.
    """
    if not is_terminal or environment.get("NO_COLOR") or environment.get("TERM") == "dumb":
        return "none"
    return "24-bit" if environment.get("COLORTERM") in ("truecolor", "24bit") else "256"


def block_text(block: ShownBlock, form: TermFrequency, *, colours: Colours, width: int) -> str:
    """Write the tokens of a block, each on the colour of its weight; without colours, high weights as numbers.

    Args:
        block (ShownBlock): the block.
        form (TermFrequency): the TF form of the weights.
        colours (Colours): which colours.
        width (int): of a line in columns.

    Returns:
        str: a heading, the tokens in lines, and what the signs mean; no final newline.
    """
    heading = f"Block {block.index}, mini-batch {block.step}, {block.num_documents} blocks in the window, tf={form}"
    shown = [readable(token.text) for token in block.tokens]
    if colours == "none":
        legend = f"(in parentheses: weights of {_SHOWN_NUMBER:g} and more; the mean is 1)"
        shown = [
            f"{text}({token.weights[form]:.2f})" if token.weights and token.weights[form] >= _SHOWN_NUMBER else text
            for text, token in zip(shown, block.tokens, strict=True)
        ]
    else:
        boxes = " ".join(_painted(f" {weight_of(level):.2g} ", level, colours) for level in LEVELS)
        legend = f"weight: {boxes} and more"
    lines = [
        "".join(
            _painted(text, level_of(token.weights[form]), colours) if token.weights and colours != "none" else text
            for text, token in line
        )
        for line in lines_of(block.tokens, shown, width)
    ]
    return "\n".join([heading, "", *lines, "", legend])


def _painted(text: str, level: int, colours: Colours) -> str:
    """Black on the level's colour, or the terminal's own colours for a weight of about 1."""
    if level == 0:
        return text
    red, green, blue = on_white(level)
    if colours == "24-bit":
        background = f"48;2;{red};{green};{blue}"
    else:  # a cube of 6 × 6 × 6 colours
        background = f"48;5;{16 + sum(n * round(part / 51) for n, part in ((36, red), (6, green), (1, blue)))}"
    underline = ";4" if level >= UNDERLINED_LEVEL else ""
    return f"\x1b[30;{background}{underline}m{text}{_PLAIN}"
