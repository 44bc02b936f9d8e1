"""What is done, what is done again and what is refused: experiments whose processes are stand-ins."""

import fcntl
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tfidf_tune.analysis import describe_machine
from tfidf_tune.commands.experiment import main as experiment_command
from tfidf_tune.experiment import (
    _cells,
    _job,
    load_experiment,
    print_cells,
    run_experiment,
    shipped_experiments,
)

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
    assert (run_folder / "train.log").read_text() == "100%|==========|\nstep 1 of 1\nprinted without Python\n"
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


def test_a_learning_rate_that_is_added_later_is_all_that_is_done(experiment_file, stubbed, tmp_path):
    stubbed(experiment_file(), "learning_rates=[0.001]", "milestones=[100]")

    failures, done = stubbed(experiment_file(), "learning_rates=[0.0005,0.001]", "milestones=[100]")

    trained = [line for line in done if line.startswith("train")]
    assert (failures, trained, len(done)) == ([], ["train lr0.0005/seed0"] * 2, 4)
    run = tmp_path / "out" / "tiny-full" / "tf-idf" / "lr0.0005" / "seed0"
    assert json.loads((run / "cell.json").read_text()) == {
        "model": "Tiny (full)", "objective": "TF-IDF", "learning_rate": 0.0005, "seed": 0,
    }  # fmt: skip
    assert len(stubbed(experiment_file(), "milestones=[100]")[1]) == 4, "those of the training config's are others"


RANDOM_START = "models[Tiny (full)].start={_component_: tfidf_tune.experiment.random_model, seed: 3}"


@pytest.mark.parametrize(("name", "known"), [("random_llama", True), ("trained_model", False)])
def test_what_was_started_from_a_component_of_a_former_name_is_done(experiment_file, stubbed, run_folder, name, known):
    stubbed(experiment_file(), RANDOM_START)
    manifest = json.loads((run_folder / "trained.json").read_text())
    assert manifest["settings"]["start"]["component"] == "tfidf_tune.experiment.random_model"
    assert manifest["provenance"] == describe_machine()
    manifest["settings"]["start"]["component"] = f"tfidf_tune.experiment.{name}"
    (run_folder / "trained.json").write_text(json.dumps(manifest))

    if known:
        assert stubbed(experiment_file(), RANDOM_START) == ([], [])
    else:
        with pytest.raises(ValueError, match="start.component was .*trained_model.*, is .*random_model"):
            stubbed(experiment_file(), RANDOM_START)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_start_that_several_runs_need_is_made_once(experiment_file, stubbed, tmp_path, jobs, capsys):
    failures, done = stubbed(experiment_file(), RANDOM_START, "seeds=[0,1]", jobs=jobs)

    (start,) = (tmp_path / "out" / "starts" / "tiny-full").iterdir()
    assert failures == []
    assert [line for line in done if line.startswith("start")] == [f"start {start.name}"]
    assert capsys.readouterr().out.count(f"making a start in {start} ...") == 1


def test_a_start_that_cannot_be_made_is_the_failure_of_a_training(experiment_file, stubbed):
    (stubbed.folder / "fail_start").touch()
    failures, done = stubbed(experiment_file(), RANDOM_START)

    assert [failure.reason for failure in failures] == ["the start could not be made: RuntimeError: no luck today"] * 2
    assert all(line.startswith("start") for line in done)


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
        ("milestones=[50,60,100]", "has no checkpoint_60pct; checkpoints are only written during training"),
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
        [line.split()[-1] for line in log.read_text().splitlines() if " by " in line]
        for log in (run_folder / "eval.log", run_folder.parents[1] / "tf-idf" / "seed0" / "eval.log")
    ]
    assert [len(set(ids)) for ids in processes] == [2, 1], "one for all milestones, after a failure another"
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


def test_runs_are_done_at_once_and_what_is_told_are_whole_lines(experiment_file, stubbed, run_folder, capsys):
    for what in ("train", "evaluate"):  # neither goes on unless both are there
        (stubbed.folder / f"wait_{what}").write_text("2" if what == "train" else "4")

    failures, done = stubbed(experiment_file(), jobs=2)

    assert failures == []
    assert sorted(done) == sorted(ALL)
    told = capsys.readouterr().out.splitlines()[1:]
    assert len(told) == 2 * len(ALL)
    for line in told:
        assert re.fullmatch(
            r"(begun  |done   ) Tiny \(full\), (CE|TF-IDF), seed 0: (training|evaluating checkpoint_(50|100)pct "
            rf"\({TASK}\))( in \d+ s)?  \(\d of 6 left, \d+ s so far(, about \d+ s to go)?\)",
            line,
        ), line
    assert [line.partition("(full)")[2] for line in told[:2]] == [
        ", CE, seed 0: training  (6 of 6 left, 0 s so far)", ", TF-IDF, seed 0: training  (6 of 6 left, 0 s so far)",
    ]  # fmt: skip
    assert " (0 of 6 left, " in told[-1]
    assert (run_folder / "train.log").read_text() == "100%|==========|\nstep 1 of 1\nprinted without Python\n"


def test_a_failure_among_runs_that_are_done_at_once_leaves_out_what_needs_it_alone(experiment_file, stubbed, capsys):
    (stubbed.folder / "fail_ce").touch()
    (stubbed.folder / "fail_tf-idf checkpoint_50pct").touch()
    failures, done = stubbed(experiment_file(), "seeds=[0,1]", jobs=3, retries=1)

    assert sorted(done) == sorted(
        [f"train ce/seed{seed}" for seed in (0, 1) for _ in range(2)]
        + [f"train tf-idf/seed{seed}" for seed in (0, 1)]
        + [f"evaluate tf-idf checkpoint_50pct {TASK}"] * 4
        + [f"evaluate tf-idf checkpoint_100pct {TASK}"] * 2
    )
    assert [failure.title for failure in failures] == [
        "Tiny (full), CE, seed 0: training", f"Tiny (full), TF-IDF, seed 0: evaluating checkpoint_50pct ({TASK})",
        "Tiny (full), CE, seed 1: training", f"Tiny (full), TF-IDF, seed 1: evaluating checkpoint_50pct ({TASK})",
    ]  # fmt: skip
    told = capsys.readouterr().out
    assert told.count("failed  ") == 8
    assert told.count("; once more\n") == 4
    assert "(0 of 12 left, " in told
    failed = "failed  Tiny (full), CE, seed 0: training: the recipe ended with exit code 1: error: no luck today  ("
    (first, *_) = told.split(failed)[1].split("\n    log: ")
    assert first.endswith("    | error: no luck today"), "a failure and its log are one piece"
    for file in stubbed.folder.glob("fail_*"):
        file.unlink()
    assert len(stubbed(experiment_file(), "seeds=[0,1]", jobs=2)[1]) == 8


def test_a_job_that_fails_as_a_whole_is_a_failure_of_its_run(experiment_file, stubbed, monkeypatch, capsys):
    def fill_disk(path, content):
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(_job, "write_manifest", fill_disk)
        failures, done = stubbed(experiment_file(), jobs=2)

    assert done in ([ALL[0], ALL[3]], [ALL[3], ALL[0]])
    assert [failure.title for failure in failures] == [
        "Tiny (full), CE, seed 0: training", "Tiny (full), TF-IDF, seed 0: training",
    ]  # fmt: skip
    assert "| OSError: no space left" in capsys.readouterr().out
    assert len(stubbed(experiment_file())[1]) == 6


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_job_that_is_killed_does_not_stop_the_others(experiment_file, stubbed, jobs):
    (stubbed.folder / "lose_evaluate ce checkpoint_50pct").touch()
    failures, done = stubbed(experiment_file(), jobs=jobs, retries=1)

    assert sorted(done) == sorted([*ALL[:2], ALL[1], *ALL[3:]]), "twice, and its run is left out"
    assert [(failure.title, failure.reason.partition(" ended ")[2]) for failure in failures] == [
        (f"Tiny (full), CE, seed 0: evaluating checkpoint_50pct ({TASK})",
         "before its work was done, its state is FINISHED"),
    ]  # fmt: skip
    (stubbed.folder / "lose_evaluate ce checkpoint_50pct").unlink()
    assert stubbed(experiment_file()) == ([], ALL[1:3])


@pytest.mark.parametrize("arguments", [["--jobs", "0"], ["--retry", "-1"]], ids=lambda arguments: arguments[0])
def test_numbers_that_make_no_sense_are_refused(experiment_file, arguments, capsys):
    with pytest.raises(SystemExit):
        experiment_command([experiment_file(), *arguments])

    assert f"argument {arguments[0]}: '{arguments[1]}' is not a whole number from " in capsys.readouterr().err
    with pytest.raises(ValueError, match="jobs is 0, it has to be at least 1"):
        run_experiment(load_experiment(experiment_file()), jobs=0)


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
    with pytest.raises(ValueError, match="has no checkpoint_50pct; checkpoints are only written during training"):
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
        patched.setattr(_cells, "_remove", interrupt)
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


STUBBED_COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
sys.path.insert(0, {folder!r})
import experiment_stubs
from tfidf_tune.commands import experiment
experiment_stubs.install()
experiment.main([{file!r}, *{arguments!r}])
"""


def start_command(file, log, *arguments):
    code = STUBBED_COMMAND.format(folder=str(Path(__file__).parent), file=file, arguments=arguments)
    return subprocess.Popen([sys.executable, "-c", code], stdout=log, stderr=log, start_new_session=True)


@pytest.mark.parametrize(
    ("sent", "hanging", "again"),
    [
        (signal.SIGKILL, "evaluate tf-idf checkpoint_100pct", ALL[5:]),
        (signal.SIGTERM, "train", ALL),
        (signal.SIGINT, "train", ALL),
    ],
)
def test_an_experiment_that_is_ended_ends_its_jobs_and_goes_on_where_it_was(
    experiment_file, stubbed, tmp_path, sent, hanging, again
):
    (stubbed.folder / f"hang_{hanging}").touch()
    file = experiment_file()
    num_hanging = 2 if hanging == "train" else 1
    listed = stubbed.folder / "hanging"
    with (tmp_path / "printed").open("w") as printed:
        process = start_command(file, printed, "--jobs", "2")
    try:
        wait_for(
            lambda: process.poll() is not None or (listed.exists() and len(listed.read_text().split()) == num_hanging)
        )
        assert process.poll() is None, (tmp_path / "printed").read_text()
        with pytest.raises(BlockingIOError, match="another experiment"):
            stubbed(file)
        process.send_signal(sent)
        process.wait()
    finally:
        process.kill()
    if sent == signal.SIGKILL:
        wait_for(lambda: is_free(tmp_path / "out" / ".jobs.lock"))
    assert is_free(tmp_path / "out" / ".jobs.lock")
    assert not any(map(is_running, listed.read_text().split()))
    text = (tmp_path / "printed").read_text()
    assert "failed" not in text
    assert ("error: ended by SIGTERM; run the same command again to continue\n" in text) == (sent == signal.SIGTERM)
    assert ("interrupted; the same command goes on" in text) == (sent == signal.SIGINT)
    (stubbed.folder / f"hang_{hanging}").unlink()

    failures, done = stubbed(file)
    assert (failures, done) == ([], again)
    assert not list(tmp_path.glob("out/**/.part*"))
