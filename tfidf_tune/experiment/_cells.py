"""Cells: what an experiment consists of, each with a folder of its own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from omegaconf import DictConfig

from tfidf_tune.training import milestone_name

Settings: TypeAlias = dict[str, Any]
"""What a result depends on, as JSON has it."""


@dataclass(frozen=True)
class Start:
    """A checkpoint folder that the experiment makes to train from.

    Args:
        component (str): dotted path of what makes it.
        arguments (dict[str, Any]): its keyword arguments.
        model (dict[str, Any]): section ``model`` of the training config.
        seed (int): of its weights.
        folder (Path): where it goes; its name changes with all of the above.
    """

    component: str
    arguments: dict[str, Any]
    model: dict[str, Any]
    seed: int
    folder: Path


@dataclass(frozen=True)
class TrainingCell:
    """One training run.

    Args:
        model (str): name of the model.
        objective (str): name of the objective.
        learning_rate (float | None): of the optimizer; None where the experiment leaves it to the training config.
        seed (int): of the run.
        recipe (str): "full_finetune" or "lora_finetune".
        folder (Path): folder of the run.
        config (DictConfig): what the recipe is given, references unresolved.
        milestones (tuple[int, ...]): in percent.
        start (Start | None): made before, unless it is there.
        settings (Settings): what the run depends on.
    """

    model: str
    objective: str
    learning_rate: float | None
    seed: int
    recipe: str
    folder: Path
    config: DictConfig
    milestones: tuple[int, ...]
    start: Start | None
    settings: Settings

    @property
    def title(self) -> str:
        """Which run it is."""
        learning_rate = "" if self.learning_rate is None else f"lr {self.learning_rate}, "
        return f"{self.model}, {self.objective}, {learning_rate}seed {self.seed}"

    @property
    def log(self) -> Path:
        """What the recipe printed."""
        return self.folder / "train.log"


@dataclass(frozen=True)
class EvaluationCell:
    """The evaluation of one milestone of a run.

    Args:
        run (TrainingCell): whose milestone.
        percent (int): which.
        tasks (dict[str, Settings]): what each task's result depends on.
        model_args (dict[str, Any]): of the harness's model.
        metadata (dict[str, Any]): of the harness's tasks.
    """

    run: TrainingCell
    percent: int
    tasks: dict[str, Settings]
    model_args: dict[str, Any]
    metadata: dict[str, Any]

    @property
    def checkpoint(self) -> Path:
        """What is evaluated."""
        return self.run.folder / milestone_name(self.percent)

    @property
    def folder(self) -> Path:
        """Where the results go, a folder ``part1``, ``part2``, ... for each time that tasks were run."""
        return self.run.folder / "evaluation" / milestone_name(self.percent)

    @property
    def log(self) -> Path:
        """What the harness printed."""
        return self.run.folder / "eval.log"


@dataclass(frozen=True)
class PlannedRun:
    """A training run and the evaluation of its milestones.

    Args:
        training (TrainingCell): the run.
        evaluations (tuple[EvaluationCell, ...]): its milestones, ascending.
    """

    training: TrainingCell
    evaluations: tuple[EvaluationCell, ...]
