"""The keys of a recipe's config, and their check before any work begins."""

import difflib
import inspect
import random
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, cast

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torchtune import config
from torchtune.config._errors import InstantiationError
from torchtune.config._utils import _get_component_from_path

from tfidf_tune.training._errors import SetupError, setup_errors


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
    collate_fn: str = "torchtune.data.padded_collate_sft"
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
    device: str = "cpu"
    dtype: str = "fp32"
    refuse_if_too_large: bool = True
    """Refuse a run whose plan exceeds the device's free memory or the free disk space; false only prints the plan."""
    enable_activation_checkpointing: bool = False
    compile: bool = False
    log_every_n_steps: int = 1
    log_peak_memory_stats: bool = False


@dataclass
class LoRAFinetuneConfig(FinetuneConfig):
    """Keys of the LoRA recipe."""

    merge_adapter: bool = False
    """Write checkpoints as complete models with the adapter merged, not as PEFT adapters."""


# Gradients in fp16 cannot be scaled back: fp16 is for frozen weights, with adapters in fp32.
_DTYPES = {FinetuneConfig: ("fp32", "bf16"), LoRAFinetuneConfig: ("fp32", "bf16", "fp16")}
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
        if key not in known:
            raise SetupError(f"config: no key {str(key)!r}{_suggestion(str(key), known)}")
    try:
        checked = cast(DictConfig, OmegaConf.merge(OmegaConf.structured(schema), cfg))
        _settle(checked)
        OmegaConf.resolve(checked)
    except OmegaConfBaseException as error:
        raise SetupError(f"config: {str(error).splitlines()[0]} (key {str(error.full_key)!r})") from error
    missing = sorted(key for key in known if OmegaConf.is_missing(checked, key))
    if missing:
        raise SetupError(f"config: missing {', '.join(missing)}")
    for key in _COMPONENTS:
        if not (key in _OPTIONAL_COMPONENTS and checked[key] is None):
            _check_component(key, checked[key])
    _find_component("collate_fn", checked.collate_fn)
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
        Any: the component; None if the config has none under that key.

    Raises:
        SetupError: If it cannot be built from the settings given; the message names the key.
    """
    section = getattr(cfg, key)
    with setup_errors(f"config: {key}"):
        return config.instantiate(section, *args, **kwargs)


def _settle(cfg: DictConfig) -> None:
    """Fix what other keys refer to: the folder's full name, a seed where none is given, components given as null."""
    if not OmegaConf.is_missing(cfg, "output_dir"):
        cfg.output_dir = str(Path(cfg.output_dir).expanduser())
    if cfg.seed is None:
        cfg.seed = random.SystemRandom().randrange(2**31)
    for key in _OPTIONAL_COMPONENTS:
        # `key=null` on the command line arrives as a section whose component is null.
        if OmegaConf.is_dict(cfg[key]) and cfg[key].get("_component_") is None:
            cfg[key] = None


def _check_values(cfg: FinetuneConfig) -> None:
    for key in ("batch_size", "gradient_accumulation_steps", "epochs", "log_every_n_steps"):
        if getattr(cfg, key) < 1:
            raise SetupError(f"config: {key} is {getattr(cfg, key)}, it has to be at least 1")
    if cfg.max_steps is not None and cfg.max_steps < 1:
        raise SetupError(f"config: max_steps is {cfg.max_steps}, it has to be at least 1, or null for no limit")
    if cfg.clip_grad_norm is not None and not cfg.clip_grad_norm > 0:
        raise SetupError(f"config: clip_grad_norm is {cfg.clip_grad_norm}, it has to be positive, or null for none")
    if not cfg.save_at_percent or not all(0 < percent <= 100 for percent in cfg.save_at_percent):
        raise SetupError(
            f"config: save_at_percent is {list(cfg.save_at_percent)}, it has to list whole percents from 1 to 100"
        )


def _check_component(key: str, section: Any) -> None:
    if not OmegaConf.is_dict(section) or not section.get("_component_"):
        raise SetupError(f"config: {key} has to be a section with `_component_`")
    path = section["_component_"]
    component = _find_component(key, path)
    parameters = inspect.signature(component).parameters
    given = {str(argument) for argument in section if argument != "_component_"}
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for argument in given - parameters.keys():
            raise SetupError(
                f"config: {key}: {path} has no argument '{argument}'{_suggestion(argument, [*parameters])}"
            )
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and name not in given
        and name not in _COMPONENTS[key]
    ]
    if missing:
        raise SetupError(f"config: {key}: {path} needs {', '.join(missing)}")


def _find_component(key: str, path: str) -> Any:
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
