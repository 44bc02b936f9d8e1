"""What all weightings do with labels of any type and size, and the input and arguments that they refuse."""

import math
from contextlib import nullcontext

import pytest
import torch
from called_weighting import CalledWeighting, unchecked
from label_batches import NO_LABEL_TYPES, random_labels
from tfidf_reference import IGNORED
from window_state import assert_same_state, state_copy

from tfidf_tune.weighting import (
    DocumentWindow,
    FocalWeighting,
    GoldfishWeighting,
    MiLeWeighting,
    RepetitionWeighting,
    TFIDFWeighting,
    TokenWeighting,
    UniformWeighting,
    shift_labels,
    term_frequency,
)
from tfidf_tune.weighting._labels import values_are_known

WEIGHTINGS = [
    UniformWeighting,
    TFIDFWeighting,
    GoldfishWeighting,
    RepetitionWeighting,
]
every_weighting = pytest.mark.parametrize("make", WEIGHTINGS)


def test_values_are_known_of_uncompiled_labels_on_a_cpu():
    labels = torch.zeros(1, 2, dtype=torch.int64)
    assert values_are_known(labels)
    assert not values_are_known(labels.to("meta"))
    torch._dynamo.reset()
    compiled = torch.compile(lambda labels: labels + int(values_are_known(labels)), fullgraph=True, backend="eager")
    assert torch.equal(compiled(labels), labels)


def test_shifted_labels_are_those_of_the_next_token():
    assert shift_labels(torch.tensor([[1, 2, 3], [4, 5, 6]])).tolist() == [[2, 3, IGNORED], [5, 6, IGNORED]]


@every_weighting
def test_narrow_and_strided_labels_give_the_same_weights_and_are_not_modified(make):
    """50,304 is beyond what 16 bits hold."""
    weightings = [make() for _ in range(5)]
    for weighting in weightings:
        weighting.set_special_tokens([5, 300])
    wide, *narrow, strided = weightings
    for is_checked in (True, False):
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            labels = random_labels(generator, 3, 40, 100)
            ids = torch.randint(0, 100, (3, 40), generator=generator) if seed else None
            vocab_size, before = (None, 50_304)[seed % 2], labels.clone()
            with nullcontext() if is_checked else unchecked():
                expected = wide(labels, vocab_size=vocab_size, document_ids=ids)
                for dtype, weighting in zip((torch.int8, torch.int16, torch.int32), narrow, strict=True):
                    narrow_ids = None if ids is None else ids.to(dtype)
                    weights = weighting(labels.to(dtype), vocab_size=vocab_size, document_ids=narrow_ids)
                    assert torch.equal(weights, expected)
                transposed = labels.t().contiguous().t()
                assert torch.equal(strided(transposed, vocab_size=vocab_size, document_ids=ids), expected)
            assert torch.equal(labels, before)
            assert expected.dtype == torch.float32
            assert torch.equal(expected[labels == IGNORED], torch.zeros(int((labels == IGNORED).sum())))
            if make is UniformWeighting:
                assert torch.equal(expected, (labels != IGNORED).float())


@every_weighting
def test_batches_without_positions_or_valid_tokens_change_nothing(make):
    for is_checked in (True, False):
        for vocab_size in (None, 20):
            weighting = make()
            for seen in (torch.zeros(1, 0, dtype=torch.int64), torch.tensor([[1, 19, 1]])):
                with nullcontext() if is_checked else unchecked():
                    weighting.train()(seen, vocab_size=vocab_size)
                    # The first call creates tables, also without a position.
                    weighting(torch.full((2, 3), IGNORED), vocab_size=vocab_size)
                    before = state_copy(weighting)
                    for shape in ((0, 5), (5, 0), (0, 0), (2, 3)):
                        for training in (True, False):
                            nothing = torch.full(shape, IGNORED)
                            ids = torch.zeros_like(nothing) if training else None
                            weights = weighting.train(training)(nothing, vocab_size=vocab_size, document_ids=ids)
                            assert torch.equal(weights, torch.zeros(shape))
                if before:
                    assert_same_state(weighting, before)


# ---- refused

ONE = torch.tensor([[2, 3, 2]])
REFUSED = {
    **{
        f"id {bad}": (torch.tensor([[1, 2, bad, IGNORED]]), {"vocab_size": 10}, f"the id {bad}, outside the voc.* 10; ")
        for bad in (10, 2**31, -1, -99, -101)
    },
    "negative": (torch.tensor([[1, 2, -7]]), {}, "contain the id -7, outside the vocabulary of ids from 0;.* by -100$"),
    "several": (torch.tensor([[9, -3, 5], [2**40, -7, 1]]), {"vocab_size": 6}, "contain the id -7,"),
    "1-D": (torch.ones(5, dtype=torch.int64), {}, r"labels has shape \(5,\), expected \[b, s\]"),
    "3-D": (torch.ones(1, 2, 3, dtype=torch.int64), {}, r"labels has shape \(1, 2, 3\), expected \[b, s\]"),
    "document shape": (
        ONE,
        {"document_ids": torch.zeros(1, 2).int()},
        r"document_ids has shape \(1, 2\), expected ",
    ),
    "document type": (ONE, {"document_ids": torch.zeros(1, 3)}, r"document_ids are torch\.float32, expected integers"),
    **{
        str(dtype): (
            torch.zeros(1, 2, dtype=dtype),
            {},
            rf"^labels are {dtype}, expected signed integers: convert token ids with labels\.long\(\)$",
        )
        for dtype in NO_LABEL_TYPES
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_and_leaves_the_state(name):
    """MiLe and focal weights check the labels before they ask for predictions."""
    labels, arguments, message = REFUSED[name]
    for make in (*WEIGHTINGS, MiLeWeighting, FocalWeighting):
        weighting = make()
        if not weighting.needs_predictions:
            weighting(torch.tensor([[1, 2, 3]]), vocab_size=10)
        before = state_copy(weighting)
        for training in (True, False):
            with pytest.raises(ValueError, match=message):
                weighting.train(training)(labels, **arguments)
        if before:
            assert_same_state(weighting, before)


@pytest.mark.parametrize("vocab_size", [32_000, None])
def test_document_ids_that_would_overflow_int64_are_refused(vocab_size):
    limit = 2**63 // (vocab_size or 2**32)
    for sync, most in ((False, limit), (True, min(limit, 2**31 - 1))):
        weighting = TFIDFWeighting(sync=sync)
        weighting(ONE, vocab_size=vocab_size, document_ids=torch.full_like(ONE, most - 1))
        for bad in (most, -1):
            with pytest.raises(ValueError, match=f"document_ids contain {bad}: .* non-negative and below {most}"):
                weighting(ONE, vocab_size=vocab_size, document_ids=torch.full_like(ONE, bad))


BAD_ARGUMENTS = [
    *((DocumentWindow, {"num_batches": n}, f"num_batches is {n}: the window holds at least") for n in (0, 2.5, True)),
    (TFIDFWeighting, {"num_batches": 0}, "num_batches is 0: .* set it to 1 or more"),
    (TFIDFWeighting, {"tf": "sublinear"}, "tf is 'sublinear': possible are count, log, binary"),
    *(
        (TFIDFWeighting, {"max_weight": cap}, f"max_weight is {cap!r}: .* or null for no cap, .* from 1 to 1e+09")
        for cap in (0.99, 1e39, math.inf, math.nan, "3")
    ),
    (TFIDFWeighting, {"sync": 1}, "sync is 1: set it to true or false"),
    (GoldfishWeighting, {"strategy": "random"}, "strategy is 'random': possible are hash, static"),
    (GoldfishWeighting, {"k": 1}, "k is 1: .* set it to 2 to 2147483648"),
    (GoldfishWeighting, {"k": 2**31 + 1}, "k is 2147483649: .* set it to 2 to 2147483648"),
    (GoldfishWeighting, {"h": 0}, "h is 0: .* set it to 1 to 1024"),
    (GoldfishWeighting, {"h": 1025}, "h is 1025: .* set it to 1 to 1024"),
    *(
        (make, {"gamma": gamma}, f"gamma is {gamma!r}: it is the exponent .* a number from 0 to 20")
        for make in (MiLeWeighting, FocalWeighting)
        for gamma in (-0.5, 20.5, math.inf, "1", True)
    ),
    (RepetitionWeighting, {"h": 0}, "h is 0"),
    (RepetitionWeighting, {"h": 2.5}, "h is 2.5: .* whole number of 1 to 1024"),
    (RepetitionWeighting, {"alpha": 0.0}, "alpha is 0.0: .* set it to a number above 0, up to 4"),
    (RepetitionWeighting, {"alpha": 5}, "alpha is 5: .* set it to a number above 0, up to 4"),
    (RepetitionWeighting, {"num_buckets": 0}, "num_buckets is 0"),
    (RepetitionWeighting, {"min_length": 0}, "min_length is 0: repetition counts from .* set it to 1 to 1000000"),
    (RepetitionWeighting, {"num_buckets": 2**31}, "num_buckets is 2147483648: .* set it to 1 to 1073741824"),
    (RepetitionWeighting, {"num_buckets": 2**29}, "num_buckets is 536870912 and sample 8: .* at most 268435456"),
    (RepetitionWeighting, {"k": 6}, "k is 6: .* how many of the 5 tokens .* set it to 1 to 5"),
    (RepetitionWeighting, {"h": 8}, "h is 8 and k is 4: the 70 choices .* more than 64, set k to h - 1 or h, or a"),
    (RepetitionWeighting, {"span": 64}, "span is 64: the token is in its middle, set it to an odd number"),
    (RepetitionWeighting, {"span": 4097}, "span is 4097: .* set it to 1 to 4095"),
    (RepetitionWeighting, {"quantile": 1.5}, "quantile is 1.5: .* set it to a number from 0 to 1"),
    (RepetitionWeighting, {"sample": 65}, "sample is 65: .* set it to 1 to 64"),
    (RepetitionWeighting, {"sync": "yes"}, "sync is 'yes'"),
    (lambda tf: term_frequency(ONE, tf), {"tf": "x"}, "tf is 'x': possible are count, log, binary"),
]


@pytest.mark.parametrize(("make", "arguments", "message"), BAD_ARGUMENTS, ids=[case[2][:32] for case in BAD_ARGUMENTS])
def test_bad_arguments_are_refused(make, arguments, message):
    with pytest.raises(ValueError, match=message.replace("e+", "e.")):
        make(**arguments)


def test_the_limits_of_the_arguments_are_accepted():
    assert all(
        isinstance(weighting, TokenWeighting)
        for weighting in (
            *(TFIDFWeighting(num_batches=1, max_weight=cap) for cap in (1, 1e9)),
            *(GoldfishWeighting(k=k, h=h) for k, h in ((2, 1), (2**31, 1024))),
            *(make(gamma=gamma) for make in (MiLeWeighting, FocalWeighting) for gamma in (0, 20)),
            RepetitionWeighting(h=1, k=1, alpha=4, span=1, quantile=0, sample=1, num_buckets=1),
            RepetitionWeighting(h=1024, k=None, span=4095, quantile=1, sample=2),
            RepetitionWeighting(h=64, k=63, sample=64),
            TFIDFWeighting(sync=True, max_weight=2),
        )
    )


def test_a_batch_of_a_different_vocabulary_leaves_the_window_usable():
    weighting = CalledWeighting()
    with pytest.raises(ValueError, match="the id 3, outside the vocabulary of 2;"):
        weighting(ONE, vocab_size=2)
    assert weighting(ONE, vocab_size=4).all()
