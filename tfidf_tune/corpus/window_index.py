"""An index of windows of text: which windows occur more than once, and where, in text of any size.

Each file gives records of its windows: a key, which copies share, and where the window starts. They
are written to disk sorted by key in *runs* of limited length; then each task takes a range of keys
from all runs and counts equal ones. Memory does not grow with the text; it grows with the number of
near copies.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from tfidf_tune._files import atomic_file
from tfidf_tune.corpus import minhash
from tfidf_tune.corpus.jobs import TaskRunner, progress
from tfidf_tune.corpus.minhash import Hashes

Places = npt.NDArray[np.int64]

_CONTEXT = 16  # bytes that decide whether a window starts at a word
_IS_LINE_END = np.isin(np.arange(256), (10, 13))
_VALUES = np.random.default_rng(0).integers(0, 2**64, 256, dtype=np.uint64)
_VALUES_IN_LOWER_CASE = _VALUES[np.frombuffer(bytes(range(256)).lower(), np.uint8)]


class TextBatch(NamedTuple):
    """Texts, joined to bytes of UTF-8 with a line end after each, and their :func:`hash_sums`."""

    data: npt.NDArray[np.uint8]
    sums: Hashes
    words: Places  # first byte of each word, see make_batch(), int64 [num_words]
    gaps: Places  # bytes that belong to no word, int64 [num_gaps]
    of_text: Places  # the text of each word, int64 [num_words]
    offsets: Places  # bytes from the start of its text to each word, int64 [num_words]
    num_left: Places  # bytes from the start of each word to the end of its text, int64 [num_words]


def make_batch(
    texts: Sequence[bytes], *, longest_word: int, ignore_case: bool = False
) -> TextBatch:
    """Join and hash texts, with a random value for each byte.

    Where no word starts for more than ``longest_word`` bytes, in Base64, emoji or a row of signs,
    each character after these bytes counts as a word, unless its first byte equals the byte before
    it, and so does the first byte of a text that begins with such a stretch. With 4 bytes, words
    start at the marked places::

        to YWJjZGVmZw==
        ^  ^   ^^^^^^^

    No word starts after Y; of the characters from 4 bytes after it on, the second "=" is no word.
    """
    joined = b"\n".join(texts) + b"\n"
    data = np.frombuffer(joined, np.uint8)
    ends = np.cumsum([len(text) + 1 for text in texts], dtype=np.int64) - 1
    sums = minhash.hash_sums((_VALUES_IN_LOWER_CASE if ignore_case else _VALUES)[data])
    starts, word_ends = minhash.word_spans(joined)
    is_start = np.zeros(len(data), np.bool_)
    change = np.zeros(len(data), np.int8)
    is_start[starts] = True
    change[starts] += 1
    change[word_ends] -= 1  # the last byte is a line end
    in_word = np.cumsum(change) > 0
    first_bytes = np.append(0, ends[:-1] + 1)
    places = np.union1d(first_bytes, np.flatnonzero(is_start))
    distances = np.diff(places, append=len(data))
    is_long = distances > longest_word
    # The bytes of all long stretches after their first ones, without a loop.
    lengths = distances[is_long] - longest_word
    before = np.cumsum(lengths) - lengths
    filled = np.arange(lengths.sum()) + np.repeat(places[is_long] + longest_word - before, lengths)
    is_character = (data[filled] & 0xC0) != 0x80  # not a further byte of a character of UTF-8
    is_start[filled] = is_character & (data[filled] != data[filled - 1])
    is_start[places[is_long]] = True
    in_word[filled] = True
    is_start[ends] = False
    in_word[ends] = False
    words = np.flatnonzero(is_start)
    gaps = np.flatnonzero(~in_word)
    of_text = np.searchsorted(ends, words)
    return TextBatch(
        data, sums, words, gaps, of_text, words - first_bytes[of_text], ends[of_text] - words
    )


def hashes(batch: TextBatch, words: Places, num_bytes: int | Places) -> Hashes:
    """Return the hash of so many bytes from each of ``words`` on, which are indices, uint64 of
    their shape.
    """
    starts = batch.words[words]
    return minhash.stretch_hashes(batch.sums, starts, starts + num_bytes)


def band_keys(
    batch: TextBatch, chosen: Places, num_bytes: int, size: int, bands: tuple[int, int]
) -> Hashes:
    """Return the keys of the bands of the signatures of windows, uint64 ``[num_windows,
    num_bands]``.

    ``chosen`` are the first words of windows, ``size`` the words of an n-gram, ``bands`` their
    number and the hash functions in each. Case does not count if the batch ignores it, nor what is
    between words.
    """
    # A word ends at a gap, or where the next begins.
    after = np.append(batch.words[1:], len(batch.data))
    # The batch ends in a gap.
    ends = np.minimum(batch.gaps[np.searchsorted(batch.gaps, batch.words)], after)
    every = minhash.stretch_hashes(batch.sums, batch.words, ends)
    ngrams = minhash.joined_words(np.pad(every, (0, size)), size)  # from each word, and one more
    last = np.searchsorted(batch.words, batch.words[chosen] + num_bytes) - size + 1
    return minhash.band_keys(ngrams, chosen, np.maximum(last, chosen + 1), bands)


def without_overlaps(starts: Places, length: int) -> Places:
    """Keep the largest number of windows without overlap, the leftmost ones, of ascending
    ``starts``, int64.
    """
    if (np.diff(starts) >= length).all():
        return starts
    kept = [0]
    while (following := int(np.searchsorted(starts, starts[kept[-1]] + length))) < len(starts):
        kept.append(following)
    return starts[kept]


PLACE = np.dtype([("file", "<u4"), ("document", "<u4"), ("offset", "<u4")])
"""Where a window starts: a file, a document of it that is not empty, a byte of that."""
DOCUMENT = ["file", "document"]
PAIR = np.dtype([("first", PLACE), ("second", PLACE)])
GROUP = np.dtype([("count", "<u4"), ("key", "<u8"), ("place", PLACE)])
"""Windows that are copies of each other: how many do not overlap (of near copies, in how many
documents), their key and where the first window is."""

Records = npt.NDArray[np.void]

MOST_SHARED = 256
"""Places in a file that are remembered of each known stretch, but one more if there are more."""

_BATCH_BYTES = 1 << 18  # the arrays of a batch fit into a cache
_RUN_RECORDS = 1 << 19
_PART_RECORDS = 1 << 20
_MOST_GROUPS = 5_000_000  # of all parts together, the largest of each
_FILTER_BITS = 22
_FILTERED = np.uint64(64 - _FILTER_BITS)
_DRAWN_FOR_ONE = 20
_WHOLE_BYTES = 1 << 15
_AROUND = 8  # windows before and after a place, of documents that are not read whole
# which windows are near copies
_NEAR_NGRAM = 3
_NEAR_THRESHOLD = 0.5


def window_spacing(num_bytes: int) -> int:
    """Return of how many words in a row one starts a window of so many bytes: so few that windows
    overlap.
    """
    return min(32, max(1, num_bytes // 16))


@dataclass(frozen=True)
class WindowIndex:
    """What is indexed, and where."""

    files: tuple[str, ...]  # each a task: a file or another source, see load_documents()
    read: Callable[[int], Iterator[str]]  # the documents of a file, by its number
    work: Path  # folder; steps that it has are not done again
    num_bytes: int  # of a window, in UTF-8
    longest_word: int  # bytes, see make_batch()
    # Windows that are nearly the same are copies, too, by MinHash on three words in lower case.
    near: bool
    num_shared_bytes: int  # length of the known stretches that are searched, too

    def batch(self, texts: Sequence[bytes]) -> TextBatch:
        """Join and hash texts."""
        return make_batch(texts, longest_word=self.longest_word, ignore_case=self.near)

    def runs(self) -> Iterator[tuple[Hashes, Records]]:
        """Yield keys and places of each run, which are on disk."""
        for file in sorted((self.work / "runs").glob("*.keys.npy")):
            places = file.with_name(file.name.replace(".keys.", ".places."))
            yield np.load(file, mmap_mode="r"), np.load(places, mmap_mode="r")

    def windows(self, batch: TextBatch, *, inner: bool = False) -> tuple[Places, Hashes]:
        """Choose windows of the texts; return their first words, which are indices, ascending, and
        their :meth:`keys`.

        Of so many words in a row the one with the least hash, a start of a line before any other;
        and the first of each text, unless ``inner``: then only those that every text has that
        contains it.
        """
        # Fewer windows have MinHash's many keys.
        spacing = window_spacing(self.num_bytes) * (2 if self.near else 1)
        is_fitting = batch.num_left >= self.num_bytes
        if inner:  # what starts a text may be inside a word
            is_fitting &= batch.offsets > 0
        # The rank of a place: its hash, after all starts of lines; it depends on the text around it
        # alone.
        fitting = np.flatnonzero(is_fitting)
        order = hashes(batch, fitting, min(_CONTEXT, self.num_bytes)) >> np.uint64(1) | np.uint64(1)
        order |= np.where(
            _IS_LINE_END[batch.data[batch.words[fitting] - 1]], np.uint64(0), np.uint64(1 << 63)
        )
        # A place is chosen if it has the lowest rank in a run of words of its text that contains it
        # (winnowing).
        of_text = batch.of_text[fitting]
        around = (spacing - 1, spacing)
        lowest = sliding_window_view(np.pad(order, around), spacing).min(axis=1)
        texts = sliding_window_view(np.pad(of_text, around, constant_values=-1), spacing)
        lowest[texts[:, 0] != texts[:, -1]] = 0
        is_chosen = order == sliding_window_view(lowest, spacing).max(axis=1)[: len(order)]
        if not inner:
            is_chosen |= np.diff(of_text, prepend=-1) > 0
        chosen = np.asarray(fitting[is_chosen])
        return chosen, self.keys(batch, chosen)

    def keys(self, batch: TextBatch, words: Places) -> Hashes:
        """Return the keys of the windows that start at words,
        uint64 ``[num_windows, num_keys]``.
        """
        if self.near:
            return band_keys(
                batch, words, self.num_bytes, _NEAR_NGRAM, minhash.bands(_NEAR_THRESHOLD)
            )
        return hashes(batch, words, self.num_bytes)[:, None]

    def stretches(self, batch: TextBatch) -> tuple[Places, Hashes]:
        """Return the words from which ``num_shared_bytes`` fit into the text, and the hashes of
        these bytes.
        """
        words = np.flatnonzero(batch.num_left >= self.num_shared_bytes)
        return words, hashes(batch, words, self.num_shared_bytes)


class Built(NamedTuple):
    """What was found when files were indexed."""

    counts: Counter[str]  # documents, bytes, windows and records
    first_documents: list[int]  # the documents before each file
    groups: Records  # a GROUP of each group of copies, the largest first, at most some millions
    # Places of each known stretch that occurs, by its hash.
    shared: dict[int, list[tuple[int, int, int]]]


def build(index: WindowIndex, known: Hashes, runner: TaskRunner) -> Built:
    """Index the files, and search occurrences of stretches with the ``known`` hashes, uint64
    ``[num_known]``.
    """
    # First pass: a task for each file writes its records, sorted in runs.
    runner.run([partial(_write_runs, index, known)], index.work / "1", len(index.files), "Reading")
    files = (index.work / "runs" / f"{rank:06d}.json" for rank in range(len(index.files)))
    summaries = [json.loads(file.read_text()) for file in files]
    each = [Counter(summary["counts"]) for summary in summaries]
    counts = sum(each, Counter())
    shared: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for rank, summary in enumerate(summaries):
        for key, places in summary["shared"].items():
            shared[int(key)] += [(rank, *place) for place in places]
    # Second pass: a task for each range of keys counts equal ones.
    num_parts = -(-counts["records"] // _PART_RECORDS)
    if num_parts:
        runner.run([partial(_count_copies, index)], index.work / "2", num_parts, "Sorting")
    parts = [np.load(index.work / "parts" / f"{rank:06d}.npy") for rank in range(num_parts)]
    groups = np.concatenate([np.zeros(0, PAIR if index.near else GROUP), *parts])
    if index.near:
        groups = _joined(groups) if len(groups) else np.zeros(0, GROUP)
    groups = groups[np.argsort(groups["count"], kind="stable")[::-1]]
    return Built(
        counts=counts,
        first_documents=np.cumsum([0, *(summary["documents"] for summary in each)]).tolist(),
        groups=groups,
        shared=shared,
    )


def find_windows(
    index: WindowIndex, keys: Hashes, most: int = 2**62
) -> tuple[Places, list[Records]]:
    """Return how many windows have each key, int64 ``[num_keys]``, and the places of at most so
    many of each.
    """
    counts = np.zeros(len(keys), np.int64)
    numbers = [np.zeros(0, np.int64)]
    places = [np.zeros(0, PLACE)]
    for own_keys, own_places in index.runs():
        # A binary search in each run, of which few pages are read.
        starts, ends = (np.searchsorted(own_keys, keys, side=side) for side in ("left", "right"))
        taken = np.clip(most - counts, 0, ends - starts)
        counts += ends - starts
        # The records of a key follow each other: those of all keys in one go.
        before = np.cumsum(taken) - taken
        places.append(own_places[np.arange(taken.sum()) + np.repeat(starts - before, taken)])
        numbers.append(np.repeat(np.arange(len(keys)), taken))
    # The places of each key, those of earlier runs first.
    of_key = np.concatenate(numbers)
    borders = np.cumsum(np.bincount(of_key, minlength=len(keys)))[:-1]
    return counts, np.split(np.concatenate(places)[np.argsort(of_key, kind="stable")], borders)


def draw_windows(
    index: WindowIndex, number: int, rng: np.random.Generator, *, unique: bool
) -> Records:
    """Draw up to so many windows at random: :data:`PLACE` ``[number]``; if ``unique``, whose key
    occurs once.
    """
    runs = [*index.runs()]
    if not runs:
        return np.zeros(0, PLACE)
    # More are drawn than are needed, because some occur again and are then left out.
    starts = np.cumsum([0, *(len(keys) for keys, _ in runs)])
    drawn = np.unique(rng.integers(0, starts[-1], _DRAWN_FOR_ONE * number))
    parts = np.split(drawn, np.searchsorted(drawn, starts[1:-1]))
    keys = np.concatenate(
        [run[0][part - start] for run, part, start in zip(runs, parts, starts, strict=False)]
    )
    places = np.concatenate(
        [run[1][part - start] for run, part, start in zip(runs, parts, starts, strict=False)]
    )
    # A window is unique if its key occurs once in all runs together.
    order = rng.permutation(len(drawn))
    if unique:
        order = order[find_windows(index, keys, most=0)[0][order] == 1]
    return np.asarray(places[order[:number]])


class Piece(NamedTuple):
    """A document, or a part of a long one around windows."""

    file: int
    document: int
    start: int  # byte of the document where it starts
    is_end: bool  # whether it ends where the document ends
    text: str

    @property
    def is_whole(self) -> bool:
        """Whether it is the document."""
        return self.start == 0 and self.is_end


def read_pieces(
    index: WindowIndex, places: Records, name: str, runner: TaskRunner
) -> Iterator[Piece]:
    """Yield the documents of windows in order, of long ones what is around the windows; ``name`` is
    the step's.
    """
    files = np.unique(places["file"]).tolist()
    folder = index.work / name
    if files:
        runner.run(
            [partial(_read_pieces, index, np.unique(places), folder)],
            folder / "tasks",
            len(files),
            name,
        )
    for number, rank in enumerate(files):
        with (folder / f"{number:06d}.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                yield Piece(rank, *json.loads(line))


def _read_pieces(
    index: WindowIndex, places: Records, folder: Path, _: Any, rank: int, world_size: int
) -> None:
    """Read the documents of windows in one file, no further than the last of them."""
    of_rank = int(np.unique(places["file"])[rank])
    wanted: dict[int, list[int]] = defaultdict(list)
    for _, document, offset in places[places["file"] == of_rank].tolist():
        wanted[document].append(offset)
    with (
        atomic_file(folder / f"{rank:06d}.jsonl") as path,
        path.open("w", encoding="utf-8") as file,
    ):
        for number, text in enumerate(islice(index.read(of_rank), max(wanted) + 1)):
            if number in wanted:
                for piece in _pieces(text, np.array(wanted[number]), index.num_bytes):
                    file.write(json.dumps([number, *piece]) + "\n")


def _pieces(text: str, offsets: Places, num_bytes: int) -> Iterator[tuple[int, bool, str]]:
    """Yield where the pieces of a document start, if they end with it, and their text."""
    if (
        len(text) <= _WHOLE_BYTES // 4
        or len(content := text.encode("utf-8", "surrogatepass")) <= _WHOLE_BYTES
    ):
        yield 0, True, text
        return
    # Of a long document what is around the windows; what overlaps is one piece.
    starts = np.maximum(0, offsets - _AROUND * num_bytes)
    ends = np.minimum(len(content), offsets + (1 + _AROUND) * num_bytes)
    is_first = np.append(True, starts[1:] > ends[:-1])
    for start, end in zip(
        starts[is_first].tolist(), ends[np.append(is_first[1:], True)].tolist(), strict=True
    ):
        yield start, end == len(content), content[start:end].decode("utf-8", "ignore")


def _write_runs(index: WindowIndex, known: Hashes, _: Any, rank: int, world_size: int) -> None:
    """Write the records of the file of a task, sorted in runs, and a summary."""
    folder = index.work / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    is_possible = np.zeros(1 << _FILTER_BITS, np.bool_)
    is_possible[known >> _FILTERED] = True
    wanted = set(known.tolist())
    counts: Counter[str] = Counter()
    shared: dict[int, list[tuple[int, int]]] = defaultdict(list)
    waiting: list[tuple[Hashes, Records]] = []
    num_waiting = num_runs = 0
    for first, texts, is_last in _batches(index, rank):
        batch = index.batch(texts)
        documents = first + batch.of_text
        chosen, keys = index.windows(batch)
        places = np.zeros(keys.shape, PLACE)
        places["file"] = rank
        places["document"] = documents[chosen, None]
        places["offset"] = batch.offsets[chosen, None]
        waiting.append((keys.ravel(), places.ravel()))
        num_waiting += keys.size
        counts.update(
            documents=len(texts), bytes=sum(map(len, texts)), windows=len(keys), records=keys.size
        )
        # A filter of some megabytes decides nearly all stretches, a set the rest.
        if wanted:
            words, stretches = index.stretches(batch)
            possible = np.flatnonzero(is_possible[stretches >> _FILTERED])
            starts = words[possible]
            where = zip(documents[starts].tolist(), batch.offsets[starts].tolist(), strict=True)
            for key, place in zip(stretches[possible].tolist(), where, strict=True):
                if key in wanted and len(shared[key]) <= MOST_SHARED:
                    shared[key].append(place)
        if num_waiting and (is_last or num_waiting >= _RUN_RECORDS):
            columns = [np.concatenate(column) for column in zip(*waiting, strict=True)]
            order = np.argsort(columns[0], kind="stable")
            for name, column in zip(("keys", "places"), columns, strict=True):
                np.save(folder / f"{rank:06d}-{num_runs:06d}.{name}.npy", column[order])
            waiting = []
            num_waiting = 0
            num_runs = num_runs + 1
    with atomic_file(folder / f"{rank:06d}.json") as file:
        file.write_text(json.dumps({"counts": counts, "shared": shared}))


def _batches(index: WindowIndex, rank: int) -> Iterator[tuple[int, list[bytes], bool]]:
    """Yield the number of the first document, documents that are hashed together, and whether they
    are the last.
    """
    texts: list[bytes] = []
    first = size = 0
    for text in progress(index.read(rank), index.files, rank, "Reading"):
        texts.append(text.encode("utf-8", "surrogatepass"))
        size += len(texts[-1])
        if size >= _BATCH_BYTES:
            yield first, texts, False
            first = first + len(texts)
            texts = []
            size = 0
    yield first, texts, True


def _count_copies(index: WindowIndex, _: Any, rank: int, world_size: int) -> None:
    """Count equal keys in a range of keys of all runs: groups of copies, or pairs if they are near
    ones.
    """
    borders = [part * 2**64 // world_size for part in (rank, rank + 1)]
    parts = []
    for keys, places in index.runs():
        start = int(np.searchsorted(keys, np.uint64(borders[0])))
        end = len(keys)
        if borders[1] < 2**64:  # else no uint64 holds it
            end = int(np.searchsorted(keys, np.uint64(borders[1])))
        parts.append((keys[start:end], places[start:end]))
    keys, places = (np.concatenate(column) for column in zip(*parts, strict=True))
    # A stable order keeps that of files, documents and offsets.
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    places = places[order]
    _, firsts, groups = np.unique(keys, return_index=True, return_inverse=True)
    records: Records
    # Near copies are pairs with the first record of their key, which are joined later; equal ones
    # are counted.
    if index.near:
        others = np.flatnonzero(firsts[groups] != np.arange(len(keys)))
        records = np.zeros(len(others), PAIR)
        records["first"] = places[firsts[groups[others]]]
        records["second"] = places[others]
        records = np.unique(
            records[~_overlap(records["first"], records["second"], index.num_bytes)]
        )
    else:
        counts = np.bincount(groups[_counted(places, groups, index.num_bytes)])
        repeated = np.flatnonzero(counts > 1)
        repeated = repeated[np.argsort(-counts[repeated], kind="stable")][
            : -(-_MOST_GROUPS // world_size)
        ]
        records = np.zeros(len(repeated), GROUP)
        records["count"] = counts[repeated]
        records["key"] = keys[firsts[repeated]]
        records["place"] = places[firsts[repeated]]
    with atomic_file(index.work / "parts" / f"{rank:06d}.npy") as path:
        np.save(path, records)


def _overlap(first: Records, second: Records, num_bytes: int) -> npt.NDArray[np.bool_]:
    """Return whether windows of so many bytes overlap, bool ``[num_windows]``."""
    distances = np.abs(second["offset"].astype(np.int64) - first["offset"])
    return np.asarray((first[DOCUMENT] == second[DOCUMENT]) & (distances < num_bytes))


def _counted(places: Records, groups: Places, num_bytes: int) -> npt.NDArray[np.bool_]:
    """Return which windows count: of those of a group the most without overlap; ``places`` are in
    order in each.
    """
    is_close = (groups[1:] == groups[:-1]) & _overlap(places[1:], places[:-1], num_bytes)
    is_counted = np.append(True, ~is_close)[: len(places)]
    # Only where windows overlap does the choice take a loop.
    starts = np.flatnonzero(is_counted)
    lengths = np.diff(starts, append=len(places))
    for start, length in zip(starts[lengths > 1], lengths[lengths > 1], strict=True):
        offsets = places["offset"][start : start + length].astype(np.int64)
        is_counted[start : start + length] = np.isin(offsets, without_overlaps(offsets, num_bytes))
    return is_counted


def _joined(pairs: Records) -> Records:
    """Join pairs of near copies to groups, and count their documents."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    # Windows are the nodes of a graph, pairs its edges; a group is a connected component.
    places, nodes = np.unique(
        np.concatenate([pairs["first"], pairs["second"]]), return_inverse=True
    )
    graph = coo_array(
        (np.ones(len(pairs), np.bool_), np.split(nodes, 2)), (len(places), len(places))
    )
    _, labels = connected_components(graph, directed=False)
    _, documents = np.unique(places[DOCUMENT], return_inverse=True)
    counts = np.bincount(np.unique(np.stack([labels, documents]), axis=1)[0])
    groups = np.zeros(len(counts), GROUP)
    groups["count"] = counts
    groups["place"] = places[np.unique(labels, return_index=True)[1]]
    return groups[groups["count"] > 1]


def first_of_stretches(groups: Records, num_bytes: int) -> Records:
    """Keep the first of windows that overlap and have equally many copies."""
    groups = groups[
        np.argsort(groups["place"], order=("file", "document", "offset"), kind="stable")
    ]
    goes_on = _overlap(groups["place"][1:], groups["place"][:-1], num_bytes)
    goes_on &= groups["count"][1:] == groups["count"][:-1]
    return np.asarray(groups[np.append(True, ~goes_on)[: len(groups)]])
