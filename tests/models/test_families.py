"""Every family against transformers' own model: logits, gradients, generation, names, settings."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers.fakes.tiny_llama import VOCAB_SIZE
from helpers.fakes.tiny_models import MODELS

from tfidf_tune.models import FAMILIES


def load_pair(name):
    tiny = MODELS[name]
    hf_model = tiny.build_hf()
    model = tiny.build().eval()
    family = FAMILIES[tiny.model_type]
    hf_config = hf_model.config
    model.load_state_dict(family.hf_to_tune(hf_model.state_dict(), hf_config))
    return model, hf_model, family, hf_config


def differing(family, model, hf_config):
    return [setting for setting in family.settings(model, hf_config) if setting[1] != setting[2]]


@pytest.mark.parametrize("name", MODELS)
def test_logits_gradients_and_settings_are_those_of_transformers(name):
    """Gradients are laid out as weights are, so that they go through the same conversion, which can
    be undone.
    """
    model, hf_model, family, hf_config = load_pair(name)
    tokens = torch.randint(VOCAB_SIZE, (3, 17))
    logits = model(tokens)
    expected_logits = hf_model(tokens).logits
    for each in (logits, expected_logits):
        F.cross_entropy(each[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()

    gradients = {key: value.grad for key, value in model.named_parameters()}
    expected = family.hf_to_tune(
        {key: value.grad for key, value in hf_model.named_parameters()}, hf_config
    )

    torch.testing.assert_close(logits, expected_logits)
    assert all(value.abs().max() > 0 for value in expected.values())
    torch.testing.assert_close(gradients, expected)
    assert len(list(family.settings(model, hf_config))) >= 6
    assert differing(family, model, hf_config) == []

    written = dict(hf_model.state_dict())
    parts = {}
    if MODELS[name].tied:
        del written["lm_head.weight"]
    for key, value in written.items():
        parts |= family.hf_to_tune({key: value}, hf_config)
    # Checkpoints of GPT-NeoX have embed_out, transformers' module is lm_head.
    back = {
        key.replace("embed_out", "lm_head"): value
        for key, value in family.tune_to_hf(parts, hf_config).items()
    }
    assert back.keys() == written.keys()
    assert all(torch.equal(back[key], written[key]) for key in written)


# The model, what its config.json says, how the model is built, and which setting is named, if any.
SETTINGS = [
    ("gpt_neox", {}, {"rotary_pct": 1.0}, "rotary dimensions of a head"),
    ("gpt_neox", {}, {"rope_base": 500.0}, "rope_base"),
    ("gpt_neox", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, {}, "rope type"),
    ("gpt_neox", {}, {"norm_eps": 1e-3}, "norm_eps"),
    ("gpt_neox", {}, {"use_parallel_residual": False}, "use_parallel_residual"),
    ("gpt_neox", {}, {"num_heads": 8}, "num_attention_heads"),
    ("gptj", {}, {"rotary_dim": 16}, "rotary_dim"),
    ("gptj", {}, {"norm_eps": 1e-3}, "norm_eps"),
    ("gptj", {}, {"num_heads": 8}, "num_attention_heads"),
    ("gptj", {"activation_function": "gelu_fast"}, {}, None),
    ("gptj", {"activation_function": "gelu_pytorch_tanh"}, {}, None),
    ("gptj", {"activation_function": "gelu"}, {}, "activation_function"),
    ("llama", {"hidden_act": "swish"}, {}, None),
    ("llama", {"hidden_act": "gelu"}, {}, "hidden_act"),
    ("llama", {}, {"norm_eps": 1e-3}, "norm_eps"),
    ("llama", {}, {"rope_base": 500}, "rope_base"),
    ("llama", {}, {"num_kv_heads": 4}, "num_key_value_heads"),
    ("llama", {"head_dim": 32}, {}, "head_dim"),
    ("llama", {}, {"_component_": "torchtune.models.llama3_2.llama3_2"}, "rope type"),
    ("llama", {}, {"_component_": "torchtune.models.qwen2.qwen2"}, "rotary halves"),
    ("llama", {}, {"_component_": "torchtune.models.gemma.gemma", "head_dim": 16}, "norm"),
    ("llama3_2-tied", {"tie_word_embeddings": False}, {}, "tie_word_embeddings"),
    *(
        ("llama3_2-tied", {"rope_parameters": {key: 2.0}}, {}, f"rope {key}")
        for key in (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        )
    ),
    ("gemma-tied", {"use_bidirectional_attention": True}, {}, "use_bidirectional_attention"),
    ("mistral", {"sliding_window": 64}, {}, None),  # the longest sequence is not longer
    ("mistral", {"sliding_window": 63}, {}, "sliding_window"),
]


@pytest.mark.parametrize("name", list(dict.fromkeys(case[0] for case in SETTINGS)))
def test_a_setting_that_differs_is_noticed(name):
    tiny = MODELS[name]
    for _, in_checkpoint, in_model, expected in (case for case in SETTINGS if case[0] == name):
        with torch.device("meta"):
            model = replace(
                tiny, tune=lambda dim, changed=in_model: tiny.tune(dim) | changed
            ).build()
        hf_config = tiny.hf_config()
        for key, value in in_checkpoint.items():
            setattr(
                hf_config,
                key,
                hf_config.rope_parameters | value if key == "rope_parameters" else value,
            )
        names = [setting[0] for setting in differing(FAMILIES[tiny.model_type], model, hf_config)]
        assert expected in names if expected else names == []
