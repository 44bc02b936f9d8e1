"""Weighted cross-entropy over chunked logits or a fused head, for every weighting alike."""

import os
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from tfidf_tune.loss._fused_cross_entropy import fused_cross_entropy
from tfidf_tune.loss._head import HeadInput
from tfidf_tune.loss._predictions import token_predictions
from tfidf_tune.loss._token_cross_entropy import linear_token_cross_entropy, token_cross_entropy, weighted_mean
from tfidf_tune.weighting import LabelExchange, TokenWeighting, check_label_type, check_weighting

Head = Literal["fused", "torch", "chunked"]
HEADS: tuple[Head, ...] = get_args(Head)

Logits = Tensor | list[Tensor] | HeadInput


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
    ``state_dict``, and ``.train()`` and ``.eval()`` reach it.

    It takes what a model has to give. Logits are turned to float32 one chunk at a time, as torchtune's
    ``CEWithChunkedOutputLoss`` does; with a torchtune model, call
    ``model.set_num_output_chunks(loss.num_output_chunks)`` and hand over the list that it returns. A
    :class:`HeadInput` holds hidden states and head weight, and no more than a fraction of the logits is ever there;
    the recipes have their models return one unless ``head`` is "chunked".

    A weighting may also ask for what the model predicts, see :attr:`TokenWeighting.needs_predictions`. Logits are then
    computed once more beforehand where they are not there, and without a gradient: with a :class:`HeadInput` that is
    one matrix product of hidden states and head on top of three.

    Args:
        weighting (TokenWeighting): gives the weights.
        ignore_index (int): label of the positions that do not count. Default: -100.
        num_output_chunks (int): chunks that whole logits are cut into along the sequence. Default: 8.
        head (Head): what becomes of a :class:`HeadInput`: ``fused`` computes gradients along with the loss, see
            :func:`fused_cross_entropy`; ``torch`` is PyTorch's ``linear_cross_entropy``, which computes logits twice;
            with ``chunked`` the recipes' models return chunks of logits. Default: "fused".
        accumulate_in_fp32 (bool): whether ``fused`` sums the gradient of a head in 16 bit over its chunks in float32,
            for 4 bytes a weight. Default: False.

    Raises:
        ValueError: If ``weighting`` is none, ``num_output_chunks`` is less than 1, ``head`` not one of the three, or
            ``accumulate_in_fp32`` set for another head than ``fused``.
    """

    def __init__(
        self,
        weighting: TokenWeighting,
        *,
        ignore_index: int = -100,
        num_output_chunks: int = 8,
        head: Head = "fused",
        accumulate_in_fp32: bool = False,
    ) -> None:
        super().__init__()
        check_weighting("weighting", weighting)
        if not isinstance(num_output_chunks, int) or num_output_chunks < 1:
            raise ValueError(f"num_output_chunks is {num_output_chunks}: set it to a whole number of 1 or more")
        if head not in HEADS:
            raise ValueError(f"head is '{head}': possible are {', '.join(HEADS)}")
        if not isinstance(accumulate_in_fp32, bool):
            raise ValueError(f"accumulate_in_fp32 is {accumulate_in_fp32!r}: set it to true or false")
        if accumulate_in_fp32 and head != "fused":
            raise ValueError(f"accumulate_in_fp32 is set, which head '{head}' does not know: set head to 'fused'")
        self.weighting = weighting
        self.ignore_index = ignore_index
        self.num_output_chunks = num_output_chunks
        self.head: Head = head
        self.accumulate_in_fp32 = accumulate_in_fp32

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
        """Run the cross-entropy of a chunk of logits through ``torch.compile``.

        The weighting stays as it is, and so does the fused head: compiled, it took several times its memory, and no
        less time on a CPU.
        """
        backend = os.environ.get("TORCH_COMPILE_BACKEND", "inductor")  # torchtune's own switch
        self.compute_cross_entropy = torch.compile(  # type: ignore[method-assign]
            self.compute_cross_entropy, backend=backend
        )

    def terms(
        self,
        logits: Logits,
        labels: Tensor,
        document_ids: Tensor | None = None,
        begun: LabelExchange | None = None,
    ) -> LossTerms:
        """Compute the objective together with what is logged beside it.

        Args:
            logits (Logits): ``[b, s, v]``, a list of chunks of it along s, or what they would be made of.
            labels (Tensor): integer ``[b, s]``, already shifted, ``ignore_index`` at ignored positions.
            document_ids (Tensor | None): integer ``[b, s]``, the document of its row that each label belongs to.
                Default: None, a row is one document.
            begun (LabelExchange | None): what ``weighting.begin(labels, document_ids=document_ids)`` gave before the
                forward pass. Default: None, what the weights need from other processes is asked for now.

        Returns:
            LossTerms: the objective, the unweighted cross-entropy, the weights.

        Raises:
            ValueError: If ``labels`` is not ``[b, s]``, not of signed integers, or does not fit the logits.
        """
        check_label_type(labels)
        if labels.dim() != 2:
            raise ValueError(
                f"labels has shape {tuple(labels.shape)}, expected [b, s]. torchtune's stock recipes flatten "
                "labels for every loss but one named CEWithChunkedOutputLoss: with them, set "
                "loss._component_=tfidf_tune.loss.stock.CEWithChunkedOutputLoss"
            )
        if isinstance(logits, Tensor):
            logits = list(logits.chunk(self.num_output_chunks, dim=1))
        num_rows, num_positions, vocab_size = _shape(logits)
        if (num_rows, num_positions) != labels.shape:
            raise ValueError(
                f"logits cover {num_rows} rows of {num_positions} positions, labels have shape {tuple(labels.shape)}"
            )
        predictions = token_predictions(logits, labels, self.ignore_index) if self.weighting.needs_predictions else None
        weights = self.weighting(
            labels, vocab_size=vocab_size, document_ids=document_ids, begun=begun, predictions=predictions
        )
        objective, losses = self.objective(logits, labels, weights)
        num_valid = (labels != self.ignore_index).sum().clamp_min(1)
        return LossTerms(objective, losses.detach().sum() / num_valid, weights)

    def objective(self, logits: list[Tensor] | HeadInput, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the objective of given weights, and the cross-entropy of each token.

        Args:
            logits (list[Tensor] | HeadInput): chunks of ``[b, s, v]`` along s, or what they would be made of.
            labels (Tensor): integer ``[b, s]``.
            weights (Tensor): float32 ``[b, s]``, 0 at ignored positions.

        Returns:
            tuple[Tensor, Tensor]: the objective, a float32 scalar, and float32 ``[b, s]``, 0 at ignored positions.
        """
        valid = labels != self.ignore_index
        if isinstance(logits, HeadInput) and self.head != "torch":
            return fused_cross_entropy(
                logits,
                labels,
                weights / valid.sum().clamp_min(1),
                ignore_index=self.ignore_index,
                accumulate_in_fp32=self.accumulate_in_fp32,
            )
        if isinstance(logits, HeadInput):
            losses = linear_token_cross_entropy(logits, labels, self.ignore_index)
        else:
            chunks = torch.split(labels, [chunk.shape[1] for chunk in logits], dim=1)
            parts = [self.compute_cross_entropy(part, chunk) for part, chunk in zip(logits, chunks, strict=True)]
            losses = torch.cat(parts, dim=1)
        return weighted_mean(losses, weights, valid), losses

    def forward(
        self,
        logits: Logits,
        labels: Tensor,
        document_ids: Tensor | None = None,
        begun: LabelExchange | None = None,
    ) -> Tensor:
        """Compute the objective alone; arguments and errors are those of :meth:`terms`.

        Returns:
            Tensor: float32 scalar; without a valid token a 0 that can be backpropagated.
        """
        return self.terms(logits, labels, document_ids, begun).loss


def _shape(logits: list[Tensor] | HeadInput) -> tuple[int, int, int]:
    """Rows, positions and vocabulary that logits cover, or would."""
    if isinstance(logits, HeadInput):
        return (*logits.hidden.shape[:2], logits.weight.shape[0])
    return len(logits[0]), sum(chunk.shape[1] for chunk in logits), logits[0].shape[-1]
