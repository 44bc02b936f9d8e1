"""``tfidf-tune cp``."""

import argparse
import shutil
from pathlib import Path

from tfidf_tune._checks import SetupError
from tfidf_tune.commands._shipped import shipped_file


def main(arguments: list[str]) -> None:
    """Copy a recipe or config to edit it."""
    parser = argparse.ArgumentParser(
        prog="tfidf-tune cp", description="Copy a recipe or config to edit it."
    )
    parser.add_argument("name", help="a name that `tfidf-tune ls` lists")
    parser.add_argument(
        "destination", type=Path, help="file or folder; a file gets the ending of what is copied"
    )
    parser.add_argument(
        "-n", "--no-clobber", action="store_true", help="leave a file that exists as it is"
    )
    parser.add_argument(
        "--make-parents", action="store_true", help="make the folder of the destination"
    )
    options = parser.parse_args(arguments)
    source = shipped_file(options.name)
    destination = options.destination.expanduser()
    if destination.is_dir():
        destination = destination / source.name
    elif destination.suffix != source.suffix:
        destination = destination.with_name(destination.name + source.suffix)
    if options.make_parents:
        destination.parent.mkdir(parents=True, exist_ok=True)
    elif not destination.parent.is_dir():
        raise SetupError(f"no folder {destination.parent}: make it, or let --make-parents make it")
    if options.no_clobber and destination.exists():
        print(f"{destination} exists already and stays as it is.")
        return
    shutil.copyfile(source, destination)
    print(f"Copied to {destination}")
