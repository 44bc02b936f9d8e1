"""The loss from hidden states and head against float64, what it refuses, and what it costs in
products and bytes.
"""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers.operations import LiveBytes, Recorder
from helpers.references.head import (
    assert_equal_truth,
    random_head,
    reference,
    relative_error,
    tolerances,
    truth_of,
    values_of,
)
from helpers.references.loss import LOSS_RTOL, GivenWeighting
from helpers.references.tfidf import IGNORED, ReferenceTFIDF

from tfidf_tune.loss import (
    CrossEntropyLoss,
    HeadInput,
    TFIDFCrossEntropyLoss,
    WeightedCrossEntropyLoss,
    _cross_entropy,
    fused_cross_entropy,
    token_predictions,
)

NAMES = HeadInput._fields
# A chunk is of 256 rows up to 4,096 tokens, so these are 1, 2, 3 chunks; then 16 of 313 rows, the
# last of 305.
NUM_TOKENS = (1, 257, 700, 5000)


@pytest.fixture
def divided_as_on(monkeypatch):
    """Whatever the device is, divide logits as on a CPU or a GPU. The meta device is none
    of a CPU.
    """

    def patch(kind):
        rows = _cross_entropy._block_rows
        device = torch.device(kind)
        monkeypatch.setattr(
            _cross_entropy, "_block_rows", lambda *s, **o: rows(*s, **o | {"device": device})
        )

    return patch


# ---- against the reference


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_value_losses_and_gradients_equal_those_in_float64(num_tokens, device):
    batch = random_head(num_tokens, bias=num_tokens != 257)
    assert_equal_truth(values_of(fused_cross_entropy, batch, device=device), batch)


@pytest.mark.parametrize(
    "vocab_size", [10_000, 2**20 + 1]
)  # 104 rows are a block, one row is more than a block
def test_they_do_where_a_chunk_has_several_blocks(vocab_size):
    batch = random_head(300 if vocab_size == 10_000 else 3, dim=4, vocab_size=vocab_size)
    assert_equal_truth(values_of(fused_cross_entropy, batch), batch)


def test_they_do_divided_as_on_a_gpu_and_so_do_predictions(divided_as_on):
    divided_as_on("cuda")
    batch = random_head(700, vocab_size=10_000)
    for wanted in (NAMES, ()):
        assert_equal_truth(values_of(fused_cross_entropy, batch, wanted=wanted), batch)
    predicted = token_predictions(batch.head, batch.labels)
    losses = torch.where(batch.labels == IGNORED, 0.0, -predicted.log_probability)
    torch.testing.assert_close(
        losses.double(),
        truth_of(batch).losses,
        rtol=0.0,
        atol=float(tolerances(batch).losses.max()),
    )


def test_small_vocabularies_ignored_rows_narrow_labels_and_strided_tensors_are_supported():
    for vocab_size in (1, 2, 1001):
        hidden, weight, bias = (batch := random_head(600, rows=3, vocab_size=vocab_size)).head
        batch.labels[1] = IGNORED
        batch.coefficients[1] = 0.0
        strided = batch._replace(
            head=HeadInput(
                hidden.transpose(0, 1).contiguous().transpose(0, 1),
                weight.t().contiguous().t(),
                bias,
            ),
            labels=batch.labels.int().t().contiguous().t(),
            coefficients=batch.coefficients.t().contiguous().t(),
        )
        assert not any(tensor.is_contiguous() for tensor in (strided.head.hidden, *strided[1:]))
        assert_equal_truth(values_of(fused_cross_entropy, strided), strided)
        assert_equal_truth(values_of(fused_cross_entropy, strided, wanted=()), strided)


@pytest.mark.parametrize("upstream", [-3.7, 2.0**16])
def test_an_upstream_gradient_scales_the_gradients(upstream, device):
    batch = random_head(600)
    assert_equal_truth(
        values_of(fused_cross_entropy, batch, upstream, device=device), batch, upstream
    )


@pytest.mark.parametrize("tf", ["log", "count"])
def test_the_tfidf_loss_from_a_head_equals_the_reference_over_several_steps(tf):
    """Through ``terms`` and through ``forward``, each with a window of its own."""
    by_terms, by_forward = (TFIDFCrossEntropyLoss(num_batches=2, tf=tf) for _ in range(2))
    weights_of = ReferenceTFIDF(2, tf)
    for seed, (rows, length) in enumerate([(3, 100), (1, 7), (2, 300), (4, 1)]):
        batch = random_head(rows * length, seed=seed, rows=rows)
        weights = torch.tensor(weights_of(batch.labels.tolist()), dtype=torch.float64)
        num_valid = int((batch.labels != IGNORED).sum())
        weighted = batch._replace(coefficients=weights / num_valid)
        truth = truth_of(weighted)
        tolerance = tolerances(weighted)

        terms = by_terms.terms(batch.head, batch.labels)

        assert_close(terms.loss, truth.total, tolerance.total)
        assert torch.equal(by_forward(batch.head, batch.labels), terms.loss)
        mean = truth.losses.sum() / num_valid
        bound = tolerance.losses.sum() / num_valid
        assert_close(terms.cross_entropy, mean, bound + LOSS_RTOL * mean)
        assert not terms.cross_entropy.requires_grad
        torch.testing.assert_close(terms.weights.double(), weights, rtol=LOSS_RTOL, atol=0.0)


def assert_close(value, truth, tolerance):
    torch.testing.assert_close(value.double(), truth, rtol=0.0, atol=float(tolerance))


# ---- which gradients are made


@pytest.mark.parametrize("wanted", [(), ("hidden",), ("weight",), ("hidden", "bias")])
def test_frozen_inputs_get_no_gradient_and_the_others_the_same_one(wanted, device):
    batch = random_head(600)
    values = values_of(fused_cross_entropy, batch, wanted=wanted, device=device)
    assert_equal_truth(values, batch)
    for name in NAMES:
        assert (getattr(values, name) is not None) == (name in wanted)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_without_grad_mode_the_losses_are_the_same_and_nothing_can_be_backpropagated(mode):
    batch = random_head(600)
    with mode():
        values = values_of(fused_cross_entropy, batch)
    assert_equal_truth(values, batch)
    assert values.hidden is values.weight is values.bias is None


def test_a_second_backward_pass_is_an_error():
    """Only the sum has a gradient."""
    batch = random_head(300)
    head = HeadInput(*(tensor.requires_grad_() for tensor in batch.head))
    total, losses = fused_cross_entropy(head, batch.labels, batch.coefficients)
    assert not losses.requires_grad
    total.backward(retain_graph=True)
    with pytest.raises(
        RuntimeError, match=r"second backward pass: compute the loss again for each backward\(\)"
    ):
        total.backward()


# ---- the ends of the number range


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_logits_of_10000_give_the_true_losses_and_finite_gradients(dtype, device):
    """One-hot hidden states pick a column of the weight: the logits are its values, which every
    dtype has exactly.
    """
    weight = torch.tensor(
        [[8192.0, -8192.0, 0.0], [0.0, 8192.0, 0.0], [-8192.0, -8192.0, 64.0]], dtype=dtype
    )
    hidden = torch.eye(3, dtype=dtype)[None]
    labels = torch.tensor([[0, 2, 2]])
    batch = random_head(3)._replace(
        head=HeadInput(hidden, weight, None),
        labels=labels,
        coefficients=torch.tensor([[0.5, 0.25, 0.25]]),
    )

    values = values_of(fused_cross_entropy, batch, device=device)

    # Powers of two and their differences; what another token than the largest has, at most e^-64,
    # rounds to nothing.
    assert torch.equal(values.losses, torch.tensor([[0.0, 16384.0, 0.0]]))
    assert float(values.total) == 4096.0
    truth = truth_of(batch)
    torch.testing.assert_close(
        values.hidden.double(), truth.hidden, rtol=0.0, atol=8192 * math.exp(-64)
    )
    torch.testing.assert_close(values.weight.double(), truth.weight, rtol=0.0, atol=math.exp(-64))


def test_non_finite_inputs_make_the_loss_nan_unless_ignored():
    """The run then ends with an error instead of continuing with a broken model."""
    for where in ("hidden", "weight", "bias"):
        for value in (math.nan, math.inf):
            batch = random_head(300, ignored=0.0)
            getattr(batch.head, where).view(-1)[5] = value
            values = values_of(fused_cross_entropy, batch)
            assert values.total.isnan()
            assert values.hidden.isnan().any()
            assert where != "hidden" or values.losses.isnan().nonzero().tolist() == [[0, 0]]

            batch = random_head(300)
            expected = values_of(fused_cross_entropy, batch)
            batch.head.hidden[batch.labels == IGNORED] = value
            values = values_of(fused_cross_entropy, batch)
            assert torch.equal(values.total, expected.total)
            assert torch.equal(values.losses, expected.losses)


def test_small_fp16_gradients_do_not_underflow():
    """Under a loss scale they have to be made as large as that, and not only be multiplied by it
    once they are lost.
    """
    batch = random_head(1024, vocab_size=1000, dtype=torch.float16, ignored=0.0)
    batch = batch._replace(coefficients=batch.coefficients / 100)  # as of a batch of 100,000 tokens
    truth = truth_of(batch)
    runs = [(fused_cross_entropy, 2.0**15), (reference, 2.0**15), (reference, 1.0)]
    ours, scaled, alone = (
        [getattr(values_of(function, batch, scale), name).double() / scale for name in NAMES]
        for function, scale in runs
    )
    for name, *values in zip(NAMES, ours, scaled, alone, strict=True):
        error, budget, lost = (relative_error(value, getattr(truth, name)) for value in values)
        assert error <= budget < 0.1 * lost, name


def test_fp16_gradients_of_few_valid_tokens_among_many_do_not_overflow():
    """The scale inside must not exceed what fp16 holds when a few tokens share the whole loss."""
    batch = random_head(16384, dtype=torch.float16, ignored=0.0)
    # As large as states after a norm.
    batch = batch._replace(head=batch.head._replace(hidden=batch.head.hidden * 8))
    batch.labels[:, :-3] = IGNORED
    batch.coefficients[:] = (batch.labels != IGNORED) / 3
    values = values_of(fused_cross_entropy, batch)
    truth = truth_of(batch)
    for name in NAMES:
        # The labels' own -1, which is exact, outweighs what the rounded logits make: a few
        # roundings of 2^-11.
        assert relative_error(getattr(values, name), getattr(truth, name)) < 12 * 2**-11, name


# ---- torch.compile


# torch.compile's own look at an activation's .grad while it traces.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_chunks_give_the_same_values(monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")
    torch._dynamo.reset()

    def compiled(head_input, labels, coefficients):
        weights = coefficients * (labels != IGNORED).sum()
        loss = WeightedCrossEntropyLoss(GivenWeighting(weights))
        loss.compile_parts()
        return loss.objective(head_input, labels, weights)

    batch = random_head(700)
    values = values_of(compiled, batch)
    torch._dynamo.reset()

    assert_equal_truth(values, batch)
    assert all(value is not None for value in values)


# ---- settings


LABELS = torch.tensor([[1, 2, IGNORED], [0, 4, 3]])


def make_head(**changes):
    return HeadInput(
        **{
            "hidden": torch.randn(2, 3, 4),
            "weight": torch.randn(5, 4),
            "bias": torch.randn(5),
            **changes,
        }
    )


def test_mismatched_inputs_are_an_error_that_names_shapes_and_dtypes():
    for changes, named in (
        ({"hidden": torch.randn(1, 3, 4)}, r"hidden \[1, 3, 4\] float32"),
        ({"hidden": torch.randn(6, 4)}, r"hidden \[6, 4\]"),
        ({"hidden": torch.ones(2, 3, 4, dtype=torch.int64)}, "int64"),
        ({"weight": torch.randn(5, 3)}, r"weight \[5, 3\]"),
        ({"weight": torch.randn(5, 4, dtype=torch.bfloat16)}, "bfloat16"),
        ({"bias": torch.randn(1)}, r"bias \[1\]"),
    ):
        head = make_head(**changes)
        fused = partial(fused_cross_entropy, coefficients=torch.ones(2, 3))
        for function in (fused, token_predictions):
            with pytest.raises(ValueError, match=rf"(?s)does not fit: .*{named}"):
                function(head, LABELS)


@pytest.mark.parametrize("is_trained", [True, False])
def test_ignored_positions_do_not_count(is_trained):
    """The label that stands in for an ignored one may have a logit of -inf: of a
    padding id, say.
    """
    bias = torch.zeros(5)
    bias[0] = float("-inf")
    labels = torch.tensor([[1, 2, IGNORED], [3, 4, IGNORED]])
    head = make_head(bias=bias)
    head.hidden.requires_grad_(is_trained)
    expected = torch.nn.functional.cross_entropy(
        torch.nn.functional.linear(*head).flatten(0, 1)[labels.flatten() != IGNORED],
        labels[labels != IGNORED],
    )

    loss, cross_entropy, _ = CrossEntropyLoss().terms(head, labels)

    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(cross_entropy, expected.detach())


PRODUCTS = ("mm", "addmm", "addmm_")


def record(batch, wanted=HeadInput._fields, head="fused"):
    """The operations of forward and backward pass."""
    for name, tensor in zip(HeadInput._fields, batch.head, strict=True):
        if tensor is not None:
            tensor.requires_grad_(name in wanted)
    loss = CrossEntropyLoss(head=head)
    with Recorder() as recorder:
        total = loss(batch.head, batch.labels)
        if wanted:
            total.backward()
    return recorder


def num_products(recorder):
    return sum(operation in PRODUCTS for operation in recorder.operations)


# ---- cost: matrix products


def test_a_chunk_takes_three_matrix_products():
    """Its logits, and the gradients of hidden states and head: none is computed again."""
    for num_tokens, num_chunks in ((256, 1), (257, 2), (4096, 16), (5000, 16)):
        assert (
            num_products(record(random_head(num_tokens, bias=num_tokens % 2 == 0)))
            == 3 * num_chunks
        )


@pytest.mark.parametrize(("num_tokens", "dtype"), [(600, torch.float32), (6000, torch.bfloat16)])
def test_no_tensor_is_larger_than_a_chunk_of_logits(num_tokens, dtype):
    dim = 4
    vocab_size = 1000
    recorder = record(random_head(num_tokens, dim=dim, vocab_size=vocab_size, dtype=dtype))
    largest = max(256, -(-num_tokens // 16)) * vocab_size
    assert dim * num_tokens < largest < num_tokens * vocab_size
    assert dim * vocab_size < largest
    assert max(recorder.sizes) == largest


def test_the_gradient_of_the_head_is_made_once_and_handed_over_without_a_copy():
    recorder = record(random_head(700, rows=7, dim=13, vocab_size=1009, dtype=torch.bfloat16))
    assert recorder.sizes.count(13 * 1009) == 1


# ---- bytes


def on_meta(num_tokens, dim=2048, vocab_size=128_256):  # Llama 3.2 1B
    with torch.device("meta"):
        hidden = torch.empty(1, num_tokens, dim, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(vocab_size, dim, dtype=torch.bfloat16, requires_grad=True)
        return (
            HeadInput(hidden, weight),
            torch.empty(1, num_tokens, dtype=torch.int64),
            torch.empty(1, num_tokens),
        )


def memory_share(num_tokens):
    """Bytes besides gradients, as a share of the logits in bf16."""
    (hidden, weight, _), labels, coefficients = batch = on_meta(num_tokens)
    with LiveBytes([hidden, weight, labels, coefficients]) as live:
        total, _ = fused_cross_entropy(*batch)
        total.backward()
    return (live.most - hidden.grad.nbytes - weight.grad.nbytes) / (2 * num_tokens * len(weight))


def test_besides_gradients_memory_is_a_fourteenth_of_the_logits_and_on_a_gpu_a_fifth(divided_as_on):
    assert memory_share(4096) <= 0.2
    assert memory_share(2**16) <= 0.2
    divided_as_on("cpu")
    assert memory_share(4096) <= 1 / 14


def num_kernels(function):
    with Recorder() as recorder:
        function()
    return recorder.num_kernels


def test_a_chunk_takes_at_most_twice_the_kernels_of_the_formula_and_predictions_four_times():
    """Of 256 tokens on a GPU, where each kernel of a small mini-batch takes about as long as
    another.
    """
    (hidden, weight, _), labels, coefficients = on_meta(256)

    def formula():
        losses = F.cross_entropy(
            F.linear(hidden, weight).float().flatten(0, 1), labels.flatten(), reduction="none"
        )
        (losses * coefficients.flatten()).sum().backward()

    def predictions():
        logs = F.log_softmax(F.linear(hidden.detach(), weight.detach()).float(), dim=-1)
        return logs.gather(-1, labels[..., None]), (logs.exp() * logs).sum(-1)

    head, many_labels, many_coefficients = on_meta(8 * 256)
    fused = num_kernels(
        lambda: fused_cross_entropy(head, many_labels, many_coefficients)[0].backward()
    )
    assert fused <= 8 * 2 * num_kernels(formula)
    with torch.no_grad():
        assert num_kernels(lambda: token_predictions(head, many_labels)) <= 8 * 4 * num_kernels(
            predictions
        )


def test_where_there_is_a_gpu_the_weighting_is_compiled_too(monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")
    for has_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        loss = TFIDFCrossEntropyLoss()
        loss.compile_parts()
        assert (loss.weighting._compiled_call_impl is not None) == has_gpu


def test_a_gradient_of_the_gradient_is_an_error():
    """It would miss what depends on the hidden states."""
    batch = random_head(300)
    hidden = batch.head.hidden.requires_grad_()
    upstream = torch.tensor(2.0, requires_grad=True)
    total, _ = fused_cross_entropy(*batch)
    (gradient,) = torch.autograd.grad(total * upstream, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
