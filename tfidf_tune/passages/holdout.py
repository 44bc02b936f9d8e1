"""Passages of a user's own training text: windows of it are held out, others are trained on, both
are measured.
"""

import logging
from itertools import islice
from typing import NamedTuple

import numpy as np

from tfidf_tune._tokenizer import TextTokenizer, TokenArray
from tfidf_tune.passages.probe_file import FEWEST_PASSAGES, MOST_PASSAGES, SHORTEST_PASSAGE
from tfidf_tune.passages.stretches import (
    SEPARATOR,
    Positions,
    WindowChooser,
    duplicated_stretches,
    join_documents,
    label_runs,
    name_repeated_windows,
    shared_run,
)

logger = logging.getLogger(__name__)


class HeldOut(NamedTuple):
    """Windows of documents whose recitation is measured."""

    rest: list[TokenArray]  # the documents without the controls: parts of them
    documents: Positions  # the number of the document of each part
    controls: list[TokenArray]
    documents_of_controls: list[int]
    targets: list[tuple[TokenArray, Positions]]  # and where they start in the joined rest


def hold_out(
    tokenizer: TextTokenizer, documents: list[TokenArray], block_size: int, share: float
) -> HeldOut:
    """Choose controls and take them out of the documents, and targets of the rest, see
    ``text_blocks_dataset``.

    The documents have no EOS inside.
    """
    sizes = [len(ids) for ids in documents]

    def most_controls(
        length: int,
    ) -> int:  # a quarter of the windows, so that text is left in small files, too
        num_windows = sum(num_tokens // length for num_tokens in sizes)
        return min(MOST_PASSAGES, int(share * sum(sizes)) // length, num_windows // 4)

    length = block_size
    while most_controls(length) < FEWEST_PASSAGES and length // 2 >= SHORTEST_PASSAGE:
        length //= 2
    corpus = join_documents(documents)
    rng = np.random.default_rng(0)
    chooser = WindowChooser(tokenizer, corpus, length, rng)
    controls = [*islice(chooser.unique(shared_run(length)), most_controls(length))]
    if not controls:
        logger.warning(
            "the text is too short, or repeats itself too much, to hold out a part: recitation is "
            "not measured"
        )
        return HeldOut(documents, np.arange(len(documents)), [], [], [])
    is_rest = corpus != SEPARATOR
    for start in controls:
        is_rest[start : start + length] = False
    runs = label_runs(is_rest)
    rest = [corpus[first:end] for first, end in runs]
    # A separator follows each document.
    document_at = np.cumsum(corpus == SEPARATOR)
    numbers = document_at[runs[:, 0]]

    # Targets: the windows that occur most often; then random ones.
    trained_corpus = join_documents(rest)
    trained = WindowChooser(tokenizer, trained_corpus, length, rng)
    names = name_repeated_windows(trained_corpus, length)
    stretches = sorted(duplicated_stretches(names, length), key=lambda stretch: -len(stretch[0]))
    starts = [*islice(trained.duplicates(stretches), len(controls))]
    others = trained.taken(trained.random(trained.fits & (names[: len(trained.fits)] == 0)))
    starts += [np.array([start]) for start in islice(others, len(controls) - len(starts))]
    targets = [(trained.window(places[0]), places) for places in starts]
    return HeldOut(
        rest=rest,
        documents=numbers,
        controls=[chooser.window(start) for start in controls],
        documents_of_controls=document_at[controls].tolist(),
        targets=targets,
    )
