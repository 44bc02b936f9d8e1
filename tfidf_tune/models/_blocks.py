"""Blocks that torchtune lacks: rotary embeddings of every type, partial ones, and parallel residuals."""

from typing import Any

import torch
from torch import Tensor, nn
from torchtune.models.qwen2 import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import RotaryPositionalEmbeddings, TransformerSelfAttentionLayer
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class _ConfiguredRotary:
    """Rotary embeddings with the frequencies that transformers computes from a checkpoint's config.

    Put before a class of torchtune, which builds its table from ``theta`` and rotates.

    Args:
        config (PreTrainedConfig): with ``rope_parameters``.
        dim (int): dimensions of a head.
        max_seq_len (int): rows of the table.
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
