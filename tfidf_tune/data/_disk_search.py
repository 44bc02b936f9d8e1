"""Find windows of text that occur more than once in files that are larger than memory, by tasks of datatrove.

Each file gives records of its windows: a key, which copies share, and where the window starts. They are written to disk
sorted by key in *runs* of limited length; then each task takes a range of keys from all runs and counts equal ones.
Memory does not grow with the text; it grows with the number of near copies.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from datatrove.pipeline.base import PipelineStep
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from tfidf_tune._files import atomic_file
from tfidf_tune.data._disk_tasks import TaskRunner, progress
from tfidf_tune.data._duplicates import without_overlaps
from tfidf_tune.data._near_copies import Hashes
from tfidf_tune.data._sources import SampleBy, load_documents
from tfidf_tune.data._windows import Places, TextBatch, band_keys, chosen_words, hashes, make_batch, window_keys

PLACE = np.dtype([("file", "<u4"), ("document", "<u4"), ("offset", "<u4")])
"""Where a window starts: a file, a document of it that is not empty, a byte of that."""
RECORD = np.dtype([("key", "<u8"), ("place", PLACE)])
PAIR = np.dtype([("first", PLACE), ("second", PLACE)])
GROUP = np.dtype([("count", "<u4"), ("place", PLACE)])
"""Windows that are copies of each other: how many do not overlap (of near copies, in how many documents), and where the
first one is."""

Records = npt.NDArray[np.void]

_BATCH_BYTES = 1 << 18  # the arrays of a batch fit into a cache
_RUN_RECORDS = 1 << 21
_PART_RECORDS = 1 << 22
_MOST_GROUPS = 5_000_000  # of all parts together, the largest of each
_FILTER_BITS = 18
_DRAWN_FOR_ONE = 20
_CONTEXT = 16  # bytes before a window
_NEAR_WORDS, _NEAR_BANDS = 3, (25, 5)  # datasketch's bands for 125 hash functions and the threshold 0.5


@dataclass(frozen=True)
class WindowSearch:
    """What is searched.

    Args:
        files (tuple[str, ...]): the text, each a task, see :func:`load_documents`.
        column (str): column of the text.
        sample_by (str): what a document of a ``.txt`` file is.
        num_bytes (int): of a window, in UTF-8.
        near (bool): also windows that are nearly the same, by MinHash on three words in lower case.
        num_shared_bytes (int): length of a stretch that ``known`` has in common with the text.
    """

    files: tuple[str, ...]
    column: str
    sample_by: SampleBy
    num_bytes: int
    near: bool
    num_shared_bytes: int

    @property
    def spacing(self) -> int:
        """Words of which one starts a window, so few that windows overlap; fewer windows have MinHash's many keys."""
        return min(32, max(2, self.num_bytes // 16)) * (4 if self.near else 1)

    def documents(self, rank: int) -> Iterator[str]:
        """Read the documents of a file."""
        return load_documents(self.files[rank], column=self.column, sample_by=self.sample_by)

    def batch(self, texts: Sequence[bytes]) -> TextBatch:
        """Hash texts."""
        return make_batch(texts, ignore_case=self.near)

    def keys(self, batch: TextBatch, chosen: Places) -> Hashes:
        """Return the keys of windows, given by their first words, uint64 ``[num_windows, num_keys]``."""
        if self.near:
            return band_keys(batch, chosen, self.num_bytes, _NEAR_WORDS, _NEAR_BANDS)
        return window_keys(batch, chosen, self.num_bytes)

    def stretches(self, batch: TextBatch) -> Hashes:
        """Return the hashes of all stretches of ``num_shared_bytes`` that start at a word."""
        starts = batch.words[batch.num_left >= self.num_shared_bytes]
        return hashes(batch, starts, starts + self.num_shared_bytes)


class Found(NamedTuple):
    """What the search found."""

    counts: Counter[str]
    """``documents``, ``bytes`` and ``windows``."""
    groups: Records
    """:data:`GROUP` of each group of copies, the largest first; at most some millions."""
    shared: Hashes
    """Those of ``known`` that occur in the text, sorted."""


def search_windows(search: WindowSearch, known: Hashes, work: Path, runner: TaskRunner) -> Found:
    """Search the files; steps that ``work`` has are not done again.

    Args:
        search (WindowSearch): what is searched.
        known (Hashes): hashes of stretches of other text, whose occurrences are searched too, uint64 ``[num_known]``.
        work (Path): folder of the steps.
        runner (TaskRunner): where the tasks run.

    Returns:
        Found: the groups of copies, and the stretches of ``known`` that occur.
    """
    runs = work / "runs"
    reading, sorting = "Reading", "Sorting"
    steps = [_WriteRuns(search, np.unique(known), str(runs), reading)]
    runner.run(steps, work / "1", len(search.files), reading)
    summaries = [json.loads(file.read_text()) for file in sorted(runs.glob("*.json"))]
    counts = sum((Counter(one["counts"]) for one in summaries), Counter())
    num_parts = -(-counts["records"] // _PART_RECORDS)
    shared = np.unique(np.array([*chain.from_iterable(one["shared"] for one in summaries)], np.uint64))
    if not num_parts:
        return Found(counts, np.zeros(0, GROUP), shared)
    runner.run([_CountCopies(search, str(runs), str(work / "parts"), num_parts)], work / "2", num_parts, sorting)
    found = [np.load(file) for file in sorted((work / "parts").glob("*.npy"))]
    groups = _joined(np.concatenate(found)) if search.near else np.concatenate(found)
    return Found(counts, groups[np.argsort(groups["count"], kind="stable")[::-1]], shared)


def count_copies(search: WindowSearch, keys: Hashes, places: Records, runs: Path) -> list[int]:
    """Count the windows that share a key with each of ``keys``, uint64 ``[num_windows, num_keys]``, as groups do."""
    found: list[list[Records]] = [[places[[index]]] for index in range(len(keys))]
    for own_keys, own_places in _read_runs(runs):
        starts, ends = (np.searchsorted(own_keys, keys, side=side) for side in ("left", "right"))
        for row, column in np.argwhere(ends > starts):
            found[row].append(np.array(own_places[starts[row, column] : ends[row, column]]))
    counts = []
    for own in found:
        together = np.unique(np.concatenate(own))
        one_group = np.zeros(len(together), np.int64)
        counts.append(int(_counted(together, one_group, None if search.near else search.num_bytes).sum()))
    return counts


def draw_places(number: int, runs: Path, rng: np.random.Generator, *, unique: bool) -> Records:
    """Draw up to so many windows at random: :data:`PLACE` ``[number]``; if ``unique``, whose key occurs once."""
    together = [*_read_runs(runs)]
    ends = np.cumsum([len(keys) for keys, _ in together])
    drawn = np.unique(rng.integers(0, ends[-1], _DRAWN_FOR_ONE * number))
    of_run = np.searchsorted(ends, drawn, side="right")
    keys, places = np.zeros(len(drawn), np.uint64), np.zeros(len(drawn), PLACE)
    for index in np.unique(of_run):
        own_keys, own_places = together[index]
        own = of_run == index
        indices = drawn[own] - (ends[index] - len(own_keys))
        keys[own], places[own] = own_keys[indices], own_places[indices]
    order = rng.permutation(len(drawn))
    if unique:
        counts = np.zeros(len(keys), np.int64)
        for own_keys, _ in together:
            counts += np.searchsorted(own_keys, keys, side="right") - np.searchsorted(own_keys, keys, side="left")
        order = order[counts[order] == 1]
    return np.asarray(places[order[:number]])


class WindowText(NamedTuple):
    """A window: some characters before it, its own, and its keys."""

    before: str
    text: str
    keys: list[int]


def read_windows(search: WindowSearch, places: Records, work: Path, runner: TaskRunner) -> list[WindowText]:
    """Return the windows at ``places``."""
    files = np.unique(places["file"])
    if len(files):
        step = _ReadWindows(search, places, [int(file) for file in files], str(work / "texts"))
        runner.run([step], work / "3", len(files), "Reading passages")
    texts: dict[str, WindowText] = {}
    for file in sorted((work / "texts").glob("*.json")):
        texts |= {name: WindowText(*one) for name, one in json.loads(file.read_text(encoding="utf-8")).items()}
    return [texts[_name(place)] for place in places]


class _WriteRuns(PipelineStep):  # type: ignore[misc]
    """Write the records of the file of a task, sorted in runs, and a summary."""

    type, name = "Search", "windows"

    def __init__(self, search: WindowSearch, known: Hashes, folder: str, doing: str) -> None:
        super().__init__()
        self.search, self.known, self.folder, self.doing = search, known, folder, doing

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Read a file."""
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        filtered = np.zeros(1 << _FILTER_BITS, np.bool_)
        filtered[_filtered(self.known)] = True
        counts: Counter[str] = Counter()
        shared: set[int] = set()
        waiting: list[Records] = []
        num_runs = 0
        for first, texts in self._batches(rank):
            batch = self.search.batch(texts)
            chosen = chosen_words(batch, self.search.num_bytes, self.search.spacing)
            keys, of_text = self.search.keys(batch, chosen), batch.of_text[chosen]
            records = np.zeros(keys.shape, RECORD)
            records["key"] = keys
            records["place"]["file"] = rank
            records["place"]["document"] = (first + of_text)[:, None]
            records["place"]["offset"] = (batch.words[chosen] - batch.starts[of_text])[:, None]
            waiting.append(records.ravel())
            counts.update(documents=len(texts), bytes=sum(map(len, texts)), windows=len(keys), records=records.size)
            stretches = self.search.stretches(batch)
            possible = stretches[filtered[_filtered(stretches)]]
            shared.update(np.intersect1d(possible, self.known).tolist())
            if sum(map(len, waiting)) >= _RUN_RECORDS:
                _write_run(folder / f"{rank:06d}-{num_runs:06d}", waiting)
                waiting, num_runs = [], num_runs + 1
        if waiting:
            _write_run(folder / f"{rank:06d}-{num_runs:06d}", waiting)
        with atomic_file(folder / f"{rank:06d}.json") as file:
            file.write_text(json.dumps({"counts": counts, "shared": sorted(shared)}))

    def _batches(self, rank: int) -> Iterator[tuple[int, list[bytes]]]:
        """Yield the number of the first document, and documents that are hashed together."""
        texts: list[bytes] = []
        first = size = 0
        with progress(self.search.files, rank, self.doing) as count:
            for text in self.search.documents(rank):
                count(text)
                texts.append(text.encode("utf-8", "surrogatepass"))
                size += len(texts[-1])
                if size >= _BATCH_BYTES:
                    yield first, texts
                    first, texts, size = first + len(texts), [], 0
            if texts:
                yield first, texts


class _CountCopies(PipelineStep):  # type: ignore[misc]
    """Count equal keys in a range of keys of all runs: groups of copies, or pairs if they are near ones."""

    type, name = "Search", "copies"

    def __init__(self, search: WindowSearch, runs: str, folder: str, num_parts: int) -> None:
        super().__init__()
        self.search, self.runs, self.folder, self.num_parts = search, runs, folder, num_parts

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Read a range."""
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        borders = [np.uint64(min(index * 2**64 // self.num_parts, 2**64 - 1)) for index in (rank, rank + 1)]
        parts = []
        for keys, places in _read_runs(Path(self.runs)):
            start, end = np.searchsorted(keys, borders)
            end = len(keys) if rank + 1 == self.num_parts else end
            part = np.zeros(end - start, RECORD)
            part["key"], part["place"] = keys[start:end], places[start:end]
            parts.append(part)
        records = np.concatenate(parts)
        del parts
        # A stable order keeps that of files, documents and offsets.
        records = records[np.argsort(records["key"], kind="stable")]
        is_new = np.append(True, records["key"][1:] != records["key"][:-1])[: len(records)]
        groups = np.cumsum(is_new) - 1
        firsts = np.flatnonzero(is_new)
        found: Records
        if self.search.near:
            others = np.flatnonzero(~is_new)
            found = np.zeros(len(others), PAIR)
            found["first"], found["second"] = records["place"][firsts[groups[others]]], records["place"][others]
            is_near = same_document(found["first"], found["second"])
            is_near &= distances(found["first"], found["second"]) < self.search.num_bytes
            found = np.unique(found[~is_near])
        else:
            counts = np.bincount(groups[_counted(records["place"], groups, self.search.num_bytes)])
            repeated = np.flatnonzero(counts > 1)
            repeated = repeated[np.argsort(-counts[repeated], kind="stable")][: -(-_MOST_GROUPS // self.num_parts)]
            found = np.zeros(len(repeated), GROUP)
            found["count"], found["place"] = counts[repeated], records["place"][firsts[repeated]]
        with atomic_file(folder / f"{rank:06d}.npy") as path, path.open("wb") as output:
            np.save(output, found)


class _ReadWindows(PipelineStep):  # type: ignore[misc]
    """Read the text of windows in one file."""

    type, name = "Search", "text"

    def __init__(self, search: WindowSearch, places: Records, ranks: list[int], folder: str) -> None:
        super().__init__()
        self.search, self.places, self.ranks, self.folder = search, places, ranks, folder

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Read a file as far as needed."""
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        own = np.unique(self.places[self.places["file"] == self.ranks[rank]])
        wanted: dict[int, list[Any]] = {}
        for place in own:
            wanted.setdefault(int(place["document"]), []).append(place)
        texts = {}
        for number, text in enumerate(self.search.documents(self.ranks[rank])):
            if number in wanted:
                content = text.encode("utf-8", "surrogatepass")
                batch = self.search.batch([content])
                for place in wanted.pop(number):
                    offset = int(place["offset"])
                    parts = (
                        content[max(0, offset - _CONTEXT) : offset],
                        content[offset : offset + self.search.num_bytes],
                    )
                    keys = self.search.keys(batch, np.searchsorted(batch.words, [offset]))[0].tolist()
                    texts[_name(place)] = [*(part.decode("utf-8", "ignore") for part in parts), keys]
            if not wanted:
                break
        with atomic_file(Path(self.folder) / f"{rank:06d}.json") as file:
            file.write_text(json.dumps(texts), encoding="utf-8")


def _write_run(file: Path, waiting: list[Records]) -> None:
    records = np.concatenate(waiting)
    order = np.argsort(records["key"], kind="stable")
    np.save(f"{file}.keys.npy", records["key"][order])
    np.save(f"{file}.places.npy", records["place"][order])


def _read_runs(folder: Path) -> Iterator[tuple[Hashes, Records]]:
    """Yield keys and places of each run, which are on disk."""
    for file in sorted(folder.glob("*.keys.npy")):
        places = file.with_name(file.name.replace(".keys.", ".places."))
        yield np.load(file, mmap_mode="r"), np.load(places, mmap_mode="r")


def _filtered(values: Hashes) -> npt.NDArray[np.int64]:
    return (values >> np.uint64(64 - _FILTER_BITS)).astype(np.int64)


def same_document(first: Records, second: Records) -> npt.NDArray[np.bool_]:
    """Return which of two windows each, :data:`PLACE` ``[num_windows]``, are in one document."""
    return np.asarray((first["file"] == second["file"]) & (first["document"] == second["document"]))


def distances(first: Records, second: Records) -> Places:
    """Return the bytes between the starts of two windows each of one document, int64 ``[num_windows]``."""
    return np.asarray(np.abs(second["offset"].astype(np.int64) - first["offset"]))


def _counted(places: Records, groups: Places, num_bytes: int | None) -> npt.NDArray[np.bool_]:
    """Return which windows count: of those of a group in a document the most without overlap, or one if None.

    ``places`` are in order within each of ``groups``, int64 ``[num_windows]``.
    """
    goes_on = (groups[1:] == groups[:-1]) & same_document(places[1:], places[:-1])
    is_counted = np.append(True, ~goes_on)[: len(places)]
    if num_bytes is None:
        return is_counted
    is_close = goes_on & (distances(places[1:], places[:-1]) < num_bytes)
    stretches = np.cumsum(is_counted) - 1
    is_counted[1:] |= ~is_close
    borders = np.append(np.flatnonzero(np.diff(stretches, prepend=-1)), len(places))
    for stretch in np.unique(stretches[1:][is_close]):
        start, end = borders[stretch : stretch + 2]
        offsets = places["offset"][start:end].astype(np.int64)
        is_counted[start:end] = np.isin(offsets, without_overlaps(offsets, num_bytes))
    return is_counted


def _joined(pairs: Records) -> Records:
    """Join pairs of near copies to groups, and count their documents."""
    places, nodes = np.unique(np.concatenate([pairs["first"], pairs["second"]]), return_inverse=True)
    first, second = np.split(nodes, 2)
    graph = coo_array((np.ones(len(pairs), np.bool_), (first, second)), (len(places), len(places)))
    _, labels = connected_components(graph, directed=False)
    labels = labels.astype(np.int64)
    order = np.argsort(labels, kind="stable")  # keeps that of the places
    labels, places = labels[order], places[order]
    counts = np.bincount(labels[_counted(places, labels, None)])
    groups = np.zeros(len(counts), GROUP)
    groups["count"], groups["place"] = counts, places[np.diff(labels, prepend=-1) != 0]
    return groups[groups["count"] > 1]


def _name(place: Any) -> str:
    return f"{place['file']}-{place['document']}-{place['offset']}"
