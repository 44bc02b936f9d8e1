"""Divide text of any size by a coin into documents to train on and documents that are held out.

What is held out differs from what is trained on by the coin alone, so an audit of the model has
controls for its targets. Near copies stay together, because a copy that is trained on would make a
document that is held out known to the model.
"""

import json
import math
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tfidf_tune._checks import require_integer, require_number
from tfidf_tune._files import atomic_file, file_sha256
from tfidf_tune.corpus.deduplication import COST_OF_MISSED, Deduplication
from tfidf_tune.corpus.file_deduplication import (
    ReadTexts,
    bands_of,
    cluster_numbers_of_file,
    find_copies,
    line_of_row,
    move_written,
    packed_lines,
    resumable_output,
)
from tfidf_tune.corpus.holdout import (
    MANIFEST,
    RULE,
    SCHEMA_VERSION,
    SIDES,
    GroupOfRow,
    Holdout,
    Side,
    groups_file,
    is_held_out,
    read_holdout,
    text_hash,
)
from tfidf_tune.corpus.jobs import Step, TaskRunner, progress
from tfidf_tune.corpus.sources import (
    PlacedRow,
    SampleBy,
    TextSource,
    content_hashes,
    load_rows,
    local_files,
    texts_of_rows,
)

FEWEST_HELD_OUT = 10
"""Documents that should be held out: an audit judges nothing from fewer."""
HIGHEST_SHARE = 0.5
"""More than this is not held out: most of a text is there to be trained on."""

_LARGEST_SHARE = 0.01  # of the documents, in a group for which a coin is tossed
_LIMITS_OF_LARGEST = (10, 1000)  # documents
_SHOWN_CUTS = 10
_DECIDED = "decided.json"
_GROUPS_FILE = "groups.npy"
_WRITTEN = "written"
_NO_TEXT = GroupOfRow(None, 1, False)

# A document on disk: the two halves of its hash, and its characters, 0 if it has no text.
_DOCUMENT = struct.Struct("<QQI")
_DOCUMENTS = np.dtype([("high", "<u8"), ("low", "<u8"), ("characters", "<u4")])
# A document with copies: its hash, its cluster, and where it is.
_COPIES = np.dtype(
    [("high", "<u8"), ("low", "<u8"), ("cluster", "<u4"), ("rank", "<u4"), ("number", "<u4")]
)
# A group of two or more documents: the least of their hashes, and where the document with it is.
_GROUPS = np.dtype(
    [
        ("high", "<u8"),
        ("low", "<u8"),
        ("documents", "<u4"),
        ("rank", "<u4"),
        ("number", "<u4"),
        ("is_tossed", "?"),
        ("is_held_out", "?"),
    ]
)
_Array = npt.NDArray[np.void]


def hold_out_documents(
    sources: Sequence[str],
    output: Path,
    *,
    share: float = 0.05,
    seed: int = 0,
    deduplication: Deduplication | None = None,
    largest_group: int | None = None,
    column: str = "text",
    sample_by: SampleBy = "line",
    read: ReadTexts | None = None,
    runner: TaskRunner | None = None,
) -> Holdout:
    """Write each document to ``output/train`` or to ``output/held_out``, as a coin decides, and
    ``output/holdout.json``, the manifest.

    *Groups.* Documents are connected if a band of their MinHash signatures agrees, as in
    :func:`~tfidf_tune.corpus.file_deduplication.deduplicate_corpus`; documents that are connected,
    also by others, are one group, any other document is a group of its own. More bands are searched
    than for a removal of copies, because here a copy that is missed costs more than one too many:
    with the defaults, a pair of the similarity 0.8 is missed in 2 % of cases, one of 0.9 in fewer
    than 0.1 %, and equal texts never.

    *The coin* is tossed for each group by :func:`~tfidf_tune.corpus.holdout.is_held_out`, a hash of
    the seed and of the text. There are no quotas, also not for groups of one size: with a quota,
    the side of a group would depend on all other groups. So the share that is held out varies by
    chance, and texts that are added later do not change the side of a group, unless a text joins it
    and has the least hash of its texts, connects it with another group, or makes it larger than
    ``largest_group``. If n different texts were in the group, a new one has the least hash with the
    probability 1 / (n + 1).

    *Groups that are too large.* For a group of more than ``largest_group`` documents no coin is
    tossed: all of it is trained on, and the manifest counts it. Dividing the group instead would
    leave near copies on both sides. If the chain ::

        A - B - C - D      A and B are near copies, B and C, C and D

    were divided in the middle, a coin could hold out C and D, while B, a near copy of C, is trained
    on: a model that recites C may have learned it from B, and the control is worthless. In a text
    with three chains of 61 documents, 1.7 % of what was held out had a near copy in the training
    text if chains were divided, 0.1 % if they were trained on, and 51 % if each document had a coin
    of its own (``research/benchmarks/holdout_copies.py``). So nothing that is held out has a near
    copy that was found in the training text, and documents of groups that are too large are no
    targets of an audit, because nothing that is held out is comparable. By default
    ``largest_group`` is 1 % of the documents, at least 10 and at most 1,000: no toss moves more of
    the text than that, and a longer chain is rather a template that connects different documents.
    This limit may grow with texts that are added; a number that is given does not.

    Documents without text, also those of white space, are trained on without a coin. Rows of JSON
    lines stay byte for byte, others become JSON.

    Each file is a task. After an interruption, the same call resumes and skips finished files.
    Memory does not grow with the text; it grows with the number of copies, by about 0.5 kB each,
    and with the documents of a file, by about 20 bytes each. ``output`` is new, empty, or of an
    interrupted call with the same arguments and files of the same content. The files of
    ``sources`` are never changed.

    Args:
        sources (Sequence[str]): files or folders of text.
        output (Path): the folder to write.
        share (float): the probability that a group is held out, above 0, up to 0.5. Default: 0.05
        seed (int): the seed of the coin. Default: 0
        deduplication (Deduplication | None): what near copies are. Default: None, which is
            ``Deduplication()``.
        largest_group (int | None): see above. Default: None
        column (str): the column of the text. Default: "text"
        sample_by (Literal["line", "paragraph", "document"]): what a document of a ``.txt`` file is.
            Default: "line"
        read (ReadTexts | None): reads the text of each row in place of ``column``, which is then
            not recorded; for conversations. Default: None
        runner (TaskRunner | None): where tasks run. Default: None, in this process.

    Returns:
        Holdout: what was written.

    Raises:
        ValueError: If an argument is not possible, the texts are too few, nothing would be held
            out, or a file changed.
    """
    deduplication = deduplication or Deduplication()
    require_number(
        "share", share, 0, HIGHEST_SHARE, "the probability that a group is held out", positive=True
    )
    require_integer("seed", seed, 0)
    if largest_group is not None:
        require_integer("largest_group", largest_group, 1)
    if deduplication.method == "none":
        raise ValueError(
            "method is none: near copies have to be found, so that no copy of a document that is "
            "held out is trained on; set it to exact or minhash"
        )
    bands_of(deduplication, COST_OF_MISSED)  # refuses a threshold that is too high
    output = output.resolve()
    _require_apart(sources, output)
    recorded_column = None if read else column
    read = read or partial(texts_of_rows, column=column, sample_by=sample_by)
    hashes = content_hashes(sources)
    files = list(hashes)
    settings: dict[str, Any] = {
        "seed": seed,
        "share": share,
        "largest_group": largest_group,
        "column": recorded_column,
        "sample_by": sample_by,
        **asdict(deduplication),
    }
    with resumable_output(output, {"files": hashes, **settings}, last=MANIFEST) as work:
        _require_documents(files, read, share)
        runner = runner or TaskRunner()
        read = partial(_texts, read)
        clusters = find_copies(
            files, work, deduplication, read, runner, cost_of_missed=COST_OF_MISSED
        )
        records = work / "records"
        record: list[Step] = [partial(_record, files, read, records)]
        runner.run(record, work / "4", len(files), "Hashing")
        if not (work / _DECIDED).is_file():
            _decide(work, files, clusters, records, settings)
        divide: list[Step] = [
            partial(_rows, files, sample_by),
            partial(_divide, work, hashes, clusters, settings),
        ]
        runner.run(divide, work / "5", len(files), "Dividing")
        manifest = _manifest(work, hashes, settings, deduplication)
        written = work / _WRITTEN
        with atomic_file(written / MANIFEST) as temporary:
            content = json.dumps(manifest, indent=2, ensure_ascii=False)
            temporary.write_text(content + "\n", encoding="utf-8")
        move_written(written, output, last=MANIFEST)
    return read_holdout(output / MANIFEST)


def _require_apart(sources: Sequence[str], output: Path) -> None:
    """Refuse to write into a folder that is read, or to read what is in the output."""
    for source in sources:
        path = Path(source).expanduser().resolve()
        if output.is_relative_to(path) and path.is_dir():
            raise ValueError(
                f"{output} is in {path}, whose files are read: name a folder outside of it"
            )
        for file in local_files(source):
            if file.resolve().is_relative_to(output):
                raise ValueError(f"{file} is in {output}, the folder to write: name another folder")


def _require_documents(files: Sequence[str], read: ReadTexts, share: float) -> None:
    """Refuse texts of which fewer than 10 documents would be held out, before hours of work."""
    needed = math.ceil(FEWEST_HELD_OUT / share)
    number = 0
    for file in files:
        for _, text in read(file):
            if text.strip():
                number += 1
            if number >= needed:
                return
    least_share = FEWEST_HELD_OUT / number if number else 1
    if least_share <= HIGHEST_SHARE:
        rounded = math.ceil(least_share * 100) / 100
        raise ValueError(
            f"there are {number:,} documents with text: of a share of {share:g}, about "
            f"{number * share:.1f} would be held out, and an audit needs {FEWEST_HELD_OUT}; set "
            f"share (--share) to {rounded:g} or more, or divide longer texts (--sample-by "
            "paragraph)"
        )
    raise ValueError(
        f"there are {number:,} documents with text, and an audit needs {FEWEST_HELD_OUT} that are "
        f"held out, at most half of all: add texts, or divide longer ones (--sample-by paragraph)"
    )


def _texts(read: ReadTexts, file: str) -> Iterator[tuple[str, str]]:
    """Yield place and text of each document, without white space around it, as training reads
    it.
    """
    for place, text in read(file):
        yield place, text.strip()


def _record(
    files: Sequence[str], read: ReadTexts, records: Path, _: Any, rank: int, world_size: int
) -> None:
    """Write the hash and the characters of each document of the file of a task."""
    texts = (text for _, text in read(files[rank]))
    with atomic_file(_records_file(records, rank)) as temporary, temporary.open("wb") as file:
        for text in progress(texts, files, rank, "Hashing"):
            halves = struct.unpack(">QQ", text_hash(text))
            file.write(_DOCUMENT.pack(*halves, len(text)))


def _records_file(records: Path, rank: int) -> Path:
    return records / f"{rank:06d}.bin"


def _name(row: Any) -> bytes:
    """Return the hash whose halves a document or a group has."""
    return struct.pack(">QQ", int(row["high"]), int(row["low"]))


def _decide(
    work: Path, files: Sequence[str], clusters: Path, records: Path, settings: dict[str, Any]
) -> None:
    """Write the table of the groups that have copies, a row for each cluster by its number, with
    the result of its coin, and what else is decided once.
    """
    parts = []
    num_documents = 0
    for rank in range(len(files)):
        documents = np.fromfile(_records_file(records, rank), _DOCUMENTS)
        num_documents += int(np.count_nonzero(documents["characters"]))
        parts.append(_with_clusters(documents, clusters, rank))
    # By cluster, then by hash: the first document of each cluster has the least hash. Of equal
    # hashes, the first in the order of files comes first.
    copies = np.concatenate(parts)
    copies = copies[np.lexsort((copies["low"], copies["high"], copies["cluster"]))]
    _, firsts, sizes = np.unique(copies["cluster"], return_index=True, return_counts=True)
    groups = np.zeros(len(firsts), _GROUPS)
    for field in ("high", "low", "rank", "number"):
        groups[field] = copies[field][firsts]
    groups["documents"] = sizes
    largest_group = settings["largest_group"] or _default_largest(num_documents)
    groups["is_tossed"] = sizes <= largest_group
    for number in np.flatnonzero(groups["is_tossed"]):
        groups["is_held_out"][number] = is_held_out(
            _name(groups[number]), seed=settings["seed"], share=settings["share"]
        )
    with atomic_file(work / _GROUPS_FILE) as temporary, temporary.open("wb") as file:
        np.save(file, groups)
    decided = {
        "date": date.today().isoformat(),
        "largest_group": largest_group,
        "cuts": _cuts(groups[~groups["is_tossed"]], files),
    }
    with atomic_file(work / _DECIDED) as temporary:
        temporary.write_text(json.dumps(decided), encoding="utf-8")


def _with_clusters(documents: _Array, clusters: Path, rank: int) -> _Array:
    """Return those documents of a file that have copies, with their clusters and places."""
    cluster_of = cluster_numbers_of_file(clusters, rank)
    numbers = np.fromiter(cluster_of, np.int64, len(cluster_of))
    copies = np.zeros(len(numbers), _COPIES)
    copies["cluster"] = np.fromiter(cluster_of.values(), np.int64, len(cluster_of))
    copies["high"] = documents["high"][numbers]
    copies["low"] = documents["low"][numbers]
    copies["rank"] = rank
    copies["number"] = numbers
    return copies


def _default_largest(num_documents: int) -> int:
    """Return 1 % of the documents, at least 10, at most 1,000."""
    lowest, highest = _LIMITS_OF_LARGEST
    return min(max(int(_LARGEST_SHARE * num_documents), lowest), highest)


def _cuts(groups: _Array, files: Sequence[str]) -> dict[str, Any]:
    """Return the numbers of the groups that are too large, and the largest of them, each with one
    of its documents.
    """
    largest = []
    for number in np.argsort(groups["documents"], kind="stable")[::-1][:_SHOWN_CUTS]:
        group = groups[number]
        largest.append(
            {
                "group": _name(group).hex(),
                "documents": int(group["documents"]),
                "file": files[group["rank"]],
                "row": int(group["number"]) + 1,
            }
        )
    return {
        "groups": len(groups),
        "documents": int(groups["documents"].sum()),
        "largest": largest,
    }


def _rows(
    files: Sequence[str], sample_by: SampleBy, _: Any, rank: int, world_size: int
) -> Iterator[PlacedRow]:
    """Yield the rows of the file of a task, with all columns."""
    rows = load_rows(TextSource(files[rank], sample_by=sample_by), {}, None)
    return progress(rows, files, rank, "Dividing", _content)


def _content(row: PlacedRow) -> Any:
    return row.line or row.columns.get("text")


class _Decisions:
    """What was decided of each document of a file."""

    def __init__(self, work: Path, clusters: Path, rank: int, seed: int, share: float) -> None:
        self._rank = rank
        self._cluster_of = cluster_numbers_of_file(clusters, rank)
        self._groups = np.load(work / _GROUPS_FILE, mmap_mode="r")
        self._seed = seed
        self._share = share

    def decide(self, number: int, document: Any) -> tuple[Side, GroupOfRow, bool]:
        """Return the side and the group of a document, and whether its group is counted with it."""
        if not document["characters"]:
            return "train", _NO_TEXT, False
        if number in self._cluster_of:
            group = self._groups[self._cluster_of[number]]
            name = _name(group)
            size = int(group["documents"])
            is_tossed = bool(group["is_tossed"])
            held_out = bool(group["is_held_out"])
            place = (int(group["rank"]), int(group["number"]))
            is_first = place == (self._rank, number)
        else:
            name = _name(document)
            size = 1
            is_tossed = True
            held_out = is_held_out(name, seed=self._seed, share=self._share)
            is_first = True
        side: Side = "held_out" if held_out else "train"
        return side, GroupOfRow(name.hex(), size, is_tossed), is_first


def _divide(
    work: Path,
    hashes: dict[str, str],
    clusters: Path,
    settings: dict[str, Any],
    data: Iterator[PlacedRow],
    rank: int,
    world_size: int,
) -> None:
    """Write the rows of a task and their groups to the files of their sides, and count."""
    documents = np.fromfile(_records_file(work / "records", rank), _DOCUMENTS)
    decisions = _Decisions(work, clusters, rank, settings["seed"], settings["share"])
    counts: Counter[str] = Counter()
    files = {side: work / _WRITTEN / side / f"{rank:05d}.jsonl.gz" for side in SIDES}
    with ExitStack() as stack:
        rows_of_side = {}
        groups_of_side = {}
        for side, file in files.items():
            rows_of_side[side] = stack.enter_context(packed_lines(file))
            groups_of_side[side] = stack.enter_context(packed_lines(groups_file(file)))
        # A file that has changed may have another number of rows: it is refused below.
        for number, (row, document) in enumerate(zip(data, documents, strict=False)):
            side, group, is_first = decisions.decide(number, document)
            rows_of_side[side].write(line_of_row(row) + b"\n")
            groups_of_side[side].write(group.line())
            _count(counts, side, group, int(document["characters"]), is_first)
        source = [*hashes][rank]
        if file_sha256(Path(source)) != hashes[source]:
            raise ValueError(f"{source} has changed while it was read: run the same command again")
    written = {}
    for side, file in files.items():
        num_rows = counts[f"{side} rows"]
        for path in (file, groups_file(file)):
            if num_rows:
                name = path.relative_to(work / _WRITTEN).as_posix()
                written[name] = {"sha256": file_sha256(path), "rows": num_rows}
            else:
                path.unlink()
    with atomic_file(_counts_file(work, rank)) as temporary:
        content = json.dumps({"counts": counts, "files": written})
        temporary.write_text(content, encoding="utf-8")


def _counts_file(work: Path, rank: int) -> Path:
    return work / "counts" / f"{rank:06d}.json"


def _count(
    counts: Counter[str], side: Side, group: GroupOfRow, characters: int, is_first: bool
) -> None:
    """Add a row to the counts of its side, and to those of groups as large as its own."""
    counts[f"{side} rows"] += 1
    if group.name is None:
        counts["without text"] += 1
        return
    counts[f"{side} documents"] += 1
    counts[f"{side} characters"] += characters
    if is_first:
        counts[f"{side} groups"] += 1
    if group.is_tossed:
        size = _size_class(group.documents)
        counts[f"{side} documents {size}"] += 1
        if is_first:
            counts[f"{side} groups {size}"] += 1


def _size_class(documents: int) -> int:
    """Return the class of a group's size: 0 for 1 document, 1 for 2, 2 for 3 and 4, 3 for 5 to
    8.
    """
    return (documents - 1).bit_length()


def _size_name(size: int) -> str:
    """Return what a class of sizes is called: ``5-8``."""
    if size < 2:
        return str(size + 1)
    return f"{2 ** (size - 1) + 1}-{2**size}"


def _manifest(
    work: Path, hashes: dict[str, str], settings: dict[str, Any], deduplication: Deduplication
) -> dict[str, Any]:
    """Return the manifest."""
    counts: Counter[str] = Counter()
    files: dict[str, Any] = {}
    for rank in range(len(hashes)):
        part = json.loads(_counts_file(work, rank).read_text(encoding="utf-8"))
        counts.update(part["counts"])
        files.update(part["files"])
    decided = json.loads((work / _DECIDED).read_text(encoding="utf-8"))
    cuts = decided["cuts"]
    sides: dict[str, Any] = {}
    for side in SIDES:
        sides[side] = {
            "documents": counts[f"{side} documents"],
            "groups": counts[f"{side} groups"],
            "characters": counts[f"{side} characters"],
        }
        if not sides[side]["groups"]:
            raise ValueError(
                f"the coin put no document on the side {side}: {cuts['documents']:,} documents are "
                f"in groups of more than {decided['largest_group']:,} near copies, for which no "
                f"coin is tossed, {counts['train groups'] - cuts['groups']:,} other groups are "
                "trained on. Set a higher share (--share), or a higher threshold of near copies "
                "(--threshold), or divide longer texts (--sample-by paragraph)"
            )
    num_bands, num_functions = bands_of(deduplication, COST_OF_MISSED)
    near_copies: dict[str, Any] = {"method": deduplication.method}
    if deduplication.method == "minhash":
        missed = (1 - deduplication.threshold**num_functions) ** num_bands
        near_copies |= {
            "threshold": deduplication.threshold,
            "ngram": deduplication.ngram,
            "bands": num_bands,
            "hashes_in_a_band": num_functions,
            "missed_at_threshold": round(missed, 4),
        }
    return {
        "schema_version": SCHEMA_VERSION,
        "made_by": f"tfidf-tune {version('tfidf-tune')}",
        "date": decided["date"],
        "seed": settings["seed"],
        "share": settings["share"],
        "rule": RULE,
        "near_copies": near_copies,
        "largest_group": decided["largest_group"],
        "column": settings["column"],
        "sample_by": settings["sample_by"],
        "sides": sides,
        "by_copies": _by_copies(counts),
        "cuts": cuts,
        "without_text": counts["without text"],
        "sources": [{"file": file, "sha256": sha256} for file, sha256 in hashes.items()],
        "files": files,
    }


def _by_copies(counts: Counter[str]) -> list[dict[str, Any]]:
    """Return the groups of each size, and their documents, on both sides; without the groups for
    which no coin was tossed.
    """
    rows = []
    for size in range(_size_class(2**32)):
        row: dict[str, Any] = {"copies": _size_name(size)}
        for side in SIDES:
            row[side] = {
                "groups": counts[f"{side} groups {size}"],
                "documents": counts[f"{side} documents {size}"],
            }
        if row["train"]["groups"] or row["held_out"]["groups"]:
            rows.append(row)
    return rows
