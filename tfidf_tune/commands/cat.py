"""``tfidf-tune cat``."""

import argparse

from tfidf_tune.commands._shipped import shipped_file


def main(arguments: list[str]) -> None:
    """Print a recipe or config as it stands."""
    parser = argparse.ArgumentParser(
        prog="tfidf-tune cat", description="Print a config, or a recipe."
    )
    parser.add_argument("name", help="a name that `tfidf-tune ls` lists")
    print(shipped_file(parser.parse_args(arguments).name).read_text(encoding="utf-8"), end="")
