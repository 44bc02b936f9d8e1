"""The cells of an experiment, each with a folder, and their states.

A manifest in a cell's folder shows that the cell is done, and holds the settings that it was made with.
"""

import enum
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from omegaconf import DictConfig

from tfidf_tune._checks import differences
from tfidf_tune._files import atomic_file
from tfidf_tune.training import milestone_name

STARTS, REPORT, JOBS = "starts", "report", "jobs"  # folders of an experiment, which runs cannot have
TRAINING = 0  # the number of a run's first cell; those of evaluations are the percents of their milestones
_CELL, _TRAINED, _EVALUATED = "cell.json", "trained.json", "evaluated.json"
# Components that make starts, by the names that earlier manifests have.
_FORMER_NAMES = {"tfidf_tune.experiment.random_llama": "tfidf_tune.experiment.random_model"}

Settings: TypeAlias = dict[str, Any]
"""Settings that affect a result, as JSON stores them."""


@dataclass(frozen=True)
class Start:
    """A checkpoint folder to train from, made by ``component(folder, model, seed, **arguments)``."""

    component: str  # dotted path
    arguments: dict[str, Any]
    model: dict[str, Any]  # section of the training config
    seed: int
    folder: Path  # its name depends on all of the above


@dataclass(frozen=True)
class Evaluation:
    """How a milestone is evaluated."""

    tasks: dict[str, Settings]  # by task, those that affect its result
    arguments: dict[str, Any]  # of tfidf_tune.tasks.evaluate, in addition to tasks and folder


class State(enum.Enum):
    """The state of a cell."""

    TO_DO = "to do"
    UNFINISHED = "failed or interrupted, will be repeated"
    DONE = "done"
    CHANGED = "made with different settings"


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
    evaluations: dict[int, Evaluation]  # by percent, ascending

    @property
    def title(self) -> str:
        """Return a description of the run."""
        learning_rate = "" if self.learning_rate is None else f"lr {self.learning_rate}, "
        return f"{self.model}, {self.objective}, {learning_rate}seed {self.seed}"

    @property
    def cells(self) -> list[int]:
        """Return the numbers of the cells in the order in which they are done."""
        return [TRAINING, *self.evaluations]

    def cell_title(self, cell: int) -> str:
        """Return a description of a cell; that of an evaluation names the tasks that are left."""
        if cell == TRAINING:
            return f"{self.title}: training"
        tasks = ", ".join(self.missing_tasks(cell) or self.evaluations[cell].tasks)
        return f"{self.title}: evaluating {milestone_name(cell)} ({tasks})"

    def log(self, cell: int) -> Path:
        """Return the file of a cell's output."""
        return self.folder / ("train.log" if cell == TRAINING else "eval.log")

    def checkpoint(self, percent: int) -> Path:
        """Return the folder of a milestone's checkpoint."""
        return self.folder / milestone_name(percent)

    def results(self, percent: int) -> Path:
        """Return the folder of an evaluation, which has a folder ``part1``, ... for each time that tasks were run."""
        return self.folder / "evaluation" / milestone_name(percent)

    def state(self, cell: int) -> State:
        """Return the state of a cell."""
        if cell != TRAINING:
            if self._changed_tasks(cell):
                return State.CHANGED
            return State.TO_DO if self.missing_tasks(cell) else State.DONE
        if (self.folder / _TRAINED).is_file():
            return State.CHANGED if self._training_changes() else State.DONE
        return State.UNFINISHED if (self.folder / _CELL).is_file() else State.TO_DO

    def changes(self) -> list[str]:
        """Return a line for each folder of the run whose results were made with different settings."""
        return self._training_changes() or [
            line for percent in self.evaluations for line in self._changed_tasks(percent)
        ]

    def evaluated_parts(self, percent: int) -> list[tuple[Path, dict[str, Any]]]:
        """Return folder and manifest of each part of an evaluation that is done."""
        if not (self.folder / _TRAINED).is_file():
            return []  # the results belong to a run that is being repeated
        return [(path.parent, _read(path)) for path in sorted(self.results(percent).glob(f"part*/{_EVALUATED}"))]

    def missing_tasks(self, percent: int) -> list[str]:
        """Return the tasks of an evaluation that are not done."""
        done = {task for _, manifest in self.evaluated_parts(percent) for task in manifest["tasks"]}
        return [task for task in self.evaluations[percent].tasks if task not in done]

    def seconds(self) -> Iterator[tuple[int, float]]:
        """Yield the cells that are done, and how long they took."""
        if (self.folder / _TRAINED).is_file():
            yield TRAINING, float(_read(self.folder / _TRAINED)["seconds"])
        for percent in self.evaluations:
            for _, manifest in self.evaluated_parts(percent):
                yield percent, float(manifest["seconds"])

    def check_folder(self) -> None:
        """Refuse a folder that does not belong to an experiment, because it is emptied before training.

        Raises:
            FileExistsError: If it holds files, but not those of an experiment.
        """
        if self.folder.exists() and not (self.folder / _CELL).is_file() and any(self.folder.iterdir()):
            raise FileExistsError(
                f"{self.folder} exists and does not belong to an experiment: choose another output_dir, or move it"
            )

    def clear(self) -> None:
        """Empty the folder and write which run it is."""
        # In this order it is an unfinished run of an experiment at every point of an interruption.
        (self.folder / _TRAINED).unlink(missing_ok=True)
        learning_rate = {} if self.learning_rate is None else {"learning_rate": self.learning_rate}
        names = {"model": self.model, "objective": self.objective, **learning_rate, "seed": self.seed}
        _write(self.folder / _CELL, names)
        for path in self.folder.iterdir():
            if path.name != _CELL:
                _remove(path)

    def finish_training(self, seconds: float, provenance: dict[str, Any]) -> None:
        """Write that the training is done."""
        _write(self.folder / _TRAINED, {"settings": self.settings, "seconds": seconds, "provenance": provenance})

    def next_part(self, percent: int) -> Path:
        """Remove what an interrupted evaluation left, and return the folder of the next part."""
        for leftover in self.results(percent).glob(".*"):
            _remove(leftover)
        numbers = [int(folder.name.removeprefix("part")) for folder, _ in self.evaluated_parts(percent)]
        return self.results(percent) / f"part{max(numbers, default=0) + 1}"

    def finish_part(self, folder: Path, percent: int, tasks: list[str], seconds: float) -> None:
        """Write into a part's folder that tasks are done."""
        settings = {task: self.evaluations[percent].tasks[task] for task in tasks}
        _write(folder / _EVALUATED, {"tasks": settings, "seconds": seconds})

    def discard_changed(self) -> None:
        """Remove what was made with different settings: the run, or parts of its evaluations."""
        if self._training_changes():
            self.clear()
        for percent in self.evaluations:
            for folder, manifest in self.evaluated_parts(percent):
                if self._part_changes(percent, manifest):
                    (folder / _EVALUATED).unlink()
                    shutil.rmtree(folder)

    def _training_changes(self) -> list[str]:
        if not (self.folder / _TRAINED).is_file():
            return []
        settings = _read(self.folder / _TRAINED)["settings"]
        if start := settings.get("start"):
            start["component"] = _FORMER_NAMES.get(start["component"], start["component"])
        if changed := differences(settings, self.settings):
            return [f"{self.folder}: {'; '.join(changed)}"]
        gone = [
            milestone_name(percent)
            for percent in self.evaluations
            if self.missing_tasks(percent) and not self.checkpoint(percent).is_dir()
        ]
        return (
            [f"{self.folder}: has no {', '.join(gone)}; checkpoints are only written during training"] if gone else []
        )

    def _changed_tasks(self, percent: int) -> list[str]:
        return [
            f"{folder}: {line}"
            for folder, manifest in self.evaluated_parts(percent)
            for line in self._part_changes(percent, manifest)
        ]

    def _part_changes(self, percent: int, manifest: Mapping[str, Any]) -> list[str]:
        tasks = self.evaluations[percent].tasks
        return [
            f"{task}: {'; '.join(changed)}"
            for task, settings in manifest["tasks"].items()
            if task in tasks and (changed := differences(settings, tasks[task]))
        ]


def _read(path: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return manifest


def _write(path: Path, content: Mapping[str, Any]) -> None:
    with atomic_file(path) as file:
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
