"""What the weightings take for labels: which are refused, of what type and size, and which way they go."""

import pytest
import torch
from label_batches import NO_LABEL_TYPES, random_labels, random_stream
from tfidf_reference import IGNORED
from ways import WAYS, OneWay
from window_state import assert_same_state, state_copy

from tfidf_tune.weighting import (
    FocalWeighting,
    GoldfishWeighting,
    MiLeWeighting,
    PowerLawWeighting,
    ProductWeighting,
    TFIDFWeighting,
    TokenDropWeighting,
    UniformWeighting,
)
from tfidf_tune.weighting._labels import on_host


def make_token_drop():
    """Nothing is dropped: in a batch of three tokens that would be all of them once in a while."""
    return TokenDropWeighting(p=0.0)


def make_product():
    return ProductWeighting(UniformWeighting(), GoldfishWeighting())


WEIGHTINGS = [
    TFIDFWeighting,
    UniformWeighting,
    GoldfishWeighting,
    make_token_drop,
    PowerLawWeighting,
    make_product,
]
# The last two need predictions for weights, and look at the labels before.
REFUSING = [*WEIGHTINGS, MiLeWeighting, FocalWeighting]

# ---- the way


def test_labels_on_a_cpu_go_the_way_of_the_host_and_others_that_of_the_device():
    assert on_host(torch.zeros(1, 2, dtype=torch.int64))
    assert not on_host(torch.zeros(1, 2, dtype=torch.int64, device="meta"))


def test_in_a_compiled_graph_all_labels_go_the_way_of_the_device():
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="eager")
    def way(labels):
        return labels + int(on_host(labels))

    labels = torch.zeros(1, 2, dtype=torch.int64)
    assert torch.equal(way(labels), labels)


# ---- labels that are refused


REFUSED = {
    **{
        f"id {bad_id}": (
            torch.tensor([[1, 2, bad_id, IGNORED]]),
            10,
            rf"contain the id {bad_id}, outside the vocabulary of 10; ignored positions are marked by -100$",
        )
        for bad_id in (10, 11, 2**31, -1, -99, -101)
    },
    "negative": (torch.tensor([[1, 2, -7]]), None, "contain the id -7, outside the vocabulary of ids from 0;"),
    "several": (torch.tensor([[9, -3, 5], [2**40, -7, 1]]), 6, "contain the id -7,"),
    "1-D": (torch.ones(5, dtype=torch.int64), None, r"labels has shape \(5,\), expected \[b, s\]"),
    "3-D": (torch.ones(1, 2, 3, dtype=torch.int64), None, r"labels has shape \(1, 2, 3\), expected \[b, s\]"),
    **{
        str(dtype): (
            torch.zeros(1, 2, dtype=dtype),
            None,
            rf"^labels are {dtype}, expected signed integers: convert token ids with labels\.long\(\)$",
        )
        for dtype in NO_LABEL_TYPES
    },
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_labels_that_are_none_are_an_error_that_names_them(name, training):
    labels, vocab_size, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        TFIDFWeighting().train(training)(labels, vocab_size=vocab_size)


@pytest.mark.parametrize("make", REFUSING)
@pytest.mark.parametrize("name", ["id 10", "1-D", "torch.uint8"])
def test_every_weighting_refuses_them(make, name):
    labels, vocab_size, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        make()(labels, vocab_size=vocab_size)


@pytest.mark.parametrize("make", [TFIDFWeighting, TokenDropWeighting, PowerLawWeighting])
def test_an_id_outside_the_vocabulary_leaves_the_state_as_it_was(make):
    weighting = make()
    weighting(torch.tensor([[1, 2, 3]]), vocab_size=10)
    before = state_copy(weighting)
    with pytest.raises(ValueError, match="10"):
        weighting(torch.tensor([[1, 2, 3, 10]]), vocab_size=10)
    assert_same_state(weighting, before)


@pytest.mark.parametrize("way", WAYS)
def test_document_ids_of_another_shape_are_an_error(way):
    with pytest.raises(ValueError, match="document_ids"):
        OneWay(way)(torch.ones(2, 3, dtype=torch.int64), document_ids=torch.zeros(2, 2, dtype=torch.int64))


def test_a_negative_document_id_is_an_error():
    with pytest.raises(ValueError, match="document_ids contain -1: they have to be non-negative"):
        TFIDFWeighting()(torch.tensor([[1, 2]]), document_ids=torch.tensor([[0, -1]]))


# ---- types


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("vocab_size", [None, 100, 50_304])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
def test_labels_of_every_signed_integer_type_weigh_the_same(way, vocab_size, dtype):
    """50,304 is beyond what 16 bits hold."""
    narrow, wide = OneWay(way, num_batches=2), OneWay(way, num_batches=2)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        labels = random_labels(generator, 3, 20, 100)
        document_ids = torch.randint(0, 100, (3, 20), generator=generator) if seed else None
        expected = wide(labels, vocab_size=vocab_size, document_ids=document_ids)
        narrow_ids = None if document_ids is None else document_ids.to(dtype)
        assert torch.equal(narrow(labels.to(dtype), vocab_size=vocab_size, document_ids=narrow_ids), expected)
        assert int(narrow.window.num_documents) == int(wide.window.num_documents)
        assert (expected == 0).any()


@pytest.mark.parametrize("make", [make for make in WEIGHTINGS if make is not TFIDFWeighting])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
def test_the_other_weightings_take_labels_of_every_signed_integer_type_too(make, dtype):
    narrow, wide = make(), make()
    for weighting in (narrow, wide):
        weighting.set_special_tokens([5, 300])
    for seed in range(3):
        labels = random_labels(torch.Generator().manual_seed(seed), 3, 40, 100)
        expected = wide(labels, vocab_size=50_304)
        assert torch.equal(narrow(labels.to(dtype), vocab_size=50_304), expected)


# ---- sizes


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("vocab_size", [None, 20])
@pytest.mark.parametrize("documents", [False, True])
def test_labels_of_no_row_or_no_position_change_nothing(way, training, shape, vocab_size, documents):
    nothing = torch.zeros(shape, dtype=torch.int64)
    weighting = OneWay(way, num_batches=2)
    for seen in [None, *random_stream(seed=1, num_batches=2, max_rows=3, max_length=9, vocab_size=20)]:
        if seen is not None:
            weighting(seen, vocab_size=vocab_size)
        before = state_copy(weighting.weighting)
        document_ids = nothing if documents else None
        weights = weighting(nothing, training=training, vocab_size=vocab_size, document_ids=document_ids)
        assert weights.shape == shape
        assert weights.dtype == torch.float32
        assert_same_state(weighting.weighting, before)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("vocab_size", [None, 20])
@pytest.mark.parametrize("make", [make for make in WEIGHTINGS if make is not TFIDFWeighting])
def test_the_other_weightings_give_no_position_no_weight_and_learn_nothing(make, training, shape, vocab_size):
    nothing = torch.zeros(shape, dtype=torch.int64)
    weighting = make()
    for seen in (None, torch.tensor([[1, 19]])):
        if seen is not None:
            weighting.train()(seen, vocab_size=vocab_size)
        before = {name: tensor.tolist() for name, tensor in weighting.state_dict().items()}
        weights = weighting.train(training)(nothing, vocab_size=vocab_size, document_ids=nothing)
        assert weights.shape == shape
        assert weights.dtype == torch.float32
        assert {name: tensor.tolist() for name, tensor in weighting.state_dict().items()} == before


@pytest.mark.parametrize("vocab_size", [32_000, None])
def test_document_ids_whose_pair_with_a_token_is_no_int64_are_an_error(vocab_size):
    labels, limit = torch.tensor([[2, 3, 2]]), 2**63 // (vocab_size or 2**32)
    TFIDFWeighting()(labels, vocab_size=vocab_size, document_ids=torch.full_like(labels, limit - 1))
    with pytest.raises(ValueError, match=f"document_ids contain {limit}.*below {limit}"):
        TFIDFWeighting()(labels, vocab_size=vocab_size, document_ids=torch.full_like(labels, limit))


def test_document_ids_that_are_no_integers_are_an_error():
    with pytest.raises(ValueError, match=r"document_ids are torch\.float32"):
        TFIDFWeighting()(torch.tensor([[2, 3]]), document_ids=torch.zeros(1, 2))
