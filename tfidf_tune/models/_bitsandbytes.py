"""Linear layers of bitsandbytes with frozen NF4 weights, for what torchao cannot hold.

The weight of such a layer is ``[out, in]``; the model of transformers may have ``[in, out]`` (GPT-2's ``Conv1D``).
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

_BLOCK = 64


def nf4_linear(name: str, module: Any, reason: str) -> nn.Module:
    """Return the layer that takes the place of a linear layer, on its device; ``reason`` says why not torchao's.

    Raises:
        ValueError: If bitsandbytes is not installed, or the layer does not have whole blocks of weights per output.
    """
    weight, is_transposed = module.weight, isinstance(module, Conv1D)
    out_dim, in_dim = weight.T.shape if is_transposed else weight.shape
    try:
        from bitsandbytes.nn import Linear4bit  # an optional extra
    except ImportError as error:
        raise ValueError(
            f"{reason}, and {error}: pip install 'tfidf-tune[bitsandbytes]', or set model.quantize_base=False"
        ) from error
    if in_dim % _BLOCK:  # bitsandbytes 0.50.2 dequantizes such weights wrongly on CPUs with AVX-512
        raise ValueError(
            f"{reason}, and bitsandbytes' NF4 takes multiples of {_BLOCK} inputs, not {in_dim} of {name}: set "
            "model.quantize_base=False"
        )
    has_bias = module.bias is not None
    layer: Any = Linear4bit(in_dim, out_dim, has_bias, weight.dtype, quant_type="nf4", device=weight.device)
    # Evaluation would otherwise reorder the weights for a kernel in bf16 that computes no gradients.
    layer.support_avx512bf16_for_cpu = False
    layer.weight = _quantize(weight, is_transposed=is_transposed)
    return layer  # type: ignore[no-any-return]


def is_4bit(parameter: Tensor) -> bool:
    """Return whether a parameter is a 4-bit weight of bitsandbytes."""
    return hasattr(parameter, "quant_state")


def quantize_as_4bit(parameter: Any, value: Tensor) -> Tensor:
    """Quantize transformers' weight for the layer of a 4-bit parameter, which may be on the meta device."""
    quantized: Tensor = _quantize(value, is_transposed=parameter.is_transposed)
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


def _quantize(value: Tensor, *, is_transposed: bool) -> Any:
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
