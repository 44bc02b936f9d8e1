"""The parts of an experiment that start, watch and describe processes."""

import io
import json
import os
import signal
import sys

import pytest

import tfidf_tune.tasks
from tfidf_tune.experiment import _worker
from tfidf_tune.experiment._children import Children, Stopped
from tfidf_tune.experiment._processes import PlainLines, exit_reason, last_lines, locked, run_logged
from tfidf_tune.experiment._progress import Progress, Step, duration


def test_output_on_a_terminal_is_passed_on_as_it_is_and_kept_as_lines(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    code = "import sys; sys.stdout.buffer.write('0 %\\r50 %\\r\\x1b[32m100 %\\x1b[0m\\nünï\\r\\nend'.encode())"

    with locked(tmp_path) as lock:
        status = run_logged([sys.executable, "-c", code], tmp_path / "log", Children(lock))

    assert status == 0
    assert sys.stdout.getvalue() == "0 %\r50 %\r\x1b[32m100 %\x1b[0m\nünï\r\nend"
    assert (tmp_path / "log").read_text() == "100 %\nünï\nend\n"
    assert last_lines(tmp_path / "log", 2) == ["ünï", "end"]
    assert last_lines(tmp_path / "none", 2) == []


def test_what_is_started_holds_the_lock_too(tmp_path):
    code = "import fcntl, sys; fcntl.flock(int(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"

    with locked(tmp_path) as lock:
        assert run_logged([sys.executable, "-c", code, str(lock)], tmp_path / "log", Children(lock)) == 0, (
            "the same lock"
        )


@pytest.mark.parametrize(
    ("jobs", "own", "given"), [(1, None, None), (2, None, "4"), (3, None, "2"), (20, None, "1"), (2, "7", "7")]
)
def test_processes_share_the_cpus_unless_the_user_has_said_how(tmp_path, monkeypatch, jobs, own, given):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if own:
        monkeypatch.setenv("OMP_NUM_THREADS", own)
    code = "import os; print(os.environ.get('OMP_NUM_THREADS'))"

    with locked(tmp_path) as lock:
        run_logged([sys.executable, "-c", code], tmp_path / "log", Children(lock, jobs))

    assert (tmp_path / "log").read_text() == f"{given}\n"


def test_what_has_been_told_to_end_starts_nothing_more(tmp_path):
    with locked(tmp_path) as lock:
        children = Children(lock, 2)
        process = children.start([sys.executable, "-c", "import time; time.sleep(60)"])
        children.stop()
        assert process.wait(timeout=30) == -15
        with pytest.raises(Stopped):
            children.start([sys.executable, "-c", ""])


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_plain_lines_do_not_depend_on_how_text_arrives(size):
    text = "\r 1%|\r 2%|\r\n\nnext\x1b[A line\r\n\r100%|==|\nlast"
    out = io.StringIO()
    with PlainLines(out) as lines:
        for first in range(0, len(text), size):
            lines.write(text[first : first + size])

    assert out.getvalue() == " 2%|\n\nnext line\n100%|==|\nlast\n"


def test_a_long_run_puts_a_progress_bar_into_a_log_now_and_then(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    out = io.StringIO()
    lines = PlainLines(out)
    for percent in range(10):
        now[0] = 10.0 * percent
        lines.write(f"\r{percent} %")
    lines.write("\r100 %\n")

    # Each is seen when the next comes: after 30 seconds, and 30 seconds later.
    assert out.getvalue() == "2 %\n5 %\n8 %\n100 %\n"


@pytest.mark.parametrize(
    ("status", "reason"),
    [(2, "ended with exit code 2"), (-15, "was ended by SIGTERM"),
     (-9, "was ended by SIGKILL, perhaps because memory ran out")],
)  # fmt: skip
def test_how_a_process_ended(status, reason):
    assert exit_reason(status) == reason


def test_a_folder_is_had_by_one_at_a_time(tmp_path):
    with locked(tmp_path / "out"), pytest.raises(BlockingIOError, match="another experiment"), locked(tmp_path / "out"):
        pass
    with locked(tmp_path / "out"):
        pass


def test_the_rest_is_estimated_from_cells_of_the_same_kind_of_the_same_model_first(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    small, large = (Step("training", name, name, f"train {name}") for name in ("small", "large"))
    evaluation = Step("evaluation", "small", "small", "evaluate small")
    progress = Progress([small, evaluation, large, large], [(large, 100.0)])

    progress.begin(small)  # 100 s as far as is known for each training, nothing for the evaluation
    now[0] = 10.0
    progress.end(small)
    progress.begin(evaluation)
    now[0] = 12.0
    progress.end(evaluation)
    progress.begin(large)
    progress.fail(large, "no luck", ["log: x"], [large])
    progress.begin(large)

    assert capsys.readouterr().out.splitlines() == [
        "[1/4] train small  (0 s so far)",
        "    done in 10 s",
        "[2/4] evaluate small  (10 s so far)",
        "    done in 2 s",
        "[3/4] train large  (12 s so far, about 3 min 20 s to go)",
        "    failed: no luck",
        "    log: x",
        "[4/4] train large  (12 s so far, about 1 min 40 s to go)",
    ]


def test_the_rest_of_runs_at_once_is_as_long_as_the_job_that_ends_last(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    training, evaluation = (
        {run: Step(kind, "m", run, f"{run} {kind}") for run in "abc"} for kind in ("training", "evaluation")
    )
    to_do = [step for run in "abc" for step in (training[run], evaluation[run])]
    progress = Progress(to_do, [(training["a"], 100.0), (evaluation["a"], 20.0)], jobs=2)

    progress.begin(training["a"])  # a and then c: 240 s, b: 120 s
    progress.begin(training["b"])
    now[0] = 70.0
    progress.fail(training["b"], "no luck", ["| why", "log: x"], [training["b"], evaluation["b"]])
    progress.begin(training["c"])  # a: 30 s and 20 s; c: 120 s
    progress.note(training["c"], "making")
    now[0] = 90.0
    progress.end(training["a"])  # which needed 90 s, so that 95 s are the mean: a: 20 s; c: 75 s and 20 s

    assert capsys.readouterr().out.splitlines() == [
        "begun   a training  (6 of 6 left, 0 s so far, about 4 min 00 s to go)",
        "begun   b training  (6 of 6 left, 0 s so far, about 4 min 00 s to go)",
        "failed  b training: no luck  (4 of 6 left, 1 min 10 s so far, about 2 min 00 s to go)",
        "    | why",
        "    log: x",
        "begun   c training  (4 of 6 left, 1 min 10 s so far, about 2 min 00 s to go)",
        "        c training: making",
        "done    a training in 1 min 30 s  (3 of 6 left, 1 min 30 s so far, about 1 min 35 s to go)",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.7, "1 h 00 min"),
        (7620, "2 h 07 min"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.fixture
def job(tmp_path):
    return {"folder": str(tmp_path / "run" / "part1"), "tasks": {"a": {"limit": 3}}, "arguments": {"model_args": {}}}


def test_the_worker_leaves_results_and_manifest_or_nothing(tmp_path, monkeypatch, job):
    def evaluate(model_args, tasks, output_path):
        assert tasks == ["a"]
        (output_path / "results.json").write_text("{}")

    monkeypatch.setattr(tfidf_tune.tasks, "evaluate", evaluate)
    assert _worker._answer("evaluation", job) is None
    assert {path.name for path in (tmp_path / "run" / "part1").iterdir()} == {"results.json", "evaluated.json"}
    manifest = json.loads((tmp_path / "run" / "part1" / "evaluated.json").read_text())
    assert manifest["tasks"] == job["tasks"]
    assert manifest["seconds"] >= 0


@pytest.mark.parametrize("error", [RuntimeError("no memory\nat all"), SystemExit("no memory")])
def test_what_fails_in_the_worker_is_an_answer(tmp_path, monkeypatch, job, capsys, error):
    def evaluate(model_args, tasks, output_path):
        (output_path / "half").touch()
        raise error

    monkeypatch.setattr(tfidf_tune.tasks, "evaluate", evaluate)

    assert _worker._answer("evaluation", job) == f"{type(error).__name__}: no memory"
    assert list((tmp_path / "run").iterdir()) == []
    assert "Traceback" in capsys.readouterr().err


def test_the_worker_leaves_a_whole_start_or_nothing(tmp_path, capsys):
    job = {
        "folder": str(tmp_path / "starts" / "seed3"), "component": "experiment_stubs.write_start",
        "model": {"sizes": "S"}, "seed": 3, "arguments": {"content": "mine"},
    }  # fmt: skip

    assert _worker._answer("start", job) is None
    assert [path.name for path in (tmp_path / "starts").iterdir()] == ["seed3"]
    assert (tmp_path / "starts" / "seed3" / "model").read_text() == "mine"
    assert capsys.readouterr().out == "making S with seed 3\n", "in plain lines"

    job |= {"folder": str(tmp_path / "starts" / "seed4"), "arguments": {"error": "no luck"}}
    assert _worker._answer("start", job) == "RuntimeError: no luck"
    assert [path.name for path in (tmp_path / "starts").iterdir()] == ["seed3"]


def test_the_worker_prints_to_the_log_that_a_job_names(tmp_path, monkeypatch):
    component = {"component": "experiment_stubs.write_start", "model": {"sizes": "S"}, "arguments": {"noise": "loud"}}
    jobs = [
        {
            "kind": "start",
            "log": str(tmp_path / f"log{number}"),
            "job": {"folder": str(tmp_path / f"seed{number}"), "seed": number, **component},
        }
        for number in (0, 1)
    ]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(json.dumps(job) + "\n" for job in jobs)))
    handler = signal.getsignal(signal.SIGTERM)
    saved = [(number, os.dup(number)) for number in (1, 2)]
    answers, own_output = os.pipe()
    os.dup2(own_output, 1)
    os.close(own_output)
    try:
        _worker.main()
    finally:
        signal.signal(signal.SIGTERM, handler)
        for number, copy in saved:
            os.dup2(copy, number)
            os.close(copy)

    with os.fdopen(answers) as told:
        assert told.read() == "null\nnull\n"
    for number in (0, 1):
        assert (tmp_path / f"seed{number}" / "model").is_file()
        assert (tmp_path / f"log{number}").read_text() == f"loud {number}\n"
