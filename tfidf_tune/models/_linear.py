"""The linear layers of our builders: plain, with LoRA, or quantized."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torchtune.modules import FrozenNF4Linear
from torchtune.modules.peft import LoRALinear


@dataclass(frozen=True)
class LinearFactory:
    """Makes each linear layer of a model, so that one builder serves plain, LoRA and QLoRA models.

    LoRA: https://arxiv.org/abs/2106.09685. NF4 and QLoRA: https://arxiv.org/abs/2305.14314.

    Attributes:
        lora_attn_modules (Sequence[str]): names of the attention's layers that get adapters. Default: none.
        apply_lora_to_mlp (bool): adapters for the MLPs' layers too. Default: False.
        apply_lora_to_output (bool): adapters for the output projection too. Default: False.
        lora_rank (int): rank of the adapters. Default: 8.
        lora_alpha (float): the adapters' contribution is scaled by alpha / rank. Default: 16.
        lora_dropout (float): dropout before the adapters. Default: 0.0.
        quantize_base (bool): whether the weights, adapters and output projection aside, are frozen NF4 tensors.
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
        """Make a layer of the attention, which has adapters if it is named among those that shall.

        Args:
            name (str): torchtune's name of the layer, without those of the modules around it.
            in_dim (int): input dimension.
            out_dim (int): output dimension.
            bias (bool): whether it has a bias.

        Returns:
            nn.Module: maps ``[..., in_dim]`` to ``[..., out_dim]``.
        """
        return self._linear(in_dim, out_dim, bias, name in self.lora_attn_modules, self.quantize_base)

    def mlp(self, in_dim: int, out_dim: int, *, bias: bool) -> nn.Module:
        """Make a layer of an MLP; arguments are those of :meth:`attention`."""
        return self._linear(in_dim, out_dim, bias, self.apply_lora_to_mlp, self.quantize_base)

    def output(self, in_dim: int, out_dim: int, *, bias: bool) -> nn.Module:
        """Make the output projection, which is never quantized."""
        return self._linear(in_dim, out_dim, bias, self.apply_lora_to_output, False)

    def _linear(self, in_dim: int, out_dim: int, bias: bool, lora: bool, quantize: bool) -> nn.Module:
        layer: nn.Module
        if lora:
            layer = LoRALinear(
                in_dim,
                out_dim,
                self.lora_rank,
                self.lora_alpha,
                self.lora_dropout,
                use_bias=bias,
                quantize_base=quantize,
            )
        else:
            layer = (FrozenNF4Linear if quantize else nn.Linear)(in_dim, out_dim, bias=bias)
        return layer


PLAIN = LinearFactory()
