"""Weighted cross-entropy over chunked logits, for every weighting alike."""

import os
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tfidf_tune.loss._token_cross_entropy import token_cross_entropy, weighted_mean
from tfidf_tune.weighting import TermFrequency, TFIDFWeighting, TokenWeighting, UniformWeighting


class LossTerms(NamedTuple):
    """What a training step wants to know of a mini-batch.

    Attributes:
        loss (Tensor): the objective, scalar, to be backpropagated.
        cross_entropy (Tensor): the unweighted mean cross-entropy of the same tokens, scalar, detached.
        weights (Tensor): float32 ``[b, s]``, 0 at ignored positions.
    """

    loss: Tensor
    cross_entropy: Tensor
    weights: Tensor


class WeightedCrossEntropyLoss(nn.Module):
    r"""Cross-entropy in which every token counts by its weight: :math:`-\frac{1}{M}\sum_i w_i \log P(x_i | x_{<i})`.

    The weighting is a submodule: its state (the window of TF-IDF, for instance) is part of this module's
    ``state_dict``, and ``.train()`` and ``.eval()`` reach it. Logits are turned to float32 one chunk at a time,
    as torchtune's ``CEWithChunkedOutputLoss`` does; with a torchtune model, call
    ``model.set_num_output_chunks(loss.num_output_chunks)`` and hand over the list that it returns.

    Args:
        weighting (TokenWeighting): gives the weights from the labels.
        ignore_index (int): label of the positions that do not count. Default: -100.
        num_output_chunks (int): chunks that whole logits are cut into along the sequence. Default: 8.

    Raises:
        ValueError: If ``num_output_chunks`` is less than 1.
    """

    def __init__(self, weighting: TokenWeighting, *, ignore_index: int = -100, num_output_chunks: int = 8) -> None:
        super().__init__()
        if num_output_chunks < 1:
            raise ValueError(f"num_output_chunks is {num_output_chunks}: set it to 1 or more")
        self.weighting = weighting
        self.ignore_index = ignore_index
        self.num_output_chunks = num_output_chunks

    def compute_cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of each token of a chunk: the one part that ``torch.compile`` is worth it for.

        Args:
            logits (Tensor): ``[b, c, v]``.
            labels (Tensor): integer ``[b, c]``.

        Returns:
            Tensor: float32 ``[b, c]``.
        """
        return token_cross_entropy(logits, labels, self.ignore_index)

    def compile_chunks(self) -> None:
        """Run the cross-entropy of a chunk through ``torch.compile``; the weighting stays as it is."""
        backend = os.environ.get("TORCH_COMPILE_BACKEND", "inductor")  # torchtune's own switch
        self.compute_cross_entropy = torch.compile(  # type: ignore[method-assign]
            self.compute_cross_entropy, backend=backend
        )

    def terms(self, logits: Tensor | list[Tensor], labels: Tensor, document_ids: Tensor | None = None) -> LossTerms:
        """Compute the objective together with what is logged beside it.

        Args:
            logits (Tensor | list[Tensor]): ``[b, s, v]``, or a list of chunks of it along s.
            labels (Tensor): integer ``[b, s]``, already shifted, ``ignore_index`` at ignored positions.
            document_ids (Tensor | None): integer ``[b, s]``, the document of its row that each label belongs to.
                Default: None, a row is one document.

        Returns:
            LossTerms: the objective, the unweighted cross-entropy, the weights.

        Raises:
            ValueError: If ``labels`` is not ``[b, s]`` or does not fit the logits.
        """
        if labels.dim() != 2:
            raise ValueError(
                f"labels has shape {tuple(labels.shape)}, expected [b, s]. torchtune's stock recipes flatten "
                "labels for every loss but one named CEWithChunkedOutputLoss: with them, set "
                "loss._component_=tfidf_tune.loss.stock.CEWithChunkedOutputLoss"
            )
        chunks = logits if isinstance(logits, list) else list(logits.chunk(self.num_output_chunks, dim=1))
        lengths = [chunk.shape[1] for chunk in chunks]
        if (len(chunks[0]), sum(lengths)) != labels.shape:
            raise ValueError(
                f"logits cover {len(chunks[0])} rows of {sum(lengths)} positions, "
                f"labels have shape {tuple(labels.shape)}"
            )
        weights = self.weighting(labels, vocab_size=chunks[0].shape[-1], document_ids=document_ids)
        losses = torch.cat(
            [
                self.compute_cross_entropy(chunk, chunk_labels)
                for chunk, chunk_labels in zip(chunks, torch.split(labels, lengths, dim=1), strict=True)
            ],
            dim=1,
        )
        valid = labels != self.ignore_index
        cross_entropy = losses.detach().sum() / valid.sum().clamp_min(1)
        return LossTerms(weighted_mean(losses, weights, valid), cross_entropy, weights)

    def forward(self, logits: Tensor | list[Tensor], labels: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """Compute the objective alone; arguments and errors are those of :meth:`terms`.

        Returns:
            Tensor: float32 scalar; without a valid token a 0 that can be backpropagated.
        """
        return self.terms(logits, labels, document_ids).loss


class CrossEntropyLoss(WeightedCrossEntropyLoss):
    """Plain cross-entropy: weight 1 for every token, all else as in the weighted losses.

    Args:
        ignore_index (int): label of the positions that do not count. Default: -100.
        num_output_chunks (int): chunks that whole logits are cut into along the sequence. Default: 8.
    """

    def __init__(self, *, ignore_index: int = -100, num_output_chunks: int = 8) -> None:
        super().__init__(
            UniformWeighting(ignore_index=ignore_index),
            ignore_index=ignore_index,
            num_output_chunks=num_output_chunks,
        )


class TFIDFCrossEntropyLoss(WeightedCrossEntropyLoss):
    """Cross-entropy weighted by TF-IDF over a rolling window, see :class:`~tfidf_tune.weighting.TFIDFWeighting`.

    Args:
        num_batches (int): mini-batches in the window, the current one included. Default: 16.
        tf (TermFrequency): ``count`` (the paper), ``log`` or ``binary``. Default: "count".
        max_weight (float | None): largest weight, at least 1. Default: None, no cap.
        ignore_index (int): label of the positions that do not count. Default: -100.
        num_output_chunks (int): chunks that whole logits are cut into along the sequence. Default: 8.
    """

    def __init__(
        self,
        *,
        num_batches: int = 16,
        tf: TermFrequency = "count",
        max_weight: float | None = None,
        ignore_index: int = -100,
        num_output_chunks: int = 8,
    ) -> None:
        super().__init__(
            TFIDFWeighting(num_batches=num_batches, tf=tf, max_weight=max_weight, ignore_index=ignore_index),
            ignore_index=ignore_index,
            num_output_chunks=num_output_chunks,
        )
