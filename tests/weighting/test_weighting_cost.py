"""What a call costs: operations, tensors and bytes, counted.

The way of a GPU is recorded on the meta device, whose tensors have a shape but no values: code that asks for a value
(``.item()``, an ``if`` on a tensor, ``nonzero``), which on a GPU would wait for the device, raises. No GPU is needed.
What NumPy allocates on the way of a CPU is traced.
"""

import tracemalloc

import pytest
import torch
from label_batches import random_labels
from operations import SYNCHRONISING, Recorder, assert_no_synchronisation
from ways import WAYS, OneWay

from tfidf_tune.weighting import DocumentWindow, TFIDFWeighting, _tfidf

ROWS, LENGTH, VOCAB_SIZE = 4, 32, 1000


def meta_batch(rows=ROWS, length=LENGTH):
    return torch.zeros(rows, length, dtype=torch.int64, device="meta")


def record(num_batches, call=None, **arguments):
    """The operations and sizes of one call on a window whose tables have been laid out."""
    weighting = TFIDFWeighting(num_batches=num_batches, **arguments).to("meta")
    call = call or (lambda weighting: weighting(meta_batch(), vocab_size=VOCAB_SIZE))
    for _ in range(2):
        call(weighting)
    with Recorder() as recorder:
        weights = call(weighting)
    assert weights.device.type == "meta"
    assert recorder.operations
    assert recorder.sizes
    return recorder


@pytest.mark.parametrize("documents", [False, True])
def test_a_batch_of_another_shape_makes_nothing_wait_for_the_device(documents):
    """The tables grow by what shapes say alone."""
    weighting = TFIDFWeighting(num_batches=4).to("meta")
    for rows, length, vocab_size in ((2, 9, 50), (4, 32, 50), (1, 3, 900)):
        document_ids = meta_batch(rows, length) if documents else None
        with Recorder() as recorder:
            weighting(meta_batch(rows, length), vocab_size=vocab_size, document_ids=document_ids)
        assert_no_synchronisation(recorder)


# (training, documents): most operations of a call, views included; a tenth more than it takes with torch 2.13.
OPERATIONS = {(True, False): 75, (True, True): 105, (False, False): 55, (False, True): 85}


@pytest.mark.parametrize(("training", "documents"), OPERATIONS)
@pytest.mark.parametrize(
    ("settings", "more"), [({}, 0), ({"tf": "binary"}, 0), ({"tf": "log"}, 2), ({"max_weight": 2.0}, 13)]
)
def test_a_call_takes_no_more_operations_than_it_has_to(training, documents, settings, more):
    """Each is a kernel to launch, or work of the host beside it: a small batch costs little else.

    Recorded on a CPU, since the meta device takes an operation more to sort.
    """
    weighting = OneWay("device", **settings)
    labels = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)
    document_ids = labels // 10 if documents else None
    weighting(labels, vocab_size=VOCAB_SIZE, document_ids=document_ids)
    with Recorder() as recorder:
        weighting(labels, training=training, vocab_size=VOCAB_SIZE, document_ids=document_ids)
    assert 30 < len(recorder.operations) <= OPERATIONS[training, documents] + more


def test_without_a_vocabulary_size_the_largest_id_is_read():
    with pytest.raises(RuntimeError, match="meta tensors"):
        record(16, lambda weighting: weighting(meta_batch()))


def test_the_operations_of_an_update_do_not_depend_on_the_length_of_the_window():
    assert record(1).operations == record(64).operations


@pytest.mark.parametrize("max_weight", [None, 2.0])
@pytest.mark.parametrize("documents", [False, True])
def test_no_tensor_of_an_update_is_larger_than_the_batch(max_weight, documents):
    def in_a_small_vocabulary(weighting):
        return weighting(meta_batch(), vocab_size=100, document_ids=meta_batch() if documents else None)

    recorder = record(64, in_a_small_vocabulary, max_weight=max_weight)

    # The window holds 64 times the batch; a presence table of (documents, vocabulary) would be 400.
    assert max(recorder.sizes) == ROWS * LENGTH < 400


def test_all_tensors_of_an_update_together_do_not_grow_with_the_window():
    # The sum over the documents of each batch is over 64 numbers and makes one.
    assert sum(record(64).sizes) == sum(record(1).sizes)


def test_a_larger_vocabulary_makes_no_tensor_of_an_update_larger():
    def in_a_large_vocabulary(weighting):
        return weighting(meta_batch(), vocab_size=1_000_000)

    assert record(4, in_a_large_vocabulary).sizes == record(4).sizes


def test_the_update_of_the_window_alone_waits_for_nothing():
    with torch.device("meta"):
        window = DocumentWindow(8)
        tokens, one = torch.zeros(100, dtype=torch.int64), torch.ones((), dtype=torch.int64)
        window.update(tokens, one, vocab_size=50)
        with Recorder() as recorder:
            window.update(tokens, one, vocab_size=50)
            window.document_frequency(tokens)
    assert len(recorder.operations) > 5
    assert_no_synchronisation(recorder)


def test_the_recorder_sees_a_synchronisation():
    """The tests above must be able to fail."""
    with Recorder() as recorder:
        torch.ones(3).sum().item()
    assert set(recorder.operations) & set(SYNCHRONISING)
    with pytest.raises(RuntimeError, match="meta tensors"):
        torch.ones(3, device="meta").sum().item()


def test_a_narrower_batch_makes_the_tables_no_larger():
    weighting = TFIDFWeighting(num_batches=3)
    sizes = []
    for length in (9, 4, 9, 1, 8):
        weighting(torch.arange(2 * length).view(2, length), vocab_size=30)
        sizes.append(sum(buffer.numel() * buffer.element_size() for buffer in weighting.buffers()))
    assert len(set(sizes)) == 1


@pytest.mark.parametrize(
    ("num_batches", "rows", "length", "vocab_size"),
    [(16, 4, 128, 1000), (64, 1, 256, 50_304), (1024, 2, 64, 50_304)],
)
def test_the_state_takes_4_bytes_for_each_token_of_the_window_and_each_entry_of_the_vocabulary(
    num_batches, rows, length, vocab_size
):
    weighting = TFIDFWeighting(num_batches=num_batches)
    for _ in range(3):
        weighting(torch.arange(rows * length).view(rows, length), vocab_size=vocab_size)
    size = sum(tensor.numel() * tensor.element_size() for tensor in weighting.state_dict().values())
    # Beside the two tables a number for each batch of the window, and a few scalars.
    assert size <= 4 * num_batches * rows * length + 4 * vocab_size + 8 * num_batches + 64


@pytest.mark.parametrize("way", WAYS)
def test_a_window_of_1024_batches_takes_less_than_8_bytes_for_each_of_its_tokens(way):
    weighting = OneWay(way, num_batches=1024)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        weighting(random_labels(generator, 2, 64, 50_304), vocab_size=50_304)
    size = sum(buffer.numel() * buffer.element_size() for buffer in weighting.weighting.buffers())
    assert size <= 8 * 1024 * 2 * 64


# ---- the way of a CPU


def memory_of_a_call(documents, max_weight=None, training=True, num_batches=1024, vocab_size=1_000_000):
    """The most that NumPy allocates at a time, in multiples of the labels' own size, once all tables are laid out."""
    rows, length = 8, 256
    labels = random_labels(torch.Generator().manual_seed(0), rows, length, vocab_size)
    document_ids = (torch.arange(length) // 50).expand(rows, length) if documents else None
    weighting = OneWay("host", num_batches=num_batches, max_weight=max_weight)
    for _ in range(3):
        weighting(labels, vocab_size=vocab_size, document_ids=document_ids)
    with Recorder() as recorder:
        weighting(labels, training=training, vocab_size=vocab_size, document_ids=document_ids)
    tracemalloc.start()
    try:
        weighting(labels, training=training, vocab_size=vocab_size, document_ids=document_ids)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert max(recorder.sizes) <= labels.numel(), "what torch allocates is not traced"
    return peak / (labels.numel() * labels.element_size())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("max_weight", [None, 2.0])
def test_on_a_cpu_a_call_makes_nothing_of_the_length_of_the_window_or_the_vocabulary(training, documents, max_weight):
    """A dozen arrays of the size of the batch live at a time. The window holds 1,024, the vocabulary is 488 of them."""
    multiple = memory_of_a_call(documents, max_weight, training)
    assert 1 < multiple < 16


def test_no_table_is_longer_than_the_terms_that_are_looked_up():
    """While a window fills, its number of documents changes at every call, and a table would be made at every call."""
    table = _tfidf._inverse_document_frequency_table
    weighting, labels = TFIDFWeighting(num_batches=40), torch.arange(60).view(30, 2)  # 60 terms
    table.cache_clear()
    for _ in range(40):
        weighting(labels, vocab_size=60)
    assert int(weighting.window.num_documents) == 1200
    assert table.cache_info().misses == 1  # of 30 documents; 60 are no fewer than the terms
