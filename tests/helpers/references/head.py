"""The loss from hidden states and head once more in float64, with whole logits, and the batches of
its tests.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from helpers.fakes.label_batches import EPS
from helpers.references.loss import GRADIENT_TOL, LOSS_RTOL
from helpers.references.tfidf import IGNORED
from tfidf_tune.loss import HeadInput


class HeadBatch(NamedTuple):
    """What a fused head is given.

    Attributes:
        head: hidden states ``[b, s, d]``, weight ``[v, d]``, bias ``[v]`` or None.
        labels: int64 ``[b, s]``.
        coefficients: float32 ``[b, s]``, 0 at ignored positions.
    """

    head: HeadInput
    labels: torch.Tensor
    coefficients: torch.Tensor


class Values(NamedTuple):
    """The sum, the cross-entropy of each token, and the gradients; None for what is not there."""

    total: torch.Tensor
    losses: torch.Tensor
    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None


def random_head(
    num_tokens,
    *,
    seed=0,
    rows=1,
    dim=16,
    vocab_size=37,
    dtype=torch.float32,
    bias=True,
    ignored=0.2,
):
    """Logits of a standard deviation of 2; coefficients of 0 to 2 over the number
    of valid tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, num_tokens // rows, dim, generator=generator).to(dtype)
    weight = (torch.randn(vocab_size, dim, generator=generator) * 2 * dim**-0.5).to(dtype)
    biases = torch.randn(vocab_size, generator=generator).to(dtype)
    labels = torch.randint(vocab_size, hidden.shape[:2], generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < ignored] = IGNORED
    labels[0, -1] = vocab_size - 1
    valid = labels != IGNORED
    coefficients = 2 * torch.rand(labels.shape, generator=generator) * valid / valid.sum()
    return HeadBatch(HeadInput(hidden, weight, biases if bias else None), labels, coefficients)


def values_of(function, batch, upstream=1.0, wanted=("hidden", "weight", "bias"), device="cpu"):
    """Call ``function(head, labels, coefficients)``, which gives a sum and losses, and take the
    gradients.

    Computed on a device, returned on the CPU.
    """
    tensors = []
    for name, tensor in zip(HeadInput._fields, batch.head, strict=True):
        if tensor is not None:
            tensor = tensor.detach().to(device, copy=True).requires_grad_(name in wanted)
        tensors.append(tensor)
    head = HeadInput(*tensors)
    total, losses = function(head, batch.labels.to(device), batch.coefficients.to(device))
    if total.requires_grad:
        (total * upstream).backward()
    values = [total.detach().cpu(), losses.detach().cpu()]
    for tensor in head:
        gradient = None if tensor is None else tensor.grad
        values.append(None if gradient is None else gradient.cpu())
    return Values(*values)


def reference(head, labels, coefficients):
    """The function itself, for :func:`values_of`; of float64 heads it is the truth."""
    log_probs = (
        F.linear(*head).log_softmax(dim=-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    )
    losses = torch.where(labels == IGNORED, 0.0, -log_probs)
    return (losses * coefficients.to(losses.dtype)).sum(), losses


def in_float64(head):
    hidden, weight, bias = head
    bias = None if bias is None else bias.detach().double()
    return HeadInput(hidden.detach().double(), weight.detach().double(), bias)


def truth_of(batch, upstream=1.0):
    return values_of(reference, batch._replace(head=in_float64(batch.head)), upstream)


def tolerances(batch, upstream=1.0):
    """How far each value may be from the truth in float32, element by element, in the worst case.

    A sum of n products is within n eps of the sum of their magnitudes. So the logits are; it shifts
    the logarithm of a probability by at most twice that, beside the tolerances of the loss on
    logits, and the gradient of the logits by as much of c (p + onehot). The normalizer is a sum
    over the vocabulary, whose v rounding errors of eps / 2 add up as in a random walk: within
    sqrt(v) eps of it (Higham and Mary 2019, lambda = 2), which shifts the logarithm by as much. The
    sums that gradients and total are made of come on top.
    """
    hidden, weight, bias = in_float64(batch.head)
    hidden = hidden.flatten(0, 1)
    labels = batch.labels.flatten()
    coefficients = batch.coefficients.flatten().double().abs() * abs(upstream)
    magnitudes = hidden.abs() @ weight.abs().t() + (0 if bias is None else bias.abs())
    shift = 2 * (hidden.shape[1] + 1) * EPS * magnitudes.amax(dim=1) + weight.shape[0] ** 0.5 * EPS
    probabilities = F.linear(hidden, weight, bias).softmax(dim=1)
    labels = labels.clamp(min=0)[:, None]
    terms = coefficients[:, None] * probabilities.scatter_add(
        1, labels, torch.ones_like(labels, dtype=torch.float64)
    )
    error = terms * (shift[:, None] + GRADIENT_TOL)
    losses = -probabilities.gather(1, labels)[:, 0].log()
    loss_error = shift + LOSS_RTOL * losses.clamp_min(1)
    num_tokens, vocab_size = terms.shape
    return Values(
        (coefficients / abs(upstream) * (loss_error + num_tokens * EPS * losses)).sum(),
        loss_error.view_as(batch.labels),
        ((error + vocab_size * EPS * terms) @ weight.abs()).view_as(batch.head.hidden),
        (error + num_tokens * EPS * terms).t() @ hidden.abs(),
        None if bias is None else (error + num_tokens * EPS * terms).sum(dim=0),
    )


def assert_equal_truth(values, batch, upstream=1.0):
    """Every value that is there, within :func:`tolerances`."""
    for name, value, truth, tolerance in zip(
        Values._fields, values, truth_of(batch, upstream), tolerances(batch, upstream), strict=True
    ):
        if value is not None:
            assert torch.isfinite(value).all(), name
            excess = (value.double() - truth).abs() - tolerance
            assert float(excess.max()) <= 0, (
                f"{name} is beyond its tolerance by {float(excess.max())}"
            )


def relative_error(value, truth):
    """In the 2-norm."""
    return float((value.double() - truth).norm() / truth.norm())
