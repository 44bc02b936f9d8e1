"""Goldfish weights: which tokens are left out, and that it is always the same ones; the hash that decides it."""

import pytest
import torch
from label_batches import EPS, assert_weights_equal_reference, random_labels
from peer_reference import contexts_of, reference_context_hash, reference_goldfish
from tfidf_reference import IGNORED

from tfidf_tune.weighting import GoldfishWeighting
from tfidf_tune.weighting._context_hash import hash_contexts, positions_in_document

# A ratio of two whole numbers, rounded once.
RTOL = EPS


def is_kept(labels, document_ids=None, **settings):
    return GoldfishWeighting(**settings)(labels, document_ids=document_ids) > 0


def random_text(seed, rows=4, length=256, vocab_size=1000):
    return torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("settings", "documents"),
    [
        ({}, False),
        ({"k": 3, "h": 2, "seed": -7}, True),
        ({"k": 8, "h": 50, "seed": 2**40}, False),
        ({"strategy": "static", "k": 7}, True),
    ],
)
def test_the_weights_equal_the_reference(settings, documents):
    weighting = GoldfishWeighting(**settings)
    weighting.set_special_tokens([3, 40])
    generator = torch.Generator().manual_seed(0)
    found = []
    for rows, length in [(3, 90), (1, 1), (2, 7), (5, 60)]:
        labels = random_labels(generator, rows, length, 50, ignored=0.02)
        labels[-1, length // 2 :] = IGNORED
        ids = torch.randint(2, labels.shape, generator=generator).cumsum(dim=1) // 30 if documents else None
        weights = weighting(labels, vocab_size=50, document_ids=ids)
        expected = reference_goldfish(
            labels.tolist(), None if ids is None else ids.tolist(), special=(3, 40), **settings
        )
        assert_weights_equal_reference(weights, expected, RTOL)
        found.append(weights[labels != IGNORED])
    found = torch.cat(found)
    assert (found == 0).any()
    assert (found > 1).any()


def test_a_passage_loses_the_same_tokens_wherever_it_occurs():
    h, passage, text = 13, random_text(5, rows=1, length=60)[0], random_text(6, rows=7, length=200)
    masks = []
    for rows, length, row, offset in [(1, 60, 0, 0), (7, 200, 3, 0), (7, 200, 6, 140), (4, 99, 0, 17), (2, 64, 1, 3)]:
        labels = text[:rows, :length].clone()
        labels[row, offset : offset + 60] = passage
        masks.append(is_kept(labels)[row, offset + h : offset + 60])
    assert not masks[0].all()
    assert all(torch.equal(mask, masks[0]) for mask in masks)


@pytest.mark.parametrize("settings", [{"k": 2, "h": 2}, {"strategy": "static", "k": 2}])
def test_special_tokens_are_always_kept_and_others_as_before(settings):
    labels = random_text(14, vocab_size=20)
    weighting = GoldfishWeighting(**settings)
    without = weighting(labels) > 0
    weighting.set_special_tokens(token for token in (3, 5, 5, 19))  # any iterable will do
    special = torch.isin(labels, torch.tensor([3, 5, 19]))
    assert not without[special].all()
    assert torch.equal(weighting(labels) > 0, without | special)
    weighting.set_special_tokens([4])  # in place of those before
    assert torch.equal(weighting(labels) > 0, without | (labels == 4))


@pytest.mark.parametrize(("length", "seed", "documents"), [(1, -5, False), (13, 0, True), (50, 2**40, False)])
def test_the_hashes_are_those_of_big_integers(length, seed, documents):
    generator = torch.Generator().manual_seed(length)
    labels = random_labels(generator, 3, 70, 50_000, ignored=0.02)
    labels[0, 3:6] = torch.tensor([2**31 - 2, 2**31 - 1, 2**63 - 2])  # 0 and 1 modulo the prime; the largest
    ids = torch.randint(2, labels.shape, generator=generator).cumsum(dim=1) // 9 if documents else None
    hashes = hash_contexts(labels, positions_in_document(labels != IGNORED, ids), length, seed=seed)
    assert hashes.dtype == torch.int64
    contexts = contexts_of(labels.tolist(), None if ids is None else ids.tolist())
    assert hashes.tolist() == [[reference_context_hash(context, length, seed) for context in row] for row in contexts]
