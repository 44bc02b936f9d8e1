"""Real sizes, without weights: on the meta device, against transformers' architecture of the
published configs.
"""

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torchtune.models.llama2 import llama2_7b
from torchtune.models.llama3_2 import llama3_2_1b
from torchtune.models.qwen2_5 import qwen2_5_0_5b

from tfidf_tune.models import FAMILIES
from tfidf_tune.models.gpt_neox import pythia
from tfidf_tune.models.gptj import gptj_6b
from tfidf_tune.models.llama import tinyllama_1_1b


def _llama(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, positions: int
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }


def _pythia(vocab_size: int, hidden: int, layers: int, heads: int) -> dict[str, Any]:
    """Keys as in those files, which are older than transformers' present names for the rotary
    embedding.
    """
    return {
        "model_type": "gpt_neox",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 2048,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "use_parallel_residual": True,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


# The config.json of each model on the Hugging Face hub, and the number of parameters that its
# authors give: the total in Pythia's README, GPT-J's model card, the Llama 2 paper, other model
# cards.
PUBLISHED: dict[str, tuple[Any, dict[str, Any], float]] = {
    "EleutherAI/pythia-70m": (partial(pythia, "70m"), _pythia(50304, 512, 6, 8), 70_426_624),
    "EleutherAI/pythia-160m": (partial(pythia, "160m"), _pythia(50304, 768, 12, 12), 162_322_944),
    "EleutherAI/pythia-410m": (partial(pythia, "410m"), _pythia(50304, 1024, 24, 16), 405_334_016),
    "EleutherAI/pythia-1b": (partial(pythia, "1b"), _pythia(50304, 2048, 16, 8), 1_011_781_632),
    "EleutherAI/pythia-1.4b": (
        partial(pythia, "1.4b"),
        _pythia(50304, 2048, 24, 16),
        1_414_647_808,
    ),
    "EleutherAI/pythia-2.8b": (
        partial(pythia, "2.8b"),
        _pythia(50304, 2560, 32, 32),
        2_775_208_960,
    ),
    "EleutherAI/pythia-6.9b": (
        partial(pythia, "6.9b"),
        _pythia(50432, 4096, 32, 32),
        6_857_302_016,
    ),
    "EleutherAI/pythia-12b": (partial(pythia, "12b"), _pythia(50688, 5120, 36, 40), 11_846_072_320),
    "EleutherAI/gpt-j-6b": (
        gptj_6b,
        {
            "model_type": "gptj",
            "vocab_size": 50400,
            "n_embd": 4096,
            "n_layer": 28,
            "n_head": 16,
            "n_positions": 2048,
            "rotary_dim": 64,
            "n_inner": None,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": False,
        },
        6.05e9,
    ),
    "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T": (
        tinyllama_1_1b,
        _llama(2048, 5632, 22, 32, 4, 2048),
        1.1e9,
    ),
    "meta-llama/Llama-2-7b-hf": (llama2_7b, _llama(4096, 11008, 32, 32, 32, 4096), 6.7e9),
    "meta-llama/Llama-3.2-1B": (
        llama3_2_1b,
        _llama(2048, 8192, 16, 32, 8, 131072)
        | {
            "vocab_size": 128256,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "head_dim": 64,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "rope_type": "llama3",
                "original_max_position_embeddings": 8192,
            },
        },
        1.24e9,
    ),
    "Qwen/Qwen2.5-0.5B": (
        qwen2_5_0_5b,
        _llama(896, 4864, 24, 14, 2, 32768)
        | {
            "model_type": "qwen2",
            "vocab_size": 151936,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "max_window_layers": 24,
            "tie_word_embeddings": True,
        },
        0.49e9,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_real_size_has_the_weights_of_the_published_architecture(name):
    build, published, num_parameters = PUBLISHED[name]
    hf_config = transformers.AutoConfig.for_model(**published)
    with torch.device("meta"):
        model = build()
        hf_model = transformers.AutoModelForCausalLM.from_config(hf_config)
    family = FAMILIES[published["model_type"]]

    converted = family.hf_to_tune(hf_model.state_dict(), hf_config)

    assert {key: value.shape for key, value in converted.items()} == {
        key: value.shape for key, value in model.state_dict().items()
    }
    count = sum(value.numel() for value in model.parameters())
    assert count == sum(value.numel() for value in hf_model.parameters())
    tolerance = 0 if isinstance(num_parameters, int) else 0.05
    assert count == pytest.approx(num_parameters, rel=tolerance, abs=0)
    assert [s for s in family.settings(model, hf_config) if s[1] != s[2]] == []
    assert model.max_seq_len == published.get(
        "max_position_embeddings", published.get("n_positions")
    )
