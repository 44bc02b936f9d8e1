import subprocess
import sys

HEAVY = {"lm_eval", "omegaconf", "peft", "rouge_score", "scipy", "torchtune", "transformers"}
CODE = """
import sys, tfidf_tune.analysis, tfidf_tune.report, tfidf_tune.results
print(*sys.modules)
from tfidf_tune.report._figures import lms_distribution
lms_distribution({'CE': {'target': [1, 2], 'control': []}})
print(*sys.modules)
"""


def test_heavy_libraries_are_imported_only_where_they_are_used_and_pyplot_nowhere():
    printed = subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True).stdout
    before, after = (set(line.split()) for line in printed.splitlines())
    assert not before & (HEAVY | {"matplotlib", "pandas", "tfidf_tune.training"})
    assert "matplotlib.figure" in after
    assert not after & (HEAVY | {"matplotlib.pyplot"})
