"""The scripts of examples/ as they stand, with arguments left out."""

import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

import tfidf_tune.data

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The one that each script trains, which takes seconds."""
    return tfidf_tune.data.train_embedded_tokenizer(
        tmp_path_factory.mktemp("tokenizer"), vocab_size=1024
    )


@pytest.fixture
def run_example(tokenizer, monkeypatch, tmp_path, capsys):
    """Run a script in an empty folder; return what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")

    def copied(folder, vocab_size):
        assert vocab_size == 1024
        return shutil.copytree(tokenizer, folder, dirs_exist_ok=True)

    monkeypatch.setattr(tfidf_tune.data, "train_embedded_tokenizer", copied)

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_every_example_is_tested():
    tested = set(re.findall(r'run_example\("(\w+\.py)"', Path(__file__).read_text()))
    assert {file.name for file in EXAMPLES.glob("*.py")} == tested


def test_own_loop_learns_under_both_losses(run_example):
    printed = run_example("own_loop.py")
    rows = {
        row[0]: [float(value) for value in row[1:]]
        for row in map(str.split, printed.splitlines()[1:])
    }
    assert [*rows] == ["CrossEntropyLoss", "TFIDFCrossEntropyLoss"]
    for first, last, mean, _ in rows.values():
        assert last < first - 0.5
        assert mean == 1
    assert rows["CrossEntropyLoss"][0] == rows["TFIDFCrossEntropyLoss"][0]
    assert rows["CrossEntropyLoss"][3] == 0
    assert rows["TFIDFCrossEntropyLoss"][3] > 0.1


def test_the_monitor_sees_canaries_come_and_controls_stay(run_example):
    printed = run_example("trainer_with_monitor.py")
    rows = re.findall(r"^ *(\d+) +([\d.]+) +([\d.]+)$", printed, re.MULTILINE)
    steps, canaries, controls = (
        [float(value) for value in column] for column in zip(*rows, strict=True)
    )
    assert steps == [0, 20, 40, 60]
    assert canaries[0] < 4
    assert canaries[-1] > 16
    assert max(controls) < 4
    assert "'weight_mean': '1'" in printed


def test_the_audit_tells_trained_text_from_unseen_text(run_example, tmp_path):
    printed = run_example("audit_from_python.py")
    assert "of 12 passages are recited further than unseen text" in printed
    assert "Limits that are exceeded: recited." in printed
    summary = json.loads((tmp_path / "runs/example_audit/report/audit.json").read_text())
    assert summary["recites_targets_more"] is True
    assert (summary["num_targets"], summary["num_controls"]) == (12, 12)
    recited = {
        kind: [one["lms"] for one in summary["passages"] if one["kind"] == kind]
        for kind in ("target", "control")
    }
    assert max(recited["target"]) == 32
    assert max(recited["control"]) < 8
