"""Both recipes, from the start of a run to checkpoints that transformers and peft load."""

import json
import os
import random
from itertools import pairwise
from pathlib import Path

import peft
import pytest
import torch
import transformers
from helpers.fakes.tiny_run import metrics_of, read_metrics, run_config, run_recipe
from omegaconf import OmegaConf

from tfidf_tune.probe import load_model

MILESTONES = [f"checkpoint_{percent}pct" for percent in (10, 25, 50, 75, 100)]
GOLDEN = Path(__file__).parent / "golden_losses.json"


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_checkpoint, text_file, device):
    """A finished run of each recipe: ``finished(lora=True)``."""
    runs = {}

    def get(*, lora):
        if lora not in runs:
            folder = tmp_path_factory.mktemp("finished") / "run"
            cfg = run_config(
                folder, tiny_checkpoint, text_file, lora=lora, epochs=2, device=str(device)
            )
            if lora:  # adapters of attention can do little for a base of random weights
                cfg.model.apply_lora_to_mlp = cfg.model.apply_lora_to_output = True
            runs[lora] = run_recipe(cfg, lora=lora)
        return runs[lora]

    return get


@pytest.mark.parametrize("lora", [False, True])
def test_a_run_learns_and_writes_what_is_documented(finished, lora):
    run = finished(lora=lora)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["cross_entropy"] for line in lines]

    assert len(losses) == 40
    assert sum(losses[-5:]) < 0.85 * sum(losses[:5])
    torch.testing.assert_close(
        [line["lr"] for line in lines], [1e-2 * (1 - step / 40) for step in range(40)]
    )
    assert lines[0].keys() == {
        "step",
        "loss",
        "cross_entropy",
        "weight_mean",
        "weight_std",
        "weight_max",
        "grad_norm",
        "lr",
        "num_sequences",
        "tokens_per_second_per_gpu",
    }
    config = OmegaConf.load(run / "config.yaml")
    assert lines[0]["num_sequences"] == config.batch_size * config.gradient_accumulation_steps
    assert lines[0]["weight_std"] > 0.1
    expected = {
        *MILESTONES,
        "metrics.jsonl",
        "probe.jsonl",
        "held_out.jsonl",
        "config.yaml",
        "logs",
        "resume",
    }
    assert {path.name for path in run.iterdir()} - {"torchtune_config.yaml"} == expected
    assert OmegaConf.load(run / "config.yaml").dataset.probe_file == str(run / "probe.jsonl")


@pytest.mark.parametrize("lora", [False, True])
def test_every_milestone_is_another_model_that_generates(finished, lora, tiny_checkpoint, tmp_path):
    """In transformers, or on the untouched base in peft; a merged checkpoint is that of base and
    adapter.
    """
    run = finished(lora=lora)
    tokens = torch.arange(20)[None]
    outputs = [load_model(tiny_checkpoint)(tokens).logits]
    for name in MILESTONES:
        folder = tiny_checkpoint if lora else run / name
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        model = (peft.PeftModel.from_pretrained(model, run / name) if lora else model).eval()
        with torch.no_grad():
            outputs.append(model(tokens).logits)
    inputs = transformers.AutoTokenizer.from_pretrained(run / name)(
        "the old sailor", return_tensors="pt"
    )
    continued = model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert continued.shape[1] > inputs["input_ids"].shape[1]
    assert not any(torch.allclose(earlier, later) for earlier, later in pairwise(outputs))

    if lora:
        cfg = OmegaConf.load(run / "config.yaml")
        cfg.merge_adapter = True
        cfg.output_dir = str(tmp_path / "merged")
        merged = load_model(run_recipe(cfg, lora=True) / MILESTONES[-1])
        with torch.no_grad():
            torch.testing.assert_close(merged(tokens).logits, outputs[-1])


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("objective", ["CrossEntropyLoss", "TFIDFCrossEntropyLoss"])
def test_seeded_runs_keep_their_golden_losses(recipe_config, lora, objective, device):
    """Ten steps have the recorded losses.

    RECORD_GOLDEN_LOSSES=1 records them again after an intended change. The tolerance is for devices
    that order sums differently: some eps of fp32, amplified by ten AdamW steps.
    """
    cfg = recipe_config(lora=lora, max_steps=10, save_at_percent=[100], device=str(device))
    cfg.loss._component_ = f"tfidf_tune.loss.{objective}"
    losses = [line["loss"] for line in read_metrics(run_recipe(cfg, lora=lora))]
    key = f"{'lora' if lora else 'full'} {objective}"
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.is_file() else {}
    if os.environ.get("RECORD_GOLDEN_LOSSES"):
        GOLDEN.write_text(json.dumps(golden | {key: losses}, indent=2) + "\n")
        return

    assert losses == pytest.approx(golden[key], rel=1e-4)


def test_a_run_follows_from_its_seed_and_objectives_see_the_same_data(recipe_config, tmp_path):
    """The first step's unweighted cross-entropy is that of one start and one batch under both
    objectives.
    """

    def run(name, seed=0, objective="TFIDFCrossEntropyLoss"):
        loss = {"_component_": f"tfidf_tune.loss.{objective}"}
        return read_metrics(
            run_recipe(
                recipe_config(max_steps=3, output_dir=str(tmp_path / name), seed=seed, loss=loss)
            )
        )

    weighted = run("a")

    assert run("b") == weighted
    assert run("c", seed=1)[0]["cross_entropy"] != weighted[0]["cross_entropy"]
    plain = run("d", objective="CrossEntropyLoss")
    assert plain[0]["cross_entropy"] == weighted[0]["cross_entropy"]
    assert plain[0]["loss"] != weighted[0]["loss"]


def test_repetition_weights_over_three_epochs_are_those_of_copies_in_the_text(
    recipe_config, tmp_path
):
    """Rows seen before are no repetitions; six rows, each twice, in three steps an epoch."""
    letters = random.Random(0)
    texts = ["".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=50)) for _ in range(6)]
    (tmp_path / "texts.txt").write_text("\n".join(texts * 2))
    weighting = {
        "_component_": "tfidf_tune.weighting.RepetitionWeighting",
        "min_length": 1,
        "sample": 1,
    }
    settings = {
        "dataset": {
            "_component_": "tfidf_tune.data.text_dataset",
            "source": str(tmp_path / "texts.txt"),
        },
        "loss": {
            "_component_": "tfidf_tune.loss.WeightedCrossEntropyLoss",
            "weighting": weighting | {"num_buckets": 2**22},
        },
        "epochs": 3,
        "save_at_percent": [100],
    }
    run = run_recipe(recipe_config(lora=True, **settings), lora=True)

    means = metrics_of(run, "weight_mean").flatten().tolist()
    assert len(means) == 9
    # Each row once before, but for itself; the first tokens have too little context.
    assert 0.5 < sum(means[:3]) / 3 < 1
    assert means[3:] == [pytest.approx(0.25, abs=0.02)] * 6
