"""The cache of tokenized text: who can read it, what is removed from it, and when."""

import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import stat

import numpy as np
import pytest
from helpers.processes.ranks import kill_when

from tfidf_tune.data import _cache as cache
from tfidf_tune.data import text_blocks_dataset, text_dataset
from tfidf_tune.data.sequences import cached_folder

DAY = 24 * 3600


@pytest.fixture(autouse=True)
def no_locks_of_other_tests(monkeypatch):
    """A process keeps its locks until it ends; here, until the test does."""
    monkeypatch.setattr(cache, "_locks", held := type(cache._locks)())
    yield
    end_use(held)


def end_use(held):
    while held:
        os.close(held.popleft())


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def make(root, name, build=lambda folder: {"number": 1}):
    return cached_folder(str(root), {"kind": "test", "name": name}, build)[0]


def make_old(path, days=31):
    os.utime(path, times=(0, path.stat().st_mtime - days * DAY))


def test_nobody_else_can_read_the_cache_and_other_folders_are_left_as_they_are(
    tokenizer, corpus_file, tmp_path
):
    own = tmp_path / "own"
    mixed = tmp_path / "mixed"
    mixed.mkdir(mode=0o755)
    (mixed / "thesis.tex").write_text("mine")
    mixed.chmod(0o755)
    for root in (own, mixed):
        dataset = text_blocks_dataset(
            tokenizer, source=str(corpus_file), block_size=16, cache_dir=str(root)
        )
        (entry,) = (path for path in root.iterdir() if path.is_dir())
        assert mode(entry) == 0o700
        assert len(dataset) > 0
    assert (mode(own), mode(mixed)) == (0o700, 0o755)
    # A cache of an earlier version is closed when it is used.
    (entry,) = own.iterdir()
    for path in (own, entry):
        path.chmod(0o755)
    text_blocks_dataset(tokenizer, source=str(corpus_file), block_size=16, cache_dir=str(own))
    assert (mode(own), mode(entry)) == (0o700, 0o700)


def test_an_entry_is_closed_before_it_has_text(tmp_path):
    seen = []

    def build(folder):
        seen.append(mode(folder))
        return {}

    make(tmp_path / "cache", "a", build)
    assert seen == [0o700]


def test_what_was_not_used_for_a_month_is_removed_and_nothing_else(tmp_path):
    root = tmp_path / "cache"
    old, used, recent = (make(root, name) for name in ("old", "used", "recent"))
    end_use(cache._locks)
    foreign = [
        root / "thesis",
        root / "0123456789abcdef",
        root / "notes.txt",
        root / ".hidden",
        root / "link",
    ]
    foreign[0].mkdir()
    foreign[1].mkdir()  # named as an entry
    (foreign[1] / "settings.json").write_text('{"mine": true}')
    foreign[2].write_text("mine")
    foreign[3].mkdir()
    elsewhere = shutil.copytree(old, tmp_path / "elsewhere")
    foreign[4].symlink_to(elsewhere)
    killed = root / f".{old.name}.tfidf-tune-{'0' * 32}"
    being_written = root / f".{used.name}.tfidf-tune-{'1' * 32}"
    for path in (killed, being_written):
        path.mkdir()
    for path in (old, used, killed, elsewhere, *foreign[:4]):
        make_old(path)
    make_old(recent, days=29)

    assert make(root, "used", build=None) == used  # which comes first, so that it is not removed
    assert not old.exists()
    assert not killed.exists()
    assert {*root.iterdir()} == {used, recent, being_written, *foreign}
    assert elsewhere.exists()
    assert make(root, "old") == old  # made again


def holding(entry, is_read, may_end):
    held = np.load(entry / "blocks.npy", mmap_mode="r") if cache.begin_use(entry) else None
    is_read.set()
    may_end.wait()
    assert int(held.sum()) == 6


def test_an_entry_that_another_process_may_read_stays(tmp_path):
    def build(folder):
        np.save(folder / "blocks.npy", np.arange(4))
        return {}

    entry = make(tmp_path, "read", build)
    end_use(cache._locks)
    context = multiprocessing.get_context("fork")
    is_read = context.Event()
    may_end = context.Event()
    process = context.Process(target=holding, args=(entry, is_read, may_end))
    process.start()
    is_read.wait()
    make_old(entry)
    make(tmp_path, "another")
    assert entry.exists()
    may_end.set()
    process.join()
    assert process.exitcode == 0
    make(tmp_path, "another")
    assert not entry.exists()


def test_a_killed_removal_leaves_no_half_entry(tmp_path):
    entry = make(tmp_path, "old")
    end_use(cache._locks)
    make_old(entry)
    removing = ("os.rename", "os.remove", "shutil.rmtree", "os.rmdir")
    for moment in range(20):
        seen = 0

        def is_moment(event, given, moment=moment):
            nonlocal seen
            seen += event in removing
            return event in removing and seen > moment

        was_killed = kill_when(is_moment, make, tmp_path, "another")
        assert not entry.exists() or json.loads((entry / "settings.json").read_text())[
            "counts"
        ] == {"number": 1}
        if not was_killed:
            break
    assert not was_killed
    leftovers = [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    for path in leftovers:
        make_old(path)
    make(tmp_path, "another")
    assert [path.name for path in tmp_path.iterdir()] == [make(tmp_path, "another").name]


def test_an_entry_that_is_removed_while_it_is_looked_up_is_made_again(tmp_path, monkeypatch):
    entry = make(tmp_path, "a")
    end_use(cache._locks)
    lock = fcntl.flock

    def removed_meanwhile(descriptor, operation):
        if entry.exists():
            shutil.rmtree(entry)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    assert not cache.begin_use(entry)
    monkeypatch.setattr(fcntl, "flock", lock)
    assert make(tmp_path, "a") == entry


def test_where_there_are_no_locks_nothing_is_removed(tmp_path, monkeypatch):
    entry = make(tmp_path, "old")
    make_old(entry)

    def no_locks(*_):
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    make(tmp_path, "another")
    assert entry.exists()


def test_a_cache_that_cannot_be_written_is_read(tmp_path, monkeypatch):
    entry = make(tmp_path, "a")
    old = make(tmp_path, "old")
    end_use(cache._locks)
    make_old(old)
    make_old(entry, days=90)

    def read_only(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("utime", "chmod", "rename", "mkdir"):
        monkeypatch.setattr(os, name, read_only)
    monkeypatch.setattr(cache, "remove_folder", read_only)
    assert make(tmp_path, "a", build=None) == entry
    assert old.exists()


def test_processes_that_start_together_remove_the_same(tmp_path):
    for number in range(20):
        make_old(make(tmp_path, str(number)))
    end_use(cache._locks)
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=make, args=(tmp_path, f"new {number % 2}")) for number in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert {*tmp_path.iterdir()} == {make(tmp_path, f"new {number}") for number in range(2)}


def test_an_entry_of_another_user_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    entry = make(tmp_path, "theirs")
    open_file = os.open

    def closed(path, *more):
        if str(path).startswith(str(entry)):
            raise PermissionError(13, "Permission denied", str(path))
        return open_file(path, *more)

    monkeypatch.setattr(os, "open", closed)
    with pytest.raises(
        PermissionError,
        match="is of another user of this machine: name a folder of your own by cache",
    ):
        make(tmp_path, "theirs")


def test_a_process_holds_few_files_open(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_MOST_LOCKS", 2)
    for number in range(5):
        make(tmp_path, str(number))
    assert len(cache._locks) == 2


@pytest.mark.parametrize("damage", ["cut", "empty", "missing", "longer"])
@pytest.mark.parametrize("kind", ["blocks", "sequences"])
def test_a_damaged_entry_is_made_again(tokenizer, corpus_file, tmp_path, caplog, kind, damage):
    """Each file of an entry in turn."""

    def build():
        arguments = {"source": str(corpus_file), "cache_dir": str(tmp_path / "cache")}
        if kind == "blocks":
            return text_blocks_dataset(tokenizer, block_size=16, holdout=0.2, **arguments)
        return text_dataset(tokenizer, max_seq_len=16, **arguments)

    first = build()
    rows = list(first)
    passages = getattr(first, "passages", None)
    (entry,) = (tmp_path / "cache").iterdir()
    written = {file.name: file.read_bytes() for file in entry.iterdir()}
    assert len(written) == {"blocks": 3, "sequences": 5}[kind]
    for name, content in written.items():
        file = entry / name
        if damage == "missing":
            file.unlink()
        else:
            file.write_bytes(
                {"cut": content[: len(content) // 2], "empty": b"", "longer": content + b" x"}[
                    damage
                ]
            )
        again = build()
        assert list(again) == rows
        assert getattr(again, "passages", None) == passages
        assert {file.name: file.read_bytes() for file in entry.iterdir()} == written, name
        assert f"{entry} is damaged" in caplog.text
        caplog.clear()
    assert [*(tmp_path / "cache").iterdir()] == [entry]


def test_a_damaged_entry_that_cannot_be_removed_is_named(tmp_path, monkeypatch):
    entry = make(tmp_path, "a")
    (entry / "settings.json").write_text("{")

    def read_only(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(cache, "remove_folder", read_only)
    with pytest.raises(
        OSError,
        match=rf"{entry} is damaged and could not be removed \(Read-only file system\): rem",
    ):
        make(tmp_path, "a")
