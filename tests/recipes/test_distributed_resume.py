"""Going on from a resume checkpoint: bit by bit with as many processes, to fp32 tolerance with another number."""

import json
import shutil
import signal
from functools import partial

import pytest
import torch
from process_hooks import send_itself
from recipe_processes import Processes, RecipeRun, run_to_the_end
from safetensors.torch import load_file
from tiny_llama import make_tokenizer
from tiny_models import MODELS
from tiny_run import run_config

NUM_STEPS, RESUMED_AT = 20, 10
METRICS = ("loss", "cross_entropy", "weight_mean", "weight_std", "weight_max", "grad_norm", "lr")
TOLERANCE = 8 * NUM_STEPS * torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def base(tmp_path_factory, text_file):
    folder = tmp_path_factory.mktemp("base")
    MODELS["llama"].build_hf().save_pretrained(folder)
    return make_tokenizer(folder, text_file)


@pytest.fixture(scope="module")
def make_run(tmp_path_factory, base, text_file):
    """Make a run of 20 steps of four sequences, 15 steps an epoch, that can be resumed from its middle."""
    folder = tmp_path_factory.mktemp("runs")

    def make(name, num_processes, *, lora=False, **overrides):
        settings = {
            "model": MODELS["llama"].section(lora=lora),
            "dataset.num_base": 40,
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3, "eps": 1e-5},
            "epochs": 2,
            "max_steps": NUM_STEPS,
            "save_at_percent": [100],
            "save_every_n_steps": RESUMED_AT,
            "batch_size": 4 // num_processes,
        }
        return RecipeRun(run_config(folder / name, base, text_file, lora=lora, **(settings | overrides)), lora)

    return make


# A window that is shared and weights that need the predictions of a sharded model.
PRODUCT = {
    "_component_": "tfidf_tune.loss.WeightedCrossEntropyLoss",
    "weighting": {
        "_component_": "tfidf_tune.weighting.ProductWeighting",
        "first": {"_component_": "tfidf_tune.weighting.RepetitionWeighting", "h": 2, "num_batches": 6, "sync": True},
        "second": {"_component_": "tfidf_tune.weighting.MiLeWeighting"},
    },
}
KINDS = {
    "full, one window": {"loss.sync": True},
    "adapters, windows of their own": {"lora": True, "model.apply_lora_to_mlp": True},
}


@pytest.fixture(scope="module")
def whole_runs(make_run, tmp_path_factory):
    """Runs that were never interrupted, on one and two processes; both have kept the checkpoint of their middle."""
    runs = {(kind, num): make_run(f"{kind} on {num}", num, **KINDS[kind]) for kind in KINDS for num in (1, 2)}
    run_to_the_end([runs[kind, 2] for kind in KINDS], tmp_path_factory.mktemp("processes"))
    for kind in KINDS:
        runs[kind, 1].here()
    return runs


def read_metrics(run):
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return torch.tensor([[line[name] for name in METRICS] for line in lines], dtype=torch.float64)


def read_state(run, step=NUM_STEPS):
    """Weights and optimizer of a resume checkpoint, whole."""
    tensors = {}
    for file in sorted((run.folder / "resume" / f"step_{step}").glob("*.safetensors")):
        for key, value in load_file(file).items():
            tensors.setdefault(key, []).append(value)
    return {key: torch.cat(parts) if parts[0].dim() else parts[0] for key, parts in tensors.items()}


def assert_same_file(run, expected, name):
    assert (run.folder / name).read_bytes() == (expected.folder / name).read_bytes(), name


def go_on(run, whole):
    """Lay the checkpoint of the middle of a whole run into the folder of this one."""
    shutil.copytree(whole.folder / "resume" / f"step_{RESUMED_AT}", run.folder / "resume" / f"step_{RESUMED_AT}")
    run.cfg.resume_from_checkpoint = True


def assert_same(found, expected, what):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        limit = TOLERANCE * float(value.abs().max())
        torch.testing.assert_close(
            found[key], value, rtol=0, atol=limit, msg=lambda text, key=key: f"{what}: {key}: {text}"
        )


@pytest.mark.parametrize("lora", [False, True])
def test_killed_and_resumed_on_two_processes_not_a_bit_differs(make_run, tmp_path, lora):
    """Weights, optimizer, windows, random states, metrics; killed after a checkpoint, in the second epoch."""
    settings = {"lora": lora, "save_every_n_steps": 4, **({"model.lora_dropout": 0.2} if lora else {"loss": PRODUCT})}
    whole, killed = (make_run(f"{name} {lora}", 2, **settings) for name in ("whole", "killed"))
    run_to_the_end([whole], tmp_path / "whole")

    ended = Processes([killed], tmp_path / "killed", before=partial(send_itself, signal.SIGKILL, 18, (0, 1))).wait()
    assert ended.codes == [-signal.SIGKILL] * 2
    killed.cfg.resume_from_checkpoint = True
    output = run_to_the_end([killed], tmp_path / "resumed")

    assert output.count(f"resuming from {killed.folder / 'resume' / 'step_16'}\n") == 1
    state, expected = read_state(killed), read_state(whole)
    assert {key.partition(".")[0] for key in expected} == {"model", "state"}
    assert state.keys() == expected.keys()
    assert [key for key, value in expected.items() if not torch.equal(state[key], value)] == []
    for rank in (0, 1):  # windows, random states, schedule
        assert_same_file(killed, whole, f"resume/step_{NUM_STEPS}/process_0000{rank}.pt")
    assert torch.equal(read_metrics(killed), read_metrics(whole))
    assert (read_metrics(whole)[:, METRICS.index("weight_mean")] < 1 - 1e-3).any() == (not lora), "n-grams come again"
    for file in (whole.folder / "checkpoint_100pct").iterdir():
        assert_same_file(killed, whole, f"checkpoint_100pct/{file.name}")


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_go_on_as_one(make_run, whole_runs, capsys, kind):
    run = make_run(f"{kind}, 2 to 1", 1, **KINDS[kind])
    go_on(run, whole_runs[kind, 2])
    capsys.readouterr()
    run.here()
    check_continuation(run, whole_runs[kind, 1], capsys.readouterr().err, 2, 1, has_one_window="one window" in kind)


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_goes_on_as_two(make_run, whole_runs, tmp_path, kind):
    run = make_run(f"{kind}, 1 to 2", 2, **KINDS[kind])
    go_on(run, whole_runs[kind, 1])
    output = run_to_the_end([run], tmp_path / "processes")
    check_continuation(run, whole_runs[kind, 2], output, 1, 2, has_one_window="one window" in kind)


def check_continuation(run, whole, output, saved, now, *, has_one_window):
    told = [line for line in output.splitlines() if f"was written by {saved} process" in line]
    assert len(told) == 1, output
    assert f"this run has {now}" in told[0]
    assert "random states (dropout) start anew" in told[0]
    # One process has but one window: each of two goes on with it.
    assert ("empty window" in told[0]) is (saved == 2 and not has_one_window)
    if has_one_window:
        expected = read_metrics(whole)[RESUMED_AT:]
        torch.testing.assert_close(read_metrics(run), expected, rtol=TOLERANCE, atol=0)
        assert_same(read_state(run), read_state(whole), "state")


@pytest.mark.parametrize("num_processes", [1, 2])
def test_another_step_size_is_refused_with_both(make_run, whole_runs, tmp_path, num_processes):
    kind = "full, one window"
    run = make_run(f"other size on {num_processes}", num_processes, **KINDS[kind], batch_size=4 // num_processes + 1)
    go_on(run, whole_runs[kind, 2])

    ended = Processes([run], tmp_path / "processes", num_processes=num_processes).wait()

    assert 0 not in ended.codes
    message = f"batch_size x processes was 4, is {4 + num_processes}. Change them back"
    assert ended.output.count(message) == 1, ended.output
    assert "Traceback" not in ended.output
    assert not (run.folder / "metrics.jsonl").exists()
