"""The process that evaluates and makes starts: jobs come as lines on its input, and it answers each with a line.

    python -m tfidf_tune.experiment._worker

A process of its own, so that what happens to it (no memory left, a crash) happens to one job, and that it can be ended
at any time. All that libraries print goes to the log that the job names.
"""

import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from tfidf_tune._files import atomic_folder
from tfidf_tune._printing import replace_unencodable
from tfidf_tune.experiment._processes import PlainLines
from tfidf_tune.experiment._state import EVALUATED, write_manifest


def main() -> None:
    """Do jobs until the input ends, as it does when the process at the other end is gone."""
    replace_unencodable()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        for line in sys.stdin:
            job = json.loads(line)
            _print_to(job["log"])
            # As Ctrl-C does: what is half done is cleaned up. Between jobs there is nothing to clean up.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            answer = _answer(job["kind"], job["job"])
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def _print_to(log: str) -> None:
    """Lead all that this process prints, Python or not, to the end of a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _answer(kind: str, job: dict[str, Any]) -> str | None:
    """Do a job; give what went wrong in a line, or None."""
    try:
        _WORK[kind](**job)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        sys.stderr.flush()
        return f"{type(error).__name__}: {error}".splitlines()[0]
    _free_memory()
    return None


def _evaluate(folder: str, tasks: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Evaluate into a folder that appears when all is there, the manifest included."""
    from tfidf_tune.tasks import evaluate

    start = time.monotonic()
    with atomic_folder(Path(folder)) as temporary:
        evaluate(tasks=list(tasks), output_path=temporary, **arguments)
        write_manifest(temporary / EVALUATED, {"tasks": tasks, "seconds": time.monotonic() - start})


def _make_start(folder: str, component: str, model: dict[str, Any], seed: int, arguments: dict[str, Any]) -> None:
    """Let a component make a checkpoint folder that appears when all is there."""
    from torchtune.config._utils import _get_component_from_path

    with (
        PlainLines(sys.stdout) as lines,
        redirect_stdout(lines),
        redirect_stderr(lines),
        atomic_folder(Path(folder)) as temporary,
    ):
        _get_component_from_path(component)(temporary, model, seed, **arguments)


def _free_memory() -> None:
    """Give a GPU's memory back: the next training may need it before the next job does."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


_WORK: dict[str, Callable[..., None]] = {"evaluation": _evaluate, "start": _make_start}


if __name__ == "__main__":
    main()
