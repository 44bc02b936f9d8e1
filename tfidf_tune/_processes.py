"""Our command in a process of its own, and modules of the working directory, which Python searches last."""

import os
import sys

# `python -m` and `python -c` search the working directory, "", first: a datasets.py that lies there would be imported
# in place of the package. Here it is searched last. Python 3.10 has no option for that.
OWN_COMMAND = [
    sys.executable,
    "-c",
    "import sys; sys.path.sort(key=lambda folder: folder == ''); from tfidf_tune.cli import main; main()",
]
"""Command line of ``tfidf-tune``, to which its arguments are added."""


def search_working_directory_last() -> None:
    """Let Python find the user's modules in the working directory; of one name, the installed one counts."""
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
