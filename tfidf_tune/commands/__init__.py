"""Our own commands of ``tfidf-tune``: a module each, with ``main(arguments)``."""

import argparse
import reprlib
from collections.abc import Callable

MOST = 2**31 - 1


def whole_number(least: int = -MOST, most: int = MOST) -> Callable[[str], int]:
    """Make the type of an option that is a whole number of a range.

    Args:
        least (int): the smallest that is possible. Default: about -2 billion.
        most (int): the largest that is possible. Default: about 2 billion.

    Returns:
        Callable[[str], int]: for ``argparse``; it refuses anything else with the range.
    """

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is not a whole number from {least} to {most}")
        return number

    return read
