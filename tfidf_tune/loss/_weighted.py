"""Weighted cross-entropy as modules: with any weighting, with TF-IDF weights, and plain."""

import os
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from tfidf_tune._checks import require_bool, require_choice, require_integer
from tfidf_tune.loss._cross_entropy import (
    HeadInput,
    fused_cross_entropy,
    token_cross_entropy,
    token_predictions,
    weighted_mean,
)
from tfidf_tune.weighting import (
    IGNORE_INDEX,
    TermFrequency,
    TFIDFWeighting,
    TokenBatch,
    TokenWeighting,
    UniformWeighting,
)
from tfidf_tune.weighting.tfidf import Counted

Head = Literal["fused", "chunked"]

Logits = Tensor | list[Tensor] | HeadInput


class LossTerms(NamedTuple):
    """What a training step needs to know of a mini-batch.

    Attributes:
        loss (Tensor): the objective, scalar, to be backpropagated.
        cross_entropy (Tensor): the unweighted mean cross-entropy of the same tokens, scalar,
            detached.
        weights (Tensor): float32 ``[b, s]``, 0 at ignored positions.
    """

    loss: Tensor
    cross_entropy: Tensor
    weights: Tensor


def weight_sums(weights: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the weights of labels, and that of their squared deviations from 1; ``[b,
    s]`` both.
    """
    valid = labels != IGNORE_INDEX
    total = weights.sum()
    deviations = (weights - 1).square() * valid
    return total, deviations.sum()


def weight_statistics(total: Tensor, deviations: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of weights from their :func:`weight_sums`."""
    mean = total / max(num_tokens, 1)
    # About 1, where most weights are: small differences would be lost in a mean of squares.
    variance = deviations / max(num_tokens, 1) - (mean - 1).square()
    return mean, variance.clamp_min(0).sqrt()


class WeightedCrossEntropyLoss(nn.Module):
    r"""Cross-entropy in which every token counts by its weight: :math:`-\frac{1}{M}\sum_i w_i \log
    P(x_i | x_{<i})`.

    The weighting is a submodule: its state (the window of TF-IDF, for example) is part of this
    module's ``state_dict``, and ``.train()`` and ``.eval()`` apply to it.

    Logits are converted to float32 one chunk at a time, as in torchtune's
    ``CEWithChunkedOutputLoss``; with a torchtune model, call
    ``model.set_num_output_chunks(loss.num_output_chunks)`` and pass the list that it returns. A
    :class:`HeadInput` holds hidden states and head weight, and only a fraction of the logits exists
    at a time; the recipes' models return one unless ``head`` is "chunked".

    A weighting may need the model's predictions, see :attr:`TokenWeighting.needs_predictions`. From
    a :class:`HeadInput` the logits are then computed once more beforehand, without gradient: one
    matrix product of hidden states and head in addition to three.

    Args:
        weighting (TokenWeighting): gives the weights.
        num_output_chunks (int): chunks that whole logits are split into along the sequence.
            Default: 8.
        head (Head): how a :class:`HeadInput` is used: ``fused`` computes gradients along with the
            loss, see :func:`fused_cross_entropy`; with ``chunked`` the recipes' models return
            chunks of logits. Default: "fused".
        accumulate_in_fp32 (bool): whether ``fused`` sums the gradient of a head in 16 bit over its
            chunks in float32, for 4 bytes a weight. Default: False.

    Raises:
        ValueError: If an argument is out of its range, or ``accumulate_in_fp32`` is set for the
            head ``chunked``.
    """

    def __init__(
        self,
        weighting: TokenWeighting,
        *,
        num_output_chunks: int = 8,
        head: Head = "fused",
        accumulate_in_fp32: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(weighting, TokenWeighting):
            raise ValueError(
                f"weighting is {weighting!r}: it has to be a tfidf_tune.weighting.TokenWeighting"
            )
        require_integer(
            "num_output_chunks", num_output_chunks, 1, "logits are split into so many chunks"
        )
        require_choice("head", head, get_args(Head))
        require_bool("accumulate_in_fp32", accumulate_in_fp32)
        if accumulate_in_fp32 and head != "fused":
            raise ValueError(
                f"accumulate_in_fp32 is set, which head '{head}' does not support: set head to "
                "'fused'"
            )
        self.weighting = weighting
        self.num_output_chunks = num_output_chunks
        self.head: Head = head
        self.accumulate_in_fp32 = accumulate_in_fp32
        self.compute_cross_entropy = token_cross_entropy

    def compile_parts(self) -> None:
        """Compile the cross-entropy of a chunk of logits, and where there is a GPU the many kernels
        of the weighting.

        Compiling the fused head takes memory and saves no time.
        """
        backend = os.environ.get("TORCH_COMPILE_BACKEND", "inductor")  # torchtune's own switch
        self.compute_cross_entropy = torch.compile(self.compute_cross_entropy, backend=backend)
        if torch.cuda.is_available():  # torch 2.11 cannot compile its integers for a CPU
            self.weighting.compile(backend=backend)

    def terms(self, logits: Logits, batch: TokenBatch | Tensor) -> LossTerms:
        """Compute the objective together with the values that are logged.

        Args:
            logits (Logits): ``[b, s, v]``, a list of chunks of it along s, or a :class:`HeadInput`.
            batch (TokenBatch | Tensor): the mini-batch, or only its labels, integer ``[b, s]``,
                already shifted, -100 where ignored.

        Returns:
            LossTerms: the objective, the unweighted cross-entropy, the weights.

        Raises:
            ValueError: If the labels are not ``[b, s]``, not of signed integers, or do not match
                the logits.
        """
        if isinstance(batch, Tensor):
            batch = TokenBatch(batch)
        labels = batch.labels
        if isinstance(logits, Tensor):
            logits = list(logits.chunk(self.num_output_chunks, dim=1))
        if isinstance(logits, HeadInput):
            shape = list(logits.hidden.shape[:-1])
            vocab_size = logits.weight.shape[0]
        else:
            length = sum(chunk.shape[1] for chunk in logits)
            shape = [len(logits[0]), length]
            vocab_size = logits[0].shape[-1]
        if shape != list(labels.shape):
            raise ValueError(
                f"logits fit labels of shape {shape}, the labels have shape {list(labels.shape)}"
            )
        predictions = None
        if self.weighting.needs_predictions:
            predictions = token_predictions(logits, labels)
        batch = replace(batch, vocab_size=vocab_size, predictions=predictions)
        weights = self.weighting(batch)
        objective, losses = self.objective(logits, labels, weights)
        num_valid = (labels != IGNORE_INDEX).sum().clamp_min(1)
        return LossTerms(objective, losses.detach().sum() / num_valid, weights)

    def objective(
        self, logits: list[Tensor] | HeadInput, labels: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the objective of given weights, float32 ``[b, s]``, and the cross-entropy of each
        token.

        Returns:
            tuple[Tensor, Tensor]: the objective, a float32 scalar, and float32 ``[b, s]``, 0 at
            ignored positions.
        """
        valid = labels != IGNORE_INDEX
        if isinstance(logits, HeadInput):
            coefficients = weights / valid.sum().clamp_min(1)
            return fused_cross_entropy(
                logits, labels, coefficients, accumulate_in_fp32=self.accumulate_in_fp32
            )
        lengths = [chunk.shape[1] for chunk in logits]
        chunk_losses = [
            self.compute_cross_entropy(chunk, chunk_labels)
            for chunk, chunk_labels in zip(logits, torch.split(labels, lengths, dim=1), strict=True)
        ]
        losses = torch.cat(chunk_losses, dim=1)
        return weighted_mean(losses, weights, valid), losses

    def forward(self, logits: Logits, batch: TokenBatch | Tensor) -> Tensor:
        """Compute only the objective of :meth:`terms`; without a valid token a 0 that can be
        backpropagated.
        """
        return self.terms(logits, batch).loss


class CrossEntropyLoss(WeightedCrossEntropyLoss):
    """Plain cross-entropy, weight 1 for every token; arguments as in
    :class:`WeightedCrossEntropyLoss`.
    """

    def __init__(
        self, *, num_output_chunks: int = 8, head: Head = "fused", accumulate_in_fp32: bool = False
    ) -> None:
        super().__init__(
            UniformWeighting(),
            num_output_chunks=num_output_chunks,
            head=head,
            accumulate_in_fp32=accumulate_in_fp32,
        )


class TFIDFCrossEntropyLoss(WeightedCrossEntropyLoss):
    """Cross-entropy weighted by TF-IDF over a rolling window: the objective of the paper.

    Arguments are those of :class:`~tfidf_tune.weighting.TFIDFWeighting` and
    :class:`WeightedCrossEntropyLoss`. ``ignore_index``, which torchtune's losses take too, can only
    be -100.

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        *,
        num_batches: int = 16,
        tf: TermFrequency = "count",
        max_weight: float | None = None,
        sync: bool = False,
        counted: Counted = "labels",
        ignore_index: int = IGNORE_INDEX,
        num_output_chunks: int = 8,
        head: Head = "fused",
        accumulate_in_fp32: bool = False,
    ) -> None:
        if ignore_index != IGNORE_INDEX:
            raise ValueError(
                f"ignore_index is {ignore_index}: ignored labels are marked by {IGNORE_INDEX}"
            )
        weighting = TFIDFWeighting(
            num_batches=num_batches, tf=tf, max_weight=max_weight, sync=sync, counted=counted
        )
        super().__init__(
            weighting,
            num_output_chunks=num_output_chunks,
            head=head,
            accumulate_in_fp32=accumulate_in_fp32,
        )
