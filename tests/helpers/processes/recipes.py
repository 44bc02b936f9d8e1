"""Recipes in several processes, as torchrun starts them, forked from a process with all imports."""

import gc
import importlib
import multiprocessing
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from torch.distributed import TCPStore

from helpers.fakes.tiny_run import run_recipe
from helpers.processes.ranks import CONTEXT

# `make faults` runs the rows that `make test` leaves out: more ways to break a run, and more kinds
# of run.
ALL = "ALL_FAULTS" in os.environ
# Protects from a hang; no result depends on how fast a machine is.
_HANG_SECONDS = 3600.0
_POLL_SECONDS = 0.005
_TORCHRUN_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class RecipeRun:
    """A run of lora_finetune or full_finetune."""

    cfg: DictConfig
    lora: bool = False

    @property
    def recipe(self) -> str:
        """Return the recipe's name."""
        return "lora_finetune" if self.lora else "full_finetune"

    @property
    def folder(self) -> Path:
        """Return the folder of the run."""
        return Path(self.cfg.output_dir)

    def here(self) -> Path:
        """Run in this process; return the folder."""
        return run_recipe(self.cfg, lora=self.lora)


@dataclass(frozen=True)
class Ended:
    """Exit codes in the order of ranks, negative for signals; stdout and stderr of all."""

    codes: list[int]
    output: str


def nothing(rank: int) -> None:
    """Change nothing."""


class Processes:
    """Processes that run recipes one after another, each run in a process group of its own.

    ``folder`` gets configs and output; ``before`` and ``after``, functions of a module, are called
    in each process with its rank, at the start and when all runs are done.
    """

    def __init__(
        self,
        runs: Sequence[RecipeRun],
        folder: Path,
        *,
        num_processes: int = 2,
        before: Callable[[int], None] = nothing,
        after: Callable[[int], None] = nothing,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "output.txt"
        self._log.touch()  # a process may be killed before it opens it
        # As under torchrun, the store of a run is not in its processes, which may be killed.
        self._stores = [
            TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in runs
        ]
        work = []
        for number, (run, store) in enumerate(zip(runs, self._stores, strict=True)):
            OmegaConf.save(run.cfg, folder / f"{number}.yaml")
            work.append((run.recipe, str(folder / f"{number}.yaml"), store.port))
        self._processes = [
            CONTEXT.Process(target=_run, args=(work, self._log, rank, num_processes, before, after))
            for rank in range(num_processes)
        ]
        for process in self._processes:
            process.start()

    def is_running(self) -> bool:
        """Return whether a process is running."""
        return any(process.is_alive() for process in self._processes)

    def kill(self) -> None:
        """Kill all processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def wait(self) -> Ended:
        """Wait until all have ended; as under torchrun, a process that fails ends the others."""
        deadline = time.monotonic() + _HANG_SECONDS
        asked_to_end = False
        while running := [process for process in self._processes if process.is_alive()]:
            if not asked_to_end and any(process.exitcode for process in self._processes):
                asked_to_end = True
                time.sleep(_TORCHRUN_POLL_SECONDS)
                for process in running:
                    process.terminate()
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(self._log.read_text())
            time.sleep(_POLL_SECONDS)
        return Ended(
            [process.exitcode for process in self._processes], self._log.read_text(errors="replace")
        )


def run_to_the_end(
    runs: Sequence[RecipeRun], folder: Path, *, num_processes: int = 2, **hooks: Callable
) -> str:
    """Run recipes in several processes, which have to succeed; return their output."""
    ended = Processes(runs, folder, num_processes=num_processes, **hooks).wait()
    assert ended.codes == [0] * num_processes, ended.output
    return ended.output


def run_command(
    function: str,
    arguments: Sequence[str],
    cwd: Path,
    *,
    script: Path | None = None,
    meanwhile: Callable[[multiprocessing.process.BaseProcess], None] = lambda process: None,
    **environment: str,
) -> Ended:
    """Call the function of a command, "module:name", with arguments in a folder, in one process
    without torchrun.

    ``script`` is that of the command, if it asks how it was started; ``meanwhile`` is called with
    the process when it has started.
    """
    log = cwd / "output.txt"
    process = CONTEXT.Process(
        target=_call, args=(function, list(arguments), cwd, log, script, environment)
    )
    process.start()
    meanwhile(process)
    process.join()
    return Ended([process.exitcode], log.read_text(errors="replace"))


def _call(
    function: str,
    arguments: list[str],
    cwd: Path,
    log: Path,
    script: Path | None,
    environment: dict[str, str],
) -> None:
    os.environ |= environment
    _begin(log)
    os.chdir(cwd)
    sys.argv = [str(script or function), *arguments]
    sys.orig_argv = [sys.executable, *sys.argv]
    pkgutil.resolve_name(function)()


def _begin(log: Path) -> None:
    """Compute on one thread, leave imports out of garbage collection, and redirect output to a
    file.
    """
    import torch

    gc.freeze()
    torch.set_num_threads(1)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def _run(
    work: list[tuple[str, str, int]],
    log: Path,
    rank: int,
    num_processes: int,
    before: Callable[[int], None],
    after: Callable[[int], None],
) -> None:
    _begin(log)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "localhost",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "tests",
    }
    before(rank)
    for recipe, config, port in work:
        os.environ["MASTER_PORT"] = str(port)
        sys.argv = [recipe, "--config", config]
        importlib.import_module(f"tfidf_tune.recipes.{recipe}").recipe_main()
    after(rank)
