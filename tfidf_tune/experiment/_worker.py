"""The process that evaluates: it does the jobs that come as lines on its input, and answers each with a line.

    python -m tfidf_tune.experiment._worker LOG

A process of its own, so that what happens to it (no memory left, a crash) happens to one evaluation, and a GPU's memory
is free again for the next training. All that libraries print goes to the log.
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tfidf_tune._files import atomic_folder
from tfidf_tune.experiment._state import EVALUATED, write_manifest


def main() -> None:
    """Do jobs until the input ends, as it does when the process at the other end is gone."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()


def _answer(job: dict[str, Any]) -> str | None:
    """Do a job; give what went wrong in a line, or None."""
    try:
        _evaluate(**job)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        sys.stderr.flush()
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def _evaluate(folder: str, tasks: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Evaluate into a folder that appears when all is there, the manifest included."""
    from tfidf_tune.tasks import evaluate

    start = time.monotonic()
    with atomic_folder(Path(folder)) as temporary:
        evaluate(tasks=list(tasks), output_path=temporary, **arguments)
        write_manifest(temporary / EVALUATED, {"tasks": tasks, "seconds": time.monotonic() - start})


if __name__ == "__main__":
    main()
