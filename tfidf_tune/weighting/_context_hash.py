"""Hashes of token contexts, and choices made by hash instead of at random.

Everything is int64 arithmetic without overflow, so that a CPU and a GPU give the same numbers.

Shape suffixes: C choices of context, B rows, S positions in a row.
"""

from collections.abc import Sequence
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from tfidf_tune.weighting._weighting import differs_from_previous

HASH_RANGE = 2**32
LONGEST_CONTEXT = 1024  # each token of context takes a pass over the mini-batch
_PRIME = 2**31 - 1
_BASE = 1_000_003
SECOND_BASE = 1_299_709
# Below 2**31, so that a product with a number of 32 bits fits into int64.
_MULTIPLIER = 0x45D9F3B
_MASK = HASH_RANGE - 1


def documents_around(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and last position of the document around each of :func:`positions_in_document`, ``[b, s]``."""
    positions_S = torch.arange(positions.shape[1], device=positions.device)
    # A document ends where the next position counts from 0 again; read backwards, the nearest end is a running minimum.
    is_last_BS = F.pad(positions[:, 1:] == 0, (0, 1), value=True)
    last_BS = torch.where(is_last_BS, positions_S, positions.shape[1]).flip(1).cummin(dim=1).values.flip(1)
    return positions_S - positions, last_BS


def positions_in_document(valid: Tensor, document_ids: Tensor | None) -> Tensor:
    """Count the valid labels of the same document right before each one, int64 ``[b, s]``; others reset the count."""
    positions_S = torch.arange(valid.shape[1], device=valid.device)
    # The count restarts after an ignored label, and where another document begins.
    begins_BS = F.pad(~valid[:, :-1], (1, 0), value=True)
    if document_ids is not None:
        begins_BS |= differs_from_previous(document_ids)
    # The last restart so far, by a running maximum.
    return positions_S - torch.where(begins_BS, positions_S, 0).cummax(dim=1).values


def hash_contexts(labels: Tensor, length: int, *, seed: int = 0) -> Tensor:
    """Hash the seed and the ``length`` labels before each position, in their order: int64 ``[b, s]`` in [0, 2**32).

    It has no meaning where fewer labels are before the position in its document.
    """
    num_positions = labels.shape[1]
    # Horner's rule, the farthest label first: each step takes the whole mini-batch one label further. Both factors are
    # below 2**31, so that no product overflows.
    tokens = F.pad(labels + 1, (length, 0)) % _PRIME
    state = torch.full_like(labels, seed % _PRIME)
    for first in range(length):
        state = (state * _BASE + tokens[:, first : first + num_positions]) % _PRIME
    return _mix_bits(state)


def hash_skip_grams(labels: Tensor, choices: Sequence[Sequence[int]], length: int, *, base: int = _BASE) -> Tensor:
    """Hash each label together with every choice of labels out of the ``length`` ones before it.

    A choice is a list of distances, and labels keep their places. A hash has no meaning where fewer than ``length``
    labels are before the position in its document. Returns int64 ``[c, b, s]`` in [0, 2**32).
    """
    # One term for each distance, shared by all choices: the label that far back times a power of the base.
    shifted = F.pad(labels + 1, (length, 0)) % _PRIME
    num_positions = labels.shape[1]
    terms = [
        shifted[:, length - distance : length - distance + num_positions] * pow(base, distance, _PRIME) % _PRIME
        for distance in range(length + 1)
    ]
    total = sum(terms[1:], terms[0])
    sums = []
    for j, choice in enumerate(choices):
        # The number of the choice tells equal sums of different choices apart.
        number = (j + 1) * pow(base, length + 1, _PRIME)
        left_out = [terms[distance] for distance in range(1, length + 1) if distance not in choice]
        # Whichever are fewer: the terms of the choice, or those to be subtracted from all.
        if len(choice) < len(left_out):
            sums.append(sum((terms[distance] for distance in choice), terms[0] + number))
        else:
            sums.append(reduce(torch.sub, left_out, total + number))
    return _mix_bits(torch.stack(sums).remainder_(_PRIME))


def _mix_bits(numbers: Tensor) -> Tensor:
    """Spread the lowest 32 bits of int64 numbers, so that similar ones differ widely: in [0, 2**32), one to one."""
    # Shifts bring high bits down, products with an odd number bring low bits up; both can be undone: none collide.
    mixed = numbers & _MASK
    for _ in range(2):
        mixed = (mixed ^ (mixed >> 16)).mul_(_MULTIPLIER).bitwise_and_(_MASK)
    return mixed ^ (mixed >> 16)
