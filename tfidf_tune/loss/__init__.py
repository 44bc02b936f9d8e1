"""Token-weighted cross-entropy losses, the objectives that a config names."""

from tfidf_tune.loss._fused_cross_entropy import fused_cross_entropy
from tfidf_tune.loss._head import HeadInput
from tfidf_tune.loss._token_cross_entropy import linear_token_cross_entropy, token_cross_entropy, weighted_mean
from tfidf_tune.loss._weighted_cross_entropy import (
    CrossEntropyLoss,
    Head,
    LossTerms,
    TFIDFCrossEntropyLoss,
    WeightedCrossEntropyLoss,
)

__all__ = [
    "CrossEntropyLoss",
    "Head",
    "HeadInput",
    "LossTerms",
    "TFIDFCrossEntropyLoss",
    "WeightedCrossEntropyLoss",
    "fused_cross_entropy",
    "linear_token_cross_entropy",
    "token_cross_entropy",
    "weighted_mean",
]
