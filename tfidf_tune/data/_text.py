"""Plain text: as blocks of equal length, and as sequences of documents."""

import hashlib
import logging
from collections.abc import Iterable, Iterator
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from tfidf_tune._checks import check_at_least
from tfidf_tune.data._deduplication import Deduplicate, Deduplication
from tfidf_tune.data._repeated_stretches import join_documents, windows_with_shared_stretch
from tfidf_tune.data._sequences import (
    Counts,
    LabelMask,
    TextBlocksDataset,
    cache_settings,
    cached_folder,
    cached_sequences,
    missing_ends,
    pack,
)
from tfidf_tune.data._sources import SampleBy, TextSource, load_documents, warn_of_short_documents
from tfidf_tune.data._tokenizer import TextTokenizer, TokenArray, bos_ids, check_fits_model, encode_texts

logger = logging.getLogger(__name__)


def text_blocks(
    tokenizer: TextTokenizer,
    documents: Iterable[str],
    block_size: int = 256,
    num_blocks: int | None = None,
    add_eos: bool = False,
) -> TokenArray:
    """Tokenize documents, concatenate them and cut them into blocks, int32 of shape ``[num_blocks, block_size]``.

    No BOS is added; with ``add_eos``, EOS ends each document. An incomplete block is dropped. Documents are read no
    further than ``num_blocks`` needs, by default all; there are fewer blocks if the text is too short.
    """
    encoded = encode_texts(tokenizer, documents)
    return blocks_and_lengths(encoded, block_size, num_blocks, tokenizer.eos_id if add_eos else None)[0]


def blocks_and_lengths(
    documents: Iterable[TokenArray], block_size: int, num_blocks: int | None, eos_id: int | None
) -> tuple[TokenArray, list[int]]:
    """Cut tokenized documents into blocks, see :func:`text_blocks`; also return the tokens of each that was read."""
    eos = np.array([] if eos_id is None else [eos_id], dtype=np.int32)
    pieces: list[TokenArray] = []
    num_tokens = 0
    for ids in documents:
        pieces += [ids, missing_ends(ids, eos[:0], eos)[1]]
        num_tokens += sum(map(len, pieces[-2:]))
        if num_blocks is not None and num_tokens >= num_blocks * block_size:
            break
    return cut_blocks(pieces, block_size)[:num_blocks], [len(ids) for ids in pieces[::2]]


def cut_blocks(pieces: list[TokenArray], block_size: int) -> TokenArray:
    """Concatenate int32 token ids and cut them into blocks ``[num_blocks, block_size]``; the rest is dropped."""
    stream = np.concatenate([np.empty(0, dtype=np.int32), *pieces])
    num_blocks = len(stream) // block_size
    return stream[: num_blocks * block_size].reshape(num_blocks, block_size)


def text_blocks_dataset(
    tokenizer: TextTokenizer,
    *,
    source: str,
    source_name: str | None = None,
    source_split: str = "train",
    source_column: str = "text",
    sample_by: SampleBy = "line",
    block_size: int = 256,
    num_blocks: int | None = None,
    deduplicate: Deduplicate = "none",
    cache_dir: str | None = None,
) -> TextBlocksDataset:
    """Build a data set of blocks for fine-tuning on plain text; EOS ends each document. The blocks are cached.

    Args:
        tokenizer (TextTokenizer): the tokenizer.
        source (str): a local file or folder, ``embedded`` or a hub id; this and the next four: :func:`load_documents`.
        source_name (str | None): configuration of a hub data set. Default: None
        source_split (str): split of a hub data set or of ``embedded``. Default: "train"
        source_column (str): the column that holds the text. Default: "text"
        sample_by (Literal["line", "paragraph", "document"]): what a document of a ``.txt`` file is. Default: "line"
        block_size (int): tokens in a block. Default: 256
        num_blocks (int | None): number of blocks, before copies are removed. Default: None, all
        deduplicate (Deduplicate): which blocks are removed as copies, see :class:`Deduplication`. Default: "none"
        cache_dir (str | None): the cache. Default: ``$TFIDF_TUNE_CACHE`` or ``~/.cache/tfidf_tune``

    Returns:
        TextBlocksDataset: the data set.

    Raises:
        FileNotFoundError: If ``source`` looks like a path and does not exist.
        ValueError: If a setting is out of range, ``block_size`` above the tokenizer's ``max_seq_len``, or the source
            cannot be read or has fewer than ``num_blocks`` blocks or none.
    """
    needed = 1 if num_blocks is None else num_blocks
    check_at_least(1, block_size=block_size, num_blocks=needed)
    check_fits_model(tokenizer, lower="block_size", block_size=block_size)
    deduplication = Deduplication.of(deduplicate)
    place = TextSource(source, source_name, source_split, source_column, sample_by)

    def build(folder: Path) -> dict[str, int]:
        documents = encode_texts(tokenizer, load_documents(*place))
        blocks, lengths = blocks_and_lengths(documents, block_size, num_blocks, tokenizer.eos_id)
        warn_of_short_documents(source, sample_by, lengths)
        if len(blocks) < needed:
            problem = f"found {len(blocks)} blocks of {block_size} tokens in {source!r}, needed {needed}"
            raise ValueError(f"{problem}: lower num_blocks or block_size, or name a larger source")
        kept = deduplication.kept(blocks, source, tokenizer)
        np.save(folder / "blocks.npy", blocks[kept])
        return {"num_documents": len(lengths), "num_removed": int((~kept).sum())}

    sizes = {"block_size": block_size, "num_blocks": num_blocks}
    settings = cache_settings("text_blocks", tokenizer, [place], **sizes, **deduplication.settings)
    folder, counts = cached_folder(cache_dir, settings, build)
    return TextBlocksDataset(np.load(folder / "blocks.npy", mmap_mode="r"), **counts)


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
    """Return the ``blocks`` without ``num_tokens`` (2 to ``block_size``) consecutive tokens in common with a source.

    The blocks are int32 of shape ``[num_blocks, block_size]``, the source is that of :func:`text_blocks_dataset`. The
    result is cached, because every evaluated model needs the same one and the source can be large.
    """
    block_size = blocks.shape[1]
    place = TextSource(source, source_name, source_split, source_column)

    def build(folder: Path) -> dict[str, int]:
        # All stretches of both texts are named at once, so that the corpus has to fit into memory.
        corpus = join_documents(encode_texts(tokenizer, load_documents(*place)))
        windows = windows_with_shared_stretch(join_documents(blocks), corpus, block_size, num_tokens)
        shared = windows[:: block_size + 1]  # the windows that are complete blocks
        np.save(folder / "shared.npy", shared)
        return {"num_shared": int(shared.sum())}

    digest = hashlib.sha256(blocks.tobytes()).hexdigest()
    settings = cache_settings(
        "shared_blocks", tokenizer, [place], block_size=block_size, blocks=digest, num_tokens=num_tokens
    )
    folder, _ = cached_folder(cache_dir, settings, build)
    unseen: TokenArray = blocks[~np.load(folder / "shared.npy")]
    return unseen


def text_dataset(
    tokenizer: TextTokenizer,
    *,
    source: str,
    source_name: str | None = None,
    source_split: str = "train",
    source_column: str = "text",
    sample_by: SampleBy = "line",
    max_seq_len: int | None = None,
    add_bos: bool = True,
    add_eos: bool = True,
    packed: bool = False,
    deduplicate: Deduplicate = "none",
    cache_dir: str | None = None,
) -> Dataset[dict[str, Any]]:
    """Build a data set for fine-tuning on plain text in which each document is a sequence. The ids are cached.

    A document of more than ``max_seq_len`` tokens, BOS and EOS included, is cut into pieces, each a sequence of its
    own. A last piece of one token, which has nothing to predict, is left out. A log line reports the counts.

    The source, ``deduplicate`` and ``cache_dir`` are those of :func:`text_blocks_dataset`; ``max_seq_len`` is by
    default the tokenizer's. With ``add_bos``, a document starts with BOS, if the tokenizer has one, so that its first
    token is learnt; with ``add_eos``, it ends with EOS. ``packed`` puts several documents into a row of the tokenizer's
    ``max_seq_len`` tokens.

    Returns:
        Dataset[dict[str, Any]]: a :class:`SequenceDataset`; if packed, a ``PackedDataset`` with it as ``ds``.

    Raises:
        FileNotFoundError: If the source looks like a path and does not exist.
        ValueError: If ``max_seq_len`` is below 2, above the tokenizer's, or neither is set, or the source cannot be
            read or has no document of two tokens.

    Example:
        >>> dataset = text_dataset(tokenizer, source="letters.jsonl", max_seq_len=512)
    """
    limit = tokenizer.max_seq_len if max_seq_len is None else max_seq_len
    if limit is None:
        raise ValueError("neither max_seq_len nor the tokenizer's is set: set the most tokens of a sequence")
    check_at_least(2, max_seq_len=limit)  # a token and one to predict
    check_fits_model(tokenizer, lower="it", max_seq_len=limit)
    deduplication = Deduplication.of(deduplicate)
    place = TextSource(source, source_name, source_split, source_column, sample_by)
    bos = np.array(bos_ids(tokenizer) if add_bos else [], dtype=np.int32)
    eos = np.array([tokenizer.eos_id] if add_eos else [], dtype=np.int32)

    def pieces(counts: Counts) -> Iterator[TokenArray]:
        lengths: list[int] = []
        longest = 0
        for text in encode_texts(tokenizer, load_documents(*place)):
            lengths.append(len(text))
            before, after = missing_ends(text, bos, eos)
            ids = np.concatenate([before, text, after])
            # A last piece of one token has nothing to predict.
            cut = [ids[start : start + limit] for start in range(0, len(ids), limit)]
            longest = max(longest, len(ids))
            counts["num_documents"] += 1
            counts["num_cut"] += len(cut) > 1
            counts["num_left_out"] += len(ids) % limit == 1
            yield from (piece for piece in cut if len(piece) > 1)
        warn_of_short_documents(source, sample_by, lengths)
        if longest < 2:
            raise ValueError(f"{source!r} has {len(lengths)} documents, none of two tokens: name another source")

    def make_sequences(counts: Counts) -> Iterator[tuple[TokenArray, LabelMask]]:
        rows: Iterable[TokenArray] = pieces(counts)
        if deduplication.method != "none":
            every = list(rows)
            kept = deduplication.kept(every, source, tokenizer)
            counts["num_removed"] = int((~kept).sum())
            rows = compress(every, kept)
        return ((piece, np.ones(len(piece), dtype=np.bool_)) for piece in rows)

    added = {"max_seq_len": limit, "add_bos": add_bos, "add_eos": add_eos}
    settings = cache_settings("text", tokenizer, [place], **added, **deduplication.settings)
    dataset = cached_sequences(cache_dir, settings, make_sequences)
    logger.log(
        logging.WARNING if dataset.num_cut else logging.INFO,
        f"{source}: {len(dataset)} sequences of {dataset.num_documents} documents; {dataset.num_cut} documents of more "
        f"than {limit} tokens cut into pieces; {dataset.num_left_out} pieces of one token left out",
    )
    return pack(dataset, tokenizer) if packed else dataset
