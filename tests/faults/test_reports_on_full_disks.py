"""A report that cannot be written leaves the one that was there whole, or none, and the message names the file."""

import re
import resource
import sys
from contextlib import contextmanager

import pytest
from run_fakes import grown_runs, write_run

from tfidf_tune import cli


@contextmanager
def files_of_at_most(num_bytes):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def contents(folder):
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_quota_that_is_met_does_no_harm(tmp_path, monkeypatch):
    """With the smaller limit the first file is refused, with the larger one only a later file."""
    for number, made in enumerate(grown_runs(num_passages=4, downstream=False)):
        write_run(tmp_path / "experiment" / str(number), made)
    old, new = tmp_path / "old", tmp_path / "new"
    compare = ["tfidf-tune", "compare", str(tmp_path / "experiment"), "--output-dir"]
    monkeypatch.setattr(sys, "argv", [*compare, str(old)])
    cli.main()
    (old / "notes.txt").write_text("mine")
    before = contents(old)

    for limit, out in ((1_000, new), (200_000, old)):
        monkeypatch.setattr(sys, "argv", [*compare, str(out), "--title", "Another"])
        refusal = rf"^error: {re.escape(str(out))}/\S+ could not be written \(File too large\), .* left as it was: make"
        with files_of_at_most(limit), pytest.raises(SystemExit, match=refusal):
            cli.main()

    assert not new.exists()
    assert contents(old) == before
