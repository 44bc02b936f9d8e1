"""Copies of passages in training text: where they are put, and how they are changed."""

from typing import Literal, NamedTuple

import numpy as np

from tfidf_tune._tokenizer import TokenArray
from tfidf_tune.passages.stretches import Positions

NoiseKind = Literal["replace", "insert", "drop", "mixed"]
NOISE_KINDS = ("replace", "insert", "drop")


def draw_slots(
    num_base: int, num_targets: int, num_repeats: int, seed: int, *, shuffle_base: bool = False
) -> Positions:
    """Draw slots for base items, in order unless ``shuffle_base``, and then for the copies of each
    target, in order.
    """
    num_copies = num_targets * num_repeats
    # The first numbers drawn are the places of the copies, the others those of the base.
    drawn = np.random.default_rng(seed).permutation(num_base + num_copies)
    slots = (
        np.argsort(drawn)
        if shuffle_base
        else np.append(np.sort(drawn[num_copies:]), drawn[:num_copies])
    )
    slots[num_base:] = np.sort(slots[num_base:].reshape(num_targets, num_repeats), axis=1).ravel()
    return slots


class NoisyCopy(NamedTuple):
    """A copy of a passage, and the number of replaced, inserted and dropped tokens that are
    measured in both.
    """

    token_ids: TokenArray
    changes: list[int]


def noisy_copy(
    ids: TokenArray,
    noise: float,
    kind: NoiseKind,
    frequencies: TokenArray,
    num_measured: int,
    rng: np.random.Generator,
    *,
    origin: str = "noise draws tokens from the base text",
) -> NoisyCopy:
    """Change ``round(noise * len(ids))`` tokens of a passage: each is replaced, dropped, or gets a
    token before it.

    New tokens are drawn from ``frequencies``, where a token occurs as often as it is to be drawn,
    and differ from the token that they replace or precede. ``origin`` starts the message if these
    are too few. Changes count if they are in the first ``num_measured`` tokens of passage and copy,
    an inserted token with the token after it.
    """
    if len(np.unique(frequencies[:1000])) < 2 and len(np.unique(frequencies)) < 2:
        raise ValueError(f"{origin}, with fewer than two different ones: use more text")
    # Which tokens change, and how: a replaced token stays one, an inserted one makes two, a dropped
    # one none.
    places = np.sort(rng.choice(len(ids), round(noise * len(ids)), replace=False))
    possible = np.arange(len(NOISE_KINDS)) if kind == "mixed" else [NOISE_KINDS.index(kind)]
    kinds = rng.choice(possible, len(places))
    times = np.ones(len(ids), dtype=np.int64)
    times[places] = np.array([1, 2, 0])[kinds]
    copy = np.repeat(ids, times)
    starts = (np.cumsum(times) - times)[places]
    # New tokens are drawn again while they equal the token that they replace or precede.
    new = starts[kinds != NOISE_KINDS.index("drop")]
    old = copy[new]
    while (undrawn := copy[new] == old).any():
        copy[new[undrawn]] = rng.choice(frequencies, undrawn.sum())
    is_measured = (places < num_measured) & (starts < num_measured)
    return NoisyCopy(copy, np.bincount(kinds[is_measured], minlength=len(NOISE_KINDS)).tolist())
