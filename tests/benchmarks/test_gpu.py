"""The ladder for a GPU, at tiny size on this CPU: records, what is missing, what fails, interruption and resuming."""

import json
import signal
import sys
import time
from dataclasses import replace

import gpu
import gpu_checks
import gpu_steps
import pytest
import torch
from fork_server import CONTEXT
from gpu_steps import Check, Outcome, Step

# Found by its name in the process of the step.
STEPS = (
    Step("weights", 0, "gpu_checks:weights"),
    Step("fails", 0, "test_gpu:fails"),
    Step("cuda graph", 0, "gpu_checks:cuda_graph"),
    Step("dies", 0, "test_gpu:dies"),
    Step("loss, quick", 1, "gpu_timings:fused_head", "demo"),
    Step("slow", 2, "test_gpu:slow", seconds=0, resumes=True),
)


def fails(setting, argument):
    return Outcome([Check("a fine one", 1, 2), Check("a bad one", float("nan"), 1)])


def dies(setting, argument):
    signal.raise_signal(signal.SIGKILL)


def slow(setting, argument):
    """Take long the first time."""
    marker = setting.work / "begun"
    if not marker.exists():
        marker.touch()
        time.sleep(3600)
    return Outcome(markdown="| a | table |")


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "STEPS", STEPS)
    monkeypatch.setattr(gpu, "context", lambda: CONTEXT)
    monkeypatch.setattr(gpu, "_LEAST_SECONDS", 0)
    monkeypatch.setattr(gpu.signal, "signal", lambda number, handler: None)  # it would outlast the test

    def run(*arguments, minutes=9.0):
        given = ["--device", "cpu", "--tiny", "--output", "records", "--minutes", str(minutes), *arguments]
        monkeypatch.setattr(sys, "argv", ["gpu.py", *given])
        return gpu.main(), capsys.readouterr().out

    return run


def test_steps_are_recorded_and_continued(command, tmp_path, monkeypatch):
    """All steps run although one fails, one dies and one is not possible; what passed is not repeated."""
    run, join, marker, late = gpu.run, CONTEXT.Process.join, tmp_path / "runs" / "records" / "begun", 12345.0

    def run_out_of_time_once(step, setting, folder, seconds):
        run(step, setting, folder, late if step.resumes and not marker.exists() else seconds)

    def join_until_begun(process, seconds=None):
        while seconds == late and not marker.exists() and process.is_alive():
            join(process, 0.1)
        if seconds != late:
            join(process, seconds)

    monkeypatch.setattr(gpu, "run", run_out_of_time_once)
    monkeypatch.setattr(CONTEXT.Process, "join", join_until_begun)
    code, out = command()
    records = {file.stem: json.loads(file.read_text()) for file in (tmp_path / "records").glob("*.json")}
    assert code == 1
    assert {name: record["status"] for name, record in records.items()} == {
        "weights": "passed", "fails": "failed", "cuda_graph": "not possible", "dies": "failed", "loss_quick": "passed",
    }  # fmt: skip
    assert records["fails"]["reason"] == "a bad one is nan, above 1"
    assert "exit code -9; log: " in records["dies"]["reason"]
    assert records["cuda_graph"]["reason"] == "a CUDA graph needs a GPU"
    assert len(records["weights"]["checks"]) > 40
    ways = records["loss_quick"]["results"]["cases"][0]["ways"]
    assert ways["fused"]["median_ms"] > 0
    assert "Left: slow. The same command continues." in out

    passed = (tmp_path / "records" / "weights.json").stat().st_mtime_ns
    code, out = command()

    assert code == 1
    assert (tmp_path / "records" / "weights.json").stat().st_mtime_ns == passed
    assert [line for line in out.splitlines() if line.endswith(": running")] == [
        f"{name}: running" for name in ("slow", "fails", "cuda graph", "dies")
    ]
    page = (tmp_path / "records" / "page.md").read_text()
    assert "| fails | failed |" in page
    assert "### slow\n\n| a | table |" in page
    assert "way" in page.partition("### loss, quick")[2]


def test_without_time_nothing_begins_and_with_other_settings_nothing_is_mixed(command, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "STEPS", (replace(STEPS[0], seconds=500),))
    code, out = command(minutes=1)
    assert code == 0
    assert "1 minutes are too few for any of them: give --minutes 9.0 or more" in out
    (tmp_path / "records" / "weights.json").write_text(json.dumps({"device": "cuda", "tiny": False}))
    with pytest.raises(SystemExit, match="has records of device cuda, tiny False: use another --output"):
        command()


def test_missing_packages_are_named_with_the_way_to_carry_them(monkeypatch):
    monkeypatch.setattr(gpu, "is_installed", lambda name: name not in ("torchtune", "submitit", "torch"))
    with pytest.raises(SystemExit, match=r"lacks submitit, torch, torchtune\. .*(?s:.*)--no-index --find-links wheels"):
        gpu.require_packages()


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_wrong_loss_is_noticed(dtype, tmp_path, monkeypatch):
    setting = gpu_steps.Setting("cpu", True, tmp_path)
    assert all(check.passed for check in gpu_checks.losses(setting, dtype).checks)
    wrong = gpu_checks.WAYS["fused"].compute
    half = replace(gpu_checks.WAYS["fused"], compute=lambda *inputs: wrong(*inputs) * 1.05)
    monkeypatch.setitem(gpu_checks.WAYS, "fused", half)
    failed = {check.name for check in gpu_checks.losses(setting, dtype).checks if not check.passed}
    assert failed == {f"fused: error of the gradient of {leaf}" for leaf in ("hidden", "weight")}


@pytest.mark.parametrize("step", [gpu_checks.weights, gpu_checks.compiled])
def test_repetition_weights_are_compared_where_text_is_repeated(step, tmp_path, monkeypatch):
    """Both forms meet copies; a form that meets none is noticed."""
    names = ("repetition", "repetition, short contexts")
    makes = {name: gpu_checks._WEIGHTINGS[name] for name in names}
    blind = {"blind": lambda: makes["repetition"](min_length=10**6)}
    monkeypatch.setattr(gpu_checks, "_WEIGHTINGS", makes | blind)
    monkeypatch.setattr(gpu_checks, "_COMPILED", (*names, "blind"))
    failed = [check.name for check in step(gpu_steps.Setting("cpu", True, tmp_path), "").checks if not check.passed]
    assert failed == ["blind: all labels of every mini-batch weigh the same, so nothing was compared"]


def test_other_weights_and_states_are_noticed():
    expected = torch.tensor([0.0, 1.0, 1.0])
    for found in (torch.tensor([0.0, 1.0, 1.001]), torch.tensor([1e-9, 1.0, 1.0]), torch.tensor([0.0, 1.0, torch.nan])):
        assert not all(check.passed for check in gpu_checks.same_weights("x", [(expected, found)]))
    assert all(check.passed for check in gpu_checks.same_weights("x", [(expected, expected)]))
    state = {"a": torch.arange(3)}
    for other in ({"a": torch.arange(3) + 1}, {}, {**state, "b": expected}):
        assert not all(check.passed for check in gpu_checks.same_state("x", state, other))
