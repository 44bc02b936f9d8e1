"""What befalls a run in its own process: set before the recipe begins, sprung at a certain moment."""

import itertools
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

Trap = Callable[[int], None]


@dataclass(frozen=True)
class AtStep:
    """Do something in the middle of a step of the run.

    Attributes:
        number (int): the step, from 1.
        act (Callable[[], None] | None): what is done. None: the step's loss is NaN.
    """

    number: int
    act: Callable[[], None] | None

    def __call__(self, rank: int) -> None:
        """Set the trap."""
        from tfidf_tune.training import _train

        original = _train.train_step
        steps: Iterator[int] | None = None

        def train_step(model: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            steps = steps or itertools.count(_first_step())
            if next(steps) != self.number:
                return original(model, loss, *args, **kwargs)
            if self.act is not None:
                self.act()
                return original(model, loss, *args, **kwargs)
            whole = loss.terms
            loss.terms = lambda *given: (terms := whole(*given))._replace(loss=terms.loss * torch.nan)
            try:
                return original(model, loss, *args, **kwargs)
            finally:
                del loss.terms

        _train.train_step = train_step  # type: ignore[assignment]


@dataclass(frozen=True)
class Calling:
    """Do something in the n-th call of a function, before it does its work.

    Attributes:
        module (str): of tfidf_tune.training, without the leading underscore.
        name (str): of the function in it, or of a class and its method.
        act (Callable[[], None]): what is done.
        nth (int): which call. Default: 1.
    """

    module: str
    name: str
    act: Callable[[], None]
    nth: int = 1

    def __call__(self, rank: int) -> None:
        """Set the trap."""
        *owners, name = self.name.split(".")
        owner: Any = import_module(f"tfidf_tune.training._{self.module}")
        for inner in owners:
            owner = getattr(owner, inner)
        original, calls = getattr(owner, name), itertools.count(1)

        def function(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == self.nth:
                self.act()
            return original(*args, **kwargs)

        setattr(owner, name, function)


@dataclass(frozen=True)
class Hangup:
    """Set a trap that sends SIGHUP.

    Attributes:
        trap (Trap): the trap.
        nohup (bool): whether SIGHUP is ignored from the start. Default: False.
    """

    trap: Trap
    nohup: bool = False

    def __call__(self, rank: int) -> None:
        """Set the trap; the tests themselves may run under nohup."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN if self.nohup else signal.SIG_DFL)
        self.trap(rank)


@dataclass(frozen=True)
class OnRank:
    """Set a trap in one process alone.

    Attributes:
        rank (int): of the process.
        trap (Trap): the trap.
    """

    rank: int
    trap: Trap

    def __call__(self, rank: int) -> None:
        """Set the trap, where it belongs."""
        if rank == self.rank:
            self.trap(rank)


def sigterm() -> None:
    """Send SIGTERM to this process."""
    os.kill(os.getpid(), signal.SIGTERM)


def sigint() -> None:
    """Send SIGINT to this process."""
    os.kill(os.getpid(), signal.SIGINT)


def sighup() -> None:
    """Send SIGHUP to this process."""
    os.kill(os.getpid(), signal.SIGHUP)


def sigkill() -> None:
    """Send SIGKILL to this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def limit_files() -> None:
    """Let this process write no file of more than 8 KiB: a log, but no weights."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**13, 2**13))


def stand_in_the_way() -> None:
    """Put a file where the next milestone is to go."""
    (_run_folder() / "checkpoint_50pct").touch()


def _run_folder() -> Path:
    return Path(OmegaConf.load(sys.argv[-1]).output_dir)


def _first_step() -> int:
    return max((int(path.name.removeprefix("step_")) for path in _run_folder().glob("resume/step_*")), default=0) + 1
