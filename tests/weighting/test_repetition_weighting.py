"""Repetition weights against a reference with dictionaries and sorting: what counts as the same,
what is forgotten.
"""

import pytest
import torch
from helpers.fakes.label_batches import assert_same_state, random_labels, state_copy
from helpers.references.peers import ReferenceRepetition
from helpers.references.tfidf import IGNORED

from tfidf_tune.weighting import RepetitionWeighting

VOCAB_SIZE = 6
# The weight is one float32 power of a small whole number.
RTOL = 4 * torch.finfo(torch.float32).eps
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


def settings(*values, min_length=1, exposures=1.0):
    names = ("h", "k", "alpha", "span", "quantile", "sample", "num_buckets")
    further = {"min_length": min_length, "exposures": exposures}
    return dict(zip(names, values, strict=True)) | further


CASES = {
    "leave one out": settings(3, 2, 2.0, 7, 0.75, 1, 2**16),
    "sampled": settings(4, 2, 0.5, 9, 0.9, 3, 2**15),
    "small table": settings(2, 2, 1.0, 65, 0.25, 2, 100),
    "tiny table": settings(2, 1, 4.0, 5, 1.0, 1, 3),
    "not in short documents": settings(2, 1, 1.0, 7, 0.75, 1, 2**16, min_length=11),
    "some exposures in full": settings(2, 1, 2.0, 5, 0.75, 1, 2**16, exposures=2.5),
    "maximum wanted of few": settings(3, 3, 1.0, 31, 0.0, 5, 2**14),
}


@pytest.mark.parametrize(
    ("case", "documents"), [(name, number % 2 == 1) for number, name in enumerate(CASES)]
)
def test_weights_and_table_are_those_of_the_reference(case, documents):
    """In training and evaluation, then once more as a second epoch, which changes no count."""
    reference = ReferenceRepetition(**CASES[case])
    weighting = RepetitionWeighting(**CASES[case])
    smallest = 1.0
    for epoch in range(2):
        for i, (labels, document_ids) in enumerate(batches()):
            given = document_ids if documents else None
            training = i != 3
            first_pass = epoch == 0
            expected = reference(
                labels.tolist(), given.tolist() if documents else None, training, first_pass
            )
            found = weighting.train(training)(labels, document_ids=given, first_pass=first_pass)
            nonzero = weighting.table.nonzero().flatten().tolist()
            assert {
                bucket: divmod(int(weighting.table[bucket]), 2048) for bucket in nonzero
            } == reference.table
            torch.testing.assert_close(found, torch.tensor(expected), rtol=RTOL, atol=0)
            smallest = min(smallest, found[labels != IGNORED].min().item() if i != 5 else 1)
    assert smallest < 1
    assert reference.num_taken > 0 or case not in ("small table", "tiny table")


def test_by_default_common_phrases_cost_nothing_and_changed_copies_their_weight():
    generator = torch.Generator().manual_seed(0)
    weighting = RepetitionWeighting(num_buckets=2**20)
    passage = torch.randint(10**4, (1, 256), generator=generator)
    means = []
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


def test_counts_end_at_2047():
    weighting = RepetitionWeighting(
        h=1, k=None, span=1, sample=1, alpha=1.0, num_buckets=2**20, min_length=1
    )
    labels = torch.arange(10).expand(1000, 10).contiguous()
    found = [round(1 / weighting(labels)[0, 5].item()) - 1 for _ in range(4)]
    assert found == [0, 1000, 2000, 2047]


def test_repetition_counts_from_min_length_labels_on():
    weighting = RepetitionWeighting(
        h=1, k=None, span=1, sample=1, alpha=1.0, num_buckets=2**20, min_length=5
    )
    short = [1, 2, 3, 4]
    long = [11, 12, 13, 14, 15]
    labels = torch.tensor(
        [[IGNORED, *short, IGNORED, *long, IGNORED], [*long, IGNORED, IGNORED, IGNORED, *short]]
    )
    weighting(labels[:1])
    of_short = [1, 1, 1, 1]
    of_long = [1, 0.5, 0.5, 0.5, 0.5]
    assert weighting(labels).tolist() == [
        [0, *of_short, 0, *of_long, 0],
        [*of_long, 0, 0, 0, *of_short],
    ]


# ---- what is refused


def test_counts_of_other_keys_are_refused_and_change_nothing():
    saved = RepetitionWeighting(num_buckets=64)
    for changed, here in (
        ({"h": 6, "k": 5}, r"\[6, 5, 8, 64\]"),
        ({"num_buckets": 128}, r"\[5, 4, 8, 128\]"),
    ):
        other = RepetitionWeighting(**{"num_buckets": 64} | changed)
        other(torch.arange(400).view(2, 200))
        before = state_copy(other)
        with pytest.raises(
            ValueError, match=rf"h, k, sample, num_buckets = \[5, 4, 8, 64\], not {here}"
        ):
            other.load_state_dict(saved.state_dict())
        assert_same_state(other, before)
