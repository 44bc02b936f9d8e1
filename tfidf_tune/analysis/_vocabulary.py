"""Check that token ids and model belong together."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def require_known_ids(model: "PreTrainedModel", ids: npt.NDArray[np.integer]) -> None:
    """Refuse token ids that are outside the model's embedding.

    Args:
        model (PreTrainedModel): language model with input embeddings ``[v, d]``.
        ids (np.ndarray): integer token ids of any shape.

    Raises:
        ValueError: If an id is not in ``[0, v)``.
    """
    vocab_size = model.get_input_embeddings().weight.shape[0]
    unknown = ids[(ids < 0) | (ids >= vocab_size)]
    if unknown.size:
        raise ValueError(
            f"Token id {unknown[0]} is outside the model's vocabulary, 0 to {vocab_size - 1}: "
            "tokenize the text with the tokenizer that this model was trained with."
        )
