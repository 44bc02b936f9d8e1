"""Processes that tests start: a function on every rank of a gloo group, and commands that are killed."""

import gc
import multiprocessing
import os
import signal
import subprocess
import time
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


def on_every_rank(num_ranks: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call ``function(rank, *arguments)``, a function of a module, on each rank; results can be saved by torch."""
    torch.multiprocessing.start_processes(
        _in_group,
        (num_ranks, folder, function, arguments),
        nprocs=num_ranks,
        start_method=CONTEXT.get_start_method(),
    )
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(num_ranks)]


def _in_group(
    rank: int, num_ranks: int, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    gc.freeze()  # imports
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(hours=1),  # protects only from a hang: a rank that waits for another in vain
    )
    torch.save(function(rank, *arguments), folder / f"rank{rank}.pt")
    dist.destroy_process_group()


def kill_when(file: Path, command: list[str]) -> None:
    """Start a command, and kill it and its children by SIGKILL as soon as a file exists."""
    job = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    while not file.exists() and job.poll() is None:
        time.sleep(0.005)
    assert job.poll() is None
    os.killpg(job.pid, signal.SIGKILL)
    job.communicate()
