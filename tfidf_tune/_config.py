"""The keys of a recipe's config, and how its files are read. Imports neither torch nor another slow
library.
"""

import ast
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from yaml import YAMLError

from tfidf_tune._checks import SetupError, closest, first_problem, most_similar, suggestion
from tfidf_tune._files import config_path

DEFAULT_COLLATE = "torchtune.data.padded_collate_sft"

WEIGHTINGS = {
    "repetition": "tfidf_tune.weighting.RepetitionWeighting",
    "goldfish": "tfidf_tune.weighting.GoldfishWeighting",
    "tfidf": "tfidf_tune.weighting.TFIDFWeighting",
    "mile": "tfidf_tune.weighting.MiLeWeighting",
    "focal": "tfidf_tune.weighting.FocalWeighting",
}
"""Words that stand for a weighting, in ``loss`` and in Axolotl's ``token_weighting``."""
OBJECTIVES: dict[str, dict[str, str]] = {
    "ce": {"loss": "tfidf_tune.loss.CrossEntropyLoss"},
    **{
        word: {"loss": "tfidf_tune.loss.WeightedCrossEntropyLoss", "loss.weighting": weighting}
        for word, weighting in WEIGHTINGS.items()
    },
    "tfidf": {"loss": "tfidf_tune.loss.TFIDFCrossEntropyLoss"},
}
"""Words that stand for an objective, and their components."""
WORDS = {"loss": list(OBJECTIVES), "loss.weighting": list(WEIGHTINGS)}
"""Keys whose values may be words."""
_NAMES_ELSEWHERE = {
    "learning_rate": "optimizer.lr",
    "model_name": "checkpointer.checkpoint_dir",
    "model_name_or_path": "checkpointer.checkpoint_dir",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "batch_size",
}
"""Names of other trainers, and our keys."""

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
    """Optimizer steps between two measurements; the start and the end of the run
    are measured, too.
    """
    prefix_length: _Count = 50
    """Tokens of a passage that are the prompt."""
    max_new_tokens: _Count = 128
    """Most tokens that are generated and compared."""
    batch_size: _Count = 32
    """Passages in a forward pass."""
    stop_above: Annotated[float, Field(strict=True, ge=0)] | None = None
    """Threshold for the mean LMS of the targets, in tokens."""
    when_above: Literal["stop", "keep"] = "stop"
    """Above the threshold, ``stop`` ends the run after a checkpoint; ``keep`` continues, and the
    folder ``below_threshold`` keeps the model of the last measurement that was not above it."""
    bos: Literal["auto"] | bool = "auto"
    """Whether BOS is before each prompt. ``auto``: if the data set of the run writes it, or its
    tokenizer adds it, or else if it lowers the NLL of the controls."""


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
    save_at_percent: Annotated[list[Annotated[_Int, Field(ge=1, le=100)]], Field(min_length=1)] = [
        10,
        25,
        50,
        75,
        100,
    ]
    """Shares of the run, in percent of its steps, after which a checkpoint is written."""
    save_every_n_steps: _Count | None = None
    """Optimizer steps between two resume checkpoints. Null: only at milestones and when the run is
    stopped.
    """
    keep_last_n_checkpoints: Annotated[_Int, Field(ge=0)] = 2
    """Number of resume checkpoints that are kept; 0 writes none. Checkpoints of milestones are all
    kept.
    """
    resume_from_checkpoint: bool = False
    """Resume from the newest intact resume checkpoint of output_dir; without one, start from the
    beginning.
    """
    memorization_monitor: MonitorConfig | None = None
    """Measures memorization during training, see :class:`MonitorConfig`. Null: no measurement."""
    on_non_finite: Literal["stop", "skip"] = "stop"
    """What to do if loss or gradient is NaN or infinite: ``stop`` ends the run, ``skip`` leaves the
    step out, which on a GPU waits for each step's loss."""
    device: str = "cpu"
    """``auto``: a GPU if there is one, else the CPU."""
    dtype: Literal["fp32", "bf16", "auto"] = "fp32"
    """``auto``: bf16 on a GPU that computes in it, else fp32."""
    enable_activation_checkpointing: bool = False
    compile: bool = False
    fsdp_cpu_offload: bool = False
    """Keep shards, gradients and optimizer state in the host's memory."""
    fsdp_reshard_after_forward: bool = True
    """Gather each layer's parameters a second time for the backward pass, instead
    of keeping them.
    """
    fsdp_param_dtype: _FSDPDtype | None = None
    """Dtype in which sharded parameters are gathered and computed with. Null: the dtype of the
    weights.
    """
    fsdp_reduce_dtype: _FSDPDtype | None = None
    """Dtype in which gradients are summed over the processes. Null: the dtype of the gradients."""
    evaluate: bool = False
    """Run the evaluation that a run prints at its end, and the comparison if the other run is
    evaluated.
    """
    log_every_n_steps: _Count = 1
    log_peak_memory_stats: bool = False

    @model_validator(mode="after")
    def _check_resume_checkpoints(self) -> "FinetuneConfig":
        if self.save_every_n_steps is not None and self.keep_last_n_checkpoints == 0:
            raise ValueError(
                "save_every_n_steps is set, but keep_last_n_checkpoints is 0: change one of them"
            )
        return self


class LoRAFinetuneConfig(FinetuneConfig):
    """Keys of the LoRA recipe."""

    # Gradients in fp16 cannot be scaled back: fp16 is for frozen weights, with adapters in fp32.
    dtype: Literal["fp32", "bf16", "fp16", "auto"] = "fp32"  # type: ignore[assignment]
    merge_adapter: bool = False
    """Write checkpoints as complete models with the adapter merged, not as PEFT adapters."""


class LoRAArguments(BaseModel):
    """Arguments that torchtune's builders share and do not check themselves."""

    lora_rank: _Count = 8
    lora_alpha: _Positive = 16
    lora_dropout: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.0


def check_keys(name: str, overrides: Sequence[str], schema: type[FinetuneConfig]) -> None:
    """Raise a :class:`SetupError` if a config or its overrides, ``key=value`` or ``~key``, have an
    unknown key.

    Keys inside of sections are arguments of components, whose import takes seconds: those of this
    package are known from its source, all others are checked later.
    """
    content = read_config(name)
    given: dict[str, list[str]] = {}  # arguments of components
    for key, section in content.items():
        if isinstance(section, dict):
            given[key] = [argument for argument in section if argument != "_component_"]
    for override in overrides:
        key, equals, value = override.partition("=")
        if override.startswith("~"):
            content.pop(override[1:], None)
        elif equals:
            require_word(key, value)
            section, _, argument = key.partition(".")
            content.setdefault(re.split(r"[.\[]", key)[0], None)
            if argument == "_component_" or (not argument and key in given):
                # Arguments that the new component does not take are dropped.
                component = (
                    OBJECTIVES[value]["loss"] if key == "loss" and value in OBJECTIVES else value
                )
                content[section] = {"_component_": component}
                given[section] = []
            elif argument:
                given.setdefault(section, []).append(argument.partition(".")[0])
        elif not override.startswith("-"):
            raise SetupError(f"config: overrides must be in the form of key=value, got {override}")
    for key in sorted(content.keys() - schema.model_fields.keys()):
        raise SetupError(f"config: {_no_key(key, content, schema)}")
    for key, arguments in given.items():
        section = content.get(key)
        if isinstance(section, dict) and "_component_" in section:
            _check_arguments(key, str(section["_component_"]), arguments)


def _check_arguments(key: str, component: str, arguments: Sequence[str]) -> None:
    """Refuse a component of this package that does not exist, or arguments that it
    does not take.
    """
    room, _, name = component.rpartition(".")
    folder = Path(__file__).parent / room.removeprefix("tfidf_tune.")
    if not room.startswith("tfidf_tune.") or not (folder / "__init__.py").is_file():
        return
    exported = ast.literal_eval(
        _assigned((folder / "__init__.py").read_text(encoding="utf-8"), "__all__")
    )
    if name not in exported:
        raise SetupError(f"config: {key}: {room} has no {name!r}{suggestion(name, exported)}")
    parameters = _parameters(folder, name)
    for argument in arguments:
        if parameters and argument not in parameters:
            hint = closest(argument, parameters).replace("'", f"'{key}.", 1)
            raise SetupError(
                "config: no key "
                f"'{key}.{argument}'{hint or ': possible are ' + ', '.join(parameters)}"
            )


def _assigned(source: str, name: str) -> ast.expr:
    """Return what a module assigns to a name; an empty list if it does not."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return node.value
    return ast.List([])


def _parameters(folder: Path, name: str) -> list[str]:
    """Return the arguments of a function or class of a room, without importing it; [] if any may be
    given.
    """
    for file in folder.glob("*.py"):
        source = file.read_text(encoding="utf-8")
        if not re.search(rf"^(def|class) {name}\b", source, re.MULTILINE):
            continue
        for node in ast.parse(source).body:
            if getattr(node, "name", "") != name:
                continue
            functions: list[ast.stmt] = node.body if isinstance(node, ast.ClassDef) else [node]
            for function in functions:
                if isinstance(function, ast.FunctionDef) and function.name in (name, "__init__"):
                    arguments = function.args
                    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                    return (
                        []
                        if arguments.kwarg or arguments.vararg
                        else [each.arg for each in every if each.arg != "self"]
                    )
    return []


def _no_key(key: str, content: dict[str, Any], schema: type[BaseModel]) -> str:
    """Say that there is no such key, and which similar key there is, also within sections."""
    if "." in key:
        return f"no key {key!r}{suggestion(key.rpartition('.')[2], schema.model_fields)}"
    if key in _NAMES_ELSEWHERE:
        return f"no key {key!r}; did you mean '{_NAMES_ELSEWHERE[key]}'?"
    # The full keys of all names; of the same name, the shortest.
    full_keys: dict[str, str] = {}
    for section_key, section in content.items():
        if isinstance(section, dict):
            for name in [*section, *_arguments_of(section)]:
                full_keys.setdefault(name, f"{section_key}.{name}")
    full_keys.pop("_component_", None)
    full_keys |= {name: name for name in schema.model_fields}
    similar = most_similar(key, full_keys)
    if similar:
        return f"no key {key!r}; did you mean {full_keys[similar]!r}?"
    return f"no key {key!r}{suggestion(key, schema.model_fields)}"


def _arguments_of(section: dict[str, Any]) -> list[str]:
    """Return the arguments of a component of this package; [] for another one."""
    component = str(section.get("_component_"))
    room, _, name = component.rpartition(".")
    if not room.startswith("tfidf_tune."):
        return []
    return _parameters(Path(__file__).parent / room.removeprefix("tfidf_tune."), name)


def require_word(key: str, value: str) -> None:
    """Raise a :class:`SetupError` if an override names an objective or a weighting by a word that
    stands for none; components have a dot.
    """
    words = WORDS.get(key)
    if words is not None and value not in words and re.fullmatch(r"[\w-]+", value):
        raise SetupError(f"config: {_no_word(key, value, words)}")


def _no_word(key: str, value: str, words: Sequence[str]) -> str:
    possible = f"; possible are {', '.join(words)}, or a section with _component_"
    return f"{key} is {value!r}{closest(value, words) or possible}"


def read_config(name: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """Read a config and its bases, ``above`` the configs that it is a base of."""
    path = config_path(name)
    if Path(path).resolve() in [Path(each).resolve() for each in above]:
        raise SetupError(f"config {path} builds on itself: {' -> '.join((*above, path))}")
    try:
        content: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (ValueError, OSError, RecursionError, YAMLError, OmegaConfBaseException) as error:
        raise SetupError(f"config {path}: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("base", ""), str | None):
        raise SetupError(
            f"config {path}: it has to hold keys and values, and its base the name or path of a "
            "config"
        )
    cfg = {str(key): value for key, value in content.items()}
    if isinstance(cfg.get("loss"), str):
        cfg["loss"] = _objective(cfg["loss"])
    base_name = cfg.pop("base", None)
    if base_name is None:
        return cfg
    sibling = Path(path).parent / Path(base_name).expanduser()
    try:
        base = read_config(str(sibling) if sibling.is_file() else base_name, (*above, path))
    except SetupError as error:
        raise SetupError(f"{error} (base of {path})") from error
    replaced = [
        key
        for key, section in cfg.items()
        if isinstance(section, dict) and "_component_" in section
    ]
    return merge_sections(
        {key: value for key, value in base.items() if key not in replaced}, cfg, f"config {path}"
    )


def _objective(word: str) -> dict[str, Any]:
    """Return the section that a word stands for."""
    if word not in OBJECTIVES:
        raise SetupError(f"config: {_no_word('loss', word, WORDS['loss'])}")
    components = OBJECTIVES[word]
    section: dict[str, Any] = {"_component_": components["loss"]}
    if "loss.weighting" in components:
        section["weighting"] = {"_component_": components["loss.weighting"]}
    return section


def merge_sections(
    base: dict[str, Any], changes: dict[str, Any], source: str, section: str = ""
) -> dict[str, Any]:
    """Merge sections; unlike in OmegaConf's merge, ``???`` replaces a value, which
    is then missing.
    """
    merged = dict(base)
    for key, value in changes.items():
        below = base.get(key)
        if isinstance(value, dict) and isinstance(below, list) and "_component_" not in value:
            raise SetupError(
                f"{source}: {section}{key} is a list, which is only replaced as a whole: give a "
                "list"
            )
        if isinstance(value, dict) and isinstance(below, dict):
            merged[key] = merge_sections(below, value, source, f"{section}{key}.")
        else:
            merged[key] = value
    return merged


def validated(schema: type[BaseModel], content: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Return the keys with defaults filled in; ``where`` is the beginning of their names in
    messages.
    """
    try:
        return schema.model_validate(content).model_dump()
    except ValidationError as error:
        name, problem = first_problem(error)
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            # The only section whose keys are ours is the monitor's.
            message = _no_key(name, content, MonitorConfig if "." in name else schema)
        elif problem["type"] == "missing":
            message = f"missing {name}"
        elif name:
            message = f"{where}{name} is {problem['input']!r}: {message}"
        raise SetupError(f"config: {message}") from error
