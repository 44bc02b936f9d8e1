"""Checkpoints and output folders that no run can begin with are refused in one message; rows for
what differs in kind.

What does not fit a model or config.json is in the tests of the checkpointer.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from helpers.fakes.tiny_llama import make_llama
from helpers.fakes.tiny_run import Payload
from helpers.refusals import CONFIG, RUN, BadInput, Site, assert_refused, each_row, value
from omegaconf import DictConfig
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
NORM = "model.norm.weight"


def checkpoint(edit: Callable[[Path], object], **overrides: Any) -> Callable[[Site], DictConfig]:
    """Copy the checkpoint and edit the copy."""

    def make(site: Site) -> DictConfig:
        folder = site.folder / "base"
        shutil.copytree(site.checkpoint, folder)
        edit(folder)
        return site.config(**{"checkpointer.checkpoint_dir": str(folder), **overrides})

    return make


def removed(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def written(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


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


def pickle_with_code(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({NORM: Payload(folder.parent / "executed")}, folder / "pytorch_model.bin")


def shard_outside(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    make_llama(folder, max_shard_size="40KB")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][NORM] = "../elsewhere.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    shutil.copyfile(
        next(folder.glob("model-*.safetensors")), folder.parent / "elsewhere.safetensors"
    )


def adapter(folder: Path) -> None:
    """Leave what PEFT writes of an adapter."""
    (folder / "config.json").unlink()
    (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "some/base"})
    )


def milestone(**overrides: Any) -> Callable[[Site], DictConfig]:
    """Put a checkpoint into the run's folder."""

    def make(site: Site) -> DictConfig:
        (site.folder / RUN / "checkpoint_10pct").mkdir()
        return site.config(**overrides)

    return make


def evaluation_in_the_way(site: Site) -> DictConfig:
    """Put a file where the evaluation of the run writes."""
    (site.folder / RUN / "evaluation").write_text("of the user\n")
    return site.config(evaluate=True)


def infinite(state_dict: dict[str, torch.Tensor]) -> None:
    state_dict["model.embed_tokens.weight"].view(-1)[7] = torch.inf


T5 = json.dumps(AutoConfig.for_model("t5").to_dict() | {"model_type": "t5"})
QUANTIZED = {"quant_method": "gptq", "bits": 4}
OWN_CODE = {"model_type": "brand-new", "auto_map": {"AutoConfig": "configuration_new.NewConfig"}}
FULL_MODEL = {
    "_component_": "torchtune.training.FullModelHFCheckpointer",
    "checkpoint_files": [WEIGHTS],
    "model_type": "LLAMA2",
    "output_dir": "none",
    "checkpoint_dir": "none",
}
KINDS = [
    BadInput(
        "an adapter",
        checkpoint(adapter),
        r"base is an adapter of some/base: set checkpointer\.checkpoint_dir=some/base, or merge it",
    ),
    BadInput(
        "GPTQ",
        checkpoint(settings(quantization_config=QUANTIZED)),
        "base is quantized .*gptq.*: name the original model",
    ),
    BadInput(
        "an encoder and a decoder",
        checkpoint(written("config.json", T5)),
        "architecture 't5': name a causal language model",
    ),
    BadInput(
        "code of its own",
        checkpoint(settings(**OWN_CODE)),
        "base has Python files of its own.*set trust_remote_code=True",
    ),
    BadInput(
        "8-bit numbers without scales",
        checkpoint(weights(lambda w: w.update({NORM: w[NORM].to(torch.float8_e4m3fn)}))),
        r"model\.norm\.weight is of torch\.float8.*correct config\.json, or name another checkpoint",
    ),
    BadInput(
        "an infinite weight",
        checkpoint(weights(infinite)),
        r"model\.embed_tokens\.weight is not finite in torch\.float32: download .*or set another dtype",
        begins=True,
    ),
    value(
        "checkpointer",
        FULL_MODEL,
        r"has no check_model, .*: take, for example, tfidf_tune\.training\.HFCheckpointer",
    ),
]
FILES = [
    value("checkpointer.checkpoint_dir", "/no/folder", r"checkpointer: no such folder /no/folder"),
    value(
        "checkpointer.checkpoint_dir",
        "nobody/nothing",
        "checkpointer: 'nobody/nothing' is not on this machine, and the Hugging Face hub could not be "
        "reached: give the path of the folder of a model",
    ),
    value(
        "checkpointer.revision",
        "main",
        r"revision 'main' is given for the local folder .*: leave it out",
    ),
    BadInput(
        "no config.json",
        checkpoint(removed("config.json")),
        r"the checkpoint .*/base lacks config\.json",
    ),
    BadInput(
        "a deep config.json",
        checkpoint(written("config.json", "[" * 50_000)),
        r"base/config\.json is not valid JSON",
    ),
    BadInput(
        "half a config.json",
        checkpoint(written("config.json", "{")),
        r"base/config\.json is not valid JSON",
    ),
    BadInput(
        "no weights",
        checkpoint(removed(WEIGHTS)),
        r"base lacks model\.safetensors or pytorch_model\.bin, or shards with an index",
    ),
    BadInput(
        "weights end too soon",
        checkpoint(lambda folder: os.truncate(folder / WEIGHTS, 100)),
        r"weights of .*base/model\.safetensors cannot be read .*: they are damaged.*; download or write them again",
    ),
    BadInput(
        "a shard outside",
        checkpoint(shard_outside),
        r"names \['\.\./elsewhere\.safetensors'\], not files of the same folder",
    ),
    BadInput(
        "a link out of the folder",
        checkpoint(lambda folder: (folder / "vocab.txt").symlink_to(f"../{CONFIG}")),
        r"base/vocab\.txt would be copied .*/mine\.yaml is not a file of its folder .*: remove it",
    ),
    BadInput(
        "a zipped pickle that runs code",
        checkpoint(pickle_with_code),
        r"pytorch_model\.bin .*more than tensors.*: take them as safetensors",
    ),
]
OUTPUT = [
    BadInput(
        "an earlier run",
        milestone(),
        "output_dir .*checkpoint_10pct: choose another output_dir, or move them away",
    ),
    BadInput(
        "nothing to resume from",
        milestone(resume_from_checkpoint=True),
        "output_dir .*checkpoint_10pct, nothing to resume from: choose another output_dir",
    ),
    BadInput(
        "a file for the folder of the evaluation",
        evaluation_in_the_way,
        r"output_dir .*/evaluation cannot be written.*; choose another output_dir",
    ),
    BadInput(
        "a file for a folder",
        lambda site: site.config(output_dir=__file__),
        r"output_dir .*\.py cannot be written.*; choose another output_dir",
    ),
]


@each_row([*KINDS, *FILES, *OUTPUT])
def test_a_wrong_checkpoint_or_folder_is_refused_in_one_message(row, site):
    assert_refused(row, site)
