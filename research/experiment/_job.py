"""What a job does: it trains runs and evaluates their milestones.

The process of a job imports the libraries once. It forks a process for each training, and one for
the evaluation of all milestones of a run: if that process fails (no memory left, a crash), the job
continues, and its memory, including that of a GPU, is free afterwards. The job writes what it does
to a journal for each run, which the command reads.
"""

import fcntl
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import submitit
import torch
from omegaconf import OmegaConf
from torchtune.config._utils import _get_component_from_path

from research.experiment._cells import TRAINING, Run, Start
from research.machine import describe_machine
from tfidf_tune._files import atomic_file, atomic_folder, remove_leftovers

LOCK = ".lock"
JOBS_LOCK = ".jobs.lock"
_LINES_SHOWN = 12  # of the log of a cell that fails
# Forking is not safe on macOS.
_CONTEXT: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


def claim(journal: Path, job: str = "") -> bool:
    """Create the journal of a run with its first event, a line of JSON; return False if there is
    one.
    """
    temporary = journal.with_suffix(f".{job}-{os.getpid()}")
    try:
        record(temporary, "claimed", job=job)
        os.link(temporary, journal)  # with its first line, or not at all
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def record(journal: Path, event: str, **more: Any) -> None:
    """Append an event to a journal; the processes of a job write one after another."""
    with journal.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"event": event, **more}) + "\n")


def events_of(journal: Path) -> list[dict[str, Any]]:
    """Return the events of a journal, without one that is being written."""
    return (
        [json.loads(line) for line in journal.read_text(encoding="utf-8").split("\n")[:-1]]
        if journal.exists()
        else []
    )


def last_lines(log: Path) -> list[str]:
    """Return the last lines of a log; none if there is no log."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return [line for line in lines if line.strip()][-_LINES_SHOWN:]


def work(
    runs: dict[int, Run],
    journals: Path,
    retries: int,
    experiment: Path | None = None,
    gpus: str | None = None,
) -> None:
    """Do the runs, by number, that no other job has begun, one after another.

    The job that creates the journal of a run does the run. A local job ends with the command that
    holds the folder of the ``experiment``, and sees the ``gpus`` of this CUDA_VISIBLE_DEVICES; None
    is a job on a cluster, or all.
    """
    if experiment is not None:
        os.setpgrp()
        # Inherited by all processes; other commands wait for them.
        held = os.open(experiment / JOBS_LOCK, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_SH)
        if not submitit.JobEnvironment().paths.submitted_pickle.exists():
            sys.exit("the command that submitted this job has ended")
        command = os.open(experiment / LOCK, os.O_RDONLY)
        # Which the command holds as long as it lives.
        _end_after(partial(fcntl.flock, command, fcntl.LOCK_SH))
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # submitit hides all GPUs
        if gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    job_id = submitit.JobEnvironment().job_id
    for number, run in runs.items():
        journal = journals / f"{number}.jsonl"
        if not claim(journal, job_id):  # a cluster may have started this job again
            events = events_of(journal)
            if events[0]["job"] != job_id or events[-1]["event"] == "finished":
                continue
        if run.is_done(TRAINING) or _train(run, journal, retries):
            _evaluate(run, journal, retries)
        record(journal, "finished")


def _end_after(wait: Callable[[], Any]) -> None:
    """Kill the process group as soon as a function returns."""

    def kill() -> None:
        wait()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


def _train(run: Run, journal: Path, retries: int) -> bool:
    """Train from an empty folder; return whether that worked."""
    log = run.log(TRAINING)
    config = run.folder / "recipe.yaml"
    for tries_left in reversed(range(1 + retries)):
        run.clear()
        record(journal, "begun", cell=TRAINING)
        reason = None if run.start is None else _make_start(run.start, log, journal)
        if reason is None:
            begun = time.monotonic()
            with atomic_file(config) as file:
                OmegaConf.save(run.config, file)
            reason = _in_process(
                "recipe", log, run_recipe, run.recipe, str(config), run.matmul_precision
            )
        if reason is None:
            run.finish_training(time.monotonic() - begun, describe_machine())
            record(journal, "done", cell=TRAINING)
            return True
        record(
            journal,
            "failed",
            cell=TRAINING,
            reason=reason,
            lines=last_lines(log),
            again=tries_left > 0,
        )
    return False


def _make_start(start: Start, log: Path, journal: Path) -> str | None:
    """Make a start unless it exists; if several jobs need the same one, one makes it and the others
    wait.
    """
    with journal.with_name(f"{start.folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if start.folder.is_dir():
            return None
        remove_leftovers(start.folder.parent, of=start.folder.name)
        record(journal, "note", cell=TRAINING, text=f"making a start in {start.folder} ...")
        reason = _in_process("start", log, make_start, start)
        return reason and f"the start could not be made: {reason}"


def _evaluate(run: Run, journal: Path, retries: int) -> None:
    """Evaluate the milestones; after a failure a new process continues with the same one, or with
    the next.
    """
    import_module("lm_eval.models.huggingface")  # once for all runs of this job
    percents = [percent for percent in run.evaluations if not run.is_done(percent)]
    tries_left = retries
    while percents:
        log = run.log(percents[0])
        reason = _in_process("evaluation", log, evaluate_milestones, run, percents, journal)
        left = [percent for percent in percents if not run.is_done(percent)]
        if not left:
            return
        if left != percents:
            tries_left = retries
        record(
            journal,
            "failed",
            cell=left[0],
            reason=reason,
            lines=last_lines(log),
            again=tries_left > 0,
        )
        percents, tries_left = (left, tries_left - 1) if tries_left else (left[1:], retries)


def _in_process(name: str, log: Path, function: Callable[..., None], *arguments: Any) -> str | None:
    """Call a function in a new process; return the reason of a failure in one line, or None."""
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_call, args=(sender, log, function, *arguments))
    process.start()
    process.join()
    status: int = process.exitcode
    if status == 0:
        return None
    if receiver.poll():
        error = str(receiver.recv())
        return f"the recipe ended with exit code 1: {error}" if name == "recipe" else error
    if status > 0:
        return f"the {name} ended with exit code {status}"
    ended_by = signal.Signals(-status).name
    return (
        f"the {name} was ended by "
        f"{ended_by}{', perhaps because memory ran out' if ended_by == 'SIGKILL' else ''}"
    )


def _call(sender: Any, log: Path, function: Callable[..., None], *arguments: Any) -> None:
    """Call a function with all output, also of other languages than Python, in a log."""
    _end_after(cast(Any, multiprocessing.parent_process()).join)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the job has handlers of submitit
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with (
        log.open("a", encoding="utf-8", buffering=1) as file,
        redirect_stdout(file),
        redirect_stderr(file),
    ):
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            function(*arguments)
        except SystemExit as error:
            if not isinstance(error.code, str):
                raise
            sender.send(error.code.splitlines()[0])
            print(error)
            sys.exit(1)
        except Exception as error:
            # First: the log may be on a full disk.
            sender.send(f"{type(error).__name__}: {error}".splitlines()[0])
            traceback.print_exc()
            sys.exit(1)


def run_recipe(recipe: str, config: str, matmul_precision: str) -> None:
    torch.set_float32_matmul_precision(matmul_precision)
    sys.argv = [recipe, "--config", config]
    import_module(f"tfidf_tune.recipes.{recipe}").recipe_main()


def make_start(start: Start) -> None:
    """Call a component that makes a checkpoint folder; the folder appears when it is complete."""
    with atomic_folder(start.folder) as temporary:
        _get_component_from_path(start.component)(
            temporary, start.model, start.seed, **start.arguments
        )


def evaluate_milestones(run: Run, percents: list[int], journal: Path) -> None:
    """Run the tasks that are not done; the folder of their results appears when it is complete."""
    from tfidf_tune.tasks import evaluate

    for percent in percents:
        record(journal, "begun", cell=percent)
        start = time.monotonic()
        tasks = run.missing_tasks(percent)
        with atomic_folder(run.next_part(percent)) as temporary:
            evaluate(tasks=tasks, output_path=temporary, **run.evaluations[percent])
            run.finish_part(temporary, tasks, time.monotonic() - start)
        record(journal, "done", cell=percent)
