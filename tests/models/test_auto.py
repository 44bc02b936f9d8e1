"""`auto` and `lora_auto`: what is chosen, the layers that get adapters, rotary embeddings of every
type.
"""

import sys

import pytest
import torch
import transformers
from helpers.fakes.any_models import hf_config
from torch import nn
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import LoRALinear

from tfidf_tune.models import FAMILIES, HFCausalLM, auto, lora_auto

LENGTH = 64
TOKENS = torch.arange(1, LENGTH + 1)[None]
HALF = [1.0 + index / 8 for index in range(8)]  # a factor for each pair of dimensions of a head
ROPE = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 2.0,
        "short_factor": HALF,
        "long_factor": [2 * one for one in HALF],
        "original_max_position_embeddings": LENGTH,
    },
}


def on_meta(builder, config, **settings):
    with torch.device("meta"):
        return builder(config, **settings)


def random_hf_model(config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize(  # adjacent pairs, halves
    ("rope_type", "architecture"),
    [*((rope_type, "Llama") for rope_type in ROPE), ("yarn", "Qwen2"), ("longrope", "Qwen2")],
)
def test_torchtunes_modules_rotate_as_transformers_does(rope_type, architecture):
    config = hf_config(architecture, rope_parameters=ROPE[rope_type] | {"rope_theta": 500.0})
    theirs = random_hf_model(config)
    ours = auto(config, implementation="torchtune")
    ours.load_state_dict(FAMILIES[config.model_type].hf_to_tune(theirs.state_dict(), config))

    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(TOKENS), theirs(TOKENS).logits)


BEYOND = {"max_position_embeddings": 4 * LENGTH}
# What torchtune's modules cannot represent, and the reason that is given.
NOT_REPRESENTABLE = [
    (
        "Llama",
        BEYOND | {"rope_parameters": ROPE["longrope"] | {"rope_theta": 500.0}},
        "change beyond 64 tokens",
    ),
    (
        "Llama",
        {"hidden_act": "relu"},
        "the activation 'relu' is not one of silu, swish, gelu, gelu_pytorch_tanh",
    ),
    ("GPT-J", {"resid_pdrop": 0.1}, "resid_pdrop is 0.1"),
    (
        "GPT-NeoX",
        {"tie_word_embeddings": True},
        "tie_word_embeddings is True in the checkpoint, False in the model",
    ),
    ("Qwen3", {}, "no family of the architecture 'qwen3'"),
]


@pytest.mark.parametrize(("architecture", "settings", "reason"), NOT_REPRESENTABLE)
def test_transformers_class_is_taken_with_the_reason(architecture, settings, reason):
    config = hf_config(architecture, **settings)

    model = on_meta(auto, config)

    assert isinstance(model, HFCausalLM)
    assert reason in model.implementation
    with pytest.raises(ValueError, match="torchtune's modules cannot represent this checkpoint"):
        on_meta(auto, config, implementation="torchtune")


def test_the_user_chooses():
    config = hf_config("Mistral", sliding_window=32)

    within_window = on_meta(auto, config)
    longer = on_meta(auto, config, max_seq_len=40)
    chosen = on_meta(auto, config, implementation="transformers", max_seq_len=20)

    assert isinstance(within_window, TransformerDecoder)
    assert within_window.max_seq_len == 32
    assert "sliding_window is 32" in longer.implementation
    assert chosen.implementation == "MistralForCausalLM of transformers"
    assert (longer.max_seq_len, chosen.max_seq_len) == (40, 20)
    with pytest.raises(ValueError, match="max_seq_len is 65"):
        on_meta(auto, config, max_seq_len=65)
    with pytest.raises(ValueError, match="implementation is 'hf'"):
        on_meta(auto, config, implementation="hf")


QKVO = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}
TARGETS = [
    ("Qwen3", "attention", QKVO),
    ("Qwen3", ["q_proj", "mlp.up_proj"], {"self_attn.q_proj", "mlp.up_proj"}),
    ("GPT-2", "attention", {"attn.c_attn", "attn.c_proj"}),
    ("Falcon", "attention", {"self_attention.query_key_value", "self_attention.dense"}),
    (
        "Llama",
        ["o_proj", "gate_proj", "up_proj", "down_proj"],
        {"attn.output_proj", "mlp.w1", "mlp.w2", "mlp.w3"},
    ),
    ("Llama", ["q_proj", "up_proj"], {"self_attn.q_proj", "mlp.up_proj"}),  # by transformers
]


@pytest.mark.parametrize(("architecture", "targets", "expected"), TARGETS)
def test_the_chosen_layers_get_adapters(architecture, targets, expected):
    settings = {"lora_rank": 3, "lora_alpha": 6, "lora_dropout": 0.25}
    model = on_meta(lora_auto, hf_config(architecture), lora_targets=targets, **settings)

    adapted = {
        name.rsplit("layers.0.", 1)[-1].rsplit("h.0.", 1)[-1]: module
        for name, module in model.named_modules()
        if (isinstance(module, LoRALinear) or hasattr(module, "lora_A")) and ".0." in name
    }
    assert adapted.keys() == expected
    for module in adapted.values():
        assert [part.p for part in module.modules() if isinstance(part, nn.Dropout)] == [0.25]
    ranks = {
        parameter.shape[0]
        for name, parameter in model.named_parameters()
        if "lora_a" in name.lower()
    }
    assert ranks == {3}


@pytest.mark.parametrize("architecture", ["Llama", "Qwen3"])
def test_a_layer_that_the_model_lacks_is_refused(architecture):
    with pytest.raises(ValueError, match="no linear layer 'c_attn'"):
        on_meta(lora_auto, hf_config(architecture), lora_targets=["q_proj", "c_attn"])


@pytest.mark.parametrize(
    ("name", "sizes", "has_bitsandbytes", "message"),
    [
        (
            "GPT-2",
            {"n_embd": 256},
            False,
            r"attn.c_attn is a Conv1D, .*pip install 'tfidf-tune\[bitsandbytes\]'",
        ),
        ("GPT-2", {"n_embd": 96}, True, r"96 of \S+attn.c_attn: .*quantize_base=False"),
        ("Llama", {}, True, "quantize_base: .* multiples of 16384 weights"),
    ],
)
def test_a_layer_without_a_form_in_nf4_is_refused(
    name, sizes, has_bitsandbytes, message, monkeypatch
):
    if not has_bitsandbytes:
        monkeypatch.setitem(sys.modules, "bitsandbytes", None)
        monkeypatch.setitem(sys.modules, "bitsandbytes.nn", None)

    settings = {"implementation": "torchtune"} if name == "Llama" else {}
    with pytest.raises(ValueError, match=message):
        on_meta(lora_auto, hf_config(name, **sizes), quantize_base=True, **settings)


def test_layers_that_share_weights_are_refused():
    config = transformers.AutoConfig.for_model(
        "zamba2",
        hidden_size=64,
        num_attention_heads=4,
        num_hidden_layers=6,
        intermediate_size=64,
        vocab_size=320,
        mamba_d_state=8,
        n_mamba_heads=8,
        mamba_ngroups=1,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid", "mamba", "mamba"],
    )

    with pytest.raises(ValueError, match="Zamba2ForCausalLM has layers that share weights"):
        on_meta(auto, config)


def test_layers_that_peft_refuses_get_no_adapters():
    config = transformers.AutoConfig.for_model(
        "mamba", vocab_size=320, hidden_size=64, num_hidden_layers=2
    )

    model = on_meta(lora_auto, config, lora_targets="all-linear")

    adapted = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }
    assert adapted == {"in_proj", "x_proj", "dt_proj"}
    with pytest.raises(ValueError, match="MambaForCausalLM has no linear layer 'attention'"):
        on_meta(lora_auto, config)


UNCAPPED = {"final_logit_softcapping": None}
HEADS = [("OPT", {}), ("Granite", {}), ("Gemma 2", {}), ("Gemma 2", UNCAPPED)]


@pytest.mark.parametrize(("architecture", "settings"), HEADS)
def test_logits_in_chunks_are_those_of_transformers(architecture, settings):
    """Scaled logits can be computed from hidden states and the output layer, capped ones cannot."""
    config = hf_config(architecture, **settings)
    hf = random_hf_model(config)
    with torch.no_grad():
        expected = hf(TOKENS).logits
    model = HFCausalLM(hf, LENGTH).eval()

    with torch.no_grad():
        whole = model(TOKENS)
        model.set_num_output_chunks(3)
        chunks = model(TOKENS)

    torch.testing.assert_close(whole, expected)
    torch.testing.assert_close(torch.cat(chunks, dim=1), expected)
    assert len(chunks) == 3
    is_capped = getattr(config, "final_logit_softcapping", None) is not None
    assert (model.output is None) == is_capped
    assert len({id(parameter) for parameter in model.parameters()}) == len(
        list(model.named_parameters())
    )
    assert isinstance(model.tok_embeddings, nn.Embedding)
