"""Checks of arguments, with messages that name the value and what is possible. Imports no library."""

import difflib
from collections.abc import Iterable
from typing import Any


class SetupError(ValueError):
    """A setting or file of the user is wrong; the message says how to fix it."""


def require_integer(name: str, value: Any, lowest: int, meaning: str = "", highest: int | None = None) -> None:
    """Raise a ``ValueError`` unless a value is an integer from ``lowest`` to ``highest``.

    The message gives the argument's ``meaning`` where there is one.
    """
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if is_integer and lowest <= value and (highest is None or value <= highest):
        return
    if not meaning:
        raise ValueError(f"{name} must be a whole number of at least {lowest}, got {value!r}")
    limits = f"{lowest} or more" if highest is None else f"{lowest} to {highest}"
    raise ValueError(f"{name} is {value!r}: {meaning}, set it to {'' if is_integer else 'a whole number of '}{limits}")


def check_at_least(lowest: int, **values: Any) -> None:
    """Call :func:`require_integer` for each of several arguments, given by name."""
    for name, value in values.items():
        require_integer(name, value, lowest)


def require_number(
    name: str, value: Any, lowest: float, highest: float, meaning: str, *, reason: str, positive: bool = False
) -> None:
    """Raise a ``ValueError`` with the argument's meaning unless it is a number from ``lowest`` to ``highest``.

    The message gives the ``reason`` for the end of the range. If ``positive``, ``lowest`` is 0 and excluded.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not lowest <= value <= highest or (positive and value == 0):
        limits = f"above 0, up to {highest:g}" if positive else f"from {lowest:g} to {highest:g}"
        raise ValueError(f"{name} is {value!r}: {meaning}, set it to a number {limits} ({reason})")


def require_bool(name: str, value: Any) -> None:
    """Raise a ``ValueError`` unless an argument is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}: set it to true or false")


def require_choice(name: str, value: Any, possible: tuple[str, ...], remark: str = "") -> None:
    """Raise a ``ValueError`` unless an argument is one of the strings that are possible."""
    if value not in possible:
        raise ValueError(f"{name} is '{value}': possible are {', '.join(possible)}{remark}")


def suggestion(name: str, possible: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the most similar possible name, or all of them."""
    names = sorted(possible)
    return closest(name, names) or f"; possible are {', '.join(names)}"


def closest(name: str, possible: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the most similar possible name, empty if none is similar."""
    close = difflib.get_close_matches(name, list(possible), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
