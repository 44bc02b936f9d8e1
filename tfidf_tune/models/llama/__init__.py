"""The Llama family."""

from tfidf_tune.models.llama._family import LlamaFamily
from tfidf_tune.models.llama._model_builders import lora_tinyllama_1_1b, tinyllama_1_1b

__all__ = ["LlamaFamily", "lora_tinyllama_1_1b", "tinyllama_1_1b"]
