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
    for name, neutral in (("label_smoothing_factor", 0), ("loss_type", "nll")):
        value = getattr(args, name, neutral)
        if value != neutral:
            raise ValueError(f"{name} is {value!r}, which knows no weights: set it to {neutral!r}")


def check_trainer(trainer: Any, *, fused_head: bool) -> None:
    """Raise a ``ValueError`` if a Trainer, built already, has settings or a model that are not supported."""
    args, model, model_name = trainer.args, trainer.model, type(trainer.model).__name__
    liger = args.liger_kernel_config or {}
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    problem = None
    if trainer.compute_loss_func is not None:
        problem = "compute_loss_func is set, but the weighted loss takes its place: leave it out"
    elif args.use_liger_kernel and (liger.get("fused_linear_cross_entropy", True) or liger.get("cross_entropy")):
        problem = (
            "use_liger_kernel is set with Liger's own loss, which knows no weights: set liger_kernel_config to "
            '{"fused_linear_cross_entropy": False, "cross_entropy": False}'
        )
    elif parallelism is not None and (parallelism.cp_enabled or getattr(parallelism, "sp_enabled", False)):
        problem = (
            "context or sequence parallelism is on: a process has only a part of each sequence, but weights need whole "
            "ones; set cp_size and sp_size to 1"
        )
    elif args.n_gpu > 1:
        problem = (
            f"one process would use {args.n_gpu} GPUs by DataParallel, which is not supported: start a process for "
            "each GPU with torchrun or accelerate launch, or set CUDA_VISIBLE_DEVICES to one"
        )
    elif getattr(getattr(model, "config", None), "is_encoder_decoder", False) or _output_layer(model) is None:
        problem = (
            f"{model_name} is an encoder-decoder model or has no output layer over a vocabulary: token weights are for "
            "causal language models, see AutoModelForCausalLM"
        )
    elif fused_head and (reason := _why_not_fused(trainer, model)):
        problem = f"fused_head is True, but {reason}: set it to False"
    if problem is not None:
        raise ValueError(problem)


def _why_not_fused(trainer: Trainer, model: Any) -> str | None:
    base, head = base_model(model), _output_layer(model)
    if "logits_to_keep" not in inspect.signature(base.forward).parameters:
        return f"{type(base).__name__} has no argument logits_to_keep"
    if trainer.is_fsdp_enabled or isinstance(head.weight, DTensor):
        return "the output layer is sharded over processes"
    if type(head) is not nn.Linear:  # with an adapter, or quantized
        return f"the output layer is a {type(head).__module__}.{type(head).__name__}, not a torch.nn.Linear"
    if getattr(base.config.get_text_config(), "final_logit_softcapping", None) is not None:
        return f"{type(base).__name__} caps its logits"
    return None


def _output_layer(model: Any) -> Any:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def base_model(model: Any) -> Any:
    """Return the model without the adapters of PEFT."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
