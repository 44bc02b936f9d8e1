"""How a recipe is started: configs by name, configs on top of others, and errors of the user's in one message."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, cast

import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torchtune.config._utils import _merge_yaml_and_cli_args
from yaml import YAMLError

from tfidf_tune.training._distributed import is_first_to_speak, is_lost_process, is_main_process
from tfidf_tune.training._errors import LostProcessError, SetupError, TrainingError, first_line, is_out_of_memory
from tfidf_tune.training._interrupt import Interrupted

_SECONDS_FOR_MAIN_PROCESS = 5.0
_LOST_BEFORE_TRAINING = "another process of the run was lost before training began: its message says why"


def config_path(name: str) -> str:
    """Find the file of a config.

    Args:
        name (str): a path, or the name of one of the configs that come with the package
            (``tinyllama/1.1B_lora_memorization``).

    Returns:
        str: the path.

    Raises:
        SetupError: If there is neither such a file nor such a name.
    """
    if Path(name).is_file():
        return name
    folder = Path(str(files("tfidf_tune.configs")))
    packaged = folder / f"{name}.yaml"
    if packaged.is_file():
        return str(packaged)
    names = sorted(
        str(path.relative_to(folder).with_suffix(""))
        for path in folder.rglob("*.yaml")
        if path.parent.name != "experiments"
    )
    raise SetupError(f"no config file {name}, and no config of that name; there are: {', '.join(names)}")


def load_config(name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """Read a config, and whatever it builds on.

    A config with the key ``base`` (another config's name, or a path, seen from the folder of the file or from the
    working directory) is laid over that one: a section that names its own ``_component_``, or a list, takes the place
    of the base's, any other section is merged into it.

    Args:
        name (str): a path or a name, see :func:`config_path`.
        overrides (Sequence[str]): ``key=value`` as on torchtune's command line. Default: none.

    Returns:
        DictConfig: the config, unchecked, references unresolved.

    Raises:
        SetupError: If there is no such config, it builds on itself, or something is to change a part of a list.
        ValueError: If an override is not of the form ``key=value``.
        YAMLError: If a file is no YAML.
    """
    content = cast(dict[str, Any], OmegaConf.to_container(_load_with_base(name, ()), resolve=False))
    for key in (key for key, value in content.items() if isinstance(value, list)):
        if inside := [override for override in overrides if override.startswith((f"{key}.", f"{key}["))]:
            raise SetupError(
                f"config: {inside[0]}: {key} is a list, and only whole lists can be given here: edit the file"
            )
    namespace = argparse.Namespace(**content)
    merged: DictConfig = _merge_yaml_and_cli_args(namespace, list(overrides))
    return merged


def _load_with_base(name: str, above: tuple[str, ...]) -> DictConfig:
    path = config_path(name)
    if path in above:
        raise SetupError(f"config {path} builds on itself: {' -> '.join((*above, path))}")
    try:
        cfg = OmegaConf.load(path)
    except UnicodeDecodeError as error:
        raise SetupError(f"config {path} is no UTF-8 text: {error}") from error
    if not isinstance(cfg, DictConfig):
        raise SetupError(f"config {path} holds a list, not keys and values")
    if wrong := [key for key in cfg if not isinstance(key, str)]:
        raise SetupError(f"config {path}: key {wrong[0]!r} is no name")
    base_name = cfg.pop("base", None)
    if base_name is None:
        return cfg
    if not isinstance(base_name, str):
        raise SetupError(f"config {path}: base is {base_name!r}, it has to be the name or path of a config")
    beside = Path(path).parent / Path(base_name).expanduser()
    try:
        base = _load_with_base(str(beside) if beside.is_file() else base_name, (*above, path))
    except SetupError as error:
        raise SetupError(f"{error} (base of {path})") from error
    below = cast(dict[str, Any], OmegaConf.to_container(base, resolve=False))
    for key, section in cfg.items_ex(resolve=False):
        if OmegaConf.is_list(section) or (OmegaConf.is_dict(section) and "_component_" in section):
            base.pop(key, None)
        elif OmegaConf.is_dict(section) and isinstance(below.get(str(key)), list):
            raise SetupError(
                f"config {path}: {key!s} is a list in {base_name}, which a section cannot change: give a list"
            )
    return cast(DictConfig, OmegaConf.merge(base, cfg))


def _read_arguments() -> DictConfig:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--config", required=True, help="a file, or the name of a config that comes with the package")
    options, overrides = parser.parse_known_args()
    flags = [argument for argument in overrides if argument.startswith("--")]
    if flags:
        raise ValueError(f"there are no options {', '.join(flags)}; keys are given as key=value")
    return load_config(options.config, overrides)


def recipe(main: Callable[[DictConfig], None]) -> Callable[[], None]:
    """Make a function of a config the entry point of a recipe: ``--config FILE_OR_NAME key=value ...``.

    What is wrong with config, data, checkpoint or disk is reported in one message without a traceback, exit code 1;
    SIGTERM ends with exit code 143, Ctrl-C with 130. Of several processes the first one speaks; another does where it
    alone has something to say.

    Args:
        main (Callable[[DictConfig], None]): the recipe.

    Returns:
        Callable[[], None]: reads ``sys.argv``; the recipe itself stays at hand as ``__wrapped__``.
    """

    @wraps(main)
    def entry_point() -> None:
        begun = False
        signal.signal(signal.SIGTERM, _end_at_once)
        try:
            cfg = _read_arguments()
            begun = True
            main(cfg)
        except LostProcessError as error:
            _fail_without_another(str(error))
        except (SetupError, TrainingError, OSError) as error:
            if isinstance(error.__cause__, RuntimeError) and is_lost_process(error.__cause__):
                _fail_without_another(_LOST_BEFORE_TRAINING)
            _fail(str(error))
        except RuntimeError as error:
            if is_out_of_memory(error):
                _fail(
                    f"out of memory before training began ({first_line(error)}): try model.quantize_base=True with "
                    "LoRA, dtype=bf16, fsdp_cpu_offload=True or more processes"
                )
            if not is_lost_process(error):
                raise
            _fail_without_another(_LOST_BEFORE_TRAINING)
        except (ValueError, YAMLError, OmegaConfBaseException) as error:
            if begun:
                raise  # a bug of ours: its traceback is wanted
            _fail(f"config: {error}")
        except Interrupted as request:
            if is_main_process():
                print(request, file=sys.stderr)
            sys.exit(request.exit_code)
        except KeyboardInterrupt:
            print("interrupted; the checkpoints written so far are whole", file=sys.stderr)
            sys.exit(128 + signal.SIGINT)
        if dist.is_initialized():
            dist.destroy_process_group()

    return entry_point


def _end_at_once(signal_number: int, _: FrameType | None) -> None:
    """Before and after training there is nothing to finish."""
    if is_main_process():
        print("ended by SIGTERM", file=sys.stderr)
    sys.exit(128 + signal_number)


def _fail(message: str) -> NoReturn:
    """End with a message; where the first process fails alike, torchrun ends this one before it repeats it."""
    if is_main_process():
        _ignore_torchrun()
        is_first_to_speak()
    else:
        time.sleep(_SECONDS_FOR_MAIN_PROCESS)
        message = f"process {os.environ['RANK']}: {message}"
    sys.exit(f"error: {message}")


def _fail_without_another(message: str) -> NoReturn:
    """End because another process is gone, which all that are left notice and one tells."""
    _ignore_torchrun()
    if is_first_to_speak():
        print(f"\nerror: {message}", file=sys.stderr)  # the other may have left its progress bar's line open
    sys.exit(1)


def _ignore_torchrun() -> None:
    """Where one process has failed torchrun ends the others by SIGTERM, which must not come before the message."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
