"""The batches that a Trainer passes to a model: what a weighting gets of them, and which are refused."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tfidf_tune.weighting import IGNORE_INDEX, TokenBatch, shift_labels, shift_tokens


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


def check_first_batch(inputs: Mapping[str, Any], *, needs_tokens: bool = False) -> None:
    """Raise a ``ValueError`` if the labels of a batch are the token that follows each token of the input.

    A causal language model of transformers shifts the labels itself: it would predict the token after the next one. If
    all tokens are counted, labels that are not the tokens at their positions are an error too.
    """
    ids, labels = inputs.get("input_ids"), inputs.get("labels")
    if ids is None or labels is None or ids.shape != labels.shape:
        return
    valid = labels != IGNORE_INDEX
    pairs = valid[:, :-1] & valid[:, 1:]  # the token after the last label may be padding
    follows = labels[:, :-1] == ids[:, 1:]
    if pairs.any() and follows[pairs].all() and not (labels == ids)[valid].all():
        raise ValueError(
            "the labels are shifted already: each is the token after that of input_ids at the same position. Pass "
            "labels that are not shifted, equal to input_ids where a token counts; the trainer shifts them"
        )
    if needs_tokens and not (labels == ids)[valid].all():
        raise ValueError(
            "the weighting counts all tokens, but labels that are not -100 differ from input_ids: make them equal, or "
            "set counted to 'labels'"
        )


def shifted_labels(inputs: Mapping[str, Any], num_positions: int) -> Tensor:
    """Return the labels of a batch, integer ``[b, num_positions]``, shifted as causal language models do.

    Prompt tuning puts virtual tokens in front of the ``s`` tokens of the inputs. They have no labels.
    """
    shifted = inputs.get("shift_labels")
    labels = _pad(inputs["labels"] if shifted is None else shifted, num_positions, IGNORE_INDEX)
    return shift_labels(labels) if shifted is None else labels


def token_batch(inputs: Mapping[str, Any], num_positions: int, *, needs_tokens: bool, first_pass: bool) -> TokenBatch:
    """Return what a weighting gets of a batch, ``[b, num_positions]``, with the :func:`shifted_labels`.

    A document begins wherever ``position_ids``, ``[b, s]`` or ``[1, s]``, do not go on by 1, as for the attention of
    transformers: some models count from 2. Tokens, if needed, are the ``input_ids`` that ``attention_mask`` does not
    hide.

    Raises:
        ValueError: If tokens are needed, but there are none, or the mask does not have their shape.
    """
    labels, positions = shifted_labels(inputs, num_positions), inputs.get("position_ids")
    documents = all_tokens = None
    if positions is not None and positions.dim() == 2:  # not those of images too
        begins = F.pad(positions.diff(dim=1) != 1, (1, 0))
        documents = _pad(begins.cumsum(dim=1), num_positions, 0)
    if needs_tokens:
        all_tokens = shift_tokens(_pad(_unpadded_tokens(inputs), num_positions, IGNORE_INDEX))
    if documents is not None:
        # The label at position i is the token at i + 1; the last position has no label, or the first token.
        last = documents[:, :1] if needs_tokens else documents[:, -1:]
        documents = torch.cat([documents[:, 1:], last], dim=1).expand_as(labels)
    return TokenBatch(labels, documents, all_tokens, first_pass=first_pass)


def _unpadded_tokens(inputs: Mapping[str, Any]) -> Tensor:
    tokens: Tensor | None = inputs.get("input_ids")
    mask: Any = inputs.get("attention_mask")
    if tokens is None or (mask is not None and getattr(mask, "shape", None) != tokens.shape):
        ids = "no input_ids" if tokens is None else f"input_ids of shape {tuple(tokens.shape)}"
        found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"the weighting counts all tokens, but a training batch has {ids} and as attention_mask, which says what "
            f"is padding, {found}: pass both in one shape, or set counted to 'labels'"
        )
    return tokens if mask is None else tokens.masked_fill(mask == 0, IGNORE_INDEX)


def _pad(tensor: Tensor, num_positions: int, value: int) -> Tensor:
    return F.pad(tensor, (num_positions - tensor.shape[1], 0), value=value)
