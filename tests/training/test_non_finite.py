"""NaN, infinity and weights of 0 end a run, or are skipped, and are reported; fp16 with scaled
gradients.
"""

import os
import signal
from pathlib import Path

import pytest
import torch
from helpers.fakes.tiny_models import MODELS
from helpers.fakes.tiny_run import read_metrics, run_recipe
from helpers.fakes.training_steps import make_batch
from helpers.processes.hooks import spoil_terms
from omegaconf import OmegaConf

from tfidf_tune.loss import TFIDFCrossEntropyLoss, WeightedCrossEntropyLoss
from tfidf_tune.training import (
    HFCheckpointer,
    Run,
    TrainingError,
    _train,
    agree_on_step,
    build_grad_scaler,
    build_model,
    load_model,
    prepare_head,
    train_adapters_only,
    train_step,
)
from tfidf_tune.training._metrics import StepGuard
from tfidf_tune.weighting import UniformWeighting

CPU = torch.device("cpu")
NAN = float("nan")


@pytest.fixture
def spoil(monkeypatch):
    """Make the loss of these steps NaN, and with it every gradient."""
    # Restored at the end.
    monkeypatch.setattr(WeightedCrossEntropyLoss, "terms", WeightedCrossEntropyLoss.terms)
    return lambda *steps: spoil_terms(("loss",), NAN, {0: steps}, 0)


def test_the_first_step_that_is_not_finite_is_reported_with_its_items(recipe_config, spoil):
    """At most 32 of them."""
    spoil(2)
    for batch_size, named in (
        (4, "items 4, 5, 6, 7 of"),
        (34, r"items 34, 35, .*, 65 and 2 more of"),
    ):
        cfg = recipe_config(batch_size=batch_size, shuffle=False)
        found = rf"loss nan and gradient norm nan at step 2 \({named}"
        with pytest.raises(TrainingError, match=f"^not finite: {found}.*on_non_finite=skip"):
            run_recipe(cfg)
        spoil(2)


def test_ten_skipped_steps_in_a_row_end_the_run(recipe_config, spoil, capsys):
    spoil(*range(1, 10), *range(11, 21))  # one that is finite: counted from the start
    with pytest.raises(
        TrainingError, match="not finite, 10 steps in a row: loss nan and .* at step 20 "
    ):
        run_recipe(recipe_config(on_non_finite="skip", epochs=2))
    assert capsys.readouterr().err.count("step skipped, not finite: loss nan") == 18


def bits(model, optimizer):
    tensors = list(model.parameters())
    for state in optimizer.state.values():
        tensors += state.values()
    return [tensor.detach().clone() for tensor in tensors]


def test_a_skipped_step_changes_neither_weights_nor_optimizer_nor_schedule(
    recipe_config, monkeypatch, spoil, capsys
):
    original = _train.train_step
    seen = []

    def train_step(model, loss, optimizer, *args, **kwargs):
        before = bits(model, optimizer)
        rate = optimizer.param_groups[0]["lr"]
        result = original(model, loss, optimizer, *args, **kwargs)
        seen.append((result.is_lost, all(map(torch.equal, before, bits(model, optimizer))), rate))
        return result

    monkeypatch.setattr(_train, "train_step", train_step)
    spoil(3, 4)

    run_recipe(recipe_config(on_non_finite="skip", max_steps=6))

    skipped, unchanged, rates = zip(*seen, strict=True)
    assert skipped == unchanged == (False, False, True, True, False, False)
    assert rates[2] == rates[3] == rates[4]
    assert len({*rates}) == 4
    notes = [
        line for line in capsys.readouterr().err.splitlines() if "step skipped, not finite" in line
    ]
    assert [line.split(" (items")[0].rsplit(" ", 1)[1] for line in notes] == ["3", "4"]


class OnlyStepOne(UniformWeighting):
    """A weighting with a fault: after the first step all weights are 0."""

    num_calls = 0

    def forward(self, *args, **kwargs):
        OnlyStepOne.num_calls += 1
        weights = super().forward(*args, **kwargs)
        return weights if OnlyStepOne.num_calls == 1 else weights * 0


def test_no_checkpoint_is_written_after_ten_steps_without_a_weight(recipe_config, monkeypatch):
    """A GPU is not read more often for it, but at step 15, which is saved."""
    monkeypatch.setattr(StepGuard, "looks_at_each_step", False)
    weighting = {"_component_": "test_non_finite.OnlyStepOne"}
    cfg = recipe_config(
        loss={"_component_": "tfidf_tune.loss.WeightedCrossEntropyLoss", "weighting": weighting},
        log_every_n_steps=30,
        save_at_percent=[25, 75, 100],
    )

    last = "the last good checkpoint is .*step_5: "
    with pytest.raises(TrainingError, match=f"were 0 in 10 steps in a row, up to step 11.*{last}"):
        run_recipe(cfg)
    assert OnlyStepOne.num_calls == 15
    assert [path.name for path in Path(cfg.output_dir).glob("checkpoint_*")] == ["checkpoint_25pct"]


def test_steps_without_a_weight_count_in_a_row_and_those_without_a_token_not_at_all():
    """Nine, one with weights, five, three without a token, five: the tenth in a row is step 23."""
    guard = StepGuard(CPU, skip=False, total_steps=30, indices_of=lambda step: [], note=print)
    weightless = (100, 0.0)
    weighted = (100, 1.0)
    empty = (0, 0.0)
    steps = [weightless] * 9 + [weighted] + [weightless] * 5 + [empty] * 3 + [weightless] * 5
    finite = {"loss": torch.ones(()), "grad_norm": torch.ones(())}

    def take(step):
        num_tokens, largest = steps[step - 1]
        guard.add(
            step,
            torch.tensor(True),
            finite | {"weight_max": torch.tensor(largest)},
            num_tokens=num_tokens,
        )
        guard.check()

    for step in range(1, 23):
        take(step)
    with pytest.raises(
        TrainingError,
        match="the weights of all tokens were 0 in 10 steps in a row, up to step 23: ",
    ):
        take(23)


def test_a_signal_does_not_save_a_model_that_is_not_finite(recipe_config, monkeypatch, spoil):
    """Where the loss was not read since, as on a GPU."""
    monkeypatch.setattr(StepGuard, "looks_at_each_step", False)
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


# ---- fp16: a frozen base in fp16, adapters in float32


def make_run(dtype):
    return Run(CPU, dtype, 0, Path("unused"))


def make_lora_model(base, dtype):
    run = make_run(dtype)
    checkpointer = HFCheckpointer(checkpoint_dir=str(base))
    torch.manual_seed(0)
    model = build_model(OmegaConf.create({"model": MODELS["gptj"].section(lora=True)}), run)
    load_model(model, checkpointer, run)
    train_adapters_only(model)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return model


def adapters_of(model):
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def test_the_step_is_that_of_fp32_up_to_the_rounding_of_fp16(make_base):
    """The update is linear in the gradient under SGD, and clipping sees gradients that are scaled
    back.
    """
    moved = {}
    for dtype in (torch.float16, torch.float32):
        model = make_lora_model(make_base("gptj"), dtype)
        before = {name: value.detach().clone() for name, value in adapters_of(model).items()}
        optimizer = torch.optim.SGD(adapters_of(model).values(), lr=1.0)
        scaler = build_grad_scaler(make_run(dtype))
        step = agree_on_step([make_batch(3, seed=3)])
        settings = {"scaler": scaler, "device": CPU, "clip_grad_norm": 0.01}
        loss = TFIDFCrossEntropyLoss()
        prepare_head(model, loss)
        result = train_step(model, loss, optimizer, step, **settings)
        assert not result.overflowed
        moved[dtype] = {
            name: value.detach() - before[name] for name, value in adapters_of(model).items()
        }

    for name, value in moved[torch.float32].items():
        # Relative error of fp16 2^-11, some thirty roundings in a row through two layers, forward
        # and backward.
        atol = 32 * 2**-11 * value.abs().max().item()
        torch.testing.assert_close(moved[torch.float16][name], value, rtol=0, atol=atol)


def test_a_step_in_fp16_does_not_wait_for_its_device_with_a_fused_optimizer(make_base, monkeypatch):
    model = make_lora_model(make_base("gptj"), torch.float16)
    loss = TFIDFCrossEntropyLoss(head="chunked")
    prepare_head(model, loss)  # the fused head compares a factor, on a CPU alone
    optimizer = torch.optim.AdamW(adapters_of(model).values(), fused=True)
    step = agree_on_step([make_batch(3)])
    reads = []
    for name in ("item", "__bool__", "__float__", "tolist"):
        read = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, name=name, read=read: reads.append(name) or read(self)
        )
    scaler = build_grad_scaler(make_run(torch.float16))
    result = train_step(model, loss, optimizer, step, scaler=scaler, device=CPU, clip_grad_norm=1.0)
    assert reads == []
    assert not result.overflowed
    assert result.metrics["loss_scale"] == scaler.get_scale()


@pytest.fixture
def run_fp16(recipe_config, make_base, monkeypatch):
    """Run the recipe with a scale of the loss at the start; return its folder."""

    def run(init_scale, **overrides):
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
        monkeypatch.setattr("tfidf_tune.training.build_grad_scaler", lambda run: scaler)
        cfg = recipe_config(lora=True, dtype="fp16", **overrides)
        cfg.model = MODELS["gptj"].section(lora=True)
        cfg.checkpointer.checkpoint_dir = str(make_base("gptj"))
        return run_recipe(cfg, lora=True)

    return run


def test_the_recipe_trains_in_fp16_and_reports_skipped_steps(run_fp16, capsys):
    lines = read_metrics(run_fp16(2.0**30, epochs=2, on_non_finite="skip"))

    skipped = [line for line in lines if line["grad_norm"] is None]  # not finite
    printed = capsys.readouterr().err
    reported = [line for line in printed.splitlines() if "gradients overflowed in fp16" in line]
    assert "not finite" not in printed, "of the loss"
    assert len(skipped) == len(reported) > 3
    assert reported[0].endswith(
        "step 1: gradients overflowed in fp16; step skipped, loss scale 5.36871e+08"
    )
    assert [line["loss_scale"] for line in lines][:2] == [2.0**29, 2.0**28]
    # The schedule waits with the optimizer.
    rates = [line["lr"] for line in lines if line not in skipped]
    torch.testing.assert_close(
        rates, [1e-2 * (1 - done / len(lines)) for done in range(len(rates))]
    )
    assert sum(line["cross_entropy"] for line in lines[-5:]) < sum(
        line["cross_entropy"] for line in lines[:5]
    )


def test_gradients_that_overflow_at_any_scale_end_the_run(run_fp16, monkeypatch):
    unscale = torch.amp.GradScaler.unscale_

    def overflow(scaler, optimizer):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.fill_(float("inf"))
        unscale(scaler, optimizer)

    monkeypatch.setattr("torch.amp.GradScaler.unscale_", overflow)
    with pytest.raises(
        TrainingError, match="gradients overflow in fp16 at step 1 even without a loss scale"
    ):
        run_fp16(1.0)
