"""The config of a recipe: how overrides change it, and what is checked before any work begins."""

import json
import logging
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from omegaconf import MISSING, DictConfig, OmegaConf
from yaml import YAMLError

from tfidf_tune._config import (
    OBJECTIVES,
    WEIGHTINGS,
    WORDS,
    FinetuneConfig,
    LoRAArguments,
    merge_sections,
    read_config,
    require_word,
    validated,
)
from tfidf_tune.training._distributed import is_main_process, started_processes
from tfidf_tune.training._errors import SetupError, setup_errors
from tfidf_tune.training.components import check_components, signature_of

_logger = logging.getLogger(__name__)
_NULL = ("", "None", "~", "null", "Null", "NULL")  # values of an override


def load_config(name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """Read a config and its bases.

    The key ``base`` names another config, or a path relative to the file or to the working
    directory. A section with ``_component_``, or a list, replaces the section of the base; any
    other section is merged into it.

    Args:
        name (str): a file, or the name of a config of the package.
        overrides (Sequence[str]): ``key=value`` as on torchtune's command line. Default: none.
            Those that name another component are applied first: keys that the new component does
            not take are dropped, which is logged, as a warning unless the component was chosen by a
            word such as ``loss=ce``. A section with ``_component_`` replaces the whole section.

    Raises:
        SetupError: If a config does not exist, a file or an override cannot be read, a config is
            its own base, or a part of a list would change.
    """
    content = read_config(name)
    changes = []
    chosen_by_word: set[str] = set()
    for override in overrides:
        named = _with_components(override, content)
        changes += named
        key, _, value = override.partition("=")
        if value in WORDS.get(key, ()):
            chosen_by_word.update(named)
    # A stable order: first those that name a component, "key._component_=name" or "key={...}".
    for change in sorted(
        changes, key=lambda text: "._component_=" not in text and "={" not in text
    ):
        level = logging.INFO if change in chosen_by_word else logging.WARNING
        content = _apply(change, content, level=level)
    return OmegaConf.create(content)


def _with_components(override: str, content: dict[str, Any]) -> list[str]:
    """Write ``loss=X`` as ``loss._component_=X`` where the config has a component,
    ``loss=repetition`` as its two.
    """
    key, equals, value = override.partition("=")
    if override.startswith("~"):
        return [override]
    if not key or not equals:
        raise SetupError(f"config: overrides must be in the form of key=value, got {override}")
    require_word(key, value)
    if key == "loss" and value in OBJECTIVES:
        return [f"{part}._component_={component}" for part, component in OBJECTIVES[value].items()]
    section = _look_up(content, key)
    is_component = key == "loss.weighting" or (
        isinstance(section, dict) and "_component_" in section
    )
    if not is_component or value.startswith(("{", "[")):
        return [override]
    if key == "loss.weighting":
        value = WEIGHTINGS.get(value, value)
    return [f"{key}._component_={value}"]


def _apply(override: str, content: dict[str, Any], *, level: int) -> dict[str, Any]:
    """Apply ``key=value`` or ``~key``; ``=`` may occur within the value. Dropped keys are logged
    with this level.
    """
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
        parsed = OmegaConf.create()
        OmegaConf.update(parsed, key, _value_of(value))
        change: Any = OmegaConf.to_container(parsed, resolve=False)
        section = key.removesuffix("._component_")
        below = _look_up(content, section)
        new = _look_up(change, section)
        if section != key:
            _drop_keys_of_another(below, section, value, level=level)
        elif isinstance(below, dict) and isinstance(new, dict) and "_component_" in new:
            below.clear()
        return merge_sections(content, change, source)


def _value_of(text: str) -> Any:
    """Read the value of an override: a collection or a quoted text in YAML, a number, true, false,
    null, or else text.

    YAML would end the text "texts #2.jsonl" at the number sign, and take "part 1: texts.jsonl" for
    a section.
    """
    text = text.strip()
    if text in _NULL:
        return None
    is_enclosed = text[0] + text[-1] in ("{}", "[]", '""', "''") and len(text) > 1
    try:
        section: Any = OmegaConf.to_container(
            OmegaConf.from_dotlist([f"value={text}"]), resolve=False
        )
    except YAMLError as error:
        if is_enclosed:
            problem = getattr(error, "problem", error)  # without the place in the text
            raise ValueError(
                f"{text} is no value in YAML ({problem}): put quotes around a text, '\"...\"'"
            ) from error
        return text
    parsed = section["value"]
    if is_enclosed:
        return parsed
    is_word = isinstance(parsed, bool | int | float) and "#" not in text
    return parsed if is_word else text


def _drop_keys_of_another(below: Any, section: str, component: str, *, level: int) -> None:
    """Drop the keys of a section that its new component does not take, in place; log which."""
    if not isinstance(below, dict) or component in ("null", "None", below.get("_component_")):
        return
    try:
        parameters = signature_of(section, component).parameters
    except SetupError:  # reported when the config is checked
        return
    dropped = [key for key in below if key not in parameters and key != "_component_"]
    if not dropped or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    ):
        return
    if is_main_process():
        _logger.log(
            level, f"config: {section}: {component} takes no {', '.join(dropped)}: left out"
        )
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
    Values that refer to environment variables, ``${oc.env:KEY}``, are resolved when they are read:
    files and logs get them as they are written, because they may be secrets.

    Raises:
        SetupError: If a key is unknown, missing or of the wrong type, a value is out of range, or a
            component does not exist or does not take the arguments given.
    """
    content: Any = {}
    for name, field in schema.model_fields.items():
        content[name] = MISSING if field.is_required() else field.get_default()
    with setup_errors("config"):
        content |= cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=False))
        missing = sorted(_missing_keys(content))
        if missing:  # before anything refers to a missing value
            raise SetupError(f"config: missing {', '.join(missing)}")
        filled = OmegaConf.create(content)
        _resolve_defaults(filled)
        written = OmegaConf.to_container(filled, resolve=False)
        secrets = _secrets(written)
        content = OmegaConf.to_container(filled, resolve=True)
        try:
            values = validated(schema, content)
        except SetupError as error:
            message = str(error)
            for secret in secrets:
                message = message.replace(repr(secret), "the value of an environment variable")
            raise SetupError(message) from None

        def without_secret(value: Any, reference: str) -> Any:
            # A number is no secret, and what reads config.yaml needs it.
            if isinstance(value, int | float):
                return value
            return reference if any(secret in str(value) for secret in secrets) else value

        checked = OmegaConf.create(change_references(values, written, without_secret))
        check_components(checked)
        validated(LoRAArguments, content["model"], "model: ")
    return cast(Schema, checked)


def _secrets(written: Any) -> list[str]:
    """Return the values of the environment variables that a config refers
    to by ``${oc.env:KEY}``.
    """
    variables = re.findall(r"oc\.env:\s*(\w+)", json.dumps(written))
    return [os.environ[name] for name in variables if os.environ.get(name)]


def change_references(values: Any, written: Any, change: Callable[[Any, str], Any]) -> Any:
    """Change the values of a resolved config that were written as references, such as
    ``${oc.env:KEY}``.

    ``change`` takes a value and its reference. Of ``{a: 1, b: "${a}"}`` it is called with 1 and
    ``${a}``.
    """
    if isinstance(values, dict) and isinstance(written, dict):
        return {
            key: change_references(value, written.get(key), change) for key, value in values.items()
        }
    if isinstance(values, list) and isinstance(written, list):
        return [change_references(*pair, change) for pair in zip(values, written, strict=True)]
    if isinstance(written, str) and "${" in written:
        return change(values, written)
    return values


def loggable(cfg: DictConfig) -> DictConfig:
    """Return a checked config for loggers, in which references to environment
    variables are text.
    """
    return cast(
        DictConfig, OmegaConf.create(OmegaConf.to_yaml(cfg, resolve=False).replace("${", "\\${"))
    )


def _resolve_defaults(cfg: DictConfig) -> None:
    """Set the values that other keys may refer to: the folder's full path, a random seed, the
    machine's device.
    """
    if str(cfg.output_dir).startswith("~"):
        cfg.output_dir = str(Path(str(cfg.output_dir)).expanduser())
    if cfg.seed is None:
        cfg.seed = _choose_seed(cfg)
    if cfg.device == "auto":
        cfg.device = "cuda" if torch.cuda.is_available() else "cpu"
    if cfg.dtype == "auto":
        on_gpu = str(cfg.device).startswith("cuda") and torch.cuda.is_available()
        has_bf16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
        cfg.dtype = "bf16" if has_bf16 else "fp32"
    # `lr_scheduler=null` on the command line arrives as a section whose component is null.
    if OmegaConf.is_dict(cfg.lr_scheduler) and cfg.lr_scheduler.get("_component_") is None:
        cfg.lr_scheduler = None


def _choose_seed(cfg: DictConfig) -> int:
    if started_processes() > 1:
        raise SetupError(
            "config: seed is null, but several processes need the same one: set seed to a number"
        )
    earlier = Path(str(cfg.output_dir)) / "config.yaml"
    if cfg.resume_from_checkpoint and earlier.is_file():
        with setup_errors(
            f"config: seed is null: set it to that of the run to resume, which {earlier} does not "
            "say"
        ):
            return int(OmegaConf.select(OmegaConf.load(earlier), "seed"))
    return random.SystemRandom().randrange(2**31)


def _missing_keys(value: Any, name: str = "") -> Iterator[str]:
    """Yield the names of values ``???``; OmegaConf.missing_keys() fails where another value refers
    to one.
    """
    if value == MISSING:
        yield name
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _missing_keys(inner, f"{name}.{key}" if name else str(key))
    if isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _missing_keys(inner, f"{name}[{index}]")
