"""Hashes of the tokens before a token, and where a document begins and ends around it.

Contexts are hashed, and choices are made by hash instead of at random. Hashes are int64 arithmetic
without overflow, so that a CPU and a GPU give the same numbers. Shapes do not depend on values, so
that nothing waits for a GPU.

Shape suffixes: H hashes, D distances to labels before, C choices of context, B rows, S positions in
a row, T positions with those before the row.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tfidf_tune.weighting.token_weighting import differs_from_previous

HASH_RANGE = 2**32
LONGEST_CONTEXT = 1024
"""Most tokens of context: each takes as much time and memory as a copy of the labels."""
BASE = 1_000_003
_PRIME = 2**31 - 1
# Below 2**31, so that a product with a number of 32 bits fits into int64.
_MULTIPLIER = 0x45D9F3B
_MASK = HASH_RANGE - 1


def documents_around(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and last position of the document around each of
    :func:`positions_in_document`, ``[b, s]``.
    """
    positions_S = torch.arange(positions.shape[1], device=positions.device)
    # A document ends where the next position counts from 0 again; read backwards, the nearest end
    # is a running minimum.
    is_last_BS = F.pad(positions[:, 1:] == 0, (0, 1), value=True)
    ends_BS = torch.where(is_last_BS, positions_S, positions.shape[1])
    last_BS = ends_BS.flip(1).cummin(dim=1).values.flip(1)
    return positions_S - positions, last_BS


def positions_in_document(valid: Tensor, document_ids: Tensor | None) -> Tensor:
    """Count the valid labels of the same document right before each one, int64 ``[b, s]``; others
    reset the count.
    """
    positions_S = torch.arange(valid.shape[1], device=valid.device)
    # The count restarts after an ignored label, and where another document begins.
    begins_BS = F.pad(~valid[:, :-1], (1, 0), value=True)
    if document_ids is not None:
        begins_BS |= differs_from_previous(document_ids)
    # The last restart so far, by a running maximum.
    first_BS = torch.where(begins_BS, positions_S, 0).cummax(dim=1).values
    return positions_S - first_BS


def descending_powers(bases: Sequence[int], length: int) -> Tensor:
    """Return the powers ``length - 1`` to 0 of each base modulo the prime of the hashes, int64
    ``[h, length]``.
    """
    powers = []
    for base in bases:
        descending = [pow(base, exponent, _PRIME) for exponent in reversed(range(length))]
        powers.append(descending)
    return torch.tensor(powers)


def hash_contexts(labels: Tensor, powers_D: Tensor, *, seed: int = 0) -> Tensor:
    """Hash the seed and the labels before each position, in their order: int64 ``[b, s]`` in [0,
    2**32).

    Of the :func:`descending_powers` the first is for the seed, the others for as many labels. A
    hash has no meaning where fewer labels are before the position in its document.
    """
    terms_BDS = _terms(F.pad(labels + 1, (len(powers_D) - 1, -1)), powers_D[1:])
    sum_BS = terms_BDS.sum(1).add_(powers_D[0] * (seed % _PRIME))
    return _mix_bits(sum_BS.remainder_(_PRIME))


def hash_skip_grams(labels: Tensor, choices: Sequence[Sequence[int]], powers_HD: Tensor) -> Tensor:
    """Hash each label together with every choice of labels before it, once for each of several
    bases.

    A choice is a list of distances, and labels keep their places. Of the :func:`descending_powers`
    the first is for the number of the choice, the others for the distances down to 0. A hash has no
    meaning where a label of the largest distance is not in its document. Returns int64 ``[h, c, b,
    s]`` in [0, 2**32).
    """
    # One term for each distance, shared by all choices, the farthest first.
    longest = powers_HD.shape[1] - 2
    terms_HBDS = _terms(F.pad(labels + 1, (longest, 0)), powers_HD[:, None, 1:])
    total_HBS = terms_HBDS.sum(2)
    sums = []
    for j, choice in enumerate(choices):
        left_out = [distance for distance in range(1, longest + 1) if distance not in choice]
        # Whichever are fewer: the terms of the choice and of the label, or those to be subtracted
        # from all.
        if len(choice) < len(left_out):
            start_HBS = terms_HBDS[:, :, -1]
            distances = list(choice)
            sign = 1
        else:
            start_HBS = total_HBS
            distances = left_out
            sign = -1
        # The number of the choice tells equal sums of different choices apart.
        sum_HBS = start_HBS.add(powers_HD[:, :1, None], alpha=j + 1)
        for distance in distances:
            sum_HBS.add_(terms_HBDS[:, :, -1 - distance], alpha=sign)
        sums.append(sum_HBS)
    return _mix_bits(torch.stack(sums, dim=1).remainder_(_PRIME))


def _terms(numbers_BT: Tensor, powers_D: Tensor) -> Tensor:
    """Multiply any d numbers next to each other by the powers ``[..., 1, d]``: int64 ``[..., b, d,
    s = t - d + 1]``.
    """
    # A view. Its windows have a fixed size, so that compiled graphs serve every length of rows.
    windows_BDS = (numbers_BT % _PRIME).unfold(1, powers_D.shape[-1], 1).transpose(1, 2)
    # Both factors are below 2**31, so that no product overflows.
    return (windows_BDS * powers_D[..., None]).remainder_(_PRIME)


def _mix_bits(numbers: Tensor) -> Tensor:
    """Spread the lowest 32 bits of int64 numbers, so that similar ones differ widely: in [0,
    2**32), one to one.
    """
    # Shifts bring high bits down, products with an odd number bring low bits up; both can be
    # undone: none collide.
    mixed = numbers & _MASK
    for _ in range(2):
        mixed = (mixed ^ (mixed >> 16)).mul_(_MULTIPLIER).bitwise_and_(_MASK)
    return mixed ^ (mixed >> 16)
