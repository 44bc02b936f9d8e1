"""``tfidf_positive_control`` and ``tfidf_positive_control_nll``: can the model read a passage that
it is shown?

See :mod:`tfidf_tune.probe.positive_control`. The first task asks for continuations, the second for
likelihoods.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from datasets import Dataset

from tfidf_tune.passages import Passage
from tfidf_tune.probe.attacks import PREFIX_LENGTHS
from tfidf_tune.probe.metrics import longest_memorized_substring
from tfidf_tune.probe.positive_control import ControlPrompt, control_prompts, unigram_nll
from tfidf_tune.probe.prompts import chat_messages
from tfidf_tune.probe.sample_fields import Unanswered
from tfidf_tune.tasks._requests import TokenIdPrompts, prompts_of
from tfidf_tune.tasks._task import task_documents
from tfidf_tune.tasks.memorization import probed, whole_numbers


def documents(
    *,
    probe_file: str | None = None,
    prefix_lengths: int | str | Sequence[int] = PREFIX_LENGTHS,
    attacks: Sequence[Mapping[str, Any]] | None = None,
    **metadata: Any,
) -> dict[str, Dataset]:
    """Make two documents of each of ten controls: its prompt with a copy of the passage before it,
    and without.

    The settings are those of :func:`tfidf_tune.tasks.memorization.documents`. With ``attacks``, the
    controls are asked for as a text, as a chat, or both, whichever way there is an attack of.
    """
    prompts, controls, shortest = _controls(metadata, probe_file, prefix_lengths)
    names = {attack["name"] for attack in attacks or [{"name": ""}]}
    rows = []
    if names != {"chat"}:
        asked = _prompts(prompts, controls, shortest, len(prompts.bos_ids))
        rows += [_document(prompts, prompt, "text") for prompt in asked]
    if "chat" in names:
        # A chat has its template and an instruction around the text.
        around = prompts.chat_ids(chat_messages(""))
        asked = _prompts(prompts, controls, shortest, len(around))
        rows += [_document(prompts, prompt, "chat") for prompt in asked]
    return task_documents(rows, "prompts of the positive control", prompts)


def _document(prompts: TokenIdPrompts, prompt: ControlPrompt, path: str) -> dict[str, Any]:
    text = prompts.tokenizer.decode(prompt.prompt_ids)
    messages = None
    asked_ids = prompts.with_bos(prompt.prompt_ids)
    if path == "chat":
        messages = chat_messages(text)
        asked_ids = prompts.chat_ids(messages)
    return {
        "passage_id": prompt.passage_id,
        "path": path,
        "has_copy": prompt.has_copy,
        "prompt_ids": prompt.prompt_ids,
        "prompt_text": text,
        "reference_ids": prompt.reference_ids,
        "reference_text": prompts.tokenizer.decode(prompt.reference_ids),
        "request": prompts.request(asked_ids),
        "max_new_tokens": len(prompt.reference_ids),
        "messages": messages,
        "round_trip": prompts.is_exact(prompt.prompt_ids, prompt.reference_ids),
    }


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float | None]:
    """Add ``num_read`` to the document for the log, the longest run of the passage's tokens in the
    response.
    """
    prompts = prompts_of(doc)
    response = results[0]
    reference = doc["reference_ids"]
    ids = prompts.response_ids(response, doc["prompt_ids"], reference)
    # A model may generate more than was asked for.
    doc["num_read"] = longest_memorized_substring(ids[: len(reference)], reference)
    doc["generated_text"] = prompts.response_text(response)
    doc["unanswered"] = int(isinstance(response, Unanswered))
    return {
        "num_read": float(doc["num_read"]) if doc["has_copy"] else None,
        "num_read_without_copy": None if doc["has_copy"] else float(doc["num_read"]),
    }


def likelihood_documents(
    *,
    probe_file: str | None = None,
    prefix_lengths: int | str | Sequence[int] = PREFIX_LENGTHS,
    **metadata: Any,
) -> dict[str, Dataset]:
    """Make the same documents for the likelihood of what follows the prompts."""
    prompts, controls, shortest = _controls(metadata, probe_file, prefix_lengths)
    frequencies: Counter[int] = Counter()
    for passage in controls:
        frequencies.update(passage.token_ids)
    rows = []
    for prompt in _prompts(prompts, controls, shortest, len(prompts.bos_ids)):
        ids = prompt.prompt_ids + prompt.reference_ids
        num_given = len(prompt.prompt_ids)
        reference_ids = np.array(prompt.reference_ids, dtype=np.int32)
        row = {
            "passage_id": prompt.passage_id,
            "has_copy": prompt.has_copy,
            "token_ids": ids,
            "num_given": num_given,
            "unigram_nll": unigram_nll(reference_ids, frequencies),
        }
        rows.append(row | prompts.scored_text(ids, num_given))
    return task_documents(rows, "passages of the positive control", prompts)


def process_likelihoods(
    doc: dict[str, Any], results: list[tuple[float, bool]]
) -> dict[str, float | None]:
    """Add ``nll`` to the document for the log, a mean over tokens in nats."""
    doc["nll"] = -results[0][0] / doc["num_predictions"]
    return {
        "nll": doc["nll"] if doc["has_copy"] else None,
        "nll_without_copy": None if doc["has_copy"] else doc["nll"],
    }


def _controls(
    metadata: Mapping[str, Any], probe_file: str | None, prefix_lengths: int | str | Sequence[int]
) -> tuple[TokenIdPrompts, list[Passage], int]:
    """Return how prompts are sent, the controls of the probe file, and the
    shortest prefix length.
    """
    shortest = min(whole_numbers(prefix_lengths))
    prompts, passages = probed(metadata, probe_file, shortest)
    controls = [passage for passage in passages if passage.kind == "control"]
    if not controls:
        raise ValueError(
            "the probe file has no controls, so there is no positive control: add controls to it"
        )
    return prompts, controls, shortest


def _prompts(
    prompts: TokenIdPrompts, controls: Sequence[Passage], shortest: int, num_around: int = 0
) -> list[ControlPrompt]:
    """Return what the controls are asked, with ``num_around`` more tokens in each prompt."""
    blank_line = prompts.tokenizer.encode(
        "\n\n", add_bos=False, add_eos=False, trim_leading_whitespace=True
    )
    num_positions = None if prompts.positions is None else prompts.positions - num_around
    # A completion has a prompt of its own.
    asked = [
        (passage.id, passage.token_ids, passage.num_prompt or shortest) for passage in controls
    ]
    return control_prompts(asked, blank_line, num_positions)
