"""How a recipe is started: configs by name, and errors of the user's in one message."""

import signal
import sys
from collections.abc import Callable
from functools import wraps
from importlib.resources import files
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torchtune import config
from yaml import YAMLError

from tfidf_tune.training._errors import SetupError


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
    names = sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml"))
    raise SetupError(f"no config file {name}, and no config of that name; there are: {', '.join(names)}")


def recipe(main: Callable[[DictConfig], None]) -> Callable[[], Any]:
    """Make a function of a config the entry point of a recipe: ``--config FILE_OR_NAME key=value ...``.

    What is wrong with config, data, checkpoint or disk is reported in one message without a traceback, exit code 1;
    an interrupt ends with exit code 130.

    Args:
        main (Callable[[DictConfig], None]): the recipe.

    Returns:
        Callable[[], Any]: reads ``sys.argv``; the recipe itself stays at hand as ``__wrapped__``.
    """

    @wraps(main)
    def entry_point() -> Any:
        begun = False

        @wraps(main)
        def begin(cfg: DictConfig) -> None:
            nonlocal begun
            begun = True
            main(cfg)

        # A save that is cut short then cleans up after itself, as it does on an exception.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("error: ended by SIGTERM"))
        try:
            if "--config" in sys.argv[1:-1]:
                position = sys.argv.index("--config") + 1
                sys.argv[position] = config_path(sys.argv[position])
            return config.parse(begin)()
        except (SetupError, OSError) as error:
            sys.exit(f"error: {error}")
        except (ValueError, AssertionError, YAMLError) as error:
            if begun:
                raise  # a bug of ours: its traceback is wanted
            sys.exit(f"error: config: {error}")
        except KeyboardInterrupt:
            print("interrupted; the checkpoints written so far are whole", file=sys.stderr)
            sys.exit(130)

    return entry_point
