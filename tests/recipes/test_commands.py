"""Recipes as users start them: under torchrun, by their names, and torchtune's own
with our loss.
"""

import os
import signal
import time

import torch
from helpers.fakes.tiny_run import assert_close_weights, metrics_of
from helpers.processes.recipes import RecipeRun, run_command, run_to_the_end
from omegaconf import OmegaConf

NUM_STEPS = 40
# As in test_distributed_recipes: an eps a step, of which each may grow a little.
TOLERANCE = 4 * NUM_STEPS * torch.finfo(torch.float32).eps


def num_steps(folder):
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def signalled(number, folder, step):
    """Send a process a signal after so many steps."""

    def send(process):
        while num_steps(folder) < step and process.is_alive():
            time.sleep(0.005)
        os.kill(process.pid, number)

    return send


def test_a_run_stopped_under_torchrun_and_resumed_is_the_run_of_one_process(
    recipe_config, tmp_path
):
    settings = {
        "loss.sync": True,
        "optimizer": {"_component_": "torch.optim.SGD", "lr": 0.02, "momentum": 0.9},
        "epochs": 10,
        "max_steps": NUM_STEPS,
        "save_at_percent": [100],
    }
    alone, run = (
        RecipeRun(recipe_config(**settings, output_dir=str(tmp_path / name), batch_size=size))
        for name, size in (("alone", 4), ("two", 2))
    )
    OmegaConf.save(run.cfg, tmp_path / "config.yaml")
    command = ["run", "--nproc_per_node", "2", "full_finetune", "--config", "config.yaml"]

    ended = run_command(
        "tfidf_tune.cli:main", command, tmp_path, meanwhile=signalled(signal.SIGTERM, run.folder, 3)
    )

    assert ended.codes != [0]
    stopped = ended.output
    (checkpoint,) = (run.folder / "resume").glob("step_*")
    step = int(checkpoint.name.removeprefix("step_"))
    assert 3 <= step < NUM_STEPS
    assert (
        stopped.count(
            f"stopped after step {step} of {NUM_STEPS}; the last good checkpoint is {checkpoint}"
        )
        == 1
    )
    assert num_steps(run.folder) == step

    run.cfg.resume_from_checkpoint = True
    resumed = run_to_the_end([run], tmp_path / "processes")

    assert resumed.count(f"resuming from {checkpoint}\n") == 1
    expected = metrics_of(alone.here(), "loss")
    assert len(expected) == NUM_STEPS
    torch.testing.assert_close(metrics_of(run.folder, "loss"), expected, rtol=TOLERANCE, atol=0)
    assert_close_weights(
        run.folder / "checkpoint_100pct", alone.folder / "checkpoint_100pct", TOLERANCE
    )


def test_ctrl_c_saves_and_leaves_no_half_checkpoint(recipe_config, tmp_path):
    """A recipe and a config of the package, started by their names."""
    cfg = recipe_config()
    settings = {
        **{
            f"model.{key}": value
            for key, value in OmegaConf.to_container(cfg.model).items()
            if key != "_component_"
        },
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
    command = ["run", "full_finetune", "--config", "demo/llama_3M_full_memorization"]
    ended = run_command(
        "tfidf_tune.cli:main",
        [*command, *(f"{key}={value}" for key, value in settings.items())],
        tmp_path,
        meanwhile=signalled(signal.SIGINT, tmp_path / "run", 1),
    )

    assert ended.codes == [130], ended.output
    steps = num_steps(tmp_path / "run")
    checkpoint = tmp_path / "run" / "resume" / f"step_{steps}"
    stopped = f"stopped after step {steps} of 6000; the last good checkpoint is {checkpoint}"
    assert (
        f"{stopped}: set resume_from_checkpoint=True to resume from it" in ended.output.splitlines()
    )
    assert (checkpoint / "manifest.json").is_file()
    assert "Traceback" not in ended.output
    assert not list((tmp_path / "run").rglob(".*"))


def test_the_stock_recipe_trains_with_the_drop_in(tmp_path, tiny_checkpoint, text_file):
    """The loss line is what a user changes; all else says where the tiny model and its data are."""
    overrides = {
        "loss": "tfidf_tune.loss.stock.CEWithChunkedOutputLoss",
        "model": "torchtune.models.llama2.llama2",
        "model.vocab_size": 320,
        "model.num_layers": 2,
        "model.num_heads": 4,
        "model.num_kv_heads": 2,
        "model.embed_dim": 32,
        "model.intermediate_dim": 64,
        "model.max_seq_len": 64,
        "model.norm_eps": 1e-5,
        "tokenizer": "tfidf_tune.data.hf_tokenizer",
        "tokenizer.path": tiny_checkpoint,
        "tokenizer.max_seq_len": 32,
        "checkpointer.checkpoint_dir": tiny_checkpoint,
        "checkpointer.checkpoint_files": "[model.safetensors]",
        "dataset": "torchtune.datasets.text_completion_dataset",
        "dataset.source": "text",
        "dataset.data_files": text_file,
        "dataset.column": "text",
        "dataset.split": "train[:16]",
        "optimizer": "torch.optim.AdamW",
        "optimizer.lr": 1e-2,
        "optimizer_in_bwd": "False",
        "output_dir": tmp_path / "run",
        "metric_logger.log_dir": tmp_path / "logs",
        "metric_logger.filename": "log.txt",
        "device": "cpu",
        "dtype": "fp32",
        "compile": "False",
        "epochs": 2,
        "batch_size": 2,
        "seed": 0,
        "enable_activation_offloading": "False",
    }
    command = ["run", "full_finetune_single_device", "--config", "llama2/7B_full_low_memory"]

    ended = run_command(
        "torchtune._cli.tune:main",
        [*command, *(f"{key}={value}" for key, value in overrides.items())],
        tmp_path,
    )

    assert ended.codes == [0], ended.output
    lines = (tmp_path / "logs" / "log.txt").read_text().splitlines()
    losses = [float(line.split("loss:")[1].split()[0]) for line in lines]
    assert len(losses) == 16
    assert sum(losses[-3:]) < sum(losses[:3])
