"""What TF-IDF does to a text: the weights of its tokens as in training, and a page with colored
tokens.
"""

import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch.utils.data import DistributedSampler

from tfidf_tune.report import Report, tabulate
from tfidf_tune.weighting import IGNORE_INDEX, TermFrequency, TFIDFWeighting, shift_labels
from tfidf_tune.weighting.tfidf import distinct_terms, inverse_document_frequency

if TYPE_CHECKING:
    from tfidf_tune.data import HFTokenizer

WEIGHTS: dict[TermFrequency, str] = {form: f"weight, {form}" for form in get_args(TermFrequency)}
"""TF form -> column of the data frames."""

_REPLACEMENT = "\ufffd"  # decoded part of a character
_MOST_PARTS = 4  # bytes of a character in UTF-8
_BAND_EDGES = (10, 100, 1000)

IntArray = npt.NDArray[np.integer]


def weigh_blocks(
    blocks: IntArray,
    *,
    vocab_size: int,
    batch_size: int = 8,
    num_batches: int = 16,
    max_weight: float | None = None,
    shuffle: bool = True,
    seed: int = 42,
) -> pd.DataFrame:
    """Compute the weights of every token of ``[n, s]`` blocks in the first epoch of a training run.

    As in training, the last mini-batch may have fewer blocks. Returns a row for each token, in the
    order of the text: "block" (its number, from 0), "step" (mini-batch in which the block was
    weighted, from 1), "documents" (sequences in the window at that step), "id", "tf" (how often the
    token is a label of its block), "df" (sequences of the window that contain it), "idf", and the
    column :data:`WEIGHTS` of each TF form. The first token of a block is never a label: its "tf" is
    0, and "df", "idf" and weights mean nothing.
    """
    numbers: Any = range(len(blocks))
    order: Any = DistributedSampler(numbers, num_replicas=1, rank=0, shuffle=shuffle, seed=seed)
    batches = np.split(np.array(list(order)), range(batch_size, len(blocks), batch_size))
    longest = min(num_batches, len(batches))  # the rest of a longer window would stay empty
    weightings = {
        form: TFIDFWeighting(num_batches=longest, tf=form, max_weight=max_weight)
        for form in WEIGHTS
    }
    parts = []
    for step, rows in enumerate(batches, start=1):
        labels = shift_labels(torch.from_numpy(blocks[rows]).long())
        weights = {
            WEIGHTS[form]: weigh(labels, vocab_size=vocab_size)
            for form, weigh in weightings.items()
        }
        window = weightings["count"].window  # the same for all forms
        terms = distinct_terms(labels)
        frequency = window.document_frequency(labels)
        of_labels = {
            "tf": terms.counts[terms.positions].masked_fill(labels == IGNORE_INDEX, 0),
            "df": frequency,
            "idf": inverse_document_frequency(frequency, window.num_documents).double(),
            **{name: values.double() for name, values in weights.items()},
        }
        # The label at position i is token i + 1.
        of_tokens = {
            name: values.roll(1, dims=-1).flatten().numpy() for name, values in of_labels.items()
        }
        of_blocks = {
            "block": np.repeat(rows, blocks.shape[1]),
            "step": step,
            "documents": int(window.num_documents),
        }
        parts.append(pd.DataFrame({**of_blocks, "id": blocks[rows].ravel(), **of_tokens}))
    return pd.concat(parts).sort_values("block", kind="stable", ignore_index=True)


def frequency_bands(labels: pd.DataFrame) -> pd.DataFrame:
    """Compare the 10 most frequent label tokens of a text, the 11th to 100th, the 101st to 1000th
    and the rest.
    """
    frequencies = labels.groupby("id").size()
    order = frequencies.sort_values(ascending=False, kind="stable").index
    ranks = pd.Series(range(1, len(order) + 1), index=order)
    last = [*(edge for edge in _BAND_EDGES if edge < len(order)), len(order)]
    band = np.searchsorted(last, labels["id"].map(ranks))
    groups = labels.groupby(band)
    first = [1, *(rank + 1 for rank in last[:-1])]
    names = [f"{start} to {end}" for start, end in zip(first, last, strict=True)]
    table = pd.DataFrame({"frequency rank": names})
    table["% of tokens"] = 100 * groups.size() / len(labels)
    for form, column in WEIGHTS.items():
        table[f"% of weight, {form}"] = 100 * groups[column].sum() / labels[column].sum()
    return table


def token_texts(tokenizer: "HFTokenizer", token_ids: IntArray) -> dict[int, str]:
    """Decode distinct tokens, with their leading space; a part of a character is the replacement
    character.
    """
    # Decode each token after another one: decoders drop the space that SentencePiece puts before
    # the first token.
    anchor = tokenizer.encode("a", add_bos=False, add_eos=False)
    before = tokenizer.decode(anchor, skip_special_tokens=False)
    texts = {}
    for token in np.unique(token_ids).tolist():
        text = tokenizer.decode([*anchor, token], skip_special_tokens=False)
        texts[token] = text[len(before) :]
    return texts


def shown_tokens(
    tokens: pd.DataFrame, block: int, texts: Mapping[int, str], decode: Callable[[list[int]], str]
) -> list[dict[str, Any]]:
    """Return the rows of one block as dictionaries with their "text".

    If several tokens make up a character, the last of them has it as its text.
    """
    rows = tokens[tokens["block"] == block].to_dict("records")
    ids = [row["id"] for row in rows]
    shown = [row | {"text": texts[row["id"]]} for row in rows]
    start = 0
    while start < len(ids):
        # The fewest tokens from here on that are whole characters; a part that is never completed
        # stands for itself.
        ends = range(start + 1, min(start + _MOST_PARTS, len(ids)) + 1)
        end = next((end for end in ends if _REPLACEMENT not in decode(ids[start:end])), start + 1)
        if end > start + 1:
            shown[end - 1]["text"] = decode(ids[start:end])
        start = end
    return shown


MAX_LEVEL = 4
LEVELS = tuple(range(-MAX_LEVEL, MAX_LEVEL + 1))
_SIGNS = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}
_BAND_NOTE = (
    "Rank 1 is the most frequent token of this text. A share of the weight above the share of "
    "tokens: these tokens count more than under plain cross-entropy."
)


def weights_report(
    tokens: pd.DataFrame, form: TermFrequency, *, num_batches: int, provenance: Mapping[str, str]
) -> Report:
    """Make the report of all tokens of a text, see
    :func:`~tfidf_tune.commands._weights_view.weigh_blocks`.
    """
    labels = tokens[tokens["tf"] > 0]
    num_steps = int(tokens["step"].max())
    largest = int(tokens["documents"].max())
    window = f"{largest} blocks; full from mini-batch {num_batches} of {num_steps} on"
    if num_steps < num_batches:
        filled = f"{num_steps} of {num_batches} mini-batches, {largest} blocks"
        window = f"never full: {filled}; idf spreads further with more text"
    statistics = (
        f"over {tokens['block'].nunique()} blocks, {len(labels)} label tokens, each with the "
        "weight of its own step; the first token of a block is never a label"
    )
    bands = frequency_bands(labels)
    first = bands.iloc[0]
    finding = (
        f"With tf={form}, the {first['frequency rank'].split()[-1]} most frequent tokens hold "
        f"{first['% of tokens']:.1f} % of the tokens and {first[f'% of weight, {form}']:.1f} % of "
        "the weight."
    )
    shares = ("% of tokens", *(f"% of weight, {each}" for each in WEIGHTS))
    columns = [
        ("frequency rank", "frequency rank", ""),
        *((share, share, ".1f") for share in shares),
    ]
    return Report(
        "Token weights under TF-IDF",
        finding,
        [
            tabulate(
                "frequency_bands",
                "Share of the weight by token frequency",
                bands,
                columns,
                [_BAND_NOTE],
            )
        ],
        provenance={**provenance, "window": window, "statistics": statistics},
    )


def tokens_section(
    blocks: Sequence[Sequence[dict[str, Any]]], form: TermFrequency
) -> dict[str, Any]:
    """Return what :func:`html_page` needs for colored :func:`shown_tokens`, their numbers on
    pointing and focus.
    """
    functions = {"level_of": level_of, "readable": readable}
    return {
        "section": "tokens",
        "blocks": blocks,
        "form": form,
        "weights": WEIGHTS,
        "levels": LEVELS,
        **functions,
    }


def level_of(token: dict[str, Any], form: TermFrequency) -> int | None:
    """Return the level of a token's weight, None for the first token of a block, which has no
    weight.

    A level is half an octave, from -4 to 4: 0 about weight 1, 2 about 2, -4 for 1/4 and below.
    """
    if not token["tf"]:
        return None
    return round(max(-MAX_LEVEL, min(MAX_LEVEL, 2 * math.log2(max(token[WEIGHTS[form]], 1e-9)))))


def readable(text: str, *, mark_spaces: bool = False) -> str:
    """Make every character of a token visible and harmless; the result is never empty.

    A leading space before something visible stays unless ``mark_spaces`` is set.
    """
    shown = "".join(map(_readable_character, text))
    if text[:1] == " " and text[1:2] not in ("", " ") and not mark_spaces:
        return " " + shown[1:]
    return "◌" + shown if unicodedata.category(text[:1] or " ")[0] == "M" else shown or "∅"


def _readable_character(character: str) -> str:
    if character not in _SIGNS and unicodedata.category(character)[0] in "CZ":
        return (
            f"\\u{ord(character):04x}" if ord(character) < 0x10000 else f"\\U{ord(character):08x}"
        )
    return _SIGNS.get(character, character)
