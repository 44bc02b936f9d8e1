import subprocess
import sys


def modules_after(code):
    listing = f"{code}\nimport sys; print(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", listing], check=True, capture_output=True, text=True).stdout.split()
    )


def test_heavy_libraries_are_imported_only_where_they_are_used():
    modules = modules_after("import tfidf_tune.analysis")
    assert "tfidf_tune.analysis" in modules
    assert not modules & {"matplotlib", "peft", "rouge_score", "tfidf_tune.training", "transformers"}


def test_figures_do_without_pyplot():
    sample = "ProbeSample('a', 'target', 0, 32, [1], [1], 'x', 'x', 1, 1, 100.0, True)"
    modules = modules_after(
        "from tfidf_tune.analysis import ProbeSample\nfrom tfidf_tune.report import lms_distribution\n"
        f"lms_distribution({{'CE': [{sample}]}})"
    )
    assert "matplotlib.figure" in modules
    assert "matplotlib.pyplot" not in modules
