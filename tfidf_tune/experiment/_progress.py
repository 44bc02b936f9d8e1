"""Progress of an experiment: what is being done, what is left, and the remaining time, as lines of text."""

import heapq
import json
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import submitit

from tfidf_tune._printing import say
from tfidf_tune.experiment._cells import (
    EvaluationCell,
    PlannedRun,
    State,
    TrainingCell,
    evaluation_state,
    missing_tasks,
    seconds_taken,
    training_state,
)
from tfidf_tune.experiment._job import LINES_SHOWN, TRAINING, Journal
from tfidf_tune.experiment._plain_lines import last_lines


@dataclass(frozen=True)
class Failure:
    """A cell that failed: its title, the reason in a line, and the log that says more."""

    title: str
    reason: str
    log: Path


@dataclass(frozen=True)
class Step:
    """A cell as it is shown."""

    kind: str  # "training" or "evaluation"
    model: str  # cells of one kind and model are assumed to take the same time
    run: str  # whose cells are done one after another
    title: str


def step_of(cell: TrainingCell | EvaluationCell) -> Step:
    """Describe a cell in a line."""
    if isinstance(cell, TrainingCell):
        return Step("training", cell.model, cell.title, f"{cell.title}: training")
    tasks = ", ".join(missing_tasks(cell) or cell.tasks)
    title = f"{cell.run.title}: evaluating {cell.checkpoint.name} ({tasks})"
    return Step("evaluation", cell.run.model, cell.run.title, title)


class RunsProgress:
    """Follows runs by their journals: shows what is done and keeps what failed.

    Args:
        runs (Sequence[PlannedRun]): the runs of an experiment.
        folder (Path): for the journals.
        retries (int): how often a run whose job is lost is done again.

    Attributes:
        to_do (dict[int, dict[int, Step]]): by number of the run and percent of the milestone, 0 for the training: the
            cells that are neither done nor given up.
        folder (Path): as given.
    """

    def __init__(self, runs: Sequence[PlannedRun], folder: Path, retries: int) -> None:
        self.folder = folder
        self.to_do: dict[int, dict[int, Step]] = {}
        self._logs: dict[tuple[int, int], Path] = {}
        for number, run in enumerate(runs):
            cells: dict[int, TrainingCell | EvaluationCell] = {}
            if training_state(run) is not State.DONE:
                cells[TRAINING] = run.training
            cells |= {cell.percent: cell for cell in run.evaluations if evaluation_state(cell) is not State.DONE}
            if cells:
                self.to_do[number] = {percent: step_of(cell) for percent, cell in cells.items()}
            self._logs |= {(number, percent): cell.log for percent, cell in cells.items()}
        self._earlier = [(step_of(cell), seconds) for run in runs for cell, seconds in seconds_taken(run)]
        self._retries = retries
        self._journals = {number: Journal(folder / f"{number}.jsonl") for number in self.to_do}
        self._read: Counter[Path] = Counter()  # how many bytes of a file
        self._jobs: dict[int, str] = {}  # by run, which only one job does
        self._unfinished: set[int] = set()
        self._current: dict[int, int] = {}  # which cell of a run is being done
        self._num_lost: Counter[int] = Counter()
        self._shown_log: Path | None = None
        self._failures: dict[tuple[int, int], Failure] = {}

    def begin(self, num_jobs: int, *, shows_logs: bool) -> None:
        """Make the folder of the journals, and begin to show progress; of a single job, the log of the training too."""
        self.folder.mkdir(parents=True)
        self._shows_logs = shows_logs
        steps = [step for cells in self.to_do.values() for step in cells.values()]
        self._progress = Progress(steps, self._earlier, num_jobs)

    def waiting(self) -> list[int]:
        """Return the numbers of the runs that no job has begun."""
        return [number for number, journal in self._journals.items() if not journal.path.exists()]

    def failures(self) -> list[Failure]:
        """Return what failed, in the order of the runs."""
        return [failure for _, failure in sorted(self._failures.items(), key=lambda item: item[0])]

    def update(self) -> None:
        """Show what is new."""
        for number, journal in self._journals.items():
            for line in self._new_lines(journal.path):
                event = json.loads(line)
                self._take(number, event.pop("event"), **event)
        self._show_log()

    def end_job(self, job: submitit.Job[None], numbers: Sequence[int]) -> None:
        """Take note of the end of a job: a run that it has not finished has failed, and may be done again."""
        lost = [number for number in self._unfinished if self._jobs[number] == job.job_id]
        if job.job_id not in self._jobs.values():
            lost = [number for number in numbers if self._journals[number].create()][:1]
        for number in lost:
            self._unfinished.discard(number)
            self._num_lost[number] += 1
            again = self._num_lost[number] <= self._retries
            if self.to_do[number]:
                cell = self._current.get(number, next(iter(self.to_do[number])))
                reason = f"job {job.job_id} ended before its work was done, its state is {job.state}"
                log = job.paths.stdout
                self._fail(number, cell, reason, last_lines(log, LINES_SHOWN), log, again=again, is_lost=True)
            if self.to_do[number]:
                self._journals[number].path.unlink()
                del self._read[self._journals[number].path]

    def _take(self, number: int, event: str, *, cell: int = TRAINING, job: str = "", **more: Any) -> None:
        """Take an event of a journal."""
        if event == "claimed":
            self._jobs[number] = job
            self._unfinished.add(number)
        elif event == "finished":
            self._unfinished.discard(number)
        elif event == "begun":
            self._current[number] = cell
            self._progress.begin(self.to_do[number][cell])
            if self._shows_logs and cell == TRAINING:
                self._shown_log = self._logs[number, cell]
                self._read[self._shown_log] = 0
        elif event == "note":
            self._progress.note(self.to_do[number][cell], more["text"])
        elif event == "done":
            self._show_log()
            self._shown_log = None
            del self._current[number]
            self._progress.end(self.to_do[number].pop(cell))
        elif event == "failed":
            self._show_log()
            self._fail(number, cell, log=self._logs[number, cell], **more)

    def _fail(
        self, number: int, cell: int, reason: str, lines: list[str], log: Path, *, again: bool, is_lost: bool = False
    ) -> None:
        self._shown_log = None
        self._current.pop(number, None)
        steps = self.to_do[number]
        step = steps[cell]
        given_up = []
        if not again:
            self._failures[number, cell] = Failure(step.title, reason, log)
            given_up = [steps.pop(other) for other in [*steps] if other == cell or cell == TRAINING or is_lost]
        details = [*(f"| {line}" for line in lines), f"log: {log}{'; once more' if again else ''}"]
        self._progress.fail(step, reason, details, given_up)

    def _show_log(self) -> None:
        if self._shown_log is not None:
            for line in self._new_lines(self._shown_log):
                say(line)

    def _new_lines(self, path: Path) -> list[str]:
        """Return the whole lines of a file that have been added since the last call."""
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._read[path])
            *lines, _ = file.read().split(b"\n")
        self._read[path] += sum(len(line) + 1 for line in lines)
        return [line.decode("utf-8", errors="replace") for line in lines]


class Progress:
    """Prints a line when a cell begins and one when it ends.

    Args:
        to_do (Sequence[Step]): the cells to do.
        earlier (Sequence[tuple[Step, float]]): cells that are done, and the seconds they took.
        jobs (int): how many runs are done at once; above 1, each line says which cell it is about. Default: 1.
    """

    def __init__(self, to_do: Sequence[Step], earlier: Sequence[tuple[Step, float]], jobs: int = 1) -> None:
        self._to_do = list(to_do)
        self._total = len(to_do)
        self._jobs = jobs
        self._seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        for step, seconds in earlier:
            self._seconds[step.kind, step.model].append(seconds)
        self._start = time.monotonic()
        self._begun: dict[str, float] = {}  # by run, of which at most one cell is being done

    def begin(self, step: Step) -> None:
        """Say what comes now and what is known of the rest."""
        self._begun[step.run] = time.monotonic()
        if self._jobs == 1:
            say(f"[{self._total - len(self._to_do) + 1}/{self._total}] {step.title}  ({self._so_far()})")
        else:
            self._say("begun", step)

    def note(self, step: Step, text: str) -> None:
        """Say more about a cell that is being done."""
        say(f"    {text}" if self._jobs == 1 else f"        {step.title}: {text}")

    def end(self, step: Step) -> None:
        """Say that it is done."""
        seconds = time.monotonic() - self._begun.pop(step.run)
        self._remove(step)
        self._seconds[step.kind, step.model].append(seconds)
        if self._jobs == 1:
            say(f"    done in {duration(seconds)}")
        else:
            self._say("done", step, f" in {duration(seconds)}")

    def fail(self, step: Step, reason: str, details: Sequence[str], given_up: Sequence[Step]) -> None:
        """Say that it failed, and forget the cells that are given up."""
        self._begun.pop(step.run, None)  # a job may be lost before it begins
        for lost in given_up:
            self._remove(lost)
        more = "".join(f"\n    {line}" for line in details)
        if self._jobs == 1:
            say(f"    failed: {reason}{more}")
        else:
            self._say("failed", step, f": {reason}", more)

    def _say(self, what: str, step: Step, how: str = "", more: str = "") -> None:
        say(f"{what:<7} {step.title}{how}  ({len(self._to_do)} of {self._total} left, {self._so_far()}){more}")

    def _remove(self, step: Step) -> None:
        self._to_do.remove(next(other for other in self._to_do if (other.kind, other.run) == (step.kind, step.run)))

    def _so_far(self) -> str:
        rest = self._rest() if self._to_do else None
        estimate = "" if rest is None else f", about {duration(rest)} to go"
        return f"{duration(time.monotonic() - self._start)} so far{estimate}"

    def _rest(self) -> float | None:
        """Seconds for what is to do; None as long as nothing is known."""
        runs: dict[str, float] = defaultdict(float)
        for step in self._to_do:
            estimate = self._estimate(step)
            if estimate is None:
                return None
            runs[step.run] += estimate
        for run, begun in self._begun.items():
            runs[run] = max(0.0, runs[run] - (time.monotonic() - begun))
        # Each run, those at work first, goes to the job that is free first.
        free = [0.0] * self._jobs
        for run in sorted(runs, key=lambda name: name not in self._begun):
            heapq.heapreplace(free, free[0] + runs[run])
        return max(free)

    def _estimate(self, step: Step) -> float | None:
        own = self._seconds.get((step.kind, step.model), [])
        others = [value for (kind, _), values in self._seconds.items() if kind == step.kind for value in values]
        return mean(own or others) if own or others else None


def duration(seconds: float) -> str:
    """Format seconds: "42 s", "3 min 05 s" or "2 h 07 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
