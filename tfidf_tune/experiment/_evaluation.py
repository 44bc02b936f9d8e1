"""The evaluation of a run's milestones, in a process of its own."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from tfidf_tune.experiment._cells import EvaluationCell
from tfidf_tune.experiment._config import EvalSettings
from tfidf_tune.experiment._processes import end, exit_reason
from tfidf_tune.experiment._state import missing_tasks, next_part

WORKER = (sys.executable, "-m", "tfidf_tune.experiment._worker")


class Evaluator:
    """Evaluates cells of a run; the process starts with the first and goes on after it, unless it fails.

    Args:
        settings (EvalSettings): of the experiment.
        lock (int): file descriptor that the process inherits.
    """

    def __init__(self, settings: EvalSettings, lock: int) -> None:
        self._settings = settings
        self._lock = lock
        self._process: subprocess.Popen[bytes] | None = None

    def evaluate(self, cell: EvaluationCell) -> str | None:
        """Run the tasks of a cell that are not done yet.

        Args:
            cell (EvaluationCell): the milestone; its run is done.

        Returns:
            str | None: what went wrong, in a line; None if nothing did.
        """
        job = {
            "folder": str(next_part(cell)),
            "tasks": {task: cell.tasks[task] for task in missing_tasks(cell)},
            "arguments": {
                "model_args": cell.model_args,
                "metadata": cell.metadata,
                "batch_size": self._settings.batch_size,
                "device": self._settings.device or cell.run.settings["device"],
                "limit": self._settings.limit,
            },
        }
        process = self._process = self._process or self._start(cell)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer:
            reason = exit_reason(process.wait())
            self.close()
            return f"the evaluation {reason}"
        if error := cast("str | None", json.loads(answer)):
            self.close()  # and with it goes whatever memory the failure still holds
        return error

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            end(self._process)
            self._process = None

    def _start(self, cell: EvaluationCell) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [*WORKER, str(cell.log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self._lock,),
        )


@contextmanager
def open_evaluator(settings: EvalSettings, lock: int) -> Iterator[Evaluator]:
    """Give an evaluator for one run, whose process is ended at the end."""
    evaluator = Evaluator(settings, lock)
    try:
        yield evaluator
    finally:
        evaluator.close()
