"""Evaluated runs side by side: the table of results, intervals, comparisons and their report."""

from tfidf_tune.compare._evaluations import compare_at_equal_perplexity, compare_objectives, evaluation_table, run_table
from tfidf_tune.compare._importer import import_results
from tfidf_tune.compare._intervals import Interval, Membership, bootstrap_interval, holm, membership
from tfidf_tune.compare._report import comparison_report
from tfidf_tune.compare._results import Checkpoint, Results
from tfidf_tune.compare._results_file import load_results, read_results, write_results

__all__ = [
    "Checkpoint",
    "Interval",
    "Membership",
    "Results",
    "bootstrap_interval",
    "compare_at_equal_perplexity",
    "compare_objectives",
    "comparison_report",
    "evaluation_table",
    "holm",
    "import_results",
    "load_results",
    "membership",
    "read_results",
    "run_table",
    "write_results",
]
