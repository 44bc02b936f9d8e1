"""What a call costs: operations, tensors and bytes, counted.

The code path of a GPU is recorded on the meta device, whose tensors have shapes but no values: code that asks for a
value (``.item()``, an ``if`` on a tensor, ``nonzero``), which would wait for a GPU, raises an error. No GPU is needed.
NumPy's allocations on the code path of a CPU are traced.
"""

import tracemalloc

import pytest
import torch
from code_paths import OneCodePath
from label_batches import random_labels
from operations import Recorder

from tfidf_tune.weighting import TFIDFWeighting, _tfidf

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


def test_without_a_vocabulary_size_the_largest_id_is_read():
    with pytest.raises(RuntimeError, match="meta tensors"):
        record(16, lambda weighting: weighting(meta_batch()))


def test_the_cost_of_an_update_does_not_depend_on_the_length_of_the_window_or_the_vocabulary():
    short, long = record(1), record(64)
    assert short.operations == long.operations
    assert sum(long.sizes) == sum(short.sizes)
    large_vocabulary = record(64, lambda weighting: weighting(meta_batch(), vocab_size=1_000_000))
    assert large_vocabulary.sizes == long.sizes


@pytest.mark.parametrize(("documents", "max_weight"), [(False, None), (True, 2.0)])
def test_no_tensor_of_an_update_is_larger_than_the_batch(max_weight, documents):
    def in_a_small_vocabulary(weighting):
        return weighting(meta_batch(), vocab_size=100, document_ids=meta_batch() if documents else None)

    recorder = record(64, in_a_small_vocabulary, max_weight=max_weight)

    # The window holds 64 times the batch; a presence table of (documents, vocabulary) would be 400.
    assert max(recorder.sizes) == ROWS * LENGTH < 400


# ---- the code path of a CPU


def memory_of_a_call(documents, max_weight=None, training=True, num_batches=1024, vocab_size=1_000_000):
    """The most that NumPy allocates at a time, in multiples of the labels' own size, once all tables are laid out."""
    rows, length = 8, 256
    labels = random_labels(torch.Generator().manual_seed(0), rows, length, vocab_size)
    document_ids = (torch.arange(length) // 50).expand(rows, length) if documents else None
    weighting = OneCodePath("host", num_batches=num_batches, max_weight=max_weight)
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


@pytest.mark.parametrize(("training", "documents", "max_weight"), [(True, True, 2.0), (False, False, None)])
def test_on_a_cpu_no_array_has_the_length_of_the_window_or_the_vocabulary(training, documents, max_weight):
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
