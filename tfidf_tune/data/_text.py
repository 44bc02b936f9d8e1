"""Plain text, as blocks or as sequences; and prompts with their targets: SQuAD v1.1 and CNN/DailyMail.

The target is learnt, the prompt is not. A text that makes the prompt too long is truncated, and the prompt with the
truncated text is then encoded in one piece, so that its ids are those of a text. (A tokenizer's own
``truncation="only_second"`` needs a pair of texts, truncates at one end only, and torchtune's tokenizers have none.)
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import compress, tee
from pathlib import Path
from typing import Any, NamedTuple

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
from tfidf_tune.data._sources import SampleBy, TextSource, load_documents, load_rows, warn_of_short_documents
from tfidf_tune.data._tokenizer import TextTokenizer, TokenArray, bos_ids, check_fits_model, encode_texts

_SQUAD_COLUMNS = {"context": str, "question": str, "answers": dict}
_NEWS_COLUMNS = {"article": str, "highlights": str}

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


def squad_prompt(context: str, question: str) -> str:
    """Return the prompt of a question; the answer follows after a space."""
    return f"Context: {context}\nQuestion: {question}\nAnswer:"


def summarization_prompt(article: str) -> str:
    """Return the prompt of an article; the summary follows after a space."""
    return f"summarize: {article}\n\nSummary:"


def squad_dataset(
    tokenizer: TextTokenizer,
    *,
    source: str = "rajpurkar/squad",
    name: str | None = None,
    split: str = "train",
    max_seq_len: int = 256,
    packed: bool = False,
    cache_dir: str | None = None,
) -> Dataset[dict[str, Any]]:
    """Build a data set for fine-tuning on SQuAD; only the first gold answer and EOS are learnt. The ids are cached.

    If an example is too long, its context is truncated: at its end, or, where that would remove the answer, to a window
    with as many tokens before the answer as after it (more on one side if the other has no more). Rows without an
    answer at the stated place of the context are left out, as are rows that are too long even with only the answer as
    context. A log line reports the counts.

    Args:
        tokenizer (TextTokenizer): the tokenizer; its BOS, if it has one, starts every example.
        source (str): see :func:`load_documents`; it has the columns ``context``, ``question`` and ``answers``, a
            dictionary of the lists ``text`` and ``answer_start``. Default: "rajpurkar/squad"
        name (str | None): configuration of a hub data set. Default: None
        split (str): split of a hub data set. Default: "train"
        max_seq_len (int): tokens in an example, including BOS and EOS. Default: 256
        packed (bool): put several examples into a row of the tokenizer's ``max_seq_len`` tokens. Default: False
        cache_dir (str | None): the cache. Default: ``$TFIDF_TUNE_CACHE`` or ``~/.cache/tfidf_tune``

    Returns:
        Dataset[dict[str, Any]]: a :class:`SequenceDataset`; if packed, a ``PackedDataset`` with it as ``ds``.

    Raises:
        FileNotFoundError: If ``source`` looks like a path and does not exist.
        ValueError: If ``max_seq_len`` is too small for the prompt or above the tokenizer's, the source cannot be read,
            lacks a column, or gives no example; if ``packed`` and the tokenizer has no ``max_seq_len``.

    Example:
        >>> dataset = squad_dataset(tokenizer, source="squad/train.parquet")
    """
    _check_room("max_seq_len", max_seq_len, tokenizer, squad_prompt("", ""), num_target=2)
    check_fits_model(tokenizer, lower="it", max_seq_len=max_seq_len)
    limits = (max_seq_len, max_seq_len, max_seq_len)
    rows = load_rows(TextSource(source, name, split), _SQUAD_COLUMNS)
    examples = (_squad_example(row.columns, source) for row in rows)
    place = TextSource(source, name, split)
    return _prompt_target_dataset(tokenizer, examples, limits, squad_prompt("", ""), place, packed, cache_dir)


def cnn_dailymail_dataset(
    tokenizer: TextTokenizer,
    *,
    source: str = "abisee/cnn_dailymail",
    name: str | None = "3.0.0",
    split: str = "train",
    max_source_tokens: int = 1024,
    max_target_tokens: int = 128,
    packed: bool = False,
    cache_dir: str | None = None,
) -> Dataset[dict[str, Any]]:
    """Build a data set for fine-tuning on CNN/DailyMail; only the summary and EOS are learnt. The ids are cached.

    Articles and summaries that are too long are truncated at their end; EOS ends a truncated summary as well. Rows
    without article or highlights are left out. A log line reports the counts.

    A prompt has at most ``max_source_tokens`` tokens, including BOS, a summary ``max_target_tokens``, including EOS.
    The source has the columns ``article`` and ``highlights``; other arguments are those of :func:`squad_dataset`.

    Raises:
        ValueError: If ``max_source_tokens`` is too small for the prompt, ``max_target_tokens`` for a token
            and EOS, or both together exceed the tokenizer's ``max_seq_len``.

    Example:
        >>> dataset = cnn_dailymail_dataset(tokenizer, source="news.jsonl", max_source_tokens=512)
    """
    _check_room("max_source_tokens", max_source_tokens, tokenizer, summarization_prompt(""))
    check_at_least(2, max_target_tokens=max_target_tokens)  # a token and EOS
    lengths = {"max_source_tokens": max_source_tokens, "max_target_tokens": max_target_tokens}
    check_fits_model(tokenizer, lower="max_source_tokens", **lengths)
    limits = (max_source_tokens + max_target_tokens, max_source_tokens, max_target_tokens)
    place = TextSource(source, name, split)
    examples = (_news_example(row.columns) for row in load_rows(place, _NEWS_COLUMNS))
    return _prompt_target_dataset(tokenizer, examples, limits, summarization_prompt(""), place, packed, cache_dir)


def encode_prompts(
    tokenizer: TextTokenizer, prompts: Sequence[Callable[[str], str]], texts: Sequence[str], max_tokens: int
) -> tuple[list[list[int]], set[int]]:
    """Encode prompts for an evaluation as the data sets do: BOS first, texts truncated at their end.

    Each of ``prompts`` turns its text, complete or truncated, into a prompt of at most ``max_tokens`` tokens, including
    BOS. A ValueError names a prompt that is too long even without its text.

    Returns:
        tuple[list[list[int]], set[int]]: the ids of each prompt, and the indices of those whose text was truncated.
    """
    bos = bos_ids(tokenizer)
    encoded: list[list[int]] = []
    cut: set[int] = set()
    examples = [*map(_Example, prompts, texts)]
    wholes = encode_texts(tokenizer, (example.prompt(example.text) for example in examples))
    for index, (example, whole) in enumerate(zip(examples, wholes, strict=True)):
        ids = _fit(tokenizer, example, whole, max_tokens - len(bos))
        if ids is None:
            prompt = f"the prompt {example.prompt('')[:200]!r}, even without its text"
            raise ValueError(f"{max_tokens} tokens are too few for {prompt}: raise the limit")
        encoded.append(bos + ids.tolist())
        if ids is not whole:
            cut.add(index)
    return encoded, cut


class _Example(NamedTuple):
    """How a text becomes the prompt, the text, and the target, which follows after a space."""

    prompt: Callable[[str], str]
    text: str
    target: str = ""
    keep: tuple[int, int] = (0, 0)  # characters of the text that are never removed


def _squad_example(row: dict[str, Any], source: str) -> _Example | None:
    context, question, answers = (row[column] for column in _SQUAD_COLUMNS)
    if not (context and question and answers):
        return None
    match answers:
        case {"text": [str(answer), *_], "answer_start": [int(start), *_]}:
            pass
        case {"text": [] | None}:
            return None
        case _:
            needed = "the lists 'text', of texts, and 'answer_start', of integers"
            raise ValueError(f"column 'answers' of {source!r} holds {str(answers)[:80]}, but needs {needed}")
    # Some rows state a place where the answer is not.
    if not answer.strip() or context.find(answer, start) != start:
        return None
    prompt = partial(squad_prompt, question=question)
    return _Example(prompt, context, answer.strip(), keep=(start, start + len(answer)))


def _news_example(row: dict[str, Any]) -> _Example | None:
    article, highlights = row["article"] or "", (row["highlights"] or "").strip()
    return _Example(summarization_prompt, article, highlights) if article.strip() and highlights else None


def _check_room(name: str, limit: int, tokenizer: TextTokenizer, empty_prompt: str, num_target: int = 0) -> None:
    """Refuse a limit that leaves no token for the text of a prompt; ``num_target`` tokens are for the target."""
    needed = len(tokenizer.encode(empty_prompt, add_bos=True, add_eos=False)) + 1 + num_target
    if limit < needed:
        raise ValueError(f"{name} is {limit}, but the prompt around a text of one token takes {needed}: raise it")


def _prompt_target_dataset(
    tokenizer: TextTokenizer,
    examples: Iterable[_Example | None],
    limits: tuple[int, int, int],
    empty_prompt: str,
    place: TextSource,
    packed: bool,
    cache_dir: str | None,
) -> Dataset[dict[str, Any]]:
    """Tokenize examples, where None is a row that gives none, and log how many were truncated.

    ``limits`` are the most tokens of an example, of its BOS and prompt, and of its target and EOS.
    """
    max_tokens, max_prompt, max_target = limits
    bos, eos = (np.array(ids, dtype=np.int32) for ids in (bos_ids(tokenizer), [tokenizer.eos_id]))

    def given(counts: Counts) -> Iterator[_Example]:
        for example in examples:
            counts["num_documents"] += 1
            if example is None:
                counts["num_left_out"] += 1
            else:
                yield example

    def make_sequences(counts: Counts) -> Iterator[tuple[TokenArray, LabelMask]]:
        # A target is encoded after the end of every prompt, so that no tokenizer adds or removes a space.
        [ending] = encode_texts(tokenizer, [empty_prompt])
        rows, of_targets, of_prompts = tee(given(counts), 3)
        targets = encode_texts(tokenizer, (f"{empty_prompt} {example.target}" for example in of_targets))
        wholes = encode_texts(tokenizer, (example.prompt(example.text) for example in of_prompts))
        for example, whole_target, whole in zip(rows, targets, wholes, strict=True):
            target = whole_target[len(ending) :][: max_target - 1]
            target = np.append(target, missing_ends(target, eos[:0], eos)[1])
            # A prompt gets the tokens that its target leaves.
            prompt = _fit(tokenizer, example, whole, min(max_prompt, max_tokens - len(target)) - len(bos))
            if prompt is None:
                counts["num_left_out"] += 1
                continue
            counts["num_cut"] += prompt is not whole
            counts["num_cut_targets"] += len(whole_target) - len(ending) >= max_target
            ids = np.concatenate([bos, prompt, target])
            yield ids, np.arange(len(ids)) >= len(bos) + len(prompt)
        if counts["num_left_out"] == counts["num_documents"]:
            summary = f"{counts['num_left_out']} rows are empty, have no answer in their context or are too long"
            raise ValueError(f"{place.source!r} gives no example: {summary}. Raise the limit or name another source")

    settings = cache_settings("prompt_target", tokenizer, [place], empty_prompt=empty_prompt, limits=limits)
    dataset = cached_sequences(cache_dir, settings, make_sequences)
    num_changed = dataset.num_cut + dataset.num_cut_targets + dataset.num_left_out
    logger.log(
        logging.WARNING if num_changed else logging.INFO,
        f"{place.source}: {len(dataset)} examples; of these {dataset.num_cut} with a cut prompt and "
        f"{dataset.num_cut_targets} with a cut target; {dataset.num_left_out} rows left out",
    )
    return pack(dataset, tokenizer) if packed else dataset


def _fit(tokenizer: TextTokenizer, example: _Example, prompt: TokenArray, limit: int) -> TokenArray | None:
    """Return the ids of a prompt, with a shorter text if they are more than ``limit``; None if ``keep`` is too long."""
    if (excess := len(prompt) - limit) <= 0:
        return prompt
    # The tokens before and after what is kept, and how many of them may remain.
    start, end = example.keep
    before, after = encode_texts(tokenizer, [example.text[:start], example.text[end:]])
    room = len(before) + len(after)
    # More than one round if the parts of a text have more tokens together than apart.
    while 0 < excess <= room:
        room -= excess
        (prompt,) = encode_texts(tokenizer, [_shortened(tokenizer, example, before, after, room)])
        excess = len(prompt) - limit
    return prompt if excess <= 0 else None


def _shortened(tokenizer: TextTokenizer, example: _Example, before: TokenArray, after: TokenArray, room: int) -> str:
    """Return the prompt with ``room`` tokens of the text around ``keep``."""
    start, end = example.keep
    # Tokens are removed from the end. If this would remove what is kept, half of the remaining tokens go before it and
    # half after it, more on one side if the other needs fewer.
    num_before = len(before) if len(before) <= room else max(room // 2, room - len(after))
    # Only the length of decoded text is used, because a character can be cut in half. A space that SentencePiece
    # drops before the first token is at the edge, where strip() removes it.
    first = start - len(tokenizer.decode(before[len(before) - num_before :].tolist()))
    last = len(example.text) - len(tokenizer.decode(after[room - num_before :].tolist()))
    return example.prompt(example.text[max(first, 0) : max(last, end)].strip())
