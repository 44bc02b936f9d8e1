"""Where a run begins and resumes: its checkpoints on disk, and whether settings and inputs are the
same.

Checkpoints are ``output_dir/resume/step_120``: written atomically, verified before use, the newest
are kept. They have what a run needs to continue bit-identically:

- ``settings.yaml``: the settings that have to stay the same.
- ``shard-*.safetensors``: trained weights and optimizer state by PyTorch's distributed checkpoint,
  each process its shards, so that any number of processes can read them.
- ``process_00000.pt``, ...: all other state of a process. Only tensors and plain values are
  unpickled from it.
- ``manifest.json``: size and SHA-256 of every other file, written last.
"""

import json
import math
import os
import random
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
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
from torch.utils.data import Dataset
from torchtune.utils import get_world_size_and_rank

from tfidf_tune._checks import differences
from tfidf_tune._config import FinetuneConfig
from tfidf_tune._files import digest, file_sha256, remove_folder, remove_leftovers, sync_to_disk
from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.training._checkpointer import HFCheckpointer
from tfidf_tune.training._config import change_references
from tfidf_tune.training._data import dataset_fingerprint
from tfidf_tune.training._distributed import (
    gather_objects,
    is_main_process,
    local_tensor,
    plain_tensors,
    print_once,
)
from tfidf_tune.training._errors import SetupError, TrainingError, cause_of
from tfidf_tune.training._folder import RESUME_FOLDER
from tfidf_tune.training._metrics import ProgressLog
from tfidf_tune.training._run import Run

_FORMAT_VERSION = 2
_MANIFEST = "manifest.json"
_SETTINGS = "settings.yaml"
_PROCESS_FILE = "process_{:05d}.pt"
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_STATE = "state."  # prefix of an optimizer's tensors
# PyTorch builds a file in memory before it writes it; this limits how much is in memory twice.
_FILE_BYTES = 2**28
_ONE_PROCESS = "torch.distributed is disabled"  # a warning of PyTorch
_MINI_BATCH = "batch_size x processes"
# Keys that a resumed run may change: what is shown and kept, and how the same results are computed.
_FREE_KEYS = (
    "compile",
    "enable_activation_checkpointing",
    "evaluate",
    "fsdp_cpu_offload",
    "fsdp_reshard_after_forward",
    "keep_last_n_checkpoints",
    "log_every_n_steps",
    "log_peak_memory_stats",
    "memorization_monitor",
    "metric_logger",
    "on_non_finite",
    "output_dir",
    "resume_from_checkpoint",
    "save_at_percent",
    "save_every_n_steps",
)


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


class ResumePoint:
    """Where a run begins, and where it can be resumed; all processes call the methods together."""

    def __init__(
        self, folder: Path, keep_last_n: int, settings: dict[str, Any], checkpoint: Path | None
    ) -> None:
        self._folder = folder
        self._keep_last_n = keep_last_n
        self._settings = settings
        self._saved: dict[str, Any] = {}
        if checkpoint is not None:
            self._saved = _read_process_file(checkpoint)
        self._inputs: dict[str, Any] = {}
        self._random_states: dict[str, Any] = {}
        self.checkpoint = checkpoint  # the newest, which the run resumed from or has written
        self.is_kept = keep_last_n > 0
        # Optimizer steps that are done, and label tokens in them.
        self.step = 0 if checkpoint is None else step_of(checkpoint)
        self.tokens_seen: int = self._saved.get("tokens_seen", 0)

    def check_inputs(self, dataset: Dataset[Any], checkpointer: HFCheckpointer) -> None:
        """Raise a SetupError if data, base weights or the steps of an epoch are not those of the
        checkpoint.
        """
        self._inputs = {
            "data set": dataset_fingerprint(dataset),
            "base weights": checkpointer.fingerprint(),
        }
        changed = differences(self._saved.get("inputs", self._inputs), self._inputs)
        if changed:
            raise SetupError(
                f"{self.checkpoint} was written with other inputs: {'; '.join(changed)}. Restore "
                "them, or choose another output_dir for a new run"
            )
        world_size, _ = get_world_size_and_rank()
        saved_world_size: int = self._saved.get("num_processes", world_size)
        before = self._steps_per_epoch(dataset, saved_world_size)
        now = self._steps_per_epoch(dataset, world_size)
        if before != now:
            raise SetupError(
                f"{self.checkpoint} was written by {saved_world_size} process(es), with {before} "
                f"steps per epoch; with {world_size} process(es) there are {now}, because "
                "sequences that cannot be shared out equally are left out: start "
                f"{saved_world_size} process(es), or choose another output_dir for a new run"
            )

    def _steps_per_epoch(self, dataset: Dataset[Any], num_processes: int) -> int:
        """Count the optimizer steps of an epoch on a number of processes: schedule and data are
        divided by them.

        Of 33 sequences, four in a mini-batch of all processes, one process takes 9 steps, the last
        with one sequence. Two processes take 16 each, two at a time, in 8 steps: the last sequence
        is left out.
        """
        batch_size: int = self._settings[_MINI_BATCH] // num_processes
        accumulated: int = self._settings["gradient_accumulation_steps"]
        num_sequences = len(cast(Sized, dataset)) // num_processes
        num_batches = math.ceil(num_sequences / batch_size)
        return math.ceil(num_batches / accumulated)

    def last_checkpoint(self) -> str:
        """Describe where a run that ends early can be resumed."""
        if self.checkpoint is None:
            return "no resume checkpoint was written; milestones written so far are complete"
        return (
            f"the last good checkpoint is {self.checkpoint}: set resume_from_checkpoint=True to "
            "resume from it"
        )

    def restore(self, state: TrainState) -> None:
        """Restore a freshly built state in place, and remove temporary files of
        a killed process.
        """
        if is_main_process():
            for path in self._folder.glob(".step_*"):
                shutil.rmtree(path)
            remove_leftovers(self._folder.parent)
            # A process that was killed after it had written the newest has not removed the oldest.
            if self.is_kept:
                paths = _checkpoints(self._folder)
                intact = [path for path in paths if step_of(path) <= self.step]
                for path in intact[self._keep_last_n :]:
                    remove_folder(path)
        if self.checkpoint is None:
            return
        try:
            self._random_states = _restore(self.checkpoint, self._saved, state)
        except (
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
            AssertionError,
            CheckpointException,
        ) as error:
            raise TrainingError(
                f"{self.checkpoint} cannot be restored ({cause_of(error)}): move it away"
            ) from error

    def restore_random_states(self) -> None:
        """Restore the random states, as the last thing before training."""
        states = self._random_states
        if not states:
            return
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        torch.set_rng_state(states["torch"])
        if states["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])

    def save(self, step: int, state: TrainState, progress: ProgressLog) -> None:
        """Write a checkpoint after ``step`` optimizer steps."""
        progress.sync_to_disk()
        write = partial(self._write_files, state=state, tokens_seen=progress.tokens_seen)
        self.checkpoint = write_checkpoint(self._folder, step, write, keep_last_n=self._keep_last_n)

    def _write_files(self, folder: Path, *, state: TrainState, tokens_seen: int) -> None:
        """Write the files of this process into an existing folder."""
        world_size, rank = get_world_size_and_rank()
        # Weights and optimizer state, of which each process writes its shards.
        optimizer = _optimizer_state(state.model, state.optimizer)
        tensors = _without_shared_memory(_tensors(state.model, optimizer))
        local = {name: local_tensor(value) for name, value in tensors.items()}
        shards = split_torch_state_dict_into_shards(local, max_shard_size=_FILE_BYTES)
        numbers: dict[str, int] = {}  # of the file of each tensor
        for number, names in enumerate(shards.filename_to_tensors.values(), start=1):
            numbers |= dict.fromkeys(names, number)
        writer = HuggingFaceStorageWriter(str(folder), numbers, save_distributed=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_ONE_PROCESS)
            save(tensors, storage_writer=writer)

        # All other state: plain values and small tensors, which differ between processes.
        optimizer_values = {
            key: value for key, value in optimizer.items() if not isinstance(value, Tensor)
        }
        optimizer_groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in state.optimizer.param_groups
        ]
        lr_scheduler = None
        if state.lr_scheduler is not None:
            lr_scheduler = state.lr_scheduler.state_dict()
        content = {
            "inputs": self._inputs,
            "num_processes": world_size,
            "tensors": sorted(tensors),
            "optimizer_has_state": bool(optimizer),
            "optimizer_values": optimizer_values,
            "optimizer_groups": optimizer_groups,
            "lr_scheduler": lr_scheduler,
            "scaler": state.scaler.state_dict(),
            "loss": {key: value.cpu() for key, value in state.loss.state_dict().items()},
            "tokens_seen": tokens_seen,
            "random_states": _random_states(),
        }
        torch.save(content, folder / _PROCESS_FILE.format(rank))
        if is_main_process():
            OmegaConf.save(OmegaConf.create(self._settings), folder / _SETTINGS)


def _random_states() -> dict[str, Any]:
    """Return the states of all random generators of this process, as tensors and plain values."""
    name, keys, *rest = cast(tuple[Any, ...], np.random.get_state())
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def open_resume(cfg: FinetuneConfig, run: Run) -> ResumePoint:
    """Find where the run begins: at the start, or with ``resume_from_checkpoint`` after the newest
    intact checkpoint.

    Damaged checkpoints, and the checkpoint that is used, are reported on stderr.

    Raises:
        SetupError: If no checkpoint is intact, or the newest intact one is of a run with other
            settings.
    """
    folder = run.output_dir / RESUME_FOLDER
    settings = _settings_affecting_results(cfg)
    if not cfg.resume_from_checkpoint:
        return ResumePoint(folder, cfg.keep_last_n_checkpoints, settings, None)
    checkpoint, damages = newest_intact(folder)
    if checkpoint is not None:
        saved_settings: Any = OmegaConf.to_container(OmegaConf.load(checkpoint / _SETTINGS))
        changed = differences(saved_settings, settings)
        if changed:
            raise SetupError(
                f"{checkpoint} is of a run with other settings: {'; '.join(changed)}. Change them "
                "back, or choose another output_dir for a new run"
            )
    for damage in damages:
        print_once(f"{damage}; the previous one is used")
    if checkpoint is None:
        print_once("there is no resume checkpoint yet: starting from the beginning")
    else:
        print_once(f"resuming from {checkpoint}")
    return ResumePoint(folder, cfg.keep_last_n_checkpoints, settings, checkpoint)


def _settings_affecting_results(cfg: FinetuneConfig) -> dict[str, Any]:
    """Return the settings that must be equal when a run is resumed, as plain values."""
    resolved: Any = OmegaConf.to_container(cast(DictConfig, cfg), resolve=True)
    settings = {
        key: value for key, value in resolved.items() if key not in (*_FREE_KEYS, "batch_size")
    }

    # The folder of the run, which may have moved, has a fixed name in all values, not in keys.
    folder = re.escape(json.dumps(cfg.output_dir)[:-1])
    text = re.sub(f'{folder}(?=/|"[^:])', '"output_dir', json.dumps(settings))

    # What follows from environment variables can be a secret: a digest of it is compared.
    written = OmegaConf.to_container(cast(DictConfig, cfg), resolve=False)
    settings = change_references(
        json.loads(text), written, lambda value, reference: f"{reference} ({digest(value)})"
    )

    # The number of processes may change as long as a mini-batch of all holds the same sequences.
    world_size, _ = get_world_size_and_rank()
    return {**settings, _MINI_BATCH: cfg.batch_size * world_size}


def _restore(folder: Path, saved: dict[str, Any], state: TrainState) -> dict[str, Any]:
    """Restore a state in place; return the random states, empty on another number of processes,
    which is reported.
    """
    # What process 0 saved says how many processes wrote the checkpoint; their windows may differ,
    # all else is equal.
    world_size, rank = get_world_size_and_rank()
    saved_world_size: int = saved["num_processes"]
    same_processes = world_size == saved_world_size
    saved_here = _read_process_file(folder, rank) if same_processes else saved

    # Weights and optimizer state are loaded in place, whatever the number of shards.
    optimizer = _optimizer_state(
        state.model, state.optimizer, initialize=saved_here["optimizer_has_state"]
    )
    tensors = _tensors(state.model, optimizer)
    differing = set(saved_here["tensors"]) ^ tensors.keys()
    if differing:
        raise TrainingError(
            f"only one of {folder} and this run has {min(differing)}: the checkpoint may be of "
            "another version of the optimizer"
        )
    reader = HuggingFaceStorageReader(str(folder))
    reader.fs = _ListedFiles()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_ONE_PROCESS)
        load(tensors, storage_reader=reader)
    optimizer = {**optimizer, **saved_here["optimizer_values"]}
    if optimizer:
        groups = get_optimizer_state_dict(state.model, state.optimizer, options=_FLAT)
        set_optimizer_state_dict(
            state.model, state.optimizer, {**groups, **optimizer}, options=_FLAT
        )
    # Group settings last: the step that initializes the state may have changed a learning rate that
    # is a tensor.
    saved_groups = saved_here["optimizer_groups"]
    for group, values in zip(state.optimizer.param_groups, saved_groups, strict=True):
        for key, value in values.items():
            if isinstance(group.get(key), Tensor):
                group[key].copy_(value)
            else:
                group[key] = value

    # The schedule, and what belongs to each process.
    if state.lr_scheduler is not None:
        state.lr_scheduler.load_state_dict(saved_here["lr_scheduler"])
    state.scaler.load_state_dict(saved_here["scaler"])
    if same_processes:
        state.loss.load_state_dict(saved_here["loss"])
        random_states: dict[str, Any] = saved_here["random_states"]
        return random_states

    # On another number of processes a window is kept only if all processes had the same.
    windows = [_read_process_file(folder, number)["loss"] for number in range(saved_world_size)]
    window = saved_here["loss"]
    if all(_are_equal(window, other) for other in windows):
        state.loss.load_state_dict(window)
        consequence = "the loss keeps its window"
    else:
        consequence = "the loss starts with an empty window"
    print_once(
        f"{folder} was written by {saved_world_size} process(es), this run has {world_size}: "
        f"{consequence}, random states (dropout) are not restored, and sums are rounded differently"
    )
    return {}


def _are_equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(second[name], value) for name, value in first.items())


def _tensors(model: nn.Module, optimizer_state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return trained parameters and optimizer state, sharded as they are, not copied; quantized
    state by its parts.
    """
    parameters = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    tensors: dict[str, Any] = {f"model.{name}": value for name, value in parameters.items()}
    for name, value in optimizer_state.items():
        if isinstance(value, DTensor):
            tensors[name] = value
        elif isinstance(value, Tensor):
            tensors |= plain_tensors(value, name)
    return tensors


def _optimizer_state(
    model: nn.Module, optimizer: Optimizer, *, initialize: bool = False
) -> dict[str, Any]:
    """Return optimizer state by parameter name, without group settings."""
    # An optimizer gets its first state only with `initialize`, because that takes a step, which the
    # optimizer counts.
    if not (optimizer.state or initialize):
        return {}
    flat: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    return {name: value for name, value in flat.items() if name.startswith(_STATE)}


def _without_shared_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Clone tensors that share memory, as the codebooks of quantized state do: safetensors refuses
    them.
    """
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
        manifest = json.loads((Path(path) / _MANIFEST).read_bytes())
        return [str(Path(path) / name) for name in sorted(manifest["files"])]


def newest_intact(folder: Path) -> tuple[Path | None, list[str]]:
    """Find the newest intact checkpoint, if there is one, and describe the damage of each newer
    one.
    """
    damages: list[str] = []
    for checkpoint in _checkpoints(folder):
        reports = [report for report in gather_objects(_damage_of(checkpoint)) if report]
        if not reports:
            return checkpoint, damages
        damages.append(f"{checkpoint} is damaged: {reports[0]}")
    if damages:
        raise SetupError(
            f"no resume checkpoint is intact: {'; '.join(damages)}: move {folder} and the "
            "milestones next to it away to start from the beginning"
        )
    return None, damages


def write_checkpoint(
    folder: Path, step: int, write_files: Callable[[Path], None], *, keep_last_n: int
) -> Path:
    """Write the checkpoint of a step under a temporary name, rename it, and remove the oldest.

    ``write_files`` writes the files of this process. After a TrainingError earlier checkpoints are
    as they were.
    """
    final = folder / f"step_{step}"
    temporary = folder / f".{final.name}.partial"

    def make_folder() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def finish() -> None:
        manifest = {"format_version": _FORMAT_VERSION, "step": step, "files": files}
        (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        sync_to_disk(temporary / _MANIFEST)
        sync_to_disk(temporary)
        remove_folder(final)  # of an earlier attempt that was damaged since
        temporary.replace(final)
        sync_to_disk(folder)
        for checkpoint in _checkpoints(folder):
            if step_of(checkpoint) > step:  # damaged, or the run would have resumed from it
                aside = checkpoint.with_name(f"damaged_{checkpoint.name}")
                remove_folder(aside)
                checkpoint.replace(aside)
        for checkpoint in _checkpoints(folder)[keep_last_n:]:
            remove_folder(checkpoint)

    try:
        # Each stage ends on all processes before the next begins; a failure of one ends all.
        _on_each_process(make_folder, only_main=True)
        if not all(_on_each_process(temporary.is_dir)):
            raise OSError(
                f"{folder} is not the same folder for all processes: use a shared file system"
            )
        _on_each_process(partial(write_files, temporary))
        files: dict[str, Any] = {}
        for entries in _on_each_process(partial(_describe_own_files, temporary)):
            files |= entries
        _on_each_process(finish, only_main=True)
    except OSError as error:
        raise TrainingError(f"resume checkpoint {final} could not be written: {error}") from error
    finally:
        if is_main_process():
            shutil.rmtree(temporary, ignore_errors=True)
    return final


def step_of(checkpoint: Path) -> int:
    """Return the number of optimizer steps of a checkpoint."""
    return int(checkpoint.name.removeprefix("step_"))


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints, the newest first."""
    checkpoints = [
        path for path in folder.glob("step_*") if path.name.removeprefix("step_").isdecimal()
    ]
    return sorted(checkpoints, key=step_of, reverse=True)


def _describe_own_files(folder: Path) -> dict[str, Any]:
    """Flush this process's share of the files to disk and describe them for the manifest."""
    # Some file systems add hidden files, ._* on macOS for example.
    names = _own_share(path.name for path in folder.iterdir() if not path.name.startswith("."))
    for name in names:
        sync_to_disk(folder / name)
    return {name: _described(folder / name) for name in names}


def _described(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": file_sha256(path)}


def _own_share(names: Iterable[str]) -> list[str]:
    """Return every n-th name: of a, b, c, d and e, the second of two processes has b and d."""
    world_size, rank = get_world_size_and_rank()
    return sorted(names)[rank::world_size]


def _damage_of(checkpoint: Path) -> str | None:
    """Describe how this process's share of the files differs from the manifest, None if it does
    not.
    """
    try:
        manifest = json.loads((checkpoint / _MANIFEST).read_bytes())
        version = manifest["format_version"]
        if version != _FORMAT_VERSION:
            return (
                f"another version of tfidf-tune wrote it, in format {version} instead of "
                f"{_FORMAT_VERSION}"
            )
        if manifest["step"] != step_of(checkpoint):
            return f"{_MANIFEST} is of step {manifest['step']}"
        for name in _own_share(manifest["files"]):
            if _described(checkpoint / name) != manifest["files"][name]:
                return f"{name} is not what was written (size or SHA-256)"
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"{_MANIFEST} or a file that it names cannot be read ({cause_of(error)})"
    return None


def _on_each_process(work: Callable[[], Any], *, only_main: bool = False) -> list[Any]:
    """Return the results of all processes; any failure raises an OSError on all, so that no process
    waits forever.
    """
    outcome = []
    failure = None
    cause = None
    try:
        if is_main_process() or not only_main:
            outcome.append(work())
    except (Exception, CheckpointException) as error:  # which is not an Exception
        failure = error
        cause = cause_of(error)
    outcomes = gather_objects((outcome, cause))
    results = []
    for results_of_process, cause in outcomes:
        if cause:
            raise OSError(cause) from failure
        results += results_of_process
    return results


def _read_process_file(checkpoint: Path, rank: int = 0) -> dict[str, Any]:
    """Read the state of a process that is not in shards."""
    file = checkpoint / _PROCESS_FILE.format(rank)
    try:
        return cast(dict[str, Any], torch.load(file, map_location="cpu", weights_only=True))
    except Exception as error:  # torch.load raises anything
        raise TrainingError(
            f"{file} cannot be read ({cause_of(error)}): move {checkpoint} away"
        ) from error
