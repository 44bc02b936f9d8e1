"""Checkpoints in and out: transformers and peft are the truth for what is written."""

import json
import re
import shutil
from pathlib import Path

import peft
import pytest
import torch
import transformers
from tiny_llama import TINY_LLAMA, make_llama
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
    """A model whose adapters do something: B is zero at the start."""
    model = loaded_model(checkpointer, lora=True)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_b" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def hf_logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(TOKENS).logits


def test_a_loaded_checkpoint_gives_the_logits_of_transformers(tiny_checkpoint, tmp_path):
    model = loaded_model(HFCheckpointer(checkpoint_dir=str(tiny_checkpoint)))

    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), hf_logits(tiny_checkpoint))


def test_shards_and_their_index_are_read(tmp_path):
    sharded = make_llama(tmp_path / "sharded", max_shard_size="40KB")
    whole = make_llama(tmp_path / "whole")
    assert len(list(sharded.glob("*.safetensors"))) > 1

    models = [loaded_model(HFCheckpointer(checkpoint_dir=str(f))) for f in (sharded, whole)]

    weights = [model.state_dict() for model in models]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


def test_a_model_can_be_loaded_in_bf16(tiny_checkpoint, tmp_path):
    run = Run(torch.device("cpu"), torch.bfloat16, 0, tmp_path)

    model = loaded_model(HFCheckpointer(checkpoint_dir=str(tiny_checkpoint)), run=run)

    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_changing_a_loaded_model_leaves_the_file_alone(tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "base")
    before = (folder / "model.safetensors").read_bytes()
    model = loaded_model(HFCheckpointer(checkpoint_dir=str(folder)))

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)

    assert (folder / "model.safetensors").read_bytes() == before


def test_a_saved_model_loads_in_transformers_with_the_same_logits(tiny_checkpoint, tmp_path):
    checkpointer = HFCheckpointer(checkpoint_dir=str(tiny_checkpoint))
    model = loaded_model(checkpointer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)

    folder = tmp_path / "checkpoint_10pct"
    checkpointer.save_model(model, folder)

    with torch.no_grad():
        torch.testing.assert_close(hf_logits(folder), model(TOKENS))


def test_a_saved_model_is_complete(tiny_checkpoint, tmp_path):
    checkpointer = HFCheckpointer(checkpoint_dir=str(tiny_checkpoint))

    folder = tmp_path / "checkpoint_10pct"
    checkpointer.save_model(loaded_model(checkpointer), folder)

    names = {file.name for file in folder.iterdir()}
    assert names == {file.name for file in tiny_checkpoint.iterdir()}
    text = "the grey cat watched the harbour."
    ids = [transformers.AutoTokenizer.from_pretrained(f)(text)["input_ids"] for f in (folder, tiny_checkpoint)]
    assert ids[0] == ids[1]


def test_the_saved_config_names_the_dtype_of_the_saved_weights(tiny_checkpoint, tmp_path):
    checkpointer = HFCheckpointer(checkpoint_dir=str(tiny_checkpoint))
    run = Run(torch.device("cpu"), torch.bfloat16, 0, tmp_path)

    folder = tmp_path / "checkpoint_10pct"
    checkpointer.save_model(loaded_model(checkpointer, run=run), folder)

    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert transformers.AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


def test_a_saved_adapter_loads_in_peft_with_the_same_logits(tiny_checkpoint, tmp_path):
    checkpointer = HFCheckpointer(checkpoint_dir=str(tiny_checkpoint))
    model = random_adapter(checkpointer)

    folder = tmp_path / "checkpoint_10pct"
    checkpointer.save_adapter(model, folder)

    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, folder).eval()
    with torch.no_grad():
        expected = model(TOKENS)
        assert not torch.allclose(hf_logits(tiny_checkpoint), expected)
        torch.testing.assert_close(adapted(TOKENS).logits, expected)


def test_an_adapter_folder_names_its_base_and_is_not_taken_for_a_model(tiny_checkpoint, tmp_path):
    checkpointer = HFCheckpointer(checkpoint_dir=str(tiny_checkpoint))

    folder = tmp_path / "checkpoint_10pct"
    checkpointer.save_adapter(random_adapter(checkpointer), folder)

    adapter_config = json.loads((folder / "adapter_config.json").read_text())
    assert adapter_config["base_model_name_or_path"] == str(tiny_checkpoint)
    assert adapter_config["lora_dropout"] == 0.25
    assert not (folder / "config.json").exists()


def test_a_merged_model_gives_the_logits_of_base_and_adapter(tiny_checkpoint, tmp_path):
    checkpointer = HFCheckpointer(checkpoint_dir=str(tiny_checkpoint))
    model = random_adapter(checkpointer)
    with torch.no_grad():
        expected = model(TOKENS)

    folder = tmp_path / "checkpoint_10pct"
    checkpointer.save_model(model, folder)

    torch.testing.assert_close(hf_logits(folder), expected)


def test_merging_leaves_the_model_in_training_alone(tiny_checkpoint, tmp_path):
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 3}, r"2 layers in the checkpoint, 3 in the model\n  no weight model.layers.2."),
        ({"num_layers": 1}, "weight layers.1..* is not in the model"),
        ({"embed_dim": 64}, r"is \(.*32.*\) in the checkpoint, \(.*64.*\) in the model"),
        ({"vocab_size": 400}, r"output.weight is \(320, 32\) in the checkpoint, \(400, 32\) in the model"),
        ({"num_heads": 8, "num_kv_heads": 4}, "num_attention_heads is 4 in the checkpoint, 8 in the model"),
        ({"rope_base": 500_000}, "rope_base is 10000.0 in the checkpoint, 500000.0 in the model"),
        ({"norm_eps": 1e-6}, "norm_eps is 1e-05 in the checkpoint, 1e-06 in the model"),
        ({"max_seq_len": 128}, "max_seq_len is 64 in the checkpoint, 128 in the model"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_the_difference(tiny_checkpoint, change, message):
    checkpointer = HFCheckpointer(checkpoint_dir=str(tiny_checkpoint))
    with torch.device("meta"):
        model = llama2(**(TINY_LLAMA | change))

    with pytest.raises(ValueError, match=message):
        checkpointer.check_model(model)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("hidden_act", "gelu", "hidden_act is gelu in the checkpoint, silu in the model"),
        ("tie_word_embeddings", True, "tie_word_embeddings is True in the checkpoint, False in the model"),
        ("quantization_config", {"bits": 4}, "quantization_config is {'bits': 4} in the checkpoint, None in the model"),
    ],
)
def test_what_shapes_do_not_show_is_compared_too(tiny_checkpoint, tmp_path, setting, value, message):
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {setting: value}))
    with torch.device("meta"):
        model = llama2(**TINY_LLAMA)

    with pytest.raises(ValueError, match=message):
        HFCheckpointer(checkpoint_dir=str(folder)).check_model(model)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "holds a list, not an object"),
        ('{"model_type": "llama"}', "weights and config.json .* do not match"),
    ],
)
def test_a_config_without_the_essentials_is_refused(tiny_checkpoint, tmp_path, content, message):
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "other")
    (folder / "config.json").write_text(content)
    with torch.device("meta"):
        model = llama2(**TINY_LLAMA)

    with pytest.raises(ValueError, match=message):
        HFCheckpointer(checkpoint_dir=str(folder)).check_model(model)


def test_the_size_of_heads_is_the_checkpoints(tmp_path):
    """head_dim need not be hidden_size / num_attention_heads; torchtune's Llama-2 builder has it so, and says no."""
    folder = make_llama(tmp_path / "wide_heads", head_dim=16)
    with torch.device("meta"):
        model = llama2(**TINY_LLAMA)

    with pytest.raises(ValueError, match=r"q_proj.weight is \(64, 32\) in the checkpoint, \(32, 32\) in the model"):
        HFCheckpointer(checkpoint_dir=str(folder)).check_model(model)


def test_a_rope_scaling_that_the_model_lacks_is_refused(tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "scaled")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = llama2(**TINY_LLAMA)

    with pytest.raises(ValueError, match="rope type is llama3 in the checkpoint, default in the model"):
        HFCheckpointer(checkpoint_dir=str(folder)).check_model(model)


def test_lora_settings_are_read_off_the_model():
    with torch.device("meta"):
        model = lora_llama2(["q_proj", "output_proj"], lora_rank=4, lora_alpha=12, lora_dropout=0.1, **TINY_LLAMA)

    assert LoRASettings.of(model) == LoRASettings(4, 12, 0.1, ("output_proj", "q_proj"))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_a_rank_of_0_is_refused():
    with torch.device("meta"):
        model = lora_llama2(["q_proj"], lora_rank=0, lora_alpha=12, **TINY_LLAMA)

    with pytest.raises(ValueError, match="lora_rank is 0, it has to be at least 1"):
        LoRASettings.of(model)


def test_a_plain_model_has_no_lora_settings():
    with torch.device("meta"):
        model = llama2(**TINY_LLAMA)

    assert LoRASettings.of(model) is None
    with pytest.raises(ValueError, match="no LoRA layers.*full_finetune"):
        LoRASettings.require(model)


@pytest.mark.parametrize("attribute", ["rank", "alpha"])
def test_lora_layers_that_differ_are_refused(attribute):
    with torch.device("meta"):
        model = lora_llama2(["q_proj", "v_proj"], lora_rank=4, lora_alpha=12, **TINY_LLAMA)
    setattr(model.layers[1].attn.q_proj, attribute, 7)

    with pytest.raises(ValueError, match=r"LoRA layers differ in .*: \[.*7.*\]; give all the same"):
        LoRASettings.of(model)


def test_weights_are_known_by_their_files(tiny_checkpoint, tmp_path):
    """By size and both ends of each file, not by name or time; 3 MiB stand for the gigabytes of a real one."""
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "a")
    elsewhere = shutil.copytree(tiny_checkpoint, tmp_path / "b")
    known = HFCheckpointer(checkpoint_dir=str(tiny_checkpoint)).fingerprint()
    assert re.fullmatch("[0-9a-f]{16}", known)
    assert HFCheckpointer(checkpoint_dir=str(elsewhere)).fingerprint() == known

    content = bytes(3 * 2**20)
    changes = {"first": 0, "of the first MiB": 2**20 - 1, "of the last MiB": 2**21, "last": len(content) - 1}
    changed = [content, content + bytes(1), content[:-1]]
    changed += [content[:place] + b"x" + content[place + 1 :] for place in changes.values()]
    checkpointer = HFCheckpointer(checkpoint_dir=str(folder))
    found = set()
    for other in changed:
        (folder / "model.safetensors").write_bytes(other)
        found.add(checkpointer.fingerprint())
    assert len({known, *found}) == 8


def test_each_file_of_weights_counts(tiny_checkpoint, tmp_path):
    model = loaded_model(HFCheckpointer(checkpoint_dir=str(tiny_checkpoint)))
    HFCheckpointer(checkpoint_dir=str(tiny_checkpoint), max_shard_size="50KB").save_model(model, tmp_path / "sharded")
    checkpointer = HFCheckpointer(checkpoint_dir=str(tmp_path / "sharded"))
    assert len(checkpointer.weight_files) > 2
    found = {checkpointer.fingerprint()}

    for file in checkpointer.weight_files:
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        found.add(checkpointer.fingerprint())

    assert len(found) == 1 + len(checkpointer.weight_files)
