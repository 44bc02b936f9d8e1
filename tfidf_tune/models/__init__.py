"""Models: builders that a config names, and their Hugging Face checkpoints."""

import tfidf_tune._torchao

from tfidf_tune.models._auto import FAMILIES, auto, lora_auto
from tfidf_tune.models.causal_lm import HFCausalLM
from tfidf_tune.models.family import ModelFamily
from tfidf_tune.models.linear import (
    LinearFactory,
    LoRASettings,
    dequantize_4bit,
    is_adapter,
    with_lora,
)

__all__ = [
    "FAMILIES",
    "HFCausalLM",
    "LinearFactory",
    "LoRASettings",
    "ModelFamily",
    "auto",
    "dequantize_4bit",
    "is_adapter",
    "lora_auto",
    "with_lora",
]
