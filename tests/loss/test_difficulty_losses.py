"""MiLe and focal through the loss: what the model predicts, the weights of it, and no gradient
through them.
"""

import pytest
import torch
import torch.nn.functional as F
from helpers.fakes.label_batches import EPS
from helpers.operations import Recorder
from helpers.references.difficulty import assert_within, logit_error_of, truth_of_difficulty
from helpers.references.head import in_float64, random_head
from helpers.references.loss import (
    GRADIENT_TOL,
    LOSS_RTOL,
    GivenWeighting,
    loss_and_gradient,
    random_batch,
    reference_loss,
)
from helpers.references.tfidf import IGNORED

from tfidf_tune.loss import HeadInput, WeightedCrossEntropyLoss, token_predictions
from tfidf_tune.weighting import FocalWeighting, MiLeWeighting


def assert_predictions(predictions, logits, labels, logit_error=0.0):
    """Bounds as in ``difficulty_reference``: a shift of logarithms, and what the terms of the
    entropy make of it.
    """
    distribution = torch.distributions.Categorical(logits=logits.detach().double())
    valid = labels != IGNORED
    vocab_size = logits.shape[-1]
    shift = 2 * torch.as_tensor(logit_error, dtype=torch.float64) + (32 + vocab_size) * EPS
    assert [part.dtype for part in predictions] == [torch.float32] * 2
    assert not any(part.requires_grad for part in predictions)
    assert_within(
        predictions.log_probability,
        distribution.log_prob(labels.clamp(min=0)) * valid,
        shift * torch.ones_like(valid),
    )
    entropy = distribution.entropy()
    largest = (entropy + shift) * torch.exp(shift) * (1 + (vocab_size + 4) * EPS)
    assert_within(predictions.entropy, entropy * valid, largest - entropy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_predictions_equal_those_of_a_categorical_distribution(dtype):
    logits, labels = random_batch(0, dtype=dtype)
    assert_predictions(
        token_predictions([logits.requires_grad_()], labels.to(torch.int8)), logits, labels
    )


# A single chunk of tokens; several, the last of them shorter.
@pytest.mark.parametrize(
    ("rows", "num_tokens", "dtype", "bias"),
    [(3, 60, torch.bfloat16, True), (2, 700, torch.float32, False)],
)
def test_a_head_input_gives_the_predictions_of_its_logits(rows, num_tokens, dtype, bias):
    head, labels, _ = random_head(num_tokens, rows=rows, dtype=dtype, bias=bias)
    for tensor in head:
        if tensor is not None:
            tensor.requires_grad_()
    logits = F.linear(*in_float64(head))
    assert_predictions(token_predictions(head, labels), logits, labels, logit_error_of(head))


def test_no_more_than_a_16th_of_the_logits_of_a_head_is_made_at_a_time():
    head, labels, _ = random_head(8192, dim=4, vocab_size=50)
    with Recorder() as recorder:
        token_predictions(head, labels)
    assert max(recorder.sizes) == 8192 * 50 // 16


# ---- extremes


def test_predictions_at_ignored_positions_do_not_count():
    logits, labels = random_batch(3)
    expected = token_predictions([logits], labels)
    logits[labels == IGNORED] = torch.nan
    predictions = token_predictions([logits], labels)
    for part, other in zip(predictions, expected, strict=True):
        assert torch.equal(part, other)
        assert not part[labels == IGNORED].any()


def mile(gamma=1.0, **options):
    return WeightedCrossEntropyLoss(MiLeWeighting(gamma=gamma), **options)


def focal(gamma=2.0, **options):
    return WeightedCrossEntropyLoss(FocalWeighting(gamma=gamma), **options)


KINDS = {"mile": mile, "focal": focal}
every_kind = pytest.mark.parametrize("kind", KINDS)


# ---- logits


def assert_loss_and_gradient(loss, gradient, logits, labels, kind, gamma):
    """The weights bring their tolerance, the rest that of the loss."""
    truth = truth_of_difficulty(kind, gamma, logits, labels)
    num_valid = (labels != IGNORED).sum()
    expected, expected_gradient = reference_loss(logits, labels, truth.weights)
    from_weights = (truth.tolerance * truth.losses + truth.weights * truth.shift).sum() / num_valid
    assert_within(loss, expected, from_weights + LOSS_RTOL * expected)
    terms = expected_gradient.abs() * (truth.tolerance / truth.weights.clamp_min(1e-300))[..., None]
    # Relative to w / M, since the difference at the label may cancel; the logarithm of a
    # probability rounds too.
    share = ((GRADIENT_TOL + truth.shift) * truth.weights / num_valid)[..., None]
    assert_within(gradient, expected_gradient, terms + share)


# 21 positions: not divisible by 2 and 8.
@pytest.mark.parametrize(("gamma", "num_chunks"), [(0.5, 2), (5.0, None)])
@every_kind
def test_the_loss_and_its_gradient_equal_the_reference(kind, gamma, num_chunks):
    """The reference takes the weights as constants: no gradient goes through them."""
    for seed in range(2):
        logits, labels = random_batch(seed)
        loss, gradient = loss_and_gradient(
            KINDS[kind](gamma=gamma), logits, labels, num_chunks=num_chunks
        )
        assert_loss_and_gradient(loss, gradient, logits, labels, kind, gamma)


# ---- hidden states and head


# 60 tokens are one chunk of the head, 700 are three.
@pytest.mark.parametrize(
    ("head", "dtype", "bias", "num_tokens"),
    [
        ("fused", torch.float32, True, 700),
        ("fused", torch.bfloat16, False, 60),
        ("fused", torch.bfloat16, True, 60),
    ],
)
@every_kind
def test_with_a_head_the_weights_equal_the_reference_and_the_gradients_are_those_of_given_weights(
    kind, head, dtype, bias, num_tokens
):
    """To the bit: the loss of given weights has tests of its own."""
    given, labels, _ = random_head(num_tokens, rows=2, dtype=dtype, bias=bias)
    logits = F.linear(*in_float64(given))
    gamma = 2.0
    truth = truth_of_difficulty(kind, gamma, logits, labels, logit_error_of(given))
    own = terms_and_gradients(KINDS[kind](gamma=gamma, head=head), given, labels)
    assert_within(own[0].weights, truth.weights, truth.tolerance)
    if num_tokens == 60:  # one product, whose rounded logits are known: bounds of float32
        truth = truth_of_difficulty(kind, gamma, F.linear(*given), labels)
        assert_within(own[0].weights, truth.weights, truth.tolerance)
        assert float(truth.tolerance.max()) < 0.001 * float(truth.weights.max())

    same = terms_and_gradients(
        WeightedCrossEntropyLoss(GivenWeighting(own[0].weights), head=head), given, labels
    )
    for value, other in zip([*own[0], *own[1]], [*same[0], *same[1]], strict=True):
        assert torch.equal(value, other)
    assert all(gradient.any() for gradient in own[1])


def terms_and_gradients(loss_function, head, labels):
    inputs = [tensor.clone().requires_grad_() for tensor in head if tensor is not None]
    terms = loss_function.terms(HeadInput(*inputs), labels)
    return terms._replace(loss=terms.loss.detach()), torch.autograd.grad(terms.loss, inputs)


# ---- extremes


@every_kind
def test_a_model_that_is_certain_gives_no_nan(kind):
    """Right or wrong: the mass on one id is all there is."""
    logits = torch.zeros(2, 5, 9)
    labels = torch.arange(10).view(2, 5) % 9
    logits.scatter_(2, torch.tensor([[0, 1, 2, 3, 0], [5, 6, 7, 8, 0]])[..., None], 1e4)
    for num_right in (9, 10):
        labels[0, 4] = 4 if num_right == 9 else 0
        terms = KINDS[kind]().terms(logits, labels)
        loss, gradient = loss_and_gradient(KINDS[kind](), logits, labels)
        assert torch.isfinite(terms.weights).all()
        assert torch.isfinite(gradient).all()
        if kind == "mile":
            assert torch.equal(terms.weights, torch.ones(2, 5))  # entropies of 0
        elif num_right == 9:
            assert terms.weights.flatten().tolist() == [0.0] * 4 + [10.0] + [0.0] * 5
        else:
            assert not terms.weights.any()
            assert not loss
            assert not gradient.any()


def test_an_id_outside_the_vocabulary_of_the_logits_is_an_error_that_names_it():
    """Predictions for it are computed before the weighting refuses it."""
    logits, labels = random_batch(7)
    for bad_id in (50, -7):
        labels[0, 0] = bad_id
        for given in (logits, HeadInput(logits, torch.eye(50))):
            with pytest.raises(ValueError, match=f"the id {bad_id}, outside the vocabulary of 50"):
                mile()(given, labels)
