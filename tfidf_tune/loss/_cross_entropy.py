"""Cross-entropy and predictions of each token, from logits or from hidden states and head weight,
as pure functions.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tfidf_tune.weighting import IGNORE_INDEX, Predictions


class HeadInput(NamedTuple):
    """What logits are computed from, ``hidden @ weight.T + bias``, for a loss that never holds all
    of them.

    Attributes:
        hidden (Tensor): ``[b, s, d]``, after the final norm.
        weight (Tensor): ``[v, d]``, of the output projection or the tied embeddings; dtype of
            ``hidden``.
        bias (Tensor | None): ``[v]``. Default: None.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None


def check_head(head: HeadInput, labels: Tensor) -> None:
    """Raise a ``ValueError`` unless shapes and dtypes of hidden states, head and labels match; it
    names them all.
    """
    hidden, weight, bias = head
    of_head = weight.dim() == 2 and (bias is None or bias.shape == weight.shape[:1])
    # One floating dtype for all, as in a matrix product outside of autocast.
    of_one_dtype = (
        hidden.is_floating_point()
        and len({tensor.dtype for tensor in head if tensor is not None}) == 1
    )
    if not (of_head and of_one_dtype and hidden.shape == (*labels.shape, weight.shape[-1])):
        found = ", ".join(
            f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            for name, tensor in (head._asdict() | {"labels": labels}).items()
            if tensor is not None
        )
        raise ValueError(
            f"the head's input does not fit: {found}; expected are hidden [b, s, d], weight [v, "
            f"d], bias [v] or "
            "none, of one floating dtype, and labels [b, s]"
        )


def _chunk_rows(num_tokens: int) -> int:
    """Number of tokens whose logits a head computes at a time: fewer than 256 would make matrix
    products slow.
    """
    return max(256, math.ceil(num_tokens / 16))


def _block_rows(num_rows: int, vocab_size: int, *, copies: int, device: torch.device) -> int:
    """Tokens of ``num_rows`` whose logits are in float32 at a time, in so many copies.

    On a CPU 4 MiB, which stay in its cache. On a GPU one copy of all, so that few kernels have much
    work: beside a chunk of 1/16 of the logits, in 16 bit, that is 1/8 of them.
    """
    return max(1, 2**20 // vocab_size if device.type == "cpu" else num_rows // copies)


def token_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Cross-entropy of each token, :math:`-\log P(x_i)`, computed in float32.

    Args:
        logits (Tensor): ``[b, s, v]``, any floating dtype.
        labels (Tensor): integer ``[b, s]``, already shifted, -100 where ignored.

    Returns:
        Tensor: float32 ``[b, s]``, 0 at ignored positions.
    """
    losses = F.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten().long(),
        ignore_index=IGNORE_INDEX,
        reduction="none",
    )
    return losses.view_as(labels)


def weighted_mean(losses: Tensor, weights: Tensor, valid: Tensor) -> Tensor:
    r"""The objective, :math:`\frac{1}{M}\sum_{i} w_i \ell_i` over the M valid tokens.

    Source: "Rebalancing Token Importance in Language Models with TF-IDF Weighted Cross-Entropy
    Loss", equation 1.

    Args:
        losses (Tensor): float32 ``[b, s]``, 0 at ignored positions.
        weights (Tensor): float32 ``[b, s]``, 0 at ignored positions.
        valid (Tensor): bool ``[b, s]``.

    Returns:
        Tensor: float32 scalar; without a valid token a 0 that can be backpropagated.
    """
    return (losses * weights).sum() / valid.sum().clamp_min(1)


@torch.no_grad()
def token_predictions(logits: list[Tensor] | HeadInput, labels: Tensor) -> Predictions:
    r"""Compute the log-probability of each label and the entropy of the predicted distribution.

    .. math::
        \ln P(x_i | x_{<i}), \qquad H_i = -\sum_v P(v | x_{<i}) \ln P(v | x_{<i})

    From a :class:`HeadInput` no more than 1/16 of the logits, or those of 256 tokens, exist at a
    time; they are converted to float32 a few tokens at a time, on a GPU a third of them.

    Args:
        logits (list[Tensor] | HeadInput): chunks of ``[b, s, v]`` along s, or what they are
            computed from.
        labels (Tensor): integer ``[b, s]``, already shifted, -100 where ignored.

    Returns:
        Predictions: float32 ``[b, s]`` each, 0 at ignored positions.

    Raises:
        ValueError: If shapes or dtypes of a :class:`HeadInput` do not match.
    """
    if isinstance(logits, HeadInput):
        check_head(logits, labels)
        rows = torch.split(logits.hidden.flatten(0, 1), _chunk_rows(labels.numel()))
        weight, bias = logits.weight, logits.bias
        return _predict((F.linear(hidden, weight, bias) for hidden in rows), labels)
    chunks = zip(
        logits, torch.split(labels, [chunk.shape[1] for chunk in logits], dim=1), strict=True
    )
    predicted = [_predict([of_chunk.flatten(0, 1)], chunk) for of_chunk, chunk in chunks]
    return Predictions(*(torch.cat(parts, dim=1) for parts in zip(*predicted, strict=True)))


def _predict(logits: Iterable[Tensor], labels: Tensor) -> Predictions:
    """Log-probabilities and entropies of labels ``[b, c]``, from logits ``[n, v]`` of some of them
    in turn.
    """
    predicted, labels_N, start = [], labels.flatten(), 0
    for piece in logits:
        for block in torch.split(piece, _block_rows(*piece.shape, copies=3, device=piece.device)):
            log_softmax = torch.log_softmax(block.float(), dim=1)
            # Labels outside the vocabulary are replaced; the weighting refuses those that are not
            # ignored.
            tokens = labels_N[start : start + len(block)].long().clamp(0, block.shape[1] - 1)
            log_probability = log_softmax.gather(1, tokens.unsqueeze(1)).squeeze(1)
            predicted.append((log_probability, torch.special.entr(log_softmax.exp_()).sum(dim=1)))
            start += len(block)
    ignored = labels == IGNORE_INDEX
    of_all = (torch.cat(parts).view(labels.shape) for parts in zip(*predicted, strict=True))
    return Predictions(*(part.masked_fill(ignored, 0) for part in of_all))


def fused_cross_entropy(
    head: HeadInput, labels: Tensor, coefficients: Tensor, *, accumulate_in_fp32: bool = False
) -> tuple[Tensor, Tensor]:
    r"""Compute :math:`\sum_i c_i \ell_i` with :math:`\ell_i = -\log P(x_i)`, and its gradients
    along the way.

    Besides inputs and gradients it needs the memory of 1/16 of the logits, in their dtype, or of
    those of 256 tokens; on a GPU also that of the same ones in float32. Gradients are computed in
    the forward pass, and can be used once.

    Args:
        head (HeadInput): hidden states ``[b, s, d]``, head weight ``[v, d]``, perhaps a bias; of
            one dtype.
        labels (Tensor): integer ``[b, s]``, already shifted, -100 where ignored.
        coefficients (Tensor): float32 ``[b, s]``, without gradient, 0 at ignored positions.
        accumulate_in_fp32 (bool): sum the gradient of a head in 16 bit over the chunks in float32,
            which takes 4 bytes (on a GPU 8) for each of its weights; otherwise it is rounded once a
            chunk, as in torchtune's chunked loss. Default: False.

    Returns:
        tuple[Tensor, Tensor]: the sum, a float32 scalar, and the :math:`\ell_i`, float32 ``[b, s]``
        without gradient, 0 at ignored positions.

    Raises:
        ValueError: If shapes or dtypes do not match.
    """
    check_head(head, labels)
    valid = labels != IGNORE_INDEX
    total, losses = _FusedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        head.hidden.flatten(0, 1),
        head.weight,
        head.bias,
        torch.where(valid, labels, 0).flatten().long(),
        valid.flatten(),
        coefficients.flatten(),
        torch.is_grad_enabled(),
        # The range of float16 is too small for a sum over tokens.
        head.weight.dtype == torch.float16 or (accumulate_in_fp32 and head.weight.itemsize < 4),
    )
    return total, losses.view_as(labels)


def _softmax_gradient_(logits: Tensor, labels: Tensor, coefficients: Tensor) -> Tensor:
    r"""Overwrite logits ``[c, v]`` with the gradient :math:`c_i (\mathrm{softmax}(z_i) -
    \mathrm{onehot}(x_i))`.

    Returns the cross-entropy of each token, ``[c]``, float32 (float64 for such logits).
    """
    # In float32 and one copy, which torch.softmax does not do for bf16; rounded once to the dtype
    # of the logits.
    labels, coefficients = labels.unsqueeze(1), coefficients.unsqueeze(1)
    largest = logits.amax(dim=1, keepdim=True).to(torch.promote_types(logits.dtype, torch.float32))
    exponentials = (logits - largest).exp_()
    sums = exponentials.sum(dim=1, keepdim=True)
    losses = largest - logits.gather(1, labels) + sums.log()
    # At the label P - 1 comes from the loss, because a P near 1 would be rounded before the
    # difference.
    gradient = exponentials.mul_(coefficients / sums).scatter_(
        1, labels, coefficients * torch.expm1(-losses)
    )
    logits.copy_(gradient)
    return losses.squeeze(1)


class _FusedCrossEntropy(torch.autograd.Function):
    """See :func:`fused_cross_entropy`; the gradients are computed with the loss and returned at the
    backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        valid_N: Tensor,
        coefficients_N: Tensor,
        is_grad_enabled: bool,
        in_fp32: bool,
    ) -> tuple[Tensor, Tensor]:
        num_tokens = len(labels_N)
        chunk_size = _chunk_rows(num_tokens)
        # Gradients are computed now, for an upstream gradient of 1 times the scale: in float16 that
        # of a mean over tokens would underflow, that of a sum does not, and a power of two rounds
        # nothing.
        ctx.scale, ctx.dtype = 1.0, weight_VD.dtype
        if hidden_ND.dtype == torch.float16:
            ctx.scale = valid_N.sum().clamp_min(1).log2().ceil().exp2()
        scaled_N = coefficients_N * ctx.scale
        # What is frozen gets none.
        wants = [is_grad_enabled and needed for needed in ctx.needs_input_grad[:3]]
        copies = 1 if any(wants) else 2
        block_size = _block_rows(chunk_size, len(weight_VD), copies=copies, device=labels_N.device)
        hidden_gradient_ND = torch.empty_like(hidden_ND) if wants[0] else None
        sum_dtype = torch.float32 if in_fp32 else weight_VD.dtype
        weight_gradient_VD = torch.zeros_like(weight_VD, dtype=sum_dtype) if wants[1] else None
        bias_gradient_V = None
        if bias_V is not None and wants[2]:
            bias_gradient_V = torch.zeros_like(
                bias_V, dtype=torch.promote_types(bias_V.dtype, torch.float32)
            )
        # The only memory of logits: every chunk of them is written over the one before it.
        losses_N = torch.empty(num_tokens, dtype=torch.float32, device=labels_N.device)
        logits_CV = hidden_ND.new_empty(min(chunk_size, num_tokens), len(weight_VD))
        for start in range(0, num_tokens, chunk_size):
            chunk = slice(start, start + chunk_size)
            hidden_CD = hidden_ND[chunk]
            logits = logits_CV[: len(hidden_CD)]
            if bias_V is None:
                torch.mm(hidden_CD, weight_VD.t(), out=logits)
            else:
                torch.addmm(bias_V, hidden_CD, weight_VD.t(), out=logits)
            # Cross-entropy in float32, one block at a time: the logits become their own gradient.
            parts = (
                torch.split(part, block_size)
                for part in (logits, labels_N[chunk], scaled_N[chunk], losses_N[chunk])
            )
            for block, labels, coefficients, losses in zip(*parts, strict=True):
                if any(wants):
                    losses.copy_(_softmax_gradient_(block, labels, coefficients))
                else:
                    losses.copy_(F.cross_entropy(block.float(), labels, reduction="none"))
                if bias_gradient_V is not None:
                    bias_gradient_V.add_(block.sum(dim=0, dtype=bias_gradient_V.dtype))
            # The gradient of the logits goes into both factors before the next chunk takes its
            # place.
            if hidden_gradient_ND is not None:
                torch.mm(logits, weight_VD, out=hidden_gradient_ND[chunk])
            if weight_gradient_VD is not None:
                _add_product(weight_gradient_VD, logits.t(), hidden_CD)
        ctx.gradients = (hidden_gradient_ND, weight_gradient_VD, bias_gradient_V)
        losses_N.masked_fill_(~valid_N, 0)  # values at ignored positions may be infinite
        ctx.mark_non_differentiable(losses_N)
        return (losses_N * coefficients_N).sum(), losses_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # The gradients were computed along with the loss, for a factor of ctx.scale; they are
        # handed over once.
        if ctx.gradients is None:
            raise RuntimeError(
                "there is no second backward pass: compute the loss again for each backward()"
            )
        # Without another reference .grad takes them without a copy.
        gradients, ctx.gradients = (
            ctx.gradients,
            None,
        )
        # Usually the factor is 1, and a pass over the gradients is saved.
        factor = upstream / ctx.scale
        if factor.device.type != "cpu" or factor != 1:  # comparing would wait for a GPU
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(factor)
        return (
            *(None if gradient is None else gradient.to(ctx.dtype) for gradient in gradients),
            *[None] * 5,
        )


def _add_product(total: Tensor, first: Tensor, second: Tensor) -> None:
    """Add a matrix product to a sum, which may be in float32 while the factors are in 16 bit."""
    if total.dtype == first.dtype:
        total.addmm_(first, second)
    elif total.is_cuda and hasattr(torch.ops.aten.mm, "dtype"):  # torch 2.8 and later
        total.add_(torch.mm(first, second, out_dtype=total.dtype))
    else:  # the 16-bit product would be rounded
        total.addmm_(first.to(total.dtype), second.to(total.dtype))
