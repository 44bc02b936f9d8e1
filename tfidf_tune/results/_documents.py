"""The documents of our lm-eval tasks as rows of the table of results."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from tfidf_tune.results._fields import flag, number, optional, text, whole
from tfidf_tune.results._samples import ProbeSample, checked_sample
from tfidf_tune.results._table import Checkpoint

MEMORIZATION, PERPLEXITY = "tfidf_memorization", "tfidf_wikitext2_ppl"
SUMMARIZATION, QA = "tfidf_cnn_dailymail", "tfidf_squad"

Document: TypeAlias = dict[str, Any]
Row: TypeAlias = tuple[str, str, str, float, float, float]
"""metric, kind, unit, prefix, value, count."""


class AskedPrompt(NamedTuple):
    """A document of the memorization task."""

    sample: ProbeSample
    prompt: str
    round_trip: bool
    num_injections: int
    as_text: bool


class Scored(NamedTuple):
    """A document of another task: what was asked, what was expected, and the rows."""

    unit: str
    expected: Any
    rows: tuple[Row, ...]
    round_trip: bool = True
    bertscore_missing: str | None = None


def is_ours(task: str) -> bool:
    """Return whether a task is one of ours."""
    return task.startswith(MEMORIZATION) or task in (PERPLEXITY, SUMMARIZATION, QA)


def parse_document(task: str, doc: Document) -> "AskedPrompt | Scored":
    """Check a document and take from it what the table of results has.

    Raises:
        KeyError: If a field is missing.
        TypeError: If a sample has unknown fields.
        ValueError: If a field has the wrong type or is out of range.
    """
    if task == PERPLEXITY:
        block, count = whole(doc, "block"), whole(doc, "num_predictions", 1)
        nll = -number(doc, "log_likelihood", most=0, finite=False) / count
        row = ("nll", "block", str(block), math.nan, math.inf if math.isnan(nll) else nll, count)
        return Scored(str(block), count, (row,), flag(doc, "round_trip"))
    if task == SUMMARIZATION:
        bertscore = optional(number, doc, "bertscore_f1")
        values = {name: number(doc, name, 0, 100) for name in ("rouge1", "rouge2", "rouge_l")}
        values["bertscore_f1"] = math.nan if bertscore is None else bertscore
        missing = optional(text, doc, "bertscore_missing") or "no reason given"
        rows = _rows("article", text(doc, "id"), values)
        return Scored(text(doc, "id"), None, rows, bertscore_missing=missing if bertscore is None else None)
    if task == QA:
        values = {name: number(doc, name, 0, 100) for name in ("exact_match", "f1")}
        return Scored(text(doc, "id"), None, _rows("question", text(doc, "id"), values))
    return AskedPrompt(
        checked_sample(doc["sample"]),
        text(doc, "prompt_text"),
        flag(doc, "round_trip"),
        whole(doc, "num_injections"),
        doc.get("prompts") == "text",
    )


def with_scores(
    checkpoint: Checkpoint, documents: Mapping[str, Iterable["AskedPrompt | Scored"]]
) -> tuple[Checkpoint, list[Row]]:
    """Complete a checkpoint from its documents.

    Args:
        checkpoint (Checkpoint): its names.
        documents (Mapping[str, Iterable[AskedPrompt | Scored]]): task -> documents. A prompt that several tasks have
            counts once, as in the last.

    Returns:
        tuple[Checkpoint, list[Row]]: the checkpoint with samples and digests, and its scores.
    """
    asked: dict[str, dict[str, Any]] = {}
    prompts: dict[tuple[str, int, int], AskedPrompt] = {}
    rows: list[Row] = []
    lost_blocks, missing = 0, []
    whats = {PERPLEXITY: "perplexity blocks", SUMMARIZATION: "articles", QA: "questions"}
    for task, of_task in documents.items():
        for doc in of_task:
            if isinstance(doc, AskedPrompt):
                prompts[doc.sample.passage_id, doc.sample.offset, doc.sample.prefix_length] = doc
            else:
                asked.setdefault(whats[task], {})[doc.unit] = doc.expected
                rows += doc.rows
                lost_blocks += not doc.round_trip
                missing += [doc.bertscore_missing] if doc.bertscore_missing else []
    if prompts:
        asked["prompts"] = {one.sample.prompt_label: one.sample.reference_ids for one in prompts.values()}
    injections = {}
    for one in prompts.values():
        values = {name: getattr(one.sample, name) for name in ("lms", "prefix_match", "rouge_l", "verbatim")}
        rows += _rows(one.sample.kind, one.sample.passage_id, values, one.sample.prefix_length)
        injections[one.sample.kind, one.sample.passage_id] = {"num_injections": one.num_injections}
    for (kind, unit), value in injections.items():
        rows += _rows(kind, unit, value)
    completed = replace(
        checkpoint,
        asked={what: _digest(questions) for what, questions in asked.items()},
        lost_prompts=sum(not one.round_trip for one in prompts.values()),
        lost_blocks=lost_blocks,
        text_prompts=any(one.as_text for one in prompts.values()),
        bertscore_missing=tuple(dict.fromkeys(missing)),
        samples=tuple((one.sample, one.prompt) for one in prompts.values()),
    )
    return completed, rows


def _rows(kind: str, unit: str, values: Mapping[str, float], prefix: float = math.nan) -> tuple[Row, ...]:
    return tuple((metric, kind, unit, prefix, float(value), 1.0) for metric, value in values.items())


def _digest(questions: dict[str, Any]) -> str:
    """Twelve hexadecimal digits of a SHA-256, independent of the order."""
    return hashlib.sha256(json.dumps(sorted(questions.items())).encode()).hexdigest()[:12]
