"""Where text comes from: local files, the embedded corpus, or the Hugging Face hub."""

import glob
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from datasets import load_dataset
from zstandard import ZstdDecompressor

from tfidf_tune._files import file_sha256, looks_like_path
from tfidf_tune.data._cache import digest
from tfidf_tune.data._embedded import embedded_documents
from tfidf_tune.data._encoding import MAX_TEXT_BYTES, num_bytes

EMBEDDED = "embedded"

_FORMATS = {
    suffix + compression: reader
    for suffix, reader in {".txt": "text", ".jsonl": "json", ".json": "json"}.items()
    for compression in ("", ".gz", ".zst")
} | {".parquet": "parquet"}


class _Row(NamedTuple):
    """The columns of a row, and where it is: ``'a.jsonl', row 3``."""

    place: str
    columns: dict[str, Any]


def load_documents(
    source: str, *, name: str | None = None, split: str = "train", column: str = "text"
) -> Iterator[str]:
    """Stream the documents of a source, stripped; empty ones are dropped.

    ``source`` is one of

    - a local ``.txt`` (a line is a document), ``.jsonl``, ``.json`` (``.gz`` or ``.zst`` as well) or
      ``.parquet`` file, or a folder of such files of one format, read in the order of their names;
    - ``embedded``, English text that every Python carries;
    - anything else is the id of a data set on the Hugging Face hub.

    A document has at most 10 MB (:data:`MAX_TEXT_BYTES`).

    Args:
        source (str): the source.
        name (str | None): configuration of a hub data set. Local files and ``embedded`` have none.
        split (str): split of a hub data set or of ``embedded``, of which it may be a slice, see
            :func:`embedded_documents`. Local files have none.
        column (str): the column that holds the text. Lines of a ``.txt`` file are the column ``text``.

    Returns:
        Iterator[str]: the documents.

    Raises:
        FileNotFoundError: If ``source`` looks like a path and nothing is there.
        ValueError: If the files' format is unknown or mixed, all are empty or one cannot be read; if the
            hub has no such data set or cannot be reached; if ``embedded`` has no such split; or if
            ``column`` is missing, is not text or holds a text that is too long. What only reading shows is raised while
            reading.
    """
    return _documents(_source_rows(source, name, split), source, column)


def load_rows(
    source: str, columns: Mapping[str, type], *, name: str | None = None, split: str = "train"
) -> Iterator[dict[str, Any]]:
    """Stream the rows of a source that has certain columns.

    Args:
        source (str): see :func:`load_documents`.
        columns (Mapping[str, type]): the columns needed and the type of their values; a value may be None.
        name (str | None): see :func:`load_documents`.
        split (str): see :func:`load_documents`.

    Returns:
        Iterator[dict[str, Any]]: the rows, other columns included.

    Raises:
        FileNotFoundError: If ``source`` looks like a path and nothing is there.
        ValueError: If the source cannot be read, see :func:`load_documents`, or a column is missing, holds
            something else or a text that is too long. What only reading shows is raised while reading.
    """
    return _checked_rows(_source_rows(source, name, split), source, columns)


def source_fingerprint(source: str, name: str | None = None, split: str = "train", column: str = "text") -> str:
    """Return a hash that changes when the documents of a source do.

    Local files and ``embedded`` are known by their contents; a hub data set by its names alone.

    Args:
        source (str): see :func:`load_documents`.
        name (str | None): see :func:`load_documents`.
        split (str): see :func:`load_documents`.
        column (str): see :func:`load_documents`.

    Returns:
        str: 16 hexadecimal digits.

    Raises:
        FileNotFoundError: If ``source`` looks like a path and nothing is there.
        ValueError: If the files' format is unknown or mixed, or all are empty, or ``embedded`` has no
            such split.
    """
    if source == EMBEDDED:
        return digest([EMBEDDED, embedded_documents(split), column])
    if _is_local(source):
        return digest(["local", [(_format(file), file_sha256(file)) for file in _local_files(source)], column])
    return digest(["hub", source, name, split, column])


def _source_rows(source: str, name: str | None, split: str) -> Iterable[_Row]:
    if source == EMBEDDED:
        return _placed(EMBEDDED, "row", ({"text": text} for text in embedded_documents(split)))
    if _is_local(source):
        return _local_rows(_local_files(source))
    return _placed(source, "row", _hub_rows(source, name, split))


def _placed(where: str, unit: str, rows: Iterable[dict[str, Any]]) -> Iterator[_Row]:
    number = 0
    try:
        for number, columns in enumerate(rows, start=1):
            yield _Row(f"{where!r}, {unit} {number}", columns)
    except MemoryError as error:
        raise ValueError(
            f"{where!r}: memory ran out while {unit} {number + 1} was read, it may be very long: split it into several"
        ) from error


def _checked_rows(rows: Iterable[_Row], source: str, columns: Mapping[str, type]) -> Iterator[dict[str, Any]]:
    for place, row in rows:
        if missing := sorted(columns.keys() - row):
            raise ValueError(
                f"{source!r} has no column {missing}, only {sorted(row)}: rename its columns, or name a source "
                f"with the columns {sorted(columns)}"
            )
        for column, kind in columns.items():
            if not isinstance(row[column], kind | None):
                raise ValueError(
                    f"column {column!r} of {source!r} holds {type(row[column]).__name__}, not {kind.__name__}: "
                    "name a source where it does"
                )
            if isinstance(row[column], str):
                _check_length(row[column], place)
        yield row


def _check_length(text: str, place: str) -> None:
    """Refuse a text that a tokenizer may have too little memory for."""
    if len(text) > MAX_TEXT_BYTES // 4 and (size := num_bytes(text)) > MAX_TEXT_BYTES:
        raise ValueError(
            f"{place}: the text has {size:,} bytes, at most {MAX_TEXT_BYTES:,} can be tokenized: split it into several "
            "documents, each a line of a .txt file or a row of a .jsonl file"
        )


def _documents(rows: Iterable[_Row], source: str, column: str) -> Iterator[str]:
    for place, row in rows:
        if column not in row:
            raise ValueError(f"{source!r} has no column {column!r}: name one of its columns {sorted(row)}")
        text = row[column]
        if text is None:
            continue
        if not isinstance(text, str):
            raise ValueError(
                f"column {column!r} of {source!r} holds {type(text).__name__}, not text: "
                f"name a text column out of {sorted(row)}"
            )
        if text := text.strip():
            _check_length(text, place)
            yield text


def _local_rows(files: list[Path]) -> Iterator[_Row]:
    # One file at a time, so that an error names the file.
    for file in files:
        reader = _FORMATS[_format(file)]
        failure = f"cannot read {str(file)!r}; is it a whole {reader} file?"
        # Escaped, because `data_files` are patterns.
        rows = _rows(failure, reader, data_files=[glob.escape(str(file))], split="train")
        yield from _placed(str(file), "line" if reader == "text" else "row", rows)
        if file.suffix.lower() == ".zst" and not _is_whole_zstandard(file):
            raise ValueError(f"{failure} It ends in the middle of a zstandard frame")


def _hub_rows(source: str, name: str | None, split: str) -> Iterator[dict[str, Any]]:
    failure = (
        f"cannot load the data set {source!r} (name {name!r}, split {split!r}) from the Hugging Face hub: "
        "check these names and the connection, or name a local file."
    )
    return _rows(failure, source, name, split=split)


def _rows(failure: str, *args: Any, **kwargs: Any) -> Iterator[dict[str, Any]]:
    try:
        yield from load_dataset(*args, **kwargs, streaming=True)
    except MemoryError:
        raise
    except Exception as error:  # every format and the hub have error types of their own
        raise ValueError(f"{failure} {type(error).__name__}: {error}") from error


def _is_whole_zstandard(file: Path) -> bool:
    """Say whether a file ends where a frame does; readers take one that is cut off for a shorter one."""
    frame = None
    with file.open("rb") as compressed:
        while chunk := compressed.read(1 << 16):
            while chunk:
                frame = frame or ZstdDecompressor().decompressobj()
                frame.decompress(chunk)
                frame, chunk = (None, frame.unused_data) if frame.eof else (frame, b"")
    return frame is None


def _is_local(source: str) -> bool:
    path = Path(source).expanduser()
    return path.exists() or looks_like_path(source) or _format(path) in _FORMATS


def _local_files(source: str) -> list[Path]:
    path = Path(source).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"no such file or folder: {source!r}")
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    known = [file for file in files if file.is_file() and _format(file) in _FORMATS]
    if not known:
        raise ValueError(f"{source!r} is of no known format: a text file ends in one of {', '.join(_FORMATS)}")
    if len(readers := {_FORMATS[_format(file)] for file in known}) > 1:
        raise ValueError(
            f"{source!r} mixes files of the formats {sorted(readers)}: name a file or a folder of one format"
        )
    filled = [file for file in known if file.stat().st_size]
    if not filled:
        raise ValueError(f"{source!r} is empty: name a source with text")
    return filled


def _format(file: Path) -> str:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    return "".join(suffixes[-2:] if suffixes[-1:] in ([".gz"], [".zst"]) else suffixes[-1:])
