"""``tfidf_memorization``: continue the start of a passage and compare with the true continuation.

Section "Memorization" of the paper: prefixes of 32, 50 and 100 tokens, 128 tokens generated
greedily, longest prefix match, LMS (longest memorized substring) and ROUGE-L; for passages of the
training text (targets) and for passages that are not in it (controls), which show the chance
baseline.
"""

import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from datasets import Dataset

from tfidf_tune._checks import check_at_least
from tfidf_tune._files import digest
from tfidf_tune._tokenizer import TokenArray
from tfidf_tune.passages import Passage, read_probe_file
from tfidf_tune.passages.copies import noisy_copy
from tfidf_tune.probe import check_passages
from tfidf_tune.probe.attacks import PREFIX_LENGTHS, Attack, generation, require_noise
from tfidf_tune.probe.memorization import best_continuation, compare_continuation
from tfidf_tune.probe.prompts import chat_messages, cut_passage
from tfidf_tune.probe.sample_fields import Unanswered
from tfidf_tune.tasks._kept import kept
from tfidf_tune.tasks._requests import TokenIdPrompts, prompts_of
from tfidf_tune.tasks._task import task_documents
from tfidf_tune.tasks.settings import prompts_for

PROBE_FILE_VARIABLE = "TFIDF_TUNE_PROBE_FILE"


def documents(
    *,
    task_prefix_length: int | None = None,
    probe_file: str | None = None,
    prefix_lengths: int | str | Sequence[int] = PREFIX_LENGTHS,
    max_new_tokens: int = 128,
    offset: int = 0,
    prompt_noise: float = 0.0,
    num_samples: int | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    num_beams: int | None = None,
    attacks: Sequence[Mapping[str, Any]] | None = None,
    **metadata: Any,
) -> dict[str, Dataset]:
    """Make a document of each passage and prefix length; ``docs/evaluation.md`` describes the
    settings.

    A completion has one document, whose prompt is its own. With ``attacks``, fields of
    :class:`~tfidf_tune.probe.attacks.Attack`, there is one of each passage and attack instead.

    ``task_prefix_length`` is that of a task with one length; in a string of ``prefix_lengths`` the
    numbers count.
    """
    # How each passage is asked for: by the settings, or by a plan of attacks.
    lengths = whole_numbers(prefix_lengths) if task_prefix_length is None else [task_prefix_length]
    check_at_least(0, offset=offset)
    check_at_least(1, max_new_tokens=max_new_tokens)
    require_noise(prompt_noise)
    decoding = generation(num_samples, temperature, top_k, num_beams)
    if attacks is None:
        planned = [Attack("", length, offset, prompt_noise, decoding) for length in lengths]
    else:
        planned = [Attack(**fields) for fields in attacks]
    # Passages are checked before a document is made; noise draws from all their tokens.
    longest_prompt = max(attack.offset + attack.prefix_length for attack in planned)
    prompts, passages = probed(metadata, probe_file, longest_prompt)
    every_token = np.concatenate(
        [np.array(passage.token_ids, dtype=np.int32) for passage in passages]
    )
    rows = []
    earlier_names: set[str] = set()
    for attack in planned:
        # A completion has its prompt: it is asked for once by each attack that does not choose
        # another one, and not again for each prefix length.
        chooses_prompt = attack.name in ("offset", "truncated")
        asks_for_completions = not chooses_prompt and attack.name not in earlier_names
        earlier_names.add(attack.name)
        for passage in passages:
            if passage.num_prompt is None or asks_for_completions:
                row = _document(prompts, passage, attack, max_new_tokens, every_token)
                rows.append(row)
    longest_sequence = max(row["num_asked"] + row["max_new_tokens"] for row in rows)
    prompts.check_length(longest_sequence, "max_new_tokens or the prefix length")
    return task_documents(rows, "prompts or references", prompts)


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float | None]:
    """Score responses, and add ``sample`` to the document for the log; metrics of the other kind
    are None.

    Of several responses each measure is the best.
    """
    prompts = prompts_of(doc)
    reference_ids = doc["reference_ids"]
    samples = []
    for response in results:
        generated_ids = prompts.response_ids(response, doc["prompt_ids"], reference_ids)
        sample = compare_continuation(
            passage_id=doc["passage_id"],
            kind=doc["kind"],
            offset=doc["offset"],
            prefix_length=doc["prefix_length"],
            attack=doc["attack"],
            # A model may generate more than was asked for.
            generated_ids=generated_ids[: len(reference_ids)],
            generated_text=prompts.response_text(response),
            reference_ids=reference_ids,
            reference_text=doc["reference_text"],
            unanswered=int(isinstance(response, Unanswered)),
        )
        samples.append(sample)
    sample = best_continuation(samples)
    doc["sample"] = asdict(sample)
    scores: dict[str, float | None] = {
        "avg_prefix": sample.prefix_match,
        "max_prefix": sample.prefix_match,
        "avg_lms": sample.lms,
        "max_lms": sample.lms,
        "rouge_l": sample.rouge_l,
        "verbatim_rate": float(sample.verbatim),
        "edit_distance": sample.edit_distance,
        "common_subsequence": sample.common_subsequence,
    }
    # Aggregations leave out None: each metric is over targets or over controls.
    is_target = sample.kind == "target"
    metrics: dict[str, float | None] = {}
    for name, score in scores.items():
        metrics[name] = score if is_target else None
    for name, score in scores.items():
        metrics[f"control_{name}"] = None if is_target else score
    metrics["round_trip"] = float(doc["round_trip"])
    metrics["num_not_round_trip"] = float(not doc["round_trip"])
    return metrics


def mean(values: Sequence[float | None]) -> float:
    """Return the mean of the values that are not None; nan if all are, for example without
    controls.
    """
    present = [value for value in values if value is not None]
    return float(np.mean(present)) if present else float("nan")


def maximum(values: Sequence[float | None]) -> float:
    """Return the largest of the values that are not None; nan if all are."""
    present = [value for value in values if value is not None]
    return float(max(present, default=float("nan")))


def _document(
    prompts: TokenIdPrompts,
    passage: Passage,
    attack: Attack,
    max_new_tokens: int,
    every_token: TokenArray,
) -> dict[str, Any]:
    prompt_ids, reference_ids = cut_passage(
        passage, attack.prefix_length, max_new_tokens, attack.offset
    )
    # Seeded by the passage, so that a second evaluation asks the same.
    if attack.prompt_noise:
        rng = np.random.default_rng([zlib.crc32(passage.id.encode()), len(prompt_ids)])
        clean = np.array(prompt_ids, dtype=np.int32)
        noisy = noisy_copy(
            clean,
            max(attack.prompt_noise, 1 / len(clean)),  # at least one token
            "replace",
            every_token,
            0,
            rng,
            origin="prompt_noise draws tokens from the passages",
        )
        prompt_ids = noisy.token_ids.tolist()
    is_completion = passage.num_prompt is not None
    prompt_text = prompts.tokenizer.decode(prompt_ids)
    messages = None
    asked_ids = prompts.with_bos(prompt_ids)
    if attack.name == "chat":
        messages = chat_messages(prompt_text)
        asked_ids = prompts.chat_ids(messages)
    return {
        "passage_id": passage.id,
        "kind": passage.kind,
        "num_injections": passage.num_injections,
        "source": passage.source,
        "offset": 0 if is_completion else attack.offset,
        "prefix_length": 0 if is_completion else attack.prefix_length,
        "prompt_ids": prompt_ids,
        "reference_ids": reference_ids,
        "request": prompts.request(asked_ids),
        "num_asked": len(asked_ids),
        "attack": attack.name,
        "prompt_text": prompt_text,
        "reference_text": prompts.tokenizer.decode(reference_ids),
        "round_trip": prompts.is_exact(prompt_ids, reference_ids),
        "has_eos": prompts.tokenizer.eos_id in reference_ids,
        "max_new_tokens": len(reference_ids),
        # A data set has the columns of its first row.
        "prompt_noise": float(attack.prompt_noise) or None,
        "generation": attack.generation or None,
        "messages": messages,
    }


def whole_numbers(value: int | str | Sequence[int]) -> list[int]:
    """Return the distinct prefix lengths of a setting, in order."""
    if isinstance(value, str):
        lengths = [int(number) for number in re.findall(r"\d+", value)]
    elif not isinstance(value, Sequence):
        lengths = [value]
    else:
        lengths = [*value]
    if not lengths:
        raise ValueError(
            "prefix_lengths names no length: give for example --metadata prefix_lengths=[16,64]"
        )
    for length in lengths:
        check_at_least(1, prefix_lengths=length)
    return list(dict.fromkeys(lengths))


def probed(
    metadata: Mapping[str, Any], probe_file: str | None, num_prompt: int
) -> tuple[TokenIdPrompts, list[Passage]]:
    """Return the way to send prompts, and the passages, none shorter than the longest prompt.

    The probe file is that of the settings or of the environment.
    """
    prompts = prompts_for(metadata)
    file = probe_file or os.environ.get(PROBE_FILE_VARIABLE)
    if not file:
        raise ValueError(
            "no probe file is named: give --metadata probe_file=RUN/probe.jsonl, or set "
            f"{PROBE_FILE_VARIABLE}; `tfidf-tune probe make` makes one of your own text"
        )
    passages = kept(digest(["passages", str(file)]), partial(read_probe_file, file))
    check_passages(prompts.tokenizer, passages, num_prompt)
    return prompts, passages
