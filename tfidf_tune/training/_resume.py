"""Where a run begins and resumes: which checkpoint it resumes from, and whether settings and inputs are the same."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
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
from tfidf_tune.training._resume_folder import ResumeFolder, step_of
from tfidf_tune.training._run import RESUME_FOLDER, Run
from tfidf_tune.training._snapshot import (
    check_snapshot,
    process_file,
    read_process_file,
    require_listed,
    restore_snapshot,
    set_random_states,
    write_snapshot,
)
from tfidf_tune.training._state import TrainState

_SETTINGS_FILE = "settings.yaml"
_MINI_BATCH = "batch_size x processes"
# Keys that a resumed run may change: what is shown and kept, and how the same results are computed.
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


class ResumePoint:
    """Where a run begins, and where it can be resumed.

    Attributes:
        step (int): optimizer steps that are done already.
        checkpoint (Path | None): the newest checkpoint, which the run resumed from or has written.
        is_kept (bool): whether the run writes resume checkpoints.
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
        self.tokens_seen: int = 0 if checkpoint is None else read_process_file(checkpoint, 0)["tokens_seen"]

    def check_inputs(self, dataset: Dataset[Any], checkpointer: HFCheckpointer) -> None:
        """Check that a run resumes with the data and the base weights that it began with.

        Raises:
            SetupError: If one of them has changed since the checkpoint was written.
        """
        self._inputs = {"data set": dataset_fingerprint(dataset), "base weights": checkpointer.fingerprint()}
        before = self._inputs if self.checkpoint is None else read_process_file(self.checkpoint, 0)["inputs"]
        if changed := differences(before, self._inputs):
            raise SetupError(
                f"{self.checkpoint} was written with other inputs: {'; '.join(changed)}. Bring them back, or choose "
                "another output_dir for a new run"
            )

    def last_checkpoint(self) -> str:
        """Describe what is left of a run that ends early."""
        if self.checkpoint is None:
            return "no resume checkpoint was written; milestones written so far are whole"
        return f"the last good checkpoint is {self.checkpoint}: resume_from_checkpoint=True goes on from there"

    def restore(self, state: TrainState) -> None:
        """Restore the training state, and remove temporary files of a process that was killed.

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
            restored = restore_snapshot(self.checkpoint, state)
        except (ValueError, TypeError, LookupError, AttributeError, AssertionError, CheckpointException) as error:
            raise TrainingError(
                f"{self.checkpoint} cannot be restored ({cause_of(error)}): move it away to resume from an older one"
            ) from error
        self._random_states = restored.random_states
        if restored.random_states is None and is_main_process():
            self._report_changes(restored.num_processes, has_loss=restored.has_loss)

    def restore_random_states(self) -> None:
        """Restore the random states, the last thing before training."""
        if self._random_states is not None:
            set_random_states(self._random_states)

    def save(self, step: int, state: TrainState, progress: ProgressLog) -> None:
        """Write a checkpoint; every process of the run has to call.

        Args:
            step (int): optimizer steps done.
            state (TrainState): as it is after that step.
            progress (ProgressLog): of this run.

        Raises:
            TrainingError: If it cannot be written; earlier ones stay as they are.
        """

        def write(folder: Path) -> None:
            write_snapshot(folder, state, inputs=self._inputs, tokens_seen=progress.tokens_seen)
            if is_main_process():
                OmegaConf.save(OmegaConf.create(self._settings), folder / _SETTINGS_FILE)

        progress.sync_to_disk()
        self.checkpoint = self._folder.write(step, write)

    def _report_changes(self, saved: int, *, has_loss: bool) -> None:
        world_size, _ = get_world_size_and_rank()
        if not has_loss:
            window = "the loss starts with an empty window (each process had its own)"
        elif saved == 1:
            window = "the window of the one process is used by all (loss.sync)"
        else:
            window = "the shared window is kept"
        print(
            f"{self.checkpoint} was written by {saved} process{'es' * (saved > 1)}, this run has {world_size}: "
            f"weights, optimizer and data order are restored; {window}; random states (dropout) start anew, and "
            "floating-point sums are rounded differently",
            file=sys.stderr,
        )


def open_resume(cfg: FinetuneConfig, run: Run) -> ResumePoint:
    """Find where the run begins: at its start, or with ``resume_from_checkpoint`` after the newest intact checkpoint.

    Args:
        cfg (FinetuneConfig): the checked config.
        run (Run): gives the folder.

    Returns:
        ResumePoint: damaged checkpoints, and where the run resumes, are reported on stderr.

    Raises:
        SetupError: If no checkpoint is intact, or the newest intact one is of a run with other settings.
    """
    folder = ResumeFolder(run.output_dir / RESUME_FOLDER, keep_last_n=cfg.keep_last_n_checkpoints)
    settings = settings_affecting_results(cfg)
    if not cfg.resume_from_checkpoint:
        return ResumePoint(folder, None, settings)
    checkpoint, damages = folder.newest_intact(_find_problem)
    if checkpoint is not None:
        saved = OmegaConf.to_container(OmegaConf.load(checkpoint / _SETTINGS_FILE))
        if changed := differences(cast("dict[str, Any]", saved), settings):
            raise SetupError(
                f"{checkpoint} is of a run with other settings: {'; '.join(changed)}. Set them back, or choose another "
                "output_dir for a new run"
            )
    if is_main_process():
        for damage in damages:
            print(f"{damage}; the one before it is used", file=sys.stderr)
        start = "there is no resume checkpoint yet: starting from the beginning"
        print(start if checkpoint is None else f"going on from {checkpoint}", file=sys.stderr)
    return ResumePoint(folder, checkpoint, settings)


def settings_affecting_results(cfg: FinetuneConfig) -> dict[str, Any]:
    """Select the settings that have to be equal when a run is resumed, as plain values; its folder may have moved."""
    resolved: dict[str, Any] = OmegaConf.to_container(cast(DictConfig, cfg), resolve=True)  # type: ignore[assignment]
    settings = {key: value for key, value in resolved.items() if key not in (*_FREE_KEYS, "batch_size")}
    world_size, _ = get_world_size_and_rank()
    # The number of processes may change as long as a mini-batch of all holds the same sequences.
    return {**_relocated(settings, cfg.output_dir), _MINI_BATCH: cfg.batch_size * world_size}


def _relocated(value: Any, output_dir: str) -> Any:
    if isinstance(value, dict):
        return {key: _relocated(inner, output_dir) for key, inner in value.items()}
    if isinstance(value, list):
        return [_relocated(inner, output_dir) for inner in value]
    if isinstance(value, str) and (value == output_dir or value.startswith(f"{output_dir}/")):
        return f"output_dir{value.removeprefix(output_dir)}"
    return value


def _find_problem(checkpoint: Path, names: Sequence[str]) -> str | None:
    """Return what is wrong with the content of a checkpoint whose files are intact."""
    try:
        require_listed(names, [_SETTINGS_FILE, process_file(checkpoint, 0).name])
        settings = OmegaConf.load(checkpoint / _SETTINGS_FILE)
        if not (isinstance(settings, DictConfig) and settings):
            raise ValueError(f"{_SETTINGS_FILE} does not hold keys and values")
        check_snapshot(checkpoint, names)
    except (ValueError, TypeError, KeyError, OSError, YAMLError, OmegaConfBaseException, SafetensorError) as error:
        return first_line(error) if isinstance(error, ValueError) else cause_of(error)
    return None
