"""The weighting under ``torch.compile``: one graph, no second compilation, the bits of the uncompiled device path."""

import pytest
import torch
from called_weighting import CalledWeighting
from label_batches import random_labels, random_stream
from tfidf_reference import IGNORED
from torch._dynamo.utils import counters
from window_state import assert_same_state, state_copy

from tfidf_tune.weighting import TFIDFWeighting

ROWS, LENGTH, VOCAB_SIZE = 3, 17, 50


@pytest.fixture(autouse=True)
def no_graphs_of_another_test():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


def compiled_and_not(training, **arguments):
    """A compiled weighting, and an eager one on the code path of a device, both with an empty window."""
    weighting = TFIDFWeighting(num_batches=3, **arguments).train(training)
    compiled = torch.compile(weighting, fullgraph=True, backend="aot_eager")
    return weighting, compiled, CalledWeighting(checked=False, num_batches=3, **arguments)


def batches_of_one_shape(documents):
    """Ordinary batches, one with nothing in it, one with a single token, and ids that are not in the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    batches = [random_labels(generator, ROWS, LENGTH, VOCAB_SIZE) for _ in range(6)]
    batches[2].fill_(IGNORED)
    batches[3].fill_(7)
    batches[4][0, :2] = torch.tensor([VOCAB_SIZE, -1])
    ids = [torch.randint(0, 3, (ROWS, LENGTH), generator=generator) if documents else None for _ in batches]
    return list(zip(batches, ids, strict=True))


def assert_same_bits(weights, expected):
    torch.testing.assert_close(weights, expected, rtol=0, atol=0, equal_nan=True)


def assert_compiled_equals_uncompiled(weighting, compiled, plain, batches, training):
    assert batches
    for labels, document_ids in batches:
        weights = compiled(labels, vocab_size=VOCAB_SIZE, document_ids=document_ids)
        expected = plain(labels, training=training, vocab_size=VOCAB_SIZE, document_ids=document_ids)
        assert_same_bits(weights, expected)
        assert_same_state(weighting, state_copy(plain.weighting))


def num_graphs():
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("training", "documents", "arguments"),
    [(True, False, {}), (True, True, {"tf": "log", "max_weight": 1.5}), (False, True, {})],
)
def test_one_graph_serves_every_batch_after_the_tables_have_grown(training, documents, arguments):
    weighting, compiled, plain = compiled_and_not(training, **arguments)
    first, *rest = batches_of_one_shape(documents)
    plain(first[0], vocab_size=VOCAB_SIZE, document_ids=first[1])
    weighting.load_state_dict(plain.weighting.state_dict())
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_compiled_equals_uncompiled(weighting, compiled, plain, rest, training)
    assert num_graphs() == 1


def test_the_shapes_of_the_batches_may_change():
    weighting, compiled, plain = compiled_and_not(training=True)
    stream = random_stream(seed=1, num_batches=3, max_rows=4, max_length=20, vocab_size=VOCAB_SIZE)
    assert len({labels.shape for labels in stream}) == 3
    assert_compiled_equals_uncompiled(weighting, compiled, plain, [(labels, None) for labels in stream], True)


def test_eager_and_compiled_steps_can_alternate():
    """Eager calls with labels on a CPU use the code path of a CPU."""
    weighting, compiled, plain = compiled_and_not(training=True)
    batches = batches_of_one_shape(documents=False)[:4]
    for i, (labels, _) in enumerate(batches):
        weights = (weighting if i % 2 == 0 else compiled)(labels, vocab_size=VOCAB_SIZE)
        expected = plain(labels, vocab_size=VOCAB_SIZE)
        torch.testing.assert_close(weights, expected)
        found, wanted = (
            window.document_frequency(torch.arange(VOCAB_SIZE)) for window in (weighting.window, plain.window)
        )
        assert torch.equal(found, wanted)
    assert num_graphs() == 1
