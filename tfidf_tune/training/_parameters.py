"""A model's parameters, whole or sharded, by the names that they have in any form of the model."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torchao.dtypes.nf4tensor import NF4Tensor

from tfidf_tune.training._distributed import gather_tensors


def plain_name(name: str) -> str:
    """The name that a parameter or module has without activation checkpointing, which wraps layers."""
    return name.replace(_CHECKPOINT_PREFIX, "")


def parameters_by_name(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by their :func:`plain_name`."""
    return {plain_name(name): value for name, value in model.named_parameters()}


def assign_parameters(model: nn.Module, weights: Iterable[tuple[str, Tensor]], device: torch.device) -> None:
    """Give parameters of a model, perhaps sharded, their whole weights; each process keeps its shards.

    Args:
        model (nn.Module): torchtune model, perhaps on the meta device; changed in place.
        weights (Iterable[tuple[str, Tensor]]): names and whole weights, the same on every process.
        device (torch.device): where what is kept goes.
    """
    parameters = parameters_by_name(model)
    shards = ((name, shard_like(parameters[name], value)) for name, value in weights)
    state_dict = {name: shard if shard.device.type == device.type else shard.to(device) for name, shard in shards}
    model.load_state_dict(state_dict, strict=False, assign=True)


def shard_like(parameter: Tensor, value: Tensor) -> Tensor:
    """Cut a whole weight to what this process holds of a parameter.

    Args:
        parameter (Tensor): the parameter, perhaps sharded, perhaps on the meta device.
        value (Tensor): the whole weight, NF4 where the parameter is; the same on every process.

    Returns:
        Tensor: ``value`` itself where the parameter is not sharded.
    """
    if not isinstance(parameter, DTensor):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    if not isinstance(value, NF4Tensor):
        return distribute_tensor(value, mesh, placements, src_data_rank=None)
    # NF4 knows few operations: a shard is copied into a tensor of its own, as FSDP2 does when it shards.
    chunk = torch.chunk(value, mesh.size())[mesh.get_local_rank()]
    shard = value.new_zeros(chunk.shape)
    shard.copy_(chunk)
    meta = TensorMeta(parameter.shape, tuple(parameter.stride()), parameter.dtype)
    spec = DTensorSpec(mesh, placements, tensor_meta=meta)
    return DTensor(shard, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def whole_tensor(parameter: Tensor) -> Tensor:
    """Gather a parameter that may be sharded; every process of the run has to ask.

    Args:
        parameter (Tensor): of a model in training.

    Returns:
        Tensor: the whole parameter, on the device of its shards, without gradient.
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
    """What this process holds of a tensor that may be sharded."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
