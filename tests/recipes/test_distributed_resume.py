"""Resuming on several processes: bit-identical on as many, equal up to rounding on a different number."""

import json
import shutil
import signal
from functools import partial

import pytest
import torch
from process_hooks import at_step
from recipe_processes import Processes, RecipeRun, run_to_the_end
from safetensors.torch import load_file
from tiny_llama import make_tokenizer
from tiny_models import MODELS
from tiny_run import run_config

NUM_STEPS, RESUMED_AT = 12, 6
METRICS = ("loss", "cross_entropy", "weight_mean", "weight_std", "weight_max", "grad_norm", "lr")
TOLERANCE = 8 * NUM_STEPS * torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def base(tmp_path_factory, text_file):
    folder = tmp_path_factory.mktemp("base")
    MODELS["llama"].build_hf().save_pretrained(folder)
    return make_tokenizer(folder, text_file)


@pytest.fixture(scope="module")
def make_run(tmp_path_factory, base, text_file):
    """Make a run of 12 steps of four sequences, 8 steps an epoch, that can be resumed from its middle."""
    folder = tmp_path_factory.mktemp("runs")

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


# Counts that are shared.
REPETITION = {
    "_component_": "tfidf_tune.loss.WeightedCrossEntropyLoss",
    "weighting": {
        "_component_": "tfidf_tune.weighting.RepetitionWeighting",
        "h": 2,
        "k": 1,
        "sample": 1,
        "min_length": 1,
        "num_buckets": 2**16,
        "sync": True,
    },
}
KINDS = {
    "full, one window": {"loss.sync": True},
    "adapters, windows of their own": {"lora": True, "model.apply_lora_to_mlp": True},
}


@pytest.fixture(scope="module")
def whole_runs(make_run, tmp_path_factory):
    """Runs that were not interrupted, on one and two processes; both keep the checkpoint of their middle."""
    runs = {(kind, num): make_run(f"{kind} on {num}", num, **KINDS[kind]) for kind in KINDS for num in (1, 2)}
    run_to_the_end([runs[kind, 2] for kind in KINDS], tmp_path_factory.mktemp("processes"))
    for kind in KINDS:
        runs[kind, 1].here()
    return runs


def read_metrics(run):
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return torch.tensor([[line[name] for name in METRICS] for line in lines], dtype=torch.float64)


def read_state(run, step=NUM_STEPS):
    """Read weights and optimizer state of a resume checkpoint, shards joined."""
    tensors = {}
    for file in sorted((run.folder / "resume" / f"step_{step}").glob("*.safetensors")):
        for key, value in load_file(file).items():
            tensors.setdefault(key, []).append(value)
    return {key: torch.cat(parts) if parts[0].dim() else parts[0] for key, parts in tensors.items()}


def assert_same_file(run, expected, name):
    assert (run.folder / name).read_bytes() == (expected.folder / name).read_bytes(), name


def resume_from(run, whole):
    """Copy the checkpoint of the middle of a run into the folder of another."""
    shutil.copytree(whole.folder / "resume" / f"step_{RESUMED_AT}", run.folder / "resume" / f"step_{RESUMED_AT}")
    run.cfg.resume_from_checkpoint = True


def assert_same(found, expected, what):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        limit = TOLERANCE * float(value.abs().max())
        torch.testing.assert_close(
            found[key], value, rtol=0, atol=limit, msg=lambda text, key=key: f"{what}: {key}: {text}"
        )


def test_two_processes_killed_and_resumed_end_bit_identically(make_run, tmp_path):
    """Weights, optimizer, windows, random states, metrics; killed after a checkpoint, in the second epoch."""
    whole, killed = (make_run(name, 2, save_every_n_steps=4, loss=REPETITION) for name in ("whole", "killed"))
    run_to_the_end([whole], tmp_path / "whole")

    ended = Processes([killed], tmp_path / "killed", before=partial(at_step, 10, signal.SIGKILL)).wait()
    assert ended.codes == [-signal.SIGKILL] * 2
    killed.cfg.resume_from_checkpoint = True
    output = run_to_the_end([killed], tmp_path / "resumed")

    assert output.count(f"resuming from {killed.folder / 'resume' / 'step_8'}\n") == 1
    state, expected = read_state(killed), read_state(whole)
    assert {key.partition(".")[0] for key in expected} == {"model", "state"}
    assert state.keys() == expected.keys()
    assert [key for key, value in expected.items() if not torch.equal(state[key], value)] == []
    for rank in (0, 1):  # windows, random states, schedule
        assert_same_file(killed, whole, f"resume/step_{NUM_STEPS}/process_0000{rank}.pt")
    assert torch.equal(read_metrics(killed), read_metrics(whole))
    assert (read_metrics(whole)[:, METRICS.index("weight_mean")] < 1 - 1e-3).any(), "some n-grams are repeated"
    for file in (whole.folder / "checkpoint_100pct").iterdir():
        assert_same_file(killed, whole, f"checkpoint_100pct/{file.name}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_two_processes_is_resumed_by_one(make_run, whole_runs, capsys, kind):
    run = make_run(f"{kind}, 2 to 1", 1, **KINDS[kind])
    resume_from(run, whole_runs[kind, 2])
    capsys.readouterr()
    run.here()
    check_continuation(run, whole_runs[kind, 1], capsys.readouterr().err, 2, 1, has_one_window="one window" in kind)


def test_a_run_of_one_process_is_resumed_by_two(make_run, whole_runs, tmp_path):
    kind = "full, one window"
    run = make_run(f"{kind}, 1 to 2", 2, **KINDS[kind])
    resume_from(run, whole_runs[kind, 1])
    output = run_to_the_end([run], tmp_path / "processes")
    check_continuation(run, whole_runs[kind, 2], output, 1, 2, has_one_window=True)


def check_continuation(run, whole, output, saved, now, *, has_one_window):
    messages = [line for line in output.splitlines() if f"was written by {saved} process" in line]
    assert len(messages) == 1, output
    assert f"this run has {now}" in messages[0]
    assert "random states (dropout) are not restored" in messages[0]
    window = "the window is kept" if has_one_window else "the loss starts with an empty window"
    assert ("all processes use its window" if saved == 1 else window) in messages[0]
    if has_one_window:
        expected = read_metrics(whole)[RESUMED_AT:]
        torch.testing.assert_close(read_metrics(run), expected, rtol=TOLERANCE, atol=0)
        assert_same(read_state(run), read_state(whole), "state")


def test_another_batch_size_is_refused_by_both_processes(make_run, whole_runs, tmp_path):
    kind = "full, one window"
    run = make_run("other size", 2, **KINDS[kind], batch_size=3)
    resume_from(run, whole_runs[kind, 2])

    ended = Processes([run], tmp_path / "processes").wait()

    assert 0 not in ended.codes
    message = "batch_size x processes was 4, is 6. Change them back"
    assert ended.output.count(message) == 1, ended.output
    assert "Traceback" not in ended.output
    assert not (run.folder / "metrics.jsonl").exists()
