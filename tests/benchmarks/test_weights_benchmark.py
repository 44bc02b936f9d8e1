"""The benchmark of weights alone reports what it measured, and its baseline computes the weights that ours does."""

import importlib
import json
import math
import os
import statistics
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from label_batches import WEIGHT_RTOL, random_stream

from tfidf_tune.weighting import TFIDFWeighting

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def imported(monkeypatch):
    """Import a module of the benchmarks by its name."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What the script printed, wrote and drew, with small sizes, and the lines of the targets that are read from it."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("peak memory is read from Linux's /proc")
    folder = tmp_path_factory.mktemp("weights")
    rows = ["weights", "sweep", "authors"]
    finished = subprocess.run(
        [
            *(sys.executable, BENCHMARKS / "targets.py", "--quick", "--device", "cpu"),
            *("--output-dir", folder, "--only", *rows),
        ],
        capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    files = {file.name: file for file in folder.iterdir()}
    assert files.keys() == {f"{name}.{suffix}" for name in ("weights_cpu", "targets") for suffix in ("json", "md")} | {
        "weights_cpu.png"
    }
    result, targets = (json.loads(files[f"{name}.json"].read_text()) for name in ("weights_cpu", "targets"))
    return files["weights_cpu.md"].read_text(), result, files["weights_cpu.png"], targets["lines"]


def table(printed, first_cell):
    """The rows of the Markdown table whose header begins with the cell."""
    lines = iter(printed.splitlines())
    next(line for line in lines if line.startswith(f"| {first_cell}"))
    next(lines)
    rows = []
    while (line := next(lines, "")).startswith("|"):
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_the_base_case_is_printed_as_it_is_written(run):
    printed, result, *_ = run
    base = result["base_case"]
    assert f"2 x 32, V = 100, window of 4 batches: {base['median_ms']:.3f} ms a batch, median of 3\n" in printed
    assert base["cuda_graph"] is None


def test_the_sweep_has_every_shape_with_every_window(run):
    printed, result, *_ = run
    sweep = result["sweep"]
    assert [(row["tokens"], row["num_batches"]) for row in sweep] == [
        (tokens, window) for tokens in (32, 64, 128, 256) for window in (2, 8)
    ]
    rows = table(printed, "batch")
    assert len(rows) == len(sweep)
    for cells, row in zip(rows, sweep, strict=True):
        assert cells[0] == f"{row['batch_size']} x {row['seq_len']}"
        assert row["tokens"] == row["batch_size"] * row["seq_len"]
        assert cells[3] == f"{row['median_ms']:.3f}"
        assert row["ns_per_token"] == pytest.approx(1e6 * row["median_ms"] / row["tokens"])
        assert cells[5] == f"{row['ratio_to_smallest_window']:.3f}"
        assert row["transient_bytes"] >= 0
    assert {row["ratio_to_smallest_window"] for row in sweep if row["num_batches"] == 2} == {1}


def test_the_summary_follows_from_the_sweep(run):
    printed, result, *_ = run
    longest = [row for row in result["sweep"] if row["num_batches"] == 8]
    tokens, times = ([math.log2(row[key]) for row in longest] for key in ("tokens", "median_ms"))
    for name, first in {"slope": 0, "last_slope": -3}.items():
        slope = statistics.covariance(tokens[first:], times[first:]) / statistics.variance(tokens[first:])
        assert result[name] == pytest.approx(slope)
    assert result["window_ratio"] == longest[-1]["ratio_to_smallest_window"]
    assert result["bytes_per_token"] == max(row["window_bytes_per_token"] for row in result["sweep"])
    assert f"to the power of {result['slope']:.3f}, of {result['last_slope']:.3f} over" in printed
    assert f"at most {result['bytes_per_token']:.3f} bytes a token" in printed


def test_the_windows_memory_is_counted_without_the_vocabularys_table(run, imported):
    _, result, *_ = run
    weights = imported("weights")
    drawn = weights.label_batches((2, 16), 1000, "cpu")  # the batches that the script drew
    weights.full_window(2, drawn, 1000)
    weighting = weights.full_window(8, drawn, 1000)
    for labels in islice(drawn, weights.WARMUP + 3):
        weighting(labels, vocab_size=1000)
    state_bytes = sum(tensor.nbytes for tensor in weighting.state_dict().values())
    row = next(row for row in result["sweep"] if (row["tokens"], row["num_batches"]) == (32, 8))
    assert row["vocabulary_bytes"] == 4 * 1000
    assert row["window_bytes_per_token"] == (state_bytes - 4 * 1000) / (8 * 32) > 0


def test_the_authors_way_is_compared_with_ours(run):
    printed, result, *_ = run
    authors = result["authors"]
    base, large = table(printed, " ")
    assert base[0] == "2 x 32, V = 100"
    assert base[1:4] == [
        f"{authors[key]:.{places}f}" for key, places in (("our_median_ms", 3), ("median_ms", 1), ("ratio", 1))
    ]
    assert authors["ratio"] > 0
    assert authors["largest_relative_difference"] <= 2 * WEIGHT_RTOL
    (case,) = authors["large_cases"]
    assert case["ratio"] == pytest.approx(case["ms"] / case["our_median_ms"])
    assert large[0] == "2 x 64, V = 100"
    assert large[3] == f"{case['ratio']:.1f}"
    documents, positions = 4 * 2, 64
    assert case["presence_bytes"] % (documents * positions) == 0
    assert 1 <= case["presence_bytes"] // (documents * positions) <= 100


def test_the_plot_is_drawn(run):
    _, _, plot, _ = run
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("seed", range(3))
def test_the_authors_way_gives_the_weights_that_ours_gives(imported, seed):
    """Over more batches than the window holds, of changing shapes, with ignored labels and empty rows."""
    stream = random_stream(seed, num_batches=8, max_rows=4, max_length=24, vocab_size=50)
    theirs, ours = imported("authors_way").AuthorsWay(num_batches=3), TFIDFWeighting(num_batches=3)
    varied = 0
    for labels in stream:
        weights = ours(labels, vocab_size=50)
        torch.testing.assert_close(theirs(labels), weights, rtol=2 * WEIGHT_RTOL, atol=0.0)
        varied += len(weights.unique()) > 2
    assert varied, "weights other than 0 and one value have to be compared"


def test_the_presence_tensor_is_counted_as_it_is_made(imported):
    authors_way = imported("authors_way").AuthorsWay(num_batches=2)
    for labels in ([[7, 7, 7]], [[1, 2, 3, 4]], [[1, 2, -100, -100], [5, 2, 2, 2]]):
        authors_way.window.append(torch.tensor(labels))
    # Three documents of 4 positions are left in the window, with the tokens 1 to 5.
    assert authors_way.presence_bytes() == 3 * 4 * 5


def test_a_presence_tensor_larger_than_the_memory_allowed_is_reported_and_harms_nothing(imported):
    weights = imported("weights")
    sizes = {"shape": (8, 4096), "vocab_size": 32_000, "num_batches": 16, "device": "cpu"}
    assert weights.authors_seconds(**sizes, memory=4 * 2**30) is None


def test_the_targets_read_what_it_writes(run):
    *_, lines = run
    on_cpu = [line for line in lines if line["device"] == "cpu"]
    assert len(on_cpu) == 3
    for line in on_cpu:  # the sizes are not those of the targets, but everything was read
        assert line["reason"] == "quick is True and not False"
        assert any(character.isdigit() for character in line["measured"])
