"""What is asked of LoRA against what the model has."""

import pytest
import torch
from omegaconf import OmegaConf
from tiny_models import FAMILY_MODELS, MODELS

from tfidf_tune.training import LoRAFinetuneConfig, LoRASettings, Run, SetupError, build_model, check_config


def build(name, tmp_path, **lora):
    section = MODELS[name].section(lora=True, **lora)
    return build_model(OmegaConf.create({"model": section}), Run(torch.device("cpu"), torch.float32, 0, tmp_path))


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_what_is_named_is_what_is_adapted(name, tmp_path):
    assert set(LoRASettings.require(build(name, tmp_path)).module_names) == set(MODELS[name].attn_modules)


@pytest.mark.parametrize(
    ("name", "asked", "possible"),
    [
        ("llama", "o_proj", "k_proj, output_proj, q_proj, v_proj"),
        ("gpt_neox", "q_proj", "output_proj, query_key_value"),
        ("gptj", "out_proj", "k_proj, output_proj, q_proj, v_proj"),
        ("qwen2-tied", "query_key_value", "k_proj, output_proj, q_proj, v_proj"),
    ],
)
def test_a_layer_that_the_model_does_not_have_is_named_with_those_it_has(name, asked, possible, tmp_path):
    modules = [MODELS[name].attn_modules[0], asked]

    with pytest.raises(
        SetupError, match=f"config: model: lora_attn_modules names '{asked}', .*possible are {possible}$"
    ):
        build(name, tmp_path, lora_attn_modules=modules)


@pytest.mark.parametrize("name", ["llama3_2-tied", "qwen2-tied"])
def test_adapters_on_a_tied_head_are_refused(name, tmp_path):
    with pytest.raises(SetupError, match="apply_lora_to_output is .*(tied to the embeddings|tie_word_embeddings)"):
        build(name, tmp_path, apply_lora_to_output=True)


@pytest.mark.parametrize("name", ["gpt_neox", "gptj"])
def test_a_size_that_cannot_be_quantized_is_refused(name, tmp_path):
    with pytest.raises(SetupError, match=r"quantize_base is True: NF4 takes linear layers of a multiple of 16384"):
        build(name, tmp_path, quantize_base=True)


@pytest.mark.parametrize("name", ["gpt_neox", "gptj"])
def test_an_unknown_argument_is_named(name, tmp_path):
    with pytest.raises(SetupError, match="config: model: .*unexpected keyword argument 'num_kv_headz'"):
        build(name, tmp_path, num_kv_headz=2)


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("lora_rank", -3, "-3, it has to be at least 1"),
        ("lora_rank", 4.5, "4.5, it has to be a whole number"),
        ("lora_alpha", 0, "0, it has to be greater than 0"),
        ("lora_dropout", -1.0, "-1.0, it has to be at least 0"),
        ("lora_dropout", 1.0, "1.0, it has to be less than 1"),
        ("lora_attn_modules", "q_proj", "'q_proj', it has to be a list"),
    ],
)
def test_a_value_that_makes_no_sense_is_named_with_what_is_possible(name, key, value, rule, recipe_config):
    cfg = recipe_config(lora=True, model=MODELS[name].section(lora=True, **{key: value}))

    with pytest.raises(SetupError, match=f"^config: model: {key} is {rule}"):
        check_config(cfg, LoRAFinetuneConfig)


@pytest.mark.parametrize("quantize_base", [False, True])
def test_other_errors_of_a_builder_are_not_blamed_on_nf4(quantize_base, tmp_path):
    with pytest.raises(SetupError, match=r"embed_dim \(256\) must be divisible by num_heads \(3\)$"):
        build("gptj", tmp_path, embed_dim=256, num_heads=3, quantize_base=quantize_base)
