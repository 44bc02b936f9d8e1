"""TF-IDF weights and their window against the slow reference, on the host and on a device, and their conventions."""

import math
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from called_weighting import CalledWeighting
from label_batches import WEIGHT_RTOL, assert_weights_equal_reference, capped_rtol, random_labels, random_stream
from tfidf_reference import IGNORED, ReferenceTFIDF
from window_state import assert_same_state, state_copy

from tfidf_tune.weighting import TFIDFWeighting

VOCAB_SIZE = 60
EMPTY = [torch.full((2, 7), IGNORED), torch.full((5, 40), IGNORED)]


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


def calls(seed, *, documents, vocab_sizes=(VOCAB_SIZE,), num_batches=14):
    """Training and evaluation, batches without a valid token, rows of one and of several documents."""
    generator = torch.Generator().manual_seed(seed)
    stream = random_stream(seed, num_batches, max_rows=4, max_length=30, vocab_size=VOCAB_SIZE)
    for i, labels in enumerate([EMPTY[0], *stream[:3], *EMPTY, *stream[3:]]):
        document_ids = torch.randint(0, 4, labels.shape, generator=generator) if documents(i) else None
        yield Call(labels, document_ids, training=i % 4 != 3, vocab_size=vocab_sizes[i % len(vocab_sizes)])


def assert_window_equals_reference(window, reference):
    """Exactly: these are integers."""
    counter = Counter(token for batch in reference.window for document in batch for token in document)
    tokens = sorted({-2, -1, 0, *counter, window.vocab_size - 1, window.vocab_size, window.vocab_size + 2})
    assert window.document_frequency(torch.tensor(tokens)).tolist() == [counter[token] for token in tokens]
    assert int(window.num_documents) == reference.num_documents
    assert int(window.num_updates) >= len(reference.window)


def assert_equals_reference(stream, num_batches=4, tf="count", cap=None):
    reference = ReferenceTFIDF(num_batches, tf, cap)
    weighting = CalledWeighting(num_batches=num_batches, tf=tf, max_weight=cap)
    assert stream, "there must be batches to compare"
    for call in stream:
        expected, weights = call.of_reference(reference), call.of(weighting)
        assert weights.dtype == torch.float32
        assert_weights_equal_reference(weights, expected, capped_rtol(call.labels, expected, cap))
        assert_window_equals_reference(weighting.window, reference)


DOCUMENTS = {"none": lambda i: False, "all": lambda i: True, "every second batch": lambda i: i % 2 == 0}


@pytest.mark.parametrize(
    ("tf", "cap", "documents", "vocab_sizes", "num_batches"),
    [
        ("count", None, "none", [VOCAB_SIZE], 4),
        ("log", None, "all", [VOCAB_SIZE, 1000, 5000], 4),
        ("binary", None, "every second batch", [None, VOCAB_SIZE], 2),
        ("count", 1.3, "all", [None], 1),
        ("count", 2.3, "none", [VOCAB_SIZE, None, 900], 16),
        ("log", 1.0, "every second batch", [VOCAB_SIZE], 4),
        ("binary", 1.1, "none", [VOCAB_SIZE], 40),
        ("count", 1000.0, "every second batch", [VOCAB_SIZE], 3),
    ],
)
def test_weights_and_window_equal_the_reference_at_every_batch(tf, cap, documents, vocab_sizes, num_batches):
    length = 30 if num_batches == 16 else 14
    stream = list(calls(num_batches, documents=DOCUMENTS[documents], vocab_sizes=vocab_sizes, num_batches=length))
    assert_equals_reference(stream, num_batches, tf, cap)


@pytest.mark.parametrize("documents", [False, True])
def test_weights_and_window_equal_the_reference_as_the_vocabulary_changes(documents):
    """The largest id is known from the labels only."""
    generator = torch.Generator().manual_seed(5)
    stream = []
    for vocab_size in (1, 2, 700, 60, 90_000, 128_256, 3):
        labels = random_labels(generator, 3, 20, vocab_size, ignored=0.2 * documents)
        labels[0, 0] = vocab_size - 1
        stream.append(Call(labels, torch.randint(0, 3, labels.shape, generator=generator) if documents else None))
    assert_equals_reference(stream, num_batches=3)


def test_weights_and_window_equal_the_reference_at_every_length():
    for length in (1, 2, 127, 1024, 4095, 4096):
        generator = torch.Generator().manual_seed(length)
        assert_equals_reference(
            [Call(random_labels(generator, 2, length, 32_000), vocab_size=32_000) for _ in range(3)], 2
        )


def test_the_default_is_the_papers_window_of_16_and_counts():
    weighting, reference = CalledWeighting(), ReferenceTFIDF(16, "count")
    for call in calls(3, documents=DOCUMENTS["none"], num_batches=20):
        assert_weights_equal_reference(call.of(weighting), call.of_reference(reference))


def test_the_weights_of_a_batch_worked_out_by_hand():
    labels = torch.tensor([[7, 7, 3, IGNORED], [7, 9, 4, 4], [IGNORED] * 4])
    # N = 2; df(7) = 2, so idf(7) = 1; df = 1 for the others, so their idf is ln(3/2) + 1.
    rare = math.log(1.5) + 1
    raw = [[2.0, 2.0, rare, 0.0], [1.0, rare, 2 * rare, 2 * rare], [0.0] * 4]
    mean = (2.0 + 2.0 + rare + 1.0 + rare + 2 * rare + 2 * rare) / 7
    weights = CalledWeighting(num_batches=4)(labels)
    assert_weights_equal_reference(weights, [[weight / mean for weight in row] for row in raw])


# ---- evaluation, empty batches


def test_eval_leaves_the_state_and_gives_unseen_ids_a_document_frequency_of_0():
    weighting = CalledWeighting(num_batches=2)
    weights = weighting(torch.tensor([[4, 4, 8, IGNORED]]), training=False)
    torch.testing.assert_close(weights, torch.tensor([[2, 2, 1, 0]]) * 3 / 5, rtol=WEIGHT_RTOL, atol=0.0)
    weighting(torch.tensor([[1, 2], [1, 3]]), vocab_size=4)
    before = state_copy(weighting.weighting)
    weights = weighting(torch.tensor([[1, 900_000]]), training=False)
    # N = 2, df(1) = 2 and df(900000) = 0.
    assert float(weights[0, 1] / weights[0, 0]) == pytest.approx(math.log(3) + 1, rel=WEIGHT_RTOL)
    weighting(torch.arange(300).view(2, 150), training=False, vocab_size=1000)  # wider than anything before
    assert_same_state(weighting.weighting, before)


@pytest.mark.parametrize("cap", [1.0, 1.3, 1.7])
def test_the_cap_is_never_exceeded_and_the_mean_stays_1(cap):
    stream = random_stream(seed=18, num_batches=10, max_rows=3, max_length=80, vocab_size=60)
    weighting = CalledWeighting(num_batches=3, max_weight=cap)
    reached = 0
    for labels in stream:
        weights = weighting(labels)[labels != IGNORED]
        assert float(weights.max()) <= torch.tensor(cap).item()  # the cap in float32
        reached += int(weights.max() == torch.tensor(cap))
        assert float(weights.double().mean()) == pytest.approx(1.0, rel=WEIGHT_RTOL)
        if cap == 1:
            assert torch.equal(weights, torch.ones_like(weights))
    assert reached > 3, "the cap must bind in some of the batches"


# ---- several documents in a row


def test_document_ids_may_be_any_non_negative_integers_and_do_not_overflow():
    generator = torch.Generator().manual_seed(23)
    labels = random_labels(generator, 3, 40, 128_256)
    document_ids = torch.randint(0, 4, labels.shape, generator=generator)
    names = torch.tensor([2**31 - 1, 0, 2**16, 77])
    expected = CalledWeighting()(labels, vocab_size=2**17, document_ids=document_ids)
    for dtype in (torch.int32, torch.int64):
        weights = CalledWeighting()(labels.int(), vocab_size=2**17, document_ids=names[document_ids].to(dtype))
        torch.testing.assert_close(weights, expected, rtol=2 * WEIGHT_RTOL, atol=0.0)
    rows = torch.tensor([[5], [0], [5]]).expand(3, 40)  # one document in each row is the default
    assert torch.equal(CalledWeighting()(labels, document_ids=rows), CalledWeighting()(labels))


def test_the_document_id_of_an_ignored_position_does_not_matter():
    labels = torch.tensor([[1, 2, 1, IGNORED, IGNORED]])
    plain, odd = CalledWeighting(), CalledWeighting()
    expected = plain(labels, document_ids=torch.tensor([[0, 0, 1, 1, 1]]))
    weights = odd(labels, document_ids=torch.tensor([[0, 0, 1, 7, 0]]))
    assert torch.equal(weights, expected)
    assert int(odd.window.num_documents) == 2


@pytest.mark.parametrize("documents", [False, True])
def test_packing_padding_and_relabelling_change_no_weight(documents):
    """The documents of a row weigh as in rows of their own, whatever their ids and the ids of their tokens."""
    generator = torch.Generator().manual_seed(20)
    packed, alone = TFIDFWeighting(num_batches=2), TFIDFWeighting(num_batches=2)
    for _ in range(4):
        labels = random_labels(generator, 3, 40, 30)
        ids = torch.randint(0, 4 if documents else 1, (3, 40), generator=generator)
        unpacked = torch.full((12, 40), IGNORED)
        for row, position in torch.cartesian_prod(torch.arange(3), torch.arange(40)).tolist():
            token = labels[row, position]
            unpacked[row * 4 + ids[row, position], position] = token if token == IGNORED else (token + 7) % 30
        unpacked = torch.nn.functional.pad(unpacked, (3, 5, 0, 2), value=IGNORED)
        weights = packed(labels, vocab_size=30, document_ids=ids)
        expected = alone(unpacked, vocab_size=30)[4 * torch.arange(3)[:, None] + ids, 3 + torch.arange(40)]
        torch.testing.assert_close(weights, expected, rtol=2 * WEIGHT_RTOL, atol=0.0)
        assert int(packed.window.num_documents) == int(alone.window.num_documents)


def test_the_window_does_not_share_memory_with_the_labels():
    labels = torch.tensor([[1, 2, 2, 4]], dtype=torch.int32)
    weighting = CalledWeighting(num_batches=2)
    weighting(labels)
    before = state_copy(weighting.weighting)
    labels.fill_(9)
    assert_same_state(weighting.weighting, before)


# ---- ids outside the vocabulary, which nobody can refuse without waiting for the GPU


def with_bad_ids(labels, bad_ids):
    """The labels with bad ids in place of a few, at least one valid one left, and what is left of them."""
    bad = torch.zeros_like(labels, dtype=torch.bool)
    bad.view(-1)[:: len(bad_ids) + 2] = True
    rubbish = torch.tensor(bad_ids).repeat(labels.numel())[: labels.numel()].view(labels.shape)
    return torch.where(bad, rubbish, labels), torch.where(bad, IGNORED, labels), bad


@pytest.mark.parametrize(
    ("training", "cap", "documents", "vocab_size"),
    [
        (True, None, False, VOCAB_SIZE),
        (True, 1.5, True, None),
        (False, 1.5, False, None),
        (True, None, True, VOCAB_SIZE),
    ],
)
def test_on_a_gpu_bad_ids_get_nan_and_count_as_ignored_for_all_others(training, cap, documents, vocab_size):
    bad_ids = [-1, -99, -(2**40)] if vocab_size is None else [VOCAB_SIZE, 2**31, -1, -101, 2**40]
    spoiled, clean = (CalledWeighting(checked=False, num_batches=3, max_weight=cap) for _ in range(2))
    for labels, document_ids, _, _ in calls(9, documents=lambda i: documents, vocab_sizes=[vocab_size]):
        bad_labels, rest, bad = with_bad_ids(labels, bad_ids)
        given = {"vocab_size": vocab_size, "document_ids": document_ids, "training": training}
        weights, expected = spoiled(bad_labels, **given), clean(rest, **given)
        assert torch.equal(weights.isnan(), bad)
        assert torch.equal(weights[~bad], expected[~bad])
        assert_same_state(spoiled.weighting, state_copy(clean.weighting))
