"""The two pure functions of the loss, with values worked out by hand."""

import math

import pytest
import torch
from label_batches import EPS
from tfidf_reference import IGNORED

from tfidf_tune.loss import token_cross_entropy, weighted_mean


def test_the_cross_entropy_of_each_token_is_minus_its_log_probability():
    logits = torch.tensor([[[0.0, math.log(3.0)], [5.0, 5.0]]])
    losses = token_cross_entropy(logits, torch.tensor([[0, 1]]))
    # P = 1/4 and 1/2. The second is lse(5, 5) - 5: an eps of lse, which is below 8.
    torch.testing.assert_close(losses, torch.tensor([[math.log(4.0), math.log(2.0)]]), rtol=0.0, atol=8 * EPS)


def test_the_cross_entropy_of_an_ignored_token_is_0():
    losses = token_cross_entropy(torch.ones(1, 2, 4), torch.tensor([[IGNORED, 1]]))
    assert losses[0, 0].item() == 0.0
    assert losses[0, 1].item() == pytest.approx(math.log(4.0), rel=4 * EPS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_cross_entropy_is_float32_whatever_the_logits_are(dtype):
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    labels = torch.tensor([[1, 2, 3], [4, 5, 6]])
    losses = token_cross_entropy(logits, labels)
    assert losses.dtype == torch.float32
    assert torch.equal(losses, token_cross_entropy(logits.float(), labels))


def test_the_weighted_mean_divides_by_the_number_of_valid_tokens_and_not_by_the_weights():
    losses = torch.tensor([[2.0, 4.0, 0.0], [1.0, 0.0, 0.0]])
    weights = torch.tensor([[1.0, 0.5, 0.0], [3.0, 0.0, 0.0]])
    valid = torch.tensor([[True, True, False], [True, False, False]])
    assert weighted_mean(losses, weights, valid).item() == pytest.approx(7 / 3, rel=EPS)


def test_the_weighted_mean_without_valid_tokens_is_0_and_can_be_backpropagated():
    losses = torch.zeros(2, 3, requires_grad=True)
    loss = weighted_mean(losses, torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(losses.grad, torch.zeros(2, 3))


def test_the_gradient_of_the_weighted_mean_is_the_weight_over_the_number_of_valid_tokens():
    losses = torch.ones(1, 4, requires_grad=True)
    weights = torch.tensor([[0.5, 1.0, 2.5, 0.0]])
    weighted_mean(losses, weights, weights > 0).backward()
    torch.testing.assert_close(losses.grad, weights / 3, rtol=EPS, atol=0.0)
