"""Where text comes from: local files, the embedded corpus, or the Hugging Face hub."""

import glob
import hashlib
import io
import json
import logging
import lzma
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

from tfidf_tune._checks import require_choice
from tfidf_tune._files import atomic_folder, digest, file_sha256, looks_like_path
from tfidf_tune.data._tokenizer import MAX_TEXT_BYTES, count_bytes

END_OF_TEXT = "<|endoftext|>"

_VALIDATION_SHARE = 0.1


def embedded_documents(split: str) -> list[str]:
    """Return documents of the embedded corpus, distinct and in a fixed order.

    A hash of a document's text decides its split; about 10 % are validation. The two kinds of text, ``reference`` and
    ``docstrings``, also have splits of their own.

    Args:
        split (str): ``"train"`` or ``"validation"``, also after ``reference_`` or ``docstrings_``; or a slice in the
            notation of ``datasets``: ``"train[:60%]"``, ``"validation[:20]"``, ``"train[:5]+validation[:5]"``.

    Returns:
        list[str]: texts of at least 200 characters.

    Raises:
        ValueError: If the split does not exist or the slice is empty.
    """
    from datasets import ReadInstruction

    splits = _splits()
    sizes = {name: len(texts) for name, texts in sorted(splits.items())}
    try:
        slices = ReadInstruction.from_spec(split).to_absolute(sizes)
    except ValueError:
        slices = []
    documents = [text for part in slices for text in splits[part.splitname][part.from_ : part.to]]
    if not documents:
        known = f"its splits have {sizes} documents, a slice is written 'train[:60%]' or 'validation[10:20]'"
        raise ValueError(f"no document of the embedded corpus is in {split!r}: {known}")
    return documents


def train_embedded_tokenizer(folder: str | Path, vocab_size: int = 4096) -> Path:
    """Train a byte-level BPE tokenizer on the embedded corpus and save it for ``transformers``.

    ``<|endoftext|>`` is its EOS and padding token; it has no BOS token. An existing tokenizer of this size is kept.

    Args:
        folder (str | Path): output folder; it appears only when it is complete.
        vocab_size (int): number of tokens. Default: 4096

    Returns:
        Path: the folder.

    Raises:
        ValueError: If ``folder`` holds anything other than a tokenizer of ``vocab_size`` tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    folder = Path(folder).expanduser()
    if folder.is_dir() and any(folder.iterdir()):
        file = folder / "tokenizer.json"
        if not file.is_file() or Tokenizer.from_file(str(file)).get_vocab_size() != vocab_size:
            raise ValueError(f"{str(folder)!r} holds no tokenizer of {vocab_size} tokens: name another folder")
        return folder
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options: dict[str, Any] = {"vocab_size": vocab_size, "special_tokens": [END_OF_TEXT], "show_progress": False}
    trainer = trainers.BpeTrainer(initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), **options)
    tokenizer.train_from_iterator(embedded_documents("train"), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)
    with atomic_folder(folder) as temporary:
        fast.save_pretrained(str(temporary))
    return folder


@cache
def _splits() -> dict[str, list[str]]:
    # A hash of the text decides, so that the split does not depend on the order or on other documents.
    packed = files("tfidf_tune.data").joinpath("corpus", "python_documentation.jsonl.xz").read_bytes()
    splits: dict[str, list[str]] = defaultdict(list)
    for row in map(json.loads, lzma.decompress(packed).splitlines()):
        is_validation = hashlib.sha256(row["text"].encode()).digest()[0] < _VALIDATION_SHARE * 256
        part = "validation" if is_validation else "train"
        splits[part].append(row["text"])
        splits[f"{row['kind']}_{part}"].append(row["text"])
    return splits


logger = logging.getLogger(__name__)

EMBEDDED = "embedded"
SampleBy = Literal["line", "paragraph", "document"]
_SHORT_DOCUMENT = 30  # tokens
_MAX_ROW_BYTES = 1 << 26  # of a text file or of JSON lines, in memory while they are decompressed
_MAX_DEPTH = 100  # arrow takes less than that, and ends the process from some thousands on
_JSON_STRING = re.compile(rb'"[^"\\\n]*(?:\\.[^"\\\n]*)*"?')
_NO_BRACKETS = bytes({*range(256)} - {*b"[]{}"})
_ROWS_TOGETHER = 16  # faster than one by one; few, because a row may have megabytes

_FORMATS = {
    suffix + compression: reader
    for suffix, reader in {".txt": "text", ".jsonl": "json", ".json": "json"}.items()
    for compression in ("", ".gz", ".zst")
} | {".parquet": "parquet"}

_PlacedRow = tuple[str, dict[str, Any]]  # where a row is, such as "'a.jsonl', row 3", and its columns


class TextSource(NamedTuple):
    """The arguments of :func:`load_documents`."""

    source: str
    name: str | None = None
    split: str = "train"
    column: str = "text"
    sample_by: SampleBy = "line"


def load_documents(
    source: str, name: str | None = None, split: str = "train", column: str = "text", sample_by: SampleBy = "line"
) -> Iterator[str]:
    """Stream the documents of a source without surrounding white space; empty ones are dropped.

    ``source`` is one of

    - a local ``.txt`` (a line is a document, see ``sample_by``), ``.jsonl``, ``.json`` (each also ``.gz`` or ``.zst``)
      or ``.parquet`` file, or a folder of such files of one format, read in the order of their names;
    - ``embedded``, the text inside the package, see :func:`embedded_documents`;
    - anything else is the id of a data set on the Hugging Face hub.

    A document has at most 10 MB (:data:`MAX_TEXT_BYTES`).

    Args:
        source (str): the source.
        name (str | None): configuration of a hub data set; ignored for other sources.
        split (str): split of a hub data set, or split or slice of ``embedded``; ignored for local files.
        column (str): the column that holds the text. A document of a ``.txt`` file is the column ``text``.
        sample_by (Literal["line", "paragraph", "document"]): what a document of a ``.txt`` file is: a line, what
            stands between empty lines, or the file; ignored for other formats. Default: "line"

    Returns:
        Iterator[str]: the documents.

    Raises:
        FileNotFoundError: If ``source`` looks like a path and does not exist.
        ValueError: If the source cannot be read, has no such split or column, or the column holds something other than
            texts, or a text that is too long; in part while reading.
    """
    return _texts(load_rows(source, {column: str}, name=name, split=split, sample_by=sample_by), source, column)


def _texts(rows: Iterable[dict[str, Any]], source: str, column: str) -> Iterator[str]:
    num_rows = num_missing = 0
    for row in rows:
        num_rows += 1
        num_missing += row[column] is None
        if text := (row[column] or "").strip():
            yield text
    if num_missing:  # a row of a file with mixed columns has None where it lacks a column
        logger.warning(f"{source}: {num_missing:,} of {num_rows:,} rows have nothing in column {column!r}: left out")


def load_rows(
    source: str,
    columns: Mapping[str, type],
    *,
    name: str | None = None,
    split: str = "train",
    sample_by: SampleBy = "line",
) -> Iterator[dict[str, Any]]:
    """Stream the rows of a source with all their columns; arguments and errors as for :func:`load_documents`.

    ``columns`` are those that are required, and the type of their values; a value may be None.
    """
    require_choice("sample_by", sample_by, get_args(SampleBy))
    if source == EMBEDDED:
        rows: Iterator[_PlacedRow] = ((EMBEDDED, {"text": document}) for document in embedded_documents(split))
    elif is_local(source):
        rows = _rows_of_files(local_files(source), sample_by)
    else:
        failure = f"cannot load the data set {source!r} (name {name!r}, split {split!r}) from the Hugging Face hub."
        rows = _streamed(failure, source, "row", source, name, split=split)
    return _checked(rows, source, columns)


def _checked(rows: Iterator[_PlacedRow], source: str, columns: Mapping[str, type]) -> Iterator[dict[str, Any]]:
    for place, row in rows:
        for column, kind in columns.items():
            if column not in row:
                only = f"only {sorted(row)}: name another column or source"
                raise ValueError(f"{source!r} has no column {column!r}, {only}")
            value = row[column]
            if not isinstance(value, kind | None):
                problem = f"{type(value).__name__}, not {kind.__name__}"
                raise ValueError(f"column {column!r} of {source!r} holds {problem}: name another of {sorted(row)}")
            check_length(value, place)
        yield row


def _rows_of_files(files: list[Path], sample_by: SampleBy) -> Iterator[_PlacedRow]:
    # One file at a time, so that an error names the file.
    for file in files:
        reader = _FORMATS[_format(file)]
        options: dict[str, Any] = {"sample_by": sample_by} if reader == "text" else {}
        encoding = "" if reader == "parquet" else " in UTF-8 (`iconv -f LATIN1 -t UTF-8` converts)"
        failure = f"cannot read {str(file)!r}; is it a complete {reader} file{encoding}?"
        # `data_files` are patterns, so the name is escaped.
        options |= {"data_files": glob.escape(str(file)), "split": "train"}
        try:
            if reader != "parquet":
                _check_file(file, reader, options.get("sample_by", "line"))
        except OSError as error:
            raise ValueError(f"{failure} {error}") from error
        yield from _streamed(failure, str(file), options.get("sample_by", "row"), reader, **options)


def _check_file(file: Path, reader: str, sample_by: SampleBy) -> None:
    """Raise a ValueError for rows that the readers do not bear, an OSError for a truncated file, which some accept."""
    import pyarrow

    compression = {".gz": "gzip", ".zst": "zstd"}.get(file.suffix.lower())
    most = sys.maxsize if file.suffix.lower() == ".json" else _MAX_ROW_BYTES  # it may be one list of rows
    depth = size = 0
    with io.BufferedReader(pyarrow.input_stream(str(file), compression=compression)) as lines:
        for number, line in enumerate(iter(partial(lines.readline, most), b""), start=1):
            place = f"{str(file)!r}, line {number}"
            if number == 1 and line.startswith((b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")):
                encoding = "UTF-32" if b"\0\0" in line[:4] else "UTF-16"
                raise ValueError(f"{str(file)!r} is in {encoding}: convert it by `iconv -f {encoding} -t UTF-8`")
            if (size := size + len(line)) >= most:
                raise ValueError(f"{place}: a row has more than {most >> 20} MiB: divide it, or remove it")
            if sample_by == "line" or (sample_by == "paragraph" and not line.strip()):
                size = 0
            for bracket in _JSON_STRING.sub(b"", line).translate(None, _NO_BRACKETS) if reader == "json" else b"":
                depth = max(0, depth + (1 if bracket in b"[{" else -1))  # of a reader that begins at any line
                if depth > _MAX_DEPTH:
                    raise ValueError(f"{place}: JSON is nested more than {_MAX_DEPTH} deep: remove this row")


def _streamed(failure: str, where: str, unit: str, *args: Any, **options: Any) -> Iterator[_PlacedRow]:
    from datasets import load_dataset

    number = 0
    # Streamed because data sets on the hub can be far larger than what is needed of them (the Pile: 800 GB).
    try:
        for columns in load_dataset(*args, **options, streaming=True).iter(_ROWS_TOGETHER):
            for values in zip(*columns.values(), strict=True):
                number += 1
                yield f"{where!r}, {unit} {number}", dict(zip(columns, values, strict=True))
    except Exception as error:  # every format and the hub have their own error types; a row can be too long for memory
        raise ValueError(f"{failure} {type(error).__name__} after {unit} {number}: {error}") from error


def warn_of_short_documents(source: str, sample_by: SampleBy, lengths: Sequence[int]) -> None:
    """Log a warning if a text file was read by lines and the median of their lengths is below 30 tokens."""
    is_text = sample_by == "line" and is_local(source) and _FORMATS[_format(local_files(source)[0])] == "text"
    if is_text and lengths and (middle := median(lengths)) < _SHORT_DOCUMENT:
        remedy = "If lines belong together, set sample_by to paragraph or document"
        lengths_shown = f"{len(lengths):,} with a median of {middle:g} tokens"
        logger.warning(f"{source}: each line is a document, {lengths_shown}. {remedy}")


def content_hashes(sources: Sequence[str]) -> dict[str, str]:
    """Return the SHA-256 of each file of local sources, by its complete path."""
    files = [str(file.resolve()) for source in sources for file in local_files(source)]
    require_distinct(files)
    return {file: file_sha256(Path(file)) for file in files}


def require_distinct(files: Sequence[str]) -> None:
    if twice := [file for file, count in Counter(files).items() if count > 1]:
        raise ValueError(f"{twice[0]} is named twice, so that all of it would be duplicated: name it once")


def source_fingerprint(
    source: str, name: str | None = None, split: str = "train", column: str = "text", sample_by: SampleBy = "line"
) -> str:
    """Return 16 hexadecimal digits that change when the documents of a source do, see :func:`load_documents`.

    Local files and ``embedded`` are hashed by their contents, a hub data set only by its names.
    """
    if source == EMBEDDED:
        return digest([EMBEDDED, embedded_documents(split), column])
    if is_local(source):
        files = local_files(source)
        hashes = [(_format(file), file_sha256(file)) for file in files]
        is_divided = sample_by != "line" and _FORMATS[_format(files[0])] == "text"
        return digest(["local", hashes, column, *([sample_by] if is_divided else [])])
    return digest(["hub", source, name, split, column])


def check_length(value: Any, place: str) -> None:
    """Raise a ValueError for a text that is too long to be tokenized."""
    # A character has at most 4 bytes.
    if isinstance(value, str) and len(value) > MAX_TEXT_BYTES // 4 and (size := count_bytes(value)) > MAX_TEXT_BYTES:
        most = f"at most {MAX_TEXT_BYTES:,} can be tokenized: split it into several documents"
        raise ValueError(f"{place}: the text has {size:,} bytes, {most}")


def is_local(source: str) -> bool:
    """Return whether a source is a file or folder, also one that does not exist."""
    path = Path(source).expanduser()
    return path.exists() or looks_like_path(source) or _format(path) in _FORMATS


def local_files(source: str) -> list[Path]:
    path = Path(source).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"no such file or folder: {source!r}")
    # Other files of a folder, such as a README, are left out; two formats would have two meanings of a column.
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    known = [file for file in files if file.is_file() and _format(file) in _FORMATS]
    if len(readers := {_FORMATS[_format(file)] for file in known}) != 1:
        problem = f"text of {' and '.join(sorted(readers)) or 'no known'} format"
        raise ValueError(f"{source!r} has {problem}: name files that all end in one of {', '.join(_FORMATS)}")
    filled = [file for file in known if file.stat().st_size]
    if not filled:
        raise ValueError(f"{source!r} is empty: name a source with text")
    return filled


def _format(file: Path) -> str:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    return "".join(suffixes[-2:] if suffixes[-1:] in ([".gz"], [".zst"]) else suffixes[-1:])
