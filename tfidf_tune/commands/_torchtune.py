"""torchtune's own commands, with our recipes and configs registered."""

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from tfidf_tune._checks import SetupError, closest
from tfidf_tune._processes import search_working_directory_last
from tfidf_tune._signals import ENDING, is_ignored_hangup
from tfidf_tune.commands import rename_command

_RECIPES = {"lora_finetune": "lora", "full_finetune": "full"}
_USAGES = {
    "run": "tfidf-tune run [TORCHRUN-OPTIONS] <recipe> --config <config> [RECIPE-OPTIONS]",
    "download": "tfidf-tune download <repo-id> [OPTIONS]",
}
_FIRST = ("mine", "injected")  # folders of configs that `ls` shows first: for any model
_UTILS = "torchtune.training.checkpointing._utils"
_RUN_HELP = f"""usage: {_USAGES["run"]}

Run a recipe, given by its name or file; `tfidf-tune ls` lists recipes and configs. RECIPE-OPTIONS are key=value, which
override keys of the config; `torchrun --help` lists TORCHRUN-OPTIONS. With --config, --help shows that of the recipe.

examples:
  tfidf-tune run lora_finetune --config mine/lora checkpointer.checkpoint_dir=MODEL dataset.source=my_texts.jsonl
  tfidf-tune run --nproc_per_node 4 lora_finetune --config tinyllama/1.1B_lora_memorization"""


def run_torchtune(command: str, arguments: list[str]) -> None:
    """Run ``tfidf-tune run``, ``ls``, ``cp``, ``cat`` or ``download``; only the first imports torch."""
    torchtune = _package_without_init()
    recipes = _register_recipes()
    if command in _USAGES and not arguments:
        usage = ArgumentParser(prog=f"tfidf-tune {command}", usage=_USAGES[command])
        usage.error(f"arguments are missing: see tfidf-tune {command} --help")
    if command != "run":
        options = _parser(command).parse_args([command, *arguments])
        is_short, num_theirs = command == "ls" and not options.all, len(recipes) - len(_RECIPES)
        if is_short:
            del recipes[len(_RECIPES) :]
        options.func(options)
        if is_short:
            print(f"\ntorchtune's own {num_theirs} recipes: tfidf-tune ls --all")
        return
    names = [recipe.name for recipe in recipes]
    arguments = [
        part for word in arguments for part in (word.split("=", 1) if word.startswith("--config=") else [word])
    ]
    if not {"-h", "--help"}.isdisjoint(arguments):
        if "--config" not in arguments:
            print(_RUN_HELP)
            return
        arguments = [*(word for word in arguments if word not in ("-h", "--help")), "--help"]  # of the recipe
    at = next((at for at, word in enumerate(arguments) if word in _RECIPES), 0)  # torchrun's options may precede it
    if not arguments[at].startswith("-"):
        arguments[at] = _checked_recipe(arguments[at], arguments[at + 1 :], names)
    if not hasattr(torchtune, "__version__"):
        torchtune.__spec__.loader.exec_module(torchtune)  # type: ignore[union-attr]
    sys.argv = ["tfidf-tune", "run", *arguments]  # torchtune counts them to see whether there are torchrun options
    options = _parser("run").parse_args(sys.argv[1:])
    options.recipe = _checked_recipe(options.recipe, options.recipe_args, names)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if any(map(is_ignored_hangup, ENDING)):  # torchrun would handle an ignored SIGHUP too
        os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGQUIT")
    try:
        options.func(options)
    except SignalException as error:  # torchrun has ended its processes
        sys.exit(128 + error.sigval)
    except ChildFailedError as error:
        sys.exit(str(error))


def _package_without_init() -> ModuleType:
    """Put torchtune in ``sys.modules`` so that light modules of it can be imported: its ``__init__`` imports torch."""
    if "torchtune" not in sys.modules:
        spec = find_spec("torchtune")
        assert spec is not None, "the command needs the extra torchtune"
        sys.modules["torchtune"] = module_from_spec(spec)
    return sys.modules["torchtune"]


def _register_recipes() -> list[Any]:
    """Put our recipes before torchtune's, whose registry accepts absolute paths; return the list of the registry."""
    registry = import_module("torchtune._recipe_registry")
    recipe_folder, config_folder = (Path(str(files(f"tfidf_tune.{name}"))) for name in ("recipes", "configs"))
    configs = [
        registry.Config(name=file.relative_to(config_folder).with_suffix("").as_posix(), file_path=str(file))
        for file in sorted(
            config_folder.rglob("*.yaml"), key=lambda file: ([*_FIRST, file.parent.name].index(file.parent.name), file)
        )
    ]
    recipes: list[Any] = registry._ALL_RECIPES
    recipes[:0] = [
        registry.Recipe(
            name=name,
            file_path=str(recipe_folder / f"{name}.py"),
            configs=[config for config in configs if method in Path(config.name).name],
            supports_distributed=True,
        )
        for name, method in _RECIPES.items()
    ]
    return recipes


def _parser(command: str) -> ArgumentParser:
    """Build torchtune's parser of one command; its help and errors say ``tfidf-tune``."""
    from torchtune._cli.subcommand import Subcommand

    if command == "download" and _UTILS not in sys.modules:  # of which it needs one constant; the module imports torch
        sys.modules[_UTILS] = ModuleType(_UTILS)
        sys.modules[_UTILS].REPO_ID_FNAME = "original_repo_id"  # type: ignore[attr-defined]
    parser = ArgumentParser(prog="tfidf-tune", usage="tfidf-tune COMMAND ...")
    subparsers = parser.add_subparsers()
    import_module(f"torchtune._cli.{command}")
    (kind,) = (each for each in Subcommand.__subclasses__() if each.__module__ == f"torchtune._cli.{command}")
    kind.create(subparsers)
    if command == "ls":
        subparsers.choices["ls"].add_argument("--all", action="store_true", help="torchtune's recipes, too")
    rename_command(
        subparsers.choices[command], r"(?<![\w-])tune (?=(run|validate|ls|cp|cat|download)\b)", "tfidf-tune "
    )
    return parser


def _checked_recipe(recipe: str, arguments: Sequence[str], names: Sequence[str]) -> str:
    """Refuse an unknown recipe and a missing config, which torchtune would notice late; return the recipe's name."""
    if recipe not in names:
        if os.path.isfile(recipe):
            recipe = os.path.relpath(recipe)  # torchtune turns the path into a module name
        module = None
        search_working_directory_last()
        with suppress(ImportError, ValueError):
            module = find_spec(os.path.splitext(recipe)[0].replace("/", "."))
        if module is None:
            listed = f"no recipe {recipe!r}{closest(recipe, names) or '.'} `tfidf-tune ls` lists the recipes"
            sys.exit(f"error: {listed}; your recipe is a Python file in the working directory or below it")
    if "--config" not in arguments[:-1]:
        usage = ArgumentParser(prog="tfidf-tune run", usage=_USAGES["run"])
        usage.error("argument --config is required, with a file or a name that `tfidf-tune ls` lists")
    if recipe in _RECIPES:
        from tfidf_tune._config import FinetuneConfig, LoRAFinetuneConfig, check_keys

        try:
            at = arguments.index("--config") + 1
            overrides = [*arguments[:at], *arguments[at + 1 :]]
            check_keys(arguments[at], overrides, FinetuneConfig if "full" in recipe else LoRAFinetuneConfig)
        except SetupError as error:
            sys.exit(f"error: {error}")
    return recipe
