"""The weights of a text's tokens: its blocks go through the weighting as they do in training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DistributedSampler, TensorDataset

from tfidf_tune.weighting import TermFrequency as TermFrequency  # also for reports
from tfidf_tune.weighting import TFIDFWeighting, distinct_terms, inverse_document_frequency, shift_labels

if TYPE_CHECKING:
    from tfidf_tune.data import TextTokenizer

TERM_FREQUENCIES: tuple[TermFrequency, ...] = get_args(TermFrequency)

IntArray = npt.NDArray[np.integer]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class WeightedBlocks:
    """Blocks of token ids with the TF-IDF weight of every label token, under each TF form.

    Labels are shifted as in training: the first token of a block is only ever an input, so it has no weight, and
    position i of all ``[n, s - 1]`` arrays describes token i + 1 of its block.

    Args:
        indices (IntArray): ``[n]``, the number of each block in the text, from 0, ascending.
        blocks (IntArray): ``[n, s]`` token ids.
        steps (IntArray): ``[n]``, the mini-batch of the epoch in which each block was weighted, from 1.
        num_documents (IntArray): ``[n]``, N: sequences in the window at that step, its own mini-batch included.
        counts (IntArray): ``[n, s - 1]``, how often the token is a label of its block.
        document_frequency (IntArray): ``[n, s - 1]``, how many of the N sequences contain the token.
        idf (FloatArray): float32 ``[n, s - 1]``.
        weights (Mapping[TermFrequency, FloatArray]): TF form -> float32 ``[n, s - 1]``, mean 1 over a mini-batch.
        num_batches (int): mini-batches in a full window.
    """

    indices: IntArray
    blocks: IntArray
    steps: IntArray
    num_documents: IntArray
    counts: IntArray
    document_frequency: IntArray
    idf: FloatArray
    weights: Mapping[TermFrequency, FloatArray]
    num_batches: int

    @property
    def labels(self) -> IntArray:
        """``[n, s - 1]`` token ids that have a weight."""
        return self.blocks[:, 1:]


def read_blocks(
    tokenizer: "TextTokenizer",
    sources: Sequence[str],
    *,
    block_size: int = 256,
    num_blocks: int | None = None,
    column: str = "text",
) -> IntArray:
    """Tokenize the documents of sources and cut them into blocks; EOS ends each document.

    Args:
        tokenizer (TextTokenizer): the tokenizer.
        sources (Sequence[str]): files, folders or ``embedded``, see :func:`tfidf_tune.data.load_documents`.
        block_size (int): tokens in a block, at least 2. Default: 256
        num_blocks (int | None): at most so many blocks. Default: None, all
        column (str): the column that holds the text. Default: "text"

    Returns:
        IntArray: int32 ``[n, block_size]``.

    Raises:
        FileNotFoundError: If a source looks like a path and does not exist.
        ValueError: If a size is too small, a source cannot be read, or the text does not fill one block.
    """
    from tfidf_tune.data import load_documents, text_blocks

    if block_size < 2:
        raise ValueError(
            f"block_size is {block_size}: it must be 2 or more, because the first token of a block is never a label"
        )
    if num_blocks is not None and num_blocks < 1:
        raise ValueError(f"num_blocks is {num_blocks}: it must be 1 or more; leave it out for all blocks")
    documents = [load_documents(source, column=column) for source in sources]  # raises for a missing file
    blocks = text_blocks(tokenizer, chain.from_iterable(documents), block_size, num_blocks, add_eos=True)
    if not len(blocks):
        raise ValueError(
            f"{', '.join(map(repr, sources))} has fewer tokens than one block of {block_size}: "
            "lower block_size, or name more text"
        )
    return blocks


def weigh_blocks(
    blocks: IntArray,
    *,
    vocab_size: int,
    batch_size: int = 8,
    num_batches: int = 16,
    max_weight: float | None = None,
    shuffle: bool = True,
    seed: int = 42,
) -> WeightedBlocks:
    """Compute the weights of every label token in the first epoch of a training run.

    The blocks go through a :class:`~tfidf_tune.weighting.TFIDFWeighting` of each TF form in mini-batches, in the
    order of the recipes' sampler. As in training, an incomplete last mini-batch is left out; a text that does not fill
    one is a mini-batch of its own.

    Args:
        blocks (IntArray): ``[n, s]`` token ids.
        vocab_size (int): number of tokens of the tokenizer.
        batch_size (int): sequences in a mini-batch. Default: 8
        num_batches (int): mini-batches in the window, the current one included. Default: 16
        max_weight (float | None): largest weight, at least 1. Default: None, no cap
        shuffle (bool): shuffle the blocks, as the recipes do by default. Default: True
        seed (int): of the shuffling. Default: 42

    Returns:
        WeightedBlocks: the weighted blocks in the order of the text.

    Raises:
        ValueError: If ``batch_size`` is less than 1, or the weighting refuses a setting.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: it must be 1 or more")
    batches = _mini_batches(len(blocks), batch_size, shuffle, seed)
    longest = min(num_batches, len(batches))  # the rest of a longer window would stay empty
    weightings = {
        form: TFIDFWeighting(num_batches=longest, tf=form, max_weight=max_weight) for form in TERM_FREQUENCIES
    }
    counts, frequencies, num_documents = [], [], []
    weights: dict[TermFrequency, list[FloatArray]] = {form: [] for form in TERM_FREQUENCIES}
    for rows in batches:
        tokens = torch.from_numpy(blocks[rows]).long()
        labels = shift_labels(tokens)
        for form, weighting in weightings.items():
            weights[form].append(weighting(labels, vocab_size=vocab_size)[:, :-1].numpy())
        window = weightings["count"].window  # the same for all forms
        terms = distinct_terms(tokens[:, 1:])
        counts.append(terms.counts[terms.positions].int().numpy())
        frequencies.append(window.document_frequency(tokens[:, 1:]).numpy())
        num_documents.append(np.full(len(rows), int(window.num_documents)))

    visited = np.concatenate(batches)
    steps = np.repeat(np.arange(1, len(batches) + 1), [len(rows) for rows in batches])
    order = np.argsort(visited)
    document_frequency = np.concatenate(frequencies)[order]
    documents = np.concatenate(num_documents)[order]
    return WeightedBlocks(
        indices=visited[order],
        blocks=blocks[visited[order]],
        steps=steps[order],
        num_documents=documents,
        counts=np.concatenate(counts)[order],
        document_frequency=document_frequency,
        idf=idf_of(document_frequency, documents),
        weights={form: np.concatenate(parts)[order] for form, parts in weights.items()},
        num_batches=num_batches,
    )


def idf_of(document_frequency: IntArray, num_documents: IntArray) -> FloatArray:
    """Compute the weighting's IDF, float32 ``[n, s]``, of document frequencies ``[n, s]`` among ``[n]`` documents."""
    documents = torch.from_numpy(num_documents)[:, None]
    idf: FloatArray = inverse_document_frequency(torch.from_numpy(document_frequency), documents).numpy()
    return idf


def typical_blocks(weighted: WeightedBlocks, limit: int) -> list[int]:
    """Return the rows of the first blocks with a full window, or of the latest mini-batches if it is never full."""
    latest = int(weighted.steps.max())
    full = weighted.steps >= min(weighted.num_batches, latest)
    rows: list[int] = np.flatnonzero(full)[:limit].tolist()
    return rows


def _mini_batches(num_blocks: int, batch_size: int, shuffle: bool, seed: int) -> list[IntArray]:
    """Return the rows of each mini-batch of the first epoch."""
    rows = TensorDataset(torch.arange(num_blocks))
    sampler: DistributedSampler[Any] = DistributedSampler(
        rows, num_replicas=1, rank=0, shuffle=shuffle, seed=seed, drop_last=True
    )
    order = np.array(list(sampler))
    num_whole = num_blocks // batch_size
    return np.split(order[: num_whole * batch_size], num_whole) if num_whole else [order]
