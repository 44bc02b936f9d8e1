"""GPT-NeoX checkpoints."""

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import nn

from tfidf_tune.models._blocks import ParallelSelfAttentionLayer
from tfidf_tune.models._family import HFConfig, ModelFamily


class GPTNeoXFamily(ModelFamily):
    """The ``gpt_neox`` architecture of transformers: Pythia. Only names differ, not layouts."""

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
    lora_targets: ClassVar = {
        "query_key_value": "query_key_value",
        "output_proj": "dense",
        "w1": "dense_h_to_4h",
        "w2": "dense_4h_to_h",
        "output": "lm_head",
    }
    ignored = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")

    def settings(self, model: nn.Module, config: HFConfig) -> Iterator[tuple[str, Any, Any]]:
        """Yield rotary embedding, norms and residual in addition to what every family has."""
        yield from super().settings(model, config)
        rope_config = config["rope_parameters"]
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        rotary: Any = model.get_submodule("layers.0.attn.pos_embeddings.rotary")
        yield "rotary dimensions of a head", int(head_dim * rope_config["partial_rotary_factor"]), rotary.dim
        yield "rope_base", float(rope_config["rope_theta"]), float(rotary.base)
        yield "rope type", rope_config["rope_type"], "default"
        layer: Any = model.get_submodule("layers.0")
        yield "norm_eps", float(config["layer_norm_eps"]), float(layer.sa_norm.eps)
        yield "use_parallel_residual", config["use_parallel_residual"], isinstance(layer, ParallelSelfAttentionLayer)
