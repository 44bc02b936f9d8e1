"""How much a fine-tuned model recites, and at which price: probe, metrics, evaluations read back and compared."""

from tfidf_tune.analysis._bootstrap import Interval, bootstrap_interval
from tfidf_tune.analysis._harness import read_runs
from tfidf_tune.analysis._metrics import (
    longest_memorized_substring,
    longest_memorized_substrings,
    longest_prefix_match,
    longest_prefix_matches,
    rouge_l,
    rouge_scores,
)
from tfidf_tune.analysis._models import load_model
from tfidf_tune.analysis._perplexity import token_perplexity
from tfidf_tune.analysis._probe import ProbeTokenizer, check_passages, compare_continuation, greedy_continuations, probe
from tfidf_tune.analysis._runs import AnswerScore, BlockScore, Evaluation, Run, SummaryScore
from tfidf_tune.analysis._samples import ProbeSample, read_samples, write_samples
from tfidf_tune.analysis._summary import MemorizationSummary, summarize

__all__ = [
    "AnswerScore",
    "BlockScore",
    "Evaluation",
    "Interval",
    "MemorizationSummary",
    "ProbeSample",
    "ProbeTokenizer",
    "Run",
    "SummaryScore",
    "bootstrap_interval",
    "check_passages",
    "compare_continuation",
    "greedy_continuations",
    "load_model",
    "longest_memorized_substring",
    "longest_memorized_substrings",
    "longest_prefix_match",
    "longest_prefix_matches",
    "probe",
    "read_runs",
    "read_samples",
    "rouge_l",
    "rouge_scores",
    "summarize",
    "token_perplexity",
    "write_samples",
]
