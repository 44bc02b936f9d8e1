"""TinyLlama, and the checkpoints of Llama and of the architectures that share its names.

Llama-2 7B and 13B are torchtune's own ``llama2_7b``, ``llama2_13b`` and their ``lora_`` forms.
"""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torchtune.models.gemma.gemma_norm_embedding import GemmaNormEmbeddings
from torchtune.models.gemma.rms_norm import GemmaRMSNorm
from torchtune.models.llama2 import llama2, lora_llama2
from torchtune.models.qwen2 import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import RMSNorm, RotaryPositionalEmbeddings, TransformerDecoder
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tfidf_tune.models.family import DecoderSizes, ModelFamily, Projection, activation, decoder
from tfidf_tune.models.linear import PLAIN, LinearFactory, with_lora


def tinyllama_1_1b(linear: LinearFactory = PLAIN) -> TransformerDecoder:
    """Build TinyLlama 1.1B, "TinyLlama: An Open-Source Small Language Model"
    (https://arxiv.org/abs/2401.02385).
    """
    builder = llama2 if linear == PLAIN else partial(lora_llama2, **asdict(linear))
    # https://huggingface.co/TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T/blob/main/config.json
    model: TransformerDecoder = builder(
        vocab_size=32_000,
        num_layers=22,
        num_heads=32,
        num_kv_heads=4,
        embed_dim=2048,
        max_seq_len=2048,
        intermediate_dim=5632,
        attn_dropout=0.0,
        norm_eps=1e-5,
    )
    return model


lora_tinyllama_1_1b = with_lora(tinyllama_1_1b)


class _ConfiguredRotary:
    """Rotary embeddings with the frequencies that transformers computes from a config, see
    :meth:`rope_init`.
    """

    def __init__(self, config: PreTrainedConfig, dim: int, max_seq_len: int) -> None:
        self._config = config
        self.rope_type: str = config.rope_parameters["rope_type"]
        super().__init__(dim, max_seq_len, float(config.rope_parameters["rope_theta"]))  # type: ignore[call-arg]

    def rope_init(self) -> None:
        """Build the table; called by the class of torchtune, which rotates, and after loading."""
        module: Any = self
        with torch.device("cpu"):  # also within the context of another device
            if self.rope_type == "default":
                exponents = torch.arange(0, module.dim, 2).float() / module.dim
                frequencies = 1 / module.base**exponents
                scale = 1.0
            else:
                initialize = ROPE_INIT_FUNCTIONS[self.rope_type]
                frequencies, scale = initialize(self._config, torch.device("cpu"))
        # Of a list, so that it is on that device.
        theta = torch.tensor(frequencies.tolist(), dtype=torch.float32)
        module.register_buffer("theta", theta, persistent=False)
        module.build_rope_cache(module.max_seq_len)
        module.cache = module.cache * scale


class _RotatedPairs(_ConfiguredRotary, RotaryPositionalEmbeddings): ...  # type: ignore[misc]


class _RotatedHalves(_ConfiguredRotary, Qwen2RotaryPositionalEmbeddings): ...  # type: ignore[misc]


class LlamaFamily(ModelFamily):
    """The ``llama`` architecture of transformers (Llama 2 to 3.3, TinyLlama), and ``mistral``,
    ``qwen2``, ``gemma``.

    They differ in what the settings compare, and in the rotary embedding: torchtune's model of
    Qwen2 rotates halves of a head as transformers does, its other models adjacent pairs, for which
    the rows of q and k are reordered.

    Args:
        rotates_halves (bool): whether torchtune's model rotates halves. Default: False.
        is_gemma (bool): Gemma's norms, which add 1 to their weights, and scaled embeddings.
            Default: False.
        qkv_bias (bool | None): whether the projections to q, k and v have biases, and that of the
            output none. Default: None, all four as ``attention_bias`` says.
    """

    modules: ClassVar = {
        "model.embed_tokens": "tok_embeddings",
        "model.layers.{}.input_layernorm": "layers.{}.sa_norm",
        "model.layers.{}.self_attn.q_proj": "layers.{}.attn.q_proj",
        "model.layers.{}.self_attn.k_proj": "layers.{}.attn.k_proj",
        "model.layers.{}.self_attn.v_proj": "layers.{}.attn.v_proj",
        "model.layers.{}.self_attn.o_proj": "layers.{}.attn.output_proj",
        "model.layers.{}.post_attention_layernorm": "layers.{}.mlp_norm",
        "model.layers.{}.mlp.gate_proj": "layers.{}.mlp.w1",
        "model.layers.{}.mlp.down_proj": "layers.{}.mlp.w2",
        "model.layers.{}.mlp.up_proj": "layers.{}.mlp.w3",
        "model.norm": "norm",
        "lm_head": "output",
    }
    norm_weight = "scale"
    norm_eps = "rms_norm_eps"
    ignored = (".rotary_emb.inv_freq",)

    def __init__(
        self, *, rotates_halves: bool = False, is_gemma: bool = False, qkv_bias: bool | None = None
    ) -> None:
        self._rotates_halves = rotates_halves
        self._norm: type[nn.Module] = GemmaRMSNorm if is_gemma else RMSNorm
        self._embeddings: type[nn.Module] = GemmaNormEmbeddings if is_gemma else nn.Embedding
        self._qkv_bias = qkv_bias

    def build(
        self, config: PreTrainedConfig, max_seq_len: int, linear: LinearFactory
    ) -> TransformerDecoder:
        """Build the model; rotary embeddings that change with the length, and other activations,
        are a ValueError.
        """
        rope = config.rope_parameters
        limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        changes_with_length = rope["rope_type"] in ("dynamic", "longrope")
        if changes_with_length and max_seq_len > limit:  # no table has such frequencies
            raise ValueError(
                f"rotary embeddings of the type '{rope['rope_type']}' change beyond {limit} tokens"
            )
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError("only a part of each head is rotated")
        # Biases are settings of some architectures, constants of others.
        if self._qkv_bias is None:
            qkv_bias = bool(getattr(config, "attention_bias", False))
            output_bias = qkv_bias
        else:
            qkv_bias = self._qkv_bias
            output_bias = False
        # The dimensions of queries and keys are all heads', which need not be those of the model.
        dim = config.hidden_size
        head_dim = _head_dim(config)
        query_dim = config.num_attention_heads * head_dim
        key_dim = config.num_key_value_heads * head_dim
        sizes = DecoderSizes(
            vocab_size=config.vocab_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            embed_dim=dim,
            intermediate_dim=config.intermediate_size,
            max_seq_len=max_seq_len,
        )
        projections = {
            "q_proj": Projection(dim, query_dim, bias=qkv_bias),
            "k_proj": Projection(dim, key_dim, bias=qkv_bias),
            "v_proj": Projection(dim, key_dim, bias=qkv_bias),
            "output_proj": Projection(query_dim, dim, bias=output_bias),
        }
        rotary_class = _RotatedHalves if self._rotates_halves else _RotatedPairs
        rotary = rotary_class(config, head_dim, max_seq_len)
        has_mlp_bias = bool(getattr(config, "mlp_bias", False))
        return decoder(
            sizes,
            linear,
            projections,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            pos_embeddings=rotary,
            attn_dropout=config.attention_dropout or 0.0,
            norm=partial(self._norm, dim, eps=config.rms_norm_eps),
            activation=activation(config.hidden_act),
            is_gated=True,
            mlp_bias=has_mlp_bias,
            embedding_class=self._embeddings,
            output_bias=None if config.tie_word_embeddings else False,
        )

    def to_layout(
        self, name: str, value: Tensor, config: PreTrainedConfig, *, of_hf: bool
    ) -> Tensor:
        """Reorder q's and k's rows between halves, Hugging Face's, and adjacent pairs."""
        if self._rotates_halves or not name.endswith(("q_proj", "k_proj")):
            return value
        # Pair i of a head is dimensions i and i + head_dim / 2 there, 2 i and 2 i + 1 here:
        # [heads, 2, head_dim / 2, ...] in halves, [heads, head_dim / 2, 2, ...] in pairs
        pairs = _head_dim(config) // 2
        head_shape = (pairs, 2) if of_hf else (2, pairs)
        by_head = value.reshape(-1, *head_shape, *value.shape[1:])
        return by_head.transpose(1, 2).reshape(value.shape)

    def settings(
        self, model: nn.Module, config: PreTrainedConfig
    ) -> Iterator[tuple[str, Any, Any]]:
        """Yield heads, rotary embedding, norms and attention window in addition to what every
        family has.
        """
        yield from super().settings(model, config)
        attention: Any = model.get_submodule("layers.0.attn")
        yield "num_key_value_heads", config.num_key_value_heads, attention.num_kv_heads
        yield "head_dim", _head_dim(config), attention.head_dim
        rope: Any = attention.pos_embeddings
        theirs = config.rope_parameters
        if hasattr(rope, "scale_factor") and theirs["rope_type"] == "llama3":
            ours = {
                "factor": rope.scale_factor,
                "original_max_position_embeddings": rope.old_context_len,
                "low_freq_factor": rope.low_freq_factor,
                "high_freq_factor": rope.high_freq_factor,
            }
            for name, value in ours.items():
                yield f"rope {name}", float(theirs[name]), float(value)
        has_halves = isinstance(rope, Qwen2RotaryPositionalEmbeddings)
        yield "rotary halves", self._rotates_halves, has_halves
        yield "norm", self._norm.__name__, type(model.norm).__name__
        # Gemma.
        is_bidirectional = bool(getattr(config, "use_bidirectional_attention", False))
        yield "use_bidirectional_attention", is_bidirectional, False
        # torchtune's models have no window, which is the same if no sequence is longer than it
        window = getattr(config, "sliding_window", None)
        if window is not None and window >= cast(int, model.max_seq_len):
            window = None
        yield "sliding_window", window, None


def _head_dim(config: PreTrainedConfig) -> int:
    head_dim = getattr(config, "head_dim", None)
    return int(head_dim or config.hidden_size // config.num_attention_heads)
