"""Checkpoints and output folders that no run can begin with are refused in one message; one row for each message."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from any_models import make_checkpoint
from omegaconf import DictConfig
from refusals import CONFIG, OPENED, RUN, BadInput, Site, each_row, problems_of, value
from safetensors.torch import load_file, save_file
from tiny_llama import make_llama
from transformers import AutoConfig

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
AUTO = "tfidf_tune.models.auto"
EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
EXPERT = "model.layers.0.block_sparse_moe.experts.1.w3.weight"
MISMATCH = (
    r"weights and config\.json of the checkpoint .*/base, of the architecture '.*', do not match:\n"
    r".*{}.*\nname a checkpoint .*correct config\.json, or download"
)


def checkpoint(edit: Callable[[Path], object], **overrides: Any) -> Callable[[Site], DictConfig]:
    """Copy the checkpoint and edit the copy."""

    def make(site: Site) -> DictConfig:
        folder = site.folder / "base"
        shutil.copytree(site.checkpoint, folder)
        edit(folder)
        return site.config(**{"checkpointer.checkpoint_dir": str(folder), **overrides})

    return make


def sharded(edit: Callable[[Path], object]) -> Callable[[Site], DictConfig]:
    """Write the checkpoint in several files and edit them."""

    def split(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        make_llama(folder, max_shard_size="40KB")
        edit(folder)

    return checkpoint(split)


def mixture(edit: Callable[[Path], object]) -> Callable[[Site], DictConfig]:
    """Write a mixture of experts, whose weights transformers joins when it loads them, and edit it."""

    def make(site: Site) -> DictConfig:
        folder = make_checkpoint("Mixtral", site.folder / "base", site.text_file)
        edit(folder)
        return site.config(**{"checkpointer.checkpoint_dir": str(folder), "model": {"_component_": AUTO}})

    return make


def removed(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def written(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def cut(name: str, num_bytes: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:num_bytes])


def linked(name: str, target: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).symlink_to(target)


def settings(**values: Any) -> Callable[[Path], None]:
    """Change settings in config.json."""

    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return edit


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Change weights."""

    def edit(folder: Path) -> None:
        state_dict = load_file(folder / WEIGHTS)
        change(state_dict)
        save_file(state_dict, folder / WEIGHTS, metadata={"format": "pt"})

    return edit


class Payload:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.file),)


def pickled(save: Callable[[Path, Path], object]) -> Callable[[Path], None]:
    """Replace the weights by a .bin file: ``save(path, folder)``."""

    def edit(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        save(folder / "pytorch_model.bin", folder)

    return edit


def missing_shard(folder: Path) -> None:
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def shard_outside(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][NORM] = "../elsewhere.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    shutil.copyfile(next(folder.glob("model-*.safetensors")), folder.parent / "elsewhere.safetensors")


def milestone(**overrides: Any) -> Callable[[Site], DictConfig]:
    """Put a checkpoint into the run's folder."""

    def make(site: Site) -> DictConfig:
        (site.folder / RUN / "checkpoint_10pct").mkdir()
        return site.config(**overrides)

    return make


def adapter(folder: Path) -> None:
    """Leave what PEFT writes of an adapter."""
    (folder / "config.json").unlink()
    (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/base"}))


def another(model: str) -> Callable[[Path], object]:
    """Replace the config by the default one of an architecture."""
    config = AutoConfig.for_model(model)
    return written("config.json", json.dumps(config.to_dict() | {"model_type": model}))


# Kinds of checkpoints that cannot be the base of a run.
KINDS = [
    BadInput(
        "an adapter", checkpoint(adapter), r"for an adapter of some/base.*set checkpointer\.checkpoint_dir=some/base"
    ),
    BadInput(
        "GPTQ",
        checkpoint(settings(quantization_config={"quant_method": "gptq", "bits": 4})),
        r"is quantized \(quantization_config: .*gptq.*\): name the original model; model\.quantize_base=True",
    ),
    BadInput(
        "an encoder and a decoder",
        checkpoint(another("t5")),
        r"'t5': name a checkpoint of a causal language model for text alone, without an enc",
    ),
    BadInput(
        "a vision model",
        checkpoint(another("llava")),
        r"'llava': name a checkpoint of a causal language model for text alone, without an enc",
    ),
    BadInput(
        "no language model",
        checkpoint(another("vit")),
        r"'vit': name a checkpoint of a causal language model for text alone, without an enc",
    ),
    BadInput(
        "code of its own",
        checkpoint(settings(model_type="brand-new", auto_map={"AutoConfig": "configuration_new.NewConfig"})),
        r"config\.json: .*contains custom code .*pass the argument `trust_remote_code=True`",
    ),
    BadInput(
        "no output layer",
        checkpoint(weights(lambda state_dict: state_dict.pop("lm_head.weight"))),
        MISMATCH.format(r"lm_head\.weight is missing in the files"),
    ),
    BadInput(
        "whole numbers for experts",
        mixture(weights(lambda w: w.update({name: w[name].to(torch.int8) for name in w if "experts" in name}))),
        MISMATCH.format(r"experts\.0\.w1\.weight is of torch\.int8, not floating point of 16 bits or more"),
    ),
    BadInput(
        "a missing expert",
        mixture(weights(lambda w: w.pop(EXPERT))),
        r"base/config\.json: transformers cannot load a model with it \(RuntimeError: .*weights",
    ),
    BadInput(
        "GGUF",
        checkpoint(lambda folder: (folder / WEIGHTS).rename(folder / "model-Q4_1.gguf")),
        r"lacks model\.safetensors .* \(GGUF files cannot be trained\)",
    ),
]
FILES = [
    value("checkpointer.checkpoint_dir", "/no/folder", r"checkpointer: no such folder /no/folder"),
    value("checkpointer.checkpoint_dir", "nobody/nothing", r"nobody/nothing is not a local folder and could not be do"),
    value("checkpointer.revision", "main", r"revision 'main' is given for the local folder .*: only hub ids have rev"),
    BadInput("no config.json", checkpoint(removed("config.json")), r"the checkpoint .*/base lacks config\.json"),
    BadInput("config.json ends too soon", checkpoint(cut("config.json", 50)), r"base/config\.json is not valid JSON"),
    BadInput("a list in config.json", checkpoint(written("config.json", "[]")), r"config\.json holds a list, not an o"),
    BadInput("no weights", checkpoint(removed(WEIGHTS)), r"lacks model\.safetensors or pytorch_model\.bin, or shards"),
    BadInput("weights end too soon", checkpoint(cut(WEIGHTS, -100)), r"base/model.safetensors is damaged \(.*\): do"),
    BadInput("weights without content", checkpoint(cut(WEIGHTS, 0)), r"base/model.safetensors is damaged \(.*\): do"),
    BadInput(
        "a missing shard", sharded(missing_shard), r"json names model-00002-of-\d+\.safetensors, which is not a file"
    ),
    BadInput(
        "a shard outside", sharded(shard_outside), r"json names \.\./elsewhere\.safetensors, which is not a file of the"
    ),
    BadInput("an index without names", sharded(written(INDEX, '{"weight_map": ["a"]}')), r"has no weight_map: do"),
    BadInput(
        "a pipe for a tokenizer file",
        checkpoint(lambda folder: os.mkfifo(folder / "merges.txt")),
        r"base/merges\.txt .*is not a file of the checkpoint folder .*: replace it with the file of the model",
    ),
    BadInput(
        "a dangling link",
        checkpoint(linked("merges.txt", "blob")),
        r"base/merges\.txt would be copied .*, but .*/base/blob is not a file of the checkpoint folder",
    ),
    BadInput(
        "a link out of the folder",
        checkpoint(linked("vocab.txt", f"../{CONFIG}")),
        r"base/vocab\.txt would be copied .*, but .*/mine\.yaml is not a file of the checkpoint folder",
    ),
    BadInput(
        "a list in generation_config.json",
        checkpoint(written("generation_config.json", "[]")),
        r"transformers cannot load a model with it \(TypeError: .*\): correct it or generation_config\.json",
    ),
    BadInput(
        "a pickle that runs code",
        checkpoint(pickled(lambda file, folder: file.write_bytes(pickle.dumps(Payload(folder.parent / "executed"))))),
        r"pytorch_model\.bin is damaged \(RuntimeError: .*before 1\.6 has to be converted to safetensors",
    ),
    BadInput(
        "a zipped pickle that runs code",
        checkpoint(pickled(lambda file, folder: torch.save({NORM: Payload(folder.parent / "executed")}, file))),
        r"pytorch_model\.bin is damaged \(UnpicklingError: ",
    ),
    BadInput(
        "a pickle of numbers",
        checkpoint(pickled(lambda file, _: torch.save({"step": 3}, file))),
        r"pytorch_model\.bin does not hold weights by name: convert it to safetensors",
    ),
]

CONTENTS = [
    BadInput(
        "another architecture",
        checkpoint(settings(model_type="gpt2")),
        r"is of the architecture 'gpt2', .*set model\._component_ to tfidf_tune\.models\.auto",
    ),
    BadInput("a text for a size", checkpoint(settings(hidden_size="wide")), r"base/config\.json: .*hidden_size"),
    BadInput(
        "a vocab_size that is not that of the weights",
        checkpoint(settings(vocab_size=600)),
        MISMATCH.format(r"embed_tokens\.weight is \(320, 32\) in the files, \(600, 32\) by config\.json"),
    ),
    BadInput(
        "biases that the weights lack, with adapters",
        checkpoint(settings(mlp_bias=True), lora=True),
        MISMATCH.format(r"model\.\S+_proj\.bias is missing in the files"),
        lora=True,
    ),
    BadInput(
        "fewer layers than the weights have",
        checkpoint(settings(num_hidden_layers=1)),
        MISMATCH.format(r"model\.layers\.1\.\S+ is of a layer that config\.json does not have"),
    ),
    BadInput(
        "padding beyond the vocabulary",
        checkpoint(settings(pad_token_id=999)),
        r"base/config\.json: transformers cannot load a model with it \(.*Padding_idx.*\): correct it or",
    ),
    BadInput(
        "a weight of another shape",
        checkpoint(weights(lambda w: w.update({NORM: torch.ones(16)}))),
        MISMATCH.format(r"model\.norm\.weight is \(16,\) in the files, \(32,\) by config\.json"),
    ),
    BadInput(
        "whole numbers for weights",
        checkpoint(weights(lambda w: w.update({NORM: torch.ones(32, dtype=torch.int64)}))),
        MISMATCH.format(r"model\.norm\.weight is of torch\.int64, not floating point of 16 bits or more"),
    ),
    BadInput(
        "8-bit numbers without scales",
        checkpoint(weights(lambda w: w.update({NORM: w[NORM].to(torch.float8_e4m3fn)}))),
        MISMATCH.format(r"model\.norm\.weight is of torch\.float8_e4m3fn, not floating point of 16"),
    ),
    BadInput(
        "an infinite weight",
        checkpoint(weights(lambda w: w[EMBEDDING].view(-1)[7].fill_(torch.inf))),
        r"weight model\.embed_tokens\.weight is not finite in torch\.float32: download",
        leaves=OPENED,
    ),
    value(
        "checkpointer",
        {
            "_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_files": [WEIGHTS],
            "model_type": "LLAMA2", "output_dir": "none", "checkpoint_dir": "none",
        },
        r"config: checkpointer: torchtune.*FullModelHFCheckpointer has no check_model.*training\.HFCheckpointer",
    ),
]  # fmt: skip

OUTPUT = [
    BadInput("an earlier run", milestone(), r"already holds checkpoint_10pct: choose another output_dir, or"),
    BadInput(
        "nothing to resume from",
        milestone(resume_from_checkpoint=True),
        r"output_dir .*/run holds checkpoint_10pct, but no resume checkpoint: choose another output_dir",
    ),
    value("output_dir", __file__, r"output_dir .*\.py cannot be written: .* is not a writable folder"),
    value("output_dir", "/proc/run", r"^error: output_dir /proc/run cannot be written: /proc is not a writable folder"),
]


@each_row([*KINDS, *FILES, *CONTENTS, *OUTPUT])
def test_a_wrong_checkpoint_or_folder_is_refused_in_one_message(row, site):
    assert problems_of(row, site) == []
