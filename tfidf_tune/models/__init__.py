"""Models: builders that a config names, and their Hugging Face checkpoints."""

from tfidf_tune.models._auto import FAMILIES, auto, lora_auto
from tfidf_tune.models._blocks import LinearFactory, with_lora
from tfidf_tune.models._causal_lm import HFCausalLM, build_hf, has_own_code
from tfidf_tune.models._family import ModelFamily, StateDict
from tfidf_tune.models._nf4 import NF4_MULTIPLE, dequantize_4bit, is_4bit, quantize_as_4bit, scales_of_4bit

__all__ = [
    "FAMILIES",
    "NF4_MULTIPLE",
    "HFCausalLM",
    "LinearFactory",
    "ModelFamily",
    "StateDict",
    "auto",
    "build_hf",
    "dequantize_4bit",
    "has_own_code",
    "is_4bit",
    "lora_auto",
    "quantize_as_4bit",
    "scales_of_4bit",
    "with_lora",
]
