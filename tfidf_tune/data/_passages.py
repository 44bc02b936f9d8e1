"""The passages whose memorization is measured, and the file that carries them to the evaluation."""

import json
import reprlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

from tfidf_tune._files import atomic_file
from tfidf_tune.data._encoding import TextTokenizer
from tfidf_tune.data._tokenizer import HFTokenizer

KINDS = ("target", "control")

# The data sets hold token ids as int32.
_LARGEST_ID = 2**31 - 1
_LARGEST = 2**53  # the largest that results are read with


@dataclass(frozen=True)
class Passage:
    """A passage that was injected into a training corpus, or a control that was not."""

    id: str
    """``target-0000`` or ``control-0000``, counted in the order of the source; in a file of ``tfidf-tune probe make``
    in the order in which they were chosen."""
    kind: str
    """``target`` or ``control``."""
    text: str
    """The text of ``token_ids``."""
    token_ids: list[int]
    """The first ``block_size`` token ids of the passage, all where it has fewer."""
    num_injections: int
    """How often ``token_ids`` stand whole in the corpus, occurrences that overlap counted once; 0 for a control."""
    positions: list[list[int]]
    """``[block, offset in the block]`` of the first token of each injection; in a file of ``tfidf-tune probe make``
    ``[document, offset in the document]`` of each occurrence."""
    source: str
    """Where the passage is from."""
    tokenizer: str
    """The name of the tokenizer."""
    tokenizer_fingerprint: str
    """By this an evaluation sees that it uses the same tokenizer."""


def passage_text(tokenizer: TextTokenizer, token_ids: list[int]) -> str:
    """Return the text of a passage's ids.

    Args:
        tokenizer (TextTokenizer): the tokenizer.
        token_ids (list[int]): the ids.

    Returns:
        str: the text, special tokens included.
    """
    if isinstance(tokenizer, HFTokenizer):
        # What a corpus spells out may be a special token: WikiText is full of "<unk>".
        return tokenizer.decode(token_ids, skip_special_tokens=False)
    return tokenizer.decode(token_ids)


def write_probe_file(path: str | Path, passages: Sequence[Passage]) -> None:
    """Write passages as JSON lines, whole or not at all; a file that is there is replaced.

    Args:
        path (str | Path): the file; its folder is made when missing.
        passages (Sequence[Passage]): at least one passage.

    Raises:
        OSError: If the file cannot be written; an earlier file of this name stays as it is.
    """
    path = Path(path).expanduser()
    try:
        with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(passage), ensure_ascii=False) + "\n" for passage in passages)
    except OSError as error:
        # The error names the temporary file, or none where the disk is full.
        raise OSError(f"cannot write the probe file {str(path)!r}: {error.strerror or error}") from error


def read_probe_file(path: str | Path) -> list[Passage]:
    """Read and check a probe file; nothing else reads one.

    A line has the keys of :class:`Passage` and no others. Ids are unique, ``kind`` is "target" or "control", token ids
    are whole numbers that fit in int32, and a control has no injections. ``positions`` may be empty where they are not
    known; otherwise there are ``num_injections`` of them.

    Args:
        path (str | Path): the file.

    Returns:
        list[Passage]: its passages, in order.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is empty, a line of it is not a passage, or two passages have the same id.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"no such probe file: {str(path)!r}. Training writes it where the data set's probe_file says, "
            "and `tfidf-tune probe make` makes one of your own text"
        )
    passages: list[Passage] = []
    line_of: dict[str, int] = {}
    # Not splitlines(): a text may hold the other line separators of Unicode.
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        passage = _parse(line, f"{path}, line {number}")
        if (first := line_of.setdefault(passage.id, number)) != number:
            raise ValueError(
                f"{path}, line {number}: the id {passage.id!r} is already used on line {first}. Ids must be unique: "
                "if several probe files were joined, make one file from all texts instead (`tfidf-tune probe make "
                "TEXT1 TEXT2 --output FILE ...`), or use each file on its own"
            )
        passages.append(passage)
    if not passages:
        raise ValueError(f"the probe file {str(path)!r} is empty: write it again by building the data set")
    return passages


def _parse(line: bytes, where: str) -> Passage:
    expected = [field.name for field in fields(Passage)]
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}): a probe file has a passage in each line") from error
    if not isinstance(values, dict) or set(values) != set(expected):
        found = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise ValueError(f"{where} is not a passage of a probe file: it needs the keys {expected}, found {found}")
    passage = Passage(**values)
    if problem := _problem(passage):
        raise ValueError(f"{where}: {problem}")
    return passage


def _problem(passage: Passage) -> str:
    """Say what is wrong with the values of a line; empty if nothing is."""
    for key in ("id", "text", "source", "tokenizer", "tokenizer_fingerprint"):
        if not _is_text(value := getattr(passage, key)):
            return f"{key} must be text, got {reprlib.repr(value)}"
    if passage.kind not in KINDS:
        return f"kind must be {' or '.join(map(repr, KINDS))}, got {reprlib.repr(passage.kind)}"
    ids = passage.token_ids
    if not isinstance(ids, list) or not ids:
        return f"token_ids must be a list of token ids and not empty, got {reprlib.repr(ids)}"
    if not _are_whole_numbers(ids, _LARGEST_ID):
        wrong = next(index for index, token_id in enumerate(ids) if not _are_whole_numbers([token_id], _LARGEST_ID))
        return f"token_ids[{wrong}] must be a whole number from 0 to {_LARGEST_ID}, got {reprlib.repr(ids[wrong])}"
    if not _are_whole_numbers([passage.num_injections]):
        return f"num_injections must be a whole number from 0 to {_LARGEST}, got {reprlib.repr(passage.num_injections)}"
    if passage.kind == "control" and passage.num_injections:
        return f"num_injections of a control must be 0, got {passage.num_injections}"
    positions = passage.positions
    if not isinstance(positions, list) or not (
        all(isinstance(pair, list) and len(pair) == 2 for pair in positions)
        and _are_whole_numbers([*chain.from_iterable(positions)])
    ):
        return f"positions must be a list of pairs [block or document, offset], got {reprlib.repr(positions)}"
    if positions and len(positions) != passage.num_injections:
        return (
            f"there are {len(positions)} positions, but num_injections is {passage.num_injections}: both must be "
            "equal, or positions empty"
        )
    return ""


def _is_text(value: object) -> bool:
    # JSON can hold halves of a character ("\ud800"), which nothing can print or write.
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value


def _are_whole_numbers(values: list[Any], largest: int = _LARGEST) -> bool:
    # type(), as True is an int as well.
    return not values or (set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= largest)
