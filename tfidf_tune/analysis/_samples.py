"""What the probe saw, one record a prompt, and its file."""

import dataclasses
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tfidf_tune._files import atomic_file


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


def _parse(line: str, where: str) -> ProbeSample:
    try:
        return ProbeSample(**json.loads(line))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{where}: not a probe sample ({error}). Give a file of write_samples, or run the probe again."
        ) from error
