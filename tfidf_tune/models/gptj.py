"""GPT-J: builders, and the checkpoints' names.

The architecture is that of https://github.com/kingoflolz/mesh-transformer-jax.
"""

from functools import partial
from typing import ClassVar

from torch import nn
from torchtune.modules import RotaryPositionalEmbeddings, TransformerDecoder
from transformers import PreTrainedConfig

from tfidf_tune.models.family import DecoderSizes, ModelFamily, Projection, decoder
from tfidf_tune.models.gpt_neox import ParallelSelfAttentionLayer, PartialRotaryEmbeddings
from tfidf_tune.models.linear import PLAIN, LinearFactory, with_lora


def gptj(
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    embed_dim: int,
    max_seq_len: int,
    rotary_dim: int,
    intermediate_dim: int | None = None,
    norm_eps: float = 1e-5,
    attn_dropout: float = 0.0,
    linear: LinearFactory = PLAIN,
) -> TransformerDecoder:
    """Build a GPT-J decoder.

    Arguments are those of :func:`~tfidf_tune.models.gpt_neox.gpt_neox`, and ``rotary_dim``, the
    dimensions of each head that are rotated, in adjacent pairs; ``intermediate_dim`` is by default
    four times ``embed_dim``.
    """
    sizes = DecoderSizes(
        vocab_size=vocab_size,
        num_layers=num_layers,
        num_heads=num_heads,
        embed_dim=embed_dim,
        intermediate_dim=intermediate_dim or 4 * embed_dim,
        max_seq_len=max_seq_len,
    )
    square = Projection(embed_dim, embed_dim, bias=False)
    rotary = RotaryPositionalEmbeddings(rotary_dim, max_seq_len)
    return decoder(
        sizes,
        linear,
        {"q_proj": square, "k_proj": square, "v_proj": square, "output_proj": square},
        pos_embeddings=PartialRotaryEmbeddings(rotary),
        attn_dropout=attn_dropout,
        norm=partial(nn.LayerNorm, embed_dim, eps=norm_eps),
        activation=nn.GELU(approximate="tanh"),
        layer_class=ParallelSelfAttentionLayer,
        has_mlp_norm=False,
        output_bias=True,
    )


def gptj_6b(linear: LinearFactory = PLAIN) -> TransformerDecoder:
    """Build GPT-J 6B, with the sizes of
    https://huggingface.co/EleutherAI/gpt-j-6b/blob/main/config.json.
    """
    return gptj(
        vocab_size=50_400,
        num_layers=28,
        num_heads=16,
        embed_dim=4096,
        max_seq_len=2048,
        rotary_dim=64,
        linear=linear,
    )


lora_gptj = with_lora(gptj)
lora_gptj_6b = with_lora(gptj_6b)


class GPTJFamily(ModelFamily):
    """The ``gptj`` architecture of transformers. Only names differ, not layouts."""

    modules: ClassVar = {
        "transformer.wte": "tok_embeddings",
        "transformer.h.{}.ln_1": "layers.{}.sa_norm",
        "transformer.h.{}.attn.q_proj": "layers.{}.attn.q_proj",
        "transformer.h.{}.attn.k_proj": "layers.{}.attn.k_proj",
        "transformer.h.{}.attn.v_proj": "layers.{}.attn.v_proj",
        "transformer.h.{}.attn.out_proj": "layers.{}.attn.output_proj",
        "transformer.h.{}.mlp.fc_in": "layers.{}.mlp.w1",
        "transformer.h.{}.mlp.fc_out": "layers.{}.mlp.w2",
        "transformer.ln_f": "norm",
        "lm_head": "output",
    }
    target_parts = 2
    norm_eps = "layer_norm_epsilon"
    ignored = (".attn.bias", ".attn.masked_bias")

    def build(
        self, config: PreTrainedConfig, max_seq_len: int, linear: LinearFactory
    ) -> TransformerDecoder:
        """Build the model; dropout outside of the attention, which torchtune's layers lack, is a
        ValueError.
        """
        for name in ("embd_pdrop", "resid_pdrop"):
            dropout = getattr(config, name)
            if dropout:
                raise ValueError(f"{name} is {dropout}")
        return gptj(
            vocab_size=config.vocab_size,
            num_layers=config.n_layer,
            num_heads=config.n_head,
            embed_dim=config.n_embd,
            max_seq_len=max_seq_len,
            rotary_dim=config.rotary_dim,
            intermediate_dim=config.n_inner,
            norm_eps=config.layer_norm_epsilon,
            attn_dropout=config.attn_pdrop,
            linear=linear,
        )
