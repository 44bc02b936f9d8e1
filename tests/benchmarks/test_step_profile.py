"""The profile of a step adds up, its operations are those of the formula, and time is found where it is spent."""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from tfidf_tune.loss import TFIDFCrossEntropyLoss
from tfidf_tune.training import train_step

FOLDER = Path(__file__).parents[2] / "benchmarks"
BATCH, SEQUENCE, LAYERS, WIDTH, HIDDEN, VOCABULARY, HEADS, KV_HEADS = 2, 32, 2, 24, 40, 128, 4, 2
OVERRIDES = [
    f"model.num_layers={LAYERS}",
    f"model.embed_dim={WIDTH}",
    f"model.num_heads={HEADS}",
    f"model.num_kv_heads={KV_HEADS}",
    f"model.intermediate_dim={HIDDEN}",
    f"model.vocab_size={VOCABULARY}",
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    output = tmp_path_factory.mktemp("step_profile") / "out.json"
    finished = subprocess.run(
        [
            sys.executable, FOLDER / "step_profile.py", "--rounds", "2", "--batch-size", str(BATCH),
            "--seq-len", str(SEQUENCE), "--output", output, *OVERRIDES,
        ],
        capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    return json.loads(output.read_text()), finished.stdout


@pytest.fixture(scope="module")
def scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield argparse.Namespace(
            step_profile=importlib.import_module("step_profile"), training_step=importlib.import_module("training_step")
        )


@pytest.fixture
def tiny_step(scripts):
    """A model with its objective, and a function that profiles steps of it."""
    options = argparse.Namespace(
        config="demo/llama_3M_full_memorization", overrides=OVERRIDES, device="cpu", dtype="fp32"
    )
    model, optimizer = scripts.training_step.build_model(options)
    loss = TFIDFCrossEntropyLoss()
    model.set_num_output_chunks(loss.num_output_chunks)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE))
    scaler, device = torch.amp.GradScaler("cpu", enabled=False), torch.device("cpu")

    def step():
        batch = {"tokens": tokens, "labels": tokens}
        train_step(model, loss, optimizer, [batch], scaler=scaler, device=device, clip_grad_norm=1.0)

    def profiled():
        with scripts.step_profile.in_ranges(model, loss, optimizer):
            return scripts.step_profile.profile_step(step, "cpu")[0]

    return argparse.Namespace(model=model, loss=loss, profiled=profiled)


def test_the_parts_add_up_to_the_profiled_step(measured):
    result, _ = measured
    parts = result["parts"]
    assert sum(part["ms"] for part in parts.values()) == pytest.approx(result["profiled_ms"], rel=1e-6)
    for name, part in parts.items():
        assert part["ms"] > 0, name
        assert part["ms"] >= part["forward_ms"] + part["backward_ms"] - 1e-9, name
        assert part["share"] == pytest.approx(part["ms"] / result["profiled_ms"]), name
    backward = {name for name, part in parts.items() if part["backward_ms"]}
    assert backward >= {
        "layers: matrix products", "layers: attention", "layers: the rest", "embedding", "head and cross-entropy",
    }  # fmt: skip
    assert not backward & {"weights", "clipping", "optimizer", "between operations"}


def test_the_operations_are_those_of_the_formula(measured):
    result, _ = measured
    kv_width = WIDTH * KV_HEADS // HEADS
    matrices = LAYERS * (2 * WIDTH * WIDTH + 2 * WIDTH * kv_width + 3 * WIDTH * HIDDEN) + WIDTH * VOCABULARY
    linear = 3 * 2 * BATCH * SEQUENCE * matrices  # forward, gradient of the input, gradient of the weight
    # QK and PV; backward QK again, and a gradient for each of Q, K, V and the probabilities.
    attention = LAYERS * (2 + 5) * 2 * BATCH * SEQUENCE * SEQUENCE * WIDTH
    assert sum(result["flops"].values()) == linear + attention
    products = [(product["factors"], product["count"]) for product in result["products"]]
    assert sum(2 * m * k * n * count for ((m, k), (_, n)), count in products) == linear


def test_the_floor_is_operations_over_the_rate(measured):
    result, _ = measured
    assert result["floor_ms"] == pytest.approx(1e3 * sum(result["flops"].values()) / result["flops_per_s"])
    assert result["step_over_floor"] == pytest.approx(result["step_ms"] / result["floor_ms"])
    rates = [product["flops_per_s"] for product in result["products"]]
    assert min(rates) <= result["flops_per_s"] <= max(rates)


def test_what_is_printed_is_what_is_written(measured):
    result, printed = measured
    for name, part in result["parts"].items():
        row = [f"{part[key]:.2f}" for key in ("forward_ms", "backward_ms", "ms")] + [f"{part['share']:.1%}"]
        assert re.search(rf"^\| {name} +\| +" + r" \| +".join(map(re.escape, row)) + r" \|$", printed, re.MULTILINE)
    batch = result["next_batch_ms"]
    assert f"step without the profiler: {result['step_ms']:.2f} ms" in printed
    assert f"= {result['floor_ms']:.2f} ms; the step takes {result['step_over_floor']:.2f} times that" in printed
    assert f"{result['square']['flops_per_s'] / 1e9:.1f} GFLOP/s\n" in printed
    assert f"next batch, before the step: {batch['next batch']:.3f} ms" in printed
    assert f"items {batch['items']:.3f} ms, collate {batch['collate']:.3f} ms" in printed


def test_a_product_with_frozen_weights_has_no_gradient_of_them(scripts):
    linear = nn.Linear(8, 16)
    rows = torch.randn(4, 8, requires_grad=True)

    def operations():
        flops, products = scripts.step_profile.count_operations(lambda: linear(rows).sum().backward())
        assert sum(scripts.step_profile.product_flops(product) * n for product, n in products.items()) == sum(
            flops.values()
        )
        return sum(flops.values())

    assert operations() == 3 * 2 * 4 * 8 * 16
    linear.requires_grad_(False)
    assert operations() == 2 * 2 * 4 * 8 * 16


def test_time_in_the_weighting_is_that_of_the_weights(tiny_step, monkeypatch):
    weigh = tiny_step.loss.weighting.forward

    def slow(*args, **kwargs):
        time.sleep(0.05)
        return weigh(*args, **kwargs)

    monkeypatch.setattr(tiny_step.loss.weighting, "forward", slow)
    parts = tiny_step.profiled()
    assert parts["weights"]["forward_ms"] >= 50
    assert parts["weights"]["backward_ms"] == 0


def test_time_in_the_heads_backward_pass_is_that_of_the_head(tiny_step, monkeypatch):
    project = tiny_step.model.output.forward

    def slow(hidden):
        logits = project(hidden)
        logits.grad_fn.register_hook(lambda *_: time.sleep(0.01))  # for each of the eight chunks
        return logits

    monkeypatch.setattr(tiny_step.model.output, "forward", slow)
    assert tiny_step.profiled()["head and cross-entropy"]["backward_ms"] >= 80
