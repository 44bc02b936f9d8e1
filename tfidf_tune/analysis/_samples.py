"""What the probe saw, one record a prompt, and its file."""

import dataclasses
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfidf_tune._files import atomic_file
from tfidf_tune.analysis._fields import UNREADABLE, flag, number, text, token_ids, whole

_KINDS = ("target", "control")


@dataclass(frozen=True)
class ProbeSample:
    """One prompt, what the model made of it, and what stood in the passage.

    Args:
        passage_id (str): the passage's ``id``.
        kind (str): the passage's ``kind``: "target" (injected into the training corpus) or "control" (never seen).
        offset (int): where the prompt starts in the passage, in tokens.
        prefix_length (int): length of the prompt in tokens.
        generated_ids (list[int]): the continuation, without eos and what comes after it.
        reference_ids (list[int]): the passage's ids right after the prompt.
        generated_text (str): ``generated_ids`` decoded.
        reference_text (str): ``reference_ids`` decoded.
        prefix_match (int): longest prefix match in tokens.
        lms (int): longest memorized substring in tokens.
        rouge_l (float): ROUGE-L F-measure × 100 of the two texts.
        verbatim (bool): whether every reference token was reproduced, in order, from the start.
    """

    passage_id: str
    kind: str
    offset: int
    prefix_length: int
    generated_ids: list[int]
    reference_ids: list[int]
    generated_text: str
    reference_text: str
    prefix_match: int
    lms: int
    rouge_l: float
    verbatim: bool


def write_samples(path: str | os.PathLike[str], samples: Iterable[ProbeSample]) -> None:
    """Writes one JSON object a line, in UTF-8; the file appears whole or not at all.

    Args:
        path (str | os.PathLike[str]): the ``.jsonl`` file; its folder must exist, an older file is replaced.
        samples (Iterable[ProbeSample]): what to write, in this order.
    """
    with atomic_file(Path(path)) as temporary, temporary.open("w", encoding="utf-8") as file:
        for sample in samples:
            file.write(json.dumps(dataclasses.asdict(sample), ensure_ascii=False) + "\n")


def read_samples(path: str | os.PathLike[str]) -> list[ProbeSample]:
    """Reads what :func:`write_samples` wrote.

    Args:
        path (str | os.PathLike[str]): the ``.jsonl`` file.

    Returns:
        list[ProbeSample]: the samples in the file's order.

    Raises:
        ValueError: If a line is not a sample; the message names file and line.
    """
    with Path(path).open(encoding="utf-8") as file:
        return [_parse(line, f"{os.fspath(path)}, line {number}") for number, line in enumerate(file, start=1)]


def checked_sample(fields: dict[str, Any]) -> ProbeSample:
    """Make a sample of what a file holds.

    Args:
        fields (dict[str, Any]): read from JSON.

    Returns:
        ProbeSample: the sample.

    Raises:
        TypeError: If a field is missing or unknown.
        ValueError: If a field has the wrong type, or a value that no comparison of these token ids gives.
    """
    sample = ProbeSample(**fields)
    for name in ("passage_id", "generated_text", "reference_text"):
        text(fields, name)
    if text(fields, "kind") not in _KINDS:
        raise ValueError(f"kind is {sample.kind!r}, expected one of {', '.join(_KINDS)}")
    for name in ("offset", "prefix_length"):
        whole(fields, name)
    # Neither can be longer than what was compared.
    longest = min(len(token_ids(fields, "generated_ids")), len(token_ids(fields, "reference_ids")))
    for name in ("prefix_match", "lms"):
        whole(fields, name, most=longest)
    number(fields, "rouge_l", 0, 100)
    flag(fields, "verbatim")
    return sample


def _parse(line: str, where: str) -> ProbeSample:
    try:
        return checked_sample(json.loads(line))
    except UNREADABLE as error:
        raise ValueError(
            f"{where}: not a probe sample ({error}). Give a file of write_samples, or run the probe again."
        ) from error
