"""Starts: random weights of every family, and a model trained with plain cross-entropy."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from helpers.fakes.probe import token_perplexity
from omegaconf import OmegaConf

from research.experiment import random_model, trained_model
from tfidf_tune.data import hf_tokenizer, load_documents, text_blocks, train_embedded_tokenizer
from tfidf_tune.probe import load_model
from tfidf_tune.training import HFCheckpointer, Run, build_model
from tfidf_tune.training import load_model as load_weights

SIZES = {"vocab_size": 300, "num_layers": 2, "num_heads": 4, "embed_dim": 32, "max_seq_len": 32}
LLAMA = {"_component_": "torchtune.models.llama2.llama2", **SIZES, "num_kv_heads": 2, "intermediate_dim": 48}
NEOX = {"_component_": "tfidf_tune.models.gpt_neox.gpt_neox", **SIZES, "intermediate_dim": 80}
GPTJ = {"_component_": "tfidf_tune.models.gptj.gptj", **SIZES, "rotary_dim": 4}
LORA = {"lora_attn_modules": ["q_proj"], "lora_rank": 2, "lora_alpha": 4, "lora_dropout": 0.1}
SECTIONS = {
    "llama": LLAMA,
    "llama-other": LLAMA | {"num_kv_heads": 4, "intermediate_dim": None, "norm_eps": 1e-2, "rope_base": 50},
    "llama-lora": LLAMA | LORA | {"_component_": "torchtune.models.llama2.lora_llama2"},
    "gpt_neox-other": NEOX
    | {"rotary_pct": 0.5, "rope_base": 50.0, "norm_eps": 1e-2, "use_parallel_residual": False, "attention_bias": False},
    "gpt_neox-lora": NEOX
    | LORA
    | {"_component_": "tfidf_tune.models.gpt_neox.lora_gpt_neox", "lora_attn_modules": ["query_key_value"]},
    "gptj-other": GPTJ | {"rotary_dim": 8, "intermediate_dim": 80, "norm_eps": 1e-2},
    "gptj-lora": GPTJ | LORA | {"_component_": "tfidf_tune.models.gptj.lora_gptj"},
}
COMPLETE = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def trained_tokenizer(tmp_path_factory):
    return train_embedded_tokenizer(tmp_path_factory.mktemp("tokenizer") / "bpe", vocab_size=SIZES["vocab_size"])


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
    with pytest.raises(ValueError, match=r"a start cannot be made for the model a\.b: use torchtune\.models\.llama2"):
        make(tmp_path, {"_component_": "a.b"}, 0)

    assert list(tmp_path.iterdir()) == []


def test_a_trained_model_fits_its_text_in_a_complete_folder(tmp_path, text_file, capsys):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(text_file.read_text().splitlines()[:40]))
    settings = {"source": str(text), "block_size": 32, "batch_size": 8, "epochs": 1, "num_warmup_steps": 2}
    folders = [tmp_path / "random", tmp_path / "trained"]
    for folder in folders:
        folder.mkdir()
    random_model(folders[0], SECTIONS["gptj-lora"], 3)
    trained_model(folders[1], SECTIONS["gptj-lora"], 3, **settings)

    assert {file.name for file in folders[1].iterdir()} == COMPLETE
    assert json.loads((folders[1] / "config.json").read_text()) == json.loads((folders[0] / "config.json").read_text())
    assert (folders[1] / "tokenizer.json").read_bytes() == (folders[0] / "tokenizer.json").read_bytes()
    tokenizer = hf_tokenizer(str(folders[1]))
    blocks = text_blocks(tokenizer, load_documents(str(text)), block_size=32, num_blocks=20)
    random, trained = (math.log(token_perplexity(load_model(str(folder)), blocks)) for folder in folders)
    assert random == pytest.approx(math.log(GPTJ["vocab_size"]), abs=0.1), "as good as a guess"
    assert trained < random - 1
    assert "Writing logs to" in capsys.readouterr().out, "what the recipe prints"
