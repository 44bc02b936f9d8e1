"""The plan that a recipe prints, and what it refuses."""

from collections import namedtuple
from functools import partial
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from tfidf_tune.recipes import full_finetune, lora_finetune
from tiny_models import FAMILY_MODELS, MODELS
from torch.utils.data import Dataset

from tfidf_tune.loss import CrossEntropyLoss
from tfidf_tune.training import HFCheckpointer, Run, SetupError, build_model, plan_memory
from tfidf_tune.training._data import longest_sequence

# Bytes of the recipes' window: 16 mini-batches of 4 x 32 tokens, 320 and two more entries, two counters.
WINDOW = 4 * 16 * 4 * 32 + 4 * (320 + 2) + 4 * 16 + 8
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def companions(tiny_checkpoint):
    """Bytes of the files that each checkpoint has beside its weights: the tokenizer's, and generation's settings."""
    return HFCheckpointer(checkpoint_dir=str(tiny_checkpoint)).companion_bytes


class Sequences(Dataset):
    def __init__(self, lengths):
        self.lengths, self.asked = lengths, []

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        self.asked.append(index)
        return {"tokens": [0] * self.lengths[index], "labels": [0] * self.lengths[index]}


def test_the_longest_of_a_small_data_set_is_found():
    assert longest_sequence(Sequences([3, 9, 4])) == 9


def test_a_large_data_set_is_sampled_evenly():
    dataset = Sequences([5] * 100_000)

    assert longest_sequence(dataset) == 5
    assert len(dataset.asked) <= 64
    assert dataset.asked[0] == 0
    assert dataset.asked[-1] > 98_000


@pytest.mark.parametrize(("lora", "trained", "frozen"), [(False, 39_072, 0), (True, 1_792, 39_072)])
def test_the_plan_is_printed_before_training(recipe_config, capsys, companions, lora, trained, frozen):
    """Parameters by hand: 2 x 320 x 32 + 2 x (2 x 32 x 32 + 2 x 32 x 16 + 3 x 32 x 64 + 2 x 32) + 32, and of
    rank 4: 2 x 4 x (2 x (32 + 32) + 2 x (32 + 16))."""
    (lora_finetune if lora else full_finetune).recipe_main.__wrapped__(recipe_config(lora=lora, max_steps=1))

    told = capsys.readouterr().err
    assert "A step of 4 x 32 tokens on cpu:\n" in told
    assert f"{trained:,} trained, {frozen:,} frozen" in told
    for part in ("weights", "optimizer state", "gradients", "activations", "loss", "needed at least", "available"):
        assert f"\n{part} " in told
    assert f"\nobjective state{WINDOW / 2**20:>10.2f} MiB\n" in told
    assert "not estimated" not in told
    checkpoint = trained * 4 / 2**20
    to_resume = 3 * checkpoint + WINDOW / 2**20  # AdamW keeps two numbers beside each weight
    saved = checkpoint + companions / 2**20
    assert f"\n5 checkpoints of {saved:.2f} MiB and 2 to resume from of {to_resume:.2f} MiB; " in told
    assert told.index("5 checkpoints") < told.index("step/s")


def test_checkpoints_with_merged_adapters_are_planned_as_whole_models(recipe_config, capsys, companions):
    lora_finetune.recipe_main.__wrapped__(recipe_config(lora=True, max_steps=1, merge_adapter=True))

    told = capsys.readouterr().err
    to_resume = 3 * 1_792 * 4 + WINDOW
    saved = 39_072 * 4 + companions
    assert f"5 checkpoints of {saved / 2**20:.2f} MiB and 2 to resume from of {to_resume / 2**20:.2f} MiB" in told


def test_a_run_without_resume_checkpoints_plans_none(recipe_config, capsys, companions):
    full_finetune.recipe_main.__wrapped__(recipe_config(max_steps=1, keep_last_n_checkpoints=0))

    told = capsys.readouterr().err
    assert f"5 checkpoints of {(39_072 * 4 + companions) / 2**20:.2f} MiB; " in told
    assert "to resume from" not in told


@pytest.mark.parametrize("lora", [False, True])
def test_what_cannot_fit_into_memory_is_refused_before_anything_is_loaded(recipe_config, monkeypatch, lora):
    monkeypatch.setattr("tfidf_tune.training._resources.available_memory", lambda device: 300_000)
    cfg = recipe_config(lora=lora)
    recipe = (lora_finetune if lora else full_finetune).recipe_main.__wrapped__

    with pytest.raises(
        SetupError, match=r"(?s)needs .* MiB of memory or more, 0\.29 MiB are available; the largest part"
    ):
        recipe(cfg)
    assert not Path(cfg.output_dir).exists()

    cfg.refuse_if_too_large = False
    recipe(cfg)
    assert (Path(cfg.output_dir) / "checkpoint_100pct").is_dir()


@pytest.mark.parametrize(("key", "value"), [("save_at_percent", [50, 100]), ("keep_last_n_checkpoints", 1)])
def test_what_cannot_fit_on_the_disk_is_refused(recipe_config, monkeypatch, companions, key, value):
    """5 x 156,288 bytes and the tokenizer; 3 x (3 x as much and the window): two to keep, one that is being written."""
    free = 14 * 39_072 * 4 + 3 * WINDOW + 5 * companions
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(10**7, 0, free))
    cfg = recipe_config()

    with pytest.raises(
        SetupError,
        match=r"5 checkpoints of 0\.16 MiB and 2 to resume from of 0\.46 MiB do not fit into .*run, where 2\.16 MiB",
    ):
        full_finetune.recipe_main.__wrapped__(cfg)

    cfg[key] = value
    full_finetune.recipe_main.__wrapped__(cfg)


def test_the_plan_knows_the_precision_of_the_run(recipe_config, capsys):
    full_finetune.recipe_main.__wrapped__(recipe_config(max_steps=1))
    in_fp32 = capsys.readouterr().err
    cfg = recipe_config(max_steps=1, dtype="bf16", output_dir=recipe_config().output_dir + "2")
    full_finetune.recipe_main.__wrapped__(cfg)
    in_bf16 = capsys.readouterr().err

    for told, size in ((in_fp32, 4), (in_bf16, 2)):
        assert f" {39_072 * size / 2**20:.2f} MiB" in next(s for s in told.splitlines() if s.startswith("gradients"))


def test_planning_leaves_the_run_as_it_was(recipe_config, monkeypatch, tmp_path):
    """Weights of adapters, the order of data and the window: the same losses with and without a plan."""
    import json

    def losses(name):
        cfg = recipe_config(lora=True, max_steps=4, output_dir=str(tmp_path / name))
        lora_finetune.recipe_main.__wrapped__(cfg)
        return [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

    planned = losses("a")
    monkeypatch.setattr("tfidf_tune.training.check_resources", lambda *_: None)

    assert losses("b") == planned


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_the_plan_of_every_family_is_complete(name, lora):
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


def test_a_share_that_is_given_twice_is_one_checkpoint(recipe_config, capsys, companions):
    full_finetune.recipe_main.__wrapped__(recipe_config(max_steps=1, save_at_percent=[50, 100, 50]))

    assert f"\n2 checkpoints of {(39_072 * 4 + companions) / 2**20:.2f} MiB" in capsys.readouterr().err
