"""The table of targets judges each row by what the scripts wrote, and says why a row was not measured."""

import functools
import importlib
import json
import operator
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "targets.py"
NUM_LINES = 15  # 7 rows on both devices, the peers on a GPU alone

STEP_SETTINGS = {"batch_size": "8", "seq_len": "256", "overrides": "[]"}
HEAD_SETTINGS = dict.fromkeys(("tokens", "hidden", "vocab_size", "dtype"), "None") | {
    "frozen_head": "False",
    "quick": "False",
}
STEPS = {
    "stock CE": {"peak_mib": 700.0},
    "our CE": {"median_ratio_to_stock": 1.0, "ratio_to_stock_interval": [0.9981, 1.0019], "peak_mib": 700.0},
}
WEIGHTS = {
    "settings": {"quick": "False"},
    "slope": 1.1,
    "last_slope": 1.1,
    "window_ratio": 1.1,
    "bytes_per_token": 8.0,
    "authors": {
        "ratio": 20.0,
        "large_cases": [
            {"batch_size": 8, "seq_len": 4096, "vocab_size": 32_000, "our_median_ms": 3.0, "ms": 9000.0},
            {"batch_size": 8, "seq_len": 4096, "vocab_size": 128_256, "our_median_ms": 4.0, "ms": None},
        ],
    },
}
PEER = {"not_measured": None, "median_ratio_of_fused": 1.05, "gradient_errors": {"hidden": 0.003, "weight": 0.06}}
# Each figure is its limit itself.
AT_THE_LIMIT = {
    "training_step_cpu": {
        "settings": {"config": "demo/llama_3M_full_memorization", "dtype": "fp32", **STEP_SETTINGS},
        "steps": STEPS | {"TF-IDF": {"median_ratio_to_our_ce": 1.005, "ratio_to_our_ce_interval": [1.0031, 1.0069]}},
    },
    "training_step_cuda": {
        "settings": {"config": "tinyllama/1.1B_full_memorization", "dtype": "bf16", **STEP_SETTINGS},
        "steps": STEPS | {"TF-IDF": {"median_ratio_to_our_ce": 1.002, "ratio_to_our_ce_interval": None}},
    },
    "weights_cpu": WEIGHTS | {"base_case": {"median_ms": 0.2, "cuda_graph": None}},
    "weights_cuda": WEIGHTS
    | {"base_case": {"median_ms": 0.11, "cuda_graph": {"median_ms": 0.06, "failure": None}}},
    "fused_head_cpu": {
        "settings": HEAD_SETTINGS,
        "cases": [
            {
                "name": "llama3",
                "ways": {
                    "fused": {
                        "not_measured": None,
                        "resident_share_of_logits": 0.1,
                        "resident_extra_bytes": 2**20,
                        "allocated_share_of_logits": 0.2,
                    },
                },
            }
        ],
    },
    "fused_head_cuda": {
        "settings": HEAD_SETTINGS,
        "cases": [
            {"name": "demo", "ways": {}},
            {
                "name": "llama3",
                "ways": {
                    "fused": {
                        "not_measured": None,
                        "allocated_share_of_logits": 0.1,
                        "allocated_extra_bytes": 2**20,
                    },
                    "Liger": PEER,
                    "cut-cross-entropy": PEER | {"median_ratio_of_fused": 0.5},
                },
            },
        ],
    },
    "probe_cpu": {"settings": {"num_passages": "100"}, "median_throughput_ratio": 5.0},
    "probe_cuda": {"settings": {"num_passages": "100"}, "median_throughput_ratio": 20.0},
}  # fmt: skip

CPU_FUSED = ("cases", 0, "ways", "fused")
CUDA_WAYS = ("cases", 1, "ways")
BEYOND = [
    ("tfidf", "training_step_cpu", ("steps", "TF-IDF", "median_ratio_to_our_ce"), 1.0051),
    ("tfidf", "training_step_cuda", ("steps", "TF-IDF", "median_ratio_to_our_ce"), 1.0021),
    *(
        (row, f"{script}_{device}", keys, value)
        for device in ("cpu", "cuda")
        for row, script, keys, value in [
            ("stock", "training_step", ("steps", "our CE", "median_ratio_to_stock"), 1.0001),
            ("stock", "training_step", ("steps", "our CE", "peak_mib"), 700.1),
            ("sweep", "weights", ("slope",), 1.101),
            ("sweep", "weights", ("last_slope",), 1.101),
            ("sweep", "weights", ("window_ratio",), 1.101),
            ("sweep", "weights", ("bytes_per_token",), 8.01),
            ("authors", "weights", ("authors", "ratio"), 19.9),
        ]
    ),
    ("weights", "weights_cpu", ("base_case", "median_ms"), 0.2001),
    ("weights", "weights_cuda", ("base_case", "cuda_graph", "median_ms"), 0.0601),
    ("weights", "weights_cuda", ("base_case", "cuda_graph", "failure"), "no capture"),
    ("memory", "fused_head_cpu", (*CPU_FUSED, "resident_share_of_logits"), 0.1001),
    ("memory", "fused_head_cuda", (*CUDA_WAYS, "fused", "allocated_share_of_logits"), 0.1001),
    ("peers", "fused_head_cuda", (*CUDA_WAYS, "Liger", "median_ratio_of_fused"), 1.0501),
    ("peers", "fused_head_cuda", (*CUDA_WAYS, "cut-cross-entropy", "median_ratio_of_fused"), 1.0501),
    ("probe", "probe_cpu", ("median_throughput_ratio",), 4.99),
    ("probe", "probe_cuda", ("median_throughput_ratio",), 19.9),
]
MISSING = [
    ("tfidf", "training_step_cpu", ("settings", "batch_size"), "4", "batch_size is 4 and not 8"),
    ("tfidf", "training_step_cuda", ("settings", "dtype"), "fp32", "dtype is fp32 and not bf16"),
    ("weights", "weights_cpu", ("settings", "quick"), "True", "quick is True and not False"),
    ("weights", "weights_cuda", ("settings", "device"), "cpu", "device is cpu and not cuda"),
    ("authors", "weights_cpu", ("authors", "large_cases", 1, "ms"), 80_000.0, "theirs 80,000 ms"),
    ("memory", "fused_head_cpu", ("settings", "vocab_size"), "32000", "vocab_size is 32000 and not None"),
    ("memory", "fused_head_cpu", (*CPU_FUSED, "not_measured"), "may need 9 GiB", "may need 9 GiB"),
    ("memory", "fused_head_cpu", ("cases",), [], "not run"),
    ("probe", "probe_cpu", ("settings", "num_passages"), "3", "num_passages is 3 and not 100"),
]  # fmt: skip


@pytest.fixture
def targets(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module("targets")


@pytest.fixture
def judge(targets, monkeypatch, tmp_path, capsys):
    """Make a folder of results, with changes; gives the table's lines by row and device, and what was printed."""

    def judged(changes=(), without=()):
        results = json.loads(json.dumps(AT_THE_LIMIT))
        for name, result in results.items():
            result["settings"] = {"device": name.rpartition("_")[2]} | result["settings"]
            result.update(date="2026-01-02", hardware="a machine", versions={"torch": "2.13.0"})
        for name, keys, value in changes:
            functools.reduce(operator.getitem, keys[:-1], results[name])[keys[-1]] = value
        for name in results.keys() - set(without):
            (tmp_path / f"{name}.json").write_text(json.dumps(results[name]))
        command = ["targets.py", "--from", str(tmp_path), "--output-dir", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", command)
        targets.main()
        lines = json.loads((tmp_path / "targets.json").read_text())["lines"]
        names = {row.what: name for name, row in targets.ROWS.items()}
        return {(names[line["what"]], line["device"]): line for line in lines}, capsys.readouterr().out

    return judged


def verdicts(lines):
    return {key: line["verdict"] for key, line in lines.items()}


def test_every_figure_at_its_limit_meets_its_target(judge):
    lines, printed = judge()
    assert len(lines) == NUM_LINES
    assert set(verdicts(lines).values()) == {"met"}
    assert printed.count("| met |") == NUM_LINES
    assert "- weights_cuda: 2026-01-02, a machine, torch 2.13.0" in printed


@pytest.mark.parametrize(("row", "name", "keys", "value"), BEYOND)
def test_a_figure_beyond_its_limit_fails_its_row_alone(judge, row, name, keys, value):
    lines, printed = judge([(name, keys, value)])
    device = name.rpartition("_")[2]
    assert [key for key, verdict in verdicts(lines).items() if verdict != "met"] == [(row, device)]
    assert lines[row, device]["verdict"] == "not met"
    assert printed.count("| not met |") == 1


@pytest.mark.parametrize(("row", "name", "keys", "value", "reason"), MISSING)
def test_a_row_that_the_result_does_not_speak_of_is_not_measured(judge, row, name, keys, value, reason):
    lines, printed = judge([(name, keys, value)])
    line = lines[row, name.rpartition("_")[2]]
    assert line["verdict"] == "not measured"
    assert reason in line["reason"]
    assert f"| not measured ({line['reason']}) |" in printed


def test_a_figure_not_met_counts_though_another_of_its_row_was_not_measured(judge):
    everything_fits = ("weights_cpu", ("authors", "large_cases", 1, "ms"), 80_000.0)
    lines, _ = judge([everything_fits, ("weights_cpu", ("authors", "ratio"), 19.0)])
    assert lines["authors", "cpu"]["verdict"] == "not met"


def test_a_peer_with_wrong_gradients_is_no_measure(judge):
    wrong = ("fused_head_cuda", (*CUDA_WAYS, "Liger", "gradient_errors", "weight"), 0.9)
    slower = ("fused_head_cuda", (*CUDA_WAYS, "Liger", "median_ratio_of_fused"), 3.0)
    lines, _ = judge([wrong, slower])
    assert lines["peers", "cuda"]["verdict"] == "met"
    assert "Liger: wrong gradients, error 9.0e-01" in lines["peers", "cuda"]["measured"]


def test_without_peers_there_is_nothing_to_compare_with(judge):
    reasons = {"Liger": "not installed", "cut-cross-entropy": "needs a GPU"}
    lines, _ = judge([("fused_head_cuda", (*CUDA_WAYS, name), {"not_measured": why}) for name, why in reasons.items()])
    assert lines["peers", "cuda"]["verdict"] == "not measured"
    assert lines["peers", "cuda"]["reason"] == "Liger: not installed, cut-cross-entropy: needs a GPU"


def test_rows_without_a_result_stay_in_the_table(judge, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lines, _ = judge(without=[name for name in AT_THE_LIMIT if name.endswith("cuda")] + ["probe_cpu"])
    assert len(lines) == NUM_LINES
    for (row, device), line in lines.items():
        missing = "no GPU" if device == "cuda" else "not run" if row == "probe" else None
        assert (line["verdict"], line["reason"]) == ("met" if missing is None else "not measured", missing)


def test_the_interval_stands_beside_the_median(judge):
    lines, printed = judge()
    assert lines["tfidf", "cpu"]["measured"] == "time 1.0050 times (95 % interval 1.0031 to 1.0069)"
    assert lines["tfidf", "cuda"]["measured"] == "time 1.0020 times"
    assert lines["tfidf", "cpu"]["measured"] in printed


def test_a_script_that_fails_leaves_no_verdict_and_is_told(targets, monkeypatch, tmp_path, capsys):
    (tmp_path / "probe_cpu.json").write_text("an older result, which must not be read")
    monkeypatch.setattr(targets.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    command = ["targets.py", "--only", "probe", "--device", "cpu", "--output-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="error: failed: probe_cpu"):
        targets.main()
    assert "| not measured (probe.py failed) |" in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_told(targets, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["targets.py", "--from", str(tmp_path / "none")])
    with pytest.raises(SystemExit):
        targets.main()
    assert "none: there is no such folder" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_the_command_runs_the_scripts_and_reads_what_they_write(tmp_path):
    """All but the weights and the probe, whose own tests check what is read of them."""
    rows = ["tfidf", "stock", "memory", "peers"]
    finished = subprocess.run(
        [sys.executable, SCRIPT, "--quick", "--device", "cpu", "--output-dir", tmp_path, "--only", *rows],
        capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    lines = json.loads((tmp_path / "targets.json").read_text())["lines"]
    assert [line["device"] for line in lines].count("cpu") == len(rows) - 1
    for line in lines:
        assert line["verdict"] == "not measured"
        if line["device"] == "cpu":  # the sizes are not those of the targets, but everything was read
            assert " and not " in line["reason"]
            assert any(character.isdigit() for character in line["measured"])
    for suffix in ("json", "md"):
        names = {file.stem for file in tmp_path.glob(f"*.{suffix}")}
        assert names == {"training_step_cpu", "fused_head_cpu", "targets"}
    assert (tmp_path / "targets.md").read_text() == finished.stdout
