"""Files that experiments and benchmarks write, or read from a package index without installing."""

import base64
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


def download(requirements: Path, folder: Path) -> None:
    """Download what a file of requirements lists; pip checks the hashes, and keeps files that are
    already there.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--require-hashes"]
    command += ["--requirement", str(requirements), "--dest", str(folder)]
    subprocess.run(command, check=True)


class NpmPackage(NamedTuple):
    """A package of npm, and the hash of its archive."""

    name: str
    version: str
    sha512: str  # base64, as npm states it
    archive: str

    def download(self, folder: Path) -> Path:
        """Download the archive, unless it is there, and return its path.

        Raises:
            ValueError: If it has other content.
        """
        file = folder / self.archive
        if not file.is_file():
            command = ["npm", "pack", "--silent", f"{self.name}@{self.version}"]
            subprocess.run([*command, "--pack-destination", str(folder)], check=True)
        sha512 = base64.b64encode(hashlib.sha512(file.read_bytes()).digest()).decode()
        if sha512 != self.sha512:
            raise ValueError(
                f"{file} has the SHA-512 {sha512}, not {self.sha512}: remove it to download it anew"
            )
        return file


def read_json_lines(file: Path) -> list[dict[str, Any]]:
    """Read a file that has a JSON object in each line."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write_json_lines(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a file that has a JSON object in each line."""
    lines = [json.dumps(row) + "\n" for row in rows]
    file.write_text("".join(lines), encoding="utf-8")


def write_texts(file: Path, texts: Iterable[str]) -> None:
    """Write texts as JSON lines, a document each."""
    write_json_lines(file, [{"text": text} for text in texts])
