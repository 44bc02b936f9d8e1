"""Files of a Hugging Face model folder: weights, tokenizer and generation config, JSON."""

import json
import os
import pickle
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from huggingface_hub.constants import HF_HUB_CACHE
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig

from tfidf_tune.training._errors import first_line

# In the order of preference: a single file, the index of shards.
_NAMES = {"model.safetensors": "model.safetensors.index.json", "pytorch_model.bin": "pytorch_model.bin.index.json"}
_GENERATION = "generation_config.json"

# The files besides weights that are copied. Those of tokenizers are declared by transformers in `vocab_files_names` of
# its classes, and in constants of its `tokenization_utils_base`.
COMPANIONS = (
    _GENERATION,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
WEIGHT_DTYPES = "floating point of 16 bits or more"
_MAX_BYTES = 2**28  # the largest tokenizers have about 30 MB


def find_weight_files(folder: Path) -> list[Path]:
    """List the weight files of a checkpoint: safetensors, or PyTorch's format where there are none."""
    for single, index in _NAMES.items():
        if (folder / index).is_file():
            weight_map = read_json(folder / index).get("weight_map")
            if not weight_map or not isinstance(weight_map, dict):
                raise ValueError(f"{folder / index} has no weight_map: download or write it again")
            names = sorted({str(name) for name in weight_map.values()})
            if elsewhere := [name for name in names if Path(name).name != name]:
                raise ValueError(
                    f"{folder / index} names '{elsewhere[0]}', which is not a file of the same folder: download or "
                    "write it again"
                )
            files = [folder / name for name in names]
            break
        if (folder / single).is_file():
            return [folder / single]
    else:
        raise FileNotFoundError(f"the checkpoint {folder} lacks {' or '.join(_NAMES)}, or shards with an index")
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(f"the checkpoint {folder} lacks {', '.join(missing)}, which {index} names")
    return files


def is_plain(dtype: torch.dtype) -> bool:
    """Return whether tensors of a dtype hold weights themselves, not numbers that a quantization makes of them."""
    return dtype.is_floating_point and dtype.itemsize > 1


def read_weights(file: Path) -> dict[str, Tensor]:
    """Map the weights of a file into memory; each is read from disk when it is used."""
    if file.suffix == ".safetensors":
        try:
            weights: dict[str, Tensor] = load_file(file)
            return weights
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged ({error}): download or write it again") from error
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)  # unpickles only tensors
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(
            f"{file} is damaged, or in PyTorch's format before 1.6 ({type(error).__name__}): download it again, or "
            "convert it to safetensors"
        ) from error
    if not (isinstance(content, dict) and all(_is_weight(name, value) for name, value in content.items())):
        raise ValueError(f"{file} does not hold weights by name: convert it to safetensors")
    return content


def write_weights(
    folder: Path, meta: dict[str, Tensor], parts: Iterable[dict[str, Tensor]], *, max_shard_size: str
) -> None:
    """Write weights as ``model.safetensors``, or as shards with an index, each as soon as it is complete.

    Unlike ``huggingface_hub.save_torch_state_dict`` this never holds the whole model in memory. ``meta`` holds all
    weights on the meta device, in the order of ``parts``, which are on the CPU and freed when written.
    """
    split = split_torch_state_dict_into_shards(meta, max_shard_size=max_shard_size)
    waiting = {name: set(weights) for name, weights in split.filename_to_tensors.items()}
    pending: dict[str, Tensor] = {}
    for part in parts:
        pending |= part
        for name in [name for name, weights in waiting.items() if weights <= pending.keys()]:
            shard = {weight: pending.pop(weight).contiguous() for weight in sorted(waiting.pop(name))}
            save_file(shard, folder / name, metadata={"format": "pt"})
            shard.clear()
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / _NAMES["model.safetensors"], index)


def check_shard_size(max_shard_size: str) -> None:
    """Raise a ValueError if a size cannot be parsed."""
    try:
        split_torch_state_dict_into_shards({}, max_shard_size=max_shard_size)
    except ValueError as error:
        raise ValueError(f"max_shard_size is '{max_shard_size}', it has to be a size such as 5GB or 500MB") from error


def read_companions(folder: Path, *, has_code: bool = False) -> dict[str, bytes]:
    """Read the files that are copied into every checkpoint of a run: tokenizer, chat template, generation config.

    Links are followed within the folder and the cache of the Hugging Face hub, whose snapshots consist of links. A link
    to any other place is refused: sharing a checkpoint would share that file. With ``has_code`` the Python files are
    copied, too.

    Returns:
        dict[str, bytes]: content by the name relative to the folder.
    """
    roots = [folder.resolve(), Path(HF_HUB_CACHE).resolve()]
    if folder.resolve().parent.name == "snapshots":  # of a cache elsewhere: <repository>/snapshots/<commit>
        roots.append(folder.resolve().parents[1])
    paths = sorted(path for pattern in (*COMPANIONS, *["*.py"] * has_code) for path in _matching(folder, pattern))
    companions = {path.relative_to(folder).as_posix(): _read(path, roots) for path in paths}
    if _GENERATION in companions:
        _check_generation(folder)
    return companions


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    if not path.is_file():
        raise FileNotFoundError(f"the checkpoint {path.parent} lacks {path.name}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _is_weight(name: Any, value: Any) -> bool:
    return isinstance(name, str) and isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta


def _check_generation(folder: Path) -> None:
    try:
        with suppress(OSError):  # transformers ignores what is not JSON
            GenerationConfig.from_pretrained(folder)
    except Exception as error:
        raise ValueError(
            f"{folder / _GENERATION}: transformers cannot load a model with it ({type(error).__name__}: "
            f"{first_line(error)}): correct it, or remove it"
        ) from error


def _matching(folder: Path, pattern: str) -> list[Path]:
    """Find files by name, including dangling links, which ``glob`` skips."""
    if "*" in pattern:
        return list(folder.glob(pattern))
    return [folder / pattern] if os.path.lexists(folder / pattern) else []


def _read(path: Path, roots: list[Path]) -> bytes:
    target = path.resolve()
    if not target.exists():
        raise ValueError(f"{path} is a link to {target}, which does not exist: download or remove the file")
    if not any(target.is_relative_to(root) for root in roots):
        raise ValueError(
            f"{path} is a link to {target}, outside of the checkpoint folder; a copy of it would go into every "
            "checkpoint of the run: replace the link with the file itself, or remove it"
        )
    status = target.stat()
    if not stat.S_ISREG(status.st_mode):  # reading a pipe would wait
        raise ValueError(f"{path} is not a regular file: replace it with the file of the model, or remove it")
    if status.st_size > _MAX_BYTES:
        raise ValueError(
            f"{path} has {status.st_size / 2**20:,.0f} MiB, and at most {_MAX_BYTES // 2**20} MiB are copied into each "
            "checkpoint: replace it with the file of the model, or remove it"
        )
    return target.read_bytes()
