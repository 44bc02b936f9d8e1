"""Which cells are done, repeated and refused: experiments with fakes of training and evaluation."""

import fcntl
import json
import os
import shutil
import signal
import time
from itertools import product
from pathlib import Path

import pytest
from helpers.fakes.experiment_stubs import SMALL

from research.experiment import _cells, load_experiment, print_cells

TASK = "tfidf_memorization_prefixes"
MORE_TASKS = f"tasks=[{TASK},tfidf_wikitext2_ppl]"
ALL = [
    "train ce/seed0",
    f"evaluate ce checkpoint_50pct {TASK}",
    f"evaluate ce checkpoint_100pct {TASK}",
    "train tf-idf/seed0",
    f"evaluate tf-idf checkpoint_50pct {TASK}",
    f"evaluate tf-idf checkpoint_100pct {TASK}",
]
SMALL_CELLS = ["train ce/seed0", f"evaluate ce checkpoint_100pct {TASK}"]


@pytest.fixture
def run_folder(tmp_path):
    return tmp_path / "out" / "tiny-full" / "ce" / "seed0"


def test_every_cell_is_done_once_with_its_logs(experiment_file, stubbed, run_folder):
    assert stubbed(experiment_file()) == ([], ALL)

    assert json.loads((run_folder / "cell.json").read_text()) == {
        "model": "Tiny (full)",
        "objective": "CE",
        "seed": 0,
    }
    assert "step 1 of 1\nprinted without Python\n" in (run_folder / "train.log").read_text()
    assert "with batches of 64" in (run_folder / "eval.log").read_text()
    assert stubbed(experiment_file()) == ([], [])


def test_only_additions_are_done(experiment_file, stubbed, run_folder):
    file = experiment_file(**SMALL)
    stubbed(file)

    evaluation = SMALL_CELLS[1].replace(TASK, "tfidf_wikitext2_ppl")
    assert stubbed(file, MORE_TASKS, "eval.metadata.num_blocks=3") == ([], [evaluation])
    failures, done = stubbed(
        file, "seeds=[0,1]", "milestones=[50,100]", "learning_rates=[0.0005,0.001]"
    )
    runs = [f"train lr{rate}/seed{seed}" for seed, rate in product((0, 1), ("0.0005", "0.001"))]
    assert (failures, [line for line in done if line.startswith("train")], len(done)) == (
        [],
        runs,
        12,
    )
    assert stubbed(file, "seeds=[0,1]", "learning_rates=[0.0005,0.001]") == ([], [])
    names = json.loads((run_folder.parent / "lr0.0005" / "seed0" / "cell.json").read_text())
    assert names == {"model": "Tiny (full)", "objective": "CE", "learning_rate": 0.0005, "seed": 0}


def test_cells_with_different_settings_are_refused_and_kept(
    experiment_file, stubbed, tmp_path, capsys
):
    file = experiment_file(**SMALL)
    stubbed(file)
    before = sorted(tmp_path.glob("out/**/*"))

    objective = "{_component_: tfidf_tune.loss.CrossEntropyLoss, num_output_chunks: 4}"
    for override, message in (
        ("overrides.dataset.num_repeats=6", "dataset.num_repeats was 5, is 6"),
        (f"objectives.CE={objective}", "loss.num_output_chunks was not set, is 4"),
        ("matmul_precision=medium", 'matmul_precision was not set, is "medium"'),
        ("eval.metadata.prefix_lengths=[9]", "metadata.prefix_lengths was [8], is [9]"),
        ("eval.limit=3", "limit was null, is 3"),
        ("eval.dtype=bf16", 'dtype was "float32", is "bfloat16"'),
        (
            "milestones=[60,100]",
            "has no checkpoint_60pct; checkpoints are only written during training",
        ),
    ):
        with pytest.raises(ValueError, match="made with different settings") as refused:
            stubbed(file, override)
        assert message in str(refused.value)
        assert "--overwrite" in str(refused.value)
        print_cells(load_experiment(file, [override]))
        printed = capsys.readouterr().out
        assert "made with different settings\n" in printed
        assert message in printed
    assert sorted(tmp_path.glob("out/**/*")) == before
    # These do not affect results.
    assert stubbed(
        file, "eval.batch_size=3", "eval.device=cuda", "overrides.log_every_n_steps=7"
    ) == ([], [])


def test_overwrite_repeats_only_what_changed(experiment_file, stubbed):
    stubbed(experiment_file())
    ce = "objectives.CE={_component_: tfidf_tune.loss.CrossEntropyLoss, num_output_chunks: 4}"

    assert stubbed(experiment_file(), ce, overwrite=True) == ([], ALL[:3])
    assert stubbed(experiment_file(), ce, "eval.limit=3", overwrite=True) == (
        [],
        [line for line in ALL if line.startswith("evaluate")],
    )
    assert stubbed(experiment_file(), ce, "eval.limit=3") == ([], [])


def test_unfinished_cells_are_emptied_and_repeated(
    experiment_file, stubbed, run_folder, monkeypatch
):
    file = experiment_file(**SMALL)
    stubbed(file)
    cell = run_folder / "evaluation" / "checkpoint_100pct"
    (cell / "part1").rename(cell / f".part1.tfidf-tune-{'0' * 32}")
    assert stubbed(file) == ([], SMALL_CELLS[1:])
    assert [path.name for path in cell.iterdir()] == ["part1"]

    def interrupt(path):
        raise KeyboardInterrupt

    # A run that is being emptied is unfinished from the start.
    with monkeypatch.context() as patched:
        patched.setattr(_cells, "remove_path", interrupt)
        with pytest.raises(KeyboardInterrupt):
            stubbed(file, "overrides.batch_size=2", overwrite=True)
    assert stubbed(file) == ([], SMALL_CELLS)
    shutil.rmtree(run_folder / "checkpoint_100pct")  # once evaluated, it can be deleted
    assert stubbed(file) == ([], [])
    with pytest.raises(
        ValueError, match="has no checkpoint_100pct; checkpoints are only written during training"
    ):
        stubbed(file, MORE_TASKS)


def test_a_folder_that_does_not_belong_to_an_experiment_is_not_touched(
    experiment_file, stubbed, run_folder
):
    run_folder.mkdir(parents=True)
    (run_folder / "thesis.txt").write_text("mine")

    with pytest.raises(FileExistsError, match="does not belong to an experiment"):
        stubbed(experiment_file())

    assert (run_folder / "thesis.txt").read_text() == "mine"

    # Of a killed process.
    (run_folder / "thesis.txt").rename(run_folder / f".cell.tfidf-tune-{'0' * 32}.json")
    assert stubbed(experiment_file(**SMALL)) == ([], SMALL_CELLS)
    shutil.rmtree(run_folder.parents[2])
    jobs = run_folder.parents[2] / "jobs"
    jobs.mkdir(parents=True)
    (jobs / "letter.txt").write_text("mine")
    with pytest.raises(ValueError, match="jobs is not of an experiment"):
        stubbed(experiment_file())
    assert (jobs / "letter.txt").read_text() == "mine"


def wait_for(condition):
    while not condition():
        time.sleep(0.05)


def is_free(lock):
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("sent", "hanging", "repeated", "message"),
    [
        (signal.SIGKILL, "evaluate tf-idf checkpoint_100pct", ALL[5:], ""),
        (
            signal.SIGTERM,
            "train",
            ALL,
            "error: ended by SIGTERM; the same command continues from here\n",
        ),
        (signal.SIGINT, "train", ALL, "interrupted; the same command continues from here\n"),
    ],
)
def test_a_command_that_is_ended_ends_its_jobs_and_the_next_one_continues(
    experiment_file, stubbed, start_command, tmp_path, sent, hanging, repeated, message
):
    (stubbed.folder / f"hang_{hanging}").touch()
    file = experiment_file()
    num_hanging = 2 if hanging == "train" else 1
    listed = stubbed.folder / "hanging"
    lock = tmp_path / "out" / ".jobs.lock"
    process, printed = start_command(file, "--jobs", "2")
    wait_for(
        lambda: (
            not process.is_alive()
            or (listed.exists() and len(listed.read_text().split()) == num_hanging)
        )
    )
    assert process.is_alive(), printed.read_text()
    wait_for(lambda: printed.read_text().count("done    ") == len(ALL) - len(repeated))
    with pytest.raises(BlockingIOError, match="another experiment"):
        stubbed(file)
    os.kill(process.pid, sent)
    process.join()
    if sent == signal.SIGKILL:
        wait_for(lambda: is_free(lock))
    assert is_free(lock)
    # A process closes its files, and so releases the lock, shortly before it has ended.
    wait_for(lambda: not any(map(is_running, listed.read_text().split())))
    text = printed.read_text()
    assert "failed" not in text
    assert message in text
    (stubbed.folder / f"hang_{hanging}").unlink()

    assert stubbed(file) == ([], repeated)
    assert not list(tmp_path.glob("out/**/.part*"))
