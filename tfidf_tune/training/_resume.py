"""Exact resume: what a resume checkpoint holds, and whether a run may go on from it.

Weights that are trained and optimizer state are written by PyTorch's distributed checkpoint as safetensors, each
process its shards, so that another number of processes can read them. What is not a parameter is one file a process,
of which nothing but tensors and plain values is unpickled.
"""

import random
import sys
import warnings
from collections.abc import Sized
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
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
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data import Dataset
from torchtune.utils import get_world_size_and_rank

from tfidf_tune._differences import differences
from tfidf_tune._files import remove_leftovers
from tfidf_tune.training._config import FinetuneConfig
from tfidf_tune.training._distributed import is_main_process
from tfidf_tune.training._errors import SetupError, TrainingError, cause_of
from tfidf_tune.training._metrics import ProgressLog
from tfidf_tune.training._parameters import local_tensor
from tfidf_tune.training._resume_files import ResumeFolder, read_manifest
from tfidf_tune.training._run import RESUME_FOLDER, Run
from tfidf_tune.training._state import TrainState

_SETTINGS_FILE = "settings.yaml"
_STATE = "state."  # what the names of an optimizer's tensors begin with
_STEP_SIZE = "batch_size x gradient_accumulation_steps x processes"

# Keys that may change between a run and its continuation: what is shown and kept, and how the same is computed.
_FREE_KEYS = (
    "compile",
    "enable_activation_checkpointing",
    "fsdp_cpu_offload",
    "fsdp_reshard_after_forward",
    "keep_last_n_checkpoints",
    "log_every_n_steps",
    "log_peak_memory_stats",
    "metric_logger",
    "on_non_finite",
    "output_dir",
    "refuse_if_too_large",
    "resume_from_checkpoint",
    "save_at_percent",
    "save_every_n_steps",
)
_BATCH_KEYS = ("batch_size", "gradient_accumulation_steps")


class ResumePoint:
    """Where a run begins, and where it can go on from.

    Attributes:
        step (int): optimizer steps that are done already.
        checkpoint (Path | None): the newest checkpoint, which the run goes on from or has written.
        is_kept (bool): whether the run writes resume checkpoints at all.
    """

    def __init__(self, folder: ResumeFolder, checkpoint: Path | None, settings: dict[str, Any]) -> None:
        self._folder = folder
        self._settings = settings
        self.checkpoint = checkpoint
        self.is_kept = folder.keep_last_n > 0
        self._num_items = 0
        self.step: int = 0 if checkpoint is None else read_manifest(checkpoint)["step"]

    def check_dataset(self, dataset: Dataset[Any]) -> None:
        """Make sure that a run goes on with the data that it began with.

        Args:
            dataset (Dataset[Any]): map-style data set.

        Raises:
            SetupError: If it has another number of items than when the checkpoint was written.
        """
        now = len(cast(Sized, dataset))
        before = now if self.checkpoint is None else _read_process_file(self.checkpoint, 0)["num_items"]
        if now != before:
            raise SetupError(
                f"the data set has {now} items, and had {before} when {self.checkpoint} was written: bring the data "
                "back, or choose another output_dir for a new run"
            )
        self._num_items = now

    def last_checkpoint(self) -> str:
        """Say what is left of a run that ends early."""
        if self.checkpoint is None:
            return "no resume checkpoint was written; milestones written so far are whole"
        return f"the last good checkpoint is {self.checkpoint}: resume_from_checkpoint=True goes on from there"

    def restore(self, state: TrainState, progress: ProgressLog) -> None:
        """Bring model, optimizer, schedule, loss, scaler, random states and the log back to where they were.

        Args:
            state (TrainState): freshly built; changed in place.
            progress (ProgressLog): of this run; changed in place.
        """
        if self.checkpoint is None:
            return
        world_size, rank = get_world_size_and_rank()
        saved_world_size: int = _read_process_file(self.checkpoint, 0)["num_processes"]
        parts = [_read_process_file(self.checkpoint, r) for r in range(saved_world_size)]
        own = parts[rank if world_size == saved_world_size else 0]
        optimizer_state = _optimizer_state(state)
        tensors = {**_trained_parameters(state), **_tensors_of(optimizer_state)}
        if other := set(own["tensors"]) ^ tensors.keys():
            raise TrainingError(
                f"{self.checkpoint} has not the weights and optimizer state that this run has: {min(other)} is in one "
                "alone; it may be of another version of the optimizer"
            )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process: as intended
            load(tensors, storage_reader=HuggingFaceStorageReader(str(self.checkpoint)))
        set_optimizer_state_dict(
            state.model, state.optimizer, {**optimizer_state, **own["optimizer_settings"]}, options=_FLAT
        )
        if state.lr_scheduler is not None:
            state.lr_scheduler.load_state_dict(own["lr_scheduler"])
        state.scaler.load_state_dict(own["scaler"])
        progress.load_state_dict(own["progress"])
        same_loss = world_size == saved_world_size or all(_equal(part["loss"], own["loss"]) for part in parts)
        if same_loss:
            state.loss.load_state_dict(own["loss"])
        if world_size == saved_world_size:
            _set_random_states(own["random_states"])
        else:
            self._tell_what_changed(saved_world_size, world_size, same_loss=same_loss)

    def save(self, step: int, state: TrainState, progress: ProgressLog) -> None:
        """Write a checkpoint of this moment; every process of the run has to.

        Args:
            step (int): optimizer steps done.
            state (TrainState): as it is after that step.
            progress (ProgressLog): of this run.

        Raises:
            TrainingError: If it cannot be written; earlier ones stay as they are.
        """
        progress.sync_to_disk()
        self.checkpoint = self._folder.write(step, lambda folder: self._write_files(folder, state, progress))

    def _write_files(self, folder: Path, state: TrainState, progress: ProgressLog) -> None:
        _, rank = get_world_size_and_rank()
        optimizer_state = _optimizer_state(state)
        tensors = {**_trained_parameters(state), **_tensors_of(optimizer_state)}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
                save(_apart(tensors), storage_writer=writer)
        except CheckpointException as error:
            raise OSError(cause_of(error)) from error
        part = {
            "num_items": self._num_items,
            "num_processes": get_world_size_and_rank()[0],
            "tensors": sorted(tensors),
            "optimizer_settings": _settings_of(optimizer_state),
            "lr_scheduler": None if state.lr_scheduler is None else state.lr_scheduler.state_dict(),
            "scaler": state.scaler.state_dict(),
            "loss": {name: value.cpu() for name, value in state.loss.state_dict().items()},
            "progress": progress.state_dict(),
            "random_states": _random_states(),
        }
        torch.save(part, _process_file(folder, rank))
        if is_main_process():
            OmegaConf.save(OmegaConf.create(self._settings), folder / _SETTINGS_FILE)

    def _tell_what_changed(self, saved: int, now: int, *, same_loss: bool) -> None:
        if not is_main_process():
            return
        if not same_loss:
            window = "the loss starts with an empty window (each process had one of its own)"
        elif saved == 1:
            window = "a window goes on from that of one process, as it was where it is shared (loss.sync)"
        else:
            window = "the window, shared, goes on as it was"
        print(
            f"{self.checkpoint} was written by {saved} process{'es' * (saved > 1)}, this run has {now}: weights, "
            f"optimizer and data go on as they were; {window}; random states (dropout) start anew, and sums are "
            "rounded otherwise",
            file=sys.stderr,
        )


def open_resume(cfg: FinetuneConfig, run: Run) -> ResumePoint:
    """Find where the run begins: at its start, or with ``resume_from_checkpoint`` after the newest whole checkpoint.

    Args:
        cfg (FinetuneConfig): the checked config.
        run (Run): gives the folder.

    Returns:
        ResumePoint: what is damaged, and where the run goes on, is told on stderr.

    Raises:
        SetupError: If no checkpoint is whole, or the newest whole one is of a run with other settings.
    """
    folder = ResumeFolder(run.output_dir / RESUME_FOLDER, keep_last_n=cfg.keep_last_n_checkpoints)
    folder.remove_leftovers()
    if is_main_process():
        remove_leftovers(run.output_dir)
    settings = _settings(cfg)
    if not cfg.resume_from_checkpoint:
        return ResumePoint(folder, None, settings)
    checkpoint, damages = folder.newest_whole()
    if checkpoint is not None:
        _check_settings(checkpoint, settings)
    if is_main_process():
        for damage in damages:
            print(f"{damage}; the one before it is used", file=sys.stderr)
        told = "there is no resume checkpoint yet: starting from the beginning"
        print(told if checkpoint is None else f"going on from {checkpoint}", file=sys.stderr)
    return ResumePoint(folder, checkpoint, settings)


_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def _trained_parameters(state: TrainState) -> dict[str, Tensor]:
    """The parameters that are trained, under names of their own beside the optimizer's; sharded as they are."""
    values: dict[str, Any] = get_model_state_dict(state.model, options=StateDictOptions(ignore_frozen_params=True))
    return {f"model.{name}": value for name, value in values.items()}


def _optimizer_state(state: TrainState) -> dict[str, Any]:
    """Optimizer state by parameter name: tensors, and the settings of the parameter groups."""
    flat: dict[str, Any] = get_optimizer_state_dict(state.model, state.optimizer, options=_FLAT)
    return flat


def _settings_of(optimizer_state: dict[str, Any]) -> dict[str, Any]:
    """What of an optimizer's state is no tensor of a parameter's: learning rate, betas."""
    return {
        name: value
        for name, value in optimizer_state.items()
        if not (name.startswith(_STATE) and isinstance(value, Tensor))
    }


def _tensors_of(optimizer_state: dict[str, Any]) -> dict[str, Tensor]:
    return _plain_tensors({name: value for name, value in optimizer_state.items() if name.startswith(_STATE)})


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of which no two share memory, which safetensors does not take: codebooks of quantized state do."""
    seen: set[int] = set()
    apart = {}
    for name, value in tensors.items():
        address = local_tensor(value).untyped_storage().data_ptr()
        apart[name] = value.clone() if address in seen else value
        seen.add(address)
    return apart


def _plain_tensors(values: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors that have a place in a file; one that is made of several, as a quantized one is, by its parts."""
    plain: dict[str, Tensor] = {}
    for name, value in values.items():
        if not isinstance(value, Tensor):
            continue
        local = local_tensor(value)
        if not is_traceable_wrapper_subclass(local):
            plain[name] = value
        elif isinstance(value, DTensor):
            raise TrainingError(
                f"{name} is a sharded {type(local).__name__}, of which no resume checkpoint can be written: take "
                "another optimizer, one process, or keep_last_n_checkpoints=0"
            )
        else:
            parts, _ = local.__tensor_flatten__()
            plain |= _plain_tensors({f"{name}.{part}": getattr(local, part) for part in parts})
    return plain


def _process_file(folder: Path, rank: int) -> Path:
    return folder / f"process_{rank:05d}.pt"


def _read_process_file(folder: Path, rank: int) -> dict[str, Any]:
    file = _process_file(folder, rank)
    try:
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise SetupError(
            f"{file} holds something other than tensors and plain values, which is never loaded: move {folder} away, "
            "and the one before it is used"
        ) from error
    return content


def _random_states() -> dict[str, Any]:
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, *rest = numpy_state
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def _set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def _settings(cfg: FinetuneConfig) -> dict[str, Any]:
    """What decides what is computed; the run's folder may have moved."""
    resolved: dict[str, Any] = OmegaConf.to_container(cast(DictConfig, cfg), resolve=True)  # type: ignore[assignment]
    settings = {key: value for key, value in resolved.items() if key not in (*_FREE_KEYS, *_BATCH_KEYS)}
    world_size, _ = get_world_size_and_rank()
    return {
        **_relocated(settings, cfg.output_dir),
        # A change of the number of processes is none of the data, if a step stays the same sequences.
        _STEP_SIZE: cfg.batch_size * cfg.gradient_accumulation_steps * world_size,
    }


def _relocated(value: Any, output_dir: str) -> Any:
    if isinstance(value, dict):
        return {key: _relocated(inner, output_dir) for key, inner in value.items()}
    if isinstance(value, list):
        return [_relocated(inner, output_dir) for inner in value]
    if isinstance(value, str) and (value == output_dir or value.startswith(f"{output_dir}/")):
        return f"output_dir{value.removeprefix(output_dir)}"
    return value


def _check_settings(checkpoint: Path, settings: dict[str, Any]) -> None:
    saved = OmegaConf.to_container(OmegaConf.load(checkpoint / _SETTINGS_FILE))
    if changed := differences(cast("dict[str, Any]", saved), settings):
        raise SetupError(
            f"{checkpoint} is of a run with other settings: {'; '.join(changed)}. Set them back, or choose another "
            "output_dir for a new run"
        )
