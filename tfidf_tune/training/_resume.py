"""Where a run begins and resumes: which checkpoint it resumes from, and whether settings and inputs are the same."""

import sys
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils.data import Dataset
from torchtune.utils import get_world_size_and_rank

from tfidf_tune._checks import differences
from tfidf_tune._files import remove_leftovers
from tfidf_tune.training._checkpointer import HFCheckpointer
from tfidf_tune.training._config import FinetuneConfig
from tfidf_tune.training._data import dataset_fingerprint
from tfidf_tune.training._distributed import is_main_process
from tfidf_tune.training._errors import SetupError, TrainingError, cause_of
from tfidf_tune.training._metrics import ProgressLog
from tfidf_tune.training._resume_folder import ResumeFolder, step_of
from tfidf_tune.training._run import RESUME_FOLDER, Run
from tfidf_tune.training._snapshot import (
    TrainState,
    check_snapshot,
    read_process_file,
    read_settings,
    restore_snapshot,
    set_random_states,
    write_snapshot,
)

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
    "memorization_monitor",
    "metric_logger",
    "on_non_finite",
    "output_dir",
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
        self.tokens_seen: int = 0 if checkpoint is None else read_process_file(checkpoint)["tokens_seen"]

    def check_inputs(self, dataset: Dataset[Any], checkpointer: HFCheckpointer) -> None:
        """Raise a SetupError if data or base weights have changed since the checkpoint was written."""
        self._inputs = {"data set": dataset_fingerprint(dataset), "base weights": checkpointer.fingerprint()}
        before = self._inputs if self.checkpoint is None else read_process_file(self.checkpoint)["inputs"]
        if changed := differences(before, self._inputs):
            raise SetupError(
                f"{self.checkpoint} was written with other inputs: {'; '.join(changed)}. Restore them, or choose "
                "another output_dir for a new run"
            )

    def last_checkpoint(self) -> str:
        """Describe where a run that ends early can be resumed."""
        if self.checkpoint is None:
            return "no resume checkpoint was written; milestones written so far are complete"
        return f"the last good checkpoint is {self.checkpoint}: set resume_from_checkpoint=True to resume from it"

    def restore(self, state: TrainState) -> None:
        """Restore a freshly built state in place, and remove temporary files of a killed process.

        Raises:
            TrainingError: If the checkpoint does not fit the run.
        """
        self._folder.remove_leftovers()
        if is_main_process():
            remove_leftovers(self._folder.folder.parent)
        if self.checkpoint is None:
            return
        try:
            self._random_states = restore_snapshot(self.checkpoint, state)
        except (ValueError, TypeError, LookupError, AttributeError, AssertionError, CheckpointException) as error:
            raise TrainingError(
                f"{self.checkpoint} cannot be restored ({cause_of(error)}): move it away to resume from an older one"
            ) from error

    def restore_random_states(self) -> None:
        """Restore the random states, as the last thing before training."""
        if self._random_states is not None:
            set_random_states(self._random_states)

    def save(self, step: int, state: TrainState, progress: ProgressLog) -> None:
        """Write a checkpoint after ``step`` optimizer steps; every process of the run has to call.

        Raises:
            TrainingError: If it cannot be written; earlier ones are not changed.
        """

        def write(folder: Path) -> None:
            write_snapshot(
                folder, state, settings=self._settings, inputs=self._inputs, tokens_seen=progress.tokens_seen
            )

        progress.sync_to_disk()
        self.checkpoint = self._folder.write(step, write)


def open_resume(cfg: FinetuneConfig, run: Run) -> ResumePoint:
    """Find where the run begins: at the start, or with ``resume_from_checkpoint`` after the newest intact checkpoint.

    Damaged checkpoints, and the one that is used, are reported on stderr.

    Raises:
        SetupError: If no checkpoint is intact, or the newest intact one is of a run with other settings.
    """
    folder = ResumeFolder(run.output_dir / RESUME_FOLDER, keep_last_n=cfg.keep_last_n_checkpoints)
    settings = _settings_affecting_results(cfg)
    if not cfg.resume_from_checkpoint:
        return ResumePoint(folder, None, settings)
    checkpoint, damages = folder.newest_intact(check_snapshot)
    if checkpoint is not None and (changed := differences(read_settings(checkpoint), settings)):
        raise SetupError(
            f"{checkpoint} is of a run with other settings: {'; '.join(changed)}. Change them back, or choose another "
            "output_dir for a new run"
        )
    if is_main_process():
        for damage in damages:
            print(f"{damage}; the previous one is used", file=sys.stderr)
        start = "there is no resume checkpoint yet: starting from the beginning"
        print(start if checkpoint is None else f"resuming from {checkpoint}", file=sys.stderr)
    return ResumePoint(folder, checkpoint, settings)


def _settings_affecting_results(cfg: FinetuneConfig) -> dict[str, Any]:
    """Return the settings that must be equal when a run is resumed, as plain values."""
    resolved = cast("dict[str, Any]", OmegaConf.to_container(cast(DictConfig, cfg), resolve=True))
    settings = {key: value for key, value in resolved.items() if key not in (*_FREE_KEYS, "batch_size")}
    world_size, _ = get_world_size_and_rank()
    # The number of processes may change as long as a mini-batch of all holds the same sequences.
    return {**_relocated(settings, cfg.output_dir), _MINI_BATCH: cfg.batch_size * world_size}


def _relocated(value: Any, output_dir: str) -> Any:
    """Replace the folder of the run, which may have moved, by a fixed name in all paths."""
    if isinstance(value, dict):
        return {key: _relocated(inner, output_dir) for key, inner in value.items()}
    if isinstance(value, list):
        return [_relocated(inner, output_dir) for inner in value]
    if isinstance(value, str) and (value == output_dir or value.startswith(f"{output_dir}/")):
        return f"output_dir{value.removeprefix(output_dir)}"
    return value
