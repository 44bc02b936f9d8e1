"""Where text comes from: local files, the embedded corpus, or the Hugging Face hub."""

import hashlib
import io
import json
import logging
import lzma
import re
from codecs import BOM_UTF8
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.resources import files
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, cast, get_args

from tfidf_tune._checks import require_choice
from tfidf_tune._files import (
    atomic_folder,
    digest,
    file_sha256,
    is_hub_unreachable,
    looks_like_path,
    not_on_this_machine,
)
from tfidf_tune._printing import counted
from tfidf_tune._tokenizer import MAX_TEXT_BYTES, count_bytes

END_OF_TEXT = "<|endoftext|>"

_VALIDATION_SHARE = 0.1


def embedded_documents(split: str) -> list[str]:
    """Return documents of the embedded corpus, distinct and in a fixed order.

    A hash of a document's text decides its split; about 10 % are validation. The two kinds of text,
    ``reference`` and ``docstrings``, also have splits of their own.

    Args:
        split (str): ``"train"`` or ``"validation"``, also after ``reference_`` or ``docstrings_``;
            or a slice in the notation of ``datasets``: ``"train[:60%]"``, ``"validation[:20]"``,
            ``"train[:5]+validation[:5]"``.

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
    documents: list[str] = []
    for part in slices:
        documents += splits[part.splitname][part.from_ : part.to]
    if not documents:
        raise ValueError(
            f"no document of the embedded corpus is in {split!r}: its splits have {sizes} "
            "documents, a slice is written 'train[:60%]' or 'validation[10:20]'"
        )
    return documents


def train_embedded_tokenizer(folder: str | Path, vocab_size: int = 4096) -> Path:
    """Train a byte-level BPE tokenizer on the embedded corpus and save it for ``transformers``.

    ``<|endoftext|>`` is its EOS and padding token; it has no BOS token. An existing tokenizer of
    this size is kept.

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
            raise ValueError(
                f"{str(folder)!r} holds no tokenizer of {vocab_size} tokens: name another folder"
            )
        return folder
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[END_OF_TEXT],
        show_progress=False,
    )
    tokenizer.train_from_iterator(embedded_documents("train"), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )
    with atomic_folder(folder) as temporary:
        fast.save_pretrained(str(temporary))
    return folder


@cache
def _splits() -> dict[str, list[str]]:
    # A hash of the text decides, so that the split does not depend on the order or on other
    # documents.
    file = files("tfidf_tune.corpus").joinpath("embedded", "python_documentation.jsonl.xz")
    lines = lzma.decompress(file.read_bytes()).splitlines()
    splits: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        row = json.loads(line)
        text = row["text"]
        first_byte = hashlib.sha256(text.encode()).digest()[0]
        part = "validation" if first_byte < _VALIDATION_SHARE * 256 else "train"
        splits[part].append(text)
        splits[f"{row['kind']}_{part}"].append(text)
    return splits


logger = logging.getLogger(__name__)

EMBEDDED = "embedded"
SampleBy = Literal["line", "paragraph", "document"]
_SHORT_DOCUMENT = 30  # tokens
# Of a row, and of a .json file, while they are decompressed.
_MAX_ROW_BYTES = 1 << 26
_MAX_LIST_BYTES = 1 << 30
_ROWS_WITHOUT = 1000  # rows without a column, until it counts as missing
_SHOWN_FILES = 5  # skipped files that a warning names
_ROWS_TOGETHER = 16  # of Parquet files and the hub; few, because a row may have megabytes

_FORMATS = {
    ".txt": "text",
    ".txt.gz": "text",
    ".txt.zst": "text",
    ".jsonl": "json",
    ".jsonl.gz": "json",
    ".jsonl.zst": "json",
    ".json": "json",
    ".json.gz": "json",
    ".json.zst": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_ARROW_FILE = b"ARROW1"  # starts a file, unlike a stream
_LIST = (".json", ".json.gz", ".json.zst")
# Of datasets.
_METADATA = (
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
)


class PlacedRow(NamedTuple):
    """Where a row is, such as ``'a.jsonl', line 3``, its columns, and, if it is JSON, how it is
    written.
    """

    place: str
    columns: dict[str, Any]
    line: bytes = b""


class TextSource(NamedTuple):
    """The arguments of :func:`load_documents`."""

    source: str
    name: str | None = None
    split: str = "train"
    column: str = "text"
    sample_by: SampleBy = "line"


def load_documents(
    source: str,
    name: str | None = None,
    split: str = "train",
    column: str = "text",
    sample_by: SampleBy = "line",
) -> Iterator[str]:
    """Stream the documents of a source without surrounding white space; empty ones are dropped.

    ``source`` is one of

    - a local ``.txt`` (a line is a document, see ``sample_by``), ``.jsonl``, ``.json`` (each also
      ``.gz`` or ``.zst``), ``.parquet`` or ``.arrow`` file, or a folder of such files of one
      format, also in folders of it, in the order of their names; names that start with ``.`` or
      ``_`` do not count, nor do metadata of ``datasets``, nor ``.json`` files beside those of other
      formats with columns;
    - ``embedded``, the text inside the package, see :func:`embedded_documents`;
    - anything else is the id of a data set on the Hugging Face hub.

    A document has at most 10 MB (:data:`MAX_TEXT_BYTES`).

    Args:
        source (str): the source.
        name (str | None): configuration of a hub data set; ignored for other sources.
        split (str): split of a hub data set, or split or slice of ``embedded``; ignored for local
            files.
        column (str): the column that holds the text. A document of a ``.txt`` file is the column
            ``text``.
        sample_by (Literal["line", "paragraph", "document"]): what a document of a ``.txt`` file is:
            a line, what stands between empty lines, or the file; ignored for other formats.
            Default: "line"

    Returns:
        Iterator[str]: the documents.

    Raises:
        FileNotFoundError: If ``source`` looks like a path and does not exist.
        ValueError: If the source cannot be read, has no such split or column, or the column holds
            something other than texts, or a text that is too long; in part while reading. If a
            folder has a file and a link to it.
    """
    rows = load_rows(TextSource(source, name, split, column, sample_by), {column: str})
    return _texts((row.columns[column] for row in rows), source, column)


def texts_of_rows(source: str, *, column: str, sample_by: SampleBy) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each row of a source, "" if it has none; errors as of
    :func:`load_documents`.
    """
    for row in load_rows(TextSource(source, sample_by=sample_by), {column: str}):
        yield row.place, row.columns[column] or ""


def _texts(values: Iterable[str | None], source: str, column: str) -> Iterator[str]:
    num_rows = 0
    num_missing = 0
    for value in values:
        num_rows += 1
        if value is None:
            num_missing += 1
            continue
        text = value.strip()
        if text:
            yield text
    if num_missing:  # a row of a file with mixed columns has None where it lacks a column
        logger.warning(
            f"{source}: {num_missing:,} of {num_rows:,} rows have nothing in column {column!r}: "
            "left out"
        )


def load_rows(
    place: TextSource, columns: Mapping[str, type], more: Collection[str] | None = ()
) -> Iterator[PlacedRow]:
    """Stream the rows of a source, with the errors of :func:`load_documents`.

    ``columns`` are required, with the type of their values; a value may be None, and is if only
    other rows have the column. ``more`` are columns that are wanted where there are any, None for
    all; others may be left out. Values of JSON are as they are written. Those of Parquet files and
    of the hub have the types of their columns.
    """
    source, name, split, _, sample_by = place
    require_choice("sample_by", sample_by, get_args(SampleBy))
    rows: Iterator[PlacedRow]
    if source == EMBEDDED:
        documents = enumerate(embedded_documents(split), start=1)
        rows = (
            PlacedRow(f"{EMBEDDED}, document {number}", {"text": document})
            for number, document in documents
        )
    elif is_local(source):
        files = local_files(source)
        rows = chain.from_iterable(_rows_of_file(file, sample_by, columns, more) for file in files)
    else:
        rows = _rows_of_hub(source, name, split)
    return _checked(rows, source, columns)


def _checked(
    rows: Iterable[PlacedRow], source: str, columns: Mapping[str, type]
) -> Iterator[PlacedRow]:
    missing: set[str] = {*columns}
    present: set[str] = set()
    for number, row in enumerate(rows, start=1):
        missing -= row.columns.keys()
        present |= row.columns.keys()
        if missing and number == _ROWS_WITHOUT:
            break
        for column, kind in columns.items():
            value = row.columns.setdefault(column, None)
            if not isinstance(value, kind | None):
                raise ValueError(
                    f"{row.place}: column {column!r} holds {type(value).__name__}, not "
                    f"{kind.__name__}: name another of {sorted(present)}"
                )
            check_length(value, row.place)
        yield row
    if missing and present:
        rows_read = f" in its first {_ROWS_WITHOUT:,} rows" if number == _ROWS_WITHOUT else ""
        if {"messages", "conversations", "instruction", "completion"} & present:
            raise ValueError(
                f"{source!r} has no column {min(missing)!r}{rows_read}, only {sorted(present)}: "
                "take the config mine/lora_chat or mine/full_chat"
            )
        first = min(present)
        raise ValueError(
            f"{source!r} has no column {min(missing)!r}{rows_read}, only {sorted(present)}: name "
            f"one, as by dataset.source_column={first} (--column {first})"
        )


def _rows_of_file(
    file: Path, sample_by: SampleBy, columns: Collection[str], more: Collection[str] | None
) -> Iterator[PlacedRow]:
    import pyarrow

    reader = _reader(file)
    is_text = reader in ("text", "json")
    if reader == "text":
        rows = _text_rows(file, sample_by)
    elif reader == "json":
        rows = _json_rows(file)
    else:
        rows = _arrow_rows(file, reader, columns, more)
    place = "its start"
    try:
        for row in rows:
            place = row.place.rpartition(", ")[2]
            yield row
    except (OSError, UnicodeDecodeError, OverflowError, KeyError, pyarrow.ArrowException) as error:
        encoding = " in UTF-8 (`iconv -f LATIN1 -t UTF-8` converts)" if is_text else ""
        raise ValueError(
            f"cannot read {str(file)!r}; is it a complete {reader} file{encoding}? "
            f"{type(error).__name__} after {place}: {error}"
        ) from error


def _lines(file: Path, most: int) -> Iterator[tuple[str, bytes]]:
    """Yield the lines of a file, decompressed, with their places."""
    import pyarrow

    compression = {".gz": "gzip", ".zst": "zstd"}.get(file.suffix.lower())
    with io.BufferedReader(pyarrow.input_stream(str(file), compression=compression)) as lines:
        for number, line in enumerate(iter(partial(lines.readline, most), b""), start=1):
            place = f"{str(file)!r}, line {number}"
            if number == 1 and _is_wide(line):
                raise ValueError(
                    f"{str(file)!r} is in UTF-16 or UTF-32: convert it, for example by `iconv -f "
                    "UTF-16 -t UTF-8`"
                )
            if len(line) == most:
                raise ValueError(
                    f"{place}: a row has more than {most >> 20} MiB: divide it, or remove it"
                )
            if number == 1:
                line = line.removeprefix(BOM_UTF8)
            yield place, line


def _is_wide(start: bytes) -> bool:
    """Return whether a text starts as in UTF-16 or UTF-32."""
    return start.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in start[:4]


def _text_rows(file: Path, sample_by: SampleBy) -> Iterator[PlacedRow]:
    """Yield lines, paragraphs or the whole of a file; the line ends within them stay
    as they are.
    """
    parts: list[bytes] = []
    size = 0
    for place, line in _lines(file, _MAX_ROW_BYTES):
        for part in line.splitlines(keepends=True):  # bytes end lines at \n, \r and \r\n alone
            parts.append(part)
            size += len(part)
            if size >= _MAX_ROW_BYTES:
                raise ValueError(
                    f"{place}: a row has more than {_MAX_ROW_BYTES >> 20} MiB: divide it, or "
                    "remove it"
                )
            is_empty = not part.rstrip(b"\r\n")
            if sample_by == "line" or (sample_by == "paragraph" and is_empty):
                yield _text_row(place, parts)
                parts = []
                size = 0
    if parts:
        yield _text_row(place, parts)


def _text_row(place: str, parts: Sequence[bytes]) -> PlacedRow:
    return PlacedRow(place, {"text": b"".join(parts).decode().strip("\r\n")})


def _json_rows(file: Path) -> Iterator[PlacedRow]:
    """Yield the objects of JSON lines, or of the list that a ``.json`` file may be."""
    is_json = _format(file) in _LIST
    lines = _lines(file, _MAX_LIST_BYTES if is_json else _MAX_ROW_BYTES)
    filled = ((place, line) for place, line in lines if line.strip())
    first = next(filled, None)
    if first is None:
        return
    rest = chain([first], filled)
    is_list = is_json and first[1].lstrip().startswith(b"[")
    for row in _rows_of_list(file, rest) if is_list else _rows_of_lines(rest):
        if not isinstance(row.columns, dict):
            raise ValueError(
                f"{row.place} is {str(row.columns)[:80]!r}, not an object with columns"
            )
        yield row


def _rows_of_lines(lines: Iterable[tuple[str, bytes]]) -> Iterator[PlacedRow]:
    for place, line in lines:
        yield PlacedRow(place, _parsed(place, line), line)


def _rows_of_list(file: Path, lines: Iterable[tuple[str, bytes]]) -> Iterator[PlacedRow]:
    name = repr(str(file))
    content = b"".join(line for _, line in lines)
    rows = _parsed(name, content)
    written = _written_rows(content.decode())
    for number, (row, line) in enumerate(zip(rows, written, strict=True), start=1):
        yield PlacedRow(f"{name}, row {number}", row, line)


def _parsed(place: str, content: bytes) -> Any:
    from pydantic_core import from_json

    # The parser refuses what is nested more than 200 deep, and lone surrogates, which cannot be
    # tokenized.
    try:
        return from_json(content.rstrip())
    except ValueError as error:
        content.decode()  # raises another error if it is not UTF-8
        raise ValueError(f"{place} is not JSON: {str(error).replace('line 1 ', '')}") from error


def _written_rows(text: str) -> Iterator[bytes]:
    """Yield the rows of a list of JSON as they are written, each on one line: a line end is white
    space in JSON.
    """
    decoder = json.JSONDecoder(parse_int=str, parse_float=str)
    between = re.compile(r"[\s,]*")
    end = text.index("[") + 1
    while True:
        separator = cast(re.Match[str], between.match(text, end))
        start = separator.end()
        if text[start] == "]":
            return
        _, end = decoder.raw_decode(text, start)
        yield text[start:end].replace("\r", " ").replace("\n", " ").encode()


def _arrow_rows(
    file: Path, reader: str, columns: Collection[str], more: Collection[str] | None
) -> Iterator[PlacedRow]:
    if reader == "parquet":
        batches = _parquet_batches(file, columns, more)
    else:
        batches = _arrow_batches(file, columns, more)
    number = 0
    for batch in batches:
        for start in range(0, len(batch), _ROWS_TOGETHER):
            for row in batch.slice(start, _ROWS_TOGETHER).to_pylist():
                number += 1
                yield PlacedRow(f"{str(file)!r}, row {number}", row)


def _parquet_batches(
    file: Path, columns: Collection[str], more: Collection[str] | None
) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file) as opened:
        names = _needed_columns(opened.schema_arrow.names, columns, more)
        yield from opened.iter_batches(_ROWS_TOGETHER, columns=names)


def _arrow_batches(
    file: Path, columns: Collection[str], more: Collection[str] | None
) -> Iterator[Any]:
    """Yield the batches of an Arrow file, or of a stream, as which `datasets` saves."""
    from pyarrow import ipc, memory_map

    with memory_map(str(file)) as mapped:
        is_file = mapped.read(len(_ARROW_FILE)) == _ARROW_FILE
        mapped.seek(0)
        with ipc.open_file(mapped) if is_file else ipc.open_stream(mapped) as opened:
            names = _needed_columns(opened.schema.names, columns, more)
            batches = map(opened.get_batch, range(opened.num_record_batches)) if is_file else opened
            for batch in batches:
                yield batch.select(names)


def _needed_columns(
    names: Sequence[str], columns: Collection[str], more: Collection[str] | None
) -> Sequence[str]:
    """Return the columns to read: all of them if one of ``columns`` is missing, because the error
    names them.
    """
    if more is None or not {*columns} <= {*names}:
        return names
    return [name for name in names if name in {*columns, *more}]


def _rows_of_hub(source: str, name: str | None, split: str) -> Iterator[PlacedRow]:
    from datasets import load_dataset

    number = 0
    # Streamed because data sets on the hub can be far larger than what is needed of them (the Pile:
    # 800 GB).
    try:
        rows = load_dataset(source, name, split=split, streaming=True)
        for columns in rows.iter(_ROWS_TOGETHER):
            for values in zip(*columns.values(), strict=True):
                number += 1
                row = dict(zip(columns, values, strict=True))
                yield PlacedRow(f"{source!r}, row {number}", row)
    except Exception as error:  # the hub has its own error types; a row can be too long for memory
        if number == 0 and is_hub_unreachable(error):
            raise ValueError(
                not_on_this_machine(source, "a file of text or a folder of such files")
            ) from error
        raise ValueError(
            f"cannot load the data set {source!r} (name {name!r}, split {split!r}) from the "
            f"Hugging Face hub. {type(error).__name__} after row {number}: {error}"
        ) from error


def warn_of_short_documents(source: str, sample_by: SampleBy, lengths: Sequence[int]) -> None:
    """Log a warning if a text file was read by lines and the median of their lengths is below 30
    tokens.
    """
    if sample_by != "line" or not is_local(source):
        return
    first_file = local_files(source)[0]
    if _reader(first_file) != "text" or not lengths:
        return
    middle = median(lengths)
    if middle < _SHORT_DOCUMENT:
        logger.warning(
            f"{source}: each line is a document, with a median of {middle:g} tokens. If lines "
            "belong together, set sample_by to paragraph or document"
        )


def tasks_of(sources: Sequence[str]) -> list[str]:
    """Return what is a task of its own: each file of local sources, by its complete path, and any
    other source.
    """
    tasks = []
    for source in sources:
        if is_local(source):
            tasks += _complete_paths(source)
        else:
            tasks.append(source)
    require_distinct(tasks)
    return tasks


def content_hashes(sources: Sequence[str]) -> dict[str, str]:
    """Return the SHA-256 of each file of local sources, by its complete path."""
    files = []
    for source in sources:
        files += _complete_paths(source)
    require_distinct(files)
    return {file: file_sha256(Path(file)) for file in files}


def _complete_paths(source: str) -> list[str]:
    return [str(file.resolve()) for file in local_files(source)]


def require_distinct(files: Sequence[str]) -> None:
    """Refuse to read what is named twice, by complete paths of files and names of other sources."""
    for file, count in Counter(files).items():
        if count > 1:
            raise ValueError(
                f"{file} is named twice, perhaps by a link, so that all of it would be duplicated: "
                "name it once"
            )


def source_fingerprint(
    source: str,
    name: str | None = None,
    split: str = "train",
    column: str = "text",
    sample_by: SampleBy = "line",
) -> str:
    """Return 16 hexadecimal digits that change when the documents of a source do, see
    :func:`load_documents`.

    Local files and ``embedded`` are hashed by their contents, a hub data set only by its names.
    """
    if source == EMBEDDED:
        return digest([EMBEDDED, embedded_documents(split), column])
    if is_local(source):
        files = local_files(source)
        hashes = [(_format(file), file_sha256(file)) for file in files]
        parts: list[Any] = ["local", hashes, column]
        if sample_by != "line" and _reader(files[0]) == "text":
            parts.append(sample_by)
        return digest(parts)
    return digest(["hub", source, name, split, column])


def check_length(value: Any, place: str) -> None:
    """Raise a ValueError for a text that is too long to be tokenized."""
    # Bytes are counted if there can be too many: a character has at most 4.
    if not isinstance(value, str) or len(value) <= MAX_TEXT_BYTES // 4:
        return
    size = count_bytes(value)
    if size > MAX_TEXT_BYTES:
        raise ValueError(
            f"{place}: the text has {size:,} bytes, at most {MAX_TEXT_BYTES:,} can be tokenized: "
            "split it, or set sample_by (--sample-by) to line or paragraph (.txt)"
        )


def is_local(source: str) -> bool:
    """Return whether a source is a file or folder, also one that does not exist."""
    path = Path(source).expanduser()
    return path.exists() or looks_like_path(source) or _format(path) in _FORMATS


def local_files(source: str) -> list[Path]:
    """Return the files of text of a path, sorted."""
    path = Path(source).expanduser()
    if not path.exists():
        raise FileNotFoundError(
            f"no such file or folder: {source!r}: name a file that ends in one of "
            f"{', '.join(_FORMATS)}, a folder of such files, or the id of a data set on the hub"
        )
    files = [path]
    if path.is_dir():
        # Folders that are links are not followed, because these can form a circle.
        below = sorted(path.rglob("*"))
        files = [file for file in below if file.is_file() or file.is_symlink()]
    named = [file for file in files if not _is_hidden(file.relative_to(path))]
    known = [file for file in named if _format(file) in _FORMATS and file.name not in _METADATA]
    # Beside files with columns, those of JSON say something about them; two formats have two
    # meanings of a column.
    has_columns = any(_format(file) not in _LIST and _reader(file) != "text" for file in known)
    if has_columns:
        known = [file for file in known if _format(file) not in _LIST]
    readers = {_reader(file) for file in known}
    if len(readers) != 1:
        raise ValueError(
            f"{source!r} has text of {' and '.join(sorted(readers)) or 'no known'} format: name "
            f"files that all end in one of {', '.join(_FORMATS)}"
        )
    filled = [file for file in known if file.stat().st_size]
    if not filled:
        raise ValueError(f"{source!r} is empty: name a source with text")
    require_distinct([str(file.resolve()) for file in filled])
    if path.is_dir():
        # A file that is hidden is mentioned if it has text.
        hidden = {*files} - {*named}
        unmentioned = {file for file in hidden if _format(file) not in _FORMATS}
        skipped = sorted({*files} - {*filled} - unmentioned)
        names = tuple(str(file.relative_to(path)) for file in skipped)
        _say_what_is_read(source, len(filled), names)
    return filled


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


@cache  # so that it is said once
def _say_what_is_read(source: str, number: int, skipped: tuple[str, ...]) -> None:
    more = f" and {len(skipped) - _SHOWN_FILES:,} more" if len(skipped) > _SHOWN_FILES else ""
    names = f"; skipped: {', '.join(skipped[:_SHOWN_FILES])}{more}" if skipped else ""
    logger.log(
        logging.WARNING if skipped else logging.INFO,
        f"{source}: {counted(number, 'file')} read{names}",
    )


def _format(file: Path) -> str:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    is_compressed = suffixes[-1:] in ([".gz"], [".zst"])
    return "".join(suffixes[-2:] if is_compressed else suffixes[-1:])


def _reader(file: Path) -> str:
    """Return how a file with a known ending is read."""
    return _FORMATS[_format(file)]
