"""When, on what and with which versions something was made."""

import os
import platform
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

_PACKAGES = ("torch", "torchtune", "transformers", "lm_eval", "tfidf-tune")


def describe_machine() -> dict[str, str]:
    """Describe this machine, its software and the day, for what is written here and now.

    Returns:
        dict[str, str]: "date", "cpu", "cores" (those that this process may use), "gpu" where there is one, "platform",
            "python", and the version of each package that results depend on.
    """
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


def merge_provenance(entries: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Put the provenance of several files together.

    Args:
        entries (Sequence[Mapping[str, str]]): of each.

    Returns:
        dict[str, str]: under each name the different values, in the order of the files.
    """
    names = dict.fromkeys(name for one in entries for name in one)
    return {name: "; ".join(dict.fromkeys(one[name] for one in entries if name in one)) for name in names}


def _cpu_name() -> str:
    """The processor's name where Linux tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
