"""The recipes and configs of the package, by their names."""

from importlib.resources import files
from pathlib import Path

from tfidf_tune._checks import SetupError, closest

RECIPES = {"lora_finetune": "lora", "full_finetune": "full"}
"""Name of a recipe -> what the names of its configs have."""
_FIRST = ("mine", "injected")  # folders of configs that are shown first: for any model


def recipe_file(name: str) -> Path:
    """Return the file of a recipe."""
    return Path(str(files("tfidf_tune.recipes"))) / f"{name}.py"


def config_files() -> dict[str, Path]:
    """Return the file of each config by its name, those for any model first."""
    folder = Path(str(files("tfidf_tune.configs")))
    found = sorted(
        folder.rglob("*.yaml"),
        key=lambda file: ([*_FIRST, file.parent.name].index(file.parent.name), file),
    )
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in found}


def shipped_file(name: str) -> Path:
    """Return the file of a recipe or config.

    Raises:
        SetupError: If there is none of this name.
    """
    known = {**{recipe: recipe_file(recipe) for recipe in RECIPES}, **config_files()}
    if name not in known:
        raise SetupError(
            f"no recipe and no config {name!r}{closest(name, known) or '.'} `tfidf-tune ls` lists "
            "them"
        )
    return known[name]
