"""The processes of a run, started by torchrun."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.distributed_c10d import _get_default_store
from torchtune.utils import get_world_size_and_rank

Value = TypeVar("Value")
_STORE_TIMEOUT = timedelta(seconds=30)  # for a store that is gone; otherwise it answers


def started_processes() -> int:
    """Return how many processes torchrun started, even before they are connected; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Return whether this process writes files and reports to the user: rank 0."""
    return int(os.environ.get("RANK", "0")) == 0


def connect_processes(device: torch.device) -> None:
    """Open the process group of torchrun's processes, or one of this process only.

    gloo connects the hosts, NCCL the GPUs, so that hosts can agree without waiting for a device.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if started_processes() > 1:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def gather_objects(value: Value) -> list[Value]:
    """Collect a small object of each process on all of them, ordered by rank; also a barrier."""
    world_size, _ = get_world_size_and_rank()
    if world_size == 1:
        return [value]
    values: list[Value | None] = [None] * world_size
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def gather_tensors(values: Tensor) -> Tensor:
    """Stack a tensor of each process on all: ``[...]`` of equal shape and dtype becomes ``[num_processes, ...]``."""
    world_size, _ = get_world_size_and_rank()
    if world_size == 1:
        return values.unsqueeze(0)
    gathered = values.new_empty(world_size * values.numel())
    dist.all_gather_single(gathered, values.flatten())
    return gathered.view(world_size, *values.shape)


def is_lost_process(error: RuntimeError) -> bool:
    """Return whether a collective failed because another process ended."""
    return dist.is_initialized() and (
        isinstance(error, dist.DistError)
        or any(word in str(error) for word in ("gloo", "Connection closed", "Connection reset", "NCCL"))
    )


def claim_error_report(message: str = "") -> bool:
    """Return True to the first process that asks to report this message, or any error if there is none."""
    try:
        if dist.is_initialized():
            store = _get_default_store()
        elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port = int(os.environ["MASTER_PORT"])
            store = TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, timeout=_STORE_TIMEOUT)
        else:
            return True
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return int(store.add(f"tfidf_tune/error/{attempt}/{message}", 1)) == 1
    except RuntimeError:  # the store ended with the process that held it
        return True


@contextmanager
def main_process_first() -> Iterator[None]:
    """Let rank 0 run the block first: it fills caches for the others, which do not repeat its log messages."""
    if is_main_process():
        yield
        gather_objects(None)
        return
    gather_objects(None)
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)
