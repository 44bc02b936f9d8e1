"""The base class of all token weightings, and uniform weights."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tfidf_tune.weighting._labels import (
    IGNORE_INDEX,
    TokenBatch,
    check_ids,
    check_tokens,
    check_types,
    gather_labels,
    has_other_ranks,
)


class TokenWeighting(nn.Module, ABC):
    """Base class of all weightings: gives each label token a weight in a cross-entropy loss.

    A subclass implements :meth:`weigh`. In ``.train()`` mode it may learn from the batch (a window of statistics, for
    example); in ``.eval()`` mode it leaves its state unchanged. State belongs into registered buffers, which the
    recipes save and restore.

    Attributes:
        needs_predictions (bool): whether :meth:`weigh` needs ``batch.predictions``. The logits then have to be computed
            before the weights are known.
        needs_tokens (bool): whether :meth:`weigh` needs ``batch.tokens``, the tokens without a label too.
        has_unit_mean (bool): whether weights have mean 1 over the valid tokens, as all here have but those of
            :class:`RepetitionWeighting`.
        sync (bool): whether :meth:`weigh` needs ``batch.gathered``, the labels of all ranks. It gets them in training
            with several processes, and None otherwise.
    """

    needs_predictions: bool = False
    needs_tokens: bool = False
    has_unit_mean: bool = True
    sync: bool = False

    @torch.no_grad()
    def forward(self, batch: TokenBatch | Tensor, **fields: Any) -> Tensor:
        """Compute the weights of a mini-batch.

        With ``sync``, several processes and no ``gathered`` labels, the labels of all ranks are gathered here; on a GPU
        the host then waits for the device.

        Args:
            batch (TokenBatch | Tensor): the mini-batch, or only its labels, signed integer ``[b, s]``, -100 where
                ignored.
            **fields (Any): with a labels tensor the other fields of :class:`TokenBatch`, such as ``vocab_size``.

        Returns:
            Tensor: float32 ``[b, s]`` on the device of the labels, without gradient: 0 at ignored positions, mean 1
            over the valid tokens where ``has_unit_mean`` is True.

        Raises:
            ValueError: If labels, document ids or tokens have another type or shape, tokens that are needed are
                missing, or, on a CPU, an id is outside the vocabulary or a label is not the token at its position. With
                ``sync`` every rank raises it.
        """
        if isinstance(batch, Tensor):
            batch = TokenBatch(batch, **fields)
        elif fields:
            batch = batch._replace(**fields)
        labels, document_ids, vocab_size, predictions, gathered, tokens, first_pass = batch
        tokens = self._required(tokens, "the batch") if self.needs_tokens else None
        check_types(labels, document_ids, tokens)
        if not (self.sync and self.training):
            gathered = None
        elif gathered is None and has_other_ranks():
            gathered = gather_labels(labels, document_ids, tokens)
        labels = labels.long()
        check_ids(labels, vocab_size)  # before those of all ranks, which are clamped to int32
        if tokens is not None:
            tokens = _checked_tokens(tokens, labels, vocab_size)
        if gathered is not None:
            all_labels, all_tokens = gathered.labels.long(), None
            check_ids(all_labels, vocab_size)
            if self.needs_tokens:
                all_tokens = _checked_tokens(self._required(gathered.tokens, "gathered"), all_labels, vocab_size)
            gathered = gathered._replace(labels=all_labels, tokens=all_tokens)
        return self.weigh(TokenBatch(labels, document_ids, vocab_size, predictions, gathered, tokens, first_pass))

    def _required(self, tokens: Tensor | None, where: str) -> Tensor:
        if tokens is None:
            raise ValueError(
                f"{type(self).__name__} counts all tokens, but {where} has only labels: pass tokens too, -100 in place "
                "of padding, as in tokens=shift_tokens(input_ids)"
            )
        return tokens

    @abstractmethod
    def weigh(self, batch: TokenBatch) -> Tensor:
        """Compute the weights, float32 ``[b, s]``, of a mini-batch whose labels are int64 and have been checked."""

    def set_special_tokens(self, token_ids: Iterable[int]) -> None:
        """Set the special tokens (BOS, EOS, ...), which are never hidden. They replace those set before."""

    def num_state_bytes(self, batch_size: int, seq_len: int, *, vocab_size: int, num_ranks: int = 1) -> int:
        """Return the bytes of the state on each rank after mini-batches ``[batch_size, seq_len]`` on ``num_ranks``."""
        return sum(buffer.nbytes for buffer in self.buffers())


def _checked_tokens(tokens: Tensor, labels: Tensor, vocab_size: int | None) -> Tensor:
    tokens = tokens.long()
    check_ids(tokens, vocab_size, "tokens")
    check_tokens(labels, tokens)
    return tokens


def require_no_tokens(weighting: TokenWeighting, host: str) -> None:
    """Raise a ``ValueError`` if a weighting needs all tokens, for a host that passes only labels to its loss."""
    if weighting.needs_tokens:
        raise ValueError(
            f"the weighting counts all tokens, but {host} passes only the labels to a loss: set counted to 'labels'"
        )


def check_weighting(name: str, value: Any) -> None:
    """Raise a ``ValueError`` unless an argument is a :class:`TokenWeighting`."""
    if not isinstance(value, TokenWeighting):
        found = f"a {type(value).__name__}" if isinstance(value, nn.Module) else repr(value)
        raise ValueError(
            f"{name} is {found}: it has to be a weighting, in a config a section with `_component_`, for example "
            "tfidf_tune.weighting.TFIDFWeighting"
        )


class UniformWeighting(TokenWeighting):
    """Weight 1 for every valid token: plain cross-entropy."""

    def weigh(self, batch: TokenBatch) -> Tensor:
        """Return 1 at valid positions and 0 at ignored ones, float32 ``[b, s]``."""
        return (batch.labels != IGNORE_INDEX).float()
