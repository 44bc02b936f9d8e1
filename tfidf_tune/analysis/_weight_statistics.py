"""Which tokens, frequencies and parts of words gain and lose weight.

A word is a run of letters, digits and marks. A token belongs to one if, white space aside, it begins with such a
character; it continues the word of the token before if no white space or other character stands between the two.
Scripts without spaces between words therefore have long "words".

In all data frames the columns "mean idf" and "weight, FORM", one for each TF form, are means over tokens.
"""

import unicodedata
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from tfidf_tune.analysis._token_weights import TERM_FREQUENCIES, IntArray, WeightedBlocks, idf_of
from tfidf_tune.weighting import IGNORE_INDEX, TermFrequency, TFIDFWeighting

if TYPE_CHECKING:
    from tfidf_tune.data import HFTokenizer

START, CONTINUATION, OTHER = "starts a word", "continues a word", "no word (punctuation, spaces, end of text)"
MOST_PIECES = 4  # longer words are counted with these
WEIGHTS = {form: f"weight, {form}" for form in TERM_FREQUENCIES}
_BAND_EDGES = (10, 100, 1000)

BoolArray = npt.NDArray[np.bool_]


def position_table(weighted: WeightedBlocks) -> pd.DataFrame:
    """Return a row for each label position: "id", "block", "tf" (count in the block), "mean idf", "weight, FORM"."""
    columns: dict[str, npt.NDArray[np.generic]] = {
        "id": weighted.labels.ravel(),
        "block": np.repeat(np.arange(len(weighted.labels)), weighted.labels.shape[1]),
        "tf": weighted.counts.ravel(),
        "mean idf": weighted.idf.ravel().astype(np.float64),
    }
    weights = {WEIGHTS[form]: values.ravel().astype(np.float64) for form, values in weighted.weights.items()}
    return pd.DataFrame(columns | weights)


def token_statistics(positions: pd.DataFrame) -> pd.DataFrame:
    """Summarize each token of the vocabulary over its occurrences as a label.

    Returns:
        pandas.DataFrame: "id", "count", "blocks" that contain it, "mean tf", "mean idf", "weight, FORM"; the most
            frequent token first, of equally frequent ones the lower id.
    """
    groups = positions.groupby("id")
    table = groups.mean().drop(columns="block").rename(columns={"tf": "mean tf"})
    table.insert(0, "count", groups.size())
    table.insert(1, "blocks", groups["block"].nunique())
    return table.sort_values("count", ascending=False, kind="stable").reset_index()


def most_weighted(
    statistics: pd.DataFrame, form: TermFrequency, *, min_count: int, limit: int, up: bool
) -> pd.DataFrame:
    """Return the tokens with the highest mean weights above 1, or the lowest below 1; of equal ones the more frequent.

    Args:
        statistics (pandas.DataFrame): of all tokens, see :func:`token_statistics`.
        form (TermFrequency): the TF form.
        min_count (int): tokens that occur less often are left out.
        limit (int): at most so many.
        up (bool): whether to return the highest.
    """
    weight = statistics[WEIGHTS[form]]
    chosen = statistics[(statistics["count"] >= min_count) & ((weight > 1) if up else (weight < 1))]
    return chosen.sort_values(WEIGHTS[form], ascending=not up, kind="stable")[:limit]


def frequency_bands(positions: pd.DataFrame) -> pd.DataFrame:
    """Compare the 10 most frequent tokens of the text, the 11th to 100th, the 101st to 1000th and the rest.

    Returns:
        pandas.DataFrame: a row for each band with tokens: "frequency rank" ("11 to 100"), "% of tokens", "% of weight,
            FORM", "mean, FORM" and "median, FORM".
    """
    order = token_statistics(positions)["id"]
    rank = positions["id"].map(pd.Series(range(1, len(order) + 1), index=order))
    first = [1, *(edge + 1 for edge in _BAND_EDGES if edge < len(order))]
    last = [*(edge for edge in _BAND_EDGES if edge < len(order)), len(order)]
    groups = positions.groupby(np.searchsorted(last, rank))
    table = pd.DataFrame({"frequency rank": [f"{a} to {b}" for a, b in zip(first, last, strict=True)]})
    table["% of tokens"] = 100 * groups.size() / len(positions)
    for form, column in WEIGHTS.items():
        table[f"% of weight, {form}"] = 100 * groups[column].sum() / positions[column].sum()
        table[f"mean, {form}"] = groups[column].mean()
        table[f"median, {form}"] = groups[column].median()
    return table


def part_statistics(weighted: WeightedBlocks, positions: pd.DataFrame, texts: Mapping[int, str]) -> pd.DataFrame:
    """Compare tokens that start a word, that continue one, and that belong to none.

    Returns:
        pandas.DataFrame: a row for each part that occurs: "token", "% of tokens", "mean idf", "weight, FORM".
    """
    starts, continues = (part[:, 1:].ravel() for part in word_parts(weighted.blocks, texts))
    parts = np.select([starts, continues], [START, CONTINUATION], OTHER)
    groups = positions.groupby(parts)
    table = groups[["mean idf", *WEIGHTS.values()]].mean()
    table.insert(0, "% of tokens", 100 * groups.size() / len(positions))
    known = [part for part in (START, CONTINUATION, OTHER) if part in table.index]
    return table.loc[known].rename_axis("token").reset_index()


def split_statistics(weighted: WeightedBlocks, positions: pd.DataFrame, texts: Mapping[int, str]) -> pd.DataFrame:
    """Compare words by their number of tokens; those that a block's border may cut are left out.

    Returns:
        pandas.DataFrame: indexed by the number of tokens, ``MOST_PIECES`` standing for more too: "tokens of the word",
            "words", "idf, tokens", "idf, word" (as if the word were one token, over the same window), "weight, FORM".
    """
    words, num_pieces = _whole_words(weighted.blocks, texts)
    pieces = positions.assign(pieces=np.minimum(num_pieces.ravel(), MOST_PIECES), word=words.ravel() != IGNORE_INDEX)
    pieces["idf, word"] = _word_idf(weighted, words).ravel().astype(np.float64)
    pieces = pieces[pieces["pieces"] > 0]
    groups, of_words = pieces.groupby("pieces"), pieces[pieces["word"]].groupby("pieces")
    table = groups[["mean idf", *WEIGHTS.values()]].mean().rename(columns={"mean idf": "idf, tokens"})
    names = [f"{count} or more" if count == MOST_PIECES else str(count) for count in table.index]
    table.insert(0, "tokens of the word", names)
    table.insert(1, "words", of_words.size())
    table["idf, word"] = of_words["idf, word"].mean()
    return table


def token_texts(tokenizer: "HFTokenizer", token_ids: IntArray) -> dict[int, str]:
    """Decode tokens one by one, with their leading space; a part of a character is the replacement character.

    Args:
        tokenizer (HFTokenizer): the tokenizer.
        token_ids (IntArray): ids of any shape.

    Returns:
        dict[int, str]: distinct id -> text.
    """
    # Behind another token: decoders drop the space that SentencePiece puts before the first one.
    anchor = tokenizer.encode("a", add_bos=False, add_eos=False)
    before = tokenizer.decode(anchor, skip_special_tokens=False)
    texts = {}
    for token in np.unique(token_ids).tolist():
        text = tokenizer.decode([*anchor, token], skip_special_tokens=False)
        alone = tokenizer.decode([token], skip_special_tokens=False)
        texts[token] = text[len(before) :] if text.startswith(before) else alone
    return texts


def word_parts(blocks: IntArray, texts: Mapping[int, str]) -> tuple[BoolArray, BoolArray]:
    """Find the tokens that start and that continue a word.

    Args:
        blocks (IntArray): ``[n, s]`` token ids.
        texts (Mapping[int, str]): token id -> text.

    Returns:
        tuple[BoolArray, BoolArray]: starts and continuations, bool ``[n, s]``; the first token of a block counts as a
            start.
    """
    ids, terms = np.unique(blocks, return_inverse=True)
    terms = terms.reshape(blocks.shape)
    of_ids = [texts[token] for token in ids.tolist()]
    in_word = np.array([_is_word_character(text.lstrip()[:1]) for text in of_ids])[terms]
    spaced = np.array([text[:1].isspace() for text in of_ids])[terms]
    open_ended = np.array([_is_word_character(text[-1:]) for text in of_ids])[terms]
    continues = np.zeros_like(in_word)
    continues[:, 1:] = in_word[:, 1:] & ~spaced[:, 1:] & open_ended[:, :-1]
    return in_word & ~continues, continues


def _whole_words(blocks: IntArray, texts: Mapping[int, str]) -> tuple[IntArray, IntArray]:
    """Return the number of its word at the first piece of each, and its pieces at each piece, both ``[n, s - 1]``.

    Elsewhere they are -100 and 0. The words at either end of a block may be cut and are left out.
    """
    starts, continues = word_parts(blocks, texts)
    words = np.full(blocks.shape, IGNORE_INDEX, dtype=np.int64)
    num_pieces = np.zeros(blocks.shape, dtype=np.int64)
    numbers: dict[str, int] = {}
    for row, column in np.argwhere(starts).tolist():
        end = column + 1
        while end < blocks.shape[1] and continues[row, end]:
            end += 1
        if column > 0 and end < blocks.shape[1]:
            word = "".join(texts[token] for token in blocks[row, column:end].tolist()).strip()
            words[row, column] = numbers.setdefault(word, len(numbers))
            num_pieces[row, column:end] = end - column
    return words[:, 1:], num_pieces[:, 1:]


def _word_idf(weighted: WeightedBlocks, words: IntArray) -> npt.NDArray[np.float32]:
    """Compute the IDF of whole words, with the blocks passing through the window in the same mini-batches."""
    num_steps = int(weighted.steps.max())
    weighting = TFIDFWeighting(num_batches=min(weighted.num_batches, num_steps))
    frequency = np.zeros(words.shape, dtype=np.int32)
    num_documents = np.zeros(len(words), dtype=np.int64)
    vocab_size = max(1, int(words.max()) + 1)
    for step in range(1, num_steps + 1):
        rows = np.flatnonzero(weighted.steps == step)
        labels = torch.from_numpy(words[rows])
        weighting(labels, vocab_size=vocab_size)
        frequency[rows] = weighting.window.document_frequency(labels).numpy()
        num_documents[rows] = int(weighting.window.num_documents)
    return idf_of(frequency, num_documents)


def _is_word_character(character: str) -> bool:
    # The replacement character is part of a letter whose bytes are several tokens.
    return character == "\ufffd" or unicodedata.category(character)[0] in "LNM" if character else False
