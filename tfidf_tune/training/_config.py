"""The config of a recipe: its keys, how files and overrides are read, and what is checked before any work begins."""

import logging
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

import torch
from omegaconf import MISSING, DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tfidf_tune._checks import first_problem, suggestion
from tfidf_tune._files import config_path
from tfidf_tune.training._components import DEFAULT_COLLATE, check_components, signature_of
from tfidf_tune.training._distributed import is_main_process, started_processes
from tfidf_tune.training._errors import SetupError, setup_errors

_logger = logging.getLogger(__name__)

_Int = Annotated[int, Field(strict=True)]
_Count = Annotated[_Int, Field(ge=1)]
_Positive = Annotated[float, Field(strict=True, gt=0)]
# fp16 is missing: its gradients would need scaling.
_FSDPDtype = Literal["bf16", "fp32"]


class MonitorConfig(BaseModel):
    """Keys of the section ``memorization_monitor``."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    probe_file: str
    """Targets and controls: the file that the data set of the run writes, or another."""
    every_n_steps: _Count
    """Optimizer steps between two measurements; the start and the end of the run are measured, too."""
    prefix_length: _Count = 50
    """Tokens of a passage that are the prompt."""
    max_new_tokens: _Count = 128
    """Most tokens that are generated and compared."""
    batch_size: _Count = 32
    """Passages in a forward pass."""
    stop_above: Annotated[float, Field(strict=True, ge=0)] | None = None
    """Threshold for the mean LMS of the targets, in tokens."""
    when_above: Literal["stop", "keep"] = "stop"
    """Above the threshold, ``stop`` ends the run after a checkpoint; ``keep`` continues, and the folder
    ``below_threshold`` keeps the model of the last measurement that was not above it."""


class FinetuneConfig(BaseModel):
    """Keys of both recipes, named as in torchtune where it has the same key.

    Components (``model``, ``loss``, ...) are sections with ``_component_`` and keyword arguments.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    output_dir: str
    """Folder of the run: checkpoints, metrics.jsonl, config.yaml."""
    model: Any
    checkpointer: Any
    tokenizer: Any
    dataset: Any
    """A section, or a list of sections: data sets that are mixed."""
    collate_fn: str = DEFAULT_COLLATE
    """For data sets that are not packed."""
    loss: Any
    """A tfidf_tune.loss component: the objective."""
    optimizer: Any
    lr_scheduler: Any = None
    """Called with the optimizer and num_training_steps. Null: a constant learning rate."""
    metric_logger: Any
    """One of torchtune's loggers; metrics.jsonl is always written."""
    seed: _Int | None = None
    shuffle: bool = True
    batch_size: _Count
    """Sequences of a mini-batch, which the loss sees at once."""
    gradient_accumulation_steps: _Count = 1
    epochs: _Count = 1
    max_steps: _Count | None = None
    """Optimizer steps after which the run ends, if the epochs have not ended it. Null: no limit."""
    clip_grad_norm: _Positive | None = 1.0
    """Null: no clipping."""
    save_at_percent: Annotated[list[Annotated[_Int, Field(ge=1, le=100)]], Field(min_length=1)] = [10, 25, 50, 75, 100]
    """Shares of the run, in percent of its steps, after which a checkpoint is written."""
    save_every_n_steps: _Count | None = None
    """Optimizer steps between two resume checkpoints. Null: only at milestones and when the run is stopped."""
    keep_last_n_checkpoints: Annotated[_Int, Field(ge=0)] = 2
    """Number of resume checkpoints that are kept; 0 writes none. Checkpoints of milestones are all kept."""
    resume_from_checkpoint: bool = False
    """Resume from the newest intact resume checkpoint of output_dir; without one, start from the beginning."""
    memorization_monitor: MonitorConfig | None = None
    """Measures memorization during training, see :class:`MonitorConfig`. Null: no measurement."""
    on_non_finite: Literal["stop", "skip"] = "stop"
    """What to do if loss or gradient is NaN or infinite: ``stop`` ends the run, ``skip`` leaves the step out, which
    on a GPU waits for each step's loss."""
    device: str = "cpu"
    """``auto``: a GPU if there is one, else the CPU."""
    dtype: Literal["fp32", "bf16", "auto"] = "fp32"
    """``auto``: bf16 on a GPU that computes in it, else fp32."""
    enable_activation_checkpointing: bool = False
    compile: bool = False
    fsdp_cpu_offload: bool = False
    """Keep shards, gradients and optimizer state in the host's memory."""
    fsdp_reshard_after_forward: bool = True
    """Gather each layer's parameters a second time for the backward pass, instead of keeping them."""
    fsdp_param_dtype: _FSDPDtype | None = None
    """Dtype in which sharded parameters are gathered and computed with. Null: the dtype of the weights."""
    fsdp_reduce_dtype: _FSDPDtype | None = None
    """Dtype in which gradients are summed over the processes. Null: the dtype of the gradients."""
    evaluate: bool = False
    """Run the evaluation that a run prints at its end, and the comparison if the other run is evaluated."""
    log_every_n_steps: _Count = 1
    log_peak_memory_stats: bool = False

    @model_validator(mode="after")
    def _check_resume_checkpoints(self) -> "FinetuneConfig":
        if self.save_every_n_steps is not None and self.keep_last_n_checkpoints == 0:
            raise ValueError("save_every_n_steps is set, but keep_last_n_checkpoints is 0: change one of them")
        return self


class LoRAFinetuneConfig(FinetuneConfig):
    """Keys of the LoRA recipe."""

    # Gradients in fp16 cannot be scaled back: fp16 is for frozen weights, with adapters in fp32.
    dtype: Literal["fp32", "bf16", "fp16", "auto"] = "fp32"  # type: ignore[assignment]
    merge_adapter: bool = False
    """Write checkpoints as complete models with the adapter merged, not as PEFT adapters."""


class _LoRAArguments(BaseModel):
    """Arguments that torchtune's builders share and do not check themselves."""

    lora_rank: _Count = 8
    lora_alpha: _Positive = 16
    lora_dropout: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.0


def load_config(name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """Read a config and its bases.

    The key ``base`` names another config, or a path relative to the file or to the working directory. A section with
    ``_component_``, or a list, replaces the section of the base; any other section is merged into it.

    Args:
        name (str): a file, or the name of a config of the package.
        overrides (Sequence[str]): ``key=value`` as on torchtune's command line. Default: none. Those that name another
            component are applied first: keys that the new component does not take are dropped, which is
            logged. A section with ``_component_`` replaces the whole section.

    Raises:
        SetupError: If a config does not exist, a file or an override cannot be read, a config is its own base, or a
            part of a list would change.
    """
    content = _load_with_base(name, ())
    changes = [_with_component(override, content) for override in overrides]
    # A stable order: first those that name a component, "key._component_=name" or "key={...}".
    for change in sorted(changes, key=lambda text: "._component_=" not in text and "={" not in text):
        content = _apply(change, content)
    return OmegaConf.create(content)


def _load_with_base(name: str, above: tuple[str, ...]) -> dict[str, Any]:
    path = config_path(name)
    if Path(path).resolve() in [Path(each).resolve() for each in above]:
        raise SetupError(f"config {path} builds on itself: {' -> '.join((*above, path))}")
    with setup_errors(f"config {path}"):
        content: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    if not isinstance(content, dict) or not isinstance(content.get("base", ""), str | None):
        raise SetupError(f"config {path}: it has to hold keys and values, and its base the name or path of a config")
    cfg = {str(key): value for key, value in content.items()}
    base_name = cfg.pop("base", None)
    if base_name is None:
        return cfg
    sibling = Path(path).parent / Path(base_name).expanduser()
    try:
        base = _load_with_base(str(sibling) if sibling.is_file() else base_name, (*above, path))
    except SetupError as error:
        raise SetupError(f"{error} (base of {path})") from error
    replaced = [key for key, section in cfg.items() if isinstance(section, dict) and "_component_" in section]
    return _merge({key: value for key, value in base.items() if key not in replaced}, cfg, f"config {path}")


def _merge(base: dict[str, Any], changes: dict[str, Any], source: str, section: str = "") -> dict[str, Any]:
    """Merge sections; unlike in OmegaConf's merge, ``???`` replaces a value, which is then missing."""
    merged = dict(base)
    for key, value in changes.items():
        below = base.get(key)
        if isinstance(value, dict) and isinstance(below, list) and "_component_" not in value:
            raise SetupError(f"{source}: {section}{key} is a list, which is only replaced as a whole: give a list")
        if isinstance(value, dict) and isinstance(below, dict):
            merged[key] = _merge(below, value, source, f"{section}{key}.")
        else:
            merged[key] = value
    return merged


def _with_component(override: str, content: dict[str, Any]) -> str:
    """Write ``loss=X`` as ``loss._component_=X`` where the config has a component."""
    key, equals, value = override.partition("=")
    if override.startswith("~"):
        return override
    if not key or not equals:
        raise SetupError(f"config: overrides must be in the form of key=value, got {override}")
    section = _look_up(content, key)
    is_component = (isinstance(section, dict) and "_component_" in section) or key == "loss.weighting"
    return f"{key}._component_={value}" if is_component and not value.startswith(("{", "[")) else override


def _apply(override: str, content: dict[str, Any]) -> dict[str, Any]:
    """Apply ``key=value`` or ``~key``; ``=`` may occur within the value."""
    source = f"config: {override}"
    key, _, value = override.partition("=")
    if override.startswith("~"):
        section, _, name = key.removeprefix("~").rpartition(".")
        below = _look_up(content, section) if section else content
        if not isinstance(below, dict) or name not in below:
            raise SetupError(f"{source}: the config has no such key")
        del below[name]
        return content
    with setup_errors(source, {"override": override}):
        change: Any = OmegaConf.from_dotlist([f"{key}={'null' if value == 'None' else value}"])
        change = OmegaConf.to_container(change, resolve=False)
        section = key.removesuffix("._component_")
        below, new = _look_up(content, section), _look_up(change, section)
        if section != key:
            _drop_keys_of_another(below, section, value)
        elif isinstance(below, dict) and isinstance(new, dict) and "_component_" in new:
            below.clear()
        return _merge(content, change, source)


def _drop_keys_of_another(below: Any, section: str, component: str) -> None:
    """Drop the keys of a section that its new component does not take, in place; log which."""
    if not isinstance(below, dict) or component in ("null", "None", below.get("_component_")):
        return
    try:
        parameters = signature_of(section, component).parameters
    except SetupError:  # reported when the config is checked
        return
    dropped = [key for key in below if key not in parameters and key != "_component_"]
    if not dropped or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    if is_main_process():
        _logger.warning(f"config: {section}: {component} takes no {', '.join(dropped)}: left out")
    for key in dropped:
        del below[key]


def _look_up(content: Any, key: str) -> Any:
    """Return the value at a dotted key, None if there is none."""
    for part in key.split("."):
        content = content.get(part) if isinstance(content, dict) else None
    return content


Schema = TypeVar("Schema", bound=FinetuneConfig)


def check_config(cfg: DictConfig, schema: type[Schema]) -> Schema:
    """Check a recipe's config, its keys, values and components, and fill in defaults.

    What is returned is in fact a DictConfig with the keys of the schema, as torchtune needs it.

    Raises:
        SetupError: If a key is unknown, missing or of the wrong type, a value is out of range, or a component does not
            exist or does not take the arguments given.
    """
    fields = schema.model_fields.items()
    defaults = {name: MISSING if field.is_required() else field.get_default() for name, field in fields}
    with setup_errors("config"):
        content: Any = {**defaults, **cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=False))}
        if missing := sorted(_missing_keys(content)):  # before anything refers to a missing value
            raise SetupError(f"config: missing {', '.join(missing)}")
        filled = OmegaConf.create(content)
        _resolve_defaults(filled)
        content = OmegaConf.to_container(filled, resolve=True)
        checked = OmegaConf.create(_validate(schema, content))
        check_components(checked)
        _validate(_LoRAArguments, content["model"], "model: ")
    return cast(Schema, checked)


def _validate(schema: type[BaseModel], content: dict[str, Any], where: str = "") -> dict[str, Any]:
    try:
        return schema.model_validate(content).model_dump()
    except ValidationError as error:
        name, problem = first_problem(error)
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            section, _, key = name.rpartition(".")
            of_sections = [f"{at}.{key}" for at, keys in content.items() if isinstance(keys, dict) and name in keys]
            hint = suggestion(key, MonitorConfig.model_fields if section else schema.model_fields)
            message = f"no key {name!r}{f'; did you mean {of_sections[0]!r}?' if of_sections else hint}"
        elif problem["type"] == "missing":
            message = f"missing {name}"
        elif name:
            message = f"{where}{name} is {problem['input']!r}: {message}"
        raise SetupError(f"config: {message}") from error


def _resolve_defaults(cfg: DictConfig) -> None:
    """Set the values that other keys may refer to: the folder's full path, a random seed, the machine's device."""
    if cfg.output_dir is not None:
        cfg.output_dir = str(Path(str(cfg.output_dir)).expanduser())
    if cfg.seed is None:
        cfg.seed = _choose_seed(cfg)
    if cfg.device == "auto":
        cfg.device = "cuda" if torch.cuda.is_available() else "cpu"
    if cfg.dtype == "auto":
        on_gpu = str(cfg.device).startswith("cuda") and torch.cuda.is_available()
        cfg.dtype = "bf16" if on_gpu and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    # `lr_scheduler=null` on the command line arrives as a section whose component is null.
    if OmegaConf.is_dict(cfg.lr_scheduler) and cfg.lr_scheduler.get("_component_") is None:
        cfg.lr_scheduler = None


def _choose_seed(cfg: DictConfig) -> int:
    if started_processes() > 1:
        raise SetupError("config: seed is null, but several processes need the same one: set seed to a number")
    earlier = Path(str(cfg.output_dir)) / "config.yaml"
    if cfg.resume_from_checkpoint and earlier.is_file():
        with setup_errors(f"config: seed is null: set it to that of the run to resume, which {earlier} does not say"):
            return int(OmegaConf.select(OmegaConf.load(earlier), "seed"))
    return random.SystemRandom().randrange(2**31)


def _missing_keys(value: Any, name: str = "") -> Iterator[str]:
    """Yield the names of values ``???``; OmegaConf.missing_keys() fails where another value refers to one."""
    if value == MISSING:
        yield name
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from _missing_keys(inner, f"{name}.{key}" if name else str(key))
    for index, inner in enumerate(value) if isinstance(value, list) else ():
        yield from _missing_keys(inner, f"{name}[{index}]")
