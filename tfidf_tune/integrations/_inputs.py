"""Labels and documents of the batches that a Trainer passes to a model."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tfidf_tune.weighting import IGNORE_INDEX, shift_labels


def has_labels(inputs: Mapping[str, Any]) -> bool:
    """Return whether a batch has labels, shifted or not."""
    return inputs.get("labels") is not None or inputs.get("shift_labels") is not None


def require_labels(inputs: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` if a training batch has no labels."""
    if not has_labels(inputs):
        found = ", ".join(name for name, value in inputs.items() if value is not None) or "nothing"
        raise ValueError(
            f"a training batch has no labels, only {found}: use a data collator that makes them, for example "
            "DataCollatorForLanguageModeling(tokenizer, mlm=False)"
        )


def shifted_labels(inputs: Mapping[str, Any], num_positions: int) -> Tensor:
    """Return the labels of a batch, integer ``[b, num_positions]``, shifted as causal language models do.

    Prompt tuning puts virtual tokens in front of the ``s`` tokens of the inputs. They have no labels.
    """
    if inputs.get("shift_labels") is None:
        return shift_labels(_pad(inputs["labels"], num_positions, IGNORE_INDEX))
    return _pad(inputs["shift_labels"], num_positions, IGNORE_INDEX)


def document_ids_of(inputs: Mapping[str, Any], labels: Tensor) -> Tensor | None:
    """Return the document of its row that each of the :func:`shifted_labels` belongs to, int64 ``[b, num_positions]``.

    A document begins wherever ``position_ids``, ``[b, s]`` or ``[1, s]``, do not go on by 1, as for the attention of
    transformers: some models count from 2. None without them.
    """
    positions = inputs.get("position_ids")
    if positions is None or positions.dim() != 2:  # of images too
        return None
    begins = F.pad(positions.diff(dim=1) != 1, (1, 0))
    documents = _pad(begins.cumsum(dim=1), labels.shape[1], 0)
    # The label at position i is the token at i + 1; the last position has no label.
    return torch.cat([documents[:, 1:], documents[:, -1:]], dim=1).expand_as(labels)


def _pad(tensor: Tensor, num_positions: int, value: int) -> Tensor:
    return F.pad(tensor, (num_positions - tensor.shape[1], 0), value=value)
