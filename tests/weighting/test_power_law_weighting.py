"""Power-law weights against a slow count, and what is kept of it."""

import pytest
import torch
from label_batches import EPS, assert_weights_equal_reference, random_stream
from peer_reference import ReferencePowerLaw
from tfidf_reference import IGNORED
from window_state import assert_same_state, state_copy

from tfidf_tune.weighting import PowerLawWeighting

# The sum with epsilon rounds once, which the power multiplies by alpha, here 3 at most; the power itself is within an
# ulp; the mean brings 14 and the scale 2, as for TF-IDF. That is 20, and 4 to spare.
RTOL = 24 * EPS

STREAM = random_stream(seed=0, num_batches=12, max_rows=4, max_length=50, vocab_size=30)


@pytest.mark.parametrize(
    ("alpha", "epsilon", "vocab_size"), [(0.5, 1.0, None), (1.0, 1e-3, 500), (3.0, 0.5, 30), (0.0, 1.0, 30)]
)
def test_the_weights_equal_the_reference_over_several_batches(alpha, epsilon, vocab_size):
    weighting, reference = PowerLawWeighting(alpha=alpha, epsilon=epsilon), ReferencePowerLaw(alpha, epsilon)
    for i, labels in enumerate(STREAM):
        training = i % 4 != 3
        weights = weighting.train(training)(labels, vocab_size=vocab_size)
        assert_weights_equal_reference(weights, reference(labels.tolist(), training), RTOL)
    assert max(reference.counts.values()) > 20


def test_the_defaults_are_alpha_one_half_and_epsilon_1():
    weights, expected = PowerLawWeighting()(STREAM[0]), PowerLawWeighting(alpha=0.5, epsilon=1.0)(STREAM[0])
    assert torch.equal(weights, expected)


def test_the_vocabulary_may_grow():
    weighting, reference = PowerLawWeighting(), ReferencePowerLaw()
    for largest in (3, 40, 7, 1000):
        labels = torch.tensor([[0, 1, 2, 2, largest], [largest, 1, IGNORED, IGNORED, 0]])
        assert_weights_equal_reference(weighting(labels), reference(labels.tolist()), RTOL)
        vocab_size = largest + 5
        labels = labels[:, :3]
        weights = weighting(labels, vocab_size=vocab_size)
        assert_weights_equal_reference(weights, reference(labels.tolist()), RTOL)


@pytest.mark.parametrize("seen_before", [0, 3])
def test_a_loaded_state_continues_exactly_in_a_module_of_any_length(seen_before):
    undisturbed, loaded = PowerLawWeighting(), PowerLawWeighting()
    for labels in STREAM[:6]:
        undisturbed(labels)
    for i in range(seen_before):
        loaded(torch.full((1, 3), 10 ** (i + 1)))  # 11 to 1001 entries, where the saved one has 30
    loaded.load_state_dict(state_copy(undisturbed))
    assert_same_state(loaded, state_copy(undisturbed))
    for labels in STREAM[6:]:
        assert torch.equal(loaded(labels), undisturbed(labels))
        assert_same_state(loaded, state_copy(undisturbed))


def test_a_state_without_the_counts_or_with_something_else_is_an_error():
    with pytest.raises(RuntimeError, match="Missing key"):
        PowerLawWeighting().load_state_dict({})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        PowerLawWeighting().load_state_dict({"counts": torch.zeros(3, dtype=torch.int64), "window": torch.zeros(3)})


@pytest.mark.parametrize("epsilon", [1e-8, 1e6])
@pytest.mark.parametrize("training", [True, False])
def test_at_the_limits_weights_have_mean_1(epsilon, training):
    """In evaluation tokens that were never seen weigh 1 / epsilon**4; in training they have been seen 2**20 times."""
    weighting = PowerLawWeighting(alpha=4, epsilon=epsilon).train(training)
    weights = weighting(torch.zeros(1, 2**20, dtype=torch.int64), vocab_size=2)
    torch.testing.assert_close(weights, torch.ones(1, 2**20), rtol=RTOL, atol=0.0)


def test_bfloat16_leaves_the_counts_as_they_are():
    weighting = PowerLawWeighting()
    weighting(torch.ones(1, 1025, dtype=torch.int64))  # bfloat16 holds 1024 and 1032
    assert weighting.to(torch.bfloat16).counts.tolist() == [0, 1025]
