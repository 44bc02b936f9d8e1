"""FSDP2: each process holds a shard of every parameter, its gradient and its optimizer state."""

import math
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune.training import get_shard_conditions

from tfidf_tune.training._config import FinetuneConfig, mixed_precision_dtype
from tfidf_tune.training._errors import SetupError
from tfidf_tune.training._run import Run

# A shard of an NF4 weight is whole blocks of 64 weights, whose scalers come in blocks of 256: torchao's defaults.
_NF4_MULTIPLE = 64 * 256


def shard_model(model: nn.Module, cfg: FinetuneConfig, run: Run) -> None:
    """Shard a model layer by layer over the processes of the run; one process alone shards only if it is asked to.

    Gradients are summed over the processes, not averaged: each process's loss is its share of the whole.

    Embeddings, final norm and output projection are gathered from the forward pass to the end of the backward pass:
    the loss computes with the projection's weight outside of the model.

    Args:
        model (nn.Module): torchtune model on the meta device, with ``requires_grad`` as in training, checkpointed and
            compiled; changed in place.
        cfg (FinetuneConfig): the checked config: its keys ``fsdp_*``.
        run (Run): gives the device.

    Raises:
        SetupError: If an NF4 weight cannot be cut into so many shards.
    """
    if not dist.is_initialized():
        return
    mesh = init_device_mesh(run.device.type, (dist.get_world_size(),))
    _check_shards_of_nf4(model, mesh.size())
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=mixed_precision_dtype(cfg.fsdp_param_dtype),
            reduce_dtype=mixed_precision_dtype(cfg.fsdp_reduce_dtype),
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=run.device.type == "cuda")
        if cfg.fsdp_cpu_offload
        else OffloadPolicy(),
    }
    for name, module in reversed(list(model.named_modules())):
        if get_shard_conditions(name, module):
            fully_shard(module, reshard_after_forward=cfg.fsdp_reshard_after_forward, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other


def _check_shards_of_nf4(model: nn.Module, num_shards: int) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, NF4Tensor) and (
            parameter.shape[0] % num_shards or math.prod(parameter.shape) % (_NF4_MULTIPLE * num_shards)
        ):
            raise SetupError(
                f"{name}, an NF4 weight of {' x '.join(map(str, parameter.shape))}, cannot be cut into {num_shards} "
                f"shards of whole blocks ({_NF4_MULTIPLE} weights): start another number of processes, or set "
                "model.quantize_base=False"
            )
