"""Ask a model for passages: continuations and their scores, likelihoods, the run that a model comes
from.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tfidf_tune.probe.attacks import Attack, planned_attacks, within_budget
from tfidf_tune.probe.membership_scores import (
    exposure,
    extraction_probability,
    membership_scores,
    passage_scores,
    reference_scores,
    true_positive_rate,
)
from tfidf_tune.probe.metrics import (
    edit_distance,
    longest_common_subsequence,
    longest_memorized_substring,
    longest_prefix_match,
    rouge_l,
    rouge_scores,
)

if TYPE_CHECKING:
    from tfidf_tune.probe.decoding import greedy_continuations
    from tfidf_tune.probe.likelihoods import TokenLikelihoods, token_likelihoods
    from tfidf_tune.probe.loading import adapter_base, load_model
    from tfidf_tune.probe.memorization import MemorizationProbe, check_passages, evaluating
    from tfidf_tune.probe.run_identity import run_of
    from tfidf_tune.probe.sample_fields import ProbeSample
else:

    def __getattr__(name: str) -> Any:
        # Comparisons do without torch, which takes seconds to import: what needs it is imported on
        # first use.
        if name in __all__:
            for module in (
                "sample_fields",
                "run_identity",
                "loading",
                "decoding",
                "likelihoods",
                "memorization",
            ):
                loaded = import_module(f"tfidf_tune.probe.{module}")
                if hasattr(loaded, name):
                    return getattr(loaded, name)
        raise AttributeError(f"module 'tfidf_tune.probe' has no attribute {name!r}")


__all__ = [
    "Attack",
    "MemorizationProbe",
    "ProbeSample",
    "TokenLikelihoods",
    "adapter_base",
    "check_passages",
    "edit_distance",
    "evaluating",
    "exposure",
    "extraction_probability",
    "greedy_continuations",
    "load_model",
    "longest_common_subsequence",
    "longest_memorized_substring",
    "longest_prefix_match",
    "membership_scores",
    "passage_scores",
    "planned_attacks",
    "reference_scores",
    "rouge_l",
    "rouge_scores",
    "run_of",
    "token_likelihoods",
    "true_positive_rate",
    "within_budget",
]
