"""An executor for experiments whose jobs are forked from this process, which
saves their imports.
"""

import multiprocessing
import os
import sys
from contextlib import suppress

import rouge_score.rouge_scorer  # noqa: F401  (evaluations import it)

from research.experiment import _job

JobPaths = _job.submitit.core.utils.JobPaths  # submitit is imported after research.experiment
CONTEXT = multiprocessing.get_context("fork")


class ForkExecutor:
    """In place of submitit's executors."""

    def __init__(self, folder):
        self.folder = folder

    def submit(self, function, *arguments):
        return ForkJob(self.folder, function, arguments)


class ForkJob:
    state = "FINISHED"

    def __init__(self, folder, function, arguments):
        self._process = CONTEXT.Process(target=self._run, args=(folder, function, arguments))
        self._process.start()
        self.job_id = str(self._process.pid)
        self.paths = JobPaths(folder, self.job_id)

    def done(self):
        return not self._process.is_alive()

    @staticmethod
    def _run(folder, function, arguments):
        for descriptor in map(
            int, os.listdir("/proc/self/fd")
        ):  # submitit does not pass the locks on
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{descriptor}").endswith("lock"):
                    os.close(descriptor)
        os.environ |= {"SUBMITIT_FOLDER": str(folder), "SUBMITIT_DEBUG_JOB_ID": str(os.getpid())}
        paths = JobPaths(folder, str(os.getpid()))
        paths.submitted_pickle.touch()
        with paths.stdout.open("w") as log:
            for number in (1, 2):
                os.dup2(log.fileno(), number)
        sys.stdout = os.fdopen(1, "w")
        sys.stderr = os.fdopen(2, "w")
        function(*arguments)
