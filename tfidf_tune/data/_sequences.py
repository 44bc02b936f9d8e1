"""Tokenized data sets on disk: blocks of equal length, and sequences of different lengths."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from tfidf_tune.data._cache import cached_folder
from tfidf_tune.data._tokenizer import TokenArray

IGNORED = -100

Counts = dict[str, int]
_COUNTS = ("num_documents", "num_cut", "num_cut_targets", "num_left_out")


class TextBlocksDataset(Dataset[dict[str, list[int]]]):
    """Blocks of token ids as a map-style data set.

    An item is ``{"tokens": list[int], "labels": list[int]}`` with ``block_size`` ids each. The labels equal the tokens:
    ``agree_on_step`` shifts them.

    Args:
        blocks (TokenArray): int32 of shape ``[num_blocks, block_size]``, an attribute; may be memory-mapped.
        num_documents (int | None): documents that they were made of, an attribute. Default: None, not known
    """

    def __init__(self, blocks: TokenArray, num_documents: int | None = None) -> None:
        self.blocks = blocks
        self.num_documents = num_documents
        self.block_size: int = blocks.shape[1]

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        tokens: list[int] = self.blocks[index].tolist()
        return {"tokens": tokens, "labels": tokens.copy()}


class SequenceDataset(Dataset[dict[str, list[int]]]):
    """Sequences of different lengths as a map-style data set: documents, or prompts with their targets.

    An item is ``{"tokens": list[int], "labels": list[int]}``. Labels are the tokens, -100 in a prompt:
    ``agree_on_step`` shifts them.

    Args:
        tokens (TokenArray): int32 ids of all sequences, one after the other; may be memory-mapped.
        spans (npt.NDArray[np.int64]): shape ``[num_sequences, 3]``: where in ``tokens`` a sequence starts, where its
            labels start, and where it ends.
        counts (Counts): values of the attributes.

    Attributes:
        num_documents (int): documents or rows of the source.
        num_cut (int): documents that were cut into several sequences, or examples whose prompt was cut.
        num_cut_targets (int): examples whose target was cut.
        num_left_out (int): pieces of one token, or rows that gave no example.
    """

    def __init__(self, tokens: TokenArray, spans: npt.NDArray[np.int64], counts: Counts) -> None:
        self._tokens = tokens
        self._spans = spans
        self.num_documents, self.num_cut, self.num_cut_targets, self.num_left_out = (counts[name] for name in _COUNTS)

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all sequences, prompts included."""
        return len(self._tokens)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        start, label_start, end = self._spans[index]
        tokens: list[int] = self._tokens[start:end].tolist()
        num_prompt = label_start - start
        return {"tokens": tokens, "labels": [IGNORED] * num_prompt + tokens[num_prompt:]}


def cached_sequences(
    cache_dir: str | None,
    settings: dict[str, Any],
    make_sequences: Callable[[Counts], Iterator[tuple[TokenArray, int]]],
) -> SequenceDataset:
    """Return the sequences for ``settings`` from the cache; if necessary, tokenize them.

    ``make_sequences`` yields at least one pair of int32 ids ``[num_tokens]`` and how many of them are the prompt, and
    increases the counts that it is given.
    """

    def build(folder: Path) -> Counts:
        counts = dict.fromkeys(_COUNTS, 0)
        spans: list[tuple[int, int, int]] = []
        start = 0
        with (folder / "tokens.int32").open("wb") as file:
            for ids, num_prompt in make_sequences(counts):
                file.write(ids.tobytes())
                spans.append((start, start + num_prompt, start + len(ids)))
                start += len(ids)
        np.save(folder / "spans.npy", np.array(spans, dtype=np.int64))
        return counts

    folder, counts = cached_folder(cache_dir, settings, build)
    tokens = np.memmap(folder / "tokens.int32", dtype=np.int32, mode="r")
    return SequenceDataset(tokens, np.load(folder / "spans.npy"), counts)
