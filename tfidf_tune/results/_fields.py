"""Checked fields of objects that were read from JSON."""

import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""What reading a damaged file may raise."""
_MAX_EXACT = 2**53  # the largest integer range that a float holds exactly
_MAX_TOKEN_ID = 2**31 - 1


def text(record: Mapping[str, Any], name: str) -> str:
    """Return a string field; raises ``KeyError`` if it is missing and ``ValueError`` if it has another type.

    A lone surrogate, which UTF-8 cannot hold, becomes its escape.
    """
    value = _checked(record, name, lambda value: isinstance(value, str), "text")
    return str(value.encode("utf-8", "backslashreplace").decode("utf-8"))


def flag(record: Mapping[str, Any], name: str) -> bool:
    """Return a boolean field; raises as :func:`text`."""
    return bool(_checked(record, name, lambda value: isinstance(value, bool), "true or false"))


def whole(record: Mapping[str, Any], name: str, least: int = 0, most: int = _MAX_EXACT) -> int:
    """Return an integer field from ``least`` to ``most``; raises as :func:`text`."""
    expected = f"an integer from {least} to {most}"
    return int(_checked(record, name, lambda value: type(value) is int and least <= value <= most, expected))


def number(
    record: Mapping[str, Any], name: str, least: float = -math.inf, most: float = math.inf, *, finite: bool = True
) -> float:
    """Return a number from ``least`` to ``most``; NaN and infinities only if ``finite`` is False; raises as text."""

    def fits(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if isinstance(value, int) and abs(value) > _MAX_EXACT:
            return False
        return math.isfinite(value) and least <= value <= most if finite else not (value < least or value > most)

    limits = f" from {least:g}" * math.isfinite(least) + f" up to {most:g}" * math.isfinite(most)
    return float(_checked(record, name, fits, f"a {'finite ' * finite}number{limits}"))


def token_ids(record: Mapping[str, Any], name: str) -> list[int]:
    """Return a list of token ids; raises as :func:`text`."""

    def fits(value: Any) -> bool:
        integers = isinstance(value, list) and set(map(type, value)) <= {int}
        return integers and (not value or (min(value) >= 0 and max(value) <= _MAX_TOKEN_ID))

    return list(_checked(record, name, fits, f"a list of token ids from 0 to {_MAX_TOKEN_ID}"))


def texts(record: Mapping[str, Any], name: str) -> dict[str, str]:
    """Return an object whose values are strings; raises as :func:`text`."""
    return {key: text(record[name], key) for key in _checked(record, name, lambda v: isinstance(v, dict), "an object")}


def seed(record: Mapping[str, Any]) -> int | None:
    """Return ``seed``: None or any seed that torch takes; raises as :func:`text`."""
    return optional(whole, record, "seed", -(2**63), 2**64 - 1)


def optional(read: Callable[..., _T], record: Mapping[str, Any], name: str, *limits: float) -> _T | None:
    """Return a field that may be None, read by one of the functions above."""
    return None if record[name] is None else read(record, name, *limits)


def _checked(record: Mapping[str, Any], name: str, fits: Callable[[Any], bool], expected: str) -> Any:
    value = record[name]
    if not fits(value):
        raise ValueError(f"{name} is {reprlib.repr(value)}, expected {expected}")
    return value
