"""``tfidf_cnn_dailymail``: summarize an article; ROUGE-1, ROUGE-2, ROUGE-L and BERTScore-F1.

Section "Summarization" of the paper on CNN/DailyMail 3.0.0. ROUGE is that of ``rouge-score`` with its stemmer,
BERTScore that of ``bert-score`` (Zhang et al. 2020, https://arxiv.org/abs/1904.09675).
"""

from collections.abc import Sequence
from typing import Any

from datasets import Dataset

from tfidf_tune.analysis import rouge_scores
from tfidf_tune.data import encode_prompts, load_rows, summarization_prompt
from tfidf_tune.tasks._prompts import prompt_settings, prompts_of, warn_of_losses
from tfidf_tune.tasks._task import check_length, setting, test_split

_COLUMNS = {"article": str, "highlights": str}


def documents(
    *,
    cnn_dailymail_source: str = "abisee/cnn_dailymail",
    cnn_dailymail_name: str | None = "3.0.0",
    cnn_dailymail_split: str = "validation",
    cnn_dailymail_max_source_tokens: int = 1024,
    cnn_dailymail_max_new_tokens: int = 128,
    bertscore_model: str = "roberta-large",
    bertscore_num_layers: int | None = None,
    **metadata: Any,
) -> dict[str, Dataset]:
    """Make a document of each article.

    Prompt and cut are those of :func:`tfidf_tune.data.cnn_dailymail_dataset`.

    Args:
        cnn_dailymail_source (str): a hub id, or a local file or folder with the columns ``article`` and
            ``highlights``.
        cnn_dailymail_name (str | None): configuration of a hub data set.
        cnn_dailymail_split (str): split of a hub data set.
        cnn_dailymail_max_source_tokens (int): tokens in a prompt, BOS included.
        cnn_dailymail_max_new_tokens (int): most tokens to generate.
        bertscore_model (str): hub id or folder of the encoder behind BERTScore.
        bertscore_num_layers (int | None): which layer's embeddings it takes. Default: what ``bert-score`` has found
            best for a model of this name.
        **metadata (Any): the model's arguments and other settings, see :func:`prompt_settings`.

    Returns:
        dict[str, Dataset]: the split ``test``.

    Raises:
        FileNotFoundError: If the source looks like a path and nothing is there.
        ValueError: If the source cannot be read, lacks a column or has no article with highlights, a setting is out
            of range, or the model has too few positions.
    """
    max_new_tokens = setting("cnn_dailymail_max_new_tokens", cnn_dailymail_max_new_tokens, 1)
    max_source_tokens = setting("cnn_dailymail_max_source_tokens", cnn_dailymail_max_source_tokens, 1)
    if bertscore_num_layers is not None:
        setting("bertscore_num_layers", bertscore_num_layers, 1)
    settings = prompt_settings(metadata)
    check_length(metadata, max_source_tokens + max_new_tokens, "cnn_dailymail_max_source_tokens")
    prompts = prompts_of(settings)
    source_rows = load_rows(cnn_dailymail_source, _COLUMNS, name=cnn_dailymail_name, split=cnn_dailymail_split)
    whole = [
        (number, row)
        for number, row in enumerate(source_rows)
        if (row["article"] or "").strip() and (row["highlights"] or "").strip()
    ]
    if not whole:
        raise ValueError(f"{cnn_dailymail_source!r} has no article with highlights: name another cnn_dailymail_source")
    all_ids, cut = encode_prompts(
        prompts.tokenizer,
        [summarization_prompt] * len(whole),
        [row["article"] for _, row in whole],
        max_source_tokens,
    )
    rows = []
    for index, ((number, row), ids) in enumerate(zip(whole, all_ids, strict=True)):
        prompt = prompts.prompt(ids)
        rows.append(
            {
                "id": str(row.get("id") or number),
                "highlights": row["highlights"].strip(),
                "request": prompt.request,
                "num_prompt_tokens": len(ids),
                "article_cut": index in cut,
                "round_trip": prompt.exact,
                "max_new_tokens": max_new_tokens,
                "bertscore_model": bertscore_model,
                "bertscore_num_layers": bertscore_num_layers,
                **settings,
            }
        )
    warn_of_losses(sum(not row["round_trip"] for row in rows), len(rows), "prompts", settings)
    return test_split(rows)


def doc_to_text(doc: dict[str, Any]) -> str:
    """Give the request of a document."""
    return str(doc["request"])


def doc_to_target(doc: dict[str, Any]) -> str:
    """Give the highlights."""
    return str(doc["highlights"])


def process_results(doc: dict[str, Any], results: list[Any]) -> dict[str, Any]:
    """Score a summary; it and its scores are kept in the document for the log.

    Args:
        doc (dict[str, Any]): of :func:`documents`; gets ``prediction``, ``rouge1``, ``rouge2``, ``rouge_l``,
            ``bertscore_f1`` and ``bertscore_missing``.
        results (list[Any]): the response with its BERTScore, see :class:`~tfidf_tune.tasks._bertscore.BERTScoreFilter`.

    Returns:
        dict[str, Any]: the metrics; F-measures × 100, a missing BERTScore as the reason.
    """
    scored = results[0]
    doc["prediction"] = scored["prediction"]
    doc |= rouge_scores(doc["prediction"], doc["highlights"])
    doc["bertscore_f1"], doc["bertscore_missing"] = scored["bertscore_f1"], scored["bertscore_missing"]
    return {
        "rouge1": doc["rouge1"],
        "rouge2": doc["rouge2"],
        "rougeL": doc["rouge_l"],
        "bertscore_f1": doc["bertscore_missing"] if doc["bertscore_f1"] is None else doc["bertscore_f1"],
        "round_trip": float(doc["round_trip"]),
    }


def bertscore_mean(values: Sequence[float | str]) -> float | str:
    """Average BERTScores.

    Args:
        values (Sequence[float | str]): scores, or the reason why there are none.

    Returns:
        float | str: the mean, or ``missing: `` and the reason.
    """
    scores = [value for value in values if not isinstance(value, str)]
    if len(scores) < len(values):
        return f"missing: {next(value for value in values if isinstance(value, str))}"
    return sum(scores) / len(scores)
