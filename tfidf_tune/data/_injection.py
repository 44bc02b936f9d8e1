"""Controlled injection: which passages are chosen, and where they go. Pure functions.

After "Demystifying Verbatim Memorization in Large Language Models" (Huang, Yang and Potts, 2024): known
passages are repeated at random places of a training corpus, and the trained model is asked for them.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tfidf_tune.data._encoding import TextTokenizer, TokenArray, cut_blocks, encode_texts


class Candidate(NamedTuple):
    """A passage that is long enough: its text and token ids, int32 of shape ``[num_tokens]``."""

    text: str
    token_ids: TokenArray


class Injection(NamedTuple):
    """A corpus with injected passages.

    ``blocks`` is int32 of shape ``[num_blocks, block_size]``; ``positions`` has for each target the
    ascending ``[block, offset]`` of its injections' first tokens.
    """

    blocks: TokenArray
    positions: list[list[list[int]]]


def choose_passages(
    tokenizer: TextTokenizer, documents: Iterable[str], *, count: int, min_tokens: int, block_size: int
) -> list[Candidate]:
    """Choose the first passages that are long enough, in order.

    Passages that agree in their first ``block_size`` tokens, which are what is measured, count once: a
    control must not be a copy of a target, nor a target be injected twice as often as the others.

    Args:
        tokenizer (TextTokenizer): the tokenizer; BOS and EOS are not counted.
        documents (Iterable[str]): read no further than needed.
        count (int): how many to choose.
        min_tokens (int): the least number of tokens.
        block_size (int): tokens in a block.

    Returns:
        list[Candidate]: at most ``count`` passages; fewer where the documents run out.
    """
    chosen: dict[bytes, Candidate] = {}
    for text, ids in encode_texts(tokenizer, documents):
        if len(chosen) == count:
            break
        if len(ids) >= min_tokens:
            chosen.setdefault(ids[:block_size].tobytes(), Candidate(text, ids))
    return list(chosen.values())


def inject_aligned(base: TokenArray, targets: TokenArray, *, num_repeats: int, seed: int) -> Injection:
    """Put whole target blocks at random places between base blocks, which keep their order.

    Args:
        base (TokenArray): int32 of shape ``[num_base, block_size]``.
        targets (TokenArray): int32 of shape ``[num_targets, block_size]``.
        num_repeats (int): how often each target is put in.
        seed (int): decides on the places.

    Returns:
        Injection: ``num_base + num_targets * num_repeats`` blocks; all offsets are 0.
    """
    num_injected = len(targets) * num_repeats
    order = np.random.default_rng(seed).permutation(len(base) + num_injected)
    places = np.sort(order[:num_injected].reshape(len(targets), num_repeats), axis=1)
    is_base = np.ones(len(order), dtype=bool)
    is_base[places] = False
    blocks = np.empty((len(order), base.shape[1]), dtype=np.int32)
    blocks[is_base] = base
    blocks[places] = targets[:, None]
    return Injection(blocks, [[[block, 0] for block in row] for row in places.tolist()])


def inject_concatenated(
    base: Sequence[TokenArray],
    targets: Sequence[TokenArray],
    *,
    num_repeats: int,
    block_size: int,
    eos_id: int,
    seed: int,
) -> Injection:
    """Mix whole documents and whole targets at random, each followed by EOS, then cut into blocks.

    Targets straddle block borders. An injection whose first ``block_size`` tokens are not all within
    the blocks, because the tail that does not fill a block is dropped, is not counted.

    Args:
        base (Sequence[TokenArray]): documents, int32 of shape ``[num_tokens]``.
        targets (Sequence[TokenArray]): targets, int32 of shape ``[num_tokens]``.
        num_repeats (int): how often each target is put in.
        block_size (int): tokens in a block.
        eos_id (int): follows every document and target.
        seed (int): decides on the order.

    Returns:
        Injection: the blocks and the positions.
    """
    pieces = [*base, *(target for target in targets for _ in range(num_repeats))]
    order = np.random.default_rng(seed).permutation(len(pieces))
    eos = np.array([eos_id], dtype=np.int32)
    blocks = cut_blocks([part for index in order for part in (pieces[index], eos)], block_size)

    lengths = np.array([len(piece) + len(eos) for piece in pieces])[order]
    starts = np.empty(len(pieces), dtype=np.int64)
    starts[order] = np.cumsum(lengths) - lengths
    places = np.sort(starts[len(base) :].reshape(len(targets), num_repeats), axis=1)
    positions = [
        [list(divmod(start, block_size)) for start in row if start + len(target[:block_size]) <= blocks.size]
        for target, row in zip(targets, places.tolist(), strict=True)
    ]
    return Injection(blocks, positions)
