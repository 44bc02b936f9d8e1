"""Recipes in several processes, as torchrun starts them; forked from a process that has done the imports."""

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fork_server import CONTEXT
from omegaconf import DictConfig, OmegaConf
from torch.distributed import TCPStore

# Protects only from a hang: no result depends on how fast a machine is.
_HANG_SECONDS = 3600.0
_POLL_SECONDS = 0.005
_TORCHRUN_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class RecipeRun:
    """A run of a recipe.

    Attributes:
        cfg (DictConfig): its config.
        lora (bool): which recipe.
    """

    cfg: DictConfig
    lora: bool = False

    @property
    def recipe(self) -> str:
        """The recipe's name."""
        return "lora_finetune" if self.lora else "full_finetune"

    @property
    def folder(self) -> Path:
        """What the run writes to."""
        return Path(self.cfg.output_dir)

    def here(self) -> Path:
        """Run in this process alone; gives the folder."""
        module = importlib.import_module(f"tfidf_tune.recipes.{self.recipe}")
        module.recipe_main.__wrapped__(self.cfg)
        return self.folder


@dataclass(frozen=True)
class Ended:
    """How processes ended.

    Attributes:
        codes (list[int]): exit codes in the order of ranks, negative ones are signals.
        output (str): what they wrote to stdout and stderr.
    """

    codes: list[int]
    output: str


def nothing(rank: int) -> None:
    """Leave everything as it is."""


class Processes:
    """Processes that run recipes one after another, each run in a process group of its own.

    Args:
        runs (Sequence[RecipeRun]): what they do.
        folder (Path): takes configs and output.
        num_processes (int): as torchrun's ``nproc_per_node``. Default: 2.
        before (Callable[[int], None]): a function of a module, called in each process with its rank at the start.
            Default: nothing.
        after (Callable[[int], None]): likewise, when all runs are done. Default: nothing.
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
        # As with torchrun, the store of a run is not one of its processes', which may be killed.
        self._stores = [TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in runs]
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

    def send(self, number: signal.Signals, *ranks: int) -> None:
        """Send a signal to some of them."""
        for rank in ranks:
            os.kill(self._processes[rank].pid, number)

    def is_running(self) -> bool:
        """Tell whether one of them is still there."""
        return any(process.is_alive() for process in self._processes)

    def kill(self) -> None:
        """End all at once, without a chance to say or save anything."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def wait_for(self, has_happened: Callable[[], bool]) -> None:
        """Wait until something has happened.

        Raises:
            RuntimeError: If all processes end before.
        """
        while not has_happened():
            if not self.is_running():
                raise RuntimeError(f"it did not happen; the processes said:\n{self._log.read_text()}")
            time.sleep(_POLL_SECONDS)

    def wait(self) -> Ended:
        """Wait for the end of all; as with torchrun, a process that fails ends the others.

        Raises:
            TimeoutError: If one hangs; it is killed.
        """
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
                raise TimeoutError(
                    f"{len(running)} still ran after {_HANG_SECONDS} s and said:\n{self._log.read_text()}"
                )
            time.sleep(_POLL_SECONDS)
        return Ended([process.exitcode for process in self._processes], self._log.read_text(errors="replace"))


def run_to_the_end(runs: Sequence[RecipeRun], folder: Path, *, num_processes: int = 2, **hooks: Callable) -> str:
    """Run recipes in several processes, which have to succeed; gives what they said."""
    ended = Processes(runs, folder, num_processes=num_processes, **hooks).wait()
    assert ended.codes == [0] * num_processes, ended.output
    return ended.output


def run_command_line(recipe: str, arguments: Sequence[str], cwd: Path) -> Ended:
    """Start a recipe by its arguments in a folder, as one process without torchrun, and wait for its end."""
    log = cwd / "output.txt"
    process = CONTEXT.Process(target=_run_arguments, args=(recipe, list(arguments), cwd, log))
    process.start()
    process.join()
    return Ended([process.exitcode], log.read_text(errors="replace"))


def _run_arguments(recipe: str, arguments: list[str], cwd: Path, log: Path) -> None:
    _begin(log)
    os.chdir(cwd)
    sys.argv = [recipe, *arguments]
    importlib.import_module(f"tfidf_tune.recipes.{recipe}").recipe_main()


def _begin(log: Path) -> None:
    """Compute on one thread, and have everything said in a file."""
    import torch

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
    }
    before(rank)
    for recipe, config, port in work:
        os.environ["MASTER_PORT"] = str(port)
        sys.argv = [recipe, "--config", config]
        importlib.import_module(f"tfidf_tune.recipes.{recipe}").recipe_main()
    after(rank)
