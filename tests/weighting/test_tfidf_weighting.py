"""TF-IDF weights, their formulas and their window: against slow references, worked out by hand, and
what they cost.
"""

from collections import Counter
from typing import NamedTuple

import pytest
import torch
from helpers.fakes.label_batches import (
    CalledWeighting,
    assert_same_state,
    assert_weights_equal_reference,
    assert_window_equals_reference,
    capped_rtol,
    random_labels,
    random_stream,
    state_copy,
)
from helpers.operations import Recorder
from helpers.references.tfidf import IGNORED, ReferenceTFIDF, reference_unit_mean

from tfidf_tune.weighting import (
    DocumentWindow,
    RepetitionWeighting,
    TFIDFWeighting,
    unit_mean,
)
from tfidf_tune.weighting.tfidf import distinct_terms

VOCAB_SIZE = 60
EMPTY = [torch.full((2, 7), IGNORED), torch.full((5, 40), IGNORED)]

# ---- the formulas


# 3 is near the largest weight without a cap; at 1.01 nearly all weights are capped.
@pytest.mark.parametrize("cap", [None, 1.0, 1.01, 3.0, 1e6])
def test_unit_mean_equals_the_reference(cap):
    seed = 0 if cap is None else int(10 * cap) % 97
    generator = torch.Generator().manual_seed(seed)
    raw = torch.rand(3, 50, generator=generator).square() * 9 + 1
    labels = torch.zeros(3, 50, dtype=torch.int64).masked_fill(
        torch.rand(3, 50, generator=generator) < 0.3, IGNORED
    )
    valid = labels != IGNORED
    expected = reference_unit_mean((raw * valid).tolist(), labels.tolist(), cap)
    weights = unit_mean(torch.where(valid, raw, 1e6), valid, cap)  # only valid positions count
    assert_weights_equal_reference(weights, expected, capped_rtol(labels, expected, cap))


@pytest.mark.parametrize("smallest", [0.0, 1e-45, 1e-32])
def test_raw_weights_too_small_for_a_mean_stay_finite_and_those_of_0_stay_0(smallest):
    """Their number over their sum would be infinite, and 0 times that is NaN."""
    raw = torch.tensor([[0.0, smallest, 0.0, smallest]])
    weights = unit_mean(raw, torch.tensor([[True, True, True, False]]))
    assert torch.isfinite(weights).all()
    assert weights[0, [0, 2, 3]].tolist() == [0.0, 0.0, 0.0]
    assert 0 <= weights[0, 1] <= 3


def cases_of_terms():
    shapes = [(1, 1), (3, 1), (4, 50), (300, 2)]
    yield from (
        random_labels(torch.Generator().manual_seed(length), rows, length, 40)
        for rows, length in shapes
    )
    largest = 2**63 - 1
    smallest = -(2**63)
    for rows in (
        [[1, 5], [5, 5], [5, 9]],  # the last key of a row in sorted order is the first of the next
        [[-1, -1, 4], [-1, 4, 4], [-1, -1, -1]],
        [
            [largest, largest - 1, largest, smallest],
            [smallest, smallest + 1, largest - 1, smallest],
        ],
    ):
        yield torch.tensor(rows)
    keys = random_labels(torch.Generator().manual_seed(0), 4, 50, 40)
    # Three are not contiguous.
    yield from (
        keys.t(),
        keys[:, ::3],
        keys[:1].expand(3, 50),
        keys.to(torch.int16),
    )


def test_the_terms_of_each_row_equal_a_counter():
    """Every position leads to a term of its own row, which has the key found there and its count in
    the row.
    """
    for keys in cases_of_terms():
        before = keys.clone()
        num_terms = sum(len(set(row)) for row in keys.tolist())
        terms = distinct_terms(keys)
        assert torch.equal(terms.keys[terms.positions], keys)
        of_rows = [set(row) for row in terms.positions.tolist()]
        for row, of_row in zip(keys.tolist(), of_rows, strict=True):
            found = {int(terms.keys[term]): int(terms.counts[term]) for term in of_row}
            assert found == Counter(row)
            assert len(found) == len(of_row), "a key has one term in a row"
        assert len(set().union(*of_rows)) == num_terms, "no two rows share a term"
        assert terms.keys.shape == terms.counts.shape == (keys.numel(),)
        assert (terms.counts[num_terms:] == 0).all()
        assert (terms.keys[num_terms:] == -1).all()
        terms.keys.fill_(0)
        assert torch.equal(keys, before)


# ---- the window alone


def test_the_window_takes_4_bytes_for_each_of_its_tokens_and_each_entry_of_the_vocabulary():
    num_batches = 16
    tokens = 4 * 512
    vocab_size = 50_304
    window = DocumentWindow(num_batches)
    for _ in range(3):
        window.update(torch.arange(tokens) % vocab_size, torch.tensor(2), vocab_size=vocab_size)
    size = sum(buffer.numel() * buffer.element_size() for buffer in window.buffers())
    # Beside the two tables a number for each batch of the window, and a few scalars.
    assert size <= 4 * num_batches * tokens + 4 * vocab_size + 8 * num_batches + 64
    assert size >= 4 * num_batches * tokens + 4 * vocab_size, (
        "the tables must be in registered buffers"
    )
    assert set(window.state_dict()) == {name for name, _ in window.named_buffers()}


@pytest.mark.parametrize("make", [TFIDFWeighting, RepetitionWeighting])
def test_an_update_during_another_update_is_refused_and_changes_nothing(make):
    """Another thread's, say. The lock is not reentrant, so that no thread is needed here."""
    weighting = make()
    labels = torch.arange(40).view(2, 20)
    weighting(labels)
    before = state_copy(weighting)
    with (
        weighting._one_thread.locked(True),
        pytest.raises(RuntimeError, match="two threads update"),
    ):
        weighting(labels)
    assert_same_state(weighting, before)
    weighting(labels)


# ---- weights and window against the reference


class Call(NamedTuple):
    labels: torch.Tensor
    document_ids: torch.Tensor | None = None
    training: bool = True
    vocab_size: int | None = None

    def of(self, weighting):
        labels, document_ids, training, vocab_size = self
        return weighting(
            labels, document_ids=document_ids, training=training, vocab_size=vocab_size
        )

    def of_reference(self, reference):
        ids = None if self.document_ids is None else self.document_ids.tolist()
        return reference(self.labels.tolist(), ids, self.training)


def calls(seed, *, documents, vocab_sizes=(VOCAB_SIZE,), num_batches=14):
    """Training and evaluation, batches without a valid token, rows of one and
    of several documents.
    """
    generator = torch.Generator().manual_seed(seed)
    stream = random_stream(seed, num_batches, max_rows=4, max_length=30, vocab_size=VOCAB_SIZE)
    for i, labels in enumerate([EMPTY[0], *stream[:3], *EMPTY, *stream[3:]]):
        document_ids = (
            torch.randint(0, 4, labels.shape, generator=generator) if documents(i) else None
        )
        yield Call(
            labels, document_ids, training=i % 4 != 3, vocab_size=vocab_sizes[i % len(vocab_sizes)]
        )


def assert_equals_reference(stream, num_batches=4, tf="count", cap=None):
    reference = ReferenceTFIDF(num_batches, tf, cap)
    weighting = CalledWeighting(num_batches=num_batches, tf=tf, max_weight=cap)
    for call in stream:
        expected = call.of_reference(reference)
        weights = call.of(weighting)
        assert weights.dtype == torch.float32
        assert_weights_equal_reference(weights, expected, capped_rtol(call.labels, expected, cap))
        assert_window_equals_reference(weighting.window, reference)
        if cap is not None:
            assert not (weights > torch.tensor(cap)).any(), "not even by rounding"


DOCUMENTS = {
    "none": lambda i: False,
    "all": lambda i: True,
    "every second batch": lambda i: i % 2 == 0,
}


@pytest.mark.parametrize(
    ("tf", "cap", "documents", "vocab_sizes", "num_batches"),
    [
        ("count", None, "none", [VOCAB_SIZE], 4),
        ("log", None, "all", [VOCAB_SIZE, 1000, 5000], 4),
        ("binary", 1.1, "every second batch", [None, VOCAB_SIZE], 2),
        ("count", 2.3, "none", [VOCAB_SIZE, None, 900], 16),
        ("log", 1.0, "every second batch", [VOCAB_SIZE], 1),
    ],
)
def test_weights_and_window_equal_the_reference_at_every_batch(
    tf, cap, documents, vocab_sizes, num_batches
):
    length = 30 if num_batches == 16 else 14
    stream = list(
        calls(
            num_batches, documents=DOCUMENTS[documents], vocab_sizes=vocab_sizes, num_batches=length
        )
    )
    assert_equals_reference(stream, num_batches, tf, cap)


def test_weights_and_window_equal_the_reference_as_vocabulary_and_length_change():
    """The largest id is known from the labels only."""
    generator = torch.Generator().manual_seed(5)
    stream = []
    for vocab_size, length in ((1, 20), (2, 1), (700, 2), (60, 127), (128_256, 4096), (3, 20)):
        labels = random_labels(generator, 3, length, vocab_size)
        labels[0, 0] = vocab_size - 1
        stream.append(Call(labels, torch.randint(0, 3, labels.shape, generator=generator)))
    assert_equals_reference(stream, num_batches=3)


# ---- ids outside the vocabulary, which nobody can refuse without waiting for the GPU


def with_bad_ids(labels, bad_ids):
    """The labels with bad ids in place of a few, at least one valid one left, and what is left of
    them.
    """
    bad = torch.zeros_like(labels, dtype=torch.bool)
    bad.view(-1)[:: len(bad_ids) + 2] = True
    rubbish = torch.tensor(bad_ids).repeat(labels.numel())[: labels.numel()].view(labels.shape)
    return torch.where(bad, rubbish, labels), torch.where(bad, IGNORED, labels), bad


@pytest.mark.parametrize(
    ("cap", "documents", "vocab_size"), [(None, False, VOCAB_SIZE), (1.5, True, None)]
)
def test_on_a_gpu_bad_ids_get_nan_and_count_as_ignored_for_all_others(cap, documents, vocab_size):
    bad_ids = [-1, -99, -(2**40)] if vocab_size is None else [VOCAB_SIZE, 2**31, -1, -101, 2**40]
    spoiled, clean = (
        CalledWeighting(checked=False, num_batches=3, max_weight=cap) for _ in range(2)
    )
    for labels, document_ids, _, _ in calls(
        9, documents=lambda i: documents, vocab_sizes=[vocab_size]
    ):
        bad_labels, rest, bad = with_bad_ids(labels, bad_ids)
        given = {"vocab_size": vocab_size, "document_ids": document_ids}
        weights = spoiled(bad_labels, **given)
        expected = clean(rest, **given)
        assert torch.equal(weights.isnan(), bad)
        assert torch.equal(weights[~bad], expected[~bad])
        assert_same_state(spoiled.weighting, state_copy(clean.weighting))


# ---- what a call costs, counted on the meta device, which has shapes but no values: asking for a
# value raises

ROWS = 4
LENGTH = 32


def meta_batch():
    return torch.zeros(ROWS, LENGTH, dtype=torch.int64, device="meta")


def record(num_batches, *, vocab_size=1000, documents=False, **arguments):
    """The operations and sizes of one call on a window whose tables have been laid out."""
    weighting = TFIDFWeighting(num_batches=num_batches, **arguments).to("meta")
    given = {"vocab_size": vocab_size, "document_ids": meta_batch() if documents else None}
    for _ in range(2):
        weighting(meta_batch(), **given)
    with Recorder() as recorder:
        weighting(meta_batch(), **given)
    assert recorder.sizes
    return recorder


def test_the_cost_of_an_update_does_not_depend_on_the_length_of_the_window_or_the_vocabulary():
    """And no tensor is larger than the batch."""
    short = record(1)
    long = record(64)
    large_vocabulary = record(64, vocab_size=1_000_000)
    assert short.operations == long.operations
    assert sum(long.sizes) == sum(short.sizes)
    assert large_vocabulary.sizes == long.sizes

    # The window holds 64 times the batch; a presence table of (documents, vocabulary) would be 400.
    assert (
        max(record(64, vocab_size=100, documents=True, max_weight=2.0).sizes) == ROWS * LENGTH < 400
    )


@pytest.mark.parametrize(("documents", "max_weight"), [(False, None), (True, 2.0)])
def test_no_tensor_of_an_update_is_larger_than_the_batch(max_weight, documents):
    recorder = record(64, vocab_size=100, documents=documents, max_weight=max_weight)
    # The window holds 64 times the batch; a presence table of (documents, vocabulary) would be 400.
    assert max(recorder.sizes) == ROWS * LENGTH < 400


def test_ever_wider_batches_do_not_copy_the_window_at_every_call():
    window = DocumentWindow(3)
    storages = set()
    for width in range(1, 101):
        window.update(torch.arange(width), torch.tensor(1), vocab_size=100)
        storages.add((window.entries_KT.shape[1], window.entries_KT.data_ptr()))
    assert len({width for width, _ in storages}) <= 13  # 1.5 to the power of 12 is 130
    assert window.entries_KT.shape[1] <= 150
