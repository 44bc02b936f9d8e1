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
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        "date": date.today().isoformat(),
        "cpu": names[0] if names else platform.machine(),
        "cores": str(
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        ),
        **gpu,
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
    }
