"""Goldfish weights: which tokens are left out, and that it is always the same ones."""

import pytest
import torch
from label_batches import EPS, assert_weights_equal_reference, random_labels
from peer_reference import reference_goldfish
from tfidf_reference import IGNORED

from tfidf_tune.weighting import GoldfishWeighting

# A ratio of two whole numbers, rounded once.
RTOL = EPS


def is_kept(labels, document_ids=None, **settings):
    return GoldfishWeighting(**settings)(labels, document_ids=document_ids) > 0


def random_text(seed, rows=4, length=256, vocab_size=1000):
    return torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


# ---- against the reference


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"k": 2, "h": 1, "seed": 5},
        {"k": 3, "h": 2, "seed": -7},
        {"k": 8, "h": 50, "seed": 2**40},
        {"strategy": "static"},
        {"strategy": "static", "k": 2},
        {"strategy": "static", "k": 7},
    ],
)
def test_the_weights_equal_the_reference(settings, documents):
    weighting = GoldfishWeighting(**settings)
    weighting.set_special_tokens([3, 40])
    generator = torch.Generator().manual_seed(0)
    found = []
    for rows, length in [(3, 90), (1, 1), (2, 7), (5, 60)]:
        labels = random_labels(generator, rows, length, 50, ignored=0.02)
        labels[-1, length // 2 :] = IGNORED
        ids = torch.randint(2, labels.shape, generator=generator).cumsum(dim=1) // 30 if documents else None
        weights = weighting(labels, vocab_size=50, document_ids=ids)
        expected = reference_goldfish(
            labels.tolist(), None if ids is None else ids.tolist(), special=(3, 40), **settings
        )
        assert_weights_equal_reference(weights, expected, RTOL)
        found.append(weights[labels != IGNORED])
    found = torch.cat(found)
    assert (found == 0).any()
    assert (found > 1).any()


def test_the_defaults_are_those_of_the_paper():
    labels = random_text(1)
    assert torch.equal(is_kept(labels), is_kept(labels, strategy="hash", k=4, h=13, seed=0))
    assert not torch.equal(is_kept(labels), is_kept(labels, k=4, h=12))


def test_static_leaves_out_every_kth_label_of_a_document():
    labels, ids = torch.ones(1, 11, dtype=torch.int64), torch.tensor([[0] * 5 + [1] * 6])
    labels[0, 8] = IGNORED
    kept = is_kept(labels, ids, strategy="static", k=3)
    assert kept[0].int().tolist() == [1, 1, 0, 1, 1, 1, 1, 0, 0, 1, 1]


def test_the_weights_of_a_batch_worked_out_by_hand():
    weights = GoldfishWeighting(strategy="static", k=2)(torch.tensor([[7, 7, 7, IGNORED], [7, IGNORED, 7, IGNORED]]))
    # 5 valid tokens, 4 of them kept.
    assert weights.tolist() == [[1.25, 0.0, 1.25, 0.0], [1.25, 0.0, 1.25, 0.0]]


# ---- what the hash is of


@pytest.mark.parametrize("h", [1, 13, 50])
@pytest.mark.parametrize("k", [2, 3, 4, 8])
def test_one_token_in_k_is_left_out(k, h):
    """No id comes twice: no context does. Within 5 deviations of a binomial distribution."""
    labels = torch.randperm(2**15, generator=torch.Generator().manual_seed(k)).view(8, -1)
    left_out = ~is_kept(labels, k=k, h=h)
    number = left_out[:, h:].numel()
    assert not left_out[:, :h].any()
    assert abs(int(left_out.sum()) - number / k) < 5 * (number * (1 / k) * (1 - 1 / k)) ** 0.5


def test_the_order_of_the_tokens_before_matters():
    """Two of them change places: what becomes of the token then is as good as drawn again."""
    contexts = torch.randperm(2**14, generator=torch.Generator().manual_seed(0)).view(-1, 4)
    targets = torch.zeros(len(contexts), 1, dtype=torch.int64)
    one, other = (
        is_kept(torch.cat([rows, targets], dim=1), k=2, h=4)[:, 4] for rows in (contexts, contexts[:, [0, 2, 1, 3]])
    )
    # Half of them differ, within 5 deviations.
    assert abs(int((one != other).sum()) - len(contexts) / 2) < 5 * (len(contexts) / 4) ** 0.5


def test_the_token_itself_does_not_matter():
    labels = random_text(2, rows=1, length=40).expand(40, 40)
    changed = labels + 1000 * torch.eye(40, dtype=torch.int64)  # another label at position r of row r
    kept, expected = is_kept(changed, k=2, h=3), is_kept(labels, k=2, h=3)
    assert torch.equal(kept.diag(), expected.diag())
    # But it is a context of the next ones.
    assert not torch.equal(kept.diag(1), expected.diag(1))


def test_what_is_further_back_than_h_does_not_matter_and_what_is_not_does():
    h, labels = 5, random_text(3, rows=64, length=20)
    for distance in (h, h + 1):
        changed = labels.clone()
        changed[:, 19 - distance] += 1000
        same = torch.equal(is_kept(changed, k=2, h=h)[:, 19], is_kept(labels, k=2, h=h)[:, 19])
        assert same == (distance > h)


def test_an_id_of_0_in_the_context_is_one_as_any_other():
    """With a product of ids every context with a 0 would hash alike."""
    h, contexts = 3, torch.arange(1, 2**12 + 1).unsqueeze(1).repeat(1, 3)
    for place in range(h):
        with_0 = contexts.clone()
        with_0[:, place] = 0
        kept = is_kept(torch.cat([with_0, contexts[:, :1]], dim=1), k=2, h=h)[:, h]
        assert abs(int(kept.sum()) - len(kept) / 2) < 5 * (len(kept) / 4) ** 0.5


def test_another_seed_leaves_out_other_tokens():
    labels = random_text(4)
    masks = [is_kept(labels, seed=seed) for seed in range(4)]
    assert all(not torch.equal(one, other) for i, one in enumerate(masks) for other in masks[:i])


# ---- the same passage


def test_a_passage_loses_the_same_tokens_wherever_it_stands():
    h, passage, text = 13, random_text(5, rows=1, length=60)[0], random_text(6, rows=7, length=200)
    masks = []
    for rows, length, row, offset in [(1, 60, 0, 0), (7, 200, 3, 0), (7, 200, 6, 140), (4, 99, 0, 17), (2, 64, 1, 3)]:
        labels = text[:rows, :length].clone()
        labels[row, offset : offset + 60] = passage
        masks.append(is_kept(labels)[row, offset + h : offset + 60])
    assert not masks[0].all()
    assert all(torch.equal(mask, masks[0]) for mask in masks)


def test_a_passage_loses_the_same_tokens_in_every_batch():
    weighting, labels = GoldfishWeighting(), random_text(7)
    first = weighting(labels)
    weighting(random_text(8))
    assert torch.equal(weighting(labels), first)
    assert not weighting.state_dict()


def test_a_token_with_fewer_than_h_labels_before_it_is_kept():
    labels = random_text(9, rows=200, length=14)
    kept = is_kept(labels, k=2)
    assert kept[:, :13].all()
    assert not kept[:, 13].all()


def test_nothing_of_another_document_is_in_a_context():
    h, own = 3, random_text(10, rows=50, length=12)
    before = random_text(11, rows=50, length=9)
    packed = torch.cat([before, own], dim=1)
    ids = torch.tensor([[4] * 9 + [2] * 12]).expand(50, -1)
    assert torch.equal(is_kept(packed, ids, k=2, h=h)[:, 9:], is_kept(own, k=2, h=h))
    assert not torch.equal(is_kept(packed, k=2, h=h)[:, 9:], is_kept(own, k=2, h=h))


def test_an_ignored_label_ends_a_context():
    h, own = 3, random_text(12, rows=50, length=12)
    masked = torch.cat([random_text(13, rows=50, length=9), torch.full((50, 1), IGNORED), own], dim=1)
    kept = is_kept(masked, k=2, h=h)
    assert torch.equal(kept[:, 10:], is_kept(own, k=2, h=h))
    assert not kept[:, 9].any()


# ---- exceptions, modes


@pytest.mark.parametrize("settings", [{"k": 2, "h": 2}, {"strategy": "static", "k": 2}])
def test_special_tokens_are_always_kept_and_others_as_before(settings):
    labels = random_text(14, vocab_size=20)
    weighting = GoldfishWeighting(**settings)
    without = weighting(labels) > 0
    weighting.set_special_tokens(token for token in (3, 5, 5, 19))  # any iterable will do
    special = torch.isin(labels, torch.tensor([3, 5, 19]))
    assert not without[special].all()
    assert torch.equal(weighting(labels) > 0, without | special)
    weighting.set_special_tokens([4])  # in place of those before
    assert torch.equal(weighting(labels) > 0, without | (labels == 4))


def test_an_ignored_label_that_is_special_does_not_count():
    labels = torch.tensor([[1, 2, IGNORED, 1]])
    weighting = GoldfishWeighting(strategy="static", k=2)
    weighting.set_special_tokens([IGNORED])
    assert weighting(labels).tolist() == [[1.5, 0.0, 0.0, 1.5]]


@pytest.mark.parametrize("strategy", ["hash", "static"])
def test_in_evaluation_nothing_is_left_out(strategy):
    labels = random_labels(torch.Generator().manual_seed(15), 4, 60, 30)
    weighting = GoldfishWeighting(strategy=strategy, k=2, h=1)
    assert (weighting(labels)[labels != IGNORED] == 0).any()
    assert torch.equal(weighting.eval()(labels), (labels != IGNORED).float())


@pytest.mark.parametrize("strategy", ["hash", "static"])
def test_the_first_token_of_a_document_is_kept_so_that_no_batch_is_empty(strategy):
    labels = torch.arange(1000).view(-1, 1)
    assert torch.equal(GoldfishWeighting(strategy=strategy, k=2, h=1)(labels), torch.ones(1000, 1))


def test_labels_that_lie_otherwise_in_memory_or_are_narrower_lose_the_same_tokens_and_stay_as_they_are():
    labels = random_text(16)
    expected, before = is_kept(labels), labels.clone()
    strided = labels.t().contiguous().t()
    assert not strided.is_contiguous()
    assert torch.equal(is_kept(strided), expected)
    assert torch.equal(is_kept(labels.int()), expected)
    assert torch.equal(labels, before)


# ---- arguments


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "seeded_random"}, "strategy is 'seeded_random': possible are hash, static"),
        ({"k": 1}, "k is 1: .* set it to 2 to 2147483648"),
        ({"k": 2**31 + 1}, "k is 2147483649: .* set it to 2 to 2147483648"),
        ({"k": 0}, "k is 0: "),
        ({"h": 0}, "h is 0: .* set it to 1 to 1024"),
        ({"h": 10**9}, "h is 1000000000: .* set it to 1 to 1024"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        GoldfishWeighting(**settings)


def test_the_largest_k_leaves_out_next_to_nothing():
    """The product of k and a hash is an int64."""
    assert GoldfishWeighting(k=2**31, h=1)(torch.arange(2**16).view(4, 2**14)).all()


@pytest.mark.parametrize("training", [True, False])
def test_document_ids_of_another_shape_are_an_error(training):
    with pytest.raises(ValueError, match="document_ids has shape"):
        GoldfishWeighting().train(training)(torch.ones(2, 3, dtype=torch.int64), document_ids=torch.zeros(1, 3).int())
