"""Token-weighted cross-entropy losses, the objectives that a config names. Needs torch only."""

from tfidf_tune.loss._cross_entropy import (
    HeadInput,
    fused_cross_entropy,
    token_cross_entropy,
    token_predictions,
    weighted_mean,
)
from tfidf_tune.loss._weighted import (
    CrossEntropyLoss,
    LossTerms,
    TFIDFCrossEntropyLoss,
    WeightedCrossEntropyLoss,
    weight_statistics,
    weight_sums,
)

__all__ = [
    "CrossEntropyLoss",
    "HeadInput",
    "LossTerms",
    "TFIDFCrossEntropyLoss",
    "WeightedCrossEntropyLoss",
    "fused_cross_entropy",
    "token_cross_entropy",
    "token_predictions",
    "weight_statistics",
    "weight_sums",
    "weighted_mean",
]
