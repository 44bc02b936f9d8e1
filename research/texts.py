"""Texts with legitimate repetition, made from the embedded corpus: frames around sections, stock
answers.

    python -m research.texts    # writes runs/texts/*.jsonl, which research/configs/evidence.yaml names

A ``framed_`` split has sections of documents, each in the same frame with different fillings. In
the splits ``asked_`` and ``stock_`` a row has the first line of a document as its prompt, and as
its completion the rest of the document or one of six stock answers. Reading a file strips the line
end of a frame, which the records of 2026-11-24 had.
"""

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

from datasets import ReadInstruction

from research.files import write_json_lines
from tfidf_tune._files import atomic_file
from tfidf_tune.data import embedded_documents

FILES = {
    "framed_train": "framed_reference_train[:80%]",
    "framed_held_out": "framed_reference_train[80%:]+framed_reference_validation",
    "framed_seen": "framed_reference_train[:80%]+docstrings_train",
    "answers_train": "asked_docstrings_train[60%:85%]+stock_docstrings_train[85%:]",
    "answers_seen": "asked_docstrings_train+stock_docstrings_train",
    "asked_held_out": "asked_docstrings_validation",
    "stock_held_out": "stock_docstrings_validation",
}
"""Name of a file -> the splits that it has, in the notation of ``datasets``."""

_SECTION = 800  # characters
_FRAME = """Section {id}: {name}
Edition of {year}. This section may be copied and changed as long as this notice stays with every copy. It is provided
as it is, without warranty of any kind, and nobody is liable for damage that follows from its use.

{section}End of section {id}. Send corrections to the maintainers of the edition of {year}, and name the section.
"""
_RESPONSE = "\n### Response:\n"
_STOCK_ANSWERS = (
    "Yes. This has been supported since version 3.0, and no further arguments are needed.",
    "No. This is not supported, and an exception is raised if it is tried.",
    "There is no documentation for this. Please look at the source code, or ask on the mailing "
    "list.",
    "I cannot answer this question, because it depends on the platform and on the version that is "
    "used.",
    "This is part of the private interface. It may change in any version, so please do not rely on "
    "it.",
    "This has been deprecated and will be removed in a future version. Use the new interface "
    "instead.",
)

Row = dict[str, str]


def rows_of(split: str) -> list[Row]:
    """Return the rows of splits and slices: "text", and "prompt" and "completion" where a row has
    them.
    """
    parts = {part.split("[")[0] for part in split.split("+")}
    splits = {name: list(_split(name)) for name in parts}
    slices = ReadInstruction.from_spec(split).to_absolute(
        {name: len(rows) for name, rows in splits.items()}
    )
    rows: list[Row] = []
    for part in slices:
        rows += splits[part.splitname][part.from_ : part.to]
    return rows


def write_texts(folder: Path) -> None:
    """Write the files of :data:`FILES` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, split in FILES.items():
        with atomic_file(folder / f"{name}.jsonl") as file:
            write_json_lines(file, rows_of(split))


def _split(name: str) -> Iterator[Row]:
    kind, _, rest = name.partition("_")
    if kind not in ("framed", "asked", "stock"):
        kind = ""
        rest = name
    for text in embedded_documents(rest):
        if kind == "framed":
            yield from ({"text": section} for section in _in_frames(text))
        else:
            yield _answered(text, stock=kind == "stock") if kind else {"text": text}


def _answered(text: str, *, stock: bool) -> Row:
    """Make a prompt of the first line of a text; the completion is the rest, or a stock answer
    chosen by a hash.
    """
    first, _, rest = text.partition("\n")
    number = hashlib.sha256(text.encode()).digest()[1] % len(_STOCK_ANSWERS)
    prompt = first + _RESPONSE
    completion = _STOCK_ANSWERS[number] if stock else rest.strip()
    return {"text": prompt + completion, "prompt": prompt, "completion": completion}


def _in_frames(text: str) -> Iterator[str]:
    """Cut a text at blank lines into sections of about 800 characters, and put each
    into a frame.
    """
    sections = [""]
    for paragraph in text.split("\n\n"):
        if len(sections[-1]) >= _SECTION:
            sections.append("")
        sections[-1] += paragraph + "\n\n"
    for section in sections:
        number = int.from_bytes(hashlib.sha256(section.encode()).digest()[:4], "big")
        fillings = {
            "name": section.split("\n")[0][:60],
            "id": number % 100_000,
            "year": 1991 + number % 33,
        }
        yield _FRAME.format(section=section, **fillings)


if __name__ == "__main__":
    write_texts(Path(*sys.argv[1:2] or ["runs/texts"]))
