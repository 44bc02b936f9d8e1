"""When, on what and with which versions something was made."""

import os
import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path

_PACKAGES = ("torch", "torchtune", "transformers", "lm_eval", "tfidf-tune")
NAMES = ("date", "cpu", "cores", "platform", "python", *_PACKAGES)


def describe_machine() -> dict[str, str]:
    """Describe this machine, its software and the day.

    Returns:
        dict[str, str]: "date", "cpu", "cores" (that this process may use), "gpu" if there is one, "platform",
            "python", and the version of each package that results depend on.
    """
    import torch

    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        "date": date.today().isoformat(),
        "cpu": _cpu_name(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        **gpu,
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{package: version(package) for package in _PACKAGES},
    }


def _cpu_name() -> str:
    """Return the name of the processor as Linux has it, elsewhere the architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
