"""What the steps of ``gpu.py`` share; needs the standard library only."""

import contextlib
import datetime
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PASSED, FAILED, NOT_POSSIBLE = "passed", "failed", "not possible"
_PACKAGES = ("torch", "torchtune", "torchao", "transformers", "peft", "triton", "bitsandbytes", "liger-kernel")


class NotPossible(Exception):
    """Something that a step needs is missing; the message names it and the remedy."""


@dataclass(frozen=True)
class Setting:
    """What every step is called with.

    Attributes:
        device (str): ``cuda`` or ``cpu``.
        tiny (bool): whether sizes only show that the step runs.
        work (Path): folder for checkpoints and logs, which are large.
        text (str | None): file of documents for the experiments; None takes docstrings of installed packages.
    """

    device: str
    tiny: bool
    work: Path
    text: str | None = None


@dataclass(frozen=True)
class Step:
    """A unit that is run in a process of its own and has one record.

    Attributes:
        name (str): also the name of the record's file.
        rung (int): 0 for correctness, 1 for time and memory, 2 for experiments.
        function (str): ``module:function``, called with a :class:`Setting` and ``argument``.
        argument (str): which variant.
        seconds (int): after which it is ended and has failed; it only starts if so much time is left.
        resumes (bool): whether it continues where it was ended. Then it starts with any time left.
    """

    name: str
    rung: int
    function: str
    argument: str = ""
    seconds: int = 120
    resumes: bool = False


@dataclass(frozen=True)
class Check:
    """A number that must not exceed a limit; for what must be identical, 0 and the count of differences."""

    name: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        """False for NaN too."""
        return self.value <= self.limit


@dataclass(frozen=True)
class Outcome:
    """What a step found: checks, numbers for the record, and Markdown for the page."""

    checks: Sequence[Check] = ()
    results: dict[str, Any] = field(default_factory=dict)
    markdown: str = ""


def run_step(step: Step, setting: Setting, file: Path, log: Path) -> None:
    """Run a step in this process, which leads a process group of its own, and write its record."""
    os.setpgid(0, 0)
    start = time.monotonic()
    with log.open("w", encoding="utf-8") as stream:
        for target in (1, 2):
            os.dup2(stream.fileno(), target)
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            record = _outcome(step, setting)
    write_record(file, step, setting, record | {"seconds": time.monotonic() - start, **_machine(setting.device)})


def write_record(file: Path, step: Step, setting: Setting, content: dict[str, Any]) -> None:
    """Write a record at once, so that an interruption leaves no half of one."""
    about = {"step": step.name, "rung": step.rung, "date": datetime.date.today().isoformat()}
    about |= {"device": setting.device, "tiny": setting.tiny}
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(about | content, indent=2) + "\n", encoding="utf-8")
    temporary.replace(file)


def _outcome(step: Step, setting: Setting) -> dict[str, Any]:
    """Call the step's function and describe what came of it."""
    module, _, name = step.function.partition(":")
    try:
        outcome: Outcome = getattr(import_module(module), name)(setting, step.argument)
    except NotPossible as reason:
        return {"status": NOT_POSSIBLE, "reason": str(reason)}
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        words = str(error).strip().splitlines() or [""]
        status = NOT_POSSIBLE if type(error).__name__ == "OutOfMemoryError" else FAILED
        return {"status": status, "reason": f"{type(error).__name__}: {words[0]}"}
    wrong = [
        f"{check.name} is {check.value:.3g}, above {check.limit:.3g}" for check in outcome.checks if not check.passed
    ]
    return {
        "status": FAILED if wrong else PASSED,
        "reason": "; ".join(wrong),
        "checks": [asdict(check) | {"passed": check.passed} for check in outcome.checks],
        "results": outcome.results,
        "markdown": outcome.markdown,
    }


def _machine(device: str) -> dict[str, Any]:
    """Describe hardware and versions."""
    from measuring import hardware  # type: ignore[import-not-found]

    return {
        "hardware": hardware(device),
        "versions": {"python": platform.python_version(), **dict(filter(None, map(_version, _PACKAGES)))},
    }


def _version(package: str) -> tuple[str, str] | None:
    try:
        return package, version(package)
    except PackageNotFoundError:
        return None
