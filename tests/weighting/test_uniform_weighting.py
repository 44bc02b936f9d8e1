"""Weight 1 everywhere, on the interface of all weightings."""

import torch
from label_batches import random_labels
from tfidf_reference import IGNORED

from tfidf_tune.weighting import TokenWeighting, UniformWeighting


def test_every_valid_token_weighs_1_and_every_ignored_one_0():
    labels = random_labels(torch.Generator().manual_seed(0), 3, 40, 20)
    weights = UniformWeighting()(labels, vocab_size=20)
    assert weights.dtype == torch.float32
    assert torch.equal(weights, (labels != IGNORED).float())


def test_document_ids_change_nothing():
    labels = torch.tensor([[1, 2, IGNORED]])
    assert UniformWeighting()(labels, document_ids=torch.tensor([[0, 1, 1]])).tolist() == [[1.0, 1.0, 0.0]]


def test_it_is_a_weighting_without_state():
    weighting = UniformWeighting()
    assert isinstance(weighting, TokenWeighting)
    assert not weighting.state_dict()
