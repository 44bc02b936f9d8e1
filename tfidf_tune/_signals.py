"""How a process ends: its exit codes, and the signals that ask it to end.

The signals are Ctrl-C, SIGTERM, and SIGHUP, which comes when the terminal is closed.
"""

import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, SimpleNamespace
from typing import Any

from tfidf_tune._printing import say

ABOVE_LIMIT = 1
"""Exit code of a command that measured a value above its limit, and of nothing else."""
FAILED = 2
"""Exit code of a usage error, of any other error, and of an audit without an all-clear."""
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

# torchrun repeats a Ctrl-C that the terminal has already sent to every process: both are one
# request.
_ONE_REQUEST_SECONDS = 3.0


class AboveLimit(SystemExit):
    """Ends a command with the exit code 1: a measured value is above its limit. The message goes to
    standard error.
    """


def exit_code(ended: SystemExit) -> int:
    """Return the exit code of a command of ours, and print the message that it ends with, if it has
    one.

    Python ends with 1 after a message and after an uncaught exception, and so do libraries whose
    commands we call. A pipeline has to tell these from a value above its limit, so they become 2.
    Codes of signals, above 128, stay.
    """
    if isinstance(ended, AboveLimit) or isinstance(ended.code, str):
        say(str(ended.code), file=sys.stderr)
    if isinstance(ended, AboveLimit):
        return ABOVE_LIMIT
    if ended.code is None or ended.code == 0:
        return 0
    return ended.code if isinstance(ended.code, int) and ended.code > 128 else FAILED


def handle(
    numbers: Collection[int], handler: Callable[[int, FrameType | None], None]
) -> dict[int, Any]:
    """Set a handler, except for SIGHUP under ``nohup``, which stays ignored; return the previous
    handlers.
    """

    def handle_one(number: int, frame: FrameType | None) -> None:
        # The null device takes the place of a terminal that was closed, to which writing fails.
        for descriptor in (1, 2):
            with suppress(OSError):  # not open
                if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        handler(number, frame)

    return {
        number: signal.signal(number, handle_one)
        for number in numbers
        if not is_ignored_hangup(number)
    }


def is_ignored_hangup(number: int) -> bool:
    """Return whether a signal is SIGHUP and ignored, as under ``nohup``."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


@contextmanager
def ended_by(numbers: Collection[int], say: Callable[[str], None]) -> Iterator[None]:
    """Exit with 128 plus the signal's number when a signal arrives within the block; ``say`` gets
    its name.

    The block ends by an exception, so that it can clean up. The exit code holds even if a library
    turns that exception into another one. Handlers stay after the block.
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


class Interrupted(Exception):
    """The run ended early because of a signal; the message says where it can be resumed."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


@contextmanager
def stop_request(
    answer: str = "finishing this step; a second signal ends the run at once",
) -> Iterator[SimpleNamespace]:
    """Turn SIGTERM, SIGINT and SIGHUP into a request while the block runs; the loop reads it
    between steps.

    Its ``signal_number`` is 0 until then; ``answer`` is printed when it comes. A later second
    signal ends the process at once.
    """
    request = SimpleNamespace(signal_number=0, received_at=0.0)

    def receive(number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if request.signal_number and now - request.received_at > _ONE_REQUEST_SECONDS:
            sys.exit(128 + number)
        request.signal_number = number
        request.received_at = now
        if os.environ.get("RANK", "0") == "0":
            with suppress(OSError):  # a print could meet one that was interrupted
                os.write(2, f"\n{answer}\n".encode())

    previous = handle(ENDING, receive)
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
