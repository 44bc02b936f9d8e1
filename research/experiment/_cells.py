"""The cells of an experiment, each with a folder, and their states.

A manifest in a cell's folder shows that the cell is done, and holds the settings that it was made
with.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from omegaconf import DictConfig

from tfidf_tune._checks import differences
from tfidf_tune._files import atomic_file, is_leftover, remove_folder, remove_leftovers, remove_path
from tfidf_tune.training import milestone_name

# Folders of an experiment, which runs cannot have.
STARTS = "starts"
REPORT = "report"
JOBS = "jobs"
TRAINING = (
    0  # the number of a run's first cell; those of evaluations are the percents of their milestones
)
DONE = "done"
_CELL = "cell.json"
_TRAINED = "trained.json"
_EVALUATED = "evaluated.json"

Settings: TypeAlias = dict[str, Any]
"""Settings that affect a result, as JSON stores them."""


@dataclass(frozen=True)
class Start:
    """A checkpoint folder to train from, made by ``component(folder,
    model, seed, **arguments)``.
    """

    component: str  # dotted path
    arguments: dict[str, Any]
    model: dict[str, Any]  # section of the training config
    seed: int
    folder: Path  # its name depends on all of the above


@dataclass(frozen=True)
class Run:
    """A training run and the evaluations of its milestones: the cells of the run."""

    model: str
    objective: str
    learning_rate: float | None  # None: that of the training config
    seed: int
    recipe: str
    folder: Path
    config: DictConfig  # for the recipe, references unresolved
    start: Start | None
    settings: Settings  # that affect the trained model
    tasks: dict[str, Settings]  # by task, those that affect its results
    # By percent, ascending: arguments of tfidf_tune.tasks.evaluate.
    evaluations: dict[int, dict[str, Any]]

    @property
    def title(self) -> str:
        learning_rate = "" if self.learning_rate is None else f"lr {self.learning_rate}, "
        return f"{self.model}, {self.objective}, {learning_rate}seed {self.seed}"

    @property
    def matmul_precision(self) -> str:
        """Of fp32 products of matrices in training."""
        return str(self.settings.get("matmul_precision", "highest"))

    @property
    def cells(self) -> list[int]:
        return [TRAINING, *self.evaluations]

    def cell_title(self, cell: int) -> str:
        """Return a description of a cell; that of an evaluation names the tasks that are left."""
        if cell == TRAINING:
            return f"{self.title}: training"
        tasks = ", ".join(self.missing_tasks(cell) or self.tasks)
        return f"{self.title}: evaluating {milestone_name(cell)} ({tasks})"

    def log(self, cell: int) -> Path:
        return self.folder / ("train.log" if cell == TRAINING else "eval.log")

    def results(self, percent: int) -> Path:
        """Return the folder of an evaluation, which has a folder ``part1``, ... for each time that
        tasks were run.
        """
        return self.folder / "evaluation" / milestone_name(percent)

    def manifests(self, cell: int) -> dict[Path, dict[str, Any]]:
        """Return the manifests of a training or of the parts of an evaluation that are done, by
        their folder.
        """
        trained = self.folder / _TRAINED
        if not trained.is_file():
            return {}  # results belong to a run that is being repeated
        paths = (
            [trained]
            if cell == TRAINING
            else sorted(self.results(cell).glob(f"part*/{_EVALUATED}"))
        )
        return {path.parent: json.loads(path.read_text(encoding="utf-8")) for path in paths}

    def missing_tasks(self, percent: int) -> list[str]:
        """Return the tasks of an evaluation that are not done."""
        done: set[str] = set()
        for manifest in self.manifests(percent).values():
            done.update(manifest["tasks"])
        return [task for task in self.tasks if task not in done]

    def is_done(self, cell: int) -> bool:
        """Return whether a cell is done, whatever its settings were."""
        return bool(self.manifests(TRAINING)) if cell == TRAINING else not self.missing_tasks(cell)

    def state(self, cell: int) -> str:
        if self.changes(cell):
            return "made with different settings"
        if self.is_done(cell):
            return DONE
        is_unfinished = cell == TRAINING and (self.folder / _CELL).is_file()
        return "failed or interrupted, will be repeated" if is_unfinished else "to do"

    def all_changes(self) -> list[str]:
        """Return a line for each change of the training, or if there is none,
        of the evaluations.
        """
        changes = self.changes(TRAINING)
        if not changes:
            for percent in self.evaluations:
                changes |= self.changes(percent)
        return [f"{folder}: {change}" for folder, change in changes.items()]

    def changes(self, cell: int) -> dict[Path, str]:
        """Return the folders of a cell whose results were made with different settings, and what
        differs.
        """
        changes = {}
        manifests = self.manifests(cell)
        for folder, manifest in manifests.items():
            before = manifest.get("settings", {})
            now = self.settings
            if cell != TRAINING:
                before = {
                    task: settings
                    for task, settings in manifest["tasks"].items()
                    if task in self.tasks
                }
                now = {task: self.tasks[task] for task in before}
            changed = differences(before, now)
            if changed:
                changes[folder] = "; ".join(changed)
        if cell == TRAINING and manifests and not changes:
            needed = [
                milestone_name(percent) for percent in self.evaluations if not self.is_done(percent)
            ]
            gone = [name for name in needed if not (self.folder / name).is_dir()]
            if gone:
                changes[self.folder] = (
                    f"has no {', '.join(gone)}; checkpoints are only written during training"
                )
        return changes

    def check_folder(self) -> None:
        """Raise a ``FileExistsError`` if the folder, which is emptied before training, has files of
        another origin.
        """
        # Of a run killed at its beginning.
        others = (path for path in self.folder.glob("*") if not is_leftover(path))
        if not (self.folder / _CELL).is_file() and any(others):
            raise FileExistsError(
                f"{self.folder} does not belong to an experiment: move it, or set output_dir"
            )

    def clear(self) -> None:
        """Empty the folder and write which run it is."""
        # In this order it is an unfinished run of an experiment at every point of an interruption.
        (self.folder / _TRAINED).unlink(missing_ok=True)
        names = {
            name: getattr(self, name) for name in ("model", "objective", "learning_rate", "seed")
        }
        _write(
            self.folder / _CELL, {name: value for name, value in names.items() if value is not None}
        )
        for path in self.folder.iterdir():
            if path.name != _CELL:
                remove_path(path)

    def finish_training(self, seconds: float, provenance: dict[str, Any]) -> None:
        _write(
            self.folder / _TRAINED,
            {"settings": self.settings, "seconds": seconds, "provenance": provenance},
        )

    def next_part(self, percent: int) -> Path:
        """Remove what an interrupted evaluation left, and return the folder of the next part."""
        remove_leftovers(self.results(percent))
        numbers = [int(folder.name.removeprefix("part")) for folder in self.manifests(percent)]
        return self.results(percent) / f"part{max(numbers, default=0) + 1}"

    def finish_part(self, folder: Path, tasks: list[str], seconds: float) -> None:
        _write(
            folder / _EVALUATED,
            {"tasks": {task: self.tasks[task] for task in tasks}, "seconds": seconds},
        )

    def discard_changed(self) -> None:
        """Remove what was made with different settings: the run, or parts of its evaluations."""
        if self.changes(TRAINING):
            self.clear()
        for percent in self.evaluations:
            for folder in self.changes(percent):
                remove_folder(folder)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    with atomic_file(path) as file:
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
