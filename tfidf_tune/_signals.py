"""Signals that ask a process to end: Ctrl-C, SIGTERM, and SIGHUP, which comes when the terminal is closed."""

import os
import signal
import stat
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

# Windows has no SIGHUP.
ENDING = tuple(number for number in signal.Signals if number.name in ("SIGTERM", "SIGINT", "SIGHUP"))


def handle(numbers: Collection[int], handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Set a handler, except for SIGHUP under ``nohup``, which stays ignored.

    Args:
        numbers (Collection[int]): signals.
        handler (Callable[[int, FrameType | None], None]): may write to stdout and stderr even if the terminal was
            closed.

    Returns:
        dict[int, Any]: the previous handlers of the signals that have a new one.
    """

    def handle_one(number: int, frame: FrameType | None) -> None:
        _leave_lost_terminal()
        handler(number, frame)

    return {number: signal.signal(number, handle_one) for number in numbers if not is_ignored_hangup(number)}


def is_ignored_hangup(number: int) -> bool:
    """Return whether a signal is SIGHUP and ignored, as under ``nohup``."""
    return signal.Signals(number).name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN


@contextmanager
def ended_by(numbers: Collection[int], say: Callable[[str], None]) -> Iterator[None]:
    """Exit with 128 plus the signal's number when a signal arrives within the block.

    The block ends by an exception, so that it can clean up. The exit code holds even if a library turns that exception
    into another one.

    Args:
        numbers (Collection[int]): signals; their handlers stay after the block.
        say (Callable[[str], None]): called with the signal's name.
    """
    received: list[int] = []

    def end(number: int, _: FrameType | None) -> None:
        received.append(number)
        say(signal.Signals(number).name)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    handle(numbers, end)
    try:
        yield
    except BaseException:
        if received:
            sys.exit(128 + received[0])
        raise


def _leave_lost_terminal() -> None:
    """Redirect stdout and stderr to the null device if their terminal was closed: writing to it fails."""
    for descriptor in (1, 2):
        with suppress(OSError):  # not open
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
