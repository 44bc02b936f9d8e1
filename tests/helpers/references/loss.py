"""The loss once more in float64, with a plain log_softmax, and the batches and tolerances of its
tests.
"""

import torch

from helpers.fakes.label_batches import EPS, random_labels
from helpers.references.tfidf import IGNORED
from tfidf_tune.weighting import TokenWeighting

# A token's cross-entropy in fp32 is lse - x: a maximum, an exponential, a sum over the vocabulary,
# a logarithm, a difference, each about an eps of values below 16, so 16 eps of the loss near ln v;
# the weights bring 24 eps, the mean over the tokens 14. That is 54, taken up to 64.
LOSS_RTOL = 64 * EPS

# The gradient is w / M (softmax - onehot): the weight brings 24 eps, the exponent x - lse below 24
# an eps for each unit of it, the rest a few. Relative to w / M, since the difference at the label
# may cancel.
GRADIENT_TOL = 64 * EPS


class GivenWeighting(TokenWeighting):
    """Hands out the weights that it was made with, and keeps what it was asked."""

    def __init__(self, weights, needs_predictions=False):
        super().__init__()
        self.weights = weights
        self.needs_predictions = needs_predictions
        self.asked = []

    def weigh(self, batch):
        self.asked.append(batch)
        return self.weights


def random_logits(generator, rows, length, vocab_size, dtype=torch.float32):
    return (torch.randn(rows, length, vocab_size, generator=generator) * 2).to(dtype)


def random_batch(seed, rows=3, length=21, vocab_size=50, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    labels = random_labels(generator, rows, length, vocab_size)
    labels[0, -1] = vocab_size - 1
    if rows > 1:
        labels[-1] = IGNORED
    return random_logits(generator, rows, length, vocab_size, dtype), labels


def reference_loss(logits, labels, weights=None, upstream=1.0):
    """Return -1/M sum_i w_i log P(x_i) and its gradient with respect to the
    logits, both float64.
    """
    logits = logits.detach().double().requires_grad_()
    valid = labels != IGNORED
    weights = valid.double() if weights is None else torch.as_tensor(weights, dtype=torch.float64)
    log_probs = logits.log_softmax(dim=-1).gather(-1, labels.long().clamp(min=0)[..., None])[..., 0]
    loss = -(weights * log_probs)[valid].sum() / int(valid.sum())
    (gradient,) = torch.autograd.grad(loss * upstream, logits)
    return loss.detach(), gradient


def loss_and_gradient(
    loss_function, logits, labels, upstream=1.0, num_chunks=None, device="cpu", **arguments
):
    """The same from a loss of ours, computed on a device, returned on the CPU.

    With ``num_chunks`` the logits come as torchtune's models return them.
    """
    logits = logits.detach().to(device).requires_grad_()
    given = logits if num_chunks is None else list(logits.chunk(num_chunks, dim=1))
    loss = loss_function(given, labels.to(device), **arguments)
    (gradient,) = torch.autograd.grad(loss * upstream, logits)
    return loss.detach().cpu(), gradient.cpu()


def assert_loss_equals_reference(loss, expected):
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=LOSS_RTOL, atol=0.0)


def assert_gradient_equals_reference(gradient, expected, scale=1.0):
    """``scale`` is the largest w / M, times the upstream gradient."""
    assert float(expected.abs().max()) > 0
    torch.testing.assert_close(
        gradient.double(), expected, rtol=GRADIENT_TOL, atol=GRADIENT_TOL * scale
    )
