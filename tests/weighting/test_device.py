"""What weightings compute on a device, see ``--device``: the weights and the state of the CPU, in CUDA graphs too.

On a CPU the first test compares two equal runs; there, the tests of each weighting compare with slow references.
"""

from functools import partial

import pytest
import torch
from label_batches import EPS, random_labels
from tfidf_reference import IGNORED

from tfidf_tune.weighting import (
    FocalWeighting,
    GoldfishWeighting,
    MiLeWeighting,
    Predictions,
    RepetitionWeighting,
    TFIDFWeighting,
    TokenBatch,
)

SHAPE, VOCAB_SIZE = (3, 60), 50
WEIGHTINGS = {
    "TF-IDF": TFIDFWeighting,
    "TF-IDF log, capped": partial(TFIDFWeighting, tf="log", max_weight=2.0),
    "TF-IDF binary": partial(TFIDFWeighting, tf="binary", num_batches=3),
    "Goldfish": partial(GoldfishWeighting, h=3),
    "Goldfish static": partial(GoldfishWeighting, strategy="static"),
    "MiLe": MiLeWeighting,
    "focal": FocalWeighting,
    "repetition": partial(RepetitionWeighting, min_length=20, sample=1, num_buckets=2**16),
    "repetition, short contexts": partial(
        RepetitionWeighting, h=2, k=1, span=5, min_length=1, sample=1, num_buckets=2**16
    ),
}
CAPTURED = ("TF-IDF", "TF-IDF log, capped", "Goldfish", "repetition", "repetition, short contexts")


def stream(device, *, same_shape=False):
    """Full mini-batches, with documents, a shorter one, one with nothing in it, all with ignored labels.

    Only the first row has no ignored labels. It is the same in each, so that repetition weights meet a copy.
    """
    generator = torch.Generator().manual_seed(0)
    passage = torch.randint(VOCAB_SIZE, SHAPE[1:], generator=generator)
    for number in range(24):
        labels = random_labels(generator, *SHAPE, VOCAB_SIZE, ignored=0.1)
        labels[0] = passage
        if number == 3:
            labels.fill_(IGNORED)
        if number == 5 and not same_shape:
            labels = labels[1:, :30].contiguous()
        predictions = Predictions(*(torch.rand(labels.shape, generator=generator) for _ in range(2)))
        documents = (torch.arange(labels.shape[1]) // 25).expand(labels.shape).contiguous()
        yield TokenBatch(
            labels.to(device),
            document_ids=documents.to(device) if number % 2 and not same_shape else None,
            vocab_size=VOCAB_SIZE,
            predictions=Predictions(-predictions[0].to(device), predictions[1].to(device)),
        )


def assert_same_state(found, expected):
    found, expected = found.state_dict(), expected.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].cpu(), expected[name].cpu()) for name in expected)


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_weights_and_state_are_those_of_the_cpu(name, device):
    """State bit for bit, zeros in the same places, weights up to rounding; the last third is evaluation."""
    found, expected = WEIGHTINGS[name](), WEIGHTINGS[name]()
    for weighting in (found, expected):
        weighting.set_special_tokens([0, 1])
    varied = 0
    for number, (here, there) in enumerate(zip(stream("cpu"), stream(device), strict=True)):
        weights = expected.train(number < 16)(here)
        on_device = found.train(number < 16)(there).cpu()
        assert torch.equal(on_device == 0, weights == 0)
        # Each is within 24 eps of the weights in float64.
        torch.testing.assert_close(on_device, weights, rtol=48 * EPS, atol=0)
        of_labels = weights[here.labels != IGNORED]
        varied += bool(of_labels.numel() and (of_labels != of_labels[0]).any())
    assert varied > 5, "weights of one value show nothing"
    assert_same_state(found, expected)


def test_a_cuda_graph_replays_the_bits_of_the_same_weighting_without_it(device):
    if device.type != "cuda":
        pytest.skip("a CUDA graph needs a GPU: --device cuda")
    for name in CAPTURED:
        eager, captured = WEIGHTINGS[name](), WEIGHTINGS[name]()
        first, *others = stream(device, same_shape=True)
        eager(first)
        expected = [eager(batch).clone() for batch in others]
        side = torch.cuda.Stream()  # a warm-up beside, as torch.cuda.graph asks for; it lays out the tables
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            captured(first)
        torch.cuda.current_stream().wait_stream(side)
        labels, graph = first.labels.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            weights = captured(TokenBatch(labels, vocab_size=VOCAB_SIZE))
        for batch, of_batch in zip(others, expected, strict=True):
            labels.copy_(batch.labels)
            graph.replay()
            assert torch.equal(weights, of_batch), name
        assert_same_state(captured, eager)
