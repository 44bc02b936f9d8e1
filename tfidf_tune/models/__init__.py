"""Model families: builders that a config names, and their Hugging Face checkpoints."""

from tfidf_tune.models._family import HFConfig, ModelFamily, StateDict
from tfidf_tune.models.llama import LlamaFamily

# By the `model_type` of a checkpoint's config.json.
FAMILIES: dict[str, ModelFamily] = {"llama": LlamaFamily()}

__all__ = ["FAMILIES", "HFConfig", "ModelFamily", "StateDict"]
