"""Rung 1 of ``gpu.py``: the scripts that measure time and memory, each with its own table."""

import contextlib
import io
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from gpu_steps import NotPossible, Outcome, Setting  # type: ignore[import-not-found]

# Milliseconds of a training step that the paper gives for TF-IDF and for CE.
_PAPER = "262 / 256 = 1.023"


def script(setting: Setting, name: str, arguments: list[str]) -> tuple[dict[str, Any], str]:
    """Run the main function of a script in this process; return its record and its table."""
    file = setting.work / f"{name}_{len(arguments)}.json"
    printed = io.StringIO()
    before, sys.argv = sys.argv, [name, *arguments, "--device", setting.device, "--output", str(file)]
    try:
        with contextlib.redirect_stdout(printed):
            import_module(name).main()
    finally:
        sys.argv = before
    return json.loads(Path(file).read_text(encoding="utf-8")), printed.getvalue()


def training_step(setting: Setting, method: str) -> Outcome:
    """A step of TinyLlama 1.1B with random weights, 8 x 256 tokens in bf16, under all objectives."""
    arguments = ["--objectives", "--config", f"tinyllama/1.1B_{method}_memorization", "--dtype", "bf16"]
    if setting.tiny:
        arguments = ["--objectives", "--config", f"demo/llama_650K_{method}_memorization", "--rounds", "2"]
        arguments += ["--batch-size", "2", "--seq-len", "32", "model.num_layers=1"]
    record, table = script(setting, "training_step", arguments)
    steps = record["steps"]
    tfidf = steps["TF-IDF"]
    text = (
        f"TF-IDF / our CE: {tfidf['median_ratio_to_our_ce']:.4f}, 95 % interval {tfidf['ratio_to_our_ce_interval']}; "
        f"in the paper {_PAPER}. Weights alone: {steps['weights alone']['median_ms']:.3f} ms."
    )
    return Outcome(results=record, markdown=f"{table}\n{text}")


def weights(setting: Setting, _: str) -> Outcome:
    """The weights alone, over sizes and windows, and the authors' way."""
    record, table = script(setting, "weights", ["--quick", "--rounds", "3"] if setting.tiny else [])
    return Outcome(results=record, markdown=table)


def fused_head(setting: Setting, case: str) -> Outcome:
    """Time and memory of the loss in every way that is there, peers included."""
    arguments = ["--case", case]
    record, table = script(setting, "fused_head", [*arguments, "--quick"] if setting.tiny else arguments)
    ways = record["cases"][0]["ways"]
    if all(way["not_measured"] for way in ways.values()):
        raise NotPossible("; ".join(f"{name}: {way['not_measured']}" for name, way in ways.items()))
    return Outcome(results=record, markdown=table)
