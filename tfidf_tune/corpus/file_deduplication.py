"""Remove copies from text that is larger than memory, on disk, by the steps of datatrove.

Signatures of all documents are written to disk and sorted there; equal ones are joined to clusters,
of which one document stays. Each step is a datatrove pipeline: finished tasks are not done again
after an interruption.
"""

import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from filecmp import cmp
from functools import partial
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from datatrove.data import Document
from datatrove.io import get_datafolder
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from loguru import logger

from tfidf_tune._files import atomic_file, is_leftover, locked_folder, work_folder
from tfidf_tune.corpus.deduplication import Deduplication
from tfidf_tune.corpus.jobs import Step, TaskRunner, progress
from tfidf_tune.corpus.minhash import Hashes, bands, signature, word_ngrams
from tfidf_tune.corpus.sources import (
    PlacedRow,
    SampleBy,
    TextSource,
    content_hashes,
    load_rows,
    texts_of_rows,
)

ReadTexts = Callable[[str], Iterator[tuple[str, str]]]
"""A function of a file that yields the place and the text of each document; the text
may be empty.
"""

_WORK = "unfinished"
_REPORT = "report.json"
_SHOWN_CLUSTERS = 10
_SHOWN_CHARACTERS = 60
_UNUSED_BITS = np.uint64(3)  # datatrove takes hashes below 2^61 - 1
_EXACT_BANDS = (1, 2)  # bands, and hashes in each: the 128 bits of a text's hash


def deduplicate_corpus(
    sources: Sequence[str],
    output: Path,
    deduplication: Deduplication,
    *,
    column: str = "text",
    sample_by: SampleBy = "line",
    runner: TaskRunner | None = None,
) -> dict[str, Any]:
    """Write the documents that stay to ``output/*.jsonl.gz``, with all their columns, and
    ``output/report.json``.

    With ``minhash``, documents are connected that have a band of their signatures in common;
    similarities are not computed, and documents that are connected by others are one cluster.
    Documents that are empty all stay.

    Each file is a task. After an interruption, the same call resumes and skips finished files.
    Memory does not grow with the text; it grows with the number of copies, by about 0.5 kB each.

    The files of ``sources`` are never changed. ``output`` is new, empty, or of an interrupted call
    with the same arguments and files of the same content; until it is complete, it has the folder
    ``unfinished``, and the report comes last. Returns the report: documents and characters read and
    kept, and the largest clusters.
    """
    output = output.resolve()
    hashes = content_hashes(sources)
    settings = asdict(deduplication) | {"column": column, "sample_by": sample_by}
    with resumable_output(output, {"files": hashes, **settings}, last=_REPORT) as work:
        runner = runner or TaskRunner()
        written = _deduplicate(list(hashes), work, deduplication, settings, runner)
        report: dict[str, Any] = json.loads((written / _REPORT).read_text(encoding="utf-8"))
        move_written(written, output, last=_REPORT)
    return report


@contextmanager
def resumable_output(output: Path, arguments: dict[str, Any], last: str) -> Iterator[Path]:
    """Lock a folder that is new, empty, or of an interrupted call with the same arguments; yield a
    folder in it for what the call writes on its way.

    ``last`` is the name of the file that a complete output has.
    """
    if output.is_file():
        raise ValueError(f"{output} is a file: name a new folder")
    with locked_folder(output):
        if any(output.iterdir()) and not (output / _WORK).is_dir():
            state = "is complete" if (output / last).is_file() else "exists and is not empty"
            raise ValueError(f"{output} {state}: name a new folder")
        with work_folder(output / _WORK, arguments) as work:
            yield work


def move_written(written: Path, output: Path, last: str) -> None:
    """Move the files that were written, also those in folders, to the output, and the file named
    ``last`` after all others.
    """
    paths = sorted(written.rglob("*"))
    files = [path for path in paths if path.is_file() and not is_leftover(path)]  # of a killed task
    for file in sorted(files, key=lambda file: file.name == last):
        target = output / file.relative_to(written)
        if target.exists() and not cmp(file, target, shallow=False):
            raise FileExistsError(
                f"{target} is not of this run: move it away, and run the same command again"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        file.replace(target)


def _deduplicate(
    files: list[str],
    work: Path,
    deduplication: Deduplication,
    settings: dict[str, Any],
    runner: TaskRunner,
) -> Path:
    """Write documents and report to a folder in ``work``, and return it."""
    column = settings["column"]
    sample_by = settings["sample_by"]
    read = partial(texts_of_rows, column=column, sample_by=sample_by)
    clusters = find_copies(files, work, deduplication, read, runner)
    counts = work / "counts"
    written = work / "written"
    pipeline: list[Step] = [
        partial(_read, files, column, sample_by, "Writing"),
        partial(_keep, clusters, counts),
        partial(_write, written),
    ]
    runner.run(pipeline, work / "4", len(files), "Writing")
    # The numbers of all files, and the largest clusters of them.
    total: Counter[str] = Counter()
    clusters_of_files: list[list[Any]] = []
    for rank in range(len(files)):
        part = json.loads((counts / f"{rank}.json").read_text(encoding="utf-8"))
        total.update(part["counts"])
        clusters_of_files += part["largest"]
    largest = nlargest(_SHOWN_CLUSTERS, clusters_of_files, key=itemgetter(0))
    num_bands, num_functions = bands_of(deduplication)
    report = {
        "documents": total["documents"],
        "kept_documents": total["kept_documents"],
        "characters": total["characters"],
        "kept_characters": total["kept_characters"],
        "settings": settings | {"bands": num_bands, "hashes_in_a_band": num_functions},
        "largest_clusters": [{"documents": size, "beginning": text} for size, text in largest],
    }
    written.mkdir(exist_ok=True)
    content = json.dumps(report, indent=2, ensure_ascii=False)
    (written / _REPORT).write_text(content + "\n", encoding="utf-8")
    return written


def bands_of(deduplication: Deduplication, cost_of_missed: float = 0.5) -> tuple[int, int]:
    """Return the number of bands of the signatures and of hash functions in each."""
    if deduplication.method == "exact":
        return _EXACT_BANDS
    return bands(deduplication.threshold, cost_of_missed)


def find_copies(
    files: Sequence[str],
    work: Path,
    deduplication: Deduplication,
    read: ReadTexts,
    runner: TaskRunner,
    doing: str = "copies",
    *,
    cost_of_missed: float = 0.5,
) -> Path:
    """Find the documents of files that are copies, see :func:`deduplicate_corpus`; ``doing`` is
    what a bar names.

    ``read`` yields the place and the text of each document of a file. ``cost_of_missed`` is what a
    pair that is not found costs, beside one that is found and is less similar than the threshold,
    see :func:`~tfidf_tune.corpus.minhash.bands`. Returns a folder in ``work`` for
    :func:`clusters_of_file` and :func:`cluster_numbers_of_file`. Steps that ``work`` has are not
    done again.
    """
    logger.disable("datatrove")
    num_bands, num_functions = bands_of(deduplication, cost_of_missed)
    config = MinhashConfig(
        n_grams=deduplication.ngram, num_buckets=num_bands, hashes_per_bucket=num_functions
    )
    signatures = str(work / "signatures")
    pairs = str(work / "pairs")
    clusters = work / "clusters"
    # Three steps, with a task for each file, for each band and for all pairs.
    documents = partial(_documents, files, read, f"Finding {doing}")
    sign = _Signature(signatures, config, deduplication.method == "exact")
    runner.run([documents, sign], work / "1", len(files), f"Finding {doing}")
    sort = MinhashDedupBuckets(signatures, pairs, config=config)
    runner.run([sort], work / "2", num_bands, f"Sorting {doing}")
    join = MinhashDedupCluster(
        pairs, str(clusters), config=config, save_cluster_id=True, save_cluster_size=True
    )
    complete = partial(_complete, clusters, len(files))
    runner.run([join, complete], work / "3", 1, f"Joining {doing}")
    return clusters


def _documents(
    files: Sequence[str], read: ReadTexts, doing: str, _: Any, rank: int, world_size: int
) -> Iterator[Document]:
    """Yield the documents of the file of a task, without its other columns."""
    texts = (text for _, text in read(files[rank]))
    for number, text in enumerate(progress(texts, files, rank, doing)):
        yield Document(text=text, id=f"{rank}-{number}")


def clusters_of_file(clusters: Path, rank: int) -> tuple[set[int], dict[int, int]]:
    """Return the numbers of the documents of a file that go, and the sizes of the clusters of those
    that stay.
    """
    removed = np.fromfile(clusters / f"{rank:06d}.remove", np.uint32)
    pairs = np.fromfile(clusters / f"{rank:06d}.sizes", np.uint32)
    numbers = pairs[::2].tolist()
    sizes = pairs[1::2].tolist()
    return set(removed.tolist()), dict(zip(numbers, sizes, strict=True))


def cluster_numbers_of_file(clusters: Path, rank: int) -> dict[int, int]:
    """Return the number of the cluster of each document of a file that has copies; clusters of all
    files are numbered from 0.
    """
    pairs = np.fromfile(clusters / f"{rank:06d}.clusters", np.uint32)
    return dict(zip(pairs[::2].tolist(), pairs[1::2].tolist(), strict=True))


def _read(
    files: Sequence[str],
    column: str,
    sample_by: SampleBy,
    doing: str,
    _: Any,
    rank: int,
    world_size: int,
) -> Iterator[Document]:
    """Yield the rows of the file of a task."""
    rows = load_rows(TextSource(files[rank], sample_by=sample_by), {column: str}, None)
    shown = progress(rows, files, rank, doing, lambda row: row.columns[column])
    for number, row in enumerate(shown):
        text = row.columns[column] or ""
        yield Document(text=text, id=f"{rank}-{number}", metadata={"line": line_of_row(row)})


def line_of_row(row: PlacedRow) -> bytes:
    """Return a row as a line of JSON, without a line end; that of JSON lines as it is."""
    try:
        line = row.line or orjson.dumps(row.columns)
    except TypeError as error:
        raise ValueError(
            f"{row.place} has a column that cannot be written as JSON ({error})"
        ) from error
    return line.rstrip(b"\r\n")


def _write(folder: Path, data: Iterator[Document], rank: int, world_size: int) -> None:
    """Write the rows of a task."""
    with packed_lines(folder / f"{rank:05d}.jsonl.gz") as packed:
        for document in data:
            packed.write(document.metadata["line"] + b"\n")


@contextmanager
def packed_lines(path: Path) -> Iterator[gzip.GzipFile]:
    """Yield a packed file to write to; it appears when the block ends without an error."""
    # datatrove's writer loses the end of a file without an error if the disk is full.
    with (
        atomic_file(path) as temporary,
        temporary.open("wb") as file,
        gzip.GzipFile("", "wb", 6, file, mtime=0) as packed,  # the same bytes at any time
    ):
        yield packed


class _Signature(MinhashDedupSignature):  # type: ignore[misc]
    def __init__(self, output_folder: str, config: MinhashConfig, is_exact: bool) -> None:
        PipelineStep.__init__(self)  # that of the base class loads a tokenizer
        self.output_folder = get_datafolder(output_folder)
        self.config = config
        self.num_hashes = config.num_buckets * config.hashes_per_bucket
        self.skip_existing_sigs = False
        self.is_exact = is_exact

    def get_shingles(self, text: str) -> Hashes:
        """Return the hashes of the n-grams of a text, or the two halves of that of the text."""
        if not self.is_exact:
            return word_ngrams(text, self.config.n_grams)
        if not text:  # rows without text are no copies of each other
            return np.zeros(0, np.uint64)
        content = text.encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(content, digest_size=16).digest()
        return np.frombuffer(digest, np.uint64)

    def get_signature(self, shingles: Hashes) -> list[list[int]]:
        """Return the least value of each hash function, by band."""
        hashes = shingles if self.is_exact else signature(shingles)[: self.num_hashes]
        in_bands = np.split(hashes >> _UNUSED_BITS, self.config.num_buckets)
        return [band.tolist() for band in in_bands]


def _complete(clusters: Path, num_files: int, _: Any, rank: int, world_size: int) -> None:
    """Write the empty files that datatrove leaves out, so that a missing one is an error."""
    clusters.mkdir(exist_ok=True)
    for number in range(num_files):
        (clusters / f"{number:06d}.remove").touch()
        (clusters / f"{number:06d}.sizes").touch()
        (clusters / f"{number:06d}.clusters").touch()


def _keep(
    clusters: Path, counts: Path, data: Iterator[Document], rank: int, world_size: int
) -> Iterator[Document]:
    """Yield the documents of a task that stay, and count."""
    removed, sizes = clusters_of_file(clusters, rank)
    total: Counter[str] = Counter()
    largest: list[tuple[int, str]] = []
    for number, document in enumerate(data):
        total.update(documents=1, characters=len(document.text))
        if number in removed:
            continue
        total.update(kept_documents=1, kept_characters=len(document.text))
        if number in sizes:
            shown = (sizes[number], document.text[:_SHOWN_CHARACTERS])
            # Not all of them are in memory.
            largest = nlargest(_SHOWN_CLUSTERS, [*largest, shown], key=itemgetter(0))
        yield document
    counts.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"counts": total, "largest": largest})
    (counts / f"{rank}.json").write_text(content, encoding="utf-8")
