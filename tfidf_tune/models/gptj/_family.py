"""GPT-J checkpoints."""

from collections.abc import Iterator
from typing import Any, ClassVar

from torch import nn

from tfidf_tune.models._family import HFConfig, ModelFamily


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
    lora_targets: ClassVar = {
        "q_proj": "attn.q_proj",
        "k_proj": "attn.k_proj",
        "v_proj": "attn.v_proj",
        "output_proj": "attn.out_proj",
        "w1": "mlp.fc_in",
        "w2": "mlp.fc_out",
        "output": "lm_head",
    }
    ignored = (".attn.bias", ".attn.masked_bias")

    def settings(self, model: nn.Module, config: HFConfig) -> Iterator[tuple[str, Any, Any]]:
        """Yield rotary embedding and norms in addition to what every family has."""
        yield from super().settings(model, config)
        rotary: Any = model.get_submodule("layers.0.attn.pos_embeddings.rotary")
        yield "rotary_dim", config["rotary_dim"], rotary.dim
        yield "rope_base", 10_000.0, float(rotary.base)  # fixed in transformers
        norm: Any = model.norm
        yield "norm_eps", float(config["layer_norm_epsilon"]), float(norm.eps)
