"""One prompt of the memorization probe with the model's continuation, and files of them."""

import dataclasses
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfidf_tune._files import atomic_file
from tfidf_tune.results._fields import FLAG, TEXT, TOKEN_IDS, UNREADABLE, Field, checked, number, whole

_SCHEMA = {
    **dict.fromkeys(("passage_id", "generated_text", "reference_text"), TEXT),
    "kind": Field(lambda value: value in ("target", "control"), "one of target, control"),
    **dict.fromkeys(("offset", "prefix_length"), whole()),
    **dict.fromkeys(("generated_ids", "reference_ids"), TOKEN_IDS),
    "rouge_l": number(0, 100),
    "verbatim": FLAG,
}


@dataclass(frozen=True)
class ProbeSample:
    """One prompt, its continuation and its scores.

    Args:
        passage_id (str): id of the passage.
        kind (str): "target" (injected into the training text) or "control" (never seen in training).
        offset (int): where the prompt starts in the passage, in tokens.
        prefix_length (int): length of the prompt in tokens.
        generated_ids (list[int]): the continuation, without EOS and what follows it.
        reference_ids (list[int]): the ids that follow the prompt in the passage.
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

    @property
    def prompt_label(self) -> str:
        """The prompt in messages: "target a, offset 0, 32 tokens"."""
        return f"{self.kind} {self.passage_id}, offset {self.offset}, {self.prefix_length} tokens"


def write_samples(path: str | os.PathLike[str], samples: Iterable[ProbeSample]) -> None:
    """Write samples to a ``.jsonl`` file, one JSON object a line; an older file is replaced atomically."""
    with atomic_file(Path(path)) as temporary, temporary.open("w", encoding="utf-8") as file:
        for sample in samples:
            file.write(json.dumps(dataclasses.asdict(sample), ensure_ascii=False) + "\n")


def read_samples(path: str | os.PathLike[str]) -> list[ProbeSample]:
    """Read a file of :func:`write_samples`.

    Raises:
        ValueError: If a line is not a sample; the message names file and line.
    """
    samples = []
    with Path(path).open(encoding="utf-8") as file:
        try:
            for line in file:
                samples.append(checked_sample(json.loads(line)))  # noqa: PERF401 (counted for the message)
        except UNREADABLE as error:
            raise ValueError(
                f"{os.fspath(path)}, line {len(samples) + 1}: not a probe sample ({error}). Give a file of "
                "write_samples, or run the probe again."
            ) from error
    return samples


def checked_sample(fields: dict[str, Any]) -> ProbeSample:
    """Make a sample from JSON.

    Raises:
        TypeError: If a field is missing or unknown.
        ValueError: If a field has the wrong type, or a value that these token ids cannot have.
    """
    sample = ProbeSample(**fields)
    values = checked(fields, _SCHEMA)
    # Neither match can be longer than the shorter of the two.
    longest = whole(most=min(len(sample.generated_ids), len(sample.reference_ids)))
    return ProbeSample(**values | checked(fields, {"prefix_match": longest, "lms": longest}))
