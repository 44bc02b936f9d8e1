"""What is written is whole or not there."""

import os
import shutil

import pytest

from tfidf_tune._files import atomic_file, atomic_folder, looks_like_path, remove_folder


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

    with atomic_folder(folder, replace=True) as temporary:
        (temporary / "new").write_text("new")
        assert [path.name for path in folder.iterdir()] == ["old"], "until the new one is whole"

    assert [path.name for path in folder.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [folder]


def test_a_replacement_that_fails_leaves_the_old_one(tmp_path):
    write(tmp_path / "folder", "old")

    def fail():
        with atomic_folder(tmp_path / "folder", replace=True) as temporary:
            (temporary / "half").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()

    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["folder", "folder/old"]


def test_what_replaces_nothing_is_just_written(tmp_path):
    write(tmp_path / "folder", "new", replace=True)

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
    write(folder, "new", replace=True)
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
