"""The recipes on two and three processes: metrics and checkpoints are those of one process at the same batch size."""

import json
from functools import partial

import pytest
import torch
from process_hooks import overflow_at, save_random_state
from recipe_processes import Processes, RecipeRun, run_to_the_end
from safetensors.torch import load_file
from tiny_llama import make_tokenizer
from tiny_models import MODELS
from tiny_run import run_config

NUM_STEPS = 10
METRICS = ("loss", "cross_entropy", "weight_mean", "weight_std", "weight_max", "grad_norm")
# Each process has half a batch, so sums are rounded differently: by about eps a step, which later steps carry on. SGD
# does so smoothly; AdamW would divide by values close to zero.
TOLERANCE = 4 * NUM_STEPS * torch.finfo(torch.float32).eps
CROSS_ENTROPY = {"loss": {"_component_": "tfidf_tune.loss.CrossEntropyLoss"}}
SHARED_ROWS = {
    "_component_": "tfidf_tune.weighting.RepetitionWeighting",
    "h": 2,
    "k": 2,
    "alpha": 1.0,
    "sample": 1,
    "span": 1,
    "sync": True,
}
WEIGHTED = {"_component_": "tfidf_tune.loss.WeightedCrossEntropyLoss"}
# Weights of 1 that need the predictions of the sharded model.
MILE = {"_component_": "tfidf_tune.weighting.MiLeWeighting", "gamma": 0}
ADAPTERS_EVERYWHERE = {"model.apply_lora_to_mlp": True, "optimizer.lr": 0.2}
NF4 = {"lora": True, "dim": 256, "model.quantize_base": True, "optimizer.lr": 0.1}


@pytest.fixture(scope="session")
def make_base(tmp_path_factory, text_file):
    """A random checkpoint of an architecture, with a tokenizer."""
    made = {}

    def make(name, dim):
        if (name, dim) not in made:
            made[name, dim] = tmp_path_factory.mktemp("base")
            MODELS[name].build_hf(dim).save_pretrained(made[name, dim])
            make_tokenizer(made[name, dim], text_file)
        return made[name, dim]

    return make


@pytest.fixture
def make_run(tmp_path, make_base, text_file):
    """Make a run of so many steps on so many processes, each step of ``rows`` sequences in all."""

    def make(name, num_processes, model="llama", *, dim=64, rows=4, lora=False, **overrides):
        settings = {
            "model": MODELS[model].section(dim, lora=lora),
            "loss.sync": True,
            "optimizer": {"_component_": "torch.optim.SGD", "lr": 0.05, "momentum": 0.9},
            "max_steps": NUM_STEPS,
            "epochs": 10,
            "save_at_percent": [100],
        }
        folder = tmp_path / f"{name} on {num_processes}"
        cfg = run_config(folder, make_base(model, dim), text_file, lora=lora, **(settings | overrides))
        cfg.batch_size = rows // num_processes // overrides.get("gradient_accumulation_steps", 1)
        return RecipeRun(cfg, lora)

    return make


def read_metrics(folder, *names):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return torch.tensor([[line[name] for name in names] for line in lines], dtype=torch.float64)


def read_weights(folder, milestone="checkpoint_100pct"):
    (file,) = (folder / milestone).glob("*.safetensors")
    return load_file(file)


def assert_same_run(name, folder, expected):
    """Metrics and weights agree up to rounding in fp32."""
    found, truth = read_metrics(folder, *METRICS), read_metrics(expected, *METRICS)
    assert truth.shape == (NUM_STEPS, len(METRICS))
    assert truth[-1, 0] < 0.99 * truth[0, 0], f"{name} learns something"
    torch.testing.assert_close(found, truth, rtol=TOLERANCE, atol=0, msg=lambda text: f"{name}: {text}")
    weights, true_weights = read_weights(folder), read_weights(expected)
    assert weights.keys() == true_weights.keys()
    for key, value in true_weights.items():
        limit = TOLERANCE * float(value.abs().max())
        torch.testing.assert_close(
            weights[key], value, rtol=0, atol=limit, msg=lambda text, key=key: f"{name}: {key}: {text}"
        )
    files, true_files = (
        {
            path.name: path.read_bytes()
            for path in (each / "checkpoint_100pct").iterdir()
            if path.suffix != ".safetensors"
        }
        for each in (folder, expected)
    )
    assert files == true_files, name


# Runs that share a pair of processes.
GROUPS = {
    "full": {
        "llama": {},
        "tied, torch's head": {"model": "llama3_2-tied", "loss.head": "torch"},
        "neox": {"model": "gpt_neox", "loss.head": "chunked"},
        "gptj": {"model": "gptj", "fsdp_reshard_after_forward": False},
        "accumulated, all tokens": {"gradient_accumulation_steps": 2, "rows": 8, "loss.counted": "tokens"},
        "repetition": {"loss": WEIGHTED | {"weighting": SHARED_ROWS}},
        "offloaded, with predictions": {"fsdp_cpu_offload": True, "loss": WEIGHTED | {"weighting": MILE}},
    },
    "adapters": {
        "checkpointed": {"enable_activation_checkpointing": True, "lora": True, **ADAPTERS_EVERYWHERE},
        "tied": {"model": "qwen2-tied", "lora": True, **ADAPTERS_EVERYWHERE, "optimizer.lr": 0.5},
        "gptj, merged": {"model": "gptj", "lora": True, "merge_adapter": True, **ADAPTERS_EVERYWHERE},
        "nf4, merged": {"merge_adapter": True, **NF4},
    },
    "compiled": {"adapters": {"compile": True, "lora": True, **ADAPTERS_EVERYWHERE}},
}


@pytest.mark.parametrize("group", GROUPS)
def test_two_processes_are_one(make_run, tmp_path, monkeypatch, group):
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")
    cases = GROUPS[group]
    runs = {name: make_run(name, 2, **settings) for name, settings in cases.items()}

    run_to_the_end([*runs.values()], tmp_path / "processes")

    for name, settings in cases.items():
        alone = make_run(name, 1, **(settings | {"compile": False, "fsdp_cpu_offload": False}))
        assert_same_run(name, runs[name].folder, alone.here())


def test_three_processes_are_one(make_run, tmp_path):
    """320 and 64 rows cannot be divided by 3, and one process has no row of a LoRA matrix of rank 2."""
    cases = {
        "full": {"rows": 3},
        "adapters": {"rows": 3, "lora": True, "model.lora_rank": 2, **ADAPTERS_EVERYWHERE},
    }
    runs = {name: make_run(name, 3, **settings) for name, settings in cases.items()}

    run_to_the_end([*runs.values()], tmp_path / "processes", num_processes=3)

    for name, settings in cases.items():
        assert_same_run(name, runs[name].folder, make_run(name, 1, **settings).here())


def test_accumulated_cross_entropy_is_that_of_the_large_batch(make_run):
    run = make_run("accumulated", 1, gradient_accumulation_steps=2, **CROSS_ENTROPY)

    assert run.cfg.batch_size == 2
    assert_same_run("accumulated", run.here(), make_run("large", 1, **CROSS_ENTROPY).here())


def test_lower_precision_costs_two_processes_no_more_than_one(make_run, tmp_path):
    """The error of the loss against fp32 is smaller where weights are in fp32 and only layers compute in bf16."""
    low = {
        "bf16": {"dtype": "bf16"},
        "fp16 adapters": {"dtype": "fp16", "lora": True, **ADAPTERS_EVERYWHERE},
        "mixed": {"fsdp_param_dtype": "bf16", "fsdp_reduce_dtype": "fp32"},
    }
    alone = {**low, "mixed": low["bf16"]}
    limits = {"bf16": 2.0, "fp16 adapters": 2.0, "mixed": 0.5}
    runs = {name: make_run(name, 2, **settings) for name, settings in low.items()}
    run_to_the_end([*runs.values()], tmp_path / "processes")

    for name, limit in limits.items():
        truth = read_metrics(make_run(f"{name}, true", 1, **(alone[name] | {"dtype": "fp32"})).here(), "loss")
        allowed = (read_metrics(make_run(name, 1, **alone[name]).here(), "loss") - truth).abs().max()
        error = (read_metrics(runs[name].folder, "loss") - truth).abs().max()
        assert 0 < error < limit * allowed, name
    dtypes = {name: {value.dtype for value in read_weights(run.folder).values()} for name, run in runs.items()}
    assert dtypes == {"bf16": {torch.bfloat16}, "fp16 adapters": {torch.float32}, "mixed": {torch.float32}}


def test_gradients_that_overflow_in_the_shard_of_one_process_skip_the_step_on_both(make_run, tmp_path):
    """The infinity is in the shard of process 1; metrics and messages are those of process 0."""
    settings = {"dtype": "fp16", "lora": True, "max_steps": 6, **ADAPTERS_EVERYWHERE}
    undisturbed, run = make_run("undisturbed", 2, **settings), make_run("overflow", 2, **settings)

    quiet = run_to_the_end([undisturbed], tmp_path / "undisturbed")
    output = run_to_the_end([run], tmp_path / "processes", before=partial(overflow_at, 4))

    message = "step 4: gradients overflowed in fp16; step skipped, loss scale"
    assert (quiet.count(message), output.count(message)) == (0, 1)
    scales, expected = (read_metrics(each.folder, "loss_scale").flatten() for each in (run, undisturbed))
    assert scales.tolist() == [*expected[:3], *(expected[3:] / 2)]


def test_random_numbers_differ_between_processes_and_are_the_same_in_every_run(make_run, tmp_path):
    """Those of dropout."""
    folders = []
    for name in ("first", "second"):
        run = make_run(name, 2, lora=True, **{"model.lora_dropout": 0.2}, max_steps=3)
        folders.append(run.folder)
        run_to_the_end([run], tmp_path / name, after=partial(save_random_state, run.folder))

    first, second = ([torch.load(folder / f"random_state_{rank}.pt") for rank in (0, 1)] for folder in folders)
    assert not torch.equal(*first)
    assert all(map(torch.equal, first, second))
    assert torch.equal(*(read_metrics(folder, "loss") for folder in folders))


NOT_SHARDED = {
    "cannot be cut into 3 shards of whole blocks (16384 weights)": (3, NF4),
    "torch.optim.SGD, which has to update parameters that FSDP2 has sharded: set fused=False, or take": (
        2,
        {"optimizer.fused": True},
    ),
}


@pytest.mark.parametrize("message", NOT_SHARDED)
def test_what_cannot_be_sharded_is_refused_by_one_message(make_run, tmp_path, message):
    number, overrides = NOT_SHARDED[message]
    run = make_run("run", number, rows=number, **overrides)

    ended = Processes([run], tmp_path / "processes", num_processes=number).wait()

    assert 0 not in ended.codes
    assert ended.output.count(message) == 1, ended.output
    assert ("set fused=False" in ended.output) == ("fused" in message)
    assert "Traceback" not in ended.output
    assert not run.folder.exists()


def test_only_one_process_reports_and_writes(make_run, tmp_path):
    run = make_run("run", 2, max_steps=2, **{"dataset.probe_file": None})

    output = run_to_the_end([run], tmp_path / "processes")

    for text in ("optimizer state 0.44 MiB, over 2 processes", "Checkpoints in", "Writing logs to"):
        assert output.count(text) == 1, output
    assert "Warning" not in output
    assert {path.name for path in run.folder.iterdir()} == {
        "checkpoint_100pct", "config.yaml", "logs", "metrics.jsonl", "resume", "torchtune_config.yaml"
    }  # fmt: skip
    assert len(read_metrics(run.folder, "step")) == 2
    assert len(list((run.folder / "logs").iterdir())) == 1


def test_without_a_seed_several_processes_are_refused(make_run, tmp_path):
    ended = Processes([make_run("run", 2, seed=None)], tmp_path / "processes").wait()

    assert 0 not in ended.codes
    message = "config: seed is null, but several processes need the same one: set seed to a number"
    assert ended.output.count(message) == 1, ended.output
