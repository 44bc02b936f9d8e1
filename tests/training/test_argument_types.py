"""Values of a config against a component's annotations."""

from pathlib import Path
from typing import Literal, Optional

import pytest
import torch

from tfidf_tune.training._components import check_argument_types


def component(
    plain,
    count: int,
    rate: float = 0.1,
    name: str = "",
    flag: bool = False,
    limit: Optional[int] = None,  # noqa: UP045  (torchtune's way)
    implicit: int = None,  # noqa: RUF013  (torchtune's too)
    mode: Literal["a", "b"] = "a",
    path: str | Path = "",
    lr: float | torch.Tensor = 0.1,
    sizes: str | list[int] = "x",
    betas: tuple[float, float] = (0.9, 0.99),
    device: torch.device | int = 0,
    **others: int,
) -> None: ...


@pytest.mark.parametrize(
    "arguments",
    [
        {"count": 3},
        {"count": 3.0},
        {"rate": 3},
        {"rate": -0.5},
        {"name": "x"},
        {"flag": True},
        {"limit": None},
        {"implicit": None},
        {"mode": "c"},  # which the component itself knows better
        {"path": "/x"},
        {"lr": 1e-3},
        {"sizes": [1]},
        {"betas": [0.9, 1]},
        {"device": "cpu"},  # which the component makes a device of
        {"plain": Ellipsis},
        {"unknown": "x"},
    ],
    ids=str,
)
def test_what_annotations_allow_is_let_through(arguments):
    check_argument_types(component, arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"betas": [0.9]}, r"betas is \[0.9\], it has to be a list of 2 values"),
        ({"betas": 0.9}, r"betas is 0.9, it has to be a list of 2 values"),
        ({"sizes": ["x"]}, r"sizes is \['x'\], it has to be a text or a list, each item a whole number"),
        ({"count": 2.5}, "count is 2.5, it has to be a whole number"),
        ({"count": True}, "count is True, it has to be a whole number"),
        ({"count": None}, "count is None, it has to be a whole number"),
        ({"count": "3"}, "count is '3', it has to be a whole number"),
        ({"count": [3]}, r"count is \[3\], it has to be a whole number"),
        ({"rate": False}, "rate is False, it has to be a number"),
        ({"rate": float("nan")}, "rate is nan, it has to be a finite number"),
        ({"unknown": float("-inf")}, "unknown is -inf, it has to be a finite number"),
        ({"name": 3}, "name is 3, it has to be a text"),
        ({"flag": 1}, "flag is 1, it has to be true or false"),
        ({"flag": "false"}, "flag is 'false', it has to be true or false"),
        ({"limit": "x"}, "limit is 'x', it has to be a whole number or null"),
        ({"mode": 3}, "mode is 3, it has to be a text"),
        ({"path": None}, "path is None, it has to be a text or pathlib.Path"),
        ({"lr": "1e-3"}, "lr is '1e-3', it has to be a number"),
    ],
)
def test_what_annotations_exclude_is_named(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_argument_types(component, arguments)


def test_annotations_that_cannot_be_read_are_passed_over():
    def later(count: "int", other: "OnlyForTypeCheckers") -> None: ...  # noqa: F821

    check_argument_types(later, {"count": "x"})


def test_annotations_may_be_texts():
    def later(count: "int") -> None: ...

    with pytest.raises(ValueError, match="count is 'x'"):
        check_argument_types(later, {"count": "x"})
