"""Probe files from a user's own training text, so that a model trained elsewhere can be audited.

Windows of text that occur more than once lead to candidates (:mod:`tfidf_tune.corpus.window_index`). Their documents
are tokenized, and passages are chosen and counted on token ids. A passage holds a window that each of its occurrences
has, because the window was chosen by the text of the passage alone: so the index knows the documents of all
occurrences.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import chain, compress, islice, tee
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from tfidf_tune._checks import check_at_least, require_choice
from tfidf_tune._files import file_sha256
from tfidf_tune._tokenizer import TextTokenizer, TokenArray, decode_whole, encode_texts, tokenizer_identity
from tfidf_tune.corpus import sources
from tfidf_tune.corpus import window_index as windows
from tfidf_tune.corpus.jobs import TaskRunner
from tfidf_tune.corpus.sources import EMBEDDED, SampleBy, embedded_documents, load_documents
from tfidf_tune.corpus.window_index import PLACE, Piece, Records
from tfidf_tune.passages import stretches as repeated
from tfidf_tune.passages.probe_file import Passage, Window, make_passages, read_probe_file
from tfidf_tune.passages.stretches import CUT, SHARED_TOKENS, Positions, Start, WindowChooser, join_documents

PASSAGES = ("duplicates", "near-duplicates", "random")
_FORMAT = 3  # of the steps on disk; an interrupted search of another format is not continued

_SAMPLE_FILES, _SAMPLE_DOCUMENTS, _SAMPLE_CHARACTERS = 10, 100, 10_000
_LEAST_SAMPLE = 16  # tokens of a document whose bytes in a token count
_SHARE_OF_PASSAGE = 0.4  # of a window, so that a passage of fewer bytes than most holds a window, too
_LEAST_WINDOW = 3  # bytes: of a character of Han
_LONGEST_WORD = 64  # bytes
_BOTH_ENDS = 6  # bytes of the incomplete characters at the ends of a passage, which its text does not have
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
        held_out (str | None): a probe file, whose controls the model was not trained on: no target overlaps a place of
            theirs in ``sources``. Default: None, for audits that of the run that wrote the model; "" for none
        without_eos (bool): no passage has EOS inside, where a server would end its answer. Default: False

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
    held_out: str | None = None
    without_eos: bool = False

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
    controls' source refused because they are partly in the training text or cannot be compared with it, and targets by
    where they start. ``num_tokens`` is estimated from a sample if ``is_estimate``. ``unsearched_share`` is the share of
    the passages of a sample that hold no window of the index: copies of such passages are not found.
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
    unsearched_share: float = 0.0


def search_arguments(tokenizer: TextTokenizer, spec: ProbeSpec) -> dict[str, Any]:
    """Return what the passages follow from, JSON data: the specification, hashes of texts and controls, the tokenizer.

    Data sets of the hub are known by their names only.
    """
    of_hub = [source for source in spec.sources if not sources.is_local(source)]
    texts = sources.content_hashes([source for source in spec.sources if source not in of_hub])
    texts |= {source: sources.source_fingerprint(source, column=spec.column) for source in of_hub}
    arguments = {**asdict(spec), "texts": texts, "tokenizer": tokenizer_identity(tokenizer), "format": _FORMAT}
    if spec.num_controls:
        unseen = spec.controls_source or EMBEDDED
        arguments["controls"] = sources.source_fingerprint(unseen, column=spec.column, sample_by=spec.sample_by)
    if spec.held_out:
        number, sha256 = len(_held_out(spec)), file_sha256(Path(spec.held_out).expanduser())
        arguments["held_out"] = {"file": spec.held_out, "sha256": sha256, "passages": number}
    return arguments


def _held_out(spec: ProbeSpec) -> list[Passage]:
    return [one for one in read_probe_file(spec.held_out) if one.kind == "control"] if spec.held_out else []


def make_probe(
    tokenizer: TextTokenizer, spec: ProbeSpec, work: Path | None = None, runner: TaskRunner | None = None
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
        work (Path | None): folder of the steps. Steps that are finished there, of a call with the same
            :func:`search_arguments`, are not repeated. Default: None, a temporary folder
        runner (TaskRunner | None): where the tasks run, one for each file. Default: None, this process

    Returns:
        MadeProbe: the passages. ``source`` is the file of the first occurrence. ``positions`` of a target are
            ``[document, offset in the document]`` of its occurrences, in tokens, with documents counted over all
            sources, without the empty ones; they are left empty for near-duplicates, if one is in a document of more
            than 32 KiB, and if there are more than 10,000.

    Raises:
        FileNotFoundError: If a source looks like a path and does not exist.
        ValueError: If a source cannot be read, see :func:`load_documents`, or has too few passages.
        ChildProcessError: If a task on another machine failed.
    """
    if work is None:
        with TemporaryDirectory() as folder:
            return make_probe(tokenizer, spec, Path(folder) / "work", runner)
    # Each file is a task, any other source too.
    local = {source: sources.local_files(source) for source in spec.sources if sources.is_local(source)}
    units = [unit for source in spec.sources for unit in local.get(source, [source])]
    return _Search(tokenizer, spec, units, work, runner or TaskRunner()).made()


class _Target(NamedTuple):
    window: Window
    start: Start
    num_copies: int


class _Corpus:
    """The tokens of the documents of windows, see :meth:`_Search.read`, and the choice of passages in them."""

    def __init__(self, search: "_Search", places: Records, name: str) -> None:
        both = [*search.read(places, name)]
        self.pieces = [piece for piece, _ in both]
        self.token_ids = join_documents(ids for _, ids in both)
        # Held-out text, of a completion about its answer, is cut out where any half of it is found: its ends may be
        # missing here, or tokenized in another way.
        texts = [one.text[len(one.text) * (one.num_prompt or 0) // len(one.token_ids) :] for one in search.held_out]
        for ids in encode_texts(search.tokenizer, texts):
            size = max(_SAME_TOKENS, len(ids) // 2)
            for first in (0, len(ids) // 4, len(ids) - size) if len(ids) >= _SAME_TOKENS else ():
                for at in _occurrences(ids[first : first + size], self.token_ids):
                    self.token_ids[max(0, at - first) : at - first + len(ids)] = CUT
        search.cut_at_eos(self.token_ids)
        self.chooser = WindowChooser(search.tokenizer, self.token_ids, search.spec.block_size, search.rng)
        self._first_tokens = np.cumsum([0, *(len(ids) + 1 for _, ids in both)])[:-1]
        self._search = search

    def located(self, tokens: Positions) -> list[tuple[Piece, int]]:
        """Return the piece of each token, and the tokens before it in the piece."""
        numbers = np.searchsorted(self._first_tokens, tokens, side="right") - 1
        offsets = tokens - self._first_tokens[numbers]
        return [(self.pieces[number], offset) for number, offset in zip(numbers, offsets.tolist(), strict=True)]

    def token_at(self, place: np.void) -> int:
        """Return the token that holds the first byte of a window."""
        number = bisect_right(self.pieces, tuple(place.tolist()), key=lambda piece: piece[:3]) - 1
        piece = self.pieces[number]
        # Bytes are counted in decoded text, by a binary search for the token whose text ends behind the first byte.
        (ids,) = encode_texts(self._search.tokenizer, [piece.text])
        first = int(place["offset"]) - piece.start
        token = bisect_right(range(len(ids) + 1), first, key=lambda end: len(self._search.text(ids[:end]))) - 1
        return int(self._first_tokens[number]) + token


class _Search:
    """The choice of the passages of files and other sources, in steps in ``work``."""

    def __init__(
        self, tokenizer: TextTokenizer, spec: ProbeSpec, units: list[Path | str], work: Path, runner: TaskRunner
    ) -> None:
        self.tokenizer, self.spec, self._units, self._runner = tokenizer, spec, units, runner
        self.rng = np.random.default_rng(spec.seed)
        self.held_out = _held_out(spec)
        self._near = spec.passages == "near-duplicates"
        self._num_candidates = _CANDIDATES * spec.num_targets + _MORE_CANDIDATES
        self._num_repetitive = self._num_readings = 0
        self._stretch_repeats: tuple[int, ...] = ()
        # The length of a window in bytes follows from a sample; the stretches of controls are searched in one pass.
        files = tuple(str(unit.resolve()) if isinstance(unit, Path) else unit for unit in units)
        sources.require_distinct(files)
        sampled, self._num_sampled, self._bytes_in_token, least = self._sample(files)
        num_bytes = max(_LEAST_WINDOW, round(spec.block_size * least * _SHARE_OF_PASSAGE))
        # A passage holds a window if as many words start in it, before its last num_bytes, as there are for one window:
        # also if all of them are the longest.
        room = round(spec.block_size * least) - num_bytes - _BOTH_ENDS
        longest_word = min(_LONGEST_WORD, max(1, room // windows.window_spacing(num_bytes)))
        self._unseen, self._num_unseen, num_shared = self._draw_controls(longest_word)
        self._index = windows.WindowIndex(
            files,
            spec.column,
            spec.sample_by,
            work,
            num_bytes=round(spec.block_size * least) if self._near else num_bytes,
            longest_word=longest_word,
            near=self._near,
            num_shared_bytes=num_shared,
        )
        self._unsearched_share = self._share_without_window(sampled)
        batch = self._index.batch([self.text(ids) for ids in self._unseen])
        words, known = self._index.stretches(batch)
        self._stretches = [known[batch.of_text[words] == number].tolist() for number in range(len(self._unseen))]
        self._counts, self._first_documents, groups, self._shared = windows.build(self._index, known, runner)
        self._groups = groups[groups["count"] >= spec.min_repeats]

    def made(self) -> MadeProbe:
        """Choose targets and controls."""
        spec, counts = self.spec, self._counts
        targets = self._near_targets() if self._near else self._targets()
        num_tokens = round(counts["bytes"] / self._bytes_in_token)
        text = f"{', '.join(spec.sources)} ({counts['documents']} documents of {num_tokens} tokens in all)"
        remark = ""
        if self._num_repetitive:
            remark = (
                f" {self._num_repetitive} more repeat a few tokens, fewer than one in eight of which are different."
            )
        self._check_enough(len(targets), "num_targets", text, remark)
        accepted, num_refused = self._controls()
        chosen = [target.window for target in targets]
        chosen += [(ids, [], spec.controls_source or EMBEDDED, {}) for ids in accepted]
        return MadeProbe(
            passages=tuple(make_passages(self.tokenizer, chosen, len(targets))),
            num_documents=counts["documents"],
            num_tokens=num_tokens,
            stretch_repeats=self._stretch_repeats,
            num_duplicates=0 if spec.passages == "random" else sum(target.num_copies > 1 for target in targets),
            num_repetitive=self._num_repetitive,
            num_refused=num_refused,
            starts=Counter(target.start for target in targets),
            is_estimate=self._num_sampled < counts["bytes"],
            unsearched_share=self._unsearched_share,
        )

    def text(self, ids: TokenArray) -> bytes:
        """Decode tokens; an incomplete character at an end is not a part of the text."""
        return decode_whole(self.tokenizer, ids.tolist()).strip("\ufffd").encode("utf-8", "surrogatepass")

    def read(self, places: Records, name: str) -> Iterator[tuple[Piece, TokenArray]]:
        """Tokenize the documents of windows; :data:`CUT` replaces tokens of a piece that its document may not have."""
        pieces, again = tee(windows.read_pieces(self._index, places, name, self._runner))
        for piece, ids in zip(pieces, encode_texts(self.tokenizer, (piece.text for piece in again)), strict=True):
            ids[: _CUT_TOKENS if piece.start else 0] = CUT
            ids[len(ids) if piece.is_end else -_CUT_TOKENS :] = CUT
            yield piece, ids

    def cut_at_eos(self, token_ids: TokenArray) -> None:
        """Put :data:`CUT` in the place of EOS, if no passage shall have it inside."""
        if self.spec.without_eos:
            token_ids[token_ids == self.tokenizer.eos_id] = CUT

    def _sample(self, files: tuple[str, ...]) -> tuple[list[TokenArray], int, float, float]:
        """Return a sample of documents, its bytes, bytes in a token on average, and of those with the shortest tokens.

        Of long documents only the start is in the sample.
        """
        # The first documents of files that are spread over all.
        chosen = np.unique(np.linspace(0, len(files) - 1, _SAMPLE_FILES).round().astype(int)).tolist()
        sampled: list[TokenArray] = []
        sizes: list[int] = []
        for file in (files[rank] for rank in chosen):
            documents = load_documents(file, column=self.spec.column, sample_by=self.spec.sample_by)
            texts = [text[:_SAMPLE_CHARACTERS] for text in islice(documents, _SAMPLE_DOCUMENTS)]
            documents_of_file = [*encode_texts(self.tokenizer, texts)]
            sources.warn_of_short_documents(file, self.spec.sample_by, [len(ids) for ids in documents_of_file])
            sampled += documents_of_file
            sizes += [len(text.encode("utf-8", "surrogatepass")) for text in texts]
        mean = max(1.0, sum(sizes) / max(1, sum(map(len, sampled))))
        shares = [size / len(ids) for size, ids in zip(sizes, sampled, strict=True) if len(ids) >= _LEAST_SAMPLE]
        return sampled, sum(sizes), mean, float(np.quantile(shares or [mean], 0.05))

    def _share_without_window(self, documents: list[TokenArray]) -> float:
        """Return the share of the passages of documents whose copies the index cannot find: they hold no window.

        Their words are too few, or their tokens too short. For near copies, whole documents are counted. Passages of a
        few repeated tokens, which are not chosen, do not count.
        """
        size = self.spec.block_size
        pieces = [ids for ids in documents if len(ids) >= size]
        if not self._near:
            pieces = [ids[first : first + size] for ids in pieces for first in range(0, len(ids) - size + 1, size)]
        texts = [self.text(ids) for ids in pieces if repeated.is_varied(ids[:size])]
        if not texts:
            return 0.0
        batch = self._index.batch(texts)
        words, _ = self._index.windows(batch, inner=not self._near)
        return 1 - len(np.unique(batch.of_text[words])) / len(texts)

    def _targets(self) -> list[_Target]:
        """Choose the most frequent duplicates, then random passages."""
        spec = self.spec
        is_random = spec.passages == "random"
        drawn = windows.draw_windows(self._index, self._num_candidates, self.rng, unique=not is_random)
        targets: list[_Target] = []
        # Few documents at first; more if they have too few passages and there are more groups.
        for most in _DOCUMENTS:
            num_groups, places, weights = self._candidates(self._groups, 0 if is_random else most)
            corpus = _Corpus(self, np.concatenate([places, drawn]), f"documents-{most}")
            if not corpus.chooser.fits.any():  # the search needs memory in proportion to the length of a passage
                return []
            names = repeated.name_repeated_windows(corpus.token_ids, spec.block_size)
            if not is_random:
                targets = self._duplicates(corpus, names, weights)
            if is_random or num_groups == len(self._groups) or len(targets) == spec.num_targets:
                break
        missing, possible = spec.num_targets - len(targets), self._random(corpus, names, drawn)
        while len(targets) < spec.num_targets and (chosen := [*islice(possible, missing)]):
            targets += [target for target in self._counted(corpus, chosen) if is_random or target.num_copies == 1]
        self._num_repetitive = corpus.chooser.num_repetitive
        return targets[: spec.num_targets]

    def _candidates(self, groups: Records, most: int) -> tuple[int, Records, dict[tuple[int, int], float]]:
        """Choose the largest groups whose windows are in so many documents.

        Returns their number, places of some windows of each, and for how many windows each document stands, at most.
        """
        counts, places = windows.find_windows(self._index, groups["key"][: 8 * most], _COPIES)
        num_groups = 0
        weights: dict[tuple[int, int], float] = {}
        for count, records in zip(counts.tolist(), places, strict=False):
            documents = {*records[windows.DOCUMENT].tolist()}
            if num_groups and len(weights) + len(documents - weights.keys()) > most:
                break
            # Of a group with more windows than were read, a document stands for several.
            weights |= {document: max(weights.get(document, 1.0), count / len(records)) for document in documents}
            num_groups += 1
        return num_groups, np.concatenate([np.zeros(0, PLACE), *places[:num_groups]]), weights

    def _duplicates(self, corpus: _Corpus, names: Positions, weights: dict[tuple[int, int], float]) -> list[_Target]:
        """Choose the passages that occur most often."""
        spec = self.spec
        # The order is that of the expected counts; a few more than needed are counted in all text.
        stretches = repeated.duplicated_stretches(names, spec.block_size)
        places = [corpus.located(starts) for starts, _ in stretches]
        expected = [sum(weights.get(piece[:2], 1.0) for piece, _ in located) for located in places]
        self._stretch_repeats = tuple(round(number) for number in expected if number >= spec.min_repeats)
        order = sorted(self.rng.permutation(len(stretches)), key=lambda number: -expected[number])
        possible = corpus.chooser.duplicates(stretches[number] for number in order)
        counted = self._counted(corpus, [*islice(possible, 2 * spec.num_targets + 20)])
        targets = [target for target in counted if target.num_copies >= spec.min_repeats]
        return sorted(targets, key=lambda target: -target.num_copies)[: spec.num_targets]

    def _random(self, corpus: _Corpus, names: Positions, drawn: Records) -> Iterator[Positions]:
        """Choose passages where windows were drawn, then anywhere in their documents; with duplicates, unique ones."""
        chooser = corpus.chooser
        allowed = chooser.fits & ((names[: len(chooser.fits)] == 0) | (self.spec.passages == "random"))
        possible = np.flatnonzero(allowed)
        if not len(possible):
            return
        # Where a window was drawn, the last possible start before it; then every possible start in random order.
        tokens = map(corpus.token_at, drawn)
        near = (int(possible[max(0, int(np.searchsorted(possible, token, side="right")) - 1)]) for token in tokens)
        for start in chooser.random(allowed, chain(near, self.rng.permutation(possible).tolist())):
            same = np.flatnonzero(names == names[start]) if names[start] else np.array([start])
            # An occurrence may overlap a passage that was chosen elsewhere; of occurrences that overlap, all are taken.
            is_free = all(map(chooser.is_free, same.tolist()))
            chooser.take(*same)
            if is_free:
                yield windows.without_overlaps(same, self.spec.block_size)

    def _counted(self, corpus: _Corpus, chosen: list[Positions]) -> list[_Target]:
        """Count passages in all text, given by where they start in a corpus; leave out those without a window."""
        # The windows that every occurrence has, and how often each is in the index.
        passages = [corpus.chooser.window(int(starts[0])) for starts in chosen]
        batch = self._index.batch([self.text(ids) for ids in passages])
        words, keys = self._index.windows(batch, inner=True)
        counts, places = windows.find_windows(self._index, keys[:, 0], _COPIES)
        whole = {piece[:2] for piece in corpus.pieces if piece.is_whole}
        occurrences: dict[int, list[tuple[Piece, int]]] = {}
        elsewhere: dict[int, int] = {}
        for number, starts in enumerate(chosen):
            stretches = np.flatnonzero(batch.of_text[words] == number)
            if not len(stretches):
                continue
            # That is all if the corpus holds the whole documents of the rarest window. The index has no window if the
            # tokenizer changes text before it splits it.
            occurrences[number] = corpus.located(starts)
            if len(stretches := stretches[counts[stretches] > 0]):
                rarest = stretches[np.argmin(counts[stretches])]
                if counts[rarest] > _COPIES or not whole.issuperset(places[rarest][windows.DOCUMENT].tolist()):
                    elsewhere[number] = int(rarest)
        files = {number: str(self._units[located[0][0].file]) for number, located in occurrences.items()}
        if elsewhere:
            # The second pass: the documents of all windows that each occurrence of a passage must have.
            _, places = windows.find_windows(self._index, keys[[*elsewhere.values()], 0])
            self._num_readings += 1
            occurrences |= {number: [] for number in elsewhere}
            for piece, ids in self.read(np.concatenate(places), f"copies-{self._num_readings}"):
                place = piece._replace(text="")
                for number in elsewhere:
                    occurrences[number] += [(place, start) for start in _occurrences(passages[number], ids)]
        targets = []
        for number, located in occurrences.items():
            positions = []
            if len(located) <= _MOST_POSITIONS and all(piece.is_whole for piece, _ in located):
                first = self._first_documents
                positions = [[first[piece.file] + piece.document, start] for piece, start in located]
            start = min(map(corpus.chooser.start_of, chosen[number]))
            window = (passages[number], positions, files[number], {"num_injections": len(located)})
            targets.append(_Target(window, start, len(located)))
        return targets

    def _near_targets(self) -> list[_Target]:
        """Choose a passage of each group of near copies, the largest groups first, then unique ones."""
        spec = self.spec
        # Candidates: the first window of each stretch, the largest groups first, then windows without near copies.
        groups = windows.first_of_stretches(self._groups, self._index.num_bytes)
        counts = groups["count"].tolist()
        self._stretch_repeats = tuple(counts)
        order = sorted(self.rng.permutation(len(groups)), key=lambda number: -counts[number])
        groups = groups[order[: self._num_candidates]]
        drawn = windows.draw_windows(self._index, self._num_candidates, self.rng, unique=True)
        places = np.concatenate([groups["place"], drawn])
        corpus = _Corpus(self, places, "documents")
        chooser = corpus.chooser
        targets: list[_Target] = []
        taken: set[bytes] = set()
        for number, place in enumerate(places):
            if len(targets) == spec.num_targets:
                break
            start = corpus.token_at(place)
            piece, _ = corpus.located(np.array([start]))[0]
            is_group = number < len(groups)
            if start >= len(chooser.fits) or not chooser.fits[start] or not (is_group or self._is_unique(piece, place)):
                continue
            # Near copies of a chosen passage are known by a run of tokens in common.
            ids = chooser.window(start)
            size = min(_SAME_TOKENS, len(ids))
            grams = {ids[first : first + size].tobytes() for first in range(len(ids) - size + 1)}
            if chooser.is_varied(start) and not grams & taken:
                taken |= grams
                # The index has counted what the positions do not tell.
                num_copies = int(groups["count"][number]) if is_group else 1
                window: Window = (ids, [], str(self._units[piece.file]), {"num_injections": num_copies})
                targets.append(_Target(window, chooser.start_of(start), num_copies))
        self._num_repetitive = chooser.num_repetitive
        return targets

    def _is_unique(self, piece: Piece, place: np.void) -> bool:
        """Return whether no window of another document is a near copy of a window."""
        batch = self._index.batch([piece.text.encode("utf-8", "surrogatepass")])
        keys = self._index.keys(batch, np.searchsorted(batch.words, [int(place["offset"]) - piece.start]))
        _, places = windows.find_windows(self._index, keys[0], _COPIES)
        return len(np.unique(np.concatenate(places)[windows.DOCUMENT])) == 1

    def _draw_controls(self, longest_word: int) -> tuple[list[TokenArray], int, int]:
        """Draw more passages than are needed, without overlap.

        A control shares no stretch of so many bytes with the training text, or the documents that share it are compared
        by tokens. That suffices if each :data:`SHARED_TOKENS` of it hold such a stretch. Returns passages of which that
        is true, the number of all that were drawn, and the bytes.
        """
        spec, tokenizer = self.spec, self.tokenizer
        if not spec.num_controls:
            return [], 0, 1
        if spec.controls_source is None:
            documents = embedded_documents("validation") + embedded_documents("train")
        else:
            documents = [*load_documents(spec.controls_source, column=spec.column, sample_by=spec.sample_by)]
        number = _CANDIDATES * spec.num_controls + _MORE_CANDIDATES
        tokens: list[TokenArray] = []
        num_possible = 0
        for ids in encode_texts(tokenizer, (documents[at] for at in self.rng.permutation(len(documents)))):
            tokens.append(ids)
            num_possible += len(ids) // spec.block_size
            if num_possible > _CANDIDATES * number:
                break
        # Distinct passages at random places of these documents.
        unseen = join_documents(tokens)
        self.cut_at_eos(unseen)
        chooser = WindowChooser(tokenizer, unseen, spec.block_size, self.rng)
        drawn: dict[bytes, TokenArray] = {}
        for start in chooser.taken(chooser.random(chooser.fits)):
            drawn.setdefault(chooser.window(start).tobytes(), chooser.window(start))
            if len(drawn) == number:
                break
        # Half of the bytes that SHARED_TOKENS have in nearly all passages.
        texts = [self.text(ids) for ids in drawn.values()]
        num_shared = min(SHARED_TOKENS, spec.block_size)
        sizes = [len(text) * num_shared / spec.block_size for text in texts] or [1.0]
        num_bytes = max(1, round(float(np.quantile(sizes, 0.05)) * _SHARE_OF_SHARED))
        # A stretch starts at a word, so that the tokens have to hold it and the longest gap between words. Characters
        # that count as words where none starts for long do so from longest_word bytes after the first of the tokens on:
        # what is before these differs in the training text.
        num_bytes_of = cache(lambda token: max(1, len(self.text(np.array([token])))))
        known = []
        for ids, text in zip(drawn.values(), texts, strict=True):
            ends = np.cumsum([0, *map(num_bytes_of, ids.tolist())])
            gap = min(_longest_gap(text, len(text)), longest_word + _longest_gap(text, longest_word))
            if (ends[num_shared:] - ends[:-num_shared]).min() >= num_bytes + gap:
                known.append(ids)
        return known, len(drawn), num_bytes

    def _controls(self) -> tuple[list[TokenArray], int]:
        """Return the controls, and how many were refused because they share text with the training text."""
        spec, shared = self.spec, self._shared
        num_shared = min(SHARED_TOKENS, spec.block_size)
        hits = [[key for key in keys if key in shared] for keys in self._stretches]
        accepted = {number for number, keys in enumerate(hits) if not keys}
        # A stretch of bytes in common is not yet SHARED_TOKENS in common: the tokens decide. Stretches that occur in
        # many places are refused without a look.
        num_places = [max((len(shared[key]) for key in keys), default=0) for keys in hits]
        possible = [number for number, most in enumerate(num_places) if 0 < most <= windows.MOST_SHARED]
        if len(accepted) < spec.num_controls and possible:
            places = np.array([place for number in possible for key in hits[number] for place in shared[key]], PLACE)
            tokens = _Corpus(self, places, "shared").token_ids
            unseen = join_documents(self._unseen[number] for number in possible)
            is_shared = repeated.windows_with_shared_stretch(unseen, tokens, spec.block_size, num_shared)
            accepted |= {*compress(possible, ~is_shared[:: spec.block_size + 1])}
        controls = [self._unseen[number] for number in sorted(accepted)][: spec.num_controls]
        num_refused = self._num_unseen - len(accepted)
        remark = f" {num_refused} more have {num_shared} tokens in a row of the training text." if num_refused else ""
        self._check_enough(len(controls), "num_controls", spec.controls_source or EMBEDDED, remark)
        return controls, num_refused

    def _check_enough(self, number: int, setting: str, source: str, remark: str = "") -> None:
        """Raise a ValueError if ``source`` has fewer passages than ``num_targets`` or ``num_controls`` says."""
        spec, needed = self.spec, getattr(self.spec, setting)
        if number < needed and not (spec.allow_fewer and (number or setting == "num_controls")):
            raise ValueError(
                f"found {number} passages of {spec.block_size} tokens without overlap in {source}, but {setting} is "
                f"{needed}.{remark} Lower {setting} or block_size, or name more text. If each {spec.sample_by} of a "
                ".txt file is too short for a passage, choose another sample_by"
            )


def _longest_gap(text: bytes, longest_word: int) -> int:
    """Return the most bytes in a row of a text in which no word starts, see :func:`make_batch`."""
    words = windows.make_batch([text], longest_word=longest_word).words
    return int(np.diff(words, prepend=0, append=len(text)).max())


def _occurrences(passage: TokenArray, ids: TokenArray) -> Iterator[int]:
    """Yield where a passage occurs in ids, from the left and without overlap."""
    content, part, size = ids.tobytes(), passage.tobytes(), ids.itemsize
    at = content.find(part)
    while at >= 0:
        if at % size == 0:
            yield at // size
        at = content.find(part, at + (1 if at % size else len(part)))
