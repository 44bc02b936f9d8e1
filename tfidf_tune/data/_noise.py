"""Copies of a passage that differ: some of its tokens are replaced, dropped, or have a token inserted before them."""

from typing import Any, Literal, NamedTuple

import numpy as np

from tfidf_tune._checks import require_choice
from tfidf_tune.data._tokenizer import TokenArray

NoiseKind = Literal["replace", "insert", "drop", "mixed"]
_KINDS = ("replace", "insert", "drop")


class NoisyCopy(NamedTuple):
    """A copy of a passage.

    ``token_ids`` is int32 of shape ``[num_tokens]``. ``changes`` has the number of replaced, inserted and dropped
    tokens among the first ``num_measured`` of the passage, as far as they lie in the first ``num_measured`` of the
    copy. An inserted token counts as one of the passage if the token after it is.
    """

    token_ids: TokenArray
    changes: list[int]


def check_noise(noise: Any, kind: Any) -> None:
    """Raise a ``ValueError`` unless the settings of noise are valid."""
    if isinstance(noise, bool) or not isinstance(noise, (int, float)) or not 0 <= noise < 1:
        raise ValueError(
            f"noise is {noise!r}: the share of a copy's tokens that is changed, set it to a number from 0 to below 1"
        )
    require_choice("noise_kind", kind, (*_KINDS, "mixed"))


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
    """Change ``round(noise * len(ids))`` tokens, drawn at random, of a passage.

    A changed token is replaced, dropped, or gets a token before it; with ``mixed`` each of the three is equally likely.
    New tokens are drawn from ``frequencies``, int32 ``[num_tokens]``, in which a token occurs as often as it is to be
    drawn, and differ from the token that they replace or precede. ``origin`` starts the message of the error.

    Raises:
        ValueError: If ``frequencies`` has fewer than two different tokens.
    """
    if len(np.unique(frequencies[:1000])) < 2 and len(np.unique(frequencies)) < 2:
        raise ValueError(f"{origin}, with fewer than two different ones: use more text")
    places = np.sort(rng.choice(len(ids), round(noise * len(ids)), replace=False))
    kinds = rng.integers(len(_KINDS), size=len(places)) if kind == "mixed" else np.full(len(places), _KINDS.index(kind))
    times = np.ones(len(ids), dtype=np.int64)
    times[places] = np.array([1, 2, 0])[kinds]
    copy = np.repeat(ids, times)
    starts = (np.cumsum(times) - times)[places]
    new = starts[kinds != _KINDS.index("drop")]
    old = copy[new]
    while (undrawn := copy[new] == old).any():
        copy[new[undrawn]] = rng.choice(frequencies, undrawn.sum())
    is_measured = (places < num_measured) & (starts < num_measured)
    return NoisyCopy(copy, np.bincount(kinds[is_measured], minlength=len(_KINDS)).tolist())
