"""The weights and texts of tokens: blocks of a text pass through the weighting as they do in training."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch.utils.data import DistributedSampler

from tfidf_tune.weighting import (
    IGNORE_INDEX,
    TermFrequency,
    TFIDFWeighting,
    distinct_terms,
    inverse_document_frequency,
    shift_labels,
)

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
    """Compute the weights of every label token in the first epoch of a training run.

    The blocks go through a :class:`~tfidf_tune.weighting.TFIDFWeighting` of each TF form in mini-batches, in the
    order of the recipes' sampler. As in training, an incomplete last mini-batch is left out; a text that does not fill
    one is a mini-batch of its own.

    ``blocks`` are ``[n, s]`` token ids, ``num_batches`` mini-batches in the window, the current one included. Returns a
    row for each token, in the order of the text: "block" (its number in the text, from 0), "step" (mini-batch in which
    the block was weighted, from 1), "documents" (sequences in the window at that step, its own mini-batch included),
    "id", "tf" (how often the token is a label of its block), "df" (sequences of the window that contain it), "idf", and
    the column :data:`WEIGHTS` of each TF form. The first token of a block is never a label: its "tf" is 0, and its
    "df", "idf" and weights have no meaning.
    """
    batches = _mini_batches(len(blocks), batch_size, shuffle, seed)
    longest = min(num_batches, len(batches))  # the rest of a longer window would stay empty
    weightings = {form: TFIDFWeighting(num_batches=longest, tf=form, max_weight=max_weight) for form in WEIGHTS}
    parts = []
    for step, rows in enumerate(batches, start=1):
        labels = shift_labels(torch.from_numpy(blocks[rows]).long())
        weights = {WEIGHTS[form]: weigh(labels, vocab_size=vocab_size) for form, weigh in weightings.items()}
        window = weightings["count"].window  # the same for all forms
        terms = distinct_terms(labels)
        frequency = window.document_frequency(labels)
        of_labels = {
            "tf": terms.counts[terms.positions] * (labels != IGNORE_INDEX),
            "df": frequency,
            "idf": inverse_document_frequency(frequency, window.num_documents).double(),
            **{name: values.double() for name, values in weights.items()},
        }
        shape = (len(rows), blocks.shape[1])
        documents = int(window.num_documents)
        of_blocks: dict[str, Any] = {"block": rows[:, None], "step": step, "documents": documents, "id": blocks[rows]}
        # The label at position i is token i + 1.
        parts.append(
            {name: np.broadcast_to(values, shape) for name, values in of_blocks.items()}
            | {name: values.roll(1, dims=-1).numpy() for name, values in of_labels.items()}
        )
    order = np.argsort(np.concatenate(batches))
    return pd.DataFrame({name: np.concatenate([part[name] for part in parts])[order].ravel() for name in parts[0]})


def frequency_bands(labels: pd.DataFrame) -> pd.DataFrame:
    """Compare the 10 most frequent tokens of the text, the 11th to 100th, the 101st to 1000th and the rest.

    ``labels`` are rows of :func:`weigh_blocks` with a "tf" above 0. Returns a row for each band with tokens: "frequency
    rank" ("11 to 100"), "% of tokens" and, for each TF form, "% of weight, FORM".
    """
    order = labels.groupby("id").size().sort_values(ascending=False, kind="stable").index
    rank = labels["id"].map(pd.Series(range(1, len(order) + 1), index=order))
    last = [*(edge for edge in _BAND_EDGES if edge < len(order)), len(order)]
    groups = labels.groupby(np.searchsorted(last, rank))
    table = pd.DataFrame({"frequency rank": [f"{a + 1} to {b}" for a, b in zip([0, *last], last, strict=False)]})
    table["% of tokens"] = 100 * groups.size() / len(labels)
    for form, column in WEIGHTS.items():
        table[f"% of weight, {form}"] = 100 * groups[column].sum() / labels[column].sum()
    return table


def token_texts(tokenizer: "HFTokenizer", token_ids: IntArray) -> dict[int, str]:
    """Decode distinct tokens, with their leading space; a part of a character is the replacement character."""
    # Decode each token after another one: decoders drop the space that SentencePiece puts before the first token.
    anchor = tokenizer.encode("a", add_bos=False, add_eos=False)
    before = tokenizer.decode(anchor, skip_special_tokens=False)
    return {
        token: tokenizer.decode([*anchor, token], skip_special_tokens=False)[len(before) :]
        for token in np.unique(token_ids).tolist()
    }


def shown_tokens(
    tokens: pd.DataFrame, block: int, texts: Mapping[int, str], decode: Callable[[list[int]], str]
) -> list[dict[str, Any]]:
    """Return the rows of one block as dictionaries with their "text".

    If several tokens make up a character, the last of them has it as its text.
    """
    rows = tokens[tokens["block"] == block]
    ids = rows["id"].tolist()
    in_context = [texts[token] for token in ids]
    start = 0
    while start < len(ids):
        end = start + 1
        if _REPLACEMENT in in_context[start]:
            for last in range(start + 1, min(start + _MOST_PARTS, len(ids))):
                if _REPLACEMENT not in (character := decode(ids[start : last + 1])):
                    in_context[last], end = character, last + 1
                    break
        start = end
    return [row | {"text": text} for row, text in zip(rows.to_dict("records"), in_context, strict=True)]


def _mini_batches(num_blocks: int, batch_size: int, shuffle: bool, seed: int) -> list[IntArray]:
    """Return the numbers of the blocks in each mini-batch of the first epoch."""
    numbers: Any = range(num_blocks)
    sampler: Any = DistributedSampler(numbers, num_replicas=1, rank=0, shuffle=shuffle, seed=seed, drop_last=True)
    order = np.array(list(sampler))
    num_complete = num_blocks // batch_size
    return np.split(order[: num_complete * batch_size], num_complete) if num_complete else [order]
