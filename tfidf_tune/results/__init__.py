"""What evaluated models recited: importing, the table of scores, intervals, and what all reports
say of them.
"""

from tfidf_tune.results.importer import import_results
from tfidf_tune.results.intervals import Interval, Membership, bootstrap_interval, holm, membership
from tfidf_tune.results.results_file import load_results, read_results, write_results
from tfidf_tune.results.table import Checkpoint, Results

__all__ = [
    "Checkpoint",
    "Interval",
    "Membership",
    "Results",
    "bootstrap_interval",
    "holm",
    "import_results",
    "load_results",
    "membership",
    "read_results",
    "write_results",
]
