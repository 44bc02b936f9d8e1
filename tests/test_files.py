"""Files and folders appear complete or not at all."""

import os
import shutil
import subprocess
import sys

import pytest

from tfidf_tune import _files
from tfidf_tune._checks import SetupError, differences
from tfidf_tune._files import (
    atomic_file,
    atomic_folder,
    locked_folder,
    remove_folder,
    remove_leftovers,
    work_folder,
)


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def write(folder, name, *, replace=None):
    with atomic_folder(folder, replace=replace) as temporary:
        (temporary / name).write_text(name)


# ---- folders


def test_a_folder_appears_when_it_is_complete_and_on_the_disk(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync

    def record(descriptor):
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), target.exists()))
        fsync(descriptor)

    target = tmp_path / "of" / "parent" / "folder"
    monkeypatch.setattr(os, "fsync", record)
    with atomic_folder(target) as temporary:
        (temporary / "inside").mkdir()
        (temporary / "inside" / "a.txt").write_text("a")
        assert not target.exists()

    assert (target / "inside" / "a.txt").read_text() == "a"
    assert list(target.parent.iterdir()) == [target]
    paths = {str(temporary), str(temporary / "inside"), str(temporary / "inside" / "a.txt")}
    assert {path for path, is_there in synced if not is_there} == paths
    assert (str(target.parent), True) in synced


def fail_in_folder(folder, error, replace=None):
    with atomic_folder(folder, replace=replace) as temporary:
        (temporary / "half").write_text("half")
        raise error


def test_a_folder_that_fails_leaves_the_old_one_or_nothing(tmp_path):
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error):
            fail_in_folder(tmp_path / "new", error)
    write(tmp_path / "folder", "old")
    with pytest.raises(RuntimeError):
        fail_in_folder(tmp_path / "folder", RuntimeError, replace=())
    with pytest.raises(OSError, match="not empty"):  # replaced only where that is asked for
        write(tmp_path / "folder", "new")
    assert names(tmp_path) == ["folder", "folder/old"]


def test_replacing_a_folder_keeps_files_of_the_user(tmp_path):
    folder = tmp_path / "folder"
    write(folder, "both", replace=())
    (folder / "both").write_text("old")
    (folder / "notes" / "deep").mkdir(parents=True)
    (folder / "notes" / "deep" / "a.txt").write_text("of the user")
    for link in (folder / "link", folder / "notes" / "deep" / "link"):
        link.symlink_to("nowhere")
    (folder / "stale.bin").touch()

    with atomic_folder(folder, replace=["*.bin"]) as temporary:
        (temporary / "both").write_text("new")
        assert (folder / "both").read_text() == "old"

    assert names(folder) == [
        "both",
        "link",
        "notes",
        "notes/deep",
        "notes/deep/a.txt",
        "notes/deep/link",
    ]
    assert (folder / "both").read_text() == "new"
    assert (folder / "notes" / "deep" / "a.txt").read_text() == "of the user"
    assert (
        str((folder / "link").readlink())
        == str((folder / "notes" / "deep" / "link").readlink())
        == "nowhere"
    )


def test_a_folder_disappears_at_once(tmp_path, monkeypatch):
    """A process that is killed meanwhile leaves no folder that lacks files under its name."""
    folder = tmp_path / "folder"
    seen = []
    rmtree = shutil.rmtree

    def record(path, **options):
        seen.append((folder.exists(), path.parent, path.name.startswith(".")))
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", record)
    write(folder, "old")
    seen.clear()
    write(folder, "new", replace=())
    assert seen[0] == (False, tmp_path, True)
    seen.clear()
    remove_folder(folder)
    remove_folder(folder)  # no error without it
    assert seen == [(False, tmp_path, True)]
    assert names(tmp_path) == []
    folder.touch()
    with pytest.raises(FileExistsError, match="folder is not a folder: move it away"):
        remove_folder(folder)


# ---- files


def test_a_file_is_replaced_when_the_new_one_is_complete(tmp_path):
    file = tmp_path / "sub" / "file.json"
    for text in ("old", "new"):
        with atomic_file(file) as temporary:
            temporary.write_text(text)
            assert temporary.suffix == ".json"

    def fail():
        with atomic_file(file) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert file.read_text() == "new"
    assert names(tmp_path) == ["sub", "sub/file.json"]


def test_a_device_is_neither_replaced_nor_lost_with_its_folder(tmp_path):
    write(tmp_path / "folder", "old")
    os.mkfifo(tmp_path / "folder" / "pipe")
    with (
        pytest.raises(FileExistsError, match="pipe is a folder or a device"),
        atomic_file(tmp_path / "folder" / "pipe"),
    ):
        pass
    with pytest.raises(OSError, match="named pipe"):
        write(tmp_path / "folder", "new", replace=["old"])
    assert (tmp_path / "folder" / "pipe").is_fifo()
    assert names(tmp_path) == ["folder", "folder/old", "folder/pipe"]


def test_leftovers_of_killed_processes_are_removed_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as if killed before it
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
    (tmp_path / f".noextension.tfidf-tune-{'a' * 32}").touch()
    assert len(list(tmp_path.glob(".*"))) == 4

    digits = "0123456789abcdef" * 2
    ours = f"tfidf-tune-{digits}"
    kept = [
        ".env",
        ".gitignore",
        ".cache",
        "metrics.jsonl",
        f"a.{ours}",
        digits,
        f".{ours}",
        f".a.{digits}",
        f".a.{ours[:-1]}",
        f".a.{ours}0",
        f".a.{ours.upper()}",
        f".a.{ours}.tar.gz",
        f".a.{ours}~",
        f"sub/.a.{ours}",
    ]
    for name in kept:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    remove_leftovers(tmp_path)
    remove_leftovers(tmp_path / "absent")

    assert names(tmp_path) == sorted([*kept, "sub"])


# ---- locks

HOLD = """
import signal, sys
from pathlib import Path
from tfidf_tune._files import locked_folder
with locked_folder(Path(sys.argv[1])):
    print("held", flush=True)
    signal.pause()
"""


def test_a_locked_folder_is_free_when_its_process_ends(tmp_path):
    folder = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "held\n"
            with pytest.raises(SetupError), locked_folder(folder):
                pass
            with locked_folder(tmp_path / "other"):
                pass
        finally:
            process.kill()

    with pytest.raises(KeyError), locked_folder(folder):
        raise KeyError
    with locked_folder(folder):
        pass
    assert list(folder.iterdir()) == [], "nothing is left to be removed by hand"


def test_a_folder_that_was_removed_and_made_again_is_not_taken_for_locked(tmp_path, monkeypatch):
    """The first process leaves no files, so it removes the folder that the second is
    about to lock.
    """
    flock = _files.fcntl.flock
    folder = tmp_path / "run"

    def late(descriptor, how):
        folder.rename(tmp_path / "moved")
        folder.mkdir()
        flock(descriptor, how)

    monkeypatch.setattr(_files.fcntl, "flock", late)
    with pytest.raises(SetupError, match="has just removed .*: start again"), locked_folder(folder):
        pass


def test_a_work_folder_is_closed_to_other_users(tmp_path):
    with work_folder(tmp_path / "work", {}) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700


def test_settings_that_differ_that_came_and_that_went_are_named():
    before = {"seed": 1, "optimizer": {"lr": 0.1, "eps": 0.2}, "gone": None, "same": [1]}
    now = {"seed": 2, "optimizer": {"lr": 0.3, "eps": 0.2}, "came": "x", "same": [1]}
    assert differences(before, now) == [
        'came was not set, is "x"',
        "gone was null, is not set",
        "optimizer.lr was 0.1, is 0.3",
        "seed was 1, is 2",
    ]
