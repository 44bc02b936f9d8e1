"""Our own commands of ``tfidf-tune``: a module each, with ``main(arguments)``, and what they share.

A module parses its arguments before it imports torch or a library of an extra, so that help and
usage errors are fast.
"""

import argparse
import re
import reprlib
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import distributions
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfidf_tune.corpus.jobs import TaskRunner

_NAME = "tfidf-tune"
_LARGEST = 2**31 - 1


def require_extras(command: str, *extras: str) -> None:
    """End the process with one message if distributions of the command's extras are missing.
    Imports none of them.
    """
    missing = {extra: _missing(extra) for extra in extras}
    missing = {extra: absent for extra, absent in missing.items() if absent}
    if missing:
        names = sorted(set[str]().union(*missing.values()))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        sys.exit(
            f"error: tfidf-tune {command} needs packages that are not installed "
            f"({', '.join(names[:3])}{more}): pip install '{_NAME}[{','.join(missing)}]'"
        )


def _missing(extra: str) -> set[str]:
    """Return the distributions of an extra that are not installed."""
    # A source tree has no metadata, so that nothing is known to be missing.
    metadata = next(iter(distributions(name=_NAME)), None)
    names: set[str] = set()
    for requirement in (metadata and metadata.requires) or ():
        match = re.match(rf'([\w.-]+)(?:\[([\w,-]+)\])?.*;.*extra == "{extra}"', requirement)
        if match and match[1] == _NAME:
            names.update(*map(_missing, match[2].split(",")))
        elif match and not any(distributions(name=match[1])):
            names.add(match[1])
    return names


def whole_number(least: int = -_LARGEST, most: int = _LARGEST) -> Callable[[str], int]:
    """Return the ``type`` of an argparse option that is a whole number in a range, which its error
    names.
    """

    def read(text: str) -> int:
        with suppress(ValueError):
            if least <= (number := int(text)) <= most:
                return number
        raise argparse.ArgumentTypeError(
            f"{reprlib.repr(text)} is not a whole number from {least} to {most}"
        )

    return read


def key_values(text: str) -> dict[str, Any]:
    """Read an argparse option ``KEY=VALUE,KEY=VALUE``; numbers, ``True`` and ``False`` are not
    text.
    """
    try:
        pairs = [part.split("=", maxsplit=1) for part in text.split(",")]
        return {key: _value(value) for key, value in pairs}
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form KEY=VALUE,KEY=VALUE"
        ) from error


def _value(text: str) -> Any:
    if text in ("True", "False"):
        return text == "True"
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?\d*\.\d+", text) else text


def add_text(parser: argparse.ArgumentParser, sample_by: str | None = "line") -> None:
    """Add the options of how text is read; ``sample_by`` is what a document is by default, None: as
    in training.
    """
    parser.add_argument("--column", default="text", help="column of the text; default: %(default)s")
    parser.add_argument(
        "--sample-by",
        choices=("line", "paragraph", "document"),
        default=sample_by or argparse.SUPPRESS,
        help="what a document of a .txt file is; default: "
        f"{sample_by or 'document, or as in the run of the model'}",
    )


def add_tasks(parser: argparse.ArgumentParser) -> None:
    """Add the options of where tasks on files run."""
    add = parser.add_argument_group("tasks, one for each file of text").add_argument
    add("--jobs", type=whole_number(1), default=1, help="at once; default: %(default)s")
    add(
        "--executor",
        choices=("local", "slurm"),
        default="local",
        help="where they run; default: %(default)s",
    )
    add(
        "--executor-args",
        type=key_values,
        default={},
        metavar="KEY=VALUE,...",
        help="of datatrove's executor for Slurm: partition=cpu,time=24:00:00,mem_per_cpu_gb=4",
    )


def task_runner(options: argparse.Namespace) -> "TaskRunner":
    """Return what the options of :func:`add_tasks` say."""
    from tfidf_tune.corpus.jobs import TaskRunner

    return TaskRunner(options.executor, options.jobs, options.executor_args)


def rename_command(parser: argparse.ArgumentParser, pattern: str, name: str) -> None:
    """Replace the name of a library's command, a regular expression, in help and usage errors of
    its parser.
    """
    for owner in (parser, *parser._actions):
        for key in {"prog", "usage", "description", "epilog", "help"} & vars(owner).keys():
            setattr(owner, key, (text := getattr(owner, key)) and re.sub(pattern, name, text))
    plain_error = parser.error
    parser.error = lambda message: plain_error(re.sub(pattern, name, message))  # type: ignore[method-assign]
