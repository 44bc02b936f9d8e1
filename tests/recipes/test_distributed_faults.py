"""What befalls one process of two: both end, or go on, at the same step, and the user is told once."""

import json
import re
import signal
from functools import partial

import pytest
from process_hooks import (
    fail_milestone,
    fail_resume_file,
    lose_loss,
    lose_weights,
    refuse_checkpoint,
    send_itself,
)
from recipe_processes import Processes, RecipeRun, run_to_the_end

FULL_DISK = "[Errno 28] No space left on device"


@pytest.fixture
def make_run(recipe_config):
    """Make a run of eight steps on two processes that saves at every second."""

    def make(*, lora=False, **overrides):
        settings = {"batch_size": 2, "max_steps": 8, "save_at_percent": [50, 100], "save_every_n_steps": 2}
        return RecipeRun(recipe_config(lora=lora, **(settings | overrides)), lora)

    return make


def last_step(run):
    return json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]


def resume_checkpoints(run):
    return {path.name for path in (run.folder / "resume").iterdir()}


def assert_reported_once(message, ended):
    """Rank 0 reports what all processes notice, unless it is seconds later than another one."""
    assert len(re.findall(f"^error: (process 1: )?{re.escape(message)}", ended.output, re.M)) == 1, ended.output


def goes_on(run, tmp_path):
    """Whether two processes finish the run from what is there."""
    run.cfg.resume_from_checkpoint = True
    output = run_to_the_end([run], tmp_path / "resumed")
    assert last_step(run) == 8
    assert {path.name for path in run.folder.glob("*checkpoint_*")} == {"checkpoint_50pct", "checkpoint_100pct"}
    return output


def test_a_loss_that_one_process_loses_stops_both(make_run, tmp_path):
    run = make_run()

    ended = Processes([run], tmp_path / "processes", before=partial(lose_loss, 6)).wait()

    assert ended.codes[0] == 1
    assert ended.codes[1] != 0
    assert_reported_once("not finite: loss nan and gradient norm nan at step 6 (items ", ended)
    assert f"the last good checkpoint is {run.folder / 'resume' / 'step_4'}" in ended.output
    assert resume_checkpoints(run) == {"step_2", "step_4"}
    assert last_step(run) == 5
    assert f"resuming from {run.folder / 'resume' / 'step_4'}" in goes_on(run, tmp_path)


def test_a_loss_that_one_process_loses_is_skipped_by_both(make_run, tmp_path):
    run = make_run(lora=True, on_non_finite="skip")

    output = run_to_the_end([run], tmp_path / "processes", before=partial(lose_loss, 6))

    assert output.count("step skipped, not finite: loss nan and gradient norm nan at step 6 (items ") == 1
    assert last_step(run) == 8


def test_weights_of_0_stop_both_after_ten_steps_in_which_neither_process_had_another(make_run, tmp_path):
    """Process 1 has none from the first step on, process 0 from the third."""
    run = make_run(max_steps=16, save_every_n_steps=None)

    ended = Processes([run], tmp_path / "processes", before=partial(lose_weights, (3, 1))).wait()

    assert ended.codes[0] == 1
    assert ended.codes[1] != 0
    message = "the weights of all tokens were 0 in 10 steps in a row, up to step 12, so that nothing was learned"
    assert_reported_once(message, ended)
    assert "Traceback" not in ended.output
    assert last_step(run) == 11
    assert {path.name for path in run.folder.glob("*checkpoint_*")} == {"checkpoint_50pct"}


@pytest.mark.parametrize("lora", [False, True])
def test_a_signal_to_one_process_stops_both_after_the_same_step(make_run, tmp_path, lora):
    run = make_run(lora=lora)

    ended = Processes([run], tmp_path / "processes", before=partial(send_itself, signal.SIGTERM, 5, (1,))).wait()

    assert ended.codes == [143, 143]
    checkpoint = run.folder / "resume" / "step_5"
    assert ended.output.count(f"stopped after step 5 of 8; the last good checkpoint is {checkpoint}") == 1, ended.output
    assert "Traceback" not in ended.output
    assert f"resuming from {checkpoint}" in goes_on(run, tmp_path)


def test_a_milestone_that_cannot_be_written_ends_both(make_run, tmp_path):
    run = make_run()

    ended = Processes([run], tmp_path / "processes", before=fail_milestone).wait()

    assert ended.codes[0] == 1
    assert ended.codes[1] != 0
    milestone = run.folder / "checkpoint_100pct"
    assert_reported_once(f"checkpoint {milestone} could not be written: {FULL_DISK}; ", ended)
    assert "Traceback" not in ended.output
    assert {path.name for path in run.folder.glob("*checkpoint_*")} == {"checkpoint_50pct"}
    goes_on(run, tmp_path)


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_resume_checkpoint_that_one_process_cannot_write_ends_both(make_run, tmp_path, failing_rank):
    run = make_run()

    ended = Processes([run], tmp_path / "processes", before=partial(fail_resume_file, failing_rank)).wait()

    assert ended.codes[0] == 1
    assert ended.codes[1] != 0
    checkpoint = run.folder / "resume" / "step_4"
    assert_reported_once(f"resume checkpoint {checkpoint} could not be written: {FULL_DISK}; ", ended)
    assert "Traceback" not in ended.output
    assert resume_checkpoints(run) == {"step_2"}
    goes_on(run, tmp_path)


def test_what_one_process_alone_finds_wrong_is_told_with_its_number(make_run, tmp_path):
    ended = Processes([make_run()], tmp_path / "processes", before=refuse_checkpoint).wait()

    assert 0 not in ended.codes
    assert "error: process 1: the copy of this machine is damaged\n" in ended.output
    assert ended.output.count("error: ") == 1, ended.output
    assert "gloo" not in ended.output


@pytest.mark.parametrize("lost", [0, 1])
def test_the_loss_of_a_process_ends_the_other(make_run, tmp_path, lost):
    run = make_run()

    ended = Processes([run], tmp_path / "processes", before=partial(send_itself, signal.SIGKILL, 6, (lost,))).wait()

    assert ended.codes[lost] == -signal.SIGKILL
    assert ended.codes[1 - lost] == 1
    assert ended.output.count("error: another process of the run was lost") == 1, ended.output
    assert f"the last good checkpoint is {run.folder / 'resume' / 'step_4'}" in ended.output
    assert "Traceback" not in ended.output
    goes_on(run, tmp_path)
