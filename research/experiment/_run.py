"""Run an experiment from its file to its report: its jobs run through submitit, on this machine or
a Slurm cluster.

Lines of text say what is being done and what is left.
"""

import fcntl
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import submitit
import torch
from submitit.helpers import environment_variables

from research.experiment._cells import DONE, JOBS, REPORT, TRAINING, Run
from research.experiment._expand import expand
from research.experiment._job import JOBS_LOCK, LOCK, claim, events_of, last_lines, work
from research.experiment._schema import Experiment, Launcher
from tfidf_tune._files import remove_folder
from tfidf_tune._printing import say
from tfidf_tune.training import SetupError

if TYPE_CHECKING:
    from tfidf_tune.report import Report
    from tfidf_tune.results import Results


@dataclass(frozen=True)
class Failure:
    """A cell that failed: its title, the reason in one line, and its log."""

    title: str
    reason: str
    log: Path


class Progress:
    """Reads the journals of runs in a folder, prints a line when a cell begins or ends, and
    collects failures.

    ``to_do`` has by the number of a run its cells that are neither done nor given up. A run whose
    job is lost is repeated up to ``retries`` times; ``shows_logs`` prints what trainings print.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        to_do: dict[int, list[int]],
        folder: Path,
        retries: int,
        *,
        shows_logs: bool,
    ) -> None:
        folder.mkdir(parents=True)
        self._runs = runs
        self.to_do = to_do
        self._retries = retries
        self._shows_logs = shows_logs
        # Made now, because the title of an evaluation names the tasks that are missing.
        self._titles: dict[tuple[int, int], str] = {}
        for number, cells in to_do.items():
            for cell in cells:
                self._titles[number, cell] = runs[number].cell_title(cell)
        self._journals = {number: folder / f"{number}.jsonl" for number in to_do}
        self._read: Counter[Path] = Counter()  # bytes of a file that have been read
        # By run: the cell that is being done, and since when.
        self._begun: dict[int, tuple[int, float]] = {}
        self._num_lost: Counter[int] = Counter()
        self._shown_log: Path | None = None
        self._failures: dict[tuple[int, int], Failure] = {}
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
        """Process the end of a job: a run that it has not finished has failed, and
        may be repeated.
        """
        events = {number: events_of(self._journals[number]) for number in numbers}
        claimed = [
            number for number, of_run in events.items() if of_run and of_run[0]["job"] == job.job_id
        ]
        lost = [number for number in claimed if events[number][-1]["event"] != "finished"]
        if not claimed:
            lost = [number for number in numbers if claim(self._journals[number])][:1]
        for number in lost:
            self._num_lost[number] += 1
            if self.to_do[number]:
                cell, _ = self._begun.get(number, (self.to_do[number][0], 0.0))
                reason = (
                    f"job {job.job_id} ended before its work was done, its state is {job.state}"
                )
                log = job.paths.stdout
                again = self._num_lost[number] <= self._retries
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
                self._say("done", f"{self._titles[number, cell]} in {_duration(seconds)}")
            case "failed":
                self._fail(number, cell, log=run.log(cell), **more)

    def _fail(
        self,
        number: int,
        cell: int,
        reason: str,
        lines: list[str],
        log: Path,
        *,
        again: bool,
        is_lost: bool = False,
    ) -> None:
        self._shown_log = None
        self._begun.pop(number, None)
        title = self._titles[number, cell]
        if not again:
            self._failures[number, cell] = Failure(title, reason, log)
            gives_up_run = is_lost or cell == TRAINING
            self.to_do[number] = (
                [] if gives_up_run else [other for other in self.to_do[number] if other != cell]
            )
        details = [
            *(f"| {line}" for line in lines),
            f"log: {log}{'; trying again' if again else ''}",
        ]
        self._say("failed", f"{title}: {reason}", "".join(f"\n    {line}" for line in details))

    def _say(self, event: str, text: str, details: str = "") -> None:
        num_left = sum(map(len, self.to_do.values()))
        elapsed = _duration(time.monotonic() - self._start)
        say(
            f"{event:<7} {text}  ({num_left} of {len(self._titles)} left, {elapsed} so "
            f"far){details}"
        )

    def _show_log(self) -> None:
        if self._shown_log is not None:
            for line in self._new_lines(self._shown_log):
                say(line)

    def _new_lines(self, path: Path) -> list[str]:
        """Return the complete lines that were added to a file; a carriage return ends a state of a
        progress bar.
        """
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._read[path])
            *lines, _ = re.split(rb"[\r\n]", file.read())
        self._read[path] += sum(len(line) + 1 for line in lines)
        return [line.decode("utf-8", errors="replace") for line in lines if line.strip()]


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


_THREADS = "OMP_NUM_THREADS"
_MINUTES_OF_A_LOCAL_JOB = 10 * 365 * 24 * 60  # submitit ends a job after 5 minutes by default
# Options of submitit for every kind of cluster; those of Slurm have a prefix.
_GENERIC_OPTIONS = ("name", "timeout_min", "mem_gb", "cpus_per_task", "gpus_per_node")


def run_experiment(
    experiment: Experiment, *, overwrite: bool = False, retries: int = 0, jobs: int | None = None
) -> list[Failure]:
    """Do the cells of an experiment that are not done, and write and print the comparison.

    Args:
        experiment (Experiment): the experiment.
        overwrite (bool): discard and repeat cells that were made with different settings. Default:
            False, refuse.
        retries (int): how often a failed cell is repeated immediately. Default: 0.
        jobs (int | None): how many runs, each a training and its evaluations, are done at the same
            time. Above 1 their output is only in their logs, and on this machine they share CPUs
            (by OMP_NUM_THREADS, unless that is set) and GPUs. Default: None, 1 on this machine, all
            runs on a cluster.

    Returns:
        list[Failure]: the cells that failed; only the cells that depend on them were skipped.

    Raises:
        ValueError: If the experiment is invalid, cells were made with different settings, or
            ``jobs`` is below 1.
        OSError: If the folder is in use, cannot be written, or has other files where a run would
            be.
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs is {jobs}, it has to be at least 1")
    runs = expand(experiment)
    out = Path(experiment.output_dir)
    try:
        with only_command(out) as jobs_lock:
            for run in runs:
                run.check_folder()
            changed = _changed(runs)
            if changed:
                if not overwrite:
                    raise ValueError(changed)
                for run in runs:
                    run.discard_changed()
            say(f"All files are in {out}.")
            failures = _run_jobs(
                runs, out, jobs_lock, experiment.launcher, retries=retries, jobs=jobs
            )
            _report(runs, experiment, out / REPORT)
    except KeyboardInterrupt:
        say("\ninterrupted; the same command continues from here")
        raise
    return failures


def print_cells(experiment: Experiment) -> None:
    """Check an experiment, see :func:`run_experiment`, and print the state of its cells; nothing is
    written.
    """
    runs = expand(experiment)
    lines = []
    for run in runs:
        lines += [(run.cell_title(cell), run.state(cell)) for cell in run.cells]
    width = max(len(title) for title, _ in lines)
    say("\n".join(f"{title:<{width}}  {state}" for title, state in lines))
    done = sum(state == DONE for _, state in lines)
    say(f"\n{done} of {len(lines)} cells are done in {experiment.output_dir}.")
    changed = _changed(runs)
    if changed:
        say(f"\n{changed}")


def _changed(runs: Sequence[Run]) -> str:
    """Return a message if cells were made with different settings, else an empty text."""
    lines: list[str] = []
    for run in runs:
        lines += [f"  {change}" for change in run.all_changes()]
    if not lines:
        return ""
    listed = "\n".join(lines)
    return (
        f"some cells were made with different settings:\n{listed}\n"
        "choose another output_dir, or restore the settings; --overwrite discards these cells and "
        "repeats them"
    )


def _report(runs: Sequence[Run], experiment: Experiment, folder: Path) -> None:
    """Write and print the report of the evaluated runs."""
    from tfidf_tune.report import terminal_text
    from tfidf_tune.results import import_results

    evaluated = [
        run.folder for run in runs if any(run.manifests(percent) for percent in run.evaluations)
    ]
    if not evaluated:
        say("\nNothing was evaluated, so there is no report.")
        return
    try:
        report = _write_report(import_results(evaluated), experiment, folder)
    except ValueError as error:  # a single run, for example; its cells are done
        say(f"\nThere is no comparison: {error}")
    else:
        say(
            f"\n{terminal_text(report)}\nThe complete report, with figures: {folder / 'index.html'}"
        )


def _write_report(results: "Results", experiment: Experiment, folder: Path) -> "Report":
    """Write a frontier if there are learning rates, else a comparison."""
    from research.frontier_report import frontier_report
    from tfidf_tune.compare import comparison_report
    from tfidf_tune.report import write_report
    from tfidf_tune.results import write_results

    if experiment.learning_rates is None:
        report = comparison_report(results)
    else:
        done = {one.objective for one in results.checkpoints}
        report = frontier_report(
            results, references=[name for name in experiment.references if name in done]
        )
    write_report(report, folder, more={"results.jsonl": partial(write_results, results)})
    return report


@contextmanager
def only_command(folder: Path) -> Iterator[int]:
    """Lock the folder of an experiment. When the block or this process ends, its local jobs are
    ended.

    Yields the descriptor of a lock that jobs share; they wait until this process unlocks it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as lock, (folder / JOBS_LOCK).open("a") as jobs_lock:
        try:
            for file in (lock, jobs_lock):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(
                f"another experiment, or a job of one, is using {folder}: wait for it"
            ) from error
        scripts = sorted((folder / JOBS).glob("[0-9]*_submission.sh"))
        jobs = [
            submitit.SlurmJob[None](folder / JOBS, path.name.removesuffix("_submission.sh"))
            for path in scripts
        ]
        left = [job.job_id for job in jobs if not job.done(force_check=True)]
        if left:
            raise BlockingIOError(
                f"jobs of an earlier command may be queued or running: {', '.join(left)}: wait or "
                f"`scancel {' '.join(left)}`; if Slurm has forgotten them, delete {folder / JOBS}"
            )
        try:
            yield jobs_lock.fileno()
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # jobs wait for this to end themselves
            fcntl.flock(jobs_lock, fcntl.LOCK_EX)  # they hold it until they have ended


def _run_jobs(
    runs: list[Run],
    folder: Path,
    jobs_lock: int,
    launcher: Launcher,
    *,
    retries: int,
    jobs: int | None,
) -> list[Failure]:
    """Run all pending cells and return the failures; folder and lock are those of
    :func:`only_command`.
    """
    is_local = launcher.name == "local"
    cells = {
        number: [cell for cell in run.cells if not run.is_done(cell)]
        for number, run in enumerate(runs)
    }
    to_do = {number: own for number, own in cells.items() if own}
    if not to_do:
        return []
    num_jobs = min(len(to_do), jobs or (1 if is_local else len(runs)))
    journals = (folder / JOBS / "journals").absolute()
    if (folder / JOBS).exists() and not journals.is_dir():
        raise SetupError(
            f"{folder / JOBS} is not of an experiment: move it away, or choose another output_dir"
        )
    remove_folder(folder / JOBS)
    fcntl.flock(jobs_lock, fcntl.LOCK_UN)
    progress = Progress(runs, to_do, journals, retries, shows_logs=is_local and num_jobs == 1)
    executor = make_executor(launcher, folder / JOBS)
    gpus = gpus_of_jobs(num_jobs, launcher.gpus_per_node) if is_local else []
    # Seconds between two lines of a log.
    environment = {
        "TQDM_MININTERVAL": "30",
        "TQDM_MAXINTERVAL": "30",
    }
    if is_local and num_jobs > 1 and _THREADS not in os.environ:
        num_cpus = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        environment[_THREADS] = str(max(1, num_cpus // num_jobs))
    # By slot: a job and the runs that it may do.
    running: dict[int, tuple[submitit.Job[None], list[int]]] = {}
    try:
        while True:
            for slot in set(range(num_jobs)) - running.keys():
                numbers = progress.waiting()
                # One run, because of the time limit; a local job saves imports by doing several.
                if not is_local:
                    submitted: list[int] = []
                    for _, numbers_of_job in running.values():
                        submitted += numbers_of_job
                    numbers = [number for number in numbers if number not in submitted][:1]
                if numbers:
                    local = (folder.absolute(), gpus[slot]) if is_local else ()
                    arguments = ({number: runs[number] for number in numbers}, journals, retries)
                    with environment_variables(**environment), _without_ctrl_c():
                        running[slot] = executor.submit(work, *arguments, *local), numbers
            if not running:
                return progress.failures()
            time.sleep(0.1 if is_local else 2.0)
            ended = [slot for slot, (job, _) in running.items() if job.done()]
            progress.update()
            for slot in ended:
                progress.end_job(*running.pop(slot))
    finally:
        if not is_local:  # local jobs end with the lock
            for job, _ in running.values():
                job.cancel(check=False)


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Block SIGINT, also for processes started here: it goes to all processes of a terminal, and
    this one ends them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def make_executor(launcher: Launcher, folder: Path) -> submitit.Executor:
    """Make the executor of a launcher; raise a ``SetupError`` if Slurm is not available or lacks an
    option.
    """
    options: dict[str, Any] = {"timeout_min": _MINUTES_OF_A_LOCAL_JOB}
    if launcher.name == "slurm":
        given = {"job_name": "tfidf-tune"} | launcher.model_dump(
            exclude={"name"}, exclude_none=True
        )
        options = {}
        for key, value in given.items():
            name = key if key in _GENERIC_OPTIONS else f"slurm_{key}"
            options[name] = value
    try:
        executor = submitit.AutoExecutor(folder, cluster=launcher.name)
        executor.update_parameters(stderr_to_stdout=True, **options)
    except (AssertionError, NameError, RuntimeError, TypeError, ValueError) as error:
        raise SetupError(f"experiment: launcher: {str(error).splitlines()[0]}") from error
    return executor


def gpus_of_jobs(num_jobs: int, per_job: int | None) -> list[str | None]:
    """Share the GPUs of this machine among jobs: return ``CUDA_VISIBLE_DEVICES`` of each, None for
    all GPUs.

    Each job has ``per_job`` of them, by default an equal share. Jobs share GPUs if there are too
    few for all.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = (
        list(map(str, range(torch.cuda.device_count())))
        if given is None
        else list(filter(None, given.split(",")))
    )
    if per_job is None and (num_jobs == 1 or not gpus):
        return [given] * num_jobs
    count = per_job or max(1, len(gpus) // num_jobs)
    if count > len(gpus):
        raise SetupError(
            f"experiment: launcher: gpus_per_node is {count}, but this machine has {len(gpus)} GPUs"
        )
    shares: list[str | None] = []
    for job in range(num_jobs):
        numbers = range(job * count, (job + 1) * count)
        shares.append(",".join(gpus[number % len(gpus)] for number in numbers))
    return shares
