"""The probe's benchmark runs and reports what it says; how fast is not a matter for tests."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "probe.py"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    output = tmp_path_factory.mktemp("probe") / "out.json"
    finished = subprocess.run(
        [sys.executable, SCRIPT, "--rounds", "1", "--num-passages", "3", "--one-in", "2", "--output", output],
        capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    return json.loads(output.read_text()), finished.stdout


def test_the_memorization_task_is_measured_against_the_probe(measured):
    result, printed = measured
    assert result["continuations"] == 9
    assert result["median_ratio_to_probe"] == result["median_s"]["harness"] / result["median_s"]["probe"]
    assert f"ratio {result['median_ratio_to_probe']:.3f}" in printed


def test_the_batched_probe_is_measured_against_one_sequence_at_a_time(measured):
    result, printed = measured
    assert result["continuations_one_at_a_time"] == 6
    per_second = result["continuations_per_s"]
    assert result["median_throughput_ratio"] == pytest.approx(per_second["batched"] / per_second["one at a time"])
    [batched, one, num_one, ratio] = re.search(
        r"batched ([\d.]+), one at a time ([\d.]+) \((\d+) continuations\), ratio ([\d.]+)", printed
    ).groups()
    assert [batched, one] == [f"{per_second[name]:.2f}" for name in ("batched", "one at a time")]
    assert (int(num_one), ratio) == (6, f"{result['median_throughput_ratio']:.2f}")
