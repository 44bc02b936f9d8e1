"""Checkpoints and output folders that no run can begin with."""

import json
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from bad_configs import TUNE_RUN, changed
from omegaconf import DictConfig
from refusals import CONFIG, OPENED, RUN, BadInput, Site
from safetensors.torch import load_file, save_file
from tiny_llama import make_llama

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
DAMAGED = rf"base/{WEIGHTS} is damaged \(.*\): download or write it again"
MISMATCH = (
    r"base/config\.json and the weights do not match, so transformers could not load the checkpoints of the "
    r"run:\n.*{}.*\ncorrect config\.json, or download"
)
UNFIT = r"does not fit the checkpoint .*{}.*change `model` or `checkpointer\.checkpoint_dir`.*download it again"


def checkpoint(edit: Callable[[Path], None], **overrides: Any) -> Callable[[Site], DictConfig]:
    """A copy of the checkpoint, changed."""

    def make(site: Site) -> DictConfig:
        folder = site.folder / "base"
        shutil.copytree(site.checkpoint, folder)
        edit(folder)
        return site.config(**{"checkpointer.checkpoint_dir": str(folder), **overrides})

    return make


def sharded(edit: Callable[[Path], None]) -> Callable[[Site], DictConfig]:
    """A checkpoint in several files, changed."""

    def split(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        make_llama(folder, max_shard_size="40KB")
        edit(folder)

    return checkpoint(split)


def removed(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def written(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def cut(name: str, num_bytes: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:num_bytes])


def zeroed(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(bytes((folder / WEIGHTS).stat().st_size))


def settings(**values: Any) -> Callable[[Path], None]:
    """Other settings in config.json."""

    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return edit


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Other weights."""

    def edit(folder: Path) -> None:
        state_dict = load_file(folder / WEIGHTS)
        change(state_dict)
        save_file(state_dict, folder / WEIGHTS, metadata={"format": "pt"})

    return edit


class Payload:
    """Unpickled, it leaves a file behind."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.file),)


def payload(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({NORM: Payload(folder.parent / "executed")}))


def zipped_payload(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({NORM: Payload(folder.parent / "executed")}, folder / "pytorch_model.bin")


def no_tensors(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({"step": 3}, folder / "pytorch_model.bin")


def outside_link(folder: Path) -> None:
    (folder.parent / "private.txt").write_text("of the user's")
    (folder / "vocab.txt").symlink_to("../private.txt")


def missing_shard(folder: Path) -> None:
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def shard_outside(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][NORM] = "../elsewhere.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    shutil.copyfile(next(folder.glob("model-*.safetensors")), folder.parent / "elsewhere.safetensors")


def earlier_checkpoint(site: Site) -> DictConfig:
    """The folder of a finished run."""
    (site.folder / RUN / "checkpoint_100pct").mkdir()
    (site.folder / RUN / "checkpoint_100pct" / WEIGHTS).write_bytes(b"of an earlier run")
    return site.config()


def nothing_to_resume(site: Site) -> DictConfig:
    (site.folder / RUN / "checkpoint_10pct").mkdir()
    return site.config(resume_from_checkpoint=True)


def file_for_folder(site: Site) -> DictConfig:
    (site.folder / "file").write_text("of the user's")
    return site.config(output_dir=str(site.folder / "file"))


def read_only(site: Site) -> DictConfig:
    (site.folder / "closed").mkdir(mode=0o555)
    return site.config(output_dir=str(site.folder / "closed" / "run"))


def with_checkpointer(component: Mapping[str, Any]) -> Callable[[Site], DictConfig]:
    return lambda site: site.config(checkpointer={"checkpoint_dir": str(site.checkpoint), **component})


FILES = [
    BadInput(
        "a folder that is not there",
        changed({"checkpointer.checkpoint_dir": "/no/such/folder"}),
        r"checkpointer: no such folder /no/such/folder",
    ),
    BadInput(
        "a hub id without a network",
        changed({"checkpointer.checkpoint_dir": "nobody/nothing"}),
        r"nobody/nothing is not a local folder and could not be downloaded from .*; give a folder, or check",
    ),
    BadInput(
        "a branch of a local folder",
        changed({"checkpointer.revision": "main"}),
        r"revision 'main' is given for the local folder",
    ),
    BadInput("no config.json", checkpoint(removed("config.json")), r"the checkpoint .*/base lacks config\.json"),
    BadInput(
        "a config.json that ends too soon", checkpoint(cut("config.json", 50)), r"base/config\.json is not valid JSON"
    ),
    BadInput(
        "a list in config.json",
        checkpoint(written("config.json", "[]")),
        r"base/config\.json holds a list, not an object",
    ),
    BadInput(
        "no weights",
        checkpoint(removed(WEIGHTS)),
        r"lacks model\.safetensors or pytorch_model\.bin, or shards with an index",
    ),
    BadInput("weights that end too soon", checkpoint(cut(WEIGHTS, -100)), DAMAGED),
    BadInput("weights that end in the header", checkpoint(cut(WEIGHTS, 100)), DAMAGED),
    BadInput("an empty file of weights", checkpoint(cut(WEIGHTS, 0)), DAMAGED),
    BadInput("a file of zeros for weights", checkpoint(zeroed), DAMAGED),
    BadInput(
        "a text for weights",
        checkpoint(written(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid 1\n")),
        DAMAGED,
    ),
    BadInput(
        "a missing shard",
        sharded(missing_shard),
        r"lacks model-00002-of-\d+\.safetensors, which model\.safetensors\.index\.json names",
    ),
    BadInput(
        "a shard outside the folder",
        sharded(shard_outside),
        r"names '\.\./elsewhere\.safetensors', which is not a file of the same folder: download",
    ),
    BadInput(
        "a folder for a file of the tokenizer",
        checkpoint(lambda folder: (folder / "merges.txt").mkdir()),
        r"base/merges\.txt is not a regular file: replace it with the file of the model, or remove it",
    ),
    BadInput(
        "a pipe for a file of the tokenizer",
        checkpoint(lambda folder: os.mkfifo(folder / "merges.txt")),
        r"base/merges\.txt is not a regular file: replace it with the file of the model, or remove it",
    ),
    BadInput(
        "a link that leads nowhere",
        checkpoint(lambda folder: (folder / "merges.txt").symlink_to("blob")),
        r"base/merges\.txt is a link to .*/base/blob, which does not exist: download or remove the file",
    ),
    BadInput(
        "a link to a file outside the folder",
        checkpoint(outside_link),
        r"base/vocab\.txt is a link to .*/private\.txt, outside of the checkpoint folder; .*: replace the link",
    ),
    BadInput(
        "a list for the settings of generation",
        checkpoint(written("generation_config.json", "[]")),
        r"base/generation_config\.json: transformers cannot load a model with it \(TypeError: .*\): correct it, or rem",
    ),
    BadInput("an index that is no JSON", sharded(written(INDEX, "{")), r"index\.json is not valid JSON"),
    BadInput(
        "an index without a weight_map",
        sharded(written(INDEX, "{}")),
        r"index\.json has no weight_map: download or write it again",
    ),
    BadInput(
        "a list for a weight_map",
        sharded(written(INDEX, '{"weight_map": ["a"]}')),
        r"index\.json has no weight_map: download or write it again",
    ),
    BadInput(
        "a pickle that runs code",
        checkpoint(payload),
        r"pytorch_model\.bin is damaged, or in PyTorch's format before 1.*convert it to safetensors",
    ),
    BadInput(
        "a zipped pickle that runs code", checkpoint(zipped_payload), r"pytorch_model\.bin .*convert it to safetensors"
    ),
    BadInput(
        "a pickle of numbers",
        checkpoint(no_tensors),
        r"pytorch_model\.bin does not hold weights by name: convert it to safetensors",
    ),
]

CONTENTS = [
    BadInput(
        "another architecture",
        checkpoint(settings(model_type="gpt2")),
        r"is of the architecture 'gpt2'; supported: gemma, gpt_neox, gptj, llama",
    ),
    BadInput(
        "no architecture",
        checkpoint(written("config.json", "{}")),
        r"is of the architecture 'None'; supported: gemma, ",
    ),
    BadInput("a text for a size", checkpoint(settings(hidden_size="wide")), r"base/config\.json: .*hidden_size"),
    BadInput(
        "a vocab_size that is not that of the weights",
        checkpoint(settings(vocab_size=600)),
        MISMATCH.format(r"embed_tokens\.weight is \(600, 32\) by .*\(vocab_size is 600\), \(320, 32\) in the weights"),
    ),
    BadInput(
        "biases that the weights lack",
        checkpoint(settings(attention_bias=True)),
        MISMATCH.format(r"no weight model\.\S+q_proj\.bias, which config\.json asks for \(attention_bias is True\)"),
    ),
    BadInput(
        "biases that the weights lack, below adapters",
        checkpoint(settings(mlp_bias=True), lora=True),
        MISMATCH.format(r"no weight model\.\S+up_proj\.bias, which config\.json asks for \(mlp_bias is True\)"),
        lora=True,
    ),
    BadInput(
        "fewer layers than the weights have",
        checkpoint(settings(num_hidden_layers=1)),
        MISMATCH.format(r"1 layers by config\.json \(num_hidden_layers is 1\), 2 in the weights"),
    ),
    BadInput(
        "padding beyond the vocabulary",
        checkpoint(settings(pad_token_id=999)),
        r"base/config\.json: transformers cannot build a model from it \(.*Padding_idx.*\): correct it, or download",
    ),
    BadInput(
        "model.max_seq_len: 10**12",
        changed({"model.max_seq_len": 10**12}),
        UNFIT.format(r"max_seq_len is 64 in the checkpoint, 1000000000000 in the model"),
    ),
    BadInput(
        "another model's builder",
        changed({"model._component_": "torchtune.models.gemma.gemma", "model.head_dim": 8}),
        r"does not fit the checkpoint|has no argument",
    ),
    BadInput(
        "a weight of another shape",
        checkpoint(weights(lambda w: w.update({NORM: torch.ones(16)}))),
        UNFIT.format(r"norm\.scale is \(16,\) in the checkpoint, \(32,\) in the model"),
    ),
    BadInput(
        "a missing weight",
        checkpoint(weights(lambda w: w.pop(NORM))),
        UNFIT.format(r"no weight model\.norm\.weight in the checkpoint"),
    ),
    BadInput(
        "a weight too many",
        checkpoint(weights(lambda w: w.update({"model.extra.weight": torch.ones(3)}))),
        r"model\.extra\.weight",
    ),
    BadInput(
        "whole numbers for weights",
        checkpoint(weights(lambda w: w.update({NORM: torch.ones(32, dtype=torch.int64)}))),
        r"weight model\.norm\.weight is of torch\.int64, not floating point: use a checkpoint that",
        leaves=OPENED,
    ),
    BadInput(
        "a weight that is NaN",
        checkpoint(weights(lambda w: w[EMBEDDING].view(-1)[7].fill_(torch.nan))),
        r"weight model\.embed_tokens\.weight is not finite in torch\.float32: download",
        leaves=OPENED,
    ),
    BadInput(
        "an infinite weight",
        checkpoint(weights(lambda w: w[EMBEDDING].view(-1)[7].fill_(torch.inf))),
        r"weight model\.embed_tokens\.weight is not finite in torch\.float32: download",
        leaves=OPENED,
    ),
    BadInput(
        "quantized weights",
        checkpoint(settings(quantization_config={"quant_method": "gptq", "bits": 4})),
        r"quantization_config is .*'bits': 4.* in the checkpoint, None in the model",
    ),
    BadInput(
        "a tied head",
        checkpoint(settings(tie_word_embeddings=True)),
        r"tie_word_embeddings is True in the checkpoint, False in the model",
    ),
    BadInput(
        "torchtune's checkpointer",
        with_checkpointer(
            {
                "_component_": "torchtune.training.FullModelHFCheckpointer",
                "checkpoint_files": [WEIGHTS],
                "model_type": "LLAMA2",
                "output_dir": "/tmp/none",
            }
        ),
        r"config: checkpointer: torchtune.*makes FullModelHFCheckpointer, not a checkp.*training\.HFCheckpointer",
    ),
]

WITHOUT_ROOTS_RIGHTS = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()

OUTPUT = [
    BadInput(
        "checkpoints of an earlier run",
        earlier_checkpoint,
        r"output_dir .*/run already holds checkpoint_100pct: choose another output_dir, or",
    ),
    BadInput(
        "nothing to resume",
        nothing_to_resume,
        r"output_dir .*/run holds checkpoint_10pct, but no resume checkpoint: choose another output_dir",
    ),
    BadInput(
        "a file for output_dir",
        file_for_folder,
        r"output_dir .*/file cannot be written: .*/file is not a writable folder",
    ),
    BadInput(
        "output_dir below a file",
        changed({"output_dir": f"{Path(__file__)}/run"}),
        r"output_dir .*/run cannot be written: .* is not a writable folder",
    ),
    BadInput(
        "output_dir in /proc", changed({"output_dir": "/proc/run"}), r"output_dir /proc/run cannot be written: /proc "
    ),
    BadInput(
        "a read-only folder for output_dir",
        read_only,
        r"^error: output_dir .*/closed/run cannot be written: .*/closed .*not a writable folder",
        command=(*WITHOUT_ROOTS_RIGHTS, *TUNE_RUN),
        arguments=("--config", CONFIG),
    ),
]

BAD_CHECKPOINTS = [*FILES, *CONTENTS, *OUTPUT]
