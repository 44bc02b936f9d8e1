"""The keys of an experiment's file and their checks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tfidf_tune._checks import suggestion
from tfidf_tune.training import SetupError, config_path, load_config

RECIPES = ("full_finetune", "lora_finetune")
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
LAUNCHERS = ("local", "slurm")
_FOLDER = "experiments"
# What the experiment itself sets in a training config, and by which of its keys.
_OWN_KEYS = {"output_dir": "output_dir", "seed": "seeds", "loss": "objectives", "save_at_percent": "milestones"}


@dataclass(frozen=True)
class Model:
    """What is trained: a row of the tables.

    Args:
        recipe (str): "full_finetune" or "lora_finetune".
        config (str): name or path of a training config.
        overrides (dict[str, Any]): keys of the training config, over the experiment's own overrides.
        start (dict[str, Any] | None): component that makes the checkpoint folder to start from, called with
            ``(folder, model, seed)``, ``model`` being the training config's section and ``seed`` the run's, or for all
            runs the one that is given here. Default: None, the training config's checkpoint.
        learning_rates (list[float] | None): of this model, where others are of use to it: adapters learn at higher
            ones than whole models. Default: None, the experiment's.
    """

    recipe: str = MISSING
    config: str = MISSING
    overrides: dict[str, Any] = field(default_factory=dict)
    start: dict[str, Any] | None = None
    learning_rates: list[float] | None = None


@dataclass(frozen=True)
class EvalSettings:
    """How checkpoints are evaluated.

    Args:
        batch_size (int): sequences at once. Default: 64.
        device (str | None): Default: None, the device of the training config.
        dtype (str | None): "fp32", "bf16" or "fp16". Default: None, the dtype of the training config.
        limit (int | None): documents of each task. Default: None, all.
        metadata (dict[str, Any]): settings of the tasks: sources, prefix lengths, ...
        model_args (dict[str, Any]): more arguments of the harness's Hugging Face model, ``parallelize`` for example.
    """

    batch_size: int = 64
    device: str | None = None
    dtype: str | None = None
    limit: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    model_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """Everything that is trained and evaluated: each model under each objective with each learning rate and seed.

    Args:
        output_dir (str): folder of the experiment.
        models (dict[str, Model]): by the names that the tables show.
        objectives (dict[str, dict[str, Any]]): the training config's ``loss`` by the names that the tables show.
        learning_rates (list[float] | None): the training config's ``optimizer.lr``. With them the report is that of the
            frontier. Default: None, as it stands there.
        references (list[str]): objectives that the others are compared with in the frontier, beside the baseline.
        seeds (list[int]): of weights, data order and injections.
        milestones (list[int]): training progress in percent at which a checkpoint is saved and evaluated.
        tasks (list[str]): tasks and groups of the evaluation harness.
        eval (EvalSettings): how they are run.
        launcher (dict[str, Any]): ``name`` ("local" or "slurm") and options of it: ``gpus_per_node`` of a job, and for
            Slurm ``timeout_min``, ``partition`` and whatever else submitit takes. Default: local.
        overrides (dict[str, Any]): keys of all training configs.
    """

    output_dir: str = MISSING
    models: dict[str, Model] = MISSING
    objectives: dict[str, dict[str, Any]] = MISSING
    learning_rates: list[float] | None = None
    references: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=lambda: [0])
    milestones: list[int] = field(default_factory=lambda: [10, 25, 50, 75, 100])
    tasks: list[str] = MISSING
    eval: EvalSettings = field(default_factory=EvalSettings)
    launcher: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)


def shipped_experiments() -> dict[str, Path]:
    """The experiments that come with the package.

    Returns:
        dict[str, Path]: their files by name, sorted.
    """
    return {file.stem: file for file in sorted((Path(str(files("tfidf_tune.configs"))) / _FOLDER).glob("*.yaml"))}


def load_experiment(name: str, overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment and check its keys; training configs are not looked at yet.

    Args:
        name (str): a path, or the name of one that comes with the package (``demo`` or ``experiments/demo``).
        overrides (Sequence[str]): ``key=value`` as for a recipe; a model whose name has dots is written
            ``models[Pythia 1.4B].overrides.batch_size=4``. Default: none.

    Returns:
        Experiment: the experiment. References in ``overrides`` are left as they are: they are the training config's.

    Raises:
        ValueError: If there is no such experiment, it is no YAML, or a key is unknown, missing or out of range.
    """
    cfg = _read(name, overrides)
    _check_keys(Experiment, cfg, "")
    # References in these are for the training config to resolve.
    shared = _plain(cfg.pop("overrides", None))
    own = {}
    for model, section in (cfg.get("models") or {}).items():
        _check_keys(Model, section, f"models: {model}: ")
        own[model] = _plain(section.pop("overrides", None))
    _check_keys(EvalSettings, cfg.get("eval") or {}, "eval: ")
    try:
        experiment = cast(Experiment, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Experiment), cfg)))
    except OmegaConfBaseException as error:
        raise SetupError(f"experiment: {str(error).splitlines()[0]} (key {str(error.full_key)!r})") from error
    models = {model: replace(settings, overrides=own[model]) for model, settings in experiment.models.items()}
    out = str(Path(experiment.output_dir).expanduser())
    launcher = {"name": "local"} | experiment.launcher
    experiment = replace(experiment, output_dir=out, models=models, overrides=shared, launcher=launcher)
    _check_values(experiment)
    return experiment


def _read(name: str, overrides: Sequence[str]) -> DictConfig:
    if not Path(name).is_file():
        shipped = shipped_experiments()
        bare = name.removeprefix(f"{_FOLDER}/")
        if bare not in shipped:
            raise SetupError(f"no file {name}, and no experiment of that name; there are: {', '.join(shipped)}")
        name = str(shipped[bare])
    return load_config(name, overrides)


def _plain(section: Any) -> dict[str, Any]:
    if section is None:
        return {}
    if not OmegaConf.is_dict(section):
        raise SetupError(f"experiment: overrides is {section!r}, it has to hold keys of a training config")
    plain = cast(dict[str, Any], OmegaConf.to_container(section, resolve=False))
    for key in plain:
        if key in _OWN_KEYS:
            raise SetupError(f"experiment: overrides: {key} is set by the experiment's {_OWN_KEYS[key]}")
        if "." in str(key):  # beside a nested one, nobody could tell which of the two counts
            raise SetupError(f"experiment: overrides: {key} has a dot; in a file, keys of sections are nested")
    return plain


def _check_keys(schema: type, section: Any, where: str) -> None:
    """Report unknown keys with the nearest known one, and missing keys."""
    assert is_dataclass(schema)
    if not OmegaConf.is_dict(section) and section != {}:
        raise SetupError(f"experiment: {where.rstrip(': ') or 'the file'} has to hold keys and values")
    known = [entry.name for entry in fields(schema)]
    for key in section:
        if key not in known:
            raise SetupError(f"experiment: {where}no key {str(key)!r}{suggestion(str(key), known)}")
    missing = [entry.name for entry in fields(schema) if entry.default is MISSING and section.get(entry.name) is None]
    if missing:
        raise SetupError(f"experiment: {where}missing {', '.join(missing)}")


def _check_values(experiment: Experiment) -> None:
    for key in ("models", "objectives", "seeds", "milestones", "tasks"):
        _check_list(key, list(getattr(experiment, key)))
    if not all(0 < percent <= 100 for percent in experiment.milestones):
        raise SetupError(
            f"experiment: milestones is {experiment.milestones}, possible are whole percents from 1 to 100"
        )
    _check_learning_rates(experiment)
    _check_launcher(experiment.launcher)
    for name, model in experiment.models.items():
        if model.recipe not in RECIPES:
            raise SetupError(
                f"experiment: models: {name}: recipe is {model.recipe!r}, possible are {', '.join(RECIPES)}"
            )
        config_path(model.config)
    for key in ("batch_size", "limit"):
        value = getattr(experiment.eval, key)
        if value is not None and value < 1:
            raise SetupError(f"experiment: eval: {key} is {value}, it has to be at least 1")
    if experiment.eval.dtype not in (None, *DTYPES):
        raise SetupError(f"experiment: eval: dtype is {experiment.eval.dtype!r}, possible are {', '.join(DTYPES)}")


def _check_launcher(launcher: dict[str, Any]) -> None:
    where = "experiment: launcher: "
    if launcher["name"] not in LAUNCHERS:
        raise SetupError(f"{where}name is {launcher['name']!r}, possible are {', '.join(LAUNCHERS)}")
    if launcher["name"] == "slurm" and "timeout_min" not in launcher:
        raise SetupError(f"{where}slurm needs timeout_min, the time limit of a job: a training and its evaluations")
    for key in ("nodes", "tasks_per_node"):
        if launcher.get(key, 1) != 1:
            raise SetupError(f"{where}{key} is {launcher[key]}, but a job is one process on one machine: leave it out")
    for key in ("timeout_min", "gpus_per_node", "cpus_per_task"):
        if key in launcher and (type(launcher[key]) is not int or launcher[key] < 1):
            raise SetupError(f"{where}{key} is {launcher[key]!r}, it has to be a whole number, at least 1")


def _check_list(where: str, values: Sequence[Any]) -> None:
    if not values:
        raise SetupError(f"experiment: {where} is empty, it has to name at least one")
    if repeated := sorted({str(value) for value in values if values.count(value) > 1}):
        raise SetupError(f"experiment: {where} holds {', '.join(repeated)} more than once")


def _check_learning_rates(experiment: Experiment) -> None:
    for name in experiment.references:
        if name not in experiment.objectives:
            raise SetupError(f"experiment: references: no objective {name!r}{suggestion(name, experiment.objectives)}")
    if experiment.learning_rates is None and experiment.references:
        raise SetupError("experiment: references are for the frontier, which needs learning_rates: name some")
    of_models = {
        f"models: {name}: ": model.learning_rates
        for name, model in experiment.models.items()
        if model.learning_rates is not None
    }
    if experiment.learning_rates is None:
        if of_models:
            where = next(iter(of_models))
            raise SetupError(f"experiment: {where}learning_rates: the experiment has none; name some for all models")
        return
    for where, rates in ({"": experiment.learning_rates} | of_models).items():
        _check_list(f"{where}learning_rates", rates)
        if not all(0 < rate < math.inf for rate in rates):
            raise SetupError(f"experiment: {where}learning_rates is {rates}, possible are numbers above 0")
    overrides = {"": experiment.overrides} | {
        f"models: {name}: ": own.overrides for name, own in experiment.models.items()
    }
    for where, section in overrides.items():
        optimizer = section.get("optimizer")
        if isinstance(optimizer, dict) and "lr" in optimizer:
            raise SetupError(f"experiment: {where}overrides: optimizer.lr is set by the experiment's learning_rates")
