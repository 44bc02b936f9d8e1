"""The product of two weightings: the numbers, and that all else reaches both factors."""

import pytest
import torch
from label_batches import EPS, WEIGHT_RTOL, assert_weights_equal_reference, random_labels, random_stream
from peer_reference import reference_goldfish, reference_product
from tfidf_reference import IGNORED, ReferenceTFIDF

from tfidf_tune.weighting import (
    FocalWeighting,
    GatheredLabels,
    GoldfishWeighting,
    MiLeWeighting,
    Predictions,
    ProductWeighting,
    RepetitionWeighting,
    TFIDFWeighting,
    TokenBatch,
    TokenDropWeighting,
    TokenWeighting,
    UniformWeighting,
)

# The errors of two factors, their product, and once more a mean.
RTOL = 2 * WEIGHT_RTOL + 18 * EPS

STREAM = random_stream(seed=0, num_batches=8, max_rows=4, max_length=40, vocab_size=30)


class AskedWeighting(TokenWeighting):
    """A factor that keeps what it gets."""

    def __init__(self, weights=None, *, sync=False):
        super().__init__()
        self.weights = weights
        self.sync = sync
        self.batches = []
        self.special = []

    def set_special_tokens(self, token_ids):
        self.special.extend(token_ids)

    def weigh(self, batch):
        self.batches.append(batch)
        return torch.ones(batch.labels.shape) if self.weights is None else self.weights


@pytest.mark.parametrize("swapped", [False, True])
def test_goldfish_times_tfidf_equals_the_references_over_several_batches(swapped):
    factors = [GoldfishWeighting(k=2, h=1), TFIDFWeighting(num_batches=3, tf="log")]
    weighting, reference = ProductWeighting(*(factors[::-1] if swapped else factors)), ReferenceTFIDF(3, "log")
    num_hidden = 0
    for i, labels in enumerate(STREAM):
        document_ids = torch.arange(labels.numel()).view_as(labels) // 7
        training = i % 4 != 3
        weights = weighting.train(training)(labels, vocab_size=30, document_ids=document_ids)
        tokens, ids = labels.tolist(), document_ids.tolist()
        uniform = [[float(token != IGNORED) for token in row] for row in tokens]
        kept = reference_goldfish(tokens, ids, k=2, h=1) if training else uniform
        expected = reference_product(kept, reference(tokens, ids, training), tokens)
        assert_weights_equal_reference(weights, expected, RTOL)
        num_hidden += int(((weights == 0) & (labels != IGNORED)).sum())
    assert num_hidden > 20


def test_factors_that_together_hide_every_token_give_weights_of_0():
    labels = torch.tensor([[1, 1, 1, 1]])
    halves = torch.tensor([[2.0, 0.0, 2.0, 0.0]])
    weighting = ProductWeighting(AskedWeighting(halves), AskedWeighting(halves.flip(1)))
    assert weighting(labels).tolist() == [[0.0, 0.0, 0.0, 0.0]]


def test_the_mean_is_1_for_factors_of_any_mean_and_ignored_positions_weigh_0():
    labels = torch.tensor([[1, 2, IGNORED]])
    weighting = ProductWeighting(AskedWeighting(torch.tensor([[4.0, 2.0, 9.0]])), AskedWeighting())
    torch.testing.assert_close(weighting(labels), torch.tensor([[4 / 3, 2 / 3, 0.0]]), rtol=4 * EPS, atol=0.0)


def test_it_needs_predictions_if_a_factor_does():
    for first, second in ((MiLeWeighting, UniformWeighting), (UniformWeighting, FocalWeighting)):
        assert ProductWeighting(first(), second()).needs_predictions
        assert ProductWeighting(UniformWeighting(), ProductWeighting(first(), second())).needs_predictions
    assert not ProductWeighting(GoldfishWeighting(), TFIDFWeighting()).needs_predictions


@pytest.mark.parametrize(("sync", "training"), [((False, True), True), ((True, False), True), ((True, True), False)])
def test_both_factors_get_the_batch_and_those_with_sync_the_gathered_labels(sync, training):
    factors = [AskedWeighting(sync=shares) for shares in sync]
    product = ProductWeighting(*factors).train(training)
    assert product.sync == any(sync)
    labels, ids, predictions = torch.tensor([[1, 2]]), torch.tensor([[0, 1]]), Predictions(torch.ones(1, 2), None)
    gathered = GatheredLabels(torch.tensor([[1, 2], [3, 4]]), None, (slice(0, 1), slice(2)))
    product(TokenBatch(labels, ids, 5, predictions, gathered))
    for factor in factors:
        (batch,) = factor.batches
        assert batch.labels is labels
        assert (batch.vocab_size, batch.document_ids, batch.predictions) == (5, ids, predictions)
        assert (batch.gathered is not None) == (factor.sync and training)


def test_special_tokens_reach_both_factors_even_from_an_iterator():
    first, second = AskedWeighting(), AskedWeighting()
    ProductWeighting(first, second).set_special_tokens(token for token in (3, 5))
    assert first.special == second.special == [3, 5]
    weighting = ProductWeighting(GoldfishWeighting(k=2, h=1), TokenDropWeighting(p=0.9))
    weighting.set_special_tokens(iter([0]))
    labels = random_labels(torch.Generator().manual_seed(0), 4, 60, 3)
    weights = weighting(labels)
    assert (weights[labels == 0] > 0).all()
    assert (weights[labels == 1] == 0).any()


def test_a_product_with_a_factor_without_unit_mean_is_not_scaled():
    labels = torch.arange(1, 41).view(2, 20)
    product = ProductWeighting(
        GoldfishWeighting(k=2, h=1), RepetitionWeighting(h=2, k=2, alpha=1.0, span=1, min_length=1, sample=1)
    )
    alone = GoldfishWeighting(k=2, h=1)(labels)
    assert not product.has_unit_mean
    for times in range(1, 4):
        expected = alone.clone()
        expected[:, 2:] /= times
        torch.testing.assert_close(product(labels), expected)
