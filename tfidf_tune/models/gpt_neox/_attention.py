"""Attention with one linear layer for queries, keys and values, as GPT-NeoX checkpoints have it."""

from typing import Any

import torch
from torch import Tensor, nn
from torchtune.modules import KVCache
from torchtune.modules.attention_utils import _sdpa_or_flex_attention


class GPTNeoXAttention(nn.Module):
    """Multi-head attention with fused projections; torchtune's ``MultiHeadAttention`` has three separate ones.

    Kept fused because that is what PEFT adapts: one LoRA A for queries, keys and values. The interface is that of
    torchtune's attention. The output of ``query_key_value`` has, for each head, its query, key and value.

    Args:
        num_heads (int): heads of queries, keys and values alike.
        head_dim (int): dimension of a head.
        query_key_value (nn.Module): ``[..., d]`` to ``[..., 3 * d]`` with ``d = num_heads * head_dim``.
        output_proj (nn.Module): ``[..., d]`` to ``[..., d]``.
        pos_embeddings (nn.Module): positional embeddings of queries and keys.
        attn_dropout (float): dropout of the attention weights. Default: 0.0.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        head_dim: int,
        query_key_value: nn.Module,
        output_proj: nn.Module,
        pos_embeddings: nn.Module,
        attn_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.query_key_value = query_key_value
        self.output_proj = output_proj
        self.pos_embeddings = pos_embeddings
        self.attn_dropout = attn_dropout
        self.kv_cache: Any = None
        self.cache_enabled = False
        self._attention_call = _sdpa_or_flex_attention()

    def setup_cache(self, batch_size: int, dtype: torch.dtype, max_seq_len: int) -> None:
        """Set up the key and value caches for generation.

        Args:
            batch_size (int): rows.
            dtype (torch.dtype): of keys and values.
            max_seq_len (int): most positions.
        """
        if self.kv_cache is None:
            self.kv_cache = KVCache(batch_size, max_seq_len, self.num_heads, self.head_dim, dtype)
            self.cache_enabled = True

    def reset_cache(self) -> None:
        """Empty the caches.

        Raises:
            RuntimeError: If there are none.
        """
        if self.kv_cache is None:
            raise RuntimeError("there are no key and value caches to reset: call setup_caches() first")
        self.kv_cache.reset()

    def forward(self, x: Tensor, y: Tensor, *, mask: Any = None, input_pos: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            x (Tensor): ``[b, s, d]``.
            y (Tensor): the same as ``x``: self-attention has one input.
            mask (Any): boolean ``[b, s, s]`` or a BlockMask, True where attended to. Default: None, causal.
            input_pos (Tensor | None): positions of the tokens. Default: None, in order.

        Returns:
            Tensor: ``[b, s, d]``.
        """
        b, s, d = x.shape
        # [b, s, n_h, 3 * h_d] -> three of [b, s, n_h, h_d]
        q, k, v = self.query_key_value(x).view(b, s, self.num_heads, 3 * self.head_dim).chunk(3, dim=-1)
        q = self.pos_embeddings(q, input_pos=input_pos).transpose(1, 2)
        k = self.pos_embeddings(k, input_pos=input_pos).transpose(1, 2)
        v = v.transpose(1, 2)
        if self.kv_cache is not None and self.cache_enabled:
            k, v = self.kv_cache.update(k, v)
        attended = self._attention_call(
            q,
            k,
            v,
            mask=mask,
            dropout_p=self.attn_dropout if self.training else 0.0,
            is_causal=self.kv_cache is None and mask is None,
        )
        output: Tensor = self.output_proj(attended.transpose(1, 2).reshape(b, s, d))
        return output
