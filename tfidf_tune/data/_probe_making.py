"""Probe files from a user's own training text, so that a model trained elsewhere can be audited."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice, takewhile
from typing import NamedTuple

import numpy as np

from tfidf_tune._checks import check_at_least, require_choice
from tfidf_tune.data._duplicates import (
    SEPARATOR,
    DuplicatedStretch,
    Mask,
    Positions,
    duplicated_stretches,
    join_documents,
    name_repeated_windows,
    none_within,
    windows_with_shared_stretch,
    without_overlaps,
)
from tfidf_tune.data._embedded import embedded_documents
from tfidf_tune.data._passages import Passage, make_passages
from tfidf_tune.data._sources import EMBEDDED, SampleBy, load_documents, warn_of_short_documents
from tfidf_tune.data._tokenizer import TextTokenizer, TokenArray, encode_texts

SHARED_TOKENS = 50
"""A control has fewer consecutive tokens than this in common with the training text."""

PASSAGES = ("duplicates", "near-duplicates", "random")

# Every model continues a line of dashes or a table of zeros, even if it was not trained on it.
_LEAST_DIFFERENT = 1 / 8
_LINE_ENDS = ("\n", "\r")


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
            same with copies that differ in some words, by :func:`make_probe_on_disk` only; "random" for random ones
            only. Default: "duplicates"
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
        if len(set(self.sources)) < len(self.sources):
            raise ValueError(f"a source is given twice, so that all of it would be duplicated: {list(self.sources)}")
        require_choice("passages", self.passages, PASSAGES)
        check_at_least(0, num_controls=self.num_controls, seed=self.seed)
        check_at_least(1, num_targets=self.num_targets)
        check_at_least(2, block_size=self.block_size, min_repeats=self.min_repeats)


class Start(IntEnum):
    """Where a passage starts, the best prompt first."""

    DOCUMENT = 0
    LINE = 1
    WORD = 2
    INSIDE_WORD = 3

    @property
    def phrase(self) -> str:
        """In words: "document", "inside word"."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True)
class MadeProbe:
    """The passages, targets first, and statistics of the search.

    Counts of the training text: documents, tokens, occurrences of each duplicated stretch (stretches may overlap),
    targets that are duplicates, windows left out because they repeat a few tokens, windows of the controls' source
    refused because they are partly in the training text, and targets by where they start. ``num_tokens`` is estimated
    from a sample if ``is_estimate``.
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


def make_probe(tokenizer: TextTokenizer, spec: ProbeSpec) -> MadeProbe:
    """Choose the passages of a probe file, in memory.

    A passage is ``block_size`` tokens within one document. Duplicates are found on token ids, at any offset, in
    one or several documents; each duplicated stretch gives one passage. Randomly drawn passages occur once. No two
    passages share a token, and none consists of a few repeated tokens.

    Args:
        tokenizer (TextTokenizer): the tokenizer of the model; no BOS is added.
        spec (ProbeSpec): what to choose.

    Returns:
        MadeProbe: the passages; ``positions`` of a target are ``[document, offset in the document]`` of its
            occurrences, with documents counted over all sources, without the empty ones.

    Raises:
        FileNotFoundError: If a source looks like a path and does not exist.
        ValueError: If a source cannot be read, see :func:`load_documents`, or has too few passages; if near-duplicates
            are to be found.
    """
    if spec.passages == "near-duplicates":
        raise ValueError("near-duplicates are found by the search on disk only (--search disk)")
    rng = np.random.default_rng(spec.seed)
    texts = {source: load_documents(source, column=spec.column, sample_by=spec.sample_by) for source in spec.sources}
    corpus = _Corpus.read(tokenizer, texts)
    for source, lengths in zip(spec.sources, corpus.document_lengths(), strict=True):
        warn_of_short_documents(source, spec.sample_by, lengths)
    chooser = WindowChooser(tokenizer, corpus.token_ids, spec.block_size, rng)
    targets, num_duplicates, stretch_repeats = _choose_targets(corpus, chooser, spec)
    controls, num_refused = _choose_controls(tokenizer, corpus, rng, spec) if spec.num_controls else ([], 0)
    found = [(chooser.window(starts[0]), [*map(corpus.place, starts)], corpus.source(starts[0])) for starts in targets]
    unseen: list[tuple[TokenArray, list[list[int]], str]] = [
        (window, [], spec.controls_source or EMBEDDED) for window in controls
    ]
    passages = make_passages(tokenizer, "target", found) + make_passages(tokenizer, "control", unseen)
    return MadeProbe(
        passages=tuple(passages),
        num_documents=len(corpus.first_tokens),
        num_tokens=len(corpus.token_ids) - len(corpus.first_tokens),
        stretch_repeats=stretch_repeats,
        num_duplicates=num_duplicates,
        num_repetitive=chooser.num_repetitive,
        num_refused=num_refused,
        starts=Counter(min(map(chooser.start_of, starts)) for starts in targets),
    )


class _Corpus(NamedTuple):
    """Documents, see :func:`join_documents`, and where they and their sources begin."""

    token_ids: TokenArray
    first_tokens: Positions
    sources: list[str]
    first_documents: list[int]

    @staticmethod
    def read(tokenizer: TextTokenizer, texts: dict[str, Iterator[str]]) -> "_Corpus":
        documents: list[TokenArray] = []
        first_documents = []
        for source_texts in texts.values():
            first_documents.append(len(documents))
            documents += encode_texts(tokenizer, source_texts)
        lengths = np.array([len(ids) + 1 for ids in documents], dtype=np.int64)
        return _Corpus(join_documents(documents), np.cumsum(lengths) - lengths, list(texts), first_documents)

    def document_lengths(self) -> list[list[int]]:
        """Return the tokens of each document of each source."""
        lengths = np.diff(self.first_tokens, append=len(self.token_ids)) - 1
        return [part.tolist() for part in np.split(lengths, self.first_documents[1:])]

    def place(self, token: int) -> list[int]:
        document = int(np.searchsorted(self.first_tokens, token, side="right")) - 1
        return [document, int(token - self.first_tokens[document])]

    def source(self, token: int) -> str:
        return self.sources[bisect_right(self.first_documents, self.place(token)[0]) - 1]


def _choose_targets(
    corpus: _Corpus, chooser: "WindowChooser", spec: ProbeSpec
) -> tuple[list[Positions], int, tuple[int, ...]]:
    """Return the occurrences of each target, the number of duplicates, and the repeats of all stretches."""
    if not chooser.fits.any():  # the search needs memory in proportion to the length of a passage
        check_enough(0, "num_targets", spec, *_described(corpus))
    names = name_repeated_windows(corpus.token_ids, spec.block_size)
    stretches = duplicated_stretches(names, spec.block_size, spec.min_repeats)
    targets: list[Positions] = []
    allowed = chooser.fits
    if spec.passages == "duplicates":
        for starts in islice(chooser.duplicates(stretches), spec.num_targets):
            chooser.take(starts)
            targets.append(starts)
        allowed = allowed & (names[: len(allowed)] == 0)
    num_duplicates = len(targets)
    for start in islice(chooser.random(allowed), spec.num_targets - num_duplicates):
        same = np.flatnonzero(names == names[start]) if names[start] else np.array([start])
        starts = without_overlaps(same, spec.block_size)
        chooser.take(starts)
        targets.append(starts)
    check_enough(len(targets), "num_targets", spec, *_described(corpus))
    return targets, num_duplicates, tuple(len(stretch.starts) for stretch in stretches)


def _choose_controls(
    tokenizer: TextTokenizer, corpus: _Corpus, rng: np.random.Generator, spec: ProbeSpec
) -> tuple[list[TokenArray], int]:
    """Return the controls, and how many windows were refused because they are partly in the corpus."""
    unseen = read_unseen(tokenizer, spec)
    num_shared = min(SHARED_TOKENS, spec.block_size)
    shared = windows_with_shared_stretch(unseen.token_ids, corpus.token_ids, spec.block_size, num_shared)
    return choose_controls(tokenizer, unseen, rng, spec, lambda start, _: bool(shared[start]))


def read_unseen(tokenizer: TextTokenizer, spec: ProbeSpec) -> _Corpus:
    """Read the text that controls are taken from."""
    if spec.controls_source is None:
        texts: Iterable[str] = embedded_documents("validation") + embedded_documents("train")
    else:
        texts = load_documents(spec.controls_source, column=spec.column, sample_by=spec.sample_by)
    return _Corpus.read(tokenizer, {spec.controls_source or EMBEDDED: iter(texts)})


def choose_controls(
    tokenizer: TextTokenizer,
    unseen: _Corpus,
    rng: np.random.Generator,
    spec: ProbeSpec,
    is_refused: Callable[[int, TokenArray], bool],
) -> tuple[list[TokenArray], int]:
    """Draw controls whose first token and ids are not refused; return also how many were."""
    chooser = WindowChooser(tokenizer, unseen.token_ids, spec.block_size, rng)
    controls: dict[bytes, TokenArray] = {}
    num_refused = 0
    for start in chooser.random(chooser.fits):
        chooser.take(np.array([start]))
        window = chooser.window(start)
        if is_refused(start, window):
            num_refused += 1
        else:
            controls.setdefault(window.tobytes(), window)
        if len(controls) == spec.num_controls:
            break
    num_shared = min(SHARED_TOKENS, spec.block_size)
    remark = f" {num_refused} more have {num_shared} tokens in a row of the training text." if num_refused else ""
    check_enough(len(controls), "num_controls", spec, *_described(unseen), remark)
    return list(controls.values()), num_refused


def _described(corpus: _Corpus) -> tuple[str, int]:
    """Describe a text for an error; return also the tokens of its longest document."""
    lengths = [length for part in corpus.document_lengths() for length in part]
    longest = max(lengths, default=0)
    return f"{', '.join(corpus.sources)} ({len(lengths)} documents, the longest of {longest} tokens)", longest


def check_enough(found: int, setting: str, spec: ProbeSpec, text: str, longest: int, remark: str = "") -> None:
    """Raise a ValueError if there are fewer passages than the setting says.

    Args:
        found (int): their number.
        setting (str): "num_targets" or "num_controls".
        spec (ProbeSpec): what was to be chosen.
        text (str): where they were searched.
        longest (int): tokens of the longest document.
        remark (str): more of the message.
    """
    needed = getattr(spec, setting)
    if found < needed and not (spec.allow_fewer and (found or setting == "num_controls")):
        if longest < spec.block_size and spec.sample_by != "document":
            remark += (
                f" Each {spec.sample_by} of a .txt file is a document: another sample_by may give longer ones, or put "
                "longer documents into the rows of a .jsonl file."
            )
        raise ValueError(
            f"found {found} passages of {spec.block_size} tokens without overlap in {text}, but {setting} is {needed}."
            f"{remark} Lower {setting} or block_size, or name more text"
        )


def is_varied(ids: TokenArray) -> bool:
    """Return whether at least one token in eight is distinct."""
    return len(np.unique(ids)) >= _LEAST_DIFFERENT * len(ids)


class WindowChooser:
    """Choose windows of ``length`` tokens of a corpus so that no two share a token, in any of their occurrences.

    A window is left out when fewer than an eighth of its tokens are distinct. ``fits`` says whether the window that
    starts at a token ends in the same document; ``num_repetitive`` counts the windows that were left out.
    """

    def __init__(self, tokenizer: TextTokenizer, corpus: TokenArray, length: int, rng: np.random.Generator) -> None:
        self.fits = none_within(corpus == SEPARATOR, length)
        self.num_repetitive = 0
        self._corpus = corpus
        self._length = length
        self._rng = rng
        self._taken = np.zeros(len(corpus), dtype=np.bool_)
        self._decode = tokenizer.decode
        self._anchor = tokenizer.encode("a", add_bos=False, add_eos=False)
        self._texts: dict[int, str] = {SEPARATOR: ""}

    def window(self, start: int) -> TokenArray:
        """Return the token ids of the window that starts at token ``start``, int32 of shape ``[length]``."""
        return self._corpus[start : start + self._length]

    def take(self, starts: Positions) -> None:
        """Exclude windows that overlap those at ``starts``, int64 of shape ``[num_occurrences]``."""
        for start in starts:
            self._taken[start : start + self._length] = True

    def duplicates(self, stretches: list[DuplicatedStretch]) -> Iterator[Positions]:
        """Choose the occurrences of a window of each stretch: the most frequent first, equals in random order.

        It starts where a document, else a line, else a word starts, at the first such place. Take a window before
        requesting the next.
        """
        for index in sorted(self._rng.permutation(len(stretches)), key=lambda index: -len(stretches[index].starts)):
            starts, num_windows = stretches[index]
            taken = np.zeros(num_windows, dtype=np.bool_)
            for start in starts:
                taken |= self._are_taken(start, num_windows)
            if offsets := np.flatnonzero(~taken).tolist():
                chosen = starts + min(offsets, key=lambda offset: self._best_start(starts, offset))
                if self._is_varied(chosen[0]):
                    yield chosen

    def random(self, allowed: Mask) -> Iterator[int]:
        """Choose the first tokens of random windows; each is moved to the start of a near word, forward if possible.

        ``allowed``, bool and no longer than ``fits``, says where a window may start. Take a window before requesting
        the next.
        """
        for drawn in self._rng.permutation(np.flatnonzero(allowed)):
            start = self._nearest_word(int(drawn), allowed)
            if self._are_taken(start, 1).any():
                continue
            if self._is_varied(start):
                yield start
            else:
                self.take(np.array([start]))  # counted once

    def start_of(self, start: int) -> Start:
        """Return whether the window at token ``start`` starts a document, a line, a word or none of these."""
        if start == 0 or self._corpus[start - 1] == SEPARATOR:
            return Start.DOCUMENT
        before, text = self._text(start - 1), self._text(start)
        if before.endswith(_LINE_ENDS) and not text.startswith(_LINE_ENDS):
            return Start.LINE
        if text.strip() and (text[0].isspace() or before[-1:].isspace()):
            return Start.WORD
        return Start.INSIDE_WORD

    def _best_start(self, starts: Positions, offset: int) -> Start:
        # Occurrences differ only in what is before the stretch.
        return min(self.start_of(start + offset) for start in (starts[:1] if offset else starts))

    def _nearest_word(self, drawn: int, allowed: Mask) -> int:
        ahead = range(drawn, min(drawn + self._length, len(allowed)))
        behind = range(drawn, max(drawn - self._length, -1), -1)
        for places in (ahead, behind):
            for start in takewhile(allowed.__getitem__, places):
                if self.start_of(start) < Start.INSIDE_WORD:
                    return start
        return drawn

    def _are_taken(self, start: int, num_windows: int) -> Mask:
        # All windows have one length, so a window that overlaps another contains its first or last token.
        last = start + self._length - 1
        return self._taken[start : start + num_windows] | self._taken[last : last + num_windows]

    def _is_varied(self, start: int) -> bool:
        varied = is_varied(self.window(start))
        self.num_repetitive += not varied
        return varied

    def _text(self, place: int) -> str:
        """Return what a token adds to a text; decoded by itself, a SentencePiece token would lose its space."""
        token_id = int(self._corpus[place])
        if token_id not in self._texts:
            anchor = self._decode(self._anchor)
            self._texts[token_id] = self._decode([*self._anchor, token_id])[len(anchor) :]
        return self._texts[token_id]
