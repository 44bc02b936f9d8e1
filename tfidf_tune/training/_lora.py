"""LoRA layers of a model: their settings, targets and initial weights."""

import inspect
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchtune.modules.peft import LoRALinear

from tfidf_tune.training._components import find_component
from tfidf_tune.training._distributed import parameters_by_name

_IS_ADAPTER = re.compile(r"\.lora_(a|b|A\.default|B\.default)\.weight$")  # torchtune's names, PEFT's


@dataclass(frozen=True)
class LoRASettings:
    """The settings that all LoRA layers of a model share, and torchtune's names of the adapted linear layers."""

    rank: int
    alpha: float
    dropout: float
    module_names: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module) -> "LoRASettings | None":
        """Read the settings off a model; None if it has no LoRA layers. Layers that differ are a ValueError."""
        peft: Any = getattr(model, "peft_config", None)
        if peft is not None:
            return cls(peft.r, peft.lora_alpha, peft.lora_dropout, tuple(sorted(peft.target_modules)))
        adapters = {name: module for name, module in model.named_modules() if hasattr(module, "adapter_params")}
        if not adapters:
            return None
        kinds = {type(module) for module in adapters.values()}
        loras: Any = adapters.values() if kinds == {LoRALinear} else ()
        settings = {(lora.rank, lora.alpha, float(getattr(lora.dropout, "p", 0.0))) for lora in loras}
        if len(settings) != 1:
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise ValueError(
                f"layers of {names} differ in (rank, alpha, dropout): {sorted(settings)}; give all the same LoRALinear"
            )
        rank, alpha, dropout = settings.pop()
        return cls(rank, alpha, dropout, tuple(sorted({name.rsplit(".", 1)[-1] for name in adapters})))

    @classmethod
    def require(cls, model: nn.Module) -> "LoRASettings":
        """Read the settings off a model, as :meth:`of`; a model without LoRA layers is a ValueError."""
        if settings := cls.of(model):
            return settings
        raise ValueError(
            "the model of the config has no LoRA layers: name a LoRA builder (for example tfidf_tune.models.lora_auto) "
            "in `model`, or use the recipe full_finetune"
        )


def has_lora_builder(cfg: Any) -> bool:
    """Return whether the builder that a config names for its model makes LoRA layers."""
    return "lora_rank" in inspect.signature(find_component("model", cfg.model["_component_"])).parameters


def require_no_lora(model: nn.Module) -> None:
    """Refuse a model with LoRA layers for full fine-tuning, by a ValueError."""
    if LoRASettings.of(model) is not None:
        raise ValueError(
            "the model of the config has LoRA layers: name a plain builder (for example "
            "tfidf_tune.models.auto) in `model`, or use the recipe lora_finetune"
        )


def check_lora_targets(model: nn.Module, attn_modules: Sequence[str]) -> None:
    """Refuse layers that the model's attention lacks, which torchtune would ignore, by a ValueError."""
    attention = model.get_submodule("layers.0.attn")
    possible = sorted(name for name, module in attention.named_children() if hasattr(module, "weight"))
    if unknown := [name for name in attn_modules if name not in possible]:
        raise ValueError(
            f"lora_attn_modules names '{unknown[0]}', which the model's attention does not have; possible are "
            f"{', '.join(possible)}"
        )


def keep_adapters_in_fp32(model: nn.Module) -> None:
    """Give adapters float32 weights, which scaled gradients need with a base in half precision."""
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.float()


def initial_adapters(model: nn.Module, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield names and whole initial weights of LoRA layers, as torchtune and PEFT set them: A random, B zero."""
    for name, parameter in parameters_by_name(model).items():
        if kind := _IS_ADAPTER.search(name):
            weight = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
            yield name, nn.init.kaiming_uniform_(weight, a=math.sqrt(5)) if kind[1][0] in "aA" else weight


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to a LoRA adapter, of torchtune or PEFT."""
    return _IS_ADAPTER.search(name) is not None


def train_adapters_only(model: nn.Module) -> None:
    """Freeze everything but the adapters."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
