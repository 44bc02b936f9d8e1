"""The text that passages are searched in: a sample, the windows that are indexed, and documents
that are read again.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice, tee
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tfidf_tune._tokenizer import TextTokenizer, TokenArray, decode_whole, encode_texts
from tfidf_tune.corpus import sources
from tfidf_tune.corpus import window_index as windows
from tfidf_tune.corpus.jobs import TaskRunner
from tfidf_tune.corpus.sources import load_documents
from tfidf_tune.corpus.window_index import Built, Piece, Records, WindowIndex
from tfidf_tune.passages.probe_file import Passage
from tfidf_tune.passages.probe_spec import ProbeSpec
from tfidf_tune.passages.stretches import CUT, Positions, WindowChooser, is_varied, join_documents

_SAMPLE_FILES = 10
_SAMPLE_DOCUMENTS = 100
_SAMPLE_CHARACTERS = 10_000
_LEAST_SAMPLE = 16  # tokens of a document whose bytes in a token count
_SHARE_OF_PASSAGE = (
    0.4  # of a window, so that a passage of fewer bytes than most holds a window, too
)
_LEAST_WINDOW = 3  # bytes: of a character of Han
_LONGEST_WORD = 64  # bytes
_BOTH_ENDS = (
    6  # bytes of the incomplete characters at the ends of a passage, which its text does not have
)
_CANDIDATES = 4
_MORE_CANDIDATES = 50
_CUT_TOKENS = 32  # next to a cut, where tokens may differ from those of the document
SAME_TOKENS = 16
"""Near copies that have as many consecutive tokens in common are taken to be of one text."""


class Sample(NamedTuple):
    """Documents of files that are spread over all; of long documents the start."""

    documents: list[TokenArray]
    num_bytes: int
    bytes_in_token: float  # on average
    least_bytes_in_token: float  # of the documents with the shortest tokens


@dataclass(frozen=True)
class Search:
    """What a search has at hand once its text is indexed."""

    tokenizer: TextTokenizer
    spec: ProbeSpec
    rng: np.random.Generator
    runner: TaskRunner
    units: list[Path | str]  # files and other sources, as the index numbers them
    index: WindowIndex
    built: Built
    held_out: list[Passage]  # no target overlaps a place of theirs

    @property
    def num_candidates(self) -> int:
        """Windows that are drawn, more than are needed."""
        return num_candidates(self.spec.num_targets)

    @property
    def groups(self) -> Records:
        """Groups of copies that are duplicates, the largest
        first, see :data:`window_index.GROUP`.
        """
        return self.built.groups[self.built.groups["count"] >= self.spec.min_repeats]


@dataclass(frozen=True)
class Corpus:
    """The tokens of the documents of windows, and the choice of passages in them."""

    tokenizer: TextTokenizer
    pieces: list[Piece]
    token_ids: TokenArray  # int32, joined by separators
    first_tokens: Positions  # of each piece
    chooser: WindowChooser

    def located(self, tokens: Positions) -> list[tuple[Piece, int]]:
        """Return the piece of each token, and the tokens before it in the piece."""
        numbers = np.searchsorted(self.first_tokens, tokens, side="right") - 1
        offsets = tokens - self.first_tokens[numbers]
        return [
            (self.pieces[number], offset)
            for number, offset in zip(numbers, offsets.tolist(), strict=True)
        ]

    def token_at(self, place: np.void) -> int:
        """Return the token that holds the first byte of a window."""
        number = bisect_right(self.pieces, tuple(place.tolist()), key=lambda piece: piece[:3]) - 1
        piece = self.pieces[number]
        # Bytes are counted in decoded text, by a binary search for the token whose text ends behind
        # the first byte.
        (ids,) = encode_texts(self.tokenizer, [piece.text])
        first = int(place["offset"]) - piece.start
        token = (
            bisect_right(
                range(len(ids) + 1), first, key=lambda end: len(text_of(self.tokenizer, ids[:end]))
            )
            - 1
        )
        return int(self.first_tokens[number]) + token


def num_candidates(number: int) -> int:
    """Return how many windows are drawn for so many passages."""
    return _CANDIDATES * number + _MORE_CANDIDATES


def text_of(tokenizer: TextTokenizer, ids: TokenArray) -> bytes:
    """Decode tokens; an incomplete character at an end is not a part of the text."""
    return decode_whole(tokenizer, ids.tolist()).strip("\ufffd").encode("utf-8", "surrogatepass")


def sample_text(tokenizer: TextTokenizer, spec: ProbeSpec, files: tuple[str, ...]) -> Sample:
    """Read the first documents of some files."""
    chosen = np.unique(np.linspace(0, len(files) - 1, _SAMPLE_FILES).round().astype(int)).tolist()
    sampled: list[TokenArray] = []
    sizes: list[int] = []
    for file in (files[rank] for rank in chosen):
        documents = load_documents(file, column=spec.column, sample_by=spec.document_is)
        texts = [text[:_SAMPLE_CHARACTERS] for text in islice(documents, _SAMPLE_DOCUMENTS)]
        documents_of_file = [*encode_texts(tokenizer, texts)]
        sources.warn_of_short_documents(
            file, spec.document_is, [len(ids) for ids in documents_of_file]
        )
        sampled += documents_of_file
        sizes += [len(text.encode("utf-8", "surrogatepass")) for text in texts]
    mean = max(1.0, sum(sizes) / max(1, sum(map(len, sampled))))
    shares = [
        size / len(ids)
        for size, ids in zip(sizes, sampled, strict=True)
        if len(ids) >= _LEAST_SAMPLE
    ]
    return Sample(sampled, sum(sizes), mean, float(np.quantile(shares or [mean], 0.05)))


def windows_to_index(
    spec: ProbeSpec, files: tuple[str, ...], sample: Sample, work: Path
) -> WindowIndex:
    """Decide on the length of windows, in bytes: nearly every passage holds one."""
    is_near = spec.passages == "near-duplicates"
    bytes_of_passage = spec.block_size * sample.least_bytes_in_token
    num_bytes = max(_LEAST_WINDOW, round(bytes_of_passage * _SHARE_OF_PASSAGE))
    # A passage holds a window if as many words start in it, before its last num_bytes, as there are
    # for one window: also if all of them are the longest.
    room = round(bytes_of_passage) - num_bytes - _BOTH_ENDS
    longest_word = min(_LONGEST_WORD, max(1, room // windows.window_spacing(num_bytes)))
    return WindowIndex(
        files,
        partial(_documents, files, spec),
        work,
        num_bytes=round(bytes_of_passage) if is_near else num_bytes,
        longest_word=longest_word,
        near=is_near,
        num_shared_bytes=1,
    )


def _documents(files: tuple[str, ...], spec: ProbeSpec, rank: int) -> Iterator[str]:
    return load_documents(files[rank], column=spec.column, sample_by=spec.document_is)


def share_without_window(search: Search, sample: Sample) -> float:
    """Return the share of the passages of a sample whose copies the index cannot find: they hold no
    window.

    Their words are too few, or their tokens too short. For near copies, whole documents are
    counted. Passages of a few repeated tokens, which are not chosen, do not count.
    """
    size = search.spec.block_size
    pieces = [ids for ids in sample.documents if len(ids) >= size]
    if not search.index.near:
        windows_of_documents = []
        for ids in pieces:
            last = len(ids) - size
            windows_of_documents += [ids[at : at + size] for at in range(0, last + 1, size)]
        pieces = windows_of_documents
    texts = [text_of(search.tokenizer, ids) for ids in pieces if is_varied(ids[:size])]
    if not texts:
        return 0.0
    batch = search.index.batch(texts)
    words, _ = search.index.windows(batch, inner=not search.index.near)
    return 1 - len(np.unique(batch.of_text[words])) / len(texts)


def read_documents(
    search: Search, places: Records, name: str
) -> Iterator[tuple[Piece, TokenArray]]:
    """Tokenize the documents of windows; :data:`CUT` replaces tokens of a piece that its document
    may not have.
    """
    pieces, again = tee(windows.read_pieces(search.index, places, name, search.runner))
    for piece, ids in zip(
        pieces, encode_texts(search.tokenizer, (piece.text for piece in again)), strict=True
    ):
        ids[: _CUT_TOKENS if piece.start else 0] = CUT
        ids[len(ids) if piece.is_end else -_CUT_TOKENS :] = CUT
        yield piece, ids


def read_corpus(search: Search, places: Records, name: str) -> Corpus:
    """Read the documents of windows as a corpus in memory; ``name`` is the step's."""
    pieces = []
    documents = []
    for piece, ids in read_documents(search, places, name):
        pieces.append(piece)
        documents.append(ids)
    token_ids = join_documents(documents)
    _cut_held_out(search, token_ids)
    cut_at_eos(search.spec, search.tokenizer, token_ids)
    return Corpus(
        search.tokenizer,
        pieces,
        token_ids,
        # With the separator.
        first_tokens=np.cumsum([0, *(len(ids) + 1 for ids in documents)])[:-1],
        chooser=WindowChooser(search.tokenizer, token_ids, search.spec.block_size, search.rng),
    )


def _cut_held_out(search: Search, token_ids: TokenArray) -> None:
    """Put :data:`CUT` in the place of held-out text, of a completion of its answer.

    It is cut out where any half of it is found: its ends may be missing here, or tokenized in
    another way.
    """
    texts = []
    for passage in search.held_out:
        # The answer starts after about this share of the text.
        num_prompt = passage.num_prompt or 0
        first = len(passage.text) * num_prompt // len(passage.token_ids)
        texts.append(passage.text[first:])
    for ids in encode_texts(search.tokenizer, texts):
        if len(ids) < SAME_TOKENS:
            continue
        size = max(SAME_TOKENS, len(ids) // 2)
        for first in (0, len(ids) // 4, len(ids) - size):
            for place in occurrences(ids[first : first + size], token_ids):
                token_ids[max(0, place - first) : place - first + len(ids)] = CUT


def cut_at_eos(spec: ProbeSpec, tokenizer: TextTokenizer, token_ids: TokenArray) -> None:
    """Put :data:`CUT` in the place of EOS, if no passage shall have it inside."""
    if spec.without_eos:
        token_ids[token_ids == tokenizer.eos_id] = CUT


def occurrences(passage: TokenArray, ids: TokenArray) -> Iterator[int]:
    """Yield where a passage occurs in ids, from the left and without overlap."""
    content = ids.tobytes()
    part = passage.tobytes()
    size = ids.itemsize
    at = content.find(part)
    while at >= 0:
        if at % size == 0:
            yield at // size
        at = content.find(part, at + (1 if at % size else len(part)))


def require_enough(
    spec: ProbeSpec, number: int, setting: str, source: str, remark: str = ""
) -> None:
    """Raise a ValueError if ``source`` has fewer passages than ``num_targets`` or ``num_controls``
    says.
    """
    needed = getattr(spec, setting)
    if number < needed and not (spec.allow_fewer and (number or setting == "num_controls")):
        raise ValueError(
            f"found {number} passages of {spec.block_size} tokens without overlap in {source}, but "
            f"{setting} is {needed}.{remark} Lower {setting} or block_size, or name more text. If "
            f"each {spec.document_is} of a .txt file is too short for a passage, choose another "
            "sample_by (--sample-by)"
        )
