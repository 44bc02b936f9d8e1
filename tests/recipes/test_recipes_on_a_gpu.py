"""Features of the recipes on a GPU against the same run on the CPU; ``GPU_TESTS=1`` tries the tests
on a CPU.
"""

import os
import shutil

import pytest
import torch
from helpers.fakes.tiny_models import MODELS
from helpers.fakes.tiny_run import metrics_of, run_config
from helpers.processes.recipes import RecipeRun, run_to_the_end

METRICS = ("loss", "cross_entropy", "weight_mean", "weight_std", "weight_max")
NUM_STEPS = 8
# Roundings in fp32 of a few thousand sums, which a GPU takes in another order, and eight steps of
# plain SGD.
TOLERANCE = 1e-4


def weighting(name, **given):
    component = {"_component_": f"tfidf_tune.weighting.{name}Weighting", **given}
    return {
        "loss": {"_component_": "tfidf_tune.loss.WeightedCrossEntropyLoss", "weighting": component}
    }


CASES = {
    "all weights": {},
    "adapters": {"lora": True},
    "tied": {"model": "llama3_2-tied"},
    "neox": {"model": "gpt_neox"},
    "gptj": {"model": "gptj"},
    "chunked": {"loss.head": "chunked"},
    "all tokens": {"loss.counted": "tokens"},
    "repetition": weighting("Repetition", min_length=5, sample=1, num_buckets=2**16),
    "MiLe": weighting("MiLe"),
    "Goldfish": weighting("Goldfish"),
    "accumulated": {"gradient_accumulation_steps": 2},
    "bf16": {"dtype": "bf16"},
    "fp16": {"lora": True, "dtype": "fp16"},
    "nf4": {"lora": True, "dim": 256, "model.quantize_base": True},
    "compiled": {"compile": True},
    "checkpointed": {"enable_activation_checkpointing": True},
    "packed": {"packed": True},
    "offloaded": {"fsdp_cpu_offload": True},
}
# As FEATURES of test_any_model: eight bits of a number, and eleven.
TOLERANCES = {"bf16": 2e-2, "fp16": 5e-3}


@pytest.fixture
def gpu(device):
    if device.type == "cpu" and "GPU_TESTS" not in os.environ:
        pytest.skip("needs a GPU and --device cuda")
    return device


@pytest.fixture
def make_run(tmp_path_factory, make_base, text_file):
    def make(device, model="llama", *, dim=64, lora=False, packed=False, **overrides):
        settings = {
            "model": MODELS[model].section(dim, lora=lora),
            "optimizer": {"_component_": "torch.optim.SGD", "lr": 0.05},
            "max_steps": NUM_STEPS,
            "epochs": 10,
            "save_at_percent": [100],
            "device": str(device),
        }
        if packed:
            settings["dataset"] = {
                "_component_": "tfidf_tune.data.text_dataset",
                "source": str(text_file),
                "packed": True,
            }
            settings["tokenizer.max_seq_len"] = 64
        folder = tmp_path_factory.mktemp("run") / "run"
        return RecipeRun(
            run_config(
                folder, make_base(model, dim), text_file, lora=lora, **(settings | overrides)
            ),
            lora,
        )

    return make


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of inductor
@pytest.mark.parametrize("case", CASES)
def test_a_run_on_a_gpu_is_the_run_on_the_cpu(case, gpu, make_run, monkeypatch):
    on_cpu = {"compile": False, "fsdp_cpu_offload": False}
    runs = [make_run(gpu, **CASES[case]), make_run("cpu", **(CASES[case] | on_cpu))]
    found, truth = (metrics_of(one.here(), *METRICS) for one in runs)

    assert truth.shape == (NUM_STEPS, len(METRICS))
    assert truth[-1, 1] < 0.999 * truth[0, 1], "it learns something"
    torch.testing.assert_close(found, truth, rtol=TOLERANCES.get(case, TOLERANCE), atol=0)


@pytest.mark.parametrize("lora", [False, True])
def test_a_resumed_run_is_the_uninterrupted_one(lora, gpu, make_run):
    run = make_run(gpu, lora=lora, save_every_n_steps=3, keep_last_n_checkpoints=3)
    whole = metrics_of(folder := run.here(), *METRICS)
    for step in (6, NUM_STEPS):
        shutil.rmtree(folder / "resume" / f"step_{step}")
    run.cfg.resume_from_checkpoint = True

    torch.testing.assert_close(metrics_of(run.here(), *METRICS), whole, rtol=TOLERANCE, atol=0)


@pytest.mark.parametrize("lora", [False, True])
def test_two_gpus_are_one(lora, gpu, make_run, tmp_path):
    if torch.cuda.device_count() < 2 and gpu.type == "cuda":
        pytest.skip("needs two GPUs")
    two = make_run(gpu.type, lora=lora, **{"loss.sync": True, "batch_size": 2})
    run_to_the_end([two], tmp_path / "processes")
    one = make_run(gpu, lora=lora, **{"loss.sync": True, "batch_size": 4})

    torch.testing.assert_close(
        metrics_of(two.folder, *METRICS), metrics_of(one.here(), *METRICS), rtol=TOLERANCE, atol=0
    )
