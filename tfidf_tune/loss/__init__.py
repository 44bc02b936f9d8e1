"""Token-weighted cross-entropy losses, the objectives that a config names."""

from tfidf_tune.loss._token_cross_entropy import token_cross_entropy, weighted_mean
from tfidf_tune.loss._weighted_cross_entropy import (
    CrossEntropyLoss,
    LossTerms,
    TFIDFCrossEntropyLoss,
    WeightedCrossEntropyLoss,
)

__all__ = [
    "CrossEntropyLoss",
    "LossTerms",
    "TFIDFCrossEntropyLoss",
    "WeightedCrossEntropyLoss",
    "token_cross_entropy",
    "weighted_mean",
]
