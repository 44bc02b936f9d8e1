"""Checked fields of objects that were read from JSON."""

import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""What reading a damaged file may raise."""
_MAX_EXACT = 2**53  # the largest integer range that a float holds exactly
_MAX_TOKEN_ID = 2**31 - 1


class Field(NamedTuple):
    """What a value must be, in code and in words, and how it is converted."""

    fits: Callable[[Any], bool]
    expected: str
    convert: Callable[[Any], Any] = lambda value: value


def checked(record: Mapping[str, Any], schema: Mapping[str, Field]) -> dict[str, Any]:
    """Return the fields of a schema.

    Raises:
        KeyError: If one is missing.
        ValueError: If one is not what it must be; the message names it, its value and what is possible.
    """
    for name, field in schema.items():
        if not field.fits(record[name]):
            raise ValueError(f"{name} is {reprlib.repr(record[name])}, expected {field.expected}")
    return {name: field.convert(record[name]) for name, field in schema.items()}


def integer(least: int = 0, most: int = _MAX_EXACT) -> Field:
    """An integer from ``least`` to ``most``."""
    return Field(lambda value: type(value) is int and least <= value <= most, f"an integer from {least} to {most}")


def number(least: float = -math.inf, most: float = math.inf, *, finite: bool = True) -> Field:
    """A number from ``least`` to ``most``; NaN and infinities only if ``finite`` is False."""

    def fits(value: Any) -> bool:
        if type(value) is int and abs(value) <= _MAX_EXACT:
            return least <= value <= most
        in_range = isinstance(value, float) and not (value < least or value > most)
        return in_range and (math.isfinite(value) or not finite)

    limits = f" from {least:g}" * math.isfinite(least) + f" up to {most:g}" * math.isfinite(most)
    return Field(fits, f"a {'finite ' * finite}number{limits}", float)


def optional(field: Field) -> Field:
    """A field that may be None."""
    return Field(
        lambda value: value is None or field.fits(value),
        field.expected,
        lambda value: None if value is None else field.convert(value),
    )


def list_of(field: Field, expected: str, convert: Callable[[list[Any]], Any] = list) -> Field:
    """A list of which each value fits a field."""
    return Field(
        lambda values: isinstance(values, list) and all(map(field.fits, values)), f"a list of {expected}", convert
    )


def _encodable(text: str) -> str:
    """Escape lone surrogates, which UTF-8 cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


TEXT = Field(lambda value: isinstance(value, str), "text", _encodable)
FLAG = Field(lambda value: isinstance(value, bool), "true or false")
OBJECT = Field(lambda value: isinstance(value, dict), "an object")
TOKEN_IDS = list_of(integer(most=_MAX_TOKEN_ID), f"token ids from 0 to {_MAX_TOKEN_ID}")
TEXTS = Field(
    lambda value: isinstance(value, dict) and all(isinstance(text, str) for text in value.values()),
    "an object of texts",
    lambda value: {name: _encodable(text) for name, text in value.items()},
)
SEED = optional(integer(-(2**63), 2**64 - 1))  # any seed that torch takes
