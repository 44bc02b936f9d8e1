"""Checks of the numbers that weightings take as arguments."""

from typing import Any


def require_integer(name: str, value: Any, lowest: int, meaning: str, highest: int | None = None) -> None:
    """Raise a ``ValueError`` with the argument's meaning unless it is an integer from ``lowest`` to ``highest``."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < lowest or (highest is not None and value > highest):
        limits = f"{lowest} or more" if highest is None else f"{lowest} to {highest}"
        kind = "" if is_integer else "a whole number of "
        raise ValueError(f"{name} is {value!r}: {meaning}, set it to {kind}{limits}")


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
