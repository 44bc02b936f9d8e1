"""What cannot be written completely is an error, and the next run completes it; older files stay
whole.
"""

import errno
import gzip
import io
import json
import random
import re
import resource
import sys
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import pytest
from helpers.fakes import tasks as task_fakes
from helpers.fakes.runs import grown_runs, write_run

from research.experiment import _job
from tfidf_tune import cli
from tfidf_tune.commands import data, tasks


@contextmanager
def files_of_at_most(num_bytes):
    """Refuse to write more into a file. What is printed goes nowhere, because pytest keeps it in
    files.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def contents(folder):
    return {
        file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()
    }


def test_a_report_that_meets_a_quota_does_no_harm(tmp_path, monkeypatch):
    """With the smaller limit the first file is refused, with the larger one only a later file."""
    for number, made in enumerate(grown_runs(num_passages=4, downstream=False)):
        write_run(tmp_path / "experiment" / str(number), made)
    old = tmp_path / "old"
    new = tmp_path / "new"
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


@pytest.mark.usefixtures("only_our_tasks")
@pytest.mark.parametrize("entry", ["function", "command", "command with the name of a file"])
def test_an_evaluation_is_written_completely_or_not_at_all(
    entry, tiny_checkpoint, tmp_path, run_command, monkeypatch
):
    """The harness itself logs an error of writing and goes on."""
    passages = task_fakes.passages_of(
        tiny_checkpoint, num_targets=20, num_controls=0, num_tokens=40
    )
    settings = {
        "probe_file": task_fakes.probe_file(tmp_path / "probe.jsonl", passages),
        "max_new_tokens": 4,
    }
    settings["prefix_lengths"] = [16]
    task = "tfidf_memorization_prefixes"
    file_name = "mine.json" if entry == "command with the name of a file" else ""

    def evaluate(folder):
        if entry == "function":
            task_fakes.run_tasks(tiny_checkpoint, task, folder, **settings)
            return
        model = ["--model_args", f"pretrained={tiny_checkpoint},dtype=float32", "--device", "cpu"]
        output = ["--log_samples", "--output_path", folder / file_name]
        metadata = [f"{key}={value}" for key, value in settings.items()]
        run_command("eval", *model, "--tasks", task, *output, "--metadata", *metadata)

    evaluate(tmp_path / "out")
    before = contents(tmp_path / "out")
    size_of_results, size_of_samples = sorted(map(len, before.values()))
    message = f"could not be written completely to {tmp_path}.* make room"

    for limit in (100, (size_of_results + size_of_samples) // 2):
        with files_of_at_most(limit), pytest.raises((OSError, SystemExit), match=message):
            evaluate(tmp_path / "out")
        assert contents(tmp_path / "out") == before

    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr("lm_eval.simple_evaluate", lambda **_: pytest.fail("the model was loaded"))
    with pytest.raises(
        (OSError, SystemExit), match="output_path .*/file.* cannot be written: .*Not a directory"
    ):
        evaluate(tmp_path / "file")


def test_deduplicated_text_is_complete_or_an_error(tmp_path):
    """The last bytes, which are written when a file is closed, are not lost."""
    rng = random.Random(0)
    rows = [{"text": f"{rng.getrandbits(400):x}"} for _ in range(300)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))

    def dedup(name):
        data.main(["dedup", str(tmp_path / "in.jsonl"), str(tmp_path / name), "--method", "exact"])
        (file,) = (tmp_path / name).glob("*.gz")
        assert [
            json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()
        ] == rows
        return file.stat().st_size

    size = dedup("whole")
    for missing in (1, 5000):
        with files_of_at_most(size - missing), pytest.raises(OSError, match="File too large"):
            dedup(f"{missing}")
        assert dedup(f"{missing}") == size


def test_a_run_of_an_experiment_is_claimed_with_its_first_event_or_not_at_all(tmp_path):
    journal = tmp_path / "0.jsonl"
    with files_of_at_most(5), pytest.raises(OSError, match="File too large"):
        _job.claim(journal, "7")
    assert not list(tmp_path.iterdir())
    assert [_job.claim(journal, job) for job in ("7", "8")] == [True, False]
    journal.write_text(journal.read_text() + '{"event": "be')
    assert _job.events_of(journal) == [{"event": "claimed", "job": "7"}]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left"), OSError("9 requested and 5 written")]
)
def test_the_message_of_a_full_disk_has_a_remedy(monkeypatch, error):
    def fail(_):
        raise error

    monkeypatch.setattr(tasks, "main", fail)
    monkeypatch.setattr(sys, "argv", ["tfidf-tune", "tasks"])
    with pytest.raises(SystemExit, match="make room, and run the same command again"):
        cli.main()
