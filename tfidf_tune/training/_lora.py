"""What a model's LoRA layers say about themselves."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchtune.modules.peft import LoRALinear, get_adapter_params, set_trainable_params


@dataclass(frozen=True)
class LoRASettings:
    """The settings that all LoRA layers of a model share, and torchtune's names of the adapted linear layers."""

    rank: int
    alpha: float
    dropout: float
    module_names: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module) -> "LoRASettings | None":
        """Read the settings off a model; None if it has no LoRA layers.

        Raises:
            ValueError: If the model has adapters other than LoRA, or LoRA layers that differ.
        """
        adapters = {name: module for name, module in model.named_modules() if hasattr(module, "adapter_params")}
        if not adapters:
            return None
        others = {type(module).__name__ for module in adapters.values() if not isinstance(module, LoRALinear)}
        if others:
            raise ValueError(f"the model has adapters of the kind {', '.join(sorted(others))}; supported is LoRA alone")
        settings = {(m.rank, m.alpha, float(getattr(m.dropout, "p", 0.0))) for m in adapters.values()}
        if len(settings) > 1:
            raise ValueError(f"LoRA layers differ in (rank, alpha, dropout): {sorted(settings)}; give all the same")
        (rank, alpha, dropout) = settings.pop()
        if rank < 1:
            raise ValueError(f"lora_rank is {rank}, it has to be at least 1")
        return cls(rank, alpha, dropout, tuple(sorted({name.rsplit(".", 1)[-1] for name in adapters})))

    @classmethod
    def require(cls, model: nn.Module) -> "LoRASettings":
        """Read the settings off a model that must have LoRA.

        Raises:
            ValueError: If it has none.
        """
        settings = cls.of(model)
        if settings is None:
            raise ValueError(
                "the model of the config has no LoRA layers: name a LoRA builder (for example "
                "torchtune.models.llama2.lora_llama2_7b) in `model`, or use the recipe full_finetune"
            )
        return settings


def require_no_lora(model: nn.Module) -> None:
    """Make sure that full fine-tuning is given a plain model.

    Raises:
        ValueError: If the model has LoRA layers.
    """
    if LoRASettings.of(model) is not None:
        raise ValueError(
            "the model of the config has LoRA layers: name a plain builder (for example "
            "torchtune.models.llama2.llama2_7b) in `model`, or use the recipe lora_finetune"
        )


def initialize_adapters(model: nn.Module, device: torch.device) -> None:
    """Give LoRA layers on the meta device their initial weights: A random, B zero.

    Args:
        model (nn.Module): model with LoRA, its adapters on the meta device.
        device (torch.device): where they go.
    """
    layer: Any
    for layer in model.modules():
        if isinstance(layer, LoRALinear):
            layer.to_empty(device=device)
            layer.initialize_parameters()


def train_adapters_only(model: nn.Module) -> None:
    """Freeze everything but the adapters."""
    set_trainable_params(model, get_adapter_params(model))
