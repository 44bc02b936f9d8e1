"""Resume checkpoints on the disk: whole or refused by name, the newest kept."""

import hashlib
import json
import os

import pytest

from tfidf_tune.training import SetupError, TrainingError
from tfidf_tune.training import _resume_folder as resume_folder
from tfidf_tune.training._resume_folder import ResumeFolder, checkpoint_files

FILES = {"a.safetensors": b"weights" * 40, "process_00000.pt": b"states", "settings.yaml": b"seed: 0\n"}


def write_files(folder, files=FILES):
    for name, content in files.items():
        (folder / name).write_bytes(content)


def nothing_lacks(checkpoint):
    """Whatever the manifest lists is enough."""
    assert (checkpoint / "manifest.json").is_file()


@pytest.fixture
def resume(tmp_path):
    """Checkpoints of steps 2, 10 and 9, written in this order; the newest is not the last by name."""
    resume = ResumeFolder(tmp_path / "run" / "resume", keep_last_n=3)
    for step in (2, 9, 10):
        resume.write(step, write_files)
    return resume


def names(resume):
    return sorted(path.name for path in resume.folder.iterdir())


def test_a_checkpoint_is_what_was_written_and_a_manifest(resume):
    checkpoint = resume.folder / "step_9"
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.name != "manifest.json"} == FILES

    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert manifest["step"] == 9
    assert {name: entry["size"] for name, entry in manifest["files"].items()} == {
        name: len(content) for name, content in FILES.items()
    }

    assert manifest["files"]["process_00000.pt"]["sha256"] == hashlib.sha256(b"states").hexdigest()
    assert checkpoint_files(checkpoint) == sorted(FILES)


def test_the_newest_is_that_of_the_highest_step(resume):
    assert resume.newest_intact(nothing_lacks) == (resume.folder / "step_10", [])


def test_a_checkpoint_that_lacks_something_is_damaged(resume):
    asked = []

    def check(checkpoint):
        asked.append(checkpoint_files(checkpoint))
        if checkpoint.name == "step_10":
            raise ValueError("its manifest does not list b")

    assert resume.newest_intact(check) == (
        resume.folder / "step_9",
        [f"{resume.folder / 'step_10'} is damaged: its manifest does not list b"],
    )
    assert asked == [sorted(FILES)] * 2


def test_hidden_files_of_a_file_system_are_no_part_of_a_checkpoint(tmp_path):
    """macOS writes ._name beside each file on some network folders."""
    ResumeFolder(tmp_path, keep_last_n=1).write(
        5, lambda folder: write_files(folder, {**FILES, "._a.safetensors": b""})
    )

    assert checkpoint_files(tmp_path / "step_5") == sorted(FILES)


def test_there_may_be_none(tmp_path):
    assert ResumeFolder(tmp_path / "absent", keep_last_n=1).newest_intact(nothing_lacks) == (None, [])
    (tmp_path / "present").mkdir()
    assert ResumeFolder(tmp_path / "present", keep_last_n=1).newest_intact(nothing_lacks) == (None, [])


def test_the_newest_are_kept(resume):
    resume.write(12, write_files)
    assert names(resume) == ["step_10", "step_12", "step_9"]

    ResumeFolder(resume.folder, keep_last_n=1).write(13, write_files)
    assert names(resume) == ["step_13"]


def test_the_older_one_goes_when_the_newer_one_is_there(tmp_path, monkeypatch):
    """At every moment a whole checkpoint is on the disk."""
    resume = ResumeFolder(tmp_path, keep_last_n=1)
    resume.write(1, write_files)
    seen = []
    original = resume_folder.remove_folder

    def remove(folder):
        seen.append((folder.name, sorted(path.name for path in tmp_path.glob("step_*"))))
        original(folder)

    monkeypatch.setattr(resume_folder, "remove_folder", remove)
    resume.write(2, write_files)

    assert ("step_1", ["step_1", "step_2"]) in seen
    assert names(resume) == ["step_2"]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path):
    path.write_bytes(b"")


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def delete(path):
    path.unlink()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (truncate, "{name} has {less} bytes instead of {size}"),
        (empty, "{name} has 0 bytes instead of {size}"),
        (zero, "{name} is not what was written (SHA-256)"),
        (flip_a_bit, "{name} is not what was written (SHA-256)"),
        (delete, "{name} is missing"),
    ],
)
@pytest.mark.parametrize("name", FILES)
def test_any_damaged_file_is_told_and_the_checkpoint_before_is_used(resume, name, damage, told):
    damage(resume.folder / "step_10" / name)

    size = len(FILES[name])
    expected = told.format(name=name, size=size, less=size - 1)
    assert resume.newest_intact(nothing_lacks) == (
        resume.folder / "step_9",
        [f"{resume.folder / 'step_10'} is damaged: {expected}"],
    )


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [halve, empty, zero, delete])
def test_a_damaged_manifest_is_told_and_the_checkpoint_before_is_used(resume, damage):
    damage(resume.folder / "step_10" / "manifest.json")

    found, [told] = resume.newest_intact(nothing_lacks)

    assert found == resume.folder / "step_9"
    assert told.startswith(f"{resume.folder / 'step_10'} is damaged: manifest.json cannot be read (")


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"files": []}', '{"files": {"settings.yaml": 3}, "format_version": 2}', '"text"', "null"]
)
def test_a_manifest_that_is_something_else_is_damage_and_no_crash(resume, content):
    (resume.folder / "step_10" / "manifest.json").write_text(content)

    found, damages = resume.newest_intact(nothing_lacks)

    assert found == resume.folder / "step_9"
    assert "manifest.json cannot be read" in damages[0]


def test_a_manifest_of_a_later_format_is_refused(resume):
    file = resume.folder / "step_10" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format_version": 7}))

    assert "wrote it, in format 7; this one reads format 2" in resume.newest_intact(nothing_lacks)[1][0]


def test_a_manifest_of_another_step_is_damage(resume):
    """Data and schedule would go on elsewhere than weights."""
    file = resume.folder / "step_10" / "manifest.json"
    file.write_text(file.read_text().replace('"step": 10', '"step": 11'))

    assert resume.newest_intact(nothing_lacks)[1] == [
        f"{resume.folder / 'step_10'} is damaged: manifest.json is of step 11"
    ]


def test_a_damaged_newer_one_takes_no_place(resume):
    """The run went on from step 2 and saves at step 5: what it abandoned must not push that out."""
    for step in (9, 10):
        zero(resume.folder / f"step_{step}" / "a.safetensors")
    assert resume.newest_intact(nothing_lacks)[0] == resume.folder / "step_2"

    ResumeFolder(resume.folder, keep_last_n=1).write(5, write_files)

    assert sorted(names(resume)) == ["damaged_step_10", "damaged_step_9", "step_5"]


def test_each_damage_is_told_the_newest_first(resume):
    delete(resume.folder / "step_10" / "settings.yaml")
    zero(resume.folder / "step_9" / "a.safetensors")

    found, damages = resume.newest_intact(nothing_lacks)

    assert found == resume.folder / "step_2"
    assert [told.split(" is damaged: ")[1] for told in damages] == [
        "settings.yaml is missing", "a.safetensors is not what was written (SHA-256)",
    ]  # fmt: skip


def test_when_none_is_whole_all_are_named(resume):
    for step in (2, 9, 10):
        delete(resume.folder / f"step_{step}" / "settings.yaml")

    with pytest.raises(SetupError) as refusal:
        resume.newest_intact(nothing_lacks)

    message = str(refusal.value)
    assert message.startswith(f"no resume checkpoint is intact: {resume.folder / 'step_10'} is damaged: settings.yaml")
    assert all(f"step_{step} is damaged" in message for step in (2, 9))
    assert "to start from the beginning" in message


def test_what_is_no_checkpoint_is_passed_over(resume):
    for name in (".step_11.partial", "step_12.old", "step_x", "notes"):
        (resume.folder / name).mkdir()

    assert resume.newest_intact(nothing_lacks) == (resume.folder / "step_10", [])
    resume.write(13, write_files)
    assert {"step_12.old", "step_x", "notes"} < set(names(resume))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("lost"), ValueError("odd")])
def test_a_write_that_fails_leaves_the_earlier_ones_and_nothing_else(resume, error):
    before = {path: path.read_bytes() for path in resume.folder.rglob("*") if path.is_file()}

    def fail(folder):
        (folder / "a.safetensors").write_bytes(b"half")
        raise error

    with pytest.raises(TrainingError, match=r"resume checkpoint .*step_11 could not be written: .*(space|lost|odd)"):
        resume.write(11, fail)

    assert names(resume) == ["step_10", "step_2", "step_9"]
    assert {path: path.read_bytes() for path in before} == before


def test_a_folder_that_cannot_be_made_is_one_message(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(TrainingError, match="could not be written: .*(Not a directory|File exists)"):
        ResumeFolder(tmp_path / "file" / "resume", keep_last_n=1).write(1, write_files)


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(resume):
    """The run went on from the one before, and comes by the step again."""
    zero(resume.folder / "step_10" / "a.safetensors")
    (resume.folder / "step_10" / "stray").touch()

    resume.write(10, write_files)

    assert resume.newest_intact(nothing_lacks) == (resume.folder / "step_10", [])
    assert not (resume.folder / "step_10" / "stray").exists()


def test_what_a_killed_process_left_is_overwritten(resume):
    partial = resume.folder / ".step_11.partial"
    partial.mkdir()
    (partial / "stray").touch()

    resume.write(11, write_files)

    assert sorted(path.name for path in (resume.folder / "step_11").iterdir()) == [
        "a.safetensors", "manifest.json", "process_00000.pt", "settings.yaml",
    ]  # fmt: skip
    assert not partial.exists()


def test_a_checkpoint_gets_its_name_when_all_of_it_is_on_the_disk(tmp_path, monkeypatch):
    """A machine that loses power may lose what was not synced, but never under the checkpoint's name."""
    synced, fsync = [], os.fsync

    def record(descriptor):
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), sorted(path.name for path in tmp_path.iterdir())))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    ResumeFolder(tmp_path, keep_last_n=1).write(5, write_files)

    before = {path for path, there in synced if there == [".step_5.partial"]}
    partial = tmp_path / ".step_5.partial"
    assert before == {str(partial), *(str(partial / name) for name in (*FILES, "manifest.json"))}
    manifest = [path for path, _ in synced].index(str(partial / "manifest.json"))
    assert manifest == len(FILES), "the manifest is the last of the files"
    assert (str(tmp_path), ["step_5"]) in synced


def test_leftovers_of_killed_processes_are_removed_and_nothing_else(resume):
    (resume.folder / ".step_11.partial" / "sub").mkdir(parents=True)
    (resume.folder / ".step_9.0123").mkdir()
    (resume.folder / "notes").mkdir()

    resume.remove_leftovers()

    assert names(resume) == ["notes", "step_10", "step_2", "step_9"]


def test_where_there_is_no_folder_there_are_no_leftovers(tmp_path):
    ResumeFolder(tmp_path / "absent", keep_last_n=1).remove_leftovers()
