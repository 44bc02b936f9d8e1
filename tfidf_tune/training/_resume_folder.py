"""Resume checkpoints on disk: written atomically, verified before use, the newest are kept.

``output_dir/resume/step_120/manifest.json`` lists size and SHA-256 of every other file of the checkpoint.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from torchtune.utils import get_world_size_and_rank

from tfidf_tune._files import file_sha256, remove_folder, sync_to_disk
from tfidf_tune.training._distributed import gather_objects, is_lost_process, is_main_process
from tfidf_tune.training._errors import SetupError, TrainingError, cause_of, first_line

_FORMAT_VERSION = 2
_MANIFEST = "manifest.json"


class _File(BaseModel):
    size: int
    sha256: str


class _Manifest(BaseModel):
    format_version: int
    step: int
    files: dict[str, _File]


class ResumeFolder:
    """The resume checkpoints of a run, ``step_<number>`` each; all processes call the methods together."""

    def __init__(self, folder: Path, *, keep_last_n: int) -> None:
        self.folder = folder
        self.keep_last_n = keep_last_n

    def newest_intact(self, check_content: Callable[[Path], None]) -> tuple[Path | None, list[str]]:
        """Find the newest intact checkpoint, if there is one, and describe the damage of each newer one.

        Files are compared with the manifest; ``check_content`` raises if intact files are not complete.

        Raises:
            SetupError: If there are checkpoints, but none is intact.
        """
        damages: list[str] = []
        for checkpoint in self._checkpoints():
            problem = _first_problem(_check_files, checkpoint) or _first_problem(check_content, checkpoint)
            if problem is None:
                return checkpoint, damages
            damages.append(f"{checkpoint} is damaged: {problem}")
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
            _on_main_process(lambda: _make_empty(temporary))
            if not all(_on_each_process(temporary.is_dir)):
                raise OSError(f"{self.folder} is not the same folder for all processes: use a shared file system")
            _on_each_process(lambda: write_files(temporary))
            parts = _on_each_process(lambda: _describe_own_files(temporary))
            files = {name: entry for part in parts for name, entry in part.items()}
            _on_main_process(lambda: self._finish(temporary, final, step, files))
        except Exception as error:
            if is_main_process():
                shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, RuntimeError) and is_lost_process(error):
                raise
            raise TrainingError(f"resume checkpoint {final} could not be written: {cause_of(error)}") from error
        return final

    def remove_leftovers(self) -> None:
        """Remove what a killed process left."""
        if is_main_process():
            for path in self.folder.glob(".step_*"):
                shutil.rmtree(path)

    def _checkpoints(self) -> list[Path]:
        """Return the checkpoints, the newest first."""
        found = [path for path in self.folder.glob("step_*") if path.name.removeprefix("step_").isdecimal()]
        return sorted(found, key=step_of, reverse=True)

    def _finish(self, temporary: Path, final: Path, step: int, files: dict[str, _File]) -> None:
        manifest = _Manifest(format_version=_FORMAT_VERSION, step=step, files=files)
        (temporary / _MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
        sync_to_disk(temporary / _MANIFEST)
        sync_to_disk(temporary)
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


def checkpoint_files(checkpoint: Path) -> list[str]:
    """Return the names of the files in a checkpoint's manifest."""
    return sorted(_read_manifest(checkpoint).files)


def step_of(checkpoint: Path) -> int:
    """Return the number of optimizer steps of a checkpoint."""
    return int(checkpoint.name.removeprefix("step_"))


def _read_manifest(checkpoint: Path) -> _Manifest:
    try:
        return _Manifest.model_validate_json((checkpoint / _MANIFEST).read_bytes())
    except (OSError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise ValueError(f"{_MANIFEST} cannot be read ({reason})") from error


def _check_files(checkpoint: Path) -> None:
    """Compare this process's share of a checkpoint's files with the manifest."""
    manifest = _read_manifest(checkpoint)
    if manifest.format_version != _FORMAT_VERSION:
        raise ValueError(
            f"another version of tfidf-tune wrote it, in format {manifest.format_version}; this one reads format "
            f"{_FORMAT_VERSION}"
        )
    if manifest.step != step_of(checkpoint):
        raise ValueError(f"{_MANIFEST} is of step {manifest.step}")
    for name in _own_share(list(manifest.files)):
        path, expected = checkpoint / name, manifest.files[name]
        if not path.is_file():
            raise ValueError(f"{name} is missing")
        if (size := path.stat().st_size) != expected.size:
            raise ValueError(f"{name} has {size} bytes instead of {expected.size}")
        if file_sha256(path) != expected.sha256:
            raise ValueError(f"{name} is not what was written (SHA-256)")


def _first_problem(check: Callable[[Path], None], checkpoint: Path) -> str | None:
    """Run a check on every process; return the first problem."""
    problem = None
    try:
        check(checkpoint)
    except Exception as error:  # readers of damaged files raise anything
        problem = first_line(error) if isinstance(error, ValueError) else cause_of(error)
    return next((found for found in gather_objects(problem) if found), None)


def _on_main_process(work: Callable[[], None]) -> None:
    _on_each_process(work if is_main_process() else lambda: None)


def _on_each_process(work: Callable[[], Any]) -> list[Any]:
    """Return the results of all processes; a failure on one raises on all, so that no process waits forever."""
    result, failure = None, None
    try:
        result = work()
    except Exception as error:
        failure = error
    outcomes = gather_objects((result, None if failure is None else cause_of(failure)))
    if failure is not None:
        raise failure
    if causes := [cause for _, cause in outcomes if cause]:
        raise OSError(causes[0])
    return [value for value, _ in outcomes]


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _own_share(names: Sequence[str]) -> list[str]:
    """Return this process's share of the files."""
    world_size, rank = get_world_size_and_rank()
    return sorted(names)[rank::world_size]


def _describe_own_files(folder: Path) -> dict[str, _File]:
    # Some file systems add hidden files of their own, ._* on macOS for example.
    paths = [folder / name for name in _own_share([p.name for p in folder.iterdir() if not p.name.startswith(".")])]
    for path in paths:
        sync_to_disk(path)
    return {path.name: _File(size=path.stat().st_size, sha256=file_sha256(path)) for path in paths}
