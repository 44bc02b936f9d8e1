"""The processes of a run, started by torchrun, and the shards of tensors that they hold."""

import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune.utils import get_world_size_and_rank

from tfidf_tune._printing import say
from tfidf_tune.models.linear import is_4bit

_STORE_TIMEOUT = timedelta(seconds=30)  # for a store that is gone; otherwise it answers


def started_processes() -> int:
    """Return how many processes torchrun started, even before they are connected; 1 without
    torchrun.
    """
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Return whether this process writes files and reports to the user: rank 0."""
    return int(os.environ.get("RANK", "0")) == 0


def print_once(text: str) -> None:
    """Print a line on stderr by rank 0."""
    if is_main_process():
        say(text, file=sys.stderr)


def connect_processes(device: torch.device) -> None:
    """Open the process group of torchrun's processes, or a group of this process only."""
    # gloo connects the hosts, NCCL the GPUs, so that hosts can agree without waiting for a device.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if started_processes() > 1:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def gather_objects(value: Any) -> list[Any]:
    """Collect a small object of each process on all of them, ordered by rank; also a barrier."""
    world_size, _ = get_world_size_and_rank()
    if world_size == 1:
        return [value]
    values = [None] * world_size
    dist.all_gather_object(values, value)
    return values


def gather_tensors(values: Tensor) -> Tensor:
    """Stack a tensor of each process on all: ``[...]`` of equal shape and dtype becomes
    ``[num_processes, ...]``.
    """
    world_size, _ = get_world_size_and_rank()
    if world_size == 1:
        return values.unsqueeze(0)
    gathered = values.new_empty(world_size * values.numel())
    # Its name before torch 2.12.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, values.flatten())
    return gathered.view(world_size, *values.shape)


def is_lost_process(error: RuntimeError) -> bool:
    """Return whether a collective failed because another process ended."""
    if not dist.is_initialized():
        return False
    words = ("gloo", "Connection closed", "Connection reset", "NCCL")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


def claim_error_report(message: str = "") -> bool:
    """Return True to the first process that asks to report this message, or any error if there is
    none.
    """
    try:
        if dist.is_initialized():
            store = _get_default_store()
        elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port = int(os.environ["MASTER_PORT"])
            store = TCPStore(
                os.environ["MASTER_ADDR"], port, is_master=False, timeout=_STORE_TIMEOUT
            )
        else:
            return True
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return int(store.add(f"tfidf_tune/error/{attempt}/{message}", 1)) == 1
    except RuntimeError:  # the store ended with the process that held it
        return True


@contextmanager
def main_process_first() -> Iterator[None]:
    """Let rank 0 run the block first: it fills caches for the others, which do not repeat its log
    messages.
    """
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


def plain_name(name: str) -> str:
    """Return the name of a parameter or module without the wrappers of activation checkpointing."""
    return name.replace(_CHECKPOINT_PREFIX, "")


def parameters_by_name(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters by their :func:`plain_name`."""
    return {plain_name(name): value for name, value in model.named_parameters()}


def assign_parameters(
    model: nn.Module, weights: Iterable[tuple[str, Tensor]], device: torch.device
) -> None:
    """Assign complete weights, the same on every process, to a model in place; each process keeps
    its shards.
    """
    parameters = parameters_by_name(model)
    state_dict = {}
    for name, value in weights:
        shard = shard_like(parameters[name], value)
        if shard.device.type != device.type:
            shard = shard.to(device)
        state_dict[name] = shard
    model.load_state_dict(state_dict, strict=False, assign=True)


def shard_like(parameter: Tensor, value: Tensor) -> Tensor:
    """Cut this process's shard of a parameter out of its complete weight, which is NF4 where the
    parameter is.
    """
    if not isinstance(parameter, DTensor):
        return value
    mesh = parameter.device_mesh
    placements = parameter.placements
    if not isinstance(value, NF4Tensor):
        return distribute_tensor(value, mesh, placements, src_data_rank=None)
    # NF4 supports few operations: a shard is copied into another tensor, as FSDP2 does when it
    # shards.
    chunk = torch.chunk(value, mesh.size())[mesh.get_local_rank()]
    shard = value.new_zeros(chunk.shape)
    shard.copy_(chunk)
    meta = TensorMeta(parameter.shape, tuple(parameter.stride()), parameter.dtype)
    spec = DTensorSpec(mesh, placements, tensor_meta=meta)
    return DTensor(shard, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def whole_tensor(parameter: Tensor) -> Tensor:
    """Gather a parameter, on the device of its shards and without gradient; every process has to
    call.
    """
    if not isinstance(parameter, DTensor):
        return parameter.detach()
    shard: Any = local_tensor(parameter)
    if not isinstance(shard, NF4Tensor):
        return DTensor.full_tensor(parameter).detach()
    parts, metadata = shard.fsdp_pre_all_gather(parameter.device_mesh)
    gathered = [gather_tensors(part).flatten(0, 1) for part in parts]
    whole: Tensor = shard.fsdp_post_all_gather(gathered, metadata, parameter.dtype)[0]
    return whole


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor that may be sharded."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def plain_tensors(tensor: Any, name: str = "") -> dict[str, Tensor]:
    """Return the tensors that hold the data, not copied, by name: a quantized tensor consists of
    several.
    """
    if is_4bit(tensor):
        state = tensor.quant_state  # 8-bit scales of blocks, and the scales of these
        return {
            name: tensor,
            f"{name}.absmax": state.absmax,
            f"{name}.nested_absmax": state.state2.absmax,
        }
    if not is_traceable_wrapper_subclass(tensor):
        return {name: tensor}
    tensors: dict[str, Tensor] = {}
    parts, _ = tensor.__tensor_flatten__()
    for part in parts:
        tensors |= plain_tensors(getattr(tensor, part), f"{name}.{part}")
    return tensors
