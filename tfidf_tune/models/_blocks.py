"""Blocks of GPT-NeoX and GPT-J that torchtune lacks: partial rotary embeddings and parallel residuals."""

from typing import Any

import torch
from torch import Tensor, nn
from torchtune.modules import TransformerSelfAttentionLayer


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
        """Run the layer.

        Args:
            x (Tensor): ``[b, s, d]``.
            mask (Any): see torchtune's ``MultiHeadAttention``. Default: None, causal.
            input_pos (Tensor | None): positions of the tokens. Default: None, in order.
            **kwargs (Any): ignored inputs of other layers.

        Returns:
            Tensor: ``[b, s, d]``.
        """
        normalized = self.sa_norm(x)
        attention = self.attn(normalized, normalized, mask=mask, input_pos=input_pos)
        mlp_input = normalized if isinstance(self.mlp_norm, nn.Identity) else self.mlp_norm(x)
        residual: Tensor = x + attention + self.mlp(mlp_input)
        return residual
