"""A report that cannot be written leaves the one that was there whole, or none, and the message names the file."""

import re
import resource
import subprocess
import sys
from contextlib import contextmanager

import pytest
from jobs import can_mount
from run_fakes import grown_runs, write_run

from tfidf_tune import cli


@pytest.fixture
def experiment(tmp_path):
    for number, made in enumerate(grown_runs(num_passages=4, downstream=False)):
        write_run(tmp_path / "experiment" / str(number), made)
    return tmp_path / "experiment"


def compare(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["tfidf-tune", "compare", *map(str, arguments)])
    cli.main()


def contents(folder):
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@contextmanager
def files_of_at_most(num_bytes):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def small_disk(folder):
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def require_refused_and_unharmed(monkeypatch, experiment, out, reason, *options):
    before = contents(out) if out.exists() else None
    message = rf"^error: {re.escape(str(out))}/\S+ could not be written \({reason}\), .* left as it was: make room"
    with pytest.raises(SystemExit, match=message):
        compare(monkeypatch, experiment, "--output-dir", out, "--title", "Another", *options)
    assert (contents(out) if out.exists() else None) == before


# With the smaller limit the first file is refused, with the larger one only a later file.
@pytest.mark.parametrize(("limit", "options"), [(1_000, ()), (20_000, ["--frontier"])])
def test_a_quota_that_is_met_does_no_harm(limit, options, experiment, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with files_of_at_most(limit):
        require_refused_and_unharmed(monkeypatch, experiment, out, "File too large", *options)
    compare(monkeypatch, experiment, "--output-dir", out, *options)
    (out / "notes.txt").write_text("mine")
    with files_of_at_most(limit):
        require_refused_and_unharmed(monkeypatch, experiment, out, "File too large", *options)


def test_a_full_disk_does_no_harm(experiment, tmp_path, monkeypatch):
    if not can_mount():
        pytest.skip("takes the right to mount")
    disk = tmp_path / "disk"
    with small_disk(disk):
        compare(monkeypatch, experiment, "--output-dir", disk / "old")
        used = int(
            subprocess.run(["df", "--output=used", "-k", disk], capture_output=True, check=True).stdout.split()[-1]
        )
        for folder, room in ((disk / "new", 0), (disk / "old", used // 2)):
            subprocess.run(["mount", "-o", f"remount,size={used + room}k", "-t", "tmpfs", "tmpfs", disk], check=True)
            require_refused_and_unharmed(monkeypatch, experiment, folder, "No space left on device")
