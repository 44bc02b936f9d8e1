"""How much a fine-tuned model recites, and at which price: probe, metrics, perplexity, tables, figures."""

from tfidf_tune.analysis._bootstrap import Interval, bootstrap_interval
from tfidf_tune.analysis._figures import plot_lms_progress
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
from tfidf_tune.analysis._tables import (
    CheckpointResult,
    memorization_table,
    qualitative_example,
    relative_reduction,
)

__all__ = [
    "AnswerScore",
    "BlockScore",
    "CheckpointResult",
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
    "memorization_table",
    "plot_lms_progress",
    "probe",
    "qualitative_example",
    "read_runs",
    "read_samples",
    "relative_reduction",
    "rouge_l",
    "rouge_scores",
    "summarize",
    "token_perplexity",
    "write_samples",
]
