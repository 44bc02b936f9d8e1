"""Experiments: train, evaluate and compare the models, objectives and seeds of one file."""

import os

# submitit configures logging when it is imported, which closes the streams of handlers that others
# have installed.
os.environ.setdefault("SUBMITIT_LOG_LEVEL", "NOCONFIG")

from research.experiment._run import print_cells, run_experiment
from research.experiment._schema import CONFIGS, Experiment, load_experiment
from research.experiment._starts import random_model, trained_model

__all__ = [
    "CONFIGS",
    "Experiment",
    "load_experiment",
    "print_cells",
    "random_model",
    "run_experiment",
    "trained_model",
]
