"""The passages whose memorization is measured, and the file that carries them to the evaluation."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tfidf_tune._files import atomic_file
from tfidf_tune.data._encoding import TextTokenizer
from tfidf_tune.data._tokenizer import HFTokenizer


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
    """
    with atomic_file(Path(path).expanduser()) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(passage), ensure_ascii=False) + "\n" for passage in passages)


def read_probe_file(path: str | Path) -> list[Passage]:
    """Read what :func:`write_probe_file` wrote.

    Args:
        path (str | Path): the file.

    Returns:
        list[Passage]: its passages, in order.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is empty, or a line of it is not a passage.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"no such probe file: {str(path)!r}. Training writes it where the data set's probe_file says, "
            "and `tfidf-tune probe make` makes one of your own text"
        )
    # Not splitlines(): a text may hold the other line separators of Unicode.
    lines = path.read_bytes().split(b"\n")
    passages = [_parse(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line]
    if not passages:
        raise ValueError(f"the probe file {str(path)!r} is empty: write it again by building the data set")
    return passages


def _parse(line: bytes, where: str) -> Passage:
    expected = [field.name for field in fields(Passage)]
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: a probe file has a passage in each line") from error
    if not isinstance(values, dict) or set(values) != set(expected):
        found = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise ValueError(f"{where} is not a passage of a probe file: it needs the keys {expected}, found {found}")
    return Passage(**values)
