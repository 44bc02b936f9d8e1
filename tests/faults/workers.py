"""Recipes in processes of their own, started as torchrun starts them but forked, which spares each the imports."""

import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import TCPStore

_POLL_SECONDS = 0.005
_MONITOR_SECONDS = 0.1  # torchrun's interval of looking after its workers


@dataclass(frozen=True)
class Ended:
    """How the processes of a run ended.

    Attributes:
        codes (list[int]): exit codes in the order of ranks, negative ones are signals.
        output (str): what they wrote to stdout and stderr.
    """

    codes: list[int]
    output: str


def import_recipes() -> None:
    """Import here what recipes import when they get to it, so that no forked process has to."""
    for name in ("full_finetune", "lora_finetune"):
        importlib.import_module(f"tfidf_tune.recipes.{name}")
    importlib.import_module("peft")


class Workers:
    """The processes of one run.

    Args:
        recipe (str): ``full_finetune`` or ``lora_finetune``.
        arguments (Sequence[str]): of the recipe.
        log (Path): file that takes stdout and stderr of all.
        num_processes (int): as torchrun's ``nproc_per_node``. Default: 1.
        before (Callable[[int], None]): called in each process with its rank before the recipe. Default: nothing.
    """

    def __init__(
        self,
        recipe: str,
        arguments: Sequence[str],
        log: Path,
        *,
        num_processes: int = 1,
        before: Callable[[int], None] = lambda rank: None,
    ) -> None:
        self._log = log
        port = _free_port()
        self._agent = _fork_agent(port)
        self.pids = [
            _fork(recipe, list(arguments), log, rank, num_processes, port, before) for rank in range(num_processes)
        ]
        self._codes: dict[int, int] = {}

    def send(self, number: signal.Signals, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to some processes, or to all."""
        for rank in range(len(self.pids)) if ranks is None else ranks:
            if self._poll(rank) is None:
                os.kill(self.pids[rank], number)

    def is_running(self) -> bool:
        """Tell whether a process is still there."""
        return any(self._poll(rank) is None for rank in range(len(self.pids)))

    def wait(self, timeout: float = 120.0) -> Ended:
        """Wait for the end; as torchrun does, a process that fails takes the others with it.

        Raises:
            TimeoutError: If a process is still there in the end; it is killed.
        """
        deadline = time.monotonic() + timeout
        asked = False
        while self.is_running():
            if not asked and any(self._codes.values()):
                asked = True
                time.sleep(_MONITOR_SECONDS)
                self.send(signal.SIGTERM)
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"still running after {timeout} s; said:\n{self._log.read_text(errors='replace')}")
            time.sleep(_POLL_SECONDS)
        self.kill()
        return Ended([self._codes[rank] for rank in range(len(self.pids))], self._log.read_text(errors="replace"))

    def kill(self) -> None:
        """End what is still there, without a chance to say or save anything."""
        self.send(signal.SIGKILL)
        while self.is_running():
            time.sleep(_POLL_SECONDS)
        os.kill(self._agent, signal.SIGKILL)
        os.waitpid(self._agent, 0)

    def _poll(self, rank: int) -> int | None:
        if rank not in self._codes:
            pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
            if pid:
                self._codes[rank] = os.waitstatus_to_exitcode(status)
        return self._codes.get(rank)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
    return port


def _fork_agent(port: int) -> int:
    """Fork what torchrun's agent is to its workers: the keeper of their store, who outlives them."""
    pid = os.fork()
    if pid:
        return pid
    store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    while store is not None:
        signal.pause()
    os._exit(0)


def _fork(
    recipe: str,
    arguments: list[str],
    log: Path,
    rank: int,
    num_processes: int,
    port: int,
    before: Callable[[int], None],
) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        # What a test runner captures in this process is none of the run's output.
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_processes),
            "LOCAL_WORLD_SIZE": str(num_processes),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        sys.argv = [recipe, *arguments]
        before(rank)
        importlib.import_module(f"tfidf_tune.recipes.{recipe}").recipe_main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
