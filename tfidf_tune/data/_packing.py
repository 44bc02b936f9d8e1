"""Packed rows: several documents in one row, each with its own attention, positions and weights."""

from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tfidf_tune.data._sequences import IGNORED
from tfidf_tune.data._tokenizer import TextTokenizer

_CPU = torch.device("cpu")


class PackedBatch(TypedDict):
    """What a model and a loss need to treat each document of a row as a row of its own.

    Attributes:
        tokens (Tensor): int64 ``[b, s]``.
        labels (Tensor): int64 ``[b, s]``, not yet shifted; -100 where ignored and for each document's first token.
        document_ids (Tensor): int64 ``[b, s]``, counted from 0 in each row; the padding has an id too.
        input_pos (Tensor): int64 ``[b, s]``, positions from 0 in each document.
        mask (Any): True where attended to, bool ``[b, s, s]``, or a ``BlockMask`` where flex attention is used.
    """

    tokens: Tensor
    labels: Tensor
    document_ids: Tensor
    input_pos: Tensor
    mask: Any


def is_packed(dataset: Dataset[Any]) -> bool:
    """Return whether a data set is torchtune's ``PackedDataset``, or a ``ConcatDataset`` of such."""
    from torchtune.datasets import ConcatDataset, PackedDataset

    return isinstance(dataset, PackedDataset) or (isinstance(dataset, ConcatDataset) and dataset.packed)


def pack(dataset: Dataset[dict[str, list[int]]], tokenizer: TextTokenizer) -> Dataset[dict[str, Any]]:
    """Pack documents in their order into rows of the tokenizer's ``max_seq_len`` tokens.

    Args:
        dataset (Dataset[dict[str, list[int]]]): map-style, of ``tokens`` and ``labels``; none longer than a row.
        tokenizer (TextTokenizer): gives the length of a row, as it does for torchtune's own data sets.

    Returns:
        Dataset[dict[str, Any]]: torchtune's ``PackedDataset``, all rows in memory.

    Raises:
        ValueError: If the tokenizer has no ``max_seq_len``.
    """
    from torchtune.datasets import PackedDataset

    if tokenizer.max_seq_len is None:
        raise ValueError("packed is true, but the tokenizer has no max_seq_len, the length of a packed row: set it")
    rows: Dataset[dict[str, Any]] = PackedDataset(dataset, max_seq_len=tokenizer.max_seq_len)
    return rows


def collate_packed(batch: Sequence[dict[str, Tensor]], *, device: torch.device = _CPU) -> PackedBatch:
    """Collate the rows of a ``PackedDataset`` so that each document counts as a row of its own.

    Unlike torchtune's ``padded_collate_packed``, it

    - ignores the label of each document's first token; otherwise, once labels are shifted, the last token of the
      previous document would be trained to predict it;
    - counts positions from 0 in each document. In torchtune's ``input_pos`` a document that is split over rows
      continues counting, and starts again in the middle of a row if it is longer than a row;
    - makes a mask for the device of the run, not for CUDA whenever CUDA is available.

    Args:
        batch (Sequence[dict[str, Tensor]]): rows of one length ``s``: ``tokens`` and ``labels``, int64 ``[s]``, labels
            not shifted; and ``seq_lens``, int64 ``[num_documents]``, tokens of each document, of the padding last.
        device (torch.device): where the model runs. Default: the CPU.

    Returns:
        PackedBatch: the batch; on the CPU except for a ``BlockMask``.
    """
    from torchtune.modules.attention_utils import create_block_causal_mask, packed_block_causal_mask

    seq_lens = [row["seq_lens"] for row in batch]
    input_pos = torch.stack([_positions(lengths) for lengths in seq_lens])
    return {
        "tokens": torch.stack([row["tokens"] for row in batch]),
        "labels": torch.stack([row["labels"] for row in batch]).masked_fill(input_pos == 0, IGNORED),
        "document_ids": torch.stack([torch.repeat_interleave(lengths) for lengths in seq_lens]),
        "input_pos": input_pos,
        "mask": packed_block_causal_mask(seq_lens) if device.type == "cuda" else create_block_causal_mask(seq_lens),
    }


def unpadded_tokens(row: dict[str, Tensor]) -> Tensor:
    """Return the tokens of a row of a ``PackedDataset``, int64 ``[s]``, with -100 in place of padding.

    torchtune's ``input_pos`` distinguishes padding from a document without labels: positions of padding continue those
    of the last document, while every other document but the first of a row starts from 0.
    """
    tokens: Tensor = row["tokens"]
    start = len(tokens) - int(row["seq_lens"][-1])
    if not 0 < start < len(tokens) or row["input_pos"][start] == 0:
        return tokens
    return torch.cat([tokens[:start], torch.full_like(tokens[start:], IGNORED)])


def _positions(lengths: Tensor) -> Tensor:
    """Count from 0 in each document: int64 ``[num_documents]`` -> ``[sum of the lengths]``."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) - torch.repeat_interleave(starts, lengths)
