"""Probe files from a user's own training text, so that a model trained elsewhere can be audited."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from tfidf_tune.data._duplicates import (
    Positions,
    duplicated_stretches,
    join_documents,
    name_repeated_windows,
    windows_with_shared_stretch,
    without_overlaps,
)
from tfidf_tune.data._embedded import embedded_documents
from tfidf_tune.data._encoding import (
    TextTokenizer,
    TokenArray,
    encode_texts,
    tokenizer_fingerprint,
    tokenizer_name,
)
from tfidf_tune.data._passages import Passage, passage_text
from tfidf_tune.data._sources import EMBEDDED, load_documents
from tfidf_tune.data._window_choice import Start, WindowChooser

SHARED_TOKENS = 50
"""A stretch of the training text so long is what no control may have."""


@dataclass(frozen=True)
class ProbeSpec:
    """Which passages a probe file shall have.

    Args:
        sources (tuple[str, ...]): the training text, each as :func:`load_documents` takes it.
        column (str): the column that holds the text, of the controls' source as well. Default: "text"
        controls_source (str | None): text that the model never saw. Default: None, the embedded corpus
        num_targets (int): passages of the training text. Default: 100
        num_controls (int): passages that it does not contain. Default: 100
        block_size (int): tokens in a passage. Default: 256
        passages (str): "duplicates" for those that occur most often, and random ones where there are too few;
            "random" for random ones alone. Default: "duplicates"
        min_repeats (int): how often a passage must occur to count as a duplicate. Default: 2
        seed (int): decides which are drawn. Default: 0

    Raises:
        ValueError: If a number is out of range, ``passages`` is unknown or there is no source.
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

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("no source is named: name at least one file of training text")
        if len(set(self.sources)) < len(self.sources):
            raise ValueError(f"a source is named twice, so that all of it would be duplicated: {list(self.sources)}")
        if self.passages not in ("duplicates", "random"):
            raise ValueError(f"passages must be 'duplicates' or 'random', got {self.passages!r}")
        for name, least in {"num_targets": 1, "num_controls": 0, "block_size": 2, "min_repeats": 2, "seed": 0}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


@dataclass(frozen=True)
class MadeProbe:
    """The passages, and what was found on the way.

    Args:
        passages (tuple[Passage, ...]): the targets, then the controls.
        num_documents (int): of the training text, all sources together.
        num_tokens (int): of the training text.
        stretch_repeats (tuple[int, ...]): how often each duplicated stretch occurs; stretches may overlap.
        num_duplicates (int): targets that are duplicates; the others were drawn at random.
        num_repetitive (int): windows left out because hardly any two of their tokens differ.
        num_refused (int): windows of the controls' source that stand in part in the training text.
        starts (dict[Start, int]): how many targets start where.
    """

    passages: tuple[Passage, ...]
    num_documents: int
    num_tokens: int
    stretch_repeats: tuple[int, ...]
    num_duplicates: int
    num_repetitive: int
    num_refused: int
    starts: dict[Start, int]


class _Corpus(NamedTuple):
    """Documents, see :func:`join_documents`, and where they and their sources begin."""

    token_ids: TokenArray
    first_tokens: Positions
    sources: list[str]
    first_documents: list[int]

    def place(self, token: int) -> list[int]:
        document = int(np.searchsorted(self.first_tokens, token, side="right")) - 1
        return [document, int(token - self.first_tokens[document])]

    def source(self, token: int) -> str:
        return self.sources[bisect_right(self.first_documents, self.place(token)[0]) - 1]


def make_probe(tokenizer: TextTokenizer, spec: ProbeSpec) -> MadeProbe:
    """Choose the passages of a probe file.

    A passage is ``block_size`` tokens within one document. Duplicates are found on token ids, at any offset, in
    different documents or one; of each stretch that stands more than once one passage is taken. What is drawn beside
    them stands once. No two passages share a token, and none consists of a few tokens over and over.

    Args:
        tokenizer (TextTokenizer): the tokenizer of the model; no BOS is added.
        spec (ProbeSpec): what to choose.

    Returns:
        MadeProbe: the passages; ``positions`` of a target are ``[document, offset in the document]`` of its
            occurrences, documents counted over all sources, without the empty ones.

    Raises:
        FileNotFoundError: If a source looks like a path and nothing is there.
        ValueError: If a source cannot be read, see :func:`load_documents`, or has too few passages.
    """
    rng = np.random.default_rng(spec.seed)
    corpus = _read(tokenizer, {source: load_documents(source, column=spec.column) for source in spec.sources})
    chooser = WindowChooser(tokenizer, corpus.token_ids, spec.block_size, rng)
    targets, num_duplicates, stretch_repeats = _choose_targets(corpus, chooser, spec)
    controls, num_refused = _choose_controls(tokenizer, corpus, rng, spec) if spec.num_controls else ([], 0)

    def passage(kind: str, number: int, window: TokenArray, source: str, positions: list[list[int]]) -> Passage:
        token_ids = window.tolist()
        return Passage(
            id=f"{kind}-{number:04d}",
            kind=kind,
            text=passage_text(tokenizer, token_ids),
            token_ids=token_ids,
            num_injections=len(positions),
            positions=positions,
            source=source,
            tokenizer=tokenizer_name(tokenizer),
            tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        )

    passages = [
        passage("target", number, chooser.window(starts[0]), corpus.source(starts[0]), [*map(corpus.place, starts)])
        for number, starts in enumerate(targets)
    ] + [
        passage("control", number, window, spec.controls_source or EMBEDDED, [])
        for number, window in enumerate(controls)
    ]
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


def _read(tokenizer: TextTokenizer, texts: Mapping[str, Iterable[str]]) -> _Corpus:
    documents: list[TokenArray] = []
    first_documents = []
    for source_texts in texts.values():
        first_documents.append(len(documents))
        documents += [ids for _, ids in encode_texts(tokenizer, source_texts)]
    lengths = np.array([len(ids) + 1 for ids in documents], dtype=np.int64)
    return _Corpus(join_documents(documents), np.cumsum(lengths) - lengths, list(texts), first_documents)


def _choose_targets(
    corpus: _Corpus, chooser: WindowChooser, spec: ProbeSpec
) -> tuple[list[Positions], int, tuple[int, ...]]:
    """The occurrences of each target, how many targets are duplicates, and the repeats of all stretches."""
    if not chooser.fits.any():  # a search takes memory for the length of a passage, which may be anything
        _check_enough(0, "num_targets", corpus, spec)
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
        starts = _occurrences(names, start, spec.block_size)
        chooser.take(starts)
        targets.append(starts)
    _check_enough(len(targets), "num_targets", corpus, spec)
    return targets, num_duplicates, tuple(len(stretch.starts) for stretch in stretches)


def _occurrences(names: Positions, start: int, length: int) -> Positions:
    if not names[start]:
        return np.array([start])
    return without_overlaps(np.flatnonzero(names == names[start]), length)


def _choose_controls(
    tokenizer: TextTokenizer, corpus: _Corpus, rng: np.random.Generator, spec: ProbeSpec
) -> tuple[list[TokenArray], int]:
    """The controls, and how many windows were refused for standing in part in the corpus."""
    if spec.controls_source is None:
        texts: Iterable[str] = chain.from_iterable(map(embedded_documents, ("validation", "train")))
    else:
        texts = load_documents(spec.controls_source, column=spec.column)
    unseen = _read(tokenizer, {spec.controls_source or EMBEDDED: texts})
    num_shared = min(SHARED_TOKENS, spec.block_size)
    shared = windows_with_shared_stretch(unseen.token_ids, corpus.token_ids, spec.block_size, num_shared)
    chooser = WindowChooser(tokenizer, unseen.token_ids, spec.block_size, rng)
    controls: dict[bytes, TokenArray] = {}
    num_refused = 0
    for start in chooser.random(chooser.fits):
        chooser.take(np.array([start]))
        window = chooser.window(start)
        if shared[start]:
            num_refused += 1
        else:
            controls.setdefault(window.tobytes(), window)
        if len(controls) == spec.num_controls:
            break
    remark = f" {num_refused} more have {num_shared} tokens in a row of the training text." if num_refused else ""
    _check_enough(len(controls), "num_controls", unseen, spec, remark)
    return list(controls.values()), num_refused


def _check_enough(found: int, setting: str, corpus: _Corpus, spec: ProbeSpec, remark: str = "") -> None:
    needed = getattr(spec, setting)
    if found < needed:
        lengths = np.diff(corpus.first_tokens, append=len(corpus.token_ids)) - 1
        longest = lengths.max(initial=0)
        if longest < spec.block_size:
            remark += " A line of a .txt file is a document of its own: longer documents are rows of a .jsonl file."
        raise ValueError(
            f"found {found} passages of {spec.block_size} tokens without overlap in {', '.join(corpus.sources)} "
            f"({len(lengths)} documents, the longest of {longest} tokens), but {setting} is {needed}.{remark} "
            f"Lower {setting} or block_size, or name more text"
        )
