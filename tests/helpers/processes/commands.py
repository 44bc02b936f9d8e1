"""Runs commands of ``tfidf-tune``: in forks of one process that has imported only the command line,
and again after an interruption.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

_CODE = """
import sys
sys.path.remove("")  # the working directory
import json, os, tempfile, traceback
from tfidf_tune import cli
printed = os.dup(1)
for arguments in json.load(sys.stdin):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        if not os.fork():
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            code, sys.argv = 0, ["tfidf-tune", *arguments]
            try:
                cli.main()
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else bool(ended.code)
                print(ended.code if code is True else "", end="", file=sys.stderr)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            texts = [os.pread(file.fileno(), 10**6, 0).decode() for file in (out, err)]
            os.write(printed, (json.dumps([int(code), *texts, [*sys.modules]]) + "\\n").encode())
            os._exit(0)
        os.wait()
"""


class Ended(NamedTuple):
    """What a command left: its exit code, its output and the modules that it imported."""

    code: int
    out: str
    err: str
    modules: list[str]


def run_in_forks(commands: list[list[str]], python: str | Path = sys.executable) -> list[Ended]:
    """Run commands, given by their arguments, with a Python that does not search the working
    directory.
    """
    done = subprocess.run(
        [python, "-c", _CODE], input=json.dumps(commands), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    ended = [Ended(*json.loads(line)) for line in done.stdout.splitlines()]
    assert len(ended) == len(commands)
    return ended


def resumed(
    main: Callable[[list[str]], None],
    command: list[str],
    capfd: pytest.CaptureFixture[str],
    *,
    other: list[str],
    difference: str,
    file: Path,
) -> str:
    """Run an interrupted command to its end; return what it says.

    Before, it is refused with other options, of which the error names the ``difference``, and while
    one of its files has another content of the same size and time.
    """
    refusal = re.escape(f"interrupted run with other arguments: {difference}")
    with pytest.raises(ValueError, match=refusal):
        main([*command, *other])

    content = file.read_text()
    times = (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    rows = content.splitlines(keepends=True)
    file.write_text("".join(reversed(rows)))
    os.utime(file, ns=times)
    with pytest.raises(ValueError, match=rf"{re.escape(file.name)} has changed"):
        main(command)
    file.write_text(content)

    capfd.readouterr()
    main(command)
    return capfd.readouterr().err
