"""The plan that a recipe prints, and what it refuses."""

from collections import namedtuple
from functools import partial
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from tfidf_tune.recipes import full_finetune, lora_finetune
from tiny_models import FAMILY_MODELS, MODELS

from tfidf_tune.loss import CrossEntropyLoss
from tfidf_tune.training import HFCheckpointer, Run, SetupError, build_model, plan_memory

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


def test_checkpoints_with_merged_adapters_are_planned_as_whole_models(recipe_config, capsys, companions):
    lora_finetune.recipe_main.__wrapped__(recipe_config(lora=True, max_steps=1, merge_adapter=True))

    printed = capsys.readouterr().err
    to_resume = 3 * 1_792 * 4 + WINDOW
    saved = 39_072 * 4 + companions
    assert f"5 checkpoints of {saved / 2**20:.2f} MiB and 2 to resume from of {to_resume / 2**20:.2f} MiB" in printed


def test_a_run_without_resume_checkpoints_plans_none(recipe_config, capsys, companions):
    cfg = recipe_config(max_steps=1, keep_last_n_checkpoints=0, save_at_percent=[50, 100, 50])
    full_finetune.recipe_main.__wrapped__(cfg)

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


@pytest.mark.parametrize(("key", "value"), [("save_at_percent", [50, 100]), ("keep_last_n_checkpoints", 1)])
def test_checkpoints_that_do_not_fit_on_the_disk_are_refused(recipe_config, monkeypatch, companions, key, value):
    """5 x 156,288 bytes and the tokenizer; 3 x (3 x as much and the window): two to keep, one being written."""
    free = 14 * 39_072 * 4 + 3 * WINDOW + 5 * companions
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(10**7, 0, free))
    cfg = recipe_config()

    with pytest.raises(
        SetupError,
        match=r"5 checkpoints of 0\.16 MiB and 2 to resume from of 0\.46 MiB do not fit into .*run, where 2\.16 MiB",
    ):
        full_finetune.recipe_main.__wrapped__(cfg)

    cfg[key], cfg.max_steps = value, 1
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


@pytest.mark.parametrize(
    ("overrides", "key", "expected"),
    [
        ({"gradient_accumulation_steps": 1}, "accumulate_gradients", False),
        ({"gradient_accumulation_steps": 2}, "accumulate_gradients", True),
        ({}, "enable_activation_checkpointing", False),
        ({"enable_activation_checkpointing": True}, "enable_activation_checkpointing", True),
        ({"compile": True}, "enable_activation_checkpointing", True),  # the bound for what a compiled model keeps
        ({"dtype": "bf16"}, "autocast_dtype", None),
        ({"dtype": "fp16"}, "autocast_dtype", torch.float16),
    ],
)
def test_the_plan_is_that_of_the_runs_switches(recipe_config, monkeypatch, overrides, key, expected):
    class Seen(Exception):
        pass

    def plan(*_, **kwargs):
        raise Seen(kwargs[key])

    monkeypatch.setattr("tfidf_tune.training._resources.plan_memory", plan)

    with pytest.raises(Seen) as seen:
        lora_finetune.recipe_main.__wrapped__(recipe_config(lora=True, **overrides))
    assert seen.value.args == (expected,)
