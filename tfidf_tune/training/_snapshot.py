"""The files of a resume checkpoint: what a run needs to continue bit-identically.

- ``settings.yaml``: the settings that have to stay the same.
- ``shard-*.safetensors``: trained weights and optimizer state by PyTorch's distributed checkpoint, each process its
  shards, so that any number of processes can read them.
- ``process_00000.pt``, ...: all other state of a process. Only tensors and plain values are unpickled from it.
- ``manifest.json``: size and SHA-256 of every other file, written last.
"""

import json
import os
import random
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torchtune.utils import get_world_size_and_rank

from tfidf_tune._files import file_sha256, sync_to_disk
from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.training._distributed import is_main_process, local_tensor, plain_tensors
from tfidf_tune.training._errors import TrainingError, cause_of

_SETTINGS = "settings.yaml"
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_STATE = "state."  # prefix of an optimizer's tensors
# PyTorch builds a file in memory before it writes it; this limits how much is in memory twice.
_FILE_BYTES = 2**28
_FORMAT_VERSION = 2
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class TrainState:
    """Everything with a state that a training step reads and changes.

    Attributes:
        model (nn.Module): torchtune model with weights, ready for training.
        loss (WeightedCrossEntropyLoss): the objective.
        optimizer (Optimizer): over all parameters that are trained.
        lr_scheduler (Any): stepped after each optimizer step that was not skipped, or None.
        scaler (torch.amp.GradScaler): scales the loss under fp16; a disabled one does nothing.
    """

    model: nn.Module
    loss: WeightedCrossEntropyLoss
    optimizer: Optimizer
    lr_scheduler: Any
    scaler: torch.amp.GradScaler


def write_snapshot(
    folder: Path, state: TrainState, settings: Mapping[str, Any], inputs: Mapping[str, Any], tokens_seen: int
) -> None:
    """Write the files of this process into an existing folder; every process has to call."""
    world_size, rank = get_world_size_and_rank()
    optimizer = _optimizer_state(state.model, state.optimizer)
    tensors = _tensors(state.model, optimizer)
    with _suppress_single_process_warning():
        writer = HuggingFaceStorageWriter(str(folder), _file_numbers(tensors), save_distributed=True)
        save(_without_shared_memory(tensors), storage_writer=writer)
    groups = state.optimizer.param_groups
    content = {
        "inputs": dict(inputs),
        "num_processes": world_size,
        "tensors": sorted(tensors),
        "optimizer_has_state": bool(optimizer),
        "optimizer_values": {name: value for name, value in optimizer.items() if not isinstance(value, Tensor)},
        "optimizer_groups": [{key: value for key, value in group.items() if key != "params"} for group in groups],
        "lr_scheduler": None if state.lr_scheduler is None else state.lr_scheduler.state_dict(),
        "scaler": state.scaler.state_dict(),
        "loss": {name: value.cpu() for name, value in state.loss.state_dict().items()},
        "tokens_seen": tokens_seen,
        "random_states": _random_states(),
    }
    torch.save(content, folder / _process_file(rank))
    if is_main_process():
        OmegaConf.save(OmegaConf.create(dict(settings)), folder / _SETTINGS)


def describe_own_files(folder: Path) -> dict[str, Any]:
    """Flush this process's share of the files to disk and describe them for the manifest."""
    # Some file systems add hidden files of their own, ._* on macOS for example.
    paths = [folder / name for name in _own_share([p.name for p in folder.iterdir() if not p.name.startswith(".")])]
    for path in paths:
        sync_to_disk(path)
    return {path.name: _described(path) for path in paths}


def _described(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": file_sha256(path)}


def write_manifest(folder: Path, step: int, files: Mapping[str, Any]) -> None:
    """Write the manifest, which makes a checkpoint complete."""
    manifest = {"format_version": _FORMAT_VERSION, "step": step, "files": files}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    sync_to_disk(folder / _MANIFEST)
    sync_to_disk(folder)


def check_files(checkpoint: Path) -> None:
    """Raise an OSError unless this process's share of the files is what the manifest says."""
    manifest = _read_manifest(checkpoint)
    if (version := manifest["format_version"]) != _FORMAT_VERSION:
        raise OSError(
            f"another version of tfidf-tune wrote it, in format {version}; this one reads format {_FORMAT_VERSION}"
        )
    if manifest["step"] != step_of(checkpoint):
        raise OSError(f"{_MANIFEST} is of step {manifest['step']}")
    for name in _own_share(manifest["files"]):
        path = checkpoint / name
        if not path.is_file():
            raise OSError(f"{name} is missing")
        if _described(path) != manifest["files"][name]:
            raise OSError(f"{name} is not what was written (size or SHA-256)")


def step_of(checkpoint: Path) -> int:
    """Return the number of optimizer steps of a checkpoint."""
    return int(checkpoint.name.removeprefix("step_"))


def _read_manifest(checkpoint: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((checkpoint / _MANIFEST).read_bytes())
        return {key: manifest[key] for key in ("format_version", "step", "files")}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise OSError(f"{_MANIFEST} cannot be read ({cause_of(error)})") from error


def _own_share(names: Iterable[str]) -> list[str]:
    world_size, rank = get_world_size_and_rank()
    return sorted(names)[rank::world_size]


def read_settings(folder: Path) -> Any:
    """Read the settings of the run that wrote a checkpoint."""
    return OmegaConf.to_container(OmegaConf.load(folder / _SETTINGS))


def read_process_file(folder: Path, rank: int = 0) -> dict[str, Any]:
    """Read the state of a process that is not in shards; a ValueError names a file that is not what a run writes."""
    file = folder / _process_file(rank)
    try:
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load has no errors of its own
        raise ValueError(f"{file} cannot be read ({cause_of(error)}): move {folder} away") from error
    return content


def restore_snapshot(folder: Path, state: TrainState) -> dict[str, Any]:
    """Restore a freshly built state in place; every process has to call.

    Returns:
        dict[str, Any]: random states for :func:`set_random_states`, empty if the number of processes has changed, which
        is reported on stderr.

    Raises:
        TrainingError: If the run has different weights or optimizer state.
    """
    world_size, rank = get_world_size_and_rank()
    own = read_process_file(folder)
    saved_world_size: int = own["num_processes"]
    same_processes = world_size == saved_world_size
    if same_processes:
        own = read_process_file(folder, rank)
    optimizer = _optimizer_state(state.model, state.optimizer, initialize=own["optimizer_has_state"])
    tensors = _tensors(state.model, optimizer)
    if differing := set(own["tensors"]) ^ tensors.keys():
        raise TrainingError(
            f"{folder} does not have the weights and optimizer state of this run: only one of them has "
            f"{min(differing)}; the checkpoint may be of another version of the optimizer"
        )
    reader = HuggingFaceStorageReader(str(folder))
    reader.fs = _ListedFiles()
    with _suppress_single_process_warning():
        load(tensors, storage_reader=reader)
    if optimizer := {**optimizer, **own["optimizer_values"]}:
        groups = get_optimizer_state_dict(state.model, state.optimizer, options=_FLAT)
        set_optimizer_state_dict(state.model, state.optimizer, {**groups, **optimizer}, options=_FLAT)
    for group, saved in zip(state.optimizer.param_groups, own["optimizer_groups"], strict=True):
        for key, value in saved.items():
            if isinstance(group.get(key), Tensor):
                group[key].copy_(value)
            else:
                group[key] = value
    if state.lr_scheduler is not None:
        state.lr_scheduler.load_state_dict(own["lr_scheduler"])
    state.scaler.load_state_dict(own["scaler"])
    windows = [] if same_processes else [read_process_file(folder, each)["loss"] for each in range(saved_world_size)]
    has_window = all(
        window.keys() == own["loss"].keys() and all(torch.equal(window[name], own["loss"][name]) for name in window)
        for window in windows
    )
    if has_window:
        state.loss.load_state_dict(own["loss"])
    if same_processes:
        random_states: dict[str, Any] = own["random_states"]
        return random_states
    if is_main_process():
        window = "all processes use its window (loss.sync)" if saved_world_size == 1 else "the window is kept"
        window = window if has_window else "the loss starts with an empty window (each process had its own)"
        print(
            f"{folder} was written by {saved_world_size} process{'es' * (saved_world_size > 1)}, this run has "
            f"{world_size}: weights, optimizer and data order are restored; {window}; random states (dropout) are not "
            "restored, and floating-point sums are rounded differently",
            file=sys.stderr,
        )
    return {}


def set_random_states(states: Mapping[str, Any]) -> None:
    """Restore the states of all random number generators."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _random_states() -> dict[str, Any]:
    """Return the states of all generators that training may use, as tensors and plain values."""
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, *rest = numpy_state
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def _process_file(rank: int) -> str:
    return f"process_{rank:05d}.pt"


def _tensors(model: nn.Module, optimizer_state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return trained parameters and optimizer state, sharded as they are, not copied; quantized state by its parts."""
    parameters = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    tensors: dict[str, Any] = {f"model.{name}": value for name, value in parameters.items()}
    for name, value in optimizer_state.items():
        if isinstance(value, Tensor):
            tensors |= {name: value} if isinstance(value, DTensor) else plain_tensors(value, name)
    return tensors


def _optimizer_state(model: nn.Module, optimizer: Optimizer, *, initialize: bool = False) -> dict[str, Any]:
    """Return optimizer state by parameter name, without group settings.

    An optimizer without state gets one only with ``initialize``, because that takes a step, which the optimizer counts.
    """
    if not (optimizer.state or initialize):
        return {}
    flat: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    return {name: value for name, value in flat.items() if name.startswith(_STATE)}


def _file_numbers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Assign the tensors of this process to files, numbered from 1, of limited size."""
    numbers, number, size = {}, 1, 0
    for name, value in tensors.items():
        added = local_tensor(value).nbytes
        if size and size + added > _FILE_BYTES:
            number, size = number + 1, 0
        numbers[name] = number
        size += added
    return numbers


def _without_shared_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Clone tensors that share memory, as the codebooks of quantized state do: safetensors refuses them."""
    seen: set[int] = set()
    apart = {}
    for name, value in tensors.items():
        address = local_tensor(value).untyped_storage().data_ptr()
        apart[name] = value.clone() if address in seen else value
        seen.add(address)
    return apart


class _ListedFiles(FileSystem):
    """Limits PyTorch's reader to the files that the manifest lists."""

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return [str(Path(path) / name) for name in sorted(_read_manifest(Path(path))["files"])]


@contextmanager
def _suppress_single_process_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
