"""What is written is whole or not there."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from tfidf_tune import _files
from tfidf_tune._files import (
    atomic_file,
    atomic_folder,
    locked_folder,
    looks_like_path,
    remove_folder,
    remove_leftovers,
)


def test_a_folder_appears_under_its_name_when_it_is_whole(tmp_path):
    target = tmp_path / "parent" / "folder"

    with atomic_folder(target) as temporary:
        (temporary / "inside").mkdir()
        (temporary / "inside" / "a.txt").write_text("a")
        assert not target.exists()

    assert (target / "inside" / "a.txt").read_text() == "a"
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_folder_that_fails_leaves_nothing(tmp_path, error):
    def fail():
        with atomic_folder(tmp_path / "folder") as temporary:
            (temporary / "a.txt").write_text("a")
            raise error

    with pytest.raises(error):
        fail()

    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_not_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old.txt").write_text("old")

    with pytest.raises(OSError, match="not empty"), atomic_folder(tmp_path / "folder") as temporary:
        (temporary / "new.txt").write_text("new")

    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["old.txt"]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_is_replaced_when_the_new_one_is_whole(tmp_path):
    file = tmp_path / "sub" / "file.json"
    for text in ("old", "new"):
        with atomic_file(file) as temporary:
            temporary.write_text(text)

    assert file.read_text() == "new"
    assert list(file.parent.iterdir()) == [file]


def test_a_file_that_fails_leaves_the_old_one(tmp_path):
    file = tmp_path / "file.json"
    file.write_text("old")

    def fail():
        with atomic_file(file) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()

    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("gpt2", False), ("a/b", False), ("/abs", True), ("./rel", True), ("../up", True), ("~/x", True), ("a/b/c", True)],
)  # fmt: skip
def test_a_hub_id_is_told_from_a_path(text, expected):
    assert looks_like_path(text) == expected


def write(folder, name, *, replace=False):
    with atomic_folder(folder, replace=replace) as temporary:
        (temporary / name).write_text(name)


def test_a_folder_is_replaced_where_that_is_asked_for(tmp_path):
    folder = tmp_path / "folder"
    write(folder, "old")

    with atomic_folder(folder, replace=["old*"]) as temporary:
        (temporary / "new").write_text("new")
        assert [path.name for path in folder.iterdir()] == ["old"], "until the new one is whole"

    assert [path.name for path in folder.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [folder]


def test_files_of_others_stay_in_a_folder_that_is_replaced(tmp_path):
    folder = tmp_path / "folder"
    write(folder, "both")
    (folder / "both").write_text("old")
    (folder / "notes" / "deep").mkdir(parents=True)
    (folder / "notes" / "deep" / "a.txt").write_text("of the user")
    (folder / "link").symlink_to("nowhere")
    (folder / "stale.bin").touch()

    with atomic_folder(folder, replace=["*.bin"]) as temporary:
        (temporary / "both").write_text("new")

    assert sorted(path.name for path in folder.iterdir()) == ["both", "link", "notes"]
    assert (folder / "both").read_text() == "new"
    assert (folder / "notes" / "deep" / "a.txt").read_text() == "of the user"
    assert str((folder / "link").readlink()) == "nowhere"


def test_a_file_that_cannot_be_kept_keeps_the_folder_from_being_replaced(tmp_path):
    write(tmp_path / "folder", "old")
    os.mkfifo(tmp_path / "folder" / "pipe")

    with pytest.raises(OSError, match="named pipe"):
        write(tmp_path / "folder", "new", replace=["old"])

    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == ["old", "pipe"]


def test_a_replacement_that_fails_leaves_the_old_one(tmp_path):
    write(tmp_path / "folder", "old")

    def fail():
        with atomic_folder(tmp_path / "folder", replace=()) as temporary:
            (temporary / "half").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()

    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["folder", "folder/old"]


def test_what_replaces_nothing_is_just_written(tmp_path):
    write(tmp_path / "folder", "new", replace=())

    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["new"]


def test_a_folder_is_removed_from_its_name_at_once(tmp_path, monkeypatch):
    """Whoever is killed in the middle leaves no folder that lacks files under a name that promises them."""
    folder = tmp_path / "folder"
    write(folder, "old")
    seen = []
    original = shutil.rmtree

    def rmtree(path, **options):
        seen.append((folder.exists(), path.parent, path.name.startswith(".")))
        original(path, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    remove_folder(folder)

    assert seen == [(False, tmp_path, True)]
    assert list(tmp_path.iterdir()) == []

    write(folder, "old")
    seen.clear()
    write(folder, "new", replace=())
    assert seen[0] == (False, tmp_path, True)


def test_a_folder_that_is_not_there_is_removed_already(tmp_path):
    remove_folder(tmp_path / "absent")


def test_a_folder_gets_its_name_when_its_files_are_on_the_disk(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync

    def record(descriptor):
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), (tmp_path / "folder").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    with atomic_folder(tmp_path / "folder") as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "a").write_text("a")

    paths = {str(temporary), str(temporary / "sub"), str(temporary / "sub" / "a")}
    assert {path for path, named in synced if not named} == paths
    assert (str(tmp_path), True) in synced


def hold_in_another_process(folder):
    """Start a process that holds a folder until it is ended."""
    code = """
import signal, sys
from pathlib import Path
from tfidf_tune._files import locked_folder
with locked_folder(Path(sys.argv[1])):
    print("held", flush=True)
    signal.pause()
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_folder_that_is_held_is_nobody_elses_until_the_process_ends(tmp_path, how):
    folder = tmp_path / "run"
    with hold_in_another_process(folder) as process:
        try:
            with pytest.raises(BlockingIOError), locked_folder(folder):
                pass
            with locked_folder(tmp_path / "other"):
                pass
        finally:
            process.send_signal(how)

    assert process.returncode == -how
    for _ in range(2):
        with locked_folder(folder):
            pass
    assert list(folder.iterdir()) == [], "nothing is left to be removed by hand"


def test_folders_made_for_a_lock_are_removed_where_nothing_was_written(tmp_path):
    with locked_folder(tmp_path / "runs" / "mine"):
        pass
    assert list(tmp_path.iterdir()) == []

    with locked_folder(tmp_path / "runs" / "mine"):
        (tmp_path / "runs" / "other").touch()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["other"]


def test_a_folder_that_was_removed_and_made_again_is_locked_anew(tmp_path, monkeypatch):
    """The first process leaves no files, so it removes the folder that the second is about to lock."""
    flock, folder = _files.fcntl.flock, tmp_path / "run"

    def late(descriptor, how):
        if folder.stat().st_ino == inodes.setdefault("first", folder.stat().st_ino):
            folder.rename(tmp_path / "moved")
            folder.mkdir()
        flock(descriptor, how)

    inodes = {}
    monkeypatch.setattr(_files.fcntl, "flock", late)
    with locked_folder(folder):
        monkeypatch.undo()
        with pytest.raises(BlockingIOError), locked_folder(folder):
            pass


def test_a_folder_is_free_after_an_error(tmp_path):
    with pytest.raises(KeyError), locked_folder(tmp_path):
        raise KeyError

    with locked_folder(tmp_path):
        pass


@pytest.mark.parametrize("cause", ["a file system without locks", "a system without locks"])
def test_where_there_are_no_locks_nothing_is_held(tmp_path, monkeypatch, cause):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    if cause == "a system without locks":
        monkeypatch.setattr(_files, "fcntl", None)
    else:
        monkeypatch.setattr(_files.fcntl, "flock", refuse)

    with locked_folder(tmp_path / "run"), locked_folder(tmp_path / "run"):
        assert (tmp_path / "run").is_dir()


def test_leftovers_are_told_from_everything_else(tmp_path, monkeypatch):
    """What a killed process leaves are the names that the functions above make, and no others are theirs."""
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as killed before it
    with atomic_folder(tmp_path / "checkpoint_10pct") as left:
        pass
    (left / "sub").mkdir(parents=True)
    (left / "sub" / "half").touch()
    (tmp_path / "checkpoint_10pct").rmdir()
    (tmp_path / "old").mkdir()
    remove_folder(tmp_path / "old")
    monkeypatch.undo()
    with atomic_file(tmp_path / "metrics.jsonl") as temporary:
        temporary.touch()
    temporary.touch()
    (tmp_path / f".noextension.{'a' * 32}").touch()
    assert len(list(tmp_path.glob(".*"))) == 4

    digits = "0123456789abcdef" * 2
    kept = [
        ".env", ".gitignore", ".cache", ".vscode/settings.json", "metrics.jsonl", f"a.{digits}", digits,
        f".{digits}", f".a.{digits[1:]}", f".a.{digits}0", f".a.{digits.upper()}", f".a.{digits}.tar.gz",
        f".a.{digits}~", f"sub/.a.{digits}",
    ]  # fmt: skip
    for name in kept:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    remove_leftovers(tmp_path)

    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()) == sorted(
        kept
    )


def test_where_there_is_no_folder_there_are_no_leftovers_of_ours(tmp_path):
    remove_leftovers(tmp_path / "absent")


def test_a_device_is_not_replaced_by_a_file(tmp_path):
    """A pipe stands for it here: root could replace a device of the computer."""
    os.mkfifo(tmp_path / "pipe")
    with (
        pytest.raises(FileExistsError, match="pipe is a folder or a device, not a file: name another place"),
        atomic_file(tmp_path / "pipe") as temporary,
    ):
        temporary.write_text("new")
    assert (tmp_path / "pipe").is_fifo()
    assert list(tmp_path.iterdir()) == [tmp_path / "pipe"]
