"""What is written is whole or not there."""

import pytest

from tfidf_tune._files import atomic_file, atomic_folder, looks_like_path


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
