"""Controls: passages of text that the model was not trained on, of which the training text has no
copy.
"""

from functools import cache
from itertools import compress
from typing import NamedTuple

import numpy as np

from tfidf_tune._tokenizer import TextTokenizer, TokenArray, encode_texts
from tfidf_tune.corpus import window_index as windows
from tfidf_tune.corpus.sources import EMBEDDED, embedded_documents, load_documents
from tfidf_tune.corpus.window_index import PLACE, WindowIndex
from tfidf_tune.passages._search import (
    Search,
    cut_at_eos,
    num_candidates,
    read_corpus,
    require_enough,
    text_of,
)
from tfidf_tune.passages.probe_spec import ProbeSpec
from tfidf_tune.passages.stretches import (
    SHARED_TOKENS,
    WindowChooser,
    join_documents,
    windows_with_shared_stretch,
)

# As many tokens are read as so many times the passages take, so that they are drawn from
# everywhere.
_MANY_TIMES = 4
_SHARE_OF_SHARED = 0.5  # of the stretches by which controls are recognized


class UnseenPassage(NamedTuple):
    """A candidate of a control.

    Attributes:
        token_ids (TokenArray): int32 ``[block_size]``.
        document (int): the number of its document in the source, over all files, from 0.
    """

    token_ids: TokenArray
    document: int


class Unseen(NamedTuple):
    """Candidates of controls.

    A control shares no stretch of ``num_bytes`` with the training text, or the documents that share
    it are compared by tokens. That suffices if each :data:`SHARED_TOKENS` of it hold such a
    stretch, which is true of ``passages``.
    """

    passages: list[UnseenPassage]
    num_drawn: int  # before those were left out of which it is not true
    num_bytes: int

    def stretches(self, tokenizer: TextTokenizer, index: WindowIndex) -> list[list[int]]:
        """Return the hashes of the stretches of each passage."""
        batch = index.batch([text_of(tokenizer, each.token_ids) for each in self.passages])
        words, hashes = index.stretches(batch)
        of_passage = batch.of_text[words]
        return [hashes[of_passage == number].tolist() for number in range(len(self.passages))]


def draw_unseen(
    tokenizer: TextTokenizer, spec: ProbeSpec, rng: np.random.Generator, longest_word: int
) -> Unseen:
    """Draw more passages than are needed, without overlap."""
    if not spec.num_controls:
        return Unseen([], 0, 1)
    if spec.controls_source is None:
        documents = embedded_documents("validation") + embedded_documents("train")
    else:
        documents = list(
            load_documents(
                spec.controls_source,
                column=spec.controls_column or spec.column,
                sample_by=spec.document_is,
            )
        )
    number = num_candidates(spec.num_controls)
    tokens: list[TokenArray] = []
    num_possible = 0
    order = rng.permutation(len(documents))
    for ids in encode_texts(tokenizer, (documents[at] for at in order)):
        tokens.append(ids)
        num_possible += len(ids) // spec.block_size
        if num_possible > _MANY_TIMES * number:
            break
    # Distinct passages at random places of these documents.
    unseen = join_documents(tokens)
    ends = np.cumsum([len(ids) + 1 for ids in tokens])  # with the separator
    cut_at_eos(spec, tokenizer, unseen)
    chooser = WindowChooser(tokenizer, unseen, spec.block_size, rng)
    drawn: dict[bytes, UnseenPassage] = {}
    for start in chooser.taken(chooser.random(chooser.fits)):
        ids = chooser.window(start)
        document = int(order[np.searchsorted(ends, start, side="right")])
        drawn.setdefault(ids.tobytes(), UnseenPassage(ids, document))
        if len(drawn) == number:
            break
    # Half of the bytes that SHARED_TOKENS have in nearly all passages.
    texts = [text_of(tokenizer, passage.token_ids) for passage in drawn.values()]
    num_shared = min(SHARED_TOKENS, spec.block_size)
    sizes = [len(text) * num_shared / spec.block_size for text in texts] or [1.0]
    num_bytes = max(1, round(float(np.quantile(sizes, 0.05)) * _SHARE_OF_SHARED))
    # A stretch starts at a word, so that the tokens have to hold it and the longest gap between
    # words. Characters that count as words where none starts for long do so from longest_word bytes
    # after the first of the tokens on: what is before these differs in the training text.
    num_bytes_of = cache(lambda token: max(1, len(text_of(tokenizer, np.array([token])))))
    known = []
    for passage, text in zip(drawn.values(), texts, strict=True):
        ends = np.cumsum([0, *map(num_bytes_of, passage.token_ids.tolist())])
        gap = min(_longest_gap(text, len(text)), longest_word + _longest_gap(text, longest_word))
        if (ends[num_shared:] - ends[:-num_shared]).min() >= num_bytes + gap:
            known.append(passage)
    return Unseen(known, len(drawn), num_bytes)


def choose_controls(
    search: Search, unseen: Unseen, stretches: list[list[int]]
) -> tuple[list[UnseenPassage], int]:
    """Return the controls, and how many were refused because they share text with the training
    text.
    """
    spec = search.spec
    shared = search.built.shared
    num_shared = min(SHARED_TOKENS, spec.block_size)
    hits = [[key for key in keys if key in shared] for keys in stretches]
    accepted = {number for number, keys in enumerate(hits) if not keys}
    # A stretch of bytes in common is not yet SHARED_TOKENS in common: the tokens decide. Stretches
    # that occur in many places are refused without a look.
    num_places = [max((len(shared[key]) for key in keys), default=0) for keys in hits]
    possible = [number for number, most in enumerate(num_places) if 0 < most <= windows.MOST_SHARED]
    if len(accepted) < spec.num_controls and possible:
        places = []
        for number in possible:
            for key in hits[number]:
                places += shared[key]
        tokens = read_corpus(search, np.array(places, PLACE), "shared").token_ids
        candidates = join_documents(unseen.passages[number].token_ids for number in possible)
        is_shared = windows_with_shared_stretch(candidates, tokens, spec.block_size, num_shared)
        accepted |= {*compress(possible, ~is_shared[:: spec.block_size + 1])}
    controls = [unseen.passages[number] for number in sorted(accepted)][: spec.num_controls]
    num_refused = unseen.num_drawn - len(accepted)
    remark = (
        f" {num_refused} more have {num_shared} tokens in a row of the training text."
        if num_refused
        else ""
    )
    require_enough(spec, len(controls), "num_controls", spec.controls_source or EMBEDDED, remark)
    return controls, num_refused


def _longest_gap(text: bytes, longest_word: int) -> int:
    """Return the most bytes in a row of a text in which no word starts, see :func:`make_batch`."""
    words = windows.make_batch([text], longest_word=longest_word).words
    return int(np.diff(words, prepend=0, append=len(text)).max())
