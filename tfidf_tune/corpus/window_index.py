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
_LOWER_CASE = np.arange(256)
_LOWER_CASE[ord("A") : ord("Z") + 1] += ord("a") - ord("A")
_VALUES_IN_LOWER_CASE = _VALUES[_LOWER_CASE]


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
    lengths = [len(text) + 1 for text in texts]  # with the line end
    ends = np.cumsum(lengths, dtype=np.int64) - 1
    first_bytes = np.append(0, ends[:-1] + 1)
    # The words of the text: each byte is inside of a word if more words have started than ended.
    starts, word_ends = minhash.word_spans(joined)
    is_start = np.zeros(len(data), np.bool_)
    is_start[starts] = True
    change = np.zeros(len(data), np.int8)
    change[starts] += 1
    change[word_ends] -= 1  # the last byte is a line end
    in_word = np.cumsum(change) > 0
    # Where no word starts for a long time, the characters after the first bytes become words.
    starts = np.union1d(first_bytes, np.flatnonzero(is_start))
    distances = np.diff(starts, append=len(data))
    is_long = distances > longest_word
    long_starts = starts[is_long]
    filled = _ranges(long_starts + longest_word, distances[is_long] - longest_word)
    is_character = (data[filled] & 0xC0) != 0x80  # not a further byte of a character of UTF-8
    is_repeated = data[filled] == data[filled - 1]
    is_start[filled] = is_character & ~is_repeated
    is_start[long_starts] = True
    in_word[filled] = True
    # Line ends between texts belong to no word.
    is_start[ends] = False
    in_word[ends] = False
    words = np.flatnonzero(is_start)
    of_text = np.searchsorted(ends, words)
    values = _VALUES_IN_LOWER_CASE if ignore_case else _VALUES
    return TextBatch(
        data=data,
        sums=minhash.hash_sums(values[data]),
        words=words,
        gaps=np.flatnonzero(~in_word),
        of_text=of_text,
        offsets=words - first_bytes[of_text],
        num_left=ends[of_text] - words,
    )


def _ranges(starts: Places, lengths: Places) -> Places:
    """Return the numbers of several ranges, range by range, int64: 5, 6, 7, 20, 21 of the starts
    5 and 20 and the lengths 3 and 2.
    """
    # Counted through, these are 0, 1, 2, 3, 4: a range is shifted by its start, 5 and 20, less the
    # numbers before it, 0 and 3.
    before = np.cumsum(lengths) - lengths
    numbers: Places = np.arange(lengths.sum()) + np.repeat(starts - before, lengths)
    return numbers


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
    # A word ends at a gap, or where the next begins. The batch ends in a gap.
    next_gaps = batch.gaps[np.searchsorted(batch.gaps, batch.words)]
    next_words = np.append(batch.words[1:], len(batch.data))
    word_ends = np.minimum(next_gaps, next_words)
    word_hashes = minhash.stretch_hashes(batch.sums, batch.words, word_ends)
    # An n-gram from each word, and one more.
    ngrams = minhash.joined_words(np.pad(word_hashes, (0, size)), size)
    # The n-grams of a window are those whose words all start in it, but at least one.
    window_ends = np.searchsorted(batch.words, batch.words[chosen] + num_bytes)
    ngram_ends = np.maximum(window_ends - size + 1, chosen + 1)
    return minhash.band_keys(ngrams, chosen, ngram_ends, bands)


def without_overlaps(starts: Places, length: int) -> Places:
    """Keep the largest number of windows without overlap, the leftmost ones, of ascending
    ``starts``, int64.
    """
    if (np.diff(starts) >= length).all():
        return starts
    kept = []
    number = 0
    while number < len(starts):
        kept.append(number)
        end = starts[number] + length
        number = int(np.searchsorted(starts, end))
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
        spacing = window_spacing(self.num_bytes)
        if self.near:  # fewer windows, because each has MinHash's many keys
            spacing *= 2
        is_fitting = batch.num_left >= self.num_bytes
        if inner:  # what starts a text may be inside a word
            is_fitting &= batch.offsets > 0
        fitting = np.flatnonzero(is_fitting)
        of_text = batch.of_text[fitting]
        is_chosen = _winnowed(self._ranks(batch, fitting), of_text, spacing)
        if not inner:
            is_chosen |= np.diff(of_text, prepend=-1) > 0
        chosen = np.asarray(fitting[is_chosen])
        return chosen, self.keys(batch, chosen)

    def _ranks(self, batch: TextBatch, words: Places) -> Hashes:
        """Return the rank of each word among those from which a window may start: its hash, above
        0, after all starts of lines. It depends on the text around the word alone.
        """
        context = hashes(batch, words, min(_CONTEXT, self.num_bytes))
        ranks = context >> np.uint64(1) | np.uint64(1)
        bytes_before = batch.data[batch.words[words] - 1]
        ranks[~_IS_LINE_END[bytes_before]] |= np.uint64(1 << 63)
        return ranks

    def keys(self, batch: TextBatch, words: Places) -> Hashes:
        """Return the keys of the windows that start at words,
        uint64 ``[num_windows, num_keys]``.
        """
        if self.near:
            bands = minhash.bands(_NEAR_THRESHOLD)
            return band_keys(batch, words, self.num_bytes, _NEAR_NGRAM, bands)
        return hashes(batch, words, self.num_bytes)[:, None]

    def stretches(self, batch: TextBatch) -> tuple[Places, Hashes]:
        """Return the words from which ``num_shared_bytes`` fit into the text, and the hashes of
        these bytes.
        """
        words = np.flatnonzero(batch.num_left >= self.num_shared_bytes)
        return words, hashes(batch, words, self.num_shared_bytes)


def _winnowed(ranks: Hashes, of_text: Places, spacing: int) -> npt.NDArray[np.bool_]:
    """Return which words have the lowest rank in a run of ``spacing`` words of their text,
    bool ``[num_words]``; this is winnowing (Schleimer et al. 2003).

    The choice in a run follows from its ranks alone. So a passage that is at least as long as a run
    has the same windows in each of its copies, whatever is around them, while most words are left
    out. With runs of 3, the words ``not``, ``is`` and ``does`` are chosen::

        words   all  not  that  is  gold  what  does
        ranks     7    2     9   4     8     6     5
        lowest of each run of 3:       2, 2, 4, 4, 5
        highest of a word's runs: 2    2     4   4     5     5     5

    A word is the lowest in one of its runs if its rank equals the last line, and in none if its
    rank is above. A longer text, ``I know: all not that ... does it``, has the same five runs,
    which choose ``not``, ``is`` and ``does`` again; runs at the border may choose other words, too.
    """
    # There is no run over the ends or into the next text: it gets the rank 0, which no word has,
    # so that it is the highest for no word that has a run.
    padding = (spacing - 1, spacing)
    lowest = sliding_window_view(np.pad(ranks, padding), spacing).min(axis=1)
    padded_texts = np.pad(of_text, padding, constant_values=-1)
    texts = sliding_window_view(padded_texts, spacing)
    lowest[texts[:, 0] != texts[:, -1]] = 0
    highest = sliding_window_view(lowest, spacing).max(axis=1)
    return np.asarray(ranks == highest[: len(ranks)])


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
    write_runs = partial(_write_runs, index, known)
    runner.run([write_runs], index.work / "1", len(index.files), "Reading")
    counts: Counter[str] = Counter()
    first_documents = [0]
    shared: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for rank in range(len(index.files)):
        file = index.work / "runs" / f"{rank:06d}.json"
        summary = json.loads(file.read_text())
        counts += Counter(summary["counts"])
        first_documents.append(counts["documents"])
        for key, places in summary["shared"].items():
            shared[int(key)] += [(rank, *place) for place in places]
    # Second pass: a task for each range of keys counts equal ones.
    num_parts = -(-counts["records"] // _PART_RECORDS)
    if num_parts:
        runner.run([partial(_count_copies, index)], index.work / "2", num_parts, "Sorting")
    files = (index.work / "parts" / f"{rank:06d}.npy" for rank in range(num_parts))
    none = np.zeros(0, PAIR if index.near else GROUP)
    groups = np.concatenate([none, *(np.load(file) for file in files)])
    if index.near:
        groups = _joined(groups) if len(groups) else np.zeros(0, GROUP)
    largest_first = np.argsort(groups["count"], kind="stable")[::-1]
    return Built(counts, first_documents, groups[largest_first], shared)


def find_windows(
    index: WindowIndex, keys: Hashes, most: int = 2**62
) -> tuple[Places, list[Records]]:
    """Return how many windows have each key, int64 ``[num_keys]``, and the places of at most so
    many of each.
    """
    counts = np.zeros(len(keys), np.int64)
    numbers = [np.zeros(0, np.int64)]
    places = [np.zeros(0, PLACE)]
    for run_keys, run_places in index.runs():
        # A binary search in each run, of which few pages are read.
        starts = np.searchsorted(run_keys, keys, side="left")
        ends = np.searchsorted(run_keys, keys, side="right")
        num_found = ends - starts
        num_taken = np.clip(most - counts, 0, num_found)
        counts += num_found
        # The records of a key follow each other; those of all keys are read together.
        places.append(run_places[_ranges(starts, num_taken)])
        numbers.append(np.repeat(np.arange(len(keys)), num_taken))
    # The places of each key, those of earlier runs first.
    of_key = np.concatenate(numbers)
    order = np.argsort(of_key, kind="stable")
    ends = np.cumsum(np.bincount(of_key, minlength=len(keys)))
    return counts, np.split(np.concatenate(places)[order], ends[:-1])


def draw_windows(
    index: WindowIndex, number: int, rng: np.random.Generator, *, unique: bool
) -> Records:
    """Draw up to so many windows at random: :data:`PLACE` ``[number]``; if ``unique``, whose key
    occurs once.
    """
    runs = [*index.runs()]
    if not runs:
        return np.zeros(0, PLACE)
    # More are drawn than are needed, because some occur again and are then left out. The numbers
    # count through all runs.
    ends = np.cumsum([len(keys) for keys, _ in runs])
    drawn = np.unique(rng.integers(0, ends[-1], _DRAWN_FOR_ONE * number))
    keys_of_runs = []
    places_of_runs = []
    start = 0
    for (run_keys, run_places), end in zip(runs, ends.tolist(), strict=True):
        in_run = drawn[(drawn >= start) & (drawn < end)] - start
        keys_of_runs.append(run_keys[in_run])
        places_of_runs.append(run_places[in_run])
        start = end
    keys = np.concatenate(keys_of_runs)
    places = np.concatenate(places_of_runs)
    # A window is unique if its key occurs once in all runs together.
    order = rng.permutation(len(drawn))
    if unique:
        counts, _ = find_windows(index, keys, most=0)
        order = order[counts[order] == 1]
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
        read = partial(_read_pieces, index, np.unique(places), folder)
        runner.run([read], folder / "tasks", len(files), name)
    for rank, number in enumerate(files):
        with (folder / f"{rank:06d}.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                yield Piece(number, *json.loads(line))


def _read_pieces(
    index: WindowIndex, places: Records, folder: Path, _: Any, rank: int, world_size: int
) -> None:
    """Read the documents of windows in one file, no further than the last of them."""
    number_of_file = int(np.unique(places["file"])[rank])
    places_of_file = places[places["file"] == number_of_file]
    offsets: dict[int, list[int]] = defaultdict(list)
    for _, document, offset in places_of_file.tolist():
        offsets[document].append(offset)
    texts = islice(index.read(number_of_file), max(offsets) + 1)
    with (
        atomic_file(folder / f"{rank:06d}.jsonl") as path,
        path.open("w", encoding="utf-8") as file,
    ):
        for number, text in enumerate(texts):
            if number not in offsets:
                continue
            for piece in _pieces(text, np.array(offsets[number]), index.num_bytes):
                file.write(json.dumps([number, *piece]) + "\n")


def _pieces(text: str, offsets: Places, num_bytes: int) -> Iterator[tuple[int, bool, str]]:
    """Yield where the pieces of a document start, if they end with it, and their text."""
    content = text.encode("utf-8", "surrogatepass")
    if len(content) <= _WHOLE_BYTES:
        yield 0, True, text
        return
    # Of a long document what is around the windows; what overlaps is one piece.
    starts = np.maximum(0, offsets - _AROUND * num_bytes)
    ends = np.minimum(len(content), offsets + (1 + _AROUND) * num_bytes)
    is_apart = starts[1:] > ends[:-1]
    piece_starts = starts[np.append(True, is_apart)].tolist()
    piece_ends = ends[np.append(is_apart, True)].tolist()
    for start, end in zip(piece_starts, piece_ends, strict=True):
        piece = content[start:end].decode("utf-8", "ignore")
        yield start, end == len(content), piece


def _write_runs(index: WindowIndex, known: Hashes, _: Any, rank: int, world_size: int) -> None:
    """Write the records of the file of a task, sorted in runs, and a summary."""
    folder = index.work / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    shared = _SharedStretches(known)
    waiting: list[tuple[Hashes, Records]] = []
    num_waiting = 0
    num_runs = 0
    for first, texts, is_last in _batches(index, rank):
        batch = index.batch(texts)
        documents = first + batch.of_text
        # The records of the batch: a key, or MinHash's many, of each window.
        chosen, keys = index.windows(batch)
        places = np.zeros(keys.shape, PLACE)
        places["file"] = rank
        places["document"] = documents[chosen, None]
        places["offset"] = batch.offsets[chosen, None]
        waiting.append((keys.ravel(), places.ravel()))
        num_waiting += keys.size
        num_bytes = sum(len(text) for text in texts)
        counts.update(documents=len(texts), bytes=num_bytes, windows=len(keys), records=keys.size)
        if len(known):
            words, stretches = index.stretches(batch)
            shared.add(stretches, documents[words], batch.offsets[words])
        # A run is full, or the file ends.
        if num_waiting and (is_last or num_waiting >= _RUN_RECORDS):
            _save_run(folder / f"{rank:06d}-{num_runs:06d}", waiting)
            waiting = []
            num_waiting = 0
            num_runs += 1
    with atomic_file(folder / f"{rank:06d}.json") as file:
        file.write_text(json.dumps({"counts": counts, "shared": shared.places}))


class _SharedStretches:
    """Which stretches of a file have known hashes, and where."""

    def __init__(self, known: Hashes) -> None:
        self.places: dict[int, list[tuple[int, int]]] = defaultdict(list)  # document and offset
        self._known = set(known.tolist())
        # A filter of some megabytes decides nearly all stretches, the set the rest.
        self._is_possible = np.zeros(1 << _FILTER_BITS, np.bool_)
        self._is_possible[known >> _FILTERED] = True

    def add(self, stretches: Hashes, documents: Places, offsets: Places) -> None:
        """Remember the stretches that are known, by their hashes."""
        possible = np.flatnonzero(self._is_possible[stretches >> _FILTERED])
        keys = stretches[possible].tolist()
        places = zip(documents[possible].tolist(), offsets[possible].tolist(), strict=True)
        for key, place in zip(keys, places, strict=True):
            if key in self._known and len(self.places[key]) <= MOST_SHARED:
                self.places[key].append(place)


def _save_run(path: Path, waiting: Sequence[tuple[Hashes, Records]]) -> None:
    """Write records, sorted by key; those with the same key stay in their order."""
    keys = np.concatenate([batch_keys for batch_keys, _ in waiting])
    places = np.concatenate([batch_places for _, batch_places in waiting])
    order = np.argsort(keys, kind="stable")
    np.save(f"{path}.keys.npy", keys[order])
    np.save(f"{path}.places.npy", places[order])


def _batches(index: WindowIndex, rank: int) -> Iterator[tuple[int, list[bytes], bool]]:
    """Yield the number of the first document, documents that are hashed together, and whether they
    are the last.
    """
    texts: list[bytes] = []
    first = 0
    size = 0
    for text in progress(index.read(rank), index.files, rank, "Reading"):
        content = text.encode("utf-8", "surrogatepass")
        texts.append(content)
        size += len(content)
        if size >= _BATCH_BYTES:
            yield first, texts, False
            first += len(texts)
            texts = []
            size = 0
    yield first, texts, True


def _count_copies(index: WindowIndex, _: Any, rank: int, world_size: int) -> None:
    """Count equal keys in a range of keys of all runs: groups of copies, or pairs if they are near
    ones.
    """
    keys, places = _records_between(
        index, rank * 2**64 // world_size, (rank + 1) * 2**64 // world_size
    )
    # Near copies are joined to groups later; equal ones are counted.
    if index.near:
        records = _pairs(keys, places, index.num_bytes)
    else:
        most = -(-_MOST_GROUPS // world_size)
        records = _groups(keys, places, index.num_bytes, most)
    with atomic_file(index.work / "parts" / f"{rank:06d}.npy") as path:
        np.save(path, records)


def _records_between(index: WindowIndex, least: int, end: int) -> tuple[Hashes, Records]:
    """Return the records of all runs with keys from ``least`` to below ``end``, sorted by key."""
    keys_of_runs = []
    places_of_runs = []
    for run_keys, run_places in index.runs():
        start = np.searchsorted(run_keys, np.uint64(least))
        stop = len(run_keys)
        if end < 2**64:  # else it is no uint64
            stop = int(np.searchsorted(run_keys, np.uint64(end)))
        keys_of_runs.append(run_keys[start:stop])
        places_of_runs.append(run_places[start:stop])
    keys = np.concatenate(keys_of_runs)
    places = np.concatenate(places_of_runs)
    # A stable order keeps that of files, documents and offsets.
    order = np.argsort(keys, kind="stable")
    return keys[order], places[order]


def _pairs(keys: Hashes, places: Records, num_bytes: int) -> Records:
    """Pair each window with the first of its key: :data:`PAIR` ``[num_pairs]``, without what
    overlaps.
    """
    _, firsts, groups = np.unique(keys, return_index=True, return_inverse=True)
    first_records = firsts[groups]
    others = np.flatnonzero(first_records != np.arange(len(keys)))
    pairs = np.zeros(len(others), PAIR)
    pairs["first"] = places[first_records[others]]
    pairs["second"] = places[others]
    is_apart = ~_overlap(pairs["first"], pairs["second"], num_bytes)
    return np.asarray(np.unique(pairs[is_apart]))


def _groups(keys: Hashes, places: Records, num_bytes: int, most: int) -> Records:
    """Count the windows of each key: :data:`GROUP` ``[num_groups]``, at most so many, the largest
    ones, of keys that occur again.
    """
    _, firsts, groups = np.unique(keys, return_index=True, return_inverse=True)
    is_counted = _counted(places, groups, num_bytes)
    counts = np.bincount(groups[is_counted])
    repeated = np.flatnonzero(counts > 1)
    largest_first = np.argsort(-counts[repeated], kind="stable")
    repeated = repeated[largest_first[:most]]
    first_records = firsts[repeated]
    records = np.zeros(len(repeated), GROUP)
    records["count"] = counts[repeated]
    records["key"] = keys[first_records]
    records["place"] = places[first_records]
    return records


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
    has_overlaps = lengths > 1
    for start, length in zip(starts[has_overlaps], lengths[has_overlaps], strict=True):
        stretch = slice(start, start + length)
        offsets = places["offset"][stretch].astype(np.int64)
        is_counted[stretch] = np.isin(offsets, without_overlaps(offsets, num_bytes))
    return is_counted


def _joined(pairs: Records) -> Records:
    """Join pairs of near copies to groups, and count their documents."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    # Windows are the nodes of a graph, pairs its edges; a group is a connected component.
    ends_of_edges = np.concatenate([pairs["first"], pairs["second"]])
    places, nodes = np.unique(ends_of_edges, return_inverse=True)
    edges = np.ones(len(pairs), np.bool_)
    graph = coo_array((edges, np.split(nodes, 2)), (len(places), len(places)))
    _, labels = connected_components(graph, directed=False)
    # A document counts once in a group.
    _, documents = np.unique(places[DOCUMENT], return_inverse=True)
    labels_and_documents = np.unique(np.stack([labels, documents]), axis=1)
    counts = np.bincount(labels_and_documents[0])
    _, firsts = np.unique(labels, return_index=True)
    groups = np.zeros(len(counts), GROUP)
    groups["count"] = counts
    groups["place"] = places[firsts]
    return groups[counts > 1]


def first_of_stretches(groups: Records, num_bytes: int) -> Records:
    """Keep the first of windows that overlap and have equally many copies."""
    order = np.argsort(groups["place"], order=("file", "document", "offset"), kind="stable")
    groups = groups[order]
    places = groups["place"]
    counts = groups["count"]
    goes_on = _overlap(places[1:], places[:-1], num_bytes) & (counts[1:] == counts[:-1])
    is_first = np.append(True, ~goes_on)[: len(groups)]
    return np.asarray(groups[is_first])
