"""Llama checkpoints: torchtune's own conversions, their arguments taken from the checkpoint's ``config.json``."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torchtune.models import convert_weights

from tfidf_tune.models._family import HFConfig, ModelFamily, StateDict


class LlamaFamily(ModelFamily):
    """The ``llama`` architecture of transformers: Llama-2, TinyLlama and what shares their blocks."""

    def hf_to_tune(self, state_dict: StateDict, config: HFConfig) -> StateDict:
        """Convert names, and the rotary layout of q and k from halves to adjacent pairs."""
        for key in state_dict:
            if re.sub(r"\.\d+", ".{}", key) not in convert_weights._FROM_HF:
                raise ValueError(f"'{key}' is not a weight of a Llama model")
        converted: StateDict = convert_weights.hf_to_tune(state_dict, **_sizes(config))
        return converted

    def tune_to_hf(self, state_dict: StateDict, config: HFConfig) -> StateDict:
        """Convert names, and the rotary layout of q and k from adjacent pairs to halves."""
        converted: StateDict = convert_weights.tune_to_hf(state_dict, **_sizes(config))
        return converted

    def tune_to_peft(self, state_dict: StateDict, config: HFConfig) -> StateDict:
        """Convert adapter names, and the rotary layout of q's and k's B matrices."""
        converted: StateDict = convert_weights.tune_to_peft_adapter_weights(state_dict, **_sizes(config))
        return converted

    def peft_target_modules(self, module_names: Iterable[str]) -> list[str]:
        """Translate ``output_proj``, ``w1`` and the like."""
        return [convert_weights._TO_PEFT_TARGET_MODULES[name] for name in module_names]

    def settings(self, model: nn.Module, config: HFConfig) -> Iterator[tuple[str, Any, Any]]:
        """Yield heads, rotary embedding, norms, activation, and what these models cannot have."""
        yield "tie_word_embeddings", bool(config.get("tie_word_embeddings", False)), False
        yield "quantization_config", config.get("quantization_config"), None
        yield "hidden_act", config.get("hidden_act", "silu"), "silu"
        attention: Any = model.get_submodule("layers.0.attn")
        rope: Any = attention.pos_embeddings
        rope_config = config.get("rope_parameters") or config.get("rope_scaling") or {}
        yield "num_heads", _sizes(config)["num_heads"], attention.num_heads
        yield "num_kv_heads", _sizes(config)["num_kv_heads"], attention.num_kv_heads
        yield (
            "rope_base",
            float(config.get("rope_theta") or rope_config.get("rope_theta", 10_000)),
            float(rope.base),
        )
        rope_type = rope_config.get("rope_type", rope_config.get("type")) or "default"
        yield "rope type", rope_type, "llama3" if hasattr(rope, "scale_factor") else "default"
        norm: Any = model.get_submodule("norm")
        yield "norm_eps", float(config.get("rms_norm_eps", 1e-6)), float(norm.eps)


def _sizes(config: HFConfig) -> dict[str, int]:
    for key in ("num_attention_heads", "hidden_size"):
        if key not in config:
            raise ValueError(f"config.json lacks {key}")
    num_heads, dim = int(config["num_attention_heads"]), int(config["hidden_size"])
    return {
        "num_heads": num_heads,
        "num_kv_heads": int(config.get("num_key_value_heads") or num_heads),
        "dim": dim,
        "head_dim": int(config.get("head_dim") or dim // num_heads),
    }
