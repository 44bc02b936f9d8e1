"""fp16 with scaled gradients: frozen base in fp16, adapters in fp32."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from tiny_models import MODELS
from tiny_run import read_metrics, run_recipe
from training_steps import make_batch

from tfidf_tune.loss import TFIDFCrossEntropyLoss
from tfidf_tune.training import (
    HFCheckpointer,
    Run,
    TrainingError,
    agree_on_step,
    build_grad_scaler,
    build_model,
    load_model,
    train_adapters_only,
    train_step,
)

CPU = torch.device("cpu")


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
    model.set_num_output_chunks(8)
    return model


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gptj")
    MODELS["gptj"].build_hf().save_pretrained(folder)
    return folder


def adapters_of(model):
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def test_the_step_is_that_of_fp32_up_to_the_rounding_of_fp16(base):
    """The update is linear in the gradient under SGD, and clipping sees gradients that are scaled back."""
    moved = {}
    for dtype in (torch.float16, torch.float32):
        model = make_lora_model(base, dtype)
        before = {name: value.detach().clone() for name, value in adapters_of(model).items()}
        optimizer = torch.optim.SGD(adapters_of(model).values(), lr=1.0)
        scaler = build_grad_scaler(make_run(dtype))
        step = agree_on_step([make_batch(3, seed=3)])
        settings = {"scaler": scaler, "device": CPU, "clip_grad_norm": 0.01}
        result = train_step(model, TFIDFCrossEntropyLoss(), optimizer, step, **settings)
        assert not result.skipped
        moved[dtype] = {name: value.detach() - before[name] for name, value in adapters_of(model).items()}

    for name, value in moved[torch.float32].items():
        # Relative error of fp16 2^-11, some thirty roundings in a row through two layers, forward and backward.
        atol = 32 * 2**-11 * value.abs().max().item()
        torch.testing.assert_close(moved[torch.float16][name], value, rtol=0, atol=atol)


@pytest.fixture
def run_fp16(recipe_config, base, tiny_checkpoint, monkeypatch):
    """Run the recipe with a scale of the loss at the start; return its folder."""

    def run(init_scale, **overrides):
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
        monkeypatch.setattr("tfidf_tune.training.build_grad_scaler", lambda run: scaler)
        cfg = recipe_config(lora=True, dtype="fp16", **overrides)
        cfg.model = MODELS["gptj"].section(lora=True)
        cfg.checkpointer.checkpoint_dir = str(base)
        cfg.tokenizer.path = str(tiny_checkpoint)
        return run_recipe(cfg, lora=True)

    return run


def test_the_recipe_trains_in_fp16_and_reports_skipped_steps(run_fp16, capsys):
    lines = read_metrics(run_fp16(2.0**30, epochs=2))

    skipped = [line for line in lines if line["grad_norm"] is None]  # not finite
    reported = [line for line in capsys.readouterr().err.splitlines() if "gradients overflowed in fp16" in line]
    assert len(skipped) == len(reported) > 3
    assert reported[0].endswith("step 1: gradients overflowed in fp16; step skipped, loss scale 5.36871e+08")
    assert [line["loss_scale"] for line in lines][:2] == [2.0**29, 2.0**28]
    # The schedule waits with the optimizer.
    rates = [line["lr"] for line in lines if line not in skipped]
    torch.testing.assert_close(rates, [1e-2 * (1 - done / len(lines)) for done in range(len(rates))])
    assert sum(line["cross_entropy"] for line in lines[-5:]) < sum(line["cross_entropy"] for line in lines[:5])


def test_gradients_that_overflow_at_any_scale_end_the_run(run_fp16, monkeypatch):
    unscale = torch.amp.GradScaler.unscale_

    def overflow(scaler, optimizer):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.fill_(float("inf"))
        unscale(scaler, optimizer)

    monkeypatch.setattr("torch.amp.GradScaler.unscale_", overflow)
    with pytest.raises(TrainingError, match="gradients overflow in fp16 at step 1 even without a loss scale"):
        run_fp16(1.0)
