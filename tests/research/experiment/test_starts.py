"""Starts: random weights of every family, and a model trained with plain cross-entropy."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from omegaconf import OmegaConf

from research.experiment import _starts, random_model, trained_model
from tfidf_tune.data import hf_tokenizer, load_documents, text_blocks, train_embedded_tokenizer
from tfidf_tune.probe import load_model, token_perplexity
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


@pytest.mark.usefixtures("quick_tokenizer")
def test_the_config_has_the_dropout_of_the_section(tmp_path):
    for section, key in ((LLAMA, "attention_dropout"), (NEOX, "attention_dropout"), (GPTJ, "attn_pdrop")):
        folder = tmp_path / section["_component_"]
        folder.mkdir()
        random_model(folder, section | {"attn_dropout": 0.25}, 0)
        config = json.loads((folder / "config.json").read_text())
        rates = {name: rate for name, rate in config.items() if name.endswith(("pdrop", "_dropout"))}
        rates.pop("classifier_dropout", None)
        assert rates.pop(key) == 0.25
        assert set(rates.values()) <= {0.0, 0.25}


@pytest.mark.usefixtures("quick_tokenizer")
def test_a_random_llama_has_the_weights_that_transformers_draws_from_the_seed(tmp_path):
    random_model(tmp_path, LLAMA, 3)
    torch.manual_seed(3)
    drawn = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(tmp_path)).state_dict()
    written = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()

    assert drawn.keys() == written.keys()
    assert all(torch.equal(drawn[name], written[name]) for name in drawn)


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


@pytest.mark.usefixtures("quick_tokenizer")
def test_a_recipe_that_fails_leaves_no_files(tmp_path):
    with pytest.raises(ValueError, match="dtype is 'fp64'"):
        trained_model(tmp_path, LLAMA, 0, dtype="fp64")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quick_tokenizer")
def test_the_arguments_of_a_trained_model_reach_the_recipe(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(_starts, "_train", given.append)
    with pytest.raises(FileNotFoundError):  # nothing was trained
        trained_model(
            tmp_path, SECTIONS["llama-lora"], 5, source="s", source_name="n", source_split="train[:10%]",
            source_column="c", epochs=7, batch_size=9, learning_rate=0.5, num_warmup_steps=11, block_size=13,
            device="cuda", dtype="bf16",
        )  # fmt: skip
    (cfg,) = given

    assert cfg.model == LLAMA
    assert cfg.dataset == {
        "_component_": "tfidf_tune.data.text_blocks_dataset", "source": "s", "source_name": "n",
        "source_split": "train[:10%]", "source_column": "c", "block_size": 13,
    }  # fmt: skip
    assert cfg.loss == {"_component_": "tfidf_tune.loss.CrossEntropyLoss"}
    assert (cfg.seed, cfg.epochs, cfg.batch_size, cfg.optimizer.lr, cfg.lr_scheduler.num_warmup_steps) == (
        5, 7, 9, 0.5, 11,
    )  # fmt: skip
    assert (cfg.device, cfg.dtype, cfg.save_at_percent) == ("cuda", "bf16", [100])
