"""Hashes of contexts: against Python's integers, and as good as chance where chance can be told."""

import math

import pytest
import torch
from label_batches import random_labels
from peer_reference import contexts_of, reference_context_hash, reference_mix
from tfidf_reference import IGNORED

from tfidf_tune.weighting._context_hash import HASH_RANGE, _mix_bits, hash_contexts, positions_in_document

# Of a sum of chances that is as good as normal, what is beyond 5 standard deviations happens once in 1.7 million times.
# All draws are fixed: a bound that holds once holds always.
NUM_DEVIATIONS = 5


def hashes_of(labels, length, *, seed=0, document_ids=None):
    return hash_contexts(labels, positions_in_document(labels != IGNORED, document_ids), length, seed=seed)


# ---- against the reference


@pytest.mark.parametrize(("length", "seed", "documents"), [(1, -5, False), (13, 0, True), (50, 2**40, False)])
def test_the_hashes_are_those_of_big_integers(length, seed, documents):
    generator = torch.Generator().manual_seed(length)
    labels = random_labels(generator, 3, 70, 50_000, ignored=0.02)
    labels[0, 3:6] = torch.tensor([2**31 - 2, 2**31 - 1, 2**63 - 2])  # 0 and 1 modulo the prime; the largest
    ids = torch.randint(2, labels.shape, generator=generator).cumsum(dim=1) // 9 if documents else None
    hashes = hashes_of(labels, length, seed=seed, document_ids=ids)
    assert hashes.dtype == torch.int64
    contexts = contexts_of(labels.tolist(), None if ids is None else ids.tolist())
    assert hashes.tolist() == [[reference_context_hash(context, length, seed) for context in row] for row in contexts]


def test_the_positions_are_the_lengths_of_the_contexts():
    generator = torch.Generator().manual_seed(1)
    labels = random_labels(generator, 6, 40, 9, ignored=0.15)
    ids = torch.randint(2, labels.shape, generator=generator).cumsum(dim=1) // 5
    for document_ids in (None, ids):
        contexts = contexts_of(labels.tolist(), None if document_ids is None else document_ids.tolist())
        positions = positions_in_document(labels != IGNORED, document_ids)
        assert positions.tolist() == [[len(context) for context in row] for row in contexts]


def test_mixing_is_those_of_big_integers():
    numbers = torch.tensor([0, 1, 2, 2**16, 2**31 - 2, 2**31 - 1, 2**31, 2**32 - 1])
    assert _mix_bits(numbers).tolist() == [reference_mix(number) for number in numbers.tolist()]


@pytest.mark.parametrize("length", [1, 50])
def test_contexts_of_a_text_hardly_ever_share_a_hash(length):
    """A product of ids collapses: at 50 tokens half of them are lost."""
    num_windows = 2**15
    labels = torch.randperm(50_000, generator=torch.Generator().manual_seed(length))[: 2**15 + length].unsqueeze(0)
    hashes = hashes_of(torch.cat([labels, labels[:, :1]], dim=1), length)[:, length : length + num_windows]
    # Of n random numbers below 2**31 - 1 some n**2 / 2 / 2**31 = 1/4 pairs agree: 5 or more of them in 1 of 10**5.
    assert num_windows - len(hashes.unique()) < 5


# ---- chance


def is_hidden(length, k, *, kind="random", seed=0):
    """1.0 or 0.0. No id comes twice in these texts, so that no context does, not even of one token."""
    labels = torch.arange(2**16).view(16, -1)
    if kind == "random":
        labels = torch.randperm(2**16, generator=torch.Generator().manual_seed(0)).view(16, -1)
    return (hashes_of(labels, length, seed=seed)[:, length:] * k < HASH_RANGE).double()


@pytest.mark.parametrize(("length", "k", "kind"), [(1, 4, "counting up"), (13, 2, "random"), (50, 8, "counting up")])
def test_one_hash_in_k_is_below_the_kth_part_of_the_range(length, k, kind):
    hidden = is_hidden(length, k, kind=kind)
    deviation = math.sqrt(hidden.numel() * (1 / k) * (1 - 1 / k))
    assert abs(hidden.sum() - hidden.numel() / k) < NUM_DEVIATIONS * deviation
