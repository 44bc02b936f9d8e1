"""How words fare that a tokenizer splits: the paper's open question on subwords.

A word is a run of letters, digits and marks. A token belongs to one when, white space aside, it begins with such a
character; it continues the word of the token before when no white space or other character stands between the two.
Scripts that put no space between words therefore have long "words".
"""

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import torch

from tfidf_tune.analysis._token_weights import IntArray, WeightedBlocks, idf_of
from tfidf_tune.weighting import IGNORE_INDEX, TermFrequency, TFIDFWeighting

if TYPE_CHECKING:
    from tfidf_tune.data import HFTokenizer

WordPart = Literal["start", "continuation", "other"]
_PARTS: tuple[WordPart, ...] = ("start", "continuation", "other")
MOST_PIECES = 4  # longer words are counted with these

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class PartStatistics:
    """Tokens that start a word, that continue one, or that belong to none.

    Args:
        part (WordPart): which.
        token_share (float): fraction of the label tokens.
        mean_idf (float): mean over the tokens.
        mean_weights (Mapping[TermFrequency, float]): TF form -> mean weight.
    """

    part: WordPart
    token_share: float
    mean_idf: float
    mean_weights: Mapping[TermFrequency, float]


@dataclass(frozen=True)
class SplitStatistics:
    """Words of one number of pieces; those that a block's border may cut are left out.

    Args:
        num_pieces (int): tokens of the word; the highest number stands for longer words too.
        num_words (int): such words in the text, repeated ones included.
        piece_idf (float): mean IDF of their tokens.
        word_idf (float): mean IDF that they would have as whole words, over the same window.
        mean_weights (Mapping[TermFrequency, float]): TF form -> mean weight of their tokens.
    """

    num_pieces: int
    num_words: int
    piece_idf: float
    word_idf: float
    mean_weights: Mapping[TermFrequency, float]


def token_texts(tokenizer: "HFTokenizer", token_ids: IntArray) -> dict[int, str]:
    """Decode tokens one by one, their leading space kept.

    Args:
        tokenizer (HFTokenizer): the tokenizer.
        token_ids (IntArray): ids of any shape.

    Returns:
        dict[int, str]: distinct id -> text; a part of a character is the replacement character.
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
        texts (Mapping[int, str]): token id -> text, see :func:`token_texts`.

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


def part_statistics(weighted: WeightedBlocks, texts: Mapping[int, str]) -> list[PartStatistics]:
    """Compare tokens that start a word with those that continue one and those that belong to none.

    Args:
        weighted (WeightedBlocks): the weighted blocks.
        texts (Mapping[int, str]): token id -> text.

    Returns:
        list[PartStatistics]: parts that occur.
    """
    starts, continues = (part[:, 1:] for part in word_parts(weighted.blocks, texts))
    masks = zip(_PARTS, (starts, continues, ~starts & ~continues), strict=True)
    return [
        PartStatistics(
            part=part,
            token_share=float(mask.mean()),
            mean_idf=float(weighted.idf[mask].mean(dtype=np.float64)),
            mean_weights={
                form: float(values[mask].mean(dtype=np.float64)) for form, values in weighted.weights.items()
            },
        )
        for part, mask in masks
        if mask.any()
    ]


def split_statistics(weighted: WeightedBlocks, texts: Mapping[int, str]) -> list[SplitStatistics]:
    """Compare words by their number of pieces, and the IDF of the pieces with that of the word.

    Args:
        weighted (WeightedBlocks): the weighted blocks.
        texts (Mapping[int, str]): token id -> text.

    Returns:
        list[SplitStatistics]: fewest pieces first.
    """
    words, num_pieces = _whole_words(weighted.blocks, texts)
    word_idf = _word_idf(weighted, words)
    is_first = words != IGNORE_INDEX
    lengths = np.minimum(num_pieces, MOST_PIECES)
    statistics = []
    for length in range(1, MOST_PIECES + 1):
        pieces = lengths == length
        first = pieces & is_first
        if first.any():
            statistics.append(
                SplitStatistics(
                    num_pieces=length,
                    num_words=int(first.sum()),
                    piece_idf=float(weighted.idf[pieces].mean(dtype=np.float64)),
                    word_idf=float(word_idf[first].mean(dtype=np.float64)),
                    mean_weights={
                        form: float(values[pieces].mean(dtype=np.float64)) for form, values in weighted.weights.items()
                    },
                )
            )
    return statistics


def _whole_words(blocks: IntArray, texts: Mapping[int, str]) -> tuple[IntArray, IntArray]:
    """The number of its word at the first piece of each word, and its pieces at each piece, both ``[n, s - 1]``.

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
    """IDF of whole words, with the blocks passing through the window in the same mini-batches."""
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
    # The replacement character is a part of one: bytes of a letter that the tokenizer does not have whole.
    return character == "\ufffd" or unicodedata.category(character)[0] in "LNM" if character else False
