"""Evaluated runs side by side: comparisons and their report."""

from tfidf_tune.compare._evaluations import (
    compare_at_equal_perplexity,
    compare_objectives,
    evaluation_table,
    run_table,
)
from tfidf_tune.compare._report import comparison_report

__all__ = [
    "compare_at_equal_perplexity",
    "compare_objectives",
    "comparison_report",
    "evaluation_table",
    "run_table",
]
