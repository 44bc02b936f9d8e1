"""``tfidf_cnn_dailymail``: summarize an article; ROUGE-1, ROUGE-2, ROUGE-L and BERTScore-F1.

Section "Summarization" of the paper on CNN/DailyMail 3.0.0. ROUGE is that of ``rouge-score`` with
its stemmer, BERTScore that of ``bert-score`` (Zhang et al. 2020, https://arxiv.org/abs/1904.09675).
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from lm_eval.api.filter import Filter

from tfidf_tune._checks import check_at_least
from tfidf_tune.data import TextSource, load_rows
from tfidf_tune.data.squad_and_news import NEWS_COLUMNS, encode_prompts, summarization_prompt
from tfidf_tune.probe import rouge_scores
from tfidf_tune.tasks._requests import prompts_of
from tfidf_tune.tasks._task import task_documents
from tfidf_tune.tasks.settings import prompts_for

logger = logging.getLogger(__name__)


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
    """Make a document of each article; ``docs/evaluation.md`` describes the settings.

    Prompt and truncation are those of :func:`tfidf_tune.data.cnn_dailymail_dataset`.
    """
    max_new_tokens = cnn_dailymail_max_new_tokens
    max_source_tokens = cnn_dailymail_max_source_tokens
    check_at_least(
        1,
        cnn_dailymail_max_new_tokens=max_new_tokens,
        cnn_dailymail_max_source_tokens=max_source_tokens,
    )
    if bertscore_num_layers is not None:
        check_at_least(1, bertscore_num_layers=bertscore_num_layers)
    prompts = prompts_for(metadata)
    prompts.check_length(max_source_tokens + max_new_tokens, "cnn_dailymail_max_source_tokens")
    # Rows without a text are left out; an id is the row's number if the data set has none.
    source = TextSource(cnn_dailymail_source, cnn_dailymail_name, cnn_dailymail_split)
    articles = []
    examples = []
    for number, row in enumerate(load_rows(source, NEWS_COLUMNS, ["id"])):
        article = row.columns["article"] or ""
        highlights = (row.columns["highlights"] or "").strip()
        if article.strip() and highlights:
            articles.append(article)
            examples.append({"id": str(row.columns.get("id") or number), "highlights": highlights})
    if not examples:
        raise ValueError(
            f"{cnn_dailymail_source!r} has no article with highlights: name another "
            "cnn_dailymail_source"
        )
    # Long articles are cut, as in training.
    instructions = [summarization_prompt] * len(examples)
    all_ids, cut = encode_prompts(prompts.tokenizer, instructions, articles, max_source_tokens)
    rows = []
    for index, (example, ids) in enumerate(zip(examples, all_ids, strict=True)):
        document: dict[str, Any] = example | prompts.document(ids, max_new_tokens)
        document["article_cut"] = index in cut
        document["bertscore_model"] = bertscore_model
        document["bertscore_num_layers"] = bertscore_num_layers
        rows.append(document)
    return task_documents(rows, "prompts", prompts)


def process_results(doc: dict[str, Any], results: list[Any]) -> dict[str, Any]:
    """Score a summary; add it and its scores × 100 to the document for the log.

    ``results`` holds the summary with its BERTScore, see :class:`BERTScoreFilter`; a missing one
    becomes the reason.
    """
    # The comparison reads these fields; sample_fields.SummaryDocument checks them.
    doc |= results[0]
    doc |= rouge_scores(doc["prediction"], doc["highlights"])
    bertscore = doc["bertscore_f1"]
    if bertscore is None:
        bertscore = doc["bertscore_missing"]
    return {
        "rouge1": doc["rouge1"],
        "rouge2": doc["rouge2"],
        "rougeL": doc["rouge_l"],
        "bertscore_f1": bertscore,
        "round_trip": float(doc["round_trip"]),
    }


def bertscore_mean(values: Sequence[float | str]) -> float | str:
    """Return the mean of BERTScores, or ``missing: `` and the first reason among them."""
    scores = []
    for value in values:
        if isinstance(value, str):
            return f"missing: {value}"
        scores.append(value)
    return sum(scores) / len(scores)


class BERTScoreFilter(Filter):  # type: ignore[misc]
    """Score all summaries at once: a filter gets every response of a task, so the encoder can work
    in batches.
    """

    def apply(
        self, resps: Sequence[Sequence[str]], docs: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return for each document ``prediction``, ``bertscore_f1`` × 100 or None, and
        ``bertscore_missing``, why.
        """
        predictions = []
        for responses, doc in zip(resps, docs, strict=True):
            summary = prompts_of(doc).response_text(responses[0])
            predictions.append(summary.strip())
        references = [doc["highlights"] for doc in docs]
        scores = _bertscores(
            predictions, references, docs[0]["bertscore_model"], docs[0]["bertscore_num_layers"]
        )
        if isinstance(scores, str):
            logger.warning("BERTScore is missing: %s", scores)
            return [
                {"prediction": prediction, "bertscore_f1": None, "bertscore_missing": scores}
                for prediction in predictions
            ]
        return [
            {"prediction": prediction, "bertscore_f1": score, "bertscore_missing": None}
            for prediction, score in zip(predictions, scores, strict=True)
        ]


def _bertscores(
    predictions: Sequence[str], references: Sequence[str], model: str, num_layers: int | None
) -> list[float] | str:
    """Return F-measures × 100, or why they are missing: without the package or the encoder."""
    from transformers import AutoConfig, AutoTokenizer, GPT2Tokenizer, RobertaTokenizer

    try:
        from bert_score import BERTScorer
        from bert_score.utils import model2layers
    except ImportError:
        return "bert-score is not installed: pip install 'tfidf-tune[bertscore]'"
    if num_layers is None:
        num_layers = model2layers.get(Path(model).name)
    if num_layers is None:
        return f"bert-score has no default layer for {model}: set bertscore_num_layers"
    try:
        # bert-score would let transformers ask whether to run code of the model.
        for kind in (AutoConfig, AutoTokenizer):
            kind.from_pretrained(model, trust_remote_code=False)
        scorer = BERTScorer(model_type=model, num_layers=num_layers)
    except Exception as error:  # the hub, the file system and bert-score's assertions
        logger.warning("%s cannot be loaded: %s", model, str(error).strip().partition("\n")[0])
        return f"{model} cannot be loaded ({type(error).__name__})"
    if isinstance(scorer._tokenizer, (GPT2Tokenizer, RobertaTokenizer)):
        # RoBERTa was trained with a space before a text; transformers 5 ignores bert-score's
        # request for it.
        scorer._tokenizer = AutoTokenizer.from_pretrained(model, add_prefix_space=True)
    # bert-score fails on an empty text, which scores 0.
    scores = [0.0] * len(predictions)
    filled = [index for index, prediction in enumerate(predictions) if prediction]
    if filled:
        summaries = [predictions[index] for index in filled]
        highlights = [references[index] for index in filled]
        f1 = scorer.score(summaries, highlights)[2].tolist()
        for index, score in zip(filled, f1, strict=True):
            scores[index] = 100.0 * score
    return scores
