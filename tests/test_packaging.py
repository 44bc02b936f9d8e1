"""What is installed is what is in the tree."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import tfidf_tune

ROOT = Path(__file__).parents[1]
PACKAGE = Path(tfidf_tune.__path__[0])
MODULES = sorted(
    "tfidf_tune." + ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
    for file in PACKAGE.rglob("*.py")
    if file.name != "__init__.py"
)


ALLOWED_IMPORTS = {
    "weighting": set(),
    "loss": {"weighting"},
    "models": set(),
    "data": set(),
    "analysis": {"data", "weighting"},
    "tasks": {"data", "analysis"},
    "report": {"data", "analysis"},
    "training": {"loss", "models", "data"},
    "experiment": {"training", "tasks", "analysis", "report", "data"},
}


def test_every_package_of_the_tree_is_listed_for_the_build():
    text = (ROOT / "pyproject.toml").read_text()
    listed = set(re.findall(r'"([\w.]+)"', text.split("packages = [", 1)[1].split("]", 1)[0]))

    in_tree = {"tfidf_tune.recipes", "tfidf_tune.configs"}
    in_tree |= {".".join(("tfidf_tune", *f.parent.relative_to(PACKAGE).parts)) for f in PACKAGE.rglob("__init__.py")}

    assert listed == in_tree


def test_modules_are_found():
    assert len(MODULES) > 30


@pytest.mark.parametrize("module", [*MODULES, "tfidf_tune.recipes.full_finetune", "tfidf_tune.recipes.lora_finetune"])
def test_every_module_imports(module):
    assert importlib.import_module(module)


@pytest.mark.parametrize("package", list(ALLOWED_IMPORTS))
def test_every_public_name_is_there_and_documented(package):
    module = importlib.import_module(f"tfidf_tune.{package}")

    assert module.__all__
    for name in module.__all__:
        member = getattr(module, name)
        assert member.__doc__ or not (inspect.isclass(member) or inspect.isfunction(member)), name


@pytest.mark.parametrize("package", ALLOWED_IMPORTS)
def test_arrows_of_import_point_one_way(package):
    imported = {
        match
        for file in (PACKAGE / package).rglob("*.py")
        for match in re.findall(r"^\s*(?:from|import) tfidf_tune\.(\w+)", file.read_text(), re.MULTILINE)
    }

    assert imported - {package, "_differences", "_files", "_printing", "_signals"} <= ALLOWED_IMPORTS[package]
