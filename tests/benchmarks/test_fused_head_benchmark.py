"""The benchmark of the loss from hidden states counts memory as it is taken and tells right gradients from wrong."""

import importlib
import json
import os
import subprocess
import sys
from math import comb
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PEERS = {"Liger": "liger_kernel", "cut-cross-entropy": "cut_cross_entropy"}
MIB = 2**20

needs_linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc"
)


@pytest.fixture
def imported(monkeypatch):
    """Import a module of the benchmarks by its name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def fused_head(imported):
    return imported("fused_head")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What the script wrote and printed, with small sizes."""
    output = tmp_path_factory.mktemp("fused_head") / "out.json"
    finished = subprocess.run(
        [sys.executable, BENCHMARKS / "fused_head.py", "--quick", "--case", "demo", "llama3", "--output", output],
        capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    return json.loads(output.read_text()), finished.stdout


@needs_linux
def test_every_case_is_printed_as_it_is_written(run):
    result, printed = run
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines() if "|" in line]
    tables = {name: iter([row for row in rows if row[0] == name]) for name in result["cases"][0]["ways"]}
    assert [(case["name"], case["dtype"]) for case in result["cases"]] == [
        ("demo", "fp32"), ("demo", "bf16"), ("llama3", "bf16"),
    ]  # fmt: skip
    for case in result["cases"]:
        assert case["logits_bytes"] == 128 * 64 * (4 if case["dtype"] == "fp32" else 2)
        for name, way in case["ways"].items():
            row = next(tables[name])
            if way["not_measured"]:
                assert row[1] == f"not measured: {way['not_measured']}"
                continue
            assert row[1:] == [
                "no" if name == "stock" else "yes",
                f"{way['median_ms']:.2f}",
                f"{way['median_ratio_to_fused']:.3f}",
                f"{way['resident_extra_bytes'] / MIB:.1f}",
                f"{way['resident_share_of_logits']:.1%}",
                f"{way['allocated_extra_bytes'] / MIB:.1f}",
                f"{way['allocated_share_of_logits']:.1%}",
                f"{way['gradient_errors']['hidden']:.1e}",
                f"{way['gradient_errors']['weight']:.1e}",
            ]
            assert way["allocated_share_of_logits"] == way["allocated_extra_bytes"] / case["logits_bytes"]


@needs_linux
def test_our_own_ways_and_the_peers_are_all_there(run):
    result, _ = run
    for case in result["cases"]:
        assert list(case["ways"]) == ["fused", "fused, fp32 sum", "torch", "chunked", "stock", "plain", *PEERS]
        assert {name for name, way in case["ways"].items() if way["not_measured"]} == set(PEERS)
        for name, package in PEERS.items():
            reason = "needs a GPU" if importlib.util.find_spec(package) else "not installed"
            assert case["ways"][name]["not_measured"] == reason
        assert case["ways"]["fused"]["median_ratio_to_fused"] == 1


def small_case(fused_head, dtype="fp32", *, is_frozen=False):
    return fused_head.Case("small", 4096, 24, 96, dtype, rounds=1, is_frozen=is_frozen)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_all_ways_give_right_gradients(fused_head, dtype):
    errors, reasons = fused_head.gradient_errors(small_case(fused_head, dtype), fused_head.WAYS, "cpu")
    assert reasons.keys() == set(PEERS)
    assert len(errors) == 6
    eps = torch.finfo(fused_head.DTYPES[dtype]).eps
    for name, of_inputs in errors.items():
        assert of_inputs.keys() == {"hidden", "weight"}
        assert max(of_inputs.values()) < 8 * eps, name  # a sum over 16 chunks rounds by half an eps in each


def test_a_wrong_gradient_has_a_large_error(fused_head):
    def without_weights(head, labels, weights):
        return fused_head.plain(head, labels, (labels != fused_head.IGNORED).float())

    def without_ignored(head, labels, weights):
        return F.cross_entropy(F.linear(head.hidden, head.weight).flatten(0, 1), labels.flatten().clamp(min=0))

    ways = {
        "weights": fused_head.Way(without_weights),
        "right": fused_head.Way(without_weights, is_weighted=False),
        "ignored": fused_head.Way(without_ignored, is_weighted=False),
    }
    errors, _ = fused_head.gradient_errors(small_case(fused_head), ways, "cpu")
    assert min(*errors["weights"].values(), *errors["ignored"].values()) > 0.1
    assert max(errors["right"].values()) < 1e-6


def test_a_frozen_head_has_no_gradient_to_return(fused_head):
    case = small_case(fused_head, is_frozen=True)
    errors, _ = fused_head.gradient_errors(case, {"fused": fused_head.WAYS["fused"]}, "cpu")
    assert errors["fused"].keys() == {"hidden"}
    assert fused_head.returned_gradient_bytes(fused_head.make_inputs(case, "cpu")) == 4096 * 24 * 4


def test_inputs_are_as_described(fused_head):
    head, labels, weights = fused_head.make_inputs(small_case(fused_head), "cpu")
    ignored = labels == fused_head.IGNORED
    assert ignored.sum() == 4096 // 8
    assert not weights[ignored].any()
    assert (weights[~ignored] > 0).any()
    assert float(weights[~ignored].mean()) == pytest.approx(1, rel=1e-5)
    assert float((head.hidden @ head.weight.T).detach().std()) == pytest.approx(2, rel=0.1)


def test_the_allocators_record_counts_what_is_there_at_one_time(fused_head):
    def one_after_another():
        for _ in range(3):
            torch.empty(MIB, dtype=torch.uint8)

    def together():
        return [torch.empty(MIB, dtype=torch.uint8) for _ in range(3)]

    assert fused_head.peak_allocated(one_after_another) == MIB
    assert fused_head.peak_allocated(together) == 3 * MIB


@needs_linux
def test_returned_gradients_are_not_extra_memory(fused_head):
    inputs = fused_head.make_inputs(fused_head.Case("wide", 4096, 2048, 64, "fp32", rounds=1), "cpu")
    inputs.head.weight.requires_grad_(False)
    returned = fused_head.returned_gradient_bytes(inputs)
    assert returned == 32 * MIB

    def turn():
        inputs.clear_gradients()
        scratch = torch.ones(16 * MIB, dtype=torch.uint8)
        inputs.head.hidden.grad = torch.ones_like(inputs.head.hidden)
        del scratch

    turn()  # a gradient of before must not count as memory that was there
    extra = fused_head.extra_memory(turn, inputs, "cpu", rounds=3)
    assert extra["allocated"] == 16 * MIB
    assert extra["resident"] == pytest.approx(16 * MIB, abs=MIB)


@needs_linux
def test_memory_that_was_freed_but_kept_counts_where_it_is_taken_again(imported):
    def blocks():
        return [
            torch.ones(2**13) for _ in range(1024)
        ]  # 32 KiB each come from the heap, not from mappings of their own

    measuring = imported("measuring")
    held = blocks()
    pin = torch.ones(2**13)  # keeps the end of the heap where it is
    del held
    with measuring.peak_memory("cpu") as peak:
        held = blocks()
    assert peak.num_bytes > 24 * MIB
    assert len(held) == 1024
    assert pin.all()


def test_a_way_that_does_not_fit_is_not_measured(fused_head, monkeypatch):
    monkeypatch.setattr(fused_head, "available_memory", lambda _: 5 * 4096 * 96 * 4 - 1)
    ways = {name: fused_head.WAYS[name] for name in ("fused", "plain")}
    result = fused_head.measure(small_case(fused_head), ways, "cpu")["ways"]
    assert result["fused"]["not_measured"] is None
    assert result["plain"] == {"not_measured": "may need 7.50 MiB of 7.50 MiB"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], [("demo", 2048, 4096, "fp32", 20, False), ("demo", 2048, 4096, "bf16", 20, False)]),
        (["--dtype", "bf16", "--rounds", "2"], [("demo", 2048, 4096, "bf16", 2, False)]),
        (
            ["--case", "tinyllama", "llama3", "--tokens", "64", "--frozen-head"],
            [("tinyllama", 64, 32_000, "bf16", 3, True), ("llama3", 64, 128_256, "bf16", 1, True)],
        ),
        (["--case", "llama3", "--device", "cuda"], [("llama3", 4096, 128_256, "bf16", 30, False)]),
    ],
)
def test_what_the_command_line_sets_takes_the_place_of_the_cases_own(fused_head, monkeypatch, arguments, expected):
    monkeypatch.setattr(sys, "argv", ["fused_head.py", *arguments])
    cases = fused_head.chosen_cases(fused_head.parse_arguments())
    fields = ("name", "tokens", "vocab_size", "dtype", "rounds", "is_frozen")
    assert [tuple(getattr(case, field) for field in fields) for case in cases] == expected


def test_tokens_that_rows_and_chunks_do_not_divide_are_refused(fused_head, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fused_head.py", "--tokens", "100"])
    with pytest.raises(SystemExit):
        fused_head.parse_arguments()
    assert "--tokens is 100: give a multiple of 64" in capsys.readouterr().err


@pytest.mark.parametrize("num_rounds", [6, 31, 100])
def test_the_interval_of_a_median_covers_it_in_95_cases_of_100(imported, num_rounds):
    """As many ratios lie below the median as coins show heads, so that binomials tell where an interval must reach."""
    low, high = imported("measuring").median_ratio_interval(
        [float(index) for index in range(num_rounds)], [1.0] * num_rounds
    )
    below, above = int(low), num_rounds - 1 - int(high)
    assert below == above

    def coverage(outside):
        return 1 - 2 * sum(comb(num_rounds, heads) for heads in range(outside + 1)) / 2**num_rounds

    assert coverage(below) >= 0.95 > coverage(below + 1)


def test_five_rounds_are_too_few_for_an_interval(imported):
    assert imported("measuring").median_ratio_interval([1.0] * 5, [2.0] * 5) is None
