"""The memorization probe and its metrics, and statistics of the table of results."""

from tfidf_tune.analysis._metrics import (
    longest_memorized_substring,
    longest_prefix_match,
    rouge_l,
    rouge_scores,
)
from tfidf_tune.analysis._models import load_model, require_known_ids
from tfidf_tune.analysis._perplexity import token_perplexity
from tfidf_tune.analysis._probe import ProbeTokenizer, check_passages, compare_continuation, greedy_continuations, probe
from tfidf_tune.analysis.averages import MemorizationSummary, run_table, summarize
from tfidf_tune.analysis.comparison import compare_at_equal_perplexity, compare_objectives
from tfidf_tune.analysis.evaluations import evaluation_table
from tfidf_tune.analysis.frontier import Frontiers, trace_frontiers
from tfidf_tune.analysis.intervals import Interval, bootstrap_interval, over_seeds
from tfidf_tune.results import ProbeSample, describe_machine, read_samples, write_samples

__all__ = [
    "Frontiers",
    "Interval",
    "MemorizationSummary",
    "ProbeSample",
    "ProbeTokenizer",
    "bootstrap_interval",
    "check_passages",
    "compare_at_equal_perplexity",
    "compare_continuation",
    "compare_objectives",
    "describe_machine",
    "evaluation_table",
    "greedy_continuations",
    "load_model",
    "longest_memorized_substring",
    "longest_prefix_match",
    "over_seeds",
    "probe",
    "read_samples",
    "require_known_ids",
    "rouge_l",
    "rouge_scores",
    "run_table",
    "summarize",
    "token_perplexity",
    "trace_frontiers",
    "write_samples",
]
