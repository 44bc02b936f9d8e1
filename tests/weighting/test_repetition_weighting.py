"""Repetition weights against a reference with dictionaries and sorting: what counts as the same, what is forgotten."""

import math

import pytest
import torch
from label_batches import assert_same_state, random_labels, state_copy
from peer_reference import ReferenceRepetition
from tfidf_reference import IGNORED

from tfidf_tune.weighting import RepetitionWeighting

VOCAB_SIZE = 6
# The weight is one float32 power of a small whole number.
RTOL = 4 * torch.finfo(torch.float32).eps
PLAIN = {"k": None, "span": 1, "sample": 1, "alpha": 1.0, "num_buckets": 2**20, "min_length": 1}
SHAPES = ((3, 30), (1, 9), (5, 17), (2, 48), (3, 30), (2, 1), (1, 30), (4, 12))


def batches():
    """Of changing shapes; part of one row comes again each time, and one batch has no label."""
    generator = torch.Generator().manual_seed(0)
    copied = random_labels(generator, 1, 48, VOCAB_SIZE, ignored=0.03)
    for i, (rows, length) in enumerate(SHAPES):
        labels = random_labels(generator, rows, length, VOCAB_SIZE, ignored=0.05)
        labels[-1] = copied[0, :length]
        if i == 5:
            labels.fill_(IGNORED)
        yield labels, (torch.arange(length) // 13).expand(rows, length).contiguous()


def settings(*values, min_length=1):
    names = ("h", "k", "alpha", "span", "quantile", "sample", "num_buckets")
    return dict(zip(names, values, strict=True)) | {"min_length": min_length}


CASES = {
    "leave one out": settings(3, 2, 2.0, 7, 0.75, 1, 2**16),
    "sampled": settings(4, 2, 0.5, 9, 0.9, 3, 2**15),
    "small table": settings(2, 2, 1.0, 65, 0.25, 2, 100),
    "tiny table": settings(2, 1, 4.0, 5, 1.0, 1, 3),
    "not in short documents": settings(2, 1, 1.0, 7, 0.75, 1, 2**16, min_length=11),
    "maximum wanted of few": settings(3, 3, 1.0, 31, 0.0, 5, 2**14),
}


@pytest.mark.parametrize(("case", "documents"), [(name, number % 2 == 1) for number, name in enumerate(CASES)])
def test_weights_and_table_are_those_of_the_reference(case, documents):
    """In training and evaluation, then once more as a second epoch, which changes no count."""
    reference = ReferenceRepetition(**CASES[case])
    weighting = RepetitionWeighting(**CASES[case])
    smallest = 1.0
    for epoch in range(2):
        for i, (labels, document_ids) in enumerate(batches()):
            given = document_ids if documents else None
            training, first_pass = i != 3, epoch == 0
            expected = reference(labels.tolist(), given.tolist() if documents else None, training, first_pass)
            found = weighting.train(training)(labels, document_ids=given, first_pass=first_pass)
            nonzero = weighting.table.nonzero().flatten().tolist()
            assert {bucket: divmod(int(weighting.table[bucket]), 2048) for bucket in nonzero} == reference.table
            torch.testing.assert_close(found, torch.tensor(expected), rtol=RTOL, atol=0)
            smallest = min(smallest, found[labels != IGNORED].min().item() if i != 5 else 1)
    assert smallest < 1
    assert reference.num_taken > 0 or case not in ("small table", "tiny table")


@pytest.mark.parametrize(
    ("k", "span", "quantile", "kept"),
    [
        (None, 1, 0.75, {20, 21, 22}),
        (1, 1, 0.75, {20}),
        (None, 7, 0.75, set()),
        (None, 7, 0.25, set(range(18, 25))),
    ],
)
def test_contexts_with_a_token_left_out_find_a_copy_with_a_changed_token(k, span, quantile, kept):
    """Pooling takes the weight of the changed token too, unless nearly all counts in the span have to be high."""
    weighting = RepetitionWeighting(**PLAIN | {"h": 2, "k": k, "span": span}, quantile=quantile)
    copy, changed = torch.arange(40)[None], torch.arange(40)[None]
    changed = changed.masked_fill(changed == 20, 99)
    assert weighting(copy).eq(1).all()
    weights = weighting(changed)[0]
    assert {i for i in range(3, 40) if weights[i] == 1} == kept
    assert weights[3:].unique().tolist() in ([0.5], [0.5, 1.0])


def test_by_default_common_phrases_cost_nothing_and_changed_copies_their_weight():
    generator = torch.Generator().manual_seed(0)
    weighting = RepetitionWeighting(num_buckets=2**20)
    passage, means = torch.randint(10**4, (1, 256), generator=generator), []
    for _ in range(8):
        new = torch.randint(10**4, (1, 256), generator=generator)
        for start in range(0, 256, 40):
            new[0, start : start + 8] = torch.arange(8)
        changed = torch.rand(passage.shape, generator=generator) < 0.1
        weights = weighting(torch.cat([passage.where(~changed, new), new]))
        assert weights[1].eq(1).all()
        means.append(weights[0].mean().item())
    assert means[0] == 1
    assert means[-1] < 0.1


def test_short_answers_after_masked_prompts_keep_their_weight():
    weighting, labels = RepetitionWeighting(sample=1, num_buckets=2**12), torch.arange(120).repeat(3, 1)
    labels[:, :20], labels[0, 22:], labels[1, 69:] = IGNORED, IGNORED, IGNORED
    for _ in range(5):
        weights = weighting(labels)
        assert weights[:2][labels[:2] != IGNORED].eq(1).all()  # answers of 2 and 49 labels
    assert weights[2, 20:].lt(0.1).all()


def test_by_plain_contexts_the_nth_repetition_of_5_tokens_counts_one_nth():
    weighting, labels = RepetitionWeighting(h=4, **PLAIN), torch.arange(20)[None]
    weights = [weighting(labels)[0] for _ in range(5)]
    assert all(row[:4].eq(1).all() for row in weights)
    assert [row[4:].unique().item() for row in weights] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])


# ---- forgetting


@pytest.mark.parametrize("num_copies", [3])
def test_a_key_stays_until_as_many_others_as_it_was_counted_have_shared_its_bucket(num_copies):
    """Of 2,000 keys, the share that is still known after 8 mini-batches: binomial, within 4 standard deviations."""
    weighting, generator = RepetitionWeighting(h=1, **PLAIN | {"num_buckets": 2**16}), torch.Generator().manual_seed(0)
    labels = torch.arange(2000)[None]
    for _ in range(num_copies):
        weighting(labels)
    for _ in range(8):
        weighting(torch.randint(2000, 10**6, (64, 129), generator=generator))
    weights = weighting.eval()(labels)[0, 1:]
    remaining = [1 / weight - 1 for weight in weights.unique().tolist()]
    assert remaining == pytest.approx(list(range(num_copies, -1, -1)))
    shared = -math.expm1(-64 * 128 / 2**16)  # share of the buckets that a mini-batch has keys for
    stay = sum(math.comb(8, n) * shared**n * (1 - shared) ** (8 - n) for n in range(num_copies))
    counted = 1 - 2000 / 2 / 2**16  # of keys that share a bucket in their own mini-batch, one is
    assert weights.lt(1).float().mean().item() == pytest.approx(counted * stay, abs=4 * (0.25 / 2000) ** 0.5)


def test_counts_end_at_2047():
    weighting, labels = RepetitionWeighting(h=1, **PLAIN), torch.arange(10).expand(1000, 10).contiguous()
    found = [round(1 / weighting(labels)[0, 5].item()) - 1 for _ in range(4)]
    assert found == [0, 1000, 2000, 2047]


# ---- what is refused


def test_counts_of_other_keys_are_refused_and_change_nothing():
    saved = RepetitionWeighting(num_buckets=64)
    for changed, here in (
        ({"h": 6, "k": 5}, r"\[6, 5, 8, 64\]"),
        ({"k": 3}, r"\[5, 3, 8, 64\]"),
        ({"sample": 4}, r"\[5, 4, 4, 64\]"),
        ({"num_buckets": 128}, r"\[5, 4, 8, 128\]"),
    ):
        other = RepetitionWeighting(**{"num_buckets": 64} | changed)
        other(torch.arange(400).view(2, 200))
        before = state_copy(other)
        message = rf"h, k, sample, num_buckets = \[5, 4, 8, 64\], here they are {here}: set them to those, or start"
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(saved.state_dict())
        assert_same_state(other, before)
