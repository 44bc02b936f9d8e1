"""Llama: transformers' own model is the truth."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_llama import TINY_LLAMA, VOCAB_SIZE, make_llama
from torch import nn
from torchtune.models.llama2 import llama2, llama2_7b, llama2_13b

from tfidf_tune.models import FAMILIES
from tfidf_tune.models.llama import LlamaFamily, lora_tinyllama_1_1b, tinyllama_1_1b

# From the config.json of each model on the Hugging Face hub.
PUBLISHED: dict[str, dict[str, Any]] = {
    "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T": {
        "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
        "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    },
    "meta-llama/Llama-2-7b-hf": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    },
    "meta-llama/Llama-2-13b-hf": {
        "vocab_size": 32000, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
        "num_attention_heads": 40, "num_key_value_heads": 40, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    },
}  # fmt: skip
BUILDERS = dict(zip(PUBLISHED, (tinyllama_1_1b, llama2_7b, llama2_13b), strict=True))


def load_pair(folder: Path, num_kv_heads: int) -> tuple[nn.Module, transformers.PreTrainedModel, dict[str, Any]]:
    make_llama(folder, num_key_value_heads=num_kv_heads)
    hf_model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = hf_model.config.to_dict()
    model = llama2(**(TINY_LLAMA | {"num_kv_heads": num_kv_heads})).eval()
    model.load_state_dict(LlamaFamily().hf_to_tune(load_file(folder / "model.safetensors"), config))
    return model, hf_model, config


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 64)])
def test_the_converted_model_gives_the_logits_of_transformers(tmp_path, num_kv_heads, shape):
    model, hf_model, _ = load_pair(tmp_path, num_kv_heads)
    tokens = torch.randint(VOCAB_SIZE, shape)

    with torch.no_grad():
        torch.testing.assert_close(model(tokens), hf_model(tokens).logits)


def test_conversion_there_and_back_is_bitwise(tmp_path):
    _, hf_model, config = load_pair(tmp_path, 2)
    weights = hf_model.state_dict()

    back = LlamaFamily().tune_to_hf(LlamaFamily().hf_to_tune(dict(weights), config), config)

    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_conversion_goes_by_part(tmp_path):
    """A checkpoint of several shards is converted shard by shard."""
    _, hf_model, config = load_pair(tmp_path, 2)
    weights = hf_model.state_dict()
    whole = LlamaFamily().hf_to_tune(dict(weights), config)

    parts = {}
    for name, value in weights.items():
        parts |= LlamaFamily().hf_to_tune({name: value}, config)

    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_an_unknown_weight_is_named():
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.self_attn\.dense\.weight' is not a weight .* 'llama'"):
        LlamaFamily().hf_to_tune({"model.layers.0.self_attn.dense.weight": torch.zeros(1)}, {"model_type": "llama"})


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_real_sizes_have_the_weights_of_the_published_architecture(name):
    with torch.device("meta"):
        model = BUILDERS[name]()
        hf_config = transformers.LlamaConfig(**PUBLISHED[name])
        hf_model = transformers.LlamaForCausalLM(hf_config)

    converted = FAMILIES["llama"].hf_to_tune(hf_model.state_dict(), hf_config.to_dict())

    assert {key: value.shape for key, value in converted.items()} == {
        key: value.shape for key, value in model.state_dict().items()
    }
    settings = list(FAMILIES["llama"].settings(model, hf_config.to_dict()))
    assert settings
    assert all(theirs == ours for _, theirs, ours in settings)
    assert model.max_seq_len == hf_config.max_position_embeddings


def test_the_lora_builder_adapts_the_named_projections_alone():
    with torch.device("meta"):
        model = lora_tinyllama_1_1b(["q_proj", "output_proj"], lora_rank=8, lora_alpha=32)

    adapted = {name.rsplit(".lora_a")[0].rsplit(".", 1)[-1] for name, _ in model.named_parameters() if "lora_a" in name}

    assert adapted == {"q_proj", "output_proj"}
    assert model.layers[0].attn.q_proj.rank == 8
    assert model.layers[0].attn.q_proj.alpha == 32
