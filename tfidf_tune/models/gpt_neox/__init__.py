"""The GPT-NeoX family: Pythia."""

from tfidf_tune.models.gpt_neox._attention import GPTNeoXAttention
from tfidf_tune.models.gpt_neox._component_builders import gpt_neox, lora_gpt_neox
from tfidf_tune.models.gpt_neox._family import GPTNeoXFamily
from tfidf_tune.models.gpt_neox._model_builders import lora_pythia, pythia

__all__ = ["GPTNeoXAttention", "GPTNeoXFamily", "gpt_neox", "lora_gpt_neox", "lora_pythia", "pythia"]
