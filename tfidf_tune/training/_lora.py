"""LoRA layers of a model: their settings, targets and initial weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchtune.modules.peft import LoRALinear, get_adapter_params, set_trainable_params
from torchtune.modules.peft.lora import _lora_a_init_params, _lora_b_init_params

from tfidf_tune.training._sharding import plain_name


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
            raise ValueError(f"the model has adapters of the class {', '.join(sorted(others))}; only LoRA is supported")
        settings = {(m.rank, m.alpha, float(getattr(m.dropout, "p", 0.0))) for m in adapters.values()}
        if len(settings) > 1:
            raise ValueError(f"LoRA layers differ in (rank, alpha, dropout): {sorted(settings)}; give all the same")
        rank, alpha, dropout = settings.pop()
        if rank < 1:
            raise ValueError(f"lora_rank is {rank}, it has to be at least 1")
        return cls(rank, alpha, dropout, tuple(sorted({name.rsplit(".", 1)[-1] for name in adapters})))

    @classmethod
    def require(cls, model: nn.Module) -> "LoRASettings":
        """Read the settings off a model, as :meth:`of`; a model without LoRA layers is a ValueError."""
        settings = cls.of(model)
        if settings is None:
            raise ValueError(
                "the model of the config has no LoRA layers: name a LoRA builder (for example "
                "torchtune.models.llama2.lora_llama2_7b) in `model`, or use the recipe full_finetune"
            )
        return settings


def require_no_lora(model: nn.Module) -> None:
    """Refuse a model with LoRA layers for full fine-tuning, by a ValueError."""
    if LoRASettings.of(model) is not None:
        raise ValueError(
            "the model of the config has LoRA layers: name a plain builder (for example "
            "torchtune.models.llama2.llama2_7b) in `model`, or use the recipe lora_finetune"
        )


def check_lora_targets(model: nn.Module, attn_modules: Sequence[str]) -> None:
    """Refuse layers that the model's attention lacks, which torchtune would ignore, by a ValueError."""
    attention = model.get_submodule("layers.0.attn")
    possible = sorted(name for name, module in attention.named_children() if hasattr(module, "weight"))
    for name in attn_modules:
        if name not in possible:
            raise ValueError(
                f"lora_attn_modules names '{name}', which the model's attention does not have; "
                f"possible are {', '.join(possible)}"
            )


def keep_adapters_in_fp32(model: nn.Module) -> None:
    """Give adapters float32 weights, which scaled gradients need with a base in half precision."""
    for parameter in get_adapter_params(model).values():
        parameter.data = parameter.data.float()


def initial_adapters(model: nn.Module, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield names and whole initial weights of LoRA layers, as torchtune sets them: A random, B zero."""
    layer: Any
    for name, layer in model.named_modules():
        if isinstance(layer, LoRALinear):
            for part, initialize in (("lora_a", _lora_a_init_params), ("lora_b", _lora_b_init_params)):
                shape = getattr(layer, part).weight
                linear = nn.Linear(shape.shape[1], shape.shape[0], bias=False, device="meta", dtype=shape.dtype)
                initialize(linear.to_empty(device=device))
                yield plain_name(f"{name}.{part}.weight"), linear.weight.detach()


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to a LoRA adapter."""
    return name.endswith((".lora_a.weight", ".lora_b.weight"))


def train_adapters_only(model: nn.Module) -> None:
    """Freeze everything but the adapters."""
    set_trainable_params(model, get_adapter_params(model))
