"""How an experiment starts processes, shares the machine among them, and shows what they do."""

import io
import json
import os
from pathlib import Path

import pytest
import submitit
import torch

import tfidf_tune.tasks
from tfidf_tune.experiment import _job, _run, load_experiment, run_experiment
from tfidf_tune.experiment._cells import Start
from tfidf_tune.experiment._expand import expand
from tfidf_tune.experiment._launcher import gpus_of_jobs
from tfidf_tune.experiment._plain_lines import PlainLines
from tfidf_tune.experiment._progress import Progress, Step, duration
from tfidf_tune.training import SetupError


@pytest.mark.parametrize(
    ("jobs", "own", "given"), [(1, None, None), (2, None, "4"), (3, None, "2"), (20, None, "2"), (2, "7", "7")]
)
def test_jobs_share_the_cpus_unless_the_user_has_said_how(
    experiment_file, stubbed, tmp_path, monkeypatch, jobs, own, given
):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if own:
        monkeypatch.setenv("OMP_NUM_THREADS", own)
    monkeypatch.setenv("STUBS_SHOW", "OMP_NUM_THREADS")

    assert stubbed(experiment_file(), "seeds=[0,1]", jobs=jobs)[0] == []

    for log in tmp_path.glob("out/*/*/*/train.log"):
        assert log.read_text().startswith(f"{{'OMP_NUM_THREADS': {given!r}}}\n")
    assert "OMP_NUM_THREADS" not in os.environ or own


@pytest.mark.parametrize(
    ("visible", "jobs", "per_job", "shares"),
    [
        (None, 1, None, [None]),  # all
        (None, 2, None, ["0,1", "2,3"]),
        (None, 3, None, ["0", "1", "2"]),
        (None, 5, None, ["0", "1", "2", "3", "0"]),
        (None, 1, 2, ["0,1"]),
        ("GPU-a,GPU-b", 2, None, ["GPU-a", "GPU-b"]),
        ("", 2, None, ["", ""]),
    ],
)
def test_each_job_has_gpus_of_its_own(monkeypatch, visible, jobs, per_job, shares):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert gpus_of_jobs(jobs, per_job) == shares
    with pytest.raises(SetupError, match=r"gpus_per_node is 5, but this machine has \d GPUs"):
        gpus_of_jobs(1, 5)


def test_a_job_sees_its_gpus_only(experiment_file, stubbed, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setenv("STUBS_SHOW", "CUDA_VISIBLE_DEVICES")
    (stubbed.folder / "wait_train").write_text("2")  # each job has a run

    assert stubbed(experiment_file(), jobs=2)[0] == []

    logs = [log.read_text().splitlines()[0] for log in tmp_path.glob("out/*/*/*/train.log")]
    assert sorted(logs) == ["{'CUDA_VISIBLE_DEVICES': '3'}", "{'CUDA_VISIBLE_DEVICES': '5'}"]


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
def evaluation(experiment_file):
    return expand(load_experiment(experiment_file()))[0].evaluations[0]


def test_an_evaluation_leaves_results_and_manifest_or_nothing(tmp_path, monkeypatch, evaluation, capsys):
    def evaluate(tasks, output_path, **arguments):
        assert tasks == ["tfidf_memorization_prefixes"]
        assert arguments == evaluation.arguments
        (output_path / "results.json").write_text("{}")
        if fails:
            raise SystemExit("no memory\nat all")

    monkeypatch.setattr(tfidf_tune.tasks, "evaluate", evaluate)
    evaluation.log.parent.mkdir(parents=True)
    journal = _job.Journal(tmp_path / "journal")
    fails = True
    reason = _job._in_process("evaluation", evaluation.log, _job.evaluate_cells, [evaluation], journal)
    assert reason == "no memory"
    assert evaluation.log.read_text() == "no memory\nat all\n"
    assert list(evaluation.folder.iterdir()) == []

    fails = False
    _job.evaluate_cells([evaluation], journal)
    part = evaluation.folder / "part1"
    assert {path.name for path in part.iterdir()} == {"results.json", "evaluated.json"}
    manifest = json.loads((part / "evaluated.json").read_text())
    assert manifest["tasks"] == evaluation.tasks
    assert manifest["seconds"] >= 0


def test_a_start_is_whole_or_not_there_and_its_output_goes_to_the_log(tmp_path):
    for seed, error in ((3, None), (4, "no luck")):
        arguments = {"content": "mine", "noise": "loud", "error": error}
        start = Start("experiment_stubs.write_start", arguments, {"sizes": "S"}, seed, tmp_path / "starts" / f"{seed}")
        reason = _job._in_process("start", tmp_path / f"log{seed}", _job.make_start, start)
        assert reason == (error and "RuntimeError: no luck")

    assert [path.name for path in (tmp_path / "starts").iterdir()] == ["3"]
    assert (tmp_path / "starts" / "3" / "model").read_text() == "mine"
    assert (tmp_path / "log3").read_text() == "making S with seed 3\nloud 3\n", "in plain lines"
    assert "Traceback" in (tmp_path / "log4").read_text()


FAKE_SLURM = {
    "sbatch": """
        cp "$1" $SLURM/$$.sh  # submitit renames the script as soon as sbatch ends
        (export SLURM_JOB_ID=$$; exec setsid sh $SLURM/$$.sh) > $SLURM/$$.out 2>&1 < /dev/null &
        echo $! > $SLURM/$$.pid
        echo Submitted batch job $$""",
    "srun": """
        log=$(echo "$3" | sed "s/%j/$SLURM_JOB_ID/; s/%t/0/"); shift 3
        exec "$@" > "$log" 2>&1""",
    "sacct": """
        echo 'JobID|State|NodeList'
        for id in $(echo "$@" | grep -oE -- '-j [0-9]+' | cut -c4-); do
            kill -0 $(cat $SLURM/$id.pid) 2> $SLURM/errors && echo "$id|RUNNING|here" || echo "$id|FAILED|here"
        done""",
    "scancel": "kill -9 -- -$(cat $SLURM/$1.pid)",
}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Commands of Slurm that run jobs here, whose training and evaluation are stand-ins."""
    folder, stubs = tmp_path / "slurm", tmp_path / "stubs"
    folder.mkdir()
    stubs.mkdir()
    for name, script in FAKE_SLURM.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    (folder / "sitecustomize.py").write_text(
        "import os\nif 'SUBMITIT_EXECUTOR' in os.environ:\n    import experiment_stubs as stubs\n    stubs.install()\n"
    )
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(__file__).parent}")
    monkeypatch.setenv("SLURM", str(folder))
    monkeypatch.setenv("STUBS", str(stubs))
    monkeypatch.setattr(_run, "_report", lambda runs, experiment, folder: None)
    return folder


SLURM = "launcher={name: slurm, partition: gpu, gpus_per_node: 1, timeout_min: 90, mem_gb: 40, qos: low}"


def test_slurm_gets_a_job_for_each_run(experiment_file, slurm, tmp_path):
    file = experiment_file()
    (tmp_path / "stubs" / "lose_evaluate tf-idf checkpoint_100pct").touch()

    (failure,) = run_experiment(load_experiment(file, [SLURM]))

    assert failure.title.startswith("Tiny (full), TF-IDF, seed 0: evaluating checkpoint_100pct")
    assert failure.reason.endswith("ended before its work was done, its state is FAILED")
    scripts = [path.read_text() for path in (tmp_path / "out" / "jobs").glob("*_submission.sh")]
    assert len(scripts) == 2
    for option in ("partition=gpu", "gpus-per-node=1", "time=90", "mem=40GB", "qos=low", "job-name=tfidf-tune"):
        assert all(f"#SBATCH --{option}\n" in script for script in scripts), scripts[0]
    done = (tmp_path / "stubs" / "journal").read_text().splitlines()
    assert sorted(line.split()[0] for line in done) == ["evaluate"] * 4 + ["train"] * 2
    job = next((tmp_path / "out" / "jobs").glob("*_submission.sh")).name.split("_")[0]

    (tmp_path / "out" / "jobs" / f"{job}_0_result.pkl").unlink(missing_ok=True)
    (slurm / f"{job}.pid").write_text(str(os.getpid()))  # as if it still ran
    submitit.SlurmJob.watcher.clear()
    with pytest.raises(BlockingIOError, match=rf"jobs of an earlier command .* running: {job}\..*`scancel {job}`"):
        run_experiment(load_experiment(file, [SLURM]))


def test_a_job_that_a_cluster_starts_again_goes_on_with_its_run(experiment_file, stubbed, tmp_path, monkeypatch):
    run = expand(load_experiment(experiment_file()))[0]
    monkeypatch.setenv("SUBMITIT_FOLDER", str(tmp_path))
    journal = _job.Journal(tmp_path / "0.jsonl")
    journal.create()
    journal.write("claimed", job="7")
    for job_id in ("8", "7", "7"):
        monkeypatch.setenv("SUBMITIT_DEBUG_JOB_ID", job_id)
        _job.work({0: run}, tmp_path, 0, None)

    done = (stubbed.folder / "journal").read_text().splitlines()
    assert [line.split()[0] for line in done] == ["train", "evaluate", "evaluate"]


def test_what_slurm_does_not_take_is_refused_before_any_work(experiment_file, slurm, monkeypatch):
    with pytest.raises(SetupError, match=r"launcher: .*'prtition'.*Valid arguments.*partition"):
        run_experiment(load_experiment(experiment_file(), ["launcher={name: slurm, timeout_min: 9, prtition: a}"]))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SetupError, match='launcher: .*"srun"'):
        run_experiment(load_experiment(experiment_file(), [SLURM]))
    assert not (slurm.parent / "stubs" / "journal").exists()
