"""Experiments: models, objectives and seeds of one file, trained, evaluated and compared."""

from tfidf_tune.experiment._config import EvalSettings, Experiment, Model, load_experiment, shipped_experiments
from tfidf_tune.experiment._run import print_cells, run_experiment
from tfidf_tune.experiment._runner import Failure
from tfidf_tune.experiment._start import random_llama

__all__ = [
    "EvalSettings",
    "Experiment",
    "Failure",
    "Model",
    "load_experiment",
    "print_cells",
    "random_llama",
    "run_experiment",
    "shipped_experiments",
]
