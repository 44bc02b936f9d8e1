"""Models: builders that a config names, and their Hugging Face checkpoints."""

from tfidf_tune.models._auto import auto, lora_auto
from tfidf_tune.models._causal_lm import HFCausalLM, build_hf, has_own_code
from tfidf_tune.models._families import FAMILIES
from tfidf_tune.models._family import HFConfig, ModelFamily, StateDict, model_remedy
from tfidf_tune.models._linear import LinearFactory, with_lora

__all__ = [
    "FAMILIES",
    "HFCausalLM",
    "HFConfig",
    "LinearFactory",
    "ModelFamily",
    "StateDict",
    "auto",
    "build_hf",
    "has_own_code",
    "lora_auto",
    "model_remedy",
    "with_lora",
]
