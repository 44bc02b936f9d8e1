"""Expand an experiment into validated runs, with the settings that affect their results."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from torchtune.config._utils import _get_component_from_path

from research.experiment._cells import JOBS, REPORT, STARTS, Run, Settings, Start
from research.experiment._schema import DTYPES, EvalSettings, Experiment, Model
from tfidf_tune import training
from tfidf_tune._checks import suggestion
from tfidf_tune._files import digest, looks_like_path
from tfidf_tune.data import source_fingerprint
from tfidf_tune.training import SetupError, load_config, milestone_name, setup_errors
from tfidf_tune.training.components import signature_of

_SCHEMAS = {"full_finetune": training.FinetuneConfig, "lora_finetune": training.LoRAFinetuneConfig}
# Keys of a training config that do not affect the trained model.
_IMMATERIAL = [
    "output_dir",
    "save_at_percent",
    "save_every_n_steps",
    "keep_last_n_checkpoints",
    "resume_from_checkpoint",
    "metric_logger",
    "log_every_n_steps",
    "log_peak_memory_stats",
]


def expand(experiment: Experiment) -> list[Run]:
    """Return the runs, checked as the recipes check their configs, so that those to be compared
    follow each other.
    """
    _fingerprint.cache_clear()
    _read_config.cache_clear()
    _check_names(experiment)
    _check_tasks(experiment)
    starts: dict[str, Path] = {}
    runs = []
    for name, model in experiment.models.items():
        rates = model.learning_rates or experiment.learning_rates or (None,)
        for seed, rate, objective in product(experiment.seeds, rates, experiment.objectives):
            runs.append(_run(experiment, name, objective, rate, seed, starts))
    return runs


def slug(name: str) -> str:
    """Return the folder name of a model or objective: ``pythia-1.4b-lora`` for "Pythia 1.4B
    (LoRA)".
    """
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")


def _check_names(experiment: Experiment) -> None:
    for names in (experiment.models, experiment.objectives):
        named = dict.fromkeys(("", STARTS, REPORT, JOBS), "a folder of the experiment")
        for name in names:
            other = named.get(slug(name))
            if other:
                raise SetupError(
                    f"experiment: {name!r} and {other} share the folder {slug(name)!r}; rename it"
                )
            named[slug(name)] = repr(name)


def _check_tasks(experiment: Experiment) -> None:
    from tfidf_tune.tasks import tasks_folder

    known = sorted(file.stem for file in tasks_folder().glob("*.yaml"))
    unknown = [task for task in experiment.tasks if task not in known]
    if unknown:
        raise SetupError(
            f"experiment: no task {', '.join(unknown)}; possible are {', '.join(known)}"
        )
    settings: list[str] = []
    for keys in task_settings().values():
        settings += keys
    of_models = {
        f"models: {name}: metadata": model.metadata for name, model in experiment.models.items()
    }
    for where, metadata in {"eval.metadata": experiment.eval.metadata, **of_models}.items():
        unknown = [key for key in metadata if key not in settings]
        if unknown:
            raise SetupError(
                f"experiment: {where}: no setting {unknown[0]!r}{suggestion(unknown[0], settings)}"
            )


@cache
def task_settings() -> dict[str, list[str]]:
    """Return by the beginning of tasks' names the settings that affect their results: arguments of
    their documents.
    """
    from tfidf_tune.tasks import (
        cnn_dailymail,
        membership,
        memorization,
        perplexity,
        positive_control,
        squad,
    )

    made_by: dict[str, list[Callable[..., Any]]] = {
        "tfidf_memorization": [memorization.documents],
        "tfidf_membership": [membership.documents],
        "tfidf_positive_control": [positive_control.documents],
        "tfidf_wikitext2_ppl": [perplexity.documents],
        "tfidf_other_ppl": [perplexity.other_documents, perplexity.documents],
        "tfidf_cnn_dailymail": [cnn_dailymail.documents],
        "tfidf_squad": [squad.documents],
    }
    settings = {}
    for task, functions in made_by.items():
        names = []
        for make in functions:
            for parameter in inspect.signature(make).parameters.values():
                is_setting = parameter.kind is inspect.Parameter.KEYWORD_ONLY
                if is_setting and parameter.name != "task_prefix_length":
                    names.append(parameter.name)
        # Another text takes the place of WikiText-2.
        if task == "tfidf_other_ppl":
            names = [name for name in names if not name.startswith("wikitext2_")]
        settings[task] = names
    return settings


def _run(
    experiment: Experiment,
    name: str,
    objective: str,
    rate: float | None,
    seed: int,
    starts: dict[str, Path],
) -> Run:
    model = experiment.models[name]
    out = Path(experiment.output_dir)
    folder = (
        out / slug(name) / slug(objective) / ("" if rate is None else f"lr{rate}") / f"seed{seed}"
    )
    with _errors_in(f"experiment: {name}, {objective}"):
        cfg = _training_config(experiment, model, objective, rate, seed)
        start = (
            None
            if model.start is None
            else _start(model.start, cfg, seed, out / STARTS / slug(name), starts)
        )
        settings = _training_settings(cfg, model.recipe, start)
        if experiment.matmul_precision != "highest":  # settings of earlier runs lack the default
            settings["matmul_precision"] = experiment.matmul_precision
        # The same for training and evaluation if auto.
        cfg.device = settings["device"]
        cfg.dtype = settings["dtype"]
        cfg.output_dir = str(folder)
        if start is not None:
            OmegaConf.update(cfg, "checkpointer.checkpoint_dir", str(start.folder))
        elif looks_like_path(cfg.checkpointer.checkpoint_dir):
            checkpoint = Path(cfg.checkpointer.checkpoint_dir).expanduser()
            if not checkpoint.is_dir():
                raise SetupError(f"checkpointer.checkpoint_dir: no such folder {checkpoint}")
            # The harness does not expand the tilde.
            cfg.checkpointer.checkpoint_dir = str(checkpoint)
        dtype = DTYPES[experiment.eval.dtype or settings["dtype"]]
        own = experiment.eval.model_copy(
            update={"metadata": experiment.eval.metadata | model.metadata}
        )
        tasks = {task: _task_settings(task, own, dtype) for task in experiment.tasks}
        evaluations = {
            percent: _evaluation(
                experiment.tasks, own, cfg, settings, dtype, folder / milestone_name(percent)
            )
            for percent in sorted(experiment.milestones)
        }
        return Run(
            name,
            objective,
            rate,
            seed,
            model.recipe,
            folder,
            cfg,
            start,
            settings,
            tasks,
            evaluations,
        )


def _training_config(
    experiment: Experiment, model: Model, objective: str, rate: float | None, seed: int
) -> DictConfig:
    cfg = deepcopy(_read_config(model.config))
    own = experiment.objectives[objective]
    for overrides in (experiment.overrides, model.overrides, own.overrides):
        for key, value in overrides.items():
            # A section with a component replaces that of the config, as with `base`.
            replaces = isinstance(value, dict) and "_component_" in value
            with _errors_in(f"overrides: {key}"):
                OmegaConf.update(cfg, key, value, merge=not replaces, force_add=True)
    cfg.loss = own.loss
    if rate is not None:
        OmegaConf.update(cfg, "optimizer.lr", rate, force_add=True)
    cfg.seed = seed
    cfg.save_at_percent = sorted(experiment.milestones)
    cfg.keep_last_n_checkpoints = 0  # an interrupted training is repeated from the beginning
    return cfg


_read_config = lru_cache(load_config)  # reading takes most of the time of expanding many runs


def _start(
    section: Mapping[str, Any], cfg: DictConfig, seed: int, folder: Path, starts: dict[str, Path]
) -> Start:
    arguments = {key: value for key, value in section.items() if key not in ("_component_", "seed")}
    component = section.get("_component_")
    seed = section.get("seed", seed)
    if not isinstance(component, str) or type(seed) is not int:
        raise SetupError(
            f"start: it is {section}, it has to have a `_component_` and a whole number as seed, "
            "if any"
        )
    model = cast(dict[str, Any], OmegaConf.to_container(cfg.model, resolve=True))
    with _errors_in("start"):
        inspect.signature(_get_component_from_path(component)).bind(
            folder, model, seed, **arguments
        )
    made_from = [component, _with_fingerprints(arguments, "start"), model]
    name = f"seed{seed}-{digest(made_from)[:8]}"
    # Models with the same start share the folder of the first.
    return Start(component, arguments, model, seed, starts.setdefault(name, folder / name))


def _evaluation(
    tasks: list[str],
    own: EvalSettings,
    cfg: DictConfig,
    trained: Settings,
    dtype: str,
    checkpoint: Path,
) -> dict[str, Any]:
    metadata = dict(own.metadata)
    probing = any(task.startswith(("tfidf_memorization", "tfidf_membership")) for task in tasks)
    if probing and "probe_file" not in metadata:
        metadata["probe_file"] = _probe_file(cfg)
    if "tfidf_membership" in tasks and cfg.checkpointer.get("revision") is None:
        # The model before training.
        metadata.setdefault("reference_model", str(cfg.checkpointer.checkpoint_dir))
    model_args = {"pretrained": str(checkpoint)}
    if trained["recipe"] == "lora_finetune" and not trained["merge_adapter"]:
        model_args = {"pretrained": str(cfg.checkpointer.checkpoint_dir), "peft": str(checkpoint)}
        if cfg.checkpointer.get("revision") is not None:
            model_args["revision"] = cfg.checkpointer.revision
    return {
        "model_args": model_args | {"dtype": dtype} | own.model_args,
        "metadata": metadata,
        "batch_size": own.batch_size,
        "device": own.device or trained["device"],
        "limit": own.limit,
    }


def _probe_file(cfg: DictConfig) -> str:
    for section in cfg.dataset if OmegaConf.is_list(cfg.dataset) else [cfg.dataset]:
        # sft_dataset writes none without targets.
        if section.get("probe_file") is not None and section.get("targets", True) is not None:
            return str(section.probe_file)
    raise SetupError(
        "passages are probed for: give the dataset, or eval.metadata, a probe_file (`tfidf-tune "
        "probe make`)"
    )


def _training_settings(cfg: DictConfig, recipe: str, start: Start | None) -> Settings:
    """Check a training config as its recipe will, and return the settings that affect the trained
    model.

    References are resolved, and local sources of text replaced by hashes of their contents. The
    folders of the run and of the start have no effect: references to them become RUN and START.
    """
    cfg = cast(DictConfig, OmegaConf.merge(cfg, {"output_dir": "RUN"}))
    if start is not None:
        OmegaConf.update(cfg, "checkpointer.checkpoint_dir", "START", force_add=True)
    checked = training.check_config(cfg, _SCHEMAS[recipe])
    training.build_loss(checked)
    has_lora = "lora_rank" in signature_of("model", checked.model["_component_"]).parameters
    if has_lora != (recipe == "lora_finetune"):
        fitting = "full_finetune" if recipe == "lora_finetune" else "lora_finetune"
        raise SetupError(
            f"recipe is {recipe}, the model {checked.model['_component_']} is trained by {fitting}"
        )
    content = cast(dict[str, Any], OmegaConf.to_container(cast(DictConfig, checked)))
    settings = {key: value for key, value in content.items() if key not in _IMMATERIAL}
    sections = settings["dataset"]
    for index, section in enumerate(sections if isinstance(sections, list) else [sections]):
        section.pop("probe_file", None)  # it says where passages are written, not which
        section |= _with_fingerprints(
            section, f"dataset[{index}]" if isinstance(sections, list) else "dataset"
        )
    if start is not None:
        of_start = {"component": start.component, "seed": start.seed}
        settings["start"] = {**of_start, "arguments": _with_fingerprints(start.arguments, "start")}
    return {"recipe": recipe, **settings}


def _task_settings(task: str, own: EvalSettings, dtype: str) -> Settings:
    """Return the settings that affect the result of a task; batch size and device do not."""
    known: list[str] = []
    for kind, keys in task_settings().items():
        if task.startswith(kind):
            known += keys
    metadata = {key: value for key, value in own.metadata.items() if key in known}
    return {
        "dtype": dtype,
        "limit": own.limit,
        "model_args": own.model_args,
        "metadata": _with_fingerprints(metadata, "eval.metadata"),
    }


def _with_fingerprints(section: Mapping[str, Any], where: str) -> Settings:
    """Replace the names of local sources, which can be written in many ways, by hashes of their
    contents.
    """
    settings = dict(section)
    for key, value in section.items():
        is_source = isinstance(value, str) and key.endswith(("source", "probe_file", "targets"))
        if is_source and (value == "embedded" or looks_like_path(value) or Path(value).exists()):
            with _errors_in(f"{where}.{key}"):
                settings[key] = f"contents {_fingerprint(value)}"
    return settings


_fingerprint = lru_cache(source_fingerprint)  # once for all cells that read a source


@contextmanager
def _errors_in(where: str) -> Iterator[None]:
    """Put the place in front of an error's message."""
    try:
        with setup_errors():
            yield
    except SetupError as error:
        raise SetupError(f"{where}: {error}") from error
