"""CNN/DailyMail: news articles and their highlights as summaries."""

from collections.abc import Iterator

from torchtune.datasets import PackedDataset

from tfidf_tune.data._encoding import TextTokenizer
from tfidf_tune.data._packing import pack
from tfidf_tune.data._sft import Example, Limits, PromptTargetDataset, check_limit, prompt_target_dataset
from tfidf_tune.data._sources import load_rows, source_fingerprint


def summarization_prompt(article: str) -> str:
    """Return the prompt of an article; the summary follows after a space.

    Args:
        article (str): the article.

    Returns:
        str: the prompt.
    """
    return f"summarize: {article}\n\nSummary:"


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
) -> PromptTargetDataset | PackedDataset:
    """Build a data set for fine-tuning on CNN/DailyMail; only the summary and EOS are learnt.

    Articles and summaries that are too long are cut at their end; EOS ends a cut summary as well. Rows
    without article or highlights are left out. A log line says how many of each there are. The ids are
    cached, so a second run starts at once.

    Args:
        tokenizer (TextTokenizer): the tokenizer; its BOS, where it has one, opens every example.
        source (str): a hub id, or a local ``.jsonl``, ``.json`` or ``.parquet`` file or folder of such files
            with the columns ``article`` and ``highlights``. Default: "abisee/cnn_dailymail"
        name (str | None): configuration of a hub data set. Default: "3.0.0"
        split (str): split of a hub data set. Default: "train"
        max_source_tokens (int): tokens in a prompt, BOS included. Default: 1024
        max_target_tokens (int): tokens in a summary, EOS included. Default: 128
        packed (bool): put several examples into a row of the tokenizer's ``max_seq_len`` tokens. Default: False
        cache_dir (str | None): the cache. Default: ``$TFIDF_TUNE_CACHE`` or ``~/.cache/tfidf_tune``

    Returns:
        PromptTargetDataset | PackedDataset: the data set, as ``ds`` of a ``PackedDataset`` where it is packed;
            ``num_cut`` counts the cut articles, ``num_cut_targets`` the cut summaries.

    Raises:
        FileNotFoundError: If ``source`` looks like a path and nothing is there.
        ValueError: If ``max_source_tokens`` is too small for the prompt, ``max_target_tokens`` for a token
            and EOS, or both together exceed the tokenizer's ``max_seq_len``; if the source cannot be read,
            lacks a column, or gives no example; if ``packed`` and the tokenizer has no ``max_seq_len``.

    Example:
        >>> dataset = cnn_dailymail_dataset(tokenizer, source="news.jsonl", max_source_tokens=512)
    """
    empty_prompt = summarization_prompt("")
    check_limit("max_source_tokens", max_source_tokens, tokenizer, empty_prompt)
    if max_target_tokens < 2:
        raise ValueError(f"max_target_tokens must be at least 2, a token and EOS, got {max_target_tokens}")
    total = max_source_tokens + max_target_tokens
    if tokenizer.max_seq_len is not None and total > tokenizer.max_seq_len:
        raise ValueError(
            f"max_source_tokens and max_target_tokens are {total} together, above max_seq_len "
            f"{tokenizer.max_seq_len}, the tokenizer's own or the model's limit: lower max_source_tokens"
        )
    dataset = prompt_target_dataset(
        tokenizer,
        _examples(source, name, split),
        Limits(total=total, prompt=max_source_tokens, target=max_target_tokens),
        empty_prompt=empty_prompt,
        source=source,
        fingerprint=source_fingerprint(source, name, split),
        cache_dir=cache_dir,
    )
    return pack(dataset, tokenizer) if packed else dataset


def _examples(source: str, name: str | None, split: str) -> Iterator[Example | None]:
    for row in load_rows(source, {"article": str, "highlights": str}, name=name, split=split):
        article, highlights = row["article"] or "", (row["highlights"] or "").strip()
        yield Example(summarization_prompt, article, highlights) if article.strip() and highlights else None
