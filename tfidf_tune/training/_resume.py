"""Where a run begins and resumes: its checkpoints on disk, and whether settings and inputs are the same.

Checkpoints are ``output_dir/resume/step_120``: written atomically, verified before use, the newest are kept.
"""

import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from omegaconf import DictConfig, OmegaConf
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils.data import Dataset
from torchtune.utils import get_world_size_and_rank

from tfidf_tune._checks import differences
from tfidf_tune._files import remove_folder, remove_leftovers, sync_to_disk
from tfidf_tune.training._checkpointer import HFCheckpointer
from tfidf_tune.training._config import FinetuneConfig
from tfidf_tune.training._data import dataset_fingerprint
from tfidf_tune.training._distributed import gather_objects, is_main_process
from tfidf_tune.training._errors import SetupError, TrainingError, cause_of
from tfidf_tune.training._metrics import ProgressLog
from tfidf_tune.training._run import RESUME_FOLDER, Run
from tfidf_tune.training._snapshot import (
    TrainState,
    check_files,
    describe_own_files,
    read_process_file,
    read_settings,
    restore_snapshot,
    set_random_states,
    step_of,
    write_manifest,
    write_snapshot,
)

Value = TypeVar("Value")
_MINI_BATCH = "batch_size x processes"
# Keys that a resumed run may change: what is shown and kept, and how the same results are computed.
_FREE_KEYS = (
    "compile", "enable_activation_checkpointing", "fsdp_cpu_offload", "fsdp_reshard_after_forward",
    "keep_last_n_checkpoints", "log_every_n_steps", "log_peak_memory_stats", "memorization_monitor", "metric_logger",
    "on_non_finite", "output_dir", "resume_from_checkpoint", "save_at_percent", "save_every_n_steps",
)  # fmt: skip


class ResumeFolder:
    """The resume checkpoints of a run, ``step_<number>`` each; all processes call the methods together."""

    def __init__(self, folder: Path, *, keep_last_n: int) -> None:
        self.folder = folder
        self.keep_last_n = keep_last_n

    def newest_intact(self) -> tuple[Path | None, list[str]]:
        """Find the newest intact checkpoint, if there is one, and describe the damage of each newer one.

        Raises:
            SetupError: If there are checkpoints, but none is intact.
        """
        damages: list[str] = []
        for checkpoint in self._checkpoints():
            damage = _damage_of(checkpoint)
            if damage is None:
                return checkpoint, damages
            damages.append(f"{checkpoint} is damaged: {damage}")
        if damages:
            raise SetupError(
                f"no resume checkpoint is intact: {'; '.join(damages)}. Move {self.folder} and the milestones next to "
                "it away to start from the beginning"
            )
        return None, damages

    def write(self, step: int, write_files: Callable[[Path], None]) -> Path:
        """Write the checkpoint of a step under a temporary name, rename it, and remove the oldest.

        ``write_files`` writes the files of this process into the given folder.

        Raises:
            TrainingError: If a file cannot be written; earlier checkpoints are not changed.
        """
        final = self.folder / f"step_{step}"
        temporary = self.folder / f".{final.name}.partial"
        try:
            if is_main_process():
                shutil.rmtree(temporary, ignore_errors=True)
            _on_each_process(lambda: temporary.mkdir(parents=True) if is_main_process() else None)
            if not all(_on_each_process(temporary.is_dir)):
                raise OSError(f"{self.folder} is not the same folder for all processes: use a shared file system")
            _on_each_process(lambda: write_files(temporary))
            parts = _on_each_process(lambda: describe_own_files(temporary))
            files = {name: entry for part in parts for name, entry in part.items()}
            _on_each_process(lambda: self._finish(temporary, final, step, files) if is_main_process() else None)
        except OSError as error:
            raise TrainingError(f"resume checkpoint {final} could not be written: {error}") from error
        finally:
            if is_main_process():
                shutil.rmtree(temporary, ignore_errors=True)
        return final

    def _checkpoints(self) -> list[Path]:
        """Return the checkpoints, the newest first."""
        found = [path for path in self.folder.glob("step_*") if path.name.removeprefix("step_").isdecimal()]
        return sorted(found, key=step_of, reverse=True)

    def _finish(self, temporary: Path, final: Path, step: int, files: dict[str, Any]) -> None:
        write_manifest(temporary, step, files)
        remove_folder(final)  # of an earlier attempt that was damaged since
        temporary.replace(final)
        sync_to_disk(self.folder)
        for checkpoint in self._checkpoints():
            if step_of(checkpoint) > step:  # damaged, or the run would have resumed from it
                aside = checkpoint.with_name(f"damaged_{checkpoint.name}")
                remove_folder(aside)
                checkpoint.replace(aside)
        for checkpoint in self._checkpoints()[self.keep_last_n :]:
            remove_folder(checkpoint)


def _damage_of(checkpoint: Path) -> OSError | None:
    try:
        _on_each_process(partial(check_files, checkpoint))
    except OSError as error:
        return error
    return None


def _on_each_process(work: Callable[[], Value]) -> list[Value]:
    """Return the results of all processes; any failure raises an OSError on all, so that no process waits forever."""
    outcome: list[Value] = []
    failure, cause = None, None
    try:
        outcome.append(work())
    except (Exception, CheckpointException) as error:  # which is not an Exception
        failure, cause = error, cause_of(error)
    outcomes = gather_objects((outcome, cause))
    if causes := [each for _, each in outcomes if each]:
        raise OSError(causes[0]) from failure
    return [result for results, _ in outcomes for result in results]


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
        self._random_states: dict[str, Any] = {}
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
        if is_main_process():
            for path in self._folder.folder.glob(".step_*"):
                shutil.rmtree(path)
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
        if self._random_states:
            set_random_states(self._random_states)

    def save(self, step: int, state: TrainState, progress: ProgressLog) -> None:
        """Write a checkpoint after ``step`` optimizer steps; every process of the run has to call.

        Raises:
            TrainingError: If it cannot be written; earlier ones are not changed.
        """
        progress.sync_to_disk()
        content = self._settings, self._inputs, progress.tokens_seen
        self.checkpoint = self._folder.write(step, lambda folder: write_snapshot(folder, state, *content))


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
    checkpoint, damages = folder.newest_intact()
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
    resolved: Any = OmegaConf.to_container(cast(DictConfig, cfg), resolve=True)
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
