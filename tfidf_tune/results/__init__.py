"""The table of results: read from lm-evaluation-harness's files, written to and read from one file."""

from tfidf_tune.results._documents import ProbeSample
from tfidf_tune.results._file import load_results, paper_results, read_results, require_runs, write_results
from tfidf_tune.results._importer import import_results, run_of
from tfidf_tune.results._table import Checkpoint, Results, describe_machine

__all__ = [
    "Checkpoint",
    "ProbeSample",
    "Results",
    "describe_machine",
    "import_results",
    "load_results",
    "paper_results",
    "read_results",
    "require_runs",
    "run_of",
    "write_results",
]
