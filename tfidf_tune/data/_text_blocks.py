"""Plain text as blocks of equal length: for perplexity, and for fine-tuning on one's own text."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset

from tfidf_tune.data._cache import cached_folder
from tfidf_tune.data._duplicates import join_documents, windows_with_shared_stretch
from tfidf_tune.data._encoding import (
    TextTokenizer,
    TokenArray,
    cut_blocks,
    encode_texts,
    tokenizer_fingerprint,
)
from tfidf_tune.data._sources import load_documents, source_fingerprint

# Part of every cache key: raise it when a change of code changes the blocks.
FORMAT_VERSION = 1


def text_blocks(
    tokenizer: TextTokenizer,
    documents: Iterable[str],
    block_size: int = 256,
    num_blocks: int | None = None,
    add_eos: bool = False,
) -> TokenArray:
    """Tokenize documents, concatenate them and cut them into blocks that do not overlap.

    The tail that does not fill a block is dropped.

    Args:
        tokenizer (TextTokenizer): the tokenizer; no BOS is added.
        documents (Iterable[str]): read no further than needed.
        block_size (int): tokens in a block. Default: 256
        num_blocks (int | None): stop at so many blocks; there are fewer where the text runs out.
            Default: None, all.
        add_eos (bool): put EOS after each document. Default: False

    Returns:
        TokenArray: int32 of shape ``[num_blocks, block_size]``.
    """
    eos = np.array([tokenizer.eos_id] if add_eos else [], dtype=np.int32)
    pieces: list[TokenArray] = []
    num_tokens = 0
    for _, ids in encode_texts(tokenizer, documents):
        pieces += [ids, eos]
        num_tokens += len(ids) + len(eos)
        if num_blocks is not None and num_tokens >= num_blocks * block_size:
            break
    return cut_blocks(pieces, block_size)[:num_blocks]


def without_shared_text(
    tokenizer: TextTokenizer,
    blocks: TokenArray,
    num_tokens: int,
    *,
    source: str,
    source_name: str | None = None,
    source_split: str = "train",
    source_column: str = "text",
    cache_dir: str | None = None,
) -> TokenArray:
    """Leave out the blocks that have a stretch of text in common with a source.

    Which blocks those are is cached: every model is asked for the same ones, and the source may be large.

    Args:
        tokenizer (TextTokenizer): that of the blocks.
        blocks (TokenArray): int32 of shape ``[num_blocks, block_size]``.
        num_tokens (int): tokens in a row that make a stretch, at least 2 and at most ``block_size``.
        source (str): a local file or folder, ``embedded`` or a hub id, see :func:`load_documents`; all of it is read.
        source_name (str | None): configuration of a hub data set. Default: None
        source_split (str): split of a hub data set or of ``embedded``. Default: "train"
        source_column (str): the column that holds the text. Default: "text"
        cache_dir (str | None): the cache. Default: ``$TFIDF_TUNE_CACHE`` or ``~/.cache/tfidf_tune``

    Returns:
        TokenArray: the other blocks, in their order.

    Raises:
        FileNotFoundError: If ``source`` looks like a path and nothing is there.
        ValueError: If the source cannot be read.
    """
    block_size = blocks.shape[1]

    def build(folder: Path) -> dict[str, int]:
        documents = load_documents(source, name=source_name, split=source_split, column=source_column)
        corpus = join_documents(ids for _, ids in encode_texts(tokenizer, documents))
        windows = windows_with_shared_stretch(join_documents(blocks), corpus, block_size, num_tokens)
        shared = windows[:: block_size + 1]  # the windows that are a whole block
        np.save(folder / "shared.npy", shared)
        return {"num_shared": int(shared.sum())}

    settings = {
        "kind": "shared_blocks",
        "format_version": FORMAT_VERSION,
        "block_size": block_size,
        "blocks": hashlib.sha256(blocks.tobytes()).hexdigest(),
        "num_tokens": num_tokens,
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer),
        "source_fingerprint": source_fingerprint(source, source_name, source_split, source_column),
    }
    unseen: TokenArray = blocks[~np.load(cached_folder(cache_dir, settings, build) / "shared.npy")]
    return unseen


class TextBlocksDataset(Dataset[dict[str, list[int]]]):
    """Blocks of token ids as a map-style data set.

    An item is ``{"tokens": list[int], "labels": list[int]}``, each of ``block_size`` ids and the labels
    equal to the tokens: the recipe shifts them.

    Args:
        blocks (TokenArray): int32 of shape ``[num_blocks, block_size]``; may be memory-mapped.

    Attributes:
        blocks (TokenArray): as given.
        block_size (int): tokens in a block.
    """

    def __init__(self, blocks: TokenArray) -> None:
        self.blocks = blocks
        self.block_size: int = blocks.shape[1]

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return block_sample(self.blocks[index])


def text_blocks_dataset(
    tokenizer: TextTokenizer,
    *,
    source: str,
    source_name: str | None = None,
    source_split: str = "train",
    source_column: str = "text",
    block_size: int = 256,
    num_blocks: int | None = None,
    cache_dir: str | None = None,
) -> TextBlocksDataset:
    """Build a data set of blocks for fine-tuning on plain text; EOS ends each document.

    The blocks are cached, so a second run starts at once.

    Args:
        tokenizer (TextTokenizer): the tokenizer.
        source (str): a local file or folder, ``embedded`` or a hub id, see :func:`load_documents`.
        source_name (str | None): configuration of a hub data set. Default: None
        source_split (str): split of a hub data set or of ``embedded``. Default: "train"
        source_column (str): the column that holds the text. Default: "text"
        block_size (int): tokens in a block. Default: 256
        num_blocks (int | None): how many blocks. Default: None, all there are
        cache_dir (str | None): the cache. Default: ``$TFIDF_TUNE_CACHE`` or ``~/.cache/tfidf_tune``

    Returns:
        TextBlocksDataset: the data set.

    Raises:
        FileNotFoundError: If ``source`` looks like a path and nothing is there.
        ValueError: If a size is not positive, ``block_size`` exceeds the tokenizer's ``max_seq_len``, the
            source cannot be read, or it has fewer than ``num_blocks`` blocks or none at all.
    """
    check_block_size(tokenizer, block_size)
    if num_blocks is not None and num_blocks < 1:
        raise ValueError(f"num_blocks must be positive or null for all blocks, got {num_blocks}")

    def build(folder: Path) -> dict[str, int]:
        documents = load_documents(source, name=source_name, split=source_split, column=source_column)
        blocks = text_blocks(tokenizer, documents, block_size, num_blocks, add_eos=True)
        if len(blocks) < (num_blocks or 1):
            raise ValueError(
                f"found {len(blocks)} blocks of {block_size} tokens in {source!r}, needed {num_blocks or 1}: "
                "lower num_blocks or block_size, or name a larger source"
            )
        np.save(folder / "blocks.npy", blocks)
        return {"num_blocks": len(blocks)}

    settings = {
        "kind": "text_blocks",
        "format_version": FORMAT_VERSION,
        "block_size": block_size,
        "num_blocks": num_blocks,
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer),
        "source_fingerprint": source_fingerprint(source, source_name, source_split, source_column),
    }
    folder = cached_folder(cache_dir, settings, build)
    return TextBlocksDataset(np.load(folder / "blocks.npy", mmap_mode="r"))


def block_sample(block: TokenArray) -> dict[str, list[int]]:
    """Return a block in the form that torchtune's collate functions take.

    Args:
        block (TokenArray): int32 of shape ``[block_size]``.

    Returns:
        dict[str, list[int]]: ``tokens`` and ``labels``, equal.
    """
    tokens: list[int] = block.tolist()
    return {"tokens": tokens, "labels": tokens.copy()}


def check_block_size(tokenizer: TextTokenizer, block_size: int) -> None:
    """Refuse a block size that is not positive or that the model cannot take.

    Args:
        tokenizer (TextTokenizer): has ``max_seq_len``, None for no limit.
        block_size (int): tokens in a block.

    Raises:
        ValueError: If ``block_size`` is below 1 or above ``tokenizer.max_seq_len``.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be positive, got {block_size}")
    if tokenizer.max_seq_len is not None and block_size > tokenizer.max_seq_len:
        raise ValueError(
            f"block_size is {block_size}, above max_seq_len {tokenizer.max_seq_len}, the tokenizer's own or the "
            "model's limit: lower block_size"
        )
