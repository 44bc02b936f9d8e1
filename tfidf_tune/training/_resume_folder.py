"""Resume checkpoints on disk: written atomically, verified before use, the newest are kept.

``output_dir/resume/step_120/manifest.json`` holds size and SHA-256 of every other file of the folder.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torchtune.utils import get_world_size_and_rank

from tfidf_tune._files import file_sha256, remove_folder, sync_to_disk
from tfidf_tune.training._distributed import gather_objects, is_lost_process, is_main_process
from tfidf_tune.training._errors import SetupError, TrainingError, cause_of
from tfidf_tune.training._hf_files import read_json, write_json

FORMAT_VERSION = 2
_MANIFEST = "manifest.json"


class ResumeFolder:
    """The resume checkpoints of a run, ``step_<number>`` each.

    All processes of a run call the methods together, and all see the same folder.

    Args:
        folder (Path): made with the first checkpoint.
        keep_last_n (int): number of checkpoints that are kept.
    """

    def __init__(self, folder: Path, *, keep_last_n: int) -> None:
        self.folder = folder
        self.keep_last_n = keep_last_n

    def newest_intact(self, find_problem: Callable[[Path, Sequence[str]], str | None]) -> tuple[Path | None, list[str]]:
        """Find the newest checkpoint whose files are all as they were written.

        Args:
            find_problem (Callable[[Path, Sequence[str]], str | None]): checks the content of a checkpoint whose files
                are intact; called with its folder and the names of its files.

        Returns:
            tuple[Path | None, list[str]]: its folder, None if there is no checkpoint; what is wrong with newer ones.

        Raises:
            SetupError: If there are checkpoints, but none is intact.
        """
        damages: list[str] = []
        for checkpoint in self._checkpoints():
            problem = _first(gather_objects(_damage(checkpoint)))
            if problem is None:
                problem = _first(gather_objects(find_problem(checkpoint, checkpoint_files(checkpoint))))
            if problem is None:
                return checkpoint, damages
            damages.append(f"{checkpoint} is damaged: {problem}")
        if damages:
            raise SetupError(
                f"no resume checkpoint is whole: {'; '.join(damages)}. Move {self.folder} and the checkpoints beside "
                "it away to start from the beginning"
            )
        return None, damages

    def write(self, step: int, write_files: Callable[[Path], None]) -> Path:
        """Write a checkpoint under a temporary name, list its files in a manifest, rename it, remove the oldest.

        Args:
            step (int): optimizer steps done.
            write_files (Callable[[Path], None]): writes this process's files into the given folder.

        Returns:
            Path: the checkpoint's folder.

        Raises:
            TrainingError: If a file cannot be written; earlier checkpoints stay as they are.
        """
        final = self.folder / f"step_{step}"
        temporary = self.folder / f".{final.name}.partial"
        try:
            _on_main_process(lambda: _make_empty(temporary))
            if not all(_together(temporary.is_dir)):
                raise OSError(f"{self.folder} has to be one folder that every process sees")
            _together(lambda: write_files(temporary))
            entries = _together(lambda: _describe_own_files(temporary))
            files = {name: entry for part in entries for name, entry in part.items()}
            _on_main_process(lambda: self._finish(temporary, final, step, files))
        except Exception as error:
            if is_main_process():
                shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, RuntimeError) and is_lost_process(error):
                raise
            raise TrainingError(f"resume checkpoint {final} could not be written: {cause_of(error)}") from error
        return final

    def remove_leftovers(self) -> None:
        """Remove what a killed process left half written or half removed."""
        if is_main_process():
            for path in self.folder.glob(".step_*"):
                shutil.rmtree(path)

    def _checkpoints(self) -> list[Path]:
        """Folders of checkpoints, the newest first."""
        found = [path for path in self.folder.glob("step_*") if path.name.removeprefix("step_").isdecimal()]
        return sorted(found, key=step_of, reverse=True)

    def _finish(self, temporary: Path, final: Path, step: int, files: dict[str, Any]) -> None:
        write_json(temporary / _MANIFEST, {"format_version": FORMAT_VERSION, "step": step, "files": files})
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
    """Return the names of the files in a checkpoint's manifest; other files are not part of the checkpoint."""
    return sorted(read_json(checkpoint / _MANIFEST)["files"])


def step_of(checkpoint: Path) -> int:
    """Return the number of optimizer steps of a checkpoint, which is in its name."""
    return int(checkpoint.name.removeprefix("step_"))


def _first(problems: list[str | None]) -> str | None:
    return next((problem for problem in problems if problem), None)


def _on_main_process(work: Callable[[], None]) -> None:
    _together(work if is_main_process() else lambda: None)


def _together(work: Callable[[], Any]) -> list[Any]:
    """Do something on every process; a failure on one raises on all, so that no process waits forever."""
    result, failure = None, None
    try:
        result = work()
    except Exception as error:
        failure = error
    outcomes = gather_objects((result, None if failure is None else cause_of(failure)))
    if failure is not None:
        raise failure
    if other := _first([cause for _, cause in outcomes]):
        raise OSError(other)
    return [value for value, _ in outcomes]


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _own_share(names: Sequence[str]) -> list[str]:
    """The files that this process hashes: processes take turns."""
    world_size, rank = get_world_size_and_rank()
    return sorted(names)[rank::world_size]


def _describe_own_files(folder: Path) -> dict[str, dict[str, Any]]:
    # Some file systems add hidden files of their own, ._* on macOS for example.
    paths = [folder / name for name in _own_share([p.name for p in folder.iterdir() if not p.name.startswith(".")])]
    for path in paths:
        sync_to_disk(path)
    return {path.name: {"size": path.stat().st_size, "sha256": file_sha256(path)} for path in paths}


def _damage(checkpoint: Path) -> str | None:
    """Return what is wrong with this process's share of a checkpoint's files."""
    try:
        manifest = read_json(checkpoint / _MANIFEST)
        files: dict[str, dict[str, Any]] = manifest["files"]
        if manifest["format_version"] != FORMAT_VERSION:
            return (
                f"another version of tfidf-tune wrote it, in format {manifest['format_version']}; "
                f"this one reads format {FORMAT_VERSION}"
            )
        if manifest["step"] != step_of(checkpoint):
            return f"{_MANIFEST} is of step {manifest['step']}"
        for name in _own_share(list(files)):
            path, expected = checkpoint / Path(name).name, files[name]
            if not path.is_file():
                return f"{name} is missing"
            if (size := path.stat().st_size) != expected["size"]:
                return f"{name} has {size} bytes instead of {expected['size']}"
            if file_sha256(path) != expected["sha256"]:
                return f"{name} is not what was written (SHA-256)"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{_MANIFEST} cannot be read ({type(error).__name__}: {error})"
    return None
