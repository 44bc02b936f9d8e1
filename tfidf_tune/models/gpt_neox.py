"""GPT-NeoX and Pythia: builders, and the checkpoints' names.

"GPT-NeoX-20B: An Open-Source Autoregressive Language Model", https://arxiv.org/abs/2204.06745;
"Pythia: A Suite for Analyzing Large Language Models", https://arxiv.org/abs/2304.01373.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchtune.models.qwen2 import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import MultiHeadAttention, TransformerDecoder, TransformerSelfAttentionLayer
from transformers import PreTrainedConfig

from tfidf_tune.models.family import DecoderSizes, ModelFamily, Projection, decoder
from tfidf_tune.models.linear import PLAIN, LinearFactory, with_lora


class PartialRotaryEmbeddings(nn.Module):
    """Rotary embeddings (https://arxiv.org/abs/2104.09864) of the first dimensions of each head.

    torchtune's ``RotaryPositionalEmbeddings`` rotates adjacent pairs, its
    ``Qwen2RotaryPositionalEmbeddings`` halves.
    """

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, x: Tensor, *, input_pos: Tensor | None = None) -> Tensor:
        """Rotate ``x`` of ``[b, s, n_h, h_d]`` at integer positions ``[b, s]`` or ``[s]``; None: in
        order.
        """
        dim: Any = self.rotary.dim
        rotated = self.rotary(x[..., :dim], input_pos=input_pos)
        return torch.cat([rotated, x[..., dim:]], dim=-1)


class ParallelSelfAttentionLayer(TransformerSelfAttentionLayer):  # type: ignore[misc]
    """Attention and MLP side by side: ``x + attn(sa_norm(x)) + mlp(mlp_norm(x))``.

    Without ``mlp_norm`` the MLP has the same input as the attention, as in GPT-J. The base class is
    what activation checkpointing, ``torch.compile`` and KV caches look for.
    """

    def forward(
        self, x: Tensor, *, mask: Any = None, input_pos: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Run the layer on ``[b, s, d]``; see torchtune's ``TransformerSelfAttentionLayer``."""
        normalized = self.sa_norm(x)
        attention = self.attn(normalized, normalized, mask=mask, input_pos=input_pos)
        mlp_input = normalized
        if not isinstance(self.mlp_norm, nn.Identity):
            mlp_input = self.mlp_norm(x)
        residual: Tensor = x + attention + self.mlp(mlp_input)
        return residual


class GPTNeoXAttention(MultiHeadAttention):  # type: ignore[misc]
    """Multi-head attention with one linear layer for queries, keys and values, as GPT-NeoX
    checkpoints have it.

    It stays one layer because that is what PEFT adapts: one LoRA A for queries, keys and values.
    The output of ``query_key_value``, ``[..., 3 * d]``, has for each head its query, key and value.
    The settings, and caches, are those of torchtune's attention.
    """

    def __init__(
        self,
        *,
        query_key_value: nn.Module,
        output_proj: nn.Module,
        pos_embeddings: nn.Module,
        **settings: Any,
    ) -> None:
        super().__init__(q_proj=None, k_proj=None, v_proj=None, output_proj=None, **settings)
        # In this order, which is that of the parameters in resume checkpoints and of random draws.
        self.query_key_value = query_key_value
        self.output_proj = output_proj
        self.pos_embeddings = pos_embeddings

    def forward(
        self, x: Tensor, y: Tensor, *, mask: Any = None, input_pos: Tensor | None = None
    ) -> Tensor:
        """Attend within ``x`` of ``[b, s, d]``, which is also ``y``; see torchtune's
        ``MultiHeadAttention``.
        """
        b, s, d = x.shape
        # [b, s, n_h, 3 * h_d] -> three of [b, s, n_h, h_d]
        qkv = self.query_key_value(x).view(b, s, self.num_heads, 3 * self.head_dim)
        q, k, v = qkv.chunk(3, dim=-1)
        q = self.pos_embeddings(q, input_pos=input_pos).transpose(1, 2)
        k = self.pos_embeddings(k, input_pos=input_pos).transpose(1, 2)
        v = v.transpose(1, 2)
        if self.kv_cache is not None and self.cache_enabled:
            k, v = self.kv_cache.update(k, v)
        dropout_p = self.attn_dropout if self.training else 0.0
        is_causal = self.kv_cache is None and mask is None
        attended = self._attention_call(
            q, k, v, mask=mask, dropout_p=dropout_p, is_causal=is_causal
        )
        joined_heads = attended.transpose(1, 2).reshape(b, s, d)
        output: Tensor = self.output_proj(joined_heads)
        return output


def gpt_neox(
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    embed_dim: int,
    intermediate_dim: int,
    max_seq_len: int,
    rotary_pct: float = 0.25,
    rope_base: float = 10_000.0,
    norm_eps: float = 1e-5,
    attn_dropout: float = 0.0,
    attention_bias: bool = True,
    use_parallel_residual: bool = True,
    linear: LinearFactory = PLAIN,
) -> TransformerDecoder:
    """Build a GPT-NeoX decoder.

    Args:
        vocab_size (int): rows of the embedding, padding included.
        num_layers (int): number of layers.
        num_heads (int): number of attention heads.
        embed_dim (int): dimension of the embeddings.
        intermediate_dim (int): dimension inside the MLPs.
        max_seq_len (int): longest sequence.
        rotary_pct (float): part of each head that is rotated, in halves. Default: 0.25.
        rope_base (float): base of the rotary frequencies. Default: 10000.
        norm_eps (float): epsilon of the layer norms. Default: 1e-5.
        attn_dropout (float): dropout of the attention weights. Default: 0.0.
        attention_bias (bool): whether the attention's linear layers have a bias. Default: True.
        use_parallel_residual (bool): attention and MLP side by side, not one after the other.
            Default: True.
        linear (LinearFactory): makes the linear layers. Default: plain ones.
    """
    sizes = DecoderSizes(
        vocab_size=vocab_size,
        num_layers=num_layers,
        num_heads=num_heads,
        embed_dim=embed_dim,
        intermediate_dim=intermediate_dim,
        max_seq_len=max_seq_len,
    )
    projections = {
        "query_key_value": Projection(embed_dim, 3 * embed_dim, bias=attention_bias),
        "output_proj": Projection(embed_dim, embed_dim, bias=attention_bias),
    }
    head_dim = embed_dim // num_heads
    rotary_dim = int(head_dim * rotary_pct)
    rotary = Qwen2RotaryPositionalEmbeddings(rotary_dim, max_seq_len, rope_base)
    layer_class = TransformerSelfAttentionLayer
    if use_parallel_residual:
        layer_class = ParallelSelfAttentionLayer
    return decoder(
        sizes,
        linear,
        projections,
        pos_embeddings=PartialRotaryEmbeddings(rotary),
        attn_dropout=attn_dropout,
        norm=partial(nn.LayerNorm, embed_dim, eps=norm_eps),
        activation=nn.GELU(),
        attention_class=GPTNeoXAttention,
        layer_class=layer_class,
    )


# vocab_size, num_layers, num_heads, embed_dim of https://huggingface.co/EleutherAI/pythia-70m and
# so on. MLPs are four times as wide; all have 2,048 positions.
_PYTHIA: dict[str, tuple[int, int, int, int]] = {
    "70m": (50_304, 6, 8, 512),
    "160m": (50_304, 12, 12, 768),
    "410m": (50_304, 24, 16, 1024),
    "1b": (50_304, 16, 8, 2048),
    "1.4b": (50_304, 24, 16, 2048),
    "2.8b": (50_304, 32, 32, 2560),
    "6.9b": (50_432, 32, 32, 4096),
    "12b": (50_688, 36, 40, 5120),
}


def pythia(size: str, linear: LinearFactory = PLAIN) -> TransformerDecoder:
    """Build a Pythia model.

    Args:
        size (str): ``70m``, ``160m``, ``410m``, ``1b``, ``1.4b``, ``2.8b``, ``6.9b`` or ``12b``.
        linear (LinearFactory): makes the linear layers. Default: plain ones.

    Raises:
        ValueError: If the size is another one.
    """
    if size not in _PYTHIA:
        raise ValueError(f"no Pythia has the size '{size}': possible are {', '.join(_PYTHIA)}")
    vocab_size, num_layers, num_heads, embed_dim = _PYTHIA[size]
    return gpt_neox(
        vocab_size, num_layers, num_heads, embed_dim, 4 * embed_dim, max_seq_len=2048, linear=linear
    )


lora_gpt_neox = with_lora(gpt_neox)
lora_pythia = with_lora(pythia)


class GPTNeoXFamily(ModelFamily):
    """The ``gpt_neox`` architecture of transformers. Only names differ, not layouts."""

    modules: ClassVar = {
        "gpt_neox.embed_in": "tok_embeddings",
        "gpt_neox.layers.{}.input_layernorm": "layers.{}.sa_norm",
        "gpt_neox.layers.{}.post_attention_layernorm": "layers.{}.mlp_norm",
        "gpt_neox.layers.{}.attention.query_key_value": "layers.{}.attn.query_key_value",
        "gpt_neox.layers.{}.attention.dense": "layers.{}.attn.output_proj",
        "gpt_neox.layers.{}.mlp.dense_h_to_4h": "layers.{}.mlp.w1",
        "gpt_neox.layers.{}.mlp.dense_4h_to_h": "layers.{}.mlp.w2",
        "gpt_neox.final_layer_norm": "norm",
        "embed_out": "output",
        "lm_head": "output",
    }
    norm_eps = "layer_norm_eps"
    ignored = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")

    def build(
        self, config: PreTrainedConfig, max_seq_len: int, linear: LinearFactory
    ) -> TransformerDecoder:
        """Build the model; dropout outside of the attention, which torchtune's layers lack, is a
        ValueError.
        """
        if config.hidden_dropout:
            raise ValueError(f"hidden_dropout is {config.hidden_dropout}")
        return gpt_neox(
            vocab_size=config.vocab_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            embed_dim=config.hidden_size,
            intermediate_dim=config.intermediate_size,
            max_seq_len=max_seq_len,
            rotary_pct=config.rope_parameters["partial_rotary_factor"],
            rope_base=config.rope_parameters["rope_theta"],
            norm_eps=config.layer_norm_eps,
            attn_dropout=config.attention_dropout,
            attention_bias=config.attention_bias,
            use_parallel_residual=config.use_parallel_residual,
            linear=linear,
        )

    def settings(
        self, model: nn.Module, config: PreTrainedConfig
    ) -> Iterator[tuple[str, Any, Any]]:
        """Yield the rotated part and the residual in addition to what every family has."""
        yield from super().settings(model, config)
        layer: Any = model.get_submodule("layers.0")
        rotary = layer.attn.pos_embeddings.rotary
        head_dim = config.hidden_size // config.num_attention_heads
        rotated = head_dim * config.rope_parameters["partial_rotary_factor"]
        yield "rotary dimensions of a head", int(rotated), rotary.dim
        is_parallel = isinstance(layer, ParallelSelfAttentionLayer)
        yield "use_parallel_residual", config.use_parallel_residual, is_parallel
