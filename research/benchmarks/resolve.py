"""Resolves, without installing, the built wheel next to other trainers and prints a Markdown table.

    make resolve        needs a package index; the result belongs in docs/install.md

Each host has its newest release for the Python version. A cell is ``yes``, or the requirements of
ours that the versions of the host without us do not meet.
"""

import argparse
import datetime
import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

from packaging.requirements import Requirement

_HOSTS = ("trl", "axolotl", "peft", "lightning", "vllm")
_EXTRAS = ("", "report", "eval", "torchtune")
_LIMIT_S = 180


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python-version", default="3.12", help="default: %(default)s")
    options = parser.parse_args()
    ours = _requirements(options.wheel)
    print(
        f"Resolved on {datetime.date.today()} for Python {options.python_version} on Linux "
        "(x86-64).\n"
    )
    print("| next to | base | " + " | ".join(f"`[{extra}]`" for extra in _EXTRAS[1:]) + " |")
    print("|---|" + "---|" * len(_EXTRAS))
    for host in _HOSTS:
        alone, error = _resolve([host], options.python_version)
        if error:
            print(f"| {host} | not resolved itself: {error} |" + " |" * (len(_EXTRAS) - 1))
            continue
        cells = [
            _cell(options, f"{host}=={alone[host]}", extra, ours[extra], alone) for extra in _EXTRAS
        ]
        print(f"| {host} {alone[host]} | {' | '.join(cells)} |", flush=True)


def _requirements(wheel: Path) -> dict[str, list[Requirement]]:
    """Read the requirements of the base and of each extra."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        texts = message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    ours = [Requirement(text) for text in texts]
    return {
        extra: [r for r in ours if r.marker is None or r.marker.evaluate({"extra": extra})]
        for extra in _EXTRAS
    }


def _cell(
    options: argparse.Namespace,
    host: str,
    extra: str,
    ours: list[Requirement],
    alone: dict[str, str],
) -> str:
    name = f"tfidf-tune[{extra}]" if extra else "tfidf-tune"
    _, error = _resolve(
        [f"{name} @ {options.wheel.resolve().as_uri()}", host], options.python_version
    )
    unmet = [
        r
        for r in ours
        if r.name in alone and not r.specifier.contains(alone[r.name], prereleases=True)
    ]
    reason = ", ".join(f"{r.name} {alone[r.name]} (needs {r.specifier})" for r in unmet) or error
    return f"no: {reason}" if error else "yes"


def _resolve(requirements: list[str], python_version: str) -> tuple[dict[str, str], str]:
    """Resolve requirements for Linux; returns name to version, and why there is no solution, or
    nothing.
    """
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "compile",
        "--quiet",
        "--no-header",
        "--no-annotate",
        "-",
    ]
    command += ["--python-version", python_version, "--python-platform", "x86_64-manylinux_2_28"]
    text = "\n".join(requirements)
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, check=False, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return {}, f"no answer within {_LIMIT_S} s"
    error = done.stderr.strip().splitlines()[-1].strip() if done.returncode else ""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", done.stdout, re.MULTILINE)), error


if __name__ == "__main__":
    main()
