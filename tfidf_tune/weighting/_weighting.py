"""The base class of all token weightings, and uniform weights."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tfidf_tune.weighting._labels import IGNORE_INDEX, TokenBatch, gather_batch, values_are_known

# Weights with a smaller sum count as none: a number of tokens divided by it is still a float32.
_SMALLEST_SUM = 2.0**-100


def unit_mean(raw_weights: Tensor, valid: Tensor, max_weight: float | None = None) -> Tensor:
    r"""Scale weights to mean 1 over the valid tokens: :math:`w_i = w'_i / (\frac{1}{M}\sum_j w'_j)`.

    With ``max_weight`` the scale :math:`c` is the one for which the mean of
    :math:`w_i = \min(c\,w'_i, \mathrm{max\_weight})` is 1, so that a cap changes neither the mean nor the learning
    rate that suits it. With k tokens at the cap :math:`c = (M - k\,\mathrm{max\_weight}) / \sum_{i>k} w'_i` over
    weights in descending order, and k is the number of positions at which that c would still exceed the cap.

    Args:
        raw_weights (Tensor): non-negative, float32, any shape; with ``max_weight`` positive where ``valid``.
        valid (Tensor): bool, same shape.
        max_weight (float | None): largest weight, at least 1. Default: None, no cap.

    Returns:
        Tensor: float32, same shape; 0 where not ``valid``; all 0 when no valid token has a weight.
    """
    raw_weights = raw_weights * valid
    num_valid = valid.count_nonzero()
    if max_weight is None or raw_weights.numel() == 0:
        return raw_weights.mul_(num_valid / raw_weights.sum().clamp_min_(_SMALLEST_SUM))

    # Candidates for the scale: with 0, 1, 2, ... of the largest weights at the cap, the rest shares what is left of M.
    descending = raw_weights.flatten().sort(descending=True).values
    tail_sums = descending.flip(0).cumsum(0).flip(0).clamp_min(_SMALLEST_SUM)
    num_capped_before = torch.arange(len(descending), device=descending.device)
    scales = (num_valid - num_capped_before * max_weight) / tail_sums
    # Never true at the last valid position, where c w' = M - (M - 1) max_weight <= 1: a scale always exists.
    num_capped = (scales * descending > max_weight).sum().unsqueeze(0)
    scale = scales[num_capped]
    return (raw_weights * scale).clamp_max(max_weight)


class TokenWeighting(nn.Module, ABC):
    """Base class of all weightings: gives each label token a weight in a cross-entropy loss.

    A subclass implements :meth:`weigh`. In ``.train()`` mode it may learn from the batch (a window of statistics, for
    example); in ``.eval()`` mode it leaves its state unchanged. State belongs into registered buffers, which the
    recipes save and restore.

    Attributes:
        needs_predictions (bool): whether :meth:`weigh` needs ``batch.predictions``. The logits then have to be computed
            before the weights are known.
        needs_tokens (bool): whether :meth:`weigh` needs ``batch.all_tokens``, the tokens without a label too; it is
            None otherwise.
        sync (bool): whether, in training with several processes, :meth:`weigh` gets one mini-batch with the rows of all
            ranks, the same on every rank, without predictions. The base class gathers it, and keeps the weights of the
            rank's own rows.
    """

    needs_predictions: bool = False
    needs_tokens: bool = False
    sync: bool = False

    @torch.no_grad()
    def forward(self, batch: TokenBatch | Tensor, **fields: Any) -> Tensor:
        """Compute the weights of a mini-batch.

        Args:
            batch (TokenBatch | Tensor): the mini-batch, or only its labels, signed integer ``[b, s]``, already shifted,
                -100 where ignored.
            **fields (Any): with a labels tensor the other fields of :class:`TokenBatch`, such as ``vocab_size``.

        Returns:
            Tensor: float32 ``[b, s]`` on the device of the labels, without gradient: 0 at ignored positions, mean 1
            over the valid tokens unless the class says otherwise.

        Raises:
            ValueError: If labels have another type or shape, tokens that are needed are missing, or, on a CPU, an id is
                outside the vocabulary or a label is not the token at its position. With ``sync`` every rank raises it
                for values.
        """
        # One form of the arguments, with all tokens exactly where they are needed.
        if not isinstance(batch, TokenBatch):
            batch = TokenBatch(batch, **fields)
        elif fields:
            batch = replace(batch, **fields)
        if not self.needs_tokens and batch.all_tokens is not None:
            batch = replace(batch, all_tokens=None)
        elif self.needs_tokens and batch.all_tokens is None:
            raise ValueError(
                f"{type(self).__name__} counts all tokens, but the batch has only labels: pass a TokenBatch with "
                "all_tokens too, -100 in place of padding, as in all_tokens=shift_tokens(input_ids)"
            )
        # In training with several processes the weighting gets the rows of all ranks.
        union, own = batch, None
        if self.sync and self.training and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            union, own = gather_batch(batch)
        if values_are_known(batch.labels):
            self.check(batch)  # before the union, whose numbers are clamped to int32
            if own is not None:
                self.check(union)
        if union.labels.numel() == 0:  # nothing to learn, and no maximum to take
            return torch.zeros(batch.labels.shape, device=batch.labels.device)
        weights = self.weigh(union)
        return weights if own is None else weights[own]

    def check(self, batch: TokenBatch) -> None:
        """Raise a ``ValueError`` if an id is outside the vocabulary, or a label is not the token at its position.

        Called where reading values waits for no device.
        """
        for name, ids in (("labels", batch.labels), ("all_tokens", batch.all_tokens)):
            if ids is None or ids.numel() == 0:
                continue
            # Ignored positions look like the id 0, which every vocabulary has.
            smallest, largest = (int(bound) for bound in torch.where(ids == IGNORE_INDEX, 0, ids).aminmax())
            if smallest < 0 or (batch.vocab_size is not None and largest >= batch.vocab_size):
                raise ValueError(
                    f"{name} contain the id {smallest if smallest < 0 else largest}, outside the vocabulary of "
                    f"{batch.vocab_size or 'ids from 0'}; ignored positions are marked by {IGNORE_INDEX}"
                )
        if batch.all_tokens is not None:
            differ = (batch.labels != IGNORE_INDEX) & (batch.labels != batch.all_tokens)
            if differ.any():
                raise ValueError(
                    f"{int(differ.sum())} labels are not the tokens at their positions: pass "
                    "all_tokens=shift_tokens(input_ids) with the shifted labels"
                )

    @abstractmethod
    def weigh(self, batch: TokenBatch) -> Tensor:
        """Compute the weights, float32 ``[b, s]``, of a mini-batch with at least one position, which has been checked.

        Labels, document ids and tokens are int64.
        """

    def set_special_tokens(self, token_ids: Iterable[int]) -> None:
        """Set the special tokens (BOS, EOS, ...), which are never hidden. They replace those set before."""


def require_no_tokens(weighting: TokenWeighting, host: str) -> None:
    """Raise a ``ValueError`` if a weighting needs all tokens, for a host that passes only labels to its loss."""
    if weighting.needs_tokens:
        raise ValueError(
            f"the weighting counts all tokens, but {host} passes only the labels to a loss: set counted to 'labels'"
        )


class UniformWeighting(TokenWeighting):
    """Weight 1 for every valid token: plain cross-entropy."""

    def weigh(self, batch: TokenBatch) -> Tensor:
        """Return 1 at valid positions and 0 at ignored ones, float32 ``[b, s]``."""
        return (batch.labels != IGNORE_INDEX).float()
