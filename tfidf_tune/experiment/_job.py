"""What a job does: it trains runs and evaluates their milestones.

The process of a job imports the libraries once. Each training, and the evaluation of all milestones of a run, is a
process forked from it: what happens to that one (no memory left, a crash) does not end the job, and its memory, that
of a GPU included, is free afterwards. What a job does is written to a journal for each run, which the command reads.
"""

import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import submitit
from omegaconf import OmegaConf
from torchtune.config._utils import _get_component_from_path

from tfidf_tune._files import atomic_file, atomic_folder
from tfidf_tune.analysis import describe_machine
from tfidf_tune.experiment._cells import (
    EVALUATED,
    TRAINED,
    EvaluationCell,
    PlannedRun,
    Start,
    State,
    clear_run,
    evaluation_state,
    missing_tasks,
    next_part,
    training_state,
    write_manifest,
)
from tfidf_tune.experiment._plain_lines import PlainLines, last_lines

LOCK, JOBS_LOCK = ".lock", ".jobs.lock"
TRAINING = 0  # the training's number in a journal, where evaluations have their percent
LINES_SHOWN = 12  # of the log of a cell that fails
# Forking is not safe on macOS.
_CONTEXT: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


@dataclass(frozen=True)
class LocalJob:
    """Settings of a job on the machine of the command, with which it ends."""

    folder: Path  # of the experiment
    gpus: str | None  # CUDA_VISIBLE_DEVICES; None: all


def work(runs: dict[int, PlannedRun], journals: Path, retries: int, local: LocalJob | None) -> None:
    """Do the runs that no other job has begun, one after another.

    Args:
        runs (dict[int, PlannedRun]): by number.
        journals (Path): a job that creates the journal of a run has the run.
        retries (int): how often a failed cell is done again.
        local (LocalJob | None): None on a cluster.
    """
    if local is not None:
        _join(local)
    job_id = submitit.JobEnvironment().job_id
    for number, run in runs.items():
        journal = Journal(journals / f"{number}.jsonl")
        if journal.create():
            journal.write("claimed", job=job_id)
        elif not journal.is_unfinished(job_id):
            continue
        _do(run, journal, retries)
        journal.write("finished")


@dataclass(frozen=True)
class Journal:
    """Lines of JSON that say what is done of a run; the processes of a job write one after another."""

    path: Path

    def create(self) -> bool:
        """Create the file; return False if it exists."""
        try:
            self.path.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def is_unfinished(self, job_id: str) -> bool:
        """Return whether a job has begun this run and not finished it: a cluster has started that job again."""
        events = [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]
        return [event["job"] for event in events[:1]] == [job_id] and events[-1]["event"] != "finished"

    def write(self, event: str, **more: Any) -> None:
        """Append an event."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **more}) + "\n")

    def fail(self, cell: int, reason: str | None, log: Path, *, again: bool) -> None:
        """Append a failure; the log may be empty when it is read."""
        self.write("failed", cell=cell, reason=reason, lines=last_lines(log, LINES_SHOWN), again=again)


def _join(local: LocalJob) -> None:
    """End this job when the command ends, and let no other command begin before that."""
    os.setpgrp()
    held = os.open(local.folder / JOBS_LOCK, os.O_RDONLY)  # inherited by all processes of the job
    fcntl.flock(held, fcntl.LOCK_SH)
    if not submitit.JobEnvironment().paths.submitted_pickle.exists():
        sys.exit("the command that submitted this job has ended")
    _end_after(partial(_wait_for_lock, local.folder / LOCK))
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # submitit hides all
    if local.gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = local.gpus


def _wait_for_lock(path: Path) -> None:
    """Wait for a lock that another process holds as long as it lives."""
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)


def _end_after(wait: Callable[[], Any]) -> None:
    """Kill the process group as soon as a function returns."""

    def kill() -> None:
        wait()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


def _do(run: PlannedRun, journal: Journal, retries: int) -> None:
    if training_state(run) is not State.DONE and not _train(run, journal, retries):
        return
    import_module("lm_eval.models.huggingface")  # once for all runs of this job
    cells = [cell for cell in run.evaluations if evaluation_state(cell) is not State.DONE]
    tries_left = retries
    while cells:
        reason = _in_process("evaluation", cells[0].log, evaluate_cells, cells, journal)
        while cells and evaluation_state(cells[0]) is State.DONE:
            del cells[0]
            tries_left = retries
        if not cells:
            return
        journal.fail(cells[0].percent, reason, cells[0].log, again=tries_left > 0)
        if tries_left == 0:
            del cells[0]
        tries_left = tries_left - 1 if tries_left else retries


def _train(run: PlannedRun, journal: Journal, retries: int) -> bool:
    """Train from an empty folder; return whether that worked."""
    cell = run.training
    for tries_left in reversed(range(1 + retries)):
        clear_run(cell)
        journal.write("begun", cell=TRAINING)
        reason = None if cell.start is None else _make_start(cell.start, cell.log, journal)
        if reason is None:
            begun = time.monotonic()
            config = cell.folder / "recipe.yaml"
            with atomic_file(config) as file:
                OmegaConf.save(cell.config, file)
            reason = _in_process("recipe", cell.log, run_recipe, cell.recipe, str(config))
        if reason is None:
            manifest = {
                "settings": cell.settings,
                "seconds": time.monotonic() - begun,
                "provenance": describe_machine(),
            }
            write_manifest(cell.folder / TRAINED, manifest)
            journal.write("done", cell=TRAINING)
            return True
        journal.fail(TRAINING, reason, cell.log, again=tries_left > 0)
    return False


def _make_start(start: Start, log: Path, journal: Journal) -> str | None:
    """Make what a run starts from, unless it is there; of jobs that need the same, one makes it, others wait."""
    with journal.path.with_name(f"{start.folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if start.folder.is_dir():
            return None
        for leftover in start.folder.parent.glob(f".{start.folder.name}.*"):
            shutil.rmtree(leftover)
        journal.write("note", cell=TRAINING, text=f"making a start in {start.folder} ...")
        reason = _in_process("start", log, make_start, start)
        return reason and f"the start could not be made: {reason}"


def _in_process(name: str, log: Path, function: Callable[..., None], *arguments: Any) -> str | None:
    """Call a function in a process of its own; return what went wrong, in a line, or None."""
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_call, args=(sender, log, function, *arguments))
    process.start()
    process.join()
    assert process.exitcode is not None
    if process.exitcode == 0:
        return None
    if not receiver.poll():
        return f"the {name} {exit_reason(process.exitcode)}"
    error = str(receiver.recv())
    return f"the recipe ended with exit code 1: {error}" if name == "recipe" else error


def _call(sender: Any, log: Path, function: Callable[..., None], *arguments: Any) -> None:
    """Call a function with all output, Python or not, in a log."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    _end_after(parent.join)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the job has handlers of submitit
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with log.open("a", encoding="utf-8") as file, PlainLines(file) as lines:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        with redirect_stdout(lines), redirect_stderr(lines):
            try:
                function(*arguments)
            except (Exception, SystemExit) as error:
                if isinstance(error, SystemExit) and not isinstance(error.code, str):
                    raise
                if isinstance(error, SystemExit):
                    print(error)
                else:
                    traceback.print_exc()
                name = "" if isinstance(error, SystemExit) else f"{type(error).__name__}: "
                sender.send(f"{name}{error}".splitlines()[0])
                sys.exit(1)


def exit_reason(status: int) -> str:
    """Describe an exit status, negative for the number of a signal."""
    if status >= 0:
        return f"ended with exit code {status}"
    name = signal.Signals(-status).name
    return f"was ended by {name}" + (", perhaps because memory ran out" if name == "SIGKILL" else "")


def run_recipe(recipe: str, config: str) -> None:
    """Run a recipe as its command does."""
    sys.argv = [recipe, "--config", config]
    import_module(f"tfidf_tune.recipes.{recipe}").recipe_main()


def evaluate_cells(cells: Sequence[EvaluationCell], journal: Journal) -> None:
    """Run the tasks that are not done; results appear in a folder when all are there, the manifest included."""
    from tfidf_tune.tasks import evaluate

    for cell in cells:
        journal.write("begun", cell=cell.percent)
        start = time.monotonic()
        tasks = {task: cell.tasks[task] for task in missing_tasks(cell)}
        with atomic_folder(next_part(cell)) as temporary:
            evaluate(tasks=list(tasks), output_path=temporary, **cell.arguments)
            write_manifest(temporary / EVALUATED, {"tasks": tasks, "seconds": time.monotonic() - start})
        journal.write("done", cell=cell.percent)


def make_start(start: Start) -> None:
    """Call a component that makes a checkpoint folder, which appears when all is there."""
    with atomic_folder(start.folder) as temporary:
        _get_component_from_path(start.component)(temporary, start.model, start.seed, **start.arguments)
