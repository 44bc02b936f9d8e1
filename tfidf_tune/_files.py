"""Files and folders that are either whole or not there, and what can be meant as a path."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def looks_like_path(text: str) -> bool:
    """Say whether ``text`` can only be meant as a path: a hub id is ``name`` or ``owner/name``.

    Args:
        text (str): a path or a hub id, as written in a config.

    Returns:
        bool: True when it starts with ``./``, ``../``, ``/`` or ``~``, or has more than one slash.
    """
    return text.startswith(("./", "../", "/", "~")) or text.count("/") > 1


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Give a temporary folder to write into and rename it to ``folder`` when the block ends without an error.

    Args:
        folder (Path): the final name; its parents are made.

    Yields:
        Path: the temporary folder, beside the final one.

    Raises:
        OSError: If ``folder`` exists and is not empty.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    temporary.mkdir()
    try:
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            _sync(path)
        temporary.replace(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Give a temporary file name to write to and rename it to ``path`` when the block ends without an error.

    Args:
        path (Path): the final name, replaced if it exists; its parents are made.

    Yields:
        Path: the temporary name, beside the final one and with its suffix.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{uuid.uuid4().hex}{path.suffix}")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Bring a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
