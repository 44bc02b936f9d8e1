"""How an experiment starts processes, shares the machine among them, and estimates the remaining time."""

import os
from pathlib import Path

import pytest
import submitit
import torch
from helpers.fakes.experiment_stubs import SMALL

from research.experiment import _job, _run, load_experiment, run_experiment
from research.experiment._cells import Start
from research.experiment._expand import expand
from research.experiment._run import gpus_of_jobs
from tfidf_tune.training import SetupError


@pytest.mark.parametrize(("jobs", "own", "given"), [(1, None, None), (20, None, "4"), (2, "7", "7")])
def test_jobs_share_the_cpus_unless_the_user_sets_the_threads(
    experiment_file, stubbed, tmp_path, monkeypatch, jobs, own, given
):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if own:
        monkeypatch.setenv("OMP_NUM_THREADS", own)
    monkeypatch.setenv("STUBS_SHOW", "OMP_NUM_THREADS")

    assert stubbed(experiment_file(**SMALL), "seeds=[0,1]", jobs=jobs)[0] == []

    for log in tmp_path.glob("out/*/*/*/train.log"):
        assert log.read_text().startswith(f"{{'OMP_NUM_THREADS': {given!r}}}\n")
    assert "OMP_NUM_THREADS" not in os.environ or own


def test_each_job_has_its_own_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for visible, jobs, per_job, shares in (
        (None, 1, None, [None]),  # all
        (None, 2, None, ["0,1", "2,3"]),
        (None, 5, None, ["0", "1", "2", "3", "0"]),
        (None, 1, 2, ["0,1"]),
        ("GPU-a,GPU-b", 2, None, ["GPU-a", "GPU-b"]),
        ("", 2, None, ["", ""]),
    ):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpus_of_jobs(jobs, per_job) == shares
        with pytest.raises(SetupError, match=r"gpus_per_node is 5, but this machine has \d GPUs"):
            gpus_of_jobs(1, 5)


def test_a_job_sees_only_its_gpus(experiment_file, stubbed, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setenv("STUBS_SHOW", "CUDA_VISIBLE_DEVICES")
    (stubbed.folder / "wait_train").write_text("2")  # each job has a run

    assert stubbed(experiment_file(**SMALL), "seeds=[0,1]", jobs=2)[0] == []

    logs = [log.read_text().splitlines()[0] for log in tmp_path.glob("out/*/*/*/train.log")]
    assert sorted(logs) == ["{'CUDA_VISIBLE_DEVICES': '3'}", "{'CUDA_VISIBLE_DEVICES': '5'}"]


def test_a_start_is_complete_or_missing_and_its_output_is_in_the_log(tmp_path):
    for seed, error in ((3, None), (4, "no luck")):
        arguments = {"content": "mine", "noise": "loud", "error": error}
        start = Start(
            "helpers.fakes.experiment_stubs.write_start",
            arguments,
            {"sizes": "S"},
            seed,
            tmp_path / "starts" / f"{seed}",
        )
        reason = _job._in_process("start", tmp_path / f"log{seed}", _job.make_start, start)
        assert reason == (error and "RuntimeError: no luck")

    assert [path.name for path in (tmp_path / "starts").iterdir()] == ["3"]
    assert (tmp_path / "starts" / "3" / "model").read_text() == "mine"
    assert (tmp_path / "log3").read_text().endswith("making S with seed 3\nloud 3\n")
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


# The harness's models, which take seconds to import, are not needed.
FAKE_WORK = """
import os, sys, types
if 'SUBMITIT_EXECUTOR' in os.environ:
    sys.modules["lm_eval.models.huggingface"] = types.ModuleType("lm_eval.models.huggingface")
    from helpers.fakes import experiment_stubs
    experiment_stubs.install()
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Commands of Slurm that run jobs here, with fakes of training and evaluation."""
    folder, stubs = tmp_path / "slurm", tmp_path / "stubs"
    folder.mkdir()
    stubs.mkdir()
    for name, script in FAKE_SLURM.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    (folder / "sitecustomize.py").write_text(FAKE_WORK)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    tests = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{tests}:{tests.parent}")
    monkeypatch.setenv("SLURM", str(folder))
    monkeypatch.setenv("STUBS", str(stubs))
    monkeypatch.setattr(_run, "_report", lambda runs, experiment, folder: None)
    monkeypatch.setattr(submitit.SlurmJob.watcher, "_delay_s", 1)  # between queries of the state of jobs
    return folder


SLURM = "launcher={name: slurm, partition: gpu, gpus_per_node: 1, timeout_min: 90, mem_gb: 40, qos: low}"


def test_slurm_gets_the_options_and_its_jobs_are_followed(experiment_file, slurm, tmp_path):
    file = experiment_file(**SMALL)
    (tmp_path / "stubs" / "lose_evaluate ce checkpoint_100pct").touch()

    (failure,) = run_experiment(load_experiment(file, [SLURM]))

    assert failure.title.startswith("Tiny (full), CE, seed 0: evaluating checkpoint_100pct")
    assert failure.reason.endswith("ended before its work was done, its state is FAILED")
    (script,) = (tmp_path / "out" / "jobs").glob("*_submission.sh")
    for option in ("partition=gpu", "gpus-per-node=1", "time=90", "mem=40GB", "qos=low", "job-name=tfidf-tune"):
        assert f"#SBATCH --{option}\n" in script.read_text(), option
    done = (tmp_path / "stubs" / "journal").read_text().splitlines()
    assert [line.split()[0] for line in done] == ["train", "evaluate"]

    job = script.name.split("_")[0]
    (tmp_path / "out" / "jobs" / f"{job}_0_result.pkl").unlink(missing_ok=True)
    (slurm / f"{job}.pid").write_text(str(os.getpid()))  # as if it still ran
    submitit.SlurmJob.watcher.clear()
    with pytest.raises(BlockingIOError, match=rf"jobs of an earlier command .* running: {job}: .*`scancel {job}`"):
        run_experiment(load_experiment(file, [SLURM]))


def test_a_job_that_a_cluster_starts_again_continues_its_run(experiment_file, stubbed, tmp_path, monkeypatch):
    run = expand(load_experiment(experiment_file()))[0]
    monkeypatch.setenv("SUBMITIT_FOLDER", str(tmp_path))
    journal = tmp_path / "0.jsonl"
    _job.record(journal, "claimed", job="7")
    for job_id in ("8", "7", "7"):
        monkeypatch.setenv("SUBMITIT_DEBUG_JOB_ID", job_id)
        _job.work({0: run}, tmp_path, 0)

    done = (stubbed.folder / "journal").read_text().splitlines()
    assert [line.split()[0] for line in done] == ["train", "evaluate", "evaluate"]


def test_an_unknown_option_of_slurm_is_refused_before_any_work(experiment_file, slurm, monkeypatch):
    with pytest.raises(SetupError, match=r"launcher: .*'prtition'.*Valid arguments.*partition"):
        run_experiment(load_experiment(experiment_file(), ["launcher={name: slurm, timeout_min: 9, prtition: a}"]))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SetupError, match='launcher: .*"srun"'):
        run_experiment(load_experiment(experiment_file(), [SLURM]))
    assert not (slurm.parent / "stubs" / "journal").exists()
