"""Processes that do the work: one experiment at a time in a folder, their output shown and kept."""

import codecs
import fcntl
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TextIO

from tfidf_tune.experiment._children import Children, end

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# A carriage return that comes last may be half of a line's end.
_LINE_ENDS = re.compile(r"(?<=\n)|(?<=\r)(?=[^\n])")
# How often a log gets a line of what is a moving progress bar on a terminal.
_SECONDS_BETWEEN_BARS = 30


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Have a folder to oneself: the lock lasts as long as this process or one that inherited it.

    Args:
        folder (Path): it is made.

    Yields:
        int: file descriptor of the lock, for processes that this one starts.

    Raises:
        BlockingIOError: If another process has the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(
                f"another experiment, or what one started before it ended, is at work in {folder}: wait for it"
            ) from error
        yield file.fileno()


def run_logged(command: Sequence[str], log: Path, children: Children) -> int:
    """Run a command and keep what it prints; show it as well, unless others work at the same time.

    Args:
        command (Sequence[str]): program and arguments.
        log (Path): gets the output, of progress bars a line now and then.
        children (Children): start the process.

    Returns:
        int: its exit status, negative for the number of a signal.
    """
    with log.open("a", encoding="utf-8") as file:
        process = children.start(command, {"PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert process.stdout is not None
        try:
            _copy(process.stdout, file, shown=children.jobs == 1)
            return process.wait()
        finally:
            end(process)


def exit_reason(status: int) -> str:
    """Say how a process ended.

    Args:
        status (int): its exit status, negative for the number of a signal.

    Returns:
        str: "ended with exit code 1", "was ended by SIGKILL, ...".
    """
    if status >= 0:
        return f"ended with exit code {status}"
    name = signal.Signals(-status).name
    return f"was ended by {name}" + (", perhaps because memory ran out" if name == "SIGKILL" else "")


def last_lines(log: Path, count: int) -> list[str]:
    """Give the last lines of a log; none where there is no log."""
    if not log.is_file():
        return []
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]


def decoded(source: IO[bytes]) -> Iterator[str]:
    """Give what comes out of a pipe as text, as soon as it comes."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while chunk := os.read(source.fileno(), 1 << 16):
        yield decoder.decode(chunk)


def _copy(source: IO[bytes], log: TextIO, *, shown: bool) -> None:
    """Show output as it comes on a terminal, as plain lines elsewhere, and as plain lines in the log."""
    on_terminal = shown and sys.stdout.isatty()
    lines = PlainLines(log, sys.stdout) if shown and not on_terminal else PlainLines(log)
    for text in decoded(source):
        if on_terminal:
            sys.stdout.write(text)
            sys.stdout.flush()
        lines.write(text)
    lines.close()


class PlainLines(io.TextIOBase):
    """A sink of text that puts it into files as plain lines.

    Control sequences are left out, and what a carriage return overwrites is dropped but for a line now and then.

    Args:
        *files (TextIO): get the lines.
    """

    def __init__(self, *files: TextIO) -> None:
        self._files = files
        self._rest = ""
        self._last_bar = time.monotonic()

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
        """Take what came without an end of line; the files stay open."""
        if self._rest:
            self._put(_ESCAPES.sub("", self._rest))
            self._rest = ""
        super().close()

    def _put(self, line: str) -> None:
        for file in self._files:
            file.write(line + "\n")
            file.flush()
