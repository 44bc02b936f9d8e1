"""Models: builders that a config names, and their Hugging Face checkpoints."""

from tfidf_tune.models._auto import FAMILIES, auto, lora_auto
from tfidf_tune.models._causal_lm import HFCausalLM, build_hf, has_own_code
from tfidf_tune.models._family import ModelFamily, StateDict
from tfidf_tune.models._linear import (
    NF4_MULTIPLE,
    LinearFactory,
    LoRASettings,
    dequantize_4bit,
    is_4bit,
    is_adapter,
    quantize_as_4bit,
    with_lora,
)

__all__ = [
    "FAMILIES",
    "NF4_MULTIPLE",
    "HFCausalLM",
    "LinearFactory",
    "LoRASettings",
    "ModelFamily",
    "StateDict",
    "auto",
    "build_hf",
    "dequantize_4bit",
    "has_own_code",
    "is_4bit",
    "is_adapter",
    "lora_auto",
    "quantize_as_4bit",
    "with_lora",
]
