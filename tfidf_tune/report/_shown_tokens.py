"""Tokens for display: readable text, and a level for the weight."""

import math
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from tfidf_tune.analysis._token_weights import TermFrequency, WeightedBlocks

MAX_LEVEL = 4
LEVELS = tuple(range(-MAX_LEVEL, MAX_LEVEL + 1))
UP_COLOR = (213, 94, 0)
"""RGB of weights above 1; with DOWN_COLOR safe for all common forms of color blindness (Okabe and Ito)."""
DOWN_COLOR = (0, 114, 178)
STRONGEST_SHARE = 0.65
"""Share of its color at the highest level; the rest is background, so that text stays legible."""
UNDERLINED_LEVEL = 2
"""Levels from here on are underlined: color is not the only sign."""

_PART = "\ufffd"  # decoded part of a character
_MOST_PARTS = 4  # bytes of a character in UTF-8
_VISIBLE = {"\n": "↵", "\t": "⇥", "\r": "␍"}


@dataclass(frozen=True)
class ShownToken:
    """A token of a block.

    Args:
        text (str): as decoded.
        token_id (int): its id.
        count (int): how often it is a label of the block.
        document_frequency (int): sequences of the window that contain it.
        idf (float): its IDF.
        weights (Mapping[TermFrequency, float]): TF form -> weight; empty for the first token, which is never a label.
    """

    text: str
    token_id: int
    count: int = 0
    document_frequency: int = 0
    idf: float = 0.0
    weights: Mapping[TermFrequency, float] | None = None


@dataclass(frozen=True)
class ShownBlock:
    """A block with the weights of its own training step.

    Args:
        index (int): its number in the text, from 0.
        step (int): its mini-batch, from 1.
        num_documents (int): sequences in the window at that step.
        tokens (tuple[ShownToken, ...]): all tokens of the block.
    """

    index: int
    step: int
    num_documents: int
    tokens: tuple[ShownToken, ...]


def shown_block(
    weighted: WeightedBlocks, row: int, texts: Mapping[int, str], decode: Callable[[list[int]], str]
) -> ShownBlock:
    """Collect the tokens of row ``row``, with their texts and a function that decodes several ids."""
    ids = weighted.blocks[row].tolist()
    first, *others = _texts_in_context(ids, texts, decode)
    labels = [
        ShownToken(
            text=text,
            token_id=token,
            count=int(weighted.counts[row, i]),
            document_frequency=int(weighted.document_frequency[row, i]),
            idf=float(weighted.idf[row, i]),
            weights={form: float(values[row, i]) for form, values in weighted.weights.items()},
        )
        for i, (token, text) in enumerate(zip(ids[1:], others, strict=True))
    ]
    return ShownBlock(
        index=int(weighted.indices[row]),
        step=int(weighted.steps[row]),
        num_documents=int(weighted.num_documents[row]),
        tokens=(ShownToken(first, ids[0]), *labels),
    )


def level_of(weight: float) -> int:
    """Return the level of a weight, from -4 to 4, half an octave each: 0 about 1, 2 about 2, -4 for 1/4 and below."""
    if weight <= 0:
        return -MAX_LEVEL
    return max(-MAX_LEVEL, min(MAX_LEVEL, round(2 * math.log2(weight))))


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
    keeps_first = not mark_spaces and text[:1] == " " and text[1:2] not in ("", " ")
    signs = [_readable_character(character) for character in text]
    if keeps_first:
        signs[0] = " "
    shown = "".join(signs)
    return "◌" + shown if unicodedata.category(text[:1] or " ")[0] == "M" else shown or "∅"


def lines_of(tokens: Iterable[ShownToken], shown: Sequence[str], width: int) -> Iterator[list[tuple[str, ShownToken]]]:
    """Set tokens in lines, breaking before a space if possible, and after each line end of the text.

    Args:
        tokens (Iterable[ShownToken]): the tokens.
        shown (Sequence[str]): the text of each.
        width (int): of a line in columns; a longer token has a line of its own.
    """
    line: list[tuple[str, ShownToken]] = []
    for text, token in zip(shown, tokens, strict=True):
        if line and cell_len("".join(part for part, _ in line) + text) > width:
            # The last word moves to the next line, unless it fills this one.
            start = next((i for i in range(len(line) - 1, 0, -1) if line[i][0].startswith(" ")), len(line))
            if text.startswith(" "):
                start = len(line)
            yield line[:start]
            line = line[start:]
        line.append((text, token))
        if "\n" in token.text:
            yield line
            line = []
    if line:
        yield line


def _texts_in_context(ids: list[int], texts: Mapping[int, str], decode: Callable[[list[int]], str]) -> list[str]:
    """Return the text of each token; if several make up a character, the last of them has it."""
    of_ids = [texts[token] for token in ids]
    start = 0
    while start < len(ids):
        end = start + 1
        if _PART in of_ids[start]:
            for end in range(start + 2, min(start + _MOST_PARTS, len(ids)) + 1):
                if _PART not in (whole := decode(ids[start:end])):
                    of_ids[end - 1] = whole
                    break
            else:
                end = start + 1
        start = end
    return of_ids


def _readable_character(character: str) -> str:
    if character in _VISIBLE:
        return _VISIBLE[character]
    if character == " ":
        return "␣"
    category = unicodedata.category(character)
    if category[0] == "C" or category[0] == "Z":
        return f"\\u{ord(character):04x}" if ord(character) < 0x10000 else f"\\U{ord(character):08x}"
    return character
