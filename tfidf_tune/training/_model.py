"""The model: built without memory, prepared for training, sharded by FSDP2, given weights."""

import math
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data import Dataset
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune import training
from torchtune.modules import TiedLinear
from torchtune.training import set_default_dtype

from tfidf_tune._config import FinetuneConfig
from tfidf_tune.data import is_packed
from tfidf_tune.loss import HeadInput, WeightedCrossEntropyLoss
from tfidf_tune.models import HFCausalLM, LoRASettings, is_adapter
from tfidf_tune.models.linear import NF4_MULTIPLE, is_4bit
from tfidf_tune.probe import evaluating
from tfidf_tune.training._checkpointer import HFCheckpointer
from tfidf_tune.training._distributed import assign_parameters, parameters_by_name, print_once
from tfidf_tune.training._errors import SetupError, TrainingError, setup_errors
from tfidf_tune.training._run import Run
from tfidf_tune.training.components import instantiate, signature_of

_UNSHARDED = "use another number of processes, or set model.quantize_base=False"
FSDP_DTYPES = {None: None, "bf16": torch.bfloat16, "fp32": torch.float32}


def build_model(
    cfg: FinetuneConfig, run: Run, checkpointer: HFCheckpointer | None = None
) -> nn.Module:
    """Build the model of the config on the meta device, where it takes neither memory nor time.

    A builder with an argument ``hf_config`` gets the config of the checkpoint.

    Raises:
        SetupError: If it cannot be built from these settings.
    """
    given = {}
    if "hf_config" in signature_of("model", cfg.model["_component_"]).parameters:
        given["hf_config"] = getattr(checkpointer, "transformers_config", None)
        if given["hf_config"] is None:
            raise SetupError(
                "config: model: it needs tfidf_tune.training.HFCheckpointer as the checkpointer"
            )
    with set_default_dtype(run.dtype), torch.device("meta"):
        model: nn.Module = instantiate(cfg, "model", **given)
    if "lora_attn_modules" in cfg.model:
        _check_attention_layers(model.get_submodule("layers.0.attn"), cfg.model.lora_attn_modules)
    if hasattr(model, "implementation"):
        print_once(f"model: {model.implementation}")
    if run.dtype is torch.float16:
        if any(isinstance(parameter, NF4Tensor) for parameter in model.parameters()):
            raise SetupError(
                "config: model: NF4 has no fp16: set dtype=bf16 or model.quantize_base=False"
            )
        for name, parameter in model.named_parameters():
            if is_adapter(name):  # scaled gradients need float32
                parameter.data = parameter.data.float()
    return model


def _check_attention_layers(attention: nn.Module, names: Sequence[str]) -> None:
    """Refuse names of layers that an attention lacks, which torchtune would ignore."""
    children = attention.named_children()
    possible = sorted(name for name, module in children if hasattr(module, "weight"))
    for name in names:
        if name not in possible:
            raise SetupError(
                f"config: model: lora_attn_modules names '{name}', not of the model's attention; "
                f"possible are {', '.join(possible)}"
            )


def require_no_lora(model: nn.Module) -> None:
    """Refuse a model with LoRA layers for full fine-tuning, by a ValueError."""
    if LoRASettings.of(model) is not None:
        raise ValueError(
            "the model has LoRA layers: name a plain builder, or use the recipe lora_finetune"
        )


def train_adapters_only(model: nn.Module) -> None:
    """Freeze everything but the adapters."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def shard_model(model: nn.Module, cfg: FinetuneConfig, run: Run) -> None:
    """Shard a model layer by layer over the processes of the run; a single process only if the
    config asks for it.

    Gradients are summed over the processes, not averaged: each process's loss is its share of the
    total. Embeddings, final norm and output projection stay gathered from the forward pass to the
    end of the backward pass, because the loss computes with the projection's weight outside of the
    model. The model is on the meta device, with ``requires_grad`` as in training, checkpointed and
    compiled.

    Raises:
        SetupError: If an NF4 weight cannot be cut into this number of shards, or is of
            bitsandbytes.
    """
    if not dist.is_initialized():
        return
    mesh = init_device_mesh(run.device.type, (dist.get_world_size(),))
    _check_shards_of_nf4(model, mesh.size())
    offload = OffloadPolicy()
    if cfg.fsdp_cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=run.device.type == "cuda")
    precision = MixedPrecisionPolicy(
        FSDP_DTYPES[cfg.fsdp_param_dtype], FSDP_DTYPES[cfg.fsdp_reduce_dtype]
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


def _check_shards_of_nf4(model: nn.Module, num_shards: int) -> None:
    for name, parameter in model.named_parameters():
        if is_4bit(parameter):
            raise SetupError(f"{name} is of bitsandbytes, which is not sharded: {_UNSHARDED}")
        if not isinstance(parameter, NF4Tensor):
            continue
        # A shard has whole rows, and whole blocks of weights with one scale.
        num_weights = math.prod(parameter.shape)
        if parameter.shape[0] % num_shards or num_weights % (NF4_MULTIPLE * num_shards):
            raise SetupError(
                f"NF4 weight {name}, of {tuple(parameter.shape)}, blocks of {NF4_MULTIPLE}, cannot "
                f"be cut into {num_shards} shards: {_UNSHARDED}"
            )


def load_model(
    model: nn.Module, checkpointer: HFCheckpointer, run: Run, dataset: Dataset[Any] | None = None
) -> None:
    """Load the checkpoint's weights and initialize adapters of a model of :func:`build_model`,
    perhaps sharded.

    Raises:
        SetupError: If a weight cannot be trained, the model is not causal, or the data set is
            packed and the model cannot keep the documents of a row apart.
    """
    checkpointer.load_weights(
        model, device=run.device, dtype=run.dtype, storage_device=run.storage_device
    )
    # Adapters depend only on the seed, and are the same on every process.
    with torch.random.fork_rng([run.device] if run.device.type == "cuda" else []):
        torch.manual_seed(run.seed)
        assign_parameters(model, _initial_adapters(model, run.device), run.storage_device)
    _build_rope_tables(model, run.device)
    # In torchtune's models no prediction depends on later tokens or other documents.
    if isinstance(model, HFCausalLM):
        with evaluating(model), setup_errors("config: model"):
            model.check_causality()
            if dataset is not None and is_packed(dataset):
                model.check_packing()
    training.validate_no_params_on_meta_device(model)


def prepare_model(model: nn.Module, loss: WeightedCrossEntropyLoss, cfg: FinetuneConfig) -> None:
    """Set up the head, ``torch.compile`` and activation checkpointing as the config
    asks; in place.
    """
    refusal = prepare_head(model, loss)
    if refusal:
        print_once(
            f"head '{loss.head}' cannot be used because {refusal}; logits are computed in "
            f"{loss.num_output_chunks} chunks"
        )
    model.get_submodule("tok_embeddings").register_forward_pre_hook(_check_token_ids)
    layers: Any = model.layers
    if cfg.compile:
        for layer in layers:
            layer.compile(backend=os.environ.get("TORCH_COMPILE_BACKEND", "inductor"))
        loss.compile_parts()
    if cfg.enable_activation_checkpointing:
        training.set_activation_checkpointing(
            model, auto_wrap_policy={type(layer) for layer in layers}
        )


def prepare_head(model: nn.Module, loss: WeightedCrossEntropyLoss) -> str | None:
    """Make a model return what the loss needs: a :class:`~tfidf_tune.loss.HeadInput`, or chunks of
    logits.

    The model is changed in place, its weights and their names are not. What is returned says why
    the model returns logits although the loss has another head; None if it returns what is set.
    """
    refusal = None if loss.head == "chunked" else _refusal(model)
    if loss.head == "chunked" or refusal:
        vars(model).pop("chunked_output", None)  # of an earlier call
        model.set_num_output_chunks(loss.num_output_chunks)  # type: ignore[operator]
        return refusal
    model.set_num_output_chunks(1)  # type: ignore[operator]
    # The head's weight is read inside the model's forward pass, where FSDP2 has it unsharded, and
    # used after it, where it still is: by default the root's own parameters are not sharded again
    # before the backward pass.
    model.chunked_output = partial(_head_input, model.output)  # type: ignore[assignment]
    return None


def _head_input(head: Any, hidden: Tensor) -> HeadInput:
    if isinstance(head, TiedLinear):
        weight = head.tied_module.weight
        bias = None
    else:
        weight = head.weight
        bias = head.bias
    # Under autocast norms give float32, which the output projection would cast.
    return HeadInput(hidden.to(weight.dtype), weight, bias)


def _refusal(model: nn.Module) -> str | None:
    """Return why logits of the model's head cannot be computed from just a weight and a bias, if
    so.
    """
    head: Any = getattr(model, "output", None) if hasattr(model, "chunked_output") else None
    if head is None:
        return f"a {type(getattr(model, 'hf', model)).__name__} computes its logits itself"
    if type(head) not in (nn.Linear, TiedLinear):
        return f"the output projection is a {type(head).__name__}"
    linear = head.tied_module if isinstance(head, TiedLinear) else head
    if is_traceable_wrapper_subclass(linear.weight) and not isinstance(linear.weight, DTensor):
        return f"the output projection's weight is a {type(linear.weight).__name__}"
    if isinstance(head, nn.Linear) and (head._forward_hooks or head._forward_pre_hooks):
        return "the output projection has hooks"
    return None


def _initial_adapters(model: nn.Module, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield names and whole initial weights of LoRA layers, as torchtune and PEFT set them: A
    random, B zero.
    """
    for name, parameter in parameters_by_name(model).items():
        if is_adapter(name):
            weight = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
            if ".lora_a." in name.lower():
                nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
            yield name, weight


def _build_rope_tables(model: nn.Module, device: torch.device) -> None:
    """Build the tables of rotary embeddings, which no checkpoint has."""
    module: Any
    for module in model.modules():
        if hasattr(module, "rope_init"):
            with device:
                module.rope_init()
            module.to(device)


def _check_token_ids(embeddings: Any, inputs: tuple[Tensor]) -> None:
    """Refuse an id without an embedding; on a GPU this would wait for the device, so its own error
    has to do.
    """
    (tokens,) = inputs
    if tokens.device.type != "cpu":
        return
    unknown = tokens[(tokens < 0) | (tokens >= embeddings.num_embeddings)]
    if len(unknown):
        raise TrainingError(
            f"the data set has the token id {int(unknown[0])}, the model embeddings for the ids 0 "
            f"to {embeddings.num_embeddings - 1}: use the model's tokenizer"
        )
