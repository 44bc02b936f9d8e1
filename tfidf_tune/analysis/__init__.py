"""The memorization probe and its metrics, and statistics of the table of results."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tfidf_tune.analysis._membership import (
    Membership,
    exposure,
    extraction_probability,
    membership,
    membership_scores,
    num_samples_needed,
    passage_scores,
    roc_auc,
    true_positive_rate,
    zlib_score,
)
from tfidf_tune.analysis._metrics import (
    edit_distance,
    longest_common_subsequence,
    longest_memorized_substring,
    longest_prefix_match,
    rouge_l,
    rouge_scores,
)
from tfidf_tune.analysis.evaluations import compare_at_equal_perplexity, compare_objectives, evaluation_table, run_table
from tfidf_tune.analysis.frontier import Frontiers, trace_frontiers
from tfidf_tune.analysis.intervals import Interval, bootstrap_interval, holm, over_seeds, over_seeds_and_passages

if TYPE_CHECKING:
    from tfidf_tune.analysis._likelihoods import TokenLikelihoods, token_likelihoods, token_perplexity
    from tfidf_tune.analysis._loading import (
        Decoding,
        adapter_base,
        batches_of_prompts,
        continue_prompts,
        greedy_continuations,
        load_model,
        require_known_ids,
    )
    from tfidf_tune.analysis._probe import (
        MemorizationProbe,
        MonitoredModel,
        ProbeTokenizer,
        best_continuation,
        check_passages,
        compare_continuation,
        evaluating,
        probe,
    )
    from tfidf_tune.analysis._relearning import relearning_steps
else:

    def __getattr__(name: str) -> Any:
        # Reports do without torch, which takes seconds to import: what needs it is imported on first use.
        if name in __all__:
            for module in ("_loading", "_likelihoods", "_probe", "_relearning"):
                found = import_module(f"tfidf_tune.analysis.{module}")
                if hasattr(found, name):
                    return getattr(found, name)
        raise AttributeError(f"module 'tfidf_tune.analysis' has no attribute {name!r}")


__all__ = [
    "Decoding",
    "Frontiers",
    "Interval",
    "Membership",
    "MemorizationProbe",
    "MonitoredModel",
    "ProbeTokenizer",
    "TokenLikelihoods",
    "adapter_base",
    "batches_of_prompts",
    "best_continuation",
    "bootstrap_interval",
    "check_passages",
    "compare_at_equal_perplexity",
    "compare_continuation",
    "compare_objectives",
    "continue_prompts",
    "edit_distance",
    "evaluating",
    "evaluation_table",
    "exposure",
    "extraction_probability",
    "greedy_continuations",
    "holm",
    "load_model",
    "longest_common_subsequence",
    "longest_memorized_substring",
    "longest_prefix_match",
    "membership",
    "membership_scores",
    "num_samples_needed",
    "over_seeds",
    "over_seeds_and_passages",
    "passage_scores",
    "probe",
    "relearning_steps",
    "require_known_ids",
    "roc_auc",
    "rouge_l",
    "rouge_scores",
    "run_table",
    "token_likelihoods",
    "token_perplexity",
    "trace_frontiers",
    "true_positive_rate",
    "zlib_score",
]
