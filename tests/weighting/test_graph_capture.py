"""What a captured CUDA graph asks of a call in the steady state, as far as a CPU can tell.

A graph replays the very same operations on the very same memory. So the operations, their shapes and their numbers
must not depend on the values of a batch, and the state must stay where it is. That nothing waits for the device is
the business of ``test_weighting_cost.py``.
"""

import pytest
import torch
from called_weighting import CalledWeighting, unchecked
from label_batches import random_labels
from operations import Recorder
from tfidf_reference import IGNORED

from tfidf_tune.weighting import RepetitionWeighting

ROWS, LENGTH, VOCAB_SIZE = 3, 17, 50


def batches():
    """Ordinary ones, one with nothing in it, one with a single token, one of ids that are not in the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    ordinary = [random_labels(generator, ROWS, LENGTH, VOCAB_SIZE) for _ in range(6)]
    odd = [torch.full((ROWS, LENGTH), token) for token in (IGNORED, 7, VOCAB_SIZE)]
    return [*ordinary, *odd, ordinary[0]]


def steady(training, max_weight, counted):
    """A weighting whose tables are laid out and whose window, of fewer batches than follow, has begun to roll."""
    weighting = CalledWeighting(checked=False, num_batches=4, max_weight=max_weight, counted=counted)
    labels = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    weighting(labels, vocab_size=VOCAB_SIZE, all_tokens=labels)
    weighting.weighting.train(training)
    return weighting


def calls_of(weighting, training, documents):
    for i, labels in enumerate(batches()):
        document_ids = (torch.arange(LENGTH) // (i + 1)).expand(ROWS, LENGTH).contiguous() if documents else None
        tokens = torch.where(labels == IGNORED, torch.arange(LENGTH), labels)
        yield lambda labels=labels, ids=document_ids, tokens=tokens: weighting(
            labels, training=training, vocab_size=VOCAB_SIZE, document_ids=ids, all_tokens=tokens
        )


@pytest.mark.parametrize(
    ("training", "documents", "max_weight", "counted"),
    [
        (True, False, None, "labels"),
        (True, True, 1.5, "labels"),
        (False, True, None, "labels"),
        (True, True, None, "tokens"),
    ],
)
def test_operations_shapes_and_memory_do_not_depend_on_values(training, documents, max_weight, counted):
    weighting = steady(training, max_weight, counted)
    before = {name: (buffer.data_ptr(), buffer.shape) for name, buffer in weighting.window.named_buffers()}
    updates, recorded = int(weighting.window.num_updates), []
    for call in calls_of(weighting, training, documents):
        with Recorder() as recorder:
            call()
        recorded.append(recorder.calls)
        after = {name: (buffer.data_ptr(), buffer.shape) for name, buffer in weighting.window.named_buffers()}
        assert after == before
    assert len(recorded) == 10
    assert len(recorded[0]) > 30
    assert all(calls == recorded[0] for calls in recorded)
    assert len(before) == 4
    # All but the batch without a valid token and the one of bad ids have entered the window; without a label, its
    # other tokens may count.
    assert int(weighting.window.num_updates) == updates + (8 + (counted == "tokens") if training else 0)


@pytest.mark.parametrize("first_pass", [True, False])
def test_operations_and_memory_of_repetition_weights_do_not_depend_on_values(first_pass):
    weighting, recorded = RepetitionWeighting(h=2, k=1, span=5, min_length=1, sample=1, num_buckets=2**13), []
    before = {name: buffer.data_ptr() for name, buffer in weighting.named_buffers()}
    with unchecked():
        for labels in batches():
            with Recorder() as recorder:
                weighting(labels, vocab_size=VOCAB_SIZE, first_pass=first_pass)
            recorded.append(recorder.calls)
    assert len(recorded[0]) > 30
    assert all(calls == recorded[0] for calls in recorded)
    assert {name: buffer.data_ptr() for name, buffer in weighting.named_buffers()} == before
    assert weighting.table.any() == first_pass
