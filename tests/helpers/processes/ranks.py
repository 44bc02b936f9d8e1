"""Processes that tests start: a function on every rank of a gloo group, and forks
that are killed.
"""

import gc
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# A fork server with all imports, which take seconds.
CONTEXT = multiprocessing.get_context("forkserver")
_RECIPES = ["tfidf_tune.recipes.full_finetune", "tfidf_tune.recipes.lora_finetune"]
# What the recipes import when they use it.
_LATER = ["peft", "scipy.io", "torchtune.training.metric_logging", "transformers.trainer_utils"]
CONTEXT.set_forkserver_preload([*_RECIPES, *_LATER])


def on_every_rank(
    num_ranks: int, folder: Path, function: Callable[..., Any], *arguments: Any
) -> list[Any]:
    """Call ``function(rank, *arguments)``, a function of a module, on each rank; results can be
    saved by torch.
    """
    torch.multiprocessing.start_processes(
        _in_group,
        (num_ranks, folder, function, arguments),
        nprocs=num_ranks,
        start_method=CONTEXT.get_start_method(),
    )
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(num_ranks)]


def _in_group(
    rank: int,
    num_ranks: int,
    folder: Path,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    gc.freeze()  # imports
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=num_ranks,
        # Protects only from a hang: a rank that waits for another in vain.
        timeout=timedelta(hours=1),
    )
    torch.save(function(rank, *arguments), folder / f"rank{rank}.pt")
    dist.destroy_process_group()


def kill_when_opening(file: Path, function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function in a fork of this process, which is killed by SIGKILL when it
    opens a file.
    """
    assert kill_when(
        lambda event, given: event == "open" and str(given[0]) == str(file), function, *arguments
    )


def kill_when(
    is_moment: Callable[[str, Any], bool], function: Callable[..., Any], *arguments: Any
) -> bool:
    """Call a function in a fork of this process, which is killed by SIGKILL before an event of
    ``sys.audit``.

    Returns whether it was killed; else it has ended without an error.
    """

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if is_moment(event, given):
            os.kill(os.getpid(), signal.SIGKILL)

    def run() -> None:
        sys.addaudithook(hook)
        function(*arguments)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0
