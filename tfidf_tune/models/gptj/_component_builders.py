"""GPT-J of any size; the architecture is that of https://github.com/kingoflolz/mesh-transformer-jax."""

from torch import nn
from torchtune.modules import FeedForward, MultiHeadAttention, RotaryPositionalEmbeddings, TransformerDecoder

from tfidf_tune.models._blocks import ParallelSelfAttentionLayer, PartialRotaryEmbeddings
from tfidf_tune.models._linear import PLAIN, LinearFactory, with_lora


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

    Args:
        vocab_size (int): rows of the embedding, padding included.
        num_layers (int): number of layers.
        num_heads (int): number of attention heads.
        embed_dim (int): dimension of the embeddings.
        max_seq_len (int): longest sequence.
        rotary_dim (int): dimensions of each head that are rotated, in adjacent pairs.
        intermediate_dim (int | None): dimension inside the MLPs. Default: None, four times ``embed_dim``.
        norm_eps (float): epsilon of the layer norms. Default: 1e-5.
        attn_dropout (float): dropout of the attention weights. Default: 0.0.
        linear (LinearFactory): makes the linear layers. Default: plain ones.

    Returns:
        TransformerDecoder: the model, randomly initialised.
    """
    head_dim = embed_dim // num_heads
    hidden_dim = intermediate_dim or 4 * embed_dim
    pos_embeddings = PartialRotaryEmbeddings(RotaryPositionalEmbeddings(rotary_dim, max_seq_len))
    layers = [
        ParallelSelfAttentionLayer(  # without an mlp_norm: attention and MLP share one
            attn=MultiHeadAttention(
                embed_dim=embed_dim,
                num_heads=num_heads,
                num_kv_heads=num_heads,
                head_dim=head_dim,
                q_proj=linear.attention("q_proj", embed_dim, embed_dim, bias=False),
                k_proj=linear.attention("k_proj", embed_dim, embed_dim, bias=False),
                v_proj=linear.attention("v_proj", embed_dim, embed_dim, bias=False),
                output_proj=linear.attention("output_proj", embed_dim, embed_dim, bias=False),
                pos_embeddings=pos_embeddings,
                max_seq_len=max_seq_len,
                attn_dropout=attn_dropout,
            ),
            mlp=FeedForward(
                gate_proj=linear.mlp(embed_dim, hidden_dim, bias=True),
                down_proj=linear.mlp(hidden_dim, embed_dim, bias=True),
                activation=nn.GELU(approximate="tanh"),
            ),
            sa_norm=nn.LayerNorm(embed_dim, eps=norm_eps),
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
        output=linear.output(embed_dim, vocab_size, bias=True),
    )


lora_gptj = with_lora(gptj)
