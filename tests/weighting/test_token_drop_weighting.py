"""Random token dropping: as many tokens as it should be, others at every call, and the same ones after a resume."""

import pytest
import torch
from label_batches import EPS, assert_weights_equal_reference, random_stream
from peer_reference import reference_token_drop
from tfidf_reference import IGNORED

from tfidf_tune.weighting import TokenDropWeighting, _dropping

TEXT = torch.zeros(8, 2**12, dtype=torch.int64)


def is_dropped(weighting, labels=TEXT):
    return (weighting(labels) == 0) & (labels != IGNORED)


@pytest.mark.parametrize(("p", "seed"), [(0.25, -3), (0.9, 2**40), (0.0, 1)])
def test_the_weights_equal_the_reference(p, seed):
    weighting = TokenDropWeighting(p=p, seed=seed)
    weighting.set_special_tokens([0, 5])
    stream = random_stream(seed=1, num_batches=6, max_rows=4, max_length=40, vocab_size=30)
    for step, labels in enumerate(stream):
        expected = reference_token_drop(labels.tolist(), p=p, seed=seed, num_batches_seen=step, special=(0, 5))
        # A ratio of two whole numbers, rounded once.
        assert_weights_equal_reference(weighting(labels, vocab_size=30), expected, EPS)


@pytest.mark.parametrize("p", [0.05, 0.5])
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


def test_every_batch_drops_different_tokens():
    weighting = TokenDropWeighting()
    batches = [is_dropped(weighting) for _ in range(5)]
    for i, one in enumerate(batches):
        for other in batches[:i]:
            assert_independent(one, other, 0.25)


def test_ranks_drop_different_tokens(monkeypatch):
    alone = is_dropped(TokenDropWeighting())
    monkeypatch.setattr(_dropping, "has_other_ranks", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert_independent(alone, is_dropped(TokenDropWeighting()), 0.25)
    labels = TEXT[:2, :50]
    expected = reference_token_drop(labels.tolist(), p=0.25, seed=0, num_batches_seen=0, rank=1)
    assert_weights_equal_reference(TokenDropWeighting()(labels), expected, EPS)
