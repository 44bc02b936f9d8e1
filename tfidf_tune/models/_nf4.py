"""Linear layers with frozen NF4 weights: torchao's, and those of bitsandbytes for what torchao cannot hold.

A weight of bitsandbytes is ``[out, in]``; the model of transformers may have ``[in, out]`` (GPT-2's ``Conv1D``).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torchtune.modules import FrozenNF4Linear
from transformers.pytorch_utils import Conv1D

_BLOCK = 64
NF4_MULTIPLE = 64 * 256
"""Weights of a block, times the blocks that share a scaler: torchao's defaults."""


def quantize(model: nn.Module, names: list[str]) -> str:
    """Replace linear layers of a model by layers with NF4 weights; in place.

    One library holds them all: torchao if it can, else bitsandbytes, and then the reason is returned. A ValueError says
    why neither can.
    """
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in names}
    reasons = [
        f"{name} is a Conv1D, which torchao has no NF4 form of"
        if isinstance(layer, Conv1D)
        else f"{name} has {layer.weight.numel()} weights, and torchao's NF4 takes multiples of {NF4_MULTIPLE}"
        for name, layer in layers.items()
        if isinstance(layer, Conv1D) or layer.weight.numel() % NF4_MULTIPLE
    ]
    for name, layer in layers.items():
        has_bias, weight = layer.bias is not None, layer.weight
        if reasons:
            new = _of_bitsandbytes(name, layer, f"quantize_base is True, but {reasons[0]}, and")
        else:
            new = FrozenNF4Linear(layer.in_features, layer.out_features, has_bias, weight.device, weight.dtype)
        model.set_submodule(name, new)
    return reasons[0] if reasons else ""


def _of_bitsandbytes(name: str, layer: Any, reason: str) -> nn.Module:
    weight, is_transposed = layer.weight, isinstance(layer, Conv1D)
    out_dim, in_dim = weight.T.shape if is_transposed else weight.shape
    remedy = "set model.quantize_base=False"
    try:
        from bitsandbytes.nn import Linear4bit  # an optional extra
    except ImportError as error:
        raise ValueError(f"{reason} {error}: pip install 'tfidf-tune[bitsandbytes]', or {remedy}") from error
    if in_dim % _BLOCK:  # bitsandbytes 0.50.2 dequantizes such weights wrongly on CPUs with AVX-512
        raise ValueError(f"{reason} bitsandbytes' takes multiples of {_BLOCK} inputs, not {in_dim} of {name}: {remedy}")
    has_bias = layer.bias is not None
    new: Any = Linear4bit(in_dim, out_dim, has_bias, weight.dtype, quant_type="nf4", device=weight.device)
    # Evaluation would otherwise reorder the weights for a kernel in bf16 that computes no gradients.
    new.support_avx512bf16_for_cpu = False
    new.weight = _quantized(weight, is_transposed=is_transposed)
    return new  # type: ignore[no-any-return]


def is_4bit(parameter: Tensor) -> bool:
    """Return whether a parameter is a 4-bit weight of bitsandbytes."""
    return hasattr(parameter, "quant_state")


def quantize_as_4bit(parameter: Any, value: Tensor) -> Tensor:
    """Quantize transformers' weight for the layer of a 4-bit parameter, which may be on the meta device."""
    quantized: Tensor = _quantized(value, is_transposed=parameter.is_transposed)
    return quantized


def dequantize_4bit(parameter: Any, device: str) -> Tensor:
    """Return transformers' weight that a 4-bit parameter stands for, on meta without values; others unchanged."""
    value: Tensor = parameter
    if not is_4bit(parameter):
        return value
    state = parameter.quant_state
    if device == "meta":
        value = torch.empty(state.shape, dtype=state.dtype, device="meta")
    else:
        from bitsandbytes import functional

        value = functional.dequantize_4bit(parameter.detach(), state).to(device)
    return value.T.contiguous() if parameter.is_transposed else value


def scales_of_4bit(parameter: Any) -> dict[str, Tensor]:
    """Return the 8-bit scales of the blocks of a 4-bit parameter, and the scales of these."""
    return {"absmax": parameter.quant_state.absmax, "nested_absmax": parameter.quant_state.state2.absmax}


def _quantized(value: Tensor, *, is_transposed: bool) -> Any:
    from bitsandbytes.functional import quantize_4bit, quantize_blockwise
    from bitsandbytes.nn import Params4bit

    if value.is_meta:
        with torch.device("cpu"):  # the codebook that the first call makes is kept, and must not be on meta
            quantize_blockwise(torch.zeros(1))
    source = (value.T if is_transposed else value).detach().contiguous()
    packed, state = quantize_4bit(source, quant_type="nf4", compress_statistics=True)
    parameter: Any = Params4bit(packed, quant_state=state, quant_type="nf4", bnb_quantized=True)
    parameter.is_transposed = is_transposed
    return parameter
