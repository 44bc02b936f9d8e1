"""What all weightings do with labels of any type and size, and the input and arguments that they refuse."""

import math
from contextlib import nullcontext

import pytest
import torch
from label_batches import NO_LABEL_TYPES, assert_same_state, random_labels, state_copy, unchecked
from tfidf_reference import IGNORED

from tfidf_tune.weighting import (
    FocalWeighting,
    GoldfishWeighting,
    MiLeWeighting,
    RepetitionWeighting,
    TFIDFWeighting,
    UniformWeighting,
    shift_labels,
    term_frequency,
)

WEIGHTINGS = [
    UniformWeighting,
    TFIDFWeighting,
    GoldfishWeighting,
    RepetitionWeighting,
]
every_weighting = pytest.mark.parametrize("make", WEIGHTINGS)


def test_shifted_labels_are_those_of_the_next_token():
    assert shift_labels(torch.tensor([[1, 2, 3], [4, 5, 6]])).tolist() == [[2, 3, IGNORED], [5, 6, IGNORED]]


@every_weighting
def test_narrow_and_strided_labels_give_the_same_weights_and_are_not_modified(make):
    """50,304 is beyond what 16 bits hold."""
    settings = {"num_buckets": 2**12} if make is RepetitionWeighting else {}
    weightings = [make(**settings) for _ in range(5)]
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
            weighting = make(**({"num_buckets": 2**12} if make is RepetitionWeighting else {}))
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
        for bad in (10, -1, -101)
    },
    "negative": (torch.tensor([[1, 2, -7]]), {}, "contain the id -7, outside the vocabulary of ids from 0;.* by -100$"),
    "1-D": (torch.ones(5, dtype=torch.int64), {}, r"shape \(5,\), expected \[b, s\].*tfidf_tune\.loss\.stock\.CE"),
    "document shape": (
        ONE,
        {"document_ids": torch.zeros(1, 2).int()},
        r"document_ids has shape \(1, 2\), expected ",
    ),
    "document type": (ONE, {"document_ids": torch.zeros(1, 3)}, r"document_ids are torch\.float32, expected integers"),
    **{
        str(dtype): (torch.zeros(1, 2, dtype=dtype), {}, rf"^labels are {dtype}, expected signed .* labels\.long\(\)$")
        for dtype in NO_LABEL_TYPES
    },
}


@pytest.mark.parametrize("make", [*WEIGHTINGS, MiLeWeighting, FocalWeighting])
def test_bad_input_is_refused_and_leaves_the_state(make):
    """MiLe and focal weights check the labels before they ask for predictions."""
    for labels, arguments, message in REFUSED.values():
        weighting = make(**({"num_buckets": 64} if make is RepetitionWeighting else {}))
        if not weighting.needs_predictions:
            weighting(torch.tensor([[1, 2, 3]]), vocab_size=10)
        before = state_copy(weighting)
        for training in (True, False):
            with pytest.raises(ValueError, match=message):
                weighting.train(training)(labels, **arguments)
        if before:
            assert_same_state(weighting, before)


BAD_ARGUMENTS = [
    *((TFIDFWeighting, {"num_batches": n}, f"num_batches is {n}: .* set it to") for n in (0, 2.5, True)),
    (TFIDFWeighting, {"tf": "sublinear"}, "tf is 'sublinear': possible are count, log, binary"),
    *((TFIDFWeighting, {"max_weight": cap}, f"max_weight is {cap!r}: .* from 1 to") for cap in (0.99, math.nan, "3")),
    (TFIDFWeighting, {"sync": 1}, "sync is 1: set it to true or false"),
    (TFIDFWeighting, {"counted": "all"}, "counted is 'all': possible are labels, tokens"),
    (GoldfishWeighting, {"strategy": "random"}, "strategy is 'random': possible are hash, static"),
    *((GoldfishWeighting, {"k": k}, f"k is {k}: .* set it to 2 to 2147483648") for k in (1, 2**31 + 1)),
    *((GoldfishWeighting, {"h": h}, f"h is {h}: .* set it to 1 to 1024") for h in (0, 1025)),
    *(
        (make, {"gamma": gamma}, f"gamma is {gamma!r}: it is the exponent .* a number from 0 to 20")
        for make in (MiLeWeighting, FocalWeighting)
        for gamma in (-0.5, 20.5, "1")
    ),
    (RepetitionWeighting, {"h": 2.5}, "h is 2.5: .* whole number of 1 to 1024"),
    *((RepetitionWeighting, {"alpha": a}, f"alpha is {a}: .* set it to a number above 0, up to 4") for a in (0.0, 5)),
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


def test_bad_arguments_are_refused():
    for make, arguments, message in BAD_ARGUMENTS:
        with pytest.raises(ValueError, match=message):
            make(**arguments)
