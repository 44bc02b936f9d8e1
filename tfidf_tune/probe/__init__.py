"""Ask a model for passages: continuations and their scores, likelihoods, the run that a model comes from."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tfidf_tune.probe._attacks import Attack, planned_attacks, within_budget
from tfidf_tune.probe._membership import (
    exposure,
    extraction_probability,
    membership_scores,
    num_samples_needed,
    passage_scores,
    roc_auc,
    true_positive_rate,
    zlib_score,
)
from tfidf_tune.probe._metrics import (
    edit_distance,
    longest_common_subsequence,
    longest_memorized_substring,
    longest_prefix_match,
    rouge_l,
    rouge_scores,
)

if TYPE_CHECKING:
    from tfidf_tune.probe._decoding import (
        before_eos,
        continue_prompts,
        decode_greedily,
        generated_continuations,
        greedy_continuations,
        most_positions,
    )
    from tfidf_tune.probe._documents import ProbeSample
    from tfidf_tune.probe._likelihoods import (
        TokenLikelihoods,
        token_likelihoods,
        token_perplexity,
    )
    from tfidf_tune.probe._loading import (
        adapter_base,
        load_model,
        on_base_model,
        require_known_ids,
        with_adapter,
    )
    from tfidf_tune.probe._memorization import (
        MemorizationProbe,
        MonitoredModel,
        ProbeTokenizer,
        best_continuation,
        check_passages,
        compare_continuation,
        evaluating,
        probe,
    )
    from tfidf_tune.probe._runs import run_of
    from tfidf_tune.probe._server import Server
else:

    def __getattr__(name: str) -> Any:
        # Comparisons do without torch, which takes seconds to import: what needs it is imported on first use.
        if name in __all__:
            for module in ("_documents", "_runs", "_server", "_loading", "_decoding", "_likelihoods", "_memorization"):
                found = import_module(f"tfidf_tune.probe.{module}")
                if hasattr(found, name):
                    return getattr(found, name)
        raise AttributeError(f"module 'tfidf_tune.probe' has no attribute {name!r}")


__all__ = [
    "Attack",
    "MemorizationProbe",
    "MonitoredModel",
    "ProbeSample",
    "ProbeTokenizer",
    "Server",
    "TokenLikelihoods",
    "adapter_base",
    "before_eos",
    "best_continuation",
    "check_passages",
    "compare_continuation",
    "continue_prompts",
    "decode_greedily",
    "edit_distance",
    "evaluating",
    "exposure",
    "extraction_probability",
    "generated_continuations",
    "greedy_continuations",
    "load_model",
    "longest_common_subsequence",
    "longest_memorized_substring",
    "longest_prefix_match",
    "membership_scores",
    "most_positions",
    "num_samples_needed",
    "on_base_model",
    "passage_scores",
    "planned_attacks",
    "probe",
    "require_known_ids",
    "roc_auc",
    "rouge_l",
    "rouge_scores",
    "run_of",
    "token_likelihoods",
    "token_perplexity",
    "true_positive_rate",
    "with_adapter",
    "within_budget",
    "zlib_score",
]
