"""GPT-NeoX of any size: "GPT-NeoX-20B: An Open-Source Autoregressive Language Model", https://arxiv.org/abs/2204.06745."""

from torch import nn
from torchtune.models.qwen2 import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import FeedForward, TransformerDecoder, TransformerSelfAttentionLayer

from tfidf_tune.models._blocks import ParallelSelfAttentionLayer, PartialRotaryEmbeddings
from tfidf_tune.models._linear import PLAIN, LinearFactory, with_lora
from tfidf_tune.models.gpt_neox._attention import GPTNeoXAttention


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
        use_parallel_residual (bool): attention and MLP side by side, not one after the other. Default: True.
        linear (LinearFactory): makes the linear layers. Default: plain ones.

    Returns:
        TransformerDecoder: the model, randomly initialised.
    """
    head_dim = embed_dim // num_heads
    pos_embeddings = PartialRotaryEmbeddings(
        Qwen2RotaryPositionalEmbeddings(int(head_dim * rotary_pct), max_seq_len, rope_base)
    )
    layer_class = ParallelSelfAttentionLayer if use_parallel_residual else TransformerSelfAttentionLayer
    layers = [
        layer_class(
            attn=GPTNeoXAttention(
                num_heads=num_heads,
                head_dim=head_dim,
                query_key_value=linear.attention("query_key_value", embed_dim, 3 * embed_dim, bias=attention_bias),
                output_proj=linear.attention("output_proj", embed_dim, embed_dim, bias=attention_bias),
                pos_embeddings=pos_embeddings,
                attn_dropout=attn_dropout,
            ),
            mlp=FeedForward(
                gate_proj=linear.mlp(embed_dim, intermediate_dim, bias=True),
                down_proj=linear.mlp(intermediate_dim, embed_dim, bias=True),
                activation=nn.GELU(),
            ),
            sa_norm=nn.LayerNorm(embed_dim, eps=norm_eps),
            mlp_norm=nn.LayerNorm(embed_dim, eps=norm_eps),
        )
        for _ in range(num_layers)
    ]
    return TransformerDecoder(
        tok_embeddings=nn.Embedding(vocab_size, embed_dim),
        layers=layers,
        max_seq_len=max_seq_len,
        num_heads=num_heads,
        head_dim=head_dim,
        norm=nn.LayerNorm(embed_dim, eps=norm_eps),
        output=linear.output(embed_dim, vocab_size, bias=False),
    )


lora_gpt_neox = with_lora(gpt_neox)
