"""The linear layers of our builders: plain, with LoRA, or quantized."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchtune.modules import FrozenNF4Linear, TransformerDecoder
from torchtune.modules.peft import LoRALinear


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
        quantize_base (bool): whether weights other than adapters and output projection are frozen NF4 tensors.
            Default: False.
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
        return self._linear(in_dim, out_dim, bias, name in self.lora_attn_modules, self.quantize_base)

    def mlp(self, in_dim: int, out_dim: int, *, bias: bool = True) -> nn.Module:
        """Make a layer of an MLP."""
        return self._linear(in_dim, out_dim, bias, self.apply_lora_to_mlp, self.quantize_base)

    def output(self, in_dim: int, out_dim: int, *, bias: bool) -> nn.Module:
        """Make the output projection, which is never quantized."""
        return self._linear(in_dim, out_dim, bias, self.apply_lora_to_output, False)

    def _linear(self, in_dim: int, out_dim: int, bias: bool, lora: bool, quantize: bool) -> nn.Module:
        if not lora:
            plain: nn.Module = (FrozenNF4Linear if quantize else nn.Linear)(in_dim, out_dim, bias=bias)
            return plain
        adapted: nn.Module = LoRALinear(
            in_dim, out_dim, self.lora_rank, self.lora_alpha, self.lora_dropout, use_bias=bias, quantize_base=quantize
        )
        return adapted


PLAIN = LinearFactory()


def with_lora(builder: Callable[..., TransformerDecoder]) -> Callable[..., TransformerDecoder]:
    """Make the LoRA form of a builder, as torchtune's ``lora_`` builders are of its others.

    Args:
        builder (Callable[..., TransformerDecoder]): makes its linear layers by its argument ``linear``.

    Returns:
        Callable[..., TransformerDecoder]: takes the builder's other arguments and, on the same level, those of
        :class:`LinearFactory`; ``lora_attn_modules`` has to be given.
    """
    lora = dict(inspect.signature(LinearFactory).parameters)
    lora["lora_attn_modules"] = lora["lora_attn_modules"].replace(default=inspect.Parameter.empty)
    own = [each for each in inspect.signature(builder).parameters.values() if each.name != "linear"]

    def build(**arguments: Any) -> TransformerDecoder:
        settings = {name: arguments.pop(name) for name in lora if name in arguments}
        return builder(**arguments, linear=LinearFactory(**settings))

    build.__name__ = build.__qualname__ = f"lora_{builder.__name__}"
    build.__module__ = builder.__module__
    build.__doc__ = (
        f"The form with LoRA of :func:`{builder.__name__}`: its arguments, and those of "
        ":class:`~tfidf_tune.models.LinearFactory`."
    )
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*lora.values(), *own)]
    build.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        parameters, return_annotation=TransformerDecoder
    )
    return build
