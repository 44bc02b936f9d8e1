"""``tfidf_membership``: the likelihood of each passage, and whether it tells training text from
unseen text.

One forward pass over each complete passage of a probe file, without generation. A model that does
not recite a passage can still find it likelier than unseen text: then membership inference detects
it, and sampling can extract it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from tfidf_tune._checks import check_at_least
from tfidf_tune._files import digest
from tfidf_tune.probe import TokenLikelihoods, load_model, token_likelihoods
from tfidf_tune.probe.attacks import PREFIX_LENGTHS
from tfidf_tune.probe.membership_scores import (
    membership_scores,
    passage_scores,
    reference_scores,
    roc_auc,
    true_positive_rate,
    zlib_score,
)
from tfidf_tune.tasks._kept import kept
from tfidf_tune.tasks._requests import TokenIdPrompts
from tfidf_tune.tasks._task import task_documents
from tfidf_tune.tasks.memorization import probed, whole_numbers

_compute_nlls: ContextVar[Callable[[Sequence[Sequence[int]]], list[Any]] | None] = ContextVar(
    "compute_nlls", default=None
)


def documents(
    *,
    probe_file: str | None = None,
    prefix_lengths: int | str | Sequence[int] = PREFIX_LENGTHS,
    max_new_tokens: int = 128,
    offset: int = 0,
    reference_model: str | None = None,
    **metadata: Any,
) -> dict[str, Dataset]:
    """Make a document of each passage; ``docs/evaluation.md`` describes the settings.

    Of a passage, the tokens after the first one from ``offset`` on are scored, of a completion
    those after its prompt; both as far as the model has positions.
    """
    lengths = whole_numbers(prefix_lengths)
    check_at_least(1, max_new_tokens=max_new_tokens)
    check_at_least(0, offset=offset)
    prompts, passages = probed(metadata, probe_file, offset + max(lengths))
    rows: list[dict[str, Any]] = []
    num_bos = len(prompts.bos_ids)
    # Longer passages are cut: what follows cannot be scored.
    last = None if prompts.positions is None else prompts.positions - num_bos
    for passage in passages:
        if passage.num_prompt is None:
            # A passage without a prompt of its own is scored after its first token.
            prompts.check_length(num_bos + offset + max(lengths) + 1, "offset or the prefix length")
            first = offset
            num_given = 1
            prompt_lengths = lengths
        else:
            first = 0
            num_given = passage.num_prompt
            prompts.check_length(
                num_bos + num_given + 1, f"the length of the prompt of {passage.id!r}"
            )
            prompt_lengths = [num_given]
        ids = passage.token_ids[first:last]
        # The continuations of the prompts: length of the prompt, first token and end.
        spans = []
        for length in prompt_lengths:
            prefix_length = length if passage.num_prompt is None else 0
            spans.append([prefix_length, length, min(length + max_new_tokens, len(ids))])
        row: dict[str, Any] = {
            "passage_id": passage.id,
            "kind": passage.kind,
            "num_injections": passage.num_injections,
            "source": passage.source,
            "offset": first,
            "token_ids": ids,
            "num_given": num_given,
            # Of a completion without its prompt.
            "text": prompts.tokenizer.decode(ids[passage.num_prompt or 0 :]),
            "spans": spans,
            "is_random": bool(passage.is_random),
        }
        rows.append(row | prompts.scored_text(ids, num_given))
    if reference_model:
        _add_reference_nlls(rows, prompts, reference_model)
    return task_documents(rows, "passages", prompts)


def _add_reference_nlls(
    rows: Sequence[dict[str, Any]], prompts: TokenIdPrompts, reference_model: str
) -> None:
    """Add to each row the NLLs under a reference model, of the same tokens as under the model.

    The first of the ids has no NLL. With a BOS in front of a passage ``a b c d``, of which ``a b``
    are given::

        ids            <s>  a  b  c  d       5
        NLLs                a  b  c  d       4, of which 5 - 4 + 2 - 1 = 2 are not counted
    """
    texts = [prompts.with_bos(row["token_ids"]) for row in rows]
    key = digest(["reference", reference_model, texts])
    nlls = kept(key, partial(_token_nlls, reference_model, texts))
    for row, ids, nll in zip(rows, texts, nlls, strict=True):
        num_bos = len(ids) - len(row["token_ids"])
        num_unscored = num_bos + row["num_given"] - 1
        row["reference_nlls"] = nll[num_unscored:].tolist()


@contextmanager
def reference_nlls_by(compute: Callable[[Sequence[Sequence[int]]], list[Any]]) -> Iterator[None]:
    """Compute the NLLs under the reference by a function in a block, not by loading a model."""
    token = _compute_nlls.set(compute)
    try:
        yield
    finally:
        _compute_nlls.reset(token)


def _token_nlls(reference_model: str, texts: Sequence[Sequence[int]]) -> list[Any]:
    compute = _compute_nlls.get()
    if compute is not None:
        return compute(texts)
    model = load_model(reference_model, device="cuda" if torch.cuda.is_available() else "cpu")
    return [tokens.nll for tokens in token_likelihoods(model, texts)]


def process_results(doc: dict[str, Any], results: list[tuple[float, bool]]) -> dict[str, Any]:
    """Add ``scores`` and ``continuations`` to the document for the log, and return the metrics.

    A model of the harness gives the sum of the log-likelihoods only; from ours there are those of
    all tokens.
    """
    # By token from our models, from others only the sum.
    tokens: TokenLikelihoods | None = getattr(results[0], "tokens", None)
    if tokens is None:
        nll = -results[0][0]
        scores = {"nll": nll / doc["num_predictions"], "zlib": zlib_score(nll, doc["text"])}
        doc["continuations"] = []
    else:
        scores = passage_scores(tokens.nll, tokens.standardized, doc["text"])
        continuations = []
        for prefix_length, start, end in doc["spans"]:
            # Tokens that were given have no likelihood.
            nll_of_span = tokens.nll[start - doc["num_given"] : end - doc["num_given"]]
            continuations.append([prefix_length, float(nll_of_span.sum())])
        doc["continuations"] = continuations
    # The log has the scores only.
    reference_nlls = doc.pop("reference_nlls", None)
    if reference_nlls is not None:
        reference_nll = np.array(reference_nlls)
        if tokens is None:
            scores["reference_nll"] = float(reference_nll.mean())
        else:
            scores |= reference_scores(tokens.nll, reference_nll, tokens.greedy)
    doc["scores"] = scores
    is_target = doc["kind"] == "target"
    metrics: dict[str, Any] = {
        "nll": scores["nll"] if is_target else None,
        "control_nll": None if is_target else scores["nll"],
        "tpr_loss": (is_target, -scores["nll"]),
    }
    attacks = membership_scores({name: np.array(value) for name, value in scores.items()})
    for attack, metric in _AUC_METRICS.items():
        score = attacks.get(attack)
        # A number, because the harness would log an array as text.
        metrics[metric] = (is_target, None if score is None else float(score))
    metrics["round_trip"] = float(doc["round_trip"])
    metrics["num_not_round_trip"] = float(not doc["round_trip"])
    return metrics


_AUC_METRICS = {
    "Loss": "auc_loss",
    "zlib": "auc_zlib",
    "Min-K%": "auc_min_k",
    "Min-K%++": "auc_min_k_plus_plus",
    "Loss against start": "auc_loss_against_start",
    "WBC": "auc_wbc",
    "Error zone": "auc_error_zone",
}


def auc(values: Sequence[tuple[bool, float | None]]) -> float:
    """Return the AUC of scores, each with whether it is a target's; nan if a score or a kind is
    missing.
    """
    return _separation(roc_auc, values)


def true_positives(values: Sequence[tuple[bool, float | None]]) -> float:
    """Return the true positive rate at 1 % false positives; nan as :func:`auc`."""
    return _separation(true_positive_rate, values)


def _separation(
    measure: Callable[[Any, Any], Any], values: Sequence[tuple[bool, float | None]]
) -> float:
    targets = []
    controls = []
    for is_target, score in values:
        if score is None or not math.isfinite(score):
            return math.nan
        if is_target:
            targets.append(score)
        else:
            controls.append(score)
    if not targets or not controls:
        return math.nan
    return float(measure(np.array(targets), np.array(controls)))
