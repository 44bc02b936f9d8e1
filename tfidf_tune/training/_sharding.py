"""Sharding by FSDP2: each process holds a shard of weights, gradients and optimizer state."""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torchao.dtypes.nf4tensor import NF4Tensor

from tfidf_tune.models import NF4_MULTIPLE, is_4bit, scales_of_4bit
from tfidf_tune.training._components import build_optimizer
from tfidf_tune.training._config import FinetuneConfig, mixed_precision_dtype
from tfidf_tune.training._distributed import gather_tensors
from tfidf_tune.training._errors import SetupError, first_line
from tfidf_tune.training._run import Run


def shard_model(model: nn.Module, cfg: FinetuneConfig, run: Run) -> None:
    """Shard a model layer by layer over the processes of the run; a single process only if the config asks for it.

    Gradients are summed over the processes, not averaged: each process's loss is its share of the total. Embeddings,
    final norm and output projection stay gathered from the forward pass to the end of the backward pass, because the
    loss computes with the projection's weight outside of the model.

    Args:
        model (nn.Module): on the meta device, with ``requires_grad`` as in training, checkpointed and compiled; changed
            in place.
        cfg (FinetuneConfig): the checked config: its keys ``fsdp_*``.
        run (Run): gives the device.

    Raises:
        SetupError: If an NF4 weight cannot be cut into this number of shards, is of bitsandbytes, or the optimizer
            cannot update shards.
    """
    if not dist.is_initialized():
        return
    mesh = init_device_mesh(run.device.type, (dist.get_world_size(),))
    _check_shards_of_nf4(model, mesh.size())
    _check_optimizer(cfg, mesh)
    offload = CPUOffloadPolicy(pin_memory=run.device.type == "cuda") if cfg.fsdp_cpu_offload else OffloadPolicy()
    precision = MixedPrecisionPolicy(
        param_dtype=mixed_precision_dtype(cfg.fsdp_param_dtype),
        reduce_dtype=mixed_precision_dtype(cfg.fsdp_reduce_dtype),
    )
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": precision, "offload_policy": offload}
    layers: Any = model.layers
    for layer in reversed(list(layers)):
        fully_shard(layer, reshard_after_forward=cfg.fsdp_reshard_after_forward, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other


def _check_optimizer(cfg: FinetuneConfig, mesh: DeviceMesh) -> None:
    """Refuse an optimizer of PyTorch that cannot update shards, tried on a dummy; others may take long to compile."""
    shard = nn.Parameter(distribute_tensor(torch.ones(mesh.size(), 8), mesh, [Shard(0)], src_data_rank=None))
    optimizer, _ = build_optimizer(cfg, [shard], total_steps=1)
    if not type(optimizer).__module__.startswith("torch.optim."):
        return
    shard.grad = torch.ones_like(shard)
    try:
        optimizer.step()
    except RuntimeError as error:
        remedy = "set optimizer.fused=False" if cfg.optimizer.get("fused") else "take, for example, torch.optim.AdamW"
        raise SetupError(
            f"config: optimizer: {cfg.optimizer['_component_']} cannot update parameters that FSDP2 has sharded "
            f"({first_line(error)}): {remedy}"
        ) from error


def plain_name(name: str) -> str:
    """Return the name of a parameter or module without the wrappers of activation checkpointing."""
    return name.replace(_CHECKPOINT_PREFIX, "")


def parameters_by_name(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters by their :func:`plain_name`."""
    return {plain_name(name): value for name, value in model.named_parameters()}


def assign_parameters(model: nn.Module, weights: Iterable[tuple[str, Tensor]], device: torch.device) -> None:
    """Assign complete weights, the same on every process, to a model in place; each process keeps its shards."""
    parameters = parameters_by_name(model)
    shards = ((name, shard_like(parameters[name], value)) for name, value in weights)
    state_dict = {name: shard if shard.device.type == device.type else shard.to(device) for name, shard in shards}
    model.load_state_dict(state_dict, strict=False, assign=True)


def shard_like(parameter: Tensor, value: Tensor) -> Tensor:
    """Cut this process's shard of a parameter out of its complete weight, which is NF4 where the parameter is."""
    if not isinstance(parameter, DTensor):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    if not isinstance(value, NF4Tensor):
        return distribute_tensor(value, mesh, placements, src_data_rank=None)
    # NF4 supports few operations: a shard is copied into a tensor of its own, as FSDP2 does when it shards.
    chunk = torch.chunk(value, mesh.size())[mesh.get_local_rank()]
    shard = value.new_zeros(chunk.shape)
    shard.copy_(chunk)
    meta = TensorMeta(parameter.shape, tuple(parameter.stride()), parameter.dtype)
    spec = DTensorSpec(mesh, placements, tensor_meta=meta)
    return DTensor(shard, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def whole_tensor(parameter: Tensor) -> Tensor:
    """Gather a parameter, on the device of its shards and without gradient; every process has to call."""
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


def plain_tensors(tensor: Tensor, name: str = "") -> dict[str, Tensor]:
    """Return the tensors that hold the data, not copied, by name: a quantized tensor consists of several."""
    if is_4bit(tensor):
        return {name: tensor} | {f"{name}.{key}": value for key, value in scales_of_4bit(tensor).items()}
    if not is_traceable_wrapper_subclass(tensor):
        return {name: tensor}
    parts, _ = tensor.__tensor_flatten__()
    return {key: t for part in parts for key, t in plain_tensors(getattr(tensor, part), f"{name}.{part}").items()}


def _check_shards_of_nf4(model: nn.Module, num_shards: int) -> None:
    for name, parameter in model.named_parameters():
        if is_4bit(parameter):
            raise SetupError(
                f"{name} is a 4-bit weight of bitsandbytes, which is not sharded: use one process without torchrun, or "
                "set model.quantize_base=False"
            )
        if isinstance(parameter, NF4Tensor) and (
            parameter.shape[0] % num_shards or math.prod(parameter.shape) % (NF4_MULTIPLE * num_shards)
        ):
            raise SetupError(
                f"{name}, an NF4 weight of {' x '.join(map(str, parameter.shape))}, cannot be cut into {num_shards} "
                f"shards of whole blocks ({NF4_MULTIPLE} weights): use another number of processes, or set "
                "model.quantize_base=False"
            )
