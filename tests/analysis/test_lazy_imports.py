import subprocess
import sys

import pytest

HEAVY = {"lm_eval", "matplotlib.pyplot", "omegaconf", "peft", "rouge_score", "scipy", "torchtune", "transformers"}


def modules_after(code):
    listing = f"{code}\nimport sys; print(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", listing], check=True, capture_output=True, text=True).stdout.split()
    )


@pytest.mark.parametrize("package", ["analysis", "report", "results"])
def test_heavy_libraries_are_imported_only_where_they_are_used(package):
    modules = modules_after(f"import tfidf_tune.{package}")
    assert f"tfidf_tune.{package}" in modules
    assert not modules & (HEAVY | {"matplotlib", "pandas", "tfidf_tune.training"})


def test_figures_do_without_pyplot():
    modules = modules_after(
        "from tfidf_tune.report._figures import lms_distribution\n"
        "lms_distribution({'CE': {'target': [1, 2], 'control': []}})"
    )
    assert "matplotlib.figure" in modules
    assert "matplotlib.pyplot" not in modules
