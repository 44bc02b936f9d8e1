"""What the families share: the decoder of torchtune's modules, and the translation of Hugging Face
checkpoints.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn
from torchtune import modules as tune
from transformers import PreTrainedConfig

from tfidf_tune.models.linear import LinearFactory

StateDict = dict[str, Tensor]


@dataclass(frozen=True)
class DecoderSizes:
    """The sizes that every decoder has."""

    vocab_size: int
    num_layers: int
    num_heads: int
    embed_dim: int
    intermediate_dim: int
    max_seq_len: int


class Projection(NamedTuple):
    """A linear layer of an attention."""

    in_dim: int
    out_dim: int
    bias: bool


def decoder(
    sizes: DecoderSizes,
    linear: LinearFactory,
    projections: Mapping[str, Projection],
    *,
    norm: Callable[[], nn.Module],
    activation: nn.Module,
    attention_class: type[nn.Module] = tune.MultiHeadAttention,
    layer_class: type[nn.Module] = tune.TransformerSelfAttentionLayer,
    has_mlp_norm: bool = True,
    is_gated: bool = False,
    mlp_bias: bool = True,
    embedding_class: type[nn.Module] = nn.Embedding,
    output_bias: bool | None = False,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    **attention_settings: Any,
) -> tune.TransformerDecoder:
    """Build a decoder of torchtune's modules.

    The projections of the attention are by name; ``attention_settings`` are further arguments of
    its class. Without ``output_bias`` (None) the output layer has the weight of the embedding.
    """
    embed_dim = sizes.embed_dim
    intermediate_dim = sizes.intermediate_dim
    if num_kv_heads is None:
        num_kv_heads = sizes.num_heads
    if head_dim is None:
        head_dim = embed_dim // sizes.num_heads
    # Layers, embedding, output layer: the order of random draws, which decides what weights a seed
    # gives.
    layers = []
    for _ in range(sizes.num_layers):
        attention_layers = {}
        for name, (in_dim, out_dim, bias) in projections.items():
            attention_layers[name] = linear.attention(name, in_dim, out_dim, bias=bias)
        attention = attention_class(
            embed_dim=embed_dim,
            num_heads=sizes.num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_seq_len=sizes.max_seq_len,
            **attention_layers,
            **attention_settings,
        )
        gate_proj = linear.mlp(embed_dim, intermediate_dim, bias=mlp_bias)
        down_proj = linear.mlp(intermediate_dim, embed_dim, bias=mlp_bias)
        up_proj = None
        if is_gated:
            up_proj = linear.mlp(embed_dim, intermediate_dim, bias=mlp_bias)
        mlp = tune.FeedForward(
            gate_proj=gate_proj, down_proj=down_proj, up_proj=up_proj, activation=activation
        )
        sa_norm = norm()
        mlp_norm = norm() if has_mlp_norm else None
        layers.append(layer_class(attn=attention, mlp=mlp, sa_norm=sa_norm, mlp_norm=mlp_norm))
    embeddings = embedding_class(sizes.vocab_size, embed_dim)
    final_norm = norm()
    output: nn.Module
    if output_bias is None:
        output = tune.TiedLinear(embeddings)
    else:
        output = linear.output(embed_dim, sizes.vocab_size, bias=output_bias)
    return tune.TransformerDecoder(
        tok_embeddings=embeddings,
        layers=layers,
        max_seq_len=sizes.max_seq_len,
        num_heads=sizes.num_heads,
        head_dim=head_dim,
        norm=final_norm,
        output=output,
    )


class ModelFamily(ABC):
    """Translation between torchtune's names and shapes and those of one Hugging Face architecture.

    Conversions work key by key, so a state dict may come in parts (shard by shard), and on meta
    tensors, by which a checkpoint is compared with a model before anything is loaded. A family is
    mostly data; :meth:`settings` and :meth:`to_layout` hold what is not a name. Each ``config`` is
    the checkpoint's, as transformers reads it.

    Attributes:
        modules (ClassVar[Mapping[str, str]]): Hugging Face's module names -> torchtune's, ``{}``
            for the layer. If a module has several names, files have the first, transformers (and so
            PEFT) the last.
        target_parts (ClassVar[int]): parts of a module's name in PEFT's ``target_modules``.
        norm_weight (ClassVar[str]): torchtune's name of a norm's weight, ``scale`` for RMSNorm.
        norm_eps (ClassVar[str]): the config's name of the epsilon of norms.
        ignored (ClassVar[tuple[str, ...]]): ends of names in older checkpoints that are not
            weights.
    """

    modules: ClassVar[Mapping[str, str]]
    target_parts: ClassVar[int] = 1
    norm_weight: ClassVar[str] = "weight"
    norm_eps: ClassVar[str]
    ignored: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def build(
        self, config: PreTrainedConfig, max_seq_len: int, linear: LinearFactory
    ) -> tune.TransformerDecoder:
        """Build the model of a checkpoint's config.

        Raises:
            ValueError: If torchtune's modules cannot represent it; the message says why.
        """

    def hf_to_tune(self, state_dict: StateDict, config: PreTrainedConfig) -> StateDict:
        """Convert (a part of) a Hugging Face state dict to torchtune's names and layout, without a
        tied head.

        Raises:
            ValueError: If a key is not one of the architecture; the message names it.
        """
        converted: StateDict = {}
        for key, value in state_dict.items():
            if key.endswith(self.ignored):
                continue
            # `model.layers.3.mlp.up_proj.weight` -> module pattern, number of the layer, `weight`.
            module, _, parameter = key.rpartition(".")
            pattern, layer = _without_layer(module)
            if pattern not in self.modules:
                raise ValueError(
                    f"'{key}' is not a weight of the architecture '{config.model_type}'"
                )
            name = self.modules[pattern].format(layer)
            if name == "output" and config.tie_word_embeddings:
                continue
            if name.endswith("norm") and parameter == "weight":
                parameter = self.norm_weight
            converted[f"{name}.{parameter}"] = self.to_layout(name, value, config, of_hf=False)
        return converted

    def tune_to_hf(self, state_dict: StateDict, config: PreTrainedConfig) -> StateDict:
        """Convert (a part of) a torchtune state dict to Hugging Face's names and layout."""
        converted: StateDict = {}
        for key, value in state_dict.items():
            module, _, _ = key.rpartition(".")
            converted[self.hf_name(key)] = self.to_layout(module, value, config, of_hf=True)
        return converted

    def tune_to_peft(self, state_dict: StateDict, config: PreTrainedConfig) -> StateDict:
        """Convert LoRA adapter weights to the names and layout of a PEFT adapter file.

        The keys end in ``.lora_a.weight`` and ``.lora_b.weight``; the rows of B are ordered as the
        weight's.
        """
        converted: StateDict = {}
        for key, value in state_dict.items():
            name, matrix, _ = key.rsplit(".", 2)
            if matrix == "lora_b":
                value = self.to_layout(name, value, config, of_hf=True)
            hf_module = self._hf_modules(name)[-1]
            hf_matrix = {"lora_a": "lora_A", "lora_b": "lora_B"}[matrix]
            converted[f"base_model.model.{hf_module}.{hf_matrix}.weight"] = value
        return converted

    @property
    def lora_targets(self) -> dict[str, str]:
        """Map torchtune's names of linear layers (``output_proj``) to PEFT's ``target_modules``
        (``o_proj``).
        """
        targets = {}
        for theirs, ours in self.modules.items():
            if ours.endswith(("norm", "tok_embeddings")):
                continue
            name = ours.rpartition(".")[2]
            target_parts = theirs.split(".")[-self.target_parts :]
            targets[name] = ".".join(target_parts)
        return targets

    def hf_name(self, name: str) -> str:
        """Translate the name of a weight into Hugging Face's in files; unknown names are returned
        unchanged.
        """
        module, _, parameter = name.rpartition(".")
        if parameter == self.norm_weight and module.endswith("norm"):
            parameter = "weight"
        hf_modules = self._hf_modules(module)
        if not hf_modules:
            return name
        return f"{hf_modules[0]}.{parameter}"

    def to_layout(
        self, name: str, value: Tensor, config: PreTrainedConfig, *, of_hf: bool
    ) -> Tensor:
        """Reorder the rows of the weight, bias or LoRA B of torchtune's module ``name`` for the
        other side.
        """
        return value

    def settings(
        self, model: nn.Module, config: PreTrainedConfig
    ) -> Iterator[tuple[str, Any, Any]]:
        """Yield (name, value in the checkpoint, value in the model) of settings that do not show in
        shapes.
        """
        attention: Any = model.get_submodule("layers.0.attn")
        mlp: Any = model.get_submodule("layers.0.mlp")
        norm: Any = model.norm
        is_tied = isinstance(model.output, tune.TiedLinear)
        yield "tie_word_embeddings", config.tie_word_embeddings, is_tied
        yield "num_attention_heads", config.num_attention_heads, attention.num_heads
        name = "hidden_act" if hasattr(config, "hidden_act") else "activation_function"
        hf_activation = activation(getattr(config, name))
        yield name, repr(hf_activation), repr(mlp.activation)
        rotary = getattr(attention.pos_embeddings, "rotary", attention.pos_embeddings)
        longest: Any = model.max_seq_len
        yield "max_seq_len", min(longest, config.max_position_embeddings), longest
        # A config without a choice stands for transformers' constants.
        rope = getattr(config, "rope_parameters", None)
        if not rope:
            rope = {"rope_theta": 10_000.0, "rope_type": "default"}
        yield "rope_base", float(rope["rope_theta"]), float(rotary.base)
        # Other configs have other settings.
        rotary_dim = getattr(config, "rotary_dim", rotary.dim)
        yield "rotary_dim", rotary_dim, rotary.dim
        # torchtune's classes do not name their type; only Llama 3's is scaled.
        unnamed_type = "llama3" if hasattr(rotary, "scale_factor") else "default"
        rope_type = getattr(rotary, "rope_type", unnamed_type)
        yield "rope type", rope["rope_type"], rope_type
        norm_eps = getattr(config, self.norm_eps)
        yield "norm_eps", float(norm_eps), float(norm.eps)

    def differing_settings(self, model: nn.Module, config: PreTrainedConfig) -> list[str]:
        """Describe the settings of :meth:`settings` that differ; numbers are equal
        to six digits.
        """
        differing = []
        for name, theirs, ours in self.settings(model, config):
            is_equal = theirs == ours
            if isinstance(theirs, float):
                is_equal = math.isclose(theirs, ours, rel_tol=1e-6)
            if not is_equal:
                differing.append(f"{name} is {theirs} in the checkpoint, {ours} in the model")
        return differing

    def _hf_modules(self, name: str) -> list[str]:
        pattern, layer = _without_layer(name)
        return [theirs.format(layer) for theirs, ours in self.modules.items() if ours == pattern]


def activation(name: str) -> nn.Module:
    """Build the activation of a config; a ValueError names one that is not supported."""
    # Https://arxiv.org/abs/1606.08415, with several names in transformers.
    tanh = nn.GELU(approximate="tanh")
    known = {"silu": nn.SiLU(), "swish": nn.SiLU(), "gelu": nn.GELU()}
    known |= dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), tanh)
    if name not in known:
        raise ValueError(f"the activation {name!r} is not one of {', '.join(known)}")
    return known[name]


def _without_layer(module: str) -> tuple[str, str]:
    """``layers.3.attn`` -> ``layers.{}.attn``, ``3``."""
    layer = re.search(r"\.(\d+)(?=\.|$)", module)
    if layer is None:
        return module, ""
    pattern = module.replace(layer[0], ".{}", 1)
    return pattern, layer[1]
