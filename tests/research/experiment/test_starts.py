"""Starts: random weights of every family, and a model trained with plain cross-entropy."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from omegaconf import OmegaConf

from research.experiment import random_model, trained_model
from tfidf_tune.data import hf_tokenizer, train_embedded_tokenizer
from tfidf_tune.training import HFCheckpointer, Run, build_model
from tfidf_tune.training import load_model as load_weights

SIZES = {"vocab_size": 300, "num_layers": 2, "num_heads": 4, "embed_dim": 32, "max_seq_len": 32}
LLAMA = {
    "_component_": "torchtune.models.llama2.llama2",
    **SIZES,
    "num_kv_heads": 2,
    "intermediate_dim": 48,
}
NEOX = {"_component_": "tfidf_tune.models.gpt_neox.gpt_neox", **SIZES, "intermediate_dim": 80}
GPTJ = {"_component_": "tfidf_tune.models.gptj.gptj", **SIZES, "rotary_dim": 4}
LORA = {"lora_attn_modules": ["q_proj"], "lora_rank": 2, "lora_alpha": 4, "lora_dropout": 0.1}
SECTIONS = {
    "llama": LLAMA
    | {"num_kv_heads": 4, "intermediate_dim": None, "norm_eps": 1e-2, "rope_base": 50},
    "gpt_neox": NEOX
    | {
        "rotary_pct": 0.5,
        "rope_base": 50.0,
        "norm_eps": 1e-2,
        "use_parallel_residual": False,
        "attention_bias": False,
    },
    "gptj-lora": GPTJ | LORA | {"_component_": "tfidf_tune.models.gptj.lora_gptj"},
}
COMPLETE = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def trained_tokenizer(tmp_path_factory):
    return train_embedded_tokenizer(
        tmp_path_factory.mktemp("tokenizer") / "bpe", vocab_size=SIZES["vocab_size"]
    )


@pytest.fixture
def quick_tokenizer(trained_tokenizer, monkeypatch):
    """Copy the tokenizer, because training it takes most of the time of a start."""

    def copy(folder, vocab_size):
        assert vocab_size == SIZES["vocab_size"]
        shutil.copytree(trained_tokenizer, folder, dirs_exist_ok=True)

    monkeypatch.setattr("tfidf_tune.data.train_embedded_tokenizer", copy)


@pytest.mark.usefixtures("quick_tokenizer")
@pytest.mark.parametrize("name", SECTIONS)
def test_a_random_model_has_the_architecture_of_the_section(name, tmp_path):
    section = SECTIONS[name]
    random_model(tmp_path, section, 3)
    assert {file.name for file in tmp_path.iterdir()} == COMPLETE
    # With the small initial weights attention is uniform, and rotations would have no effect.
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=1.5 * section["embed_dim"] ** -0.5)
    theirs.save_pretrained(tmp_path)

    run = Run(torch.device("cpu"), torch.float32, 0, Path("unused"))
    checkpointer = HFCheckpointer(checkpoint_dir=str(tmp_path))
    ours = build_model(OmegaConf.create({"model": section}), run)
    checkpointer.check_model(ours)
    load_weights(ours, checkpointer, run)
    tokens = torch.randint(section["vocab_size"], (2, section["max_seq_len"]))
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(tokens), theirs(tokens).logits)
    assert hf_tokenizer(str(tmp_path)).vocab_size == section["vocab_size"]


@pytest.mark.parametrize("make", [random_model, trained_model])
def test_an_unsupported_builder_is_refused(make, tmp_path):
    with pytest.raises(
        ValueError,
        match=r"a start cannot be made for the model a\.b: use torchtune\.models\.llama2",
    ):
        make(tmp_path, {"_component_": "a.b"}, 0)

    assert list(tmp_path.iterdir()) == []
