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
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.io import get_datafolder
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.writers import JsonlWriter
from loguru import logger
from tqdm import tqdm

from tfidf_tune._checks import differences, require_choice, require_integer, require_number
from tfidf_tune.data._sources import SampleBy, load_rows, local_files

Hashes = npt.NDArray[np.uint64]
_WORK = "unfinished"
_SHOWN_CLUSTERS, _SHOWN_CHARACTERS = 10, 60
_UNUSED_BITS = np.uint64(3)  # datatrove takes hashes below 2^61 - 1
_TOGETHER = 4096  # n-grams whose hashes are computed at once
_BASE, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)  # odd, so that powers have inverses
_IS_WORD = np.array([byte >= 128 or chr(byte).isalnum() for byte in range(256)])


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
    sources: Sequence[str], output: Path, settings: CorpusDeduplication, *, num_jobs: int = 1
) -> dict[str, Any]:
    """Write the documents that stay to ``output/*.jsonl.gz``, with all their columns, and ``output/report.json``.

    Files are divided among the jobs. An interrupted call, made again, goes on with the files that were not finished.
    Memory does not grow with the text; it grows with the number of copies, by about 0.5 kB each.

    Args:
        sources (Sequence[str]): ``.txt``, ``.jsonl`` or ``.parquet`` files, or folders of them; never changed.
        output (Path): a folder that does not exist, is empty, or is of an interrupted call with the same arguments.
        settings (CorpusDeduplication): what is a copy.
        num_jobs (int): processes. Default: 1

    Returns:
        dict[str, Any]: the report: documents and characters read and kept, and the largest clusters.

    Raises:
        FileNotFoundError: If a source does not exist.
        ValueError: If a source cannot be read, has no such column, or ``output`` is something else.
    """
    require_integer("num_jobs", num_jobs, 1)
    files = [str(file) for source in sources for file in local_files(source)]
    num_bands, _ = settings.bands
    work = _begin(output, {"files": files, **asdict(settings)})
    logger.disable("datatrove")
    config = MinhashConfig(n_grams=settings.ngram, num_buckets=num_bands, hashes_per_bucket=settings.bands[1])
    tasks = len(files)

    def run(name: str, steps: list[PipelineStep], number: int, workers: int) -> None:
        LocalPipelineExecutor(
            steps, tasks=number, workers=min(workers, number), logging_dir=str(work / name), start_method="fork"
        ).run()

    reader = _Reader(files, settings, "Finding copies")
    run("1", [reader, _Signature(str(work / "signatures"), config, settings)], tasks, num_jobs)
    buckets = MinhashDedupBuckets(str(work / "signatures"), str(work / "pairs"), config=config)
    run("2", [buckets], num_bands, num_jobs)
    cluster = MinhashDedupCluster(str(work / "pairs"), str(work / "clusters"), config=config, save_cluster_size=True)
    run("3", [cluster], 1, 1)
    writer = JsonlWriter(str(output), "${rank}.jsonl.gz", adapter=lambda _, document: document.metadata["row"])
    steps = [_Reader(files, settings, "Writing"), _Keep(str(work / "clusters"), str(work / "counts")), writer]
    run("4", steps, tasks, num_jobs)
    report = _report(work / "counts", settings)
    (output / "report.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    shutil.rmtree(work)
    return report


class _Reader(PipelineStep):  # type: ignore[misc]
    """Read the files of a task."""

    type, name = "Reader", "rows"

    def __init__(self, files: Sequence[str], settings: CorpusDeduplication, doing: str) -> None:
        super().__init__()
        self.files, self.settings, self.doing = files, settings, doing

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the rows of every ``world_size``-th file."""
        column = self.settings.column
        for file in self.files[rank::world_size]:
            is_plain = Path(file).suffix in (".txt", ".jsonl")
            size = Path(file).stat().st_size if is_plain else None
            with tqdm(total=size, unit="B", unit_scale=True, desc=f"{self.doing} {Path(file).name}") as bar:
                for number, row in enumerate(load_rows(file, {column: str}, sample_by=self.settings.sample_by)):
                    text = row[column] or ""
                    bar.update(len(text) if size else 1)
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


def word_ngrams(text: str, size: int) -> Hashes:
    """Return a hash of each n-gram of the words of a text in lower case, uint64 ``[num_ngrams]``.

    A word is a run of letters and digits, and of all characters that are not ASCII. A text with fewer words is one
    n-gram; without words it has none. All hashes come from a few operations on the bytes of the text: with the bytes
    ``x_i`` and an odd base B modulo 2^64, that of the word from s to e is ``B^-s * sum_{s <= i < e} (x_i + 1) B^i``.
    """
    data = np.frombuffer(text.lower().encode("utf-8", "surrogatepass"), np.uint8)
    borders = np.flatnonzero(np.diff(_IS_WORD[data], prepend=False, append=False))
    starts, ends = borders[::2], borders[1::2]
    if not len(starts):
        return np.zeros(0, np.uint64)
    powers, inverses = _powers(1 << len(data).bit_length())
    sums = np.zeros(len(data) + 1, np.uint64)
    np.cumsum((data + np.uint64(1)) * powers[: len(data)], out=sums[1:])
    words = _mixed((sums[ends] - sums[starts]) * inverses[starts])
    size = min(size, len(words))
    hashes = np.zeros(len(words) - size + 1, np.uint64)
    for place in range(size):
        hashes = hashes * _BASE + words[place : place + len(hashes)]
    return np.unique(_mixed(hashes))


@lru_cache(4)
def _powers(number: int) -> tuple[Hashes, Hashes]:
    """Return the powers of the base and of its inverse modulo 2^64, from 0 on."""
    bases = _BASE, np.uint64(pow(int(_BASE), -1, 2**64))
    rows = [np.concatenate([np.ones(1, np.uint64), np.full(number, base, np.uint64)]).cumprod() for base in bases]
    return rows[0], rows[1]


def _mixed(values: Hashes) -> Hashes:
    values = (values ^ (values >> np.uint64(30))) * _MIX
    return np.asarray(values ^ (values >> np.uint64(31)))


def _numbers(file: Path) -> npt.NDArray[np.uint32]:
    return np.fromfile(file, np.uint32) if file.is_file() else np.zeros(0, np.uint32)


def _begin(output: Path, arguments: dict[str, Any]) -> Path:
    """Make the folder of the steps, or check that the one that is there has the same arguments."""
    work = output / _WORK
    record = work / "arguments.json"
    if record.is_file():
        if changed := differences(json.loads(record.read_text(encoding="utf-8")), arguments):
            raise ValueError(
                f"{output} has an interrupted run with other arguments: {'; '.join(changed)}. Name another folder, or "
                "remove this one"
            )
        return work
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise ValueError(f"{output} exists and is not empty: name a new folder")
    work.mkdir(parents=True)
    record.write_text(json.dumps(arguments), encoding="utf-8")
    return work


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
