"""All weightings where labels are on a GPU, as far as a CPU can show, and under ``torch.compile``."""

from functools import partial
from itertools import product

import pytest
import torch
from called_weighting import unchecked
from label_batches import random_labels
from operations import Recorder, assert_no_synchronisation
from tfidf_reference import IGNORED
from window_state import assert_same_state, state_copy

from tfidf_tune.weighting import (
    FocalWeighting,
    GoldfishWeighting,
    MiLeWeighting,
    Predictions,
    RepetitionWeighting,
    TFIDFWeighting,
)

ROWS, LENGTH, VOCAB_SIZE = 3, 40, 50


def make_hash():
    return GoldfishWeighting(k=2, h=3)


def make_static():
    return GoldfishWeighting(strategy="static")


def make_repetition():
    return RepetitionWeighting(h=2, k=1, span=5, min_length=1, sample=1, num_buckets=2**12)


WEIGHTINGS = [
    *(partial(TFIDFWeighting, tf=tf, max_weight=cap) for tf, cap in (("count", None), ("log", 2.0), ("binary", None))),
    GoldfishWeighting,
    make_static,
    MiLeWeighting,
    FocalWeighting,
    make_repetition,
]


def with_exceptions(make):
    weighting = make()
    weighting.set_special_tokens([0, 1])
    return weighting


def arguments_of(labels, generator):
    """All that a weighting may be given, on the device of the labels."""
    shape = labels.shape
    predictions = Predictions(-torch.rand(shape, generator=generator), torch.rand(shape, generator=generator))
    document_ids = (torch.arange(shape[1]) // 25).expand(shape).contiguous()
    return {
        "vocab_size": VOCAB_SIZE,
        "document_ids": document_ids.to(labels.device),
        "predictions": Predictions(*(part.to(labels.device) for part in predictions)),
    }


# ---- waiting for nothing


@pytest.mark.parametrize("make", WEIGHTINGS)
def test_with_a_vocabulary_size_nothing_waits_for_the_device(make):
    """At the first call state and special tokens follow the labels; torchtune's stock recipes do not move their loss.

    Later batches may have other shapes and vocabularies: the tables grow by what shapes say.
    """
    for documents, training in product((True, False), repeat=2):
        weighting = with_exceptions(make).train(training)
        for i, (rows, length) in enumerate(((ROWS, LENGTH), (ROWS, LENGTH), (2, 9), (4, 50))):
            labels = torch.zeros(rows, length, dtype=torch.int64, device="meta")
            arguments = arguments_of(labels, torch.Generator()) | {"vocab_size": VOCAB_SIZE + 10 * i}
            if not documents:
                arguments["document_ids"] = None
            with Recorder() as recorder:
                weights = weighting(labels, **arguments)
            assert weights.device.type == "meta"
            assert weights.shape == labels.shape
            assert weights.dtype == torch.float32
            if i:
                assert_no_synchronisation(recorder)
        if training:
            devices = {name: tensor.device.type for name, tensor in weighting.state_dict().items()}
            assert set(devices.values()) <= {"meta"}


def test_on_a_gpu_the_device_assertion_of_the_loss_reports_a_bad_id():
    labels = torch.tensor([[1, 2, VOCAB_SIZE, -7, 3, IGNORED]])
    weighting, clean = TFIDFWeighting(num_batches=2), TFIDFWeighting(num_batches=2)
    with unchecked():
        weighting(labels, vocab_size=VOCAB_SIZE)
        clean(labels.masked_fill((labels < 0) | (labels >= VOCAB_SIZE), IGNORED), vocab_size=VOCAB_SIZE)
    assert_same_state(weighting, state_copy(clean))


# ---- compiled


@pytest.fixture
def no_graphs_of_another_test():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("make", [make_hash, make_static, MiLeWeighting, FocalWeighting, make_repetition])
@pytest.mark.usefixtures("no_graphs_of_another_test")
def test_compiled_weights_are_bit_identical(make):
    """In training and in evaluation, with special tokens, documents and a batch with nothing in it."""
    weighting, plain = with_exceptions(make), with_exceptions(make)
    compiled = torch.compile(weighting, fullgraph=True, backend="aot_eager")
    generator = torch.Generator().manual_seed(0)
    batches = [random_labels(generator, ROWS, LENGTH, VOCAB_SIZE, ignored=0.05) for _ in range(4)]
    batches[1].fill_(IGNORED)
    compared = 0.0
    for i, labels in enumerate(batches):
        training = i != 2
        arguments = arguments_of(labels, generator)
        arguments["first_pass"] = i != 3
        weights = compiled.train(training)(labels, **arguments)
        with unchecked():
            expected = plain.train(training)(labels, **arguments)
        assert torch.equal(weights, expected)
        if weighting.state_dict():
            assert_same_state(weighting, state_copy(plain))
        compared += float(weights.sum())
    assert compared > 0
