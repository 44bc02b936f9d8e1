"""The families by the ``model_type`` of a checkpoint's config.json."""

from tfidf_tune.models._family import ModelFamily
from tfidf_tune.models.gpt_neox import GPTNeoXFamily
from tfidf_tune.models.gptj import GPTJFamily
from tfidf_tune.models.llama import LlamaFamily

FAMILIES: dict[str, ModelFamily] = {
    "gemma": LlamaFamily(is_gemma=True),
    "gpt_neox": GPTNeoXFamily(),
    "gptj": GPTJFamily(),
    "llama": LlamaFamily(),
    "mistral": LlamaFamily(),
    "qwen2": LlamaFamily(rotates_halves=True, qkv_bias=True),
}
