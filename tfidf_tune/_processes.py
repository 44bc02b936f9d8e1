"""Our command in a process of its own, its settings, and modules of the working directory, which
come last.
"""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

# `python -m` and `python -c` search the working directory, "", first: a datasets.py that lies there
# would be imported in place of the package. Here it is searched last. Python 3.10 has no option for
# that.
OWN_COMMAND = [
    sys.executable,
    "-c",
    "import sys; sys.path.sort(key=lambda folder: folder == ''); from tfidf_tune.cli import main; "
    "main()",
]
"""Command line of ``tfidf-tune``, to which its arguments are added."""
_SPECIAL = frozenset("\"'()[]{},")  # where the harness splits, or joins, the value of an option


def search_working_directory_last() -> None:
    """Let Python find the user's modules in the working directory; of one name, the installed one
    counts.
    """
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)


def harness_settings(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as the harness's command reads them: key=value, or JSON if that would take a
    path apart.
    """
    if any(_SPECIAL.intersection(value) for value in settings.values() if isinstance(value, str)):
        return [json.dumps(settings, ensure_ascii=False)]
    words = []
    for name, value in settings.items():
        if isinstance(value, list):
            value = f"[{','.join(map(str, value))}]"
        words.append(f"{name}={value}")
    return words
