"""The plan that a recipe prints, and what it refuses."""

from collections import namedtuple
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from tfidf_tune.recipes import full_finetune, lora_finetune
from tiny_models import FAMILY_MODELS, MODELS

from tfidf_tune.loss import CrossEntropyLoss
from tfidf_tune.training import HFCheckpointer, Run, SetupError, _resources, build_model, plan_memory

# Bytes of the recipes' window: 16 mini-batches of 4 x 32 tokens, 320 and two more entries, two counters.
WINDOW = 4 * 16 * 4 * 32 + 4 * (320 + 2) + 4 * 16 + 8
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def companions(tiny_checkpoint):
    """Bytes of a checkpoint's files other than weights: the tokenizer's, and settings of generation."""
    return HFCheckpointer(checkpoint_dir=str(tiny_checkpoint)).companion_bytes


@pytest.mark.parametrize(("lora", "trained", "frozen"), [(False, 39_072, 0), (True, 1_792, 39_072)])
def test_the_plan_is_printed_before_training(recipe_config, capsys, companions, lora, trained, frozen):
    """Parameters by hand: 2 x 320 x 32 + 2 x (2 x 32 x 32 + 2 x 32 x 16 + 3 x 32 x 64 + 2 x 32) + 32, and of
    rank 4: 2 x 4 x (2 x (32 + 32) + 2 x (32 + 16))."""
    (lora_finetune if lora else full_finetune).recipe_main.__wrapped__(recipe_config(lora=lora, max_steps=1))

    printed = capsys.readouterr().err
    assert "A step of 4 x 32 tokens on cpu:\n" in printed
    assert f"{trained:,} trained, {frozen:,} frozen" in printed
    for part in ("weights", "optimizer state", "gradients", "activations", "loss", "needed at least", "available"):
        assert f"\n{part} " in printed
    assert f"\nobjective state{WINDOW / 2**20:>10.2f} MiB\n" in printed
    assert "not estimated" not in printed
    checkpoint = trained * 4 / 2**20
    to_resume = 3 * checkpoint + WINDOW / 2**20  # AdamW keeps two numbers for each weight
    saved = checkpoint + companions / 2**20
    assert f"\n5 checkpoints of {saved:.2f} MiB and 2 to resume from of {to_resume:.2f} MiB; " in printed
    assert printed.index("5 checkpoints") < printed.index("step/s")


def test_merged_adapters_are_planned_as_complete_models_and_no_resume_checkpoints_if_none_are_kept(
    recipe_config, capsys, companions
):
    cfg = recipe_config(lora=True, max_steps=1, merge_adapter=True, keep_last_n_checkpoints=0)
    cfg.save_at_percent = [50, 100, 50]
    lora_finetune.recipe_main.__wrapped__(cfg)

    printed = capsys.readouterr().err
    assert f"2 checkpoints of {(39_072 * 4 + companions) / 2**20:.2f} MiB; " in printed
    assert "to resume from" not in printed


def test_a_run_that_does_not_fit_into_memory_is_refused_before_anything_is_loaded(recipe_config, monkeypatch):
    monkeypatch.setattr("tfidf_tune.training._resources.available_memory", lambda device: 300_000)
    cfg, recipe = recipe_config(max_steps=1), full_finetune.recipe_main.__wrapped__

    with pytest.raises(
        SetupError, match=r"(?s)needs .* MiB of memory or more, 0\.29 MiB are available; the largest part"
    ):
        recipe(cfg)
    assert not Path(cfg.output_dir).exists()

    cfg.refuse_if_too_large = False
    recipe(cfg)
    assert (Path(cfg.output_dir) / "checkpoint_100pct").is_dir()


def test_checkpoints_that_do_not_fit_on_the_disk_are_refused(recipe_config, monkeypatch, companions):
    """5 x 156,288 bytes and the tokenizer; 3 x (3 x as much and the window): two to keep, one being written."""
    free = 14 * 39_072 * 4 + 3 * WINDOW + 5 * companions
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(10**7, 0, free))
    cfg = recipe_config()

    with pytest.raises(
        SetupError,
        match=r"5 checkpoints of 0\.16 MiB and 2 to resume from of 0\.46 MiB do not fit into .*run, where 2\.16 MiB",
    ):
        full_finetune.recipe_main.__wrapped__(cfg)

    cfg.keep_last_n_checkpoints, cfg.max_steps = 1, 1
    full_finetune.recipe_main.__wrapped__(cfg)


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_the_plan_of_every_family_is_complete(name):
    lora = FAMILY_MODELS.index(name) % 2 == 0
    run = Run(torch.device("cpu"), torch.float32, 0, Path("unused"))
    model = build_model(OmegaConf.create({"model": MODELS[name].section(lora=lora)}), run)
    plan = plan_memory(
        model, CrossEntropyLoss(), partial(torch.optim.AdamW, lr=1e-3), batch_size=2, seq_len=32,
        device=torch.device("cpu"),
    )  # fmt: skip

    assert plan.not_estimated == ()
    assert plan.total > plan.weights + plan.gradients


def test_the_plan_is_that_of_the_runs_switches(recipe_config, monkeypatch):
    class Seen(Exception):
        pass

    def plan(*_, **kwargs):
        raise Seen(*(kwargs[key] for key in keys))

    monkeypatch.setattr(_resources, "plan_memory", plan)
    keys = "accumulate_gradients", "enable_activation_checkpointing", "autocast_dtype"
    for overrides, expected in (
        ({"dtype": "bf16"}, (False, False, None)),
        ({"gradient_accumulation_steps": 2, "enable_activation_checkpointing": True}, (True, True, None)),
        ({"dtype": "fp16", "compile": True}, (False, True, torch.float16)),  # a compiled model keeps less than that
    ):
        with pytest.raises(Seen) as seen:
            lora_finetune.recipe_main.__wrapped__(recipe_config(lora=True, **overrides))
        assert dict(zip(keys, seen.value.args, strict=True)) == dict(zip(keys, expected, strict=True))


def test_sharded_quantized_optimizer_state_is_refused_unless_no_checkpoint_is_kept(recipe_config, monkeypatch):
    # torchao compiles its step, which takes a minute and changes no size.
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(_resources, "dist", SimpleNamespace(is_initialized=lambda: True))
    cfg = recipe_config(max_steps=1, optimizer={"_component_": "torchao.optim.AdamW8bit", "lr": 1e-2})

    with pytest.raises(
        SetupError,
        match=r"optimizer: torchao\.optim\.AdamW8bit keeps its state as OptimState8bit, .*keep_last_n_checkpoints=0$",
    ):
        full_finetune.recipe_main.__wrapped__(cfg)
    assert not Path(cfg.output_dir).exists()

    cfg.keep_last_n_checkpoints = 0
    full_finetune.recipe_main.__wrapped__(cfg)
