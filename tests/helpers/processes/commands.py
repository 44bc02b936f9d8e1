"""Runs commands of ``tfidf-tune`` in forks of one process that has imported only
the command line.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

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
