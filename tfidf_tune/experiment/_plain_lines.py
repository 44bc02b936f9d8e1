"""Logs as plain lines, whatever a progress bar writes."""

import io
import re
import time
from pathlib import Path
from typing import TextIO

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# A carriage return at the end of a piece may be the first half of a line's end.
_LINE_ENDS = re.compile(r"(?<=\n)|(?<=\r)(?=[^\n])")
# How often a log gets a line of what is a moving progress bar on a terminal.
_SECONDS_BETWEEN_BARS = 30


class PlainLines(io.TextIOBase):
    """A text stream that writes plain lines to a file.

    Control sequences are removed. What a carriage return overwrites is dropped, except for a line now and then.

    Args:
        file (TextIO): gets the lines.
    """

    encoding = "utf-8"

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._rest = ""
        self._last_bar = time.monotonic()

    def fileno(self) -> int:
        """Return the file's descriptor."""
        return self._file.fileno()

    def write(self, text: str) -> int:
        """Take a piece of text."""
        *pieces, self._rest = _LINE_ENDS.split(self._rest + text)
        for piece in pieces:
            line = _ESCAPES.sub("", piece.rstrip("\r\n"))
            is_bar = piece.endswith("\r")
            if is_bar and (not line or time.monotonic() - self._last_bar < _SECONDS_BETWEEN_BARS):
                continue
            if is_bar:
                self._last_bar = time.monotonic()
            self._put(line)
        return len(text)

    def close(self) -> None:
        """Write what came without an end of line; the file stays open."""
        if self._rest:
            self._put(_ESCAPES.sub("", self._rest))
            self._rest = ""
        super().close()

    def _put(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()


def last_lines(log: Path, count: int) -> list[str]:
    """Return the last lines of a log; none where there is no log."""
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:] if log.is_file() else []
