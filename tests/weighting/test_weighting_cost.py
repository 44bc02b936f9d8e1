"""What a call costs: operations, tensors and bytes, counted.

It is recorded on the meta device, whose tensors have shapes but no values: code that asks for a value (``.item()``, an
``if`` on a tensor, ``nonzero``), which would wait for a GPU, raises an error. No GPU is needed.
"""

import pytest
import torch
from operations import Recorder

from tfidf_tune.weighting import TFIDFWeighting

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
