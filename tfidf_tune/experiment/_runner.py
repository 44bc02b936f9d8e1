"""Doing what is to do: train, evaluate, go on after failures."""

import contextlib
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from omegaconf import OmegaConf
from torchtune.config._utils import _get_component_from_path

from tfidf_tune._files import atomic_file, atomic_folder
from tfidf_tune.experiment._cells import EvaluationCell, PlannedRun, Start, TrainingCell
from tfidf_tune.experiment._config import EvalSettings
from tfidf_tune.experiment._evaluation import open_evaluator
from tfidf_tune.experiment._processes import PlainLines, exit_reason, last_lines, run_logged
from tfidf_tune.experiment._progress import Progress, Step, say
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


def do_cells(runs: Sequence[PlannedRun], settings: EvalSettings, lock: int, *, retries: int = 0) -> list[Failure]:
    """Do every cell that is not done, one after the other; a failure leaves out what needs it, nothing else.

    Args:
        runs (Sequence[PlannedRun]): without cells of other settings.
        settings (EvalSettings): of the experiment.
        lock (int): file descriptor that processes inherit.
        retries (int): how often a failed cell is done again at once. Default: 0.

    Returns:
        list[Failure]: what failed; empty if all is done.
    """
    return _Runner(runs, settings, lock, retries).run()


def step_of(cell: TrainingCell | EvaluationCell) -> Step:
    """Describe a cell in a line."""
    if isinstance(cell, TrainingCell):
        return Step("training", cell.model, f"{cell.title}: training")
    tasks = ", ".join(missing_tasks(cell) or cell.tasks)
    return Step("evaluation", cell.run.model, f"{cell.run.title}: evaluating {cell.checkpoint.name} ({tasks})")


class _Runner:
    def __init__(self, runs: Sequence[PlannedRun], settings: EvalSettings, lock: int, retries: int) -> None:
        self._runs = [
            (
                run.training if training_state(run) is not State.DONE else None,
                [cell for cell in run.evaluations if evaluation_state(cell) is not State.DONE],
            )
            for run in runs
        ]
        self._settings = settings
        self._lock = lock
        self._retries = retries
        self._failures: list[Failure] = []
        to_do = [step_of(cell) for training, cells in self._runs for cell in (training, *cells) if cell is not None]
        self._progress = Progress(to_do, list(_earlier(runs)))

    def run(self) -> list[Failure]:
        for training, evaluations in self._runs:
            if training is not None and not self._attempt(training, training.log, partial(self._train, training)):
                for cell in evaluations:
                    self._progress.drop(step_of(cell))
                continue
            with open_evaluator(self._settings, self._lock) as evaluator:
                for cell in evaluations:
                    self._attempt(cell, cell.log, partial(evaluator.evaluate, cell))
        return self._failures

    def _attempt(self, cell: TrainingCell | EvaluationCell, log: Path, work: Callable[[], str | None]) -> bool:
        """Do a cell, again if it fails and that is wanted; say whether it is done."""
        step = step_of(cell)
        for attempt in range(1 + self._retries):
            self._progress.begin(step)
            reason = work()
            if reason is None:
                self._progress.end(step)
                return True
            lines = "\n".join(f"    | {line}" for line in last_lines(log, _LINES_SHOWN))
            again = "; once more" if attempt < self._retries else ""
            say(f"    failed: {reason}\n{lines}\n    log: {log}{again}")
        self._progress.drop(step)
        self._failures.append(Failure(step.title, reason or "", log))
        return False

    def _train(self, cell: TrainingCell) -> str | None:
        """Train from an empty folder; give what went wrong in a line, or None."""
        begun = time.monotonic()
        clear_run(cell)
        if cell.start is not None and (reason := _make(cell.start, cell.log)):
            return reason
        config = cell.folder / "recipe.yaml"
        with atomic_file(config) as file:
            OmegaConf.save(cell.config, file)
        status = run_logged([*TUNE, "run", cell.recipe, "--config", str(config)], cell.log, self._lock)
        if status != 0:
            told = [line for line in last_lines(cell.log, _LINES_SHOWN) if line.startswith("error: ")]
            return ": ".join([f"the recipe {exit_reason(status)}", *told[-1:]])
        write_manifest(cell.folder / TRAINED, {"settings": cell.settings, "seconds": time.monotonic() - begun})
        return None


def _make(start: Start, log: Path) -> str | None:
    """Make a start unless it is there; give what went wrong in a line, or None."""
    if start.folder.is_dir():
        return None
    say(f"    making a start in {start.folder} ...")
    with log.open("a", encoding="utf-8") as file, contextlib.closing(PlainLines(file)) as lines:
        try:
            with atomic_folder(start.folder) as temporary, redirect_stdout(lines), redirect_stderr(lines):
                _get_component_from_path(start.component)(temporary, start.model, start.seed, **start.arguments)
        except Exception as error:  # whatever a component of the user's may raise is this cell's failure
            traceback.print_exc(file=lines)
            return f"the start could not be made: {type(error).__name__}: {error}".splitlines()[0]
    return None


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
