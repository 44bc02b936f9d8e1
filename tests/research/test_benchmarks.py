"""The benchmarks run, print what they write, and compare with baselines that compute the same. Speed is not tested."""

import json
import logging
import sys
from math import comb
from pathlib import Path
from types import SimpleNamespace

import audit_limits
import fused_head
import implementations
import measuring
import numpy
import probe
import pytest
import torch
import trainers
import training_step
import weights
from authors_way import AuthorsWay
from helpers.fakes.label_batches import WEIGHT_RTOL, random_stream
from helpers.fakes.tiny_llama import make_llama, make_tokenizer
from helpers.processes.ranks import CONTEXT

from tfidf_tune.passages.probe_file import make_passages
from tfidf_tune.weighting import TFIDFWeighting

needs_linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc"
)
TINY_MODEL = [f"model.{key}" for key in ("num_layers=1", "embed_dim=24", "num_heads=2", "num_kv_heads=2")]
SMALL = ["--batch-size", "2", "--seq-len", "32"]
STEP = ["--rounds", "2", *SMALL, *TINY_MODEL, "model.vocab_size=128"]


def measured(result):
    """Of the fused head."""
    (case,) = result["cases"]
    ways = {name: way for name, way in case["ways"].items() if not way["not_measured"]}
    assert ways.keys() == fused_head.WAYS.keys() - {"Liger", "cut-cross-entropy"}
    return {name: {"error": max(way["gradient_errors"].values()), **way} for name, way in ways.items()}


def longest_windows(result):
    sizes = {(row["batch_size"], row["seq_len"]): row for row in result["sweep"] if row["num_batches"] == 8}
    return {"{} x {}".format(*shape): row for shape, row in sizes.items()}


@pytest.fixture
def small_probe(tmp_path, text_file, monkeypatch):
    """A tiny checkpoint, and random passages instead of those of the embedded corpus."""

    def make(tokenizer, spec):
        ids = numpy.random.default_rng(0).integers(1, 64, (spec.num_targets, spec.block_size), dtype=numpy.int32)
        return SimpleNamespace(passages=make_passages(tokenizer, [(row, [], "x", {}) for row in ids], len(ids)))

    monkeypatch.setattr(probe, "make_probe", make)
    return str(make_tokenizer(make_llama(tmp_path / "model", max_position_embeddings=512), text_file))


@needs_linux
@pytest.mark.parametrize(
    ("script", "arguments", "rows", "cells"),
    [
        (training_step, ["--objectives", *STEP], lambda result: result["steps"], "{median_ms:.2f}"),
        (fused_head, ["--quick", "--case", "llama3"], measured, "{median_ms:.2f} {error:.1e}"),
        (weights, ["--quick", "--rounds", "3"], longest_windows, "{median_ms:.3f}"),
        (
            trainers,
            ["--config", "demo/llama_650K_full_memorization", "--rounds", "1", "--steps", "2", *SMALL],
            lambda result: result["trainers"],
            "{tokens_per_second:,.0f} {median_ms:.1f}",
        ),
        (
            implementations,
            ["--rounds", "1", "--dtypes", "fp32", *SMALL, "--checkpoint"],
            lambda result: result["implementations"],
            "{tokens_per_second:,.0f} {loading_s:.1f}",
        ),
        (
            probe,
            ["--rounds", "1", "--num-passages", "3", "--one-in", "2", "--checkpoint"],
            lambda result: {"batched": result},
            "{continuations_per_s[batched]:.2f} {median_throughput_ratio:.2f}",
        ),
    ],
)
def test_a_benchmark_prints_what_it_writes(tmp_path, script, arguments, rows, cells, monkeypatch, capsys, small_probe):
    if arguments[-1] == "--checkpoint":
        arguments = [*arguments, small_probe]
    monkeypatch.setattr(sys, "argv", [script.__name__, *arguments, "--output", str(tmp_path / "out.json")])
    monkeypatch.setattr(probe, "take_turns", lambda ways, **turns: measuring.take_turns(ways, **turns | {"warmup": 0}))
    monkeypatch.setattr(implementations.multiprocessing, "get_context", lambda method: CONTEXT)  # saves imports
    monkeypatch.setattr(trainers, "WARMUP", 0)
    monkeypatch.setattr(trainers, "MEMORY_ROUNDS", 1)
    try:
        script.main()
    finally:
        logging.disable(logging.NOTSET)

    result = json.loads((tmp_path / "out.json").read_text())
    assert {"date", "hardware", "versions", "settings"} <= result.keys()
    lines = capsys.readouterr().out.splitlines()
    expected = rows(result)
    assert expected
    for name, row in expected.items():
        numbers = cells.format(**row).split()
        assert any(name in line and all(number in line for number in numbers) for line in lines), name


def test_the_authors_way_gives_the_weights_that_ours_gives():
    """Over more batches than the window holds, of changing shapes, with ignored labels and empty rows."""
    theirs, ours = AuthorsWay(num_batches=3), TFIDFWeighting(num_batches=3)
    varied = 0
    for labels in random_stream(0, num_batches=8, max_rows=4, max_length=24, vocab_size=50):
        weights = ours(labels)
        torch.testing.assert_close(theirs(labels), weights, rtol=2 * WEIGHT_RTOL, atol=0.0)
        varied += len(weights.unique()) > 2
    assert varied, "weights other than 0 and one value have to be compared"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_all_ways_give_correct_gradients_and_a_wrong_one_is_detected(dtype):
    wrong = fused_head.Way(
        lambda head, labels, weights: fused_head.plain(head, labels, (labels != fused_head.IGNORED).float())
    )
    case = fused_head.Case("small", 4096, 24, 96, dtype, rounds=1)
    errors, not_measured = fused_head.gradient_errors(case, {**fused_head.WAYS, "wrong": wrong}, "cpu")

    assert not_measured.keys() == {"Liger", "cut-cross-entropy"}
    assert min(errors.pop("wrong").values()) > 0.1
    assert errors.keys() == fused_head.WAYS.keys() - not_measured.keys()
    eps = torch.finfo(fused_head.DTYPES[dtype]).eps
    # A sum over 16 chunks rounds by half an eps in each.
    assert all(max(of_inputs.values()) < 8 * eps for of_inputs in errors.values())


def test_the_interval_of_a_median_covers_it_in_95_cases_of_100():
    """As many ratios lie below the median as coins show heads: binomials say where an interval must reach."""
    num_rounds = 31
    low, high = measuring.median_ratio_interval([float(index) for index in range(num_rounds)], [1.0] * num_rounds)
    below, above = int(low), num_rounds - 1 - int(high)
    assert below == above

    def coverage(outside):
        return 1 - 2 * sum(comb(num_rounds, heads) for heads in range(outside + 1)) / 2**num_rounds

    assert coverage(below) >= 0.95 > coverage(below + 1)


def test_a_simulated_limit_is_seldom_exceeded_by_unseen_text_and_always_where_all_copies_are_recited(monkeypatch):
    monkeypatch.setattr(audit_limits, "_NUM_DRAWS", 300)
    unseen = [{"lms": number % 7, "of": 128, "verbatim": False} for number in range(230)]
    recited = [{"lms": 30, "of": 128, "verbatim": True}] * 24

    def exceeded(num_others, num_known):
        made = audit_limits._simulated(unseen, recited, num_others=num_others, num_controls=100, num_known=num_known)
        return {limit: number / 300 for limit, number in made["exceeded"].items()}

    assert exceeded(77, 0)["recited=0"] <= 0.05 + 3 * (0.05 * 0.95 / 300) ** 0.5
    assert exceeded(77, 0)["lms=20"] == 0
    assert exceeded(0, 24) == dict.fromkeys(audit_limits.SIMULATED, 1)
    diluted = exceeded(77, 24)
    assert (diluted["recited=0"], diluted["lms=20"]) == (1, 0)  # a mean of (24 * 30 + 77 * 3) / 101
