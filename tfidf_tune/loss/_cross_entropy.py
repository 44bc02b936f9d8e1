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
    is_head = weight.dim() == 2 and (bias is None or bias.shape == weight.shape[:1])
    fits_labels = is_head and hidden.shape == (*labels.shape, weight.shape[1])
    # One floating dtype for all, as in a matrix product outside of autocast.
    dtypes = {tensor.dtype for tensor in head if tensor is not None}
    has_one_dtype = hidden.is_floating_point() and len(dtypes) == 1
    if not (fits_labels and has_one_dtype):
        tensors = {"hidden": hidden, "weight": weight, "bias": bias, "labels": labels}
        descriptions = []
        for name, tensor in tensors.items():
            if tensor is not None:
                dtype = str(tensor.dtype).removeprefix("torch.")
                descriptions.append(f"{name} {list(tensor.shape)} {dtype}")
        raise ValueError(
            f"the head's input does not fit: {', '.join(descriptions)}; expected are hidden [b, s, "
            "d], weight [v, d], bias [v] or none, of one floating dtype, and labels [b, s]"
        )


# Chunks and blocks of logits. A chunk is what one matrix product gives, in the dtype of the head; a
# block is the part of a chunk that is in float32 at a time. An example: 4 rows of 4,096 tokens, the
# 128,256 ids and 4,096 dimensions of Llama 3, in bf16.
#
#   all logits            16,384 tokens x 128,256 ids x 2 bytes   3.9 GiB, in float32 7.8 GiB
#   a chunk, 1/16          1,024 tokens x 128,256 ids x 2 bytes   250 MiB
#   its block on a GPU     1,024 tokens x 128,256 ids x 4 bytes   501 MiB: 751 MiB with the chunk
#   its block on a CPU         8 tokens x 128,256 ids x 4 bytes   3.9 MiB
#
# Liger's fused_linear_cross_entropy chooses v / d chunks, so that the logits of a chunk take as
# much memory as the hidden states: in the example 32 chunks of 512 tokens, 125 MiB each.


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
    block_rows = num_rows // copies
    if device.type == "cpu":
        block_rows = 2**20 // vocab_size
    return max(1, block_rows)


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
        # Each chunk of logits is computed when it is asked for.
        chunks = (F.linear(hidden, logits.weight, logits.bias) for hidden in rows)
        return _predict(chunks, labels)
    lengths = [chunk.shape[1] for chunk in logits]
    predicted = [
        _predict([chunk.flatten(0, 1)], chunk_labels)
        for chunk, chunk_labels in zip(logits, torch.split(labels, lengths, dim=1), strict=True)
    ]
    log_probability = torch.cat([part.log_probability for part in predicted], dim=1)
    entropy = torch.cat([part.entropy for part in predicted], dim=1)
    return Predictions(log_probability, entropy)


def _predict(logits: Iterable[Tensor], labels: Tensor) -> Predictions:
    """Log-probabilities and entropies of labels ``[b, c]``, from logits ``[n, v]`` of some of them
    in turn.
    """
    labels_N = labels.flatten()
    log_probabilities = []
    entropies = []
    start = 0
    for chunk in logits:
        num_rows, vocab_size = chunk.shape
        block_size = _block_rows(num_rows, vocab_size, copies=3, device=chunk.device)
        for block in torch.split(chunk, block_size):
            log_softmax = torch.log_softmax(block.float(), dim=1)
            # Labels outside the vocabulary are replaced; the weighting refuses those that are not
            # ignored.
            tokens = labels_N[start : start + len(block)].long().clamp(0, vocab_size - 1)
            log_probabilities.append(log_softmax.gather(1, tokens.unsqueeze(1)).squeeze(1))
            probabilities = log_softmax.exp_()  # in place: no further copy of the block
            entropies.append(torch.special.entr(probabilities).sum(dim=1))
            start += len(block)
    ignored = labels == IGNORE_INDEX
    log_probability = torch.cat(log_probabilities).view(labels.shape)
    entropy = torch.cat(entropies).view(labels.shape)
    return Predictions(log_probability.masked_fill(ignored, 0), entropy.masked_fill(ignored, 0))


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
    known_labels = torch.where(valid, labels, 0)
    # The range of float16 is too small for a sum over tokens.
    is_fp16 = head.weight.dtype == torch.float16
    in_fp32 = is_fp16 or (accumulate_in_fp32 and head.weight.itemsize < 4)
    total, losses = _FusedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        head.hidden.flatten(0, 1),
        head.weight,
        head.bias,
        known_labels.flatten().long(),
        valid.flatten(),
        coefficients.flatten(),
        torch.is_grad_enabled(),
        in_fp32,
    )
    return total, losses.view_as(labels)


def _softmax_gradient_(logits: Tensor, labels: Tensor, coefficients: Tensor) -> Tensor:
    r"""Overwrite logits ``[c, v]`` with the gradient :math:`c_i (\mathrm{softmax}(z_i) -
    \mathrm{onehot}(x_i))`.

    Returns the cross-entropy of each token, ``[c]``, float32 (float64 for such logits).
    """
    # In float32 and one copy, which torch.softmax does not do for bf16; rounded once to the dtype
    # of the logits.
    labels = labels.unsqueeze(1)
    coefficients = coefficients.unsqueeze(1)
    sum_dtype = torch.promote_types(logits.dtype, torch.float32)
    largest = logits.amax(dim=1, keepdim=True).to(sum_dtype)
    exponentials = (logits - largest).exp_()
    sums = exponentials.sum(dim=1, keepdim=True)
    losses = largest - logits.gather(1, labels) + sums.log()
    # At the label P - 1 comes from the loss, because a P near 1 would be rounded before the
    # difference.
    gradient = exponentials.mul_(coefficients / sums)
    gradient.scatter_(1, labels, coefficients * torch.expm1(-losses))
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
        ctx.dtype = weight_VD.dtype
        ctx.scale = 1.0
        if hidden_ND.dtype == torch.float16:
            ctx.scale = valid_N.sum().clamp_min(1).log2().ceil().exp2()
        scaled_N = coefficients_N * ctx.scale
        # What is frozen gets none.
        wants = [is_grad_enabled and needed for needed in ctx.needs_input_grad[:3]]
        hidden_gradient_ND = None
        if wants[0]:
            hidden_gradient_ND = torch.empty_like(hidden_ND)
        weight_gradient_VD = None
        if wants[1]:
            sum_dtype = torch.float32 if in_fp32 else weight_VD.dtype
            weight_gradient_VD = torch.zeros_like(weight_VD, dtype=sum_dtype)
        bias_gradient_V = None
        if bias_V is not None and wants[2]:
            bias_dtype = torch.promote_types(bias_V.dtype, torch.float32)
            bias_gradient_V = torch.zeros_like(bias_V, dtype=bias_dtype)
        copies = 1 if any(wants) else 2
        block_size = _block_rows(chunk_size, len(weight_VD), copies=copies, device=labels_N.device)
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
            blocks = zip(
                torch.split(logits, block_size),
                torch.split(labels_N[chunk], block_size),
                torch.split(scaled_N[chunk], block_size),
                torch.split(losses_N[chunk], block_size),
                strict=True,
            )
            for block, labels, coefficients, losses in blocks:
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
        gradients = ctx.gradients
        ctx.gradients = None
        # Usually the factor is 1, and a pass over the gradients is saved; comparing would wait for
        # a GPU.
        factor = upstream / ctx.scale
        needs_factor = factor.device.type != "cpu" or bool(factor != 1)
        converted: list[Tensor | None] = []
        for gradient in gradients:
            if gradient is not None:
                if needs_factor:
                    gradient.mul_(factor)
                gradient = gradient.to(ctx.dtype)
            converted.append(gradient)
        # The other five arguments of `forward` have no gradient.
        return (*converted, None, None, None, None, None)


def _add_product(total: Tensor, first: Tensor, second: Tensor) -> None:
    """Add a matrix product to a sum, which may be in float32 while the factors are in 16 bit."""
    if total.dtype == first.dtype:
        total.addmm_(first, second)
    elif total.is_cuda and hasattr(torch.ops.aten.mm, "dtype"):  # torch 2.8 and later
        total.add_(torch.mm(first, second, out_dtype=total.dtype))
    else:  # the 16-bit product would be rounded
        total.addmm_(first.to(total.dtype), second.to(total.dtype))
