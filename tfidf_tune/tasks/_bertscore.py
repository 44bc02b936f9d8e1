"""BERTScore of all summaries at once."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.filter import Filter

from tfidf_tune.tasks._prompts import prompts_of

logger = logging.getLogger(__name__)


class BERTScoreFilter(Filter):  # type: ignore[misc]
    """The harness hands a filter every response of a task, so that an encoder can score them in batches."""

    def apply(self, resps: Sequence[Sequence[str]], docs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Score the first response of each document.

        Args:
            resps (Sequence[Sequence[str]]): responses.
            docs (Sequence[dict[str, Any]]): documents of ``tfidf_cnn_dailymail``.

        Returns:
            list[dict[str, Any]]: ``prediction``, ``bertscore_f1`` × 100 or None, and ``bertscore_missing``, why.
        """
        predictions = [
            prompts_of(doc).response_text(responses[0]).strip() for responses, doc in zip(resps, docs, strict=True)
        ]
        scores, missing = _scores(
            predictions,
            [doc["highlights"] for doc in docs],
            docs[0]["bertscore_model"],
            docs[0]["bertscore_num_layers"],
        )
        return [
            {"prediction": prediction, "bertscore_f1": score, "bertscore_missing": missing}
            for prediction, score in zip(predictions, scores, strict=True)
        ]


def _scores(
    predictions: Sequence[str], references: Sequence[str], model: str, num_layers: int | None
) -> tuple[Sequence[float | None], str | None]:
    """Scores × 100; or Nones and the reason, which is logged too."""
    try:
        from bert_score import BERTScorer
        from bert_score.utils import model2layers
    except ImportError:
        return _missing(predictions, "bert-score is not installed: pip install 'tfidf-tune[bertscore]'")
    if num_layers is None and (num_layers := model2layers.get(Path(model).name)) is None:
        return _missing(predictions, f"bert-score knows no layer for {model}: give bertscore_num_layers")
    try:
        scorer = BERTScorer(model_type=model, num_layers=num_layers)
    except Exception as error:  # the hub, the file system and bert-score's assertions
        logger.warning("%s cannot be loaded: %s", model, str(error).strip().partition("\n")[0])
        return _missing(predictions, f"{model} cannot be loaded ({type(error).__name__})")
    _add_prefix_space(scorer, model)
    # bert-score fails on an empty text; nothing recalls nothing.
    filled = [index for index, prediction in enumerate(predictions) if prediction]
    scores = [0.0] * len(predictions)
    if filled:
        *_, f1 = scorer.score([predictions[index] for index in filled], [references[index] for index in filled])
        for index, value in zip(filled, f1.tolist(), strict=True):
            scores[index] = 100.0 * value
    return scores, None


def _missing(predictions: Sequence[str], reason: str) -> tuple[list[None], str]:
    logger.warning("BERTScore is missing: %s", reason)
    return [None] * len(predictions), reason


def _add_prefix_space(scorer: Any, model: str) -> None:
    """Put the space before a text that RoBERTa was trained with: transformers 5 ignores bert-score's asking for it."""
    from transformers import AutoTokenizer, GPT2Tokenizer, RobertaTokenizer

    if isinstance(scorer._tokenizer, (GPT2Tokenizer, RobertaTokenizer)):
        scorer._tokenizer = AutoTokenizer.from_pretrained(model, add_prefix_space=True)
