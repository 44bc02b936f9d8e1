"""Jobs that a process other than this one does: evaluations, and starts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

from tfidf_tune.experiment._cells import EvaluationCell, Start
from tfidf_tune.experiment._children import Children, Stopped, end
from tfidf_tune.experiment._config import EvalSettings
from tfidf_tune.experiment._processes import exit_reason
from tfidf_tune.experiment._state import missing_tasks, next_part

WORKER = (sys.executable, "-m", "tfidf_tune.experiment._worker")


class Worker:
    """A process that does one job after the other; it starts with the first and goes on after it, unless it fails.

    Its import of the libraries takes longer than many an evaluation, so it is kept from one run to the next.

    Args:
        settings (EvalSettings): of the experiment.
        children (Children): start the process.
    """

    def __init__(self, settings: EvalSettings, children: Children) -> None:
        self._settings = settings
        self._children = children
        self._process: subprocess.Popen[bytes] | None = None

    def evaluate(self, cell: EvaluationCell) -> str | None:
        """Run the tasks of a cell that are not done yet.

        Args:
            cell (EvaluationCell): the milestone; its run is done.

        Returns:
            str | None: what went wrong, in a line; None if nothing did.

        Raises:
            Stopped: If the experiment is being ended.
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
        return self._do("evaluation", job, cell.log)

    def make(self, start: Start, log: Path) -> str | None:
        """Make a start.

        Args:
            start (Start): it is not there yet.
            log (Path): gets what its component prints.

        Returns:
            str | None: what went wrong, in a line; None if nothing did.

        Raises:
            Stopped: If the experiment is being ended.
        """
        job = {
            "folder": str(start.folder),
            "component": start.component,
            "model": start.model,
            "seed": start.seed,
            "arguments": start.arguments,
        }
        return self._do("start", job, log)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            end(self._process)
            self._process = None

    def _do(self, kind: str, job: dict[str, Any], log: Path) -> str | None:
        if self._process is None:
            self._process = self._children.start(WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"kind": kind, "log": str(log), "job": job}).encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer:
            reason = f"the {kind} {exit_reason(process.wait())}"
        elif told := cast("str | None", json.loads(answer)):
            reason = f"the start could not be made: {told}" if kind == "start" else told
        else:
            return None
        self.close()  # and with it goes whatever memory the failure still holds
        if self._children.stopped:
            raise Stopped
        return reason
