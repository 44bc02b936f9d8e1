"""The extras of this distribution: which of them a command needs, and whether they are installed."""

import re
import sys
from importlib.metadata import PackageNotFoundError, distribution, requires

_NAME = "tfidf-tune"


def require_extras(command: str, *extras: str) -> None:
    """End the process with one message if distributions of an extra are missing. Imports none of them.

    Args:
        command (str): the name of the command that needs the extras.
        *extras (str): names of extras in ``pyproject.toml``.
    """
    missing = {extra: absent for extra in extras if (absent := _missing(extra))}
    if missing:
        names = sorted(set[str]().union(*missing.values()))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        sys.exit(
            f"error: tfidf-tune {command} needs packages that are not installed ({', '.join(names[:3])}{more}): "
            f"pip install '{_NAME}[{','.join(missing)}]'"
        )


def _missing(extra: str) -> set[str]:
    """Return the distributions of an extra that are not installed."""
    try:
        requirements = requires(_NAME) or []
    except PackageNotFoundError:  # run from a source tree, which has no metadata
        return set()
    names: set[str] = set()
    for requirement in requirements:
        found = re.match(r'([\w.-]+)(?:\[([\w,-]+)\])?.*;.*extra == "([\w-]+)"', requirement)
        if found is None or found[3] != extra:
            continue
        if found[1] == _NAME:
            names = names.union(*map(_missing, found[2].split(",")))
        elif not _is_installed(found[1]):
            names.add(found[1])
    return names


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
