"""What the package needs to be imported, and what the checks of configs need of its components."""

import inspect
import subprocess
import sys

import pytest

from tfidf_tune import data

BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torchtune", "torchao", "torchdata", "omegaconf"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
import tfidf_tune.data, tfidf_tune.tasks
from tfidf_tune.tasks import _model, cnn_dailymail, memorization, perplexity, squad
"""


def test_data_and_tasks_are_imported_without_the_training_stack():
    """As installed by the extra ``eval``."""
    subprocess.run([sys.executable, "-c", BLOCKED], check=True)


@pytest.mark.parametrize("name", [name for name in data.__all__ if name.endswith("_dataset")])
def test_annotations_can_be_evaluated(name):
    """Otherwise the values of a config are not checked against them before a run."""
    assert inspect.signature(getattr(data, name), eval_str=True).parameters["cache_dir"].annotation == str | None
