"""How a recipe is started: configs by name, configs on top of others, and errors of the user's in one message."""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torchtune.config._utils import _merge_yaml_and_cli_args
from yaml import YAMLError

from tfidf_tune.training._errors import SetupError, TrainingError


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
    working directory) is laid over that one: a section that names its own ``_component_`` takes the place of the
    base's, any other is merged into it.

    Args:
        name (str): a path or a name, see :func:`config_path`.
        overrides (Sequence[str]): ``key=value`` as on torchtune's command line. Default: none.

    Returns:
        DictConfig: the config, unchecked, references unresolved.

    Raises:
        SetupError: If there is no such config, or it builds on itself.
        ValueError: If an override is not of the form ``key=value``.
        YAMLError: If a file is no YAML.
    """
    content = OmegaConf.to_container(_load_with_base(name, ()), resolve=False)
    namespace = argparse.Namespace(**cast(dict[str, Any], content))
    merged: DictConfig = _merge_yaml_and_cli_args(namespace, list(overrides))
    return merged


def _load_with_base(name: str, above: tuple[str, ...]) -> DictConfig:
    path = config_path(name)
    if path in above:
        raise SetupError(f"config {path} builds on itself: {' -> '.join((*above, path))}")
    cfg = OmegaConf.load(path)
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
    for key, section in cfg.items_ex(resolve=False):
        if OmegaConf.is_dict(section) and "_component_" in section:
            base.pop(key, None)
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
    an interrupt ends with exit code 130.

    Args:
        main (Callable[[DictConfig], None]): the recipe.

    Returns:
        Callable[[], None]: reads ``sys.argv``; the recipe itself stays at hand as ``__wrapped__``.
    """

    @wraps(main)
    def entry_point() -> None:
        begun = False
        # A save that is cut short then cleans up after itself, as it does on an exception.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("error: ended by SIGTERM"))
        try:
            cfg = _read_arguments()
            begun = True
            main(cfg)
        except (SetupError, TrainingError, OSError) as error:
            sys.exit(f"error: {error}")
        except (ValueError, YAMLError, OmegaConfBaseException) as error:
            if begun:
                raise  # a bug of ours: its traceback is wanted
            sys.exit(f"error: config: {error}")
        except KeyboardInterrupt:
            print("interrupted; the checkpoints written so far are whole", file=sys.stderr)
            sys.exit(130)

    return entry_point
