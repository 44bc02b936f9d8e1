"""What an experiment comes to: its cells, with everything about them that can be checked beforehand checked."""

import inspect
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from torchtune.config._utils import _get_component_from_path

from tfidf_tune._files import looks_like_path
from tfidf_tune.data._cache import digest
from tfidf_tune.experiment._cells import EvaluationCell, PlannedRun, Start, TrainingCell
from tfidf_tune.experiment._config import DTYPES, Experiment, Model, hint
from tfidf_tune.experiment._settings import (
    TASK_SETTINGS,
    config_errors,
    fingerprint,
    task_settings,
    training_settings,
    with_fingerprints,
)
from tfidf_tune.training import SetupError, load_config, milestone_name

STARTS, REPORT = "starts", "report"


def plan_runs(experiment: Experiment) -> list[PlannedRun]:
    """Make the cells of an experiment, checked as the recipes check their configs.

    Args:
        experiment (Experiment): the experiment.

    Returns:
        list[PlannedRun]: a run for each model, seed, learning rate and objective, in this order, so that what is to be
            compared comes one after the other.

    Raises:
        ValueError: If names do not make different folders; a task is unknown or has no passages to probe for; a
            training config cannot be read, is not right, or its objective cannot be built; what makes a start
            cannot be found; a path leads nowhere, or a local source of text cannot be read.
    """
    fingerprint.cache_clear()
    _read_config.cache_clear()
    _check_tasks(experiment)
    models, objectives = _slugs(experiment.models, "models"), _slugs(experiment.objectives, "objectives")
    starts: dict[str, Path] = {}
    return [
        _planned_run(
            experiment, model, objective, learning_rate, seed, Path(models[model], objectives[objective]), starts
        )
        for model in experiment.models
        for seed in experiment.seeds
        for learning_rate in _learning_rates(experiment, experiment.models[model])
        for objective in experiment.objectives
    ]


def slug(name: str) -> str:
    """Make a folder's name: lower-case letters, digits, dots and single dashes.

    Args:
        name (str): of a model or an objective.

    Returns:
        str: ``pythia-1.4b-lora`` for "Pythia 1.4B (LoRA)".
    """
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")


def _learning_rates(experiment: Experiment, model: Model) -> Sequence[float | None]:
    return model.learning_rates or experiment.learning_rates or (None,)


def _slugs(names: Mapping[str, Any], key: str) -> dict[str, str]:
    slugs = {name: slug(name) for name in names}
    for name, own in slugs.items():
        if not own or own in (STARTS, REPORT):
            raise SetupError(f"experiment: {key}: {name!r} makes no folder of its own; choose another name")
        if same := [other for other in names if other != name and slugs[other] == own]:
            raise SetupError(f"experiment: {key}: {name!r} and {same[0]!r} would share the folder {own}; rename one")
    return slugs


def _check_tasks(experiment: Experiment) -> None:
    from tfidf_tune.tasks import tasks_folder

    known = sorted(file.stem for file in tasks_folder().glob("*.yaml"))
    if unknown := [task for task in experiment.tasks if task not in known]:
        raise SetupError(f"experiment: no task {', '.join(unknown)}; there are {', '.join(known)}")
    settings = [key for keys in TASK_SETTINGS.values() for key in keys]
    for key in experiment.eval.metadata:
        if key not in settings:
            raise SetupError(f"experiment: eval.metadata: no setting {key!r}; {hint(key, settings)}")


def _planned_run(
    experiment: Experiment,
    name: str,
    objective: str,
    learning_rate: float | None,
    seed: int,
    place: Path,
    starts: dict[str, Path],
) -> PlannedRun:
    model = experiment.models[name]
    out = Path(experiment.output_dir)
    folder = out / place / ("" if learning_rate is None else f"lr{learning_rate}") / f"seed{seed}"
    with config_errors(f"experiment: {name}, {objective}"):
        cfg = _training_config(experiment, model, objective, learning_rate, seed)
        start = None if model.start is None else _start(model.start, cfg, seed, out / STARTS / place.parts[0], starts)
        settings = training_settings(cfg, model.recipe, start)
        if start is not None:
            OmegaConf.update(cfg, "checkpointer.checkpoint_dir", str(start.folder))
        elif looks_like_path(cfg.checkpointer.checkpoint_dir):
            _require_folder(cfg.checkpointer)
        cfg.output_dir = str(folder)
        training = TrainingCell(
            model=name,
            objective=objective,
            learning_rate=learning_rate,
            seed=seed,
            recipe=model.recipe,
            folder=folder,
            config=cfg,
            milestones=tuple(sorted(experiment.milestones)),
            start=start,
            settings=settings,
        )
        return PlannedRun(
            training, tuple(_evaluation(experiment, training, percent) for percent in training.milestones)
        )


def _training_config(
    experiment: Experiment, model: Model, objective: str, learning_rate: float | None, seed: int
) -> DictConfig:
    cfg = deepcopy(_read_config(model.config))
    for overrides in (experiment.overrides, model.overrides):
        for key, value in overrides.items():
            # A section that names its own component takes the place of the config's, as with `base`.
            replaces = isinstance(value, dict) and "_component_" in value
            with config_errors(f"overrides: {key}"):
                OmegaConf.update(cfg, key, value, merge=not replaces, force_add=True)
    cfg.loss = experiment.objectives[objective]
    if learning_rate is not None:
        OmegaConf.update(cfg, "optimizer.lr", learning_rate, force_add=True)
    cfg.seed = seed
    cfg.save_at_percent = sorted(experiment.milestones)
    cfg.keep_last_n_checkpoints = 0  # a cell that was interrupted is trained anew
    return cfg


_read_config = lru_cache(load_config)  # one for many runs, which is most of the time that they take to plan


def _start(section: Mapping[str, Any], cfg: DictConfig, seed: int, folder: Path, starts: dict[str, Path]) -> Start:
    arguments = {key: value for key, value in section.items() if key not in ("_component_", "seed")}
    component = section.get("_component_")
    if not isinstance(component, str):
        raise SetupError("start: has to be a section with `_component_`")
    seed = section.get("seed", seed)
    if type(seed) is not int:
        raise SetupError(f"start: seed is {seed!r}, it has to be a whole number")
    model = cast(dict[str, Any], OmegaConf.to_container(cfg.model, resolve=True))
    with config_errors("start"):
        inspect.signature(_get_component_from_path(component)).bind(folder, model, seed, **arguments)
    made_from = [component, with_fingerprints(arguments, "start"), model]
    name = f"seed{seed}-{digest(made_from)[:8]}"
    # Models that start from the same share the folder of the first.
    return Start(component, arguments, model, seed, starts.setdefault(name, folder / name))


def _evaluation(experiment: Experiment, run: TrainingCell, percent: int) -> EvaluationCell:
    own = experiment.eval
    dtype = DTYPES[own.dtype or run.settings["dtype"]]
    metadata = dict(own.metadata)
    if any(task.startswith("tfidf_memorization") for task in experiment.tasks) and "probe_file" not in metadata:
        metadata["probe_file"] = _probe_file(run)
    checkpoint = run.folder / milestone_name(percent)
    return EvaluationCell(
        run=run,
        percent=percent,
        tasks={task: task_settings(task, own, dtype) for task in experiment.tasks},
        model_args=_model_args(run, str(checkpoint)) | {"dtype": dtype} | own.model_args,
        metadata=metadata,
    )


def _model_args(run: TrainingCell, checkpoint: str) -> dict[str, Any]:
    """Name the checkpoint to the harness, an adapter together with its base."""
    if run.recipe == "full_finetune" or run.settings["merge_adapter"]:
        return {"pretrained": checkpoint}
    checkpointer = run.config.checkpointer
    revision = {} if checkpointer.get("revision") is None else {"revision": checkpointer.revision}
    return {"pretrained": str(checkpointer.checkpoint_dir), "peft": checkpoint, **revision}


def _probe_file(run: TrainingCell) -> str:
    dataset = run.config.dataset
    sections = dataset if OmegaConf.is_list(dataset) else [dataset]
    probe_file = next((section.probe_file for section in sections if section.get("probe_file") is not None), None)
    if probe_file is None:
        raise SetupError(
            "tfidf_memorization needs passages to probe for: train on injected_corpus_dataset with a probe_file, or "
            "name one in eval.metadata.probe_file (`tfidf-tune probe make` makes one)"
        )
    return str(probe_file)


def _require_folder(checkpointer: DictConfig) -> None:
    folder = Path(checkpointer.checkpoint_dir).expanduser()
    if not folder.is_dir():
        raise SetupError(f"checkpointer.checkpoint_dir: no such folder {folder}")
    checkpointer.checkpoint_dir = str(folder)  # the harness does not know the tilde
