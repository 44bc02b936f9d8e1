"""The numbers that weightings are given, checked with one message each."""

from typing import Any


def require_whole(name: str, value: Any, lowest: int, meaning: str, highest: int | None = None) -> None:
    """Refuse what is no whole number of a range.

    Args:
        name (str): of the argument.
        value (Any): its value.
        lowest (int): the least that is possible.
        meaning (str): what the number says, for the message.
        highest (int | None): the most that is possible. Default: None, no limit.

    Raises:
        ValueError: If it is no int, or out of the range.
    """
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < lowest or (highest is not None and value > highest):
        limits = f"{lowest} or more" if highest is None else f"{lowest} to {highest}"
        kind = "" if is_whole else "a whole number of "
        raise ValueError(f"{name} is {value!r}: {meaning}, set it to {kind}{limits}")


def require_number(
    name: str, value: Any, lowest: float, highest: float, meaning: str, *, reason: str, positive: bool = False
) -> None:
    """Refuse what is not a number of a range.

    Args:
        name (str): of the argument.
        value (Any): its value.
        lowest (float): the smallest that is possible.
        highest (float): the largest that is possible.
        meaning (str): what the number says, for the message.
        reason (str): why the range ends where it does, for the message.
        positive (bool): whether ``lowest`` is 0 and refused too. Default: False.

    Raises:
        ValueError: If it is not a number, or out of the range.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not lowest <= value <= highest or (positive and value == 0):
        limits = f"above 0, up to {highest:g}" if positive else f"from {lowest:g} to {highest:g}"
        raise ValueError(f"{name} is {value!r}: {meaning}, set it to a number {limits} ({reason})")
