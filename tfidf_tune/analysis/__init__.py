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
from tfidf_tune.analysis._summary import MemorizationSummary, summarize
from tfidf_tune.results import ProbeSample, describe_machine, read_samples, write_samples

__all__ = [
    "MemorizationSummary",
    "ProbeSample",
    "ProbeTokenizer",
    "check_passages",
    "compare_continuation",
    "describe_machine",
    "greedy_continuations",
    "load_model",
    "longest_memorized_substring",
    "longest_prefix_match",
    "probe",
    "read_samples",
    "require_known_ids",
    "rouge_l",
    "rouge_scores",
    "summarize",
    "token_perplexity",
    "write_samples",
]
