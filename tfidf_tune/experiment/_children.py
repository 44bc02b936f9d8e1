"""The processes that an experiment starts, as many at once as it has jobs."""

import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any

SECONDS_TO_END = 30
_THREADS = "OMP_NUM_THREADS"


class Stopped(Exception):
    """The experiment is being ended: what fails now is no failure of a cell."""


class Children:
    """Starts processes that hold the experiment's lock and share the CPUs, and ends them all.

    Args:
        lock (int): file descriptor that they inherit.
        jobs (int): how many work at once; above 1, each has its share of the CPUs as threads, unless the user has said
            how many. Default: 1.

    Attributes:
        jobs (int): as given.
        stopped (bool): whether they have been told to end.
    """

    def __init__(self, lock: int, jobs: int = 1) -> None:
        self.jobs = jobs
        self.stopped = False
        self._lock = lock
        self._guard = threading.Lock()
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
    ) -> "subprocess.Popen[bytes]":
        """Start a process.

        Args:
            command (Sequence[str]): program and arguments.
            environment (Mapping[str, str] | None): variables beside those that this process has. Default: none.
            **options (Any): of :class:`subprocess.Popen`.

        Returns:
            subprocess.Popen[bytes]: the process.

        Raises:
            Stopped: If all have been told to end.
        """
        variables = os.environ | dict(environment or {})
        if self.jobs > 1 and _THREADS not in variables:
            variables[_THREADS] = str(max(1, _num_cpus() // self.jobs))
        with self._guard:
            if self.stopped:
                raise Stopped
            process = subprocess.Popen(command, pass_fds=(self._lock,), env=variables, **options)
            self._started = [earlier for earlier in self._started if earlier.poll() is None] + [process]
        return process

    def stop(self) -> None:
        """Tell all processes to end, and start no more."""
        with self._guard:
            self.stopped = True
        for process in self._started:
            process.terminate()

    def kill(self) -> None:
        """End those that have not ended although they were told to."""
        for process in self._started:
            process.kill()


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process if it still runs, gently first."""
    if process.poll() is None:
        process.terminate()
    try:
        process.communicate(timeout=SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def _num_cpus() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1
