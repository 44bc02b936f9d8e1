"""Whether runs were asked the same: without that, a difference says nothing about the objectives."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

from tfidf_tune.analysis._runs import Evaluation, Run

# What is asked, and of an evaluation: each question and what was expected of it.
_ASKED: dict[str, Callable[[Evaluation], dict[Any, Any]]] = {
    "prompts": lambda evaluation: {
        f"{s.kind} {s.passage_id}, offset {s.offset}, {s.prefix_length} tokens": s.reference_ids
        for s in evaluation.samples
    },
    "perplexity blocks": lambda evaluation: {block.block: block.num_predictions for block in evaluation.blocks},
    "articles": lambda evaluation: {summary.id: None for summary in evaluation.summaries},
    "questions": lambda evaluation: {answer.id: None for answer in evaluation.answers},
}


def require_comparable(runs: Iterable[Run]) -> None:
    """Check that all evaluations of a model had the same prompts, references, blocks, articles and questions.

    Runs of different learning rates are asked the same too: that is what makes a curve of them.

    Args:
        runs (Iterable[Run]): of any models. A task that was not run is no difference.

    Raises:
        ValueError: If two evaluations of one model differ; the message names both and the first difference.
    """
    by_model = sorted(runs, key=lambda run: run.model)
    for _, same_model in groupby(by_model, key=lambda run: run.model):
        evaluations = [(run, evaluation) for run in same_model for evaluation in run.evaluations]
        for what, asked_of in _ASKED.items():
            _require_same(what, [(*where, asked) for where in evaluations if (asked := asked_of(where[1]))])


def asked_digest(evaluation: Evaluation) -> str:
    """Name what was asked for LMS and perplexity in a word: two evaluations of one digest can be compared.

    Args:
        evaluation (Evaluation): of one checkpoint.

    Returns:
        str: 12 hexadecimal digits of a SHA-256 over prompts, references and blocks, whatever their order.
    """
    asked = [sorted(_ASKED[what](evaluation).items()) for what in ("prompts", "perplexity blocks")]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:12]


def _require_same(what: str, asked: Sequence[tuple[Run, Evaluation, dict[Any, Any]]]) -> None:
    for run, evaluation, expected in asked[1:]:
        first_run, first_evaluation, first_expected = asked[0]
        if expected == first_expected:
            continue
        raise ValueError(
            f"{_title(first_run, first_evaluation)} and {_title(run, evaluation)} cannot be compared, their {what} "
            f"differ: {_difference(first_expected, expected)}. Evaluate both with one probe file, data set and settings"
        )


def _title(run: Run, evaluation: Evaluation) -> str:
    return f"{run.folder} ({run.setting}, {run.objective}, {evaluation.progress} %)"


def _difference(first: dict[Any, Any], second: dict[Any, Any]) -> str:
    for key in first | second:
        if key not in second:
            return f"only the first has {key}"
        if key not in first:
            return f"only the second has {key}"
        if first[key] != second[key]:
            return f"{key} expects {_short(first[key])} in the first and {_short(second[key])} in the second"
    raise AssertionError("called with equal questions")


def _short(value: Any) -> str:
    return f"{value[:5]}... ({len(value)} ids)" if isinstance(value, list) else f"{value} predictions"
