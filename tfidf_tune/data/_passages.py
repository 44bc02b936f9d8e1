"""The passages whose memorization is measured, and the probe file that carries them to the evaluation."""

import json
import reprlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

from tfidf_tune._files import atomic_file
from tfidf_tune.data._tokenizer import HFTokenizer, TextTokenizer, TokenArray, tokenizer_fingerprint, tokenizer_name

_LARGEST_ID = 2**31 - 1  # the data sets hold token ids as int32
_LARGEST = 2**53  # the largest number that results are read with


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
    """The first ``block_size`` token ids of the passage, or all if it has fewer."""
    num_injections: int
    """How often ``token_ids`` occur in the corpus, counted without overlap; 0 for a control."""
    positions: list[list[int]]
    """``[block, offset in the block]`` of the first token of each injection; in a file of ``tfidf-tune probe make``
    ``[document, offset in the document]`` of each occurrence."""
    source: str
    """The source of the passage."""
    tokenizer: str
    """The name of the tokenizer."""
    tokenizer_fingerprint: str
    """By this an evaluation checks that it uses the same tokenizer."""


def make_passage(
    tokenizer: TextTokenizer, kind: str, number: int, ids: TokenArray, *, positions: list[list[int]], source: str
) -> Passage:
    """Make the ``number``-th passage of a kind, "target" or "control", from int32 ids of shape ``[num_tokens]``."""
    token_ids: list[int] = ids.tolist()
    if isinstance(tokenizer, HFTokenizer):
        # A corpus can spell out special tokens: WikiText is full of "<unk>".
        text = tokenizer.decode(token_ids, skip_special_tokens=False)
    else:
        text = tokenizer.decode(token_ids)
    return Passage(
        id=f"{kind}-{number:04d}",
        kind=kind,
        text=text,
        token_ids=token_ids,
        num_injections=len(positions),
        positions=positions,
        source=source,
        tokenizer=tokenizer_name(tokenizer),
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
    )


def write_probe_file(path: str | Path, passages: Sequence[Passage]) -> None:
    """Write passages as JSON lines; an existing file is replaced only when the new one is complete.

    Args:
        path (str | Path): the file; its folder is created if it does not exist.
        passages (Sequence[Passage]): at least one passage.

    Raises:
        OSError: If the file cannot be written.
    """
    path = Path(path).expanduser()
    try:
        with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(passage), ensure_ascii=False) + "\n" for passage in passages)
    except OSError as error:
        # The error names the temporary file, or no file if the disk is full.
        raise OSError(f"cannot write the probe file {str(path)!r}: {error.strerror or error}") from error


def read_probe_file(path: str | Path) -> list[Passage]:
    """Read and check a probe file.

    A line has exactly the keys of :class:`Passage`. Ids are unique, ``kind`` is "target" or "control", token ids are
    whole numbers that fit in int32, and a control has no injections. ``positions`` may be empty if they are not known;
    otherwise there are ``num_injections`` of them.

    Args:
        path (str | Path): the file.

    Returns:
        list[Passage]: its passages, in order.

    Raises:
        FileNotFoundError: If the file does not exist.
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
    # Not splitlines(): a text can hold Unicode line separators.
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
    for key, (is_valid, must_be) in _RULES.items():
        if not is_valid(values[key]):
            raise ValueError(f"{where}: {key} must be {must_be}, got {reprlib.repr(values[key])}")
    passage = Passage(**values)
    if not _are_whole_numbers(passage.token_ids, _LARGEST_ID):
        index, wrong = next(
            pair for pair in enumerate(passage.token_ids) if not _are_whole_numbers([pair[1]], _LARGEST_ID)
        )
        raise ValueError(
            f"{where}: token_ids[{index}] must be a whole number from 0 to {_LARGEST_ID}, got {reprlib.repr(wrong)}"
        )
    if passage.kind == "control" and passage.num_injections:
        raise ValueError(f"{where}: num_injections of a control must be 0, got {passage.num_injections}")
    if passage.positions and len(passage.positions) != passage.num_injections:
        raise ValueError(
            f"{where}: there are {len(passage.positions)} positions, but num_injections is {passage.num_injections}: "
            "both must be equal, or positions empty"
        )
    return passage


def _is_text(value: Any) -> bool:
    # JSON can hold half of a character ("\ud800"), which cannot be printed or written.
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value


def _are_whole_numbers(values: Any, largest: int = _LARGEST) -> bool:
    # type(), because True is an int as well.
    return not values or (set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= largest)


def _are_pairs(value: Any) -> bool:
    return (
        isinstance(value, list)
        and all(isinstance(pair, list) and len(pair) == 2 for pair in value)
        and _are_whole_numbers([*chain.from_iterable(value)])
    )


_RULES = dict.fromkeys(("id", "text", "source", "tokenizer", "tokenizer_fingerprint"), (_is_text, "text")) | {
    "kind": (lambda kind: kind in ("target", "control"), "'target' or 'control'"),
    "token_ids": (
        lambda ids: isinstance(ids, list) and bool(ids),
        "a list of token ids and not empty",
    ),
    "num_injections": (lambda number: _are_whole_numbers([number]), f"a whole number from 0 to {_LARGEST}"),
    "positions": (_are_pairs, "a list of pairs [block or document, offset]"),
}
