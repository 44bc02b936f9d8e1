"""Labels, documents and tokens of the batches that a Trainer passes to a model."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tfidf_tune.weighting import IGNORE_INDEX, shift_labels, shift_tokens


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


def documents_and_tokens(
    inputs: Mapping[str, Any], labels: Tensor, *, needs_tokens: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return what a weighting gets with the :func:`shifted_labels`, each ``[b, num_positions]``.

    A document begins wherever ``position_ids``, ``[b, s]`` or ``[1, s]``, do not go on by 1, as for the attention of
    transformers: some models count from 2. Tokens are the ``input_ids`` that ``attention_mask`` does not hide.

    Returns:
        tuple[Tensor | None, Tensor | None]: the document of its row that each label belongs to, int64, or None without
        ``position_ids``; if needed, all tokens, with -100 in place of padding.

    Raises:
        ValueError: If tokens are needed, but there are none, or the mask does not have their shape.
    """
    positions = inputs.get("position_ids")
    documents = None
    if positions is not None and positions.dim() == 2:  # not those of images too
        begins = F.pad(positions.diff(dim=1) != 1, (1, 0))
        documents = _pad(begins.cumsum(dim=1), labels.shape[1], 0)
    if needs_tokens:
        tokens = shift_tokens(_pad(_unpadded_tokens(inputs), labels.shape[1], IGNORE_INDEX))
        return None if documents is None else shift_tokens(documents).expand_as(labels), tokens
    if documents is not None:
        # The label at position i is the token at i + 1; the last position has no label.
        documents = torch.cat([documents[:, 1:], documents[:, -1:]], dim=1).expand_as(labels)
    return documents, None


def _unpadded_tokens(inputs: Mapping[str, Any]) -> Tensor:
    tokens: Tensor | None = inputs.get("input_ids")
    mask: Any = inputs.get("attention_mask")
    if tokens is None:
        raise ValueError(
            "the weighting counts all tokens, but a training batch has no input_ids: set counted to 'labels'"
        )
    if mask is None:
        return tokens
    if getattr(mask, "shape", None) != tokens.shape:
        found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"the weighting counts all tokens, but attention_mask, which says what is padding, is {found}, not of the "
            f"shape of input_ids, {tuple(tokens.shape)}: pass such a mask, or set counted to 'labels'"
        )
    return tokens.masked_fill(mask == 0, IGNORE_INDEX)


def _pad(tensor: Tensor, num_positions: int, value: int) -> Tensor:
    return F.pad(tensor, (num_positions - tensor.shape[1], 0), value=value)
