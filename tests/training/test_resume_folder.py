"""Resume checkpoints on disk: intact or refused by name, the newest kept."""

import hashlib
import json
import os

import pytest

from tfidf_tune.training import _resume
from tfidf_tune.training._resume import ResumePoint, newest_intact, write_checkpoint

FILES = {
    "a.safetensors": b"weights" * 40,
    "process_00000.pt": b"states",
    "settings.yaml": b"seed: 0\n",
}


def write_files(folder):
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "._a.safetensors").touch()  # macOS writes such files on some network folders


def write(folder, step, keep_last_n=3):
    write_checkpoint(folder, step, write_files, keep_last_n=keep_last_n)


@pytest.fixture
def resume(tmp_path):
    """Checkpoints of steps 2, 9 and 10: the newest is not the last by name."""
    for step in (2, 9, 10):
        write(tmp_path / "run" / "resume", step)
    return tmp_path / "run" / "resume"


def names(resume):
    return sorted(path.name for path in resume.iterdir())


def test_a_checkpoint_holds_what_was_written_and_a_manifest_in_format_2(resume):
    found = {path.name: path.read_bytes() for path in (resume / "step_9").iterdir()}
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
        (resume / name).mkdir()

    assert newest_intact(resume) == (resume / "step_10", [])
    write(resume, 13)
    assert {"step_12.old", "step_x", "notes"} < set(names(resume))
    assert newest_intact(tmp_path / "absent") == (None, [])


def flip_a_bit(content):
    return content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("process_00000.pt", flip_a_bit, "process_00000.pt"),
        ("settings.yaml", None, "settings.yaml"),
        ("manifest.json", lambda content: content[:50], "cannot be read"),
        ("manifest.json", lambda content: b'{"files": {"settings.yaml": 3}}', "cannot be read"),
        (
            "manifest.json",
            lambda content: content.replace(b'version": 2', b'version": 7'),
            "format 7 instead of 2",
        ),
        ("manifest.json", lambda content: content.replace(b'step": 10', b'step": 11'), "step 11"),
    ],
)
def test_a_damaged_file_is_named_and_the_previous_checkpoint_is_used(resume, name, damage, message):
    file = resume / "step_10" / name
    content = file.read_bytes()
    file.unlink()
    if damage:
        file.write_bytes(damage(content))

    found, (damaged,) = newest_intact(resume)

    assert found == resume / "step_9"
    assert damaged.startswith(f"{resume / 'step_10'} is damaged: ")
    assert message in damaged


def test_the_newest_are_kept_and_the_oldest_is_removed_last(resume, monkeypatch):
    """At every moment an intact checkpoint is on disk."""
    write(resume, 12)
    assert names(resume) == ["step_10", "step_12", "step_9"]

    seen = []
    remove = _resume.remove_folder
    monkeypatch.setattr(
        _resume, "remove_folder", lambda folder: (seen.append(names(resume)), remove(folder))
    )
    write(resume, 13, keep_last_n=1)

    assert seen[1] == ["step_10", "step_12", "step_13", "step_9"]
    assert names(resume) == ["step_13"]


def test_a_resumed_run_removes_what_a_killed_run_had_not_and_keeps_newer_ones(resume):
    point = ResumePoint(resume, 1, {}, None)
    point.step = 9  # step_10 is damaged
    point.restore(None)
    assert names(resume) == ["step_10", "step_9"]


def test_damaged_checkpoints_are_replaced_or_moved_aside_by_the_resumed_run(resume):
    for step in (9, 10):
        (resume / f"step_{step}" / "a.safetensors").write_bytes(b"")
        (resume / f"step_{step}" / "stray").touch()
    (resume / ".step_9.partial").mkdir()
    (resume / ".step_9.partial" / "stray").touch()

    write(resume, 9, keep_last_n=2)

    assert names(resume) == ["damaged_step_10", "step_2", "step_9"]
    assert newest_intact(resume) == (resume / "step_9", [])
    assert not (resume / "step_9" / "stray").exists()


def test_a_checkpoint_gets_its_name_when_all_of_it_is_on_disk(tmp_path, monkeypatch):
    """A machine that loses power may lose what was not synced, but never under the checkpoint's
    name.
    """
    synced = []
    fsync = os.fsync

    def record(descriptor):
        synced.append(
            (
                os.readlink(f"/proc/self/fd/{descriptor}"),
                sorted(path.name for path in tmp_path.iterdir()),
            )
        )
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    write(tmp_path, 5, keep_last_n=1)

    partial = tmp_path / ".step_5.partial"
    assert synced == [
        *((str(partial / name), [partial.name]) for name in (*FILES, "manifest.json")),
        (str(partial), [partial.name]),
        (str(tmp_path), ["step_5"]),
    ]


def test_the_steps_of_an_epoch_count_its_last_mini_batch_and_an_optimizer_step_of_fewer(tmp_path):
    settings = {"batch_size x processes": 4, "gradient_accumulation_steps": 2}
    point = ResumePoint(tmp_path, 3, settings, None)

    # Of 33 sequences one process has 9 mini-batches; each of two has 16 sequences in 8.
    assert [point._steps_per_epoch(range(33), number) for number in (1, 2)] == [5, 4]
