"""Which tokens, frequencies and parts of words gain and lose weight.

All functions take the labels (rows with "tf" above 0) of :func:`~tfidf_tune.analysis._token_weights.weigh_blocks`. In
what they return, "mean idf", "idf, tokens" and "weight, FORM", one for each TF form, are means over tokens.
"""

import unicodedata
from collections.abc import Mapping

import numpy as np
import pandas as pd
import torch

from tfidf_tune.analysis._token_weights import WEIGHTS
from tfidf_tune.weighting import IGNORE_INDEX, TFIDFWeighting, inverse_document_frequency

START, CONTINUATION, OTHER = "starts a word", "continues a word", "no word (punctuation, spaces, end of text)"
_MOST_PIECES = 4  # longer words are counted with these
_BAND_EDGES = (10, 100, 1000)


def token_statistics(labels: pd.DataFrame) -> pd.DataFrame:
    """Summarize each token of the vocabulary over its occurrences as a label.

    Returns:
        pandas.DataFrame: "id", "count", "blocks" that contain it, "mean tf", "mean idf", "weight, FORM"; the most
            frequent token first, of equally frequent ones the lower id.
    """
    groups = labels.groupby("id")
    table = groups[["tf", "idf", *WEIGHTS.values()]].mean().rename(columns={"tf": "mean tf", "idf": "mean idf"})
    table["count"], table["blocks"] = groups.size(), groups["block"].nunique()
    return table.sort_values("count", ascending=False, kind="stable").reset_index()


def frequency_bands(labels: pd.DataFrame) -> pd.DataFrame:
    """Compare the 10 most frequent tokens of the text, the 11th to 100th, the 101st to 1000th and the rest.

    Returns:
        pandas.DataFrame: a row for each band with tokens: "frequency rank" ("11 to 100"), "% of tokens", "% of weight,
            FORM", "mean, FORM" and "median, FORM".
    """
    order = labels.groupby("id").size().sort_values(ascending=False, kind="stable").index
    rank = labels["id"].map(pd.Series(range(1, len(order) + 1), index=order))
    last = [*(edge for edge in _BAND_EDGES if edge < len(order)), len(order)]
    groups = labels.groupby(np.searchsorted(last, rank))
    table = pd.DataFrame({"frequency rank": [f"{a + 1} to {b}" for a, b in zip([0, *last], last, strict=False)]})
    table["% of tokens"] = 100 * groups.size() / len(labels)
    for form, column in WEIGHTS.items():
        table[f"% of weight, {form}"] = 100 * groups[column].sum() / labels[column].sum()
        table[f"mean, {form}"] = groups[column].mean()
        table[f"median, {form}"] = groups[column].median()
    return table


def part_statistics(labels: pd.DataFrame) -> pd.DataFrame:
    """Compare tokens that start a word, that continue one, and that belong to none, see :func:`mark_words`.

    Returns:
        pandas.DataFrame: a row for each part that occurs: "token", "% of tokens", "mean idf", "weight, FORM".
    """
    groups = labels.groupby("part", observed=True)
    table = groups[["idf", *WEIGHTS.values()]].mean().rename(columns={"idf": "mean idf"})
    table["% of tokens"] = 100 * groups.size() / len(labels)
    return table.rename_axis("token").reset_index()


def split_statistics(labels: pd.DataFrame) -> pd.DataFrame:
    """Compare words by their number of tokens, see :func:`mark_words`.

    Returns:
        pandas.DataFrame: indexed by the number of tokens, 4 standing for more too: "tokens of the word", "words", "idf,
            tokens", "idf, word", "weight, FORM".
    """
    groups = labels[labels["pieces"] > 0].groupby("pieces")
    table = groups[["idf", "idf, word", *WEIGHTS.values()]].mean().rename(columns={"idf": "idf, tokens"})
    table["tokens of the word"] = [f"{n} or more" if n == _MOST_PIECES else str(n) for n in table.index]
    table["words"] = groups["idf, word"].count()
    return table


def mark_words(tokens: pd.DataFrame, texts: Mapping[int, str], num_batches: int) -> pd.DataFrame:
    """Find the words in a text and the IDF that each would have if it were one token.

    A word is a run of letters, digits and marks. A token belongs to one if, white space aside, it begins with such a
    character; it continues the word of the token before if no white space or other character stands between the two.
    Scripts without spaces between words therefore have long "words".

    Args:
        tokens (pandas.DataFrame): all tokens, see :func:`~tfidf_tune.analysis._token_weights.weigh_blocks`.
        texts (Mapping[int, str]): token id -> text.
        num_batches (int): mini-batches in the window.

    Returns:
        pandas.DataFrame: the tokens with "part" (START, CONTINUATION or OTHER), "pieces" (tokens of the word, at most
            4; 0 outside of words, and for the words at both ends of a block, which may be cut) and "idf, word" (over
            the same window, at the first token of each word that has pieces, otherwise NaN).
    """
    number, ids = pd.factorize(tokens["id"])
    distinct = [texts[token] for token in ids]
    in_word, is_spaced, is_open = np.array(
        [
            (_is_word_character(text.lstrip()[:1]), text[:1].isspace(), _is_word_character(text[-1:]))
            for text in distinct
        ]
    )[number].T
    continues = in_word & ~is_spaced & np.roll(is_open, 1) & (tokens["tf"] > 0).to_numpy()
    first = np.flatnonzero(~continues)  # of each word, and every token that belongs to none
    num_pieces = np.diff(first, append=len(tokens))
    block_size = int((tokens["block"] == tokens["block"].iloc[0]).sum())
    is_complete = in_word[first] & (first % block_size > 0) & (first % block_size + num_pieces < block_size)
    joined = np.add.reduceat(np.array(distinct, dtype=object)[number], first)[is_complete]
    words = np.full(len(tokens), IGNORE_INDEX)
    words[first[is_complete]] = pd.factorize(np.array([word.strip() for word in joined], dtype=object))[0]
    part = np.select([continues, in_word], [CONTINUATION, START], OTHER)
    return tokens.assign(
        part=pd.Categorical(part, [START, CONTINUATION, OTHER]),
        pieces=np.repeat(np.where(is_complete, num_pieces.clip(max=_MOST_PIECES), 0), num_pieces),
        **{"idf, word": _word_idf(tokens, words, block_size, num_batches)},
    )


def _word_idf(tokens: pd.DataFrame, words: np.ndarray, block_size: int, num_batches: int) -> np.ndarray:
    """Compute the IDF of words, with the blocks passing through the window in the same mini-batches."""
    rows_of_steps = tokens.groupby("step").indices
    weighting = TFIDFWeighting(num_batches=min(num_batches, len(rows_of_steps)))
    idf = np.full(len(words), np.nan)
    for _, rows in sorted(rows_of_steps.items()):
        labels = torch.from_numpy(words[rows].reshape(-1, block_size))
        weighting(labels, vocab_size=max(1, int(words.max()) + 1))
        frequency = weighting.window.document_frequency(labels)
        idf[rows] = inverse_document_frequency(frequency, weighting.window.num_documents).flatten()
    return np.where(words == IGNORE_INDEX, np.nan, idf)


def _is_word_character(character: str) -> bool:
    # The replacement character is part of a letter whose bytes are several tokens.
    return character == "\ufffd" or (character != "" and unicodedata.category(character)[0] in "LNM")
