"""MiLe and focal weights from given predictions; what a model predicts is the business of the
loss's tests.
"""

import math

import pytest
import torch
from helpers.fakes.label_batches import EPS, assert_weights_equal_reference, random_labels
from helpers.references.peers import mean_1
from helpers.references.tfidf import IGNORED

from tfidf_tune.weighting import FocalWeighting, MiLeWeighting, Predictions

# A sum (or a difference) and a power, each within an ulp, the first magnified by gamma, here 5 at
# most; the mean 14 and the scale 2, as for TF-IDF.
RTOL = 24 * EPS


def random_predictions(seed, rows=3, length=40):
    """Probabilities from next to nothing to nearly 1; entropies from 0 to ln 50,000."""
    generator = torch.Generator().manual_seed(seed)
    labels = random_labels(generator, rows, length, 30)
    log_probability = -12 * torch.rand(rows, length, generator=generator) ** 3
    entropy = math.log(50_000) * torch.rand(rows, length, generator=generator) ** 2
    ignored = labels == IGNORED
    return labels, Predictions(
        log_probability.masked_fill(ignored, 0), entropy.masked_fill(ignored, 0)
    )


def expected_weights(labels, values, raw_weight):
    labels = labels.tolist()
    values = values.tolist()
    raw = []
    for row, row_values in zip(labels, values, strict=True):
        weights = []
        for token, value in zip(row, row_values, strict=True):
            weights.append(0.0 if token == IGNORED else raw_weight(value))
        raw.append(weights)
    return mean_1(raw, labels)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 5.0])
def test_the_weights_equal_the_formulas(gamma):
    for seed in range(2):
        labels, predictions = random_predictions(seed)
        predictions.entropy.requires_grad_()
        weights = MiLeWeighting(gamma=gamma)(labels, predictions=predictions)
        expected = expected_weights(
            labels, predictions.entropy, lambda entropy: (1 + entropy) ** gamma
        )
        assert not weights.requires_grad
        assert_weights_equal_reference(weights, expected, RTOL)
        weights = FocalWeighting(gamma=gamma).eval()(labels, predictions=predictions)
        expected = expected_weights(
            labels, predictions.log_probability, lambda value: (-math.expm1(value)) ** gamma
        )
        assert_weights_equal_reference(weights, expected, RTOL)


@pytest.mark.parametrize("gamma", [1.0, 9.0])
def test_focal_weights_of_what_is_certain_are_0_and_never_nan(gamma):
    """What float32 can tell from certainty, to a power that it can no longer hold."""
    labels = torch.zeros(1, 8, dtype=torch.int64)
    for others, last in (
        (0.0, 0.0),
        (0.0, -EPS),
        (-EPS, -EPS),
        (1e-7, -0.5),
    ):  # 1e-7: rounded above a probability of 1
        log_probability = torch.tensor([[others] * 7 + [last]])
        weights = FocalWeighting(gamma=gamma)(
            labels, predictions=Predictions(log_probability, torch.zeros(1, 8))
        )
        assert torch.isfinite(weights).all()
        assert not weights[log_probability >= 0].any()
