"""Our own commands of ``tfidf-tune``: a module each, with ``main(arguments)``.

A module parses its arguments before it imports torch or a library of an extra, so that help and usage errors are fast.
"""

import argparse
import re
import reprlib
from collections.abc import Callable
from typing import Any

_LARGEST = 2**31 - 1


def whole_number(least: int = -_LARGEST, most: int = _LARGEST) -> Callable[[str], int]:
    """Return the ``type`` of an argparse option that is a whole number in a range, which its error names."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is not a whole number from {least} to {most}")
        return number

    return read


def key_values(text: str) -> dict[str, Any]:
    """Read an argparse option ``KEY=VALUE,KEY=VALUE``; numbers, ``True`` and ``False`` are not text."""
    try:
        return {key: _value(value) for key, value in (part.split("=", maxsplit=1) for part in text.split(","))}
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form KEY=VALUE,KEY=VALUE") from error


def _value(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?\d*\.\d+", text) else text


def rename_command(parser: argparse.ArgumentParser, pattern: str, name: str) -> None:
    """Replace the name of a library's command, a regular expression, in help and usage errors of its parser."""
    for owner in (parser, *parser._actions):
        for key in {"prog", "usage", "description", "epilog", "help"} & vars(owner).keys():
            setattr(owner, key, (text := getattr(owner, key)) and re.sub(pattern, name, text))
    plain_error = parser.error
    parser.error = lambda message: plain_error(re.sub(pattern, name, message))  # type: ignore[method-assign]
