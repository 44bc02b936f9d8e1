"""What the fused head costs: matrix products and bytes, counted.

Bytes are counted on the meta device, whose tensors have a shape but no memory, so that the sizes are those of real
models. Its operations are a CPU's: code that asked for a value would raise.
"""

import pytest
import torch
from head_reference import random_head
from operations import LiveBytes, Recorder

import tfidf_tune.loss._cross_entropy as module
from tfidf_tune.loss import CrossEntropyLoss, HeadInput, _cross_entropy, fused_cross_entropy

NAMES = HeadInput._fields
PRODUCTS = ("mm", "addmm", "addmm_")


def record(batch, wanted=NAMES, head="fused"):
    """The operations of forward and backward pass."""
    inputs = HeadInput(
        *(
            None if tensor is None else tensor.requires_grad_(name in wanted)
            for name, tensor in zip(NAMES, batch.head, strict=True)
        )
    )
    loss = CrossEntropyLoss(head=head)
    with Recorder() as recorder:
        total = loss(inputs, batch.labels)
        if wanted:
            total.backward()
    return recorder


def num_products(*args, **kwargs):
    return sum(operation in PRODUCTS for operation in record(*args, **kwargs).operations)


# ---- matrix products


def test_a_chunk_takes_three_matrix_products():
    """Its logits, and the gradients of hidden states and head: none is computed again."""
    for num_tokens, num_chunks in ((1, 1), (256, 1), (257, 2), (4096, 16), (5000, 16)):
        assert num_products(random_head(num_tokens, bias=num_tokens % 2 == 0)) == 3 * num_chunks


@pytest.mark.parametrize("wanted", [(), ("hidden",), ("weight", "bias")])
def test_frozen_inputs_cost_no_matrix_product_and_no_sum(wanted):
    recorder = record(random_head(700), wanted)
    products = sum(operation in PRODUCTS for operation in recorder.operations)
    assert products == 3 * (1 + ("hidden" in wanted) + ("weight" in wanted))
    assert (37 in recorder.sizes) == ("bias" in wanted)


def test_without_grad_mode_there_are_only_the_logits():
    batch = random_head(700)
    head = HeadInput(*(tensor.requires_grad_() for tensor in batch.head))
    with torch.no_grad(), Recorder() as recorder:
        fused_cross_entropy(head, batch.labels, batch.coefficients)
    assert sum(operation in PRODUCTS for operation in recorder.operations) == 3
    assert "scatter_add_" not in recorder.operations, "no gradient of the logits either"


def test_an_upstream_gradient_of_1_takes_no_pass_over_the_gradients():
    batch = random_head(700, dtype=torch.bfloat16)
    head = HeadInput(*(tensor.requires_grad_() for tensor in batch.head))
    total, _ = fused_cross_entropy(head, batch.labels, batch.coefficients)
    with Recorder() as recorder:
        total.backward()
    assert head.weight.grad is not None
    assert "mul_" not in recorder.operations


# ---- tensors


@pytest.mark.parametrize(("num_tokens", "dtype"), [(600, torch.float32), (6000, torch.bfloat16)])
def test_no_tensor_is_larger_than_a_chunk_of_logits(num_tokens, dtype):
    dim, vocab_size = 4, 1000
    recorder = record(random_head(num_tokens, dim=dim, vocab_size=vocab_size, dtype=dtype))
    largest = max(256, -(-num_tokens // 16)) * vocab_size
    assert dim * num_tokens < largest < num_tokens * vocab_size
    assert dim * vocab_size < largest
    assert max(recorder.sizes) == largest


def test_the_gradient_of_the_head_is_made_once_and_handed_over_without_a_copy(monkeypatch):
    addresses = []

    def spy(*args):
        gradients = original(*args)
        addresses.extend(gradient.data_ptr() for gradient in gradients[:2])  # a reference would make it a copy
        return gradients

    original = module._empty_gradients
    monkeypatch.setattr(module, "_empty_gradients", spy)
    batch = random_head(700, rows=7, dim=13, vocab_size=1009, dtype=torch.bfloat16)

    recorder = record(batch)

    assert recorder.sizes.count(13 * 1009) == 1
    assert [tensor.grad.data_ptr() for tensor in batch.head[:2]] == addresses


# ---- bytes


def peak_bytes(num_tokens, dim, vocab_size, dtype=torch.bfloat16, trained=True, **settings):
    """Most bytes alive at one time beside the inputs."""
    with torch.device("meta"):
        hidden = torch.empty(1, num_tokens, dim, dtype=dtype, requires_grad=True)
        weight = torch.empty(vocab_size, dim, dtype=dtype, requires_grad=trained)
        labels, coefficients = torch.empty(1, num_tokens, dtype=torch.int64), torch.empty(1, num_tokens)
    with LiveBytes([hidden, weight, labels, coefficients]) as live:
        total, _ = fused_cross_entropy(HeadInput(hidden, weight), labels, coefficients, **settings)
        total.backward()
    assert hidden.grad is not None
    assert (weight.grad is not None) == trained
    return live.most


NUM_TOKENS, DIM, VOCAB_SIZE = 4096, 2048, 128_256  # Llama 3.2 1B
LOGITS = NUM_TOKENS * VOCAB_SIZE * 2
GRADIENTS = {"hidden": NUM_TOKENS * DIM * 2, "weight": VOCAB_SIZE * DIM * 2}


def test_besides_gradients_memory_is_below_a_tenth_of_the_logits():
    assert peak_bytes(NUM_TOKENS, DIM, VOCAB_SIZE) - sum(GRADIENTS.values()) <= 0.1 * LOGITS


@pytest.mark.parametrize("block_size", ["_BLOCK_SIZE", "_CUDA_BLOCK_SIZE"])
def test_with_the_gradient_of_the_hidden_states_memory_is_below_a_tenth_too(block_size, monkeypatch):
    """On a CPU and on a GPU. The gradient of the head is half as large as the logits, whatever computes it."""
    monkeypatch.setattr(_cross_entropy, "_BLOCK_SIZE", getattr(_cross_entropy, block_size))
    assert peak_bytes(NUM_TOKENS, DIM, VOCAB_SIZE, trained=False) <= 0.1 * LOGITS


def test_accumulating_in_fp32_takes_4_bytes_more_for_each_weight_of_the_head():
    sizes = (1024, 512, 32_000)
    more = peak_bytes(*sizes, accumulate_in_fp32=True) - peak_bytes(*sizes)
    assert 0 < more <= 4 * 512 * 32_000
    more = peak_bytes(*sizes, dtype=torch.float32, accumulate_in_fp32=True) - peak_bytes(*sizes, dtype=torch.float32)
    assert more == 0
