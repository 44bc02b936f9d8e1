"""The command ``tfidf-tune``: our commands, and torchtune's with our recipes and configs registered.

What needs no library is answered before torch is imported, which takes seconds: versions, lists, unknown commands.
"""

import difflib
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn

from tfidf_tune._signals import ENDING, ended_by, is_ignored_hangup

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

from tfidf_tune._printing import replace_unencodable, visible

# Each is the module of this name in tfidf_tune.commands.
_OURS = {
    "demo": "train a small Llama under CE and TF-IDF on this computer and show what each recites",
    "eval": "lm-evaluation-harness with our tasks and token-exact prompts",
    "experiment": "train and evaluate models, objectives and seeds as one file says, and compare them",
    "compare": "tables, intervals, figures and an HTML report of evaluated runs",
    "weights": "show the weights that TF-IDF gives the tokens of your own text",
    "probe": "make a probe file from your own text; audit one model with it",
    "tasks": "print the folder of our tasks, for lm_eval --include_path",
}
_TORCHTUNES = {
    "run": "run a recipe with a config, on one process or many",
    "validate": "check a config without running it",
    "ls": "list recipes and configs",
    "cp": "copy a recipe or config to edit it",
    "cat": "print a config",
    "download": "download a model from the Hugging Face hub",
}
_RECIPES = {"lora_finetune": "lora_", "full_finetune": "_full_"}


def main() -> None:
    """Run the command line. Ctrl-C ends it with exit code 130, a reader of its output that is gone with 141."""
    hook, sys.unraisablehook = sys.unraisablehook, _end_if_interrupted
    try:
        with ended_by([signal.SIGINT], lambda name: None):
            try:
                _run_command(sys.argv[1:])
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        sys.exit(128 + signal.SIGPIPE)
    finally:
        sys.unraisablehook = hook


def _end_if_interrupted(unraisable: "sys.UnraisableHookArgs") -> None:
    """Take a Ctrl-C that came inside a callback of the import system, where Python would only print and lose it."""
    if unraisable.exc_type is KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)
    sys.__unraisablehook__(unraisable)


def _run_command(arguments: Sequence[str]) -> None:
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help"):
        print(f"usage: tfidf-tune [--version] COMMAND ...\n\n{_commands()}\ntfidf-tune COMMAND --help says more.")
    elif command == "--version":
        from importlib.metadata import version

        print(f"tfidf-tune {version('tfidf-tune')}")
    elif command not in (*_OURS, *_TORCHTUNES):
        print(
            f"error: no command {command!r}{_hint(command, [*_OURS, *_TORCHTUNES])}\n\n{_commands()}", file=sys.stderr
        )
        sys.exit(2)
    elif not _has_working_directory():
        sys.exit("error: the working directory does not exist any more: change to another one")
    elif command in _OURS:
        _run_ours(command, [*arguments[1:]])
    elif command == "validate" and len(arguments) == 2 and not arguments[1].startswith("-"):
        _check_config(arguments[1])
    else:
        _run_torchtunes()


def _commands() -> str:
    def listed(commands: dict[str, str]) -> str:
        return "".join(f"  {name:<10} {purpose}\n" for name, purpose in commands.items())

    return (
        f"commands:\n{listed(_OURS)}\ncommands of torchtune, which know our recipes and configs:\n{listed(_TORCHTUNES)}"
    )


def _hint(name: str, possible: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, possible, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def _has_working_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _run_torchtunes() -> None:
    _register_recipes()
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torchtune._cli.tune import TuneCLIParser

    torchtune = TuneCLIParser()
    torchtune._parser.prog, torchtune._parser.usage = "tfidf-tune", "tfidf-tune COMMAND ..."
    parsers = torchtune._parser._subparsers._group_actions[0].choices
    for parser in parsers.values():
        _name_ourselves(parser)
    options = torchtune.parse_args()
    if sys.argv[1] == "run":
        _check_run(parsers["run"], options)
    if any(map(is_ignored_hangup, ENDING)):  # torchrun would handle it nevertheless
        os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGQUIT")
    try:
        torchtune.run(options)
    except SignalException as error:  # torchrun has ended its processes
        sys.exit(128 + error.sigval)
    except ChildFailedError as error:
        sys.exit(str(error))


def _name_ourselves(parser: "ArgumentParser") -> None:
    """Let a parser of torchtune's speak of tfidf-tune in its help and errors."""

    def renamed(text: str) -> str:
        return re.sub(rf"(?<![\w-])tune (?=({'|'.join(_TORCHTUNES)})\b)", "tfidf-tune ", text)

    def error(message: str) -> NoReturn:
        type(parser).error(parser, renamed(message))

    for name in ("prog", "usage", "description", "epilog"):
        if text := getattr(parser, name):
            setattr(parser, name, renamed(text))
    for action in parser._actions:
        action.help = renamed(action.help) if action.help else None
    parser.error = error  # type: ignore[method-assign]


def _check_run(parser: "ArgumentParser", options: "Namespace") -> None:
    """Refuse what torchtune would start without looking: an unknown recipe, ``--config`` without a value."""
    from torchtune._recipe_registry import get_all_recipes

    names = [recipe.name for recipe in get_all_recipes()]
    if options.recipe not in names:
        if os.path.isfile(options.recipe):
            options.recipe = os.path.relpath(options.recipe)  # torchtune makes a module's name of it
        if not _is_module(os.path.splitext(options.recipe)[0].replace("/", ".")):
            sys.exit(
                f"error: no recipe {options.recipe!r}{_hint(options.recipe, names) or '.'} `tfidf-tune ls` lists the "
                "recipes; one of your own is a Python file in the working directory or below it"
            )
    if options.recipe_args[-1:] == ["--config"]:
        parser.error("argument --config: expected one argument")


def _is_module(name: str) -> bool:
    sys.path.append(os.getcwd())  # as torchtune does
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _register_recipes() -> None:
    """Put our recipes in front of torchtune's: its registry takes absolute paths."""
    from importlib.resources import files
    from pathlib import Path

    from torchtune import _recipe_registry as registry

    recipe_folder, config_folder = (Path(str(files(f"tfidf_tune.{name}"))) for name in ("recipes", "configs"))
    config_files = sorted(config_folder.rglob("*.yaml"))
    registry._ALL_RECIPES[:0] = [
        registry.Recipe(
            name=name,
            file_path=str(recipe_folder / f"{name}.py"),
            configs=[
                registry.Config(name=file.relative_to(config_folder).with_suffix("").as_posix(), file_path=str(file))
                for file in config_files
                if method in file.stem
            ],
            supports_distributed=True,
        )
        for name, method in _RECIPES.items()
    ]


def _check_config(name: str) -> None:
    """Run torchtune's ``validate`` on a path or name, base included; on configs of our recipes, the recipes' check."""
    from omegaconf import OmegaConf
    from torchtune.config import validate
    from torchtune.config._errors import ConfigError

    from tfidf_tune.training import (
        FinetuneConfig,
        LoRAFinetuneConfig,
        SetupError,
        check_config,
        check_loss,
        load_config,
        setup_errors,
    )

    try:
        cfg = load_config(name)
        sections: Any = OmegaConf.to_container(cfg, resolve=False)
        if not sections:
            raise SetupError(f"config {name} is empty")
        checkpointer = str(sections.get("checkpointer"))
        if "HFCheckpointer" in checkpointer and "torchtune.training" not in checkpointer:
            is_lora = "lora_attn_modules" in str(sections.get("model"))
            check_loss(check_config(cfg, LoRAFinetuneConfig if is_lora else FinetuneConfig))
        else:
            with setup_errors("config"):
                for key, section in sections.items():
                    if isinstance(section, dict) and not isinstance(section.get("_component_", ""), str):
                        raise ValueError(
                            f"{key}: _component_ is {section['_component_']!r}, it has to be a dotted path"
                        )
                validate(cfg)
    except (SetupError, ConfigError) as error:
        sys.exit(f"error: {error}")
    print("Config is well-formed!")


def _run_ours(command: str, arguments: list[str]) -> None:
    """Run a command of ours; report errors of the user's in one message, without a traceback."""
    replace_unencodable()
    module = import_module(f"tfidf_tune.commands.{command}")
    try:
        module.main(arguments)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {visible(str(error))}")
    except MemoryError as error:
        sys.exit(f"error: out of memory{f' ({error})' if str(error) else ''}: use less text or a smaller batch size")


if __name__ == "__main__":
    main()
