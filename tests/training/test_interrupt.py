"""SIGTERM, Ctrl-C and SIGHUP: the step is finished, the run saved, then it ends."""

import os
import signal

import pytest
from tiny_run import run_recipe

from tfidf_tune import _signals
from tfidf_tune._signals import Interrupted, stop_request
from tfidf_tune.training import ResumePoint, _train

SIGNALS = [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]


@pytest.fixture(autouse=True)
def no_nohup():
    """The tests themselves may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def clock(monkeypatch):
    time = [100.0]
    monkeypatch.setattr(_signals.time, "monotonic", lambda: time[0])
    return time


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_is_one_request_until_the_block_ends_and_a_later_one_ends_at_once(clock, number, code):
    """A terminal sends Ctrl-C to every process, and torchrun repeats it."""
    before = {each: signal.getsignal(each) for each, _ in SIGNALS}
    with stop_request() as request:
        assert request.signal_number == 0
        for _ in range(4):
            send(number)
            clock[0] += 0.7
        assert request.signal_number == number
        clock[0] += 3.1
        with pytest.raises(SystemExit) as ended:
            send(number)

    assert ended.value.code == code
    assert {each: signal.getsignal(each) for each, _ in SIGNALS} == before


def test_a_signal_in_the_last_step_lets_the_run_finish(recipe_config, monkeypatch):
    original = _train.train_step

    def train_step(*args, **kwargs):
        send(signal.SIGTERM)
        return original(*args, **kwargs)

    monkeypatch.setattr(_train, "train_step", train_step)

    assert (run_recipe(recipe_config(max_steps=1)) / "checkpoint_100pct").is_dir()


def test_a_signal_while_a_checkpoint_is_saved_writes_no_second_one(recipe_config, monkeypatch):
    original, saved = ResumePoint.save, []

    def save(self, step, *args):
        send(signal.SIGTERM)
        saved.append(step)
        original(self, step, *args)

    monkeypatch.setattr(ResumePoint, "save", save)

    with pytest.raises(Interrupted, match="stopped after step 2 of 4; the last good checkpoint is .*step_2"):
        run_recipe(recipe_config(save_at_percent=[50, 100], max_steps=4))
    assert saved == [2]
