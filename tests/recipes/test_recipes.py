"""Both recipes, from the start of a run to checkpoints that transformers and peft load."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
import transformers
from omegaconf import OmegaConf
from tfidf_tune.recipes import full_finetune, lora_finetune
from tiny_llama import BLOCK_SIZE

from tfidf_tune.analysis import load_model, probe, summarize
from tfidf_tune.data import hf_tokenizer, read_probe_file
from tfidf_tune.training import SetupError

MILESTONES = [f"checkpoint_{percent}pct" for percent in (10, 25, 50, 75, 100)]
GOLDEN = Path(__file__).parent / "golden_losses.json"


def run_recipe(cfg, *, lora=False):
    (lora_finetune if lora else full_finetune).recipe_main.__wrapped__(cfg)
    return Path(cfg.output_dir)


def read_metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def run_process(*command, cwd):
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_checkpoint, text_file):
    """A finished run of each recipe; tests look at it from all sides."""
    runs = {}

    def get(recipe_config, *, lora):
        if lora not in runs:
            folder = tmp_path_factory.mktemp("finished")
            cfg = recipe_config(lora=lora, output_dir=str(folder / "run"), epochs=2)
            if lora:  # on attention alone, adapters can do little for a base of random weights
                cfg.model.apply_lora_to_mlp = cfg.model.apply_lora_to_output = True
            runs[lora] = run_recipe(cfg, lora=lora)
        return runs[lora]

    return get


@pytest.mark.parametrize("lora", [False, True])
def test_the_loss_falls(recipe_config, finished, lora):
    losses = [line["cross_entropy"] for line in read_metrics(finished(recipe_config, lora=lora))]

    assert len(losses) == 40
    assert sum(losses[-5:]) < 0.85 * sum(losses[:5])


@pytest.mark.parametrize("lora", [False, True])
def test_a_run_folder_holds_what_was_promised(recipe_config, finished, lora):
    run = finished(recipe_config, lora=lora)

    expected = {*MILESTONES, "metrics.jsonl", "probe.jsonl", "config.yaml", "logs", "resume", "torchtune_config.yaml"}
    assert {path.name for path in run.iterdir()} <= expected
    assert {path.name for path in run.iterdir()} >= expected - {"torchtune_config.yaml"}
    assert OmegaConf.load(run / "config.yaml").dataset.probe_file == str(run / "probe.jsonl")


def test_every_milestone_of_a_full_run_generates_in_transformers(recipe_config, finished):
    run = finished(recipe_config, lora=False)
    continuations = []
    for name in MILESTONES:
        model = transformers.AutoModelForCausalLM.from_pretrained(run / name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(run / name)
        inputs = tokenizer("the old sailor", return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert output.shape[1] > inputs["input_ids"].shape[1]
        continuations.append(tokenizer.decode(output[0]))

    assert len(set(continuations)) > 1, "the milestones should be different models"


def test_every_milestone_of_a_lora_run_loads_in_peft_and_changes_the_base(recipe_config, finished, tiny_checkpoint):
    run = finished(recipe_config, lora=True)
    tokens = torch.arange(20)[None]
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    with torch.no_grad():
        seen = [base(tokens).logits]
        for name in MILESTONES:
            adapted = peft.PeftModel.from_pretrained(
                transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint), run / name
            )
            seen.append(adapted.eval()(tokens).logits)

    for earlier, later in zip(seen, seen[1:], strict=False):
        assert not torch.allclose(earlier, later)


def test_merged_checkpoints_are_the_same_model_as_base_and_adapter(recipe_config, finished, tmp_path):
    adapter_run = finished(recipe_config, lora=True)
    cfg = OmegaConf.load(adapter_run / "config.yaml")
    cfg.merge_adapter, cfg.output_dir = True, str(tmp_path / "merged")
    merged_run = run_recipe(cfg, lora=True)
    tokens = torch.arange(20)[None]

    with torch.no_grad():
        expected = load_model(adapter_run / MILESTONES[-1])(tokens).logits
        torch.testing.assert_close(load_model(merged_run / MILESTONES[-1])(tokens).logits, expected)


def test_metrics_hold_what_lets_objectives_be_compared(recipe_config, finished):
    line = read_metrics(finished(recipe_config, lora=False))[0]

    assert line.keys() == {
        "step", "loss", "cross_entropy", "weight_mean", "weight_std", "weight_max", "grad_norm", "lr",
        "tokens_per_second_per_gpu",
    }  # fmt: skip
    assert line["weight_std"] > 0.1


def test_the_learning_rate_follows_the_schedule(recipe_config, finished):
    rates = [line["lr"] for line in read_metrics(finished(recipe_config, lora=False))]

    torch.testing.assert_close(rates, [1e-2 * (1 - step / 40) for step in range(40)])


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("objective", ["CrossEntropyLoss", "TFIDFCrossEntropyLoss"])
def test_seeded_runs_keep_their_golden_losses(recipe_config, lora, objective):
    """Ten steps against the losses that were recorded when the recipes were checked by the other tests.

    To record anew after a wanted change of the numerics: RECORD_GOLDEN_LOSSES=1. The tolerance is for other CPUs,
    whose sums are ordered differently: some eps of fp32, amplified by ten AdamW steps.
    """
    cfg = recipe_config(lora=lora, max_steps=10, save_at_percent=[100])
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
    "overrides",
    [
        {"dtype": "bf16"},
        {"gradient_accumulation_steps": 2},
        {"enable_activation_checkpointing": True},
        {"clip_grad_norm": None},
        {"lr_scheduler": None},
        {"shuffle": False},
        {"metric_logger._component_": "torchtune.training.metric_logging.TensorBoardLogger"},
        {"metric_logger": {"_component_": "torchtune.training.metric_logging.StdoutLogger"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("lora", [False, True])
def test_settings_of_a_run_lead_to_whole_checkpoints(recipe_config, overrides, lora):
    run = run_recipe(recipe_config(lora=lora, max_steps=2, save_at_percent=[50, 100], **overrides), lora=lora)

    with torch.no_grad():
        logits = load_model(run / "checkpoint_100pct")(torch.arange(20)[None]).logits
    assert torch.isfinite(logits).all()
    assert len(read_metrics(run)) == 2


def test_what_was_repeated_is_recited_and_what_was_never_seen_is_not(recipe_config, tmp_path, tiny_checkpoint):
    """The chain from corpus to probe: trained hard on four passages, the model recites them, not the controls."""
    run = run_recipe(
        recipe_config(
            epochs=12, save_at_percent=[100], **{
                "dataset.num_base": 8, "dataset.num_repeats": 8, "loss._component_": "tfidf_tune.loss.CrossEntropyLoss",
            },
        )
    )  # fmt: skip
    passages = read_probe_file(run / "probe.jsonl")

    summary = summarize(
        probe(
            load_model(run / "checkpoint_100pct"), hf_tokenizer(str(tiny_checkpoint)), passages,
            prefix_lengths=(8,), max_new_tokens=BLOCK_SIZE - 8,
        )
    )  # fmt: skip

    assert summary["target"].avg_lms > 20
    assert summary["control"].avg_lms < 0.7 * summary["target"].avg_lms


@pytest.mark.parametrize(
    ("lora", "overrides", "message"),
    [
        (False, {"batch_sise": 4}, "no key 'batch_sise'"),
        (False, {"model.num_layers": 3}, "does not fit the checkpoint"),
        (True, {"model.lora_attn_modules": []}, "Must pass one or more"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_and_leaves_nothing_behind(recipe_config, tmp_path, lora, overrides, message):
    cfg = recipe_config(lora=lora)
    for key, value in overrides.items():
        OmegaConf.update(cfg, key, value)

    with pytest.raises(SetupError, match=message):
        run_recipe(cfg, lora=lora)

    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("builder", ["several", "with_passages"])
def test_a_data_set_of_the_users_own_may_be_of_any_make(recipe_config, monkeypatch, tmp_path, builder):
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


def test_a_logger_whose_package_is_missing_is_refused(recipe_config, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    cfg = recipe_config(metric_logger={"_component_": "torchtune.training.metric_logging.WandBLogger"})

    with pytest.raises(SetupError, match="config: metric_logger: ImportError: .*pip install wandb"):
        run_recipe(cfg)


def test_tune_run_starts_the_recipe_from_any_folder(recipe_config, tmp_path):
    OmegaConf.save(recipe_config(lora=True), tmp_path / "mine.yaml")
    (tmp_path / "elsewhere").mkdir()

    finished = run_process(
        "torchtune._cli.tune", "run", "tfidf_tune/recipes/lora_finetune.py", "--config", "../mine.yaml", "max_steps=2",
        cwd=tmp_path / "elsewhere",
    )  # fmt: skip

    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "run" / "checkpoint_100pct").is_dir()


def test_tfidf_tune_run_starts_the_recipe_by_name(recipe_config, tmp_path):
    cfg = recipe_config()
    model = [f"model.{key}={value}" for key, value in OmegaConf.to_container(cfg.model).items() if key != "_component_"]

    finished = run_process(
        "tfidf_tune.cli", "run", "full_finetune", "--config", "demo/llama_3M_full_memorization", *model,
        f"checkpointer.checkpoint_dir={cfg.checkpointer.checkpoint_dir}", f"output_dir={tmp_path / 'run'}",
        f"dataset.source={cfg.dataset.source}", f"dataset.target_source={cfg.dataset.source}", "dataset.block_size=32",
        "dataset.min_target_tokens=32", "dataset.num_base=20", "dataset.num_targets=2", "dataset.num_repeats=2",
        "max_steps=1",
        cwd=tmp_path,
    )  # fmt: skip

    assert finished.returncode == 0, finished.stderr
    assert (tmp_path / "run" / "checkpoint_100pct" / "model.safetensors").is_file()
    assert "Skipping import of cpp extensions" not in finished.stderr


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_ended_saves_and_leaves_no_half_checkpoint(recipe_config, tmp_path, sent, code):
    OmegaConf.save(recipe_config(epochs=500), tmp_path / "mine.yaml")
    command = ["torchtune._cli.tune", "run", "tfidf_tune/recipes/full_finetune.py", "--config", "mine.yaml"]
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        # A shell's background job would hand down that SIGINT is ignored.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(sent)
        _, stderr = process.communicate()
    finally:
        process.kill()

    assert process.returncode == code
    steps = len(read_metrics(tmp_path / "run"))
    checkpoint = tmp_path / "run" / "resume" / f"step_{steps}"
    assert stderr.strip().splitlines()[-1] == (
        f"stopped after step {steps} of 10000; the last good checkpoint is {checkpoint}: "
        "set resume_from_checkpoint=True to resume from it"
    )
    assert (checkpoint / "manifest.json").is_file()
    assert "Traceback" not in stderr
    assert not list((tmp_path / "run").rglob(".*"))
