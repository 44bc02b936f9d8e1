"""Blocks that torchtune lacks: linear layers of every kind, rotary embeddings of every type, parallel residuals."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torchtune.models.qwen2 import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import (
    FeedForward,
    FrozenNF4Linear,
    RotaryPositionalEmbeddings,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
)
from torchtune.modules.peft import LoRALinear
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tfidf_tune.models._nf4 import NF4_MULTIPLE


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
        if quantize and in_dim * out_dim % NF4_MULTIPLE:
            raise ValueError(
                f"quantize_base is True, but torchao's NF4 takes multiples of {NF4_MULTIPLE} weights, not {in_dim} x "
                f"{out_dim} of a layer"
            )
        layer: nn.Module
        if lora:
            settings = self.lora_rank, self.lora_alpha, self.lora_dropout
            layer = LoRALinear(in_dim, out_dim, *settings, use_bias=bias, quantize_base=quantize)
        else:
            layer = (FrozenNF4Linear if quantize else nn.Linear)(in_dim, out_dim, bias=bias)
        return layer


PLAIN = LinearFactory()


def with_lora(builder: Callable[..., TransformerDecoder]) -> Callable[..., TransformerDecoder]:
    """Make the LoRA form of a builder, as torchtune's ``lora_`` builders are of its others.

    Args:
        builder (Callable[..., TransformerDecoder]): makes its linear layers by its argument ``linear``.

    Returns:
        Callable[..., TransformerDecoder]: takes the builder's other arguments and, on the same level, those of
        :class:`LinearFactory`; ``lora_attn_modules`` has to be given.
    """
    lora, own = (dict(inspect.signature(each).parameters) for each in (LinearFactory, builder))
    lora["lora_attn_modules"] = lora["lora_attn_modules"].replace(default=inspect.Parameter.empty)
    del own["linear"]

    @wraps(builder)
    def build(**arguments: Any) -> TransformerDecoder:
        settings = {name: arguments.pop(name) for name in lora.keys() & arguments.keys()}
        return builder(**arguments, linear=LinearFactory(**settings))

    build.__name__ = build.__qualname__ = f"lora_{builder.__name__}"
    build.__doc__ = (
        f"The form with LoRA of :func:`{builder.__name__}`: its arguments, and those of "
        ":class:`~tfidf_tune.models.LinearFactory`."
    )
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*lora.values(), *own.values())]
    build.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        parameters, return_annotation=TransformerDecoder
    )
    return build


class _ConfiguredRotary:
    """Rotary embeddings with the frequencies that transformers computes from a checkpoint's config.

    Put before a class of torchtune, which builds its table from ``theta`` and rotates.
    """

    def __init__(self, config: PreTrainedConfig, dim: int, max_seq_len: int) -> None:
        parameters = config.rope_parameters
        self.rope_type: str = parameters["rope_type"]
        base = float(parameters["rope_theta"])
        frequencies, self._scale = 1 / base ** (torch.arange(0, dim, 2, device="cpu").float() / dim), 1.0
        if self.rope_type != "default":
            with torch.device("cpu"):
                frequencies, self._scale = ROPE_INIT_FUNCTIONS[self.rope_type](config, torch.device("cpu"))
        self._frequencies: list[float] = frequencies.tolist()  # no tensor, which the meta device would empty
        super().__init__(dim, max_seq_len, base)  # type: ignore[call-arg]

    def rope_init(self) -> None:
        """Build the table."""
        module: Any = self
        module.register_buffer("theta", torch.tensor(self._frequencies, dtype=torch.float32), persistent=False)
        module.build_rope_cache(module.max_seq_len)
        module.cache = module.cache * self._scale


class ConfiguredRotaryEmbeddings(_ConfiguredRotary, RotaryPositionalEmbeddings):  # type: ignore[misc]
    """Of adjacent pairs; see :class:`_ConfiguredRotary`."""


class ConfiguredHalvesRotaryEmbeddings(_ConfiguredRotary, Qwen2RotaryPositionalEmbeddings):  # type: ignore[misc]
    """Of halves; see :class:`_ConfiguredRotary`."""


class PartialRotaryEmbeddings(nn.Module):
    """Rotary embeddings (https://arxiv.org/abs/2104.09864) of the first dimensions of each head.

    Args:
        rotary (nn.Module): embeddings of the part that is rotated: torchtune's ``RotaryPositionalEmbeddings`` rotates
            adjacent pairs, its ``Qwen2RotaryPositionalEmbeddings`` halves.
    """

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, x: Tensor, *, input_pos: Tensor | None = None) -> Tensor:
        """Rotate ``x`` of ``[b, s, n_h, h_d]`` at integer positions ``[b, s]`` or ``[s]``; None: in order."""
        dim: Any = self.rotary.dim
        return torch.cat([self.rotary(x[..., :dim], input_pos=input_pos), x[..., dim:]], dim=-1)


class ParallelSelfAttentionLayer(TransformerSelfAttentionLayer):  # type: ignore[misc]
    """Attention and MLP side by side: ``x + attn(sa_norm(x)) + mlp(mlp_norm(x))``.

    Without ``mlp_norm`` the MLP has the same input as the attention, as in GPT-J. The base class is what activation
    checkpointing, ``torch.compile`` and KV caches look for.
    """

    def forward(self, x: Tensor, *, mask: Any = None, input_pos: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Run the layer on ``[b, s, d]``; see torchtune's ``TransformerSelfAttentionLayer``."""
        normalized = self.sa_norm(x)
        attention = self.attn(normalized, normalized, mask=mask, input_pos=input_pos)
        mlp_input = normalized if isinstance(self.mlp_norm, nn.Identity) else self.mlp_norm(x)
        residual: Tensor = x + attention + self.mlp(mlp_input)
        return residual


def gpt_decoder(
    attention: Callable[[], nn.Module],
    linear: LinearFactory,
    sizes: Sequence[int],
    *,
    norm_eps: float,
    activation: nn.Module,
    is_parallel: bool = True,
    has_mlp_norm: bool = True,
    output_bias: bool = False,
) -> TransformerDecoder:
    """Build a decoder of layer norms and MLPs with two biased layers around an attention, as GPT-NeoX and GPT-J are."""
    vocab_size, num_layers, num_heads, embed_dim, intermediate_dim, max_seq_len = sizes
    norm = partial(nn.LayerNorm, embed_dim, eps=norm_eps)
    layer_class = ParallelSelfAttentionLayer if is_parallel else TransformerSelfAttentionLayer
    layers = [
        layer_class(
            attn=attention(),
            mlp=FeedForward(
                gate_proj=linear.mlp(embed_dim, intermediate_dim),
                down_proj=linear.mlp(intermediate_dim, embed_dim),
                activation=activation,
            ),
            sa_norm=norm(),
            mlp_norm=norm() if has_mlp_norm else None,
        )
        for _ in range(num_layers)
    ]
    return TransformerDecoder(
        tok_embeddings=nn.Embedding(vocab_size, embed_dim),
        layers=layers,
        max_seq_len=max_seq_len,
        num_heads=num_heads,
        head_dim=embed_dim // num_heads,
        norm=norm(),
        output=linear.output(embed_dim, vocab_size, bias=output_bias),
    )
