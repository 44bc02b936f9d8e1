"""The documents of our lm-eval tasks as rows of the table of results."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from pydantic import TypeAdapter

from tfidf_tune.results._documents import (
    MEMBERSHIP,
    MEMORIZATION,
    OTHER_PERPLEXITY,
    PERPLEXITY,
    QA,
    SUMMARIZATION,
    AnswerDocument,
    BlockDocument,
    PassageDocument,
    ProbeSample,
    PromptDocument,
    SummaryDocument,
)
from tfidf_tune.results._table import Checkpoint

Row: TypeAlias = tuple[str, str, str, float, float, float]
"""metric, kind, unit, prefix, value, count."""

_SCHEMAS: dict[str, TypeAdapter[Any]] = {
    MEMORIZATION: TypeAdapter(PromptDocument),
    PERPLEXITY: TypeAdapter(BlockDocument),
    OTHER_PERPLEXITY: TypeAdapter(BlockDocument),
    MEMBERSHIP: TypeAdapter(PassageDocument),
    SUMMARIZATION: TypeAdapter(SummaryDocument),
    QA: TypeAdapter(AnswerDocument),
}
_MATCHES = ("lms", "prefix_match", "rouge_l", "verbatim", "edit_distance", "common_subsequence")
_BY_PREFIX = ("", "greedy")  # attacks whose scores are averaged by the length of the prompt


class Scored(NamedTuple):
    """A document of a task: what was asked, what was expected, and the scores."""

    what: str  # "prompts", "passages", "perplexity blocks", "blocks of other text", "articles", "questions"
    unit: str
    expected: Any
    rows: tuple[Row, ...]
    round_trip: bool = True  # whether token ids survived as text
    bertscore_missing: str | None = None
    sample: ProbeSample | None = None
    prompt: str = ""
    num_injections: int = 0
    as_text: bool = False  # whether the prompt was text


def is_ours(task: str) -> bool:
    """Return whether a task is one of ours."""
    return task.startswith(MEMORIZATION) or task in _SCHEMAS


def parse_document(task: str, doc: Mapping[str, Any]) -> Scored:
    """Check a document and return what the table of results has of it; a wrong one raises one of ``UNREADABLE``."""
    fields = _SCHEMAS[MEMORIZATION if task.startswith(MEMORIZATION) else task].validate_python(doc)
    if task in (PERPLEXITY, OTHER_PERPLEXITY):
        block, count = str(fields["block"]), fields["num_predictions"]
        nll = -fields["log_likelihood"] / count
        metric, what = ("nll", "perplexity blocks") if task == PERPLEXITY else ("other_nll", "blocks of other text")
        row = (metric, "block", block, math.nan, math.inf if math.isnan(nll) else nll, count)
        return Scored(what, block, count, (row,), fields["round_trip"])
    if task == SUMMARIZATION:
        unit, reason = fields.pop("id"), fields.pop("bertscore_missing") or "no reason given"
        if fields["bertscore_f1"] is not None:
            return Scored("articles", unit, None, _rows("article", unit, fields))
        rows = _rows("article", unit, fields | {"bertscore_f1": math.nan})
        return Scored("articles", unit, None, rows, bertscore_missing=reason)
    if task == QA:
        unit = fields.pop("id")
        return Scored("questions", unit, None, _rows("question", unit, fields))
    if task == MEMBERSHIP:
        return _scored_passage(fields)
    sample: ProbeSample = fields["sample"]
    # No match can be longer than the shorter of the two.
    longest = min(len(sample.generated_ids), len(sample.reference_ids))
    for name in ("prefix_match", "lms", "common_subsequence"):
        if (getattr(sample, name) or 0) > longest:
            raise ValueError(f"{name} is {getattr(sample, name)}, expected at most {longest}")
    asked = {name: fields[name] for name in ("prompt_noise", "generation") if fields.get(name)}
    names = _MATCHES if sample.attack in _BY_PREFIX else ()
    scores = {name: value for name in names if (value := getattr(sample, name)) is not None}
    return Scored(
        "prompts",
        sample.prompt_label,
        [sample.reference_ids, asked] if asked else sample.reference_ids,
        _rows(sample.kind, sample.passage_id, scores, sample.prefix_length),
        fields["round_trip"],
        sample=sample,
        prompt=fields["prompt_text"],
        num_injections=fields["num_injections"],
        as_text=fields.get("prompts") == "text",
    )


def with_scores(checkpoint: Checkpoint, documents: Iterable[Scored]) -> tuple[Checkpoint, list[Row]]:
    """Complete a checkpoint from the documents of all tasks; return it and its scores.

    A prompt that several tasks have counts once, as in the last.
    """
    found = {(doc.what, doc.unit): doc for doc in documents}
    prompts = [(doc.sample, doc) for doc in found.values() if doc.sample is not None]
    others = [doc for doc in found.values() if doc.sample is None]
    in_order = [*others, *(doc for _, doc in prompts)]
    asked: dict[str, dict[str, Any]] = {}
    for doc in in_order:
        asked.setdefault(doc.what, {})[doc.unit] = doc.expected
    injections = {(sample.kind, sample.passage_id): doc.num_injections for sample, doc in prompts}
    rows = [row for doc in in_order for row in doc.rows]
    rows += [row for at, number in injections.items() for row in _rows(*at, {"num_injections": number})]
    completed = replace(
        checkpoint,
        asked={
            what: hashlib.sha256(json.dumps(sorted(questions.items())).encode()).hexdigest()[:12]
            for what, questions in asked.items()
        },
        lost_prompts=sum(not doc.round_trip for _, doc in prompts),
        lost_blocks=sum(not doc.round_trip for doc in others if doc.what == "perplexity blocks"),
        text_prompts=any(doc.as_text for doc in in_order),
        bertscore_missing=tuple(dict.fromkeys(doc.bertscore_missing for doc in others if doc.bertscore_missing)),
        samples=tuple((sample, doc.prompt) for sample, doc in prompts),
    )
    return completed, rows


def _scored_passage(fields: Mapping[str, Any]) -> Scored:
    kind, unit = fields["kind"], fields["passage_id"]
    defined = {name: _defined(name, value) for name, value in fields["scores"].items()}
    rows = _rows(kind, unit, {"passage_nll": defined.pop("nll"), **defined})  # "nll" is that of perplexity blocks
    for prefix, nll in fields["continuations"]:
        rows += _rows(kind, unit, {"continuation_nll": _defined("nll", nll)}, prefix)
    as_text = fields["prompts"] == "text"
    return Scored("passages", f"{kind} {unit}", fields["token_ids"], rows, fields["round_trip"], as_text=as_text)


def _defined(name: str, value: float) -> float:
    """Return a score; of a diverged model an infinite NLL, and no other score."""
    if math.isfinite(value):
        return value
    return math.inf if name == "nll" else math.nan


def _rows(kind: str, unit: str, values: Mapping[str, float], prefix: float = math.nan) -> tuple[Row, ...]:
    return tuple((metric, kind, unit, prefix, float(value), 1.0) for metric, value in values.items())
