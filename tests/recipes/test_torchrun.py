"""The command on two processes of torchrun: stopped, resumed, and the folder of one process."""

import json
import signal
import subprocess
import sys
import time

import torch
from omegaconf import OmegaConf
from recipe_processes import RecipeRun, run_to_the_end
from safetensors.torch import load_file

NUM_STEPS = 60
# As in test_distributed_recipes: an eps a step, of which each may grow a little.
TOLERANCE = 4 * NUM_STEPS * torch.finfo(torch.float32).eps


def start(*arguments, cwd):
    return subprocess.Popen(
        [sys.executable, "-m", "tfidf_tune.cli", "run", "--nproc_per_node", "2", *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def read_losses(folder):
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return torch.tensor([json.loads(line)["loss"] for line in lines], dtype=torch.float64)


def test_a_run_stopped_under_torchrun_and_resumed_is_the_run_of_one_process(recipe_config, tmp_path):
    settings = {
        "loss.sync": True,
        "optimizer": {"_component_": "torch.optim.SGD", "lr": 0.02, "momentum": 0.9},
        "epochs": 10,
        "max_steps": NUM_STEPS,
        "save_at_percent": [50, 100],
    }
    alone, run = (
        RecipeRun(recipe_config(**settings, output_dir=str(tmp_path / name), batch_size=size))
        for name, size in (("alone", 4), ("two", 2))
    )
    OmegaConf.save(run.cfg, tmp_path / "config.yaml")

    process = start("full_finetune", "--config", "config.yaml", cwd=tmp_path)
    while len(read_losses(run.folder)) < 3 and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    stopped, _ = process.communicate()
    assert process.returncode, stopped
    (checkpoint,) = (run.folder / "resume").glob("step_*")
    step = int(checkpoint.name.removeprefix("step_"))
    assert 3 <= step < NUM_STEPS
    assert stopped.count(f"stopped after step {step} of {NUM_STEPS}; the last good checkpoint is {checkpoint}") == 1
    assert len(read_losses(run.folder)) == step

    run.cfg.resume_from_checkpoint = True
    resumed = run_to_the_end([run], tmp_path / "processes")
    assert resumed.count(f"resuming from {checkpoint}\n") == 1

    alone.here()
    expected = read_losses(alone.folder)
    assert len(expected) == NUM_STEPS
    torch.testing.assert_close(read_losses(run.folder), expected, rtol=TOLERANCE, atol=0)
    for milestone in ("checkpoint_50pct", "checkpoint_100pct"):
        names = {path.name for path in (alone.folder / milestone).iterdir()}
        assert {path.name for path in (run.folder / milestone).iterdir()} == names
        (name,) = (name for name in names if name.endswith(".safetensors"))
        weights, true_weights = (load_file(each.folder / milestone / name) for each in (run, alone))
        assert weights.keys() == true_weights.keys()
        for key, value in true_weights.items():
            limit = TOLERANCE * float(value.abs().max())
            torch.testing.assert_close(
                weights[key], value, rtol=0, atol=limit, msg=lambda text, key=key: f"{key}: {text}"
            )
        for other in names - {name}:
            assert (run.folder / milestone / other).read_bytes() == (alone.folder / milestone / other).read_bytes()
