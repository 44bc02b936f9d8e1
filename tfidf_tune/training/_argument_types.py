"""The values that a config gives a component, held against the component's annotations."""

import inspect
import math
import os
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from omegaconf import ListConfig
from torch import Tensor

_WORDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    NoneType: "null",
}


def check_argument_types(component: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Refuse values of a type that a component's annotations exclude, and numbers that are not finite.

    Annotations of numbers, texts, booleans and null are looked at, unions of them, and the length of tuples; where any
    other type is possible, and where there is none, the component is left to judge by itself.

    Args:
        component (Callable[..., Any]): class or function.
        arguments (Mapping[str, Any]): values by names; those that are no parameters are passed over.

    Raises:
        ValueError: If a value does not fit; the message names the argument, the value and what is possible.
    """
    try:
        parameters = inspect.signature(component, eval_str=True).parameters
    except NameError:  # annotations may be there for type checkers alone
        return
    for name, value in arguments.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} is {value}, it has to be a finite number")
        annotation = parameters[name].annotation if name in parameters else None
        length = _tuple_length(annotation)
        if length and not (isinstance(value, (list, ListConfig)) and len(value) == length):
            raise ValueError(f"{name} is {value!r}, it has to be a list of {length} values")
        kinds = _kinds(annotation) if name in parameters else None
        if kinds and not (_is_of(value, kinds) or (value is None and parameters[name].default is None)):
            possible = " or ".join(word for kind, word in _WORDS.items() if kind in kinds)
            raise ValueError(f"{name} is {value!r}, it has to be {possible}")


def _tuple_length(annotation: Any) -> int | None:
    """The length that an annotation such as ``tuple[float, float]`` asks for."""
    parts = get_args(annotation)
    return len(parts) if get_origin(annotation) is tuple and Ellipsis not in parts else None


def _kinds(annotation: Any) -> set[type] | None:
    """The plain types of an annotation; None where it allows something else that a config might give."""
    if get_origin(annotation) in (Union, UnionType):
        parts = [_kinds(part) for part in get_args(annotation)]
        return None if None in parts else {kind for part in parts if part for kind in part}
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    if isinstance(annotation, type) and issubclass(annotation, os.PathLike):
        return {str}
    if annotation is Tensor:
        return set()
    if annotation is None:
        return {NoneType}
    return {annotation} if isinstance(annotation, type) and annotation in _WORDS else None


def _is_of(value: Any, kinds: set[type]) -> bool:
    if type(value) is int:
        return not kinds.isdisjoint((int, float))
    if type(value) is float:
        return float in kinds or (int in kinds and value.is_integer())
    return type(value) in kinds
