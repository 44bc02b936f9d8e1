"""Checkpoints of a Llama: what is written besides weights, and which models do not fit."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from tiny_llama import TINY_LLAMA
from torch import nn
from torchtune.models.llama2 import llama2, lora_llama2

from tfidf_tune.training import HFCheckpointer, LoRASettings, Run, TrainingError, build_model, load_model

FLOAT32_ON_CPU = Run(torch.device("cpu"), torch.float32, 0, Path("unused"))
TOKENS = torch.arange(40).view(2, 20)


def loaded_model(checkpointer: HFCheckpointer, *, run: Run = FLOAT32_ON_CPU, lora: bool = False) -> nn.Module:
    from omegaconf import OmegaConf

    section = {"_component_": "torchtune.models.llama2.llama2", **TINY_LLAMA}
    if lora:
        section |= {
            "_component_": "torchtune.models.llama2.lora_llama2",
            "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
            "apply_lora_to_mlp": True,
            "apply_lora_to_output": True,
            "lora_rank": 4,
            "lora_alpha": 12,
            "lora_dropout": 0.25,
        }
    model = build_model(OmegaConf.create({"model": section}), run)
    checkpointer.check_model(model)
    load_model(model, checkpointer, run)
    return model.eval()


def random_adapter(checkpointer: HFCheckpointer) -> nn.Module:
    """Make a model whose adapters change it: B is zero at the start."""
    model = loaded_model(checkpointer, lora=True)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_b" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def test_a_saved_model_is_complete_and_its_config_names_the_dtype(tiny_checkpoint, tmp_path):
    checkpointer = HFCheckpointer(checkpoint_dir=str(tiny_checkpoint))
    run = Run(torch.device("cpu"), torch.bfloat16, 0, tmp_path)

    folder = tmp_path / "checkpoint_10pct"
    checkpointer.save_model(loaded_model(checkpointer, run=run), folder)

    assert {file.name for file in folder.iterdir()} == {file.name for file in tiny_checkpoint.iterdir()}
    text = "the grey cat watched the harbour."
    ids = [transformers.AutoTokenizer.from_pretrained(f)(text)["input_ids"] for f in (folder, tiny_checkpoint)]
    assert ids[0] == ids[1]
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert transformers.AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


def test_merging_does_not_change_the_model_in_training(tiny_checkpoint, tmp_path):
    """torchtune's merge adds to the tensors it is given, which on CPU would be the model's own."""
    checkpointer = HFCheckpointer(checkpoint_dir=str(tiny_checkpoint))
    model = random_adapter(checkpointer)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    checkpointer.save_model(model, tmp_path / "run" / "checkpoint_10pct")

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_save_that_fails_leaves_nothing(tiny_checkpoint, tmp_path, monkeypatch):
    checkpointer = HFCheckpointer(checkpoint_dir=str(tiny_checkpoint))
    model = loaded_model(checkpointer)

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tfidf_tune.training._hf_files.save_file", full_disk)
    with pytest.raises(TrainingError, match="checkpoint_10pct could not be written: .*No space left"):
        checkpointer.save_model(model, tmp_path / "run" / "checkpoint_10pct")

    assert list((tmp_path / "run").iterdir()) == []


LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "checkpoint", "message"),
    [
        ({"num_layers": 3}, {}, r"model.layers.2.\S+ is missing in the checkpoint, "),
        ({"embed_dim": 64}, {}, r"is \(.*32.*\) in the checkpoint, \(.*64.*\) in the model"),
        ({"num_heads": 8, "num_kv_heads": 4}, {}, "num_attention_heads is 4 in the checkpoint, 8 in the model"),
        (
            {"rope_base": 500_000, "norm_eps": 1e-6},
            {},
            r"rope_base is 10000.0 in the checkpoint, 500000.0 in the model\n  norm_eps is 1e-05 in the checkpoint, "
            r"1e-06 in the model\nmake `model` the same model",
        ),
        ({"norm_eps": 1.0001e-5}, {}, "norm_eps is 1e-05 in the checkpoint, "),
        ({"max_seq_len": 65}, {}, "max_seq_len is 64 in the checkpoint, 65 in the model"),
        (
            {"norm_eps": 1e-6},
            {"hidden_act": "gelu"},
            r"is GELU\(.*\) in the checkpoint, SiLU\(\) in the model\n.*\nmake `model`",
        ),
        ({}, {"quantization_config": {"quant_method": "gptq"}}, "is quantized \\(quantization_config: .*gptq"),
        ({}, {"rope_parameters": LLAMA3_ROPE}, "rope type is llama3 in the checkpoint, default in the model"),
        ({}, None, "weights and config.json .* do not match"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_the_difference(
    tiny_checkpoint, tmp_path, model, checkpoint, message
):
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "base")
    known = json.loads((folder / "config.json").read_text())
    changed = {"model_type": "llama"} if checkpoint is None else known | checkpoint
    (folder / "config.json").write_text(json.dumps(changed))
    with torch.device("meta"):
        built = llama2(**(TINY_LLAMA | model))

    with pytest.raises(ValueError, match=message):
        HFCheckpointer(checkpoint_dir=str(folder)).check_model(built)


def test_a_setting_that_was_rounded_to_float32_is_the_same(tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "base")
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | {"rms_norm_eps": float(torch.tensor(1e-5))}))
    with torch.device("meta"):
        built = llama2(**TINY_LLAMA)

    assert float(torch.tensor(1e-5)) != TINY_LLAMA["norm_eps"]
    HFCheckpointer(checkpoint_dir=str(folder)).check_model(built)


def test_lora_settings_are_read_off_the_model_whose_layers_must_have_the_same():
    def build():
        with torch.device("meta"):
            return lora_llama2(["q_proj", "output_proj"], lora_rank=4, lora_alpha=12, lora_dropout=0.1, **TINY_LLAMA)

    assert LoRASettings.of(build()) == LoRASettings(4, 12, 0.1, ("output_proj", "q_proj"))
    for attribute in ("rank", "alpha"):
        model = build()
        setattr(model.layers[1].attn.q_proj, attribute, 7)
        with pytest.raises(ValueError, match=r"layers of LoRALinear differ in .*: \[.*7.*\]; give all the same"):
            LoRASettings.of(model)


def test_the_fingerprint_is_that_of_size_and_ends_of_each_file(tiny_checkpoint, tmp_path):
    """Not of name or time; 3 MiB stand for the gigabytes of a real file."""
    model = loaded_model(HFCheckpointer(checkpoint_dir=str(tiny_checkpoint)))
    HFCheckpointer(checkpoint_dir=str(tiny_checkpoint), max_shard_size="50KB").save_model(model, tmp_path / "sharded")
    copy = shutil.copytree(tmp_path / "sharded", tmp_path / "copy")
    checkpointer = HFCheckpointer(checkpoint_dir=str(copy))
    known = HFCheckpointer(checkpoint_dir=str(tmp_path / "sharded")).fingerprint()
    assert checkpointer.fingerprint() == known
    assert len(known) == 16
    assert len(checkpointer.weight_files) > 2

    found = {known}
    for file in checkpointer.weight_files:
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        found.add(checkpointer.fingerprint())
    content = bytes(3 * 2**20)
    places = (0, 2**20 - 1, 2**21, len(content) - 1)  # of the first MiB and the last MiB
    for changed in (content, content + bytes(1), *(content[:i] + b"x" + content[i + 1 :] for i in places)):
        file.write_bytes(changed)
        found.add(checkpointer.fingerprint())
    assert len(found) == 1 + len(checkpointer.weight_files) + 6
    file.write_bytes(content[: 3 * 2**19] + b"x" + content[3 * 2**19 + 1 :])  # in between, which is not read
    assert checkpointer.fingerprint() in found
