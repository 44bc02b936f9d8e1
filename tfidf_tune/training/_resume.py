"""Exact resume: what a resume checkpoint holds, and whether a run may go on from it.

Weights that are trained and optimizer state are written by PyTorch's distributed checkpoint as safetensors, each
process its shards, so that another number of processes can read them. What is not a parameter is one file a process,
of which nothing but tensors and plain values is unpickled.
"""

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from types import UnionType
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils.data import Dataset
from torchtune.utils import get_world_size_and_rank
from yaml import YAMLError

from tfidf_tune._differences import differences
from tfidf_tune._files import remove_leftovers
from tfidf_tune.training._checkpointer import HFCheckpointer
from tfidf_tune.training._config import FinetuneConfig
from tfidf_tune.training._data import dataset_fingerprint
from tfidf_tune.training._distributed import is_main_process
from tfidf_tune.training._errors import SetupError, TrainingError, cause_of, first_line
from tfidf_tune.training._metrics import ProgressLog
from tfidf_tune.training._resume_files import ResumeFolder, checkpoint_files, step_of
from tfidf_tune.training._resume_settings import lasting_settings
from tfidf_tune.training._resume_state import (
    apart,
    file_numbers,
    group_settings,
    optimizer_state,
    plain_tensors,
    random_states,
    set_group_settings,
    set_optimizer_state,
    set_random_states,
    trained_parameters,
)
from tfidf_tune.training._run import RESUME_FOLDER, Run
from tfidf_tune.training._state import TrainState

_SETTINGS_FILE = "settings.yaml"


# What one process of a run writes besides its shards of weights and optimizer state.
_PROCESS_STATE: dict[str, type | UnionType] = {
    "inputs": dict,
    "num_processes": int,
    "tensors": list,
    "optimizer_has_state": bool,
    "optimizer_values": dict,
    "optimizer_groups": list,
    "lr_scheduler": dict | None,
    "scaler": dict,
    "loss": dict,
    "tokens_seen": int,
    "random_states": dict,
}


class ResumePoint:
    """Where a run begins, and where it can go on from.

    Attributes:
        step (int): optimizer steps that are done already.
        checkpoint (Path | None): the newest checkpoint, which the run goes on from or has written.
        is_kept (bool): whether the run writes resume checkpoints at all.
        tokens_seen (int): label tokens that it has been trained on.
    """

    def __init__(self, folder: ResumeFolder, checkpoint: Path | None, settings: dict[str, Any]) -> None:
        self._folder = folder
        self._settings = settings
        self.checkpoint = checkpoint
        self.is_kept = folder.keep_last_n > 0
        self._inputs: dict[str, Any] = {}
        self._random_states: dict[str, Any] | None = None
        self.step: int = 0 if checkpoint is None else step_of(checkpoint)
        self.tokens_seen: int = 0 if checkpoint is None else _read_process_file(checkpoint, 0)["tokens_seen"]

    def check_inputs(self, dataset: Dataset[Any], checkpointer: HFCheckpointer) -> None:
        """Make sure that a run goes on with the data and from the weights that it began with.

        Args:
            dataset (Dataset[Any]): map-style data set.
            checkpointer (HFCheckpointer): of the weights that the run began with.

        Raises:
            SetupError: If one of them has changed since the checkpoint was written.
        """
        self._inputs = {"data set": dataset_fingerprint(dataset), "base weights": checkpointer.fingerprint()}
        before = self._inputs if self.checkpoint is None else _read_process_file(self.checkpoint, 0)["inputs"]
        if changed := differences(before, self._inputs):
            raise SetupError(
                f"{self.checkpoint} was written with other inputs: {'; '.join(changed)}. Bring them back, or choose "
                "another output_dir for a new run"
            )

    def last_checkpoint(self) -> str:
        """Say what is left of a run that ends early."""
        if self.checkpoint is None:
            return "no resume checkpoint was written; milestones written so far are whole"
        return f"the last good checkpoint is {self.checkpoint}: resume_from_checkpoint=True goes on from there"

    def restore(self, state: TrainState) -> None:
        """Restore model, optimizer, schedule, loss and scaler.

        Temporary files of a process that was killed are removed on the way.

        Args:
            state (TrainState): freshly built; changed in place.

        Raises:
            TrainingError: If the checkpoint does not fit the run.
        """
        self._folder.remove_leftovers()
        if is_main_process():
            remove_leftovers(self._folder.folder.parent)
        if self.checkpoint is None:
            return
        try:
            self._restore_from(self.checkpoint, state)
        except (ValueError, TypeError, LookupError, AttributeError, AssertionError, CheckpointException) as error:
            raise TrainingError(
                f"{self.checkpoint} cannot be restored ({cause_of(error)}): move it away to resume from an older one"
            ) from error

    def restore_random_states(self) -> None:
        """Restore the random states, the last thing before training."""
        if self._random_states is not None:
            set_random_states(self._random_states)

    def _restore_from(self, checkpoint: Path, state: TrainState) -> None:
        world_size, rank = get_world_size_and_rank()
        first = _read_process_file(checkpoint, 0)
        saved_world_size: int = first["num_processes"]
        same_processes = world_size == saved_world_size
        own = _read_process_file(checkpoint, rank) if same_processes else first
        optimizer = optimizer_state(state.model, state.optimizer, initialize=own["optimizer_has_state"])
        tensors = {**trained_parameters(state.model), **plain_tensors(optimizer)}
        if other := set(own["tensors"]) ^ tensors.keys():
            raise TrainingError(
                f"{checkpoint} does not have the weights and optimizer state of this run: only one of them has "
                f"{min(other)}; the checkpoint may be of another version of the optimizer"
            )
        with _no_word_of_one_process():
            load(tensors, storage_reader=_tensor_reader(checkpoint))
        set_optimizer_state(state.model, state.optimizer, {**optimizer, **own["optimizer_values"]})
        set_group_settings(state.optimizer, own["optimizer_groups"])
        if state.lr_scheduler is not None:
            state.lr_scheduler.load_state_dict(own["lr_scheduler"])
        state.scaler.load_state_dict(own["scaler"])
        same_loss = same_processes or all(
            _equal(_read_process_file(checkpoint, other)["loss"], own["loss"]) for other in range(saved_world_size)
        )
        if same_loss:
            state.loss.load_state_dict(own["loss"])
        if same_processes:
            self._random_states = own["random_states"]
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
        optimizer = optimizer_state(state.model, state.optimizer)
        tensors = {**trained_parameters(state.model), **plain_tensors(optimizer)}
        try:
            with _no_word_of_one_process():
                writer = HuggingFaceStorageWriter(str(folder), file_numbers(tensors), save_distributed=True)
                save(apart(tensors), storage_writer=writer)
        except CheckpointException as error:
            raise OSError(cause_of(error)) from error
        part = {
            "inputs": self._inputs,
            "num_processes": get_world_size_and_rank()[0],
            "tensors": sorted(tensors),
            "optimizer_has_state": bool(optimizer),
            "optimizer_values": {name: value for name, value in optimizer.items() if not isinstance(value, Tensor)},
            "optimizer_groups": group_settings(state.optimizer),
            "lr_scheduler": None if state.lr_scheduler is None else state.lr_scheduler.state_dict(),
            "scaler": state.scaler.state_dict(),
            "loss": {name: value.cpu() for name, value in state.loss.state_dict().items()},
            "tokens_seen": progress.tokens_seen,
            "random_states": random_states(),
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
    settings = lasting_settings(cfg)
    if not cfg.resume_from_checkpoint:
        return ResumePoint(folder, None, settings)
    checkpoint, damages = folder.newest_whole(_find_problem)
    if checkpoint is not None:
        _check_settings(checkpoint, settings)
    if is_main_process():
        for damage in damages:
            print(f"{damage}; the one before it is used", file=sys.stderr)
        told = "there is no resume checkpoint yet: starting from the beginning"
        print(told if checkpoint is None else f"going on from {checkpoint}", file=sys.stderr)
    return ResumePoint(folder, checkpoint, settings)


@contextmanager
def _no_word_of_one_process() -> Iterator[None]:
    """PyTorch warns that it is on one process, as it is meant to be."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _process_file(folder: Path, rank: int) -> Path:
    return folder / f"process_{rank:05d}.pt"


def _find_problem(checkpoint: Path, names: Sequence[str]) -> str | None:
    """Return what the files of a checkpoint lack of a run's state; each process reads its share of them."""
    world_size, own_rank = get_world_size_and_rank()
    try:
        _require_listed(names, [_SETTINGS_FILE, _process_file(checkpoint, 0).name])
        settings = OmegaConf.load(checkpoint / _SETTINGS_FILE)
        if not (isinstance(settings, DictConfig) and settings):
            raise ValueError(f"{_SETTINGS_FILE} does not hold keys and values")
        first = _read_process_file(checkpoint, 0)
        ranks = range(first["num_processes"])
        _require_listed(names, [_process_file(checkpoint, rank).name for rank in ranks])
        for rank in ranks[1:][own_rank::world_size]:
            _read_process_file(checkpoint, rank)
        stored = _tensor_reader(checkpoint).read_metadata().state_dict_metadata
        if lacking := set(first["tensors"]) - stored.keys():
            raise ValueError(f"none of its files holds {min(lacking)}")
    except (ValueError, TypeError, KeyError, OSError, YAMLError, OmegaConfBaseException, SafetensorError) as error:
        return first_line(error) if isinstance(error, ValueError) else cause_of(error)
    return None


def _require_listed(names: Sequence[str], needed: Sequence[str]) -> None:
    if lacking := sorted(set(needed) - set(names)):
        raise ValueError(f"its manifest does not list {', '.join(lacking)}")


class _ListedFiles(FileSystem):
    """Shows PyTorch's reader the files that the manifest lists, whatever else is in the folder."""

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return [str(Path(path) / name) for name in checkpoint_files(Path(path))]


def _tensor_reader(checkpoint: Path) -> HuggingFaceStorageReader:
    reader = HuggingFaceStorageReader(str(checkpoint))
    reader.fs = _ListedFiles()
    return reader


def _read_process_file(folder: Path, rank: int) -> dict[str, Any]:
    file = _process_file(folder, rank)
    try:
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        wrong = [key for key, kind in _PROCESS_STATE.items() if not isinstance(content.get(key, ...), kind)]
    except UnpicklingError as error:
        raise ValueError(
            f"{file.name} holds something other than tensors and plain values, which is never loaded"
        ) from error
    except Exception as error:  # torch.load has no errors of its own
        raise ValueError(f"{file.name} cannot be read ({cause_of(error)})") from error
    if wrong:
        raise ValueError(f"{file.name} lacks {', '.join(wrong)}, or has another type of value there")
    return content


def _equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def _check_settings(checkpoint: Path, settings: dict[str, Any]) -> None:
    saved = OmegaConf.to_container(OmegaConf.load(checkpoint / _SETTINGS_FILE))
    if changed := differences(cast("dict[str, Any]", saved), settings):
        raise SetupError(
            f"{checkpoint} is of a run with other settings: {'; '.join(changed)}. Set them back, or choose another "
            "output_dir for a new run"
        )
