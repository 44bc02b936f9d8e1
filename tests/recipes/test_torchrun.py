"""Both recipes by the commands that users type, on two processes: stopped, resumed, and the folders of one process."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from omegaconf import OmegaConf
from recipe_processes import Processes, RecipeRun, run_to_the_end
from safetensors.torch import load_file

NUM_STEPS = 60
COMMANDS = {
    "full": ("torchtune._cli.tune", "tfidf_tune/recipes/full_finetune.py"),
    "adapters": ("tfidf_tune.cli", "lora_finetune"),
}
# As in test_distributed_recipes: an eps a step, of which each may grow a little.
TOLERANCE = 4 * NUM_STEPS * torch.finfo(torch.float32).eps


def start(kind, file, cwd, *overrides):
    module, recipe = COMMANDS[kind]
    return subprocess.Popen(
        [sys.executable, "-m", module, "run", "--nproc_per_node", "2", recipe, "--config", str(file), *overrides],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def read_losses(folder):
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return torch.tensor([json.loads(line)["loss"] for line in lines], dtype=torch.float64)


def has_begun(run):
    return len(read_losses(run.folder)) >= 3


@pytest.mark.parametrize("kind", COMMANDS)
def test_stopped_and_resumed_by_the_command_two_processes_leave_what_one_leaves(recipe_config, tmp_path, kind):
    lora = kind == "adapters"
    settings = {
        "loss.sync": True,
        "optimizer": {"_component_": "torch.optim.SGD", "lr": 0.02, "momentum": 0.9},
        "epochs": 10,
        "max_steps": NUM_STEPS,
        "save_at_percent": [50, 100],
    }
    alone, run = (
        RecipeRun(recipe_config(lora=lora, **settings, output_dir=str(tmp_path / name), batch_size=size), lora)
        for name, size in (("alone", 4), ("two", 2))
    )
    OmegaConf.save(run.cfg, tmp_path / "config.yaml")

    # One kind is stopped under the command, the other resumed by it; what else there is to do, forked processes do,
    # for each process of a command begins with seconds of imports.
    if lora:
        processes = Processes([run], tmp_path / "stopped")
        processes.wait_for(lambda: has_begun(run))
        processes.send(signal.SIGTERM, 0, 1)
        ended = processes.wait()
        codes, stopped = ended.codes, ended.output
    else:
        process = start(kind, tmp_path / "config.yaml", tmp_path)
        while not has_begun(run) and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        stopped, _ = process.communicate()
        codes = [process.returncode]
    assert all(codes), stopped
    (checkpoint,) = (run.folder / "resume").glob("step_*")
    step = int(checkpoint.name.removeprefix("step_"))
    assert 3 <= step < NUM_STEPS
    assert stopped.count(f"stopped after step {step} of {NUM_STEPS}; the last good checkpoint is {checkpoint}") == 1
    assert len(read_losses(run.folder)) == step

    if lora:
        process = start(kind, tmp_path / "config.yaml", tmp_path, "resume_from_checkpoint=True")
        resumed, _ = process.communicate()
        assert process.returncode == 0, resumed
    else:
        OmegaConf.update(run.cfg, "resume_from_checkpoint", True)
        resumed = run_to_the_end([run], tmp_path / "resumed")
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
