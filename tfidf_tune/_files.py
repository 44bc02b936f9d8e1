"""Files and folders that are written atomically, work folders, locks, paths, and what the package
has.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from tfidf_tune._checks import SetupError, closest, differences

_TEMPORARY_NAME = re.compile(r"\..+\.tfidf-tune-[0-9a-f]{32}(\.\w+)?")
_OFFLINE_ERRORS = (
    "ConnectError",
    "ConnectTimeout",
    "ConnectionError",
    "LocalEntryNotFoundError",
    "OfflineModeIsEnabled",
    "gaierror",
)
_MARK = "tfidf-tune.json"  # in a work folder: whose it is


def looks_like_path(text: str) -> bool:
    """Return whether a text is a path rather than a hub id, which is ``name`` or ``owner/name``."""
    return text.startswith(("./", "../", "/", "~")) or text.count("/") > 1


def is_hub_unreachable(error: BaseException | None) -> bool:
    """Return whether an error, or one that it follows from, says that the Hugging Face hub could
    not be reached, or may not be.
    """
    while error is not None:
        # Types of several libraries, which are not imported for this.
        if type(error).__name__ in _OFFLINE_ERRORS or "couldn't connect to" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def not_on_this_machine(name: str, needed: str) -> str:
    """Return the message for a name that is taken for an id of the hub, which cannot be reached;
    ``needed`` is what a path has to lead to.
    """
    return (
        f"{name!r} is not on this machine, and the Hugging Face hub could not be reached: give the "
        f"path of {needed}, or connect this machine to the hub"
    )


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal; the file is read in parts."""
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            sha256.update(chunk)
    return sha256.hexdigest()


def digest(value: Any) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of JSON data; the order of keys does
    not matter.
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def atomic_folder(folder: Path, *, replace: Collection[str] | None = None) -> Iterator[Path]:
    """Yield a temporary folder, and rename it to ``folder`` when the block ends without an error.

    With ``replace`` an existing folder is replaced, else it is an OSError; those of its files that
    the new one lacks are kept, unless they match one of these patterns.
    """
    made = [path for path in folder.absolute().parents if not path.exists()]
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(folder.name, folder)
    temporary.mkdir()
    try:
        yield temporary
        if replace is not None and folder.is_dir():
            for path in folder.iterdir():
                if (temporary / path.name).exists() or any(
                    path.match(pattern) for pattern in replace
                ):
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.copytree(path, temporary / path.name, symlinks=True)
                else:
                    shutil.copy2(path, temporary / path.name, follow_symlinks=False)
        for path in [*temporary.rglob("*"), temporary]:
            if not path.is_symlink():
                sync_to_disk(path)
        if replace is not None:
            remove_folder(folder)
        temporary.replace(folder)
        sync_to_disk(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        _remove_empty(made)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary file name, and rename the file to ``path`` when the block ends without an
    error.
    """
    # Renaming would replace a device or a pipe.
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is a folder or a device, not a file: name another place")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path.stem, path, path.suffix)
    try:
        yield temporary
        sync_to_disk(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def update_files(folder: Path, files: Mapping[str, Callable[[Path], object]]) -> None:
    """Write files, by their names relative to a folder, to paths passed to their functions: all of
    them or none.

    They are renamed at the end, the last one first, so that a full disk leaves the earlier ones
    intact. An OSError names the file; a folder that is new is then removed. The folder is locked,
    and leftovers in it are removed.
    """
    is_new = not folder.exists()
    with locked_folder(folder), ExitStack() as stack:
        if is_new:
            stack.push(
                lambda failure, *_: shutil.rmtree(folder, ignore_errors=True) if failure else None
            )
        for parent in {(folder / name).parent for name in files} - {folder}:
            remove_leftovers(parent)
        for name, write in files.items():
            path = folder / name
            try:
                temporary = stack.enter_context(atomic_file(path))
                write(temporary)
                # Here, so that a full disk is noticed before the first is renamed.
                sync_to_disk(temporary)
            except OSError as error:
                raise OSError(
                    f"{path} could not be written ({error.strerror or error}), {folder} is left as "
                    "it was: make room, or choose another folder"
                ) from error


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Lock a folder for this process, until the block or the process ends; a SetupError says that
    another has it.

    It is made if needed, and removed at the end if it is still empty; what killed processes left in
    it is removed. Some file systems have no locks.
    """
    made = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError) as error:  # locked, or removed, by another process
        raise SetupError(f"another process is writing into {folder}: wait until it ends") from error
    except OSError:  # no locks here
        pass
    try:
        if not (folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat())):
            raise SetupError(f"another process has just removed {folder}: start again")
        remove_leftovers(folder)
        yield
    finally:
        _remove_empty(made)
        os.close(descriptor)


@contextmanager
def work_folder(
    folder: Path,
    arguments: dict[str, Any],
    *,
    replace: bool = False,
    keep: bool = False,
    describe: Callable[[dict[str, Any], dict[str, Any]], list[str]] = differences,
) -> Iterator[Path]:
    """Yield a locked folder for what a call writes on its way to a result, and remove it when the
    block ends.

    A file in the folder marks it as ours and has the arguments of the call, JSON data. After an
    interruption, a call with equal arguments finds what is done; with ``replace``, a call with
    other arguments begins anew. A ``ValueError`` in the block means that the arguments cannot work,
    and removes the folder, too, unless it is to ``keep``. ``describe`` says what is different in
    other arguments.

    Raises:
        SetupError: If the folder is of another running process, of a call with other arguments, or
            not ours.
    """
    while True:
        if not folder.exists():
            try:
                with atomic_folder(folder) as marked:
                    marked.chmod(0o700)  # it holds text
                    (marked / _MARK).write_text(json.dumps(arguments), encoding="utf-8")
            except OSError:
                if not (folder / _MARK).is_file():  # made by another process in the meantime
                    raise
        with locked_folder(folder):
            if not (folder / _MARK).is_file():
                raise SetupError(
                    f"{folder} is not of an interrupted run: move it away, or name another output"
                )
            remove_leftovers(folder.parent, of=folder.name)
            marked_arguments = json.loads((folder / _MARK).read_text(encoding="utf-8"))
            changed = "; ".join(describe(marked_arguments, arguments))
            if changed and not replace:
                raise SetupError(
                    f"{folder} is of an interrupted run with other arguments: {changed}. Name "
                    "another output, or remove this folder"
                )
            if not changed:
                try:
                    yield folder
                except ValueError:
                    if not keep:
                        remove_folder(folder)
                    raise
            remove_folder(folder)
            if not changed:
                return


def require_model_folder(folder: Path) -> None:
    """Raise a SetupError if a folder is no model, but has models inside, as that of a run has; the
    message names them.
    """
    if _has_model(folder) or not folder.is_dir():
        return
    names = [path.name for path in folder.iterdir() if _has_model(path)]
    if names:
        # checkpoint_100pct after checkpoint_75pct
        inside = [str(folder / name) for name in sorted(names, key=lambda name: (len(name), name))]
        raise SetupError(
            f"{folder} is no model, but has models inside: name one: {', '.join(inside)}"
        )


def _has_model(folder: Path) -> bool:
    """Return whether a folder has the config of a model or of an adapter."""
    return (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file()


def require_writable(what: str, path: Path) -> None:
    """Raise an OSError unless files can be written at or below a path; ``what`` names the option or
    key.
    """
    try:  # the only reliable test for root, network folders and the like
        TemporaryFile(dir=nearest_folder(path)).close()
    except OSError as error:
        raise OSError(
            f"{what} {path} cannot be written: {nearest_folder(path)} is not a writable folder "
            f"({error.strerror}); choose another {what}"
        ) from error


def nearest_folder(path: Path) -> Path:
    """Return the path itself if it exists, or its nearest existing parent."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def remove_leftovers(folder: Path, of: str = "") -> None:
    """Remove temporary files and folders, of all names or one, that a killed process left in a
    folder.
    """
    for path in folder.glob(".*"):
        if is_leftover(path) and (not of or path.name.startswith(f".{of}.tfidf-tune-")):
            remove_path(path)


def is_leftover(path: Path) -> bool:
    """Return whether a file or folder has a temporary name of this module."""
    return _TEMPORARY_NAME.fullmatch(path.name) is not None


def remove_path(path: Path) -> None:
    """Remove a file, a link or a folder with its contents, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder, if it exists; it is renamed first, so that it never appears half empty."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is not a folder: move it away")
    if folder.exists():
        doomed = _temporary(folder.name, folder)
        folder.replace(doomed)
        shutil.rmtree(doomed, ignore_errors=True)  # what is left is removed as a leftover


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # not empty
            folder.rmdir()


def _temporary(name: str, path: Path, suffix: str = "") -> Path:
    return path.with_name(f".{name}.tfidf-tune-{uuid.uuid4().hex}{suffix}")


def sync_to_disk(path: Path) -> None:
    """Flush a file or a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def config_path(name: str) -> str:
    """Return the path of a config: a file, or a config of the package
    (``tinyllama/1.1B_lora_memorization``).
    """
    return find_file("config", name, Path(str(files("tfidf_tune.configs"))))


def find_file(kind: str, name: str, folder: Path) -> str:
    """Return a path, or the path of a YAML file of a folder that is named without the ending."""
    shipped = {
        path.relative_to(folder).with_suffix("").as_posix(): path
        for path in sorted(folder.rglob("*.yaml"))
    }
    if Path(name).is_file():
        return name
    if name not in shipped:
        known = closest(name, shipped) or f"; available are {', '.join(shipped)}"
        raise SetupError(f"no {kind} file {name}, and no {kind} of that name{known}")
    return str(shipped[name])
