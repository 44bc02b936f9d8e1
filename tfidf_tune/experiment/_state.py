"""What is done: a manifest in a cell's folder says so, and holds everything that the cell was made from."""

import enum
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfidf_tune._differences import differences
from tfidf_tune._files import atomic_file
from tfidf_tune.experiment._cells import EvaluationCell, PlannedRun, TrainingCell

TRAINED, EVALUATED = "trained.json", "evaluated.json"
_CELL = "cell.json"  # whose folder it is; the comparison reads it too
# Components that make starts, by the names under which earlier manifests have them.
_FORMER_NAMES = {"tfidf_tune.experiment.random_llama": "tfidf_tune.experiment.random_model"}


class State(enum.Enum):
    """How far a cell is."""

    TO_DO = "to do"
    UNFINISHED = "failed or interrupted, to do again"
    DONE = "done"
    CHANGED = "made with other settings"


def training_state(run: PlannedRun) -> State:
    """Say how far the training of a run is."""
    folder = run.training.folder
    if (folder / TRAINED).is_file():
        return State.CHANGED if _training_changes(run) else State.DONE
    return State.UNFINISHED if (folder / _CELL).is_file() else State.TO_DO


def evaluation_state(cell: EvaluationCell) -> State:
    """Say how far an evaluation is."""
    if _evaluation_changes(cell):
        return State.CHANGED
    return State.TO_DO if missing_tasks(cell) else State.DONE


def changes(run: PlannedRun) -> list[str]:
    """Say what of a run is done, but not as the experiment now has it.

    Args:
        run (PlannedRun): the run.

    Returns:
        list[str]: a line for each folder concerned.
    """
    return _training_changes(run) or [line for cell in run.evaluations for line in _evaluation_changes(cell)]


def evaluation_parts(cell: EvaluationCell) -> list[tuple[Path, dict[str, Any]]]:
    """Give folders and manifests of what is done of an evaluation: a part for each time that tasks were run."""
    if not (cell.run.folder / TRAINED).is_file():
        return []  # what there is belongs to a training that is done again
    return [(path.parent, read_manifest(path)) for path in sorted(cell.folder.glob(f"part*/{EVALUATED}"))]


def missing_tasks(cell: EvaluationCell) -> list[str]:
    """Say which tasks are not done yet."""
    done = {task for _, manifest in evaluation_parts(cell) for task in manifest["tasks"]}
    return [task for task in cell.tasks if task not in done]


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest."""
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return manifest


def write_manifest(path: Path, content: Mapping[str, Any]) -> None:
    """Write a manifest, which is whole or not there."""
    with atomic_file(path) as file:
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def check_folder(cell: TrainingCell) -> None:
    """Refuse a run's folder that is not an experiment's: it would be emptied before training.

    Raises:
        FileExistsError: If it holds something, but not what an experiment leaves.
    """
    if cell.folder.exists() and not (cell.folder / _CELL).is_file() and any(cell.folder.iterdir()):
        raise FileExistsError(
            f"{cell.folder} exists and is not of an experiment: choose another output_dir, or move it away"
        )


def clear_run(cell: TrainingCell) -> None:
    """Empty a run's folder of what is there, done or not, and write whose it is."""
    # In an order that makes it, wherever this is interrupted, an unfinished run of an experiment.
    (cell.folder / TRAINED).unlink(missing_ok=True)
    learning_rate = {} if cell.learning_rate is None else {"learning_rate": cell.learning_rate}
    named = {"model": cell.model, "objective": cell.objective, **learning_rate, "seed": cell.seed}
    write_manifest(cell.folder / _CELL, named)
    for path in cell.folder.iterdir():
        if path.name != _CELL:
            _remove(path)


def next_part(cell: EvaluationCell) -> Path:
    """Remove what an interrupted evaluation left, and name the folder of the next part."""
    for leftover in cell.folder.glob(".*"):
        _remove(leftover)
    numbers = [int(folder.name.removeprefix("part")) for folder, _ in evaluation_parts(cell)]
    return cell.folder / f"part{max(numbers, default=0) + 1}"


def discard_changed(run: PlannedRun) -> None:
    """Remove what is done, but not as the experiment now has it: the run, or parts of its evaluations."""
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
    return [f"{folder}: has no {', '.join(gone)}; checkpoints are written while training alone"] if gone else []


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
