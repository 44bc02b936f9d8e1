"""Tokens as they are shown: readable, and with a level for their weight."""

import math
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tfidf_tune.analysis import TermFrequency, WeightedBlocks

MAX_LEVEL = 4
LEVELS = tuple(range(-MAX_LEVEL, MAX_LEVEL + 1))
UP_COLOUR = (213, 94, 0)
"""Of weights above 1, RGB; with the other one told apart under every common colour blindness (Okabe and Ito)."""
DOWN_COLOUR = (0, 114, 178)
STRONGEST_SHARE = 0.65
"""Of its colour that the highest level has; the rest is background, so that text stays legible on it."""
UNDERLINED_LEVEL = 2
"""Levels from here on are underlined: colour is not the only sign."""

_PART = "\ufffd"  # how a part of a character is decoded
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
    """Collect what there is to show of a block.

    Args:
        weighted (WeightedBlocks): the weighted blocks.
        row (int): which of them.
        texts (Mapping[int, str]): token id -> text.
        decode (Callable[[list[int]], str]): token ids -> text.

    Returns:
        ShownBlock: the block.
    """
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
    """Give a weight its level, half an octave each: 0 about 1, 2 about 2, -4 for 1/4 and all below.

    Args:
        weight (float): the weight, not negative.

    Returns:
        int: from -4 to 4.
    """
    if weight <= 0:
        return -MAX_LEVEL
    return max(-MAX_LEVEL, min(MAX_LEVEL, round(2 * math.log2(weight))))


def weight_of(level: int) -> float:
    """Return the weight in the middle of a level."""
    return float(2 ** (level / 2))


def on_white(level: int) -> tuple[int, int, int]:
    """Return the colour of a level on a white background, RGB."""
    share = STRONGEST_SHARE * abs(level) / MAX_LEVEL
    red, green, blue = (round(255 + share * (part - 255)) for part in (UP_COLOUR if level > 0 else DOWN_COLOUR))
    return red, green, blue


def readable(text: str, *, mark_spaces: bool = False) -> str:
    """Make every character of a token visible and harmless.

    Line ends and tabs become signs, other control and format characters (which could steer a terminal or turn the
    direction of a page) their code points, and spaces ␣, but for one at the start that stands before something visible.

    Args:
        text (str): the token's text.
        mark_spaces (bool): mark a leading space too, for a token that stands alone. Default: False

    Returns:
        str: the text, never empty.
    """
    keeps_first = not mark_spaces and text[:1] == " " and text[1:2] not in ("", " ")
    signs = [_readable_character(character) for character in text]
    if keeps_first:
        signs[0] = " "
    shown = "".join(signs)
    return "◌" + shown if unicodedata.category(text[:1] or " ")[0] == "M" else shown or "∅"


def lines_of(tokens: Iterable[ShownToken], shown: Sequence[str], width: int) -> Iterator[list[tuple[str, ShownToken]]]:
    """Set tokens in lines, breaking before a space where that is possible and after each line end of the text.

    Args:
        tokens (Iterable[ShownToken]): the tokens.
        shown (Sequence[str]): what stands for each of them.
        width (int): of a line in columns; a longer token has a line of its own.

    Yields:
        list[tuple[str, ShownToken]]: the tokens of a line.
    """
    line: list[tuple[str, ShownToken]] = []
    for text, token in zip(shown, tokens, strict=True):
        if line and columns("".join(part for part, _ in line) + text) > width:
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


def columns(text: str) -> int:
    """Count the columns that a text takes in a terminal; East Asian wide characters take two."""
    return sum(
        0 if unicodedata.combining(character) else 1 + (unicodedata.east_asian_width(character) in "WF")
        for character in text
    )


def _texts_in_context(ids: list[int], texts: Mapping[int, str], decode: Callable[[list[int]], str]) -> list[str]:
    """The text of each token; where several make up a character, the last of them has it."""
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
