"""The processes of a run: started by torchrun, each with a shard of the model and batches of its own."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import _get_default_store
from torchtune.utils import get_world_size_and_rank

Value = TypeVar("Value")


def started_processes() -> int:
    """Tell how many processes torchrun started, which is known before they are connected; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Tell whether this is the process that writes files and speaks to the user: rank 0."""
    return int(os.environ.get("RANK", "0")) == 0


def connect_processes(device: torch.device) -> None:
    """Open the process group of torchrun's processes, or one of this process alone.

    Host and device have a backend each: gloo, and NCCL on CUDA. What only the host knows is then agreed on without
    waiting for the device.

    Args:
        device (torch.device): of the model.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if started_processes() > 1:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def gather_objects(value: Value) -> list[Value]:
    """Collect a small object from each process on all of them, in the order of ranks; a barrier as well."""
    world_size, _ = get_world_size_and_rank()
    if world_size == 1:
        return [value]
    values: list[Value | None] = [None] * world_size
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def gather_tensors(values: Tensor) -> Tensor:
    """Stack a tensor of each process on all of them.

    Args:
        values (Tensor): ``[...]``, of one shape and dtype everywhere; on the host or on the model's device.

    Returns:
        Tensor: ``[num_processes, ...]``.
    """
    world_size, _ = get_world_size_and_rank()
    if world_size == 1:
        return values.unsqueeze(0)
    gathered = values.new_empty(world_size * values.numel())
    dist.all_gather_single(gathered, values.flatten())
    return gathered.view(world_size, *values.shape)


def is_lost_process(error: RuntimeError) -> bool:
    """Tell whether a collective failed because another process is gone."""
    return dist.is_initialized() and (
        isinstance(error, dist.DistError)
        or any(word in str(error) for word in ("gloo", "Connection closed", "Connection reset", "NCCL"))
    )


def is_first_to_speak() -> bool:
    """Tell whether no process of the run has asked this before, so that what all notice is said once."""
    if not dist.is_initialized():
        return is_main_process()
    try:
        return int(_get_default_store().add("is_first_to_speak", 1)) == 1
    except RuntimeError:  # the store went with the process that held it
        return True


@contextmanager
def main_process_first() -> Iterator[None]:
    """Let rank 0 do the block before the others: it fills a cache that they find, and logs what there is to say."""
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
