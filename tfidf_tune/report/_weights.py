"""What TF-IDF does to a text: sentences, a table, and tokens on the colors of their weights."""

import math
import unicodedata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from tfidf_tune.analysis._token_weights import WEIGHTS, frequency_bands
from tfidf_tune.report._document import Report, tabulate
from tfidf_tune.weighting import TermFrequency

if TYPE_CHECKING:
    import pandas as pd

ShownToken: TypeAlias = dict[str, Any]
"""A row of :func:`~tfidf_tune.analysis._token_weights.shown_tokens`."""

MAX_LEVEL = 4
LEVELS = tuple(range(-MAX_LEVEL, MAX_LEVEL + 1))
# RGB of weights above and below 1, safe for all common forms of color blindness (Okabe and Ito).
_UP_COLOR, _DOWN_COLOR = (213, 94, 0), (0, 114, 178)
_STRONGEST_SHARE = 0.65  # of its color at the highest level; the rest is background, so that text stays legible
_UNDERLINED_LEVEL = 2  # levels from here on are underlined: color is not the only sign
_SIGNS = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}
_BAND_NOTE = (
    "Rank 1 is the most frequent token of this text. A share of the weight above the share of tokens: these tokens "
    "count more than under plain cross-entropy."
)


def weights_report(
    tokens: "pd.DataFrame", form: TermFrequency, *, num_batches: int, provenance: Mapping[str, str]
) -> Report:
    """Make the report of all tokens of a text, see :func:`~tfidf_tune.analysis._token_weights.weigh_blocks`."""
    labels = tokens[tokens["tf"] > 0]
    num_steps, largest = int(tokens["step"].max()), int(tokens["documents"].max())
    window = f"{largest} blocks; full from mini-batch {num_batches} of {num_steps} on"
    if num_steps < num_batches:
        filled = f"{num_steps} of {num_batches} mini-batches, {largest} blocks"
        window = f"never full: {filled}; idf spreads further with more text"
    statistics = (
        f"over {tokens['block'].nunique()} blocks, {len(labels)} label tokens, each with the weight of its own step; "
        "the first token of a block is never a label"
    )
    bands = frequency_bands(labels)
    first = bands.iloc[0]
    finding = (
        f"With tf={form}, the {first['frequency rank'].split()[-1]} most frequent tokens hold "
        f"{first['% of tokens']:.1f} % of the tokens and {first[f'% of weight, {form}']:.1f} % of the weight."
    )
    shares = ("% of tokens", *(f"% of weight, {each}" for each in WEIGHTS))
    columns = [("frequency rank", "frequency rank", ""), *((share, share, ".1f") for share in shares)]
    title = "Share of the weight by token frequency"
    return Report(
        "Token weights under TF-IDF",
        [finding],
        [tabulate("frequency_bands", title, bands, columns, [_BAND_NOTE])],
        provenance={**provenance, "window": window, "statistics": statistics},
    )


def tokens_section(blocks: Sequence[Sequence[ShownToken]], form: TermFrequency) -> dict[str, Any]:
    """Return what :func:`html_page` needs for colored tokens whose numbers are shown on pointing, touch and focus."""
    shown = []
    for tokens in blocks:
        heading = "Block {block}, mini-batch {step}, {documents} blocks in the window".format_map(tokens[0])
        classes = [{each: _class_of(level_of(token, each)) for each in WEIGHTS} for token in tokens]
        shown.append((heading, [(one, _details(one), own) for one, own in zip(tokens, classes, strict=True)]))
    return {
        "section": "tokens",
        "blocks": shown,
        "form": form,
        "forms": [*WEIGHTS],
        "readable": readable,
        "legend": [(f"{2 ** (level / 2):.2g}", _class_of(level)) for level in LEVELS],
        "colors": {"up": _UP_COLOR, "down": _DOWN_COLOR},
        "percent_of_level": 100 * _STRONGEST_SHARE / MAX_LEVEL,
        "lines": [0] * _UNDERLINED_LEVEL + list(range(1, MAX_LEVEL)),
    }


def level_of(token: ShownToken, form: TermFrequency) -> int | None:
    """Return the level of a token's weight, None for the first token of a block, which has no weight.

    A level is half an octave, from -4 to 4: 0 about weight 1, 2 about 2, -4 for 1/4 and below.
    """
    if not token["tf"]:
        return None
    return round(max(-MAX_LEVEL, min(MAX_LEVEL, 2 * math.log2(max(token[WEIGHTS[form]], 1e-9)))))


def readable(text: str, *, mark_spaces: bool = False) -> str:
    """Make every character of a token visible and harmless; the result is never empty.

    Line ends and tabs become symbols, other control and format characters their code points, and spaces ␣, except a
    leading one before something visible, which stays unless ``mark_spaces`` is set.
    """
    shown = "".join(map(_readable_character, text))
    if text[:1] == " " and text[1:2] not in ("", " ") and not mark_spaces:
        return " " + shown[1:]
    return "◌" + shown if unicodedata.category(text[:1] or " ")[0] == "M" else shown or "∅"


def _readable_character(character: str) -> str:
    if character not in _SIGNS and unicodedata.category(character)[0] in "CZ":
        return f"\\u{ord(character):04x}" if ord(character) < 0x10000 else f"\\U{ord(character):08x}"
    return _SIGNS.get(character, character)


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
