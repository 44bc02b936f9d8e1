"""What a model predicts for the labels: against distributions in float64, from logits, chunks and hidden states."""

import math

import pytest
import torch
import torch.nn.functional as F
from difficulty_reference import assert_within, logit_error_of
from head_reference import random_head
from label_batches import EPS
from loss_reference import random_batch
from operations import Recorder
from tfidf_reference import IGNORED

from tfidf_tune.loss import HeadInput, token_predictions


def assert_predictions(predictions, logits, labels, logit_error=0.0):
    """Bounds as in ``difficulty_reference``: a shift of logarithms, and what the terms of the entropy make of it."""
    distribution = torch.distributions.Categorical(logits=logits.detach().double())
    valid, vocab_size = labels != IGNORED, logits.shape[-1]
    shift = 2 * torch.as_tensor(logit_error, dtype=torch.float64) + (32 + vocab_size) * EPS
    assert [part.dtype for part in predictions] == [torch.float32] * 2
    assert not any(part.requires_grad for part in predictions)
    assert_within(
        predictions.log_probability, distribution.log_prob(labels.clamp(min=0)) * valid, shift * torch.ones_like(valid)
    )
    entropy = distribution.entropy()
    largest = (entropy + shift) * torch.exp(shift) * (1 + (vocab_size + 4) * EPS)
    assert_within(predictions.entropy, entropy * valid, largest - entropy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_predictions_equal_those_of_a_categorical_distribution(dtype):
    logits, labels = random_batch(0, dtype=dtype)
    assert_predictions(token_predictions([logits.requires_grad_()], labels.to(torch.int8)), logits, labels)


# 21 positions.
@pytest.mark.parametrize("lengths", [[1, 13, 2, 5], [1] * 21])
def test_chunks_are_bit_identical_to_whole_logits(lengths):
    logits, labels = random_batch(1)
    expected = token_predictions([logits], labels)
    predictions = token_predictions(list(logits.split(lengths, dim=1)), labels)
    assert all(torch.equal(part, other) for part, other in zip(predictions, expected, strict=True))


# A single chunk of tokens; several, the last of them shorter.
@pytest.mark.parametrize(
    ("rows", "num_tokens", "dtype", "bias"), [(3, 60, torch.bfloat16, True), (2, 700, torch.float32, False)]
)
def test_a_head_input_gives_the_predictions_of_its_logits(rows, num_tokens, dtype, bias):
    head, labels, _ = random_head(num_tokens, rows=rows, dtype=dtype, bias=bias)
    head = HeadInput(*(None if tensor is None else tensor.requires_grad_() for tensor in head))
    logits = F.linear(*(None if tensor is None else tensor.detach().double() for tensor in head))
    assert_predictions(token_predictions(head, labels), logits, labels, logit_error_of(head))


def test_logits_of_several_blocks_give_the_same_predictions():
    """2**20 logits are a block: here 104 tokens, of 150."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 50, 10_000, generator=generator)
    labels = torch.randint(10_000, (3, 50), generator=generator)
    with Recorder() as recorder:
        predictions = token_predictions([logits], labels)
    assert 10**6 < max(recorder.sizes) <= 2**20
    assert_predictions(predictions, logits, labels)


def test_no_more_than_a_16th_of_the_logits_of_a_head_is_made_at_a_time():
    head, labels, _ = random_head(8192, dim=4, vocab_size=50)
    with Recorder() as recorder:
        token_predictions(head, labels)
    assert max(recorder.sizes) == 8192 * 50 // 16


# ---- extremes


def test_a_distribution_with_one_outcome_has_an_entropy_of_0_and_no_nan():
    logits = torch.full((1, 3, 6), float("-inf"))
    logits[0, 0, 2] = logits[0, 1, 5] = 0.0
    logits[0, 2] = torch.tensor([0.0, 0.0, 1e30, 0.0, 0.0, 0.0])
    log_probability, entropy = token_predictions([logits], torch.tensor([[2, 4, 2]]))
    assert entropy.tolist() == [[0.0, 0.0, 0.0]]
    assert log_probability.tolist() == [[0.0, -math.inf, 0.0]]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_ignored_positions_do_not_count(value):
    logits, labels = random_batch(3)
    expected = token_predictions([logits], labels)
    logits[labels == IGNORED] = value
    predictions = token_predictions([logits], labels)
    for part, other in zip(predictions, expected, strict=True):
        assert torch.equal(part, other)
        assert not part[labels == IGNORED].any()
