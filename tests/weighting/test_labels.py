"""What all weightings do with labels of any type and size, and the input and arguments that they
refuse.
"""

import math
from contextlib import nullcontext

import pytest
import torch
from helpers.fakes.label_batches import assert_same_state, random_labels, state_copy, unchecked
from helpers.references.tfidf import IGNORED

from tfidf_tune.weighting import (
    FocalWeighting,
    GoldfishWeighting,
    MiLeWeighting,
    RepetitionWeighting,
    TFIDFWeighting,
    TokenWeighting,
    UniformWeighting,
    shift_labels,
)

WEIGHTINGS = [UniformWeighting, TFIDFWeighting, GoldfishWeighting, RepetitionWeighting]
every_weighting = pytest.mark.parametrize("make", WEIGHTINGS)


def test_shifted_labels_are_those_of_the_next_token():
    assert shift_labels(torch.tensor([[1, 2, 3], [4, 5, 6]])).tolist() == [
        [2, 3, IGNORED],
        [5, 6, IGNORED],
    ]


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
            vocab_size = (None, 50_304)[seed % 2]
            before = labels.clone()
            with nullcontext() if is_checked else unchecked():
                expected = wide(labels, vocab_size=vocab_size, document_ids=ids)
                for dtype, weighting in zip(
                    (torch.int8, torch.int16, torch.int32), narrow, strict=True
                ):
                    narrow_ids = None if ids is None else ids.to(dtype)
                    weights = weighting(
                        labels.to(dtype), vocab_size=vocab_size, document_ids=narrow_ids
                    )
                    assert torch.equal(weights, expected)
                transposed = labels.t().contiguous().t()
                assert torch.equal(
                    strided(transposed, vocab_size=vocab_size, document_ids=ids), expected
                )
            assert torch.equal(labels, before)
            assert expected.dtype == torch.float32
            assert torch.equal(
                expected[labels == IGNORED], torch.zeros(int((labels == IGNORED).sum()))
            )
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
                            weights = weighting.train(training)(
                                nothing, vocab_size=vocab_size, document_ids=ids
                            )
                            assert torch.equal(weights, torch.zeros(shape))
                if before:
                    assert_same_state(weighting, before)


# ---- refused

ONE = torch.tensor([[2, 3, 2]])
# Labels, other arguments, what the message names.
REFUSED = [
    *(
        (torch.tensor([[1, 2, bad, IGNORED]]), {"vocab_size": 10}, f"the id {bad}, ")
        for bad in (10, -1, -101)
    ),
    (torch.tensor([[1, 2, -7]]), {}, "the id -7, outside the vocabulary"),
    (torch.ones(5, dtype=torch.int64), {}, r"shape \(5,\), expected \[b, s\]"),
    (ONE, {"document_ids": torch.zeros(1, 2).int()}, r"document_ids has shape \(1, 2\)"),
    (ONE, {"document_ids": torch.zeros(1, 3)}, r"document_ids are torch\.float32"),
    *(
        (ONE.to(dtype), {}, f"labels are {dtype}")
        for dtype in (torch.uint8, torch.bool, torch.float32)
    ),
]


@pytest.mark.parametrize("make", [*WEIGHTINGS, MiLeWeighting, FocalWeighting])
def test_bad_input_is_refused_and_leaves_the_state(make):
    """MiLe and focal weights check the labels before they ask for predictions."""
    for labels, arguments, message in REFUSED:
        weighting = make(**({"num_buckets": 64} if make is RepetitionWeighting else {}))
        if not weighting.needs_predictions:
            weighting(torch.tensor([[1, 2, 3]]), vocab_size=10)
        before = state_copy(weighting)
        for training in (True, False):
            with pytest.raises(ValueError, match=message):
                weighting.train(training)(labels, **arguments)
        if before:
            assert_same_state(weighting, before)


BAD_ARGUMENTS = {
    TFIDFWeighting: {
        "num_batches": (0, 2.5, True),
        "tf": ("sublinear",),
        "max_weight": (0.99, math.nan, "3"),
        "sync": (1,),
        "counted": ("all",),
    },
    GoldfishWeighting: {"strategy": ("random",), "k": (1, 2**31 + 1), "h": (0, 1025)},
    MiLeWeighting: {"gamma": (-0.5, 20.5, "1")},
    FocalWeighting: {"gamma": (-0.5, 20.5)},
    RepetitionWeighting: {
        "h": (2.5, 8),
        "alpha": (0.0, 5),
        "exposures": (0.5, 2048),
        "min_length": (0,),
        "num_buckets": (2**31, 2**29),
        "k": (6,),
        "span": (64, 4097),
        "quantile": (1.5,),
        "sample": (65,),
        "sync": ("yes",),
    },
}


def test_bad_arguments_are_refused():
    for make, arguments in BAD_ARGUMENTS.items():
        for name, values in arguments.items():
            for value in values:
                with pytest.raises(ValueError, match=f"{name} is {value!r}"):
                    make(**{name: value})


def test_weights_of_another_shape_are_refused():
    class Scalar(TokenWeighting):
        def weigh(self, batch):
            return torch.tensor(1.0) if batch.labels[0, 0] else 1.0

    for labels, found in ((torch.ones, r"\[\]"), (torch.zeros, "float")):
        with pytest.raises(
            ValueError, match=rf"Scalar\.weigh has to return \[b, s\] = \[2, 3\], got {found}"
        ):
            Scalar()(labels(2, 3, dtype=torch.int64))
