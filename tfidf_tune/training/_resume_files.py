"""Resume checkpoints on the disk: each is whole or has no name, is checked before it is used, and the newest are kept.

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
from tfidf_tune.training._weight_files import read_json, write_json

FORMAT_VERSION = 2
FindProblem = Callable[[Path, Sequence[str]], str | None]
_MANIFEST = "manifest.json"


class ResumeFolder:
    """The resume checkpoints of a run, ``step_<number>`` each.

    All processes of a run call the methods together; a folder that all of them see is taken for granted.

    Args:
        folder (Path): made with the first checkpoint.
        keep_last_n (int): checkpoints that are kept, the newest.
    """

    def __init__(self, folder: Path, *, keep_last_n: int) -> None:
        self.folder = folder
        self.keep_last_n = keep_last_n

    def newest_whole(self, find_problem: FindProblem) -> tuple[Path | None, list[str]]:
        """Find the newest checkpoint of which every file is what was written.

        Args:
            find_problem (FindProblem): called with a checkpoint and the names of its files once these are what was
                written; returns what they lack, or None.

        Returns:
            tuple[Path | None, list[str]]: its folder, None if there is no checkpoint at all; and what is wrong with
            newer ones.

        Raises:
            SetupError: If there are checkpoints, but none is whole.
        """
        damages: list[str] = []
        for checkpoint in self._checkpoints():
            damage = next((found for found in gather_objects(_damage(checkpoint)) if found), None)
            if damage is None:
                problem = find_problem(checkpoint, checkpoint_files(checkpoint))
                damage = next((found for found in gather_objects(problem) if found), None)
            if damage is None:
                return checkpoint, damages
            damages.append(f"{checkpoint} is damaged: {damage}")
        if damages:
            raise SetupError(
                f"no resume checkpoint is whole: {'; '.join(damages)}. Move {self.folder} and the checkpoints beside "
                "it away to start anew"
            )
        return None, damages

    def write(self, step: int, write_files: Callable[[Path], None]) -> Path:
        """Write a checkpoint under a temporary name, check in all files, give it its name, remove the oldest.

        Args:
            step (int): optimizer steps done.
            write_files (Callable[[Path], None]): writes this process's files into the folder that it is given.

        Returns:
            Path: the checkpoint's folder.

        Raises:
            TrainingError: If a file cannot be written; earlier checkpoints stay as they are.
        """
        final = self.folder / f"step_{step}"
        temporary = self.folder / f".{final.name}.partial"
        try:
            self._on_main_process(lambda: _make_empty(temporary))
            if not all(self._together(temporary.is_dir)):
                raise OSError(f"{self.folder} has to be one folder that every process sees")
            self._together(lambda: write_files(temporary))
            entries = self._together(lambda: _describe_own_files(temporary))
            files = {name: entry for part in entries for name, entry in part.items()}
            self._on_main_process(lambda: self._finish(temporary, final, step, files))
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
        manifest = {"format_version": FORMAT_VERSION, "step": step, "files": files}
        write_json(temporary / _MANIFEST, manifest)
        sync_to_disk(temporary / _MANIFEST)
        sync_to_disk(temporary)
        remove_folder(final)  # of an earlier attempt that was damaged since
        temporary.replace(final)
        sync_to_disk(self.folder)
        for checkpoint in self._checkpoints():
            if step_of(checkpoint) > step:  # damaged, or the run would have gone on from it
                aside = checkpoint.with_name(f"damaged_{checkpoint.name}")
                remove_folder(aside)
                checkpoint.replace(aside)
        for checkpoint in self._checkpoints()[self.keep_last_n :]:
            remove_folder(checkpoint)

    def _on_main_process(self, work: Callable[[], None]) -> None:
        self._together(work if is_main_process() else lambda: None)

    def _together(self, work: Callable[[], Any]) -> list[Any]:
        """Do something on every process; what fails on one fails on all, so that none waits for another in vain."""
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        outcomes = gather_objects((result, None if failure is None else cause_of(failure)))
        if failure is not None:
            raise failure
        if other := next((told for _, told in outcomes if told is not None), None):
            raise OSError(other)
        return [value for value, _ in outcomes]


def checkpoint_files(checkpoint: Path) -> list[str]:
    """Return the names of the files that a checkpoint's manifest lists; others in the folder are not part of it."""
    return sorted(_read_manifest(checkpoint)["files"])


def step_of(checkpoint: Path) -> int:
    """Return the number of optimizer steps that are done in a checkpoint, which is in its name."""
    return int(checkpoint.name.removeprefix("step_"))


def _read_manifest(checkpoint: Path) -> dict[str, Any]:
    return read_json(checkpoint / _MANIFEST)


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _own_share(names: list[str]) -> list[str]:
    """The files that this process hashes: each takes its turn."""
    world_size, rank = get_world_size_and_rank()
    return sorted(names)[rank::world_size]


def _describe_own_files(folder: Path) -> dict[str, dict[str, Any]]:
    # Some file systems add hidden files of their own, ._* on macOS for example.
    names = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
    for name in _own_share(names):
        sync_to_disk(folder / name)
    return {
        name: {"size": (folder / name).stat().st_size, "sha256": file_sha256(folder / name)}
        for name in _own_share(names)
    }


def _damage(checkpoint: Path) -> str | None:
    """What this process finds wrong with its share of a checkpoint's files."""
    try:
        manifest = _read_manifest(checkpoint)
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
