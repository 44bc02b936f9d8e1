"""Model families: builders that a config names, and their Hugging Face checkpoints."""

from tfidf_tune.models._family import HFConfig, ModelFamily, StateDict, model_remedy
from tfidf_tune.models._linear import LinearFactory, with_lora
from tfidf_tune.models.gpt_neox import GPTNeoXFamily
from tfidf_tune.models.gptj import GPTJFamily
from tfidf_tune.models.llama import LlamaFamily

# By the `model_type` of a checkpoint's config.json.
FAMILIES: dict[str, ModelFamily] = {
    "gemma": LlamaFamily(norm="GemmaRMSNorm"),
    "gpt_neox": GPTNeoXFamily(),
    "gptj": GPTJFamily(),
    "llama": LlamaFamily(),
    "mistral": LlamaFamily(),
    "qwen2": LlamaFamily(rotates_halves=True),
}

__all__ = ["FAMILIES", "HFConfig", "LinearFactory", "ModelFamily", "StateDict", "model_remedy", "with_lora"]
