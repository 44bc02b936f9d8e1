"""The benchmark runs and reports what it says; how fast is not a matter for tests."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tfidf_tune import loss

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "training_step.py"


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_the_training_step_is_measured_for_every_loss(tmp_path):
    finished = subprocess.run(
        [
            sys.executable, SCRIPT, "--objectives", "--rounds", "2", "--batch-size", "2", "--seq-len", "32",
            "--output", tmp_path / "out.json", "model.num_layers=1",
            "model.embed_dim=24", "model.num_heads=2", "model.num_kv_heads=2",
            "model.vocab_size=128",
        ],
        capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip

    assert finished.returncode == 0, finished.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    first, last = ["stock CE", "our CE, chunked", "our CE", "TF-IDF"], "weights alone"
    others = ["Goldfish", "token dropping", "MiLe", "focal", "power law", "repetition", "Goldfish and TF-IDF"]
    assert list(result["steps"]) == [*first, *others, last]
    assert len(others) + 2 == sum(
        name.endswith("CrossEntropyLoss") and name != "WeightedCrossEntropyLoss" for name in vars(loss)
    )
    assert result["steps"]["stock CE"]["median_ratio_to_stock"] == 1
    assert result["steps"]["our CE"]["median_ratio_to_our_ce"] == 1
    for name, row in result["steps"].items():
        assert re.search(rf"^\| {name} +\| +{row['median_ms']:.2f} \|", finished.stdout, re.MULTILINE)
        assert row["peak_mib"] >= 0
