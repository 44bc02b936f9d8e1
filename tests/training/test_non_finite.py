"""NaN, infinity and weights of 0 end a run, or are skipped, and are reported with the step's data."""

import os
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from process_hooks import spoil_terms
from tiny_run import run_recipe
from torch import nn

from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.training import TrainingError, _train
from tfidf_tune.training._metrics import StepGuard, require_finite
from tfidf_tune.weighting import UniformWeighting

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")


def make_guard(*, skip=False, device=CPU, notes=None, num_items=3, total_steps=100):
    def indices_of(step):
        return [100 * step + item for item in range(num_items)]

    note = ([] if notes is None else notes).append
    return StepGuard(device, skip=skip, total_steps=total_steps, indices_of=indices_of, note=note)


def add(guard, step, loss=1.0, grad_norm=1.0, weight_max=1.0, num_tokens=7):
    loss, grad_norm, weight_max = torch.tensor([loss, grad_norm, weight_max])
    metrics = {"loss": loss, "grad_norm": grad_norm, "weight_max": weight_max}
    guard.add(step, loss.isfinite() & grad_norm.isfinite(), metrics, num_tokens=num_tokens)


def test_the_first_step_that_is_not_finite_is_reported_with_its_items():
    for loss, grad_norm in ((NAN, 1.5), (2.5, INF)):
        guard = make_guard()
        for step in range(1, 7):
            add(guard, step)
            guard.check()
        add(guard, 7, loss, grad_norm)
        add(guard, 8, INF)
        add(guard, 9)

        found = rf"loss {loss:g} and gradient norm {grad_norm:g} at step 7 \(items 700, 701, 702 of the data set\)"
        with pytest.raises(TrainingError, match=f"^not finite: {found}: try .*, or on_non_finite=skip$"):
            guard.check()


def test_at_most_32_items_are_listed():
    for num_items, more in ((32, "131 of"), (33, "131 and 1 more of")):
        guard = make_guard(num_items=num_items)
        add(guard, 1, NAN)
        with pytest.raises(TrainingError, match=f"items 100, 101, .*, {more}"):
            guard.check()


def test_ten_skipped_steps_in_a_row_end_the_run():
    notes = []
    guard = make_guard(skip=True, notes=notes)
    for step in range(1, 10):
        add(guard, step, NAN)
        guard.check()
    add(guard, 10)  # one that is finite: counted from the start
    guard.check()
    for step in range(11, 20):
        add(guard, step, NAN)
        guard.check()
    assert len(notes) == 18
    assert notes[0].startswith("step skipped, not finite: loss nan and gradient norm 1 at step 1 (items 100, 101")

    add(guard, 20, NAN)
    with pytest.raises(TrainingError, match="not finite, 10 steps in a row: loss nan and .* at step 20 .*clipping$"):
        guard.check()


def test_only_a_run_that_skips_waits_for_a_gpu_at_each_step():
    """On the meta device, in place of a GPU, nothing can be read."""
    meta = torch.device("meta")
    guard = make_guard(device=meta)
    guards = (make_guard(), make_guard(skip=True), guard, make_guard(device=meta, skip=True))
    assert [each.looks_at_each_step for each in guards] == [True, True, False, True]

    metrics = {name: torch.ones((), device=meta) for name in ("loss", "grad_norm", "weight_max")}
    guard.add(1, torch.ones((), dtype=torch.bool, device=meta), metrics, num_tokens=7)

    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        guard.check()


# ---- weights of 0


@pytest.mark.parametrize(("skip", "checks_each_step"), [(False, True), (True, False)])
def test_ten_steps_in_a_row_with_weights_of_0_end_the_run(skip, checks_each_step):
    """Also where they are checked long after; steps without a label do not count."""
    guard = make_guard(skip=skip)
    steps = [*[0.0] * 9, 1.0, *[0.0] * 9, NAN, *[0.0] * 9]
    for step, weight_max in enumerate(steps, start=1):
        add(guard, step, weight_max=weight_max)
        if checks_each_step:
            guard.check()
    add(guard, 30, weight_max=0.0, num_tokens=0)
    guard.check()

    for step, weight_max in ((31, 0.0), (32, 1.0)):
        add(guard, step, weight_max=weight_max)
    with pytest.raises(TrainingError, match="the weights of all tokens were 0 in 10 steps in a row, up to step 31, so"):
        guard.check()


def test_a_run_of_fewer_steps_is_stopped_if_all_weights_are_0():
    for weights in ([0.0, 0.0, 1e-30], [0.0, 0.0, 0.0]):
        guard = make_guard(total_steps=3)
        for step, weight_max in enumerate(weights, start=1):
            guard.check()
            add(guard, step, weight_max=weight_max)
        if any(weights):
            guard.check()
        else:
            with pytest.raises(TrainingError, match="were 0 in 3 steps in a row, up to step 3, so"):
                guard.check()


# ---- weights of the model


def test_a_weight_that_is_not_finite_is_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    require_finite(model, 3)
    model[1].bias.data[1] = INF

    with pytest.raises(TrainingError, match=r"^1\.bias is not finite after step 3: try a lower learning rate"):
        require_finite(model, 3)
    model[1].bias.requires_grad = False  # frozen: it was so before
    require_finite(model, 3)


# ---- in a run


@pytest.fixture
def spoil(monkeypatch):
    """Make the loss of these steps NaN, and with it every gradient."""
    monkeypatch.setattr(WeightedCrossEntropyLoss, "terms", WeightedCrossEntropyLoss.terms)  # restored at the end
    return lambda *steps: spoil_terms(("loss",), NAN, {0: steps}, 0)


@pytest.fixture
def train_step(monkeypatch):
    """The training step, as a mock that counts its calls."""
    mock = Mock(wraps=_train.train_step)
    monkeypatch.setattr(_train, "train_step", mock)
    return mock


def bits(model, optimizer):
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [value.detach().clone() for value in (*model.parameters(), *states)]


def test_a_skipped_step_changes_neither_weights_nor_optimizer_nor_schedule(recipe_config, monkeypatch, spoil, capsys):
    original, seen = _train.train_step, []

    def train_step(model, loss, optimizer, *args, **kwargs):
        before, rate = bits(model, optimizer), optimizer.param_groups[0]["lr"]
        result = original(model, loss, optimizer, *args, **kwargs)
        seen.append((result.skipped, all(map(torch.equal, before, bits(model, optimizer))), rate))
        return result

    monkeypatch.setattr(_train, "train_step", train_step)
    spoil(3, 4)

    run_recipe(recipe_config(on_non_finite="skip", max_steps=6))

    skipped, unchanged, rates = zip(*seen, strict=True)
    assert skipped == unchanged == (False, False, True, True, False, False)
    assert rates[2] == rates[3] == rates[4]
    assert len({*rates}) == 4
    notes = [line for line in capsys.readouterr().err.splitlines() if "step skipped, not finite" in line]
    assert [line.split(" (items")[0].rsplit(" ", 1)[1] for line in notes] == ["3", "4"]


def test_a_cpu_run_stops_at_the_step_and_names_its_items_and_the_last_checkpoint(recipe_config, spoil, train_step):
    """Also if it rarely logs."""
    spoil(2)
    cfg = recipe_config(shuffle=False, save_every_n_steps=1, log_every_n_steps=5)

    with pytest.raises(TrainingError, match=r"step 2 \(items 4, 5, 6, 7 of the data set\).* the last good .*step_1: "):
        run_recipe(cfg)
    assert train_step.call_count == 2
    assert [path.name for path in (Path(cfg.output_dir) / "resume").iterdir()] == ["step_1"]


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """A guard that does not wait for each step's loss."""
    original = StepGuard.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.looks_at_each_step = False

    monkeypatch.setattr(StepGuard, "__init__", init)


@pytest.mark.parametrize(("log_every_n_steps", "stops_after"), [(1, 2), (5, 4)])
def test_a_gpu_is_read_when_a_step_is_logged_or_saved(
    recipe_config, spoil, train_step, as_on_a_gpu, log_every_n_steps, stops_after
):
    """The run continues until then; the first step is reported, and nothing is saved after it."""
    spoil(2)
    cfg = recipe_config(log_every_n_steps=log_every_n_steps, save_at_percent=[100], save_every_n_steps=4, max_steps=9)

    with pytest.raises(TrainingError, match="gradient norm nan at step 2 "):
        run_recipe(cfg)
    assert train_step.call_count == stops_after
    assert not list(Path(cfg.output_dir).glob("resume/step_*"))


class OnlyStepOne(UniformWeighting):
    """A weighting with a fault: after the first step all weights are 0."""

    num_calls = 0

    def forward(self, *args, **kwargs):
        OnlyStepOne.num_calls += 1
        return super().forward(*args, **kwargs) * (OnlyStepOne.num_calls == 1)


def test_no_checkpoint_is_written_after_ten_steps_without_a_weight(recipe_config, train_step, as_on_a_gpu):
    """A GPU is not read more often for it, but at step 15, which is saved."""
    weighting = {"_component_": "test_non_finite.OnlyStepOne"}
    cfg = recipe_config(
        loss={"_component_": "tfidf_tune.loss.WeightedCrossEntropyLoss", "weighting": weighting},
        log_every_n_steps=30,
        save_at_percent=[25, 75, 100],
    )

    last = "the last good checkpoint is .*step_5: "
    with pytest.raises(TrainingError, match=f"were 0 in 10 steps in a row, up to step 11, so that nothing .*{last}"):
        run_recipe(cfg)
    assert train_step.call_count == 15
    assert [path.name for path in Path(cfg.output_dir).glob("checkpoint_*")] == ["checkpoint_25pct"]


def test_a_signal_does_not_save_a_model_that_is_not_finite(recipe_config, monkeypatch, spoil, as_on_a_gpu):
    """Where the loss was not read since."""
    spoil(1)
    original = _train.train_step

    def interrupted(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    monkeypatch.setattr(_train, "train_step", interrupted)
    cfg = recipe_config(log_every_n_steps=5, save_at_percent=[100], max_steps=9)

    with pytest.raises(TrainingError, match="at step 1 .*; no resume checkpoint was written"):
        run_recipe(cfg)
    assert not list(Path(cfg.output_dir).glob("resume/step_*"))


def test_fp16_overflow_is_left_to_the_scaler(recipe_config, monkeypatch, spoil, capsys):
    """The loss is finite, the scaled gradients are not; a loss of NaN still stops the run."""
    monkeypatch.setattr(
        "tfidf_tune.training.build_grad_scaler", lambda run: torch.amp.GradScaler("cpu", init_scale=2.0**30)
    )
    cfg = recipe_config(lora=True, dtype="fp16", on_non_finite="skip", max_steps=2)
    run_recipe(cfg, lora=True)

    printed = capsys.readouterr().err
    assert "step 1: gradients overflowed in fp16; step skipped, loss scale" in printed
    assert "not finite" not in printed

    spoil(2)
    cfg.output_dir += "_stop"
    cfg.on_non_finite = "stop"
    with pytest.raises(TrainingError, match="not finite: loss nan .* at step 2 "):
        run_recipe(cfg, lora=True)
