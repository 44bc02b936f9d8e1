"""Files of weights: found in a checkpoint folder, read and written one after the other."""

import json
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

# In the order of preference: the single file, the index of several.
_NAMES = {
    "model.safetensors": "model.safetensors.index.json",
    "pytorch_model.bin": "pytorch_model.bin.index.json",
}


def find_weight_files(folder: Path) -> list[Path]:
    """Find the files of a checkpoint: safetensors, or PyTorch's own format where there are none.

    Args:
        folder (Path): a Hugging Face model folder.

    Returns:
        list[Path]: at least one file.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If an index is damaged.
    """
    for single, index in _NAMES.items():
        if (folder / index).is_file():
            weight_map = read_json(folder / index).get("weight_map")
            if not weight_map or not isinstance(weight_map, dict):
                raise ValueError(f"{folder / index} has no weight_map: fetch or write it again")
            names = sorted({str(name) for name in weight_map.values()})
            if elsewhere := [name for name in names if Path(name).name != name]:
                raise ValueError(
                    f"{folder / index} names '{elsewhere[0]}', which is no file of the same folder: fetch or write it "
                    "again"
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


def read_meta(file: Path) -> dict[str, Tensor]:
    """Read names and shapes of the weights of a file, not the weights.

    Args:
        file (Path): one of :func:`find_weight_files`.

    Returns:
        dict[str, Tensor]: tensors on the meta device.

    Raises:
        ValueError: If the file is damaged.
    """
    if file.suffix == ".bin":
        return {name: torch.empty(value.shape, device="meta") for name, value in _load_bin(file).items()}
    with _open_safetensors(file) as shard:
        names = list(shard.keys())
        return {name: torch.empty(shard.get_slice(name).get_shape(), device="meta") for name in names}


def read_weights(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Read the weights of a file one by one; they may be views of the file.

    Args:
        file (Path): one of :func:`find_weight_files`.

    Yields:
        tuple[str, Tensor]: name and weight, on the CPU.

    Raises:
        ValueError: If the file is damaged.
    """
    if file.suffix == ".bin":
        yield from _load_bin(file).items()
        return
    with _open_safetensors(file) as shard:
        for name in list(shard.keys()):
            yield name, shard.get_tensor(name)


def read_weight(file: Path, name: str) -> Tensor:
    """Read one weight of a file; it may be a view of the file.

    Args:
        file (Path): one of :func:`find_weight_files`.
        name (str): the weight's name.

    Returns:
        Tensor: the weight, on the CPU.

    Raises:
        ValueError: If the file is damaged.
    """
    if file.suffix == ".bin":
        return _load_bin(file)[name]
    with _open_safetensors(file) as shard:
        weight: Tensor = shard.get_tensor(name)
        return weight


def write_weights(
    folder: Path, meta: dict[str, Tensor], parts: Iterable[dict[str, Tensor]], *, max_shard_size: str
) -> None:
    """Write weights as ``model.safetensors``, or as shards with an index, each as soon as it is complete.

    Args:
        folder (Path): an existing folder.
        meta (dict[str, Tensor]): all weights on the meta device, in the order in which they come.
        parts (Iterable[dict[str, Tensor]]): the weights, on the CPU; what is written is let go.
        max_shard_size (str): largest file, ``5GB`` for example.
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
    """Try whether a size can be read.

    Raises:
        ValueError: If it cannot.
    """
    try:
        split_torch_state_dict_into_shards({}, max_shard_size=max_shard_size)
    except ValueError as error:
        raise ValueError(f"max_shard_size is '{max_shard_size}', it has to be a size such as 5GB or 500MB") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path (Path): the file.

    Returns:
        dict[str, Any]: the object.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it holds no JSON object.
    """
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
    """Write a JSON object, indented."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _open_safetensors(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}): fetch or write it again") from error


def _load_bin(file: Path) -> dict[str, Tensor]:
    try:
        # Tensors alone, no other objects; and mapped, so that the file is read as its weights are.
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(
            f"{file} is damaged, or in PyTorch's format of before 2020 ({type(error).__name__}): "
            "fetch it again, or convert it to safetensors"
        ) from error
    if not (isinstance(content, dict) and all(_is_weight(name, value) for name, value in content.items())):
        raise ValueError(f"{file} holds something else than weights by their names: convert it to safetensors")
    return content


def _is_weight(name: Any, value: Any) -> bool:
    return isinstance(name, str) and isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
