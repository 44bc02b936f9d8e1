"""Every architecture small enough for any test: transformers' config, and torchtune's builder of
the same model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from omegaconf import OmegaConf
from torch import nn
from torchtune import config

from helpers.fakes.tiny_llama import VOCAB_SIZE

MAX_SEQ_LEN = 64
ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ROPE_QWEN = {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}
TIED = {"tie_word_embeddings": True}
QKV = ("q_proj", "k_proj", "v_proj", "output_proj")


@dataclass(frozen=True)
class TinyModel:
    """One architecture with its switches set; ``dim`` is 64, or 256 for NF4 weights."""

    model_type: str
    builder: str
    hf: Callable[[int], dict[str, Any]]
    tune: Callable[[int], dict[str, Any]]
    attn_modules: tuple[str, ...] = QKV
    peft_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    tied: bool = False

    def hf_config(self, dim: int = 64) -> transformers.PreTrainedConfig:
        ids = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
        return transformers.AutoConfig.for_model(
            self.model_type, vocab_size=VOCAB_SIZE, **ids, **self.hf(dim)
        )

    def section(self, dim: int = 64, *, lora: bool = False, **lora_settings: Any) -> dict[str, Any]:
        """The config's `model`."""
        module, name = self.builder.rsplit(".", 1)
        section = {
            "_component_": self.builder,
            "vocab_size": VOCAB_SIZE,
            "max_seq_len": MAX_SEQ_LEN,
            **self.tune(dim),
        }
        if lora:
            settings = {
                "lora_attn_modules": list(self.attn_modules),
                "lora_rank": 4,
                "lora_alpha": 12,
            }
            section |= {"_component_": f"{module}.lora_{name}", **settings, **lora_settings}
        return section

    def build(self, dim: int = 64, **kwargs: Any) -> nn.Module:
        return config.instantiate(OmegaConf.create(self.section(dim, **kwargs)))

    def build_hf(self, dim: int = 64, *, seed: int = 0) -> transformers.PreTrainedModel:
        """Random weights, also of norms and biases, so that none is neutral; layers outweigh the
        embedding.
        """
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            self.hf_config(dim), dtype=torch.float32
        ).eval()
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name or ".ln_" in name
            mean = (
                1.0 if is_norm and name.endswith("weight") and self.model_type != "gemma" else 0.0
            )
            scale = 0.3 if parameter is model.get_input_embeddings().weight else 1.5
            nn.init.normal_(
                parameter, mean, 0.1 if is_norm or name.endswith("bias") else scale * dim**-0.5
            )
        return model


def _llama_hf(dim: int) -> dict[str, Any]:
    return {
        "hidden_size": dim,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 2 * dim,
        "max_position_embeddings": MAX_SEQ_LEN,
        "rms_norm_eps": 1e-5,
    }


def _llama_tune(dim: int) -> dict[str, Any]:
    return {
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "embed_dim": dim,
        "intermediate_dim": 2 * dim,
        "norm_eps": 1e-5,
    }


def _like_llama(
    kind: str, name: str, hf: dict[str, Any], tune: dict[str, Any], *, tied: bool = False
) -> TinyModel:
    return TinyModel(
        kind,
        f"torchtune.models.{name}.{name}",
        lambda dim: _llama_hf(dim) | hf,
        lambda dim: _llama_tune(dim) | tune,
        tied=tied,
    )


def _neox(rotary_pct: float, parallel: bool) -> TinyModel:
    return TinyModel(
        "gpt_neox",
        "tfidf_tune.models.gpt_neox.gpt_neox",
        lambda dim: {
            "hidden_size": dim,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 3 * dim,
            "max_position_embeddings": MAX_SEQ_LEN,
            "use_parallel_residual": parallel,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": rotary_pct,
            },
        },
        lambda dim: {
            "num_layers": 2,
            "num_heads": 4,
            "embed_dim": dim,
            "intermediate_dim": 3 * dim,
            "rotary_pct": rotary_pct,
            "use_parallel_residual": parallel,
        },
        attn_modules=("query_key_value",),
        peft_targets=("query_key_value",),
    )


def _gptj(rotary_dim: int) -> TinyModel:
    return TinyModel(
        "gptj",
        "tfidf_tune.models.gptj.gptj",
        lambda dim: {
            "n_embd": dim,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": MAX_SEQ_LEN,
            "rotary_dim": rotary_dim,
        },
        lambda dim: {"num_layers": 2, "num_heads": 4, "embed_dim": dim, "rotary_dim": rotary_dim},
        peft_targets=("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.out_proj"),
    )


MODELS = {
    "llama": _like_llama("llama", "llama2", {}, {}),
    "llama-1-kv-head": _like_llama(
        "llama", "llama2", {"num_key_value_heads": 1}, {"num_kv_heads": 1}
    ),
    "llama-4-kv-heads": _like_llama(
        "llama", "llama2", {"num_key_value_heads": 4}, {"num_kv_heads": 4}
    ),
    "llama3_2-tied": _like_llama(
        "llama", "llama3_2", TIED | {"rope_parameters": ROPE_LLAMA3}, {}, tied=True
    ),
    "mistral": _like_llama("mistral", "mistral", {"head_dim": None, "sliding_window": None}, {}),
    "qwen2-tied": _like_llama("qwen2", "qwen2", TIED | ROPE_QWEN, TIED, tied=True),
    "qwen2": _like_llama("qwen2", "qwen2", ROPE_QWEN, {}),
    "gemma-tied": TinyModel(
        "gemma",
        "torchtune.models.gemma.gemma",
        lambda dim: _llama_hf(dim) | {"head_dim": dim // 2},
        lambda dim: _llama_tune(dim) | {"head_dim": dim // 2},
        tied=True,
    ),
    "gpt_neox": _neox(0.25, True),
    "gpt_neox-full-rotary": _neox(1.0, True),
    "gpt_neox-sequential": _neox(0.25, False),
    "gptj": _gptj(8),
    "gptj-full-rotary": _gptj(16),
}
# One of each family, for tests that do not depend on the switches.
FAMILY_MODELS = (
    "llama",
    "llama3_2-tied",
    "mistral",
    "qwen2-tied",
    "gemma-tied",
    "gpt_neox",
    "gptj",
)
