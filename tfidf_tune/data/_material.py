"""What an injected corpus is made of: targets, controls and base text, in sizes that the text allows."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, tee
from typing import Any, Literal, NamedTuple

import numpy as np

from tfidf_tune.data._duplicates import SEPARATOR, join_documents, name_repeated_windows
from tfidf_tune.data._probe_making import WindowChooser
from tfidf_tune.data._sources import load_documents
from tfidf_tune.data._text import blocks_and_lengths
from tfidf_tune.data._tokenizer import TextTokenizer, TokenArray, encode_texts

ALL = -1
_MOST_TARGETS = 100  # the paper's number
_LEAST_TARGETS = 10  # a report judges nothing from fewer
_ENOUGH_WINDOWS = 16
_LEAST_LENGTH = 16
_MOST_PROPOSALS = 20
Source = tuple[Any, ...]
"""Arguments of :func:`load_documents`."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a corpus; None stands for a number that follows from the text."""

    num_base: int
    num_targets: int | None
    num_controls: int | None
    min_target_tokens: int | None
    block_size: int
    layout: Literal["aligned", "concatenated"]


class Material(NamedTuple):
    """What was found for some sizes.

    Attributes:
        targets (list[TokenArray]): int32 ids of each.
        controls (list[TokenArray]): int32 ids of each.
        base (TokenArray | list[TokenArray]): int32 blocks ``[num_blocks, block_size]``; concatenated: documents.
        base_lengths (list[int]): tokens of the documents that were read for the base.
        num_left_out (int): base documents that were left out, or passages that were taken out of them.
        shortages (list[str]): what is missing, in words.
        proposal (Sizes | None): sizes that may fit instead; None if there is no shortage, or no such sizes.
    """

    targets: list[TokenArray]
    controls: list[TokenArray]
    base: TokenArray | list[TokenArray]
    base_lengths: list[int]
    num_left_out: int
    shortages: list[str]
    proposal: Sizes | None


def gather_or_refuse(gather: Callable[[Sizes], Material], sizes: Sizes, source: str) -> Material:
    """Gather the material of a corpus; if it is too little, raise one ValueError with sizes that would fit."""
    material = gather(sizes)
    if not material.shortages:
        return material
    tried, proposal = material, material.proposal
    for _ in range(_MOST_PROPOSALS):
        if proposal is None or not (tried := gather(proposal)).shortages:
            break
        proposal = tried.proposal
    if proposal is None or tried.shortages:
        remedy = "No sizes fit: name more text, or longer documents (sample_by joins the lines of a .txt file)"
    else:
        changed = [name for name in vars(sizes) if getattr(sizes, name) != getattr(proposal, name)]
        values = " ".join(f"{name}={getattr(proposal, name)}" for name in changed)
        remedy = f"{values} would fit (keys of the data set); or name more text"
    raise ValueError(f"there is too little text in {source}: {'; '.join(material.shortages)}. {remedy}")


def gather_from_two_sources(tokenizer: TextTokenizer, place: Source, target_place: Source, sizes: Sizes) -> Material:
    """Take the first long passages of one source as targets and controls, and base text from another."""
    block_size = sizes.block_size
    least = sizes.min_target_tokens or block_size
    num_targets = _MOST_TARGETS if sizes.num_targets is None else sizes.num_targets
    num_controls = num_targets if sizes.num_controls is None else sizes.num_controls
    needed = num_targets + num_controls
    passages, lengths = choose_passages(
        tokenizer, load_documents(*target_place), count=needed, min_tokens=least, block_size=block_size
    )
    if 1 < len(passages) < needed and sizes.num_targets is None and sizes.num_controls is None:
        num_targets = num_controls = len(passages) // 2
    known = {text for text, _ in passages[: num_targets + num_controls]}
    num_left_out = 0

    def base_documents() -> Iterator[str]:
        nonlocal num_left_out
        for text in load_documents(*place):
            if text in known:
                num_left_out += 1
            else:
                yield text

    encoded = encode_texts(tokenizer, islice(base_documents(), _stop(sizes)))
    base, base_lengths = _base(encoded, tokenizer.eos_id, sizes)
    shortages: list[str] = []
    proposal: Sizes | None = sizes
    if len(passages) < num_targets + num_controls:
        shortages.append(
            f"found {len(passages)} distinct passages of at least {least} tokens in {target_place[0]!r}, needed "
            f"{num_targets} targets + {num_controls} controls"
        )
        fewer = _fewer_passages(sizes, len(passages), num_targets, num_controls)
        proposal = fewer or _shorter_passages(sizes, _common_length(lengths, needed))
    if wanted := _missing_base(len(base), sizes):
        shortages.append(f"found {len(base)} base {_unit(sizes)} in {place[0]!r}, needed {wanted}")
        proposal = proposal and _less_base(proposal, sizes, len(base))
    ids = [ids for _, ids in passages]
    return Material(
        ids[:num_targets], ids[num_targets : num_targets + num_controls], base, base_lengths, num_left_out, shortages,
        proposal if shortages else None,
    )  # fmt: skip


def gather_from_one_source(
    tokenizer: TextTokenizer, documents: Sequence[TokenArray], source: str, sizes: Sizes
) -> Material:
    """Draw targets and controls from the text itself; what is left of its documents is the base.

    A passage is a window of tokens that occurs once in the text, so that no copy of it stays in the base. A document
    ends where a passage was taken out, and the rest of it is a document of its own. The same passages are drawn for
    every seed.
    """
    block_size = sizes.block_size
    lengths = [len(ids) for ids in documents]
    least = sizes.min_target_tokens or (block_size if sizes.layout == "aligned" else _own_length(lengths, block_size))
    num_windows = sum(length // least for length in lengths)
    by_rule = max(1, min(_MOST_TARGETS, max(_LEAST_TARGETS, num_windows // 10), num_windows // 4))
    num_targets = by_rule if sizes.num_targets is None else sizes.num_targets
    num_controls = num_targets if sizes.num_controls is None else sizes.num_controls
    corpus = join_documents(documents)
    chooser = WindowChooser(tokenizer, corpus, least, np.random.default_rng(0))
    allowed = chooser.fits & (name_repeated_windows(corpus, least)[: len(chooser.fits)] == 0)
    starts: list[int] = []
    for start in islice(chooser.random(allowed), num_targets + num_controls):
        chooser.take(np.array([start]))
        starts.append(start)
    if 1 < len(starts) < num_targets + num_controls and sizes.num_targets is None and sizes.num_controls is None:
        num_targets = num_controls = len(starts) // 2
        starts = starts[: 2 * num_targets]
    windows = [chooser.window(start) for start in starts]
    base, _ = _base(_without_windows(corpus, starts, least), tokenizer.eos_id, replace(sizes, num_base=ALL))
    num_read = len(documents) if sizes.layout == "concatenated" else sum(length + 1 for length in lengths) // block_size
    shortages: list[str] = []
    proposal: Sizes | None = sizes
    if len(windows) < num_targets + num_controls:
        shortages.append(
            f"found {len(windows)} passages of {least} tokens that occur once, needed {num_targets} targets + "
            f"{num_controls} controls"
        )
        fewer = _fewer_passages(sizes, len(windows), num_targets, num_controls)
        proposal = fewer or _shorter_passages(sizes, _own_length(lengths, least // 2))
    elif not len(base):
        shortages.append(f"{num_targets} targets and {num_controls} controls leave no base {_unit(sizes)}")
        half = (num_targets + num_controls) // 2
        proposal = _fewer_passages(sizes, half, num_targets, num_controls)
    if num_read < (wanted := max(1, sizes.num_base)):
        shortages.append(f"found {num_read} {_unit(sizes)} in {source!r}, needed {wanted}")
        proposal = proposal and replace(proposal, num_base=ALL)
    return Material(
        windows[:num_targets], windows[num_targets:], base, lengths, len(windows), shortages,
        proposal if shortages else None,
    )  # fmt: skip


def read_own_text(tokenizer: TextTokenizer, place: Source, sizes: Sizes) -> list[TokenArray]:
    """Read as many documents as ``num_base`` says, or as fill so many blocks."""
    encoded = encode_texts(tokenizer, islice(load_documents(*place), _stop(sizes)))
    if sizes.layout == "concatenated" or sizes.num_base == ALL:
        return list(encoded)
    documents: list[TokenArray] = []
    num_left = sizes.num_base * sizes.block_size
    for ids in encoded:
        documents.append(ids[: num_left - 1])  # EOS follows
        num_left -= len(documents[-1]) + 1
        if num_left < 2:
            break
    return documents


def choose_passages(
    tokenizer: TextTokenizer, documents: Iterable[str], *, count: int, min_tokens: int, block_size: int
) -> tuple[list[tuple[str, TokenArray]], list[int]]:
    """Return text and ids of the first ``count`` passages of at least ``min_tokens`` tokens, or all if there are fewer.

    Passages that agree in their first ``block_size`` tokens, which are measured, count once: a control must not be a
    copy of a target, nor a target be injected twice as often as the others. BOS and EOS are not counted. The second
    value is the number of tokens of each document that was read.
    """
    chosen: dict[bytes, tuple[str, TokenArray]] = {}
    lengths = []
    texts, to_encode = tee(documents)
    for text, ids in zip(texts, encode_texts(tokenizer, to_encode), strict=True):
        if len(chosen) == count:
            break
        lengths.append(len(ids))
        if len(ids) >= min_tokens:
            chosen.setdefault(ids[:block_size].tobytes(), (text, ids))
    return list(chosen.values()), lengths


def _base(encoded: Iterable[TokenArray], eos_id: int, sizes: Sizes) -> tuple[TokenArray | list[TokenArray], list[int]]:
    if sizes.layout == "concatenated":
        documents = list(encoded)
        return documents, [len(ids) for ids in documents]
    num_blocks = None if sizes.num_base == ALL else sizes.num_base
    return blocks_and_lengths(encoded, sizes.block_size, num_blocks, eos_id)


def _without_windows(corpus: TokenArray, starts: list[int], length: int) -> Iterator[TokenArray]:
    """Yield what is left of the documents of a corpus of :func:`join_documents` without some windows."""
    kept = corpus != SEPARATOR
    for start in starts:
        kept[start : start + length] = False
    borders = np.flatnonzero(np.diff(kept, prepend=False, append=False))
    return (corpus[first:end] for first, end in borders.reshape(-1, 2))


def _own_length(lengths: Sequence[int], most: int) -> int:
    """Return the longest of ``most``, its half, its quarter, ... of which enough passages may be found."""
    length = most
    while length // 2 >= _LEAST_LENGTH and sum(each // length for each in lengths) < _ENOUGH_WINDOWS:
        length //= 2
    return length


def _common_length(lengths: Sequence[int], needed: int) -> int:
    """Return a length that some of the documents have, a quarter of them if there are many; 0 if there are too few."""
    longest = sorted(lengths, reverse=True)
    number = min(needed, max(2, len(lengths) // 4))
    return longest[number - 1] if len(longest) >= number else 0


def _fewer_passages(sizes: Sizes, found: int, num_targets: int, num_controls: int) -> Sizes | None:
    """Share the passages that were found in the ratio that was asked for; None if they are too few."""
    if found < (2 if num_controls else 1):
        return None
    targets = min(max(1, found * num_targets // (num_targets + num_controls)), found - bool(num_controls))
    controls = num_controls and max(1, targets * num_controls // num_targets)
    return replace(sizes, num_targets=targets, num_controls=min(controls, found - targets))


def _shorter_passages(sizes: Sizes, length: int) -> Sizes | None:
    if length < _LEAST_LENGTH or length >= (sizes.min_target_tokens or sizes.block_size):
        return None
    block_size = min(sizes.block_size, length) if sizes.layout == "aligned" else sizes.block_size
    return replace(sizes, min_target_tokens=length, block_size=block_size)


def _less_base(proposal: Sizes, tried: Sizes, found: int) -> Sizes | None:
    if proposal.block_size != tried.block_size:  # there will be other numbers of blocks
        return proposal
    return replace(proposal, num_base=found) if found else None


def _missing_base(found: int, sizes: Sizes) -> int:
    """Return how many base blocks or documents are wanted if fewer were found, else 0."""
    wanted = max(1, sizes.num_base)
    return wanted if found < wanted else 0


def _stop(sizes: Sizes) -> int | None:
    """Return how many documents to read; None for any number."""
    return sizes.num_base if sizes.layout == "concatenated" and sizes.num_base != ALL else None


def _unit(sizes: Sizes) -> str:
    return "documents" if sizes.layout == "concatenated" else f"blocks of {sizes.block_size} tokens"
