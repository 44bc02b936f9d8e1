"""Both recipes, from the start of a run to checkpoints that transformers and peft load."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import pandas as pd
import peft
import pytest
import torch
import transformers
from omegaconf import OmegaConf
from tfidf_tune.recipes import full_finetune, lora_finetune
from tiny_llama import BLOCK_SIZE
from tiny_run import run_config

from tfidf_tune.analysis import load_model, probe
from tfidf_tune.data import hf_tokenizer, read_probe_file
from tfidf_tune.training import SetupError

MILESTONES = [f"checkpoint_{percent}pct" for percent in (10, 25, 50, 75, 100)]
GOLDEN = Path(__file__).parent / "golden_losses.json"


def run_recipe(cfg, *, lora=False):
    (lora_finetune if lora else full_finetune).recipe_main.__wrapped__(cfg)
    return Path(cfg.output_dir)


def read_metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_checkpoint, text_file, device):
    """A finished run of each recipe: ``finished(lora=True)``."""
    runs = {}

    def get(*, lora):
        if lora not in runs:
            folder = tmp_path_factory.mktemp("finished") / "run"
            cfg = run_config(folder, tiny_checkpoint, text_file, lora=lora, epochs=2, device=str(device))
            if lora:  # adapters of attention can do little for a base of random weights
                cfg.model.apply_lora_to_mlp = cfg.model.apply_lora_to_output = True
            runs[lora] = run_recipe(cfg, lora=lora)
        return runs[lora]

    return get


@pytest.mark.parametrize("lora", [False, True])
def test_a_run_learns_and_writes_what_is_documented(finished, lora):
    run = finished(lora=lora)
    lines = read_metrics(run)
    losses = [line["cross_entropy"] for line in lines]

    assert len(losses) == 40
    assert sum(losses[-5:]) < 0.85 * sum(losses[:5])
    torch.testing.assert_close([line["lr"] for line in lines], [1e-2 * (1 - step / 40) for step in range(40)])
    assert lines[0].keys() == {
        "step", "loss", "cross_entropy", "weight_mean", "weight_std", "weight_max", "grad_norm", "lr",
        "tokens_per_second_per_gpu",
    }  # fmt: skip
    assert lines[0]["weight_std"] > 0.1
    expected = {*MILESTONES, "metrics.jsonl", "probe.jsonl", "config.yaml", "logs", "resume"}
    assert {path.name for path in run.iterdir()} - {"torchtune_config.yaml"} == expected
    assert OmegaConf.load(run / "config.yaml").dataset.probe_file == str(run / "probe.jsonl")


def test_every_milestone_of_a_full_run_generates_in_transformers(finished):
    run = finished(lora=False)
    continuations = []
    for name in MILESTONES:
        model = transformers.AutoModelForCausalLM.from_pretrained(run / name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(run / name)
        inputs = tokenizer("the old sailor", return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert output.shape[1] > inputs["input_ids"].shape[1]
        continuations.append(tokenizer.decode(output[0]))

    assert len(set(continuations)) > 1, "the milestones should be different models"


def test_every_milestone_of_a_lora_run_changes_the_base_in_peft_as_merged_checkpoints_do(
    finished, tiny_checkpoint, tmp_path
):
    run = finished(lora=True)
    cfg = OmegaConf.load(run / "config.yaml")
    cfg.merge_adapter, cfg.output_dir = True, str(tmp_path / "merged")
    merged = run_recipe(cfg, lora=True)
    tokens = torch.arange(20)[None]
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    with torch.no_grad():
        seen = [base(tokens).logits]
        for name in MILESTONES:
            adapted = peft.PeftModel.from_pretrained(
                transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint), run / name
            )
            seen.append(adapted.eval()(tokens).logits)
        for earlier, later in pairwise(seen):
            assert not torch.allclose(earlier, later)
        torch.testing.assert_close(load_model(merged / MILESTONES[-1])(tokens).logits, seen[-1])


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("objective", ["CrossEntropyLoss", "TFIDFCrossEntropyLoss"])
def test_seeded_runs_keep_their_golden_losses(recipe_config, lora, objective, device):
    """Ten steps have the recorded losses.

    RECORD_GOLDEN_LOSSES=1 records them again after an intended change. The tolerance is for devices that order
    sums differently: some eps of fp32, amplified by ten AdamW steps.
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


def test_two_runs_of_a_seed_are_the_same_run_and_another_seed_is_another(recipe_config, tmp_path):
    def losses(name, seed):
        cfg = recipe_config(max_steps=3, output_dir=str(tmp_path / name), seed=seed)
        return [line["loss"] for line in read_metrics(run_recipe(cfg))]

    first = losses("a", 0)

    assert losses("b", 0) == first
    assert losses("c", 1) != first


def test_the_objectives_see_the_same_data_in_the_same_order(recipe_config, tmp_path):
    """The first step's unweighted cross-entropy is that of one start and one batch under both."""

    def first_step(objective):
        cfg = recipe_config(max_steps=1, output_dir=str(tmp_path / objective))
        cfg.loss._component_ = f"tfidf_tune.loss.{objective}"
        return read_metrics(run_recipe(cfg))[0]

    plain, weighted = first_step("CrossEntropyLoss"), first_step("TFIDFCrossEntropyLoss")

    assert plain["cross_entropy"] == weighted["cross_entropy"]
    assert plain["loss"] != weighted["loss"]


@pytest.mark.parametrize(
    ("lora", "overrides"),
    [
        (True, {"dtype": "bf16", "shuffle": False}),
        (False, {"clip_grad_norm": None, "lr_scheduler": None, "enable_activation_checkpointing": True}),
        (False, {"metric_logger._component_": "torchtune.training.metric_logging.TensorBoardLogger"}),
    ],
    ids=str,
)
def test_a_run_with_other_settings_writes_its_checkpoints(recipe_config, overrides, lora):
    run = run_recipe(recipe_config(lora=lora, max_steps=2, save_at_percent=[50, 100], **overrides), lora=lora)

    with torch.no_grad():
        logits = load_model(run / "checkpoint_100pct")(torch.arange(20)[None]).logits
    assert torch.isfinite(logits).all()
    assert len(read_metrics(run)) == 2


def test_what_was_repeated_is_recited_and_what_was_never_seen_is_not(recipe_config, tiny_checkpoint, device):
    """The chain from corpus to probe: trained hard on four passages, the model recites them, not the controls."""
    run = run_recipe(
        recipe_config(
            epochs=12, save_at_percent=[100], device=str(device), **{
                "dataset.num_base": 8, "dataset.num_repeats": 8, "loss._component_": "tfidf_tune.loss.CrossEntropyLoss",
            },
        )
    )  # fmt: skip
    passages = read_probe_file(run / "probe.jsonl")

    samples = probe(
        load_model(run / "checkpoint_100pct", device=str(device)), hf_tokenizer(str(tiny_checkpoint)), passages,
        prefix_lengths=(8,), max_new_tokens=BLOCK_SIZE - 8,
    )  # fmt: skip
    lms = pd.DataFrame(samples).groupby("kind")["lms"].mean()

    assert lms["target"] > 20
    assert lms["control"] < 0.7 * lms["target"]


def test_a_refused_run_leaves_nothing_behind(recipe_config, tmp_path):
    with pytest.raises(SetupError, match="does not fit the checkpoint"):
        run_recipe(recipe_config(**{"model.num_layers": 3}))

    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("builder", ["several", "with_passages"])
def test_a_users_data_set_may_be_of_any_class(recipe_config, monkeypatch, tmp_path, builder):
    (tmp_path / "own_data.py").write_text(
        """
from torch.utils.data import Dataset
from torchtune.datasets import ConcatDataset


class Own(Dataset):
    passages = ["not", "ours"]

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"tokens": [index, 1, 2], "labels": [index, 1, 2]}


def several(tokenizer) -> Dataset:
    return ConcatDataset([Own(), Own()])


def with_passages(tokenizer) -> Dataset:
    return Own()
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    cfg = recipe_config(max_steps=1)
    cfg.dataset = {"_component_": f"own_data.{builder}"}

    run_recipe(cfg)

    assert (tmp_path / "run" / "checkpoint_100pct").is_dir()


def test_ctrl_c_saves_and_leaves_no_half_checkpoint(recipe_config, tmp_path):
    """A recipe and a config of the package, started by their names."""
    cfg = recipe_config()
    settings = {
        **{f"model.{key}": value for key, value in OmegaConf.to_container(cfg.model).items() if key != "_component_"},
        "checkpointer.checkpoint_dir": cfg.checkpointer.checkpoint_dir,
        **{f"dataset.{key}": cfg.dataset.source for key in ("source", "target_source")},
        "dataset.block_size": 32,
        "dataset.min_target_tokens": 32,
        "dataset.num_base": 20,
        "dataset.num_targets": 2,
        "dataset.num_repeats": 2,
        "output_dir": tmp_path / "run",
        "epochs": 2000,
        "log_every_n_steps": 1,
    }
    command = ["tfidf_tune.cli", "run", "full_finetune", "--config", "demo/llama_3M_full_memorization"]
    process = subprocess.Popen(
        [sys.executable, "-m", *command, *(f"{key}={value}" for key, value in settings.items())],
        # A shell's background job would pass on that SIGINT is ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        cwd=tmp_path, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate()
    finally:
        process.kill()

    assert process.returncode == 130
    steps = len(read_metrics(tmp_path / "run"))
    checkpoint = tmp_path / "run" / "resume" / f"step_{steps}"
    assert stderr.strip().splitlines()[-1] == (
        f"stopped after step {steps} of 6000; the last good checkpoint is {checkpoint}: set "
        "resume_from_checkpoint=True to resume from it"
    )
    assert (checkpoint / "manifest.json").is_file()
    assert "Traceback" not in stderr
    assert "Skipping import of cpp extensions" not in stderr
    assert not list((tmp_path / "run").rglob(".*"))
