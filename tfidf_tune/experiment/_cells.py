"""The cells of an experiment, each with a folder of its own, and how far they are.

A manifest in a cell's folder says that it is done, and holds everything that it was made from.
"""

import enum
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from omegaconf import DictConfig

from tfidf_tune._differences import differences
from tfidf_tune._files import atomic_file
from tfidf_tune.training import milestone_name

STARTS, REPORT, JOBS = "starts", "report", "jobs"  # folders of an experiment, which runs cannot have
TRAINED, EVALUATED = "trained.json", "evaluated.json"
_CELL = "cell.json"  # which run this is; the comparison reads it too
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
class TrainingCell:
    """A training run."""

    model: str
    objective: str
    learning_rate: float | None  # None: that of the training config
    seed: int
    recipe: str
    folder: Path
    config: DictConfig  # for the recipe, references unresolved
    start: Start | None
    settings: Settings  # that affect the trained model

    @property
    def title(self) -> str:
        """Return a description of the run."""
        learning_rate = "" if self.learning_rate is None else f"lr {self.learning_rate}, "
        return f"{self.model}, {self.objective}, {learning_rate}seed {self.seed}"

    @property
    def log(self) -> Path:
        """Return the file of the recipe's output."""
        return self.folder / "train.log"


@dataclass(frozen=True)
class EvaluationCell:
    """The evaluation of a milestone of a run."""

    run: TrainingCell
    percent: int
    tasks: dict[str, Settings]  # by task, that affect its result
    arguments: dict[str, Any]  # further ones of tfidf_tune.tasks.evaluate

    @property
    def checkpoint(self) -> Path:
        """Return the folder of the checkpoint."""
        return self.run.folder / milestone_name(self.percent)

    @property
    def folder(self) -> Path:
        """Return the folder of the results, which has a folder ``part1``, ... for each time that tasks were run."""
        return self.run.folder / "evaluation" / milestone_name(self.percent)

    @property
    def log(self) -> Path:
        """Return the file of the harness's output."""
        return self.run.folder / "eval.log"


@dataclass(frozen=True)
class PlannedRun:
    """A training run and the evaluations of its milestones, ascending."""

    training: TrainingCell
    evaluations: tuple[EvaluationCell, ...]


class State(enum.Enum):
    """The state of a cell."""

    TO_DO = "to do"
    UNFINISHED = "failed or interrupted, to do again"
    DONE = "done"
    CHANGED = "made with other settings"


def training_state(run: PlannedRun) -> State:
    """Return the state of the training of a run."""
    folder = run.training.folder
    if (folder / TRAINED).is_file():
        return State.CHANGED if _training_changes(run) else State.DONE
    return State.UNFINISHED if (folder / _CELL).is_file() else State.TO_DO


def evaluation_state(cell: EvaluationCell) -> State:
    """Return the state of an evaluation."""
    if _evaluation_changes(cell):
        return State.CHANGED
    return State.TO_DO if missing_tasks(cell) else State.DONE


def changes(run: PlannedRun) -> list[str]:
    """Return a line for each folder of a run whose results were made with other settings."""
    return _training_changes(run) or [line for cell in run.evaluations for line in _evaluation_changes(cell)]


def evaluation_parts(cell: EvaluationCell) -> list[tuple[Path, dict[str, Any]]]:
    """Return folder and manifest of each part of an evaluation that is done."""
    if not (cell.run.folder / TRAINED).is_file():
        return []  # the results are those of a run that is trained again
    return [(path.parent, read_manifest(path)) for path in sorted(cell.folder.glob(f"part*/{EVALUATED}"))]


def missing_tasks(cell: EvaluationCell) -> list[str]:
    """Return the tasks that are not done."""
    done = {task for _, manifest in evaluation_parts(cell) for task in manifest["tasks"]}
    return [task for task in cell.tasks if task not in done]


def seconds_taken(run: PlannedRun) -> Iterator[tuple[TrainingCell | EvaluationCell, float]]:
    """Yield the cells that are done, and the seconds that they took."""
    if (run.training.folder / TRAINED).is_file():
        yield run.training, float(read_manifest(run.training.folder / TRAINED)["seconds"])
    for cell in run.evaluations:
        for _, manifest in evaluation_parts(cell):
            yield cell, float(manifest["seconds"])


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest."""
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return manifest


def write_manifest(path: Path, content: Mapping[str, Any]) -> None:
    """Write a manifest atomically."""
    with atomic_file(path) as file:
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def check_folder(cell: TrainingCell) -> None:
    """Refuse a run's folder that does not belong to an experiment: it would be emptied before training.

    Raises:
        FileExistsError: If it holds files, but not those of an experiment.
    """
    if cell.folder.exists() and not (cell.folder / _CELL).is_file() and any(cell.folder.iterdir()):
        raise FileExistsError(
            f"{cell.folder} exists and is not of an experiment: choose another output_dir, or move it away"
        )


def clear_run(cell: TrainingCell) -> None:
    """Empty a run's folder and write which run it is."""
    # In this order it is an unfinished run of an experiment wherever this is interrupted.
    (cell.folder / TRAINED).unlink(missing_ok=True)
    learning_rate = {} if cell.learning_rate is None else {"learning_rate": cell.learning_rate}
    names = {"model": cell.model, "objective": cell.objective, **learning_rate, "seed": cell.seed}
    write_manifest(cell.folder / _CELL, names)
    for path in cell.folder.iterdir():
        if path.name != _CELL:
            _remove(path)


def next_part(cell: EvaluationCell) -> Path:
    """Remove what an interrupted evaluation left, and return the folder of the next part."""
    for leftover in cell.folder.glob(".*"):
        _remove(leftover)
    numbers = [int(folder.name.removeprefix("part")) for folder, _ in evaluation_parts(cell)]
    return cell.folder / f"part{max(numbers, default=0) + 1}"


def discard_changed(run: PlannedRun) -> None:
    """Remove what was made with other settings: the run, or parts of its evaluations."""
    if _training_changes(run):
        clear_run(run.training)
    for cell in run.evaluations:
        for folder, manifest in evaluation_parts(cell):
            if _task_changes(cell, manifest):
                (folder / EVALUATED).unlink()
                shutil.rmtree(folder)


def _training_changes(run: PlannedRun) -> list[str]:
    folder = run.training.folder
    if not (folder / TRAINED).is_file():
        return []
    settings = read_manifest(folder / TRAINED)["settings"]
    if start := settings.get("start"):
        start["component"] = _FORMER_NAMES.get(start["component"], start["component"])
    if changed := differences(settings, run.training.settings):
        return [f"{folder}: {'; '.join(changed)}"]
    gone = [cell.checkpoint.name for cell in run.evaluations if missing_tasks(cell) and not cell.checkpoint.is_dir()]
    return [f"{folder}: has no {', '.join(gone)}; checkpoints are only written during training"] if gone else []


def _evaluation_changes(cell: EvaluationCell) -> list[str]:
    return [
        f"{folder}: {line}" for folder, manifest in evaluation_parts(cell) for line in _task_changes(cell, manifest)
    ]


def _task_changes(cell: EvaluationCell, manifest: Mapping[str, Any]) -> list[str]:
    return [
        f"{task}: {'; '.join(changed)}"
        for task, settings in manifest["tasks"].items()
        if task in cell.tasks and (changed := differences(settings, cell.tasks[task]))
    ]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
