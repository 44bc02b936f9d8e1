"""The cache of tokenized text: closed to other users, and without what nobody has used for a month.

An entry is a folder, named by a hash of what its contents depend on. Its time is that of its last
use. Processes that use it hold a shared lock of its ``settings.json``, so that no other removes it
while they may read its files; it is removed under an exclusive lock. Where a file system has no
locks, nothing is removed. ``settings.json`` has the sizes of the other files; an entry with other
sizes is damaged, as by a full disk or a crash, and is removed when it is asked for.
"""

import fcntl
import json
import logging
import os
import re
from collections import deque
from contextlib import suppress
from pathlib import Path

from tfidf_tune._files import is_leftover, remove_folder, remove_path

SETTINGS = "settings.json"  # of an entry
_NAME = re.compile(r"[0-9a-f]{16}")
_UNUSED_SECONDS = 30 * 24 * 3600
_MOST_LOCKS = 64  # that a process holds, of the entries that it used last
_locks: deque[int] = deque()  # file descriptors, until the process ends

logger = logging.getLogger(__name__)


def close_root(root: Path) -> None:
    """Close the folder of all entries to other users, unless it holds something else."""
    is_open = root.stat().st_mode & 0o077
    if is_open and all(_is_entry(path) or _is_unfinished(path) for path in root.iterdir()):
        close_to_others(root)


def close_to_others(folder: Path) -> None:
    """Let only its user read a folder; one of another user stays as it is."""
    with suppress(OSError):  # a file system that cannot be written
        if folder.stat().st_uid == os.geteuid():
            folder.chmod(0o700)


def file_sizes(entry: Path) -> dict[str, int]:
    """Return the bytes of each file of an entry but its settings, which record them."""
    return {
        file.name: file.stat().st_size for file in sorted(entry.iterdir()) if file.name != SETTINGS
    }


def begin_use(entry: Path) -> bool:
    """Keep an entry from being removed until this process ends; return whether there is one.

    A damaged entry is removed.

    Raises:
        PermissionError: If it is of another user.
        OSError: If it is damaged and cannot be removed.
    """
    try:
        descriptor = os.open(entry / SETTINGS, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        # An entry appears with its settings, perhaps just now by another process.
        if entry.is_dir() and not (entry / SETTINGS).exists():
            _remove_damaged(entry)
        return False
    except PermissionError as error:
        raise PermissionError(
            f"{entry} is of another user of this machine: name a folder of your own by cache_dir "
            "or TFIDF_TUNE_CACHE"
        ) from error
    with suppress(OSError):  # no locks here
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    # Another process may have removed the entry before this one had the lock.
    try:
        is_there = os.path.samestat(os.fstat(descriptor), (entry / SETTINGS).stat())
    except FileNotFoundError:
        is_there = False
    is_damaged = is_there and not _is_complete(entry)
    if is_damaged:
        _remove_damaged(entry)
    if is_damaged or not is_there:
        os.close(descriptor)
        return False
    _locks.append(descriptor)
    if len(_locks) > _MOST_LOCKS:
        os.close(_locks.popleft())
    close_to_others(entry)
    with suppress(OSError):  # a file system that cannot be written
        os.utime(entry)
    return True


def _is_complete(entry: Path) -> bool:
    """Return whether the files of an entry have the sizes with which they were written."""
    try:
        contents = json.loads((entry / SETTINGS).read_text(encoding="utf-8"))
        sizes: object = contents["sizes"]
        return sizes == file_sizes(entry)
    except (OSError, ValueError, LookupError, TypeError):  # the settings are cut, too
        return False


def _remove_damaged(entry: Path) -> None:
    logger.warning(f"{entry} is damaged, perhaps because the disk was full, and is made again")
    try:
        remove_folder(entry)
    except OSError as error:
        raise OSError(
            f"{entry} is damaged and could not be removed ({error.strerror or error}): remove it, "
            "or name another folder by cache_dir or TFIDF_TUNE_CACHE"
        ) from error


def remove_unused(used: Path) -> None:
    """Remove the entries beside one that was just used which nobody has used for a month, and
    nothing else.
    """
    # By the clock of the file system, which can be that of another machine.
    now = used.stat().st_mtime
    for path in used.parent.iterdir():
        with suppress(OSError):  # removed by another process, used by one, or of another user
            if path.lstat().st_mtime > now - _UNUSED_SECONDS:
                continue
            if _is_unfinished(path):  # of a process that was killed
                remove_path(path)
            elif _is_entry(path):
                _remove_entry(path, now)


def _remove_entry(entry: Path, now: float) -> None:
    # NFS locks no file that is open for reading only.
    descriptor = os.open(entry / SETTINGS, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if entry.stat().st_mtime <= now - _UNUSED_SECONDS:  # still
            remove_folder(entry)
    finally:
        os.close(descriptor)


def _is_entry(path: Path) -> bool:
    """Return whether a path is an entry, by its name and its file of settings; other files may be
    in the folder.
    """
    if not _NAME.fullmatch(path.name) or path.is_symlink():
        return False
    try:
        contents = json.loads((path / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(contents, dict) and {"settings", "counts"} <= contents.keys()


def _is_unfinished(path: Path) -> bool:
    """Return whether a path is an entry that is being written or removed, or was when its process
    was killed.
    """
    return is_leftover(path) and _NAME.fullmatch(path.name[1:17]) is not None and path.is_dir()
