"""Signals during training: the step is finished, the run saved, then it ends."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tfidf_tune._signals import ENDING, handle

# torchrun repeats a Ctrl-C that the terminal has already sent to every process: both are one request.
_ONE_REQUEST_SECONDS = 3.0


class Interrupted(Exception):
    """The run ended early because of a signal; the message says where it can be resumed."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class StopRequest:
    """Whether a signal has asked the run to end: ``signal_number``, 0 until then."""

    def __init__(self) -> None:
        self.signal_number = 0
        self._received_at = 0.0

    def __call__(self, signal_number: int, _: FrameType | None) -> None:
        """Handle a signal; a later second one ends the process at once."""
        now = time.monotonic()
        if self.signal_number and now - self._received_at > _ONE_REQUEST_SECONDS:
            sys.exit(128 + signal_number)
        self.signal_number, self._received_at = signal_number, now


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Turn SIGTERM, SIGINT and SIGHUP into a request while the block runs; the loop reads it between steps."""
    request = StopRequest()
    previous = handle(ENDING, request)
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
