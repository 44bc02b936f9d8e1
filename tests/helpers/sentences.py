"""Compares error messages with ``messages.json``, which maps the name of each bad input to its complete message.

Tests of bad input assert the exception and the key that the message names. ``UPDATE_MESSAGES=1 pytest -n 0`` rewrites
the file; read the diff. With other versions than those of ``constraints.txt`` complete messages are not compared,
because libraries word parts of them.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

MESSAGES = Path(__file__).with_name("messages.json")
_FIXED = MESSAGES.parents[2] / "constraints.txt"
SEEN: dict[str, str] = {}  # of this process, which `make faults` prints


def changed_sentence(what: str, sentence: str, **places: object) -> str:
    """Compare an error with the recorded one, and say how they differ; places on this machine have their names."""
    for name, place in places.items():
        sentence = sentence.replace(str(place), f"{{{name}}}")
    sentence = re.sub("(recursion depth exceeded) in comparison", r"\1", sentence)  # Python 3.10 says where
    sentence = re.sub(r"(loss|loss of \w+ is|next tokens) \d[\d.]*", r"\1 {number}", sentence)
    sentence = re.sub(r"\b[0-9a-f]{16,64}\b", "{hash}", sentence)
    SEEN[what] = sentence
    known = json.loads(MESSAGES.read_text())
    if os.environ.get("UPDATE_MESSAGES"):
        MESSAGES.write_text(json.dumps({**known, what: sentence}, indent=1, sort_keys=True) + "\n")
    elif known.get(what) != sentence and _has_fixed_versions():
        return f"{MESSAGES.name} has for {what!r}: {known.get(what)!r}, now it is {sentence!r}"
    return ""


@cache
def _has_fixed_versions() -> bool:
    """Return whether each installed package that ``constraints.txt`` names has the version that it says."""
    installed = {canonicalize_name(one.name): one.version for one in distributions()}
    fixed = [Requirement(line) for line in _FIXED.read_text().splitlines() if "==" in line]
    here = {canonicalize_name(one.name): one.specifier for one in fixed if not one.marker or one.marker.evaluate()}
    return all(here[name].contains(installed[name]) for name in here.keys() & installed)


@contextmanager
def refused(
    kind: type[BaseException] | tuple[type[BaseException], ...], named: str, what: str, **places: object
) -> Iterator[None]:
    """Expect an error of a kind that names a key or value, a regular expression, in the recorded sentence."""
    with pytest.raises(kind, match=named) as caught:
        yield
    assert changed_sentence(what, str(caught.value), **places) == ""
