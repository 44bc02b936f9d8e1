"""Random token dropping: as many tokens as it should be, others at every call, and the same ones after a resume."""

import pytest
import torch
from label_batches import EPS, assert_weights_equal_reference, random_labels, random_stream
from peer_reference import reference_token_drop
from tfidf_reference import IGNORED
from window_state import assert_same_state, state_copy

from tfidf_tune.weighting import TokenDropWeighting, _hiding

TEXT = torch.zeros(8, 2**12, dtype=torch.int64)


def is_dropped(weighting, labels=TEXT):
    return (weighting(labels) == 0) & (labels != IGNORED)


@pytest.mark.parametrize(("p", "seed"), [(0.25, 0), (0.5, 7), (0.1, -3), (0.9, 2**40), (0.0, 1)])
def test_the_weights_equal_the_reference(p, seed):
    weighting = TokenDropWeighting(p=p, seed=seed)
    weighting.set_special_tokens([0, 5])
    stream = random_stream(seed=1, num_batches=6, max_rows=4, max_length=40, vocab_size=30)
    for step, labels in enumerate(stream):
        expected = reference_token_drop(labels.tolist(), p=p, seed=seed, num_batches_seen=step, special=(0, 5))
        # A ratio of two whole numbers, rounded once.
        assert_weights_equal_reference(weighting(labels, vocab_size=30), expected, EPS)


@pytest.mark.parametrize("p", [0.05, 0.25, 0.5, 0.75])
def test_the_share_that_is_dropped_is_p(p):
    """Within 5 deviations of a binomial distribution, in each of several batches."""
    weighting = TokenDropWeighting(p=p)
    deviation = (TEXT.numel() * p * (1 - p)) ** 0.5
    for _ in range(4):
        assert abs(int(is_dropped(weighting).sum()) - p * TEXT.numel()) < 5 * deviation


def assert_independent(one, other, p):
    """Of two batches of draws: how often both are dropped, within 5 deviations."""
    deviation = (one.numel() * p**2 * (1 - p**2)) ** 0.5
    assert abs(int((one & other).sum()) - p**2 * one.numel()) < 5 * deviation


def test_every_batch_loses_other_tokens():
    weighting = TokenDropWeighting()
    batches = [is_dropped(weighting) for _ in range(5)]
    for i, one in enumerate(batches):
        for other in batches[:i]:
            assert_independent(one, other, 0.25)


def test_another_seed_drops_other_tokens():
    assert_independent(is_dropped(TokenDropWeighting(seed=0)), is_dropped(TokenDropWeighting(seed=1)), 0.25)


def test_the_next_seed_is_not_the_next_batch():
    first = TokenDropWeighting(seed=0)
    is_dropped(first)
    assert_independent(is_dropped(first), is_dropped(TokenDropWeighting(seed=1)), 0.25)


def test_another_rank_drops_other_tokens(monkeypatch):
    alone = is_dropped(TokenDropWeighting())
    monkeypatch.setattr(_hiding, "has_other_ranks", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert_independent(alone, is_dropped(TokenDropWeighting()), 0.25)
    labels = TEXT[:2, :50]
    expected = reference_token_drop(labels.tolist(), p=0.25, seed=0, num_batches_seen=0, rank=1)
    assert_weights_equal_reference(TokenDropWeighting()(labels), expected, EPS)


def test_neighbours_are_independent():
    dropped = is_dropped(TokenDropWeighting(p=0.5)).flatten()
    for distance in (1, 2, 3, 2**12):
        # Pairs that overlap add 2 (p^3 - p^4) a pair to the variance p^2 (1 - p^2).
        deviation = (dropped.numel() * (0.5**2 * (1 - 0.5**2) + 2 * (0.5**3 - 0.5**4))) ** 0.5
        both = int((dropped[distance:] & dropped[:-distance]).sum())
        assert abs(both - 0.25 * (dropped.numel() - distance)) < 5 * deviation


def test_special_tokens_are_never_dropped_and_others_as_before():
    labels = random_labels(torch.Generator().manual_seed(0), 8, 64, 12)
    without, weighting = is_dropped(TokenDropWeighting(p=0.5), labels), TokenDropWeighting(p=0.5)
    weighting.set_special_tokens([0, 11])
    special = (labels == 0) | (labels == 11)
    assert without[special].any()
    assert torch.equal(is_dropped(weighting, labels), without & ~special)


def test_in_evaluation_nothing_is_dropped_and_the_state_stays():
    weighting, undisturbed = TokenDropWeighting(), TokenDropWeighting()
    for labels in random_stream(seed=2, num_batches=5, max_rows=3, max_length=30, vocab_size=20):
        assert torch.equal(weighting.train()(labels), undisturbed(labels))
        before = state_copy(weighting)
        assert torch.equal(weighting.eval()(labels), (labels != IGNORED).float())
        assert_same_state(weighting, before)


def test_a_saved_state_goes_on_exactly():
    stream = random_stream(seed=3, num_batches=8, max_rows=3, max_length=60, vocab_size=20)
    undisturbed = TokenDropWeighting(p=0.5)
    for labels in stream[:5]:
        undisturbed(labels)
    loaded = TokenDropWeighting(p=0.5)
    loaded.load_state_dict(state_copy(undisturbed))
    for labels in stream[5:]:
        assert torch.equal(loaded(labels), undisturbed(labels))
    assert not torch.equal(TokenDropWeighting(p=0.5)(stream[-1]), undisturbed(stream[-1]))


def test_a_batch_without_a_valid_token_is_not_counted():
    weighting = TokenDropWeighting()
    before = state_copy(weighting)
    assert not weighting(torch.full((2, 9), IGNORED)).any()
    assert_same_state(weighting, before)


def test_where_all_is_dropped_every_weight_is_0():
    assert not TokenDropWeighting(p=0.99)(torch.ones(2, 9, dtype=torch.int64)).any()


@pytest.mark.parametrize("p", [-0.1, 1.0, 1, 2.5, float("nan"), 1 - 1e-12, 0.9999, "many"])
def test_a_share_that_cannot_be_is_refused(p):
    with pytest.raises(ValueError, match=f"p is {p!r}: it is the share of tokens that is dropped, .* from 0 to 0.99 "):
        TokenDropWeighting(p=p)
