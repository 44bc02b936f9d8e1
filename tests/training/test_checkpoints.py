"""Checkpoints of every family and of other classes: read, written, and refused where they do not
fit the model.
"""

import json
import logging
import os
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
import transformers
from helpers.fakes import any_models
from helpers.fakes.tiny_models import FAMILY_MODELS, MODELS
from helpers.fakes.tiny_run import read_weights
from omegaconf import OmegaConf
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torchao.dtypes.nf4tensor import NF4Tensor, to_nf4
from torchtune import config
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.training import set_activation_checkpointing

from tfidf_tune.models import auto
from tfidf_tune.training import (
    HFCheckpointer,
    Run,
    TrainingError,
    _checkpointer,
    build_model,
    load_model,
)
from tfidf_tune.training._hf_files import COMPANIONS

TOKENS = torch.arange(1, 41).view(2, 20)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_checkpoint(name, folder, *, dim=64, **kwargs) -> Path:
    MODELS[name].build_hf(dim).save_pretrained(folder, **kwargs)
    return folder


def make_model(name, checkpointer, *, dim=64, dtype="fp32", **lora) -> nn.Module:
    run = Run(torch.device("cpu"), DTYPES[dtype], 0, Path("unused"))
    model = build_model(OmegaConf.create({"model": MODELS[name].section(dim, **lora)}), run)
    checkpointer.check_model(model)
    load_model(model, checkpointer, run)
    for key, parameter in model.named_parameters():
        if "lora_b" in key:  # zero at the start
            nn.init.normal_(parameter, std=0.1)
    return model.eval()


def hf_logits(folder, dtype=torch.float32):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        return model(TOKENS).logits


def logits(model):
    with torch.no_grad():
        return model(TOKENS)


def assert_same_but_for_rounding(found, expected):
    """Merged or not, adapters give sums in another order: of some dozen roundings, as large as the
    largest logit's.
    """
    torch.testing.assert_close(
        found,
        expected,
        rtol=0,
        atol=32 * torch.finfo(torch.float32).eps * expected.abs().max().item(),
    )


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_loaded_and_saved_models_are_those_of_transformers(name, tmp_path):
    shards = {"max_shard_size": "60KB"} if FAMILY_MODELS.index(name) % 2 else {}
    base = make_checkpoint(name, tmp_path / "base", **shards)
    checkpointer = HFCheckpointer(checkpoint_dir=str(base), **shards)
    model = make_model(name, checkpointer)

    torch.testing.assert_close(logits(model), hf_logits(base))
    checkpointer.save_model(model, tmp_path / "run" / "checkpoint_10pct")

    saved = tmp_path / "run" / "checkpoint_10pct"
    torch.testing.assert_close(hf_logits(saved), logits(model))
    assert {file.name for file in saved.iterdir()} >= {"config.json", "generation_config.json"}
    assert (len(list(saved.glob("*.safetensors"))) > 1) is bool(shards)
    if shards:
        written, known = (
            json.loads((f / "model.safetensors.index.json").read_text()) for f in (saved, base)
        )
        assert written["metadata"]["total_size"] == known["metadata"]["total_size"]
        assert written["weight_map"].keys() == known["weight_map"].keys()
    # The copy of a checkpoint that was not trained is bit-identical.
    torch.testing.assert_close(read_weights(saved), read_weights(base), rtol=0, atol=0)


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_an_adapter_on_the_untouched_base_and_a_merged_model_give_the_same_logits(name, tmp_path):
    everywhere = FAMILY_MODELS.index(name) % 2 == 0
    flags = {"apply_lora_to_mlp": True} | (
        {} if MODELS[name].tied else {"apply_lora_to_output": True}
    )
    base = make_checkpoint(name, tmp_path / "base")
    checkpointer = HFCheckpointer(checkpoint_dir=str(base))
    model = make_model(
        name, checkpointer, lora=True, **(flags if everywhere else {"lora_dropout": 0.1})
    )
    if everywhere:  # saved under plain names
        set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})

    checkpointer.save_adapter(model, tmp_path / "run" / "checkpoint_10pct")
    checkpointer.save_model(model, tmp_path / "run" / "checkpoint_25pct")

    adapted = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        tmp_path / "run" / "checkpoint_10pct",
    ).eval()
    assert not torch.allclose(logits(model), hf_logits(base))
    with torch.no_grad():
        assert_same_but_for_rounding(adapted(TOKENS).logits, logits(model))
    assert_same_but_for_rounding(hf_logits(tmp_path / "run" / "checkpoint_25pct"), logits(model))
    adapter_config = json.loads(
        (tmp_path / "run" / "checkpoint_10pct" / "adapter_config.json").read_text()
    )
    assert (adapter_config["r"], adapter_config["lora_alpha"]) == (4, 12)
    assert not (tmp_path / "run" / "checkpoint_10pct" / "config.json").exists()
    if not everywhere:
        assert set(adapter_config["target_modules"]) == set(MODELS[name].peft_targets)
        assert adapter_config["lora_dropout"] == 0.1


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama", "bf16"), ("gpt_neox", "fp32"), ("gemma-tied", "bf16")]
)
def test_nf4_weights_are_those_of_the_checkpoint_rounded(name, dtype, tmp_path):
    """Loaded as torchao quantizes them, saved as what they stand for with the adapter merged in."""
    base = make_checkpoint(name, tmp_path / "base", dim=256)
    checkpointer = HFCheckpointer(checkpoint_dir=str(base))
    model = make_model(name, checkpointer, dim=256, dtype=dtype, lora=True, quantize_base=True)
    plain = make_model(name, checkpointer, dim=256, dtype=dtype)

    expected = dict(plain.named_parameters())
    quantized = {
        key: value for key, value in model.named_parameters() if isinstance(value, NF4Tensor)
    }
    assert len(quantized) >= 2 * 4
    for key, value in quantized.items():
        assert torch.equal(
            value.get_original_weight(), to_nf4(expected[key].detach()).get_original_weight()
        )
        assert value.get_original_weight().dtype == DTYPES[dtype]

    checkpointer.save_model(model, tmp_path / "run" / "checkpoint_10pct")

    saved = hf_logits(tmp_path / "run" / "checkpoint_10pct", DTYPES[dtype])
    ours = logits(model).to(saved.dtype)
    # W + BA is summed in another order than W and BA, in 8 layers; over 256 columns where sums are
    # in fp32 too.
    roundings = 8 * 256**0.5 if dtype == "fp32" else 2 * 8
    atol = roundings * torch.finfo(DTYPES[dtype]).eps * ours.abs().max().item()
    torch.testing.assert_close(saved, ours, rtol=0, atol=atol)


def test_older_names_in_config_json_are_understood(tmp_path):
    """Pythia's files on the hub say rotary_pct and rotary_emb_base, and have buffers among the
    weights.
    """
    base = make_checkpoint("gpt_neox", tmp_path / "base")
    expected = hf_logits(base)
    config = json.loads((base / "config.json").read_text())
    del config["rope_parameters"], config["dtype"]
    config |= {"rotary_pct": 0.25, "rotary_emb_base": 10000, "torch_dtype": "float16"}
    (base / "config.json").write_text(json.dumps(config))
    weights = load_file(base / "model.safetensors")
    for layer in range(2):
        weights[f"gpt_neox.layers.{layer}.attention.bias"] = torch.ones(
            1, 1, 64, 64, dtype=torch.bool
        )
        weights[f"gpt_neox.layers.{layer}.attention.masked_bias"] = torch.tensor(-1e9)
        weights[f"gpt_neox.layers.{layer}.attention.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})

    checkpointer = HFCheckpointer(checkpoint_dir=str(base))
    model = make_model("gpt_neox", checkpointer)
    checkpointer.save_model(model, tmp_path / "run" / "checkpoint_10pct")

    torch.testing.assert_close(logits(model), expected)
    torch.testing.assert_close(hf_logits(tmp_path / "run" / "checkpoint_10pct"), expected)
    written = json.loads((tmp_path / "run" / "checkpoint_10pct" / "config.json").read_text())
    assert (written["rotary_pct"], written["torch_dtype"]) == (0.25, "float32")
    with safe_open(
        tmp_path / "run" / "checkpoint_10pct" / "model.safetensors", framework="pt"
    ) as file:
        assert not any("inv_freq" in key or "masked_bias" in key for key in file.keys())  # noqa: SIM118


def test_a_hub_id_is_downloaded_in_the_format_that_it_has(tmp_path, monkeypatch):
    """The older format only where there are no safetensors."""
    base = make_checkpoint("gptj", tmp_path / "base")
    bare = shutil.copytree(base, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(load_file(base / "model.safetensors"), bare / "pytorch_model.bin")
    asked = []

    def download(repo_id, *, revision, allow_patterns):
        asked.append((repo_id, revision, allow_patterns))
        return str(bare if repo_id == "some/old" else base)

    monkeypatch.setattr("tfidf_tune.training._hf_files.snapshot_download", download)

    assert HFCheckpointer(checkpoint_dir="some/new").weight_files == [base / "model.safetensors"]
    old = HFCheckpointer(checkpoint_dir="some/old", revision="float16")

    assert old.weight_files == [bare / "pytorch_model.bin"]
    assert [
        (*where, patterns[0]) for *where, patterns in asked
    ] == [  # a config is read before weights are downloaded
        ("some/new", None, "config.json"),
        ("some/new", None, "*.safetensors"),
        ("some/old", "float16", "config.json"),
        ("some/old", "float16", "*.safetensors"),
        ("some/old", "float16", "pytorch_model*.bin"),
    ]
    assert {*COMPANIONS} < {*asked[-1][-1]}
    old.save_adapter(make_model("gptj", old, lora=True), tmp_path / "run" / "adapter")
    adapter_config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert (adapter_config["base_model_name_or_path"], adapter_config["revision"]) == (
        "some/old",
        "float16",
    )


def test_checkpoints_are_complete_although_the_base_has_vanished(tmp_path, monkeypatch):
    """All files of a tokenizer are copied; the index of a sharded base, which names other files, is
    not.
    """
    base = make_checkpoint("llama", tmp_path / "base", max_shard_size="60KB")
    (base / "additional_chat_templates").mkdir()
    companions = {"tokenizer.model", "merges.txt", "chat_template.jinja", "tokenizer_config.json"}
    companions.add("additional_chat_templates/tools.jinja")
    for name in companions:
        (base / name).write_text("{}")
    for name in (
        "training_args.bin",
        "README.md",
        "model-other.ckpt",
        "trainer_state.json",
        "notes.txt",
    ):
        (base / name).write_text("")
    (base / "old.json").mkdir()
    monkeypatch.chdir(tmp_path)
    checkpointer = HFCheckpointer(checkpoint_dir="base")
    model = make_model("llama", checkpointer, lora=True)

    shutil.rmtree(base)
    checkpointer.save_model(model, tmp_path / "run" / "merged")
    checkpointer.save_adapter(model, tmp_path / "run" / "adapter")

    for folder, own in (
        ("merged", {"config.json", "model.safetensors"}),
        ("adapter", {"adapter_config.json", "adapter_model.safetensors"}),
    ):
        saved = tmp_path / "run" / folder
        names = {
            file.relative_to(saved).as_posix() for file in saved.rglob("*") if file.is_file()
        } - {"README.md"}
        assert names - {"generation_config.json"} == companions | own
    assert_same_but_for_rounding(hf_logits(tmp_path / "run" / "merged"), logits(model))
    adapter_config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert adapter_config["base_model_name_or_path"] == str(base)


def test_saving_holds_no_more_than_a_shard_and_two_layers(tmp_path, monkeypatch):
    """Merged weights are copies; of those at most a shard and the layers at hand are alive at a
    time.
    """
    layers = {"num_hidden_layers": 8}, {"num_layers": 8}
    tiny = MODELS["llama"]
    monkeypatch.setitem(
        MODELS,
        "llama",
        replace(
            tiny,
            hf=lambda dim: tiny.hf(dim) | layers[0],
            tune=lambda dim: tiny.tune(dim) | layers[1],
        ),
    )
    base = make_checkpoint("llama", tmp_path / "base")
    checkpointer = HFCheckpointer(checkpoint_dir=str(base), max_shard_size="460KB")  # three layers
    model = make_model("llama", checkpointer, lora=True)
    alive = []
    sizes = []
    weights = []
    kind = _checkpointer._TorchtuneModel
    parts = kind.parts

    def watched(implementation, device):
        for part in parts(implementation, device):
            if device == "cpu":
                weights.extend((weakref.ref(value), value.nbytes) for value in part.values())
                sizes.append(sum(value.nbytes for value in part.values()))
                alive.append(sum(size for ref, size in weights if ref() is not None))
            yield part

    monkeypatch.setattr(kind, "parts", watched)
    checkpointer.save_model(model, tmp_path / "run" / "checkpoint_10pct")

    assert len(list((tmp_path / "run" / "checkpoint_10pct").glob("*.safetensors"))) == 3
    # Parts of an incomplete shard, the part before, and this one.
    assert max(alive) <= 460_000 + 2 * max(sizes) < 0.6 * sum(sizes)


def test_bin_files_are_mapped_into_memory_and_a_loaded_model_does_not_depend_on_them(
    tmp_path, monkeypatch
):
    """GPT-J's repository has no other. They keep strides, with which no resume checkpoint can be
    written.
    """
    base = make_checkpoint("gptj", tmp_path / "base")
    expected = hf_logits(base)
    weights = load_file(base / "model.safetensors")
    for key, value in weights.items():
        if value.dim() == 2:
            weights[key] = value.t().contiguous().t()
    parts = {f"pytorch_model-{i}.bin": dict(list(weights.items())[i::2]) for i in range(2)}
    weight_map = {}
    for file, part in parts.items():
        weight_map |= dict.fromkeys(part, file)
    index = {"weight_map": weight_map}
    (base / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for file, part in parts.items():
        torch.save(part, base / file)
    assert HFCheckpointer(checkpoint_dir=str(base)).weight_files == [base / "model.safetensors"], (
        "preferred"
    )
    (base / "model.safetensors").unlink()
    asked = []
    load = torch.load
    monkeypatch.setattr(
        "torch.load", lambda *args, **kwargs: asked.append(kwargs) or load(*args, **kwargs)
    )

    checkpointer = HFCheckpointer(checkpoint_dir=str(base))
    model = make_model("gptj", checkpointer)
    for file in parts:  # in place, as a writer without a temporary name does
        with (base / file).open("r+b") as opened:
            opened.seek((base / file).stat().st_size // 10)
            opened.write(os.urandom((base / file).stat().st_size * 9 // 10))

    assert len(asked) == 2 * 2, "once for the check, once for the weights"
    assert all(kwargs["mmap"] and kwargs["weights_only"] for kwargs in asked)
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    torch.testing.assert_close(logits(model), expected)


def setting(**values):
    """Change settings of config.json."""

    def edit(base):
        content = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(content | values))

    return edit


def weights(change):
    """Change the weights of the file: ``change(weights)`` returns others."""

    def edit(base):
        save_file(
            change(load_file(base / "model.safetensors")),
            base / "model.safetensors",
            metadata={"format": "pt"},
        )

    return edit


def another(name):
    return lambda: MODELS[name].build()


def longer(**changes):
    return lambda: config.instantiate(OmegaConf.create(MODELS["gptj"].section() | changes))


# Checkpoint, the model of the config (None: the same), what is changed on disk, what is named.
DIFFERENT = {
    "architecture": ("gptj", another("gpt_neox"), None, "architecture 'gptj'"),
    "biases": (
        "qwen2",
        another("llama"),
        None,
        r"k_proj.bias is \(\d+,\) in the checkpoint, missing in the model",
    ),
    "a setting": (
        "gptj",
        another("gptj-full-rotary"),
        None,
        "rotary_dim is 8 in the checkpoint, 16 in the model",
    ),
    "longer": (
        "gptj",
        longer(max_seq_len=65),
        None,
        "max_seq_len is 64 in the checkpoint, 65 in the model",
    ),
    # Of the third layer: two weights of the norm, four of the attention, four of the MLP.
    "deeper": ("gptj", longer(num_layers=3), None, r"(?s)'gptj':\n(  [^\n]+\n){5}  and 5 more\n"),
    "activation": (
        "llama",
        None,
        setting(hidden_act="gelu"),
        r"is GELU\(.*\) in the checkpoint, SiLU\(\) in",
    ),
    "no biases": ("gpt_neox", None, setting(attention_bias=False), r"dense\.bias is in the files"),
    "width": (
        "gptj",
        None,
        setting(n_inner=96),
        r"fc_in\.weight is \(256, 64\) in the files, \(96, 64\) by config",
    ),
    "layers": (
        "llama",
        None,
        setting(num_hidden_layers=1),
        r"model\.layers\.1\.\S+ is of a layer that config\.json",
    ),
    "padding": ("llama", None, setting(pad_token_id=999), r"config\.json: .*Padding_idx"),
    "missing": (
        "gemma-tied",
        None,
        weights(lambda w: {name: w[name] for name in w if "0.mlp.down_proj" not in name}),
        r"down_proj\.weight is missing in the files",
    ),
    "head": (
        "qwen2-tied",
        None,
        weights(lambda w: w | {"lm_head.weight": 2 * w["model.embed_tokens.weight"]}),
        r"tie_word_embeddings is True by config\.json, but lm_head",
    ),
}


@pytest.mark.parametrize("difference", DIFFERENT)
def test_a_checkpoint_that_does_not_fit_is_refused_with_the_difference(difference, tmp_path):
    """transformers could not load what a run writes, or would load another model."""
    name, build, edit, message = DIFFERENT[difference]
    base = make_checkpoint(name, tmp_path / "base")
    if edit:
        edit(base)
    with torch.device("meta"):
        model = build() if build else MODELS[name].build()

    with pytest.raises(ValueError, match=message):
        HFCheckpointer(checkpoint_dir=str(base)).check_model(model)


def test_merging_does_not_change_the_model_in_training_and_a_failed_save_leaves_nothing(
    tmp_path, monkeypatch
):
    """torchtune's merge adds to the tensors it is given, which on CPU would be the model's own."""
    checkpointer = HFCheckpointer(checkpoint_dir=str(make_checkpoint("gptj", tmp_path / "base")))
    model = make_model("gptj", checkpointer, dtype="fp16", lora=True)
    dtypes = {"lora" in key: value.dtype for key, value in model.named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.float16}
    before = {name: value.clone() for name, value in model.state_dict().items()}

    checkpointer.save_model(model, tmp_path / "run" / "merged")

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {value.dtype for value in read_weights(tmp_path / "run" / "merged").values()} == {
        torch.float16
    }
    assert (
        json.loads((tmp_path / "run" / "merged" / "config.json").read_text())["dtype"] == "float16"
    )

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tfidf_tune.training._hf_files.save_file", full_disk)
    with pytest.raises(
        TrainingError, match="checkpoint_10pct could not be written: .*No space left"
    ):
        checkpointer.save_model(model, tmp_path / "failed" / "checkpoint_10pct")
    assert not (tmp_path / "failed").exists()


def test_the_fingerprint_is_that_of_size_and_ends_of_each_file(tmp_path):
    """Not of name or time; 3 MiB stand for the gigabytes of a real file."""
    base = make_checkpoint("llama", tmp_path / "base", max_shard_size="60KB")
    known = HFCheckpointer(checkpoint_dir=str(base)).fingerprint()
    checkpointer = HFCheckpointer(checkpoint_dir=str(shutil.copytree(base, tmp_path / "copy")))
    assert checkpointer.fingerprint() == known
    assert len(known) == 16

    found = {known}
    content = bytes(3 * 2**20)
    places = (0, 2**20 - 1, 2**21, len(content) - 1)  # of the first MiB and the last MiB
    changed = [
        content,
        content + bytes(1),
        *(content[:i] + b"x" + content[i + 1 :] for i in places),
    ]
    for file in checkpointer.weight_files:
        for other in changed:
            file.write_bytes(other)
            found.add(checkpointer.fingerprint())
    assert len(found) == 1 + len(checkpointer.weight_files) * len(changed)
    # In between, which is not read.
    file.write_bytes(content[: 3 * 2**19] + b"x" + content[3 * 2**19 + 1 :])
    assert checkpointer.fingerprint() in found


def check_as_transformers(folder):
    checkpointer = HFCheckpointer(checkpoint_dir=str(folder))
    with torch.device("meta"):
        model = auto(checkpointer.transformers_config, implementation="transformers")
    checkpointer.check_model(model)


def test_a_layer_that_predicts_more_tokens_is_left_out_with_a_warning(tmp_path, text_file, caplog):
    folder = any_models.make_checkpoint("GLM-4 MoE", tmp_path / "base", text_file)
    extra = {"model.layers.2.eh_proj.weight": torch.ones(64, 128)}
    weights(lambda w: w | extra)(folder)

    setting(num_nextn_predict_layers=1)(folder)
    with caplog.at_level(logging.WARNING):
        check_as_transformers(folder)
    setting(num_nextn_predict_layers=0)(folder)
    with pytest.raises(ValueError, match=r"model\.layers\.2\.eh_proj\.weight is of a layer"):
        check_as_transformers(folder)

    assert (
        "1 weights are not of the model and are not used, first model.layers.2.eh_proj.weight"
        in caplog.text
    )
