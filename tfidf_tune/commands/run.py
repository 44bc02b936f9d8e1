"""``tfidf-tune run``: torchtune's command, with our recipes and configs registered."""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from tfidf_tune._checks import SetupError, closest
from tfidf_tune._processes import search_working_directory_last
from tfidf_tune._signals import ENDING, is_ignored_hangup
from tfidf_tune.commands import rename_command
from tfidf_tune.commands._shipped import RECIPES, config_files, recipe_file

_USAGE = "tfidf-tune run [TORCHRUN-OPTIONS] <recipe> --config <config> [RECIPE-OPTIONS]"
_RUN_HELP = f"""usage: {_USAGE}

Run a recipe, given by its name or file; `tfidf-tune ls` lists recipes and configs. RECIPE-OPTIONS
are key=value, which override keys of the config; `torchrun --help` lists TORCHRUN-OPTIONS. With
--config, --help shows the help of the recipe.

examples:
  tfidf-tune run lora_finetune --config mine/lora checkpointer.checkpoint_dir=MODEL \\
      dataset.source=my_texts.jsonl
  tfidf-tune run --nproc_per_node 4 lora_finetune --config tinyllama/1.1B_lora_memorization"""


def main(arguments: list[str]) -> None:
    """Run a recipe. Arguments are checked before torch is imported, which takes seconds."""
    if not arguments:
        _fail_for_usage("arguments are missing: see tfidf-tune run --help")
    words = []
    for word in arguments:
        words += word.split("=", 1) if word.startswith("--config=") else [word]
    if not {"-h", "--help"}.isdisjoint(words):
        if "--config" not in words:
            print(_RUN_HELP)
            return
        # Of the recipe.
        words = [
            *(word for word in words if word not in ("-h", "--help")),
            "--help",
        ]
    # Torchrun's options may precede it.
    at = next((at for at, word in enumerate(words) if word in RECIPES), 0)
    if not words[at].startswith("-"):
        words[at] = _checked_recipe(words[at], words[at + 1 :])
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # Torchtune counts them to see whether there are torchrun options.
    sys.argv = [
        "tfidf-tune",
        "run",
        *words,
    ]
    options = _torchtunes_parser().parse_args(sys.argv[1:])
    options.recipe = _checked_recipe(options.recipe, options.recipe_args)
    if any(map(is_ignored_hangup, ENDING)):  # torchrun would handle an ignored SIGHUP too
        os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGQUIT")
    try:
        options.func(options)
    except SignalException as error:  # torchrun has ended its processes
        sys.exit(128 + error.sigval)
    except ChildFailedError as error:
        sys.exit(str(error))


def _torchtunes_parser() -> argparse.ArgumentParser:
    """Build torchtune's parser of ``run``, which knows our recipes; its help and errors say
    ``tfidf-tune``.
    """
    import tfidf_tune._torchao

    from torchtune import _recipe_registry as registry
    from torchtune._cli.run import Run

    # Before torchtune's, whose registry accepts absolute paths.
    configs = [
        registry.Config(name=name, file_path=str(file)) for name, file in config_files().items()
    ]
    recipes: list[Any] = registry._ALL_RECIPES
    recipes[:0] = [
        registry.Recipe(
            name=name,
            file_path=str(recipe_file(name)),
            configs=[config for config in configs if method in Path(config.name).name],
            supports_distributed=True,
        )
        for name, method in RECIPES.items()
    ]
    parser = argparse.ArgumentParser(prog="tfidf-tune", usage="tfidf-tune COMMAND ...")
    subparsers = parser.add_subparsers()
    Run.create(subparsers)
    rename_command(subparsers.choices["run"], r"(?<![\w-])tune (?=run\b)", "tfidf-tune ")
    return parser


def _checked_recipe(recipe: str, arguments: Sequence[str]) -> str:
    """Refuse an unknown recipe and a missing config, which torchtune would notice late; return the
    recipe's name.
    """
    theirs = [] if recipe in RECIPES else _torchtunes_recipes()
    if recipe not in RECIPES and recipe not in theirs:
        if os.path.isfile(recipe):
            recipe = os.path.relpath(recipe)  # torchtune turns the path into a module name
        module = None
        search_working_directory_last()
        with suppress(ImportError, ValueError):
            module = find_spec(os.path.splitext(recipe)[0].replace("/", "."))
        if module is None:
            sys.exit(
                f"error: no recipe {recipe!r}{closest(recipe, [*RECIPES, *theirs]) or '.'} "
                "`tfidf-tune ls` lists the recipes; your recipe is a Python file in the working "
                "directory or below it"
            )
    if "--config" not in arguments[:-1]:
        _fail_for_usage(
            "argument --config is required, with a file or a name that `tfidf-tune ls` lists"
        )
    if recipe in RECIPES:
        from tfidf_tune._config import FinetuneConfig, LoRAFinetuneConfig, check_keys

        try:
            at = arguments.index("--config") + 1
            overrides = [*arguments[:at], *arguments[at + 1 :]]
            check_keys(
                arguments[at], overrides, FinetuneConfig if "full" in recipe else LoRAFinetuneConfig
            )
        except SetupError as error:
            sys.exit(f"error: {error}")
    return recipe


def _torchtunes_recipes() -> list[str]:
    """Return the names of torchtune's recipes, which are files beside its package: importing it
    takes seconds.
    """
    spec = find_spec("torchtune")
    assert spec is not None, "the command needs the extra torchtune"
    folder = Path(str(spec.origin)).parents[1] / "recipes"
    files = [file for file in folder.rglob("*.py") if file.stem != "__init__"]
    return [file.relative_to(folder).with_suffix("").as_posix() for file in files]


def _fail_for_usage(message: str) -> NoReturn:
    argparse.ArgumentParser(prog="tfidf-tune run", usage=_USAGE).error(message)
