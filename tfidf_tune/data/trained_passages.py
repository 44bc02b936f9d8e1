"""Which passages stand in the sequences that a model is trained on, whatever data set they come
from.

Each data set proves for its own text that its controls are not in it. A run can mix data sets, and
what is trained on are the finished sequences, so that targets are counted and controls are looked
for there.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tfidf_tune._tokenizer import TokenArray
from tfidf_tune.data.sequences import (
    InjectedCorpusDataset,
    SequenceDataset,
    TextBlocksDataset,
    unpacked,
)
from tfidf_tune.passages.probe_file import Passage
from tfidf_tune.passages.stretches import SEPARATOR, shared_run, shared_run_of_answer
from tfidf_tune.weighting import IGNORE_INDEX

_CHUNK = 2**20  # tokens that are compared at a time
_MULTIPLIER = 0x9E3779B97F4A7C15


class Trained(NamedTuple):
    """What is known of passages after a look at the sequences.

    Attributes:
        passages (list[Passage]): without the controls that are trained on, targets with their
            number of occurrences.
        controls_in (list[int]): the number of the first sequences in which each other control was
            found.
    """

    passages: list[Passage]
    controls_in: list[int]


def trained_passages(
    passages: Sequence[Passage], own: int | None, datasets: Sequence[Any]
) -> Trained:
    """Count the targets of a data set in all data sets of a run, and leave out its controls that
    are trained on.

    A control is trained on if a sequence has as many of its tokens in a row as the choice of
    controls excludes: 50, or half of a shorter passage and at least 16; of a completion, half of
    its answer; of an injected corpus, all. Sequences that were cut from one document are searched
    as one.

    Targets whose copies are exact are counted without overlap. Near copies in their own data set,
    with noise or of 90 % of an answer, keep the count that they have, and exact ones of other data
    sets are added.

    Args:
        passages (Sequence[Passage]): targets and controls of the data set ``own``.
        own (int | None): its place in ``datasets``; None if the passages were chosen from another
            one.
        datasets (Sequence[Any]): all data sets of the run, each a map-style data set of ``tokens``
            and ``labels``.
    """
    # The runs of tokens that are looked for, and the passage that each is of.
    runs: list[TokenArray] = []
    passage_of_run: list[int] = []
    is_injected = own is not None and isinstance(datasets[own], InjectedCorpusDataset)
    for number, passage in enumerate(passages):
        for run in _runs_of(passage, is_injected=is_injected):
            runs.append(run)
            passage_of_run.append(number)

    # How often each passage occurs in each data set, without overlap.
    counts = np.zeros((len(passages), len(datasets)), dtype=np.int64)
    search = _Search(runs)
    for column, dataset in enumerate(datasets):
        for stream in _streams(dataset):
            ends: dict[int, int] = {}  # where the last occurrence of a run that counted ends
            for number, start in search.occurrences(stream):
                if start >= ends.get(number, 0):
                    ends[number] = start + len(runs[number])
                    counts[passage_of_run[number], column] += 1

    # Controls that occur are left out, targets get their numbers.
    kept = []
    controls_in = []
    for passage, passage_counts in zip(passages, counts, strict=True):
        if passage.kind == "control":
            if passage_counts.any():
                controls_in.append(int(np.flatnonzero(passage_counts)[0]))
            else:
                kept.append(passage)
            continue
        num_injections = int(passage_counts.sum())
        has_near_copies = passage.num_prompt is not None or passage.changes is not None
        if has_near_copies:
            # A target of which 10 near copies are in its own data set, 3 of them exact, and 2 exact
            # copies in another one: 5 were found, and it occurs 5 - 3 + 10 = 12 times.
            if own is not None:
                num_injections -= int(passage_counts[own])
            num_injections += passage.num_injections
        positions = passage.positions if num_injections == passage.num_injections else []
        kept.append(replace(passage, num_injections=num_injections, positions=positions))
    return Trained(kept, controls_in)


def _runs_of(passage: Passage, *, is_injected: bool) -> Iterator[TokenArray]:
    """Yield the runs of tokens that count as the passage: the whole target, each run of a control.

    A target of 256 tokens is a run of 256 tokens. A control of 256 tokens must share no 50 tokens
    with what is trained on, and gives the 207 runs ``[0:50]``, ``[1:51]`` to ``[206:256]``; the
    answer of 40 tokens of a control that is a completion gives the 21 runs of 20 tokens.
    """
    ids = np.array(passage.token_ids[passage.num_prompt or 0 :], dtype=np.int32)
    if passage.kind == "target" or is_injected:
        yield ids
        return
    length = shared_run(len(ids))
    if passage.num_prompt is not None:
        length = shared_run_of_answer(len(ids))
    for start in range(len(ids) + 1 - length):
        yield ids[start : start + length]


def _streams(dataset: Any) -> Iterator[TokenArray]:
    """Yield the tokens that are learned, int32 ``[num_tokens]``, with SEPARATOR between documents
    and for the others.

    Rows that were cut from one text are joined again, because a passage can start in one of them
    and end in the next::

        rows       a b c | d e f | g h i
        continues  False   True    False
        stream     a b c d e f SEPARATOR g h i
    """
    import tfidf_tune._torchao

    from torchtune.datasets import ConcatDataset

    dataset = unpacked(dataset)
    if isinstance(dataset, ConcatDataset):
        for part in dataset._datasets:
            yield from _streams(part)
        return
    if isinstance(dataset, TextBlocksDataset):
        # A view: the blocks need not fit into memory.
        breaks = np.empty(0, dtype=np.int64)
        if dataset.continues is not None:
            breaks = np.flatnonzero(~dataset.continues[1:]) + 1
        for blocks in np.split(dataset.blocks, breaks):
            yield blocks.reshape(-1)
        return
    # Whole documents are joined until they are a chunk.
    stream: list[TokenArray] = []
    num_tokens = 0
    for index in range(len(dataset)):
        continues = False
        if isinstance(dataset, SequenceDataset):
            tokens, is_learned = dataset.sequence(index)
            continues = dataset.continues is not None and bool(dataset.continues[index])
        else:
            item = dataset[index]
            tokens = np.asarray(item["tokens"], dtype=np.int32)
            is_learned = np.asarray(item["labels"]) != IGNORE_INDEX
        if not continues:
            if num_tokens >= _CHUNK:
                yield np.concatenate(stream)
                stream = []
                num_tokens = 0
            stream.append(np.array([SEPARATOR], dtype=np.int32))
        stream.append(np.where(is_learned, tokens, np.int32(SEPARATOR)))
        num_tokens += len(tokens)
    if stream:
        yield np.concatenate(stream)


class _Search:
    """The search for runs of tokens in streams of any length.

    The first tokens of all runs, as many as the shortest has, are looked for by a hash; what has
    the same hash is compared. With the runs ``a b c``, ``a b c d`` and ``b c d e f``, each window
    of 3 tokens of a stream is looked for among the hashes of ``a b c`` and ``b c d``::

        stream   x  a  b  c  d  y
        window      a  b  c         the start of runs 0 and 1, which are both there in full
                       b  c  d      the start of run 2, which does not follow: y is not e
    """

    def __init__(self, runs: Sequence[TokenArray]) -> None:
        self._runs = runs
        self._size = min((len(run) for run in runs), default=1)
        self._by_start: dict[bytes, list[int]] = defaultdict(list)
        for number, run in enumerate(runs):
            self._by_start[run[: self._size].tobytes()].append(number)
        # All starts, one after the other: a window at each multiple of their length is a start.
        starts = np.frombuffer(b"".join(self._by_start), dtype=np.int32)
        self._start_hashes = np.unique(_hashes(starts, self._size)[:: self._size])

    def occurrences(self, stream: TokenArray) -> Iterator[tuple[int, int]]:
        """Yield the number of a run and where it starts in the stream, ascending, for each
        occurrence of each run.
        """
        if not len(self._start_hashes):
            return
        last = len(self._start_hashes) - 1
        for first in range(0, len(stream), _CHUNK):
            # With the tokens of all windows that start in the chunk.
            chunk = np.asarray(stream[first : first + _CHUNK + self._size - 1])
            if len(chunk) < self._size:
                continue
            hashes = _hashes(chunk, self._size)
            nearest = np.minimum(np.searchsorted(self._start_hashes, hashes), last)
            is_candidate = self._start_hashes[nearest] == hashes
            for offset in np.flatnonzero(is_candidate).tolist():
                start = first + offset
                window = chunk[offset : offset + self._size].tobytes()
                for number in self._by_start.get(window, ()):
                    run = self._runs[number]
                    if np.array_equal(stream[start : start + len(run)], run):
                        yield number, start


def _hashes(tokens: TokenArray, size: int) -> npt.NDArray[np.uint64]:
    """Return a hash of each window of ``size`` tokens, uint64 ``[num_tokens + 1 - size]``.

    A window of ``2k`` tokens has a hash of the hashes of its halves, so that ``log2(size)`` rounds
    suffice; in the last round the halves overlap if ``size`` is not a power of two. For windows of
    3 of the tokens a, b, c and d, each letter a hash::

        length 1   a    b    c    d
        length 2   ab   bc   cd           step 1: the hash of a with the hash of b
        length 3   abc  bcd               step 1: the hash of ab with the hash of bc
    """
    hashes = tokens.astype(np.uint64)
    length = 1
    while length < size:
        step = min(length, size - length)
        second = hashes[step:]
        hashes = hashes[:-step] * np.uint64(_MULTIPLIER) + (second ^ (second >> np.uint64(29)))
        length += step
    return hashes
