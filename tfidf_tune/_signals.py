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
        handler (Callable[[int, FrameType | None], None]): what is called; after SIGHUP it can write to stdout and
            stderr even if the terminal is gone.

    Returns:
        dict[int, Any]: the handlers before, of the signals that have a new one.
    """

    def handle_one(number: int, frame: FrameType | None) -> None:
        _leave_lost_terminal()
        handler(number, frame)

    return {number: signal.signal(number, handle_one) for number in numbers if not is_ignored_hangup(number)}


def is_ignored_hangup(number: int) -> bool:
    """Return whether a signal is SIGHUP and ignored, as ``nohup`` has it."""
    return signal.Signals(number).name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN


@contextmanager
def ended_by(numbers: Collection[int], say: Callable[[str], None]) -> Iterator[None]:
    """End the process when a signal comes within the block, with 128 and the signal's number as exit code.

    The block ends by an exception, so that it can clean up. Some libraries turn an exception that comes while they are
    imported into another one; the exit code is that of the signal all the same.

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
    """Send stdout and stderr to nowhere where they are a terminal that was closed: writing to it fails."""
    for descriptor in (1, 2):
        with suppress(OSError):  # not open
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
