"""Tasks on files: in this process, in several of this machine, or by datatrove on Slurm."""

import copy
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from tqdm import tqdm

from tfidf_tune._checks import require_choice, require_integer
from tfidf_tune._printing import visible

EXECUTORS = ("local", "slurm")
_SECONDS_BETWEEN_LOOKS = 2.0
_Item = TypeVar("_Item")

Step = Callable[[Any, int, int], Any]
"""A function of the result of the step before it (None for the first), a rank and the number of
ranks; a step of datatrove is a step, too. The result may be a generator."""


@dataclass(frozen=True)
class TaskRunner:
    """Where tasks run. A task that is finished is not done again.

    Args:
        executor (str): "local", this process, or processes of this machine if there are several
            jobs; "slurm", job arrays, submitted from here, whose machines need this environment and
            the files at the same paths. Default: "local"
        num_jobs (int): tasks at once. Default: 1
        options (Mapping[str, Any]): more arguments of datatrove's executor. Slurm needs
            ``partition`` and ``time``.

    Raises:
        ValueError: If a value is not possible, or Slurm's are missing.
    """

    executor: str = "local"
    num_jobs: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_choice("executor", self.executor, EXECUTORS)
        require_integer("num_jobs", self.num_jobs, 1)
        if self.executor == "local" and self.options:
            raise ValueError(
                f"executor_args are for slurm, but the executor is local: {dict(self.options)}"
            )
        missing = [name for name in ("partition", "time") if name not in self.options]
        if self.executor == "slurm" and missing:
            names = " and ".join(missing)
            raise ValueError(f"slurm needs executor_args {names}: partition=NAME,time=24:00:00")
        if self.executor == "slurm" and shutil.which("sbatch") is None:
            raise ValueError(
                "slurm has no command sbatch here: run this on a machine from which jobs are "
                "submitted"
            )

    def run(self, steps: Sequence[Step], folder: Path, num_tasks: int, doing: str) -> None:
        """Run the steps for each rank below ``num_tasks`` that ``folder`` does not
        say is finished.
        """
        if self.executor == "local":
            _run_here(steps, folder / "completions", num_tasks, self.num_jobs, doing)
            return
        from datatrove.executor import SlurmPipelineExecutor
        from loguru import logger

        logger.disable("datatrove")
        # Jobs use this environment; their names tell those of this call from others in the queue.
        activate = Path(sys.prefix) / "bin" / "activate"
        options: dict[str, Any] = {
            "qos": "",
            "job_name": f"tfidf-tune-{doing.replace(' ', '-')}-{os.getpid()}",
        }
        if activate.is_file():
            options["venv_path"] = str(activate)
        # Ranks, marks of finished tasks and logs are those of tasks that run here.
        executor = SlurmPipelineExecutor(
            list(steps),
            tasks=num_tasks,
            workers=min(self.num_jobs, num_tasks),
            logging_dir=str(folder),
            **options | dict(self.options),
        )
        try:
            executor.run()
        except (OSError, subprocess.CalledProcessError) as error:
            raise ChildProcessError(f"{doing}: cannot submit the job to Slurm: {error}") from error
        _wait(executor, num_tasks, doing)
        failed = executor.get_incomplete_ranks()
        if failed:
            raise ChildProcessError(
                f"{doing}: {len(failed)} of {num_tasks} tasks failed on Slurm; see the logs in "
                f"{folder}. Run the same command again to retry them"
            )


def _run_here(
    steps: Sequence[Step], completions: Path, num_tasks: int, num_jobs: int, doing: str
) -> None:
    """Run the tasks as datatrove does, with the same marks of finished ones."""
    completions.mkdir(parents=True, exist_ok=True)
    marks = [completions / f"{rank:05d}" for rank in range(num_tasks)]
    left = [mark for mark in marks if not mark.is_file()]
    task = partial(_run_task, steps, num_tasks)
    if num_jobs == 1:
        for mark in left:
            task(mark)
    elif left:
        _run_in_workers(task, left, num_jobs, doing)


def _run_in_workers(
    task: Callable[[Path], None], marks: Sequence[Path], num_jobs: int, doing: str
) -> None:
    """Run the tasks with these marks in processes of this machine."""
    # Workers are forks, so that steps need not be pickled. They end when nothing can be written to
    # a pipe any more: it is closed here, or this process was killed.
    pipe = os.pipe()
    num_workers = min(num_jobs, len(marks))
    pool = ProcessPoolExecutor(num_workers, get_context("fork"), _start_worker, (*pipe, task))
    try:
        futures = [pool.submit(_run_in_worker, mark) for mark in marks]
        for future in as_completed(futures):
            future.result()
    except BrokenProcessPool as error:
        raise ChildProcessError(
            f"{doing}: one of {num_jobs} processes was killed, perhaps because memory was short. "
            "Run the same command again, with fewer jobs, to go on"
        ) from error
    finally:
        os.close(pipe[1])
        pool.shutdown(cancel_futures=True)
        os.close(pipe[0])


def _run_task(steps: Sequence[Step], num_tasks: int, mark: Path) -> None:
    data = None
    # Steps of datatrove keep counts, so each task gets its own.
    for step in copy.deepcopy(steps):
        data = step(data, int(mark.name), num_tasks)
    deque(data or (), maxlen=0)  # generators do nothing until they are read
    os.sync()  # what is marked as finished is on disk
    mark.touch()


_task: Callable[[Path], None]  # of a worker


def _run_in_worker(mark: Path) -> None:
    _task(mark)


def _start_worker(reading: int, writing: int, task: Callable[[Path], None]) -> None:
    global _task
    _task = task
    os.close(writing)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C goes to all processes of a terminal
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    Thread(target=lambda: os._exit(len(os.read(reading, 1)) + 1), daemon=True).start()


def _wait(executor: Any, num_tasks: int, doing: str) -> None:
    """Wait until the jobs of Slurm have ended."""
    is_queued = True
    with tqdm(total=num_tasks, desc=f"{doing} on Slurm", unit="task") as bar:
        while left := len(executor.get_incomplete_ranks()):
            bar.update(num_tasks - left - bar.n)
            if not is_queued:
                break
            # The last array; earlier ones end before it. Slurm forgets a job some time after its
            # end.
            query = ["squeue", "--noheader", "--job", executor.job_id]
            queue = subprocess.run(query, capture_output=True, text=True, check=False)
            is_queued = bool(queue.stdout.strip())
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        bar.update(num_tasks - left - bar.n)
    # What waits for the success of tasks that failed would wait forever.
    subprocess.run(["scancel", "--quiet", "--name", executor.job_name], check=False)


def progress(
    items: Iterable[_Item],
    files: Sequence[str],
    index: int,
    doing: str,
    text_of: Callable[[_Item], Any] = str,
) -> Iterator[_Item]:
    """Yield the items of a file, and show how far it is, by the text of each; files before it count
    as done.
    """
    sizes = [_size(Path(name)) for name in files]
    before = sum(sizes[:index])
    file = Path(files[index])
    description = f"{doing} {visible(file.name)} ({index + 1} of {len(files)})"
    # The bar of a compressed file moves at its end.
    is_plain = file.suffix in (".txt", ".jsonl")
    with tqdm(total=sum(sizes), initial=before, unit="B", unit_scale=True, desc=description) as bar:
        for item in items:
            if is_plain:
                bar.update(len(text_of(item) or ""))
            yield item
        bar.update(before + sizes[index] - bar.n)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
