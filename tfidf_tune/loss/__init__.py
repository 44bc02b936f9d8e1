"""Token-weighted cross-entropy losses, the objectives that a config names."""

from tfidf_tune.loss._fused_cross_entropy import fused_cross_entropy
from tfidf_tune.loss._head import HeadInput
from tfidf_tune.loss._objectives import (
    CrossEntropyLoss,
    FocalCrossEntropyLoss,
    GoldfishCrossEntropyLoss,
    MiLeCrossEntropyLoss,
    PowerLawCrossEntropyLoss,
    ProductCrossEntropyLoss,
    RepetitionCrossEntropyLoss,
    TFIDFCrossEntropyLoss,
    TokenDropCrossEntropyLoss,
)
from tfidf_tune.loss._predictions import token_predictions
from tfidf_tune.loss._token_cross_entropy import linear_token_cross_entropy, token_cross_entropy, weighted_mean
from tfidf_tune.loss._weighted_cross_entropy import Head, LossTerms, WeightedCrossEntropyLoss

__all__ = [
    "CrossEntropyLoss",
    "FocalCrossEntropyLoss",
    "GoldfishCrossEntropyLoss",
    "Head",
    "HeadInput",
    "LossTerms",
    "MiLeCrossEntropyLoss",
    "PowerLawCrossEntropyLoss",
    "ProductCrossEntropyLoss",
    "RepetitionCrossEntropyLoss",
    "TFIDFCrossEntropyLoss",
    "TokenDropCrossEntropyLoss",
    "WeightedCrossEntropyLoss",
    "fused_cross_entropy",
    "linear_token_cross_entropy",
    "token_cross_entropy",
    "token_predictions",
    "weighted_mean",
]
