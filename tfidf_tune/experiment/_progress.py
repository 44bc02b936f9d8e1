"""Follow the jobs of an experiment: lines of text say what is being done, what is left, and the remaining time."""

import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import mean
from typing import Any

import submitit

from tfidf_tune._printing import say
from tfidf_tune.experiment._cells import TRAINING, Run
from tfidf_tune.experiment._job import claim, last_lines


@dataclass(frozen=True)
class Failure:
    """A cell that failed: its title, the reason in one line, and its log."""

    title: str
    reason: str
    log: Path


class Progress:
    """Reads the journals of runs in a folder, prints a line when a cell begins or ends, and collects failures.

    ``to_do`` has by the number of a run its cells that are neither done nor given up. A run whose job is lost is
    repeated up to ``retries`` times.
    """

    def __init__(self, runs: Sequence[Run], folder: Path, retries: int) -> None:
        self.folder = folder
        pending = {number: [cell for cell in run.cells if not run.is_done(cell)] for number, run in enumerate(runs)}
        self.to_do = {number: cells for number, cells in pending.items() if cells}
        self._runs = runs
        # Made now, because the title of an evaluation names the tasks that are missing.
        self._titles = {(n, cell): runs[n].cell_title(cell) for n, cells in self.to_do.items() for cell in cells}
        self._retries = retries
        self._journals = {number: folder / f"{number}.jsonl" for number in self.to_do}
        self._read: Counter[Path] = Counter()  # bytes of a file that have been read
        self._jobs: dict[int, str] = {}  # by run, which one job does
        self._unfinished: set[int] = set()
        self._begun: dict[int, tuple[int, float]] = {}  # by run: the cell that is being done, and since when
        self._num_lost: Counter[int] = Counter()
        self._shown_log: Path | None = None
        self._failures: dict[tuple[int, int], Failure] = {}
        # By the kind of cell and the model: cells of both equal are assumed to take the same time.
        self._seconds: dict[tuple[bool, str], list[float]] = defaultdict(list)
        for run in runs:
            for cell in run.cells:
                seconds = [manifest["seconds"] for manifest in run.manifests(cell).values()]
                self._seconds[cell == TRAINING, run.model] += seconds

    def begin(self, num_jobs: int, *, shows_logs: bool) -> None:
        """Make the folder of the journals and start the clock; ``shows_logs`` prints what trainings print."""
        self.folder.mkdir(parents=True)
        self._num_jobs = num_jobs
        self._shows_logs = shows_logs
        self._start = time.monotonic()

    def waiting(self) -> list[int]:
        """Return the numbers of the runs that no job has begun."""
        return [number for number, journal in self._journals.items() if not journal.exists()]

    def failures(self) -> list[Failure]:
        return [self._failures[key] for key in sorted(self._failures)]

    def update(self) -> None:
        for number, journal in self._journals.items():
            for line in self._new_lines(journal):
                self._process(number, **json.loads(line))
        self._show_log()

    def end_job(self, job: submitit.Job[None], numbers: Sequence[int]) -> None:
        """Process the end of a job: a run that it has not finished has failed, and may be repeated."""
        lost = [number for number in self._unfinished if self._jobs[number] == job.job_id]
        if job.job_id not in self._jobs.values():
            lost = [number for number in numbers if claim(self._journals[number])][:1]
        for number in lost:
            self._unfinished.discard(number)
            self._num_lost[number] += 1
            if self.to_do[number]:
                cell, _ = self._begun.get(number, (self.to_do[number][0], 0.0))
                reason = f"job {job.job_id} ended before its work was done, its state is {job.state}"
                log, again = job.paths.stdout, self._num_lost[number] <= self._retries
                self._fail(number, cell, reason, last_lines(log), log, again=again, is_lost=True)
            if self.to_do[number]:
                self._journals[number].unlink()
                del self._read[self._journals[number]]

    def _process(self, number: int, event: str, cell: int = TRAINING, **more: Any) -> None:
        run = self._runs[number]
        if event in ("done", "failed"):
            self._show_log()
            self._shown_log = None
        match event:
            case "claimed":
                self._jobs[number] = more["job"]
                self._unfinished.add(number)
            case "finished":
                self._unfinished.discard(number)
            case "begun":
                self._begun[number] = cell, time.monotonic()
                self._say("begun", self._titles[number, cell])
                if self._shows_logs and cell == TRAINING:
                    self._shown_log = run.log(cell)
                    self._read[self._shown_log] = 0
            case "note":
                say(f"        {run.title}: {more['text']}")
            case "done":
                seconds = time.monotonic() - self._begun.pop(number)[1]
                self.to_do[number].remove(cell)
                self._seconds[cell == TRAINING, run.model].append(seconds)
                self._say("done", f"{self._titles[number, cell]} in {_duration(seconds)}")
            case "failed":
                self._fail(number, cell, log=run.log(cell), **more)

    def _fail(
        self, number: int, cell: int, reason: str, lines: list[str], log: Path, *, again: bool, is_lost: bool = False
    ) -> None:
        self._shown_log = None
        self._begun.pop(number, None)
        title = self._titles[number, cell]
        if not again:
            self._failures[number, cell] = Failure(title, reason, log)
            gives_up_run = is_lost or cell == TRAINING
            self.to_do[number] = [] if gives_up_run else [other for other in self.to_do[number] if other != cell]
        details = [*(f"| {line}" for line in lines), f"log: {log}{'; trying again' if again else ''}"]
        self._say("failed", f"{title}: {reason}", "".join(f"\n    {line}" for line in details))

    def _say(self, event: str, text: str, details: str = "") -> None:
        num_left, remaining = sum(map(len, self.to_do.values())), self._remaining()
        estimate = "" if remaining is None else f", about {_duration(remaining)} to go"
        elapsed = _duration(time.monotonic() - self._start)
        say(f"{event:<7} {text}  ({num_left} of {len(self._titles)} left, {elapsed} so far{estimate}){details}")

    def _show_log(self) -> None:
        if self._shown_log is not None:
            for line in self._new_lines(self._shown_log):
                say(line)

    def _new_lines(self, path: Path) -> list[str]:
        """Return the complete lines that were added to a file; a carriage return ends a state of a progress bar."""
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._read[path])
            *lines, _ = re.split(rb"[\r\n]", file.read())
        self._read[path] += sum(len(line) + 1 for line in lines)
        return [line.decode("utf-8", errors="replace") for line in lines if line.strip()]

    def _remaining(self) -> float | None:
        """Estimate the seconds left from means of finished cells of a kind and model; None if a kind was not timed."""
        total, busy = 0.0, [number for number, cells in self.to_do.items() if cells]
        for number in busy:
            for cell in self.to_do[number]:
                kind, model = cell == TRAINING, self._runs[number].model
                of_kind = [seconds for key, values in self._seconds.items() if key[0] == kind for seconds in values]
                if not of_kind:
                    return None
                total += mean(self._seconds[kind, model] or of_kind)
        return total / min(self._num_jobs, len(busy)) if busy else None


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
