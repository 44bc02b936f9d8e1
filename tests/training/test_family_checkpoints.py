"""Checkpoints of every family, read and written, in every form: shards, .bin, tied heads, NF4, fp16."""

import json
import os
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
import transformers
from omegaconf import OmegaConf
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import FAMILY_MODELS, MODELS
from torch import nn
from torchao.dtypes.nf4tensor import NF4Tensor, to_nf4
from torchtune import config, modules, training

from tfidf_tune.models import FAMILIES
from tfidf_tune.training import HFCheckpointer, Run, build_model, load_model
from tfidf_tune.training._checkpointer import implementation_of
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
    """Merged or not, adapters give sums in another order: of some dozen roundings, as large as the largest logit's."""
    torch.testing.assert_close(
        found, expected, rtol=0, atol=32 * torch.finfo(torch.float32).eps * expected.abs().max().item()
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
        written, known = (json.loads((f / "model.safetensors.index.json").read_text()) for f in (saved, base))
        assert written["metadata"]["total_size"] == known["metadata"]["total_size"]
        assert written["weight_map"].keys() == known["weight_map"].keys()
    # The copy of a checkpoint that was not trained is bit-identical.
    weights = [{k: v for file in f.glob("*.safetensors") for k, v in load_file(file).items()} for f in (base, saved)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_an_adapter_on_the_untouched_base_and_a_merged_model_give_the_same_logits(name, tmp_path):
    everywhere = FAMILY_MODELS.index(name) % 2 == 0
    flags = {"apply_lora_to_mlp": True} | ({} if MODELS[name].tied else {"apply_lora_to_output": True})
    base = make_checkpoint(name, tmp_path / "base")
    checkpointer = HFCheckpointer(checkpoint_dir=str(base))
    model = make_model(name, checkpointer, lora=True, **(flags if everywhere else {"lora_dropout": 0.1}))

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
    adapter_config = json.loads((tmp_path / "run" / "checkpoint_10pct" / "adapter_config.json").read_text())
    assert (adapter_config["r"], adapter_config["lora_alpha"]) == (4, 12)
    assert not (tmp_path / "run" / "checkpoint_10pct" / "config.json").exists()
    if not everywhere:
        assert set(adapter_config["target_modules"]) == set(MODELS[name].peft_targets)
        assert adapter_config["lora_dropout"] == 0.1


@pytest.mark.parametrize(("name", "dtype"), [("llama", "bf16"), ("gpt_neox", "fp32"), ("gemma-tied", "bf16")])
def test_nf4_weights_are_those_of_the_checkpoint_rounded(name, dtype, tmp_path):
    """Loaded as torchao quantizes them, saved as what they stand for with the adapter merged in."""
    base = make_checkpoint(name, tmp_path / "base", dim=256)
    checkpointer = HFCheckpointer(checkpoint_dir=str(base))
    model = make_model(name, checkpointer, dim=256, dtype=dtype, lora=True, quantize_base=True)
    plain = make_model(name, checkpointer, dim=256, dtype=dtype)

    expected = dict(plain.named_parameters())
    quantized = {key: value for key, value in model.named_parameters() if isinstance(value, NF4Tensor)}
    assert len(quantized) >= 2 * 4
    for key, value in quantized.items():
        assert torch.equal(value.get_original_weight(), to_nf4(expected[key].detach()).get_original_weight())
        assert value.get_original_weight().dtype == DTYPES[dtype]

    checkpointer.save_model(model, tmp_path / "run" / "checkpoint_10pct")

    saved = hf_logits(tmp_path / "run" / "checkpoint_10pct", DTYPES[dtype])
    ours = logits(model).to(saved.dtype)
    # W + BA is summed in another order than W and BA, in 8 layers; over 256 columns where sums are in fp32 too.
    roundings = 8 * 256**0.5 if dtype == "fp32" else 2 * 8
    atol = roundings * torch.finfo(DTYPES[dtype]).eps * ours.abs().max().item()
    torch.testing.assert_close(saved, ours, rtol=0, atol=atol)


def test_fp16_bases_have_adapters_in_fp32(tmp_path):
    checkpointer = HFCheckpointer(checkpoint_dir=str(make_checkpoint("gptj", tmp_path / "base")))
    model = make_model("gptj", checkpointer, dtype="fp16", lora=True)

    dtypes = {"lora" in key: value.dtype for key, value in model.named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.float16}
    checkpointer.save_model(model, tmp_path / "run" / "merged")
    checkpointer.save_adapter(model, tmp_path / "run" / "adapter")
    assert {v.dtype for v in load_file(tmp_path / "run" / "merged" / "model.safetensors").values()} == {torch.float16}
    assert json.loads((tmp_path / "run" / "merged" / "config.json").read_text())["dtype"] == "float16"
    adapter = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert {value.dtype for value in adapter.values()} == {torch.float32}


def test_bin_files_are_mapped_into_memory_where_there_are_no_safetensors(tmp_path, monkeypatch):
    """GPT-J's repository has no other. They keep strides, with which no resume checkpoint can be written."""
    base = make_checkpoint("gptj", tmp_path / "base")
    expected, weights = hf_logits(base), load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    weights = {key: value.t().contiguous().t() if value.dim() == 2 else value for key, value in weights.items()}
    parts = {f"pytorch_model-{i}.bin": dict(list(weights.items())[i::2]) for i in range(2)}
    index = {"weight_map": {key: file for file, part in parts.items() for key in part}}
    (base / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for file, part in parts.items():
        torch.save(part, base / file)
    asked, load = [], torch.load
    monkeypatch.setattr("torch.load", lambda *args, **kwargs: asked.append(kwargs) or load(*args, **kwargs))

    checkpointer = HFCheckpointer(checkpoint_dir=str(base))
    model = make_model("gptj", checkpointer)
    checkpointer.save_model(model, tmp_path / "run" / "checkpoint_10pct")

    assert len(asked) == 2 * 2, "once for the check, once for the weights"
    assert all(kwargs["mmap"] and kwargs["weights_only"] for kwargs in asked)
    assert all(parameter.is_contiguous() for parameter in model.parameters())
    torch.testing.assert_close(logits(model), expected)
    assert list((tmp_path / "run" / "checkpoint_10pct").glob("*.bin*")) == []


def test_a_file_may_hold_a_tied_head_unless_it_differs(tmp_path):
    """transformers leaves it out, others write it. If it differs, transformers uses both weights, a run only one."""
    base = make_checkpoint("qwen2-tied", tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    assert "lm_head.weight" not in weights

    save_file(weights | {"lm_head.weight": embeddings.clone()}, base / "model.safetensors", metadata={"format": "pt"})
    model = make_model("qwen2-tied", HFCheckpointer(checkpoint_dir=str(base)))
    torch.testing.assert_close(logits(model), hf_logits(base))

    save_file(weights | {"lm_head.weight": embeddings * 2}, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"tie_word_embeddings is True by config\.json, but lm_head\.weight and model\.emb"
    ):
        HFCheckpointer(checkpoint_dir=str(base)).check_model(model)


def test_weights_are_converted_one_by_one(tmp_path, monkeypatch):
    """Files are mapped into memory: a large one is never in memory in addition to the model."""
    base = make_checkpoint("gpt_neox", tmp_path / "base")
    checkpointer = HFCheckpointer(checkpoint_dir=str(base))
    converted = []
    family = FAMILIES["gpt_neox"]
    convert = family.hf_to_tune
    monkeypatch.setattr(
        family,
        "hf_to_tune",
        lambda state, config: (converted.append(len(state)), convert(state, config))[1],
    )

    make_model("gpt_neox", checkpointer)

    assert converted[1:] == [1] * len(load_file(base / "model.safetensors"))  # the first is a check


@pytest.mark.parametrize(
    ("checkpoint", "model", "message"),
    [
        ("gptj", "gpt_neox", r"architecture 'gptj':\n  \S+ is "),
        ("qwen2", "llama", r"layers.0.self_attn.k_proj.bias is \(\d+,\) in the checkpoint, missing in the model"),
        ("llama", "gemma-tied", r"tie_word_embeddings is False in the checkpoint, True in the model"),
        ("gpt_neox", "gpt_neox-sequential", r"use_parallel_residual is True in the checkpoint, False in the model"),
        ("gptj", "gptj-full-rotary", r"rotary_dim is 8 in the checkpoint, 16 in the model"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_with_the_difference(checkpoint, model, message, tmp_path):
    checkpointer = HFCheckpointer(checkpoint_dir=str(make_checkpoint(checkpoint, tmp_path / "base")))
    with torch.device("meta"):
        built = MODELS[model].build()

    with pytest.raises(ValueError, match=message):
        checkpointer.check_model(built)


@pytest.mark.parametrize(
    ("name", "setting", "message"),
    [
        ("gemma-tied", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True in the checkpoint"),
        (
            "gpt_neox",
            {"attention_bias": False},
            r"dense\.bias is in the files, but not in the model of config\.json",
        ),
        (
            "gptj",
            {"n_inner": 96},
            r"fc_in\.weight is \(256, 64\) in the files, \(96, 64\) by config\.json",
        ),
    ],
)
def test_a_config_that_does_not_belong_to_the_weights_is_refused(name, setting, message, tmp_path):
    """transformers could not load what a run writes, or would load another model."""
    base = make_checkpoint(name, tmp_path / "base")
    content = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(content | setting))
    with torch.device("meta"):
        model = MODELS[name].build()

    with pytest.raises(ValueError, match=message):
        HFCheckpointer(checkpoint_dir=str(base)).check_model(model)


@pytest.mark.parametrize("name", ["gemma-tied"])
def test_a_missing_and_an_unknown_weight_are_named(name, tmp_path):
    base = make_checkpoint(name, tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    with torch.device("meta"):
        model = MODELS[name].build()
    missing = next(key for key in sorted(weights) if "mlp" in key)

    save_file({key: value for key, value in weights.items() if key != missing}, base / "model.safetensors")
    message = rf"'\w+', do not match:\n  {missing} is missing in the files\n.*again$"
    with pytest.raises(ValueError, match=message):
        HFCheckpointer(checkpoint_dir=str(base)).check_model(model)

    save_file({**weights, "model.extra.weight": torch.zeros(2)}, base / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.extra\.weight is in the files, but not in the model of config\.json"):
        HFCheckpointer(checkpoint_dir=str(base)).check_model(model)


def test_older_names_in_config_json_are_understood(tmp_path):
    """Pythia's files on the hub say rotary_pct and rotary_emb_base, and have buffers among the weights."""
    base = make_checkpoint("gpt_neox", tmp_path / "base")
    expected = hf_logits(base)
    config = json.loads((base / "config.json").read_text())
    del config["rope_parameters"], config["dtype"]
    config |= {"rotary_pct": 0.25, "rotary_emb_base": 10000, "torch_dtype": "float16"}
    (base / "config.json").write_text(json.dumps(config))
    weights = load_file(base / "model.safetensors")
    for layer in range(2):
        weights[f"gpt_neox.layers.{layer}.attention.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.bool)
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
    with safe_open(tmp_path / "run" / "checkpoint_10pct" / "model.safetensors", framework="pt") as file:
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
    configs = ["config.json", "adapter_config.json"]
    others = [*configs, "*.index.json", *COMPANIONS]
    assert asked == [  # a config is read before weights are downloaded
        ("some/new", None, configs),
        ("some/new", None, ["*.safetensors", *others]),
        ("some/old", "float16", configs),
        ("some/old", "float16", ["*.safetensors", *others]),
        ("some/old", "float16", ["pytorch_model*.bin", *others]),
    ]
    old.save_adapter(make_model("gptj", old, lora=True), tmp_path / "run" / "adapter")
    adapter_config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert (adapter_config["base_model_name_or_path"], adapter_config["revision"]) == ("some/old", "float16")


def test_a_loaded_model_does_not_depend_on_its_file(tmp_path):
    """Files are mapped into memory; writing a checkpoint again must not change a run."""
    base = make_checkpoint("gpt_neox", tmp_path / "base")
    torch.save(load_file(base / "model.safetensors"), tmp_path / "pytorch_model.bin")
    for form in ("model.safetensors", "pytorch_model.bin"):
        model = make_model("gpt_neox", HFCheckpointer(checkpoint_dir=str(base)))
        before = {key: value.detach().clone() for key, value in model.named_parameters()}

        size = (base / form).stat().st_size
        with (base / form).open("r+b") as file:  # in place, as a writer without a temporary name does
            file.seek(size // 10)
            file.write(os.urandom(size - size // 10))

        assert all(torch.equal(value, before[key]) for key, value in model.named_parameters())
        (base / form).unlink()
        if form == "model.safetensors":
            (tmp_path / "pytorch_model.bin").rename(base / "pytorch_model.bin")


def test_a_longer_model_is_refused_and_of_many_differences_five_are_listed(tmp_path):
    """GPT-J's config calls the limit n_positions."""
    checkpointer = HFCheckpointer(checkpoint_dir=str(make_checkpoint("gptj", tmp_path / "base")))
    changes = {"max_seq_len": 32}, {"max_seq_len": 65}, {"num_layers": 3}
    with torch.device("meta"):
        shorter, longer, deeper = (
            config.instantiate(OmegaConf.create(MODELS["gptj"].section() | change)) for change in changes
        )

    checkpointer.check_model(shorter)
    with pytest.raises(ValueError, match=r"max_seq_len is 64 in the checkpoint, 65 in the model"):
        checkpointer.check_model(longer)
    # Of the third layer: two weights of the norm, four of the attention, four of the MLP.
    with pytest.raises(ValueError, match=r"(?s)'gptj':\n(  [^\n]+\n){5}  and 5 more\n"):
        checkpointer.check_model(deeper)


def test_checkpoints_are_complete_although_the_base_has_vanished(tmp_path, monkeypatch):
    """All files of a tokenizer are copied; the index of a sharded base, which names other files, is not."""
    base = make_checkpoint("llama", tmp_path / "base", max_shard_size="60KB")
    (base / "additional_chat_templates").mkdir()
    companions = {"tokenizer.model", "merges.txt", "chat_template.jinja", "tokenizer_config.json"}
    companions.add("additional_chat_templates/tools.jinja")
    for name in companions:
        (base / name).write_text("{}")
    for name in ("training_args.bin", "README.md", "model-other.ckpt", "trainer_state.json", "notes.txt"):
        (base / name).write_text("")
    (base / "old.json").mkdir()
    monkeypatch.chdir(tmp_path)
    checkpointer = HFCheckpointer(checkpoint_dir="base")
    model = make_model("llama", checkpointer, lora=True)

    shutil.rmtree(base)
    checkpointer.save_model(model, tmp_path / "run" / "merged")
    checkpointer.save_adapter(model, tmp_path / "run" / "adapter")

    for folder, own in (("merged", {"config.json", "model.safetensors"}),
                        ("adapter", {"adapter_config.json", "adapter_model.safetensors"})):  # fmt: skip
        saved = tmp_path / "run" / folder
        names = {file.relative_to(saved).as_posix() for file in saved.rglob("*") if file.is_file()} - {"README.md"}
        assert names - {"generation_config.json"} == companions | own
    assert_same_but_for_rounding(hf_logits(tmp_path / "run" / "merged"), logits(model))
    adapter_config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert adapter_config["base_model_name_or_path"] == str(base)


def test_the_files_of_known_tokenizers_are_among_those_copied():
    for name in ("Llama", "Gemma", "Qwen2", "GPTNeoX", "GPT2", "T5", "Bert"):
        assert {*getattr(transformers, f"{name}Tokenizer").vocab_files_names.values()} <= {*COMPANIONS}


def test_the_links_of_a_hub_snapshot_are_followed(tmp_path):
    """Each file of a snapshot is a link to a blob of the same repository, wherever the cache is."""
    snapshot = make_checkpoint("llama", tmp_path / "models--some--model" / "snapshots" / "abc")
    blobs = tmp_path / "models--some--model" / "blobs"
    blobs.mkdir()
    (snapshot / "tokenizer.json").write_text("{}")
    for number, file in enumerate(list(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(f"../../blobs/{number}")
    checkpointer = HFCheckpointer(checkpoint_dir=str(snapshot))

    checkpointer.save_model(make_model("llama", checkpointer), tmp_path / "run" / "saved")

    assert (tmp_path / "run" / "saved" / "tokenizer.json").read_text() == "{}"
    assert not any(file.is_symlink() for file in (tmp_path / "run" / "saved").iterdir())


def test_a_file_too_large_for_a_tokenizer_is_refused(tmp_path):
    base = make_checkpoint("llama", tmp_path / "base")
    with (base / "tokenizer.json").open("wb") as file:
        file.truncate(2**29)

    with pytest.raises(ValueError, match=r"tokenizer\.json is not a file of the checkpoint folder of at most 256 MiB"):
        HFCheckpointer(checkpoint_dir=str(base))


def test_safetensors_are_preferred_to_pytorchs_format(tmp_path):
    """The hub's copies of a model in both; of the second nothing is read."""
    base = make_checkpoint("gptj", tmp_path / "base")
    (base / "pytorch_model.bin").write_bytes(b"not read")
    assert HFCheckpointer(checkpoint_dir=str(base)).weight_files == [base / "model.safetensors"]

    sharded = make_checkpoint("gptj", tmp_path / "sharded", max_shard_size="100KB")
    (sharded / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "pytorch_model-1.bin"}}')
    (sharded / "pytorch_model-1.bin").write_bytes(b"not read")
    files = HFCheckpointer(checkpoint_dir=str(sharded)).weight_files
    assert len(files) > 1
    assert {file.suffix for file in files} == {".safetensors"}


def test_a_model_under_activation_checkpointing_is_saved_under_plain_names(tmp_path):
    base = make_checkpoint("gptj", tmp_path / "base")
    checkpointer = HFCheckpointer(checkpoint_dir=str(base))
    model = make_model("gptj", checkpointer, lora=True)
    expected = logits(model)
    training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})

    checkpointer.save_model(model, tmp_path / "run" / "merged")
    checkpointer.save_adapter(model, tmp_path / "run" / "adapter")

    torch.testing.assert_close(hf_logits(tmp_path / "run" / "merged"), expected)
    names = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors").keys()
    assert not any("checkpoint" in name for name in names)


def test_saving_holds_no_more_than_a_shard_and_two_layers(tmp_path, monkeypatch):
    """Merged weights are copies; of those at most a shard and the layers at hand are alive at a time."""
    layers = {"num_hidden_layers": 8}, {"num_layers": 8}
    tiny = MODELS["llama"]
    monkeypatch.setitem(MODELS, "llama", replace(
        tiny, hf=lambda dim: tiny.hf(dim) | layers[0], tune=lambda dim: tiny.tune(dim) | layers[1]))  # fmt: skip
    base = make_checkpoint("llama", tmp_path / "base")
    checkpointer = HFCheckpointer(checkpoint_dir=str(base), max_shard_size="460KB")  # three layers
    model = make_model("llama", checkpointer, lora=True)
    alive, sizes, weights = [], [], []
    kind = type(implementation_of(model))
    parts = kind.parts

    def watched(implementation, base, device):
        for part in parts(implementation, base, device):
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


def test_a_bin_file_without_weights_is_refused(tmp_path):
    base = make_checkpoint("gptj", tmp_path / "base")
    (base / "model.safetensors").unlink()
    (base / "pytorch_model.bin").touch()
    checkpointer, name = HFCheckpointer(checkpoint_dir=str(base)), "transformer.wte.weight"
    with torch.device("meta"):
        model = MODELS["gptj"].build()
    on_meta = torch.zeros(1, device="meta")

    for content in ([torch.zeros(1)], {3: torch.zeros(1)}, {name: torch.eye(4).to_sparse()}, {name: on_meta}):
        torch.save(content, base / "pytorch_model.bin")
        with pytest.raises(ValueError, match=r"pytorch_model\.bin does not hold weights"):
            checkpointer.check_model(model)
