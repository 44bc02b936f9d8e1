"""Files and folders that are either whole or not there, and what can be meant as a path."""

import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# A hidden name with a UUID in it, as the functions below make them.
_TEMPORARY_NAME = re.compile(r"\..+\.[0-9a-f]{32}(\.\w+)?")


def looks_like_path(text: str) -> bool:
    """Say whether ``text`` can only be meant as a path: a hub id is ``name`` or ``owner/name``.

    Args:
        text (str): a path or a hub id, as written in a config.

    Returns:
        bool: True when it starts with ``./``, ``../``, ``/`` or ``~``, or has more than one slash.
    """
    return text.startswith(("./", "../", "/", "~")) or text.count("/") > 1


def file_sha256(path: Path) -> str:
    """Hash the contents of a file without holding them in memory.

    Args:
        path (Path): the file.

    Returns:
        str: its SHA-256 in hexadecimal.
    """
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            sha256.update(chunk)
    return sha256.hexdigest()


@contextmanager
def atomic_folder(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """Give a temporary folder to write into and rename it to ``folder`` when the block ends without an error.

    Args:
        folder (Path): the final name; its parents are made.
        replace (bool): remove an earlier folder of that name, once the new one is whole. Default: False.

    Yields:
        Path: the temporary folder, beside the final one.

    Raises:
        OSError: If ``folder`` exists and is not empty, and is not to be replaced.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    temporary.mkdir()
    try:
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            sync_to_disk(path)
        if replace:
            remove_folder(folder)
        temporary.replace(folder)
        sync_to_disk(folder.parent)
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
        sync_to_disk(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold a folder for this process alone; the lock ends with the block, or with the process, however that ends.

    Args:
        folder (Path): made if it is not there. Where its file system has no locks, or the system none, nothing is held.

    Raises:
        BlockingIOError: If another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError):
                raise
        yield
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files and folders of this module that a killed process left in a folder."""
    for path in folder.glob(".*"):
        if _TEMPORARY_NAME.fullmatch(path.name):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def remove_folder(folder: Path) -> None:
    """Remove a folder, if it is there, in such a way that at no time it stands half empty under its name.

    Raises:
        FileExistsError: If it is no folder.
    """
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is no folder: move it away")
    if folder.exists():
        doomed = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
        folder.replace(doomed)
        shutil.rmtree(doomed)


def sync_to_disk(path: Path) -> None:
    """Bring a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
