"""What hidden states, head and labels have to be, and what stands where nothing counts."""

import pytest
import torch
from tfidf_reference import IGNORED

from tfidf_tune.loss import (
    CrossEntropyLoss,
    HeadInput,
    fused_cross_entropy,
    linear_token_cross_entropy,
    token_predictions,
)

LABELS = torch.tensor([[1, 2, IGNORED], [0, 4, 3]])


def make_head(**changes):
    return HeadInput(**{"hidden": torch.randn(2, 3, 4), "weight": torch.randn(5, 4), "bias": torch.randn(5), **changes})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden": torch.randn(1, 3, 4)}, r"hidden \[1, 3, 4\] float32"),
        ({"hidden": torch.randn(6, 4)}, r"hidden \[6, 4\]"),
        ({"hidden": torch.ones(2, 3, 4, dtype=torch.int64)}, "int64"),
        ({"weight": torch.randn(5, 3)}, r"weight \[5, 3\]"),
        ({"weight": torch.randn(5, 4, dtype=torch.bfloat16)}, "bfloat16"),
        ({"weight": torch.randn(4)}, r"weight \[4\]"),
        ({"weight": torch.randn(5, 4, 4)}, r"weight \[5, 4, 4\]"),
        ({"bias": torch.randn(1)}, r"bias \[1\]"),
        (
            {"hidden": torch.ones(2, 3, 4).int(), "weight": torch.ones(5, 4).int(), "bias": None},
            r"labels \[2, 3\] int64",
        ),
        ({"bias": torch.randn(5, dtype=torch.float16)}, "float16"),
    ],
)
def test_mismatched_inputs_are_an_error_that_names_shapes_and_dtypes(changes, named):
    head = make_head(**changes)
    for call in (
        lambda: fused_cross_entropy(head, LABELS, torch.ones(2, 3)),
        lambda: linear_token_cross_entropy(head, LABELS),
        lambda: token_predictions(head, LABELS),
        lambda: CrossEntropyLoss().objective(head, LABELS, torch.ones(2, 3)),
    ):
        with pytest.raises(ValueError, match=rf"(?s)does not fit: .*{named}.*expected are hidden \[b, s, d\]"):
            call()


@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_ignored_positions_do_not_count(value, is_trained):
    """The label that stands in for an ignored one may have a logit of -inf: of a padding id, say."""
    bias = torch.zeros(5)
    bias[0] = float("-inf")
    labels = torch.tensor([[1, 2, IGNORED], [3, 4, IGNORED]])
    head = make_head(bias=bias) if value == float("-inf") else make_head()
    if value != value:
        head.hidden[:, 2] = value
    head.hidden.requires_grad_(is_trained)
    expected = torch.nn.functional.cross_entropy(
        torch.nn.functional.linear(*head).flatten(0, 1)[labels.flatten() != IGNORED], labels[labels != IGNORED]
    )

    loss, cross_entropy, _ = CrossEntropyLoss().terms(head, labels)

    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(cross_entropy, expected.detach())
