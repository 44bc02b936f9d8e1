"""SQuAD v1.1: a question about a paragraph, answered with words of the paragraph."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torchtune.datasets import PackedDataset

from tfidf_tune.data._encoding import TextTokenizer
from tfidf_tune.data._packing import pack
from tfidf_tune.data._sft import Example, Limits, PromptTargetDataset, check_limit, prompt_target_dataset
from tfidf_tune.data._sources import load_rows, source_fingerprint

_COLUMNS = {"context": str, "question": str, "answers": dict}


def squad_prompt(context: str, question: str) -> str:
    """Return the prompt of a question; the answer follows after a space.

    Args:
        context (str): the paragraph.
        question (str): the question.

    Returns:
        str: the prompt.
    """
    return f"Context: {context}\nQuestion: {question}\nAnswer:"


def squad_dataset(
    tokenizer: TextTokenizer,
    *,
    source: str = "rajpurkar/squad",
    name: str | None = None,
    split: str = "train",
    max_seq_len: int = 256,
    packed: bool = False,
    cache_dir: str | None = None,
) -> PromptTargetDataset | PackedDataset:
    """Build a data set for fine-tuning on SQuAD; only the first gold answer and EOS are learnt.

    Where an example is too long, its context is cut: at its end, or, where that would take the answer,
    to a window around the answer with as many tokens before as behind it (more on one side where the
    other has no more). Question and answer are never cut. Rows without an answer at the place given in the
    context are left out, as are those too long even with the answer alone as context. A log line says how
    many of each there are. The ids are cached, so a second run starts at once.

    Args:
        tokenizer (TextTokenizer): the tokenizer; its BOS, where it has one, opens every example.
        source (str): a hub id, or a local ``.jsonl``, ``.json`` or ``.parquet`` file or folder of such files
            with the columns ``context``, ``question`` and ``answers``, a dictionary of the lists ``text``
            and ``answer_start``. Default: "rajpurkar/squad"
        name (str | None): configuration of a hub data set. Default: None
        split (str): split of a hub data set. Default: "train"
        max_seq_len (int): tokens in an example, BOS and EOS included. Default: 256
        packed (bool): put several examples into a row of the tokenizer's ``max_seq_len`` tokens. Default: False
        cache_dir (str | None): the cache. Default: ``$TFIDF_TUNE_CACHE`` or ``~/.cache/tfidf_tune``

    Returns:
        PromptTargetDataset | PackedDataset: the data set, as ``ds`` of a ``PackedDataset`` where it is packed;
            ``num_cut`` counts the cut contexts.

    Raises:
        FileNotFoundError: If ``source`` looks like a path and nothing is there.
        ValueError: If ``max_seq_len`` is too small for the prompt or above the tokenizer's, the source
            cannot be read, lacks a column, or gives no example; if ``packed`` and the tokenizer has no ``max_seq_len``.

    Example:
        >>> dataset = squad_dataset(tokenizer, source="squad/train.parquet")
    """
    empty_prompt = squad_prompt("", "")
    check_limit("max_seq_len", max_seq_len, tokenizer, empty_prompt, num_target=2)
    if tokenizer.max_seq_len is not None and max_seq_len > tokenizer.max_seq_len:
        raise ValueError(
            f"max_seq_len is {max_seq_len}, above max_seq_len {tokenizer.max_seq_len}, the tokenizer's own or the "
            "model's limit: lower it"
        )
    dataset = prompt_target_dataset(
        tokenizer,
        _examples(source, name, split),
        Limits(total=max_seq_len, prompt=max_seq_len, target=max_seq_len),
        empty_prompt=empty_prompt,
        source=source,
        fingerprint=source_fingerprint(source, name, split),
        cache_dir=cache_dir,
    )
    return pack(dataset, tokenizer) if packed else dataset


def _examples(source: str, name: str | None, split: str) -> Iterator[Example | None]:
    for row in load_rows(source, _COLUMNS, name=name, split=split):
        yield _example(row, source)


def _example(row: dict[str, Any], source: str) -> Example | None:
    context, question, answers = (row[column] for column in _COLUMNS)
    if not (context and question and answers):
        return None
    match answers:
        case {"text": [str(answer), *_], "answer_start": [int(start), *_]}:
            pass
        case {"text": [] | None}:
            return None
        case _:
            raise ValueError(
                f"column 'answers' of {source!r} holds {str(answers)[:80]}: name a source where it has the lists "
                "'text', of texts, and 'answer_start', of integers"
            )
    if not answer.strip() or context.find(answer, start) != start:
        return None
    return Example(
        prompt=partial(squad_prompt, question=question),
        text=context,
        target=answer.strip(),
        keep=(start, start + len(answer)),
    )
