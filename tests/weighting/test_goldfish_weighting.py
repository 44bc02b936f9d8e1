"""Goldfish weights: which tokens are left out, and the hash that decides it."""

import pytest
import torch
from helpers.fakes.label_batches import EPS, assert_weights_equal_reference, random_labels
from helpers.references.peers import reference_goldfish
from helpers.references.tfidf import IGNORED

from tfidf_tune.weighting import GoldfishWeighting

# A ratio of two whole numbers, rounded once.
RTOL = EPS


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
    """Special tokens are kept; without the size of a vocabulary ids may have any size."""
    weighting = GoldfishWeighting(**settings)
    weighting.set_special_tokens([4])
    weighting.set_special_tokens(token for token in (3, 40, 40))  # in place of those before
    generator = torch.Generator().manual_seed(0)
    found = []
    for rows, length in [(3, 90), (1, 1), (2, 7), (5, 60)]:
        labels = random_labels(generator, rows, length, 50, ignored=0.02)
        labels[-1, length // 2 :] = IGNORED
        ids = (
            torch.randint(2, labels.shape, generator=generator).cumsum(dim=1) // 30
            if documents
            else None
        )
        if length == 90:
            # 0 and 1 modulo the prime; the largest.
            labels[0, 3:6] = torch.tensor([2**31 - 2, 2**31 - 1, 2**63 - 2])
        weights = weighting(labels, vocab_size=None if length == 90 else 50, document_ids=ids)
        expected = reference_goldfish(
            labels.tolist(), None if ids is None else ids.tolist(), special=(3, 40), **settings
        )
        assert_weights_equal_reference(weights, expected, RTOL)
        found.append(weights[labels != IGNORED])
    found = torch.cat(found)
    assert (found == 0).any()
    assert (found > 1).any()
