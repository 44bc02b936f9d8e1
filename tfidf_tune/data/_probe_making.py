"""Probe files from a user's own training text, so that a model trained elsewhere can be audited.

Windows of text that occur more than once lead to candidates (:mod:`tfidf_tune.data._window_index`). Their documents are
tokenized, and passages are chosen and counted on token ids. A passage holds a window that each of its occurrences has,
because the window was chosen by the text of the passage alone: so the index knows the documents of all occurrences.
"""

import shutil
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import chain, compress, islice, tee
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from tfidf_tune._checks import check_at_least, require_choice
from tfidf_tune.data._deduplication import Hashes
from tfidf_tune.data._disk_tasks import TaskRunner, begin, file_stamps
from tfidf_tune.data._duplicates import (
    CUT,
    SHARED_TOKENS,
    Positions,
    Start,
    WindowChooser,
    duplicated_stretches,
    is_varied,
    join_documents,
    name_repeated_windows,
    windows_with_shared_stretch,
    without_overlaps,
)
from tfidf_tune.data._passages import Passage, make_passages
from tfidf_tune.data._sources import (
    EMBEDDED,
    SampleBy,
    embedded_documents,
    is_local,
    load_documents,
    local_files,
    source_fingerprint,
    warn_of_short_documents,
)
from tfidf_tune.data._tokenizer import HFTokenizer, TextTokenizer, TokenArray, encode_texts, tokenizer_fingerprint
from tfidf_tune.data._window_index import (
    MOST_SHARED,
    PLACE,
    Found,
    Piece,
    Records,
    WindowIndex,
    build,
    document_numbers,
    draw_windows,
    find_windows,
    first_of_stretches,
    make_batch,
    read_pieces,
)

PASSAGES = ("duplicates", "near-duplicates", "random")
_FORMAT = 2  # of the steps on disk; an interrupted search of another format is not continued

_SAMPLE_FILES, _SAMPLE_DOCUMENTS, _SAMPLE_CHARACTERS = 10, 100, 10_000
_LEAST_SAMPLE = 16  # tokens of a document whose bytes in a token count
_SHARE_OF_PASSAGE = 0.4  # of a window, so that a passage of fewer bytes than most holds a window, too
_SHARE_OF_SHARED = 0.5  # of the stretches by which controls are recognized
_CANDIDATES, _MORE_CANDIDATES = 4, 50
_DOCUMENTS = (4096, 16384)  # of candidates: at first, and if they have too few passages
_COPIES = 64  # that are compared to find the passages of a candidate
_CUT_TOKENS = 32  # next to a cut, where tokens may differ from those of the document
_MOST_POSITIONS = 10_000
_SAME_TOKENS = 16
"""Near copies that have as many consecutive tokens in common are taken to be of one text."""


@dataclass(frozen=True)
class ProbeSpec:
    """The passages that a probe file should have.

    Args:
        sources (tuple[str, ...]): the training text, each as for :func:`load_documents`.
        column (str): the column that holds the text, also in ``controls_source``. Default: "text"
        controls_source (str | None): text that the model was not trained on. Default: None, the embedded corpus
        num_targets (int): passages of the training text. Default: 100
        num_controls (int): passages that it does not contain. Default: 100
        block_size (int): tokens in a passage. Default: 256
        passages (str): "duplicates" for the most frequent passages, completed with random ones; "near-duplicates" the
            same with copies that differ in some words; "random" for random ones only. Default: "duplicates"
        min_repeats (int): occurrences from which on a passage is a duplicate. Default: 2
        seed (int): decides which passages are drawn. Default: 0
        sample_by (Literal["line", "paragraph", "document"]): what a document of a ``.txt`` file is, also in
            ``controls_source``, see :func:`load_documents`. Default: "line"
        allow_fewer (bool): take fewer targets and controls, at least one target, if there are no more. Default: False

    Raises:
        ValueError: If a number is out of range, ``passages`` is unknown or no source is given.
    """

    sources: tuple[str, ...]
    column: str = "text"
    controls_source: str | None = None
    num_targets: int = 100
    num_controls: int = 100
    block_size: int = 256
    passages: str = "duplicates"
    min_repeats: int = 2
    seed: int = 0
    sample_by: SampleBy = "line"
    allow_fewer: bool = False

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("no source is given: name at least one file of training text")
        require_choice("passages", self.passages, PASSAGES)
        check_at_least(0, num_controls=self.num_controls, seed=self.seed)
        check_at_least(1, num_targets=self.num_targets)
        check_at_least(2, block_size=self.block_size, min_repeats=self.min_repeats)


@dataclass(frozen=True)
class MadeProbe:
    """The passages, targets first, and statistics of the search.

    Counts of the training text: documents, tokens, occurrences of each duplicated stretch of the candidates (stretches
    may overlap), targets that are duplicates, passages left out because they repeat a few tokens, passages of the
    controls' source refused because they are partly in the training text, and targets by where they start.
    ``num_tokens`` is estimated from a sample if ``is_estimate``.
    """

    passages: tuple[Passage, ...]
    num_documents: int
    num_tokens: int
    stretch_repeats: tuple[int, ...]
    num_duplicates: int
    num_repetitive: int
    num_refused: int
    starts: dict[Start, int]
    is_estimate: bool = False


def make_probe(
    tokenizer: TextTokenizer,
    spec: ProbeSpec,
    work: Path | None = None,
    runner: TaskRunner | None = None,
    *,
    replace_work: bool = False,
) -> MadeProbe:
    """Choose the passages of a probe file from text of any size; memory does not grow with the text.

    A passage is ``block_size`` tokens within one document. Duplicates are found at any offset, in one or several
    documents; each duplicated stretch gives one passage. Randomly drawn passages occur once. No two passages share a
    token, and none consists of a few repeated tokens. ``num_injections`` is exact: the occurrences of the token ids
    without overlap. Of near-duplicates, most are found whose windows have a Jaccard similarity of three-word n-grams
    above 0.5, and ``num_injections`` counts the documents that are connected by such pairs.

    Args:
        tokenizer (TextTokenizer): the tokenizer of the model; no BOS is added. If it changes text before it splits it
            (lower case, NFKC), ``num_injections`` is a lower bound.
        spec (ProbeSpec): what to choose.
        work (Path | None): folder of the steps. If an interrupted call with the same arguments left one, it goes on.
            Default: None, a temporary folder
        runner (TaskRunner | None): where the tasks run, one for each file. Default: None, this process
        replace_work (bool): empty ``work`` if it is of a call with other arguments. Default: False

    Returns:
        MadeProbe: the passages. ``source`` is the file of the first occurrence. ``positions`` of a target are
            ``[document, offset in the document]`` of its occurrences, in tokens, with documents counted over all
            sources, without the empty ones; they are left empty for near-duplicates, if one is in a document of more
            than 32 KiB, and if there are more than 10,000.

    Raises:
        FileNotFoundError: If a source looks like a path and does not exist.
        ValueError: If a source cannot be read, see :func:`load_documents`, or has too few passages; if ``work`` is of a
            call with other arguments.
        ChildProcessError: If a task on another machine failed.
    """
    if work is None:
        with TemporaryDirectory() as folder:
            return make_probe(tokenizer, spec, Path(folder) / "work", runner)
    runner = runner or TaskRunner()
    # Each file is a task, any other source too; what they hold now decides whether an interrupted call goes on.
    units: list[Path | str] = [
        unit for source in spec.sources for unit in (local_files(source) if is_local(source) else [source])
    ]
    stamps = file_stamps([source for source in spec.sources if is_local(source)])
    stamps |= {str(unit): source_fingerprint(str(unit), column=spec.column) for unit in units if unit in spec.sources}
    arguments = {**asdict(spec), "sources": list(spec.sources), "files": stamps, "format": _FORMAT}
    if spec.num_controls:
        unseen = spec.controls_source or EMBEDDED
        arguments["controls"] = source_fingerprint(unseen, column=spec.column, sample_by=spec.sample_by)
    begin(work, arguments | {"tokenizer": tokenizer_fingerprint(tokenizer)}, replace=replace_work)
    try:
        return _choose(tokenizer, spec, units, work, runner)
    except ValueError:
        shutil.rmtree(work)  # it would be in the way of other arguments
        raise


def _choose(
    tokenizer: TextTokenizer, spec: ProbeSpec, units: list[Path | str], work: Path, runner: TaskRunner
) -> MadeProbe:
    """Choose the passages of files and other sources, in steps in ``work``."""
    # The length of a window in bytes follows from a sample; the stretches of controls are searched in the same pass.
    files = tuple(str(unit.resolve()) if isinstance(unit, Path) else unit for unit in units)
    rng = np.random.default_rng(spec.seed)
    num_sampled, bytes_in_token, least = _sample(tokenizer, files, spec)
    controls = _Controls.draw(tokenizer, spec, rng)
    near = spec.passages == "near-duplicates"
    index = WindowIndex(
        files=files,
        column=spec.column,
        sample_by=spec.sample_by,
        work=str(work),
        num_bytes=max(4, round(spec.block_size * least * (1 if near else _SHARE_OF_PASSAGE))),
        near=near,
        num_shared_bytes=controls.num_shared_bytes,
    )
    found = build(index, np.concatenate([np.zeros(0, np.uint64), *controls.stretches(index)]), runner)
    search = _Search(tokenizer, spec, index, found, runner, rng)
    targets = search.near_targets() if near else search.targets()
    num_tokens = round(found.counts["bytes"] / bytes_in_token)
    text = f"{', '.join(spec.sources)} ({found.counts['documents']} documents of {num_tokens} tokens in all)"
    _check_enough(len(targets), "num_targets", spec, text)
    accepted, num_refused = controls.accepted(search)
    windows = [(one.ids, one.positions, str(units[one.file])) for one in targets]
    windows += [(ids, [], spec.controls_source or EMBEDDED) for ids in accepted]
    passages = make_passages(tokenizer, windows, len(targets))
    # The index has counted what the positions of a passage do not always tell.
    counted = map(lambda passage, one: replace(passage, num_injections=one.num_copies), passages, targets)
    return MadeProbe(
        passages=(*counted, *passages[len(targets) :]),
        num_documents=found.counts["documents"],
        num_tokens=num_tokens,
        stretch_repeats=search.stretch_repeats,
        num_duplicates=search.num_duplicates,
        num_repetitive=search.num_repetitive,
        num_refused=num_refused,
        starts=Counter(target.start for target in targets),
        is_estimate=num_sampled < found.counts["bytes"],
    )


def _sample(tokenizer: TextTokenizer, files: tuple[str, ...], spec: ProbeSpec) -> tuple[int, float, float]:
    """Return the bytes of a sample, bytes in a token on average, and of documents with the shortest tokens."""
    # The first documents of files that are spread over all.
    chosen = np.unique(np.linspace(0, len(files) - 1, _SAMPLE_FILES).round().astype(int)).tolist()
    lengths: list[int] = []
    sizes: list[int] = []
    for file in (files[rank] for rank in chosen):
        documents = load_documents(file, column=spec.column, sample_by=spec.sample_by)
        texts = [text[:_SAMPLE_CHARACTERS] for text in islice(documents, _SAMPLE_DOCUMENTS)]
        own = [len(ids) for ids in encode_texts(tokenizer, texts)]
        warn_of_short_documents(file, spec.sample_by, own)
        lengths += own
        sizes += [len(text.encode("utf-8", "surrogatepass")) for text in texts]
    mean = max(1.0, sum(sizes) / max(1, sum(lengths)))
    shares = [size / length for size, length in zip(sizes, lengths, strict=True) if length >= _LEAST_SAMPLE]
    return sum(sizes), mean, float(np.quantile(shares, 0.05)) if shares else mean


class _Target(NamedTuple):
    ids: TokenArray
    start: Start
    num_copies: int
    positions: list[list[int]]
    file: int


class _Corpus:
    """The tokens of pieces, see :func:`join_documents`, where each begins, and the choice of windows."""

    def __init__(self, search: "_Search", pieces: Iterable[Piece]) -> None:
        both = [*_encoded(search.tokenizer, pieces)]
        self.pieces = [piece for piece, _ in both]
        self.token_ids = join_documents(ids for _, ids in both)
        self.first_tokens = np.cumsum([0, *(len(ids) + 1 for _, ids in both)])[:-1]
        self.chooser = WindowChooser(search.tokenizer, self.token_ids, search.spec.block_size, search.rng)
        self._tokenizer = search.tokenizer

    def pieces_of(self, tokens: Positions) -> Positions:
        """Return the piece of each token, int64 of the shape of ``tokens``."""
        return np.searchsorted(self.first_tokens, tokens, side="right") - 1

    def token_at(self, place: np.void) -> int:
        """Return the token that holds the first byte of a window."""
        number = bisect_right(self.pieces, tuple(place.tolist()), key=lambda piece: piece[:3]) - 1
        piece = self.pieces[number]
        # Bytes are counted in decoded text, by a binary search for the token whose text ends behind the first byte.
        (ids,) = encode_texts(self._tokenizer, [piece.text])
        first = int(place["offset"]) - piece.start
        token = bisect_right(range(len(ids) + 1), first, key=lambda end: len(_text(self._tokenizer, ids[:end]))) - 1
        return int(self.first_tokens[number]) + token


def _encoded(tokenizer: TextTokenizer, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, TokenArray]]:
    """Tokenize pieces; :data:`CUT` is in place of tokens that may differ from those of the document."""
    pieces, again = tee(pieces)
    for piece, ids in zip(pieces, encode_texts(tokenizer, (piece.text for piece in again)), strict=True):
        ids[: _CUT_TOKENS if piece.start else 0] = CUT
        ids[len(ids) if piece.is_end else -_CUT_TOKENS :] = CUT
        yield piece, ids


def _text(tokenizer: TextTokenizer, ids: TokenArray) -> bytes:
    options = {"skip_special_tokens": False} if isinstance(tokenizer, HFTokenizer) else {}
    # An incomplete character at an end is not a part of the text.
    return tokenizer.decode(ids.tolist(), **options).strip("\ufffd").encode("utf-8", "surrogatepass")


@dataclass
class _Search:
    """The choice of targets from an index."""

    tokenizer: TextTokenizer
    spec: ProbeSpec
    index: WindowIndex
    found: Found
    runner: TaskRunner
    rng: np.random.Generator
    num_duplicates: int = 0
    num_repetitive: int = 0
    stretch_repeats: tuple[int, ...] = ()
    _num_readings: int = 0

    def targets(self) -> list[_Target]:
        """Choose the most frequent duplicates, then random passages."""
        spec = self.spec
        is_random = spec.passages == "random"
        drawn = self._drawn(unique=not is_random)
        groups = self.found.groups[self.found.groups["count"] >= spec.min_repeats]
        targets: list[_Target] = []
        # Few documents at first; more if they have too few passages and there are more groups.
        for most in _DOCUMENTS:
            num_groups, places, weights = self._candidates(groups, 0 if is_random else most)
            together = np.concatenate([places, drawn])
            corpus = _Corpus(self, read_pieces(self.index, together, f"documents-{most}", self.runner))
            if not corpus.chooser.fits.any():  # the search needs memory in proportion to the length of a passage
                return []
            names = name_repeated_windows(corpus.token_ids, spec.block_size)
            if not is_random:
                targets = self._duplicates(corpus, names, weights)
            if is_random or num_groups == len(groups) or len(targets) == spec.num_targets:
                break
        self.num_duplicates = len(targets)
        targets += self._random(corpus, names, drawn, spec.num_targets - len(targets))
        self.num_repetitive = corpus.chooser.num_repetitive
        return targets

    def _drawn(self, *, unique: bool) -> Records:
        number = _CANDIDATES * self.spec.num_targets + _MORE_CANDIDATES
        return draw_windows(self.index, number, self.rng, unique=unique)

    def _candidates(self, groups: Records, most: int) -> tuple[int, Records, dict[int, float]]:
        """Choose the largest groups whose windows are in so many documents.

        Returns their number, places of up to :data:`_COPIES` windows of each, and for how many windows each of these
        stands, at most, by document.
        """
        counts, places = find_windows(self.index, groups["key"][: 8 * most], _COPIES)
        if not len(counts):
            return 0, np.zeros(0, PLACE), {}
        # As many groups as their documents allow, counting each document where it comes first.
        together = np.concatenate(places)
        documents, first, numbers = np.unique(document_numbers(together), return_index=True, return_inverse=True)
        num_documents = np.cumsum(np.isin(np.arange(len(together)), first))
        sizes = np.array([len(own) for own in places])
        num_groups = max(1, int(np.searchsorted(num_documents[np.cumsum(sizes) - 1], most, side="right")))
        num_places = int(sizes[:num_groups].sum())
        # Of a group with more windows than were read, a document stands for several.
        weights = np.ones(len(documents))
        np.maximum.at(weights, numbers[:num_places], np.repeat(counts / sizes, sizes)[:num_places])
        return num_groups, together[:num_places], dict(zip(documents.tolist(), weights.tolist(), strict=True))

    def _duplicates(self, corpus: _Corpus, names: Positions, weights: dict[int, float]) -> list[_Target]:
        """Choose the passages that occur most often."""
        spec = self.spec
        # The order is that of the expected counts; a few more than needed are counted in all text.
        stretches = duplicated_stretches(names, spec.block_size)
        stands_for = np.array([weights.get(piece.number, 1.0) for piece in corpus.pieces])
        expected = [stands_for[corpus.pieces_of(stretch.starts)].sum() for stretch in stretches]
        self.stretch_repeats = tuple(round(number) for number in expected if number >= spec.min_repeats)
        order = sorted(self.rng.permutation(len(stretches)), key=lambda number: -expected[number])
        chosen = []
        possible = corpus.chooser.duplicates(stretches[number] for number in order)
        for starts in islice(possible, 2 * spec.num_targets + 20):
            corpus.chooser.take(starts)
            chosen.append(starts)
        targets = [one for one in self._counted(corpus, chosen) if one.num_copies >= spec.min_repeats]
        return sorted(targets, key=lambda target: -target.num_copies)[: spec.num_targets]

    def _random(self, corpus: _Corpus, names: Positions, drawn: Records, number: int) -> list[_Target]:
        """Choose passages where windows were drawn, then anywhere in their documents; with duplicates, unique ones."""
        chooser, is_random = corpus.chooser, self.spec.passages == "random"
        allowed = chooser.fits if is_random else chooser.fits & (names[: len(chooser.fits)] == 0)
        possible = np.flatnonzero(allowed)
        if not len(possible):
            return []
        # Where a window was drawn, the last possible start before it; then every possible start in random order.
        tokens = map(corpus.token_at, drawn)
        near = (int(possible[max(0, int(np.searchsorted(possible, token, side="right")) - 1)]) for token in tokens)
        starts = chooser.random(allowed, chain(near, self.rng.permutation(possible).tolist()))
        targets: list[_Target] = []
        while len(targets) < number:
            chosen = []
            for start in islice(starts, number):
                same = np.flatnonzero(names == names[start]) if names[start] else np.array([start])
                chosen.append(without_overlaps(same, self.spec.block_size))
                chooser.take(chosen[-1])
            if not chosen:
                break
            targets += [one for one in self._counted(corpus, chosen) if is_random or one.num_copies == 1]
        return targets[:number]

    def _counted(self, corpus: _Corpus, chosen: list[Positions]) -> list[_Target]:
        """Count passages in all text, given by where they start in a corpus; leave out those without a window."""
        if not chosen:
            return []
        # The windows that every occurrence has, and how often each is in the index.
        passages = [corpus.chooser.window(int(starts[0])) for starts in chosen]
        batch = make_batch([_text(self.tokenizer, ids) for ids in passages])
        words, keys = self.index.windows(batch, inner=True)
        counts, places = find_windows(self.index, keys[:, 0], _COPIES)
        whole = {piece.number for piece in corpus.pieces if piece.is_whole}
        occurrences: dict[int, list[tuple[Piece, int]]] = {}
        elsewhere: dict[int, int] = {}
        for number, starts in enumerate(chosen):
            own = np.flatnonzero(batch.of_text[words] == number)
            if not len(own):
                continue
            of_pieces = corpus.pieces_of(starts)
            offsets = (starts - corpus.first_tokens[of_pieces]).tolist()
            occurrences[number] = [(corpus.pieces[at], start) for at, start in zip(of_pieces, offsets, strict=True)]
            # That is all if the corpus holds the whole documents of the rarest window. The index has no window if the
            # tokenizer changes text before it splits it.
            if len(own := own[counts[own] > 0]):
                rarest = own[np.argmin(counts[own])]
                if counts[rarest] > _COPIES or not whole.issuperset(document_numbers(places[rarest]).tolist()):
                    elsewhere[number] = int(rarest)
        files = {number: places[0][0].file for number, places in occurrences.items()}
        if elsewhere:
            # The second pass: the documents of all windows that each occurrence of a passage must have.
            _, places = find_windows(self.index, keys[[*elsewhere.values()], 0])
            self._num_readings += 1
            occurrences |= {number: [] for number in elsewhere}
            read = read_pieces(self.index, np.concatenate(places), f"copies-{self._num_readings}", self.runner)
            for piece, ids in _encoded(self.tokenizer, read):
                content, place = ids.tobytes(), piece._replace(text="")
                for number in elsewhere:
                    passage = passages[number]
                    starts = without_overlaps(_find(content, passage.tobytes(), ids.itemsize), len(passage))
                    occurrences[number] += [(place, start) for start in starts.tolist()]
        return [
            _Target(
                ids=passages[number],
                start=min(map(corpus.chooser.start_of, chosen[number])),
                num_copies=len(found),
                positions=self._positions(found),
                file=files[number],
            )
            for number, found in occurrences.items()
        ]

    def _positions(self, occurrences: list[tuple[Piece, int]]) -> list[list[int]]:
        if len(occurrences) > _MOST_POSITIONS or not all(piece.is_whole for piece, _ in occurrences):
            return []
        return [[self.found.first_documents[piece.file] + piece.document, start] for piece, start in occurrences]

    def near_targets(self) -> list[_Target]:
        """Choose a passage of each group of near copies, the largest groups first, then unique ones."""
        spec, index = self.spec, self.index
        # Candidates: the first window of each stretch, the largest groups first, then windows without near copies.
        groups = first_of_stretches(self.found.groups[self.found.groups["count"] >= spec.min_repeats], index.num_bytes)
        self.stretch_repeats = tuple(groups["count"].tolist())
        order = sorted(self.rng.permutation(len(groups)), key=lambda number: -int(groups["count"][number]))
        groups = groups[order[: _CANDIDATES * spec.num_targets + _MORE_CANDIDATES]]
        places = np.concatenate([groups["place"], self._drawn(unique=True)])
        corpus = _Corpus(self, read_pieces(index, places, "documents", self.runner))
        chooser = corpus.chooser
        targets: list[_Target] = []
        taken: set[bytes] = set()
        for number, place in enumerate(places):
            if len(targets) == spec.num_targets:
                break
            start = corpus.token_at(place)
            piece = corpus.pieces[int(corpus.pieces_of(np.array([start]))[0])]
            is_group = number < len(groups)
            if start >= len(chooser.fits) or not chooser.fits[start] or not (is_group or self._is_unique(piece, place)):
                continue
            # Near copies of a chosen passage are known by a run of tokens in common.
            ids = chooser.window(start)
            size = min(_SAME_TOKENS, len(ids))
            grams = {ids[first : first + size].tobytes() for first in range(len(ids) - size + 1)}
            if not is_varied(ids):
                self.num_repetitive += 1
            elif not grams & taken:
                taken |= grams
                self.num_duplicates += is_group
                num_copies = int(groups["count"][number]) if is_group else 1
                targets.append(_Target(ids, chooser.start_of(start), num_copies, [], piece.file))
        return targets

    def _is_unique(self, piece: Piece, place: np.void) -> bool:
        """Return whether no window of another document is a near copy of a window."""
        batch = make_batch([piece.text.encode("utf-8", "surrogatepass")], ignore_case=True)
        keys = self.index.keys(batch, np.searchsorted(batch.words, [int(place["offset"]) - piece.start]))
        _, places = find_windows(self.index, keys[0], _COPIES)
        return len(np.unique(document_numbers(np.concatenate(places)))) == 1


def _find(content: bytes, part: bytes, size: int) -> Positions:
    """Return where a part occurs, in items of ``size`` bytes, int64 ``[num_occurrences]``."""
    starts = []
    start = content.find(part)
    while start >= 0:
        if start % size == 0:
            starts.append(start // size)
        start = content.find(part, start + 1)
    return np.array(starts, np.int64)


class _Controls(NamedTuple):
    """Passages that may be controls.

    A control shares at most ``num_shared_bytes`` at a time with the training text, or the documents that share more are
    tokenized and compared. That suffices if each :data:`SHARED_TOKENS` of it hold such a stretch: ``is_known``.
    """

    windows: list[TokenArray]
    texts: list[bytes]
    is_known: list[bool]
    num_shared_bytes: int

    @staticmethod
    def draw(tokenizer: TextTokenizer, spec: ProbeSpec, rng: np.random.Generator) -> "_Controls":
        """Draw more passages than are needed, without overlap."""
        if not spec.num_controls:
            return _Controls([], [], [], 1)
        if spec.controls_source is None:
            documents = embedded_documents("validation") + embedded_documents("train")
        else:
            documents = [*load_documents(spec.controls_source, column=spec.column, sample_by=spec.sample_by)]
        number = _CANDIDATES * spec.num_controls + _MORE_CANDIDATES
        tokens: list[TokenArray] = []
        num_possible = 0
        for ids in encode_texts(tokenizer, (documents[at] for at in rng.permutation(len(documents)))):
            tokens.append(ids)
            num_possible += len(ids) // spec.block_size
            if num_possible > _CANDIDATES * number:
                break
        # Distinct passages at random places of these documents.
        chooser = WindowChooser(tokenizer, join_documents(tokens), spec.block_size, rng)
        drawn: dict[bytes, TokenArray] = {}
        for start in chooser.random(chooser.fits):
            chooser.take(np.array([start]))
            drawn.setdefault(chooser.window(start).tobytes(), chooser.window(start))
            if len(drawn) == number:
                break
        windows = [*drawn.values()]
        # Half of the bytes that SHARED_TOKENS have in nearly all passages.
        texts = [_text(tokenizer, ids) for ids in windows]
        num_shared = min(SHARED_TOKENS, spec.block_size)
        sizes = [len(text) * num_shared / spec.block_size for text in texts] or [1.0]
        num_bytes = max(1, round(float(np.quantile(sizes, 0.05)) * _SHARE_OF_SHARED))
        # A stretch starts at a word, so that the tokens have to hold it and the longest gap between words.
        num_bytes_of = cache(lambda token: max(1, len(_text(tokenizer, np.array([token])))))
        is_known = []
        for ids, text in zip(windows, texts, strict=True):
            ends = np.cumsum([0, *map(num_bytes_of, ids.tolist())])
            gaps = np.diff(make_batch([text]).words, prepend=0)
            is_known.append(bool((ends[num_shared:] - ends[:-num_shared]).min() >= num_bytes + gaps.max(initial=0)))
        return _Controls(windows, texts, is_known, num_bytes)

    def stretches(self, index: WindowIndex) -> list[Hashes]:
        """Return the hashes of the stretches of each passage."""
        batch = make_batch(self.texts, ignore_case=index.near)
        words, hashes = index.stretches(batch)
        return [hashes[batch.of_text[words] == number] for number in range(len(self.texts))]

    def accepted(self, search: _Search) -> tuple[list[TokenArray], int]:
        """Return the controls, and how many were refused because they share text with the training text."""
        spec, shared = search.spec, search.found.shared
        num_shared = min(SHARED_TOKENS, spec.block_size)
        hits = [[key for key in own.tolist() if key in shared] for own in self.stretches(search.index)]
        known = [number for number, is_known in enumerate(self.is_known) if is_known]
        accepted = {number for number in known if not hits[number]}
        # A stretch of bytes in common is not yet SHARED_TOKENS in common: the tokens decide. Stretches that occur in
        # many places are refused without a look.
        possible = [
            number for number in known if hits[number] and all(len(shared[key]) <= MOST_SHARED for key in hits[number])
        ]
        if len(accepted) < spec.num_controls and possible:
            places = np.array([place for number in possible for key in hits[number] for place in shared[key]], PLACE)
            tokens = _Corpus(search, read_pieces(search.index, places, "shared", search.runner)).token_ids
            unseen = join_documents(self.windows[number] for number in possible)
            is_shared = windows_with_shared_stretch(unseen, tokens, spec.block_size, num_shared)
            accepted |= {*compress(possible, ~is_shared[:: spec.block_size + 1])}
        controls = [self.windows[number] for number in sorted(accepted)][: spec.num_controls]
        num_refused = len(self.windows) - len(accepted)
        remark = f" {num_refused} more have {num_shared} tokens in a row of the training text." if num_refused else ""
        _check_enough(len(controls), "num_controls", spec, spec.controls_source or EMBEDDED, remark)
        return controls, num_refused


def _check_enough(found: int, setting: str, spec: ProbeSpec, source: str, remark: str = "") -> None:
    """Raise a ValueError if ``source`` has fewer passages than ``num_targets`` or ``num_controls`` says."""
    needed = getattr(spec, setting)
    if found < needed and not (spec.allow_fewer and (found or setting == "num_controls")):
        raise ValueError(
            f"found {found} passages of {spec.block_size} tokens without overlap in {source}, but {setting} is "
            f"{needed}.{remark} Lower {setting} or block_size, or name more text. If each {spec.sample_by} of a .txt "
            "file is too short for a passage, choose another sample_by"
        )
