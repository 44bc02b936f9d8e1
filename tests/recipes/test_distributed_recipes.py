"""Recipes on two and three processes: the run of one process at the same batch size, also where it
is resumed.
"""

import shutil
from functools import partial

import pytest
import torch
from helpers.fakes.tiny_models import MODELS
from helpers.fakes.tiny_run import assert_close_weights, metrics_of, read_weights, run_config
from helpers.processes.hooks import overflow_at, save_loaded_bytes, save_random_state
from helpers.processes.recipes import ALL, Processes, RecipeRun, run_to_the_end
from safetensors.torch import load_file

from tfidf_tune.training import SetupError

NUM_STEPS = 10
METRICS = ("loss", "cross_entropy", "weight_mean", "weight_std", "weight_max", "grad_norm")
# Each process has half a batch, so sums are rounded differently: by about eps a step, which later
# steps carry on. SGD does so smoothly; AdamW would divide by values close to zero.
TOLERANCE = 4 * NUM_STEPS * torch.finfo(torch.float32).eps
WEIGHTED = {"_component_": "tfidf_tune.loss.WeightedCrossEntropyLoss"}
SHARED_ROWS = {
    "_component_": "tfidf_tune.weighting.RepetitionWeighting",
    "h": 2,
    "k": 2,
    "alpha": 1.0,
    "sample": 1,
    "span": 1,
    "sync": True,
}
# Weights of 1 that need the predictions of the sharded model.
MILE = {"_component_": "tfidf_tune.weighting.MiLeWeighting", "gamma": 0}
ADAPTERS_EVERYWHERE = {"lora": True, "model.apply_lora_to_mlp": True, "optimizer.lr": 0.2}
NF4 = {"lora": True, "dim": 256, "model.quantize_base": True, "optimizer.lr": 0.1}


@pytest.fixture(scope="module")
def make_run(tmp_path_factory, make_base, text_file):
    """Make a run of so many steps on so many processes, each step of ``rows`` sequences in all."""

    def make(num_processes, model="llama", *, dim=64, rows=4, lora=False, **overrides):
        settings = {
            "model": MODELS[model].section(dim, lora=lora),
            "loss.sync": True,
            "optimizer": {"_component_": "torch.optim.SGD", "lr": 0.05, "momentum": 0.9},
            "max_steps": NUM_STEPS,
            "epochs": 10,
            "save_at_percent": [100],
        }
        folder = tmp_path_factory.mktemp("run") / f"on {num_processes}"
        cfg = run_config(
            folder, make_base(model, dim), text_file, lora=lora, **(settings | overrides)
        )
        cfg.batch_size = rows // num_processes // overrides.get("gradient_accumulation_steps", 1)
        return RecipeRun(cfg, lora)

    return make


def assert_same_run(name, folder, expected):
    """Metrics and weights agree up to rounding in fp32; other files of the checkpoint are equal."""
    found = metrics_of(folder, *METRICS)
    truth = metrics_of(expected, *METRICS)
    assert truth.shape == (NUM_STEPS, len(METRICS))
    assert truth[-1, 0] < 0.99 * truth[0, 0], f"{name} learns something"
    torch.testing.assert_close(
        found, truth, rtol=TOLERANCE, atol=0, msg=lambda text: f"{name}: {text}"
    )
    assert_close_weights(folder / "checkpoint_100pct", expected / "checkpoint_100pct", TOLERANCE)
    files, true_files = (
        {
            path.name: path.read_bytes()
            for path in each.glob("checkpoint_100pct/*")
            if path.suffix != ".safetensors"
        }
        for each in (folder, expected)
    )
    assert files == true_files, name


# Runs that share their processes; all heads, with and without a tied one.
GROUPS = {
    "full": {
        "tied": {"model": "llama3_2-tied"},
        "neox, offloaded, chunked, with predictions": {
            "model": "gpt_neox",
            "fsdp_cpu_offload": True,
            "loss": WEIGHTED | {"weighting": MILE, "head": "chunked"},
        },
        "gptj, fused, kept gathered": {"model": "gptj", "fsdp_reshard_after_forward": False},
        "accumulated, all tokens": {
            "gradient_accumulation_steps": 2,
            "rows": 8,
            "loss.counted": "tokens",
        },
        "repetition": {"loss": WEIGHTED | {"weighting": SHARED_ROWS}},
    },
    "adapters": {
        "compiled, checkpointed": {
            "model": "gpt_neox",
            "compile": True,
            "enable_activation_checkpointing": True,
            **ADAPTERS_EVERYWHERE,
        },
        "tied": {"model": "qwen2-tied", **ADAPTERS_EVERYWHERE, "optimizer.lr": 0.5},
        "nf4, merged": {"merge_adapter": True, **NF4},
    },
    # 320 and 64 rows cannot be divided by 3, and one process has no row of a LoRA matrix of rank 2.
    "three": {
        "full": {"rows": 3},
        "adapters": {"rows": 3, "model.lora_rank": 2, **ADAPTERS_EVERYWHERE},
    },
}
if not ALL:
    del GROUPS["three"]["full"]


@pytest.mark.parametrize("group", GROUPS)
def test_several_processes_are_one(make_run, tmp_path, monkeypatch, group):
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "eager")
    cases = GROUPS[group]
    number = 3 if group == "three" else 2
    runs = {name: make_run(number, **settings) for name, settings in cases.items()}

    run_to_the_end([*runs.values()], tmp_path / "processes", num_processes=number)

    for name, settings in cases.items():
        alone = make_run(1, **(settings | {"compile": False, "fsdp_cpu_offload": False}))
        assert_same_run(name, runs[name].folder, alone.here())


def test_lower_precision_costs_two_processes_no_more_than_one(make_run, tmp_path):
    """The error of the loss against fp32 is smaller where weights are in fp32 and only layers
    compute in bf16.
    """
    fp16 = {"dtype": "fp16", **ADAPTERS_EVERYWHERE}
    cases = {
        "bf16": {"dtype": "bf16"},
        "mixed": {"fsdp_param_dtype": "bf16", "fsdp_reduce_dtype": "fp32"},
        "fp16": fp16,
    }
    runs = {name: make_run(2, **settings) for name, settings in cases.items()}
    run_to_the_end([*runs.values()], tmp_path / "processes")

    def losses_of_one(**settings):
        return metrics_of(make_run(1, **settings).here(), "loss")

    def error_of_two(name, truth):
        return (metrics_of(runs[name].folder, "loss") - truth).abs().max()

    truth = losses_of_one()
    error_of_one = (losses_of_one(dtype="bf16") - truth).abs().max()
    assert 0 < error_of_two("bf16", truth) < 2 * error_of_one
    assert 0 < error_of_two("mixed", truth) < 0.5 * error_of_one
    truth = losses_of_one(**ADAPTERS_EVERYWHERE)
    assert 0 < error_of_two("fp16", truth) < 2 * (losses_of_one(**fp16) - truth).abs().max()
    dtypes = {
        name: {value.dtype for value in read_weights(run.folder / "checkpoint_100pct").values()}
        for name, run in runs.items()
    }
    assert dtypes == {"bf16": {torch.bfloat16}, "fp16": {torch.float32}, "mixed": {torch.float32}}


def test_gradients_that_overflow_in_the_shard_of_one_process_skip_the_step_on_both(
    make_run, tmp_path
):
    """The infinity is in the shard of process 1. Process 0 reports and writes; each draws its own
    dropout.
    """
    settings = {
        "dtype": "fp16",
        "model.lora_dropout": 0.2,
        "max_steps": 6,
        "dataset.probe_file": None,
    }
    run = make_run(2, **ADAPTERS_EVERYWHERE, **settings)

    after = partial(save_random_state, tmp_path)
    output = run_to_the_end(
        [run], tmp_path / "processes", before=partial(overflow_at, 4), after=after
    )

    assert "step 4: gradients overflowed" in output
    for text in (
        "gradients overflowed in fp16",
        "MiB, over 2 processes",
        "Checkpoints in",
        "Writing logs to",
    ):
        assert output.count(text) == 1, output
    assert "Warning" not in output
    assert metrics_of(run.folder, "loss_scale").flatten().tolist() == [2.0**16] * 3 + [2.0**15] * 3
    assert {path.name for path in run.folder.iterdir()} == {
        "checkpoint_100pct",
        "config.yaml",
        "logs",
        "metrics.jsonl",
        "resume",
        "torchtune_config.yaml",
    }
    assert len(list((run.folder / "logs").iterdir())) == 1
    assert not torch.equal(*(torch.load(tmp_path / f"random_state_{rank}.pt") for rank in (0, 1)))


def test_two_processes_hold_half_of_the_weights_of_one(make_run, tmp_path):
    """When training begins: embeddings that are tied to the head, NF4 weights and adapters."""
    held = {}
    for number in (1, 2):
        run = make_run(number, "qwen2-tied", rows=number, max_steps=1, **NF4)
        before = partial(save_loaded_bytes, tmp_path)
        run_to_the_end([run], tmp_path / f"processes {number}", num_processes=number, before=before)
        held[number] = torch.load(tmp_path / "loaded_0.pt")

    assert len(held[1]) > 10
    assert sum(held[2].values()) <= 0.51 * sum(held[1].values())


REFUSED = {
    "cannot be cut into 3 shards": (3, NF4),
    "set fused=False": (2, {"optimizer.fused": True}),
    "config: seed is null": (2, {"seed": None}),
}


@pytest.mark.parametrize("message", list(REFUSED) if ALL else ["set fused=False"])
def test_what_several_processes_cannot_do_is_refused_by_one_message(make_run, tmp_path, message):
    number, overrides = REFUSED[message]
    run = make_run(number, rows=number, **overrides)

    ended = Processes([run], tmp_path / "processes", num_processes=number).wait()

    assert 0 not in ended.codes
    assert ended.output.count(message) == 1, ended.output
    assert "Traceback" not in ended.output
    assert not run.folder.exists()


# ---- resumed on another number of processes: equal up to rounding

RESUMED_AT = 6
RESUMED_TOLERANCE = 8 * 12 * torch.finfo(torch.float32).eps
# 12 steps of four sequences, 8 steps an epoch.
RESUMABLE = {
    "dataset.num_base": 12,
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3, "eps": 1e-5},
    "epochs": 2,
    "max_steps": 12,
    "save_every_n_steps": RESUMED_AT,
}
WINDOWS = {**RESUMABLE, "lora": True, "model.apply_lora_to_mlp": True, "loss.sync": False}


@pytest.fixture(scope="module")
def whole(make_run, tmp_path_factory):
    """Runs that were not interrupted, on one and two processes; they keep the checkpoint of their
    middle.
    """
    runs = {
        1: make_run(1, **RESUMABLE),
        2: make_run(2, **RESUMABLE),
        "windows": make_run(2, **WINDOWS),
    }
    run_to_the_end([runs[2], runs["windows"]], tmp_path_factory.mktemp("processes"))
    runs[1].here()
    return runs


def read_state(run):
    """Read weights and optimizer state of the last resume checkpoint, shards joined."""
    tensors = {}
    for file in sorted((run.folder / "resume" / "step_12").glob("*.safetensors")):
        for key, value in load_file(file).items():
            tensors.setdefault(key, []).append(value)
    for key, parts in tensors.items():
        tensors[key] = torch.cat(parts) if parts[0].dim() else parts[0]
    return tensors


def resume(run, earlier):
    """Let a run begin from the middle of another."""
    shutil.copytree(
        earlier.folder / "resume" / f"step_{RESUMED_AT}",
        run.folder / "resume" / f"step_{RESUMED_AT}",
    )
    run.cfg.resume_from_checkpoint = True
    return run


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_reported(output, saved, now, window):
    (message,) = [line for line in output.splitlines() if f"was written by {saved} process" in line]
    for text in (f"this run has {now}", "random states (dropout) are not restored", window):
        assert text in message


def assert_continued(run, expected):
    torch.testing.assert_close(
        metrics_of(run.folder, *METRICS),
        metrics_of(expected.folder, *METRICS)[RESUMED_AT:],
        rtol=RESUMED_TOLERANCE,
        atol=0,
    )
    state = read_state(run)
    expected_state = read_state(expected)
    assert state.keys() == expected_state.keys()
    for key, value in expected_state.items():
        limit = RESUMED_TOLERANCE * float(value.abs().max())
        torch.testing.assert_close(
            state[key], value, rtol=0, atol=limit, msg=lambda text, key=key: f"{key}: {text}"
        )


def test_a_run_of_two_processes_is_resumed_by_one(make_run, whole, capsys):
    """One window is restored, windows of their own are not."""
    run = resume(make_run(1, **RESUMABLE), whole[2])
    run.here()
    assert_reported(capsys.readouterr().err, 2, 1, "the loss keeps its window")
    assert_continued(run, whole[1])

    resume(make_run(1, **WINDOWS), whole["windows"]).here()
    assert_reported(capsys.readouterr().err, 2, 1, "the loss starts with an empty window")


def test_a_run_of_one_process_is_resumed_by_two(make_run, whole, tmp_path):
    run = resume(make_run(2, **RESUMABLE), whole[1])
    assert_reported(
        run_to_the_end([run], tmp_path / "processes"), 1, 2, "the loss keeps its window"
    )
    assert_continued(run, whole[2])


# 33 sequences, four in a step: one process takes 9 steps an epoch; two leave one sequence out and
# take 8.
UNEVEN = {**RESUMABLE, "dataset.num_base": 13, "max_steps": None, "keep_last_n_checkpoints": 3}


def test_a_number_of_processes_with_other_steps_per_epoch_is_refused(make_run, tmp_path):
    """The schedule and the position in the data follow from them; nothing that is
    saved is changed.
    """
    runs = {number: make_run(number, **UNEVEN) for number in (1, 2)}
    runs[1].here()
    run_to_the_end([runs[2]], tmp_path / "processes")
    on_one = resume(make_run(1, **UNEVEN), runs[2])
    on_two = resume(make_run(2, **UNEVEN), runs[1])
    before = [contents(run.folder) for run in (on_one, on_two)]

    ended = Processes([on_two], tmp_path / "resumed", num_processes=2).wait()
    remedy = r"start 2 process\(es\), or choose another output_dir"
    with pytest.raises(
        SetupError,
        match=f"step_6 was written by 2 .* with 8 steps per epoch; .* there are 9.*: {remedy}",
    ):
        on_one.here()

    assert [len(metrics_of(run.folder, "loss")) for run in runs.values()] == [2 * 9, 2 * 8]
    assert 0 not in ended.codes
    said = "was written by 1 process(es), with 9 steps per epoch; with 2 process(es) there are 8"
    assert ended.output.count(said) == 1, ended.output
    assert "Traceback" not in ended.output
    assert [contents(run.folder) for run in (on_one, on_two)] == before
