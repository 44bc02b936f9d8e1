"""The losses on logits, whole and in chunks, against float64; the drop-in for stock recipes."""

from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from helpers.fakes.label_batches import EPS
from helpers.references.loss import (
    LOSS_RTOL,
    assert_gradient_equals_reference,
    assert_loss_equals_reference,
    loss_and_gradient,
    random_batch,
    reference_loss,
)
from helpers.references.tfidf import IGNORED, ReferenceTFIDF
from torchtune.training import compile_loss

from tfidf_tune.loss import (
    CrossEntropyLoss,
    HeadInput,
    TFIDFCrossEntropyLoss,
)
from tfidf_tune.loss.stock import CEWithChunkedOutputLoss
from tfidf_tune.weighting import TFIDFWeighting


def largest_share(weights, labels):
    return max(chain.from_iterable(weights)) / int((labels != IGNORED).sum())


# ---- against the reference


# 21 positions: not divisible by 2 and 8; 40 chunks are more than positions. None is whole logits.
@pytest.mark.parametrize(
    ("num_chunks", "num_output_chunks", "tf", "cap", "upstream"),
    [
        (None, 3, "log", 1.2, -0.25),
        (None, 64, "binary", None, 3.0),
        (2, 8, "count", 1.2, 1.0),
        (40, 8, "count", None, 1.0),
    ],
)
def test_the_tfidf_loss_and_its_gradient_equal_the_reference_over_several_steps(
    num_chunks, num_output_chunks, tf, cap, upstream, device
):
    """Narrow and strided labels, strided logits and changing vocabularies too."""
    loss_function = TFIDFCrossEntropyLoss(
        num_batches=2, tf=tf, max_weight=cap, num_output_chunks=num_output_chunks
    )
    weights_of = ReferenceTFIDF(2, tf, cap)
    steps = [(3, 21, 50), (1, 7, 70), (2, 21, 20), (4, 1, 300), (2, 33, 50)]
    for seed, (rows, length, vocab_size) in enumerate(steps):
        logits, labels = random_batch(seed, rows, length, vocab_size)
        weights = weights_of(labels.tolist())
        expected, expected_gradient = reference_loss(logits, labels, weights, upstream)
        if seed == 2:
            logits, labels = (
                tensor.transpose(0, 1).contiguous().transpose(0, 1)
                for tensor in (logits, labels.int())
            )
        loss, gradient = loss_and_gradient(
            loss_function, logits, labels, upstream, num_chunks, device
        )
        assert_loss_equals_reference(loss, expected)
        assert_gradient_equals_reference(
            gradient, expected_gradient, abs(upstream) * largest_share(weights, labels)
        )


def test_chunks_of_unequal_lengths_are_matched_with_their_labels_and_left_as_they_are():
    logits, labels = random_batch(2)
    weights = ReferenceTFIDF(4)(labels.tolist())
    expected, expected_gradient = reference_loss(logits, labels, weights)
    chunks = [chunk.clone().requires_grad_() for chunk in logits.split([1, 13, 2, 5], dim=1)]
    before = list(chunks)
    loss = TFIDFCrossEntropyLoss(num_batches=4)(chunks, labels)
    assert_loss_equals_reference(loss.detach(), expected)
    loss.backward()
    gradient = torch.cat([chunk.grad for chunk in before], dim=1)
    assert_gradient_equals_reference(gradient, expected_gradient, largest_share(weights, labels))
    assert len(chunks) == 4
    assert all(chunk is other for chunk, other in zip(chunks, before, strict=True))


# ---- plain cross-entropy


def fp32_cross_entropy(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


@pytest.mark.parametrize(("rows", "length", "num_chunks"), [(3, 21, None), (1, 4096, 8)])
def test_a_uniform_weighting_equals_pytorchs_cross_entropy(rows, length, num_chunks, device):
    logits, labels = random_batch(length, rows, length, vocab_size=31)
    expected, expected_gradient = loss_and_gradient(
        fp32_cross_entropy, logits, labels, device=device
    )
    loss, gradient = loss_and_gradient(
        CrossEntropyLoss(), logits, labels, num_chunks=num_chunks, device=device
    )
    # The terms are the same bits; their sum is taken in another order than that of F.cross_entropy.
    # 2 ulp of the scalar for it, an ulp being at most eps of the value.
    torch.testing.assert_close(loss, expected, rtol=2 * EPS, atol=0.0)
    # The same softmax; the factor 1 / M goes in at another place, and rounds there.
    torch.testing.assert_close(
        gradient, expected_gradient, rtol=2 * EPS, atol=EPS / (rows * length)
    )


# ---- bfloat16


def test_on_bfloat16_logits_the_tfidf_loss_is_no_further_from_the_truth_than_fp32(device):
    logits, labels = random_batch(1, 4, 64, 500, torch.bfloat16)
    weights = torch.tensor(ReferenceTFIDF(4)(labels.tolist()), dtype=torch.float64)
    truth, expected_gradient = reference_loss(logits, labels, weights)
    loss, gradient = loss_and_gradient(
        TFIDFCrossEntropyLoss(num_batches=4), logits, labels, 1.0, 8, device
    )
    terms = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    naive = (terms.view_as(labels) * weights.float()).sum() / int((labels != IGNORED).sum())
    assert float((loss.double() - truth).abs()) <= float(
        (naive.double() - truth).abs() + LOSS_RTOL * truth
    )
    # The gradient is bf16 as the logits are: half an ulp of bf16 (2**-8 of the value), beside the
    # fp32 error.
    assert gradient.dtype == torch.bfloat16
    share = float(weights.max()) / int((labels != IGNORED).sum())
    torch.testing.assert_close(
        gradient.double(), expected_gradient, rtol=2**-8 + LOSS_RTOL, atol=LOSS_RTOL * share
    )


# ---- terms


@pytest.mark.parametrize("num_chunks", [None, 8])
def test_terms_hold_the_loss_the_weights_and_the_unweighted_cross_entropy_without_gradient(
    num_chunks,
):
    logits, labels = random_batch(19)
    logits.requires_grad_()
    given = logits if num_chunks is None else list(logits.chunk(num_chunks, dim=1))
    terms = TFIDFCrossEntropyLoss(num_batches=4).terms(given, labels)
    assert torch.equal(terms.loss, TFIDFCrossEntropyLoss(num_batches=4)(given, labels))
    assert torch.equal(terms.weights, TFIDFWeighting(num_batches=4)(labels, vocab_size=50))
    assert not terms.cross_entropy.requires_grad
    # Another order of summation than that of F.cross_entropy: 2 ulp.
    expected = fp32_cross_entropy(logits, labels).detach()
    torch.testing.assert_close(terms.cross_entropy, expected, rtol=2 * EPS, atol=0.0)


# ---- arguments


def test_labels_of_another_shape_than_the_logits_are_an_error_that_leaves_the_window():
    logits, _ = random_batch(23, rows=2, length=21)
    head = HeadInput(torch.zeros(2, 21, 4), torch.zeros(50, 4))
    for rows, length in ((2, 20), (2, 22), (3, 21)):
        labels = random_batch(23, rows=rows, length=length)[1]
        loss = TFIDFCrossEntropyLoss()
        for given in (logits, list(logits.chunk(8, dim=1)), head):
            with pytest.raises(
                ValueError, match=rf"shape \[2, 21\], the labels have shape \[{rows}, {length}\]"
            ):
                loss(given, labels)
        assert loss.weighting.window.num_documents == 0


def test_bad_arguments_are_refused():
    for arguments, message in (
        ({"num_output_chunks": 0}, "num_output_chunks is 0"),
        ({"accumulate_in_fp32": "no"}, "accumulate_in_fp32 is 'no'"),
        ({"head": "x"}, "head is 'x': possible are fused, chunked"),
        (
            {"head": "chunked", "accumulate_in_fp32": True},
            "accumulate_in_fp32 is set, which head 'chunked'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            CrossEntropyLoss(**arguments)


# ---- the drop-in for torchtune's own recipes: the TF-IDF loss under the name and with the base
# that they look at


# Dynamo looks at `.grad` of the chunks and hides the warning by a filter of its own, which ours
# comes before.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_drop_in_is_the_tfidf_loss_compiled_or_not(is_compiled, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "eager")  # which runs the same operations
    torch._dynamo.reset()
    settings = {"num_batches": 2, "tf": "log", "max_weight": 1.2}
    ours = TFIDFCrossEntropyLoss(**settings)
    stock = CEWithChunkedOutputLoss(**settings)
    if is_compiled:
        stock = compile_loss(stock, verbose=False)
    for seed in range(3):
        logits, labels = random_batch(seed)
        expected, expected_gradient = loss_and_gradient(ours, logits, labels, num_chunks=8)
        loss, gradient = loss_and_gradient(stock, logits, labels, num_chunks=8)
        assert torch.equal(loss, expected)
        assert torch.equal(gradient, expected_gradient)
    assert type(stock) is CEWithChunkedOutputLoss
    assert stock.state_dict().keys() == ours.state_dict().keys()
    torch._dynamo.reset()
