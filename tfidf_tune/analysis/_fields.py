"""Checked fields of records that were read from JSON."""

import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading a damaged record may raise."""
# Exact as a float.
_LARGEST = 2**53
_LARGEST_ID = 2**31 - 1
_WHOLE = frozenset([int])  # not bool


def text(record: Mapping[str, Any], name: str) -> str:
    """Read a string.

    Args:
        record (Mapping[str, Any]): the record.
        name (str): of the field.

    Returns:
        str: its value.

    Raises:
        KeyError: If the field is missing.
        ValueError: If it is something else.
    """
    value = record[name]
    if not isinstance(value, str):
        raise _wrong(name, value, "text")
    return value


def flag(record: Mapping[str, Any], name: str) -> bool:
    """Read a truth value; as :func:`text`."""
    value = record[name]
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def whole(record: Mapping[str, Any], name: str, least: int = 0, most: int = _LARGEST) -> int:
    """Read a whole number from ``least`` to ``most``; as :func:`text`."""
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _wrong(name, value, f"a whole number from {least} to {most}")
    return value


def number(
    record: Mapping[str, Any],
    name: str,
    least: float = -math.inf,
    most: float = math.inf,
    *,
    finite: bool = True,
) -> float:
    """Read a number from ``least`` to ``most``, also one that is not finite where that is allowed.

    Args:
        record (Mapping[str, Any]): the record.
        name (str): of the field.
        least (float): its lower limit. Default: none.
        most (float): its upper limit. Default: none.
        finite (bool): whether to refuse NaN and infinities. Default: True.

    Returns:
        float: its value.

    Raises:
        KeyError: If the field is missing.
        ValueError: If it is something else.
    """
    value = record[name]
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if known and isinstance(value, int) and abs(value) > _LARGEST:
        known = False
    if known and (least <= value <= most or math.isnan(value)) and (math.isfinite(value) or not finite):
        return float(value)
    if math.isfinite(least) and math.isfinite(most):
        limits = f" from {least:g} to {most:g}"
    elif math.isfinite(least):
        limits = f" of at least {least:g}"
    else:
        limits = f" of at most {most:g}" if math.isfinite(most) else ""
    raise _wrong(name, value, f"a {'finite ' * finite}number{limits}")


def token_ids(record: Mapping[str, Any], name: str) -> list[int]:
    """Read a list of token ids; as :func:`text`."""
    value = record[name]
    if not isinstance(value, list) or not _WHOLE.issuperset(map(type, value)):
        raise _wrong(name, value, "a list of token ids")
    least, most = min(value, default=0), max(value, default=0)
    if least < 0 or most > _LARGEST_ID:
        raise _wrong(name, least if least < 0 else most, f"token ids from 0 to {_LARGEST_ID}")
    return value


def texts(record: Mapping[str, Any], name: str) -> dict[str, str]:
    """Read a mapping of strings to strings; as :func:`text`."""
    value = record[name]
    if not isinstance(value, dict):
        raise _wrong(name, value, "names and texts")
    return {key: text(value, key) for key in value}


def optional(read: Callable[..., _T], record: Mapping[str, Any], name: str, *limits: float) -> _T | None:
    """Read a field that may be None by one of the functions above."""
    return None if record[name] is None else read(record, name, *limits)


def seed(record: Mapping[str, Any]) -> int | None:
    """Read ``seed``, any that torch takes; as :func:`text`."""
    return optional(whole, record, "seed", -(2**63), 2**64 - 1)


def _wrong(name: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{name} is {reprlib.repr(value)}, expected {expected}")
