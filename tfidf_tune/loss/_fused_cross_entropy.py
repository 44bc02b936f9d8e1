"""Weighted cross-entropy from hidden states and head weight, the logits of a few rows at a time.

The weights do not depend on the logits, so that the gradient of a chunk is known as soon as its logits are:

    dL/dlogits_i = c_i (softmax(logits_i) - onehot(x_i)),      L = sum_i c_i l_i

It takes the logits' place, is multiplied into the gradients of hidden states and head, and the next chunk takes its
place in turn. That is one matrix product forward and two backward as for whole logits, where others who free the
logits compute them twice. The trick is known from Liger's fused linear cross-entropy (https://arxiv.org/abs/2410.10989).

Shape suffixes: N tokens of the mini-batch, C tokens of a chunk, D hidden dimension, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tfidf_tune.loss._head import HeadInput

# A chunk's logits are at most 1/16 of all, or 256 rows: fewer make matrix products of too thin matrices.
_NUM_CHUNKS = 16
_MIN_ROWS = 256
# Logits that are turned to float32 at a time: 16 MiB still lie in a CPU's cache, and keep a GPU busy for longer than a
# kernel takes to launch.
_BLOCK_SIZE = 2**22

SoftmaxGradient = Callable[[Tensor, Tensor, Tensor], Tensor]


def fused_cross_entropy(
    head: HeadInput,
    labels: Tensor,
    coefficients: Tensor,
    *,
    ignore_index: int = -100,
    accumulate_in_fp32: bool = False,
    softmax_gradient: SoftmaxGradient | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Compute :math:`\sum_i c_i \ell_i` with :math:`\ell_i = -\log P(x_i)`, and its gradients along the way.

    Its memory beside inputs and gradients is 1/16 of that of the logits, in their dtype, from 4,096 tokens on, and that
    of the logits of 256 tokens below. Gradients can be taken once.

    Args:
        head (HeadInput): hidden states ``[b, s, d]``, head weight ``[v, d]``, perhaps a bias.
        labels (Tensor): integer ``[b, s]``, already shifted.
        coefficients (Tensor): float32 ``[b, s]``, without gradient, 0 at ignored positions.
        ignore_index (int): label of the positions that do not count. Default: -100.
        accumulate_in_fp32 (bool): sum the gradient of a head in 16 bit over the chunks in float32, which takes 4 bytes
            for each of its weights; otherwise it is rounded once a chunk, as in torchtune's chunked loss.
            Default: False.
        softmax_gradient (SoftmaxGradient | None): a compiled :func:`softmax_gradient_`. Default: None.

    Returns:
        tuple[Tensor, Tensor]: the sum, a float32 scalar, and the :math:`\ell_i`, float32 ``[b, s]`` without gradient,
        0 at ignored positions.
    """
    valid = labels != ignore_index
    wants = [tensor is not None and tensor.requires_grad and torch.is_grad_enabled() for tensor in head]
    rows = max(_MIN_ROWS, math.ceil(labels.numel() / _NUM_CHUNKS))
    settings = _Settings(
        chunk_rows=rows,
        block_rows=rows if softmax_gradient else max(1, _BLOCK_SIZE // head.weight.shape[0]),
        wants=_Wanted(*wants),
        accumulate_in_fp32=accumulate_in_fp32 and head.weight.dtype != torch.float32,
        softmax_gradient=softmax_gradient or softmax_gradient_,
    )
    total, losses = _FusedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        head.hidden.flatten(0, 1),
        head.weight,
        head.bias,
        torch.where(valid, labels, 0).flatten().long(),
        coefficients.flatten(),
        settings,
    )
    losses = losses.view_as(labels) * valid
    return total, losses


def softmax_gradient_(logits: Tensor, labels: Tensor, coefficients: Tensor) -> Tensor:
    r"""Put the gradient :math:`c_i (\mathrm{softmax}(z_i) - \mathrm{onehot}(x_i))` in the place of the logits.

    Args:
        logits (Tensor): ``[c, v]``, any floating dtype; overwritten.
        labels (Tensor): int64 ``[c]``.
        coefficients (Tensor): float32 ``[c]``.

    Returns:
        Tensor: float32 ``[c]``, the cross-entropy of each token.
    """
    labels, coefficients = labels.unsqueeze(1), coefficients.unsqueeze(1)
    probabilities = torch.softmax(logits, dim=1, dtype=torch.float32)
    # The largest logit z and its probability p give the log of the softmax's denominator, z - ln p, in two reductions;
    # p is at least 1/v, while the label's own probability may be no float32 at all.
    distance = logits.amax(dim=1, keepdim=True).float() - logits.gather(1, labels).float()
    losses = distance - probabilities.amax(dim=1, keepdim=True).log()
    logits.copy_(probabilities.mul_(coefficients).scatter_add_(1, labels, -coefficients))
    return losses.squeeze(1)


class _Wanted(NamedTuple):
    """Which gradients are wanted."""

    hidden: bool
    weight: bool
    bias: bool


class _Settings(NamedTuple):
    chunk_rows: int
    block_rows: int
    wants: _Wanted
    accumulate_in_fp32: bool
    softmax_gradient: SoftmaxGradient


class _Gradients(NamedTuple):
    hidden_ND: Tensor | None
    weight_VD: Tensor | None
    bias_V: Tensor | None


class _FusedCrossEntropy(torch.autograd.Function):
    """See :func:`fused_cross_entropy`; the gradients are computed with the loss and given away at the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        coefficients_N: Tensor,
        settings: _Settings,
    ) -> tuple[Tensor, Tensor]:
        # Gradients in half precision would vanish; those of a sum over tokens, not of a mean, do not. The scaling is by
        # a power of two, which rounds nothing, and is undone in the backward pass.
        ctx.scale = 2.0 ** math.ceil(math.log2(max(1, len(labels_N)))) if hidden_ND.dtype == torch.float16 else 1.0
        gradients = _empty_gradients(hidden_ND, weight_VD, bias_V, settings)
        losses_N = torch.empty(len(labels_N), dtype=torch.float32, device=labels_N.device)
        logits_CV = hidden_ND.new_empty(min(settings.chunk_rows, len(labels_N)), len(weight_VD))
        for start in range(0, len(labels_N), settings.chunk_rows):
            part = slice(start, start + settings.chunk_rows)
            chunk_CD = hidden_ND[part]
            logits = logits_CV[: len(chunk_CD)]
            if bias_V is None:
                torch.mm(chunk_CD, weight_VD.t(), out=logits)
            else:
                torch.addmm(bias_V, chunk_CD, weight_VD.t(), out=logits)
            for block in range(start, start + len(chunk_CD), settings.block_rows):
                rows = slice(block, min(block + settings.block_rows, start + len(chunk_CD)))
                in_chunk = logits[rows.start - start : rows.stop - start]
                if any(settings.wants):
                    losses_N[rows] = settings.softmax_gradient(
                        in_chunk, labels_N[rows], coefficients_N[rows] * ctx.scale
                    )
                else:
                    losses_N[rows] = F.cross_entropy(in_chunk.float(), labels_N[rows], reduction="none")
            _add_chunk(gradients, part, logits, chunk_CD, weight_VD)
        ctx.gradients = _Gradients(
            gradients.hidden_ND,
            None if gradients.weight_VD is None else gradients.weight_VD.to(weight_VD.dtype),
            None if gradients.bias_V is None or bias_V is None else gradients.bias_V.to(bias_V.dtype),
        )
        ctx.mark_non_differentiable(losses_N)
        return (losses_N * coefficients_N).sum(), losses_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "the fused head was asked for its gradients a second time, but has given them away: call backward() "
                "once for each loss, or choose head='chunked'"
            )
        gradients, ctx.gradients = ctx.gradients, None  # no reference stays, so that .grad takes them without a copy
        factor = upstream / ctx.scale
        if factor.device.type != "cpu" or factor != 1:  # a GPU would have to be waited for
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(factor)
        return (*gradients, None, None, None)


def _empty_gradients(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, settings: _Settings) -> _Gradients:
    wants = settings.wants
    accumulator = torch.float32 if settings.accumulate_in_fp32 else weight_VD.dtype
    return _Gradients(
        torch.empty_like(hidden_ND) if wants.hidden else None,
        torch.zeros_like(weight_VD, dtype=accumulator) if wants.weight else None,
        torch.zeros_like(bias_V, dtype=torch.float32) if wants.bias and bias_V is not None else None,
    )


def _add_chunk(gradients: _Gradients, part: slice, gradient_CV: Tensor, chunk_CD: Tensor, weight_VD: Tensor) -> None:
    """Add what the gradient of a chunk's logits gives to the others."""
    if gradients.hidden_ND is not None:
        torch.mm(gradient_CV, weight_VD, out=gradients.hidden_ND[part])
    if gradients.weight_VD is not None:
        if gradients.weight_VD.dtype == chunk_CD.dtype:
            gradients.weight_VD.addmm_(gradient_CV.t(), chunk_CD)
        else:
            gradients.weight_VD.add_(gradient_CV.t() @ chunk_CD)
    if gradients.bias_V is not None:
        gradients.bias_V.add_(gradient_CV.sum(dim=0, dtype=torch.float32))
