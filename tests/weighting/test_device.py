"""Weightings on a device, see ``--device``: the CPU's weights and state, no waiting,
``torch.compile``, CUDA graphs.

Where there is no GPU, the meta device stands for it, and the code path of a GPU runs on the CPU.
"""

from functools import partial
from itertools import product

import pytest
import torch
from helpers.fakes.label_batches import (
    EPS,
    assert_same_state,
    random_labels,
    state_copy,
    unchecked,
)
from helpers.operations import Recorder, assert_no_synchronisation
from helpers.references.tfidf import IGNORED
from torch._dynamo.utils import counters

from tfidf_tune.weighting import (
    FocalWeighting,
    GoldfishWeighting,
    MiLeWeighting,
    Predictions,
    RepetitionWeighting,
    TFIDFWeighting,
    TokenBatch,
)

ROWS = 3
LENGTH = 60
VOCAB_SIZE = 50
WEIGHTINGS = {
    "TF-IDF": TFIDFWeighting,
    "TF-IDF log, capped": partial(TFIDFWeighting, tf="log", max_weight=2.0, num_batches=3),
    "TF-IDF of all tokens": partial(TFIDFWeighting, counted="tokens", num_batches=3),
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


def make(name):
    weighting = WEIGHTINGS[name]()
    weighting.set_special_tokens([0, 1])
    return weighting


def batch_of(labels, generator, *, device="cpu", documents=True, vocab_size=VOCAB_SIZE):
    """All that a weighting may be given, on a device."""
    log_probability, entropy = (torch.rand(labels.shape, generator=generator) for _ in range(2))
    document_ids = (torch.arange(labels.shape[1]) // 25).expand(labels.shape).contiguous()
    all_tokens = torch.where(labels == IGNORED, torch.arange(labels.shape[1]) % VOCAB_SIZE, labels)
    return TokenBatch(
        labels.to(device),
        document_ids=document_ids.to(device) if documents else None,
        all_tokens=all_tokens.to(device),
        vocab_size=vocab_size,
        predictions=Predictions(-log_probability.to(device), entropy.to(device)),
    )


# ---- a GPU


def stream(device, *, same_shape=False):
    """Full mini-batches, with documents, a shorter one, one with nothing in it, all with ignored
    labels.

    Only the first row has no ignored labels. It is the same in each, so that repetition weights
    meet a copy.
    """
    generator = torch.Generator().manual_seed(0)
    passage = torch.randint(VOCAB_SIZE, (LENGTH,), generator=generator)
    for number in range(24):
        labels = random_labels(generator, ROWS, LENGTH, VOCAB_SIZE, ignored=0.1)
        labels[0] = passage
        if number == 3:
            labels.fill_(IGNORED)
        if number == 5 and not same_shape:
            labels = labels[1:, :30].contiguous()
        yield batch_of(labels, generator, device=device, documents=number % 2 and not same_shape)


def assert_states_equal(found, expected):
    assert found.state_dict().keys() == expected.state_dict().keys()
    assert all(
        torch.equal(value.cpu(), expected.state_dict()[name].cpu())
        for name, value in found.state_dict().items()
    )


def test_weights_and_state_are_those_of_the_cpu(device):
    """State bit for bit, zeros in the same places, weights up to rounding; the last third is
    evaluation.
    """
    if device.type == "cpu":
        pytest.skip("two equal runs show nothing: --device cuda")
    for name in WEIGHTINGS:
        found = make(name)
        expected = make(name)
        varied = 0
        for number, (here, there) in enumerate(zip(stream("cpu"), stream(device), strict=True)):
            weights = expected.train(number < 16)(here)
            on_device = found.train(number < 16)(there).cpu()
            assert torch.equal(on_device == 0, weights == 0), name
            # Each is within 24 eps of the weights in float64.
            torch.testing.assert_close(on_device, weights, rtol=48 * EPS, atol=0)
            of_labels = weights[here.labels != IGNORED]
            varied += bool(of_labels.numel() and (of_labels != of_labels[0]).any())
        assert varied > 5, "weights of one value show nothing"
        assert_states_equal(found, expected)


def test_a_cuda_graph_replays_the_bits_of_the_same_weighting_without_it(device):
    if device.type != "cuda":
        pytest.skip("a CUDA graph needs a GPU: --device cuda")
    for name in CAPTURED:
        eager = make(name)
        captured = make(name)
        first, *others = stream(device, same_shape=True)
        eager(first)
        expected = [eager(batch).clone() for batch in others]
        # A warm-up beside, as torch.cuda.graph asks for; it lays out the tables.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            captured(first)
        torch.cuda.current_stream().wait_stream(side)
        labels = first.labels.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            weights = captured(TokenBatch(labels, vocab_size=VOCAB_SIZE))
        for batch, of_batch in zip(others, expected, strict=True):
            labels.copy_(batch.labels)
            graph.replay()
            assert torch.equal(weights, of_batch), name
        assert_states_equal(captured, eager)


# ---- what a captured graph asks for: the same operations on the same memory, whatever the values
# are


def batches_of_any_values(generator):
    """Ordinary ones, one with nothing in it, one with a single token, one of ids that are not in
    the vocabulary.
    """
    ordinary = [random_labels(generator, ROWS, LENGTH, VOCAB_SIZE) for _ in range(6)]
    return [
        *ordinary,
        *(torch.full((ROWS, LENGTH), token) for token in (IGNORED, 7, VOCAB_SIZE)),
        ordinary[0],
    ]


@pytest.mark.parametrize(
    ("name", "num_updates"),
    # In the window is all but what has no valid token; without a label, other tokens may count.
    [("TF-IDF log, capped", 8), ("TF-IDF of all tokens", 9), ("repetition, short contexts", None)],
)
def test_operations_shapes_and_memory_do_not_depend_on_values(name, num_updates):
    generator = torch.Generator().manual_seed(0)
    recorded = []
    weighting = make(name)
    # Lays out the tables.
    weighting(batch_of(torch.zeros(ROWS, LENGTH, dtype=torch.int64), generator))
    before = {name: (buffer.data_ptr(), buffer.shape) for name, buffer in weighting.named_buffers()}
    updates = weighting.window.num_updates.clone() if num_updates else None
    with unchecked():
        for labels in batches_of_any_values(generator):
            batch = batch_of(labels, generator)
            with Recorder() as recorder:
                weighting(batch)
            recorded.append(recorder.calls)
            assert {
                name: (b.data_ptr(), b.shape) for name, b in weighting.named_buffers()
            } == before
    assert len(recorded[0]) > 30
    assert all(calls == recorded[0] for calls in recorded)
    assert num_updates is None or int(weighting.window.num_updates - updates) == num_updates


# ---- waiting for nothing


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_with_a_vocabulary_size_nothing_waits_for_the_device(name):
    """At the first call state and special tokens follow the labels; torchtune's stock recipes do
    not move their loss.

    Later batches may have other shapes and vocabularies: the tables grow by what shapes say.
    """
    for documents, training in product((True, False), repeat=2):
        weighting = make(name).train(training)
        for i, (rows, length) in enumerate(((3, 40), (2, 9), (4, 50))):
            labels = torch.zeros(rows, length, dtype=torch.int64)
            batch = batch_of(
                labels, None, device="meta", documents=documents, vocab_size=VOCAB_SIZE + 10 * i
            )
            with Recorder() as recorder:
                weights = weighting(batch)
            assert (weights.device.type, weights.shape, weights.dtype) == (
                "meta",
                labels.shape,
                torch.float32,
            )
            if i:
                assert_no_synchronisation(recorder)
        if training:
            assert {tensor.device.type for tensor in weighting.state_dict().values()} <= {"meta"}


def num_kernels(weighting, rows, length):
    """Those of a call after the tables have been laid out."""
    batch = TokenBatch(
        torch.zeros(rows, length, dtype=torch.int64, device="meta"), vocab_size=32_000
    )
    weighting(batch)
    with Recorder() as recorder:
        weighting(batch)
    return recorder.num_kernels


@pytest.mark.parametrize("make_weighting", [TFIDFWeighting, RepetitionWeighting, GoldfishWeighting])
def test_more_rows_longer_ones_and_longer_contexts_take_no_more_kernels(make_weighting):
    """Each takes about as long as another, because a mini-batch is small."""
    number = num_kernels(make_weighting(), 2, 64)
    assert number > 0
    assert num_kernels(make_weighting(), 32, 64) == num_kernels(make_weighting(), 2, 1024) == number
    if make_weighting is GoldfishWeighting:
        assert num_kernels(GoldfishWeighting(h=100), 2, 64) == number


# ---- compiled: one graph, the bits of the uncompiled device path


@pytest.fixture
def num_graphs():
    """Graphs that a test has compiled so far."""
    torch._dynamo.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize(
    "name",
    [
        "TF-IDF log, capped",
        "TF-IDF of all tokens",
        "Goldfish",
        "MiLe",
        "focal",
        "repetition, short contexts",
    ],
)
def test_one_graph_serves_every_batch_after_the_tables_have_grown(name, num_graphs):
    generator = torch.Generator().manual_seed(0)
    plain = make(name)
    weighting = make(name)
    with unchecked():
        plain(batch_of(torch.zeros(ROWS, LENGTH, dtype=torch.int64), generator))
    weighting.load_state_dict(plain.state_dict())
    compiled = torch.compile(weighting, fullgraph=True, backend="aot_eager")
    compared = 0.0
    with torch._dynamo.config.patch(error_on_recompile=True):
        for labels in batches_of_any_values(generator):
            batch = batch_of(labels, generator)
            weights = compiled(batch)
            with unchecked():
                expected = plain(batch)
            torch.testing.assert_close(weights, expected, rtol=0, atol=0, equal_nan=True)
            if weighting.state_dict():
                assert_same_state(weighting, state_copy(plain))
            compared += float(weights.nansum())
    assert num_graphs() == 1
    assert compared > 0


# The graphs of AOTAutograd are those of the test above; it takes half of the time, and Goldfish is
# the shortest.
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("TF-IDF log, capped", "eager"),
        ("Goldfish", "aot_eager"),
        ("repetition, short contexts", "eager"),
    ],
)
def test_a_few_graphs_serve_rows_of_every_length(name, backend, num_graphs):
    """Otherwise torch gives up compiling at 8, and says so only in its log."""
    generator = torch.Generator().manual_seed(0)
    plain = make(name)
    compiled = torch.compile(make(name), backend=backend)
    with unchecked():
        for length in (*range(40, 52), *range(30, 20, -1)):
            batch = batch_of(random_labels(generator, ROWS, length, VOCAB_SIZE), generator)
            torch.testing.assert_close(compiled(batch), plain(batch), rtol=0, atol=0)
    assert num_graphs() < 8
