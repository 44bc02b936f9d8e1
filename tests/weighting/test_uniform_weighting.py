"""Weight 1 everywhere, on the interface of all weightings."""

import pytest
import torch
from label_batches import random_labels
from tfidf_reference import IGNORED

from tfidf_tune.weighting import TokenWeighting, UniformWeighting


def test_every_valid_token_weighs_1_and_every_ignored_one_0():
    labels = random_labels(torch.Generator().manual_seed(0), 3, 40, 20)
    weights = UniformWeighting()(labels, vocab_size=20)
    assert weights.dtype == torch.float32
    assert torch.equal(weights, (labels != IGNORED).float())


def test_another_ignore_index_is_ignored():
    weights = UniformWeighting(ignore_index=7)(torch.tensor([[7, 1, 0]]))
    assert weights.tolist() == [[0.0, 1.0, 1.0]]


@pytest.mark.parametrize("bad_id", [-3, 10])
def test_an_id_outside_the_vocabulary_is_an_error_that_names_it(bad_id):
    with pytest.raises(ValueError, match=f"the id {bad_id}, outside the vocabulary of 10;"):
        UniformWeighting()(torch.tensor([[1, bad_id]]), vocab_size=10)


def test_document_ids_change_nothing():
    labels = torch.tensor([[1, 2, IGNORED]])
    assert UniformWeighting()(labels, document_ids=torch.tensor([[0, 1, 1]])).tolist() == [[1.0, 1.0, 0.0]]


def test_it_is_a_weighting_without_state():
    weighting = UniformWeighting()
    assert isinstance(weighting, TokenWeighting)
    assert not weighting.state_dict()
