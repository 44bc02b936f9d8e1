"""Resume checkpoints on disk: intact or refused by name, the newest kept."""

import hashlib
import json
import os

import pytest

from tfidf_tune.training import _resume as resume_folder
from tfidf_tune.training._resume import ResumeFolder

FILES = {"a.safetensors": b"weights" * 40, "process_00000.pt": b"states", "settings.yaml": b"seed: 0\n"}


def write_files(folder):
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "._a.safetensors").touch()  # macOS writes such files on some network folders


@pytest.fixture
def resume(tmp_path):
    """Checkpoints of steps 2, 9 and 10: the newest is not the last by name."""
    resume = ResumeFolder(tmp_path / "run" / "resume", keep_last_n=3)
    for step in (2, 9, 10):
        resume.write(step, write_files)
    return resume


def names(resume):
    return sorted(path.name for path in resume.folder.iterdir())


def test_a_checkpoint_holds_what_was_written_and_a_manifest_in_format_2(resume):
    found = {path.name: path.read_bytes() for path in (resume.folder / "step_9").iterdir()}
    manifest = json.loads(found.pop("manifest.json"))

    assert found == FILES | {"._a.safetensors": b""}
    assert manifest == {
        "format_version": 2,
        "step": 9,
        "files": {
            name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in FILES.items()
        },
    }


def test_the_newest_intact_checkpoint_is_found_and_other_names_are_ignored(resume, tmp_path):
    for name in (".step_11.partial", "step_12.old", "step_x", "notes"):
        (resume.folder / name).mkdir()

    assert resume.newest_intact() == (resume.folder / "step_10", [])
    resume.write(13, write_files)
    assert {"step_12.old", "step_x", "notes"} < set(names(resume))
    assert ResumeFolder(tmp_path / "absent", keep_last_n=1).newest_intact() == (None, [])


def flip_a_bit(content):
    return content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("process_00000.pt", flip_a_bit, "process_00000.pt is not what was written (size or SHA-256)"),
        ("settings.yaml", None, "settings.yaml is missing"),
        ("manifest.json", lambda content: content[:50], "manifest.json cannot be read (JSONDecodeError: "),
        ("manifest.json", lambda content: b'{"files": {"settings.yaml": 3}}', "manifest.json cannot be read ("),
        (
            "manifest.json",
            lambda content: content.replace(b'version": 2', b'version": 7'),
            "another version of tfidf-tune wrote it, in format 7 instead of 2",
        ),
        ("manifest.json", lambda content: content.replace(b'step": 10', b'step": 11'), "manifest.json is of step 11"),
    ],
)
def test_a_damaged_file_is_named_and_the_previous_checkpoint_is_used(resume, name, damage, message):
    file = resume.folder / "step_10" / name
    content = file.read_bytes()
    file.unlink()
    if damage:
        file.write_bytes(damage(content))

    found, (damaged,) = resume.newest_intact()

    assert found == resume.folder / "step_9"
    assert damaged.startswith(f"{resume.folder / 'step_10'} is damaged: {message}")


def test_the_newest_are_kept_and_the_oldest_is_removed_last(resume, monkeypatch):
    """At every moment an intact checkpoint is on disk."""
    resume.write(12, write_files)
    assert names(resume) == ["step_10", "step_12", "step_9"]

    seen, remove = [], resume_folder.remove_folder
    monkeypatch.setattr(resume_folder, "remove_folder", lambda folder: (seen.append(names(resume)), remove(folder)))
    ResumeFolder(resume.folder, keep_last_n=1).write(13, write_files)

    assert seen[1] == ["step_10", "step_12", "step_13", "step_9"]
    assert names(resume) == ["step_13"]


def test_damaged_checkpoints_are_replaced_or_moved_aside_by_the_resumed_run(resume):
    for step in (9, 10):
        (resume.folder / f"step_{step}" / "a.safetensors").write_bytes(b"")
        (resume.folder / f"step_{step}" / "stray").touch()
    (resume.folder / ".step_9.partial").mkdir()
    (resume.folder / ".step_9.partial" / "stray").touch()

    ResumeFolder(resume.folder, keep_last_n=2).write(9, write_files)

    assert names(resume) == ["damaged_step_10", "step_2", "step_9"]
    assert resume.newest_intact() == (resume.folder / "step_9", [])
    assert not (resume.folder / "step_9" / "stray").exists()


def test_a_checkpoint_gets_its_name_when_all_of_it_is_on_disk(tmp_path, monkeypatch):
    """A machine that loses power may lose what was not synced, but never under the checkpoint's name."""
    synced, fsync = [], os.fsync

    def record(descriptor):
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), sorted(path.name for path in tmp_path.iterdir())))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    ResumeFolder(tmp_path, keep_last_n=1).write(5, write_files)

    partial = tmp_path / ".step_5.partial"
    assert synced == [
        *((str(partial / name), [partial.name]) for name in (*FILES, "manifest.json")),
        (str(partial), [partial.name]),
        (str(tmp_path), ["step_5"]),
    ]
