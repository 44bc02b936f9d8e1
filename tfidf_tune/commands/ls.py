"""``tfidf-tune ls``."""

import argparse
from pathlib import Path

from tfidf_tune.commands._shipped import RECIPES, config_files


def main(arguments: list[str]) -> None:
    """List recipes, each with its configs."""
    parser = argparse.ArgumentParser(
        prog="tfidf-tune ls", description="List recipes and their configs."
    )
    parser.parse_args(arguments)
    print(f"{'RECIPE':<16} CONFIG")
    for recipe, method in RECIPES.items():
        shown = recipe
        for config in config_files():
            if method in Path(config).name:
                print(f"{shown:<16} {config}")
                shown = ""
    print("\nRecipes of torchtune: tune ls")
