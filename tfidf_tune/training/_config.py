"""The keys of a recipe's config, and their check before any work begins."""

import difflib
import inspect
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torchtune import config
from torchtune.config._errors import InstantiationError
from torchtune.config._utils import _get_component_from_path
from yaml import YAMLError

from tfidf_tune.training._argument_types import check_argument_types
from tfidf_tune.training._component_kinds import check_kind, check_made
from tfidf_tune.training._distributed import started_processes
from tfidf_tune.training._errors import SetupError, first_line, setup_errors


@dataclass
class FinetuneConfig:
    """Keys that both recipes know; names are torchtune's where it has the same thing.

    Components (``model``, ``loss``, ...) are sections with ``_component_`` and keyword arguments.
    """

    output_dir: str = MISSING
    """Folder of the run: checkpoints, metrics.jsonl, config.yaml."""
    model: Any = MISSING
    checkpointer: Any = MISSING
    tokenizer: Any = MISSING
    dataset: Any = MISSING
    """A section, or a list of sections: data sets that are mixed."""
    collate_fn: str = "torchtune.data.padded_collate_sft"
    """For data sets that are not packed."""
    loss: Any = MISSING
    """A tfidf_tune.loss component: the objective."""
    optimizer: Any = MISSING
    lr_scheduler: Any = None
    """Called with the optimizer and num_training_steps. Null: a constant learning rate."""
    metric_logger: Any = MISSING
    """torchtune's loggers; metrics.jsonl is written in any case."""
    seed: int | None = None
    shuffle: bool = True
    batch_size: int = MISSING
    """Sequences of a mini-batch: what the loss sees at once."""
    gradient_accumulation_steps: int = 1
    epochs: int = 1
    max_steps: int | None = None
    """Optimizer steps after which the run ends, if the epochs have not ended it."""
    clip_grad_norm: float | None = 1.0
    save_at_percent: list[int] = field(default_factory=lambda: [10, 25, 50, 75, 100])
    """Shares of the run, in percent of its steps, after which a checkpoint is written."""
    save_every_n_steps: int | None = None
    """Optimizer steps between two resume checkpoints. Null: at milestones and when the run is stopped alone."""
    keep_last_n_checkpoints: int = 2
    """Resume checkpoints that are kept, the newest; 0 writes none. Checkpoints of milestones all stay."""
    resume_from_checkpoint: bool = False
    """Go on from the newest whole resume checkpoint of output_dir; where there is none, start from the beginning."""
    on_non_finite: str = "stop"
    """What a loss or gradient that is NaN or infinite does: ``stop`` ends the run, ``skip`` leaves out the step, which
    on a GPU waits for each step's loss."""
    device: str = "cpu"
    dtype: str = "fp32"
    refuse_if_too_large: bool = True
    """Refuse a run whose plan exceeds the device's free memory or the free disk space; false only prints the plan."""
    enable_activation_checkpointing: bool = False
    compile: bool = False
    fsdp_cpu_offload: bool = False
    """Keep shards, gradients and optimizer state in the host's memory."""
    fsdp_reshard_after_forward: bool = True
    """Gather each layer's parameters a second time for the backward pass, instead of keeping them."""
    fsdp_param_dtype: str | None = None
    """Dtype in which sharded parameters are gathered and computed with. Null: that of the weights."""
    fsdp_reduce_dtype: str | None = None
    """Dtype in which gradients are summed over the processes. Null: that of the gradients."""
    log_every_n_steps: int = 1
    log_peak_memory_stats: bool = False


@dataclass
class LoRAFinetuneConfig(FinetuneConfig):
    """Keys of the LoRA recipe."""

    merge_adapter: bool = False
    """Write checkpoints as complete models with the adapter merged, not as PEFT adapters."""


# Gradients in fp16 cannot be scaled back: fp16 is for frozen weights, with adapters in fp32.
_DTYPES = {FinetuneConfig: ("fp32", "bf16"), LoRAFinetuneConfig: ("fp32", "bf16", "fp16")}
_OF_LORA = {entry.name for entry in fields(LoRAFinetuneConfig)} - {entry.name for entry in fields(FinetuneConfig)}
# No fp16: its gradients would need scaling.
_FSDP_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_ON_NON_FINITE = ("stop", "skip")
# Components, with the names of the arguments that the recipe itself hands over.
_COMPONENTS: dict[str, tuple[str, ...]] = {
    "model": (),
    "checkpointer": (),
    "tokenizer": (),
    "dataset": ("tokenizer",),
    "loss": (),
    "optimizer": ("params",),
    "lr_scheduler": ("optimizer", "num_training_steps"),
    "metric_logger": (),
}
_OPTIONAL_COMPONENTS = ("lr_scheduler",)
_MULTIPLE_COMPONENTS = ("dataset",)
_COMPOSED_COMPONENTS = ("loss",)
# torchtune's names, which all its builders of decoders share; they divide by them.
_MODEL_SIZES = ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "embed_dim", "intermediate_dim", "max_seq_len")

Schema = TypeVar("Schema", bound=FinetuneConfig)


def check_config(cfg: DictConfig, schema: type[Schema]) -> Schema:
    """Check a recipe's config against its keys, their types, and the signatures of its components.

    Args:
        cfg (DictConfig): what the user gave: file and overrides.
        schema (type[Schema]): the recipe's keys.

    Returns:
        Schema: the config with defaults filled in (in fact a DictConfig that behaves like the schema, so that
        components can be instantiated from it).

    Raises:
        SetupError: If a key is unknown, missing or of the wrong type, a value is out of range, or a component cannot
            be found or does not take the arguments given.
    """
    known = [entry.name for entry in fields(schema)]
    for key in cfg:
        if key in _OF_LORA and key not in known:
            raise SetupError(f"config: no key {str(key)!r}; it is one of the recipe lora_finetune")
        if key not in known:
            raise SetupError(f"config: no key {str(key)!r}{_suggestion(str(key), known)}")
    with setup_errors("config"):
        checked = cast(DictConfig, OmegaConf.merge(OmegaConf.structured(schema), cfg))
        missing = {key for key in known if OmegaConf.is_missing(checked, key)}
        missing |= set(
            _marked_as_missing(OmegaConf.to_container(cfg, resolve=False))
        )  # merging takes a default instead
        if missing:  # before anything refers to it
            raise SetupError(f"config: missing {', '.join(sorted(missing))}")
        _settle(checked)
        OmegaConf.resolve(checked)
    for key in _COMPONENTS:
        if not (key in _OPTIONAL_COMPONENTS and checked[key] is None):
            for where, section in _sections(key, checked[key]):
                _check_component(where, section, key=key, handed_over=_COMPONENTS[key])
                if key in _COMPOSED_COMPONENTS:
                    _check_parts(where, section)
    _check_datasets(checked.dataset)
    _check_collate_fn(checked.collate_fn)
    _check_values(cast(FinetuneConfig, checked))
    if checked.dtype not in _DTYPES[schema]:
        remedy = "" if checked.dtype != "fp16" else "; fp16 needs the recipe lora_finetune"
        raise SetupError(f"config: dtype is '{checked.dtype}', possible are {', '.join(_DTYPES[schema])}{remedy}")
    return cast(Schema, checked)


def instantiate(cfg: FinetuneConfig, key: str, *args: Any, **kwargs: Any) -> Any:
    """Build a component of a checked config.

    Args:
        cfg (FinetuneConfig): the checked config.
        key (str): the component's key.
        *args (Any): positional arguments that the recipe hands over.
        **kwargs (Any): keyword arguments that the recipe hands over.

    Returns:
        Any: the component; None if the config has none under that key; a list where it has a list of sections.

    Raises:
        SetupError: If it cannot be built from the settings given, or is no component for that key; the message
            names the key.
    """
    components = []
    for where, section in _sections(key, getattr(cfg, key)):
        component = _build(where, section, *args, composed=key in _COMPOSED_COMPONENTS, **kwargs)
        with setup_errors(f"config: {where}"):
            if component is not None:
                check_made(key, section["_component_"], component)
            components.append(component)
    return components if OmegaConf.is_list(getattr(cfg, key)) else components[0]


def is_own(where: str, section: Any) -> bool:
    """Return whether a component and all components within it are of this package."""
    module: str = _find_component(where, section["_component_"]).__module__
    return module.startswith("tfidf_tune.") and all(is_own(f"{where}.{name}", part) for name, part in _parts(section))


def shards_model(cfg: FinetuneConfig) -> bool:
    """Tell whether the config asks for something that FSDP2 does, be it on one process."""
    return cfg.fsdp_cpu_offload or cfg.fsdp_param_dtype is not None or cfg.fsdp_reduce_dtype is not None


def mixed_precision_dtype(name: str | None) -> torch.dtype | None:
    """Look up a dtype of the keys ``fsdp_param_dtype`` and ``fsdp_reduce_dtype``."""
    return None if name is None else _FSDP_DTYPES[name]


def _settle(cfg: DictConfig) -> None:
    """Fix what other keys refer to: the folder's full name, a seed where none is given, components given as null."""
    cfg.output_dir = str(Path(cfg.output_dir).expanduser())
    if cfg.seed is None:
        cfg.seed = _choose_seed(cfg)
    for key in _OPTIONAL_COMPONENTS:
        # `key=null` on the command line arrives as a section whose component is null.
        if OmegaConf.is_dict(cfg[key]) and cfg[key].get("_component_") is None:
            cfg[key] = None


def _choose_seed(cfg: DictConfig) -> int:
    if started_processes() > 1:
        raise SetupError("config: seed is null, but several processes need one and the same: set seed to a number")
    earlier = Path(str(cfg.output_dir)) / "config.yaml"
    if cfg.resume_from_checkpoint and earlier.is_file():
        try:
            return int(OmegaConf.load(earlier).seed)
        except (ValueError, TypeError, AttributeError, YAMLError, OmegaConfBaseException) as error:
            raise SetupError(
                f"config: seed is null, and that of the run to go on with cannot be read from {earlier} "
                f"({first_line(error)}): set seed to it"
            ) from error
    return random.SystemRandom().randrange(2**31)


def _marked_as_missing(value: Any, name: str = "") -> Iterator[str]:
    """Names of the values that are given as ``???``."""
    if value == MISSING:
        yield name
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from _marked_as_missing(inner, f"{name}.{key}" if name else str(key))
    for index, inner in enumerate(value) if isinstance(value, list) else ():
        yield from _marked_as_missing(inner, f"{name}[{index}]")


def _check_values(cfg: FinetuneConfig) -> None:
    for key, dtype in (("fsdp_param_dtype", cfg.fsdp_param_dtype), ("fsdp_reduce_dtype", cfg.fsdp_reduce_dtype)):
        if dtype is not None and dtype not in _FSDP_DTYPES:
            raise SetupError(f"config: {key} is '{dtype}', possible are {', '.join(_FSDP_DTYPES)}, or null")
    if cfg.on_non_finite not in _ON_NON_FINITE:
        raise SetupError(f"config: on_non_finite is '{cfg.on_non_finite}', possible are {', '.join(_ON_NON_FINITE)}")
    if cfg.keep_last_n_checkpoints < 0:
        raise SetupError(
            f"config: keep_last_n_checkpoints is {cfg.keep_last_n_checkpoints}, it has to be at least 1, or 0 for no "
            "resume checkpoints"
        )
    if cfg.save_every_n_steps is not None and cfg.save_every_n_steps < 1:
        raise SetupError(
            f"config: save_every_n_steps is {cfg.save_every_n_steps}, it has to be at least 1, or null for milestones"
        )
    if cfg.save_every_n_steps is not None and cfg.keep_last_n_checkpoints == 0:
        raise SetupError(
            f"config: save_every_n_steps is {cfg.save_every_n_steps}, but keep_last_n_checkpoints is 0, which keeps "
            "none: set one of them otherwise"
        )
    for key in ("batch_size", "gradient_accumulation_steps", "epochs", "log_every_n_steps"):
        if getattr(cfg, key) < 1:
            raise SetupError(f"config: {key} is {getattr(cfg, key)}, it has to be at least 1")
    for key in _MODEL_SIZES:
        size = cfg.model.get(key)
        if isinstance(size, int) and size < 1:
            raise SetupError(f"config: model: {key} is {size}, it has to be at least 1")
    if cfg.max_steps is not None and cfg.max_steps < 1:
        raise SetupError(f"config: max_steps is {cfg.max_steps}, it has to be at least 1, or null for no limit")
    if cfg.clip_grad_norm is not None and not cfg.clip_grad_norm > 0:
        raise SetupError(f"config: clip_grad_norm is {cfg.clip_grad_norm}, it has to be positive, or null for none")
    if not cfg.save_at_percent or not all(0 < percent <= 100 for percent in cfg.save_at_percent):
        raise SetupError(
            f"config: save_at_percent is {list(cfg.save_at_percent)}, it has to list whole percents from 1 to 100"
        )


def _sections(key: str, value: Any) -> list[tuple[str, Any]]:
    """The sections of a component with their names: one, or where there may be several those of a list."""
    if key in _MULTIPLE_COMPONENTS and OmegaConf.is_list(value):
        return [(f"{key}[{index}]", section) for index, section in enumerate(value)]
    return [(key, value)]


def _parts(section: Any) -> list[tuple[str, Any]]:
    """The components within a component: the factors of a product of weights."""
    return [(str(name), part) for name, part in section.items() if OmegaConf.is_dict(part) and "_component_" in part]


def _check_parts(where: str, section: Any) -> None:
    for name, part in _parts(section):
        _check_component(f"{where}.{name}", part, key=None)
        _check_parts(f"{where}.{name}", part)


def _build(where: str, section: Any, *args: Any, composed: bool, **kwargs: Any) -> Any:
    """Build a component; torchtune leaves components within it as they are, so they are built before."""
    within = _parts(section) if composed else []
    parts = {name: _build(f"{where}.{name}", part, composed=True) for name, part in within}
    given = {str(name): value for name, value in (section or {}).items() if name not in ("_component_", *parts)}
    with setup_errors(f"config: {where}", given):
        if parts:
            return _find_component(where, section["_component_"])(*args, **given, **parts, **kwargs)
        return config.instantiate(section, *args, **kwargs)


def _check_datasets(dataset: Any) -> None:
    sections = _sections("dataset", dataset)
    if not sections:
        raise SetupError("config: dataset is an empty list: name one data set or more")
    packed = [where for where, section in sections if section.get("packed")]
    if packed and len(packed) < len(sections):
        others = [where for where, _ in sections if where not in packed]
        raise SetupError(
            f"config: {', '.join(packed)} packed, {', '.join(others)} not: of the data sets that are mixed, "
            "all have to be packed or none"
        )


def _check_component(where: str, section: Any, *, key: str | None, handed_over: Sequence[str] = ()) -> None:
    if not OmegaConf.is_dict(section) or not section.get("_component_"):
        alternative = ", or a list of such" if where in _MULTIPLE_COMPONENTS else ""
        raise SetupError(f"config: {where} has to be a section with `_component_`{alternative}")
    path = section["_component_"]
    component = _find_component(where, path)
    parameters = _parameters(where, path, component)
    check_kind(where, path, component, key=key, handed_over=handed_over)
    given = {str(argument) for argument in section if argument != "_component_"}
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for argument in given - parameters.keys():
            raise SetupError(
                f"config: {where}: {path} has no argument '{argument}'{_suggestion(argument, [*parameters])}"
            )
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and name not in given
        and name not in handed_over
    ]
    if missing:
        raise SetupError(f"config: {where}: {path} needs {', '.join(missing)}")
    with setup_errors(f"config: {where}"):
        check_argument_types(component, {str(name): section[name] for name in given})


def _parameters(where: str, path: str, component: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(component).parameters
    except ValueError as error:  # dict, for example
        raise SetupError(f"config: {where}: {path} does not tell its arguments: name a class or function") from error


def _check_collate_fn(path: str) -> None:
    parameters = _parameters("collate_fn", path, _find_component("collate_fn", path))
    if lacking := {"padding_idx", "ignore_idx"} - parameters.keys():
        raise SetupError(
            f"config: collate_fn: {path} takes no {', '.join(sorted(lacking))}: take, for example, "
            f"{FinetuneConfig.collate_fn}"
        )


def _find_component(key: str, path: Any) -> Any:
    if not isinstance(path, str):
        raise SetupError(f"config: {key}: component is {path!r}, it has to be a dotted path such as torch.optim.AdamW")
    try:
        component = _get_component_from_path(path)
    except (InstantiationError, ValueError) as error:
        raise SetupError(f"config: {key}: no component '{path}': {str(error).splitlines()[-1]}") from error
    if not callable(component):
        raise SetupError(f"config: {key}: '{path}' is no class or function")
    return component


def _suggestion(name: str, possible: list[str]) -> str:
    close = difflib.get_close_matches(name, possible, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; possible are {', '.join(sorted(possible))}"
