"""``tfidf_membership``: the likelihood of each passage, and whether it tells training text from
unseen text.

One forward pass over each complete passage of a probe file, without generation. A model that does
not recite a passage can still find it likelier than unseen text: then membership inference detects
it, and sampling can extract it.
"""

import math
from collections.abc import Callable, Sequence
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
    roc_auc,
    true_positive_rate,
    zlib_score,
)
from tfidf_tune.tasks._kept import kept
from tfidf_tune.tasks._task import task_documents
from tfidf_tune.tasks.memorization import probed, whole_numbers


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
    for passage in passages:
        # A passage without a prompt of its own is scored after its first token.
        if passage.num_prompt is None:
            first, num_given, starts = offset, 1, [(length, length) for length in lengths]
            prompts.check_length(num_bos + offset + max(lengths) + 1, "offset or the prefix length")
        else:
            first, num_given, starts = 0, passage.num_prompt, [(0, passage.num_prompt)]
            prompts.check_length(
                num_bos + num_given + 1, f"the length of the prompt of {passage.id!r}"
            )
        # Longer passages are cut: what follows cannot be scored.
        last = None if prompts.positions is None else prompts.positions - num_bos
        ids = passage.token_ids[first:last]
        row: dict[str, Any] = {
            "passage_id": passage.id,
            "kind": passage.kind,
            "num_injections": passage.num_injections,
            "source": passage.source,
            "offset": first,
            "token_ids": ids,
            "num_given": num_given,
            "text": prompts.tokenizer.decode(
                ids if passage.num_prompt is None else ids[num_given:]
            ),
            "spans": [
                [prefix, start, min(start + max_new_tokens, len(ids))] for prefix, start in starts
            ],
        }
        rows.append(row | prompts.scored_text(ids, num_given))
    if reference_model:
        given = [prompts.with_bos(row["token_ids"]) for row in rows]
        scores = kept(
            digest(["reference", reference_model, given]),
            partial(_token_nlls, reference_model, given),
        )
        for row, ids, nll in zip(rows, given, scores, strict=True):
            # The first of the ids has no NLL.
            num_unscored = len(ids) - len(row["token_ids"]) + row["num_given"] - 1
            row["reference_nll"] = float(nll[num_unscored:].mean())
    return task_documents(rows, "passages", prompts)


def _token_nlls(reference_model: str, given: Sequence[Sequence[int]]) -> list[Any]:
    model = load_model(reference_model, device="cuda" if torch.cuda.is_available() else "cpu")
    return [tokens.nll for tokens in token_likelihoods(model, given)]


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
        doc["continuations"] = [
            [prefix, float(tokens.nll[start - doc["num_given"] : end - doc["num_given"]].sum())]
            for prefix, start, end in doc["spans"]
        ]
    if (reference_nll := doc.pop("reference_nll", None)) is not None:
        scores["reference_nll"] = reference_nll
    doc["scores"] = scores
    is_target = doc["kind"] == "target"
    attacks = membership_scores({name: np.array(value) for name, value in scores.items()})
    return {
        "nll": scores["nll"] if is_target else None,
        "control_nll": None if is_target else scores["nll"],
        "tpr_loss": (is_target, -scores["nll"]),
        **{metric: (is_target, attacks.get(attack)) for attack, metric in _AUC_METRICS.items()},
        "round_trip": float(doc["round_trip"]),
        "num_not_round_trip": float(not doc["round_trip"]),
    }


_AUC_METRICS = {
    "Loss": "auc_loss",
    "zlib": "auc_zlib",
    "Min-K%": "auc_min_k",
    "Min-K%++": "auc_min_k_plus_plus",
    "Loss against start": "auc_loss_against_start",
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
    targets, controls = (
        [score for kind, score in values if kind == wanted] for wanted in (True, False)
    )
    is_known = all(score is not None and math.isfinite(score) for _, score in values)
    return (
        float(measure(np.array(targets), np.array(controls)))
        if is_known and targets and controls
        else math.nan
    )
