"""Experiments: models, objectives and seeds of one file, trained, evaluated and compared."""

from tfidf_tune.experiment._config import EvalSettings, Experiment, Model, load_experiment, shipped_experiments
from tfidf_tune.experiment._run import print_cells, run_experiment
from tfidf_tune.experiment._runner import Failure
from tfidf_tune.experiment._start import random_model
from tfidf_tune.experiment._trained_start import trained_model

__all__ = [
    "EvalSettings",
    "Experiment",
    "Failure",
    "Model",
    "load_experiment",
    "print_cells",
    "random_model",
    "run_experiment",
    "shipped_experiments",
    "trained_model",
]
