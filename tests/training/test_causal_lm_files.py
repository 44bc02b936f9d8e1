"""Files of checkpoints for transformers' own classes: what is accepted although names or dtypes are unusual."""

import json
import logging

import pytest
import torch
from any_models import make_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tfidf_tune.models import auto
from tfidf_tune.training import HFCheckpointer


def edit_weights(folder, change):
    state_dict = load_file(folder / "model.safetensors")
    save_file(change(state_dict), folder / "model.safetensors", metadata={"format": "pt"})


def check(folder):
    checkpointer = HFCheckpointer(checkpoint_dir=str(folder))
    with torch.device("meta"):
        model = auto(checkpointer.transformers_config, implementation="transformers")
    checkpointer.check_model(model)


def test_names_without_prefix_and_whole_numbers_that_are_no_weights_are_accepted(tmp_path, text_file):
    folder = make_checkpoint("GPT-2", tmp_path / "base", text_file)
    causal = {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.uint8) for layer in range(2)}

    # As in the repository of GPT-2.
    edit_weights(folder, lambda w: {name.removeprefix("transformer."): value for name, value in w.items()} | causal)
    check(folder)

    name = "h.1.mlp.c_fc.weight"
    edit_weights(folder, lambda w: w | {name: w[name].to(torch.uint8)})
    with pytest.raises(ValueError, match=rf"  {name} is of torch\.uint8, not floating point of 16 bits or more\n"):
        check(folder)


def test_buffers_of_whole_numbers_are_accepted(tmp_path):
    small = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"n_routed_experts": 8, "moe_intermediate_size": 32, "pad_token_id": 0}
    config = AutoConfig.for_model("deepseek_v4", **small, **experts)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    check(tmp_path)

    dtypes = {name.rpartition(".")[2]: value.dtype for name, value in load_file(tmp_path / "model.safetensors").items()}
    assert dtypes["tid2eid"] == torch.int64


def test_a_layer_that_predicts_more_tokens_is_left_out_with_a_warning(tmp_path, text_file, caplog):
    folder = make_checkpoint("GLM-4 MoE", tmp_path / "base", text_file)
    config = json.loads((folder / "config.json").read_text())
    extra = {"model.layers.2.eh_proj.weight": torch.ones(64, 128)}
    edit_weights(folder, lambda w: w | extra)

    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    with caplog.at_level(logging.WARNING):
        check(folder)
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(
        ValueError, match=r"model\.layers\.2\.eh_proj\.weight is of a layer that config\.json does not have"
    ):
        check(folder)

    assert "1 weights are not of the model and are not used, first model.layers.2.eh_proj.weight" in caplog.text
