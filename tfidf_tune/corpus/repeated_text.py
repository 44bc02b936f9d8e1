"""What repeats in a text of any size: copies of documents, and stretches that occur again in the
documents that stay.

Documents that are copies are found as :mod:`tfidf_tune.corpus.file_deduplication` finds them.
Stretches are found in the documents that are left when near copies are removed, by an index of
windows of these: windows that occur more than once and overlap, or follow each other, are one
stretch. Of so many words in a row one starts a window, so that a stretch may be found without its
first and last few words, and is longer than it is said to be.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from heapq import nlargest
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tfidf_tune._files import atomic_file
from tfidf_tune._tokenizer import TextTokenizer, encode_texts
from tfidf_tune.corpus import minhash
from tfidf_tune.corpus import window_index as windows
from tfidf_tune.corpus.deduplication import Deduplication
from tfidf_tune.corpus.file_deduplication import ReadTexts, clusters_of_file, find_copies
from tfidf_tune.corpus.jobs import TaskRunner, progress
from tfidf_tune.corpus.sources import texts_of_rows
from tfidf_tune.corpus.window_index import Records, WindowIndex

LEAST_TOKENS = 50
"""Tokens of the shortest stretch that counts."""
BYTES_OF_TOKEN = 4.0
"""Bytes of a token in UTF-8 where no tokenizer is given: about its length in English."""
USUAL = Deduplication("minhash", threshold=0.8, ngram=5)
"""The definition of near copies that is usual in the literature."""
DIFFERING = Deduplication("minhash", threshold=0.3, ngram=5)
"""The definition of copies that differ: it finds 90 % of copies of documentation of which 10 % of
the words were replaced, and connects 1 of 1,574 paragraphs of Wikipedia with another."""
TUNED = Deduplication("minhash", threshold=0.11, ngram=2)
"""The definition that was best in our measurements, on text of which most is a copy. On other text
it connects nearly all documents of one kind. Its count is therefore the number of documents that it
would remove, not the number of copies."""
LARGE_SHARE = 0.1
"""A stretch in more than this share of the documents is a frame."""

_WINDOW = 0.4  # of the shortest stretch, so that each such stretch holds a window that is indexed
_FOUND = 0.75  # of the shortest stretch: what the index finds of it at least
_NUM_LARGEST = 10
_EXCERPT_BYTES = 200
_LONGEST_WORD = 64  # bytes
_BATCH_BYTES = 1 << 18
_SAMPLE_FILES = 10
_SAMPLE_DOCUMENTS = 100
_SAMPLE_CHARACTERS = 10_000


def measured_bytes_of_token(
    tokenizer: TextTokenizer, files: Sequence[str], read: ReadTexts
) -> float:
    """Return the bytes of a token on average, in the first documents of files."""
    num_bytes = 0
    num_tokens = 0
    for file in files[:_SAMPLE_FILES]:
        first_documents = islice(read(file), _SAMPLE_DOCUMENTS)
        texts = [text[:_SAMPLE_CHARACTERS] for _, text in first_documents]
        num_bytes += sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        num_tokens += sum(len(ids) for ids in encode_texts(tokenizer, texts))
    return num_bytes / num_tokens if num_tokens else BYTES_OF_TOKEN


class Stretch(NamedTuple):
    """A text that occurs again.

    Attributes:
        copies (int): occurrences without overlap, in the documents that stay; of a document, all of
            its copies.
        documents (int | None): documents that have it; None if that was not counted.
        num_bytes (int): its length in UTF-8.
        place (str): where it occurs first.
        excerpt (str): its beginning.
    """

    copies: int
    documents: int | None
    num_bytes: int
    place: str
    excerpt: str


class NumberOfCopies(NamedTuple):
    """The stretches that occur from ``least`` to ``most`` times: their number, and the bytes but of
    the first.
    """

    least: int
    most: int
    stretches: int
    copied_bytes: int


class Repeats(NamedTuple):
    """The numbers of a :class:`RepeatedText` that advice follows from; ``frames``
    is their number.
    """

    documents: int
    num_bytes: int
    near_copies: int
    differing_copies: int
    copied_bytes_inside: int
    frames: int


@dataclass(frozen=True)
class RepeatedText:
    """What repeats in a text.

    Attributes:
        documents (int): documents that are not empty.
        words (int): words, see :func:`~tfidf_tune.corpus.minhash.word_spans`.
        tokens (int | None): tokens, if a tokenizer was given.
        num_bytes (int): bytes in UTF-8.
        exact_copies (int): documents that are equal to an earlier one.
        near_copies (int): documents that :data:`USUAL` removes.
        differing_copies (int): documents that :data:`DIFFERING` removes.
        tuned_copies (int): documents that :data:`TUNED` removes.
        copied_bytes (int): bytes of the documents that :data:`USUAL` removes, and
            ``copied_bytes_inside``.
        copied_bytes_inside (int): bytes of stretches that occur earlier, in documents that stay.
        by_copies (list[NumberOfCopies]): the stretches by their number of copies: 2, 3 and 4, 5 to
            8, ...
        largest_documents (list[Stretch]): the largest groups of copies of documents.
        largest_stretches (list[Stretch]): the stretches that take the most text.
        frames (list[Stretch]): stretches that are in more than a tenth of the documents that stay.
    """

    documents: int
    words: int
    tokens: int | None
    num_bytes: int
    exact_copies: int
    near_copies: int
    differing_copies: int
    tuned_copies: int
    copied_bytes: int
    copied_bytes_inside: int
    by_copies: list[NumberOfCopies]
    largest_documents: list[Stretch]
    largest_stretches: list[Stretch]
    frames: list[Stretch]

    @property
    def copied_share(self) -> float:
        """The share of the text that is a copy of earlier text, in bytes."""
        return self.copied_bytes / max(1, self.num_bytes)

    @property
    def repeats(self) -> Repeats:
        """The numbers that advice follows from."""
        return Repeats(
            documents=self.documents,
            num_bytes=self.num_bytes,
            near_copies=self.near_copies,
            differing_copies=self.differing_copies,
            copied_bytes_inside=self.copied_bytes_inside,
            frames=len(self.frames),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the attributes and ``copied_share`` as JSON data."""
        data = asdict(self) | {"copied_share": self.copied_share}
        for name in ("by_copies", "largest_documents", "largest_stretches", "frames"):
            data[name] = [row._asdict() for row in getattr(self, name)]
        return data


class _Document(NamedTuple):
    place: str
    text: str
    is_kept: bool
    size: int  # of the group of copies of which it stays


def _documents(
    files: Sequence[str], clusters: Path, read: ReadTexts, rank: int
) -> Iterator[_Document]:
    """Yield the documents of a file that are not empty."""
    removed, sizes = clusters_of_file(clusters, rank)
    for number, (place, text) in enumerate(read(files[rank])):
        text = text.strip()
        if text:
            yield _Document(place, text, number not in removed, sizes.get(number, 1))


def _kept_texts(documents: Callable[[int], Iterator[_Document]], rank: int) -> Iterator[str]:
    return (document.text for document in documents(rank) if document.is_kept)


def find_repeated_text(
    files: Sequence[str],
    work: Path,
    *,
    read: ReadTexts | None = None,
    tokenizer: TextTokenizer | None = None,
    bytes_of_token: float | None = None,
    for_advice: bool = False,
    runner: TaskRunner | None = None,
) -> RepeatedText:
    """Find what repeats in files.

    Each file is a task. Memory does not grow with the text; it grows with the number of copies.

    Args:
        files (Sequence[str]): files, or ``embedded``, see
            :func:`~tfidf_tune.corpus.sources.load_documents`.
        work (Path): a folder for what is found on the way; steps that it has are not done again.
        read (ReadTexts | None): yields the place and the text of each document of a file. Default:
            None, the column "text" of each row, or each line
        tokenizer (TextTokenizer | None): counts tokens. Default: None
        bytes_of_token (float | None): decides how long a stretch of :data:`LEAST_TOKENS` tokens is.
            Default: None, :data:`BYTES_OF_TOKEN`
        for_advice (bool): find only what advice follows from: no equal copies, and none by
            :data:`TUNED`, are counted. Default: False
        runner (TaskRunner | None): where tasks run. Default: in this process

    Raises:
        ValueError: If a file cannot be read.
    """
    runner = runner or TaskRunner()
    read = read or partial(texts_of_rows, column="text", sample_by="line")
    # First the documents that are copies, by each definition.
    near = find_copies(files, work / "near", USUAL, read, runner, "near copies")
    differing = find_copies(
        files, work / "differing", DIFFERING, read, runner, "copies that differ"
    )
    exact_copies = 0
    tuned_copies = 0
    if not for_advice:
        equal = Deduplication("exact")
        exact = find_copies(files, work / "exact", equal, read, runner, "equal documents")
        tuned = find_copies(files, work / "tuned", TUNED, read, runner, "distant copies")
        exact_copies = _num_removed(exact, len(files))
        tuned_copies = _num_removed(tuned, len(files))
    # Then an index of the windows of the documents that stay without near copies.
    bytes_of_token = bytes_of_token or BYTES_OF_TOKEN
    shortest = LEAST_TOKENS * bytes_of_token
    documents = partial(_documents, files, near, read)
    index = _index_of_kept(files, documents, work, shortest)
    built = windows.build(index, np.zeros(0, np.uint64), runner)
    num_kept = built.counts["documents"]
    groups = built.groups[np.argsort(built.groups["key"], kind="stable")]
    # Windows in so many documents are counted by document; others cannot be in a tenth of the
    # documents.
    frequent = np.flatnonzero(groups["count"] > LARGE_SHARE * num_kept)
    with atomic_file(work / "groups.npy") as path, path.open("wb") as file:
        np.save(file, groups)
    # A task for each file finds its stretches.
    measure = partial(_measure, index, documents, frequent, round(shortest * _FOUND), tokenizer)
    runner.run([measure], work / "measured", len(files), "Measuring stretches")
    measured = _read_measured(work / f"measured-{rank:06d}.json" for rank in range(len(files)))
    counts = measured.counts
    largest = nlargest(_NUM_LARGEST, measured.largest, key=_copied)
    return RepeatedText(
        documents=counts["documents"],
        words=counts["words"],
        tokens=None if tokenizer is None else counts["tokens"],
        num_bytes=counts["bytes"],
        exact_copies=exact_copies,
        near_copies=_num_removed(near, len(files)),
        differing_copies=_num_removed(differing, len(files)),
        tuned_copies=tuned_copies,
        copied_bytes=counts["bytes_of_copies"] + counts["copied_bytes"],
        copied_bytes_inside=counts["copied_bytes"],
        by_copies=_by_copies(counts),
        largest_documents=nlargest(_NUM_LARGEST, measured.documents, key=_copied),
        largest_stretches=_named(largest, measured.documents_with),
        frames=_frames(measured, num_kept),
    )


def _index_of_kept(
    files: Sequence[str],
    documents: Callable[[int], Iterator[_Document]],
    work: Path,
    shortest: float,
) -> WindowIndex:
    """Return an index, still empty, for stretches of ``shortest`` bytes in documents that stay."""
    num_bytes = round(shortest * _WINDOW)
    # A stretch holds a whole window if it has room for a window and for the words to its start.
    room = round(shortest - num_bytes) // windows.window_spacing(num_bytes)
    return WindowIndex(
        tuple(files),
        partial(_kept_texts, documents),
        work,
        num_bytes=num_bytes,
        longest_word=min(_LONGEST_WORD, max(1, room)),
        near=False,
        num_shared_bytes=1,
    )


def _num_removed(clusters: Path, num_files: int) -> int:
    return sum(len(clusters_of_file(clusters, rank)[0]) for rank in range(num_files))


class _Found(NamedTuple):
    """A stretch as a task writes it, with its windows that are frequent."""

    copies: int
    num_bytes: int
    place: str
    excerpt: str
    windows: list[int]


def _copied(found: Stretch | _Found) -> int:
    """Return the bytes of all occurrences of a stretch but the first."""
    return (found.copies - 1) * found.num_bytes


def _named(found: Sequence[_Found], num_with: Mapping[int, int]) -> list[Stretch]:
    """Count the documents of stretches: as many as half of the windows of each have."""
    stretches = []
    for copies, num_bytes, place, excerpt, frequent in found:
        documents = None
        if frequent:
            documents = int(np.median([num_with[window] for window in frequent]))
        stretches.append(Stretch(copies, documents, num_bytes, place, excerpt))
    return stretches


class _AllMeasured(NamedTuple):
    """What the tasks of all files found."""

    counts: Counter[str]
    documents_with: Counter[int]  # how many documents have each frequent window
    frequent: list[_Found]
    largest: list[_Found]  # of each file
    documents: list[Stretch]  # the largest groups of copies of each file


def _read_measured(files: Iterable[Path]) -> _AllMeasured:
    """Join what the tasks wrote."""
    joined = _AllMeasured(Counter(), Counter(), [], [], [])
    for file in files:
        measured = json.loads(file.read_text(encoding="utf-8"))
        joined.counts.update(measured["counts"])
        for window, number in measured["documents_with"].items():
            joined.documents_with[int(window)] += number
        joined.frequent.extend(_Found(*stretch) for stretch in measured["frequent"])
        joined.largest.extend(_Found(*stretch) for stretch in measured["largest"])
        joined.documents.extend(Stretch(*group) for group in measured["documents"])
    return joined


def _by_copies(counts: Counter[str]) -> list[NumberOfCopies]:
    """Return the stretches of each level: 1 of 2 copies, 2 of 3 and 4, 3 of 5 to 8."""
    by_copies = []
    for level in range(1, 33):
        most = 1 << level
        num_stretches = counts[f"stretches {level}"]
        if num_stretches:
            copied_bytes = counts[f"copied {level}"]
            by_copies.append(NumberOfCopies(most // 2 + 1, most, num_stretches, copied_bytes))
    return by_copies


def _frames(measured: _AllMeasured, num_kept: int) -> list[Stretch]:
    """Return the frames that take the most text, of ``num_kept`` documents."""

    def bytes_of_all(frame: Stretch) -> int:
        documents = frame.documents or 0
        return documents * frame.num_bytes

    stretches = _named(measured.frequent, measured.documents_with)
    frames = [stretch for stretch in stretches if (stretch.documents or 0) > LARGE_SHARE * num_kept]
    return nlargest(_NUM_LARGEST, frames, key=bytes_of_all)


def _measure(
    index: WindowIndex,
    documents: Callable[[int], Iterator[_Document]],
    frequent: npt.NDArray[np.int64],
    least: int,
    tokenizer: TextTokenizer | None,
    _: Any,
    rank: int,
    world_size: int,
) -> None:
    """Count the text of a file, and find its stretches; ``least`` are the bytes of the shortest."""
    groups = np.load(index.work / "groups.npy", mmap_mode="r")
    measured = _Measured(index, rank, groups, frequent, least)
    shown = progress(documents(rank), index.files, rank, "Measuring", lambda each: each.text)
    waiting: list[_Document] = []
    num_waiting = 0
    for document in shown:
        waiting.append(document)
        num_waiting += len(document.text)
        if num_waiting >= _BATCH_BYTES:
            measured.add(waiting, tokenizer)
            waiting = []
            num_waiting = 0
    if waiting:
        measured.add(waiting, tokenizer)
    content = {
        "counts": measured.counts,
        "documents_with": measured.documents_with,
        "frequent": measured.frequent_stretches,
        "largest": measured.largest,
        "documents": measured.largest_documents,
    }
    with atomic_file(index.work / f"measured-{rank:06d}.json") as path:
        path.write_text(json.dumps(content), encoding="utf-8", errors="backslashreplace")


class _Windows(NamedTuple):
    """Windows of a batch of texts that occur again, in the order of the text."""

    groups: windows.Places  # their groups of copies
    starts: windows.Places  # bytes of the batch
    texts: windows.Places  # numbers of their texts
    offsets: windows.Places  # bytes of their texts
    copies: npt.NDArray[np.uint32]
    levels: windows.Places  # 1 of 2 copies, 2 of 3 and 4, 3 of 5 to 8
    is_first: npt.NDArray[np.bool_]  # whether no copy is earlier
    is_frequent: npt.NDArray[np.bool_]

    def take(self, chosen: npt.NDArray[np.bool_] | slice) -> "_Windows":
        """Return some of the windows."""
        return _Windows._make(column[chosen] for column in self)


class _Measured:
    """What was found in a file so far."""

    def __init__(
        self,
        index: WindowIndex,
        rank: int,
        groups: Records,
        frequent: npt.NDArray[np.int64],
        least: int,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.documents_with: Counter[int] = Counter()
        self.frequent_stretches: list[_Found] = []
        self.largest: list[_Found] = []
        self.largest_documents: list[Stretch] = []
        self._index = index
        self._rank = rank
        self._groups = groups
        self._keys = np.ascontiguousarray(groups["key"])
        self._frequent = frequent
        self._least = least
        self._num_kept = 0

    def add(self, documents: Sequence[_Document], tokenizer: TextTokenizer | None) -> None:
        """Count documents that follow those before."""
        texts = [document.text.encode("utf-8", "surrogatepass") for document in documents]
        word_starts, _ = minhash.word_spans(b"\n".join(texts))
        self.counts["documents"] += len(texts)
        self.counts["bytes"] += sum(len(text) for text in texts)
        self.counts["words"] += len(word_starts)
        if tokenizer is not None:
            encoded = encode_texts(tokenizer, [document.text for document in documents])
            self.counts["tokens"] += sum(len(ids) for ids in encoded)
        kept = []
        kept_texts = []
        for document, text in zip(documents, texts, strict=True):
            if not document.is_kept:
                self.counts["bytes_of_copies"] += len(text)
                continue
            kept.append(document)
            kept_texts.append(text)
            if document.size > 1:
                size = document.size
                group = Stretch(size, size, len(text), document.place, _excerpt(text))
                groups = [*self.largest_documents, group]
                self.largest_documents = nlargest(_NUM_LARGEST, groups, key=_copied)
        if kept and len(self._keys):
            self._add_stretches(kept, kept_texts)
        self._num_kept += len(kept)

    def _add_stretches(self, documents: Sequence[_Document], texts: Sequence[bytes]) -> None:
        repeated = self._repeated_windows(self._index.batch(texts))
        if not len(repeated.starts):
            return
        # What is not first is copied.
        num_bytes = self._index.num_bytes
        copied = repeated.take(~repeated.is_first)
        self.counts["copied_bytes"] += _covered(copied.starts, num_bytes)
        for level in np.unique(repeated.levels).tolist():
            of_level = copied.starts[copied.levels == level]
            self.counts[f"copied {level}"] += _covered(of_level, num_bytes)
        # A document counts once for each of its frequent windows.
        frequent = repeated.take(repeated.is_frequent)
        pairs = np.unique(np.stack([frequent.texts, frequent.groups]), axis=1)
        self.documents_with.update(pairs[1].tolist())
        # Each stretch is described where it is first. It ends where its number of copies changes
        # much; a frame does not, because its parts may be in other text, too.
        first = repeated.take(repeated.is_first)
        stretches = self._described(first, first.levels, documents, texts)
        for stretch in stretches:
            level = (stretch.copies - 1).bit_length()
            self.counts[f"stretches {level}"] += 1
        self.largest = nlargest(_NUM_LARGEST, [*self.largest, *stretches], key=_copied)
        of_frames = first.take(first.is_frequent)
        any_level = np.zeros_like(of_frames.levels)
        self.frequent_stretches += self._described(of_frames, any_level, documents, texts)

    def _repeated_windows(self, batch: windows.TextBatch) -> _Windows:
        """Return the windows of which long stretches consist.

        Windows that overlap or touch are a region, and short regions are left out. If windows of 80
        bytes that occur again start at the bytes 100, 130 and 170 and at 400 and 420, they are
        regions from 100 to 250 and from 400 to 500. Where the shortest stretch has 150 bytes, the
        first three windows stay. Of their 4, 12 and 12 copies, 12 are taken for each, see
        :func:`_smoothed`, and their level is 4, for 9 to 16 copies: a stretch of 150 bytes, which
        is described in the first of its 12 places, and copied in the others.
        """
        num_bytes = self._index.num_bytes
        chosen, keys = self._index.windows(batch)
        # The group of a window, by a search in the sorted keys of all groups.
        groups = np.searchsorted(self._keys, keys[:, 0])
        groups = np.minimum(groups, len(self._keys) - 1)
        is_repeated = self._keys[groups] == keys[:, 0]
        chosen = chosen[is_repeated]
        groups = groups[is_repeated]
        # The windows of regions that are long enough.
        starts = batch.words[chosen]
        firsts, lasts = _runs(np.diff(starts) > num_bytes, len(starts))
        is_long = starts[lasts] + num_bytes - starts[firsts] >= self._least
        is_inside = np.repeat(is_long, lasts - firsts + 1)
        chosen = chosen[is_inside]
        groups = groups[is_inside]
        # Their copies; whether the place in the text is the first of them.
        counts = self._groups["count"][groups]
        copies = _smoothed(counts, chosen, windows.window_spacing(num_bytes))
        place = self._groups["place"][groups]
        texts = batch.of_text[chosen]
        offsets = batch.offsets[chosen]
        is_first = (place["file"] == self._rank) & (place["offset"] == offsets)
        is_first &= place["document"] == self._num_kept + texts
        return _Windows(
            groups=groups,
            starts=batch.words[chosen],
            texts=texts,
            offsets=offsets,
            copies=copies,
            levels=np.ceil(np.log2(copies)).astype(np.int64),
            is_first=is_first,
            is_frequent=np.isin(groups, self._frequent),
        )

    def _described(
        self,
        found: _Windows,
        kinds: windows.Places,
        documents: Sequence[_Document],
        texts: Sequence[bytes],
    ) -> list[_Found]:
        """Return the long stretches of windows; a stretch ends where its kind does."""
        num_bytes = self._index.num_bytes
        is_gap = np.diff(found.starts) > num_bytes
        is_other_kind = np.diff(kinds) != 0
        firsts, lasts = _runs(is_gap | is_other_kind, len(found.starts))
        stretches = []
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            length = int(found.starts[last] - found.starts[first]) + num_bytes
            if length < self._least:
                continue
            inside = found.take(slice(first, last + 1))
            text = int(inside.texts[0])
            offset = int(inside.offsets[0])
            stretch = _Found(
                copies=int(np.median(inside.copies)),
                num_bytes=length,
                place=documents[text].place,
                excerpt=_excerpt(texts[text][offset:]),
                windows=inside.groups[inside.is_frequent].tolist(),
            )
            stretches.append(stretch)
        return stretches


def _runs(ends: npt.NDArray[np.bool_], number: int) -> tuple[windows.Places, windows.Places]:
    """Return the first and the last item of each run; ``ends`` says after which item, but the last,
    a run ends.
    """
    if not number:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    borders = np.flatnonzero(ends)
    return np.append(0, borders + 1), np.append(borders, number - 1)


def _smoothed(
    copies: npt.NDArray[np.uint32], words: windows.Places, spacing: int
) -> npt.NDArray[np.uint32]:
    """Give windows the copies of the most frequent window of which they start fewer than
    ``spacing`` words away.

    At the ends of a stretch, what is around it decides which windows are chosen, so that some of
    its windows are chosen in a part of its copies. Of a stretch with 12 copies, the windows may
    have 4, 12, 12, 12 and 7; all get 12.
    """
    smoothed = copies.copy()
    for step in range(1, spacing):
        are_near = words[step:] - words[:-step] < spacing
        of_next = np.where(are_near, copies[step:], 0)
        of_previous = np.where(are_near, copies[:-step], 0)
        smoothed[:-step] = np.maximum(smoothed[:-step], of_next)
        smoothed[step:] = np.maximum(smoothed[step:], of_previous)
    return smoothed


def _covered(starts: windows.Places, num_bytes: int) -> int:
    """Return how many bytes windows cover, each counted once; their starts ascend."""
    if not len(starts):
        return 0
    return int(np.minimum(np.diff(starts), num_bytes).sum()) + num_bytes


def _excerpt(text: bytes) -> str:
    return text[:_EXCERPT_BYTES].decode("utf-8", "ignore")
