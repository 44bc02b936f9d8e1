"""The terms of a mini-batch: each token once for every document that contains it.

Two ways to one result. On a GPU shapes are fixed, so that nothing waits for the device and the whole can be compiled
or captured in a graph. On a CPU NumPy looks at the values: it sorts short rows several times faster than torch, a call
of it costs a third, and nothing is done for positions that hold no term.

Shape suffixes: B rows, S positions in a row, N positions of all rows, T terms.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from tfidf_tune.weighting._labels import on_host

Integers = npt.NDArray[np.integer]


class Terms(NamedTuple):
    """The distinct keys of each row.

    Attributes:
        keys (Tensor): integer ``[t]``, each key once for each row that holds it. On CPU t is their number; elsewhere,
            where that number is not known without waiting for the device, it is b * s, and -1 fills the room left.
        counts (Tensor): int64 ``[t]``, the positions of the row that hold the key; 0 in the room left.
        positions (Tensor): int64 ``[b, s]``, the term at each position: an index of the other two.
    """

    keys: Tensor
    counts: Tensor
    positions: Tensor


def distinct_terms(keys_BS: Tensor) -> Terms:
    """Find the distinct keys of each row and count how often they occur in it.

    Sorting brings equal keys together, so that the count of a key is the length of its run. The work
    is that of one sort of ``[b, s]``; nothing of the size of the vocabulary is made.

    Args:
        keys_BS (Tensor): integer keys of shape ``[b, s]``.

    Returns:
        Terms: the terms.
    """
    if keys_BS.numel() == 0:
        nothing = keys_BS.long()
        return Terms(keys_BS.flatten(), nothing.flatten(), nothing)
    if on_host(keys_BS):
        return Terms(*map(torch.from_numpy, distinct_terms_on_host(keys_BS.numpy())))
    return distinct_terms_on_device(keys_BS)


def distinct_terms_on_device(keys_BS: Tensor) -> Terms:
    """:func:`distinct_terms` with fixed shapes."""
    sorted_BS, order_BS = keys_BS.sort(dim=-1)
    is_first_BS = F.pad(sorted_BS[:, 1:] != sorted_BS[:, :-1], (1, 0), value=True)
    term_N = is_first_BS.flatten().cumsum(0) - 1
    sorted_N = sorted_BS.flatten()
    return Terms(
        keys=torch.full_like(sorted_N, -1).scatter_(0, term_N, sorted_N),
        counts=torch.zeros_like(term_N).scatter_add_(0, term_N, torch.ones_like(term_N)),
        positions=torch.empty_like(order_BS).scatter_(-1, order_BS, term_N.view_as(order_BS)),
    )


def distinct_terms_on_host(keys_BS: Integers) -> tuple[Integers, Integers, Integers]:
    """:func:`distinct_terms` with NumPy."""
    num_rows, length = keys_BS.shape
    order_BS = keys_BS.argsort(axis=-1)
    order_BS += np.arange(0, num_rows * length, length)[:, None]
    order_N = order_BS.ravel()
    sorted_N = keys_BS.ravel().take(order_N)
    is_first_N = np.empty(num_rows * length, dtype=np.bool_)
    np.not_equal(sorted_N[1:], sorted_N[:-1], out=is_first_N[1:])
    is_first_N[::length] = True
    first_T = is_first_N.nonzero()[0]
    counts_T = np.empty_like(first_T)
    np.subtract(first_T[1:], first_T[:-1], out=counts_T[:-1])
    counts_T[-1:] = num_rows * length - first_T[-1:]
    term_N = is_first_N.cumsum()
    term_N -= 1
    positions_N = np.empty_like(term_N)
    positions_N[order_N] = term_N
    return sorted_N.take(first_T), counts_T, positions_N.reshape(keys_BS.shape)
