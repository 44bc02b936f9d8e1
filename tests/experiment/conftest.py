"""An experiment on the tiny Llama, and its run with stand-ins for the processes that train and evaluate."""

import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from tfidf_tune.experiment import _jobs, _run, _runner, load_experiment, run_experiment

STUBS = Path(__file__).with_name("experiment_stubs.py")


@pytest.fixture
def experiment_file(tmp_path, recipe_config):
    """Make the file of an experiment: ``experiment_file(seeds=[0, 1])``; ``lora=True`` for an adapter."""

    def make(*, lora=False, **keys):
        OmegaConf.save(recipe_config(lora=lora), tmp_path / "training.yaml")
        content = {
            "output_dir": str(tmp_path / "out"),
            "models": {
                "Tiny (LoRA)" if lora else "Tiny (full)": {
                    "recipe": "lora_finetune" if lora else "full_finetune",
                    "config": str(tmp_path / "training.yaml"),
                }
            },
            "objectives": {
                "CE": {"_component_": "tfidf_tune.loss.CrossEntropyLoss"},
                "TF-IDF": {"_component_": "tfidf_tune.loss.TFIDFCrossEntropyLoss"},
            },
            "seeds": [0],
            "milestones": [50, 100],
            "tasks": ["tfidf_memorization_prefixes"],
            "eval": {"metadata": {"prefix_lengths": [8], "max_new_tokens": 16}},
        }
        file = tmp_path / "experiment.yaml"
        file.write_text(yaml.safe_dump(content | keys, sort_keys=False))
        return str(file)

    return make


@pytest.fixture
def stubbed(tmp_path, monkeypatch):
    """Run experiments with stand-ins: ``stubbed(file, "seeds=[0,1]")`` gives the failures and what was done."""
    folder = tmp_path / "stubs"
    folder.mkdir()
    monkeypatch.setenv("STUBS", str(folder))
    monkeypatch.setattr(_runner, "TUNE", (sys.executable, str(STUBS), "recipe"))
    monkeypatch.setattr(_jobs, "WORKER", (sys.executable, str(STUBS), "worker"))
    monkeypatch.setattr(_run, "_report", lambda runs, experiment, folder: None)  # there are no results to compare

    def run(file, *overrides, **options):
        journal = folder / "journal"
        journal.unlink(missing_ok=True)
        failures = run_experiment(load_experiment(file, overrides), **options)
        return failures, journal.read_text().splitlines() if journal.exists() else []

    run.folder = folder
    return run
