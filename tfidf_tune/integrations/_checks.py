"""Refuse settings of a Trainer that would be ignored, and models that cannot be trained with token weights."""

import inspect
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Trainer


def check_class(trainer: type) -> None:
    """Raise a ``ValueError`` for a trainer of TRL whose loss the class cannot weigh."""
    is_for_trl = any(base.__module__ == "tfidf_tune.integrations.trl" for base in trainer.__mro__)
    for base in trainer.__mro__:
        is_allowed = base.__name__ == "_BaseTrainer" or (is_for_trl and base.__name__ == "SFTTrainer")
        if base.__module__.startswith("trl.") and not is_allowed:
            raise ValueError(
                f"{trainer.__name__} is derived from TRL's {base.__name__}, which computes its loss by itself: token "
                "weights work in transformers.Trainer and, by tfidf_tune.integrations.trl.TokenWeightingSFTTrainer in "
                "place of TokenWeightingMixin, in SFTTrainer"
            )


def check_arguments(args: Any) -> None:
    """Raise a ``ValueError`` for settings that a weighted loss would ignore, before the Trainer is built."""
    if args is None:
        return
    if args.label_smoothing_factor != 0:
        raise ValueError(
            f"label_smoothing_factor is {args.label_smoothing_factor}, which the weighted loss does not support: "
            "set it to 0"
        )
    if getattr(args, "loss_type", "nll") != "nll":
        raise ValueError(f"loss_type is {args.loss_type!r}, which knows no weights: set it to 'nll'")


def check_trainer(trainer: Any, *, fused_head: bool) -> None:
    """Raise a ``ValueError`` if a Trainer, built already, has settings or a model that are not supported."""
    args, model = trainer.args, trainer.model
    if trainer.compute_loss_func is not None:
        raise ValueError("compute_loss_func is set, but the weighted loss takes its place: leave it out")
    liger = args.liger_kernel_config or {}
    if args.use_liger_kernel and (liger.get("fused_linear_cross_entropy", True) or liger.get("cross_entropy")):
        raise ValueError(
            "use_liger_kernel is set with Liger's own loss, which knows no weights: set liger_kernel_config to "
            '{"fused_linear_cross_entropy": False, "cross_entropy": False}'
        )
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    if parallelism is not None and (parallelism.cp_enabled or getattr(parallelism, "sp_enabled", False)):
        raise ValueError(
            "context or sequence parallelism is on: a process has only a part of each sequence, but weights need whole "
            "ones; set cp_size and sp_size to 1"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"one process would use {args.n_gpu} GPUs by DataParallel, which is not supported: start a process for "
            "each GPU with torchrun or accelerate launch, or set CUDA_VISIBLE_DEVICES to one"
        )
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder model, whose labels are not shifted: token weights are for "
            "causal language models"
        )
    if _output_layer(model) is None:
        raise ValueError(
            f"{type(model).__name__} has no output layer over a vocabulary: token weights are for causal language "
            "models, see AutoModelForCausalLM"
        )
    if fused_head:
        _check_fused_head(trainer, model)


def _check_fused_head(trainer: Trainer, model: Any) -> None:
    base, head = base_model(model), _output_layer(model)
    problem = None
    if "logits_to_keep" not in inspect.signature(base.forward).parameters:
        problem = f"{type(base).__name__} has no argument logits_to_keep"
    elif trainer.is_fsdp_enabled or isinstance(head.weight, DTensor):
        problem = "the output layer is sharded over processes"
    elif type(head) is not nn.Linear:  # with an adapter, or quantized
        problem = f"the output layer is a {type(head).__module__}.{type(head).__name__}, not a torch.nn.Linear"
    elif getattr(base.config.get_text_config(), "final_logit_softcapping", None) is not None:
        problem = f"{type(base).__name__} caps its logits"
    if problem is not None:
        raise ValueError(f"fused_head is True, but {problem}: set it to False")


def _output_layer(model: Any) -> Any:
    find = getattr(model, "get_output_embeddings", None)
    return None if find is None else find()


def base_model(model: Any) -> Any:
    """Return the model without the adapters of PEFT."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
