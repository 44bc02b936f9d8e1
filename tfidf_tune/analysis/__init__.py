"""The memorization probe and its metrics, and statistics of the table of results."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tfidf_tune.analysis._metrics import longest_memorized_substring, longest_prefix_match, rouge_l, rouge_scores
from tfidf_tune.analysis.averages import run_table
from tfidf_tune.analysis.comparison import compare_at_equal_perplexity, compare_objectives
from tfidf_tune.analysis.evaluations import evaluation_table
from tfidf_tune.analysis.frontier import Frontiers, trace_frontiers
from tfidf_tune.analysis.intervals import Interval, bootstrap_interval, over_seeds

if TYPE_CHECKING:
    from tfidf_tune.analysis._loading import adapter_base, load_model, require_known_ids
    from tfidf_tune.analysis._monitor import MemorizationProbe, MonitoredModel, evaluating
    from tfidf_tune.analysis._perplexity import token_perplexity
    from tfidf_tune.analysis._probe import (
        Decoding,
        ProbeTokenizer,
        batches_of_prompts,
        check_passages,
        compare_continuation,
        greedy_continuations,
        probe,
    )
else:

    def __getattr__(name: str) -> Any:
        # Import what needs torch on first use: torch takes seconds, and reports do without it.
        if name not in __all__:
            raise AttributeError(f"module 'tfidf_tune.analysis' has no attribute {name!r}")
        modules = {
            "adapter_base": "_loading",
            "load_model": "_loading",
            "require_known_ids": "_loading",
            "token_perplexity": "_perplexity",
            "MemorizationProbe": "_monitor",
            "MonitoredModel": "_monitor",
            "evaluating": "_monitor",
        }
        return getattr(import_module(f"tfidf_tune.analysis.{modules.get(name, '_probe')}"), name)

    def __dir__() -> list[str]:
        return __all__


__all__ = [
    "Decoding",
    "Frontiers",
    "Interval",
    "MemorizationProbe",
    "MonitoredModel",
    "ProbeTokenizer",
    "adapter_base",
    "batches_of_prompts",
    "bootstrap_interval",
    "check_passages",
    "compare_at_equal_perplexity",
    "compare_continuation",
    "compare_objectives",
    "evaluating",
    "evaluation_table",
    "greedy_continuations",
    "load_model",
    "longest_memorized_substring",
    "longest_prefix_match",
    "over_seeds",
    "probe",
    "require_known_ids",
    "rouge_l",
    "rouge_scores",
    "run_table",
    "token_perplexity",
    "trace_frontiers",
]
