"""Prompts with their targets: SQuAD v1.1 and CNN/DailyMail.

The target is learnt, the prompt is not. A text that makes the prompt too long is truncated, and the
prompt with the truncated text is then encoded in one piece, so that its ids are those of a text. (A
tokenizer's own ``truncation="only_second"`` needs a pair of texts, truncates at one end only, and
torchtune's tokenizers have none.)
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import tee
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset

from tfidf_tune._checks import check_at_least
from tfidf_tune._tokenizer import TextTokenizer, TokenArray, bos_ids, check_fits_model, encode_texts
from tfidf_tune.corpus.sources import TextSource, load_rows
from tfidf_tune.data.sequences import (
    Counts,
    TokenizedSequence,
    cache_key,
    cached_sequences,
    missing_ends,
    pack,
)

SQUAD_COLUMNS = {"context": str, "question": str, "answers": dict}
NEWS_COLUMNS = {"article": str, "highlights": str}

logger = logging.getLogger(__name__)


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
    """Build a data set for fine-tuning on SQuAD; only the first gold answer and EOS are learnt. The
    ids are cached.

    If an example is too long, its context is truncated: at its end, or, where that would remove the
    answer, to a window with as many tokens before the answer as after it (more on one side if the
    other has no more). Rows without an answer at the stated place of the context are left out, as
    are rows that are too long even with only the answer as context. A log line reports the counts.

    Args:
        tokenizer (TextTokenizer): the tokenizer; its BOS, if it has one, starts every example.
        source (str): see :func:`load_documents`; it has the columns ``context``, ``question`` and
            ``answers``, a dictionary of the lists ``text`` and ``answer_start``. Default:
            "rajpurkar/squad"
        name (str | None): configuration of a hub data set. Default: None
        split (str): split of a hub data set. Default: "train"
        max_seq_len (int): tokens in an example, including BOS and EOS. Default: 256
        packed (bool): put several examples into a row of the tokenizer's ``max_seq_len`` tokens.
            Default: False
        cache_dir (str | None): the cache. Default: ``$TFIDF_TUNE_CACHE`` or ``~/.cache/tfidf_tune``

    Returns:
        Dataset[dict[str, Any]]: a :class:`SequenceDataset`; if packed, a ``PackedDataset`` with it
        as ``ds``.

    Raises:
        FileNotFoundError: If ``source`` looks like a path and does not exist.
        ValueError: If ``max_seq_len`` is too small for the prompt or above the tokenizer's, the
            source cannot be read, lacks a column, or gives no example; if ``packed`` and the
            tokenizer has no ``max_seq_len``.

    Example:
        >>> dataset = squad_dataset(tokenizer, source="squad/train.parquet")
    """
    _check_room("max_seq_len", max_seq_len, tokenizer, squad_prompt("", ""), num_target=2)
    check_fits_model(tokenizer, lower="it", max_seq_len=max_seq_len)
    limits = (max_seq_len, max_seq_len, max_seq_len)
    place = TextSource(source, name, split)
    examples = (_squad_example(row.columns, source) for row in load_rows(place, SQUAD_COLUMNS))
    return _prompt_target_dataset(
        tokenizer, examples, limits, squad_prompt("", ""), place, packed, cache_dir
    )


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
    """Build a data set for fine-tuning on CNN/DailyMail; only the summary and EOS are learnt. The
    ids are cached.

    Articles and summaries that are too long are truncated at their end; EOS ends a truncated
    summary as well. Rows without article or highlights are left out. A log line reports the counts.

    A prompt has at most ``max_source_tokens`` tokens, including BOS, a summary
    ``max_target_tokens``, including EOS. The source has the columns ``article`` and ``highlights``;
    other arguments are those of :func:`squad_dataset`.

    Raises:
        ValueError: If ``max_source_tokens`` is too small for the prompt, ``max_target_tokens`` for
            a token and EOS, or both together exceed the tokenizer's ``max_seq_len``.

    Example:
        >>> dataset = cnn_dailymail_dataset(tokenizer, source="news.jsonl", max_source_tokens=512)
    """
    _check_room("max_source_tokens", max_source_tokens, tokenizer, summarization_prompt(""))
    check_at_least(2, max_target_tokens=max_target_tokens)  # a token and EOS
    check_fits_model(
        tokenizer,
        lower="max_source_tokens",
        max_source_tokens=max_source_tokens,
        max_target_tokens=max_target_tokens,
    )
    limits = (max_source_tokens + max_target_tokens, max_source_tokens, max_target_tokens)
    place = TextSource(source, name, split)
    examples = (_news_example(row.columns) for row in load_rows(place, NEWS_COLUMNS))
    return _prompt_target_dataset(
        tokenizer, examples, limits, summarization_prompt(""), place, packed, cache_dir
    )


def encode_prompts(
    tokenizer: TextTokenizer,
    prompts: Sequence[Callable[[str], str]],
    texts: Sequence[str],
    max_tokens: int,
) -> tuple[list[list[int]], set[int]]:
    """Encode prompts for an evaluation as the data sets do: BOS first, texts truncated at their
    end.

    Each of ``prompts`` turns its text, complete or truncated, into a prompt of at most
    ``max_tokens`` tokens, including BOS. A ValueError names a prompt that is too long even without
    its text.

    Returns:
        tuple[list[list[int]], set[int]]: the ids of each prompt, and the indices of those whose
        text was truncated.
    """
    bos = bos_ids(tokenizer)
    encoded: list[list[int]] = []
    cut: set[int] = set()
    examples = [_Example(prompt, text) for prompt, text in zip(prompts, texts, strict=False)]
    wholes = encode_texts(tokenizer, (example.prompt(example.text) for example in examples))
    for index, (example, whole) in enumerate(zip(examples, wholes, strict=True)):
        ids = _fit(tokenizer, example, whole, max_tokens - len(bos))
        if ids is None:
            raise ValueError(
                f"{max_tokens} tokens are too few for the prompt {example.prompt('')[:200]!r}, "
                "even without its text: raise the limit"
            )
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
    context, question, answers = (row[column] for column in SQUAD_COLUMNS)
    if not (context and question and answers):
        return None
    match answers:
        case {"text": [str(answer), *_], "answer_start": [int(start), *_]}:
            pass
        case {"text": [] | None}:
            return None
        case _:
            raise ValueError(
                f"column 'answers' of {source!r} holds {str(answers)[:80]}, but needs the lists "
                "'text', of texts, and 'answer_start', of integers"
            )
    # Some rows state a place where the answer is not.
    if not answer.strip() or context.find(answer, start) != start:
        return None
    prompt = partial(squad_prompt, question=question)
    return _Example(prompt, context, answer.strip(), keep=(start, start + len(answer)))


def _news_example(row: dict[str, Any]) -> _Example | None:
    article = row["article"] or ""
    highlights = (row["highlights"] or "").strip()
    if not article.strip() or not highlights:
        return None
    return _Example(summarization_prompt, article, highlights)


def _check_room(
    name: str, limit: int, tokenizer: TextTokenizer, empty_prompt: str, num_target: int = 0
) -> None:
    """Refuse a limit that leaves no token for the text of a prompt; ``num_target`` tokens are for
    the target.
    """
    needed = len(tokenizer.encode(empty_prompt, add_bos=True, add_eos=False)) + 1 + num_target
    if limit < needed:
        raise ValueError(
            f"{name} is {limit}, but the prompt around a text of one token takes {needed}: raise it"
        )


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
    bos = np.array(bos_ids(tokenizer), dtype=np.int32)
    eos = np.array([tokenizer.eos_id], dtype=np.int32)

    def complete(counts: Counts) -> Iterator[_Example]:
        for example in examples:
            counts["num_documents"] += 1
            if example is None:
                counts["num_left_out"] += 1
            else:
                yield example

    def make_sequences(counts: Counts) -> Iterator[TokenizedSequence]:
        # A target is encoded after the end of every prompt, so that no tokenizer adds or removes a
        # space.
        [ending] = encode_texts(tokenizer, [empty_prompt])
        rows, rows_of_targets, rows_of_prompts = tee(complete(counts), 3)
        texts = (f"{empty_prompt} {example.target}" for example in rows_of_targets)
        prompts = (example.prompt(example.text) for example in rows_of_prompts)
        targets = encode_texts(tokenizer, texts)
        wholes = encode_texts(tokenizer, prompts)
        for example, prompt_and_target, whole in zip(rows, targets, wholes, strict=True):
            # The target, cut so that EOS has room.
            whole_target = prompt_and_target[len(ending) :]
            target = whole_target[: max_target - 1]
            _, missing_eos = missing_ends(target, eos[:0], eos)
            target = np.append(target, missing_eos)
            # The prompt, in the tokens that the target leaves.
            limit = min(max_prompt, max_tokens - len(target)) - len(bos)
            prompt = _fit(tokenizer, example, whole, limit)
            if prompt is None:
                counts["num_left_out"] += 1
                continue
            if prompt is not whole:
                counts["num_cut"] += 1
            if len(whole_target) >= max_target:
                counts["num_cut_targets"] += 1
            ids = np.concatenate([bos, prompt, target])
            yield TokenizedSequence(ids, np.arange(len(ids)) >= len(bos) + len(prompt))
        if counts["num_left_out"] == counts["num_documents"]:
            raise ValueError(
                f"{place.source!r} gives no example: {counts['num_left_out']} rows are empty, have "
                "no answer in their context or are too long. Raise the limit or name another source"
            )

    key = cache_key(
        "prompt_target",
        tokenizer,
        [place],
        deduplication=None,
        passages_of=None,
        empty_prompt=empty_prompt,
        limits=limits,
    )
    dataset = cached_sequences(cache_dir, key, make_sequences)
    num_changed = dataset.num_cut + dataset.num_cut_targets + dataset.num_left_out
    logger.log(
        logging.WARNING if num_changed else logging.INFO,
        f"{place.source}: {len(dataset)} examples; of these {dataset.num_cut} with a cut prompt "
        f"and {dataset.num_cut_targets} with a cut target; {dataset.num_left_out} rows left out",
    )
    return pack(dataset, tokenizer) if packed else dataset


def _fit(
    tokenizer: TextTokenizer, example: _Example, prompt: TokenArray, limit: int
) -> TokenArray | None:
    """Return the ids of a prompt, with a shorter text if they are more than ``limit``; None if
    ``keep`` is too long.
    """
    excess = len(prompt) - limit
    if excess <= 0:
        return prompt
    # The tokens before and after what is kept, and how many of them may remain. Of 300 tokens of
    # which 256 fit, 44 are removed. If the shorter text has 257 tokens, because it is divided into
    # other tokens than before, another token is removed in a second round.
    start, end = example.keep
    before, after = encode_texts(tokenizer, [example.text[:start], example.text[end:]])
    room = len(before) + len(after)
    # More than one round if the parts of a text have more tokens together than apart.
    while 0 < excess <= room:
        room -= excess
        shorter = _shortened(tokenizer, example, before, after, room)
        (prompt,) = encode_texts(tokenizer, [shorter])
        excess = len(prompt) - limit
    return prompt if excess <= 0 else None


def _shortened(
    tokenizer: TextTokenizer, example: _Example, before: TokenArray, after: TokenArray, room: int
) -> str:
    """Return the prompt with ``room`` tokens of the text around ``keep``."""
    # Tokens are removed from the end. If this would remove what is kept, half of the remaining
    # tokens go before it and half after it, more on one side if the other needs fewer: with room
    # for 100, of 70 tokens before and 80 after, 70 and 30 remain; of 150 and 80, 50 and 50; of 150
    # and 20, 80 and 20.
    num_before = len(before)
    if num_before > room:
        num_before = max(room // 2, room - len(after))
    removed_after = after[room - num_before :].tolist()
    kept_before = before[len(before) - num_before :].tolist()
    # Only the length of decoded text is used, because a character can be cut in half. A space that
    # SentencePiece drops before the first token is at the edge, where strip() removes it.
    start, end = example.keep
    first = start - len(tokenizer.decode(kept_before))
    last = len(example.text) - len(tokenizer.decode(removed_after))
    text = example.text[max(first, 0) : max(last, end)]
    return example.prompt(text.strip())
