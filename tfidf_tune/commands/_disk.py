"""Options of the commands that search text on disk."""

import argparse
from typing import TYPE_CHECKING

from tfidf_tune.commands import key_values, whole_number

if TYPE_CHECKING:
    from tfidf_tune.data._disk_tasks import TaskRunner

_DEFAULT = "default: %(default)s"


def add_tasks(parser: argparse.ArgumentParser) -> None:
    """Add the options of where tasks run."""
    add = parser.add_argument_group("tasks on text on disk, one for each file").add_argument
    add("--jobs", type=whole_number(1), default=1, help=f"at once; {_DEFAULT}")
    add("--executor", choices=("local", "slurm", "ray"), default="local", help=f"where they run; {_DEFAULT}")
    add("--executor-args", type=key_values, default={}, metavar="KEY=VALUE,...", help=(
        "of datatrove's executor for Slurm or Ray: partition=cpu,time=24:00:00,mem_per_cpu_gb=4"
    ))  # fmt: skip


def task_runner(options: argparse.Namespace) -> "TaskRunner":
    """Return what the options of :func:`add_tasks` say."""
    from tfidf_tune.data._disk_tasks import TaskRunner

    return TaskRunner(options.executor, options.jobs, options.executor_args)
