"""The way of a CPU and that of a GPU, side by side: one window, one set of weights."""

from collections import Counter
from typing import NamedTuple

import pytest
import torch
from label_batches import (
    assert_weights_equal_reference,
    capped_rtol,
    random_labels,
    random_stream,
)
from tfidf_reference import IGNORED, ReferenceTFIDF
from ways import WAYS, OneWay
from window_state import assert_same_state, state_copy

TF_FORMS = ["count", "log", "binary"]
VOCAB_SIZE = 60


class Call(NamedTuple):
    labels: torch.Tensor
    document_ids: torch.Tensor | None = None
    training: bool = True
    vocab_size: int | None = None

    def of(self, weighting):
        labels, document_ids, training, vocab_size = self
        return weighting(labels, document_ids=document_ids, training=training, vocab_size=vocab_size)

    def of_reference(self, reference):
        ids = None if self.document_ids is None else self.document_ids.tolist()
        return reference(self.labels.tolist(), ids, self.training)


def calls(seed, *, documents, vocab_sizes, num_batches=14):
    """Training and evaluation, batches with nothing in them, rows of one and of several documents."""
    generator = torch.Generator().manual_seed(seed)
    stream = random_stream(seed, num_batches, max_rows=4, max_length=30, vocab_size=VOCAB_SIZE)
    stream[3:3] = [torch.full((2, 7), IGNORED), torch.full((5, 40), IGNORED)]
    for i, labels in enumerate(stream):
        document_ids = torch.randint(0, 4, labels.shape, generator=generator) if documents(i) else None
        yield Call(labels, document_ids, training=i % 4 != 3, vocab_size=vocab_sizes[i % len(vocab_sizes)])


def assert_window_equals_reference(window, reference):
    """Exactly: these are whole numbers."""
    counter = Counter(token for batch in reference.window for document in batch for token in document)
    tokens = range(-2, window.vocab_size + 3)
    assert window.document_frequency(torch.tensor(tokens)).tolist() == [counter[token] for token in tokens]
    assert int(window.num_documents) == reference.num_documents


def assert_same_batches(one, other):
    """The order of the tokens of a batch is nobody's business, and so is the room left."""
    assert torch.equal(one.num_updates, other.num_updates)
    assert torch.equal(one.num_documents_K, other.num_documents_K)
    of_one, of_other = ([sorted(filter(None, row)) for row in window.entries_KT.tolist()] for window in (one, other))
    assert of_one == of_other


def assert_ways_agree(stream, num_batches=4, tf="count", cap=None):
    reference = ReferenceTFIDF(num_batches, tf, cap)
    ways = {way: OneWay(way, num_batches=num_batches, tf=tf, max_weight=cap) for way in WAYS}
    assert stream, "there must be batches to compare"
    for call in stream:
        expected = call.of_reference(reference)
        for weighting in ways.values():
            weights = call.of(weighting)
            assert_weights_equal_reference(weights, expected, capped_rtol(call.labels, expected, cap))
            assert_window_equals_reference(weighting.window, reference)
        assert_same_batches(ways["host"].window, ways["device"].window)


@pytest.mark.parametrize("tf", TF_FORMS)
@pytest.mark.parametrize("cap", [None, 1.0, 1.3, 2.3])
@pytest.mark.parametrize("documents", ["none", "all", "every second batch"])
def test_both_ways_equal_the_reference_at_every_batch(tf, cap, documents):
    has_documents = {"none": lambda i: False, "all": lambda i: True, "every second batch": lambda i: i % 2 == 0}
    stream = list(calls(len(documents), documents=has_documents[documents], vocab_sizes=[VOCAB_SIZE]))
    assert_ways_agree(stream, tf=tf, cap=cap)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("vocab_sizes", [[None], [None, VOCAB_SIZE], [VOCAB_SIZE, 1000, 5000], [VOCAB_SIZE, None, 900]])
def test_both_ways_equal_the_reference_whatever_is_known_of_the_vocabulary(documents, vocab_sizes):
    assert_ways_agree(list(calls(7, documents=lambda i: documents, vocab_sizes=vocab_sizes)))


@pytest.mark.parametrize("num_batches", [1, 2, 16, 40])
def test_both_ways_equal_the_reference_at_every_length_of_the_window(num_batches):
    stream = list(calls(num_batches, documents=lambda i: i % 3 == 0, vocab_sizes=[VOCAB_SIZE], num_batches=30))
    assert_ways_agree(stream, num_batches)


@pytest.mark.parametrize("documents", [False, True])
def test_both_ways_equal_the_reference_as_the_vocabulary_grows(documents):
    """The largest id is known from the labels alone."""
    generator = torch.Generator().manual_seed(5)
    stream = []
    for vocab_size in (1, 2, 700, 60, 90_000, 128_256, 3):
        labels = random_labels(generator, 3, 20, vocab_size)
        labels[0, 0] = vocab_size - 1
        stream.append(Call(labels, torch.randint(0, 3, labels.shape, generator=generator) if documents else None))
    assert_ways_agree(stream, num_batches=3)


def test_both_ways_equal_the_reference_where_no_position_is_ignored():
    generator = torch.Generator().manual_seed(6)
    stream = [Call(random_labels(generator, 3, 20, 40, ignored=0.0), vocab_size=40) for _ in range(5)]
    assert all((call.labels != IGNORED).all() for call in stream)
    assert_ways_agree(stream, num_batches=2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("vocab_size", [None, VOCAB_SIZE])
@pytest.mark.parametrize("documents", [False, True])
def test_a_first_batch_without_a_valid_token_weighs_nothing(way, training, vocab_size, documents):
    labels = torch.full((2, 5), IGNORED)
    weighting = OneWay(way, num_batches=2)
    document_ids = torch.arange(5).expand(2, 5) if documents else None
    weights = weighting(labels, training=training, vocab_size=vocab_size, document_ids=document_ids)
    assert torch.equal(weights, torch.zeros(2, 5))
    assert_window_equals_reference(weighting.window, ReferenceTFIDF(2))
    assert int(weighting.window.num_updates) == 0


@pytest.mark.parametrize(("before", "after"), [("host", "device"), ("device", "host")])
@pytest.mark.parametrize("documents", [False, True])
def test_a_state_saved_by_one_way_goes_on_alike_in_the_other(before, after, documents):
    stream = list(calls(8, documents=lambda i: documents, vocab_sizes=[VOCAB_SIZE, None]))
    reference, saved = ReferenceTFIDF(4), OneWay(before, num_batches=4)
    for call in stream[:9]:
        call.of_reference(reference)
        call.of(saved)
    loaded = OneWay(after, num_batches=4)
    loaded.weighting.load_state_dict(saved.weighting.state_dict())
    for call in stream[9:]:
        expected = call.of_reference(reference)
        for weighting in (saved, loaded):
            assert_weights_equal_reference(call.of(weighting), expected)
            assert_window_equals_reference(weighting.window, reference)
        assert_same_batches(saved.window, loaded.window)
    assert len(stream) - 9 > 4, "the batches of before must fall out of the window"


# ---- ids outside the vocabulary, which nobody can refuse without waiting for the GPU


def with_bad_ids(labels, bad_ids):
    """The labels with bad ids in place of a few, at least one valid one left, and what is left of them."""
    bad = torch.zeros_like(labels, dtype=torch.bool)
    bad.view(-1)[:: len(bad_ids) + 2] = True
    rubbish = torch.tensor(bad_ids).repeat(labels.numel())[: labels.numel()].view(labels.shape)
    return torch.where(bad, rubbish, labels), torch.where(bad, IGNORED, labels), bad


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("vocab_size", [None, VOCAB_SIZE])
def test_on_a_gpu_bad_ids_get_nan_and_count_as_ignored_for_all_others(training, cap, documents, vocab_size):
    bad_ids = [-1, -99, -(2**40)] if vocab_size is None else [VOCAB_SIZE, 2**31, -1, -101, 2**40]
    spoiled, clean = (OneWay("device", num_batches=3, max_weight=cap) for _ in range(2))
    for labels, document_ids, _, _ in calls(9, documents=lambda i: documents, vocab_sizes=[vocab_size]):
        bad_labels, rest, bad = with_bad_ids(labels, bad_ids)
        given = {"vocab_size": vocab_size, "document_ids": document_ids, "training": training}
        weights, expected = spoiled(bad_labels, **given), clean(rest, **given)
        assert torch.equal(weights.isnan(), bad)
        assert torch.equal(weights[~bad], expected[~bad])
        assert_same_state(spoiled.weighting, state_copy(clean.weighting))


@pytest.mark.parametrize("documents", [False, True])
def test_on_a_gpu_a_batch_of_bad_ids_alone_takes_no_place_in_the_window(documents):
    labels = torch.tensor([[4, 5, 5], [5, 6, IGNORED]])
    document_ids = torch.tensor([[0, 0, 1], [0, 1, 1]]) if documents else None
    weighting = OneWay("device", num_batches=2)
    weighting(labels, vocab_size=10, document_ids=document_ids)
    before = state_copy(weighting.weighting)
    weights = weighting(torch.where(labels == IGNORED, labels, labels + 10), vocab_size=10, document_ids=document_ids)
    assert torch.equal(weights.isnan(), labels != IGNORED)
    assert weights[1, 2] == 0
    assert_same_state(weighting.weighting, before)
