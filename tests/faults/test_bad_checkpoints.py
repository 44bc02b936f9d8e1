"""Checkpoints and output folders that no run can begin with are refused in one message; rows for what differs in kind.

What does not fit a model or config.json is in the tests of the checkpointer.
"""

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
from refusals import CONFIG, RUN, BadInput, Site, each_row, problems_of, value
from safetensors.torch import load_file, save_file
from tiny_llama import make_llama
from transformers import AutoConfig

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
NORM = "model.norm.weight"
EXPERT = "model.layers.0.block_sparse_moe.experts.1.w3.weight"


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
        model = {"_component_": "tfidf_tune.models.auto"}
        return site.config(**{"checkpointer.checkpoint_dir": str(folder), "model": model})

    return make


def removed(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def written(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def cut(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, 100)


def settings(**values: Any) -> Callable[[Path], None]:
    """Change settings in config.json."""

    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return edit


def another(model: str) -> Callable[[Path], object]:
    """Replace config.json by the default one of an architecture."""
    config = AutoConfig.for_model(model)
    return written("config.json", json.dumps(config.to_dict() | {"model_type": model}))


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


def pickled(save: Callable[[Path, Payload], object]) -> Callable[[Site], DictConfig]:
    """Replace the weights by a .bin file with code."""

    def edit(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        save(folder / "pytorch_model.bin", Payload(folder.parent / "executed"))

    return checkpoint(edit)


def shard_outside(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][NORM] = "../elsewhere.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    shutil.copyfile(next(folder.glob("model-*.safetensors")), folder.parent / "elsewhere.safetensors")


def adapter(folder: Path) -> None:
    """Leave what PEFT writes of an adapter."""
    (folder / "config.json").unlink()
    (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/base"}))


def milestone(**overrides: Any) -> Callable[[Site], DictConfig]:
    """Put a checkpoint into the run's folder."""

    def make(site: Site) -> DictConfig:
        (site.folder / RUN / "checkpoint_10pct").mkdir()
        return site.config(**overrides)

    return make


def infinite(state_dict: dict[str, torch.Tensor]) -> None:
    state_dict["model.embed_tokens.weight"].view(-1)[7] = torch.inf


QUANTIZED = {"quant_method": "gptq", "bits": 4}
OWN_CODE = {"model_type": "brand-new", "auto_map": {"AutoConfig": "configuration_new.NewConfig"}}
FULL_MODEL = {
    "_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_files": [WEIGHTS],
    "model_type": "LLAMA2", "output_dir": "none", "checkpoint_dir": "none",
}  # fmt: skip
KINDS = [
    BadInput("an adapter", checkpoint(adapter), r"checkpointer\.checkpoint_dir=some/base"),
    BadInput("GPTQ", checkpoint(settings(quantization_config=QUANTIZED)), "quantization_config"),
    BadInput("an encoder and a decoder", checkpoint(another("t5")), "'t5'"),
    BadInput("a vision model", checkpoint(another("llava")), "'llava'"),
    BadInput("code of its own", checkpoint(settings(**OWN_CODE)), "trust_remote_code"),
    BadInput("another architecture", checkpoint(settings(model_type="gpt2")), r"'gpt2', .*tfidf_tune\.models\.auto"),
    BadInput("a missing expert", mixture(weights(lambda w: w.pop(EXPERT))), r"base/config\.json"),
    BadInput("no output layer", checkpoint(weights(lambda w: w.pop("lm_head.weight"))), "lm_head.weight"),
    BadInput(
        "whole numbers for experts",
        mixture(weights(lambda w: w.update({name: w[name].to(torch.int8) for name in w if "experts" in name}))),
        r"experts\.0\.w1\.weight is of torch\.int8",
    ),
    BadInput(
        "8-bit numbers without scales",
        checkpoint(weights(lambda w: w.update({NORM: w[NORM].to(torch.float8_e4m3fn)}))),
        r"model\.norm\.weight is of torch\.float8",
    ),
    BadInput(
        "an infinite weight",
        checkpoint(weights(infinite)),
        r"model\.embed_tokens\.weight is not finite",
        begins=True,
    ),
    value("checkpointer", FULL_MODEL, "check_model"),
]
FILES = [
    value("checkpointer.checkpoint_dir", "/no/folder", r"checkpointer: no such folder /no/folder"),
    value("checkpointer.checkpoint_dir", "nobody/nothing", "nobody/nothing"),
    value("checkpointer.revision", "main", r"revision 'main' is given for the local folder "),
    BadInput("no config.json", checkpoint(removed("config.json")), r"the checkpoint .*/base lacks config\.json"),
    BadInput("a list in config.json", checkpoint(written("config.json", "[]")), r"config\.json"),
    BadInput("half a config.json", checkpoint(written("config.json", "{")), r"base/config\.json is not valid JSON"),
    BadInput(
        "a list in generation_config.json",
        checkpoint(written("generation_config.json", "[]")),
        r"generation_config\.json",
    ),
    BadInput("no weights", checkpoint(removed(WEIGHTS)), r"model\.safetensors or pytorch_model\.bin"),
    BadInput("weights end too soon", checkpoint(cut), r"base/model\.safetensors"),
    BadInput("a shard outside", sharded(shard_outside), r"\.\./elsewhere\.safetensors"),
    BadInput("an index without names", sharded(written(INDEX, '{"weight_map": ["a"]}')), "weight_map"),
    BadInput("a pipe", checkpoint(lambda folder: os.mkfifo(folder / "merges.txt")), r"base/merges\.txt"),
    BadInput(
        "a link out of the folder",
        checkpoint(lambda folder: (folder / "vocab.txt").symlink_to(f"../{CONFIG}")),
        r"base/vocab\.txt .*/mine\.yaml",
    ),
    BadInput(
        "a pickle that runs code",
        pickled(lambda file, code: file.write_bytes(pickle.dumps(code))),
        r"pytorch_model\.bin .*RuntimeError",
    ),
    BadInput(
        "a zipped pickle that runs code",
        pickled(lambda file, code: torch.save({NORM: code}, file)),
        r"pytorch_model\.bin .*UnpicklingError",
    ),
]
OUTPUT = [
    BadInput("an earlier run", milestone(), "checkpoint_10pct"),
    BadInput("nothing to resume from", milestone(resume_from_checkpoint=True), "output_dir .*checkpoint_10pct"),
    BadInput("a file for a folder", lambda site: site.config(output_dir=__file__), r"output_dir .*\.py"),
]


@each_row([*KINDS, *FILES, *OUTPUT])
def test_a_wrong_checkpoint_or_folder_is_refused_in_one_message(row, site):
    assert problems_of(row, site) == []
