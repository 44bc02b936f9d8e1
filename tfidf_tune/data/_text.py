"""Plain text as documents of their own lengths, each a sequence: for fine-tuning on one's own text."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset
from torchtune.datasets import PackedDataset

from tfidf_tune.data._cache import cached_counts, cached_folder
from tfidf_tune.data._encoding import TextTokenizer, TokenArray, encode_texts, tokenizer_fingerprint
from tfidf_tune.data._packing import pack
from tfidf_tune.data._sft import opening_ids
from tfidf_tune.data._sources import load_documents, source_fingerprint
from tfidf_tune.data._text_blocks import block_sample

# Part of every cache key: raise it when a change of code changes the ids.
FORMAT_VERSION = 1

logger = logging.getLogger(__name__)


class TextDataset(Dataset[dict[str, list[int]]]):
    """Documents of varying length as a map-style data set.

    An item is ``{"tokens": list[int], "labels": list[int]}``, the labels equal to the tokens: the recipe shifts them.

    Args:
        tokens (TokenArray): int32 ids of all sequences, one after the other; may be memory-mapped.
        spans (npt.NDArray[np.int64]): shape ``[num_sequences, 2]``: where in ``tokens`` each starts and ends.
        num_documents (int): documents of the source.
        num_cut (int): of these, how many were cut into several sequences.
        num_left_out (int): pieces of one token, in which there is nothing to predict.

    Attributes:
        num_documents (int): as given.
        num_cut (int): as given.
        num_left_out (int): as given.
    """

    def __init__(
        self,
        tokens: TokenArray,
        spans: npt.NDArray[np.int64],
        *,
        num_documents: int,
        num_cut: int,
        num_left_out: int,
    ) -> None:
        self._tokens = tokens
        self._spans = spans
        self.num_documents = num_documents
        self.num_cut = num_cut
        self.num_left_out = num_left_out

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        start, end = self._spans[index]
        return block_sample(self._tokens[start:end])


def text_dataset(
    tokenizer: TextTokenizer,
    *,
    source: str,
    source_name: str | None = None,
    source_split: str = "train",
    source_column: str = "text",
    max_seq_len: int | None = None,
    add_bos: bool = True,
    add_eos: bool = True,
    packed: bool = False,
    cache_dir: str | None = None,
) -> TextDataset | PackedDataset:
    """Build a data set for fine-tuning on plain text in which each document is a sequence.

    A document of more than ``max_seq_len`` tokens is cut into pieces, each a sequence of its own; a last piece of one
    token, in which there is nothing to predict, is left out. A log line says how many there are. The ids are cached,
    so a second run starts at once.

    Args:
        tokenizer (TextTokenizer): the tokenizer.
        source (str): a local file or folder, ``embedded`` or a hub id, see :func:`load_documents`.
        source_name (str | None): configuration of a hub data set. Default: None
        source_split (str): split of a hub data set or of ``embedded``. Default: "train"
        source_column (str): the column that holds the text. Default: "text"
        max_seq_len (int | None): tokens in a sequence, BOS and EOS included. Default: None, the tokenizer's own.
        add_bos (bool): open each document by BOS, where the tokenizer has one, so that its first token is learnt too.
            Default: True
        add_eos (bool): end each document by EOS. Default: True
        packed (bool): put several documents into a row of the tokenizer's ``max_seq_len`` tokens. Default: False
        cache_dir (str | None): the cache. Default: ``$TFIDF_TUNE_CACHE`` or ``~/.cache/tfidf_tune``

    Returns:
        TextDataset | PackedDataset: the data set, as ``ds`` of a ``PackedDataset`` where it is packed.

    Raises:
        FileNotFoundError: If ``source`` looks like a path and nothing is there.
        ValueError: If ``max_seq_len`` is below 2, above the tokenizer's, or neither is set; if the source cannot be
            read or gives no sequence of two tokens.

    Example:
        >>> dataset = text_dataset(tokenizer, source="letters.jsonl", max_seq_len=512)
    """
    limit = _limit(tokenizer, max_seq_len)
    bos = opening_ids(tokenizer) if add_bos else []
    eos = [tokenizer.eos_id] if add_eos else []

    def build(folder: Path) -> dict[str, int]:
        documents = load_documents(source, name=source_name, split=source_split, column=source_column)
        return _write_sequences(folder, tokenizer, documents, bos, eos, limit, source)

    settings: dict[str, Any] = {
        "kind": "text",
        "format_version": FORMAT_VERSION,
        "max_seq_len": limit,
        "special_ids": [bos, eos],
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer),
        "source_fingerprint": source_fingerprint(source, source_name, source_split, source_column),
    }
    folder = cached_folder(cache_dir, settings, build)
    dataset = TextDataset(
        np.memmap(folder / "tokens.int32", dtype=np.int32, mode="r"),
        np.load(folder / "spans.npy"),
        **cached_counts(folder),
    )
    logger.log(
        logging.WARNING if dataset.num_cut else logging.INFO,
        "%s: %d sequences of %d documents; %d documents of more than %d tokens cut into pieces; %d pieces of one token "
        "left out",
        source,
        len(dataset),
        dataset.num_documents,
        dataset.num_cut,
        limit,
        dataset.num_left_out,
    )
    return pack(dataset, tokenizer) if packed else dataset


def _limit(tokenizer: TextTokenizer, max_seq_len: int | None) -> int:
    limit = tokenizer.max_seq_len if max_seq_len is None else max_seq_len
    if limit is None:
        raise ValueError("neither max_seq_len nor the tokenizer's is set: set the most tokens of a sequence")
    if limit < 2:
        raise ValueError(f"max_seq_len must be at least 2, a token and one to predict, got {limit}")
    if tokenizer.max_seq_len is not None and limit > tokenizer.max_seq_len:
        raise ValueError(
            f"max_seq_len is {limit}, above max_seq_len {tokenizer.max_seq_len}, the tokenizer's own or the model's "
            "limit: lower it"
        )
    return limit


def _write_sequences(
    folder: Path,
    tokenizer: TextTokenizer,
    documents: Iterable[str],
    bos: list[int],
    eos: list[int],
    limit: int,
    source: str,
) -> dict[str, int]:
    counts = {"num_documents": 0, "num_cut": 0, "num_left_out": 0}
    spans: list[tuple[int, int]] = []
    position = 0
    opening, ending = np.array(bos, dtype=np.int32), np.array(eos, dtype=np.int32)
    with (folder / "tokens.int32").open("wb") as file:
        for _, text in encode_texts(tokenizer, documents):
            ids = np.concatenate([opening, text, ending])
            counts["num_documents"] += 1
            counts["num_cut"] += len(ids) > limit
            for start in range(0, len(ids), limit):
                piece = ids[start : start + limit]
                if len(piece) < 2:
                    counts["num_left_out"] += 1
                    continue
                file.write(piece.tobytes())
                spans.append((position, position + len(piece)))
                position += len(piece)
    if not spans:
        raise ValueError(
            f"{source!r} gives no sequence of two tokens or more out of {counts['num_documents']} documents: name "
            "another source"
        )
    np.save(folder / "spans.npy", np.array(spans, dtype=np.int64))
    return counts
