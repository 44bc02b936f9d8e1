"""What a call costs: operations and tensors recorded by a dispatch mode, on the meta device.

A tensor of the meta device has a shape but no values: code that asks for a value (``.item()``, an ``if`` on a tensor,
``nonzero``), which on a GPU would wait for the device, raises. No GPU is needed.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tfidf_tune.weighting import DocumentWindow, TFIDFWeighting

ROWS, LENGTH, VOCAB_SIZE = 4, 32, 1000
SYNCHRONISING = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "unique")


class Recorder(TorchDispatchMode):
    """Notes the name of every operation and the size of every tensor that it makes (views and in-place excepted)."""

    def __init__(self):
        super().__init__()
        self.operations = []
        self.sizes = []
        self.devices = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operations.append(func.overloadpacket.__name__)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        owned = {tensor.untyped_storage()._cdata for tensor in inputs}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.devices.add(leaf.device.type)
                if leaf.untyped_storage()._cdata not in owned:
                    self.sizes.append(leaf.numel())
        return result


def meta_batch(rows=ROWS, length=LENGTH):
    return torch.zeros(rows, length, dtype=torch.int64, device="meta")


def record(num_batches, call=None, num_calls=3, training=True, **arguments):
    """The operations and sizes of one call on a window whose tables have been laid out."""
    with torch.device("meta"):
        weighting = TFIDFWeighting(num_batches=num_batches, **arguments).train(training)
        call = call or (lambda weighting: weighting(meta_batch(), vocab_size=VOCAB_SIZE))
        for _ in range(num_calls - 1):
            call(weighting)
        with Recorder() as recorder:
            weights = call(weighting)
    assert weights.device.type == "meta"
    assert recorder.operations
    assert recorder.sizes
    return recorder


def with_documents(weighting):
    return weighting(meta_batch(), vocab_size=VOCAB_SIZE, document_ids=meta_batch())


def assert_no_synchronisation(recorder):
    assert recorder.devices == {"meta"}, "nothing may be made on the host and copied over"
    assert not set(recorder.operations) & set(SYNCHRONISING)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("tf", ["count", "log", "binary"])
@pytest.mark.parametrize("max_weight", [None, 2.0])
def test_with_a_vocabulary_size_nothing_waits_for_the_device(training, tf, max_weight):
    for num_calls in (1, 3):
        recorder = record(16, num_calls=num_calls, training=training, tf=tf, max_weight=max_weight)
        assert_no_synchronisation(recorder)


@pytest.mark.parametrize("training", [True, False])
def test_with_document_ids_nothing_waits_for_the_device(training):
    assert_no_synchronisation(record(16, with_documents, training=training))


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


@pytest.mark.parametrize(("num_batches", "rows", "length", "vocab_size"), [(16, 4, 128, 1000), (64, 1, 256, 50_304)])
def test_the_state_takes_4_bytes_for_each_token_of_the_window_and_each_entry_of_the_vocabulary(
    num_batches, rows, length, vocab_size
):
    weighting = TFIDFWeighting(num_batches=num_batches)
    for _ in range(3):
        weighting(torch.arange(rows * length).view(rows, length), vocab_size=vocab_size)
    size = sum(tensor.numel() * tensor.element_size() for tensor in weighting.state_dict().values())
    # Beside the two tables a number for each batch of the window, and a few scalars.
    assert size <= 4 * num_batches * rows * length + 4 * vocab_size + 8 * num_batches + 64
