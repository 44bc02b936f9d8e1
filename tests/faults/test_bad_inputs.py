"""Each wrong input is refused in one message, before training, and leaves what was there as it was."""

from dataclasses import replace

import pytest
from bad_configs import changed
from bad_inputs import BAD_INPUTS
from refusals import BadInput, Site, try_row

ROWS = [pytest.param(row, id=f"{kind}: {row.what}") for kind, rows in BAD_INPUTS.items() for row in rows]
GOOD = BadInput("nothing", changed({"max_steps": 1}), "")


@pytest.fixture
def site(tmp_path, tiny_checkpoint, text_file):
    return Site(tmp_path / "row", tiny_checkpoint, text_file)


@pytest.mark.parametrize("row", ROWS)
def test_a_wrong_input_is_one_message_before_training(row, site):
    assert not try_row(row, site).problems


def test_there_are_as_many_rows_as_were_promised():
    assert len(ROWS) >= 60
    assert len({row.id for row in ROWS}) == len(ROWS)


def test_a_good_run_fails_every_check(site):
    """Else rows could pass without being looked at."""
    problems = " ".join(try_row(GOOD, site).problems)

    for said in ("exit code 0", "not one message", "training had begun", "run/checkpoint_100pct"):
        assert said in problems


def test_another_message_than_the_expected_is_a_problem(site):
    row = BadInput("batch_size: 0", changed({"batch_size": 0}), "epochs is 0")

    assert [problem[:19] for problem in try_row(row, site).problems] == ["no /epochs is 0/ in"]


def test_a_traceback_is_a_problem(site, monkeypatch):
    def bug(cfg):
        raise KeyError("a bug")

    monkeypatch.setattr("tfidf_tune.training.open_run", bug)

    problems = try_row(replace(GOOD, message="a bug"), site).problems

    assert problems[0] == "a traceback: KeyError: 'a bug'"
