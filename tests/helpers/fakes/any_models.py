"""Tiny random checkpoints of many architectures, as transformers makes them."""

from pathlib import Path
from typing import Any

import torch
import transformers

from helpers.fakes.tiny_llama import VOCAB_SIZE, make_tokenizer

_LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
_HEADS_OF_16 = _LLAMA | {"head_dim": 16}
# A window shorter than the rows of the tests.
_WINDOW = _HEADS_OF_16 | {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}
_GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_NEOX = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}

# Name -> model_type, settings, and what `auto` makes of it.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], str]] = {
    "Llama": ("llama", _LLAMA, "torchtune's modules"),
    "SmolLM2": (
        "llama",
        _LLAMA | {"tie_word_embeddings": True, "rms_norm_eps": 9.999999747378752e-06},
        "torchtune's modules",
    ),
    "Mistral": (
        "mistral",
        _LLAMA | {"head_dim": None, "sliding_window": None},
        "torchtune's modules",
    ),
    "Qwen2": ("qwen2", _LLAMA, "torchtune's modules"),
    "Gemma": ("gemma", _HEADS_OF_16, "torchtune's modules"),
    "GPT-NeoX": ("gpt_neox", _NEOX, "torchtune's modules"),
    "GPT-J": ("gptj", _GPT | {"rotary_dim": 8}, "torchtune's modules"),
    "Qwen3": ("qwen3", _HEADS_OF_16, "Qwen3ForCausalLM"),
    "Gemma 2": ("gemma2", _WINDOW | {"query_pre_attn_scalar": 16}, "Gemma2ForCausalLM"),
    "Gemma 3 (text)": ("gemma3_text", _WINDOW | {"query_pre_attn_scalar": 16}, "Gemma3ForCausalLM"),
    "Phi-3": ("phi3", _LLAMA | {"pad_token_id": 0}, "Phi3ForCausalLM"),
    "OLMo2": ("olmo2", _LLAMA, "Olmo2ForCausalLM"),
    "GPT-2": ("gpt2", _GPT | _NO_DROPOUT, "GPT2LMHeadModel"),
    "OPT": (
        "opt",
        _NEOX | {"ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.0},
        "OPTForCausalLM",
    ),
    "Granite": (
        "granite",
        _LLAMA | {"logits_scaling": 2.0, "embedding_multiplier": 3.0},
        "GraniteForCausalLM",
    ),
    "Mixtral": (
        "mixtral",
        _LLAMA | {"num_local_experts": 4, "sliding_window": None},
        "MixtralForCausalLM",
    ),
    "GLM-4 MoE": (
        "glm4_moe",
        _HEADS_OF_16
        | {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
        },
        "Glm4MoeForCausalLM",
    ),
    "Falcon": (
        "falcon",
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
        "FalconForCausalLM",
    ),
    "SmolLM3": ("smollm3", _LLAMA | {"no_rope_layers": [1, 0]}, "SmolLM3ForCausalLM"),
}


def hf_config(name: str, **overrides: Any) -> transformers.PreTrainedConfig:
    """Return transformers' config of an architecture."""
    model_type, settings, _ = ARCHITECTURES[name]
    ids = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    return transformers.AutoConfig.for_model(
        model_type, **{"vocab_size": VOCAB_SIZE, **ids, **settings, **overrides}
    )


def make_checkpoint(name: str, folder: Path, text_file: Path, **overrides: Any) -> Path:
    """Write random weights, also of norms and biases so that none is neutral, and a tokenizer."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        hf_config(name, **overrides), dtype=torch.float32
    )
    with torch.no_grad():
        for value in model.state_dict().values():  # buffers, too
            value += 0.1 * torch.randn_like(value)
    model.save_pretrained(folder)
    return make_tokenizer(folder, text_file)
