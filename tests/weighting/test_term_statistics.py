"""The pure functions of the weighting: term frequency, idf, normalisation."""

import math

import pytest
import torch
from label_batches import EPS, WEIGHT_RTOL
from tfidf_reference import IGNORED, reference_unit_mean

from tfidf_tune.weighting import inverse_document_frequency, term_frequency, unit_mean

# ---- term frequency


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("count", [1.0, 2.0, 3.0, 4096.0]),
        ("log", [1.0, 1 + math.log(2), 1 + math.log(3), 1 + math.log(4096)]),
        ("binary", [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_each_form_of_term_frequency_is_its_formula(form, expected):
    frequency = term_frequency(torch.tensor([[1, 2, 3, 4096]]), form)
    # A logarithm and a sum, each rounded once.
    torch.testing.assert_close(frequency, torch.tensor([expected]), rtol=2 * EPS, atol=0.0)


# ---- idf


def test_idf_is_the_smoothed_formula():
    for num_documents in (0, 1, 2, 64, 100_000):
        found = sorted({0, 1, num_documents // 2, num_documents})[: num_documents + 1]
        idf = inverse_document_frequency(torch.tensor(found), torch.tensor(num_documents))
        expected = torch.tensor([math.log((1 + num_documents) / (1 + df)) + 1 for df in found])
        # The logarithm rounds once, its argument before it (an absolute error of eps), the sum after it; idf >= 1.
        torch.testing.assert_close(idf, expected, rtol=3 * EPS, atol=0.0)


# ---- unit mean


def raw_weights(seed, rows=3, length=50):
    generator = torch.Generator().manual_seed(seed)
    raw = torch.rand(rows, length, generator=generator).square() * 9 + 1
    valid = torch.rand(rows, length, generator=generator) < 0.7
    return raw * valid, valid


def reference_of(raw, valid, cap):
    labels = torch.where(valid, 0, IGNORED).tolist()
    return torch.tensor(reference_unit_mean(raw.tolist(), labels, cap))


# 3 is near the largest weight without a cap; at 1.01 nearly all weights are capped.
@pytest.mark.parametrize("cap", [None, 1.0, 1.01, 1.5, 3.0, 1e6])
def test_unit_mean_equals_the_reference(cap):
    raw, valid = raw_weights(int(10 * (cap or 0)) % 97)
    weights = unit_mean(torch.where(valid, raw, 1e6), valid, cap)  # only valid positions count
    expected = reference_of(raw, valid, cap)
    rtol = WEIGHT_RTOL
    if cap is not None:
        num_valid = int(valid.sum())
        rest = num_valid - int((expected >= cap * (1 - 1e-6)).sum()) * cap
        # The scale is (M - k cap) / rest of the weights: the rounding of k cap, magnified by the difference.
        rtol += num_valid * EPS / rest if rest > 1e-6 else 0.0
    torch.testing.assert_close(weights, expected, rtol=rtol, atol=0.0)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_unit_mean_of_nothing_valid_is_0(cap):
    weights = unit_mean(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool), cap)
    assert torch.equal(weights, torch.zeros(2, 3))


@pytest.mark.parametrize("smallest", [0.0, 1e-45, 1e-38, 1e-32])
def test_raw_weights_too_small_for_a_mean_stay_finite_and_those_of_0_stay_0(smallest):
    """Their number over their sum would be infinite, and 0 times that is NaN."""
    raw = torch.tensor([[0.0, smallest, 0.0, smallest]])
    weights = unit_mean(raw, torch.tensor([[True, True, True, False]]))
    assert torch.isfinite(weights).all()
    assert weights[0, [0, 2, 3]].tolist() == [0.0, 0.0, 0.0]
    assert 0 <= weights[0, 1] <= 3


@pytest.mark.parametrize("cap", [None, 1.0])
def test_a_single_valid_token_weighs_1(cap):
    weights = unit_mean(torch.tensor([[3.7, 1.0]]), torch.tensor([[True, False]]), cap)
    # A reciprocal and a product, each rounded once.
    torch.testing.assert_close(weights, torch.tensor([[1.0, 0.0]]), rtol=EPS, atol=0.0)


def test_equal_weights_at_the_edge_of_the_cap_stay_equal():
    raw = torch.tensor([[4.0, 4.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    weights = unit_mean(raw, torch.ones(1, 8, dtype=torch.bool), 1.5)
    # Three tokens at 1.5 leave 8 - 4.5 for five equal ones.
    torch.testing.assert_close(weights, torch.tensor([[1.5] * 3 + [0.7] * 5]), rtol=4 * EPS, atol=0.0)
