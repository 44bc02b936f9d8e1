"""Doing what is to do: train, evaluate, go on after failures."""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from omegaconf import OmegaConf

from tfidf_tune._files import atomic_file
from tfidf_tune.analysis import describe_machine
from tfidf_tune.experiment._cells import EvaluationCell, PlannedRun, TrainingCell
from tfidf_tune.experiment._children import SECONDS_TO_END, Children, Stopped
from tfidf_tune.experiment._config import EvalSettings
from tfidf_tune.experiment._jobs import Worker
from tfidf_tune.experiment._processes import exit_reason, last_lines, run_logged
from tfidf_tune.experiment._progress import Progress, Step
from tfidf_tune.experiment._state import (
    TRAINED,
    State,
    clear_run,
    evaluation_parts,
    evaluation_state,
    missing_tasks,
    read_manifest,
    training_state,
    write_manifest,
)

TUNE = (sys.executable, "-m", "tfidf_tune.cli")
_LINES_SHOWN = 12


@dataclass(frozen=True)
class Failure:
    """A cell that could not be done.

    Args:
        title (str): which.
        reason (str): one line.
        log (Path): where more stands.
    """

    title: str
    reason: str
    log: Path


def do_cells(
    runs: Sequence[PlannedRun], settings: EvalSettings, lock: int, *, retries: int = 0, jobs: int = 1
) -> list[Failure]:
    """Do every cell that is not done, the runs in their order; a failure leaves out what needs it, nothing else.

    Args:
        runs (Sequence[PlannedRun]): without cells of other settings.
        settings (EvalSettings): of the experiment.
        lock (int): file descriptor that processes inherit.
        retries (int): how often a failed cell is done again at once. Default: 0.
        jobs (int): how many runs are done at the same time. Default: 1.

    Returns:
        list[Failure]: what failed, in the order of the runs; empty if all is done.
    """
    return _Runner(runs, settings, Children(lock, jobs), retries).run()


def step_of(cell: TrainingCell | EvaluationCell) -> Step:
    """Describe a cell in a line."""
    if isinstance(cell, TrainingCell):
        return Step("training", cell.model, cell.title, f"{cell.title}: training")
    tasks = ", ".join(missing_tasks(cell) or cell.tasks)
    title = f"{cell.run.title}: evaluating {cell.checkpoint.name} ({tasks})"
    return Step("evaluation", cell.run.model, cell.run.title, title)


class _Runner:
    def __init__(self, runs: Sequence[PlannedRun], settings: EvalSettings, children: Children, retries: int) -> None:
        self._runs = [
            (
                run.training if training_state(run) is not State.DONE else None,
                [cell for cell in run.evaluations if evaluation_state(cell) is not State.DONE],
            )
            for run in runs
        ]
        self._children = children
        self._retries = retries
        self._idle = [Worker(settings, children) for _ in range(children.jobs)]
        self._starts = {run.training.start.folder: threading.Lock() for run in runs if run.training.start is not None}
        to_do = [step_of(cell) for training, cells in self._runs for cell in (training, *cells) if cell is not None]
        self._progress = Progress(to_do, list(_earlier(runs)), children.jobs)

    def run(self) -> list[Failure]:
        pool = ThreadPoolExecutor(self._children.jobs)
        futures = [pool.submit(self._do, *run) for run in self._runs]
        try:
            for future in as_completed(futures):
                future.result()  # what is no cell's failure, a full disk for example, ends the experiment
            return [failure for future in futures for failure in future.result()]
        finally:
            # Workers alone, unless something else has brought us here: Ctrl-C, SIGTERM.
            pool.shutdown(wait=False, cancel_futures=True)
            self._children.stop()
            if wait([future for future in futures if not future.cancelled()], timeout=SECONDS_TO_END).not_done:
                self._children.kill()
            pool.shutdown()
            for worker in self._idle:
                worker.close()

    def _do(self, training: TrainingCell | None, evaluations: Sequence[EvaluationCell]) -> list[Failure]:
        """Do what is to do of a run."""
        worker = self._idle.pop()
        try:
            if training is not None:
                failure = self._attempt(training, partial(self._train, training, worker), needed_by=evaluations)
                if failure is not None:
                    return [failure]
            attempts = [self._attempt(cell, partial(worker.evaluate, cell)) for cell in evaluations]
            return [failure for failure in attempts if failure is not None]
        finally:
            self._idle.append(worker)

    def _attempt(
        self,
        cell: TrainingCell | EvaluationCell,
        work: Callable[[], str | None],
        needed_by: Sequence[EvaluationCell] = (),
    ) -> Failure | None:
        """Do a cell, again if it fails and that is wanted."""
        step = step_of(cell)
        for tries_left in reversed(range(1 + self._retries)):
            self._progress.begin(step)
            reason = work()
            if reason is None:
                self._progress.end(step)
                return None
            lines = [f"| {line}" for line in last_lines(cell.log, _LINES_SHOWN)]
            again = "; once more" if tries_left else ""
            given_up = [] if tries_left else [step, *map(step_of, needed_by)]
            self._progress.fail(step, reason, [*lines, f"log: {cell.log}{again}"], given_up)
        return Failure(step.title, reason or "", cell.log)

    def _train(self, cell: TrainingCell, worker: Worker) -> str | None:
        """Train from an empty folder; give what went wrong in a line, or None."""
        clear_run(cell)
        if reason := self._make_start(cell, worker):
            return reason
        begun = time.monotonic()
        config = cell.folder / "recipe.yaml"
        with atomic_file(config) as file:
            OmegaConf.save(cell.config, file)
        status = run_logged([*TUNE, "run", cell.recipe, "--config", str(config)], cell.log, self._children)
        if status != 0:
            if self._children.stopped:
                raise Stopped
            told = [line for line in last_lines(cell.log, _LINES_SHOWN) if line.startswith("error: ")]
            return ": ".join([f"the recipe {exit_reason(status)}", *told[-1:]])
        seconds = time.monotonic() - begun
        manifest = {"settings": cell.settings, "seconds": seconds, "provenance": describe_machine()}
        write_manifest(cell.folder / TRAINED, manifest)
        return None

    def _make_start(self, cell: TrainingCell, worker: Worker) -> str | None:
        """Make what a run starts from, unless it is there; of runs that need the same, one makes it, others wait."""
        if cell.start is None:
            return None
        with self._starts[cell.start.folder]:
            if cell.start.folder.is_dir():
                return None
            self._progress.note(step_of(cell), f"making a start in {cell.start.folder} ...")
            return worker.make(cell.start, cell.log)


def _earlier(runs: Sequence[PlannedRun]) -> list[tuple[Step, float]]:
    """What is done, and how long it took."""
    found = []
    for run in runs:
        trained = run.training.folder / TRAINED
        if trained.is_file():
            found.append((step_of(run.training), float(read_manifest(trained)["seconds"])))
        found += [
            (step_of(cell), float(manifest["seconds"]))
            for cell in run.evaluations
            for _, manifest in evaluation_parts(cell)
        ]
    return found
