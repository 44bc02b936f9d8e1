"""What is done, what is done again and what is refused: experiments whose processes are stand-ins."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from experiment_stubs import __file__ as stubs_file

from tfidf_tune.commands.experiment import main as experiment_command
from tfidf_tune.experiment import _state, load_experiment, print_cells, shipped_experiments

TASK = "tfidf_memorization_prefixes"
ALL = [
    "train ce/seed0",
    f"evaluate ce checkpoint_50pct {TASK}",
    f"evaluate ce checkpoint_100pct {TASK}",
    "train tf-idf/seed0",
    f"evaluate tf-idf checkpoint_50pct {TASK}",
    f"evaluate tf-idf checkpoint_100pct {TASK}",
]


@pytest.fixture
def run_folder(tmp_path):
    return tmp_path / "out" / "tiny-full" / "ce" / "seed0"


def test_every_cell_is_done_once_and_never_again(experiment_file, stubbed):
    assert stubbed(experiment_file()) == ([], ALL)
    assert stubbed(experiment_file()) == ([], [])


def test_a_run_says_whose_it_is_and_keeps_what_was_printed_without_control_characters(
    experiment_file, stubbed, run_folder, capsys
):
    stubbed(experiment_file())

    assert json.loads((run_folder / "cell.json").read_text()) == {
        "model": "Tiny (full)", "objective": "CE", "seed": 0,
    }  # fmt: skip
    assert (run_folder / "train.log").read_text() == "100%|==========|\nstep 1 of 1\n"
    assert "with batches of 64" in (run_folder / "eval.log").read_text()
    out = capsys.readouterr().out
    assert "\r" not in out
    assert "\x1b" not in out
    assert "step 1 of 1" in out


def test_the_display_counts_cells_and_estimates_the_rest(experiment_file, stubbed, capsys):
    stubbed(experiment_file())

    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert [line.split()[0] for line in lines] == [f"[{number}/6]" for number in range(1, 7)]
    assert lines[0].startswith("[1/6] Tiny (full), CE, seed 0: training")
    assert "to go" not in lines[1], "nothing is known of evaluations yet"
    assert "to go" in lines[3]


def test_what_is_added_later_is_all_that_is_done(experiment_file, stubbed):
    stubbed(experiment_file())

    assert stubbed(experiment_file(), f"tasks=[{TASK},tfidf_wikitext2_ppl]")[1] == [
        f"evaluate {objective} checkpoint_{percent}pct tfidf_wikitext2_ppl"
        for objective in ("ce", "tf-idf")
        for percent in (50, 100)
    ]
    assert stubbed(experiment_file(), "seeds=[0,1]")[1] == [line.replace("seed0", "seed1") for line in ALL]
    assert stubbed(experiment_file(), "milestones=[100]")[1] == []


def test_a_setting_of_an_added_task_leaves_the_others_alone(experiment_file, stubbed):
    stubbed(experiment_file())

    done = stubbed(experiment_file(), f"tasks=[{TASK},tfidf_wikitext2_ppl]", "eval.metadata.num_blocks=3")[1]

    assert len(done) == 4
    assert all(line.endswith(" tfidf_wikitext2_ppl") for line in done)


@pytest.mark.parametrize("key", ["eval.batch_size=3", "eval.device=cuda", "overrides.log_every_n_steps=7"])
def test_what_does_not_change_results_may_change(experiment_file, stubbed, key):
    stubbed(experiment_file())

    assert stubbed(experiment_file(), key) == ([], [])


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("overrides.optimizer.lr=0.5", "optimizer.lr was 0.01, is 0.5"),
        ("overrides.dataset.num_repeats=6", "dataset.num_repeats was 5, is 6"),
        ("objectives.CE={_component_: tfidf_tune.loss.CrossEntropyLoss, num_output_chunks: 4}",
         "loss.num_output_chunks was not set, is 4"),
        ("eval.metadata.prefix_lengths=[9]", "metadata.prefix_lengths was [8], is [9]"),
        ("eval.limit=3", "limit was null, is 3"),
        ("eval.dtype=bf16", 'dtype was "float32", is "bfloat16"'),
        ("milestones=[50,60,100]", "has no checkpoint_60pct; checkpoints are written while training alone"),
    ],
)  # fmt: skip
def test_cells_of_other_settings_are_refused_and_nothing_is_lost(
    experiment_file, stubbed, tmp_path, capsys, override, told
):
    stubbed(experiment_file())
    before = sorted(tmp_path.glob("out/**/*"))

    with pytest.raises(ValueError, match="made with other settings") as refused:
        stubbed(experiment_file(), override)

    assert told in str(refused.value)
    assert "--overwrite" in str(refused.value)
    assert sorted(tmp_path.glob("out/**/*")) == before
    print_cells(load_experiment(experiment_file(), [override]))
    shown = capsys.readouterr().out
    assert "made with other settings" in shown
    assert told in shown


def test_overwrite_does_again_what_changed_and_nothing_else(experiment_file, stubbed):
    stubbed(experiment_file())
    ce = "objectives.CE={_component_: tfidf_tune.loss.CrossEntropyLoss, num_output_chunks: 4}"

    assert stubbed(experiment_file(), ce, overwrite=True) == ([], ALL[:3])
    assert stubbed(experiment_file(), ce, "eval.limit=3", overwrite=True) == (
        [], [line for line in ALL if line.startswith("evaluate")],
    )  # fmt: skip
    assert stubbed(experiment_file(), ce, "eval.limit=3") == ([], [])


def test_a_source_that_is_edited_makes_other_settings_and_one_that_moves_does_not(experiment_file, stubbed, tmp_path):
    source = tmp_path / "text.txt"
    source.write_text("some text\n")
    stubbed(experiment_file(), f"overrides.dataset.source={source}")
    moved = shutil.copy(source, tmp_path / "moved.txt")

    assert stubbed(experiment_file(), f"overrides.dataset.source={moved}") == ([], [])
    source.write_text("other text\n")
    with pytest.raises(ValueError, match="dataset.source was"):
        stubbed(experiment_file(), f"overrides.dataset.source={source}")


def test_a_failed_training_leaves_out_its_evaluations_alone_and_is_tried_again_alone(
    experiment_file, stubbed, run_folder, capsys
):
    (stubbed.folder / "fail_ce").touch()
    failures, done = stubbed(experiment_file())

    assert done == [ALL[0], *ALL[3:]]
    assert [(failure.title, failure.reason, failure.log) for failure in failures] == [
        (
            "Tiny (full), CE, seed 0: training",
            "the recipe ended with exit code 1: error: no luck today",
            run_folder / "train.log",
        )
    ]
    out = capsys.readouterr().out
    assert "    | error: no luck today" in out
    assert f"log: {run_folder / 'train.log'}" in out
    (stubbed.folder / "fail_ce").unlink()
    assert stubbed(experiment_file()) == ([], ALL[:3])


def test_the_command_lists_what_failed_with_exit_code_1(experiment_file, stubbed, run_folder, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # it would outlast the test
    (stubbed.folder / "fail_ce").touch()

    with pytest.raises(SystemExit) as ended:
        experiment_command([experiment_file(), "seeds=[0]", "--retry", "1"])

    assert str(ended.value) == (
        "error: 1 of the cells failed; the same command tries them again:\n"
        "  Tiny (full), CE, seed 0: training: the recipe ended with exit code 1: error: no luck today; "
        f"log: {run_folder / 'train.log'}"
    )
    (stubbed.folder / "fail_ce").unlink()
    experiment_command(["--dry-run", experiment_file()])
    experiment_command([experiment_file()])


def test_the_command_lists_what_is_shipped(capsys):
    experiment_command([])
    told = capsys.readouterr().out
    experiment_command(["--list"])

    assert told == capsys.readouterr().out
    for name, file in shipped_experiments().items():
        assert f"  {name} " in told
        assert str(file) in told


def test_a_failed_evaluation_leaves_the_others_alone(experiment_file, stubbed, run_folder):
    (stubbed.folder / "fail_ce checkpoint_50pct").touch()
    failures, done = stubbed(experiment_file())

    assert done == ALL
    assert [failure.reason for failure in failures] == ["RuntimeError: no luck today"]
    processes = [
        [line.split()[-1] for line in log.read_text().splitlines()]
        for log in (run_folder / "eval.log", run_folder.parents[1] / "tf-idf" / "seed0" / "eval.log")
    ]
    assert [len(set(ids)) for ids in processes] == [2, 1], "after a failure, one with a clean memory"
    (stubbed.folder / "fail_ce checkpoint_50pct").unlink()
    assert stubbed(experiment_file()) == ([], [ALL[1]])


def test_a_process_that_is_killed_is_one_failed_cell(experiment_file, stubbed):
    (stubbed.folder / "die_evaluate ce checkpoint_50pct").touch()
    (stubbed.folder / "die_tf-idf").touch()
    failures, done = stubbed(experiment_file())

    assert done == ALL[:4]
    assert [failure.reason for failure in failures] == [
        "the evaluation was ended by SIGKILL, perhaps because memory ran out",
        "the recipe was ended by SIGKILL, perhaps because memory ran out",
    ]
    for file in stubbed.folder.glob("die_*"):
        file.unlink()
    assert stubbed(experiment_file()) == ([], [ALL[1], *ALL[3:]])


def test_retries_are_counted(experiment_file, stubbed):
    (stubbed.folder / "fail_ce checkpoint_100pct").touch()
    failures, done = stubbed(experiment_file(), retries=2)

    assert len(failures) == 1
    assert done == [*ALL[:3], ALL[2], ALL[2], *ALL[3:]]


def test_an_unfinished_run_is_emptied_and_trained_again(experiment_file, stubbed, run_folder):
    stubbed(experiment_file())
    (run_folder / "trained.json").unlink()

    assert stubbed(experiment_file()) == ([], ALL[:3])


def test_what_an_interrupted_evaluation_left_is_removed(experiment_file, stubbed, run_folder):
    stubbed(experiment_file())
    cell = run_folder / "evaluation" / "checkpoint_50pct"
    (cell / "part1").rename(cell / ".part1.0123")

    assert stubbed(experiment_file()) == ([], [ALL[1]])
    assert [path.name for path in cell.iterdir()] == ["part1"]


def test_checkpoints_that_are_evaluated_may_be_deleted(experiment_file, stubbed, run_folder):
    stubbed(experiment_file())
    shutil.rmtree(run_folder / "checkpoint_50pct")

    assert stubbed(experiment_file()) == ([], [])
    with pytest.raises(ValueError, match="has no checkpoint_50pct; checkpoints are written while training alone"):
        stubbed(experiment_file(), f"tasks=[{TASK},tfidf_wikitext2_ppl]")


def test_an_experiment_that_is_moved_is_still_done(experiment_file, stubbed, tmp_path):
    inside = "overrides.dataset.cache_dir=${output_dir}/cache"
    stubbed(experiment_file(), inside)
    (tmp_path / "out").rename(tmp_path / "moved")

    assert stubbed(experiment_file(), inside, f"output_dir={tmp_path / 'moved'}") == ([], [])
    assert stubbed(
        experiment_file(), inside, f"output_dir={tmp_path / 'moved'}", f"overrides.dataset.probe_file={tmp_path}/mine"
    ) == ([], []), "where the passages are written does not matter"


def test_a_run_that_is_being_emptied_counts_as_unfinished_from_the_start(
    experiment_file, stubbed, run_folder, monkeypatch
):
    stubbed(experiment_file())

    def interrupt(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(_state, "_remove", interrupt)
        with pytest.raises(KeyboardInterrupt):
            stubbed(experiment_file(), "overrides.batch_size=2", overwrite=True)

    assert stubbed(experiment_file()) == ([], ALL[:3])


def test_a_folder_that_is_not_of_an_experiment_is_not_touched(experiment_file, stubbed, run_folder):
    run_folder.mkdir(parents=True)
    (run_folder / "thesis.txt").write_text("mine")

    with pytest.raises(FileExistsError, match="exists and is not of an experiment"):
        stubbed(experiment_file())

    assert (run_folder / "thesis.txt").read_text() == "mine"


def test_a_dry_run_shows_the_cells_and_writes_nothing(experiment_file, stubbed, tmp_path, capsys):
    print_cells(load_experiment(experiment_file()))

    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[-1].strip() for line in lines[:6]] == ["to do"] * 6
    assert lines[-1] == f"0 of 6 cells are done in {tmp_path / 'out'}."
    assert not (tmp_path / "out").exists()

    (stubbed.folder / "fail_train").touch()
    stubbed(experiment_file())
    print_cells(load_experiment(experiment_file()))
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith("failed or interrupted, to do again") for line in lines) == 2


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_free(lock):
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


STUBBED_COMMAND = """
import sys
from tfidf_tune.commands import experiment
from tfidf_tune.experiment import _evaluation, _run, _runner
_runner.TUNE, _evaluation.WORKER = ((sys.executable, {stubs!r}, what) for what in ("recipe", "worker"))
_run._compare = lambda runs, report: None
experiment.main([{file!r}])
"""


@pytest.mark.parametrize(
    ("sent", "hanging", "again"),
    [(signal.SIGKILL, "evaluate tf-idf checkpoint_100pct", ALL[5:]), (signal.SIGTERM, "train", ALL)],
)
def test_an_experiment_that_is_ended_goes_on_where_it_was(experiment_file, stubbed, tmp_path, sent, hanging, again):
    (stubbed.folder / f"hang_{hanging}").touch()
    file = experiment_file()
    command = [sys.executable, "-c", STUBBED_COMMAND.format(stubs=stubs_file, file=file)]
    with (tmp_path / "told").open("w") as told:
        process = subprocess.Popen(command, stderr=told)
    try:
        wait_for(lambda: (stubbed.folder / "hanging").exists() or process.poll() is not None)
        assert process.poll() is None, (tmp_path / "told").read_text()
        with pytest.raises(BlockingIOError, match="another experiment"):
            stubbed(file)
        process.send_signal(sent)
        process.wait(timeout=60)
    finally:
        process.kill()
    if sent == signal.SIGKILL:  # then nobody could end what it had started
        with pytest.raises(BlockingIOError, match="another experiment, or what one started"):
            stubbed(file)
        os.kill(int((stubbed.folder / "hanging").read_text()), signal.SIGKILL)
        wait_for(lambda: is_free(tmp_path / "out" / ".lock"))
    else:
        assert (tmp_path / "told").read_text() == "error: ended by SIGTERM; the same command goes on from here\n"
    (stubbed.folder / f"hang_{hanging}").unlink()

    assert stubbed(file) == ([], again)
    assert not list(tmp_path.glob("out/**/.temporary"))
