"""The GPT-J family."""

from tfidf_tune.models.gptj._component_builders import gptj, lora_gptj
from tfidf_tune.models.gptj._family import GPTJFamily
from tfidf_tune.models.gptj._model_builders import gptj_6b, lora_gptj_6b

__all__ = ["GPTJFamily", "gptj", "gptj_6b", "lora_gptj", "lora_gptj_6b"]
