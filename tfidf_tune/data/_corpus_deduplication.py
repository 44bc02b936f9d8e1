"""Remove copies from text that is larger than memory, on disk, by the steps of datatrove.

Signatures of all documents are written to disk and sorted there; equal ones are joined to clusters, of which one
document stays. Each step is a datatrove pipeline: finished tasks are not done again after an interruption.
"""

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from datatrove.data import Document
from datatrove.io import get_datafolder
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.writers import JsonlWriter

from tfidf_tune._checks import require_choice, require_integer, require_number
from tfidf_tune.data._disk_tasks import TaskRunner, begin, file_stamps, progress
from tfidf_tune.data._hashes import Hashes, word_ngrams
from tfidf_tune.data._sources import SampleBy, load_rows

_WORK = "unfinished"
_SHOWN_CLUSTERS, _SHOWN_CHARACTERS = 10, 60
_UNUSED_BITS = np.uint64(3)  # datatrove takes hashes below 2^61 - 1
_TOGETHER = 4096  # n-grams whose hashes are computed at once


@dataclass(frozen=True)
class CorpusDeduplication:
    """What is a copy.

    - ``exact``: a document with the text of another one.
    - ``minhash``: a document that MinHash with locality-sensitive hashing finds near another one, by the n-grams of its
      words in lower case. A pair of Jaccard similarity s is found with the probability ``1 - (1 - s^r)^b``, of b bands
      of r hash functions that are chosen for the threshold. Similarities are not computed, and documents that are
      connected by pairs are one cluster.

    Args:
        method (str): "exact" or "minhash". Default: "minhash"
        threshold (float): similarity at which most pairs are found, above 0. Default: 0.8
        ngram (int): words of an n-gram. Default: 5
        num_perm (int): hash functions at most. Default: 128
        column (str): column of the text. Default: "text"
        sample_by (str): what a document of a ``.txt`` file is. Default: "line"

    Raises:
        ValueError: If a value is out of range.
    """

    method: str = "minhash"
    threshold: float = 0.8
    ngram: int = 5
    num_perm: int = 128
    column: str = "text"
    sample_by: SampleBy = "line"

    def __post_init__(self) -> None:
        require_choice("method", self.method, ("exact", "minhash"))
        require_number("threshold", self.threshold, 0, 1, "the Jaccard similarity of copies",
                       reason="that of equal sets", positive=True)  # fmt: skip
        require_integer("ngram", self.ngram, 1)
        require_integer("num_perm", self.num_perm, 2)

    @cached_property
    def bands(self) -> tuple[int, int]:
        """Bands and hash functions of each: with errors of both kinds equally bad; of exact copies one of 128 bits."""
        if self.method == "exact":
            return 1, 2
        from datasketch import MinHashLSH

        try:
            index = MinHashLSH(self.threshold, self.num_perm)
        except ValueError as error:  # a single band
            raise ValueError(
                f"threshold {self.threshold} is too high for {self.num_perm} hash functions: lower it or use exact"
            ) from error
        return index.b, index.r


def deduplicate_corpus(
    sources: Sequence[str], output: Path, settings: CorpusDeduplication, runner: TaskRunner | None = None
) -> dict[str, Any]:
    """Write the documents that stay to ``output/*.jsonl.gz``, with all their columns, and ``output/report.json``.

    Each file is a task. After an interruption, the same call resumes and skips finished files. Memory does not grow
    with the text; it grows with the number of copies, by about 0.5 kB each.

    Args:
        sources (Sequence[str]): ``.txt``, ``.jsonl`` or ``.parquet`` files, or folders of them; never changed.
        output (Path): a folder that does not exist, is empty, or is of an interrupted call with the same arguments.
        settings (CorpusDeduplication): what is a copy.
        runner (TaskRunner | None): where the tasks run. Default: None, one process of this machine

    Returns:
        dict[str, Any]: the report: documents and characters read and kept, and the largest clusters.

    Raises:
        FileNotFoundError: If a source does not exist.
        ValueError: If a source cannot be read, has no such column, or ``output`` is something else.
        ChildProcessError: If a task on another machine failed.
    """
    runner = runner or TaskRunner()
    stamps = file_stamps(sources)
    files = list(stamps)
    num_bands, num_rows = settings.bands
    output = output.resolve()
    work = output / _WORK
    if output.is_file() or (output.is_dir() and any(output.iterdir()) and not work.is_dir()):
        raise ValueError(f"{output} exists and is not empty: name a new folder")
    begin(work, {"files": stamps, **asdict(settings)})
    config = MinhashConfig(n_grams=settings.ngram, num_buckets=num_bands, hashes_per_bucket=num_rows)
    signatures, pairs, clusters, counts = (str(work / name) for name in ("signatures", "pairs", "clusters", "counts"))
    writer = JsonlWriter(str(output), "${rank}.jsonl.gz", adapter=_row)
    find, write = "Finding copies", "Writing"
    cluster = MinhashDedupCluster(pairs, clusters, config=config, save_cluster_size=True)
    steps: list[tuple[str, int, list[PipelineStep]]] = [
        (find, len(files), [_Reader(files, settings, find), _Signature(signatures, config, settings)]),
        ("Sorting copies", num_bands, [MinhashDedupBuckets(signatures, pairs, config=config)]),
        ("Joining copies", 1, [cluster]),
        (write, len(files), [_Reader(files, settings, write), _Keep(clusters, counts), writer]),
    ]
    for number, (doing, num_tasks, pipeline) in enumerate(steps, start=1):
        runner.run(pipeline, work / str(number), num_tasks, doing)
    report = _report(Path(counts), settings)
    (output / "report.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    shutil.rmtree(work)
    return report


def _row(_: Any, document: Document) -> Any:
    return document.metadata["row"]


class _Reader(PipelineStep):  # type: ignore[misc]
    """Read the file of a task."""

    type, name = "Reader", "rows"

    def __init__(self, files: Sequence[str], settings: CorpusDeduplication, doing: str) -> None:
        super().__init__()
        self.files, self.settings, self.doing = files, settings, doing

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield its rows."""
        column, file = self.settings.column, self.files[rank]
        with progress(self.files, rank, self.doing) as count:
            for number, row in enumerate(load_rows(file, {column: str}, sample_by=self.settings.sample_by)):
                if number == 0:
                    _check_columns(row, file)
                text = row[column] or ""
                count(text)
                yield Document(text=text, id=f"{rank}-{number}", metadata={"row": row})


class _Signature(MinhashDedupSignature):  # type: ignore[misc]
    """The hashes of a document, computed for all its n-grams at once."""

    def __init__(self, output_folder: str, config: MinhashConfig, settings: CorpusDeduplication) -> None:
        PipelineStep.__init__(self)  # that of the base class loads a tokenizer
        self.output_folder, self.config = get_datafolder(output_folder), config
        self.num_hashes, self.skip_existing_sigs = config.num_buckets * config.hashes_per_bucket, False
        self.is_exact = settings.method == "exact"

    def get_shingles(self, text: str) -> Hashes:
        """Return the hashes of the n-grams of a text, or the two halves of that of the text."""
        if self.is_exact:
            if not text:  # rows without text are no copies of each other
                return np.zeros(0, np.uint64)
            digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            return np.frombuffer(digest, np.uint64)
        return word_ngrams(text, self.config.n_grams)

    @cached_property
    def functions(self) -> Hashes:
        """Odd factors and summands modulo 2^64, uint64 ``[2, num_hashes]``."""
        drawn = np.random.default_rng(self.config.seed).integers(0, 2**64, (2, self.num_hashes), dtype=np.uint64)
        drawn[0] |= np.uint64(1)
        return drawn

    def get_signature(self, shingles: Hashes) -> list[list[int]]:
        """Return the least value of each hash function, by band."""
        if self.is_exact:
            return [(shingles >> _UNUSED_BITS).tolist()]
        factors, summands = self.functions
        lowest = np.full(self.num_hashes, np.iinfo(np.uint64).max)
        for start in range(0, len(shingles), _TOGETHER):
            values = shingles[start : start + _TOGETHER, None] * factors + summands
            lowest = np.minimum(lowest, values.min(axis=0))
        return [part.tolist() for part in np.split(lowest >> _UNUSED_BITS, self.config.num_buckets)]


class _Keep(PipelineStep):  # type: ignore[misc]
    """Leave out the copies of a task's documents, and count."""

    type, name = "Filter", "copies"

    def __init__(self, clusters: str, counts: str) -> None:
        super().__init__()
        self.clusters, self.counts = clusters, counts

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents that stay."""
        removed = set(_numbers(Path(self.clusters) / f"{rank:06d}.remove").tolist())
        pairs = _numbers(Path(self.clusters) / f"{rank:06d}.sizes").reshape(-1, 2)
        sizes: dict[int, int] = {int(number): int(size) for number, size in pairs}
        counts: Counter[str] = Counter()
        largest: list[tuple[int, str]] = []
        for number, document in enumerate(data):
            counts.update(documents=1, characters=len(document.text))
            if number in removed:
                continue
            counts.update(kept_documents=1, kept_characters=len(document.text))
            if number in sizes:
                largest.append((sizes[number], document.text[:_SHOWN_CHARACTERS]))
                largest = sorted(largest, key=lambda one: -one[0])[:_SHOWN_CLUSTERS]
            yield document
        folder = Path(self.counts)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{rank}.json").write_text(json.dumps({"counts": counts, "largest": largest}), encoding="utf-8")


def _check_columns(row: dict[str, Any], file: str) -> None:
    try:
        orjson.dumps(row)
    except TypeError as error:
        raise ValueError(
            f"{file!r} has a column that cannot be written as JSON ({error}): remove it or make it text"
        ) from error


def _numbers(file: Path) -> npt.NDArray[np.uint32]:
    return np.fromfile(file, np.uint32) if file.is_file() else np.zeros(0, np.uint32)


def _report(counts: Path, settings: CorpusDeduplication) -> dict[str, Any]:
    parts = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(counts.glob("*.json"))]
    total: Counter[str] = sum((Counter(part["counts"]) for part in parts), Counter())
    names = ("documents", "kept_documents", "characters", "kept_characters")
    largest = sorted((tuple(one) for part in parts for one in part["largest"]), key=lambda one: -one[0])
    bands, rows = settings.bands
    return {
        **{name: total[name] for name in names},
        "settings": {**asdict(settings), "bands": bands, "hashes_in_a_band": rows},
        "largest_clusters": [{"documents": size, "beginning": text} for size, text in largest[:_SHOWN_CLUSTERS]],
    }
