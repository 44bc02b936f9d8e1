"""The machine that experiments and benchmarks ran on, for their records."""

import os
import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

from tfidf_tune.results.table import PACKAGES


def describe_machine() -> dict[str, str]:
    """Describe this machine, its software and the day.

    Returns:
        dict[str, str]: "date", "cpu", "cores" (that this process may use), "gpu" if there is one,
            "platform", "python", and the version of each package that results depend on.
    """
    info = Path("/proc/cpuinfo")  # Linux has the processor's name there
    cpu = platform.machine()
    if info.is_file():
        lines = info.read_text(encoding="utf-8").splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        if names:
            cpu = names[0]
    num_cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    machine = {"date": date.today().isoformat(), "cpu": cpu, "cores": str(num_cores)}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    machine["platform"] = platform.platform()
    machine["python"] = platform.python_version()
    for package in PACKAGES:
        machine[package] = version(package)
    return machine
