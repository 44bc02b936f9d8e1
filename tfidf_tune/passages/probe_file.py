"""The passages whose memorization is measured, and the probe file that carries them to the
evaluation.
"""

import json
import reprlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from tfidf_tune._checks import first_problem
from tfidf_tune._files import atomic_file
from tfidf_tune._tokenizer import (
    TextTokenizer,
    TokenArray,
    decode_whole,
    tokenizer_fingerprint,
    tokenizer_name,
)

# The data sets hold them as int32.
_TokenId = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
# Results are read with numbers up to this.
_Count = Annotated[int, Field(strict=True, ge=0, le=2**53)]
_Pair = Annotated[list[_Count], Field(min_length=2, max_length=2)]
_Changes = Annotated[list[_Count], Field(min_length=3, max_length=3)]
PassageKind = Literal["target", "control"]
_ONE_FILE = (
    "do not join probe files, make one file from all texts (`tfidf-tune probe make TEXT1 TEXT2 "
    "...`)"
)
MOST_PASSAGES = 100
"""Targets that are chosen if no number is given: as many as in the paper."""
FEWEST_PASSAGES = 10
"""Targets, or controls, that there should be: a report judges nothing from fewer."""
SHORTEST_PASSAGE = 16
"""Tokens that a passage has, however little text there is."""
MOST_POSITIONS = 10_000
"""Positions of a passage that are written."""


@dataclass(frozen=True)
class Passage:
    """A passage that was injected into a training corpus, or a control that was not; or a prompt
    and its completion.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    id: str
    """``target-0000`` or ``control-0000``, counted in the order of the source; in a file of
    ``tfidf-tune probe make`` in the order in which they were chosen. In a file of several data sets
    after the data set: ``dataset[1]/target-0000``."""
    kind: PassageKind
    """``target`` or ``control``."""
    text: str
    """The text of ``token_ids``."""
    token_ids: Annotated[list[_TokenId], Field(min_length=1)]
    """The first ``block_size`` token ids of the passage, or all if it has fewer."""
    num_injections: _Count
    """How often ``token_ids`` occur in the corpus, counted without overlap, or copies of them with
    noise; of near-duplicates the documents with a copy; 0 for a control."""
    positions: list[_Pair]
    """``[block, offset in the block]`` of the first token of each injection; in a file of
    ``tfidf-tune probe make`` ``[document, offset in the document]`` of each occurrence, or empty if
    they are not known."""
    source: str
    """The source of the passage."""
    tokenizer: str
    """The name of the tokenizer."""
    tokenizer_fingerprint: str
    """By this an evaluation checks that it uses the same tokenizer."""
    num_prompt: Annotated[_Count, Field(ge=1)] | None = None
    """Of a completion: tokens of its prompt, the rest is measured. ``num_injections`` and
    ``positions`` are then those of runs of at least 90 % of the rest where they are learned: after
    any prompt, in any turn, within a longer text. None, and left out of a file, if the evaluation
    chooses the length of the prompt."""
    changes: list[_Changes] | None = None
    """Of copies with noise: ``[replaced, inserted, dropped]`` tokens of ``token_ids`` at each
    position. None, and left out of a file, if the copies are exact or were not compared."""
    is_random: Annotated[bool, Field(strict=True)] | None = None
    """Whether it is tokens, digits or words that were drawn at random, and no natural text: audits
    tell such canaries from unseen ones by another score. None, and left out of a file, if it is
    natural text."""
    document: _Count | None = None
    """The number of the document in ``source`` that it is of, from 0; of several occurrences, the
    first one's. By it, passages of one document are known, targets and controls alike. None, and
    left out of a file, if it is not known."""

    def values(self) -> dict[str, Any]:
        """Return the fields as a line of a probe file has them."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class PassageDraft(NamedTuple):
    """What a passage is made of; ``fields`` are further fields of :class:`Passage`."""

    token_ids: TokenArray  # int32 [num_tokens]
    positions: list[list[int]]
    source: str
    fields: dict[str, Any]


def make_passages(
    tokenizer: TextTokenizer, drafts: Sequence[PassageDraft], num_targets: int
) -> list[Passage]:
    """Make passages: the targets first, then the controls."""
    name = tokenizer_name(tokenizer)
    fingerprint = tokenizer_fingerprint(tokenizer)
    passages = []
    for index, draft in enumerate(drafts):
        kind: PassageKind = "target"
        number = index
        if index >= num_targets:
            kind = "control"
            number = index - num_targets
        values: dict[str, Any] = {
            "id": f"{kind}-{number:04d}",
            "kind": kind,
            "text": decode_whole(tokenizer, draft.token_ids.tolist()),
            "token_ids": draft.token_ids.tolist(),
            "num_injections": len(draft.positions),
            "positions": draft.positions,
            "source": draft.source,
            "tokenizer": name,
            "tokenizer_fingerprint": fingerprint,
        }
        passages.append(Passage(**(values | draft.fields)))
    return passages


def write_probe_file(path: str | Path, passages: Sequence[Passage]) -> None:
    """Write passages as JSON lines; an existing file is replaced only when the new one is complete.

    A file that has the same passages is left as it is, with its date: evaluations that are newer
    stay valid.

    Args:
        path (str | Path): the file; its folder is created if it does not exist.
        passages (Sequence[Passage]): at least one passage.

    Raises:
        OSError: If the file cannot be written.
    """
    path = Path(path).expanduser()
    lines = [json.dumps(passage.values(), ensure_ascii=False) + "\n" for passage in passages]
    content = "".join(lines).encode()
    try:
        if path.is_file() and path.read_bytes() == content:
            return
        with atomic_file(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        # The error names the temporary file, or no file if the disk is full.
        raise OSError(
            f"cannot write the probe file {str(path)!r}: {error.strerror or error}"
        ) from error


def read_probe_file(path: str | Path) -> list[Passage]:
    """Read and check a probe file.

    A line has exactly the keys of :class:`Passage`, ``num_prompt`` only for a completion,
    ``changes`` only for copies with noise, ``is_random`` only for random text, and ``document``
    only where it is known. Ids are unique, ``kind`` is "target" or "control", token ids are whole
    numbers that fit in int32, and a control has no injections. ``positions`` may be empty if they
    are not known; otherwise there are ``num_injections`` of them.

    Args:
        path (str | Path): the file.

    Returns:
        list[Passage]: its passages, in order.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If the file is empty, a line of it is not a passage, or two passages have the
            same id.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"no such probe file: {str(path)!r}; training writes it where probe_file says, and "
            "`tfidf-tune probe make` makes one of your own text"
        )
    passages: list[Passage] = []
    line_of: dict[str, int] = {}
    # Not splitlines(): a text can hold Unicode line separators.
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            passage = _PASSAGE.validate_json(line)
        except ValidationError as error:
            name, problem = first_problem(error)
            raise ValueError(
                f"{path}, line {number} is not a passage of a probe file: {name or 'the line'}: "
                f"{problem['msg']}, got {reprlib.repr(problem['input'])}"
            ) from error
        first = line_of.setdefault(passage.id, number)
        num_tokens = len(passage.token_ids)
        num_positions = len(passage.positions)
        for is_wrong, message in (
            (
                num_positions not in (0, passage.num_injections),
                "positions must be as many as num_injections, or none",
            ),
            (
                len(passage.changes or passage.positions) != num_positions,
                "changes must be as many as positions",
            ),
            (
                (passage.num_prompt or 0) >= num_tokens,
                f"num_prompt must be less than the {num_tokens} token ids",
            ),
            (
                passage.kind == "control" and passage.num_injections,
                "num_injections of a control must be 0",
            ),
            (
                first != number,
                f"the id {passage.id!r} is already used on line {first}: {_ONE_FILE}",
            ),
        ):
            if is_wrong:
                raise ValueError(f"{path}, line {number}: {message}")
        passages.append(passage)
    if not passages:
        raise ValueError(
            f"the probe file {str(path)!r} is empty: write it again by building the data set"
        )
    return passages


_PASSAGE = TypeAdapter(Passage)
