"""Linear layers: plain, with LoRA adapters, and with frozen NF4 weights.

NF4 is torchao's, and of bitsandbytes for what torchao cannot hold. A weight of bitsandbytes is
``[out, in]``; the model of transformers may have ``[in, out]`` (GPT-2's ``Conv1D``).
"""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torchtune.modules import FrozenNF4Linear, TransformerDecoder
from torchtune.modules.peft import LoRALinear
from transformers.pytorch_utils import Conv1D

# Torchtune's names, PEFT's.
_IS_ADAPTER = re.compile(r"\.lora_(a|b|A\.default|B\.default)\.weight$")
_BLOCK = 64
NF4_MULTIPLE = _BLOCK * 256
"""Weights of a block, times the blocks that share a scaler: torchao's defaults."""


@dataclass(frozen=True)
class LinearFactory:
    """Makes each linear layer of a model, so that one builder serves plain, LoRA and QLoRA models.

    LoRA: https://arxiv.org/abs/2106.09685. NF4 and QLoRA: https://arxiv.org/abs/2305.14314.

    Attributes:
        lora_attn_modules (Sequence[str]): layers of the attention that get adapters. Default: none.
        apply_lora_to_mlp (bool): adapters for the MLPs' layers too. Default: False.
        apply_lora_to_output (bool): adapters for the output projection too. Default: False.
        lora_rank (int): rank of the adapters. Default: 8.
        lora_alpha (float): the adapters' contribution is scaled by alpha / rank. Default: 16.
        lora_dropout (float): dropout before the adapters. Default: 0.0.
        quantize_base (bool): whether weights other than adapters and output projection are frozen
            NF4 tensors. Default: False.
    """

    lora_attn_modules: Sequence[str] = ()
    apply_lora_to_mlp: bool = False
    apply_lora_to_output: bool = False
    lora_rank: int = 8
    lora_alpha: float = 16
    lora_dropout: float = 0.0
    quantize_base: bool = False

    def attention(self, name: str, in_dim: int, out_dim: int, *, bias: bool) -> nn.Module:
        """Make the attention's layer of that name, from ``[..., in_dim]`` to ``[..., out_dim]``."""
        return self._linear(
            in_dim, out_dim, bias, name in self.lora_attn_modules, self.quantize_base
        )

    def mlp(self, in_dim: int, out_dim: int, *, bias: bool = True) -> nn.Module:
        """Make a layer of an MLP."""
        return self._linear(in_dim, out_dim, bias, self.apply_lora_to_mlp, self.quantize_base)

    def output(self, in_dim: int, out_dim: int, *, bias: bool) -> nn.Module:
        """Make the output projection, which is never quantized."""
        return self._linear(in_dim, out_dim, bias, self.apply_lora_to_output, False)

    def _linear(
        self, in_dim: int, out_dim: int, bias: bool, lora: bool, quantize: bool
    ) -> nn.Module:
        if quantize and in_dim * out_dim % NF4_MULTIPLE:
            raise ValueError(
                f"quantize_base: torchao's NF4 takes multiples of {NF4_MULTIPLE} weights, not "
                f"{in_dim} x {out_dim} of a layer"
            )
        layer: nn.Module
        if lora:
            layer = LoRALinear(
                in_dim,
                out_dim,
                rank=self.lora_rank,
                alpha=self.lora_alpha,
                dropout=self.lora_dropout,
                use_bias=bias,
                quantize_base=quantize,
            )
        elif quantize:
            layer = FrozenNF4Linear(in_dim, out_dim, bias=bias)
        else:
            layer = nn.Linear(in_dim, out_dim, bias=bias)
        return layer


PLAIN = LinearFactory()


def with_lora(builder: Callable[..., TransformerDecoder]) -> Callable[..., TransformerDecoder]:
    """Make the LoRA form of a builder, as torchtune's ``lora_`` builders are of its others.

    Args:
        builder (Callable[..., TransformerDecoder]): makes its linear layers by its argument
            ``linear``.

    Returns:
        Callable[..., TransformerDecoder]: takes the builder's other arguments and, on the same
        level, those of :class:`LinearFactory`; ``lora_attn_modules`` has to be given.
    """
    # A config is checked against the signature, so that it has the arguments of both, and which of
    # them are needed.
    lora_parameters = dict(inspect.signature(LinearFactory).parameters)
    attn_modules = lora_parameters["lora_attn_modules"]
    lora_parameters["lora_attn_modules"] = attn_modules.replace(default=inspect.Parameter.empty)
    builder_parameters = dict(inspect.signature(builder).parameters)
    del builder_parameters["linear"]

    @wraps(builder)
    def build(**arguments: Any) -> TransformerDecoder:
        given = lora_parameters.keys() & arguments.keys()
        settings = {name: arguments.pop(name) for name in given}
        return builder(**arguments, linear=LinearFactory(**settings))

    build.__name__ = build.__qualname__ = f"lora_{builder.__name__}"
    build.__doc__ = (
        f"The form with LoRA of :func:`{builder.__name__}`: its arguments, and "
        ":class:`LinearFactory`'s."
    )
    both = (*lora_parameters.values(), *builder_parameters.values())
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in both]
    signature = inspect.Signature(parameters, return_annotation=TransformerDecoder)
    build.__signature__ = signature  # type: ignore[attr-defined]
    return build


@dataclass(frozen=True)
class LoRASettings:
    """The settings that all LoRA layers of a model share, and torchtune's names of the adapted
    linear layers.
    """

    rank: int
    alpha: float
    dropout: float
    module_names: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module) -> "LoRASettings | None":
        """Read the settings off a model; None if it has no LoRA layers. Layers that differ are a
        ValueError.
        """
        peft: Any = getattr(model, "peft_config", None)
        if peft is not None:
            module_names = sorted(peft.target_modules)
            return cls(peft.r, peft.lora_alpha, peft.lora_dropout, tuple(module_names))
        adapters: dict[str, Any] = {
            name: module
            for name, module in model.named_modules()
            if hasattr(module, "adapter_params")
        }
        if not adapters:
            return None
        # Layers of other classes have no settings that could be read.
        kinds = {type(module) for module in adapters.values()}
        settings = set()
        if kinds == {LoRALinear}:
            for lora in adapters.values():
                dropout = float(getattr(lora.dropout, "p", 0.0))
                settings.add((lora.rank, lora.alpha, dropout))
        if len(settings) != 1:
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise ValueError(
                f"layers of {names} differ in (rank, alpha, dropout): {sorted(settings)}"
            )
        rank, alpha, dropout = settings.pop()
        module_names = sorted({name.rsplit(".", 1)[-1] for name in adapters})
        return cls(rank, alpha, dropout, tuple(module_names))

    @classmethod
    def require(cls, model: nn.Module) -> "LoRASettings":
        """Read the settings off a model, as :meth:`of`; a model without LoRA layers is a
        ValueError.
        """
        settings = cls.of(model)
        if settings is None:
            raise ValueError(
                "the model has no LoRA layers: name a LoRA builder, or use the recipe full_finetune"
            )
        return settings


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to a LoRA adapter, of torchtune or PEFT."""
    return _IS_ADAPTER.search(name) is not None


def quantize(model: nn.Module, names: list[str]) -> str:
    """Replace linear layers of a model by NF4 layers of torchao, or of bitsandbytes for the reason
    that is returned.
    """
    # Why torchao cannot hold some of the layers; then bitsandbytes has to hold them all.
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in names}
    obstacle = ""
    for name, layer in layers.items():
        obstacle = _torchao_obstacle(name, layer)
        if obstacle:
            break
    for name, layer in layers.items():
        if obstacle:
            reason = f"quantize_base is True, but {obstacle}, and"
            nf4_layer = _bitsandbytes_layer(name, layer, reason)
        else:
            nf4_layer = FrozenNF4Linear(
                layer.in_features,
                layer.out_features,
                bias=layer.bias is not None,
                device=layer.weight.device,
                dtype=layer.weight.dtype,
            )
        model.set_submodule(name, nf4_layer)
    return obstacle


def _torchao_obstacle(name: str, layer: Any) -> str:
    """Return why torchao cannot hold a linear layer, or nothing."""
    if isinstance(layer, Conv1D):
        return f"{name} is a Conv1D, which torchao has no NF4 form of"
    num_weights = layer.weight.numel()
    if num_weights % NF4_MULTIPLE:
        return (
            f"{name} has {num_weights} weights, and torchao's NF4 takes multiples of {NF4_MULTIPLE}"
        )
    return ""


def _bitsandbytes_layer(name: str, layer: Any, reason: str) -> nn.Module:
    weight = layer.weight
    is_transposed = isinstance(layer, Conv1D)
    out_dim, in_dim = weight.T.shape if is_transposed else weight.shape
    remedy = "set model.quantize_base=False"
    try:
        from bitsandbytes.nn import Linear4bit  # an optional extra
    except ImportError as error:
        raise ValueError(
            f"{reason} {error}: pip install 'tfidf-tune[bitsandbytes]', or {remedy}"
        ) from error
    if in_dim % _BLOCK:  # bitsandbytes 0.50.2 dequantizes such weights wrongly on CPUs with AVX-512
        raise ValueError(
            f"{reason} bitsandbytes' takes multiples of {_BLOCK} inputs, not {in_dim} of {name}: "
            f"{remedy}"
        )
    has_bias = layer.bias is not None
    new: Any = Linear4bit(
        in_dim, out_dim, has_bias, weight.dtype, quant_type="nf4", device=weight.device
    )
    # Evaluation would otherwise reorder the weights for a kernel in bf16 that computes no
    # gradients.
    new.support_avx512bf16_for_cpu = False
    new.weight = quantize_as_4bit(weight, is_transposed=is_transposed)
    return new  # type: ignore[no-any-return]


def is_4bit(parameter: Tensor) -> bool:
    """Return whether a parameter is a 4-bit weight of bitsandbytes."""
    return hasattr(parameter, "quant_state")


def dequantize_4bit(parameter: Any, device: str) -> Tensor:
    """Return transformers' weight that a 4-bit parameter stands for, on meta without values; others
    unchanged.
    """
    value: Tensor = parameter
    if not is_4bit(parameter):
        return value
    state = parameter.quant_state
    if device == "meta":
        value = torch.empty(state.shape, dtype=state.dtype, device="meta")
    else:
        from bitsandbytes import functional

        value = functional.dequantize_4bit(parameter.detach(), state).to(device)
    if parameter.is_transposed:
        value = value.T.contiguous()
    return value


def quantize_as_4bit(value: Tensor, *, is_transposed: bool) -> Any:
    """Quantize transformers' weight, which may be on the meta device, as the 4-bit parameter of a
    layer.
    """
    from bitsandbytes.functional import quantize_4bit, quantize_blockwise
    from bitsandbytes.nn import Params4bit

    if value.is_meta:
        # The codebook that the first call makes is kept, and must not be on meta.
        with torch.device("cpu"):
            quantize_blockwise(torch.zeros(1))
    if is_transposed:
        value = value.T
    source = value.detach().contiguous()
    packed, state = quantize_4bit(source, quant_type="nf4", compress_statistics=True)
    parameter: Any = Params4bit(packed, quant_state=state, quant_type="nf4", bnb_quantized=True)
    parameter.is_transposed = is_transposed
    return parameter
