"""Printing numbers and text of unknown origin: control characters are escaped, any output encoding
works.
"""

import io
import logging
import re
import sys
from collections.abc import Iterable
from typing import TextIO

# Control characters (C0 and C1) except tab and line feed, line and paragraph separators, overrides
# and isolates of the writing direction, and what UTF-8 or XML cannot represent. Marks and joiners
# are kept.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def visible(text: str) -> str:
    r"""Replace characters that could control a terminal, reorder a line or make a file invalid by
    their code points.

    An escape character becomes ``\u001b``, for example; CR LF becomes LF.
    """
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text.replace("\r\n", "\n"))


def option_names(names: Iterable[str]) -> str:
    """Return the options of the command line with these names of fields: ``--base-url, --send``."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def counted(number: int, noun: str) -> str:
    """Return a number with a noun: ``1 example``, ``2,000 examples``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def say(text: str, file: TextIO | None = None) -> None:
    """Print and flush text, made visible, in one write, so that lines of threads do not mix."""
    print(f"{visible(text)}\n", end="", flush=True, file=file)


def visible_record(record: logging.LogRecord) -> bool:
    """Make the text of a log message visible: a filter of handlers that print."""
    record.msg = visible(record.getMessage())
    record.args = ()
    return True


def prepare_output() -> None:
    """Make standard output print a question mark for what its encoding lacks,
    and warnings visible.
    """
    if logging.lastResort is not None:
        logging.lastResort.addFilter(visible_record)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
