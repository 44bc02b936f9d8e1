"""Signals while training: the step is finished, the run saved, then it ends."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tfidf_tune._signals import ENDING, handle

# torchrun hands on a Ctrl-C that the terminal has already sent to every process: both are one wish.
_SAME_WISH_SECONDS = 3.0


class Interrupted(Exception):
    """The run has ended early because it was asked to; the message says where it can go on from.

    Args:
        message (str): for the user.
        signal_number (int): the signal; the exit code is 128 and this.
    """

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class StopRequest:
    """Whether a signal has asked for an end of the run.

    Attributes:
        signal_number (int): the signal, 0 as long as there was none.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._received_at = 0.0

    def __call__(self, signal_number: int, _: FrameType | None) -> None:
        """Take a signal; a later second one does not wait for the end of the step."""
        now = time.monotonic()
        if self.signal_number and now - self._received_at > _SAME_WISH_SECONDS:
            sys.exit(128 + signal_number)
        self.signal_number, self._received_at = signal_number, now


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Turn SIGTERM, SIGINT and SIGHUP into a request, as long as the block lasts.

    Yields:
        StopRequest: asked between steps.
    """
    request = StopRequest()
    previous = handle(ENDING, request)
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
