"""Resuming on another number of processes: equal up to rounding."""

import shutil

import pytest
import torch
from recipe_processes import RecipeRun, run_to_the_end
from safetensors.torch import load_file
from tiny_llama import make_tokenizer
from tiny_models import MODELS
from tiny_run import metrics_of, run_config

NUM_STEPS, RESUMED_AT = 12, 6
METRICS = ("loss", "cross_entropy", "weight_mean", "weight_std", "weight_max", "grad_norm", "lr")
TOLERANCE = 8 * NUM_STEPS * torch.finfo(torch.float32).eps
ONE_WINDOW = {"loss.sync": True}
ADAPTERS = {"lora": True, "model.apply_lora_to_mlp": True}


@pytest.fixture(scope="module")
def make_run(tmp_path_factory, text_file):
    """Make a run of 12 steps of four sequences, 8 steps an epoch, that can be resumed from its middle."""
    folder, base = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("base")
    MODELS["llama"].build_hf().save_pretrained(base)
    make_tokenizer(base, text_file)

    def make(name, num_processes, *, lora=False, **overrides):
        settings = {
            "model": MODELS["llama"].section(lora=lora),
            "dataset.num_base": 12,
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3, "eps": 1e-5},
            "epochs": 2,
            "max_steps": NUM_STEPS,
            "save_at_percent": [100],
            "save_every_n_steps": RESUMED_AT,
            "batch_size": 4 // num_processes,
        }
        return RecipeRun(run_config(folder / name, base, text_file, lora=lora, **(settings | overrides)), lora)

    return make


@pytest.fixture(scope="module")
def whole(make_run, tmp_path_factory):
    """Runs that were not interrupted, on one and two processes; they keep the checkpoint of their middle."""
    runs = {1: make_run("one", 1, **ONE_WINDOW), 2: make_run("two", 2, **ONE_WINDOW)}
    runs["adapters"] = make_run("adapters", 2, **ADAPTERS)
    run_to_the_end([runs[2], runs["adapters"]], tmp_path_factory.mktemp("processes"))
    runs[1].here()
    return runs


def read_state(run):
    """Read weights and optimizer state of the last resume checkpoint, shards joined."""
    tensors = {}
    for file in sorted((run.folder / "resume" / f"step_{NUM_STEPS}").glob("*.safetensors")):
        for key, value in load_file(file).items():
            tensors.setdefault(key, []).append(value)
    return {key: torch.cat(parts) if parts[0].dim() else parts[0] for key, parts in tensors.items()}


def resume(run, earlier):
    """Let a run begin from the middle of another."""
    shutil.copytree(earlier.folder / "resume" / f"step_{RESUMED_AT}", run.folder / "resume" / f"step_{RESUMED_AT}")
    run.cfg.resume_from_checkpoint = True
    return run


def assert_reported(output, saved, now, window):
    (message,) = [line for line in output.splitlines() if f"was written by {saved} process" in line]
    for text in (f"this run has {now}", "random states (dropout) are not restored", window):
        assert text in message


def assert_continued(run, expected):
    torch.testing.assert_close(
        metrics_of(run.folder, *METRICS), metrics_of(expected.folder, *METRICS)[RESUMED_AT:], rtol=TOLERANCE, atol=0
    )
    state, expected_state = read_state(run), read_state(expected)
    assert state.keys() == expected_state.keys()
    for key, value in expected_state.items():
        limit = TOLERANCE * float(value.abs().max())
        torch.testing.assert_close(state[key], value, rtol=0, atol=limit, msg=lambda text, key=key: f"{key}: {text}")


def test_a_run_of_two_processes_is_resumed_by_one(make_run, whole, capsys):
    """One window is restored, windows of their own are not."""
    run = resume(make_run("2 to 1", 1, **ONE_WINDOW), whole[2])
    run.here()
    assert_reported(capsys.readouterr().err, 2, 1, "the window is kept")
    assert_continued(run, whole[1])

    resume(make_run("adapters, 2 to 1", 1, **ADAPTERS), whole["adapters"]).here()
    assert_reported(capsys.readouterr().err, 2, 1, "the loss starts with an empty window")


def test_a_run_of_one_process_is_resumed_by_two(make_run, whole, tmp_path):
    run = resume(make_run("1 to 2", 2, **ONE_WINDOW), whole[1])
    assert_reported(run_to_the_end([run], tmp_path / "processes"), 1, 2, "all processes use its window")
    assert_continued(run, whole[2])
