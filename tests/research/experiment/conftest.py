"""An experiment on the tiny Llama, and runs of it with fakes of training and evaluation."""

import os
import signal
import sys

import pytest
import yaml
from helpers.fakes import experiment_stubs
from helpers.processes.fork_jobs import CONTEXT
from omegaconf import OmegaConf

from research.experiment import load_experiment, run_experiment
from research.experiment.__main__ import main


@pytest.fixture
def experiment_file(tmp_path, recipe_config):
    """Make the file of an experiment: ``experiment_file(seeds=[0, 1])``; ``lora=True`` for an
    adapter.
    """

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
    """Run experiments with fakes: ``stubbed(file, "seeds=[0,1]")`` returns the failures and what
    was done.
    """
    folder = tmp_path / "stubs"
    folder.mkdir()
    monkeypatch.setenv("STUBS", str(folder))
    experiment_stubs.install(monkeypatch.setattr)

    def run(file, *overrides, **options):
        journal = folder / "journal"
        journal.unlink(missing_ok=True)
        failures = run_experiment(load_experiment(file, overrides), **options)
        return failures, journal.read_text().splitlines() if journal.exists() else []

    run.folder = folder
    return run


@pytest.fixture
def start_command(tmp_path):
    """Start ``tfidf-tune experiment`` in a process forked from this one; returns it and the file of
    its output.
    """
    started = []

    def start(*arguments):
        printed = tmp_path / f"printed{len(started)}"
        process = CONTEXT.Process(target=run_command, args=(arguments, printed))
        process.start()
        started.append(process)
        return process, printed

    yield start
    for process in started:
        process.kill()
        process.join()


def run_command(arguments, printed):
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    with printed.open("w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    sys.stdout = os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w")
    main([*arguments])
