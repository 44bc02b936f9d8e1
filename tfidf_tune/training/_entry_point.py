"""The entry point of a recipe: its config, with bases and overrides; errors in one message; exit codes."""

import argparse
import inspect
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torchtune.config._utils import _merge_yaml_and_cli_args

from tfidf_tune._files import config_path
from tfidf_tune._signals import ENDING, Interrupted, ended_by
from tfidf_tune.training._components import find_component
from tfidf_tune.training._distributed import claim_error_report, is_lost_process, is_main_process
from tfidf_tune.training._errors import (
    LostProcessError,
    SetupError,
    TrainingError,
    first_line,
    is_out_of_memory,
    setup_errors,
)

logger = logging.getLogger(__name__)

_SECONDS_FOR_MAIN_PROCESS = 5.0
_LOST_BEFORE_TRAINING = "another process of the run was lost before training began: see its message"


def load_config(name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """Read a config and its bases.

    The key ``base`` names another config, or a path relative to the file or to the working directory. A section with
    its own ``_component_``, or a list, replaces that of the base; any other section is merged into it.

    Args:
        name (str): a file, or the name of a config of the package.
        overrides (Sequence[str]): ``key=value`` as on torchtune's command line. Default: none. Those that name another
            component are applied first: keys of the old one that the new one does not take are dropped, which is
            logged. A section with ``_component_`` replaces the whole section.

    Returns:
        DictConfig: the config, unchecked, references unresolved.

    Raises:
        SetupError: If a config does not exist, a file or an override cannot be read, a config is its own base, or a
            part of a list would change.
    """
    content = _load_with_base(name, ())
    changes = [_Override.read(override, content) for override in overrides]
    for change in sorted(changes, key=lambda change: not change.names_component):
        content = change.apply(content)
    return OmegaConf.create(content)


def _load_with_base(name: str, above: tuple[str, ...]) -> dict[str, Any]:
    path = config_path(name)
    if Path(path).resolve() in [Path(each).resolve() for each in above]:
        raise SetupError(f"config {path} builds on itself: {' -> '.join((*above, path))}")
    with setup_errors(f"config {path}"):
        content: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    if not isinstance(content, dict):
        raise SetupError(f"config {path} holds a list, not keys and values")
    cfg = {str(key): value for key, value in content.items()}
    base_name = cfg.pop("base", None)
    if base_name is None:
        return cfg
    if not isinstance(base_name, str):
        raise SetupError(f"config {path}: base is {base_name!r}, it has to be the name or path of a config")
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


class _Override(NamedTuple):
    """``key=value`` or ``~key`` of the command line; ``=`` may occur within the value."""

    text: str
    key: str
    value: str | None
    names_component: bool

    @classmethod
    def read(cls, text: str, content: dict[str, Any]) -> "_Override":
        key, equals, value = text.partition("=")
        if text.startswith("~"):
            return cls(text, key.removeprefix("~"), None, names_component=False)
        if not key or not equals:
            raise SetupError(f"config: overrides must be in the form of key=value, got {text}")
        below = _look_up(content, key)
        is_component = (isinstance(below, dict) and "_component_" in below) or key == "loss.weighting"
        if is_component and not value.startswith(("{", "[")):
            return cls(text, f"{key}._component_", value, names_component=True)
        return cls(text, key, value, names_component=key.endswith("._component_") or value.startswith("{"))

    def apply(self, content: dict[str, Any]) -> dict[str, Any]:
        source = f"config: {self.text}"
        with setup_errors(source, {"override": self.text}):
            if self.value is None:
                removed = _merge_yaml_and_cli_args(argparse.Namespace(**content), [self.text])
                return cast(dict[str, Any], OmegaConf.to_container(removed))
            value = "null" if self.value == "None" else self.value
            change: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"{self.key}={value}"]), resolve=False)
            section = self.key.removesuffix("._component_")
            below, new = _look_up(content, section), _look_up(change, section)
            if section != self.key:
                _drop_keys_of_another(below, section, value, source)
            elif isinstance(below, dict) and isinstance(new, dict) and "_component_" in new:
                below.clear()
            return _merge(content, change, source)


def _drop_keys_of_another(below: Any, section: str, component: str, source: str) -> None:
    """Drop the keys of a section that its new component does not take, in place; log which."""
    if not isinstance(below, dict) or component in ("null", below.get("_component_")):
        return
    try:
        parameters = inspect.signature(find_component(section, component)).parameters
    except (SetupError, ValueError):  # reported when the config is checked
        return
    dropped = [key for key in below if key not in parameters and key != "_component_"]
    if not dropped or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    if is_main_process():
        logger.warning(f"{source}: it takes no {', '.join(dropped)} of the config's {section}: left out")
    for key in dropped:
        del below[key]


def _look_up(content: Any, key: str) -> Any:
    """Return the value at a dotted key, None if there is none."""
    for part in key.split("."):
        content = content.get(part) if isinstance(content, dict) else None
    return content


def _read_arguments() -> DictConfig:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--config", required=True, help="a file, or the name of a config that comes with the package")
    options, overrides = parser.parse_known_args()
    flags = [argument for argument in overrides if argument.startswith("--")]
    if flags:
        raise SetupError(f"config: unknown options {', '.join(flags)}: write keys as key=value")
    return load_config(options.config, overrides)


def recipe(main: Callable[[DictConfig], None]) -> Callable[[], None]:
    """Make a function the entry point of a recipe: ``--config FILE_OR_NAME key=value ...``.

    User-facing errors are reported in one message without a traceback, with exit code 1. SIGTERM ends the run with exit
    code 143, Ctrl-C with 130, SIGHUP with 129. An error of several processes is reported once.

    Args:
        main (Callable[[DictConfig], None]): the recipe.

    Returns:
        Callable[[], None]: reads ``sys.argv``; the recipe itself is its ``__wrapped__``.
    """

    @wraps(main)
    def entry_point() -> None:
        with ended_by(ENDING, _report_signal):
            _run(main)

    return entry_point


def _run(main: Callable[[DictConfig], None]) -> None:
    try:
        main(_read_arguments())
    except LostProcessError as error:
        _exit_after_lost_process(str(error))
    except (SetupError, TrainingError, OSError) as error:
        if isinstance(error.__cause__, RuntimeError) and is_lost_process(error.__cause__):
            _exit_after_lost_process(_LOST_BEFORE_TRAINING)
        _exit_with_error(str(error))
    except MemoryError as error:
        _exit_with_error(f"out of host memory{f' ({error})' if str(error) else ''}: use less text or a smaller model")
    except RuntimeError as error:
        if is_out_of_memory(error):
            _exit_with_error(
                f"out of memory before training began ({first_line(error)}): try model.quantize_base=True with "
                "LoRA, dtype=bf16, fsdp_cpu_offload=True or more processes"
            )
        if not is_lost_process(error):
            raise
        _exit_after_lost_process(_LOST_BEFORE_TRAINING)
    except Interrupted as request:
        if is_main_process():
            print(request, file=sys.stderr)
        sys.exit(request.exit_code)
    except KeyboardInterrupt:
        print("interrupted; the checkpoints written so far are complete", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    if dist.is_initialized():
        dist.destroy_process_group()


def _report_signal(name: str) -> None:
    """Report a signal outside of training."""
    if name != "SIGINT" and is_main_process():  # Ctrl-C has a message of its own
        print(f"ended by {name}", file=sys.stderr)


def _exit_with_error(message: str) -> NoReturn:
    """Exit with a message, unless another process has reported the same, usually rank 0."""
    if is_main_process():
        _ignore_torchrun()
    else:
        time.sleep(_SECONDS_FOR_MAIN_PROCESS)
    claim_error_report()  # so that no process reports that this one is lost
    if not claim_error_report(message):
        sys.exit(1)
    sys.exit(f"error: {message}" if is_main_process() else f"error: process {os.environ['RANK']}: {message}")


def _exit_after_lost_process(message: str) -> NoReturn:
    """Exit because another process has ended: all remaining processes notice, one reports it."""
    _ignore_torchrun()
    if claim_error_report():
        print(f"\nerror: {message}", file=sys.stderr)  # that process may have left a progress bar
    sys.exit(1)


def _ignore_torchrun() -> None:
    """Ignore the SIGTERM that torchrun sends to all processes when one fails, until the message is written."""
    if dist.is_torchelastic_launched():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
