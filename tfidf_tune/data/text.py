"""Plain text: as blocks of equal length, and as sequences of documents."""

import hashlib
import logging
from collections.abc import Iterable, Iterator
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from tfidf_tune._checks import check_at_least, require_number
from tfidf_tune._tokenizer import TextTokenizer, TokenArray, bos_ids, check_fits_model, encode_texts
from tfidf_tune.corpus.deduplication import Deduplicate, Deduplication
from tfidf_tune.corpus.sources import SampleBy, TextSource, load_documents, warn_of_short_documents
from tfidf_tune.data.sequences import (
    Counts,
    TextBlocksDataset,
    TokenizedSequence,
    cache_key,
    cached_folder,
    cached_sequences,
    missing_ends,
    pack,
)
from tfidf_tune.passages.holdout import HeldOut, hold_out
from tfidf_tune.passages.probe_file import (
    MOST_POSITIONS,
    SHORTEST_PASSAGE,
    Passage,
    PassageDraft,
    make_passages,
    read_probe_file,
    write_probe_file,
)
from tfidf_tune.passages.stretches import (
    Mask,
    join_documents,
    windows_with_shared_stretch,
)

BLOCK_SIZE = 256

logger = logging.getLogger(__name__)


def text_blocks(
    tokenizer: TextTokenizer,
    documents: Iterable[str],
    block_size: int = 256,
    num_blocks: int | None = None,
    add_eos: bool = False,
) -> TokenArray:
    """Tokenize documents, concatenate them and cut them into blocks, int32 of shape ``[num_blocks,
    block_size]``.

    No BOS is added; with ``add_eos``, EOS ends each document. An incomplete block is dropped.
    Documents are read no further than ``num_blocks`` needs, by default all; there are fewer blocks
    if the text is too short.
    """
    encoded = encode_texts(tokenizer, documents)
    eos_id = tokenizer.eos_id if add_eos else None
    blocks, _ = blocks_and_lengths(encoded, block_size, num_blocks, eos_id)
    return blocks


def blocks_and_lengths(
    documents: Iterable[TokenArray], block_size: int, num_blocks: int | None, eos_id: int | None
) -> tuple[TokenArray, list[int]]:
    """Cut tokenized documents into blocks, see :func:`text_blocks`; also return the tokens of each
    that was read.
    """
    eos = np.array([] if eos_id is None else [eos_id], dtype=np.int32)
    pieces: list[TokenArray] = []
    lengths: list[int] = []
    num_tokens = 0
    for ids in documents:
        _, missing_eos = missing_ends(ids, eos[:0], eos)
        pieces += [ids, missing_eos]
        lengths.append(len(ids))
        num_tokens += len(ids) + len(missing_eos)
        if num_blocks is not None and num_tokens >= num_blocks * block_size:
            break
    return cut_blocks(pieces, block_size)[:num_blocks], lengths


def cut_blocks(pieces: list[TokenArray], block_size: int) -> TokenArray:
    """Concatenate int32 token ids and cut them into blocks ``[num_blocks, block_size]``; the rest
    is dropped.
    """
    stream = np.concatenate([np.empty(0, dtype=np.int32), *pieces])
    num_blocks = len(stream) // block_size
    return stream[: num_blocks * block_size].reshape(num_blocks, block_size)


def split_at_eos(documents: Iterable[TokenArray], eos_id: int) -> list[TokenArray]:
    """Divide documents at each EOS, which is left out: ``[a b EOS c EOS]`` becomes ``[a b]`` and
    ``[c]``.
    """
    parts = []
    for ids in documents:
        start = 0
        for end in [*np.flatnonzero(ids == eos_id).tolist(), len(ids)]:
            if end > start:
                parts.append(ids[start:end])
            start = end + 1
    return parts


def text_blocks_dataset(
    tokenizer: TextTokenizer,
    *,
    source: str,
    source_name: str | None = None,
    source_split: str = "train",
    source_column: str = "text",
    sample_by: SampleBy = "line",
    block_size: int | None = 256,
    num_blocks: int | None = None,
    holdout: float = 0.0,
    deduplicate: Deduplicate = "none",
    probe_file: str | None = None,
    cache_dir: str | None = None,
) -> TextBlocksDataset:
    """Build a data set of blocks for fine-tuning on plain text; EOS ends each document. The blocks
    are cached.

    With ``holdout``, it can be measured what a model recites; nothing else is changed. Controls are
    random windows of which no 50 consecutive tokens, or half of a shorter window and at least 16,
    occur again. They are held out; what is before and after them in a document are two documents.
    Targets are as many windows of the rest: those that occur most often, then random ones that
    occur once. Both are the same for every seed, and at most 100. A window has ``block_size``
    tokens; while there would be fewer than 10 controls, half as many, but at least 16.

    Args:
        tokenizer (TextTokenizer): the tokenizer.
        source (str): a local file or folder, ``embedded`` or a hub id; this and the next four:
            :func:`load_documents`.
        source_name (str | None): configuration of a hub data set. Default: None
        source_split (str): split of a hub data set or of ``embedded``. Default: "train"
        source_column (str): the column that holds the text. Default: "text"
        sample_by (Literal["line", "paragraph", "document"]): what a document of a ``.txt`` file is.
            Default: "line"
        block_size (int | None): tokens in a block; None for 256, or the tokenizer's ``max_seq_len``
            if that is less. Default: 256
        num_blocks (int | None): number of blocks. Default: None, all
        holdout (float): the largest share of the tokens that is held out, from 0 to 0.5; the search
            takes about 30 bytes of memory per token. Default: 0.0
        deduplicate (Deduplicate): which documents are removed as copies before the text is cut into
            blocks, see :class:`Deduplication`. Targets and controls stay those of the text with its
            copies. Default: "none"
        probe_file (str | None): where to write the passages, see :func:`read_probe_file`. Default:
            None, nowhere
        cache_dir (str | None): the cache. Default: ``$TFIDF_TUNE_CACHE`` or ``~/.cache/tfidf_tune``

    Returns:
        TextBlocksDataset: the data set.

    Raises:
        FileNotFoundError: If ``source`` looks like a path and does not exist.
        ValueError: If a setting is out of range, ``block_size`` above the tokenizer's
            ``max_seq_len``, or the source cannot be read or has fewer than ``num_blocks`` blocks or
            none.
    """
    if block_size is None:
        block_size = min(BLOCK_SIZE, tokenizer.max_seq_len or BLOCK_SIZE)
    require_number("holdout", holdout, 0, 0.5, "the share of the text that is held out")
    if holdout and num_blocks is not None:
        raise ValueError(
            f"holdout {holdout:g} takes all of the text: leave out num_blocks {num_blocks}, or set "
            "holdout to 0"
        )
    needed = 1 if num_blocks is None else num_blocks
    check_at_least(SHORTEST_PASSAGE if holdout else 1, block_size=block_size)
    check_at_least(1, num_blocks=needed)
    check_fits_model(tokenizer, lower="block_size", block_size=block_size)
    deduplication = Deduplication.of(deduplicate)
    place = TextSource(source, source_name, source_split, source_column, sample_by)

    def build(folder: Path) -> dict[str, int]:
        eos_id = tokenizer.eos_id
        encoded = encode_texts(tokenizer, load_documents(*place))
        passages: list[Passage] = []
        num_removed = 0
        if not holdout and deduplication.method == "none":
            # Documents are read no further than num_blocks needs.
            blocks, lengths = blocks_and_lengths(encoded, block_size, num_blocks, eos_id)
        else:
            whole = list(encoded)
            lengths = [len(ids) for ids in whole]
            # In the blocks, EOS separates documents: so does EOS in the text itself.
            documents = split_at_eos(whole, eos_id)
            is_kept = deduplication.kept(documents, source, tokenizer)
            num_removed = int((~is_kept).sum())
            # Passages are chosen in all of the text: they are the same for the text without copies.
            held_out = None
            if holdout:
                held_out = hold_out(tokenizer, documents, block_size, holdout)
                documents = held_out.rest
                is_kept = is_kept[held_out.documents]
            trained = compress(documents, is_kept)
            blocks, _ = blocks_and_lengths(trained, block_size, num_blocks, eos_id)
            if held_out is not None:
                passages = _passages(held_out, tokenizer, source, is_kept, blocks)
        warn_of_short_documents(source, sample_by, lengths)
        if len(blocks) < needed:
            raise ValueError(
                f"found {len(blocks)} blocks of {block_size} tokens in {source!r}, needed "
                f"{needed}: lower num_blocks or block_size, or name a larger source"
            )
        np.save(folder / "blocks.npy", blocks)
        write_probe_file(folder / "probe.jsonl", passages)
        return {
            "num_documents": len(lengths),
            "num_removed": num_removed,
            "num_passages": len(passages),
        }

    key = cache_key(
        "text_blocks",
        tokenizer,
        [place],
        deduplication=deduplication,
        copies_of="documents",
        passages_of=source if holdout else None,
        block_size=block_size,
        num_blocks=num_blocks,
        holdout=holdout,
    )
    folder, counts = cached_folder(cache_dir, key, build)
    passages = []
    if counts["num_passages"]:
        passages = read_probe_file(folder / "probe.jsonl")
        if probe_file:
            write_probe_file(probe_file, passages)
    blocks = np.load(folder / "blocks.npy", mmap_mode="r")
    return TextBlocksDataset(
        blocks,
        num_documents=counts["num_documents"],
        num_removed=counts["num_removed"],
        passages=passages,
        continues=np.arange(len(blocks)) > 0,
    )


def _passages(
    held_out: HeldOut, tokenizer: TextTokenizer, source: str, is_kept: Mask, blocks: TokenArray
) -> list[Passage]:
    """Return the passages, and where targets are in the ``blocks`` of those parts of the text that
    are kept, bool ``[num_parts]``.
    """
    # Parts of 4, 2 and 3 tokens, each with a separator, in whose place the blocks have EOS. Without
    # the second, what started at 9 starts at 6:
    #
    #   part               0 0 0 0 | 1 1 | 2 2 2 |
    #   start in the text  0 1 2 3 4 5 6 7 8 9 10 11
    #   start in blocks    0 1 2 3 4 - - - 5 6 7  8
    sizes = np.array([len(ids) + 1 for ids in held_out.rest])
    ends = np.cumsum(sizes)
    num_removed = np.cumsum(np.where(is_kept, 0, sizes))  # tokens, with those of the part itself
    block_size = blocks.shape[1]
    end_of_text = sizes.sum() // block_size * block_size
    drafts: list[PassageDraft] = []
    for ids, starts in held_out.targets:
        # Tokens after the last complete block are not trained on, with or without copies.
        in_blocks = starts[starts + len(ids) <= end_of_text]
        if not len(in_blocks):
            continue
        parts = np.searchsorted(ends, in_blocks, side="right")
        places = (in_blocks - num_removed[parts])[is_kept[parts]]
        places = places[places + len(ids) <= blocks.size]
        positions: list[list[int]] = []
        if len(places) <= MOST_POSITIONS:
            positions = np.stack(np.divmod(places, block_size), axis=1).tolist()
        document = int(held_out.documents[parts[0]])
        fields = {"num_injections": len(places), "document": document}
        drafts.append(PassageDraft(ids, positions, source, fields))
    num_targets = len(drafts)
    for ids, document in zip(held_out.controls, held_out.documents_of_controls, strict=True):
        drafts.append(PassageDraft(ids, [], source, {"document": document}))
    return make_passages(tokenizer, drafts, num_targets)


def without_shared_text(
    tokenizer: TextTokenizer, blocks: TokenArray, num_tokens: int, place: TextSource
) -> TokenArray:
    """Return the ``blocks`` without ``num_tokens`` (2 to ``block_size``) consecutive tokens in
    common with a source.

    The blocks are int32 of shape ``[num_blocks, block_size]``. The result is cached, because every
    evaluated model needs the same one and the source can be large.
    """
    block_size = blocks.shape[1]

    def build(folder: Path) -> dict[str, int]:
        # All stretches of both texts are named at once, so that the corpus has to fit into memory.
        corpus = join_documents(encode_texts(tokenizer, load_documents(*place)))
        windows = windows_with_shared_stretch(
            join_documents(blocks), corpus, block_size, num_tokens
        )
        shared = windows[:: block_size + 1]  # the windows that are complete blocks
        np.save(folder / "shared.npy", shared)
        return {"num_shared": int(shared.sum())}

    key = cache_key(
        "shared_blocks",
        tokenizer,
        [place],
        deduplication=None,
        passages_of=None,
        block_size=block_size,
        blocks=hashlib.sha256(blocks.tobytes()).hexdigest(),
        num_tokens=num_tokens,
    )
    folder, _ = cached_folder(None, key, build)
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
    """Build a data set for fine-tuning on plain text in which each document is a sequence. The ids
    are cached.

    A document of more than ``max_seq_len`` tokens, BOS and EOS included, is cut into pieces, each a
    sequence of its own. A last piece of one token, which has nothing to predict, is left out. A log
    line reports the counts.

    The source, ``deduplicate`` and ``cache_dir`` are those of :func:`text_blocks_dataset`;
    ``max_seq_len`` is by default the tokenizer's. With ``add_bos``, a document starts with BOS, if
    the tokenizer has one, so that its first token is learnt; with ``add_eos``, it ends with EOS.
    ``packed`` puts several documents into a row of the tokenizer's ``max_seq_len`` tokens.

    Returns:
        Dataset[dict[str, Any]]: a :class:`SequenceDataset`; if packed, a ``PackedDataset`` with it
        as ``ds``.

    Raises:
        FileNotFoundError: If the source looks like a path and does not exist.
        ValueError: If ``max_seq_len`` is below 2, above the tokenizer's, or neither is set, or the
            source cannot be read or has no document of two tokens.

    Example:
        >>> dataset = text_dataset(tokenizer, source="letters.jsonl", max_seq_len=512)
    """
    limit = tokenizer.max_seq_len if max_seq_len is None else max_seq_len
    if limit is None:
        raise ValueError(
            "neither max_seq_len nor the tokenizer's is set: set the most tokens of a sequence"
        )
    check_at_least(2, max_seq_len=limit)  # a token and one to predict
    check_fits_model(tokenizer, lower="it", max_seq_len=limit)
    deduplication = Deduplication.of(deduplicate)
    place = TextSource(source, source_name, source_split, source_column, sample_by)
    bos = np.array(bos_ids(tokenizer) if add_bos else [], dtype=np.int32)
    eos = np.array([tokenizer.eos_id] if add_eos else [], dtype=np.int32)

    def make_sequences(counts: Counts) -> Iterator[TokenizedSequence]:
        documents: Iterable[TokenArray] = encode_texts(tokenizer, load_documents(*place))
        if deduplication.method != "none":
            whole = list(documents)
            is_kept = deduplication.kept(whole, source, tokenizer)
            counts["num_removed"] = int((~is_kept).sum())
            counts["num_documents"] = counts["num_removed"]
            documents = compress(whole, is_kept)
        lengths: list[int] = []
        longest = 0
        for text in documents:
            lengths.append(len(text))
            before, after = missing_ends(text, bos, eos)
            ids = np.concatenate([before, text, after])
            longest = max(longest, len(ids))
            counts["num_documents"] += 1
            if len(ids) > limit:
                counts["num_cut"] += 1
            for start in range(0, len(ids), limit):
                piece = ids[start : start + limit]
                if len(piece) == 1:  # it has nothing to predict
                    counts["num_left_out"] += 1
                    continue
                is_label = np.ones(len(piece), dtype=np.bool_)
                yield TokenizedSequence(piece, is_label, continues=start > 0)
        warn_of_short_documents(source, sample_by, lengths)
        if longest < 2:
            raise ValueError(
                f"{source!r} has {len(lengths)} documents, none of two tokens: name another source"
            )

    key = cache_key(
        "text",
        tokenizer,
        [place],
        deduplication=deduplication,
        copies_of="documents",
        passages_of=None,
        max_seq_len=limit,
        add_bos=add_bos,
        add_eos=add_eos,
    )
    dataset = cached_sequences(cache_dir, key, make_sequences)
    logger.log(
        logging.WARNING if dataset.num_cut else logging.INFO,
        f"{source}: {len(dataset)} sequences of {dataset.num_documents} documents; "
        f"{dataset.num_cut} documents of more than {limit} tokens cut into pieces; "
        f"{dataset.num_left_out} pieces of one token left out",
    )
    return pack(dataset, tokenizer) if packed else dataset
